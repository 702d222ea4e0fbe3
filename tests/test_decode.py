"""
Decoding: every way of feeding the tokens gives the same model, with exits and without.
"""
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import TAUS, check_bits
from torch._dynamo.testing import CompileCounter

import decode
from cache import Span
from compiled import compile_passes
from decode import Decoder, Drafts, OneByOne, WarmStart, Wave, pick
from exits import Exit, make_exit
from loops import Plan, as_noise

CLOSE = dict(rtol=1e-4, atol=1e-4)
GREEDY, ROTARY = dict(temperature=0), dict(pos='rotary', rope_base=100.0)
RANDOM = dict(injection='concat_random')
WINDOW = dict(pos='rotary', window=3)
SHORT = dict(n_layer=2, groups=[[1]])


def rule_of(name):
    return name and make_exit(name, TAUS[name])


def text_of(stream):
    """What stream yields, as one tensor of tokens and one of steps."""
    return tuple(torch.cat(parts, dim=1) for parts in zip(*stream))


@pytest.mark.parametrize('name, seed, changes', [
    *((name, 0, RANDOM) for name in [None, *TAUS]),
    *((name, 1, RANDOM | ROTARY) for name in (None, 'kl', 'accel')),
    *((name, 0, WINDOW) for name in [None, *TAUS]),
    ('accel', 0, dict(injection='none')), ('kl', 0, dict(groups=[[0], [2, 3], [4]], x0='zero'))])
def test_token_by_token_is_the_whole_sequence(tiny, name, seed, changes):
    """With a slot for each step of the budget, one token after another gives what one pass does."""
    model, rule, trace = tiny(**changes), rule_of(name), []
    counts = [12, 11, 9][:len(model.groups)]
    idx = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(seed))
    logits, _ = model(idx, n_loop=counts, exit=rule, noise_seed=seed, trace=trace)
    steps, evals = (torch.stack([entry[kind] for entry in trace], dim=2)
                    for kind in ('steps_used', 'evals'))
    assert rule is None or len(steps.unique()) > 1
    plan = Plan(counts, rule, as_noise(seed))
    whole = decode.read(model, idx, plan)
    check_bits(whole, (logits, steps, evals))
    for rows in (slice(None), slice(1)):        # a lone row is one number where several are many
        one_by_one = decode.read(model, idx[rows], plan, 12)
        torch.testing.assert_close(one_by_one[0], logits[rows], **CLOSE)
        check_bits(one_by_one[1:], (steps[rows], evals[rows]))


# texts --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, T, changes', [
    (None, 5, {}), ('kl', 1, {}), ('accel', 16, ROTARY), (None, 9, ROTARY | dict(groups=[])),
    (None, 5, WINDOW)])
def test_generate_is_the_argmax_of_the_whole_context(tiny, idx, name, T, changes):
    """Also past the block of 16, where the window moves on."""
    model = tiny(**RANDOM | changes)
    how = dict(exit=rule_of(name), n_loop=10, noise_seed=1)
    out, steps = model.generate(idx[:2, :T], 20, **how, **GREEDY)
    assert out.shape == (2, T + 20) and steps.shape == (2, 20, len(model.groups))
    for t in range(T, T + 20):
        trace = []
        start = 8 * max(0, math.ceil((t - 16) / 8))
        logits, _ = model(out[:, start:t], trace=trace, **how)
        assert torch.equal(out[:, t], logits[:, -1].argmax(-1))
        for g, entry in enumerate(trace):
            assert torch.equal(steps[:, t - T, g], entry['steps_used'][:, -1])
    long, _ = model.generate(out, 6, **how, **GREEDY)
    of_last_block, _ = model.generate(out[:, -16:], 6, **how, **GREEDY)
    assert torch.equal(long[:, :T + 20], out)
    assert torch.equal(long[:, T + 20:], of_last_block[:, 16:])


