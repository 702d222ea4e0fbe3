"""Problems that need depth: what the page says of them, the shipped figures, the machinery."""
import os
from functools import partialmethod
from pathlib import Path

import conftest
import pytest
from conftest import ROOT
from test_results import Inline

import data
import tasks
from common import plots
from results import claims, depth, runs, table
from results.rows import load

SEEDS = (1337, 1, 2)


# the shipped figures ----------------------------------------------------------------------------

@pytest.fixture(scope='module')
def shipped():
    return load('depth', names=depth.CSVS)


def accuracy(t, n, **key):
    """The shares of each seed at n loops."""
    return claims.column(claims.pick(t['accuracy'], loops=n, **key), 'accuracy')


def test_readme_says_what_the_files_say():
    with open(os.path.join(ROOT, 'results', 'README.md'), encoding='utf-8') as f:
        text = f.read()
    assert text.split(depth.BEGIN)[1].split(depth.END)[0].strip() == depth.markdown()


def test_all_that_is_run_is_shipped(shipped):
    made = {(row['part'], row['variant'], row['seed']) for row in shipped['runs']}
    assert made == set(depth.trainings())


def test_one_loop_is_not_enough(shipped):
    for part, n, most_at_one, least in (('calc', 16, 0.80, 0.995), ('hop', 8, 0.84, 0.97)):
        assert max(accuracy(shipped, 1, part=part, variant='looped')) <= most_at_one
        assert min(accuracy(shipped, n, part=part, variant='looped')) >= least


def test_a_wave_reaches_as_far_as_there_are_loops(shipped):
    for seed in SEEDS:
        share = {(row['loops'], row['depth']): row['accuracy']
                 for row in claims.pick(shipped['deeper'], seed=seed)}
        assert share[8, 4] > 0.98 > 0.6 > share[8, 20] and share[32, 20] > 0.9


# the tables -------------------------------------------------------------------------------------

def test_deeper_weighs_by_labels():
    rows = [dict(seed=1, loops=n, depth=d, labels=labels, accuracy=share)
            for n in depth.DEEPER_LOOPS
            for d, labels, share in ((0, 3, 1.0), (4, 1, 0.0), (5, 1, 0.5), (9, 1, 0.25),
                                     (13, 1, 0.25), (23, 1, 0.25))]
    table = list(depth.deeper_table(dict(deeper=rows)))
    assert table[2] == '| 4 | 75.0 | 50.0 | 25.0 | 25.0 | 25.0 |'


# the machinery ----------------------------------------------------------------------------------

@pytest.fixture
def small(tmp_path, monkeypatch):
    """results/depth.py on runs made tiny, in this process; the names of what it calls, in order."""
    monkeypatch.chdir(tmp_path)
    os.symlink(os.path.join(ROOT, 'config'), 'config')
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(900)))
    data.make('pydocs', 'book.txt')
    calls = []

    def command(script, *flags, log, until=None, threads=None):
        calls.append(script)
        done = conftest.run(*flags, script=script)
        assert done.returncode == 0, done.stderr
        return True

    monkeypatch.setattr(runs, 'command', command)
    tiny = ['--n_embd=16', '--max_iters=4', '--warmup_iters=1', '--batch_size=4',
            '--eval_windows=4', '--keep_iters=[]', '--mean_recurrence=2', '--log_interval=2']
    stacks = {name: (configs, 1, 2) for name, (configs, _, _) in depth.STACKS.items()}
    settings = dict(seeds=[1, 2], workers=1, STACKS=stacks, OTHERS=['group'], more=tiny,
                    LEVERS={'x0 zero': ['--x0=zero']}, ThreadPoolExecutor=Inline)
    for name, setting in settings.items():
        monkeypatch.setattr(depth, name, setting)
    monkeypatch.setattr(plots, 'losses', lambda *args: None)
    monkeypatch.setattr(plots, 'depth', lambda rows, path: Path(path).touch())
    few = partialmethod(tasks.Problems.__init__, held_out=16)
    monkeypatch.setattr(tasks.Problems, '__init__', few)
    monkeypatch.setattr(table, 'write', lambda begin, end, lines: calls.append('table'))
    monkeypatch.setattr(depth, 'markdown', lambda: '')
    return calls


def test_all_is_run_once_and_gathered(small):
    depth.main()
    assert small == ['train.py'] * (9 * 2 + 2 + 1) + ['table']
    t = load('depth', 'results', depth.CSVS)
    assert {(row['part'], row['variant'], row['seed']) for row in t['runs']} == {*depth.trainings()}
    looped, plain = (claims.pick(t['runs'], part='calc', variant=name, seed=1)[0]['parameters']
                     for name in ('looped', 'stack'))
    block, around = 12 * 16 ** 2 + 4 * 16, 13 * 16 + 16     # norms; embedding and last norm
    assert looped == 3 * block + around + 2 * 16 ** 2 + 16 and plain == 4 * block + around
    small.clear()
    depth.main()
    assert small == ['table']


def test_pieces_stop_and_go_on(small, monkeypatch, capsys):
    monkeypatch.setattr(depth, 'minutes', 1e-9)
    depth.main()
    assert small == []
    assert 'the time is up: the same command goes on' in capsys.readouterr().out
    for name, setting in dict(minutes=None, parts=['calc']).items():
        monkeypatch.setattr(depth, name, setting)
    depth.main()
    assert small == ['train.py'] * 6 + ['table']
    # another part: these rows stay
    monkeypatch.setattr(depth, 'parts', ['others'])
    depth.main()
    t = {name: runs.read_csv(f'results/depth/{name}.csv') for name in ('runs', 'deeper')}
    assert [row['part'] for row in t['runs']] == ['calc'] * 6 + ['others']
    assert {row['seed'] for row in t['deeper']} == {'1', '2'}


@pytest.mark.parametrize('knob, value, words', [
    ('minutes', -1.0, '--minutes must be more than 0'),
    ('parts', ['clac'], "unknown part 'clac'"),
    ('seeds', [], '--seeds must name one')])
def test_bad_input(knob, value, words, monkeypatch):
    monkeypatch.setattr(depth, knob, value)
    with pytest.raises(ValueError, match=words):
        depth.main()
