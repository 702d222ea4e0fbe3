"""The page of page/: in a browser, the model of model.js is that of model.py."""
import contextlib
import json
import os
import re
import select
import shutil
import subprocess
from itertools import count, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TAUS, TINY, finished, make_book, refused

import page
import tasks
from common.checkpoint import load_checkpoint
from decode import teacher_forced
from exits import EXITS, make_exit
from geometry import logits_of, paths
from loops import Plan
from model import GPT, GPTConfig

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}} \u05d0\u05d1 $&'
NEAR = dict(atol=2e-5, rtol=1e-5)


@pytest.fixture(scope='module')
def pages(tmp_path_factory, wave):
    """
    Pages for a text with nasty characters in it, for one that is read through a window, for a task
    that is read with full attention, and for the models that we ship. long: calc with 192 tokens.
    """
    folder = tmp_path_factory.mktemp('explore')
    short = *TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=3', '--block_size=48'
    with contextlib.chdir(folder):
        make_book()
        finished(*short)
        finished(*short, '--window=3', '--pos=rotary', '--out_dir=near')
        (folder / 'prompt.txt').write_text(NASTY, encoding='utf-8')
        shutil.copytree(wave / 'out', folder / 'out-wave')
        for name in ('text', 'calc'):
            shutil.copytree(f'{ROOT}/pretrained/{name}', folder / name)
        for arguments in ('--out_dir=text --n_loop=8', '--start=FILE:prompt.txt --n_loop=9',
                          '--out_dir=near', '--out_dir=out-wave --n_loop=12 --seed=3',
                          '--out_dir=calc --length=48 --dataset=calc:reset=0.01 --seed=1',
                          '--out_dir=calc --length=192 --dataset=calc:reset=0.01 --seed=1 '
                          '--path=long.html'):
            finished(*arguments.split(), script='page/__main__.py')
    return SimpleNamespace(folder=folder, tiny=folder / 'out/explore.html',
                           near=folder / 'near/explore.html',
                           task=folder / 'out-wave/explore.html',
                           text=folder / 'text/explore.html', calc=folder / 'calc/explore.html',
                           long=folder / 'long.html')


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
        self.unchanged = None           # the page that is shown, if nothing on it has changed
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        attached = self.call('Target.attachToTarget', targetId=target, flatten=True)
        self.session = dict(sessionId=attached['sessionId'])
        for domain in ('Page', 'Runtime', 'Network'):
            self.call(f'{domain}.enable')
        self.prefer(motion='reduce')            # or the maze would begin by itself

    def prefer(self, motion, scheme='light'):
        """What the reader has asked of all pages."""
        self.call('Emulation.setEmulatedMedia', features=[
            dict(name='prefers-reduced-motion', value=motion),
            dict(name='prefers-color-scheme', value=scheme)])

    def message(self):
        while b'\0' not in self.read:
            if not select.select([self.back], [], [], 300)[0]:
                self.process.kill()             # the page waits for something that does not come
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

    def set_width(self, width):
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=900,
                  deviceScaleFactor=1, mobile=False)

    def open(self, page, width=500, address='', before='', start=True):
        """Show a page, anew. before: a script that runs before the page's own."""
        self.set_width(width)
        added = self.call('Page.addScriptToEvaluateOnNewDocument', source=before)
        self.events.clear()
        self.unchanged = None
        # with a new number, or a new address behind # would not load anything
        self.call('Page.navigate', url=f'file://{page}?{next(self.numbers)}{address}')
        while not any(event['method'] == 'Page.loadEventFired' for event in self.events):
            self.events.append(self.message())
        self.call('Page.removeScriptToEvaluateOnNewDocument', identifier=added['identifier'])
        if start:
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
    browser.process.wait(60)


def type_text(text):
    """JavaScript that puts a text into the page, and waits until it is drawn."""
    return f"($('text').value = {json.dumps(text)}, take_text())"


def set_controls(**values):
    """JavaScript that sets controls by their ids, as a reader's hand does."""
    return ', '.join(f"(set('{name}', {json.dumps(value)}), "
                     f"$('{name}').dispatchEvent(new Event('input', {{bubbles: true}})))"
                     for name, value in values.items()) + ', drawn'


def how(exit=None, n_loop=9, one_by_one=False):
    """A rule as model.js knows it, None = fixed loops."""
    exit = exit or make_exit('norm_rel', 0.0)
    rule = dict(signal=exit.name, tau=exit.tau, hits=exit.hits, keep=exit.keep)
    return dict(rule=rule, loops=n_loop, wake=exit.wake, one_by_one=one_by_one)


