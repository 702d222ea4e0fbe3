"""Tasks against their oracles and by hand, problems that never change, a new task, bad input."""
import hashlib
import sys

import numpy as np
import pytest
import torch
from conftest import finished, refused

import data
import tasks


def made(text, rows=200, T=24):
    return tasks.Problems(text).make(np.random.default_rng(0), rows, T)


@pytest.mark.parametrize('text', [
    'calc:p=2,reset=1', 'calc:p=11,reset=0.04', 'hop:letters=2,hops=0', 'hop:letters=26,hops=7',
    'hop:letters=3,hops=30', 'group:name=S5', 'group:reset=0'])
def test_labels_are_the_oracles(text):
    problems = tasks.Problems(text)
    problems.check_fits(24)
    x, y, depth = made(text)
    assert x.shape == y.shape == depth.shape
    assert x.min() >= 0 and x.max() < problems.vocab_size
    assert problems.wrong_rows(x, y) == []
    # all tokens have a label, except hop's p; only labels have a depth
    first = int(text[:3] == 'hop')
    assert ((y != tasks.NOT_ASKED) == (np.arange(24) >= first)).all()
    assert (depth[y == tasks.NOT_ASKED] == 0).all()
    # a wrong label is noticed
    y[7, 23] = (y[7, 23] + 1) % problems.vocab_size
    assert problems.wrong_rows(x, y) == [7]


# recorded: 50 problems of seed 0, the held-out problems, and the sha256 that a checkpoint stores,
# with the tokenizer's name
@pytest.mark.parametrize('text, drawn, held_out, sha256, tokenizer', [
    ('calc', '49d31bf7e80d', 'f34c6ff5e13e', '566481fb9ce7', 'calc:p=5'),
    ('hop', '4b8a1e946c7f', '9807c1ab4f86', '2e63756254f6', 'hop:letters=4,hops=4'),
    ('group', '2220a3966240', '85c357830761', '090d54813219', 'group:name=S3'),
    ('group:name=S5', '967eb3477bd8', 'ed491e832c57', '07c1a9b79fe4', 'group:name=S5')])
def test_problems_never_change(text, drawn, held_out, sha256, tokenizer):
    def digest(arrays):
        return hashlib.sha256(b''.join(a.astype('<i8').tobytes() for a in arrays)).hexdigest()[:12]
    problems = tasks.Problems(text)
    T = 40 if text[:3] == 'hop' else 24
    assert digest(made(text, rows=50, T=T)) == drawn
    assert digest(problems.all_held_out(T)) == held_out
    assert (problems.sha256[:12], problems.tokenizer) == (sha256, tokenizer)


def test_calc_by_hand():
    """The value so far, and how far back it was set."""
    problems = tasks.Problems('calc')
    assert problems.answers('=4 *3 +2 =1 *4'.split()) == ['=4', '=2', '=4', '=1', '=4']
    x, _, depth = made('calc', rows=1)
    steps = 0
    for token, d in zip(x[0], depth[0]):
        steps = 0 if problems.encoding.vocabulary[token][0] == '=' else steps + 1
        assert d == steps


def test_hop_by_hand():
    """b a c b a: from the last a back to the a before it, one on to c; c has none before it."""
    words = list('bacba')
    assert tasks.Hop().oracle(['0', *words]) == [None, 'b', 'a', 'c', 'b', 'a']
    assert tasks.Hop().oracle(['1', *words]) == [None, '-', '-', '-', 'a', 'c']
    assert tasks.Hop().oracle(['2', *words]) == [None, '-', '-', '-', '-', '-']
    x, y, depth = made('hop', rows=300)
    # the depth is p where the whole chain exists, and at most p where it breaks
    p, whole = np.tile(x[:, :1] - 5, (1, 23)), y[:, 1:] != 4
    assert (depth[:, 1:] <= p).all() and (depth[:, 1:][whole] == p[whole]).all()


def test_held_out_problems_are_not_trained_on():
    problems = tasks.Problems('calc')
    problems.n_problems = 64
    x, y = problems.held_out(range(64), 24)
    assert problems.n_held_out(24) == 64 and problems.depths(24).shape == (64, 24)
    assert torch.equal(problems.held_out([3, 5], 24)[1], y[[3, 5]])
    assert problems.held_out([0], 8)[0].shape == (1, 8)         # another T after the first
    whole, labels = problems.batch(np.random.default_rng(0), 2000, 24)
    assert not set(map(tuple, whole.tolist())) & set(map(tuple, x.tolist()))
    # a process of several takes its part of the batch
    part = problems.batch(np.random.default_rng(0), 2000, 24, slice(2, 4))
    assert torch.equal(part[0], whole[2:4]) and torch.equal(part[1], labels[2:4])
    # spread evenly, from the first to the last
    assert problems.spread(4, 24).tolist() == [0, 21, 42, 63]
    with pytest.raises(ValueError):
        problems.spread(65, 24)


