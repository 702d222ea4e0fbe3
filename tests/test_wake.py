"""
A window of attention, and exits that can be undone: one meaning on every way to decode.

The block map by hand copies: a token takes over what the one before it has. So its news travels one
token a step, and a token that has not been reached yet stands still.
"""
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TAUS

import decode
import model as module_of_model
from cache import KeysValues, make_cache
from exits import loop, make_exit
from loops import Plan
from model import attend_near

WINDOW = dict(window=3, pos='rotary')
CLOSE = dict(rtol=1e-4, atol=1e-5)


# who wakes whom -----------------------------------------------------------------------------------

@pytest.mark.parametrize('window, reads', [
    (1, [0, 1, 0, 0, 0]), (2, [0, 1, 1, 0, 0]), (3, [0, 1, 1, 1, 0]), (9, [0, 1, 1, 1, 1]),
    (None, [0, 1, 1, 1, 1])])
def test_readers_are_the_tokens_in_whose_window_it_is(tiny, window, reads):
    attention = tiny(window=window).groups[0].core[0].attn
    moved = np.array([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=bool)
    assert attention.readers(moved).astype(int).tolist() == [reads, [0, 0, 0, 0, 0]]
    assert moved.sum() == 1                     # and what it was given stays
    # by another way: who changes if a token does?
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[0, 1] += 1
    changed = (attention(x) - attention(other)).abs().amax(-1)[0] > 1e-6
    assert changed.int().tolist() == reads


def test_a_token_sleeps_and_wakes_by_hand():
    """
    Three tokens, each read by itself and the next; two small signals in a row are needed. The
    states count the steps that a token has been computed for.
    """
    small, large = 0.0, 1.0             # a value of exactly tau is not small
    table = torch.tensor([
        [small, small, small],          # 1: nobody has two small ones yet
        [small, large, small],          # 2: 0 and 2 are still, but 2 reads 1, which moved
        [large, small, small],          # 3: 0 sleeps, whatever its signal; 2 is still again
        [large, small, large],          # 4: 1 is still now; 2, which had two small ones, moves
        [large, large, small],          # 5: 2 alone is awake
        [large, large, small],
        [large, large, large]])
    now, awake = [], []

    def f(x, k, at):
        now[:] = [k, at]
        awake.append(at.tolist())
        return x[at] + 1

    def signal(x0, x1, memo, logits_of):
        k, at = now
        return table[k - 1, at], None

    rule = replace(make_exit('accel', 1.0, wake=True), signal=signal)       # keep=False
    x, used, evals = loop(f, torch.zeros(1, 3, 1), 7, rule, readers=lambda moved: (
        np.pad(moved, ((0, 0), (1, 0)))[:, :-1]))           # who moved is awake, whatever this says
    assert awake == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [2], [2]]
    assert evals.tolist() == [[2, 4, 6]]
    # who falls asleep throws that step away
    assert used.tolist() == [[1, 3, 5]] and x.flatten().tolist() == [1, 3, 5]


# a window and waking in the model -----------------------------------------------------------------

RULES = [None, *(make_exit(name, tau) for name, tau in TAUS.items())]
WAKING = [make_exit(name, tau, wake=True) for name, tau in TAUS.items()]


def forced(model, idx, rule, n_loop=14, cache=None):
    """All tokens side by side -> logits, steps used, evals."""
    counts = [n_loop] * len(model.groups)
    return decode.read(model, idx, Plan(counts, rule, cache=cache))


@pytest.mark.parametrize('rule', WAKING, ids=lambda rule: rule.name)
def test_computing_the_awake_alone_changes_nothing(tiny, idx, rule, monkeypatch):
    """Against the same pass in which all are computed, and sleeping ones keep what they had."""
    model, sizes = tiny(**WINDOW), []
    update_some = KeysValues.update_some
    monkeypatch.setattr(KeysValues, 'update_some', lambda kv, new, *rest, **more: (
        sizes.append(new.shape[1]) or update_some(kv, new, *rest, **more)))
    some = forced(model, idx, rule)
    assert min(sizes) < 48 == max(sizes)
    # the diary says who was computed in each step
    trace = []
    with torch.no_grad():
        model(idx, n_loop=14, exit=rule, trace=trace)
    for g, entry in enumerate(trace):
        times = np.bincount(np.concatenate(entry['awake']), minlength=48).reshape(3, 16)
        assert (times == some[2][..., g].numpy()).all()
    computed = len(sizes)
    masked = forced(model, idx, rule, cache=make_cache(model, [14, 14], 'latest', 16))
    assert len(sizes) == computed
    torch.testing.assert_close(masked[0], some[0], **CLOSE)
    assert torch.equal(masked[1], some[1]) and torch.equal(masked[2], some[2])
    # some slept while others went on
    assert len(some[2].unique()) > 1


def test_a_rule_that_reads_whole_rows_computes_them(tiny, idx, monkeypatch):
    """Logits after the coda: with one state alone its layers could not attend."""
    model, shapes = tiny(**WINDOW), []
    through_coda = model.through_coda
    monkeypatch.setattr(model, 'through_coda', lambda x, plan: (
        shapes.append(x.shape) or through_coda(x, plan)))
    for wake in (False, True):
        rule = replace(make_exit('kl', 3e-4, wake=wake), reads='through_coda')
        _, _, evals = forced(model, idx, rule)
        assert len(evals.unique()) > 1
    assert set(shapes) == {(3, 16, 16)}


def test_keys_of_a_long_row_are_the_same_picked_and_masked(tiny):
    model = tiny(block_size=200, **WINDOW)
    idx = torch.randint(50, (2, 200))
    found = []
    for long in 1, 10 ** 6:             # picked, and masked
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module_of_model, 'LONG', long)
            logits, loss = model(idx, idx.roll(-1, 1), n_loop=3)
            found.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*found, **CLOSE)


@torch.no_grad()
def test_near_attention_sums_in_float32():
    """Under bfloat16 the awake alone are as exact as all: the sums are those of float32."""
    q = (8 * torch.randn(1, 30, 2, 8)).bfloat16()
    kv = torch.randn(1, 30, 4, 2, 2, 8).bfloat16()
    there = torch.ones(30, 4, dtype=torch.bool)
    exact = attend_near(q.double(), kv.double(), there)
    assert (attend_near(q, kv, there) - exact).abs().max() < 2 ** -8 * exact.abs().max()
    assert attend_near(q, kv, there).dtype == torch.bfloat16