# of a pass: reads tokens on the page; the loop steps kept and the block maps evaluated of a token
# in each group; the answers
HELPERS = """
    globalThis.pass = (ids, how, edit) => {
        const {tokens, from} = edit ?? edited([], ids, false);
        for (const work = read(tokens, from, how); !work.next().done;);
        return tokens;
    };
    globalThis.steps_of = token => M.groups.map(i => steps_kept(token.cells[i]));
    globalThis.evals_of = token => M.groups.map(i => token.cells[i].frames.length - 1);
    globalThis.answers_of = tokens => tokens.map(token => argmax(token.logits));
"""


def in_page(browser, page, function, *values):
    """What an arrow function gives on the page, opened anew, of these values."""
    browser.open(page)
    browser.value('{' + HELPERS + '}')
    return browser.value(f"({function})({', '.join(map(json.dumps, values))})")


def of_passes(browser, page, function, *values):
    """The same for a function that changes nothing on the page: the next may find it open."""
    if browser.unchanged != page:
        browser.open(page)
        browser.value('{' + HELPERS + '}')
        browser.unchanged = page
    return browser.value(f"({function})({', '.join(map(json.dumps, values))})")


def words_of(page, tokens):
    """The text that stands for some tokens of a task."""
    return ' '.join(record_of(page)['words'][token] for token in tokens)


def record_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


def model_of(path, length=None):
    """The model of a page: float16 if its weights are."""
    model, _ = load_checkpoint(path.with_name('ckpt.pt'), length=length)
    return page.halved(model) if record_of(path)['model']['half'] else model


# the same numbers as in Python --------------------------------------------------------------------

@pytest.mark.parametrize('name', ['task', 'near', 'text', 'calc', 'tiny'])
@torch.no_grad()
def test_the_page_computes_what_the_model_computes(browser, pages, name):
    """States, logits, predictions and axes: learned and rotary positions, float16 and float32."""
    path, K = getattr(pages, name), 5
    model, rng = model_of(path), np.random.default_rng(0)
    V, T = model.config.vocab_size, model.config.block_size
    texts = [rng.integers(V, size=n).tolist() for n in (1, 7, min(T, 20))]
    results = of_passes(browser, path, f"""(texts, how) => texts.map(ids => {{
        const tokens = pass(ids, how), numbers = x => [...x];
        const states = M.groups.map(i => tokens.map(({{cells}}) =>
            cells[i].frames.map(({{x}}) => x)));
        return {{
            logits: tokens.map(token => numbers(token.logits)),
            states: states.map(tokens => tokens.map(states => states.map(numbers))),
            lens: M.groups.map(i => [1, {K}].map(k => lens(tokens, i, k).map(numbers))),
            alone: M.groups.map(i => numbers(lens(tokens, i, {K}, ids.length - 1)[0])),
            path: ids.map((_, t) => pca_2d(states.flatMap(tokens => tokens[t].slice(1))))}};
    }})""", texts, how(n_loop=K))
    for tokens, found in zip(texts, results):
        trace = []
        logits, _ = model(torch.tensor([tokens]), n_loop=K, trace=trace)
        states = torch.cat([group['states'] for group in trace], dim=1)         # (K+1, G, T, C)
        np.testing.assert_allclose(found['logits'], logits[0], **NEAR)
        np.testing.assert_allclose(found['states'], states.permute(1, 2, 0, 3), **NEAR)
        for g in range(len(trace)):
            for k, of_step in zip((1, K), found['lens'][g]):
                np.testing.assert_allclose(of_step, logits_of(model, g, states[k, g]), **NEAR)
            np.testing.assert_allclose(found['alone'][g], found['lens'][g][1][-1], **NEAR)
        path = paths(states.transpose(0, 1))[0].flatten(0, 1).transpose(0, 1)   # (T, G * K, 2)
        on_page = np.array(found['path'])
        sign = np.sign((on_page * path.numpy()).sum(1, keepdims=True))          # of an axis: free
        np.testing.assert_allclose(on_page * sign, path, atol=1e-2)


def assert_same(model, ids, exit, n_loop, on_page, atol=2e-5):
    """A pass of the page, [[steps of each group, evals, logits] of each token], is the model's."""
    trace = []
    with torch.no_grad():
        logits, _ = model(torch.tensor([ids]), n_loop=n_loop, exit=exit, trace=trace)
    steps, evals, logits_on_page = zip(*on_page)
    for on_page, name in ((steps, 'steps_used'), (evals, 'evals')):
        in_python = [group[name][0].tolist() for group in trace]
        assert [list(of_group) for of_group in zip(*on_page)] == in_python, (exit, name)
    np.testing.assert_allclose(logits_on_page, logits[0], atol=atol, rtol=1e-5)


ALL_OF_A_PASS = """(texts, hows) => texts.map(ids => hows.map(how => pass(ids, how).map(
    token => [steps_of(token), evals_of(token), [...token.logits]])))"""


@pytest.mark.parametrize('name, lengths', [('tiny', (2, 9)), ('near', (12,)), ('task', (12,)),
                                           ('calc', (16,))])
