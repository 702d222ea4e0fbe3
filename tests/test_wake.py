"""
A window of attention, and exits that can be undone: one meaning on every way to decode.

The block map by hand copies: a token takes over what the one before it has. So its news travels one
token a step, and a token that has not been reached yet stands still.
"""
import numpy as np
import pytest
import torch
from conftest import TAUS, exit_by_hand

import loops
import model as module_of_model
from cache import KeysValues, Span, make_cache
from decode import teacher_forced
from exits import Tokens, loop, loop_awake, make_exit
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


def test_a_token_sleeps_and_wakes_by_hand():
    """Three tokens, each read by itself and the next; two small signals in a row are needed."""
    def next_one(moved):
        return moved | np.pad(moved, ((0, 0), (1, 0)))[:, :-1]

    tokens = Tokens(1, 3, make_exit('norm', 0.5, hits=2, keep=False, wake=True), next_one)
    small, large = 0.0, 1.0
    awake = []
    for k, value in enumerate((
            [small, small, small],          # 1: nobody has two small ones yet
            [small, large, small],          # 2: 0 and 2 are still, but 2 reads 1, which moved
            [large, small, small],          # 3: 0 sleeps, whatever its signal; 2 is still again
            [large, small, large],          # 4: 1 is still now; 2, which had two small ones, moves
            [large, large, small],          # 5: 2 alone is awake
            [large, large, small]), start=1):
        done = tokens.after(np.array([value]), k)
        awake.append(tokens.awake[0].astype(int).tolist())
        if done:
            break
    assert awake == [[1, 1, 1], [0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert tokens.streak.tolist() == [[2, 2, 2]] and k == 6
    assert tokens.evals.tolist() == [[2, 4, 6]]
    # who falls asleep throws that step away
    assert tokens.steps_used.tolist() == [[1, 3, 5]]


def test_a_streak_is_kept_while_asleep():
    """A token that wakes and is still at once sleeps again, and wakes nobody."""
    tokens = Tokens(1, 2, make_exit('norm', 0.5, hits=2, wake=True),
                    lambda moved: moved | moved[:, ::-1])
    tokens.after(np.array([[0.0, 0.0]]), 1)
    assert tokens.after(np.array([[0.0, 0.0]]), 2)          # both are still: all is done
    tokens.awake[:] = [[True, False]]                       # as if news had come for the first
    assert tokens.after(np.array([[0.0, 9.0]]), 3)
    assert tokens.streak.tolist() == [[3, 2]]


@pytest.mark.parametrize('name', ['norm', 'norm_rel', 'accel', 'kl'])
@pytest.mark.parametrize('keep', [False, True])
def test_news_wakes_who_slept(name, keep):
    """A chain of copies: with exits for good most tokens never hear of the first one."""
    T = 9
    start = torch.zeros(2, T, 4)

    def copy(x, k, awake):
        first = torch.tensor([3.0, 1.0, 0.0, 0.0]).expand(2, 1, 4)
        return torch.cat((first, x[:, :-1]), dim=1)

    def next_one(moved):
        return moved | np.pad(moved, ((0, 0), (1, 0)))[:, :-1]

    def read(x):
        return x

    rule = make_exit(name, 1e-3, keep=keep, wake=True)
    x, used, evals, k = loop(copy, start, 40, rule, read, next_one)
    assert (x[:, :, 0] == 3).all() and (x[:, :, 1] == 1).all()
    assert k <= T + 2 * rule.hits and evals.max() <= 7 < k
    assert (used >= np.arange(1, T + 1)).all()          # the news arrived in these steps
    alone, _, _, _ = loop(copy, start, 40, rule, read)
    assert (alone[:, -1] == 0).all()

    # the same with only the awake tokens computed
    def copy_some(x, k, rows, places):
        now[rows, places] = x                       # the states of those who sleep are as they were
        return copy(now, k, None)[rows, places]
    now = start.clone()
    some, used_some, evals_some, k_some = loop_awake(copy_some, start, 40, rule, read, next_one)
    assert torch.equal(some, x) and k_some == k
    assert (used_some == used).all() and (evals_some == evals).all()


@pytest.mark.parametrize('name, tau', [('accel_rel', 2.0), ('accel_rel', 3.0)])
def test_who_slept_has_an_update_of_zero(name, tau):
    """Tokens that fall asleep while they drift, and wake: as if all were computed, and masked."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))[0]
    start = 3 * torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(2))

    keys = start.clone()            # of each token the state before its last computed step

    def pull(x, k, awake):
        if awake is None:
            keys.copy_(x)
        else:
            keys.copy_(torch.where(awake[..., None], x, keys))
        return 0.9 * x @ turn + 0.3 * torch.cat((torch.ones(2, 1, 4), keys[:, :-1]), dim=1)

    def pull_some(x, k, rows, places):
        keys[rows, places] = x
        whole = torch.zeros(2, 30, 4)
        whole[rows, places] = x
        before = torch.cat((torch.ones(2, 1, 4), keys[:, :-1]), dim=1)
        return (0.9 * whole @ turn + 0.3 * before)[rows, places]

    def next_one(moved):
        return moved | np.pad(moved, ((0, 0), (1, 0)))[:, :-1]

    diary = []
    rule = make_exit(name, tau, keep=True, wake=True)
    x, used, evals, k = loop(pull, start, 60, rule, None, next_one, diary=diary)
    some = loop_awake(pull_some, start, 60, rule, None, next_one)
    torch.testing.assert_close(some[0], x, **CLOSE)
    assert (some[1] == used).all() and (some[2] == evals).all() and some[3] == k
    # some slept and woke
    computed = np.zeros((len(diary), 60), dtype=int)
    for step, tokens in enumerate(diary):
        computed[step, tokens] = 1
    assert (np.diff(computed, axis=0) == 1).any()


# a window and waking in the model -----------------------------------------------------------------

def forced(model, idx, rule, n_loop=14, cache=None):
    """All tokens side by side -> logits, steps used, evals."""
    trace = []
    with torch.no_grad():
        logits, _ = model(idx, n_loop=n_loop, exit=rule, trace=trace)
    steps, evals = (torch.stack([entry[name] for entry in trace], -1)
                    for name in ('steps_used', 'evals'))
    return logits, steps, evals


def token_by_token(model, idx, rule, n_loop=14):
    """One token after another through the exact cache."""
    counts = [n_loop] * len(model.groups)
    cache, parts = make_cache(model, counts, 'exact', wakes=rule is not None and rule.wake), []
    with torch.no_grad():
        for i in range(idx.shape[1]):
            plan = Plan(counts, rule, span=Span(i), cache=cache)
            x, found = model.hidden(idx[:, i:i + 1], plan)
            parts.append((model.lm_head(x), *(torch.stack([one[name] for one in found], -1)
                                              for name in ('steps_used', 'evals'))))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


RULES = [None, *(make_exit(name, tau, wake=wake) for name, tau in TAUS.items()
                 for wake in (False, True))]


@pytest.mark.parametrize('rule', RULES, ids=lambda rule: rule and f'{rule.name}-{rule.wake}')
def test_a_window_means_the_same_side_by_side_and_token_by_token(tiny, idx, rule):
    model = tiny(**WINDOW)
    logits, steps, evals = forced(model, idx, rule)
    alone, steps_alone, evals_alone = token_by_token(model, idx, rule)
    torch.testing.assert_close(alone, logits, **CLOSE)
    assert torch.equal(steps_alone, steps) and torch.equal(evals_alone, evals)
    assert torch.allclose(logits, teacher_forced(model, idx, Plan([14, 14], rule))[0], **CLOSE)
    # it matters: three tokens back and more do not count in one layer
    assert not torch.allclose(logits, forced(tiny(pos='rotary'), idx, rule)[0], atol=1e-3)


@pytest.mark.parametrize('rule', [rule for rule in RULES if rule and rule.wake],
                         ids=lambda rule: rule.name)
def test_computing_the_awake_alone_changes_nothing(tiny, idx, rule, monkeypatch):
    """Against the same pass in which all are computed, and sleeping ones masked."""
    model, calls = tiny(**WINDOW), []
    monkeypatch.setattr(loops, 'loop_awake', lambda *args: calls.append(1) or loop_awake(*args))
    some = forced(model, idx, rule)
    assert calls
    # the diary says who was computed in each step
    trace = []
    with torch.no_grad():
        model(idx, n_loop=14, exit=rule, trace=trace)
    for g, entry in enumerate(trace):
        times = np.bincount(np.concatenate(entry['awake']), minlength=48).reshape(3, 16)
        assert (times == some[2][..., g].numpy()).all()
    monkeypatch.setattr(KeysValues, 'update_some', None)

    class Masked(KeysValues):
        """Not the plain cache, so the pass computes all tokens."""
    cache = {block: Masked(1, 16) for group in model.groups for block in group.core}
    cache |= {block: KeysValues(1, 16) for block in model.h if block not in model.groups}
    with torch.no_grad():
        x, found = model.hidden(idx, Plan([14, 14], rule, span=Span(0, 16), cache=cache))
    torch.testing.assert_close(some[0], model.lm_head(x), **CLOSE)
    assert torch.equal(some[1], torch.stack([one['steps_used'] for one in found], -1))
    assert torch.equal(some[2], torch.stack([one['evals'] for one in found], -1))
    # some slept while others went on
    assert len(some[2].unique()) > 1


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


@pytest.mark.parametrize('rule', [make_exit('norm', 0.3, wake=True),
                                  make_exit('accel', 0.3, wake=True)], ids=lambda rule: rule.name)
@pytest.mark.parametrize('changes', [dict(), dict(window=16), dict(window=99)])
def test_with_full_attention_waking_is_waiting_for_all_earlier_tokens(tiny, idx, rule, changes):
    """The definition by hand: a token exits when it and all before it have been still."""
    model, counts = tiny(**changes), [20, 20]
    _, steps, evals = forced(model, idx, rule, 20)
    assert (evals.diff(dim=1) >= 0).all()           # nobody exits before an earlier token
    own = forced(model, idx, make_exit(rule.name, rule.tau), 20)[2]
    assert (evals[:, 0] == own[:, 0]).all() and (evals > own).any() and (evals < counts[0]).any()


def test_long_rows_read_only_the_window():
    """More than 64 windows of tokens: the keys in the window are picked, not masked."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=200, vocab_size=9, n_layer=3, n_head=2, n_embd=8, groups=[[1]],
                          mean_recurrence=3, **WINDOW)).eval()
    idx = torch.randint(9, (2, 200))
    assert 200 > 64 * 3
    picked, loss = model(idx, idx.roll(-1, 1), n_loop=3)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    # 190 of these tokens fit into 64 windows
    masked, _ = model(idx[:, :190], n_loop=3)
    torch.testing.assert_close(picked[:, :190], masked, **CLOSE)
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


