"""
Exits with keys and values by loop step: every way of feeding the tokens gives the same model.
"""
import math

import pytest
import torch
from conftest import TAUS
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from common.checkpoint import load_checkpoint
from decode import compile_one_token, make_cache, one_token, prefill, stream, window
from exits import make_exit
from tasks import Problems

CLOSE = dict(rtol=1e-4, atol=1e-4)
GREEDY, ROTARY = dict(temperature=0), dict(pos='rotary', rope_base=100.0)
CASES = [None, *TAUS, 'norm, past', 'accel, past']     # fixed loops, each rule, two that wait
FEW = [None, 'kl', 'accel, past']      # where the kind of rule is what matters
WAITING = [f'{name}, past' for name in TAUS if f'{name}, past' not in CASES]


def rule_of(name):
    """A case as a rule; ', past' waits for the past."""
    name, _, past = (name or '').partition(', ')
    taus = TAUS | dict(accel_hat=0.9) if past else TAUS     # of many tokens the largest is larger
    return make_exit(name, taus[name], past=bool(past)) if name else None


def token_by_token(model, idx, counts, rule, cut=1, policy='exact', **how):
    """
    Logits (B, T, V) and steps (B, T, groups): the first `cut` tokens at once, the others one by
    one through a cache.
    """
    cache = make_cache(model, counts, policy, **how)
    with torch.no_grad():
        x, groups = model.hidden(idx[:, :cut], counts, rule, cache=cache)
        logits = [model.lm_head(x)]                                             # (B, cut, V)
        steps = [torch.stack([used for _, used in groups], dim=2)]              # (B, cut, groups)
        for t in range(cut, idx.shape[1]):
            of_token, used, _ = one_token(model, idx[:, t:t + 1], t, counts, rule, 0, cache)
            logits.append(of_token[:, None])
            steps.append(used[:, None])
    return torch.cat(logits, dim=1), torch.cat(steps, dim=1)


def assert_same(generated, other):
    """Two pairs of (tokens or logits, steps) are equal in every bit."""
    assert torch.equal(generated[0], other[0])
    assert torch.equal(generated[1], other[1])


# -------------------------------------------------------------------------------------------------
# one token through the cache

@pytest.mark.parametrize('name, seed, cut, positions', [
    *((name, 0, 1, {}) for name in CASES), *((name, 1, 7, ROTARY) for name in CASES + WAITING)])
def test_token_by_token_is_the_whole_sequence(tiny, positions, name, seed, cut):
    model, rule, trace = tiny(seed=seed, adapter_init='random', **positions), rule_of(name), []
    idx = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(seed))
    whole = model(idx, n_loop=12, exit=rule, trace=trace)[0]
    whole_steps = torch.stack([entry['steps_used'] for entry in trace], dim=2)
    logits, steps = token_by_token(model, idx, [12, 12], rule, cut)
    torch.testing.assert_close(logits, whole, **CLOSE)
    assert torch.equal(steps, whole_steps)
    assert rule is None or len(steps.unique()) > 1
    if rule and rule.past:      # a lone token waits by a shorter way
        _, alone = token_by_token(model, idx[:1], [12, 12], rule, cut)
        assert torch.equal(alone, whole_steps[:1])


def test_step_noise_is_by_position_too(tiny, idx):
    model = tiny(step_noise=0.1)
    logits, _ = token_by_token(model, idx, [5, 5], None)
    torch.testing.assert_close(logits, model(idx, n_loop=5)[0], **CLOSE)


def test_a_compiled_step_is_the_step(tiny, idx, positions=ROTARY):
    """The same logits and steps, and no graph for another loop count or position."""
    plain, compiled, rule = tiny(**positions), tiny(**positions), rule_of('accel')
    counter, graphs = CompileCounter(), []
    compile_one_token(compiled, backend=counter)
    for n in (9, 4, 7):
        expected, steps = token_by_token(plain, idx[:1], [n, n + 1], rule)
        logits, compiled_steps = token_by_token(compiled, idx[:1], [n, n + 1], rule)
        torch.testing.assert_close(logits, expected, **CLOSE)
        assert torch.equal(compiled_steps, steps)
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[-1] <= 8


# -------------------------------------------------------------------------------------------------
# cache policies

@pytest.mark.parametrize('name', FEW)
def test_a_ring_as_long_as_the_budget_is_exact(tiny, idx, name):
    model, rule = tiny(), rule_of(name)
    ring = token_by_token(model, idx, [9, 9], rule, policy='ring', ring=9)
    assert_same(ring, token_by_token(model, idx, [9, 9], rule))