def test_a_run_can_have_other_problems_of_its_task():
    """Deeper ones, and longer ones, if the model knows their words."""
    checkpoint = dict(config=dict(dataset='calc'), tokenizer='calc:p=5',
                      model_args=dict(block_size=8192, vocab_size=13))
    assert tasks.problems_of(checkpoint).knobs == dict(p=5, reset=0.2)
    deep = tasks.problems_of(checkpoint, 'calc:reset=0.01')
    x, y, depth = deep.all_held_out(100)
    assert x.shape == (2048, 100) and depth.max() > 50 and deep.wrong_rows(x[:7], y[:7]) == []
    # how many there are to draw windows from: fewer of long ones
    assert [deep.n_held_out(T) for T in (24, 512, 8192, 2 ** 21)] == [2048, 2048, 128, 1]
    problems, idx, targets, depth = data.held_out_windows(checkpoint, 3, 'calc:reset=0.01')
    x, y = problems.held_out([0, 64, 127], 8192)
    assert torch.equal(idx, x) and torch.equal(targets, y)
    assert depth.shape == (3, 8192) and depth.max() > 300
    for dataset in 'calc:p=7', 'hop', 'torchdocs':
        with pytest.raises(ValueError):
            tasks.problems_of(checkpoint, dataset)


@pytest.mark.parametrize('task, text, answers', [
    ('calc', '=2 +3  *4', '=2 =0 =0'), ('hop', '1 b a c b a', '- - - a c'),
    ('group', '=021 102 =120', '021 201 120')])
def test_a_problem_can_be_typed(task, text, answers):
    problems = tasks.Problems(task)
    x, y = problems.solve(text)
    assert problems.encoding.decode(x[0]).split() == text.split() and x.dtype == y.dtype == np.int64
    assert problems.encoding.decode(y[y != tasks.NOT_ASKED]) == answers
    assert problems.wrong_rows(x, y) == []


@pytest.mark.parametrize('task, text', [
    ('calc', '=2 /3'), ('calc', '+2 =3'), ('calc', ' '), ('group', '021 =120'), ('hop', 'a b'),
    ('hop', '1 a 2')])
def test_what_is_typed_is_checked(task, text):
    with pytest.raises(ValueError):
        tasks.Problems(task).solve(text)


@pytest.mark.parametrize('text, T', [
    ('clac', 24), ('calc:rest=0.1', 24), ('calc:p=1', 24), ('calc:reset=0', 24),
    ('calc:reset=2', 24), ('calc:reset', 24), ('calc', 0), ('hop:letters=1', 24),
    ('hop:letters=27', 24), ('hop:hops=-1', 24), ('hop', 1), ('hop:hops=many', 24),
    ('group:name=S4', 24), ('group:reset=-1', 24)])
def test_bad_input(text, T):
    with pytest.raises(ValueError):
        tasks.Problems(text).check_fits(T)


class Echo:
    """A task as a user writes it, with a knob and an oracle; `change` spoils what it makes."""
    change = staticmethod(lambda x, y, depth: (x, y, depth))

    def __call__(self, rng, rows, T, n=3):
        x = rng.integers(n, size=(rows, T))
        return self.change(x, x.copy(), np.zeros((rows, T), dtype=np.int64))

    def words(self, n):
        return list('abcdef'[:n])

    def oracle(self, words):
        return words


@pytest.fixture
def echo(monkeypatch):
    task = Echo()
    monkeypatch.setitem(tasks.TASKS, 'echo', task)
    monkeypatch.setattr(tasks, 'task', 'echo')
    monkeypatch.setattr(tasks, 'rows', 20)
    return task


@pytest.mark.parametrize('change', [
    lambda x, y, depth: (x < 2, x < 2, depth),
    lambda x, y, depth: (x, y, depth[:, 1:]),
    lambda x, y, depth: (x, y - 1, depth),
    lambda x, y, depth: (x + 1, y, depth)])
def test_a_task_is_checked_against_its_words(echo, change):
    tasks.main()
    echo.change = change
    with pytest.raises(ValueError):
        tasks.main()


def test_the_first_problem_on_which_the_oracle_disagrees_is_shown(echo, capsys):
    echo.change = lambda x, y, depth: (
        x, np.where(np.arange(len(x)) == 13, (y.T + 1) % 3, y.T).T, depth)
    with pytest.raises(SystemExit) as stop:
        tasks.main()
    assert stop.value.code == 1
    assert 'disagrees with 1\n' in capsys.readouterr().out
    # an oracle answers each word
    echo.oracle = lambda words: words[:-1]
    with pytest.raises(ValueError):
        tasks.Problems('echo').wrong_rows(*made('echo')[:2])


def test_a_task_without_an_oracle(monkeypatch, echo, capsys):
    monkeypatch.delattr(Echo, 'oracle')
    tasks.main()
    assert 'not checked' in capsys.readouterr().out
    x, y = tasks.Problems('echo').solve('a b')
    assert x.tolist() == [[0, 1]] and (y == tasks.NOT_ASKED).all()


def test_a_task_in_a_file_of_ones_own(tmp_path, monkeypatch):
    """tasks.py, which then runs as __main__, knows what the file enters in TASKS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, 'tasks')
    (tmp_path / 'mine.py').write_text(
        'from tasks import TASKS, Calc\n\n\nclass Mine(Calc):\n    pass\n\n\n'
        "TASKS['mine'] = Mine()\n")
    printed = finished('mine.py', 'mine', '--rows=20', script='tasks.py')
    assert '20 problems: the oracle disagrees with 0' in printed and 'mine' not in tasks.TASKS
    refused('calc', '--seed=-1', script='tasks.py')