def test_tokens_exit_and_wake_as_in_the_model(browser, pages, name, lengths):
    """Every rule, for good and undone, one hit and two, each step kept and thrown away."""
    path, K = getattr(pages, name), 9
    model, rng = model_of(path), np.random.default_rng(1)
    texts = [rng.integers(model.config.vocab_size, size=n).tolist() for n in lengths]
    rules = [make_exit(name, tau, hits, keep, wake) for name, tau, hits, keep, wake
             in product(TAUS, (0.03, 0.3), (1, 2), (False, True), (False, True))]
    results = of_passes(browser, path, ALL_OF_A_PASS, texts, [how(rule, K) for rule in rules])
    for tokens, of_text in zip(texts, results):
        for rule, of_rule in zip(rules, of_text):
            assert_same(model, tokens, rule, K, of_rule)
    assert len({evals for of_text in results for of_rule in of_text for token in of_rule
                for evals in token[1]}) > 5


@pytest.mark.parametrize('T', [192, 512])
def test_long_problems_are_solved_as_in_the_model(browser, pages, T):
    """Far longer than in training; and all that sleeps makes it quick."""
    model = model_of(pages.calc, length=T)
    x, y, depth = tasks.Problems('calc:reset=0.01').make(np.random.default_rng(2), 1, T)
    rules = [make_exit('accel', 1, wake=True), make_exit('norm_rel', 0.1, wake=True),
             make_exit('accel', 1)]
    n_loop = 2 * T + 100
    [results] = of_passes(browser, pages.calc, ALL_OF_A_PASS, x.tolist(),
                          [how(rule, n_loop) for rule in rules])
    right = []
    for rule, of_rule in zip(rules, results):
        assert_same(model, x[0].tolist(), rule, n_loop, of_rule, atol=1e-3)
        right.append(np.mean([np.argmax(token[2]) for token in of_rule] == y[0]))
    assert right[:2] == [1, 1] and right[2] < 0.9 and depth.max() > T / 3
    evals = np.mean([token[1] for token in results[0]])
    assert evals < 20, 'a token is computed a few times, however deep the problem'


@torch.no_grad()
def test_one_by_one_is_the_policy_latest(browser, pages):
    """A token begins when all before it are done, and reads their last states."""
    rules = [None, make_exit('norm_rel', 0.1), make_exit('accel', 1), make_exit('kl', 1e-3)]
    for path in (pages.calc, pages.near):
        model = model_of(path)
        x = np.random.default_rng(3).integers(model.config.vocab_size, size=(1, 12))
        hows = [how(rule, 6, one_by_one=True) for rule in rules]
        # nobody wakes whom it reads when all these are done, or at the end of their budget
        hows += [one | dict(wake=True) for one in hows]
        [results] = of_passes(browser, path, ALL_OF_A_PASS, x.tolist(), hows)
        for rule, of_rule in zip(rules * 2, results):
            plan = Plan([6] * len(model.groups), rule)
            logits, _, evals = teacher_forced(model, torch.tensor(x), plan, 'latest')
            np.testing.assert_allclose([token[2] for token in of_rule], logits[0], **NEAR)
            assert [token[1] for token in of_rule] == evals[0].tolist()


def test_it_reads_only_what_is_new(browser, pages):
    """After a change at the start, in the middle or at the end: what reading anew gives."""
    rules = [how(make_exit(name, tau, wake=wake)) for name, tau, wake
             in product(('kl', 'norm_rel'), (.03, .1, .3), (False, True))]
    for path in (pages.near, pages.task, pages.calc):
        plain, *others = of_passes(browser, path, """rules => {
            const x = R.task ? R.task.ids.slice(0, 24) : encode('12 and 144 are friends').tokens;
            const changed = t => x.map((id, i) => i === t ? 1 - id % 2 : id);
            return [[], [changed(0)], [changed(5), x.slice(0, 3), changed(11)]].map(before =>
                rules.map(how => {
                    let tokens = [];
                    for (const ids of [...before, x]) {
                        const edit = edited(tokens, ids, false);
                        tokens = pass(ids, how, edit);
                    }
                    return tokens.map(token => [steps_of(token)[0], ...token.logits]);
                }));
        }""", rules)
        assert others == [plain, plain]
        assert len({token[0] for of_rule in plain for token in of_rule}) > 3