@pytest.mark.parametrize('policy, ring', [('ring', 4), ('latest', 1)])
def test_with_fewer_slots_a_token_that_comes_alone_waits_for_none(tiny, idx, policy, ring):
    model, how = tiny(adapter_init='random'), dict(policy=policy, ring=ring)
    past = token_by_token(model, idx, [9, 9], rule_of('norm, past'), **how)
    assert_same(past, token_by_token(model, idx, [9, 9], rule_of('norm'), **how))


@pytest.mark.parametrize('policy, ring', [('ring', 4), ('latest', 1)])
def test_fewer_slots_change_the_result_and_keep_less(tiny, idx, policy, ring):
    model = tiny(adapter_init='random')
    exact, _ = token_by_token(model, idx, [9, 9], None)
    fewer, _ = token_by_token(model, idx, [9, 9], None, policy=policy, ring=ring)
    assert 1e-4 < (exact - fewer).abs().max() < 1
    cache = make_cache(model, [9, 9], policy, ring)
    slots = [kv.slots for layers in cache for kv in layers]
    assert slots == [1, ring, ring, ring, 1]


@pytest.fixture
def problems(wave):
    """A model that has learnt a task with a wave, and 32 of its problems: idx, targets (32, 12)."""
    model, checkpoint = load_checkpoint(wave / 'out' / 'ckpt.pt')
    return model, *Problems(checkpoint['config']['dataset']).held_out(range(32), 12)


def test_policies_end_at_one_fixed_point_and_latest_is_there_first(problems):
    """exact is Jacobi's iteration, latest Gauss and Seidel's."""
    model, idx, targets = problems
    exact, _ = token_by_token(model, idx, [30], None)
    ring, _ = token_by_token(model, idx, [30], None, policy='ring', ring=4)
    latest, _ = token_by_token(model, idx, [30], None, policy='latest')
    for other in (ring, latest):
        torch.testing.assert_close(other, exact, rtol=0, atol=1e-3)

    def steps_to_the_end(policy):
        for n in range(1, 31):
            logits, _ = token_by_token(model, idx, [n], None, policy=policy)
            if F.cross_entropy(logits.flatten(0, 1), targets.flatten()) < loss + 5e-3:
                return n
    loss = F.cross_entropy(exact.flatten(0, 1), targets.flatten())
    assert steps_to_the_end('latest') <= steps_to_the_end('exact') - 2


@pytest.mark.parametrize('name', [None, 'norm_rel', 'accel'])
@pytest.mark.parametrize('chunk', [5, 12])
def test_with_latest_a_prompt_settles(problems, name, chunk):
    """Whatever the rule and the chunks, where as many loops side by side are not enough."""
    model, idx, _ = problems
    rule = make_exit(name, dict(norm_rel=1e-3, accel=1e-2)[name]) if name else None
    counts, lengths = [6], [12] * 30 + [7, 1]
    rows = [row[:n] for row, n in zip(idx, lengths)]
    ends, _ = token_by_token(model, idx, [30], None)
    ends = torch.stack([row[n - 1] for row, n in zip(ends, lengths)])
    cache = make_cache(model, counts, 'latest', rows=32)
    with torch.no_grad():
        logits, steps, _ = prefill(model, rows, counts, rule, 0, cache, True, chunk)
        alone, _, _ = prefill(model, rows, counts, rule, 0, None)
    assert 3 * (logits - ends).abs().mean() < (alone - ends).abs().mean()
    assert counts[0] < steps.max() <= counts[0] + chunk - 1


@pytest.mark.parametrize('name', [None, 'accel', 'norm_rel, past'])
@pytest.mark.parametrize('chunk', [1, 3, 16])
def test_with_exact_chunks_change_nothing(tiny, idx, name, chunk):
    model, how = tiny(adapter_init='random'), dict(exit=rule_of(name), n_loop=10, **GREEDY)
    lengths = [3, 14, 9]
    whole = model.generate(idx, 8, lengths=lengths, **how)
    assert_same(model.generate(idx, 8, lengths=lengths, prefill_chunk=chunk, **how), whole)


def test_latest_is_a_ring_of_one(tiny, idx):
    model = tiny(adapter_init='random')
    ring = token_by_token(model, idx, [9, 9], None, policy='ring', ring=1)
    assert_same(ring, token_by_token(model, idx, [9, 9], None, policy='latest'))


def test_a_cache_that_no_memory_holds_is_refused(tiny, idx):
    with pytest.raises(ValueError, match='GiB of memory.* lower n_loop'):
        tiny().generate(idx, 1, n_loop=10 ** 8)


# -------------------------------------------------------------------------------------------------
# rows of tokens

