"""Tasks against their oracles and by hand, problems that never change, a new task, bad input."""
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import digest, finished, refused

import data
import tasks
from common.evaluation import spread
from results.hop_and_group import Hop


def made(text, rows=200, T=24):
    return tasks.Problems(text).make(np.random.default_rng(0), rows, T)


@pytest.mark.parametrize('text', [
    'calc:p=2,reset=1', 'calc:p=11,reset=0.04', 'hop', 'hop:letters=2,hops=0',
    'hop:letters=26,hops=7', 'hop:letters=3,hops=30', 'group:name=S5', 'group:reset=0'])
def test_labels_are_the_oracles(text):
    problems = tasks.Problems(text)
    problems.check_fits(24)
    x, y, depth = made(text)
    assert problems.wrong_rows(x, y) == []
    if text == 'hop':       # the depth is p where the whole chain exists, and at most p elsewhere
        p, whole = np.tile(x[:, :1] - 5, (1, 23)), y[:, 1:] != 4
        assert (depth[:, 1:] <= p).all() and (depth[:, 1:][whole] == p[whole]).all()
    y[7, 23], y[9, 23] = y[7, 23] + 1, tasks.NOT_ASKED
    assert problems.wrong_rows(x, y) == [7, 9]


# recorded: 50 problems of seed 0, those held out, and what a checkpoint stores of the task
@pytest.mark.parametrize('text, T, drawn, held_out, sha256, tokenizer', [
    ('calc', 24, '49d31bf7e80d', 'f34c6ff5e13e', '566481fb9ce7', 'calc:p=5'),
    ('hop', 40, '4b8a1e946c7f', '9807c1ab4f86', '2e63756254f6', 'hop:letters=4,hops=4'),
    ('group', 24, '2220a3966240', '85c357830761', '090d54813219', 'group:name=S3'),
    ('group:name=S5', 24, '967eb3477bd8', 'ed491e832c57', '07c1a9b79fe4', 'group:name=S5')])
def test_problems_never_change(text, T, drawn, held_out, sha256, tokenizer):
    problems = tasks.Problems(text)
    assert digest(made(text, 50, T)) == drawn
    assert digest(problems.all_held_out(T)) == held_out
    assert (problems.sha256[:12], problems.tokenizer) == (sha256, tokenizer)


def test_calc_by_hand():
    """The value so far, and how far back it was set."""
    assert tasks.Calc().oracle('=4 *3 +2 =1 *4'.split()) == ['=4', '=2', '=4', '=1', '=4']
    sets = np.array([[True, False, False, True, False]])
    assert tasks.steps_since(sets).tolist() == [[0, 1, 2, 0, 1]]


def test_hop_and_group_by_hand():
    """b a c b a: from the last a back to the a before it, one on to c; c has none before it."""
    assert Hop().oracle(list('1bacba')) == [None, '-', '-', '-', 'a', 'c']
    assert Hop().oracle(list('2bacba')) == [None, '-', '-', '-', '-', '-']
    problems = tasks.Problems('group')
    _, y = problems.solve('=021 102 =120')
    assert problems.encoding.decode(y[0]) == '021 201 120'
    with pytest.raises(ValueError):
        problems.solve('=021 201 a')


def test_held_out_problems_are_not_trained_on():
    problems = tasks.Problems('calc')
    problems.n_problems = 64
    x, y = problems.held_out(range(64), 24)
    assert torch.equal(problems.held_out([3, 5], 24)[1], y[[3, 5]])
    whole, _ = problems.batch(np.random.default_rng(0), 64, 24)     # the same shape
    assert not set(map(tuple, whole.tolist())) & set(map(tuple, x.tolist()))
    assert spread(problems, 4, 24).tolist() == [0, 21, 42, 63]
    with pytest.raises(ValueError):
        spread(problems, 65, 24)


def test_a_run_can_have_other_problems_of_its_task():
    """Deeper ones, and longer ones, if the model knows their words."""
    checkpoint = dict(config=dict(dataset='calc'), tokenizer='calc:p=5',
                      model_args=dict(vocab_size=13))
    assert data.examples_of(checkpoint).task == tasks.Calc(p=5, reset=0.2)
    deep = data.examples_of(checkpoint, 'calc:reset=0.01')
    # how many there are to draw windows from: fewer of long ones
    assert [deep.n_held_out(T) for T in (24, 512, 8192, 2 ** 21)] == [2048, 2048, 128, 1]
    assert deep.all_held_out(8192)[2].max() > 300
    with pytest.raises(ValueError):
        data.examples_of(checkpoint, 'calc:p=7')


def test_a_problem_can_be_typed():
    problems = tasks.Problems('calc')
    x, y = problems.solve('=2 +3  *4')
    assert x.tolist() == [[2, 7, 12]] and y.tolist() == [[2, 0, 0]]
    assert x.dtype == y.dtype == np.int64 and problems.wrong_rows(x, y) == []
    for text in '=2 /3', '+2 =3', ' ':
        with pytest.raises(ValueError):
            problems.solve(text)