@pytest.mark.parametrize('length, reset', [(24, 0.2), (192, 0.02)])
def test_edits_end_with_the_answers_of_a_fresh_solve(browser, pages, length, reset):
    """
    Thirty in a row, words changed, put in and taken out: few tokens wake, none is wrong. This holds
    for the trained model that we ship: one that has hardly learned may keep an old answer.
    """
    problems = tasks.Problems(f'calc:reset={reset}')
    rng = np.random.default_rng(length)
    x, _, _ = problems.make(rng, 1, length)
    texts, ids = [], x[0].tolist()
    for _ in range(30):
        place, word = int(rng.integers(1, len(ids))), int(rng.integers(problems.vocab_size))
        change = rng.choice(['change', 'put in', 'take out'])
        if change != 'put in':
            ids = ids[:place] + ids[place + 1:]
        if change != 'take out':
            ids = ids[:place] + [word] + ids[place:]
        texts.append(ids[:length])
        ids = texts[-1]
    results = of_passes(browser, pages.calc, """(first, texts, hows) => hows.map(how => {
        let tokens = pass(first, how);
        return texts.map((ids, n) => {
            tokens = pass(ids, how, edited(tokens, ids, true));
            const fresh = n % 10 ? tokens : pass(ids, how);
            const evals = tokens => mean(tokens.map(one => evals_of(one)[0]));
            return [answers_of(tokens), answers_of(fresh), evals(tokens), evals(fresh)];
        });
    })""", x[0].tolist(), texts, [how(make_exit(name, tau, wake=True), 2 * length + 100)
                                  for name, tau in (('accel', 1), ('norm_rel', .1))])
    for of_rule in results:
        for ids, (repaired, fresh, _, _) in zip(texts, of_rule):
            right = problems.answers([problems.vocabulary[token] for token in ids])
            assert repaired == fresh == [problems.vocabulary.index(word) for word in right]
        assert np.mean([one[2] for one in of_rule]) < np.mean([one[3] for one in of_rule[::10]]) / 2


def test_tokens_that_moved_when_the_budget_ended_go_on_after_an_edit(browser, pages):
    """Edits at the start give a long sum behind it, on which nothing depends, more loops each."""
    encode = tasks.Words('calc').encode
    texts = [encode(f'=1 {word} =2' + 37 * ' +1') for word in ['+1', '+2'] * 4]
    answers = of_passes(browser, pages.calc, """(texts, how) => {
        let tokens = pass(texts[0], how);
        return texts.map(ids => {
            tokens = pass(ids, how, edited(tokens, ids, true));
            return answers_of(tokens);
        });
    }""", texts, how(make_exit('norm_rel', 0.1, wake=True), 10))
    right = encode(' '.join(f'={value % 5}' for value in range(2, 40)))
    assert answers[0][2:] != right
    assert answers[-1][2:] == right


def test_an_edit_that_is_overtaken_leaves_nothing_behind(browser, pages):
    """Typed on before the page has read it: the next edit begins with the last text that was."""
    x, _, _ = tasks.Problems('calc:reset=0.01').make(np.random.default_rng(5), 1, 48)
    put_in = [[x[0, :at].tolist() + [word] + x[0, at:].tolist() for word in range(13)]
              for at in (20, 22)]
    early, late, plain = of_passes(browser, pages.calc, """(first, [others, texts], how) =>
      [6, 1e9, 0].map(steps => {
        let tokens = pass(first, how);
        texts.forEach((ids, n) => {
            const edit = edited(tokens, others[n], true);
            const work = read(edit.tokens, edit.from, how);
            for (let i = 0; i < steps && !work.next().done; i++);
            tokens = pass(ids, how, edited(tokens, ids, true));
        });
        return tokens.map(({logits}) => [...logits]);
      })""", x[0].tolist(), put_in, how(make_exit('norm_rel', 0.1, wake=True), 200))
    assert early == late == plain


def test_it_writes_what_the_model_writes(browser, pages):
    """Greedily, with a rule, past the end of the window; each tile has the steps of its token."""
    model = load_checkpoint(pages.tiny.with_name('ckpt.pt'))[0]
    browser.open(pages.tiny)
    browser.value(f"""(set_rule('norm_rel'),
                      {set_controls(loops=8, tau=0.1, wake='0', temperature=0)},
                      {type_text('12 and 144')})""")
    text, steps, written = browser.value("""{
        for (let i = 0; i < 52; i++) await write_token();
        return [ids, [...$('tokens').children].map(tile => +tile.children[2].textContent),
                document.querySelectorAll('.written').length];
    }""")
    prompt = torch.tensor([[*b'12 and 144']])
    out, used = model.generate(prompt, 52, temperature=0, n_loop=8, cache='exact',
                               exit=make_exit('norm_rel', 0.1))
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
        assert tokens == expected and marks == 5 and wide <= inner == width
        assert shown == [chr(token).translate(symbols) if token < 128 else
                         f'\\x{token:x}' if token < 256 else '<|endoftext|>'
                         for token in expected]
    assert [event['params']['request']['url'].partition('?')[0] for event in browser.events
            if event['method'] == 'Network.requestWillBeSent'] in (
                [f'file://{pages.tiny}'], [f'file://{pages.tiny}', 'data:,'])