@torch.no_grad()
@pytest.mark.parametrize('window', [None, 4])
def test_an_attention_of_ones_own_reads_the_same_in_a_row_of_any_length(monkeypatch, window):
    """Token by token, too. It needs no window."""
    monkeypatch.setattr(Block, 'attention', Odd)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=24, vocab_size=9, n_layer=2, n_head=2, n_embd=16, groups=[[1]],
                          x0='zero', **WINDOW | dict(window=window))).eval()
    idx = torch.randint(9, (1, 24))
    whole, _ = model(idx, n_loop=3)
    for t in 2, 3, 4, 9:
        torch.testing.assert_close(model(idx[:, :t], n_loop=3)[0], whole[:, :t], **CLOSE)
    text, _ = model.generate(idx[:, :3], 9, temperature=0, n_loop=3)
    for t in range(3, 12):
        logits, _ = model(text[:, :t], n_loop=3)
        assert torch.equal(text[:, t], logits[:, -1].argmax(-1))


@pytest.mark.parametrize('cache', ['exact', 'latest', 'ring', None])
def test_a_window_in_generated_text(tiny, idx, cache):
    """Each token is the argmax of the whole context where the policy is exact; all have drafts."""
    model = tiny(**WINDOW)
    how = dict(temperature=0, n_loop=6)
    text, _ = model.generate(idx[:1, :5], 9, cache=cache, ring=2, **how)
    if cache in ('exact', None):
        for t in range(5, 14):
            logits, _ = model(text[:, :t], n_loop=6)
            assert torch.equal(text[:, t], logits[:, -1].argmax(-1))
        drafted, _ = model.generate(idx[:1, :5], 9, draft_loops=2, **how)
        assert torch.equal(drafted, text)
    else:
        # with loops that have converged all policies agree
        long = dict(temperature=0, n_loop=40)
        assert torch.equal(model.generate(idx[:1, :5], 9, cache=cache, ring=2, **long)[0],
                           model.generate(idx[:1, :5], 9, cache='exact', **long)[0])