class Echo(tasks.Task):
    """A task as a user writes it, with an oracle; `change` spoils what it makes."""

    def change(self, x, y, depth):
        return x, y, depth

    def __call__(self, rng, rows, T):
        x = rng.integers(3, size=(rows, T))
        return self.change(x, x.copy(), np.zeros((rows, T), dtype=np.int64))

    def words(self):
        return list('abc')

    def oracle(self, words):
        return words


@pytest.fixture
def echo(monkeypatch):
    """echo(**methods): the task `echo` is an Echo with these methods."""
    def enter(**methods):
        monkeypatch.setitem(tasks.TASKS, 'echo', type('Echo', (Echo,), methods))
    enter()
    return enter


@pytest.mark.parametrize('spoilt', [
    dict(change=lambda self, x, y, depth: (x < 2, x < 2, depth)),
    dict(change=lambda self, x, y, depth: (x, y, depth[:, 1:])),
    dict(change=lambda self, x, y, depth: (x, y)),
    dict(change=lambda self, x, y, depth: (x, np.full_like(y, tasks.NOT_ASKED), depth)),
    dict(change=lambda self, x, y, depth: (x, y - 1, depth)),
    dict(change=lambda self, x, y, depth: (x + 1, y, depth)),
    dict(change=lambda self, x, y, depth: (x, y, depth - 1)),
    dict(change=lambda self, x, y, depth: (x, np.where(x > 1, tasks.NOT_ASKED, y), depth + 1)),
    dict(words=lambda self: list('aba')), dict(words=lambda self: ['a', 'b', 'c c']),
    dict(batch=lambda self, rng, rows, T: self(rng, rows, T)),
    dict(oracle=lambda self, words: words[:1]), dict(oracle=lambda self, words: ['z'] * 24)])
def test_a_task_is_checked_against_its_words(echo, spoilt):
    tasks.show('echo')
    echo(**spoilt)
    with pytest.raises(ValueError, match='echo'):
        tasks.show('echo')


def test_the_first_problem_on_which_the_oracle_disagrees_is_shown(echo, capsys):
    echo(change=lambda self, x, y, depth: (
        x, np.where(np.arange(len(x)) == 13, (y.T + 1) % 3, y.T).T, depth))
    with pytest.raises(SystemExit, match='1'):
        tasks.show('echo', rows=20)
    printed = capsys.readouterr().out
    assert 'disagrees with 1\n' in printed and printed.count('!') == 2 * 24


def test_a_task_without_an_oracle(echo, capsys):
    echo(oracle=None)
    tasks.show('echo')
    printed = capsys.readouterr().out
    assert 'not checked' in printed and 'oracle ' not in printed
    x, y = tasks.Problems('echo').solve('a b')
    assert x.tolist() == [[0, 1]] and (y == tasks.NOT_ASKED).all()


def test_a_training_batch_may_have_more_and_shorter_problems(echo):
    """The same in all processes, each of which takes its part."""
    echo(batch=lambda self, rng, rows, T: self(rng, 3 * rows, T - 2)[:2])
    problems = tasks.Problems('echo')
    x, _, _ = problems.make(np.random.default_rng(0), 12, 10)
    parts = [problems.batch(np.random.default_rng(0), 4, 12, mine)
             for mine in (slice(None), slice(0, 2), slice(2, 4))]
    for (tokens, labels), rows in zip(parts, (slice(12), slice(6), slice(6, 12)), strict=True):
        assert tokens.tolist() == labels.tolist() == x[rows].tolist()
    echo(batch=lambda self, rng, rows, T: self(rng, 5, 12)[:2])
    with pytest.raises(ValueError, match='multiple of 4'):
        tasks.Problems('echo').batch(np.random.default_rng(0), 4, 12)


def test_a_problem_is_wrapped(echo, capsys, monkeypatch):
    """Below each token stand the loop steps that it was computed for, the mean over groups."""
    monkeypatch.setenv('COLUMNS', '30')
    x = np.array([2, 0, 1, 0, 2, 0])
    y = np.array([tasks.NOT_ASKED, 2, 2, 1, 2, 0])
    guesses = np.array([0, 2, 99, 1, 2, 0])     # a padded vocabulary has tokens without a word
    steps = np.array([4, 3.5, 10, 2, 1.5, 0.5])
    tasks.print_problem(tasks.Problems('echo'), x, y, guesses, steps)
    assert capsys.readouterr().out == (
        'problem     c     a     b\n'
        'right             c     c\n'
        'model       a     c !#99!\n'
        'loops       4   3.5    10\n\n'
        'problem     a     c     a\n'
        'right       b     c     a\n'
        'model       b     c     a\n'
        'loops       2   1.5   0.5\n\n')


@mock.patch.dict(tasks.TASKS)
def test_a_task_in_a_file_of_ones_own(tmp_path, monkeypatch):
    """tasks.py, which then runs as __main__, knows what the file enters in TASKS."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text(
        'from tasks import TASKS, Calc\n\n\nclass Mine(Calc):\n    pass\n\n\n'
        "TASKS['mine'] = Mine\n")
    printed = finished('mine.py', 'mine:p=3', '--rows=20', script='tasks.py')
    assert '20 problems: the oracle disagrees with 0' in printed
    refused('calc', '--rows=0', script='tasks.py')
