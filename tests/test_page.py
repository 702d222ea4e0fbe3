"""The pages of page/ in a browser: their model is that of model.py, and they do what they offer."""
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, finished, refused

import page
import tasks
from cache import Span
from common.checkpoint import load_checkpoint
from exits import make_exit
from loops import Plan
from model import GPT
from page.__main__ import as_text
from pretrained import make
from sample import SKIP
from zoo.sudoku import YES, side_of

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('chrome')
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason='no Chromium: apt-get install chromium')
NASTY = '<script>alert(1)</script>&amp; "q" \'s\'\t\n\x07\x7f{{RECORD}} \u05d0\u05d1 $&'

# What a question can use besides the page itself: a key, a control that is set, words that are
# typed, and what is seen at the end.
HELPERS = """
const press = (node, key, shiftKey) => node.onkeydown({key, shiftKey, preventDefault() {}});
function put_in(id, value) {
  $(id).value = value;
  return $(id).oninput();
}
async function type(words) {
  await put_in('text', words);
  await drawn;
}
const seen_at_end = () => ({
  evals: pass.ids.map((_, t) => computed(t)),
  states: pass.ids.map((_, t) => [...row(pass.state.X, t)]),
  answers: pass.labels.map((_, place) => seen(place).best),
  n_wrong: pass.labels.filter((_, place) => seen(place).is_wrong).length});
"""


def ask(path, question, width=1200, address='', moves=False):
    """
    What the body of an async function in JavaScript returns on a page that is opened anew. It
    begins after the first pass, or (moves) while this is played, for a reader who likes that. The
    time of the browser is virtual: nobody waits for a play.
    """
    question = f"""<script>(async () => {{
        {HELPERS}
        {'' if moves else 'await drawn;'}
        {question}
    }})().then(JSON.stringify).then(answer => document.body.append(make('pre', {{}}, answer)))
    </script></body>"""
    asking = path.with_name('asking.html')
    asking.write_text(path.read_text(encoding='utf-8').replace('</body>', question), 'utf-8')
    command = [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage',
               f'--user-data-dir={path.parent}/profile', '--kiosk',
               f'--screen-info={{{width}x900}}', '--virtual-time-budget=600000', '--dump-dom']
    if not moves:
        command.append('--force-prefers-reduced-motion')
    done = subprocess.run([*command, f'file://{asking}{address}'], capture_output=True,
                          encoding='utf-8', timeout=300)
    failed = re.search('<p id="failed".*', done.stdout)[0]
    assert 'hidden' in failed, failed
    return json.loads(html.unescape(re.search('<pre>(.*)</pre>', done.stdout, re.S)[1]))


def make_page(path, name, *flags):
    finished(f'--out_dir={ROOT}/pretrained/{name}', f'--path={path}', *flags,
             script='page/__main__.py')
    return path


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """{kind: the page of a model that we ship}, with small mazes and boards."""
    folder = tmp_path_factory.mktemp('pages')
    made = dict(strip=['calc', '--dataset=calc:reset=0.01', '--tau=1'],
                maze=['maze', '--length=100'], sudoku=['sudoku', '--length=64', '--tau=0.1'])
    return {kind: make_page(folder / f'{kind}.html', *how) for kind, how in made.items()}


def record_of(path):
    text = path.read_text(encoding='utf-8')
    return json.loads(text.split('id="record">')[1].split('</script>')[0])


def filled(path, record, words=''):
    """A page with this record."""
    words = dict.fromkeys(('TITLE', 'ABOUT', 'RESULTS', 'MODEL'), words)
    path.write_text(page.fill(record, **words), encoding='utf-8')
    return path


def problem(kind, dataset, T, seed=0):
    """-> x, y, depth (T,), and the problem as the page reads it"""
    problems = tasks.Problems(dataset)
    x, y, depth = (row[0] for row in problems.make(np.random.default_rng(seed), 1, T))
    return x, y, depth, as_text(problems, kind, x)


