"""The invariants of exits with keys and values by loop step: every way of feeding the tokens gives the same model."""
import math

import pytest
import torch
from conftest import TAUS
from torch._dynamo.testing import CompileCounter

from decode import make_cache, one_token, prefill, stream, window
from exits import EXITS, make_exit
from loops import KeysValues, Span

GREEDY = dict(temperature=0)
CASES = [None, *EXITS]


def rule_of(name):
    return name and make_exit(name, TAUS[name])


def token_by_token(model, idx, counts, rule, cut=1, policy='exact', **how):
    """Logits (B, T, V), steps (B, T, groups): the first `cut` tokens at once, the others one by one through a cache."""
    cache = make_cache(model, counts, policy, **how)
    with torch.no_grad():
        first, groups = model.hidden(idx[:, :cut], counts, rule, cache=cache)
        logits, steps = [model.lm_head(first)], [torch.stack([used for _, used in groups], dim=2)]
        for t in range(cut, idx.shape[1]):
            out, used, _ = one_token(model, idx[:, t:t + 1], t, counts, rule, 0, cache)
            logits.append(out[:, None])
            steps.append(used[:, None])
    return torch.cat(logits, dim=1), torch.cat(steps, dim=1)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('seed, cut', [(0, 1), (1, 7), (2, 15)])
def test_token_by_token_is_the_whole_sequence(tiny, name, seed, cut):
    model, rule, trace = tiny(seed=seed, adapter_init='random'), rule_of(name), []
    idx = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(seed))
    whole = model(idx, n_loop=12, exit=rule, trace=trace)[0]
    logits, steps = token_by_token(model, idx, [12, 12], rule, cut)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    used = torch.stack([t['steps_used'] for t in trace], dim=2)
    assert torch.equal(steps, used) and (rule is None or len(used.unique()) > 1)


def test_step_noise_is_by_position_too(tiny, idx):
    model = tiny(step_noise=0.1)
    torch.testing.assert_close(token_by_token(model, idx, [5, 5], None)[0], model(idx, n_loop=5)[0], rtol=1e-4, atol=1e-4)


