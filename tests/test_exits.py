"""Exit rules: Algorithm 1 by hand, each rule's formula, many tokens at once, a rule of your own."""
import csv
import glob
import math
import os
import re
import shutil
import subprocess
import sys

import conftest
import pytest
import torch
from conftest import ROOT, exit_by_hand
from torch.nn import functional as F

import data
import exits
from exits import EPS, EXITS, Exit, algorithm_1, loop_until_exit, make_exit

# thresholds at which the tokens of a spiral stop at different steps
TAUS = dict(norm=0.3, norm_rel=0.1, kl=1e-3, accel=0.1, accel_hat=0.82, accel_rel=0.05)


# -------------------------------------------------------------------------------------------------
# Algorithm 1, one state

def walk(*states):
    """A block map that steps through the given numbers, whatever it is fed."""
    rest = iter(states)
    return lambda x: torch.tensor([float(next(rest))])


def test_algorithm_1_by_hand():
    start = torch.tensor([0.0])
    # updates 4, 2, 2, 2: accelerations 2, 0, 0. Both are small at the fourth step, so the third
    # state is returned
    assert algorithm_1(walk(4, 6, 8, 10, 12), start, 0.5, 9) == (torch.tensor([8.0]), 3)
    # updates 1, 1, 3, 3, 3: accelerations 0, 2, 0, 0. Small ones must follow one another
    assert algorithm_1(walk(1, 2, 5, 8, 11, 14), start, 0.5, 9) == (torch.tensor([8.0]), 4)
    # never small: k_max steps, the last state
    assert algorithm_1(walk(1, 4, 9, 16, 25), start, 0.5, 4) == (torch.tensor([16.0]), 4)
    # an acceleration of exactly tau is not small
    assert algorithm_1(walk(1, 2, 3, 4, 5), start, 0.0, 5) == (torch.tensor([5.0]), 5)
    assert algorithm_1(walk(1, 2, 3, 4, 5), start, math.inf, 5) == (torch.tensor([2.0]), 2)
    assert algorithm_1(walk(), start, 0.5, 0) == (start, 0)


def test_algorithm_1_takes_the_norm_of_the_whole_state():
    def f(x):
        # the first update is 1.3 in each of the four numbers, the later ones are 1: one
        # acceleration of 0.3 each, of norm 0.6
        return x + (1.3 if x[0, 0] < 1 else 1.0)

    assert algorithm_1(f, torch.zeros(2, 2), 0.5, 9)[1] == 3
    assert algorithm_1(f, torch.zeros(2, 2), 0.7, 9)[1] == 2


# -------------------------------------------------------------------------------------------------
# signals and rules

def signal_by_formula(name, x0, x1, x2, readout):
    """The signal of a rule for one token at its second step, from states (C,)."""
    d1, d2 = x1 - x0, x2 - x1
    if name == 'norm':
        return d2.norm()                                            # Eq. 3
    if name == 'norm_rel':
        return d2.norm() / (x1.norm() + EPS)
    if name == 'kl':
        p1, p2 = readout(x1).softmax(0), readout(x2).softmax(0)
        return (p2 * (p2 / p1).log()).sum()                         # Eq. 4
    if name == 'accel':
        return (d2 - d1).norm()                                     # Eq. 5
    if name == 'accel_hat':
        return (d2 - d1).norm() / (d2.norm() + d1.norm() + EPS)     # Eq. 6
    if name == 'accel_rel':
        return (d2 - d1).norm() / (x1.norm() + EPS)


@pytest.mark.parametrize('name', TAUS)
def test_signal_is_its_formula(name):
    torch.manual_seed(0)
    x0, x1, x2 = torch.randn(3, 2, 5, 8).double()       # each (B, T, C)
    head = torch.randn(11, 8).double()

    def readout(x):
        return x @ head.T

    rule = make_exit(name, 1.0)
    at_step_1, memo = rule.signal(x0, x1, None, readout)
    at_step_2, _ = rule.signal(x1, x2, memo, readout)
    assert (at_step_1 is None) == name.startswith('accel')          # Eq. 5 needs two updates
    for b in range(2):
        for t in range(5):
            value = signal_by_formula(name, x0[b, t], x1[b, t], x2[b, t], readout)
            assert math.isclose(at_step_2[b, t], value, rel_tol=1e-5)


