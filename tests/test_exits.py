import math
import os
import re

import pytest
import torch
from torch.nn import functional as F

import exits
from exits import EPS, EXITS, algorithm_1, loop_until_exit, make_exit

TAUS = dict(norm=0.3, norm_rel=0.1, kl=1e-3, accel=0.1, accel_hat=0.82, accel_rel=0.05)


def walk(*states):
    """A block map that steps through the given numbers, whatever it is fed."""
    rest = iter(states)
    return lambda x: torch.tensor([float(next(rest))])


def test_algorithm_1_by_hand():
    start = torch.tensor([0.0])
    # updates 4, 2, 2, 2: accelerations 2, 0, 0; both small at the fourth step, so the third state is returned
    assert algorithm_1(walk(4, 6, 8, 10, 12), start, 0.5, 9) == (torch.tensor([8.0]), 3)
    # updates 1, 1, 3, 3, 3: accelerations 0, 2, 0, 0. One small one is not enough, and they must follow one another
    assert algorithm_1(walk(1, 2, 5, 8, 11, 14), start, 0.5, 9) == (torch.tensor([8.0]), 4)
    # never small: k_max steps, the last state
    assert algorithm_1(walk(1, 4, 9, 16, 25), start, 0.5, 4) == (torch.tensor([16.0]), 4)
    # an acceleration of exactly tau is not small: the comparison is strict
    assert algorithm_1(walk(1, 2, 3, 4, 5), start, 0.0, 5) == (torch.tensor([5.0]), 5)
    assert algorithm_1(walk(1, 2, 3, 4, 5), start, math.inf, 5) == (torch.tensor([2.0]), 2)
    assert algorithm_1(walk(), start, 0.5, 0) == (start, 0)


def test_algorithm_1_takes_the_norm_of_the_whole_state():
    f = lambda x: x + torch.full((2, 2), 1.0) * (1 + 0.3 * (x[0, 0] < 1))    # acceleration 0.3 everywhere once: norm 0.6
    assert algorithm_1(f, torch.zeros(2, 2), 0.5, 9)[1] == 3
    assert algorithm_1(f, torch.zeros(2, 2), 0.7, 9)[1] == 2


@pytest.mark.parametrize('name', EXITS)
def test_signal_is_its_formula(name):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5, 8).double()                    # x^(0), x^(1), x^(2), each (B, T, C)
    head = torch.randn(11, 8).double()
    readout = lambda s: s @ head.T
    rule = make_exit(name, 1.0)
    first, memo = rule.signal(x[0], x[1], None, readout)
    second, _ = rule.signal(x[1], x[2], memo, readout)
    assert (first is None) == name.startswith('accel')      # Eq. 5 needs two updates
    for b in range(2):
        for t in range(5):
            x0, x1, x2 = x[:, b, t]
            d1, d2 = x1 - x0, x2 - x1
            a = (d2 - d1).norm()
            p1, p2 = readout(x1).softmax(0), readout(x2).softmax(0)
            naive = dict(norm=d2.norm(), norm_rel=d2.norm() / (x1.norm() + EPS), kl=(p2 * (p2 / p1).log()).sum(), accel=a,
                         accel_hat=a / (d2.norm() + d1.norm() + EPS), accel_rel=a / (x1.norm() + EPS))[name]
            assert math.isclose(second[b, t], naive, rel_tol=1e-5)


def test_kl_has_the_new_distribution_first():
    logits = dict(old=torch.tensor([0.5, 0.5]).log(), new=torch.tensor([0.9, 0.1]).log())
    value, _ = make_exit('kl', 1.0).signal('old', 'new', None, logits.get)
    assert math.isclose(value, 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel_tol=1e-5)     # 0.368, not 0.511