def test_the_newest_text_wins(browser, pages):
    """What is typed while another text is read replaces it: the page does not freeze."""
    browser.open(pages.text)
    browser.value("""{
        globalThis.texts = [], globalThis.begun = null;
        const draw = draw_think;
        draw_think = view => (texts.push(decode(view.tokens.map(({id}) => id))), draw(view));
        set('loops', 16);
        $('text').value = 'x'.repeat(47);
        begun = take_text();
    }""")
    browser.call('Input.insertText', text='!')
    assert browser.value('Promise.all([begun, drawn]).then(() => texts)') == ['x' * 47 + '!']


def test_keys_alone_choose_tokens_and_reach_every_control(browser, pages):
    """Tab visits each control and one tile; arrows, Home and End go from tile to tile."""
    controls = ['loops', 'rule', 'tau', 'hits', 'wake', 'reading']
    for path, text, expected in (
            (pages.tiny, 'The quick brown', ['text', *controls, 'temperature', 'write', 'tokens',
                                             'play', 'step', 'group', 'map', 'think']),
            (pages.calc, '=1 +1 *1', ['text', 'deep', 'early', 'again', *controls, 'tokens', 'play',
                                      'step', 'map', 'think'])):
        browser.open(path)
        browser.value(type_text(text))
        visited = []
        for _ in expected:
            visited.append(browser.value("document.activeElement.closest('[id]')?.id ?? ''"))
            browser.press('Tab', 9)
        assert visited == expected
    browser.open(pages.tiny)
    browser.value(type_text('The quick brown'))
    browser.value("document.querySelector('#tokens [tabindex=\"0\"]').focus()")
    chosen = "[chosen, [...$('tokens').children].indexOf(document.activeElement)]"
    for key, code, to in (('ArrowLeft', 37, 13), ('Home', 36, 0), ('ArrowLeft', 37, 0),
                          ('ArrowRight', 39, 1), ('End', 35, 14), ('ArrowRight', 39, 14)):
        browser.press(key, code)
        assert browser.value(chosen) == [to, to]


def test_every_control_says_what_it_does(browser, pages):
    for path in (pages.tiny, pages.calc):
        browser.open(path)
        titles = browser.value("""
            [...document.querySelectorAll('button, input, select, textarea, a')]
                .filter(control => !control.closest('#tokens'))
                .map(control => [control.id, control.closest('[title]')?.title ?? ''])""")
        assert len(titles) > 15 and all(len(title) > 15 for _, title in titles), titles
        sliders = browser.value("""[...document.querySelectorAll('input[type=range]')]
            .map(slider => [...slider.labels].map(label => label.control === slider))""")
        assert sliders and all(named == [True] for named in sliders)


def test_a_chosen_tile_shows_its_predictions_and_play_hides_later_steps(browser, pages):
    browser.open(pages.tiny)
    browser.value(type_text('The quick brown'))
    table, log_p, opacity, guesses = browser.value("""{
        await choose(5);
        const log_p = [...Array(9).keys()].map(k => [...lens(view.shown, view.layer, k + 1)[5]]);
        const table = [...$('think').children].map(row => [...row.querySelectorAll('td')].map(
            cell => +cell.dataset.token));
        show_step(4);
        reveal();
        return [table, log_p, [...document.querySelectorAll('[data-k]')].map(mark =>
            [+mark.dataset.k, +mark.style.opacity]), [...$('tokens').children].map(tile =>
            R.words.indexOf(tile.children[1].textContent))];
    }""")
    order = np.argsort(-np.array(log_p), axis=1, kind='stable')
    assert table == order[:, :5].tolist() and guesses[5] == order[3, 0]
    assert {shown == 1 for k, shown in opacity if k <= 4} == {True}
    assert {shown == 1 for k, shown in opacity if k > 4} == {False}
    ended = browser.value("""{
        play();
        const began = $('play').textContent;
        while (playing) await new Promise(done => setTimeout(done, 50));
        return [began, shown_step > 1e9, $('step').value, $('play').textContent];
    }""")
    assert ended == ['■ stop', True, '9', '▶ step by step']


def test_every_setting_has_a_page(browser, pages):
    """From one loop to thirty, every rule; tiles have the steps of the chosen group."""
    browser.open(pages.tiny)
    browser.value(type_text('The quick'))
    names = [name for name in EXITS if name != 'random']        # what the page does not know
    options = browser.value("[...$('rule').options].map(option => option.value)")
    assert set(options) >= {'', *TAUS} and set(options) <= {'', *names}
    for (loops, tau, wake), rule in product(((1, 1e-6, '0'), (30, 100, '1')), ('', *TAUS)):
        steps, shown, hits = browser.value(f"""{{
            set_rule({rule!r});
            await ({set_controls(loops=loops, tau=tau, wake=wake, group=1)});
            return [[...$('tokens').children].map(tile => +tile.children[2].textContent),
                    view.passes, +$('hits').value];
        }}""")
        assert shown == loops and hits == (EXITS[rule].hits if rule else 1)
        assert rule or {*steps} == {loops}
        assert loops < 30 or not rule or {*steps} <= {1, 2, 3}