def test_kl_has_the_new_distribution_first():
    logits = dict(old=torch.tensor([0.5, 0.5]).log(), new=torch.tensor([0.9, 0.1]).log())
    value, _ = make_exit('kl', 1.0).signal('old', 'new', None, logits.get)
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)        # 0.368, not 0.511
    assert math.isclose(value, expected, rel_tol=1e-5)


@pytest.mark.parametrize('tau', [-1e-3, math.nan, 'small', True])
def test_bad_tau(tau):
    with pytest.raises(ValueError, match='tau must be a number >= 0'):
        make_exit('accel', tau)


def test_unknown_rule_and_hits():
    known = 'choose one of norm, norm_rel, kl, accel, accel_hat, accel_rel'
    with pytest.raises(ValueError, match=f'unknown exit rule .acel.: {known}'):
        make_exit('acel', 1e-2)
    with pytest.raises(ValueError, match='hits must be at least 1'):
        make_exit('accel', 1e-2, hits=0)
    changed = make_exit('norm', 1e-2, hits=2, keep=False)
    assert (changed.hits, changed.keep) == (2, False)


# -------------------------------------------------------------------------------------------------
# many tokens at once

def spiral(B=3, T=7, C=6, seed=0):
    """
    A block map f(x, b, t) that treats tokens apart, and its starts (B, T, C).

    Each token turns and shrinks towards a point, at a pace of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(C, C, generator=generator))[0]
    pace = 0.5 + 0.45 * torch.rand(B, T, 1, generator=generator)

    def f(x, b, t):
        return pace[b, t] * (x @ turn) + 1.0

    return f, torch.randn(B, T, C, generator=generator)


def batched(f):
    """f(x, b, t) of single tokens as a step of loop_until_exit."""
    every = slice(None)
    return lambda x, k, rows, active: f(x, every if rows is None else rows, every)


@pytest.mark.parametrize('tau', [0.0, 1e-3, 1e-1, 2.0, math.inf])
@pytest.mark.parametrize('seed', [0, 1])
def test_accel_on_many_tokens_is_algorithm_1_on_each(tau, seed):
    f, x0 = spiral(seed=seed)
    x_star, steps_used, evals = loop_until_exit(batched(f), x0, 25, make_exit('accel', tau))
    for b in range(3):
        for t in range(7):
            alone, k = algorithm_1(lambda x: f(x, b, t), x0[b, t], tau, 25)
            assert steps_used[b, t] == k
            assert torch.allclose(x_star[b, t], alone, atol=1e-5)
            triggered = k < 25 and tau > 0          # the step that triggered was evaluated too
            assert evals[b, t] == (k + 1 if triggered else k)


@pytest.mark.parametrize('name', TAUS)
def test_rules_against_each_token_alone(name):
    f, x0 = spiral(B=2, T=4)
    head = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))

    def readout(x):
        return x @ head.T

    rule = make_exit(name, TAUS[name])
    x_star, steps_used, evals = loop_until_exit(batched(f), x0, 20, rule, readout)
    assert 1 < steps_used.float().mean() < 20
    for b in range(2):
        for t in range(4):
            x, used, done = exit_by_hand(lambda x, k: f(x, b, t), x0[b, t], 20, rule, readout)
            assert (steps_used[b, t], evals[b, t]) == (used, done)
            assert torch.allclose(x_star[b, t], x, atol=1e-5)


def scripted(signals, keep):
    """A rule of two hits below 1 whose signals are given: for each step (T,), or None."""
    steps = iter(signals)

    def signal(x0, x1, memo, readout):
        value = next(steps)
        return None if value is None else torch.tensor([value]), None       # (1, T)

    return Exit('scripted', 1.0, signal, 2, keep)


# signals of each step; for each token the block maps done, and the loop steps kept without `keep`
@pytest.mark.parametrize('signals, evals, kept', [
    ([[.1], [.1], [.1]], [2], [1]),
    ([None, [.1], [.1], [.1]], [3], [2]),
    ([[.1], [5.], [.1], [.1], [.1]], [4], [3]),
    ([[.1], [1.], [.1], [5.], [.1], [.1]], [6], [5]),               # 1 is not below 1
    ([[.1, 1.], [.1, 1.], [5., .1], [5., .1]], [2, 4], [1, 3]),
    ([[.1], [5.], [.1], [5.], [.1], [5.]], [6], [6]),               # the budget: it is kept
    ([[.1, 5.], [5., .1], [.1, .1], [.1, 5.], [.1, .1], [5., .1]], [4, 3], [3, 2]),
    ([[.1, .1], [5., 5.], [.1, 5.], [.1, .1], [5., 5.], [5., .1]], [4, 6], [3, 6]),
    ([[5., .1], [5., .1], [.1, .1], [5., .1], [.1, .1], [5., .1]], [6, 2], [6, 1])])
@pytest.mark.parametrize('keep', [True, False])
def test_hits_must_follow_one_another(signals, evals, kept, keep):
    x_star, steps_used, done = loop_until_exit(
        lambda x, k, rows, active: x + 1, torch.zeros(1, len(evals), 1), 6, scripted(signals, keep))
    assert done.tolist() == [evals]
    assert steps_used.tolist() == [evals if keep else kept]
    assert x_star[..., 0].tolist() == steps_used.tolist()           # a state counts its steps


@pytest.mark.parametrize('past', [False, True])
@pytest.mark.parametrize('name', TAUS)
def test_tau_zero_never_and_tau_infinite_at_once(name, past):
    f, x0 = spiral()

    def readout(x):
        return x[..., :4]

    def still(x, k, rows, active):          # every signal is exactly 0
        return x

    for step in (batched(f), still):
        steps_used = loop_until_exit(step, x0, 12, make_exit(name, 0, past=past), readout)[1]
        assert (steps_used == 12).all()

    infinite = make_exit(name, math.inf, past=past)
    _, steps_used, evals = loop_until_exit(batched(f), x0, 12, infinite, readout)
    if name.startswith('accel'):            # two hits, of which the first is possible at step 2
        assert (evals == 3).all() and (steps_used == 2).all()
    else:
        assert (evals == 1).all() and (steps_used == 1).all()


def test_finished_rows_cost_nothing_and_are_announced():
    f, x0 = spiral()
    rows_of_step, announced = [], []

    def step(x, k, rows, active):
        rows_of_step.append(len(x))
        return batched(f)(x, k, rows, active)

    def on_leave(rows, k):
        announced.extend((row, k) for row in rows.tolist())

    _, _, evals = loop_until_exit(step, x0, 50, make_exit('norm', 1e-2), on_leave=on_leave)
    last = evals.max(dim=1).values.tolist()             # a row loops until its slowest token goes
    assert len(set(last)) > 1
    assert sorted(announced) == list(enumerate(last))
    assert rows_of_step == [sum(n >= k for n in last) for k in range(1, max(last) + 1)]


def chain(x, k, rows, active):
    """Each token takes the number of the one before it, the first 1: token t settles at t + 1."""
    return torch.cat((torch.ones(len(x), 1, 1), x[:, :-1]), dim=1)


def test_who_waits_for_the_past_is_not_too_early():
    """A token that stands still at 0 has not heard from the first one yet."""
    start = torch.zeros(1, 5, 1)
    own, used, _ = loop_until_exit(chain, start, 20, make_exit('norm', 0.5))
    assert own.flatten().tolist() == [1, 0, 0, 0, 0] and used.tolist() == [[2, 1, 1, 1, 1]]
    past, used, _ = loop_until_exit(chain, start, 20, make_exit('norm', 0.5, past=True))
    assert past.flatten().tolist() == [1] * 5 and used.tolist() == [[2, 3, 4, 5, 6]]


@pytest.mark.parametrize('hits', [1, 2])
@pytest.mark.parametrize('name', TAUS)
def test_waiting_is_its_definition(name, hits):
    """On a map that treats tokens apart each one's own signals are known before any has gone."""
    (f, x0), k_max, tau = spiral(), 20, 1.1 * TAUS[name]
    rule, own = make_exit(name, tau, hits=hits, past=True), []

    def readout(x):
        return x[..., :4]

    x, memo = x0, None
    for k in range(k_max):
        x, before = batched(f)(x, k, None, None), x
        value, memo = rule.signal(before, x, memo, readout)
        own.append(torch.full((3, 7), math.inf) if value is None else value)
    own = torch.stack(own, dim=-1)                                          # (B, T, k_max)

    evals = loop_until_exit(batched(f), x0, k_max, rule, readout)[2]
    for b in range(3):
        done = []
        for t in range(7):
            waits = [max([own[b, t, k]] + [own[b, j, k] for j in range(t) if done[j] > k])
                     for k in range(k_max)]
            small = [value < tau for value in waits]
            ends = [k + 1 for k in range(hits - 1, k_max) if all(small[k - hits + 1:k + 1])]
            done.append(min(ends, default=k_max))
        assert evals[b].tolist() == done == sorted(done)
    assert len(evals.unique()) > 1


