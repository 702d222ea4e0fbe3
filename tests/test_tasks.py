"""Tasks against their oracles and by hand, problems that never change, a new task, bad input."""
import hashlib
import math
import runpy
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, finished, refused

import data
import tasks
from common import training_log
from common.checkpoint import Run
from common.resume import check_same_data
from results.first_errors import first_errors


def made(text, rows=200, T=24):
    return tasks.Problems(text).make(np.random.default_rng(0), rows, T)


@pytest.mark.parametrize('text', [
    'calc:p=2,reset=1', 'calc:p=11,reset=0.04', 'hop:letters=2,hops=0', 'hop:letters=26,hops=7',
    'hop:letters=3,hops=30', 'group:name=S5', 'group:reset=0'])
def test_labels_are_the_oracles(text):
    problems = tasks.Problems(text)
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
    problems = tasks.Problems('calc', n_problems=64)
    x, y = problems.held_out(range(64), 24)
    assert torch.equal(problems.held_out([3, 5], 24)[1], y[[3, 5]])
    assert problems.held_out([0], 8)[0].shape == (1, 8)         # another T after the first
    _, _, labels, depth = data.held_out_windows(checkpoint_of('hop', None), 3, 'calc')
    assert depth.shape == labels.shape == (3, 24) and (depth > 0).any()
    whole, labels = problems.batch(np.random.default_rng(0), 2000, 24)
    assert not set(map(tuple, whole.tolist())) & set(map(tuple, x.tolist()))
    # a process of several takes its part of the batch
    part = problems.batch(np.random.default_rng(0), 2000, 24, slice(2, 4))
    assert torch.equal(part[0], whole[2:4]) and torch.equal(part[1], labels[2:4])


def test_words_are_an_encoding():
    words = data.open_encoding('calc:p=5')
    assert words.encode('=4 *1  +2') == [4, 9, 6] and words.n_vocab == 13
    assert b''.join(map(words.decode_single_token_bytes, [4, 9, 6])) == b'=4*1+2'
    with pytest.raises(ValueError, match="'/2' is not a word of calc:p=5: choose from =0 =1"):
        words.encode('=4 /2')


def checkpoint_of(dataset, tokenizer):
    return dict(config=dict(dataset=dataset), tokenizer=tokenizer, folder='',
                model_args=dict(block_size=24, vocab_size=13))


def test_a_run_can_have_other_problems_of_its_task():
    """Deeper ones, and longer ones, if the model knows their words."""
    checkpoint = checkpoint_of('calc', 'calc:p=5')
    assert tasks.problems_of(checkpoint).knobs == dict(p=5, reset=0.2)
    deep = tasks.problems_of(checkpoint, 'calc:reset=0.01')
    x, y, depth = deep.all_held_out(100)
    assert x.shape == (2048, 100) and depth.max() > 50 and deep.wrong_rows(x[:7], y[:7]) == []
    # how many there are to draw windows from: fewer of long ones
    assert [deep.n_held_out(T) for T in (24, 512, 8192, 2 ** 21)] == [2048, 2048, 128, 1]
    checkpoint['model_args']['block_size'] = 8192       # as open_run(length=8192) has it
    _, idx, targets, depth = data.held_out_windows(checkpoint, 3, 'calc:reset=0.01')
    assert idx.shape == targets.shape == depth.shape == (3, 8192) and depth.max() > 300
    with pytest.raises(ValueError, match='words of calc:p=5, and .* has those of calc:p=7: '):
        tasks.problems_of(checkpoint, 'calc:p=7,reset=0.01')
    with pytest.raises(ValueError, match="unknown task 'torchdocs'"):
        tasks.problems_of(checkpoint, 'torchdocs')


@pytest.mark.parametrize('task, text, answers', [
    ('calc', '=2 +3  *4', '=2 =0 =0'), ('hop', '1 b a c b a', '- - - a c'),
    ('group', '=021 102 =120', '021 201 120')])
def test_a_problem_can_be_typed(task, text, answers):
    problems = tasks.Problems(task)
    x, y = problems.solve(text)
    assert problems.encoding.decode(x[0]).split() == text.split() and x.dtype == y.dtype == np.int64
    assert problems.encoding.decode(y[y != tasks.NOT_ASKED]) == answers
    assert problems.wrong_rows(x, y) == []
    if task == 'calc':      # in the tokens of a model that reads text
        x, y = tasks.problems_of(checkpoint_of('book', 'bytes'), 'calc').solve(text)
        assert bytes(x[0].tolist()) == b'=2+3*4'
        assert y[0].tolist() == [-100, ord('2'), -100, ord('0'), -100, ord('0')]