def test_one_slot_and_one_step(tiny, idx):
    """A budget of one step: the exact cache then has one slot, and remembers who moved."""
    model, rule = tiny(**WINDOW), make_exit('norm', 1e9, keep=False, wake=True)
    text, steps = model.generate(idx[:1, :6], 5, temperature=0, n_loop=1, exit=rule, cache='exact')
    for t in range(6, 11):
        logits, step, _ = forced(model, text[:, :t], rule, 1)
        assert torch.equal(text[:, t], logits[:, -1].argmax(-1))
        assert torch.equal(steps[:, t - 6], step[:, -1])


@torch.no_grad()
def test_near_attention_sums_in_float32(tiny, idx):
    """Under bfloat16 the awake alone are as exact as all: the sums are those of float32."""
    q = torch.randn(1, 3, 2, 8).bfloat16()
    kv = torch.randn(1, 3, 4, 2, 2, 8).bfloat16()
    there = torch.ones(3, 4, dtype=torch.bool)
    exact = attend_near(q.double(), kv.double(), there)
    assert (attend_near(q, kv, there) - exact).abs().max() < 2 ** -7 * exact.abs().max()
    assert attend_near(q, kv, there).dtype == torch.bfloat16


def test_slots_are_allocated_as_steps_are_taken(tiny, idx):
    """A budget of 5,000 steps costs nothing where 40 are taken."""
    model, counts = tiny(**WINDOW), [5000, 5000]
    cache = make_cache(model, counts, 'exact', wakes=True)
    rule = make_exit('norm', 1e-3, wake=True)
    with torch.no_grad():
        for i in range(8):
            model.hidden(idx[:, i:i + 1], Plan(counts, rule, span=Span(i), cache=cache))
    kv = cache[model.groups[0].core[0]]
    assert kv.slots == 5000 and len(kv.kv) <= 128
    _, steps, evals = forced(model, idx[:, :8], rule, 5000)
    assert evals.max() > 32 or len(kv.kv) == 32


