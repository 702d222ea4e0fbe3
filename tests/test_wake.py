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
import exits
import model as module_of_model
from cache import KeysValues, Span, make_cache
from exits import Exit, loop, make_exit
from loops import Plan
from model import GPT, Block, CausalSelfAttention, GPTConfig, attend_near

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


def scripted(table, rule, readers):
    """
    exits.loop with signals from a table [step][token] -> what loop returns, and who was computed in
    each step. The states count the steps that a token has been computed for.
    """
    now, diary = [], []

    def f(x, k, at):
        now[:] = [k, at]
        return x + 1

    def signal(x0, x1, memo, read):
        k, at = now
        return torch.tensor(table[k - 1])[at], None

    T = len(table[0])
    found = loop(f, torch.zeros(1, T, 1), len(table), replace(rule, signal=signal),
                 readers=readers, diary=diary)
    return *found, [awake.tolist() for awake in diary]


def next_one(moved):
    """A token is read by itself and by the next one."""
    return moved | np.pad(moved, ((0, 0), (1, 0)))[:, :-1]


def test_a_token_sleeps_and_wakes_by_hand():
    """Three tokens, each read by itself and the next; two small signals in a row are needed."""
    small, large = 0.0, 1.0
    rule = make_exit('accel', 0.5, wake=True)           # two hits, and the last step is thrown away
    x, used, evals, awake = scripted([
        [small, small, small],          # 1: nobody has two small ones yet
        [small, large, small],          # 2: 0 and 2 are still, but 2 reads 1, which moved
        [large, small, small],          # 3: 0 sleeps, whatever its signal; 2 is still again
        [large, small, large],          # 4: 1 is still now; 2, which had two small ones, moves
        [large, large, small],          # 5: 2 alone is awake
        [large, large, small],
        [large, large, large]], rule, next_one)
    assert awake == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [2], [2]]
    assert evals.tolist() == [[2, 4, 6]]
    # who falls asleep throws that step away
    assert used.tolist() == [[1, 3, 5]] and x.flatten().tolist() == [1, 3, 5]


def test_a_streak_is_kept_while_asleep():
    """A token that is woken and still at once sleeps again, and wakes nobody."""
    def both(moved):                    # they read each other
        return moved | moved[:, ::-1]

    rule = make_exit('norm', 0.5, hits=2, wake=True)
    _, _, evals, awake = scripted([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
                                  rule, both)
    # token 1 moves until step 3, and so 0 loops, too; its streak is long enough at once
    assert awake == [[0, 1], [0, 1], [0, 1], [0, 1]]

    # the first one sleeps from step 3 on, and wakes in step 5, when the second has moved again
    script = [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [9.0, 9.0, 1.0], [9.0, 9.0, 1.0], [9.0, 0.0, 0.0],
              [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]]

    def at_step_4(moved):
        calls.append(moved)
        return moved | np.array([[False, len(calls) == 4, False]])

    calls = []
    *_, awake = scripted(script, rule, at_step_4)
    assert awake == [[0, 1, 2], [0, 1, 2], [2], [2], [1, 2], [2]]


def test_the_memo_of_a_token_that_wakes_is_that_of_a_step_in_place():
    """Its last update is 0, since it has stood still, and not the one before it fell asleep."""
    at_step = [5.0, 5.0, 5.0, 0.0, 2.0]         # updates of token 0; token 1 moves on
    memos = []

    def f(x, k, at):
        update = torch.tensor([[at_step[k - 1]], [float(2 ** k)]])
        return x + update[at]

    def signal(x0, x1, memo, read):
        if len(x0) == 2:
            memos.append(None if memo is None else memo[0].item())
        return exits.accel(x0, x1, memo, read)

    def at_step_4(moved):
        calls.append(moved)
        return moved | np.array([[len(calls) == 4, False]])

    calls = []
    rule = Exit(signal, tau=0.5, hits=2, keep=False, wake=True)
    loop(f, torch.zeros(1, 2, 1), 5, rule, readers=at_step_4)
    # still in steps 2 and 3, asleep in 4, awake in 5
    assert memos == [None, 5.0, 5.0, 0.0]


# a window and waking in the model -----------------------------------------------------------------

RULES = [None, *(make_exit(name, tau) for name, tau in TAUS.items())]
WAKING = [make_exit(name, tau, wake=True) for name, tau in TAUS.items()]


def forced(model, idx, rule, n_loop=14, cache=None):
    """All tokens side by side -> logits, steps used, evals."""
    counts = [n_loop] * len(model.groups)
    return decode.read(model, idx, Plan(counts, rule, cache=cache))


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule and rule.name)
def test_a_window_means_the_same_side_by_side_and_token_by_token(tiny, idx, rule):
    model = tiny(**WINDOW)
    logits, steps, evals = forced(model, idx, rule)
    alone, steps_alone, evals_alone = decode.read(model, idx, Plan([14, 14], rule), 14)
    torch.testing.assert_close(alone, logits, **CLOSE)
    assert torch.equal(steps_alone, steps) and torch.equal(evals_alone, evals)
    # it matters: three tokens back and more do not count in one layer
    assert not torch.allclose(logits, forced(tiny(pos='rotary'), idx, rule)[0], atol=1e-3)


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
    monkeypatch.setattr(KeysValues, 'update_some', None)
    masked = forced(model, idx, rule, cache=make_cache(model, [14, 14], 'latest', 16))
    torch.testing.assert_close(masked[0], some[0], **CLOSE)
    assert torch.equal(masked[1], some[1]) and torch.equal(masked[2], some[2])
    # some slept while others went on
    assert len(some[2].unique()) > 1