@pytest.mark.parametrize('name', make.PAGES)
def test_the_pages_that_ship_are_those_of_today(name):
    """Their model, and all but problems and words. If not: python -m pretrained.make."""
    path = Path(ROOT, make.PAGES[name][0].removeprefix('--path='))
    record = record_of(path)
    assert record['model'] == page.as_json(GPT.load(f'pretrained/{name}'))
    words = dict.fromkeys(('TITLE', 'ABOUT', 'RESULTS', 'MODEL'), '\0')
    shipped = path.read_text(encoding='utf-8')
    assert [part for part in page.fill(record, **words).split('\0') if part not in shipped] == []


# the same numbers as in Python --------------------------------------------------------------------

@in_a_browser
@pytest.mark.parametrize('kind, name, T, n_loop', [
    ('strip', 'calc', 40, 60), ('maze', 'maze', 36, 70), ('sudoku', 'sudoku', 64, 40),
    ('strip', 'small', 16, 60)])
@torch.no_grad()
def test_the_page_computes_what_the_model_computes(pages, tiny, kind, name, T, n_loop):
    """Fixed loops and every rule, for good and with sleep: loop steps, last states and logits."""
    path = pages[kind]
    if name == 'small':         # what no model that ships has: learned positions, several layers
        model = tiny(vocab_size=13, groups=[[2, 3]], damping=0.2).half().float()
        path = filled(path.with_name('small.html'),
                      record_of(path) | dict(model=page.as_json(model)))
    else:
        model, _ = load_checkpoint(f'{ROOT}/pretrained/{name}', length=T)
    x, _, _, text = problem(kind, dict(small='calc').get(name, name), T)
    rules = [make_exit('norm', 0)]                      # no signal lies below 0
    for rule, thresholds in dict(norm=(.3, 1), norm_rel=(.03, .1), accel=(.3, 1)).items():
        rules += [make_exit(rule, tau, wake=tau == thresholds[1]) for tau in thresholds]
    plans = [dict(rule=dict(signal=rule.name, tau=rule.tau, hits=rule.hits, keep=rule.keep),
                  loops=n_loop, wake=rule.wake) for rule in rules]
    first, ids, found = ask(path, f"""
        take({json.dumps(text)});
        const {{ids, labels}} = pass;
        const runs = {json.dumps(plans)}.map(plan => {{
            const state = first_state(ids, 3);
            pass = {{ids, labels, plan, state, steps: [{{awake: []}}]}};
            while (!is_done()) advance();
            shown = n_steps();
            return {{...seen_at_end(), logits: [...state.logits]}};
        }});
        return [[...noise(ids.length, 3)], ids, runs];""")
    assert ids == x.tolist()
    for rule, one in zip(rules, found, strict=True):
        warm = [torch.tensor(first).view(1, T, -1)]
        plan = Plan([n_loop], rule, span=Span(0, T), warm=warm)
        hidden, (group,) = model.hidden(torch.from_numpy(x)[None], plan)
        answers = model.lm_head(hidden)[0][:, record_of(path)['first_answer']:]
        assert one['evals'] == group['evals'][0].tolist(), rule
        near = dict(atol=1e-4, rtol=0, err_msg=str(rule))
        np.testing.assert_allclose(np.reshape(one['logits'], answers.shape), answers, **near)
        np.testing.assert_allclose(one['states'], group['x'][0], **near)


@in_a_browser
@pytest.mark.parametrize('kind, dataset, lengths', [
    ('strip', 'calc:reset=0.01', [48]), ('maze', 'maze', [36, 81]),
    ('sudoku', 'sudoku', [64, 216, 729, 4096])])
def test_the_page_knows_the_right_answers(pages, kind, dataset, lengths):
    """
    It was told those of its own problems; ways in mazes and solutions of boards it searches. And a
    narrow window shows the picture without scrolling.
    """
    problems = [problem(kind, dataset, T, seed=4) for T in lengths]
    fits, found = ask(pages[kind], f"""
        const fits = document.documentElement.scrollWidth <= innerWidth &&
            scrollY + canvas.getBoundingClientRect().bottom <= innerHeight;
        return [fits, {json.dumps([text for *_, text in problems])}.map(text => {{
            take(text);
            return [pass.ids, pass.labels.map(({{right}}) => right),
                pass.labels.map(({{depth}}) => depth)];
        }})];""", width=360)
    assert fits
    for (x, y, depth, _), one in zip(problems, found, strict=True):
        if kind == 'sudoku':
            n = side_of(len(x))
            right = [np.flatnonzero(cell == YES).tolist() for cell in y.reshape(n * n, n)]
            depth = np.full(n * n, None)
        else:
            first = record_of(pages[kind])['first_answer']
            right = [[answer - first] if answer != tasks.NOT_ASKED else [] for answer in y]
        assert one == [x.tolist(), right, depth.tolist()]