def test_a_problem_can_be_edited(browser, pages):
    """calc's answers and depths follow; those of another task hold up to the first change."""
    known = "[view.labels.map(one => one.answer), view.labels.map(one => one.depth)]"
    problems = tasks.Problems('calc:p=5')
    browser.open(pages.calc)
    for seed, n in (7, 48), (8, 11):
        x, y, depth = (row[0].tolist() for row in problems.make(np.random.default_rng(seed), 1, n))
        browser.value(type_text(words_of(pages.calc, x)))
        assert browser.value(f'[ids, ...{known}]') == [x, y, depth]
    right, *_ = browser.value(f"({type_text('+1 =2 *x +4')}).then(() => {known})")
    assert right == [-1, 2, 1]                      # unknown before the first value; *x is no word

    record = record_of(pages.calc)
    record['task']['p'] = None
    other = pages.folder / 'other.html'
    other.write_text(page.fill(record, '', '', ''), encoding='utf-8')
    browser.open(other)
    text = ' '.join([words_of(other, record['task']['ids'][:6]), '=0 =1'])
    before, _ = browser.value(known)
    right, _ = browser.value(f'({type_text(text)}).then(() => {known})')
    assert before == record['task']['right'] and len(right) == 8
    assert right[:6] == before[:6] and right[7] == -1


def test_only_whole_words_are_read_and_the_others_are_named(browser, pages):
    browser.open(pages.calc)
    for text, words, unknown in (
            ('hello world', '', 'hello, world'), ('2+3', '', '2+3'), ('=7 +9 *4', '*4', '=7, +9'),
            ('=9', '', '=9'), ('*0 =1', '=1', '*0'), ('=1+2', '', '=1+2'), ('', '', ''),
            ('=1 \uff0b2 \u00d73', '=1', '\uff0b2, \u00d73'), ('=1\n+2\t*3', '=1 +2 *3', '')):
        read, notice, tiles, summary = browser.value(f"""({type_text(text)}).then(() => [
            decode(ids), $('notice').textContent, $('tokens').children.length,
            $('summary').textContent])""")
        assert read == words and tiles == len(words.split())
        assert (f'not read: {unknown}.' in notice) == bool(unknown)
        assert '=0 =1 =2 =3 =4 +1' in (notice if words else summary) or not unknown


def test_what_is_too_long_is_cut_with_a_word(browser, pages):
    """A text of more than 1,000 letters, a problem of more than 512 words; what is shown stays."""
    for path, text, most in ((pages.tiny, 'x' * 1005, '1000 letters'),
                             (pages.calc, '=1 ' * 515, '512 words')):
        browser.open(path)
        n, notice, value = browser.value(f"""({type_text(text)}).then(() => [
            ids.length, $('notice').textContent, $('text').value])""")
        assert n == int(most.split()[0]) and value == text
        cut = len(text.split()) - n if path == pages.calc else len(text) - n
        assert notice.startswith(f'Only the first {most}') and f'{cut} more are left out' in notice


def test_numbers_after_a_paste_that_is_longer_than_the_window(browser, pages):
    """Tiles in the model's sight have the numbers of their own tokens; those before have none."""
    browser.open(pages.tiny)
    text = ''.join(chr(97 + i % 26) for i in range(79))
    at_once, one_by_one, steps, start = browser.value(f"""{{
        const numbers = () => [...$('tokens').children].map(tile => tile.children[2].textContent);
        await ({set_controls(tau=0.3)});
        await {type_text(text)};
        const at_once = numbers();
        await {type_text('')};
        for (let n = 1; n <= {len(text)}; n++) {{
            $('text').value = {text!r}.slice(0, n);
            await take_text();
        }}
        const evals = view.tokens.map(({{cells}}) => cells[view.layer].frames.length - 1);
        return [at_once, numbers(), evals.map(n => `${{n}}`), view.start];
    }}""")
    assert start == 48 and at_once == [''] * 48 + steps and one_by_one[48:] == steps
    assert '' not in one_by_one and len(set(steps)) > 1


def test_the_summary_counts_what_the_tiles_show(browser, pages):
    """At every loop step: as many crosses as answers that are not right."""
    browser.open(pages.long)
    seen = browser.value("""{
        const seen = [];
        const {passes} = view;
        for (const k of [0, 1, 5, 20, Math.floor(passes / 2), passes - 1, Infinity]) {
            show_step(k);
            reveal();
            seen.push([$('summary').textContent, document.querySelectorAll('small.wrong').length,
                       document.querySelectorAll('#tokens .awake').length]);
        }
        return seen;
    }""")
    crosses = [wrong for _, wrong, _ in seen]
    for summary, wrong, awake in seen[1:-1]:
        assert f': {192 - wrong} of 192 answers right, {awake} of 192 tokens awake.' in summary
    assert crosses[1] > 100 and crosses[-1] == 0 and seen[-1][0].startswith('192 of 192 answers')