@pytest.mark.parametrize('task, text, message', [
    ('calc', '=2 /3', "'/3' is not a word of calc:p=5: choose from =0 =1 .* \\*4$"),
    ('calc', '+2 =3', r"'\+2 =3' is not a problem of calc \(it must begin with =v\): python tasks"),
    ('calc', ' ', 'it has no words'), ('group', '021 =120', 'it must begin with =g'),
    ('hop', 'a b', 'a number of hops and then letters'), ('hop', '1 a 2', 'and then letters')])
def test_what_is_typed_is_checked(task, text, message):
    with pytest.raises(ValueError, match=message):
        tasks.Problems(task).solve(text)


@pytest.mark.parametrize('text, T, rows, message', [
    ('clac', 24, 1, "unknown task 'clac': did you mean 'calc'?"),
    ('calc:rest=0.1', 24, 1, "unknown knob 'rest' of the task calc: did you mean 'reset'?"),
    ('calc:p=1', 24, 1, 'p must be at least 2, not 1'),
    ('calc:p=1000000000', 24, 1, 'p of the task calc must be at most 1000'),
    ('calc:reset=0', 24, 1, r'reset must lie in \(0, 1\], not 0.0'),
    ('hop:letters=27', 24, 1, r'letters must lie in \[2, 26\]'), ('hop', 1, 1, 'T of at least 2'),
    ('hop:hops=many', 24, 1, "hops of the task hop must be int, not 'many'"),
    ('group:name=S4', 24, 1, "name must be one of S3, S5, not 'S4'"),
    ('calc', 10 ** 9, 1, 'cannot make 1 problems of 1000000000 tokens .*--block_size'),
    ('calc', 24, 10 ** 8, 'cannot make 100000000 problems .*--batch_size')])
def test_bad_input(text, T, rows, message):
    with pytest.raises(ValueError, match=message):
        tasks.Problems(text).check_fits(T, rows)


def test_a_config_fits_its_task():
    calc = runpy.run_path(f'{ROOT}/config/calc.py')
    for config in 'calc', 'hop', 's3':      # the last two on top of the first
        knobs = calc | runpy.run_path(f'{ROOT}/config/{config}.py')
        tasks.Problems(knobs['dataset']).check_fits(knobs['block_size'])


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


@pytest.mark.parametrize('change, message', [
    (lambda x, y, depth: (x < 2, x < 2, depth), "three arrays of int64 .*'bool'"),
    (lambda x, y, depth: (x, np.where(np.arange(20) == 3, tasks.NOT_ASKED, y.T).T, depth),
     'made 1 of 20 problems without a label'),
    (lambda x, y, depth: (x, y - 1, depth), 'words 0 to 2, and y has tokens from -1 to 1'),
    (lambda x, y, depth: (x + 1, y, depth), 'words 0 to 2, and x has tokens from 1 to 3')])
def test_a_task_is_checked_against_its_words(monkeypatch, capsys, change, message):
    task = Echo()
    monkeypatch.setitem(tasks.TASKS, 'echo', task)
    monkeypatch.setattr(tasks, 'rows', 20)
    monkeypatch.setattr(tasks, 'task', 'echo')
    tasks.main()
    assert 'the oracle disagrees with 0' in capsys.readouterr().out
    # the first problem on which they disagree is shown
    task.change = lambda x, y, depth: (x, np.where(np.arange(20) == 3, (y.T + 1) % 3, y.T).T, depth)
    with pytest.raises(SystemExit):
        tasks.main()
    *_, problem, answers, oracle = capsys.readouterr().out.splitlines()
    assert problem.split()[1:] == oracle.split()[1:]
    assert answers.split()[1:] == ['bca'['abc'.index(word)] for word in oracle.split()[1:]]
    task.change = change
    for run in tasks.main, lambda: tasks.Problems('echo', n_problems=20).check_fits(24):
        with pytest.raises(ValueError, match=f'the task echo .*{message}'):
            run()