@in_a_browser
def test_the_noise_of_the_page(pages):
    """Normal, with a variance of 2/5, and cut; another seed gives other noise."""
    found = ask(pages['strip'], 'return [1, 1, 2].map(seed => [...noise(300, seed)])')
    one, again, other = np.array(found)
    assert abs(one.mean()) < 0.02 and abs(one.var() - 0.389) < 0.02
    assert abs(one).max() < 3 * 0.4 ** 0.5
    assert 0.66 < (abs(one) < 0.4 ** 0.5).mean() < 0.71
    assert (one == again).all() and abs(np.corrcoef(one, other)[0, 1]) < 0.03
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03


@in_a_browser
def test_starts_after_the_first_skip_steps(pages):
    """A candidate that skips a step keeps its state and stays awake; no other feels it."""
    chances, n_wrong, before, plain, skipping, awake = ask(pages['sudoku'], """
        const chances = [pass.plan.skip];
        $('over').click();
        await drawn;
        const {ids, plan} = pass;
        chances.push(plan.skip);
        const is_still = {...plan, rule: {...plan.rule, tau: 1e9, hits: 1}};
        const states = [1, 2].map(() => first_state(ids, 2));
        states.forEach((state, n) => loop_step(state, {...is_still, skip: n * plan.skip}));
        return [chances, seen_at_end().n_wrong, [...noise(ids.length, 2)],
            ...states.map(({X}) => [...X]), [...states[1].awake]];""")
    assert chances == [0, SKIP] and n_wrong == 0
    awake = np.array(awake, dtype=bool)
    assert 4 < awake.sum() < 24                             # of 64
    before, plain, skipping = np.reshape((before, plain, skipping), (3, len(awake), -1))
    assert (skipping == np.where(awake[:, None], before, plain)).all()


# what a reader does -------------------------------------------------------------------------------

@in_a_browser
def test_a_problem_is_played(pages):
    """By itself; back to a loop step, on by one, to the end, and from the start again."""
    assert ask(pages['strip'], """
        const begins = player !== null && !is_done();
        await drawn;
        const ends = player === null && at_end();
        put_in('step', 3);
        const at_three = [shown, document.querySelectorAll('#tiles .awake').length > 0];
        $('next').click();
        const next = shown;
        $('play').click();
        await drawn;
        const ends_again = at_end();
        $('play').click();
        return [begins, ends, ...at_three, next, ends_again, shown];
        """, moves=True) == [True, True, 3, True, 4, True, 1]


@in_a_browser
def test_a_problem_is_typed_and_shared(pages):
    # a deep problem: all are right; more words leave the states before them as they were, and an
    # unknown one is named
    _, y, depth, text = problem('strip', 'calc:reset=0.01', 192, seed=2)
    typed, longer, notice = ask(pages['strip'], f"""
        await type({json.dumps(text)});
        const typed = seen_at_end();
        await type(text + ' foo +1 *2 +0');
        return [typed, seen_at_end(), $('notice').textContent];""")
    assert typed['answers'] == y.tolist() and depth.max() > 100
    assert longer['answers'][192:] == [(y[-1] + 1) % 5, (y[-1] + 1) * 2 % 5]
    assert longer['evals'][:192] == typed['evals'] and 'foo, +0' in notice

    # other noise, and no answer changes; the next problem, with tokens that stop for good: many are
    # wrong; and the address shows it once more
    before, after, address, *stopped = ask(pages['strip'], """
        const before = seen_at_end();
        $('over').click();
        await drawn;
        const after = seen_at_end();
        $('new').click();
        put_in('wake', '0');
        await drawn;
        await pause(500);
        return [before, after, location.hash, text, seen_at_end().n_wrong];""")
    assert before['answers'] == after['answers'] and before['states'] != after['states']
    assert stopped[0] == record_of(pages['strip'])['problems']['calc:reset=0.01, 48 tokens'][1]
    assert stopped[1] > 10
    assert ask(pages['strip'], 'return [text, seen_at_end().n_wrong]', address=address) == stopped

    # keys choose a tile; of an address only what fits is taken
    assert ask(pages['strip'], """
        press($('tiles'), 'Home');
        press($('tiles'), 'ArrowRight');
        const is_chosen = document.activeElement === $('tiles').children[1];
        return [chosen, is_chosen, get('rule'), get('wake'), seen(1).best];
        """, address='#rule=x&tau=-1&wake=7&text=%3D1+%2B3+*2') == [1, True, 'accel', '1', 4]