def test_the_three_stories(browser, pages):
    """A deep problem is solved; its tokens exit too early; they wake, and it is solved again."""
    browser.open(pages.calc)
    shown = [browser.value(f"""{{
        $('{story}').click();
        await drawn;
        share();
        return [$('text').value, labelled(view.labels) -
                document.querySelectorAll('small.wrong').length, $('summary').textContent,
                Math.max(...view.labels.map(label => label.depth)), location.hash];
    }}""") for story in ('deep', 'early', 'again', 'deep')]
    texts, right, summaries, depths, addresses = zip(*shown)
    assert texts[0] == texts[1] == texts[2] != texts[3] and depths == (191,) * 4
    assert right[1] < 150 and right[0] == right[2] == right[3] == 192
    assert 'before the news' in summaries[1] and 'slept the rest' in summaries[2]
    assert 'wake=0' in addresses[1] and 'wake' not in addresses[2]


def test_typing_wakes_few_and_says_so(browser, pages):
    browser.open(pages.calc)
    text = browser.value("$('text').value")
    assert not text.endswith('=0')
    summary, computed = browser.value(f"""({type_text(text[:-2] + '=0')}).then(() => [
        $('summary').textContent,
        view.tokens.filter(({{cells}}) => cells[1].frames.length > 1).length])""")
    assert f'Your change: {computed} token' in summary and 0 < computed < 5
    # a change of nothing keeps the picture
    again = browser.value(f"({type_text(text[:-2] + '=0')}).then(() => $('summary').textContent)")
    assert again == summary
    settled = browser.value("choose(0).then(() => $('think').textContent)")
    assert settled.startswith('before')


def test_the_address_holds_the_state(browser, pages):
    """What is not as at first; a page that is opened at that address shows the same."""
    for path, text, changes in (
            (pages.calc, '=1 +1 *1 +1', dict(wake='0', tau=0.5, loops=20, reading='1')),
            (pages.tiny, 'a # & = % \u00e9 +b', dict(group='0', hits='3', temperature='0.3'))):
        state = """[$('text').value, chosen, $('summary').textContent,
                    ...CONTROLS.map(id => BASES[id] ? get(id).toPrecision(3) : get(id))]"""
        browser.open(path)
        assert browser.value('location.hash') in ('', '#')
        address, before = browser.value(f"""{{
            await {type_text(text)};
            await ({set_controls(**changes)});
            await choose(1);
            share();
            return [location.hash, {state}];
        }}""")
        assert all(f'{name}=' in address for name in changes) and 'rule' not in address
        browser.open(path, address=address)
        assert browser.value(state) == before
    browser.open(pages.calc, address='#rule=nonsense&tau=x&token=99&group=7&loops=-1&text=%3D1')
    assert browser.value("[ids.length, $('rule').value]") == [1, 'accel']
    browser.open(pages.calc)
    browser.value("(set_rule('norm_rel'), update())")
    # and the address follows what is typed
    browser.value(type_text('=1 +1'))
    assert browser.value("""{
        for (let n = 0; n < 50 && !location.hash.includes('text'); n++)
            await new Promise(done => setTimeout(done, 100));
        return location.hash;
    }""") == '#text=%3D1+%2B1&rule=norm_rel&tau=0.1&hits=1'


def test_a_letter_typed_while_the_model_writes_stays_where_it_is_typed(browser, pages):
    browser.open(pages.tiny)
    browser.value(type_text('The quick brown'))
    # at temperature 0, since a drawn text may end at once
    browser.value("""{
        set('temperature', 0);
        $('text').focus();
        $('text').setSelectionRange(3, 3);
        write();
        while (writing && ids.length < 18) await new Promise(done => setTimeout(done, 10));
    }""")
    browser.call('Input.insertText', text='!')
    text, writes = browser.value("drawn.then(() => [$('text').value, writing])")
    assert text.startswith('The! quick brown') and len(text) > 17 and writes == 0


def test_write_on_in_a_long_text(browser, pages):
    """Not a letter a click: until the text is full, which it says."""
    browser.open(pages.tiny)
    n, notice, label = browser.value(f"""{{
        set('loops', 1);
        set('temperature', 0);
        await {type_text('x' * 980)};
        await write();
        return [ids.length, $('notice').textContent, $('write').textContent];
    }}""")
    assert n == 1000 and 'full' in notice and label == 'write on'


