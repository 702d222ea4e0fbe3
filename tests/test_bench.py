import contextlib
import csv
import json
import math
import os
import runpy
import sys

import conftest
import numpy as np
import pytest
import torch
from test_geometry import trained  # noqa: F401
from test_train import ROOT

import bench
import data
from exits import EXITS, make_exit

SMALL = ['--taus=[0,1e-2,0.3]', '--more_taus=[100.0]', '--budgets=[1,2,5]', '--epsilons=[0.0,0.3]', '--n_loop=5', '--n_windows=6', '--rounds=2', '--timed_tokens=3', '--device=cpu']


def go(*args):
    sys.argv = ['bench.py', *SMALL, *args]
    runpy.run_path(os.path.join(ROOT, 'bench.py'), run_name='__main__')
    return list(csv.DictReader(open('out/bench.csv')))


@pytest.fixture(scope='module')
def benched(trained):       # noqa: F811
    """The rows of a benchmark of the tiny run with both protocols, what it printed and its JSON."""
    with contextlib.chdir(trained):
        done = conftest.run(*SMALL, '--protocol=both', '--json', script='bench.py')
    assert done.returncode == 0, done.stderr
    with open(trained / 'out/bench.csv') as f:
        return list(csv.DictReader(f)), done.stdout, json.load(open(trained / 'out/bench.json'))


def value(rows, rule, tau, column='ce'):
    found, = [float(row[column]) for row in rows if row['rule'] == rule and float(row['tau']) == tau]
    return found


def test_every_point_once_and_no_nan(benched, trained):     # noqa: F811
    rows, out, told = benched
    wanted = [(name, tau) for name in EXITS for tau in (0, 1e-2, 0.3, 100)] + [('fixed', n) for n in (1, 2, 5)] + [('oracle', eps) for eps in (0, 0.3)]
    assert sorted((row['rule'], float(row['tau'])) for row in rows) == sorted(wanted)
    assert all(math.isfinite(float(v)) for row in rows for k, v in row.items() if k not in ('rule', 'extension'))
    assert {row['tau'] for row in rows if row['extension'] == 'True'} == {'100.0'}
    assert all(os.path.getsize(trained / 'out' / f'{name}.png') > 5000 for name in ('figure_4', 'frontier'))
    assert len(told['points']) == len(rows) and told['verdict'] and told['config']['n_loop'] == 5 and len(told['checks']) == 2 * len(EXITS)


def test_quality_is_the_models_own(benched, trained, monkeypatch):      # noqa: F811
    rows, _, _ = benched
    monkeypatch.chdir(trained)
    model, _ = bench.load_checkpoint('out/ckpt.pt')
    tokens = data.load('book')[1]
    most = (len(tokens) - 1) // 16
    idx, targets = data.windows(tokens, 16 * np.linspace(0, most - 1, 6).round().astype(int), 16)
    with torch.no_grad():
        for n in (1, 2, 5):
            assert math.isclose(value(rows, 'fixed', n), model(idx, targets, n_loop=n)[1], rel_tol=1e-6)
            assert value(rows, 'fixed', n, 'mean_evals') == n
        loss = model(idx, targets, n_loop=5, exit=make_exit('accel', 0.3))[1]
        assert math.isclose(value(rows, 'accel', 0.3), loss, rel_tol=1e-6)
    assert math.isclose(value(rows, 'fixed', 2, 'ppl'), math.exp(value(rows, 'fixed', 2)), rel_tol=1e-9)
    assert value(rows, 'fixed', 5, 'agreement') == 1 and value(rows, 'fixed', 5, 'kl_to_full') == value(rows, 'fixed', 5, 'ce_minus_full') == 0


@pytest.mark.parametrize('name', [*EXITS, 'oracle'])
def test_tau_zero_is_the_full_budget_and_steps_fall(benched, name):
    rows, _, _ = benched
    assert value(rows, name, 0) == pytest.approx(value(rows, 'fixed', 5), rel=1e-6) and value(rows, name, 0, 'mean_steps') == 5
    mine = sorted((float(row['tau']), float(row['mean_steps'])) for row in rows if row['rule'] == name)
    assert all(a >= b for (_, a), (_, b) in zip(mine, mine[1:])) and mine[0][1] > mine[-1][1]


def test_both_protocols_say_the_same(benched):
    _, out, _ = benched
    assert 'both protocols say the same tokens: yes' in out


