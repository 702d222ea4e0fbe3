"""Exit rules: Algorithm 1 by hand, each rule's formula, many tokens at once."""
import math

import pytest
import torch
from conftest import exit_by_hand, loop

import exits
from exits import EPS, Exit, algorithm_1, loop_awake, make_exit

# thresholds at which the tokens of a spiral exit at different steps
TAUS = dict(norm=0.3, norm_rel=0.1, kl=1e-3, accel=0.1, accel_hat=0.82, accel_rel=0.05)


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


def test_algorithm_1_takes_the_norm_of_the_whole_state():
    def f(x):
        # updates of 1.3 in each of four numbers, then of 1: an acceleration of norm 0.6
        return x + (1.3 if x[0, 0] < 1 else 1.0)

    assert [algorithm_1(f, torch.zeros(2, 2), tau, 9)[1] for tau in (0.5, 0.7)] == [3, 2]


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


@pytest.mark.parametrize('name', TAUS)
def test_signal_is_its_formula(name):
    x0, x1, x2 = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0)).double()
    head = torch.randn(11, 8, generator=torch.Generator().manual_seed(1)).double()

    def read(x):
        return x @ head.T

    rule = make_exit(name, 1.0)
    at_step_1, memo = rule.signal(x0, x1, None, read)
    at_step_2, _ = rule.signal(x1, x2, memo, read)
    assert (at_step_1 is None) == name.startswith('accel')          # Eq. 5 needs two updates
    for b in range(2):
        for t in range(5):
            value = signal_by_formula(name, x0[b, t], x1[b, t], x2[b, t], read)
            assert math.isclose(at_step_2[b, t], value, rel_tol=1e-5)
    # a state that does not move, not even from 0, gives 0
    still = torch.zeros(4)
    assert rule.signal(still, still, rule.signal(still, still, None, torch.exp)[1],
                       torch.exp)[0] == 0


def test_make_exit():
    rule = make_exit('accel')
    assert (rule.name, rule.tau, rule.hits, rule.keep) == ('accel', 1e-2, 2, False)
    assert not rule.wake
    rule = make_exit('norm', 3, hits=2, keep=False, wake=True)
    assert (rule.tau, rule.hits, rule.keep, rule.wake) == (3.0, 2, False, True)
    assert make_exit('norm', 1e300).tau == math.inf         # of what float32 can hold


@pytest.mark.parametrize('args, words', [
    (('acel', 1e-2), 'unknown exit rule .acel.: choose one of norm, norm_rel, kl, accel, accel_h'),
    (('ranks', 1e-2), 'name a file of your own behind the script, or write MODULE:NAME'),
    *((('accel', tau), 'tau must be a number >= 0') for tau in (-1e-3, math.nan, 'small', True)),
    (('accel', 1e-2, 0), 'hits must be at least 1')])
def test_bad_rules(args, words):
    with pytest.raises(ValueError, match=words):
        make_exit(*args)


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


def four(x):
    """As logits the first four numbers of a state."""
    return x[..., :4]


@pytest.mark.parametrize('rule', [
    *(make_exit(name, tau) for name, tau in TAUS.items()), make_exit('accel', 0),
    make_exit('accel', 2.0), make_exit('accel', math.inf), make_exit('accel', 0.1, hits=1),
    make_exit('norm', 0.3, hits=3, keep=False), make_exit('kl', 1e-3, hits=2)],
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
            assert torch.allclose(x_star[b, t], x, atol=1e-5)
            # a lone token, whose signal is a number and no array
            assert loop(lambda x, k: f(x, b, t), x0[b, t].view(1, 1, 6), 60, rule,
                        lambda x: x @ heads[b])[1:] == (used, done)
            if rule.name == 'accel' and rule.hits == 2:
                assert algorithm_1(lambda x: f(x, b, t), x0[b, t], rule.tau, 60)[1] == used
    # tokens exit one after another; a turning spiral does not end every rule's loops
    assert len(evals.unique()) > 1 or rule.name == 'accel_hat' or (
        rule.tau in (0, math.inf))
    # a rule keeps nothing between passes
    assert torch.equal(loop(batched(f), x0, 60, rule, read)[1], steps_used)


@pytest.mark.parametrize('past', [False, True])
@pytest.mark.parametrize('name', TAUS)
def test_tau_zero_never_exits_and_tau_infinite_at_once(name, past):
    _, x0 = spiral()
    # two hits of an acceleration are possible at step 3; where nothing moves every signal is 0
    first = 3 if name.startswith('accel') else 1
    for tau, k_max, k in ((0, 12, 12), (0, 1, 1), (math.inf, 12, first)):
        rule = make_exit(name, tau, wake=past)
        _, steps_used, evals = loop(lambda x, *_: x, x0, k_max, rule, four)
        assert (evals == k).all() and (tau > 0 or (steps_used == k).all())


def test_the_loop_ends_with_the_slowest_token():
    """Who still loops is announced to every step; all tokens take part in it."""
    (f, x0), announced = spiral(), []

    def counted(x, k, awake):
        announced.append(torch.ones(3, 7, dtype=torch.bool) if awake is None else awake)
        return f(x, slice(None), slice(None))

    _, _, evals, _ = exits.loop(counted, x0, 200, make_exit('norm', 1e-2))
    assert len(announced) == evals.max() < 200 and len(set(evals.flatten())) > 1
    assert (torch.stack(announced).sum(0).numpy() == evals).all()


@pytest.mark.parametrize('B', [1, 2])
def test_a_nan_is_no_signal(B):
    def step(x, k):
        return x + 1 if k < 3 else x + math.nan

    with pytest.raises(ValueError, match="not finite at loop step 3: rule 'norm' met a NaN"):
        loop(step, torch.zeros(B, 1, 2), 9, make_exit('norm', 0.1))


@pytest.mark.parametrize('name, hits', [('norm_rel', 1), ('kl', 2), ('accel', 1), ('accel', 2)])
def test_waiting_is_its_definition(name, hits):
    """On a map that treats tokens apart, the own signals of all tokens are known beforehand."""
    (f, x), k_max, tau = spiral(), 99, 1.1 * TAUS[name]
    rule, own, memo = make_exit(name, tau, hits=hits, wake=True), [], None
    evals = loop(batched(f), x, k_max, rule, four)[2]
    for k in range(k_max):
        x, before = batched(f)(x, k), x
        value, memo = rule.signal(before, x, memo, four)
        own.append(torch.full((3, 7), math.inf) if value is None else value)
    own = torch.stack(own, dim=-1)                                          # (B, T, k_max)

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


def test_a_memo_of_several_parts_is_refused_where_tokens_wake_alone():
    rule = Exit(lambda x0, x1, memo, read: ((x1 - x0).norm(dim=-1), (x0, x1)), tau=1, wake=True)
    with pytest.raises(ValueError, match='must be a tensor or None, not a tuple: stack its parts'):
        loop_awake(lambda x, k, rows, places: x + 1, torch.zeros(2, 3, 2), 9, rule,
                   lambda x: x, lambda moved: moved)


def test_a_yes_or_no_signal_is_refused():
    rule = Exit(lambda x0, x1, memo, read: ((x0 != x1).any(-1), None), tau=1)
    with pytest.raises(ValueError, match='is True or False: give a number'):
        loop(lambda x, k: x + 1, torch.zeros(2, 1, 2), 9, rule)