def test_a_rule_that_reads_whole_rows_computes_them(tiny, idx, monkeypatch):
    """Logits after the coda: with one state alone its layers could not attend."""
    model, shapes = tiny(**WINDOW), []
    through_coda = model.through_coda
    monkeypatch.setattr(KeysValues, 'update_some', None)
    monkeypatch.setattr(model, 'through_coda', lambda x, plan: (
        shapes.append(x.shape) or through_coda(x, plan)))
    for wake in (False, True):
        rule = replace(make_exit('kl', 3e-4, wake=wake), reads='through_coda')
        _, _, evals = forced(model, idx, rule)
        assert len(evals.unique()) > 1
    assert set(shapes) == {(3, 16, 16)}


def test_waking_needs_a_whole_sequence(tiny, idx):
    model, rule = tiny(), make_exit('norm', 0.3, wake=True)
    with pytest.raises(ValueError, match='one pass'):
        decode.read(model, idx, Plan([9, 9], rule), 'latest')
    with pytest.raises(ValueError, match='one pass'):
        model.generate(idx, 3, exit=rule)


@torch.no_grad()
@pytest.mark.parametrize('groups', [[[1]], [[1, 2]], [[1, 2, 3]]])
def test_news_of_an_edit_reaches_all_through_cores_of_any_depth(tiny, idx, groups):
    """From the states at rest of another first token, to those of a fresh solve."""
    model, span = tiny(groups=groups, **WINDOW), Span(0, 16)
    before = idx.clone()
    before[:, 0] = (idx[:, 0] + 1) % 50
    _, (at_rest,) = model.hidden(before, Plan([80], span=span))
    fresh, _ = model.hidden(idx, Plan([80], span=span))
    plan = Plan([80], make_exit('norm', 1e-6, wake=True), span=span, warm=[at_rest['x']])
    after, (mended,) = model.hidden(idx, plan)
    torch.testing.assert_close(after, fresh, rtol=0, atol=3e-5)
    assert mended['evals'].max() < 80 and (mended['evals'][:, 1:] > 1).any()