def test_a_compiled_step_is_the_step(tiny, idx):
    """The same logits and steps, and no graph for another loop count or position."""
    model, rule, counter, counts = tiny(), rule_of('accel'), CompileCounter(), []
    for n in (9, 4, 7):
        model.groups[0].lone = model.groups[1].lone = None
        eager = token_by_token(model, idx[:1], [n, n + 1], rule)
        for group in model.groups:
            group.compile_lone(backend=counter) if not counts else setattr(group, 'lone', lone.pop(0))
        compiled = token_by_token(model, idx[:1], [n, n + 1], rule)
        lone = [group.lone for group in model.groups]
        counts.append(counter.frame_count)
        torch.testing.assert_close(compiled[0], eager[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(compiled[1], eager[1])
    assert 0 < counts[0] == counts[-1] <= 8


@pytest.mark.parametrize('name', CASES)
def test_a_ring_as_long_as_the_budget_is_exact(tiny, idx, name):
    model, rule = tiny(), rule_of(name)
    exact = token_by_token(model, idx, [9, 9], rule)
    ring = token_by_token(model, idx, [9, 9], rule, policy='ring', ring=9)
    assert torch.equal(exact[0], ring[0]) and torch.equal(exact[1], ring[1])


@pytest.mark.parametrize('policy, ring', [('ring', 4), ('latest', 1)])
def test_fewer_slots_change_the_result_and_keep_less(tiny, idx, policy, ring):
    model = tiny(adapter_init='random')
    exact, fewer = token_by_token(model, idx, [9, 9], None)[0], token_by_token(model, idx, [9, 9], None, policy=policy, ring=ring)[0]
    assert 1e-4 < (exact - fewer).abs().max() < 1
    assert [layer.slots for layers in make_cache(model, [9, 9], policy, ring) for layer in layers] == [1, ring, ring, ring, 1]
    # with one slot a ring is `latest`
    assert torch.equal(token_by_token(model, idx, [9, 9], None, policy='ring', ring=1)[0], token_by_token(model, idx, [9, 9], None, policy='latest')[0])


def test_ring_slots_by_hand():
    kv, new = KeysValues(3, 4), lambda k: torch.full((2, 1, 1, 1, 1), float(k))
    for k in range(1, 6):           # steps 4 and 5 write over 1 and 2
        kv.at(Span(0, 1), k)(new(k))
    assert kv.kv[:, 0, 0, 0, 0, 0].tolist() == [4, 5, 3]
    for k in range(1, 3):           # a token that stops after step 2 leaves step 2 in what it never reached
        kv.at(Span(1, 1), k)(new(k))
    kv.leave(Span(1, 1), torch.tensor([0]), 2)
    assert kv.kv[:, 0, 0, 0, 1, 0].tolist() == [1, 2, 2]


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('prompt', [1, 16])
def test_generation_with_a_cache_is_without(tiny, idx, name, prompt):
    model, how = tiny(adapter_init='random'), dict(exit=rule_of(name), n_loop=10, **GREEDY)
    cached, plain = (model.generate(idx[:2, :prompt], 20, cache=cache, **how) for cache in ('exact', None))      # past the block of 16
    assert torch.equal(cached[0], plain[0]) and torch.equal(cached[1], plain[1])


def test_window():
    assert [window(n, 16) for n in (1, 16, 17, 24, 25, 32, 33)] == [0, 0, 8, 8, 16, 16, 24]
    assert all(n - window(n, b) <= b and n - window(n, b) >= min(n, b // 2) for b in (1, 2, 5, 16) for n in range(1, 60))


@pytest.mark.parametrize('name, cache', [(name, 'exact') for name in CASES] + [('accel', None)])
def test_rows_of_any_lengths_are_as_alone(tiny, name, cache):
    model, how = tiny(adapter_init='random'), dict(exit=rule_of(name), n_loop=8, cache=cache, **GREEDY)
    lengths, g = [3, 14, 9, 1], torch.Generator().manual_seed(3)
    idx = torch.randint(50, (4, 16), generator=g)
    out, steps = model.generate(idx, 14, lengths=lengths, **how)
    for b, n in enumerate(lengths):
        alone, alone_steps = model.generate(idx[b:b + 1, :n], 14, **how)
        assert torch.equal(out[b, :n + 14], alone[0]) and torch.equal(steps[b], alone_steps[0])


def test_rows_of_any_lengths_have_the_logits_that_they_have_alone(tiny, idx):
    model, counts, rule = tiny(adapter_init='random'), [10, 10], rule_of('accel')
    rows = [idx[0, :4], idx[1, :11], idx[2, :7]]
    cache = make_cache(model, counts)
    with torch.no_grad():
        prefill(model, rows, counts, rule, 0, cache)
        batch, _, _ = one_token(model, idx[:, 12:13], [4, 11, 7], counts, rule, 0, cache)
    for b, row in enumerate(rows):
        alone = model(torch.cat((row, idx[b, 12:13]))[None], n_loop=10, exit=rule)[0][0, -1]
        torch.testing.assert_close(batch[b], alone, rtol=1e-4, atol=1e-4)


def test_stop_at_a_token(tiny, idx):
    model, how = tiny(adapter_init='random'), dict(n_loop=6, exit=rule_of('norm'), **GREEDY)
    free, free_steps = model.generate(idx[:, :5], 20, **how)
    stop = int(free[0, 9])                                              # row 0 says it at its fifth new token at the latest
    out, steps = model.generate(idx[:, :5], 20, stop=stop, **how)
    for b in range(3):
        said = free[b, 5:].tolist()
        n = said.index(stop) + 1 if stop in said else 20
        assert torch.equal(out[b, :5 + n], free[b, :5 + n]) and (out[b, 5 + n:] == stop).all()
        assert torch.equal(steps[b, :n], free_steps[b, :n]) and (steps[b, n:] == 0).all()


def test_rows_that_have_stopped_cost_nothing(tiny, idx):
    model, seen = tiny(adapter_init='random'), []
    free, _ = model.generate(idx[:, :5], 12, n_loop=3, **GREEDY)
    stop = int(free[0, 7])
    model.h[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    model.generate(idx[:, :5], 11, n_loop=3, stop=stop, **GREEDY)
    goes_on = [sum(stop not in row[5:5 + t].tolist() for row in free) for t in range(11)]
    assert seen == [n for n in goes_on if n] and min(seen) < 3


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('draft_loops, new', [(2, 31), (9, 3)])
def test_speculative_is_greedy(tiny, idx, name, draft_loops, new):
    model, how = tiny(adapter_init='random'), dict(n_loop=10, exit=rule_of(name), **GREEDY)
    plain, quick = model.generate(idx[:1, :6], new, **how), model.generate(idx[:1, :6], new, draft_loops=draft_loops, **how)
    assert torch.equal(plain[0], quick[0]) and torch.equal(plain[1], quick[1])
    stop = int(plain[0][0, -2])
    assert torch.equal(*(model.generate(idx[:1, :6], new, stop=stop, **how, **more)[0] for more in ({}, dict(draft_loops=draft_loops))))


def test_speculation_runs_fewer_full_passes(tiny, idx):
    model, passes = tiny(block_size=64), []
    model.groups[1].register_forward_pre_hook(lambda _, args: passes.append(args[1]))
    model.generate(idx[:1, :6], 40, n_loop=12, draft_loops=4, **GREEDY)
    assert sum(n == 12 for n in passes) < 20 and any(n == 4 for n in passes)


def test_warm_start_is_the_last_state_of_the_token_before(tiny, idx):
    model, how = tiny(adapter_init='random'), dict(n_loop=3, **GREEDY)
    rows = model.generate(idx[:, :5], 6, warm_start=True, **how)[0]
    cache = make_cache(model, [3, 3])
    with torch.no_grad():
        logits, _, warm = prefill(model, list(idx[:, :5]), [3, 3], None, 0, cache)
        for t in range(5, 10):
            assert torch.equal(rows[:, t], logits.argmax(-1))
            starts = [state.clone() for state in warm]
            logits, _, warm = one_token(model, rows[:, t:t + 1], t, [3, 3], None, 0, cache, starts)
    cold = one_token(model, rows[:, 9:10], 9, [3, 3], None, 0, cache)[0]
    assert not torch.allclose(cold, logits, atol=1e-4)


def test_a_model_without_groups_generates(tiny, idx):
    model = tiny(groups=[])
    cached, plain = (model.generate(idx, 20, cache=cache, **GREEDY) for cache in ('exact', None))
    assert torch.equal(cached[0], plain[0]) and cached[1].shape == (3, 20, 0)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('cache', ['exact', None])
def test_a_nan_stops_with_a_clear_error(tiny, idx, name, cache):
    model = tiny()
    model.groups[0].norm.weight.data[3] = math.nan
    with pytest.raises(ValueError, match='not finite'):
        list(stream(model, [idx[0]], 5, exit=rule_of(name), cache=cache))


@pytest.mark.parametrize('how, word', [
    (dict(max_new_tokens=0), 'max_new_tokens'), (dict(temperature=-1), 'temperature'), (dict(top_k=0), 'top_k'),
    (dict(cache='ring', ring=0), 'ring must have at least 1'), (dict(cache='newest'), 'unknown cache policy .newest.'),
    (dict(draft_loops=3, n_loop=3, temperature=0), 'draft_loops must lie between 1 and n_loop - 1 = 2'), (dict(draft_loops=0, temperature=0), 'draft_loops'),
    (dict(draft_loops=1), 'greedily'), (dict(draft_loops=1, temperature=0, cache=None), 'greedily'), (dict(warm_start=True, cache=None), 'needs a cache'),
    (dict(lengths=[3, 0, 2]), 'no prompt is empty'), (dict(lengths=[3, 17, 2]), 'from 1 to 16'), (dict(lengths=[3]), 'each of the 3 rows'),
    (dict(draft_loops=1, temperature=0, warm_start=True), 'do not go together'), (dict(n_loop=0), 'n_loop')])
def test_bad_input(tiny, idx, how, word):
    with pytest.raises(ValueError, match=word):
        tiny().generate(**dict(idx=idx, max_new_tokens=1) | how)
    with pytest.raises(ValueError, match='prompt is empty'):
        tiny().generate(idx[:, :0], 1)
