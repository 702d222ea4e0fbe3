import contextlib
import csv
import json
import math
import os

import conftest
import numpy as np
import pytest
import torch
from test_geometry import trained  # noqa: F401

import bench
import data
import exits
import latency
import memory
from common import plots
from common.checkpoint import load_checkpoint
from exits import EXITS, make_exit
from model import GPT

SMALL = ['--taus=[0,1e-2,0.3]', '--more_taus=[100.0]', '--budgets=[1,2,5]', '--epsilons=[0.0,0.3]',
         '--n_loop=5', '--n_windows=6', '--rounds=1', '--timed_tokens=2', '--device=cpu',
         '--cache=exact', '--past=False']
RULES = [name for name in EXITS if name != 'accel_hat']       # bench.py's default
ALL_WAYS = ['--least_tau=0.3', '--cache=["exact","latest"]', '--past=[False,True]']
ONE_RULE = [*SMALL, '--rules=["accel"]', '--checks=False']
TWO_ROUNDS = [*ONE_RULE, '--rounds=2', '--timed_tokens=3']
NINE = [('fixed', 1), ('fixed', 2), ('fixed', 5), ('accel', 0), ('accel', 1e-2), ('accel', 0.3),
        ('accel', 100), ('oracle', 0), ('oracle', 0.3)]     # the points of ONE_RULE, in their order


def read_rows():
    with open('out/bench.csv') as f:
        return list(csv.DictReader(f))


def go(*args):
    done = conftest.run(*args, script='bench.py')
    assert done.returncode == 0, done.stderr
    return read_rows()


@pytest.fixture
def here(trained, monkeypatch):     # noqa: F811
    """In the folder of the tiny run, with no bench.csv yet; figures are drawn and not saved."""
    monkeypatch.chdir(trained)
    monkeypatch.setattr(plots.Figure, 'savefig', lambda *how, **more: None)
    if os.path.exists('out/bench.csv'):
        os.remove('out/bench.csv')


@pytest.fixture(scope='module')
def benched(trained):       # noqa: F811
    """A benchmark of the tiny run with both protocols: its rows, what it printed, its JSON."""
    with contextlib.chdir(trained):
        done = conftest.run(*SMALL, *ALL_WAYS, '--timed_tokens=1', '--protocol=both', '--json',
                            script='bench.py')
        assert done.returncode == 0, done.stderr
        with open('out/bench.json') as f:
            return read_rows(), done.stdout, json.load(f)


@pytest.fixture(scope='module')
def held_out(trained):      # noqa: F811
    """The tiny run's model, and the six windows that SMALL looks at: idx, targets."""
    with contextlib.chdir(trained):
        model, _ = load_checkpoint('out/ckpt.pt')
        tokens = data.load('book')[1]
    last = (len(tokens) - 1) // 16 - 1
    starts = 16 * np.linspace(0, last, 6).round().astype(int)
    return model, *data.windows(tokens, starts, 16)


def names(rows):
    return [(row['rule'], float(row['tau'])) for row in rows]


def value(rows, rule, tau, column='ce', cache='exact', past='False'):
    row, = [row for row in rows if (row['cache'], row['rule'], row['past']) == (cache, rule, past)
            and float(row['tau']) == tau]
    return float(row[column])


# a whole benchmark --------------------------------------------------------------------------------

def test_every_point_once_and_no_nan(benched, trained):     # noqa: F811
    rows, out, everything = benched
    wanted = [(name, tau) for name in RULES for tau in (0, 1e-2, 0.3, 100)]
    late = [(name, tau) for name, tau in wanted if tau >= 0.3]
    bounds = [('fixed', n) for n in (1, 2, 5)] + [('oracle', eps) for eps in (0, 0.3)]
    for way, of_way in (('exact', 'False'), wanted + bounds), (('exact', 'True'), late), (
            ('latest', 'False'), bounds), (('latest', 'True'), late):
        assert sorted(names(row for row in rows if (row['cache'], row['past']) == way)) == sorted(
            of_way)
    for row in rows:
        numbers = {key: v for key, v in row.items()
                   if key not in ('rule', 'extension', 'cache', 'past')}
        if row['cache'] == 'latest':        # what the context anew gives is exact
            assert not any(numbers.pop(key) for key in list(numbers) if key.endswith('_paper'))
        assert all(math.isfinite(float(number)) for number in numbers.values())
    assert {row['tau'] for row in rows if row['extension'] == 'True'} == {'100.0'}
    assert {row['windows'] for row in rows} == {'6'}
    for name in ('figure_4', 'frontier'):
        assert os.path.getsize(trained / 'out' / f'{name}.png') > 5000
    assert len(everything['points']) == len(rows) and everything['verdict']
    assert everything['config']['n_loop'] == 5 and len(everything['checks']) == 2 * len(EXITS)


