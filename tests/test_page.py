"""The page of page/: in a browser, the model of model.js is that of model.py."""
import contextlib
import json
import os
import re
import shutil
import subprocess
from itertools import count, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finished, make_book, refused

import page
import tasks
from common.checkpoint import load_checkpoint
from exits import EXITS, make_exit
from geometry import logits_of, paths
from model import GPT, GPTConfig

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}} \u05d0\u05d1 $&'
NEAR = dict(atol=2e-5, rtol=1e-5)


@pytest.fixture(scope='module')
def pages(tmp_path_factory, wave):
    """Pages for a text with nasty characters in it, for a task, and for the models that we ship."""
    folder = tmp_path_factory.mktemp('explore')
    with contextlib.chdir(folder):
        make_book()
        finished(*TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=3', '--block_size=48')
        (folder / 'prompt.txt').write_text(NASTY, encoding='utf-8')
        shutil.copytree(wave / 'out', folder / 'out-wave')
        for name in ('text', 'calc'):
            shutil.copytree(f'{ROOT}/pretrained/{name}', folder / name)
            finished(f'--out_dir={name}', '--n_loop=8', script='page/__main__.py')
        finished('--start=FILE:prompt.txt', '--n_loop=9', script='page/__main__.py')
        finished('--out_dir=out-wave', '--n_loop=12', '--seed=3', script='page/__main__.py')
    return SimpleNamespace(folder=folder, tiny=folder / 'out/explore.html',
                           task=folder / 'out-wave/explore.html', text=folder / 'text/explore.html',
                           calc=folder / 'calc/explore.html')


class Browser:
    """A Chromium without a window. It is driven through two pipes, by its DevTools protocol."""

    def __init__(self, profile):
        (theirs, self.to), (self.back, mine) = os.pipe(), os.pipe()
        command = (f'exec {CHROMIUM} --headless --no-sandbox --disable-gpu --disable-dev-shm-usage '
                   f'--user-data-dir={profile} --remote-debugging-pipe 3<&{theirs} 4>&{mine}')
        self.process = subprocess.Popen(['bash', '-c', command], pass_fds=(theirs, mine),
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(mine)
        self.numbers, self.read, self.events, self.session = count(1), b'', [], {}
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        attached = self.call('Target.attachToTarget', targetId=target, flatten=True)
        self.session = dict(sessionId=attached['sessionId'])
        for domain in ('Page', 'Runtime', 'Network'):
            self.call(f'{domain}.enable')

    def message(self):
        while b'\0' not in self.read:
            chunk = os.read(self.back, 1 << 16)
            assert chunk, 'Chromium has ended'
            self.read += chunk
        one, self.read = self.read.split(b'\0', 1)
        return json.loads(one)

    def call(self, method, **params):
        number = next(self.numbers)
        message = json.dumps(dict(id=number, method=method, params=params) | self.session)
        os.write(self.to, message.encode() + b'\0')
        while (answer := self.message()).get('id') != number:
            self.events.append(answer)
        assert 'error' not in answer, answer
        return answer['result']

    def open(self, page, width=500):
        """Show a page, anew."""
        self.events.clear()
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        self.call('Page.navigate', url=f'file://{page}')
        while not any(one['method'] == 'Page.loadEventFired' for one in self.events):
            self.events.append(self.message())
        self.value('drawn')

    def value(self, script):
        """What an expression on the page is, or what it promises."""
        result = self.call('Runtime.evaluate', expression=f'(async () => {script})()',
                           awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in result, result['exceptionDetails']
        assert not [one for one in self.events if one['method'] == 'Runtime.exceptionThrown']
        return result['result'].get('value')

    def press(self, key, code=0):
        for kind in ('keyDown', 'keyUp'):
            self.call('Input.dispatchKeyEvent', type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code)
        return self.value('drawn')


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip('there is no Chromium here: apt-get install chromium')
    browser = Browser(tmp_path_factory.mktemp('profile'))
    yield browser
    browser.call('Browser.close')
    browser.process.wait()


def type_text(text):
    """JavaScript that puts a text into the page, and waits until it is drawn."""
    return f"($('text').value = {json.dumps(text)}, take_text())"


def set_controls(**values):
    """JavaScript that sets controls by their ids, as a reader's hand does."""
    return ', '.join(f"($('{name}').value = {json.dumps(value)}, "
                     f"$('{name}').dispatchEvent(new Event('input', {{bubbles: true}})))"
                     for name, value in values.items()) + ', drawn'


def words_of(page, tokens):
    """The text that stands for some tokens of a task."""
    return ' '.join(record_of(page)['words'][token] for token in tokens)


def record_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


# the same numbers as in Python --------------------------------------------------------------------

@pytest.mark.parametrize('name', ['tiny', 'task', 'text', 'calc'])
@torch.no_grad()
def test_the_page_computes_what_the_model_computes(browser, pages, name):
    """States, logits, predictions and axes: learned and rotary positions, float16 and float32."""
    page, K = getattr(pages, name), 5
    model, rng = load_checkpoint(page.with_name('ckpt.pt'))[0], np.random.default_rng(0)
    V, T = model.config.vocab_size, model.config.block_size
    browser.open(page)
    for tokens in (rng.integers(V, size=n).tolist() for n in (1, 7, min(T, 20))):
        found = browser.value(f"""{{
            const work = reader()({tokens}, {K}, null);
            let one;
            while (!(one = work.next()).done);
            const full = one.value, numbers = x => [...x];
            return {{
              logits: full.map(one => numbers(one.logits)),
              states: full.map(one => one.groups.map(({{states}}) => states.map(numbers))),
              lens: R.names.map((_, g) => [1, {K}].map(k => lens({{full, g}}, k).map(numbers))),
              alone: R.names.map((_, g) => numbers(lens({{full, g}}, {K}, full.length - 1)[0])),
              path: full.map(one => pca_2d(one.groups.flatMap(({{states}}) => states.slice(1))))}};
        }}""")
        trace = []
        logits, _ = model(torch.tensor([tokens]), n_loop=K, trace=trace)
        states = torch.cat([one['states'] for one in trace], dim=1)             # (K+1, G, T, C)
        np.testing.assert_allclose(found['logits'], logits[0], **NEAR)
        np.testing.assert_allclose(found['states'], states.permute(2, 1, 0, 3), **NEAR)
        for g in range(len(trace)):
            for k, of_step in zip((1, K), found['lens'][g]):
                np.testing.assert_allclose(of_step, logits_of(model, g, states[k, g]), **NEAR)
            np.testing.assert_allclose(found['alone'][g], found['lens'][g][1][-1], **NEAR)
        path = paths(states.transpose(0, 1))[0].flatten(0, 1).transpose(0, 1)   # (T, G * K, 2)
        found_path = np.array(found['path'])
        sign = np.sign((found_path * path.numpy()).sum(1, keepdims=True))       # of an axis: free
        np.testing.assert_allclose(found_path * sign, path, atol=1e-2)


@pytest.mark.parametrize('name, lengths', [('tiny', (2, 9)), ('task', (7, 12))])
@torch.no_grad()
def test_tokens_exit_as_in_the_model(browser, pages, name, lengths):
    """Every rule, own and past, one hit and two: the steps kept, and what comes out."""
    page, K = getattr(pages, name), 9
    model, rng = load_checkpoint(page.with_name('ckpt.pt'))[0], np.random.default_rng(1)
    texts = [rng.integers(model.config.vocab_size, size=n).tolist() for n in lengths]
    rules = [dict(name=name, tau=tau, hits=hits, past=past, keep=EXITS[name].keep)
             for name, tau, hits, past in product(EXITS, (0.03, 0.3), (1, 2), (False, True))]
    browser.open(page)
    found = browser.value(f"""{json.dumps(texts)}.map(ids => {json.dumps(rules)}.map(rule => {{
        const work = reader()(ids, {K}, rule);
        let one;
        while (!(one = work.next()).done);
        return one.value.map(one => [one.groups.map(({{steps}}) => steps), [...one.logits]]);
    }}))""")
    seen = set()
    for tokens, of_text in zip(texts, found):
        for rule, of_rule in zip(rules, of_text):
            trace = []
            exit = make_exit(rule['name'], rule['tau'], rule['hits'], wake=rule['past'])
            logits, _ = model(torch.tensor([tokens]), n_loop=K, exit=exit, trace=trace)
            steps, at = zip(*of_rule)
            assert [list(one) for one in zip(*steps)] == [
                one['steps_used'][0].tolist() for one in trace], rule
            np.testing.assert_allclose(at, logits[0], **NEAR)
            seen |= {step for one in steps for step in one}
    assert len(seen) > 5


def test_it_reads_only_what_is_new(browser, pages):
    """After a change at the start, in the middle or at the end: what reading anew gives."""
    rules = [dict(name=name, tau=tau, hits=1, keep=True, past=past)
             for name, tau, past in product(('kl', 'norm_rel'), (.03, .1, .3), (False, True))]
    browser.open(pages.task)
    one, *others = browser.value(f"""{{
        const x = R.problem.ids, changed = t => x.map((id, i) => i === t ? 1 - id : id);
        return [[], [changed(0)], [changed(5), x.slice(0, 3), changed(11)]].map(before =>
          {json.dumps(rules)}.map(rule => {{
            const read = reader();
            let found;
            for (const ids of [...before, x])
              for (const work = read(ids, 9, rule); !(found = work.next()).done;);
            return found.value.map(one => [one.groups[0].steps, ...one.logits]);
          }}));
    }}""")
    assert others == [one, one]
    assert len({token[0] for of_rule in one for token in of_rule}) > 5


def test_it_writes_what_the_model_writes(browser, pages):
    """Greedily, with a rule, past the end of the window; each tile has the steps of its token."""
    model = load_checkpoint(pages.tiny.with_name('ckpt.pt'))[0]
    browser.open(pages.tiny)
    browser.value(f"""({set_controls(rule='accel', loops=8, tau=-0.5, temperature=0)},
                      {type_text('12 and 144')})""")
    text, steps, written = browser.value("""{
        for (let i = 0; i < 52; i++) await write_token();
        return [ids, [...$('tokens').children].map(tile => +tile.children[1].textContent),
                document.querySelectorAll('.written').length];
    }""")
    prompt = torch.tensor([[*b'12 and 144']])
    out, used = model.generate(prompt, 52, temperature=0, n_loop=8,
                               exit=make_exit('accel', 10 ** -0.5, 2))
    assert text == out[0].tolist() and written == 52
    # tokens 24 to 47 were read again when the window moved; the last one's prediction is not used
    used = [None] * 9 + used[0, :, -1].tolist()
    assert steps[9:24] == used[9:24] and steps[48:-1] == used[48:]
    assert len({*steps}) > 1


# what a reader does -------------------------------------------------------------------------------

@pytest.mark.parametrize('width', [1100, 390])
def test_any_text_can_be_typed(browser, pages, width):
    """Tokens are the bytes of the text, and none of it becomes markup. Nothing is fetched."""
    browser.open(pages.tiny, width)
    assert browser.value("[$('text').value, document.activeElement.id]") == [NASTY, 'text']
    symbols = {code: chr(0x2400 + code) for code in range(32)} | {10: '↵', 32: '·', 127: '␡'}
    for text in ('', '\U0001f600 caf\u00e9', 'x' * 200, 'a\n\n\tb', NASTY):
        browser.value("$('text').select()")
        if text:
            browser.call('Input.insertText', text=text)
        else:
            browser.press('Delete', 46)
        tokens, shown, marks, wide, inner = browser.value("""drawn.then(() => [ids,
            [...document.querySelectorAll('#tokens bdi')].map(b => b.textContent),
            document.querySelectorAll('script, b, img').length,
            document.documentElement.scrollWidth, innerWidth])""")
        expected = [*text.encode()] or [256]
        assert tokens == expected and marks == 3 and wide <= inner == width
        assert shown == [chr(token).translate(symbols) if token < 128 else
                         f'\\x{token:x}' if token < 256 else '<|endoftext|>'
                         for token in expected]
    assert [one['params']['request']['url'] for one in browser.events
            if one['method'] == 'Network.requestWillBeSent'] in (
                [f'file://{pages.tiny}'], [f'file://{pages.tiny}', 'data:,'])


def test_the_newest_text_wins(browser, pages):
    """What is typed while another text is read replaces it: the page does not freeze."""
    browser.open(pages.text)
    browser.value("""{
        globalThis.texts = [], globalThis.begun = null;
        const draw = heat;
        heat = v => (texts.push(decode(v.tokens)), draw(v));
        $('loops').value = 16;
        $('text').value = 'x'.repeat(47);
        begun = take_text();
    }""")
    browser.call('Input.insertText', text='!')
    assert browser.value('Promise.all([begun, drawn]).then(() => texts)') == ['x' * 47 + '!']


def test_keys_alone_choose_tokens_and_reach_every_control(browser, pages):
    """Tab visits each control and one tile; arrows, Home and End go from tile to tile."""
    browser.open(pages.tiny)
    browser.value(type_text('The quick brown'))
    visited = []
    for _ in range(13):
        visited.append(browser.value("document.activeElement.closest('[id]')?.id ?? ''"))
        browser.press('Tab', 9)
    assert visited == ['text', 'loops', 'rule', 'tau', 'hits', 'past', 'write', 'temperature',
                       'tokens', 'play', 'k', 'group', 'think']
    browser.value("document.querySelector('#tokens [tabindex=\"0\"]').focus()")
    chosen = "[chosen, [...$('tokens').children].indexOf(document.activeElement)]"
    for key, code, to in (('ArrowLeft', 37, 13), ('Home', 36, 0), ('ArrowLeft', 37, 0),
                          ('ArrowRight', 39, 1), ('End', 35, 14), ('ArrowRight', 39, 14)):
        browser.press(key, code)
        assert browser.value(chosen) == [to, to]


def test_a_chosen_tile_shows_its_predictions_and_play_hides_later_steps(browser, pages):
    browser.open(pages.tiny)
    browser.value(type_text('The quick brown'))
    table, log_p, opacity, guesses = browser.value("""{
        await choose(5);
        const log_p = [...Array(9).keys()].map(k => [...lens(view, k + 1)[5]]);
        const table = [...$('think').children].map(row => [...row.querySelectorAll('td')].map(
            cell => +cell.dataset.token));
        show_up_to(4);
        return [table, log_p, [...document.querySelectorAll('[data-k]')].map(mark =>
            [+mark.dataset.k, +mark.style.opacity]), [...$('tokens').children].map(tile =>
            R.words.indexOf(tile.lastChild.textContent))];
    }""")
    order = np.argsort(-np.array(log_p), axis=1, kind='stable')
    assert table == order[:, :5].tolist() and guesses[5] == order[3, 0]
    assert {one == 1 for k, one in opacity if k <= 4} == {True}
    assert {one == 1 for k, one in opacity if k > 4} == {False}
    steps = browser.value("""{
        show_up_to(8);
        play(true);
        while (player) await new Promise(done => setTimeout(done, 50));
        return [shown > 1e9, $('k').value, $('play').textContent];
    }""")
    assert steps == [True, '9', '▶ step by step']


def test_every_setting_has_a_page(browser, pages):
    """From one loop to thirty, every rule; tiles have the steps of the chosen group."""
    browser.open(pages.tiny)
    browser.value(type_text('The quick'))
    assert browser.value("[...$('rule').options].map(one => one.value)") == ['', *EXITS]
    for (loops, tau, past), rule in product(((1, -6, 0), (30, 2, 1)), ('', *EXITS)):
        steps, cells, hits = browser.value(f"""{{
            await ({set_controls(loops=loops, rule=rule, tau=tau, past=past, group=1)});
            return [[...$('tokens').children].map(tile => +tile.children[1].textContent),
                    $('heat').querySelectorAll('rect').length, +$('hits').value];
        }}""")
        assert cells == len(steps) * (loops + 2) and hits == (EXITS[rule].hits if rule else 1)
        assert rule or {*steps} == {loops}
        assert loops < 30 or not rule or {*steps} <= {1, 2}


def test_a_problem_can_be_edited(browser, pages):
    """calc's answers and depths follow; those of another task hold up to the first change."""
    known = "[view.right, view.depth, document.querySelectorAll('#heat circle').length]"
    problems = tasks.Problems('calc:p=5')
    browser.open(pages.calc)
    for seed, T in (0, 24), (7, 24), (8, 11):       # the page's own problem, and others
        x, y, depth = (one[0].tolist() for one in problems.make(np.random.default_rng(seed), 1, T))
        if seed:
            browser.value(type_text(words_of(pages.calc, x)))
        assert browser.value(f'[ids, ...{known}]') == [x, y, depth, T]
    right, *_ = browser.value(f"({type_text('+1 =2 *x +4')}).then(() => {known})")
    assert right == [-1, 2, 1]                      # unknown before the first value; *x is no word

    record = record_of(pages.calc)
    record['problem']['p'] = None
    other = pages.folder / 'other.html'
    other.write_text(page.fill(record, ''), encoding='utf-8')
    browser.open(other)
    text = ' '.join([words_of(other, record['problem']['ids'][:6]), '=0 =1'])
    *_, before = browser.value(known)
    right, _, after = browser.value(f'({type_text(text)}).then(() => {known})')
    assert before == 24 and after in (6, 7) and right[:6] == record['problem']['right'][:6]


# the file -----------------------------------------------------------------------------------------

def test_the_page_needs_no_network_and_no_text_is_code(pages):
    text = pages.tiny.read_text(encoding='utf-8')
    assert text.count('<script') == 3 and text.count('</script>') == 3
    assert record_of(pages.tiny)['start'] == NASTY
    assert page.fill(NASTY, NASTY).count('<script') == 3
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\bhttps?://[^\'"]*|\b(?:src|href)="[^"]*', text))
    assert addresses == {'http://www.w3.org/2000/svg', 'href="data:,'}


def test_weights_are_float16_where_that_loses_nothing(pages):
    assert [record_of(page)['model']['half'] for page in (pages.text, pages.calc)] == [True, False]
    assert pages.text.stat().st_size < 2.2e6


def test_times(browser, pages):
    """Printed, not asserted: pytest -s -k times."""
    browser.open(pages.text)
    text = 'The method returns a list of all the tensors in '
    times = browser.value(f"""{{
        const times = {{}};
        for (const [name, at] of [['start', 0], ['middle', 24], ['end', 47]])
          for (const letter of 'xy') {{
            {type_text(text)};
            await drawn;
            const began = performance.now();
            $('text').value = $('text').value.slice(0, at) + letter + $('text').value.slice(at + 1);
            await take_text();
            times[name] = Math.min(times[name] ?? 1e9, performance.now() - began);
          }}
        return times;
    }}""")
    for name, ms in times.items():
        print(f'an edit of 48 tokens at 8 loops, at the {name}: {ms:.0f} ms')
    assert min(times.values()) > 0 and len(times) == 3


@pytest.mark.parametrize('flag, words', [
    ('--path=.', 'is a directory'), ('--n_loop=0', 'n_loop must lie between 1 and 30'),
    ('--seed=1', '--seed does nothing'), ('--out_dir=calc --start=1', '--start does nothing')])
def test_bad_input(pages, monkeypatch, flag, words):
    monkeypatch.chdir(pages.folder)
    assert words in refused(*flag.split(), script='page/__main__.py')


def test_what_the_page_cannot_run(pages):
    class Mine(GPT):
        pass
    shape = dict(block_size=8, vocab_size=9, n_layer=2, n_embd=8, n_head=1, groups=[[0]])
    for cls, change, words in (
            (Mine, {}, 'without Mine'), (GPT, dict(injection='add'), 'injection = add'),
            (GPT, dict(bias=True, x0='e'), 'bias = True, x0 = e'), (GPT, dict(n_embd=208), '1,0')):
        with pytest.raises(ValueError, match=words):
            page.for_page(cls(GPTConfig(**shape | change)))
    model = GPT(GPTConfig(**shape))
    model.wte.weight.data[3, 3] = float('nan')
    with pytest.raises(ValueError, match='holds a NaN'):
        page.for_page(model)