def test_one_seed_one_answer(trained, monkeypatch, capsys):     # noqa: F811
    monkeypatch.chdir(trained)
    first, again = (go('--rules=["accel","kl"]', '--checks=False') for _ in range(2))
    untimed = lambda rows: [{k: v for k, v in row.items() if not k.startswith('ms_')} for row in rows]
    assert untimed(first) == untimed(again)
    one_hit = go('--rules=["accel"]', '--hits=1', '--keep=True', '--per=sequence', '--cache=latest', '--batch_size=2', '--dtype=bfloat16', '--checks=False')
    assert value(one_hit, 'accel', 100, 'mean_steps') == value(one_hit, 'accel', 100, 'mean_evals') == 2       # the first check, its step kept
    assert (value(first, 'accel', 100, 'mean_steps'), value(first, 'accel', 100, 'mean_evals')) == (2, 3)      # Algorithm 1: a second hit, its step dropped


def test_a_sequence_stops_together(tiny, idx):
    model, rule, trace = tiny(), bench.sequence_exit(make_exit('norm', 0.3)), []
    model(idx, exit=rule, trace=trace)
    alone = []
    model(idx, exit=make_exit('norm', 0.3), trace=alone)
    assert all((t['steps_used'] == t['steps_used'][:, :1]).all() for t in trace)
    assert (trace[0]['steps_used'][:, 0] >= alone[0]['steps_used'].amax(dim=1)).all()


def test_the_oracle_goes_at_the_first_step_within_epsilon(tiny, idx):
    model, full, trace = tiny(groups=[[1]]), [], []
    model(idx[:, :1], n_loop=9, trace=full)
    states = full[0]['states'][:, :, 0]                         # one token a row: nobody else's exit changes its path
    with bench.Oracle(model, 0.5):
        model(idx[:, :1], n_loop=9, trace=trace)
    distance = (states - states[-1]).norm(dim=-1)
    assert trace[-1]['steps_used'][:, 0].tolist() == [int((d[1:] < 0.5).nonzero()[0]) + 1 for d in distance.T]
    after = []
    model(idx[:, :1], n_loop=9, trace=after)
    assert (after[0]['steps_used'] == 9).all()                  # and it is gone afterwards


def test_the_verdict_is_computed(monkeypatch):
    row = lambda rule, tau, diff, ms: dict(rule=rule, tau=tau, ce_minus_full=diff, diff_low=diff, diff_high=diff, ms_per_token=ms, mean_evals=ms)
    rows = [row('fixed', 4, 0.001, 3.0), row('fixed', 1, 0.5, 1.0), row('norm', 0.1, 0.002, 2.0), row('norm', 1.0, 0.02, 1.5), row('kl', 0.1, 0.0, 4.0), row('accel', 0.1, 0.0, 6.0)]
    times = {(r['rule'], r['tau']): [r['ms_per_token']] * 5 for r in rows}
    says = bench.verdict(rows, times)
    assert says[0].startswith('Within 0.005 nats of the full budget the fastest rule is norm at tau 0.1: 2.00 ms')
    assert 'kl at 0.1 takes 2.00 [2.00, 2.00] times as long' in says[1] and 'accel at 0.1 takes 3.00' in says[2] and 'fixed budget of 4 takes 1.50' in says[3]
    assert not any('worth its cost' in s for s in says)
    rows[0]['ms_per_token'] = 1.9
    assert 'No rule is worth its cost here: looping 4 times' in bench.verdict(rows, times)[-1]
    assert bench.verdict(rows[1:2], times) == ['No rule comes within 0.005 nats of the full budget at the taus given.']


def test_the_interval_is_paired():
    rng = np.random.default_rng(0)
    difference = 5e-4 + 1e-4 * rng.standard_normal(64)          # half a thousandth of a nat, window by window
    low, high = bench.interval(difference)
    assert 4e-4 < low < difference.mean() < high < 6e-4


@pytest.mark.parametrize('args, words', [
    (['--out_dir=nowhere'], 'no checkpoint at'), (['--taus=[]'], 'taus and rules must not be empty'), (['--rules=[]'], 'must not be empty'), (['--rules=["acel"]'], 'unknown exit rule'),
    (['--prompt_tokens=15'], 'do not fit block_size = 16'), (['--prompt_tokens=0'], 'do not fit'), (['--taus=[-1.0]'], 'tau must be'), (['--per=word'], "unknown per 'word'"),
    (['--protocol=fast'], "unknown protocol 'fast'"), (['--cache=newest'], "unknown cache 'newest'"), (['--n_windows=9999'], 'windows of 16 tokens'), (['--rounds=0'], 'rounds must be'),
    (['--budgets=[0]'], 'n_loop must be')] + [(['--device=cuda'], "device 'cuda' is not available")] * (not torch.cuda.is_available()))
def test_bad_input(trained, monkeypatch, capsys, args, words):      # noqa: F811
    monkeypatch.chdir(trained)
    with pytest.raises(SystemExit, match='2'):
        go(*args)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and words in error
