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
from cache import Span
from common.checkpoint import checkpoint_of, load_checkpoint, save_checkpoint
from exits import make_exit
from loops import Plan
from model import GPT, GPTConfig
from tasks import NOT_ASKED
from zoo.sudoku import DIGITS, GIVEN, YES, Sudoku, SudokuConfig, side_of

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
KEYS = dict(ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40, Enter=13, Home=36, Backspace=8)
SHIFT = 8
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}} \u05d0\u05d1 $&'
NEAR = dict(atol=1e-4, rtol=0)


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """{name: the page of a model that we ship}; the one of boards has random weights"""
    folder = tmp_path_factory.mktemp('pages')
    save_checkpoint(checkpoint_of(random_sudoku(), dict(dataset='sudoku', block_size=216),
                                  tasks.Problems('sudoku').tokenizer, ''), f'{folder}/ckpt.pt')
    finished(f'--out_dir={folder}', f'--path={folder}/sudoku.html', '--length=216', '--tau=0.3',
             script='page/__main__.py')
    for name, flags in dict(calc=['--dataset=calc:reset=0.01', '--tau=1'],
                            maze=['--tau=0.14', '--length=100']).items():
        finished(f'--out_dir={ROOT}/pretrained/{name}', f'--path={folder}/{name}.html', *flags,
                 script='page/__main__.py')
    return {name: folder / f'{name}.html' for name in ('calc', 'maze', 'sudoku')}


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
                      windowsVirtualKeyCode=KEYS.get(key, 0))
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


# of the pass that is shown: how often each token was computed, the last states, and the answers
RESULT = """({
    evals: pass.ids.map((_, t) => computed(t)),
    states: pass.ids.map((_, t) => [...row(pass.state.X, t)]),
    answers: pass.labels.map((_, place) => seen(place).best)})"""

# a narrow window needs no scrolling sideways, and shows the picture without scrolling down
FITS = """document.documentElement.scrollWidth <= innerWidth &&
    scrollY + $('canvas').getBoundingClientRect().bottom <= innerHeight"""


def record_of(path):
    text = path.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


def filled(record, path, words=''):
    """A page with this record."""
    text = page.fill(record, **dict.fromkeys(('TITLE', 'ABOUT', 'RESULTS', 'MODEL'), words))
    path.write_text(text, encoding='utf-8')
    return path


def shipped(name, length=None):
    return load_checkpoint(f'{ROOT}/pretrained/{name}', length=length)[0]