@pytest.mark.parametrize('name', FEW)
@pytest.mark.parametrize('T, new', [(1, 20), (16, 12)])         # past the block of 16
def test_generation_with_a_cache_is_without(tiny, idx, name, T, new):
    model, how = tiny(adapter_init='random'), dict(exit=rule_of(name), n_loop=10, **GREEDY)
    cached = model.generate(idx[:2, :T], new, cache='exact', **how)
    assert_same(cached, model.generate(idx[:2, :T], new, cache=None, **how))


@pytest.mark.parametrize('changes', [{}, dict(groups=[])])
def test_rotary_positions_move_with_the_window(tiny, idx, changes):
    """Cached and drafted as without a cache, past the block of 16."""
    model = tiny(pos='rotary', rope_base=100.0, adapter_init='random', **changes)
    plain = model.generate(idx[:1, :9], 14, cache=None, **GREEDY)
    assert_same(model.generate(idx[:1, :9], 14, cache='exact', **GREEDY), plain)
    if model.groups:
        assert_same(model.generate(idx[:1, :9], 14, draft_loops=1, **GREEDY), plain)


def test_a_model_without_groups_generates(tiny, idx):
    model = tiny(groups=[])
    cached = model.generate(idx, 20, cache='exact', **GREEDY)
    assert_same(cached, model.generate(idx, 20, cache=None, **GREEDY))
    assert cached[1].shape == (3, 20, 0)


def test_window():
    starts = [window(n, 16) for n in (1, 16, 17, 24, 25, 32, 33)]
    assert starts == [0, 0, 8, 8, 16, 16, 24]
    for block in (1, 2, 5, 16):
        for n in range(1, 60):
            in_window = n - window(n, block)
            assert min(n, block // 2) <= in_window <= block


@pytest.mark.parametrize('name, cache', [(name, 'exact') for name in FEW] + [('accel', None)])
def test_rows_of_any_lengths_are_as_alone(tiny, name, cache):
    model = tiny(adapter_init='random')
    how = dict(exit=rule_of(name), n_loop=8, cache=cache, **GREEDY)
    idx = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(3))
    lengths = [3, 14, 9, 1]
    out, steps = model.generate(idx, 8, lengths=lengths, **how)
    for b, n in enumerate(lengths):
        alone = model.generate(idx[b:b + 1, :n], 8, **how)
        assert_same((out[b:b + 1, :n + 8], steps[b:b + 1]), alone)


@pytest.mark.parametrize('step_noise', [0.0, 0.02])
def test_rows_of_any_lengths_have_the_logits_that_they_have_alone(tiny, idx, step_noise):
    model = tiny(adapter_init='random', step_noise=step_noise)
    counts, rule = [10, 10], rule_of('accel')
    rows, new = [idx[0, :4], idx[1, :11], idx[2, :7]], idx[:, 12:13]
    cache = make_cache(model, counts)
    with torch.no_grad():
        prefill(model, rows, counts, rule, 0, cache)
        logits, steps, _ = one_token(model, new, [4, 11, 7], counts, rule, 0, cache)
    assert len(steps.unique(dim=0)) > 1             # a row leaves the batch before another
    for b, row in enumerate(rows):
        alone = model(torch.cat((row, new[b]))[None], n_loop=10, exit=rule)[0]
        torch.testing.assert_close(logits[b], alone[0, -1], **CLOSE)


@pytest.mark.parametrize('name', ['norm', 'norm, past'])
def test_stop_at_a_token(tiny, idx, name):
    model, how = tiny(adapter_init='random'), dict(n_loop=6, exit=rule_of(name), **GREEDY)
    free, free_steps = model.generate(idx[:, :5], 20, **how)
    new = free[:, 5:].tolist()
    # one that row 0 or 1 says while the last row goes on
    stop = next(token for said in zip(*new) for token in said[:2] if token not in new[2][:5])
    out, steps = model.generate(idx[:, :5], 20, stop=stop, **how)
    for b in range(3):
        n = new[b].index(stop) + 1 if stop in new[b] else 20
        assert_same((out[b, :5 + n], steps[b, :n]), (free[b, :5 + n], free_steps[b, :n]))
        assert (out[b, 5 + n:] == stop).all() and (steps[b, n:] == 0).all()


def test_rows_that_have_stopped_cost_nothing(tiny, idx):
    model, rows_of_pass = tiny(adapter_init='random'), []
    free, _ = model.generate(idx[:, :5], 12, n_loop=3, **GREEDY)
    stop = int(free[0, 7])
    model.h[0].register_forward_pre_hook(lambda _, args: rows_of_pass.append(len(args[0])))
    model.generate(idx[:, :5], 11, n_loop=3, stop=stop, **GREEDY)
    # before the new token t, the rows that have not said it
    going_on = [sum(stop not in row[5:5 + t] for row in free) for t in range(11)]
    assert rows_of_pass == [n for n in going_on if n > 0]
    assert min(rows_of_pass) < 3