def test_where_the_panels_stand(browser, pages):
    """
    The answers stand right below the play button on narrow screens; jumps need two groups. The
    window becomes smaller from width to width.
    """
    for path, width in product((pages.long, pages.tiny), (1400, 800, 360)):
        if width == 1400:
            browser.open(path, width)
        browser.set_width(width)
        play, think, map, hidden, wide, inner = browser.value("""{
            for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
            return [
                $('play').getBoundingClientRect().bottom, $('think').getBoundingClientRect().top,
                $('map').getBoundingClientRect().top, $('path-panel').hidden,
                document.documentElement.scrollWidth, innerWidth];
        }""")
        assert think - play < 260 and hidden == (path == pages.long) and wide <= inner == width
        assert (think < map) == (width < 1000)


def test_a_tile_of_the_map_can_be_chosen(browser, pages):
    """A click on the map chooses its token; the map is as wide as its tokens."""
    browser.open(pages.long, 1400)
    for t in (0, 100, 191):
        x, y = browser.value(f"""{{
            canvas.scrollIntoView();
            const box = canvas.getBoundingClientRect();
            const map = layout_of_map(view, $('map').clientWidth);
            return [box.left + map.x({t}) + map.w / 2, box.top + map.y(2)];
        }}""")
        for kind in ('mousePressed', 'mouseReleased'):
            browser.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left',
                         clickCount=1)
        assert browser.value('drawn.then(() => chosen)') == t


def test_an_older_browser(browser, pages):
    """What came after 2022 is not needed; where something is missing, one line says so."""
    browser.open(pages.calc, before="""
        delete Uint8Array.fromBase64; delete globalThis.Float16Array; delete globalThis.scheduler;
        for (const array of [Array, Float32Array]) {
            delete array.prototype.findLastIndex; delete array.prototype.findLast;
            delete array.prototype.toSorted; delete array.prototype.with;
        }
        delete Object.groupBy; delete Promise.withResolvers;""")
    T = len(record_of(pages.calc)['task']['ids'])
    assert browser.value("[$('tokens').children.length, $('failed').hidden]") == [T, True]

    browser.open(pages.calc, before='delete globalThis.atob', start=False)
    line = browser.call('Runtime.evaluate', expression="$('failed').textContent")['result']['value']
    assert 'atob' in line and 'needs a browser of 2022' in line
    browser.events.clear()
    assert '<noscript>' in pages.calc.read_text(encoding='utf-8')


# the file -----------------------------------------------------------------------------------------

def test_the_page_needs_no_network_and_no_text_is_code(pages):
    text = pages.tiny.read_text(encoding='utf-8')
    assert text.count('<script') == 5 and text.count('</script>') == 5
    assert record_of(pages.tiny)['start'] == NASTY
    assert page.fill(NASTY, NASTY, NASTY, NASTY).count('<script') == 5
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\bhttps?://[^\'"]*|\b(?:src|href)="[^"]*', text))
    paper = 'https://arxiv.org/abs/2509.23314'
    assert addresses == {'http://www.w3.org/2000/svg', 'href="data:,', f'href="{paper}',
                         'href="../README.md'}


def test_weights_are_float16_where_that_changes_no_answer(pages):
    """Of a text: where it loses nothing; of a problem: where all its answers stay."""
    assert [record_of(path)['model']['half'] for path in
            (pages.tiny, pages.text, pages.task)] == [False, True, True]
    model, _ = load_checkpoint(pages.task.with_name('ckpt.pt'))
    assert not torch.equal(model.wte.weight, page.halved(model).wte.weight)
    assert pages.text.stat().st_size < 2.2e6


@pytest.mark.parametrize('flag, words', [
    ('--path=.', 'is a directory'), ('--n_loop=0', 'n_loop must lie between 1 and 30'),
    ('--seed=1', '--seed does nothing'), ('--dataset=calc', '--dataset does nothing'),
    ('--out_dir=calc --n_loop=1125', 'between 1 and 1124'), ('--length=0', 'length must lie'),
    ('--out_dir=calc --length=513', 'between 1 and 512'), ('--length=49', 'learned positions'),
    ('--out_dir=calc --dataset=hop', 'words'), ('--out_dir=calc --start==7', "'=7' is not a word"),
    ('--out_dir=calc --start==1 --seed=1', '--seed does nothing')])
def test_bad_input(pages, monkeypatch, flag, words):
    monkeypatch.chdir(pages.folder)
    assert words in refused(*flag.split(), script='page/__main__.py')


def test_length_and_difficulty_of_the_first_problem(pages, monkeypatch):
    monkeypatch.chdir(pages.folder)
    task = record_of(pages.calc)['task']
    x, y, depth = tasks.Problems('calc:reset=0.01').make(np.random.default_rng(1), 1, 48)
    assert [task['ids'], task['right'], task['depth']] == [x[0].tolist(), y[0].tolist(),
                                                           depth[0].tolist()]
    finished('--out_dir=calc', '--start==3 +4 *2', '--path=own.html', script='page/__main__.py')
    record = record_of(pages.folder / 'own.html')
    assert record['start'] == '=3 +4 *2' and record['task']['right'] == [3, 2, 4]


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