def test_long_rows_read_only_the_window():
    """More than 64 windows of tokens: the keys in the window are picked, not masked."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=200, vocab_size=9, n_layer=3, n_head=2, n_embd=8, groups=[[1]],
                          mean_recurrence=3, **WINDOW)).eval()
    idx = torch.randint(9, (2, 200))
    picked, loss = model(idx, idx.roll(-1, 1), n_loop=3)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_model, 'LONG', 10 ** 6)
        again, loss = model(idx, idx.roll(-1, 1), n_loop=3)
        loss.backward()
    torch.testing.assert_close(again, picked, **CLOSE)
    for grad, p in zip(grads, model.parameters()):
        torch.testing.assert_close(p.grad, grad, **CLOSE)


class FirstToo(CausalSelfAttention):
    """Each token reads the first one besides its window."""

    def near(self, pos):
        window = super().near(pos)
        first = torch.where(window.amin(dim=1, keepdim=True) > 0, 0, -1)
        return torch.cat((first, window), dim=1)

    def readers(self, moved):
        return super().readers(moved) | moved[:, :1]


@torch.no_grad()
def test_an_attention_that_reads_others_does_so_in_short_and_long_rows(monkeypatch):
    monkeypatch.setattr(Block, 'attention', FirstToo)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=96, vocab_size=9, n_layer=3, n_head=2, n_embd=16, groups=[[1]],
                          mean_recurrence=3, **WINDOW)).eval()
    idx = torch.randint(9, (1, 96))
    short, _ = model(idx, n_loop=40)
    asleep, _ = model(idx, n_loop=400, exit=make_exit('norm', 1e-6, wake=True))
    torch.testing.assert_close(asleep, short, rtol=0, atol=1e-3)
    monkeypatch.setattr(module_of_model, 'LONG', 1)
    torch.testing.assert_close(model(idx, n_loop=40)[0], short, **CLOSE)
    # the first token reaches the last one at once
    other = idx.clone()
    other[0, 0] = (idx[0, 0] + 1) % 9
    assert (model(other, n_loop=1)[0] - model(idx, n_loop=1)[0])[0, -1].abs().max() > 1e-3


class Odd(CausalSelfAttention):
    """Each token reads itself and the token three places before it."""

    def near(self, pos):
        return torch.stack((pos, pos - 3), dim=1)

    def reads_few(self, end):
        return True


@torch.no_grad()
def test_an_attention_of_ones_own_reads_the_same_in_a_row_of_any_length(monkeypatch):
    """Token by token, too. It needs no window."""
    monkeypatch.setattr(Block, 'attention', Odd)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=24, vocab_size=9, n_layer=2, n_head=2, n_embd=16, groups=[[1]],
                          x0='zero', pos='rotary')).eval()
    idx = torch.randint(9, (1, 24))
    whole, _ = model(idx, n_loop=3)
    for t in 2, 3, 4, 9:
        torch.testing.assert_close(model(idx[:, :t], n_loop=3)[0], whole[:, :t], **CLOSE)
    text, _ = model.generate(idx[:, :3], 9, temperature=0, n_loop=3)
    for t in range(3, 12):
        logits, _ = model(text[:, :t], n_loop=3)
        assert torch.equal(text[:, t], logits[:, -1].argmax(-1))


def test_a_window_in_generated_text(tiny, idx):
    """Each token is the argmax of the whole context; so with drafts."""
    model = tiny(**WINDOW)
    how = dict(temperature=0, n_loop=6)
    text, _ = model.generate(idx[:1, :5], 9, **how)
    for t in range(5, 14):
        logits, _ = model(text[:, :t], n_loop=6)
        assert torch.equal(text[:, t], logits[:, -1].argmax(-1))
    assert torch.equal(model.generate(idx[:1, :5], 9, draft_loops=2, **how)[0], text)


@torch.no_grad()
def test_near_attention_sums_in_float32(tiny, idx):
    """Under bfloat16 the awake alone are as exact as all: the sums are those of float32."""
    q = torch.randn(1, 3, 2, 8).bfloat16()
    kv = torch.randn(1, 3, 4, 2, 2, 8).bfloat16()
    there = torch.ones(3, 4, dtype=torch.bool)
    exact = attend_near(q.double(), kv.double(), there)
    assert (attend_near(q, kv, there) - exact).abs().max() < 2 ** -7 * exact.abs().max()
    assert attend_near(q, kv, there).dtype == torch.bfloat16