def test_a_rule_keeps_nothing_between_passes():
    f, x0 = spiral()
    rule = make_exit('accel', 1e-2)
    once, again = (loop_until_exit(batched(f), x0, 30, rule) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again))


# -------------------------------------------------------------------------------------------------
# a rule of your own

def rule_of_the_readme():
    """Its lines of Python, as the README prints them."""
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
        return re.search(r'```python\n(.*?)```', f.read(), re.S).group(1)


def test_the_rule_of_the_readme(monkeypatch):
    """A token goes at the second step in a row that leaves its likeliest token as it was."""
    monkeypatch.setattr(exits, 'EXITS', dict(EXITS))
    exec(rule_of_the_readme(), exits.__dict__)
    likeliest = iter([2, 1, 1, 0, 0, 0, 0])

    def readout(x):
        return F.one_hot(torch.full(x.shape[:-1], next(likeliest)), 3).float()

    x, steps_used, evals = loop_until_exit(
        lambda x, k, rows, active: x + 1, torch.zeros(1, 1, 4), 9, make_exit('same', 0.5), readout)
    assert steps_used.item() == evals.item() == 6
    assert x.unique().tolist() == [6.0]


def test_a_fork_with_a_rule_of_its_own(tmp_path, monkeypatch):
    """In a copy whose exits.py has the README's rule, scripts know it and tests stay green."""
    # the copy
    fork = tmp_path / 'fork'
    os.makedirs(fork / 'tests')
    for path in glob.glob('*.py', root_dir=ROOT):
        shutil.copy(os.path.join(ROOT, path), fork)
    for path in ('README.md', 'tests/conftest.py', 'tests/test_exits.py'):
        shutil.copy(os.path.join(ROOT, path), fork / path)
    shutil.copytree(os.path.join(ROOT, 'config'), fork / 'config')
    with open(fork / 'exits.py', 'a', encoding='utf-8') as f:
        f.write('\n\n' + rule_of_the_readme())

    # a small model
    monkeypatch.chdir(fork)
    with open('book.txt', 'w') as f:
        f.write('The quick brown fox jumps over the lazy dog. ' * 100)
    data.make('book', 'book.txt')
    trained = conftest.run(
        '--dataset=book', '--n_layer=4', '--n_embd=16', '--n_head=2', '--groups=[[1],[2]]',
        '--block_size=16', '--batch_size=2', '--max_iters=2', '--mean_recurrence=3',
        '--eval_loops=[1]', '--eval_windows=2', '--device=cpu')
    assert trained.returncode == 0, trained.stderr

    # the scripts and the tests, in a process of their own, because exits.py is another one there
    program = """
import runpy, sys, pytest
for line in sys.argv[1].splitlines():
    sys.argv = line.split()
    runpy.run_path(sys.argv[0], run_name='__main__')
sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/test_exits.py',
                      '--deselect=tests/test_exits.py::test_a_fork_with_a_rule_of_its_own']))
"""
    commands = """sample.py --exit=same --tau=0.5 --max_new_tokens=4
bench.py --rules=['same'] --taus=[0.5] --more_taus=[] --budgets=[1] --epsilons=[] --n_loop=4 \
--n_windows=2 --rounds=1 --timed_tokens=2 --checks=False
geometry.py --n_loop=5 --n_windows=2 --most_loops=2"""
    done = subprocess.run([sys.executable, '-c', program, commands], capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH='.'))
    assert done.returncode == 0, (done.stdout, done.stderr)
    with open('out/bench.csv') as f:
        assert 'same' in [row['rule'] for row in csv.DictReader(f)]