@torch.no_grad()
def halves(model):
    """A model in evaluation, with weights as a page stores them."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    return model.eval()


def random_sudoku():
    torch.manual_seed(0)
    return halves(Sudoku(SudokuConfig(block_size=216, vocab_size=5, n_layer=2, n_head=4, n_embd=32,
                                      groups=[[0]])))


def board_of(x):
    """The candidates of a board (T,) as the page writes it."""
    n = side_of(len(x))
    return ''.join(DIGITS[(cell == GIVEN).argmax()] if (cell == GIVEN).any() else '.'
                   for cell in x.reshape(n * n, n))


def letters_of(maze):
    """A maze as the page writes it."""
    return ''.join(np.base_repr(word, 32).lower() for word in maze)


# the same numbers as in Python --------------------------------------------------------------------

@pytest.mark.parametrize('name, T, n_loop', [('calc', 40, 60), ('maze', 36, 70), ('small', 12, 60),
                                             ('sudoku', 216, 60)])
@torch.no_grad()
def test_the_page_computes_what_the_model_computes(browser, pages, name, T, n_loop):
    """Fixed loops and every rule, for good and with sleep: loop steps, last states and logits."""
    path = pages.get(name)
    rng = np.random.default_rng(0)
    if name == 'small':         # what no model that ships has: learned positions, several layers
        model = halves(GPT(GPTConfig(block_size=12, vocab_size=13, n_layer=5, n_embd=32, n_head=2,
                                     groups=[[2, 3]], damping=0.2)))
        record = record_of(pages['calc'])
        record |= dict(most=T, model=page.as_json(model), start='=1', labels={})
        path = filled(record, pages['calc'].with_name('small.html'))
    elif name == 'sudoku':
        model = random_sudoku()
    else:
        model = shipped(name, length=36 if name == 'maze' else None)
    browser.open(path)
    x = rng.integers(model.config.vocab_size, size=T)
    if name == 'maze':
        x = tasks.Problems('maze').make(rng, 1, T)[0][0]
        browser.value(f'take({json.dumps(letters_of(x))})')
    if name == 'sudoku':
        x = tasks.Problems('sudoku').make(rng, 1, T)[0][0]
        browser.value(f'take("{board_of(x)}")')
        assert browser.value('pass.ids') == x.tolist()
    first = torch.tensor(browser.value(f'[...noise({T}, 3)]')).view(1, T, -1)
    rules = [None]
    for rule, thresholds in dict(norm=(.3, 1), norm_rel=(.03, .1), kl=(1e-3, 1e-2),
                                 accel=(.3, 1)).items():
        rules += [make_exit(rule, tau, wake=tau == thresholds[1]) for tau in thresholds]
    numbers = set()
    for rule in rules:
        plan = Plan([n_loop], rule, span=Span(0, T), warm=[first])
        hidden, (group,) = model.hidden(torch.from_numpy(x)[None], plan)
        logits = model.lm_head(hidden)[0]
        known = rule or make_exit('norm', 0)            # no signal lies below 0
        plan = dict(rule=dict(signal=known.name, tau=known.tau, hits=known.hits, keep=known.keep),
                    loops=n_loop, wake=known.wake)
        found = browser.value(f"""{{
            const ids = {x.tolist()};
            const labels = ids.map(() => ({{right: [], depth: -1}}));
            const plan = {json.dumps(plan)};
            const state = first_state(ids, 3);
            pass = {{ids, labels, plan, state, steps: [{{awake: []}}]}};
            while (!is_done()) advance();
            shown = n_steps();
            return {{...{RESULT}, logits: [...state.logits]}};
        }}""")
        assert found['evals'] == group['evals'][0].tolist(), rule
        answers = logits[:, record_of(path)['first_answer']:]
        np.testing.assert_allclose(np.reshape(found['logits'], answers.shape), answers,
                                   err_msg=str(rule), **NEAR)
        np.testing.assert_allclose(found['states'], group['x'][0], **NEAR)
        numbers.update(found['evals'])
    assert len(numbers) > 5, 'tokens should exit at different steps'


def test_the_noise_of_the_page(browser, pages):
    """Normal, with a variance of 2/5, and cut; another seed gives other noise."""
    browser.open(pages['calc'])
    one, again, other = np.array(browser.value('[1, 1, 2].map(seed => [...noise(300, seed)])'))
    for x in one, other:
        assert abs(x.mean()) < 0.02 and abs(x.var() - 0.389) < 0.02
        assert abs(x).max() < 3 * 0.4 ** 0.5
        assert 0.66 < (abs(x) < 0.4 ** 0.5).mean() < 0.71
    assert (one == again).all() and abs(np.corrcoef(one, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03


def test_mazes_in_which_the_goal_moves_and_a_wall_opens(browser, pages):
    """By clicks and by keys: some rooms wake, and the arrows lead to the new goal."""
    counts = """[pass.ids.filter((_, t) => computed(t)).length,
        pass.ids.filter((_, t) => seen(t).is_wrong).length]"""
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
        const at_work = () => pass.ids.filter((_, t) => seen(t).is_awake).length;
        take(R.start);
        step();
        const {goal} = maze;
        move_goal(goal ? 0 : 1);
        const after_one = at_work();
        move_goal(goal);
        const counts = [after_one, at_work()];
        const paused = shown;
        await finish();
        return [counts, paused, pass.ids.filter((_, t) => seen(t).is_wrong).length];
    }''')
    assert min(at_work) > 90 and (shown, n_wrong) == (1, 0)


def test_the_page_knows_the_right_answers(browser, pages):
    known = 'pass.labels.map(({right, depth}) => [right, depth])'
    browser.open(pages['calc'])
    problems = tasks.Problems('calc:reset=0.01')
    for seed in 4, 5:                                   # the first problem, and a new one
        x, y, depth = (row[0].tolist() for row in problems.make(np.random.default_rng(seed), 1, 48))
        assert browser.value('drawn.then(() => pass.ids)') == x
        assert browser.value(known) == [[[right], n] for right, n in zip(y, depth)]
        browser.value("$('new').click()")
    browser.value("take('=3 +4')")
    assert browser.value(known) == [[[], -1], [[], -1]]

    browser.open(pages['maze'], width=360)
    assert browser.value(FITS)
    problems = tasks.Problems('maze')
    for seed in range(3):
        x, y, depth = (row[0] for row in problems.make(np.random.default_rng(seed), 1, 36))
        browser.value(f'(take({json.dumps(letters_of(x))}), 1)')
        assert browser.value(known) == [[[right - 32] if right != NOT_ASKED else [], n]
                                        for right, n in zip(y.tolist(), depth.tolist())]


def test_the_page_finds_the_solutions_of_boards(browser, pages):
    browser.open(pages['sudoku'])
    for T in 64, 216, 729, 4096:
        x, y, _ = (row[0] for row in tasks.Problems('sudoku').make(np.random.default_rng(1), 1, T))
        n = side_of(T)
        found = browser.value(f"""{{
            take('{board_of(x)}');
            const open = board.clues.indexOf(0);
            const {{right}} = pass.labels[open];
            const wrong = board.clues.with(open, (right[0] + 1) % board.n + 1);
            return [pass.labels.map(({{right}}) => right), $('notice').textContent,
                solutions_of({{n: board.n, clues: wrong}}).length,
                solutions_of({{n: board.n, clues: Array(board.n ** 2).fill(0)}}).length];
        }}""")
        labels = [np.flatnonzero(cell == YES).tolist() for cell in y.reshape(n * n, n)]
        assert found == [labels, '', 0, 2]


# what a reader does -------------------------------------------------------------------------------

def test_a_problem_is_played_and_typed(browser, pages):
    browser.open(pages['calc'], motion='no-preference')
    assert browser.value('[player !== null, is_done()]') == [True, False]   # it plays by itself
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
    found = browser.value(RESULT)
    assert found['answers'] == y.tolist() and depth.max() > 100

    # more words leave the states before them as they were; an unknown one is named
    browser.value("$('text').setSelectionRange(1e6, 1e6)")
    browser.type(' foo +1 *2 +0')
    longer = browser.value(RESULT)
    assert longer['answers'][192:] == [(y[-1] + 1) % 5, (y[-1] + 1) * 2 % 5]
    assert longer['evals'][:192] == found['evals']
    assert 'foo, +0' in browser.value("$('notice').textContent")

    # a new problem: stopped for good, many are wrong; the address says so
    address = browser.value("""{
        $('new').click();
        $('wake').value = '0';
        $('wake').dispatchEvent(new Event('input'));
        $('play').click();              // pause, and to the end
        await finish();
        await pause(500);
        return location.hash;
    }""")
    wrong = browser.value("document.querySelectorAll('#tiles .wrong').length")
    assert wrong > 10 and 'wake=0' in address
    text = browser.value('text')
    browser.open(pages['calc'], width=360, address=address)
    browser.value('drawn')
    assert browser.value(FITS)
    assert browser.value("document.querySelectorAll('#tiles .wrong').length") == wrong
    assert browser.value('text') == text

    # other noise, and no answer changes
    browser.open(pages['calc'])
    before, after = (browser.value(f"""{{
        {click}
        await drawn;
        return {RESULT};
    }}""") for click in ('', "$('over').click();"))
    assert before['answers'] == after['answers'] and before['states'] != after['states']

    # keys choose a tile
    browser.value("$('tiles').children[chosen].focus()")
    browser.press('Home')
    browser.press('ArrowRight')
    assert browser.value('[chosen, [...$("tiles").children].indexOf(document.activeElement)]') \
        == [1, 1]
    browser.open(pages['calc'], address='#rule=x&tau=-1&wake=7&text=' + quote_plus('=1 +3'))
    browser.value('drawn')
    assert browser.value("[get('rule'), get('wake'), seen(1).best]") == ['accel', '1', 4]


def test_boards_are_typed_and_clues_change(browser, pages):
    browser.open(pages['sudoku'], width=390)
    state = "[text, $('notice').textContent, n_steps()]"
    first, notice, n_steps = browser.value(f'drawn.then(() => {state})')
    assert notice == '' and n_steps > 1 and browser.value(FITS)

    def typed(board):
        browser.value("($('text').focus(), $('text').select())")
        browser.type(board)
        return browser.value(state)

    # what is no board is said, and the board stays; then a clue twice in a row, a column, a box
    for board in ('12', '5' + 15 * '.', '1..1' + 12 * '.', '1...1' + 11 * '.', '1....1' + 10 * '.'):
        found, notice, steps = typed(board)
        assert (found, steps) == (first, n_steps) and notice

    # in lines and with blanks; it has two solutions, or none
    for board, words in (('12.. 34..\n0000\n....', 'several solutions'),
                         ('123.\n...4\n....\n....', 'no solution')):
        assert words in typed(board)[1]
        assert browser.value("[board.n, pass.labels.some(({right}) => right.length)]") == [4, False]

    # a clue by a key wakes some tokens; one by a button breaks the rules; and none
    browser.value("(take(R.start), $('text').blur(), finish())")
    clues = browser.value('board.clues')
    cell = clues.index(0)
    right = browser.value(f'pass.labels[{cell}].right[0] + 1')
    browser.value(f'(canvas.focus(), chosen = {cell})')
    browser.press(str(right))
    assert browser.value('board.clues') == clues[:cell] + [right] + clues[cell + 1:]
    assert browser.value("[$('text').value === text, $('notice').textContent]") == [True, '']
    assert 0 < browser.value('pass.ids.filter((_, t) => computed(t)).length')
    before = browser.value('text')
    given = next(i for i in range(6) if clues[i])
    browser.value(f'(chosen = {next(i for i in range(6) if not clues[i])}, 1)')
    browser.value(f"$('pad').children[{clues[given] - 1}].click()")
    assert browser.value("[text, $('notice').textContent !== '']") == [before, True]
    browser.value(f'(chosen = {cell}, 1)')
    browser.press('Backspace')
    assert browser.value('board.clues') == clues


# the file -----------------------------------------------------------------------------------------

def test_the_page_needs_no_network_and_no_text_is_code(pages):
    text = pages['calc'].read_text(encoding='utf-8')
    nasty = pages['calc'].with_name('nasty.html')
    filled(dict(kind='strip', start=NASTY), nasty, NASTY)
    assert record_of(nasty)['start'] == NASTY
    for words in text, nasty.read_text(encoding='utf-8'):
        assert words.count('<script') == 5 and words.count('</script>') == 5
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\b(?:src|href)="([^"]*)', text))
    results = os.path.relpath(f'{ROOT}/results/depth.md', pages['calc'].parent)
    assert addresses == {'data:,', 'https://arxiv.org/abs/2509.23314', results}


def test_the_first_problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def record(*flags):
        finished(f'--out_dir={ROOT}/pretrained/calc', '--path=own.html', *flags,
                 script='page/__main__.py')
        return record_of(tmp_path / 'own.html')
    x, y, depth = tasks.Problems('calc:reset=0.01').make(np.random.default_rng(1), 1, 100)
    found = record('--dataset=calc:reset=0.01', '--length=100', '--seed=1', '--n_loop=9', '--tau=2')
    text = tasks.Problems('calc').encoding.decode(x[0])
    assert found['start'] == text == found['problems']['calc:reset=0.01, 100 words'][0]
    assert found['labels'][text] == dict(right=y[0].tolist(), depth=depth[0].tolist())
    assert (found['loops'], found['rules']['accel']['tau']) == (9, 2)
    found = record('--start==3 +4 *2')
    assert (found['start'], found['labels']['=3 +4 *2']['right']) == ('=3 +4 *2', [3, 2, 4])


@pytest.mark.parametrize('name, flag', [
    ('text', ''), ('calc', '--n_loop=0'), ('calc', '--length=513'), ('calc', '--tau=0'),
    ('calc', '--dataset=maze'), ('calc', '--start==7'), ('maze', '--length=80')])
def test_bad_input(tmp_path, monkeypatch, name, flag):
    monkeypatch.chdir(tmp_path)
    refused(f'--out_dir={ROOT}/pretrained/{name}', *flag.split(), script='page/__main__.py')
    assert not os.path.exists('out')


def test_what_the_page_cannot_run():
    class Mine(GPT):
        pass
    shape = dict(block_size=8, vocab_size=9, n_layer=2, n_embd=8, n_head=1, groups=[[0]])
    model = GPT(GPTConfig(**shape))
    page.as_json(model)
    for cls, change in ((Mine, {}), (GPT, dict(injection='add')), (GPT, dict(x0='e')),
                        (GPT, dict(n_embd=208)), (GPT, dict(groups=[[0], [1]])),
                        (GPT, dict(groups=[]))):
        with pytest.raises(ValueError):
            page.as_json(cls(GPTConfig(**shape | change)))
    model.wte.weight.data[3, 3] = 1e9                   # more than float16 can hold
    with pytest.raises(ValueError, match='float16'):
        page.as_json(model)
