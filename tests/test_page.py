"""The pages of page/ in a browser: their model is that of model.py, and they do what they offer."""
import json
import os
import re
import select
import shutil
import subprocess
from itertools import count
from urllib.parse import quote_plus

import numpy as np
import pytest
import torch
from conftest import ROOT, finished, refused

import page
import tasks
from common.checkpoint import load_checkpoint
from exits import make_exit
from model import GPT, GPTConfig
from tasks import NOT_ASKED

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
KEYS = dict(ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40, Enter=13, Home=36)
SHIFT = 8
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}} \u05d0\u05d1 $&'
NEAR = dict(atol=1e-4, rtol=0)


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """{name: the page of a model that we ship}; the text has nasty characters in it."""
    folder = tmp_path_factory.mktemp('pages')
    nasty = folder / 'nasty.txt'
    nasty.write_text(NASTY, encoding='utf-8')
    for name, flags in dict(calc=['--dataset=calc:reset=0.01', '--tau=1'],
                            text=[f'--start=FILE:{nasty}', '--tau=0.1'],
                            maze=['--tau=0.14', '--length=100']).items():
        finished(f'--out_dir={ROOT}/pretrained/{name}', f'--path={folder}/{name}.html', *flags,
                 script='page/__main__.py')
    return {name: folder / f'{name}.html' for name in ('calc', 'text', 'maze')}


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
        self.numbers = count(1)
        self.read = b''
        self.events = []
        self.session = {}
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        attached = self.call('Target.attachToTarget', targetId=target, flatten=True)
        self.session = dict(sessionId=attached['sessionId'])
        for domain in ('Page', 'Runtime'):
            self.call(f'{domain}.enable')

    def message(self):
        while b'\0' not in self.read:
            if not select.select([self.back], [], [], 300)[0]:
                self.process.kill()             # the page waits for something that does not come
            chunk = os.read(self.back, 1 << 16)
            assert chunk, 'Chromium has ended'
            self.read += chunk
        message, self.read = self.read.split(b'\0', 1)
        return json.loads(message)

    def call(self, method, **params):
        number = next(self.numbers)
        message = json.dumps(dict(id=number, method=method, params=params) | self.session)
        os.write(self.to, message.encode() + b'\0')
        while (answer := self.message()).get('id') != number:
            self.events.append(answer)
        assert 'error' not in answer, answer
        return answer['result']

    def open(self, page, width=1200, motion='reduce', address=''):
        """Show a page, anew. motion: 'reduce' for a reader who wants nothing to move."""
        self.call('Emulation.setEmulatedMedia',
                  features=[dict(name='prefers-reduced-motion', value=motion)])
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        self.events.clear()
        # with a new number, or a new address behind # would not load anything
        self.call('Page.navigate', url=f'file://{page}?{next(self.numbers)}{address}')
        while not any(event['method'] == 'Page.loadEventFired' for event in self.events):
            self.events.append(self.message())

    def value(self, script):
        """What an expression on the page is, or what it promises."""
        result = self.call('Runtime.evaluate', expression=f'(async () => {script})()',
                           awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in result, result['exceptionDetails']
        assert not [one for one in self.events if one['method'] == 'Runtime.exceptionThrown']
        return result['result'].get('value')

    def press(self, key, modifiers=0):
        for kind in ('keyDown', 'keyUp'):
            self.call('Input.dispatchKeyEvent', type=kind, key=key, code=key, modifiers=modifiers,
                      windowsVirtualKeyCode=KEYS[key])
        return self.value('drawn.then(() => 1)')

    def click(self, x, y):
        for kind in ('mousePressed', 'mouseReleased'):
            self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)
        return self.value('drawn.then(() => 1)')

    def type(self, text):
        self.call('Input.insertText', text=text)
        return self.value('pause(500).then(() => drawn).then(() => 1)')


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip('there is no Chromium here: apt-get install chromium')
    browser = Browser(tmp_path_factory.mktemp('profile'))
    yield browser
    browser.call('Browser.close')
    browser.process.wait(60)


