"""Tasks against their oracles and by hand; the same problems from the same seed; bad input."""
import os

import numpy as np
import pytest
import torch
from conftest import ROOT, run

import tasks

EXAMPLES = ['calc', 'calc:p=2,reset=1.0', 'calc:dense=False', 'calc:p=11,reset=0.04',
            'hop', 'hop:letters=2,hops=0', 'hop:letters=30,hops=7', 'hop:dense=False',
            'addition', 'addition:numbers=2,digits=1', 'group', 'group:name=S5',
            'group:name=Z2,reset=0', 'mano', 'mano:p=2,operators=7',
            'igsm', 'igsm:p=11,variables=5,steps=1']


def made(text, rows=200, T=None, seed=0):
    name, _ = tasks.parse(text)
    return tasks.make(text, np.random.default_rng(seed), rows, T or tasks.LENGTHS[name])


@pytest.mark.parametrize('text', EXAMPLES)
def test_labels_are_the_oracles(text):
    x, y, depth = made(text)
    assert x.shape == y.shape == depth.shape
    assert x.min() >= 0 and x.max() < tasks.Words(text).n_vocab
    assert tasks.check_rows(text, x, y) == 0
    # something is asked in every row, and only there is a depth
    assert (y != tasks.NOT_ASKED).any(axis=1).all()
    assert (depth[y == tasks.NOT_ASKED] == 0).all()
    # a wrong label is found
    row, place = np.argwhere(y != tasks.NOT_ASKED)[-1]
    y[row, place] = (y[row, place] + 1) % tasks.Words(text).n_vocab
    assert tasks.check_rows(text, x, y) == 1


@pytest.mark.parametrize('text', EXAMPLES)
def test_a_seed_is_a_problem_set(text):
    assert all(map(np.array_equal, made(text), made(text)))
    assert not np.array_equal(made(text)[0], made(text, seed=1)[0])


def test_calc_by_hand():
    """Depth is the distance from the last reset."""
    x, y, depth = made('calc', rows=50)
    words = tasks.Words('calc').words
    for tokens, depths in zip(x, depth):
        since = 0
        for token, d in zip(tokens, depths):
            since = 0 if words[token][0] == '=' else since + 1
            assert d == since
    share = np.mean([words[token][0] == '=' for token in made('calc', rows=2000)[0][:, 1:].ravel()])
    assert abs(share - 0.2) < 0.01


def test_hop_by_hand():
    """b a c b a: from the last a back to the a before it, one on to c; c has none before it."""
    words = list('baCba'.lower())
    assert tasks.hop_oracle(['0', *words], 3, 2, True) == [None, 'b', 'a', 'c', 'b', 'a']
    assert tasks.hop_oracle(['1', *words], 3, 2, True) == [None, '-', '-', '-', 'a', 'c']
    assert tasks.hop_oracle(['2', *words], 3, 2, True) == [None, '-', '-', '-', '-', '-']
    x, y, depth = made('hop', rows=300)
    letters = x[:, 1:]
    assert (letters[:, 1:] != letters[:, :-1]).all()            # no two alike in a row
    p = x[:, 0] - 5
    assert (depth <= p[:, None]).all()
    whole = y[:, 1:] != 4                                       # not `none`: all hops were made
    assert (depth[:, 1:][whole] == np.tile(p[:, None], (1, 39))[whole]).all()