def test_warm_start_is_the_last_state_of_the_token_before(tiny, idx):
    model, counts = tiny(adapter_init='random'), [3, 3]
    rows, _ = model.generate(idx[:, :5], 6, n_loop=3, warm_start=True, **GREEDY)
    cache = make_cache(model, counts)
    with torch.no_grad():
        logits, _, last_states = prefill(model, list(idx[:, :5]), counts, None, 0, cache)
        for t in range(5, 10):
            assert torch.equal(rows[:, t], logits.argmax(-1))
            warm = [state.clone() for state in last_states]
            logits, _, last_states = one_token(model, rows[:, t:t + 1], t, counts, None, 0, cache,
                                               warm)
        cold, _, _ = one_token(model, rows[:, 9:10], 9, counts, None, 0, cache)
    assert not torch.allclose(cold, logits, atol=1e-4)


# -------------------------------------------------------------------------------------------------
# drafts

@pytest.mark.parametrize('name', FEW)
@pytest.mark.parametrize('draft_loops, new', [(2, 14), (9, 3)])
def test_speculative_is_greedy(tiny, idx, name, draft_loops, new):
    model, prompt = tiny(adapter_init='random'), idx[:1, :6]
    how = dict(n_loop=10, exit=rule_of(name), **GREEDY)
    plain = model.generate(prompt, new, **how)
    assert_same(model.generate(prompt, new, draft_loops=draft_loops, **how), plain)
    # and it ends at the same token
    tokens = plain[0][0, 6:].tolist()
    stop = tokens[-2]
    n = tokens.index(stop) + 1
    stopped = model.generate(prompt, new, stop=stop, draft_loops=draft_loops, **how)
    assert_same(stopped, (plain[0][:, :6 + n], plain[1][:, :n]))


def test_speculation_runs_fewer_full_passes(tiny, idx):
    model, loops_of_pass = tiny(block_size=64), []
    model.groups[1].register_forward_pre_hook(lambda _, args: loops_of_pass.append(args[1]))
    model.generate(idx[:1, :6], 40, n_loop=12, draft_loops=4, **GREEDY)
    assert sum(n == 12 for n in loops_of_pass) < 20
    assert any(n == 4 for n in loops_of_pass)


# -------------------------------------------------------------------------------------------------
# bad input

@pytest.mark.parametrize('name', FEW)
@pytest.mark.parametrize('cache', ['exact', None])
def test_a_nan_stops_with_a_clear_error(tiny, idx, name, cache):
    model = tiny()
    model.groups[0].norm.weight.data[3] = math.nan
    with pytest.raises(ValueError, match='not finite'):
        list(stream(model, [idx[0]], 5, exit=rule_of(name), cache=cache))


@pytest.mark.parametrize('how, words', [
    (dict(max_new_tokens=0), 'max_new_tokens'),
    (dict(temperature=-1), 'temperature'),
    (dict(top_k=0), 'top_k'),
    (dict(n_loop=0), 'n_loop'),
    (dict(cache='ring', ring=0), 'ring must have at least 1'),
    (dict(cache='newest'), 'unknown cache policy .newest.'),
    (dict(warm_start=True, cache=None), 'needs a cache'),
    (dict(prefill_chunk=0), 'prefill_chunk must be at least 1'),
    (dict(prefill_chunk=4, cache=None), 'with a cache'),
    (dict(draft_loops=3, n_loop=3, temperature=0),
     'draft_loops must lie between 1 and n_loop - 1 = 2'),
    (dict(draft_loops=0, temperature=0), 'draft_loops'),
    (dict(draft_loops=1), 'greedily'),
    (dict(draft_loops=1, temperature=0, cache=None), 'greedily'),
    (dict(draft_loops=1, temperature=0, warm_start=True), 'do not go together'),
    (dict(lengths=[3, 0, 2]), 'no prompt is empty'),
    (dict(lengths=[3, 17, 2]), 'from 1 to 16'),
    (dict(lengths=[3]), 'each of the 3 rows')])
def test_bad_input(tiny, idx, how, words):
    with pytest.raises(ValueError, match=words):
        tiny().generate(**dict(idx=idx, max_new_tokens=1) | how)


def test_an_empty_prompt(tiny, idx):
    with pytest.raises(ValueError, match='prompt is empty'):
        tiny().generate(idx[:, :0], 1)