# of the pass that is shown: how often each group has computed each token, the last states, answers
RESULT = """({
    evals: M.groups.map(i => pass.tokens.map(token => computed(token, i))),
    states: M.groups.map(i => pass.tokens.map(({cells}) => [...cells[i].frames.at(-1).x])),
    answers: pass.tokens.map((_, t) => seen(t).best)})"""

# a narrow window needs no scrolling sideways, and shows the picture without scrolling down
FITS = """document.documentElement.scrollWidth <= innerWidth &&
    scrollY + $('canvas').getBoundingClientRect().bottom <= innerHeight"""


def record_of(path):
    text = path.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


def shipped(name, length=None):
    return load_checkpoint(f'{ROOT}/pretrained/{name}', length=length)[0]


def letters_of(maze):
    """A maze as the page writes it."""
    return ''.join(np.base_repr(word, 32).lower() for word in maze)


# the same numbers as in Python --------------------------------------------------------------------

@pytest.mark.parametrize('name, T, n_loop', [('calc', 40, 60), ('text', 20, 12), ('maze', 36, 70)])
@torch.no_grad()
def test_the_page_computes_what_the_model_computes(browser, pages, name, T, n_loop):
    """Fixed loops and every rule, for good and with sleep: loop steps, last states and logits."""
    model = shipped(name, length=36 if name == 'maze' else None)
    browser.open(pages[name])
    rng = np.random.default_rng(0)
    x = rng.integers(model.config.vocab_size, size=T)
    if name == 'maze':
        x = tasks.Problems('maze').make(rng, 1, T)[0][0]
        browser.value(f'take({json.dumps(letters_of(x))})')
    rules = [None]
    for rule, thresholds in dict(norm=(.3, 1), norm_rel=(.03, .1), kl=(1e-3, 1e-2),
                                 accel=(.3, 1)).items():
        rules += [make_exit(rule, tau, wake=tau == thresholds[1]) for tau in thresholds]
    numbers = set()
    for rule in rules:
        trace = []
        logits, _ = model(torch.from_numpy(x)[None], n_loop=n_loop, exit=rule, trace=trace)
        known = rule or make_exit('norm', 0)            # no signal lies below 0
        plan = dict(rule=dict(signal=known.name, tau=known.tau, hits=known.hits, keep=known.keep),
                    loops=n_loop, wake=known.wake)
        found = browser.value(f"""{{
            const tokens = {x.tolist()}.map(id => ({{id, cells: []}}));
            for (const work = read(tokens, 0, {json.dumps(plan)}); !work.next().done;);
            pass = {{...pass, tokens}};
            return {{...{RESULT}, logits: tokens.map(({{cells}}) =>
                [...cells[M.groups.at(-1)].answers.at(-1).logits])}};
        }}""")
        assert found['evals'] == [group['evals'][0].tolist() for group in trace], rule
        np.testing.assert_allclose(found['logits'], logits[0], err_msg=str(rule), **NEAR)
        if rule is None:
            states = [group['states'][-1, 0] for group in trace]
            np.testing.assert_allclose(found['states'], torch.stack(states), **NEAR)
        numbers.update(sum(found['evals'], []))
    assert len(numbers) > 5, 'tokens should exit at different steps'