def test_pick():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(400, 10, 4)
    how = dict(places=range(10), seeds=range(400))
    assert (pick(logits, **how, temperature=0) == 1).all()
    assert set(pick(logits, **how, top_k=2).unique().tolist()) == {1, 3}
    for temperature, top_k in ((1.0, None), (2.0, None), (0.7, 3), (0.7, 99)):
        counts = pick(logits, **how, temperature=temperature, top_k=top_k).flatten().bincount(
            minlength=4)
        left_out = torch.arange(4) < 4 - (top_k or 4)
        p = (logits[0, 0] / temperature).masked_fill(left_out, -math.inf)
        expected = 4000 * p.softmax(0)
        chi_squared = ((counts - expected) ** 2 / expected)[expected > 0].sum()
        assert chi_squared < 16.3               # 3 degrees of freedom: 1 in 1000 is above


@pytest.mark.parametrize('name, changes, how', [
    (None, ROTARY, dict(temperature=0.8)), ('kl', ROTARY, dict(temperature=1.5, top_k=7)),
    ('accel', {}, dict(temperature=0.8)), (None, WINDOW, dict(temperature=0.8))])
def test_one_seed_is_one_text(tiny, idx, name, changes, how):
    """However it is decoded: in a batch, alone, with drafts, in two parts."""
    model = tiny(**RANDOM | changes)
    how |= dict(n_loop=6, exit=rule_of(name))
    text, steps = model.generate(idx, 14, seed=7, **how)
    assert not torch.equal(text, model.generate(idx, 14, seed=8, **how)[0])
    for b in range(3):
        row, alone = idx[b:b + 1], (text[b:b + 1], steps[b:b + 1])
        check_bits(model.generate(row, 14, seed=7 + b, **how), alone)
        check_bits(model.generate(row, 14, seed=7 + b, decoder=Drafts(2), **how), alone)
    # a text that is continued from its 24 tokens, of which the model sees the last block of 16
    again = model.generate(text[:, :24], 6, seed=7, **how)
    check_bits(again, (text, steps[:, 8:]))


# drafts and warm start ----------------------------------------------------------------------------

def test_good_drafts_take_few_full_passes(tiny, idx):
    """Four drafts and the token after them, as often as all agree with all loops."""
    model, loops_of_pass = tiny(block_size=64), []
    model.groups[1].register_forward_pre_hook(
        lambda _, args: loops_of_pass.append(args[1].counts[1]))
    model.generate(idx[:1, :6], 40, n_loop=12, decoder='drafts:loops=11', **GREEDY)
    assert loops_of_pass.count(12) == 1 + math.ceil(39 / 5)
    assert loops_of_pass.count(11) == 7 * 4 + 3


@torch.no_grad()
@pytest.mark.parametrize('changes', [RANDOM, RANDOM | dict(norm_inside=False)])
def test_a_warm_start_begins_where_the_token_before_it_ended(tiny, idx, changes):
    """By hand, through a cache of one slot: what the groups put out is the next first state."""
    model, prompt, plan = tiny(**changes), idx[:1, :5], Plan([4, 4])
    stream = decode.stream(model, prompt, 8, plan, WarmStart(), 'latest', **GREEDY)
    tokens, _ = text_of(stream)
    cached = replace(plan, cache=decode.make_cache(model, plan.counts, 'latest'))
    x, results = model.hidden(prompt, replace(cached, span=Span(0, 5)))
    expected = []
    for position in range(5, 13):
        expected.append(model.lm_head(x[:, -1]).argmax(-1).item())
        warm = [group.output(result['x'])[:, -1:] for group, result in zip(model.groups, results)]
        x, results = model.hidden(torch.tensor([expected[-1:]]),
                                  replace(cached, span=Span(position), warm=warm))
    assert tokens[0].tolist() == expected
    cold, _ = text_of(decode.stream(model, prompt, 8, plan, OneByOne(), 'latest', **GREEDY))
    assert not torch.equal(cold, tokens)