@torch.no_grad()
def test_quality_is_the_models_own(benched, held_out):
    rows, _, _ = benched
    model, idx, targets = held_out
    for n in (1, 2, 5):
        loss = model(idx, targets, n_loop=n)[1]
        assert math.isclose(value(rows, 'fixed', n), loss, rel_tol=1e-6)
        assert value(rows, 'fixed', n, 'mean_evals') == n
    loss = model(idx, targets, n_loop=5, exit=make_exit('accel', 0.3))[1]
    assert math.isclose(value(rows, 'accel', 0.3), loss, rel_tol=1e-6)
    ppl = value(rows, 'fixed', 2, 'ppl')
    assert math.isclose(ppl, math.exp(value(rows, 'fixed', 2)), rel_tol=1e-9)
    assert value(rows, 'fixed', 5, 'agreement') == 1
    assert value(rows, 'fixed', 5, 'kl_to_full') == value(rows, 'fixed', 5, 'ce_minus_full') == 0


@pytest.mark.parametrize('name', [*RULES, 'oracle'])
def test_tau_zero_is_the_full_budget_and_steps_fall(benched, name):
    rows, _, _ = benched
    assert value(rows, name, 0) == pytest.approx(value(rows, 'fixed', 5), rel=1e-6)
    assert value(rows, name, 0, 'mean_steps') == 5
    mine = [row for row in rows if row['rule'] == name and row['cache'] == 'exact'
            and row['past'] == 'False']
    mine.sort(key=lambda row: float(row['tau']))
    steps = [float(row['mean_steps']) for row in mine]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_both_protocols_say_the_same(benched):
    _, out, _ = benched
    assert 'both protocols choose the same tokens: yes' in out


def test_bytes_a_token(benched):
    """Keys and values of two layers outside the groups, and of two in them: 5 loops, or one."""
    _, out, _ = benched
    assert f'exact keeps {(2 + 2 * 5) * 2 * 16 * 4:,} bytes' in out
    assert f'latest keeps {(2 + 2) * 2 * 16 * 4:,} bytes' in out


def test_one_seed_one_answer(here):
    def untimed(rows):
        return [{k: v for k, v in row.items() if not k.startswith('ms_')} for row in rows]
    once, again = go(*ONE_RULE), go(*ONE_RULE)
    assert untimed(once) == untimed(again) and names(once) == NINE
    # Algorithm 1 at a huge tau: a second hit at step 3, and its step is dropped
    assert value(once, 'accel', 100, 'mean_steps') == 2
    assert value(once, 'accel', 100, 'mean_evals') == 3
    # one hit: the first check, at step 2, and its step is kept
    one_hit = go(*ONE_RULE, '--hits=1', '--keep=True', '--per=sequence', '--cache=latest',
                 '--batch_size=2', '--dtype=bfloat16')
    for column in ('mean_steps', 'mean_evals'):
        assert value(one_hit, 'accel', 100, column, 'latest', 'True') == 2


def test_a_rule_that_a_fork_adds(here, monkeypatch):
    """It is benched without being asked for, and drawn."""
    monkeypatch.setitem(exits.EXITS, 'mine', (exits.norm, 3, True))
    rows = go(*SMALL, '--taus=[0.3]', '--more_taus=[]', '--epsilons=[]', '--checks=False')
    assert {row['rule'] for row in rows} == {'fixed', 'mine', *RULES}
    assert value(rows, 'mine', 0.3, 'mean_steps') > value(rows, 'norm', 0.3, 'mean_steps')


# interrupted --------------------------------------------------------------------------------------

def interrupt(monkeypatch, where, name, call, before=lambda: None):
    """From now on the given call of where.name, counted from 1, is a Ctrl-C."""
    calls, plain = [], getattr(where, name)

    def count(*args, **how):
        calls.append(name)
        if len(calls) == call:
            before()
            raise KeyboardInterrupt
        return plain(*args, **how)
    monkeypatch.setattr(where, name, count)


@torch.no_grad()
def test_ctrl_c_in_the_quality_phase_loses_nothing(here, held_out, monkeypatch):
    model, idx, targets = held_out
    losses = {n: model(idx[:rows], targets[:rows], n_loop=n)[1] for n, rows in ((1, 4), (5, 2))}
    # two windows at once, and for each two a pass of the full budget and of every point: the 14th
    # is that of the third point, in the second two windows
    monkeypatch.setattr(memory, 'windows_at_once', lambda config, most: 2)
    interrupt(monkeypatch, GPT, 'forward', 14)
    done = conftest.run(*ONE_RULE, script='bench.py')
    assert done.returncode == 130 and done.stderr == '\nstopped\n'
    rows = read_rows()
    assert names(rows) == NINE
    assert [row['windows'] for row in rows] == ['4'] * 2 + ['2'] * 7
    assert {row['ms_per_token'] for row in rows} == {''}
    assert math.isclose(value(rows, 'fixed', 1), losses[1], rel_tol=1e-6)
    assert math.isclose(value(rows, 'fixed', 5), losses[5], rel_tol=1e-6)