def test_mazes_in_which_the_goal_moves_and_a_wall_opens(browser, pages):
    """By clicks and by keys: some rooms wake, and the arrows lead to the new goal."""
    counts = """[pass.tokens.filter(token => computed(token, M.groups[0])).length,
        pass.tokens.filter((_, t) => seen(t).is_wrong).length]"""
    browser.open(pages['maze'])
    words = browser.value('drawn.then(() => pass.ids)')
    assert browser.value(counts) == [100, 0]

    # a goal by a click; a wall by a click; then both by keys
    left, top, size = browser.value("""{
        const {left, top} = canvas.getBoundingClientRect();
        return [left, top, size];
    }""")
    goal = next(room for room in range(50, 59) if not words[room] & 2 and words[room] < 16)
    x = left + size * (goal % 10)
    y = top + size * 5.5
    browser.click(x + .5 * size, y)
    words = [doors % 16 + 16 * (room == goal) for room, doors in enumerate(words)]
    assert browser.value('pass.ids') == words
    n_woken, n_wrong = browser.value(counts)
    assert 0 < n_woken < 100 and n_wrong == 0

    browser.click(x + .95 * size, y)                    # the wall to the east of the goal
    words[goal] += 2
    words[goal + 1] += 8
    assert browser.value('pass.ids') == words
    assert 0 < browser.value(counts)[0] < 100

    browser.value('(canvas.focus(), chosen = 75)')
    for key in ('ArrowUp', 'ArrowLeft', 'Enter'):
        browser.press(key)
    assert browser.value('[chosen, maze.goal]') == [64, 64]
    doors = browser.value('maze.doors[chosen]')
    browser.press('ArrowDown', SHIFT)
    assert browser.value('maze.doors[chosen]') == doors ^ 4

    # a goal that moves and comes back while the page is paused: who was at work works on
    at_work, shown, n_wrong = browser.value('''{
        const at_work = () => pass.tokens.filter((_, t) => seen(t).is_awake).length;
        take(R.start);
        step();
        const {goal} = maze;
        move_goal(goal ? 0 : 1);
        const after_one = at_work();
        move_goal(goal);
        const counts = [after_one, at_work()];
        const paused = shown;
        await finish();
        return [counts, paused, pass.tokens.filter((_, t) => seen(t).is_wrong).length];
    }''')
    assert min(at_work) > 90 and (shown, n_wrong) == (1, 0)


def test_the_page_knows_the_right_answers(browser, pages):
    """Those of calc and of mazes; mazes that it makes are mazes."""
    known = 'pass.labels.map(({right, depth}) => [right, depth])'
    browser.open(pages['calc'])
    problems = tasks.Problems('calc')
    for seed, T in (7, 48), (8, 11):
        x, y, depth = (row[0].tolist() for row in problems.make(np.random.default_rng(seed), 1, T))
        browser.value(f'(take({json.dumps(problems.encoding.decode(x))}), 1)')
        assert browser.value('pass.ids') == x
        assert browser.value(known) == [[[right], n] for right, n in zip(y, depth)]

    # of another task those of its first problem, as far as there are any
    record = record_of(pages['calc'])
    x = record['first']['ids']
    record |= dict(p=None, first=dict(ids=x, right=[2] + [-100] * 47, depth=[1] + [0] * 47))
    other = pages['calc'].with_name('other.html')
    other.write_text(page.fill(record, TITLE='', ABOUT='', RESULTS='', MODEL=''), encoding='utf-8')
    browser.open(other)
    browser.value('drawn')
    assert browser.value(known)[:2] == [[[2], 1], [[], -1]]
    assert 'of 1 answer right' in browser.value("$('summary').textContent")

    browser.open(pages['maze'], width=360)
    assert browser.value(FITS)
    problems = tasks.Problems('maze')
    for seed in range(3):
        x, y, depth = (row[0] for row in problems.make(np.random.default_rng(seed), 1, 36))
        browser.value(f'(take({json.dumps(letters_of(x))}), 1)')
        assert browser.value(known) == [[[right] if right != NOT_ASKED else [], n]
                                        for right, n in zip(y.tolist(), depth.tolist())]
    for kind in ('long', 'bushy'):
        words = browser.value(f"""{{
            $('kind').value = '{kind}';
            $('side').value = 30;
            take(another());
            return pass.ids;
        }}""")
        _, y = problems.solve(problems.encoding.decode(words))
        assert len(words) == 900 and (y != NOT_ASKED).sum() == 899


# what a reader does -------------------------------------------------------------------------------