def test_addition_by_hand():
    """999 + 001: a carry runs through all columns, so the last digit waits for three of them."""
    x, y, depth = made('addition:numbers=2,digits=1', rows=500, T=8)
    words = tasks.Words('addition').words
    for tokens, labels, depths in zip(x, y, depth):
        a, b = (int(words[tokens[place]]) for place in (2, 4))
        carried = int(a + b >= 10)
        assert [*labels[-2:]] == [(a + b) // 10, (a + b) % 10]
        assert [*depths[-2:]] == [1 + carried, 1]


def test_group_is_a_group():
    """S5 does not commute, and Z2 is the parity."""
    x, y, _ = made('group:name=Z2,reset=0', rows=100)
    ones = np.cumsum(x % 2, axis=1) % 2
    assert np.array_equal(y, ones)
    words = tasks.Words('group:name=S5').words
    assert len(set(words)) == 240


def test_igsm_depth_is_the_longest_way():
    x, y, depth = made('igsm', rows=200)
    words = tasks.Words('igsm').words
    for tokens, labels, depths in zip(x, y, depth):
        equations, asked = ''.join(words[t] for t in tokens).strip().split('?')
        right = dict(equation.split('=') for equation in equations.rstrip(';').split(';'))

        def way(name):
            return 1 + max((way(c) for c in right[name] if c.isalpha()), default=-1)
        assert depths[-1] == way(asked)


def test_held_out_problems_are_the_same_and_their_own():
    a, b = (tasks.Problems('calc', held_out=64) for _ in range(2))
    x, y = a.held_out(range(64), 24)
    assert torch.equal(x, b.held_out(range(64), 24)[0]) and a.n_held_out(24) == 64
    trained = a.batch(np.random.default_rng(0), 2000, 24)[0]
    rows = {tuple(row) for row in trained.tolist()}
    assert not rows & {tuple(row) for row in x.tolist()}
    assert torch.equal(a.held_out([3, 5], 24)[1], y[[3, 5]])


def test_a_process_takes_its_rows():
    problems = tasks.Problems('hop')
    whole, _ = problems.batch(np.random.default_rng(1), 6, 40)
    part, _ = problems.batch(np.random.default_rng(1), 6, 40, slice(2, 4))
    assert torch.equal(part, whole[2:4])


@pytest.mark.parametrize('text, words', [
    ('clac', "unknown task 'clac': did you mean 'calc'?"),
    ('calc:rest=0.1', "unknown knob 'rest' of the task calc: did you mean 'reset'?"),
    ('calc:p=two', "p of the task calc must be int, not 'two'"),
    ('calc:p=1', 'p must be at least 2, not 1'),
    ('calc:reset=0', 'reset must lie in (0, 1], not 0.0'),
    ('calc:reset=1.5', 'reset must lie in (0, 1]'),
    ('hop:letters=1', 'letters must be at least 2'),
    ('hop:hops=-1', 'hops must be at least 0'),
    ('hop:dense=no', "dense of the task hop must be bool, not 'no'"),
    ('group:name=S4', "unknown group 'S4': choose one of S3, S5, Z2"),
    ('mano:operators=0', 'operators must be at least 1'),
    ('igsm:steps=9', 'variables more than steps'),
    ('addition:numbers=1', 'numbers must be at least 2')])
def test_bad_knobs_are_one_line(text, words):
    done = run(text, script='tasks.py')
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert words in done.stderr


@pytest.mark.parametrize('text, T', [('calc', 0), ('hop', 1), ('addition', 19), ('mano', 13),
                                     ('igsm', 35)])
def test_too_few_tokens(text, T):
    with pytest.raises(ValueError, match=f'T of at least {T + 1}, not {T}'):
        tasks.Problems(text).check(T)
    tasks.Problems(text).check(T + 1)


@pytest.mark.parametrize('name', [f'{task}{end}' for task in tasks.TASKS for end in ('', '_gpu')
                                  if (task, end) not in (('calc', '_gpu'), ('hop', '_gpu'))])
def test_a_config_fits_its_task(name):
    knobs = {}
    with open(os.path.join(ROOT, 'config', f'{name}.py')) as f:
        exec(f.read(), knobs)
    tasks.Problems(knobs['dataset']).check(knobs['block_size'])
    if not name.endswith('_gpu'):
        assert knobs['block_size'] == tasks.LENGTHS[name]


def test_the_command_shows_and_checks():
    done = run('calc:p=3', '--rows=50', script='tasks.py')
    assert done.returncode == 0, done.stderr
    assert '50 problems, 0 of them with another answer than the oracle' in done.stdout
    assert done.stdout.count('problem ') == 3 and 'depth: 0 ' in done.stdout