@pytest.mark.parametrize('how, changes', [
    (dict(max_new_tokens=0), {}), (dict(temperature=-1.0), {}), (dict(top_k=0), {}),
    (dict(cache=0), {}), (dict(cache='newest'), {}), (dict(n_loop=0), {}), (dict(n_loop=[1]), {}),
    (dict(decoder='drafts:loops=3', n_loop=3), {}), (dict(decoder='drafts:loops=-1'), {}),
    (dict(decoder='drafts:tokens=0'), {}), (dict(decoder='drafts:loops=1', rows=2), {}),
    (dict(decoder='drafts:loops=1', cache='latest'), {}), (dict(decoder='drats'), {}),
    (dict(decoder='wave', cache='exact'), {}), (dict(decoder='wave', rows=2), {}),
    (dict(decoder='wave:width=0'), {}), (dict(decoder='wave:height=2'), {}),
    (dict(decoder='wave'), dict(groups=[])), (dict(decoder='wave'), dict(injection='none')),
    (dict(decoder='warm_start'), dict(injection='none')),
    (dict(decoder='wave', exit=Exit(None, reads='through_coda')), {}), (dict(exit='acel'), {}),
    (dict(exit=Exit(None, reads='stars')), {}), (dict(exit=make_exit('norm', wake=True)), {}),
    (dict(idx=torch.zeros(1, 0, dtype=torch.long)), {})], ids=lambda part: str(part)[:30])
def test_bad_input(tiny, idx, how, changes):
    how = dict(idx=idx[:how.pop('rows', 1), :9], max_new_tokens=1) | how
    with pytest.raises(ValueError):
        tiny(**changes).generate(how.pop('idx'), how.pop('max_new_tokens'), **how)


class Greedy(Decoder):
    """Reads and gives three tokens, without a look at the room for them."""

    def __call__(self, model, plan, text, most):
        decode.one_pass(model, text.last.repeat(1, 3), text.position, plan)
        return text.last.repeat(1, 3), torch.zeros(1, 3, self.groups)


@pytest.mark.parametrize('T, new, groups, message', [
    (5, 3, 2, 'Greedy must give .* the 2 tokens left'), (5, 4, 1, 'Greedy must give'),
    (14, 9, 2, 'a sequence of 17 tokens')])
def test_a_decoder_that_takes_too_much_room(tiny, idx, T, new, groups, message):
    Greedy.groups = groups
    with pytest.raises(ValueError, match=message):
        tiny().generate(idx[:1, :T], new, n_loop=2, decoder=Greedy())


# compiled -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('decoder, cache, counts, rows, widths, graphs', [
    (OneByOne(), 'latest', [2], 3, {1}, 1),
    (Drafts(1), 'exact', [2], 1, {1, 5}, 3),
    (Wave(4, steps=2), 'latest', [6], 1, {4}, 1),
    (Wave(12), 'latest', [40], 1, {12}, 1),
    (WarmStart(), 4, [6], 1, {1}, 1),
    ('with a rule', 'exact', [6], 3, {1}, 0)])
def test_compiled_texts_are_those_of_eager(tiny, decoder, cache, counts, rows, widths, graphs,
                                           monkeypatch):
    """Over window moves, and for another text, a setting is compiled once."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled, eager = (tiny(**SHORT, block_size=24) for _ in range(2))
    to_counter = partial(torch.compile, backend=counter)
    monkeypatch.setattr(torch, 'compile', lambda run, options, **how: to_counter(run, **how))
    compile_passes(compiled, widths)
    rule = make_exit('norm_rel', 1e-3)
    if decoder == 'with a rule':
        decoder = OneByOne()
    elif not isinstance(decoder, Wave):
        rule = None
    plan = Plan(counts, rule)
    assert decoder.widths(plan) == (widths if graphs else set())
    for seed, new in (1, 48), (2, 20):
        prompts = torch.arange(3)[None] + torch.arange(rows)[:, None] + seed
        how = dict(policy=cache, temperature=0.7, seed=seed)
        passes = [], []
        texts = [text_of(decode.stream(model, prompts, new, replace(plan, passes=of_model), decoder,
                                       **how))
                 for model, of_model in zip((eager, compiled), passes)]
        check_bits(*texts)
        check_bits(*passes)
        assert counter.frame_count == graphs
    reads = [decode.read(model, prompts, plan, 'latest') for model in (eager, compiled)]
    torch.testing.assert_close(*reads, **CLOSE)