def test_a_run_of_other_problems_is_not_resumed(monkeypatch):
    """Such as those whose knobs tasks.py had in an earlier version."""
    checkpoint = dict(data=tasks.Problems('calc').sha256)
    check_same_data(tasks.Problems('calc'), checkpoint, 'calc', 'out')
    monkeypatch.setattr(tasks.Calc.__call__, '__defaults__', (5, 0.3))
    with pytest.raises(ValueError) as error:
        check_same_data(tasks.Problems('calc'), checkpoint, 'calc', 'out')
    assert str(error.value) == (
        'calc is not the data set that the run in out had (its sha256 differs): tasks.py has '
        'changed since then; start from the weights in another --out_dir with '
        '--init_from=out/ckpt.pt')


@pytest.mark.parametrize('words, message', [('aba', 'has a word twice'), ('', 'has no words')])
def test_words_differ(monkeypatch, words, message):
    task = Echo()
    task.words = lambda: list(words)
    monkeypatch.setitem(tasks.TASKS, 'echo', task)
    with pytest.raises(ValueError, match=f'the task echo {message}'):
        tasks.Problems('echo')


def test_a_task_in_a_file_of_ones_own(tmp_path, monkeypatch):
    """tasks.py, which then runs as __main__, knows what the file enters in TASKS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, 'tasks')
    (tmp_path / 'mine.py').write_text(
        'from tasks import TASKS, Calc\n\n\nclass Mine(Calc):\n    pass\n\n\n'
        "TASKS['mine'] = Mine()\n")
    printed = finished('mine.py', 'mine', '--rows=20', script='tasks.py')
    assert '20 problems: the oracle disagrees with 0' in printed and 'mine' not in tasks.TASKS
    assert 'seed must be at least 0' in refused('calc', '--seed=-1', script='tasks.py')


def test_the_command_that_prints_problems_names_the_files_of_ones_own(monkeypatch):
    monkeypatch.setattr(tasks.configurator, 'own_files', ['my files/mine.py'])
    with pytest.raises(ValueError, match=r"python tasks.py 'my files/mine.py' calc prints some"):
        tasks.Problems('calc').solve('+1')


@pytest.mark.parametrize('n_answers', [0, 23])
def test_an_oracle_answers_each_word(monkeypatch, n_answers):
    task = Echo()
    task.oracle = lambda words: words[:n_answers]
    monkeypatch.setitem(tasks.TASKS, 'echo', task)
    with pytest.raises(ValueError, match=f'oracle of echo gave {n_answers} answers to 24 words'):
        tasks.Problems('echo').wrong_rows(*made('echo')[:2])


def test_answers_are_told_apart_by_their_last_token(monkeypatch):
    """Spelled in several tokens, a label is the last of them."""
    task = Echo()
    task.words = lambda n: ['xa', 'ya', 'zb'][:n]
    monkeypatch.setitem(tasks.TASKS, 'echo', task)
    problems = tasks.Problems('echo', data.open_encoding('bytes'))
    with pytest.raises(ValueError, match='two answers of the task echo end in the same token'):
        problems.check_fits(24)
    # of words that are no answers it does not matter
    task.change = lambda x, y, depth: (x, np.where(y == 1, tasks.NOT_ASKED, y), depth)
    _, y, _ = problems.make(np.random.default_rng(0), 9, 24)
    assert {*y.flatten()} == {tasks.NOT_ASKED, ord('a'), ord('b')}


def test_an_oracle_that_answers_no_word(monkeypatch):
    task = Echo()
    task.oracle = lambda words: ['z' for word in words]
    monkeypatch.setitem(tasks.TASKS, 'echo', task)
    with pytest.raises(ValueError, match="'a b' is not a problem of echo .*answers .'z'., which"):
        tasks.Problems('echo').solve('a b')


def test_a_loss_that_is_not_finite_names_a_checkpoint_if_it_has_learned():
    run = Run(dict(out_dir='out'), None, {}, '', '', done=7)
    for saved, advice in (0, 'start again'), (5, 'continue from'):
        run.saved = saved
        with pytest.raises(ValueError, match=f'not finite at iteration 7.*{advice}') as error:
            training_log.check_finite(run, math.nan, 1.0, [4], 1e-3)
        assert ('--init_from=out/ckpt.pt' in str(error.value)) == (saved > 0)


def test_a_chain_has_one_first_error():
    """Words 0 and 1 begin a chain. Three chains: wrong at 2 and 4, in none, at 8."""
    x = np.array([[0, 5, 6, 5, 5, 1, 7, 0, 5]])
    y = np.zeros_like(x)
    guesses = np.array([[0, 0, 1, 0, 1, 0, 0, 0, 1]])
    assert first_errors(x, y, guesses, [0, 1]).tolist() == [2, 8]