def test_a_problem_is_played_and_typed(browser, pages):
    browser.open(pages['calc'], motion='no-preference')
    assert browser.value('[player !== null, pass.done]') == [True, False]       # it plays by itself
    browser.value('drawn')
    assert browser.value('[player, at_end()]') == [None, True]

    # back to a loop step, on by one, and to the end
    shown = browser.value("""{
        $('step').value = 3;
        $('step').dispatchEvent(new Event('input'));
        const at_three = [shown, document.querySelectorAll('#tiles .awake').length];
        $('next').click();
        const next = shown;
        $('speed').value = 60;
        $('play').click();
        await drawn;
        const end = at_end();
        $('play').click();              // from the start again
        return [...at_three, next, end, shown];
    }""")
    assert shown[0] == 3 and shown[1] > 0 and shown[2:] == [4, True, 1]

    # a deep problem, typed: all are right, as many loop steps as in Python
    problems = tasks.Problems('calc:reset=0.01')
    x, y, depth = (row[0] for row in problems.make(np.random.default_rng(2), 1, 192))
    browser.value("($('text').focus(), $('text').select())")
    browser.type(problems.encoding.decode(x))
    trace = []
    with torch.no_grad():
        shipped('calc', length=192)(torch.from_numpy(x)[None], n_loop=484,
                                    exit=make_exit('accel', 1, wake=True), trace=trace)
    found = browser.value(RESULT)
    assert found['answers'] == y.tolist() and depth.max() > 100
    assert found['evals'][0] == trace[0]['evals'][0].tolist()
    assert '192 of 192 answers right' in browser.value("$('summary').textContent")

    # more words leave the states before them as they were; an unknown one is named
    browser.value("$('text').setSelectionRange(1e6, 1e6)")
    browser.type(' foo +1 *2 +0')
    longer = browser.value(RESULT)
    assert longer['answers'][192:] == [(y[-1] + 1) % 5, (y[-1] + 1) * 2 % 5]
    assert longer['evals'][0][:192] == found['evals'][0]
    assert 'foo, +0' in browser.value("$('notice').textContent")

    # it is read when the typing has paused
    assert browser.value("""{
        $('text').value += ' +1';
        $('text').dispatchEvent(new Event('input'));
        return pass.ids.length;
    }""") == 194
    browser.type(' +1')
    assert browser.value('pass.ids.length') == 196

    # stopped for good, most are wrong; the address says so
    address = browser.value("""{
        $('wake').value = '0';
        $('wake').dispatchEvent(new Event('input'));
        $('play').click();              // pause, and to the end
        await finish();
        await pause(500);
        return location.hash;
    }""")
    wrong = browser.value("document.querySelectorAll('#tiles .wrong').length")
    assert wrong > 50 and 'wake=0' in address and 'foo' in address
    text = browser.value('text')
    browser.open(pages['calc'], width=360, address=address)
    browser.value('drawn')
    assert browser.value(FITS)
    assert browser.value("document.querySelectorAll('#tiles .wrong').length") == wrong
    assert browser.value('text') == text

    # keys choose a tile
    browser.value("$('tiles').children[chosen].focus()")
    browser.press('Home')
    browser.press('ArrowRight')
    assert browser.value('[chosen, [...$("tiles").children].indexOf(document.activeElement)]') \
        == [1, 1]
    browser.open(pages['calc'], address='#rule=x&tau=-1&wake=7&text=' + quote_plus('=1 +3'))
    browser.value('drawn')
    assert browser.value("[get('rule'), get('wake'), seen(1).best]") == ['accel', '1', 4]