@in_a_browser
def test_mazes_in_which_the_goal_moves_and_a_wall_opens(pages):
    """By clicks and by keys: some rooms wake, and the arrows lead to the new goal."""
    words, goal, after_goal, after_wall, by_keys, paused = ask(pages['maze'], """
        const words = [...pass.ids];
        const goal = words.findIndex((word, room) => room > 50 && !(word & 2) && word < 16);
        const {left, top} = canvas.getBoundingClientRect();
        async function click(share) {           // of the room's width
            canvas.dispatchEvent(new MouseEvent('click', {
                clientX: left + size * (goal % 10 + share),
                clientY: top + size * (Math.floor(goal / 10) + .5)}));
            await drawn;
            const {evals, n_wrong} = seen_at_end();
            return [pass.ids, evals.filter(n => n).length, n_wrong];
        }
        const after_clicks = [await click(.5), await click(.95)];

        canvas.focus();
        chosen = 75;
        for (const key of ['ArrowUp', 'ArrowLeft', 'Enter']) press(canvas, key);
        const doors = maze.doors[chosen];
        press(canvas, 'ArrowDown', true);
        const by_keys = [chosen, maze.goal, maze.doors[chosen] ^ doors];

        // a goal that moves and comes back while the page is paused: who was at work works on
        await drawn;
        const at_work = () => pass.ids.filter((_, t) => seen(t).is_awake).length;
        take(R.start);
        step();
        const old = maze.goal;
        move_goal(old ? 0 : 1);
        const after_one = at_work();
        move_goal(old);
        const paused = [after_one > 90, at_work() > 90, shown];
        await play(true);
        return [words, goal, ...after_clicks, by_keys, [...paused, seen_at_end().n_wrong]];""")
    words = [word % 16 + 16 * (room == goal) for room, word in enumerate(words)]
    assert after_goal[0] == words and 0 < after_goal[1] < 100 and after_goal[2] == 0
    words[goal] += 2                            # a door to the east
    words[goal + 1] += 8
    assert after_wall[0] == words and 0 < after_wall[1] < 100
    assert by_keys == [64, 64, 4] and paused == [True, True, 1, 0]