def test_ctrl_c_at_the_third_point_leaves_two(here, monkeypatch):
    interrupt(monkeypatch, GPT, 'forward', 4)
    assert conftest.run(*ONE_RULE, script='bench.py').returncode == 130
    assert names(read_rows()) == NINE[:2]


def test_ctrl_c_before_there_is_anything_leaves_the_old_file(here, monkeypatch):
    with open('out/bench.csv', 'w') as f:
        f.write('of an earlier day')
    interrupt(monkeypatch, GPT, 'forward', 1)
    assert conftest.run(*ONE_RULE, script='bench.py').returncode == 130
    with open('out/bench.csv') as f:
        assert f.read() == 'of an earlier day'


def test_ctrl_c_in_a_timing_round_loses_nothing(here, monkeypatch):
    """Two tokens of each of three ways warm up; a round has three: this is the fifth point."""
    at_hand = []
    interrupt(monkeypatch, latency, 'one_token', 2 * 3 + 3 * 4 + 1,
              lambda: at_hand.extend(read_rows()))
    done = conftest.run(*TWO_ROUNDS, script='bench.py')
    assert done.returncode == 130 and done.stderr == '\nstopped\n'
    # a file of the quality phase was there already
    assert names(at_hand) == NINE and {row['ms_per_token'] for row in at_hand} == {''}
    rows = read_rows()
    assert names(rows) == NINE and {row['windows'] for row in rows} == {'6'}
    for column in ('ms_per_token', 'ms_p10', 'ms_p90'):
        assert all(float(row[column]) > 0 for row in rows[:4])
        assert {row[column] for row in rows[4:]} == {''}


def test_each_round_is_written_when_it_is_over(here, monkeypatch):
    at_hand = []
    interrupt(monkeypatch, latency, 'one_token', 2 * 3 + 3 * 9 + 1,
              lambda: at_hand.extend(read_rows()))
    assert conftest.run(*TWO_ROUNDS, script='bench.py').returncode == 130
    assert names(at_hand) == NINE and all(float(row['ms_per_token']) > 0 for row in at_hand)
    assert read_rows() == at_hand


# its parts ----------------------------------------------------------------------------------------

def test_a_sequence_stops_together(tiny, idx):
    model, rule = tiny(), make_exit('norm', 0.3)
    together, alone = [], []
    model(idx, exit=bench.sequence_exit(rule), trace=together)
    model(idx, exit=rule, trace=alone)
    for entry in together:
        assert (entry['steps_used'] == entry['steps_used'][:, :1]).all()
    slowest = alone[0]['steps_used'].amax(dim=1)
    assert (together[0]['steps_used'][:, 0] >= slowest).all()


def test_points_are_made_once_each(monkeypatch):
    monkeypatch.setattr(bench, 'budgets', [2, 30, 2])
    monkeypatch.setattr(bench, 'rules', ['kl'])
    monkeypatch.setattr(bench, 'more_taus', [1e-2, 0.1])        # one is in the paper's sweep
    monkeypatch.setattr(bench, 'epsilons', [])
    monkeypatch.setattr(bench, 'past', False)
    monkeypatch.setattr(bench, 'least_tau', 1e-2)
    points = bench.make_points(2)
    taus = [('kl', tau) for tau in (1e-5, 1e-4, 1e-3, 1e-2, 0.1)]
    fixed = [('fixed', 2), ('fixed', 30)]
    assert [(p.rule, p.tau) for p in points] == [*fixed, *taus, *fixed, *taus[-2:]]
    assert [p.extension for p in points] == 6 * [False] + [True] + 3 * [False] + [True]
    assert points[0].loops == [2, 2] and points[-1].loops == [30, 30]
    assert [p.cache for p in points] == 7 * ['exact'] + 4 * ['latest']
    monkeypatch.setattr(bench, 'past', [True, False, True])
    monkeypatch.setattr(bench, 'cache', 'exact')
    points = bench.make_points(2)
    assert [(p.rule, p.tau) for p in points] == [*fixed, *taus[-2:], *taus]
    assert [p.past for p in points] == 2 * [False] + 2 * [True] + 5 * [False]


