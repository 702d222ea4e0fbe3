"""Exit rules: Algorithm 1 by hand, each rule's formula, many tokens at once."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import exit_by_hand, loop

import exits
from decode import Wave
from exits import EPS, Exit, algorithm_1, choose, make_exit

# thresholds at which the tokens of a spiral exit at different steps
SPIRAL_TAUS = dict(norm=0.3, norm_rel=0.1, kl=1e-3, accel=0.1, accel_hat=0.82, accel_rel=0.05)


# Algorithm 1, one state --------------------------------------------------------------------------

def walk(states):
    """A block map that steps through the given numbers, whatever it is fed."""
    rest = iter(states)
    return lambda x: torch.tensor([float(next(rest))])


@pytest.mark.parametrize('states, tau, k_max, x_star, k', [
    # updates 4, 2, 2, 2: accelerations 2, 0, 0. Both are small at the fourth step, so the third
    # state is returned
    ([4, 6, 8, 10, 12], 0.5, 9, 8, 3),
    # updates 1, 1, 3, 3, 3: accelerations 0, 2, 0, 0. Small ones must follow one another
    ([1, 2, 5, 8, 11, 14], 0.5, 9, 8, 4),
    ([1, 4, 9, 16, 25], 0.5, 4, 16, 4),             # never small: k_max steps, the last state
    ([1, 2, 3, 4, 5], 0.0, 5, 5, 5),                # an acceleration of exactly tau is not small
    ([1, 2, 3, 4, 5], math.inf, 5, 2, 2),
    ([], 0.5, 0, 0, 0)])
def test_algorithm_1_by_hand(states, tau, k_max, x_star, k):
    assert algorithm_1(walk(states), torch.tensor([0.0]), tau, k_max) == (x_star, k)


# signals and rules -------------------------------------------------------------------------------

def signal_by_formula(name, x0, x1, x2, read):
    """The signal of a rule for one token at its second step, from states (C,)."""
    d1, d2 = x1 - x0, x2 - x1
    p1, p2 = read(x1).softmax(0), read(x2).softmax(0)
    a = (d2 - d1).norm()
    return dict(
        norm=d2.norm(),                                             # Eq. 3
        norm_rel=d2.norm() / (x1.norm() + EPS),
        kl=(p2 * (p2 / p1).log()).sum(),                            # Eq. 4
        accel=a,                                                    # Eq. 5
        accel_hat=a / (d2.norm() + d1.norm() + EPS),                # Eq. 6
        accel_rel=a / (x1.norm() + EPS))[name]


@pytest.mark.parametrize('name', SPIRAL_TAUS)
def test_signal_is_its_formula(name):
    x0, x1, x2 = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    head = torch.randn(11, 8, generator=torch.Generator().manual_seed(1)).double()

    def read(x):
        return x @ head.T

    rule = make_exit(name, 1.0)
    at_step_1, memo = rule.signal(x0, x1, None, read)
    at_step_2, _ = rule.signal(x1, x2, memo, read)
    assert at_step_1.isnan().all() == name.startswith('accel')      # Eq. 5 needs two updates
    for b in range(2):
        for t in range(5):
            value = signal_by_formula(name, x0[b, t], x1[b, t], x2[b, t], read)
            assert math.isclose(at_step_2[b, t], value, rel_tol=1e-5)
    # a state that does not move, not even from 0, gives 0
    still = torch.zeros(4)
    assert rule.signal(still, still, rule.signal(still, still, None, torch.exp)[1],
                       torch.exp)[0] == 0


def test_make_exit():
    assert make_exit('accel') == Exit(exits.accel, 1e-2, hits=2, keep=False, name='accel')
    assert make_exit('norm', 3, wake=True) == Exit(exits.norm, 3.0, wake=True, name='norm')
    for bad in (('acel',), ('nowhere:norm',), ('math:norm',), ('zoo.huginn:nothing',),
                ('accel', -1e-3), ('accel', math.nan)):
        with pytest.raises(ValueError):
            make_exit(*bad)


def test_choose():
    """Given, a wave's own, the first row of this rule and cache, the rule's own."""
    rows = [dict(rule=rule, cache=cache, tau=tau) for rule, cache, tau in (
        ('norm', 'exact', 1.0), ('norm', 'exact', 2.0), ('norm', 'latest', 3.0),
        ('norm_rel', 'latest', 4.0), ('kl', 'latest', 5.0))]
    for expected, how in (
            (None, {}), (('norm', 9, 'exact'), dict(exit='norm', tau=9)),
            (('norm', 1, 'exact'), dict(exit='norm')),
            (('norm', 3, 'latest'), dict(exit='norm', policy='latest')),
            (('norm', 0.01, 4), dict(exit='norm', policy=4)),
            (('norm', 7, 'exact'), dict(exit=make_exit('norm', 7))),
            (('norm_rel', 0.003, 'latest'), dict(decoder=Wave())),
            (('norm_rel', 0.5, 'latest'), dict(decoder=Wave(), tau=0.5)),
            (('norm_rel', 4, 'latest'), dict(exit='norm_rel', policy='latest')),
            (('kl', 5, 'latest'), dict(exit='kl', decoder=Wave()))):
        rule, cache, _ = choose(**how, rows=rows)
        assert (rule and (rule.name, rule.tau, cache)) == expected
    for bad in (dict(exit='acel'), dict(exit=0.1), dict(tau=1), dict(wake=True),
                dict(exit=make_exit('kl'), tau=1)):
        with pytest.raises(ValueError):
            choose(**bad)


# many tokens at once -----------------------------------------------------------------------------

def spiral(B=3, T=7, C=6, seed=0):
    """
    A block map f(x, b, t) that treats tokens apart, and its starts (B, T, C).

    Each token turns and shrinks towards a point, at a pace of its own.
    """
    how = dict(generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(C, C, **how))[0]
    pace = 0.5 + 0.45 * torch.rand(B, T, 1, **how)

    def f(x, b, t):
        return pace[b, t] * (x @ turn) + 1.0

    return f, torch.randn(B, T, C, **how)


def batched(f):
    """f(x, b, t) of single tokens as the block map of `loop`."""
    every = slice(None)
    return lambda x, k: f(x, every, every)


@pytest.mark.parametrize('rule', [
    *(make_exit(name, tau) for name, tau in SPIRAL_TAUS.items()), make_exit('accel', 0),
    make_exit('accel', 2.0), make_exit('accel', math.inf), replace(make_exit('accel', 0.1), hits=1),
    replace(make_exit('norm', 0.3), hits=3, keep=False), replace(make_exit('kl', 1e-3), hits=2),
    # a signal that is tau is not below it
    Exit(lambda x0, x1, memo, logits_of: (x1[..., 0] * 0 + 1, None), tau=1.0, name='tau')],
    ids=lambda rule: f'{rule.name}-{rule.tau:g}-{rule.hits}')
def test_many_tokens_at_once_are_each_token_alone(rule):
    f, x0 = spiral(B=3, T=4)
    heads = torch.randn(3, 6, 9, generator=torch.Generator().manual_seed(2)).double()

    def read(x):                    # each row has a head of its own
        return x @ heads

    x_star, steps_used, evals = loop(batched(f), x0, 60, rule, read)
    for b in range(3):
        for t in range(4):
            x, used, done = exit_by_hand(lambda x, k: f(x, b, t), x0[b, t], 60, rule,
                                         lambda x: x @ heads[b])
            assert (steps_used[b, t], evals[b, t]) == (used, done)
            torch.testing.assert_close(x_star[b, t], x, atol=1e-5, rtol=1e-5)
            # a lone token, whose signal is a number and no array
            assert loop(lambda x, k: f(x, b, t), x0[b, t].view(1, 1, 6), 60, rule,
                        lambda x: x @ heads[b])[1:] == (used, done)
            if rule.name == 'accel' and rule.hits == 2:
                assert algorithm_1(lambda x: f(x, b, t), x0[b, t], rule.tau, 60)[1] == used
    # tokens exit one after another
    assert len(evals.unique()) > 1 or rule.tau in (0, 1, math.inf)
    # a rule keeps nothing between passes
    assert torch.equal(loop(batched(f), x0, 60, rule, read)[1], steps_used)


def test_after_waking_the_memo_is_that_of_rest():
    """Each of three tokens reads the one before: 0 moves, then 1 once, and 2 wakes for it."""
    memos = []

    def scripted(x0, x1, memo, logits_of):
        step, token = x1[:, 0], x1[:, 1]        # a state counts its steps, and knows its token
        moves = (token == 0) & (step < 5) | (token == 1) & (step == 3)
        if memo is not None and not torch.equal(x0, x1):
            memos.append({int(t): value.item() for t, value in zip(token, memo)})
        return moves.float(), x1[:, 0] - x0[:, 0]

    def readers(moved):
        return moved | np.roll(moved, 1, axis=1) & [False, True, True]

    x = torch.tensor([[[0.0, 0], [0, 1], [0, 2]]])
    _, _, evals = exits.loop(lambda x, k, at: x[at] + torch.tensor([1.0, 0]), x, 9,
                             Exit(scripted, tau=0.5, wake=True), readers=readers)
    assert evals.tolist() == [[5, 5, 2]]        # token 2 in steps 1 and 4
    assert [sorted(entry) for entry in memos] == [[0, 1], [0, 1], [0, 1, 2], [0, 1]]
    assert memos[2][2] == 0 and memos[2][1] == 1


@pytest.mark.parametrize('memo', ['x0', 'x1'])
def test_a_memo_may_hold_the_states_themselves(memo):
    """The loop changes states in place; what a signal keeps is still what it was."""
    f, x0 = spiral(B=2, T=4)

    def far(x0, x1, before, read):
        now = dict(x0=x0, x1=x1)[memo]
        unknown = torch.full(x1.shape[:-1], math.nan)
        return unknown if before is None else (x1 - before).norm(dim=-1), now

    rule = Exit(far, tau=0.5, keep=memo == 'x0')
    start = x0.clone()
    x_star, steps_used, evals = loop(batched(f), x0, 60, rule)
    assert torch.equal(x0, start)
    for b in range(2):
        for t in range(4):
            x, *steps = exit_by_hand(lambda x, k: f(x, b, t), x0[b, t], 60, rule)
            assert [steps_used[b, t], evals[b, t]] == steps
            assert torch.allclose(x_star[b, t], x)
    assert len(evals.unique()) > 1


@pytest.mark.parametrize('rule', [
    make_exit('norm', 0.1), make_exit('accel', 0.1), make_exit('random', 0),
    Exit(lambda x0, x1, memo, logits_of: (x1[..., 0] * 0 + 1, None), hits=1)],
    ids=['norm', 'accel', 'random', 'a signal that hides it'])
@pytest.mark.parametrize('broken', [math.nan, math.inf])
def test_a_broken_model_is_an_error(rule, broken):
    """In the steps after it breaks if the signal shows it, otherwise at the end."""
    steps = []

    def step(x, k):
        steps.append(k)
        x = x + 1
        if k == 3:
            x[-1, -1] = broken
        return x

    with pytest.raises(ValueError, match='a state is NaN or infinite'):
        loop(step, torch.zeros(2, 2, 2), 9, rule)
    assert len(steps) <= (5 if rule.name in ('norm', 'accel') else 9)


@pytest.mark.parametrize('signal, message', [
    (lambda x0, x1, memo, logits_of: (torch.tensor(0.0), None), 'one value for each token'),
    (lambda x0, x1, memo, logits_of: (x1, None), 'one value for each token'),
    (lambda x0, x1, memo, logits_of: x1[..., 0], 'a pair'),
    (lambda x0, x1, memo, logits_of: (x1[..., 0], x1[0]), 'its memo'),
    (lambda x0, x1, memo, logits_of: (x1[..., 0] * math.nan, None), 'NaN after three')])
def test_a_wrong_signal_is_named(signal, message):
    rule = Exit(signal, name='mine')
    with pytest.raises(ValueError, match=message) as error:
        loop(lambda x, k: x + 1, torch.zeros(1, 3, 2), 3, rule)
    assert "'mine'" in str(error.value)


@pytest.mark.parametrize('first', [True, False])
def test_a_memo_in_some_steps_alone_is_named(first):
    """In the first step or in later ones: memos of the awake must not pass for those of all."""
    def signal(x0, x1, memo, logits_of):
        is_first = len(x1) == 3         # one of the three exits in it
        return x1[..., 0], x1 if is_first == first else None

    rule = Exit(signal, tau=2, name='mine')
    with pytest.raises(ValueError, match="'mine' must return a memo in every step"):
        loop(lambda x, k: x + 1, torch.tensor([[[0.0], [2.0], [3.0]]]), 9, rule)


def test_random_exits_after_one_over_tau_steps_on_average():
    torch.manual_seed(0)
    for tau in (0.5, 0.1):
        _, steps, _ = exits.loop(lambda x, k, at: x[at] + 1, torch.zeros(1, 4000, 1), 200,
                                 make_exit('random', tau))
        assert abs(steps.mean() * tau - 1) < 0.06