def test_a_text_is_typed_and_written_on(browser, pages):
    browser.open(pages['text'], width=360, motion='no-preference')
    assert browser.value('text') == NASTY
    # it can be written on while it is played
    assert browser.value('''{
        $('write').click();
        while (!pass.done) await pause(10);
        $('write').click();
        await drawn;
        return [player, writer, text.startsWith(R.start)];
    }''') == [None, None, True]
    browser.value("($('text').focus(), $('text').select())")
    browser.type('caf\u00e9 \u05d0 in a')
    ids = list('caf\u00e9 \u05d0 in a'.encode())
    assert browser.value('pass.ids') == ids

    # a letter that is typed while the model writes stays where it is typed, and stops the writing
    browser.value("""{
        $('text').setSelectionRange(2, 2);
        $('write').click();
        while (pass.ids.length < 30 && writer) await pause(10);
    }""")
    browser.type('!')
    assert browser.value("[writer, $('text').value.slice(0, 7)]") == [None, 'ca!f\u00e9 \u05d0']

    assert browser.value(FITS)

    # what has been kept is what reading anew gives
    kept = browser.value(RESULT)
    assert browser.value(f'{{ take(text); await finish(); return {RESULT}; }}') == kept

    # a letter of two bytes is written; the end of the text and a full text stop the writing
    assert browser.value("""{
        const drawn = [...new TextEncoder().encode('\\u00e9'), END];
        drawn_token = () => drawn.shift();
        take('caf');
        await write();
        const ended = [text, $('notice').textContent];
        drawn_token = () => 120;
        take('x'.repeat(R.most - 2));
        await write();
        return [...ended, text.length, $('write').textContent];
    }""") == ['caf\u00e9', 'The model has ended its text.', 1000, 'write on']


# the file -----------------------------------------------------------------------------------------

def test_the_page_needs_no_network_and_no_text_is_code(pages):
    text = pages['text'].read_text(encoding='utf-8')
    assert text.count('<script') == 5 and text.count('</script>') == 5
    assert record_of(pages['text'])['start'] == NASTY
    filled = page.fill(dict(kind='text', start=NASTY), TITLE=NASTY, ABOUT=NASTY, RESULTS=NASTY,
                       MODEL=NASTY)
    assert filled.count('<script') == 5
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\b(?:src|href)="([^"]*)', text))
    results = os.path.relpath(f'{ROOT}/results/text.md', pages['text'].parent)
    assert addresses == {'data:,', 'https://arxiv.org/abs/2509.23314', results}


def test_the_first_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def record(*flags):
        finished(f'--out_dir={ROOT}/pretrained/calc', '--path=own.html', *flags,
                 script='page/__main__.py')
        return record_of(tmp_path / 'own.html')
    x, y, depth = tasks.Problems('calc:reset=0.01').make(np.random.default_rng(1), 1, 100)
    found = record('--dataset=calc:reset=0.01', '--length=100', '--seed=1', '--n_loop=9', '--tau=2')
    assert found['first'] == dict(ids=x[0].tolist(), right=y[0].tolist(), depth=depth[0].tolist())
    assert (found['loops'], found['rules']['accel']['tau']) == (9, 2)
    found = record('--start==3 +4 *2')
    assert (found['start'], found['first']['right']) == ('=3 +4 *2', [3, 2, 4])


@pytest.mark.parametrize('name, flag', [
    ('text', '--seed=1'), ('text', '--dataset=calc'), ('text', '--length=9'),
    ('text', '--n_loop=0'), ('text', '--path=.'), ('calc', '--length=0'),
    ('calc', '--length=513'), ('calc', '--tau=0'),
    ('calc', '--dataset=calc:p=7'), ('calc', '--start==7'), ('calc', '--start==1 --seed=1'),
    ('maze', '--start=x'), ('maze', '--length=80')])
def test_bad_input(tmp_path, monkeypatch, name, flag):
    monkeypatch.chdir(tmp_path)
    line = refused(f'--out_dir={ROOT}/pretrained/{name}', *flag.split(), script='page/__main__.py')
    assert line.startswith('error: ') and not os.path.exists('out')


def test_what_the_page_cannot_run():
    class Mine(GPT):
        pass
    shape = dict(block_size=8, vocab_size=9, n_layer=2, n_embd=8, n_head=1, groups=[[0]])
    model = GPT(GPTConfig(**shape))
    assert page.as_json(model)['C'] == 8
    for cls, change in ((Mine, {}), (GPT, dict(injection='add')), (GPT, dict(x0='e')),
                        (GPT, dict(n_embd=208))):
        with pytest.raises(ValueError):
            page.as_json(cls(GPTConfig(**shape | change)))
    model.wte.weight.data[3, 3] = 1e9                   # more than float16 can hold
    with pytest.raises(ValueError, match='float16'):
        page.as_json(model)