def row_of(rule, tau, diff, ms, cache='exact', past=False):
    return dict(cache=cache, rule=rule, past=past, tau=tau, ce_minus_full=diff, diff_low=diff,
                diff_high=diff, ms_per_token=ms, mean_evals=ms)


def test_the_verdict_is_computed():
    rows = [row_of('fixed', 4, 0.001, 3.0), row_of('fixed', 1, 0.5, 1.0),
            row_of('norm', 0.1, 0.002, 2.0), row_of('norm', 1.0, 0.02, 1.5),
            row_of('kl', 0.1, 0.0, 4.0), row_of('accel', 0.1, 0.0, 6.0, past=True),
            row_of('oracle', 0.1, 0.0, 0.5)]

    def says():
        return bench.verdict(rows, {bench.name_of(row): [row['ms_per_token']] * 5 for row in rows})
    fastest, *others = says()
    assert fastest == ('Within 0.005 nats of the full budget the fastest is norm at tau 0.1 under '
                       'exact: 2.00 ms a token, 2.00 block maps a group, CE +0.0020 [+0.0020, '
                       '+0.0020].')
    assert others[0].startswith('1.50 [1.50, 1.50] times as long: a fixed budget of 4 under exact')
    assert others[1].startswith('3.00 [3.00, 3.00] times as long: accel at tau 0.1 under exact, '
                                'waiting for the past: 6.00 ms')
    assert len(others) == 2
    rows.append(row_of('fixed', 2, 0.001, 1.0, cache='latest'))
    fastest, *others, last = says()
    assert 'the fastest is a fixed budget of 2 under latest: 1.00 ms' in fastest
    assert len(others) == 3 and last.startswith('No rule is worth its cost here')
    del rows[2:], rows[0]
    assert says() == ['No point comes within 0.005 nats of the full budget.']


# bad input ----------------------------------------------------------------------------------------

def test_a_cache_that_does_not_fit_is_refused_at_the_start(here, monkeypatch):
    # two groups and six states of six windows of 16 tokens of 16 numbers, in float32, twice
    states = 2 * 4 * 2 * 6 * 6 * 16 * 16
    monkeypatch.setattr(memory, 'available', lambda device: states)
    assert conftest.run(*ONE_RULE, script='bench.py').returncode == 0
    os.remove('out/bench.csv')
    done = conftest.run(*ONE_RULE, '--batch_size=20', script='bench.py')
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert 'a cache of' in done.stderr and 'n_loop' in done.stderr
    assert done.stdout == '' and not os.path.exists('out/bench.csv')
    monkeypatch.setattr(memory, 'available', lambda device: states - 1)
    done = conftest.run(*ONE_RULE, script='bench.py')
    assert done.returncode == 2 and 'keeping the states of 5 loops over 6 windows' in done.stderr


@pytest.mark.parametrize('args, words', [
    (['--out_dir=nowhere'], 'no checkpoint at'),
    (['--taus=[]'], 'taus and rules must not be empty'),
    (['--rules=[]'], 'must not be empty'),
    (['--rules=["acel"]'], 'unknown exit rule'),
    (['--taus=[-1.0]'], 'tau must be'),
    (['--prompt_tokens=15'], 'do not fit block_size = 16'),
    (['--prompt_tokens=0'], 'do not fit'),
    (['--per=word'], "unknown per 'word'"),
    (['--protocol=fast'], "unknown protocol 'fast'"),
    (['--cache=newest'], "unknown cache 'newest'"),
    (['--cache=[]'], "unknown cache '[]'"),
    (['--past=[]'], "unknown past '[]'"),
    (['--cache=latest', '--protocol=paper'], 'computes the context anew'),
    (['--same=0'], 'same must be'),
    (['--ring=0'], 'ring must be'),
    (['--calibrate=0'], 'must be more than 0 nats'),
    (['--calibrate=0.1'], '6 windows are too few to halve: --n_windows=16'),
    (['--n_windows=9999'], 'windows of 16 tokens'),
    (['--dataset=calc'], "reads bytes tokens, data set 'calc' holds calc:p=5"),
    (['--rounds=0'], 'rounds must be'),
    (['--budgets=[0]'], 'n_loop must be'),
    (['--n_loop=100000000'], 'lower --n_loop'),
])
def test_bad_input(here, args, words):
    done = conftest.run(*SMALL, *args, script='bench.py')
    assert done.returncode == 2
    assert done.stderr.count('\n') == 1 and words in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason='there is a card')
def test_a_card_that_is_not_there(here):
    done = conftest.run(*SMALL, '--device=cuda', script='bench.py')
    assert done.returncode == 2 and "device 'cuda' is not available" in done.stderr