def test_the_last_keys_are_there_when_more_slots_are_made():
    """33 steps need a second lot of slots: a token that exited after two is read as it was then."""
    kv = KeysValues(100, 3)
    for k in (1, 2):
        kv.update(torch.full((1, 1, 2, 1, 1), float(k)), Span(0), k)
    kv.fill(Span(0), 2)
    for k in range(1, 40):
        read, _ = kv.update(torch.full((1, 1, 2, 1, 1), 100.0 + k), Span(1), k)
        assert read.flatten().tolist() == [min(k, 2)] * 2 + [100 + k] * 2
    assert len(kv.kv) == 64


def test_confidence_is_one_minus_the_largest_probability():
    head = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    steps = exit_by_hand(lambda x, k: x + torch.tensor([1.0, 0.0]), torch.zeros(2), 9,
                         make_exit('confidence', 0.01), lambda x: x @ head.T)[1]
    # logits (2k, 0, 0): 1 - p is .0353 at k = 2, .0049 at k = 3
    assert steps == 3


def test_random_exits_after_one_over_tau_steps_on_average():
    torch.manual_seed(0)
    for tau in (0.5, 0.1):
        _, steps, _, _ = loop(lambda x, k, awake: x + 1, torch.zeros(1, 4000, 1), 200,
                              make_exit('random', tau))
        assert abs(steps.mean() * tau - 1) < 0.06