@in_a_browser
def test_boards_are_typed_and_clues_change(pages):
    # no board: a wrong length; a clue twice in a row, a column, a box; then two solutions, and none
    wrong = ['12', '5' + 15 * '.', '1..1' + 12 * '.', '1...1' + 11 * '.', '1....1' + 10 * '.']
    odd = ['12.. 34..\n0000\n....', '123.\n...4\n....\n....']
    found = ask(pages['sudoku'], f"""
        const found = [];
        for (const board of {json.dumps(wrong + odd)}) {{
            await type(board);
            found.push([text === R.start, $('why').textContent !== '' || n_solutions !== 1,
                pass.labels.some(({{right}}) => right.length)]);
        }}
        return found;""")
    assert found == [[True, True, True]] * 5 + [[False, True, False]] * 2

    # the right clue by a key wakes some; one by a button breaks the rules; the first goes again
    assert ask(pages['sudoku'], """
        const clues = board.clues;
        const cell = chosen = clues.indexOf(0);
        const right = pass.labels[cell].right[0] + 1;
        press(canvas, `${right}`);
        await drawn;
        const is_set = `${board.clues}` === `${clues.with(cell, right)}`;
        const n_woken = seen_at_end().evals.filter(n => n).length;
        chosen = board.clues.indexOf(0);
        const rival = board.clues.slice(0, board.n).find(clue => clue);
        $('pad').children[rival - 1].click();
        const is_refused = board.clues[chosen] === 0 && $('notice').textContent !== standing;
        choose(Math.floor(cell / board.n), cell % board.n);
        const is_over = $('notice').textContent === standing && chosen === cell;
        press(canvas, 'Backspace');
        const is_back = `${board.clues}` === `${clues}`;
        // a run goes on with the board that has changed, and a digit that is there changes nothing
        const goes_on = player !== null;
        await drawn;
        const n = n_steps();
        press(canvas, 'Backspace');
        const stays = at_end() && n_steps() === n;
        // an empty board waits for its clues, and the full one comes back
        const all = $('pad').lastChild.previousSibling;
        all.click();
        $('pad').lastChild.click();
        const is_undone = `${board.clues}` === `${clues}`;
        all.click();
        press(canvas, '2');
        const is_alone = text === '2' + '.'.repeat(15) && shown === 0;
        const told = {is_set, n_woken, is_refused, is_over, is_back, goes_on, stays, is_undone,
            is_alone};
        return Object.keys(told).filter(name => !told[name]);
        """) == []

    # without one solution, digits are wrong that stand twice in a unit: 3 in a row, 2 beside a clue
    assert ask(pages['sudoku'], """
        await type('2' + '.'.repeat(15));
        const p = new Float32Array(128).map((_, i) => i % 2 ? -9 : 9);          // no, 64 times
        for (const [cell, digit] of [[1, 3], [3, 3], [4, 2], [14, 2], [15, 4]])
            p.set([-9, 9], 2 * (4 * cell + digit - 1));
        const view = pass.labels.map((_, cell) => seen(cell, {logits: p, awake: []}));
        return [[...view.keys()].filter(cell => view[cell].is_wrong), ANSWERS.score(view)];
        """) == [[1, 3, 4], '5 of 15 open cells decided, 3 digits against the rules (red)']


# the file -----------------------------------------------------------------------------------------

def test_the_page_needs_no_network_and_no_text_is_code(pages):
    text = pages['strip'].read_text(encoding='utf-8')
    nasty = filled(pages['strip'].with_name('nasty.html'), dict(kind='strip', start=NASTY), NASTY)
    assert record_of(nasty)['start'] == NASTY
    for words in text, nasty.read_text(encoding='utf-8'):
        assert words.count('<script') == 5 and words.count('</script>') == 5
    assert "default-src 'none'" in text
    addresses = set(re.findall(r'\b(?:src|href)="([^"]*)', text))
    results = os.path.relpath(f'{ROOT}/results/depth.md', pages['strip'].parent)
    assert addresses == {'data:,', 'https://arxiv.org/abs/2509.23314', results}


def test_the_first_problem(tmp_path):
    x, y, depth, text = problem('strip', 'calc:reset=0.01', 100, seed=1)
    path = make_page(tmp_path / 'own.html', 'calc', '--dataset=calc:reset=0.01', '--length=100',
                     '--seed=1', '--tau=2')
    found = record_of(path)
    assert found['start'] == text == found['problems']['calc:reset=0.01, 100 tokens'][0]
    assert found['labels'][text] == dict(right=y.tolist(), depth=depth.tolist())
    assert found['rules']['accel']['tau'] == 2


@pytest.mark.parametrize('name, flag', [
    ('text', ''), ('calc', '--length=513'), ('calc', '--tau=0'), ('calc', '--dataset=maze'),
    ('maze', '--length=80')])
def test_bad_input(tmp_path, monkeypatch, name, flag):
    monkeypatch.chdir(tmp_path)
    refused(f'--out_dir={ROOT}/pretrained/{name}', *flag.split(), script='page/__main__.py')
    assert not os.path.exists('out')


def test_what_the_page_cannot_run(tiny):
    class Mine(GPT):
        pass
    page.as_json(tiny(groups=[[1]]))
    for change in (dict(kind=Mine), dict(injection='add'), dict(x0='e'), dict(groups=[]),
                   dict(groups=[[0], [1]])):
        with pytest.raises(ValueError):
            page.as_json(tiny(**dict(groups=[[1]]) | change))