def spiral(B=3, T=7, C=6, seed=0):
    """f that treats tokens apart (each with its own pace), and starts: contractions towards a point, with a turn."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(C, C, generator=g))[0]
    pace = 0.5 + 0.45 * torch.rand(B, T, 1, generator=g)
    return lambda x, b, t: pace[b, t] * (x @ turn) + 1.0, torch.randn(B, T, C, generator=g)


def batched(f):
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
            assert k == steps_used[b, t] and torch.allclose(alone, x_star[b, t], atol=1e-5)
            assert evals[b, t] == (k + 1 if k < 25 and tau > 0 else k)      # the step that triggered was evaluated too


@pytest.mark.parametrize('name', EXITS)
def test_rules_against_a_naive_loop(name):
    f, x0 = spiral(B=2, T=4)
    head = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    rule = make_exit(name, TAUS[name])
    x_star, steps_used, evals = loop_until_exit(batched(f), x0, 20, rule, lambda s: s @ head.T)
    assert 1 < steps_used.float().mean() < 20
    for b in range(2):
        for t in range(4):
            x, memo, small = x0[b, t], None, []
            for k in range(1, 21):
                y = f(x, b, t)
                value, memo = rule.signal(x, y, memo, lambda s: s @ head.T)
                small.append(value is not None and bool(value < rule.tau))
                go = len(small) >= rule.hits and all(small[-rule.hits:])
                x, used = (y, k) if rule.keep or not go else (x, k - 1)
                if go:
                    break
            assert (steps_used[b, t], evals[b, t]) == (used, k)
            assert torch.allclose(x_star[b, t], x, atol=1e-5)


@pytest.mark.parametrize('name', EXITS)
def test_tau_zero_never_and_tau_infinite_at_once(name):
    f, x0 = spiral()
    readout = lambda s: s[..., :4]
    still = lambda x, k, rows, active: x        # every signal is exactly 0
    for step in (batched(f), still):
        assert (loop_until_exit(step, x0, 12, make_exit(name, 0), readout)[1] == 12).all()
    first = 3 if name.startswith('accel') else 1        # Algorithm 1: two hits, of which the first is possible at step 2
    x_star, steps_used, evals = loop_until_exit(batched(f), x0, 12, make_exit(name, math.inf), readout)
    assert (evals == first).all() and (steps_used == first - (first == 3)).all()


def test_finished_rows_cost_nothing_and_are_announced():
    f, x0 = spiral()
    seen, left = [], []

    def step(x, k, rows, active):
        seen.append(len(x))
        return batched(f)(x, k, rows, active)

    _, _, evals = loop_until_exit(step, x0, 50, make_exit('norm', 1e-2), on_leave=lambda rows, k: left.extend((r, k) for r in rows.tolist()))   # one by one
    last = evals.max(dim=1).values.tolist()             # a row loops until its slowest token goes
    assert sorted(left) == list(enumerate(last)) and len(set(last)) > 1
    assert seen == [sum(n >= k for n in last) for k in range(1, max(last) + 1)]


def test_a_rule_keeps_nothing_between_passes():
    f, x0 = spiral()
    rule = make_exit('accel', 1e-2)
    first, again = (loop_until_exit(batched(f), x0, 30, rule) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize('tau', [-1e-3, math.nan, 'small', None, True])
def test_bad_tau(tau):
    with pytest.raises(ValueError, match='tau must be a number >= 0'):
        make_exit('accel', tau)


def test_unknown_rule_and_hits():
    with pytest.raises(ValueError, match='unknown exit rule .acel.: choose one of norm, norm_rel, kl, accel'):
        make_exit('acel', 1e-2)
    with pytest.raises(ValueError, match='hits must be at least 1'):
        make_exit('accel', 1e-2, hits=0)
    assert make_exit('norm', 1e-2, hits=2, keep=False).hits == 2


def test_the_rule_of_the_readme(monkeypatch):
    """As printed there it is a rule: a token goes at the second step in a row that leaves its likeliest token as it was."""
    monkeypatch.setattr(exits, 'EXITS', dict(EXITS))
    with open(os.path.join(os.path.dirname(exits.__file__), 'README.md'), encoding='utf-8') as f:
        exec(re.search(r'```python\n(.*?)```', f.read(), re.S).group(1), exits.__dict__)
    likeliest = iter([2, 1, 1, 0, 0, 0, 0])
    readout = lambda x: F.one_hot(torch.full(x.shape[:-1], next(likeliest)), 3).float()
    x, steps_used, evals = loop_until_exit(lambda x, k, rows, active: x + 1, torch.zeros(1, 1, 4), 9, exits.make_exit('same', 0.5), readout)
    assert steps_used.item() == evals.item() == 6 and x.unique().tolist() == [6.0]
