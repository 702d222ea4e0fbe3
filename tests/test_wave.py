"""Waves: several tokens at once, against one token after another and a wave by hand."""
import math
from dataclasses import replace

import pytest
import torch

import decode
from cache import Span, make_cache
from decode import OneByOne, Wave, pick
from exits import Exit, make_exit
from loops import Plan, as_noise

RANDOM = dict(injection='concat_random')


def written(model, prompt, new, plan, decoder, **draws):
    """The new tokens (1, new), and their loop steps (1, new, groups), with one slot."""
    tokens, steps = zip(*decode.stream(model, prompt, new, plan, decoder, 'latest', **draws))
    return torch.cat(tokens, dim=1), torch.cat(steps, dim=1)


@pytest.mark.parametrize('changes, n_loop, T', [
    ({}, 5, 5), (dict(pos='rotary', norm_inside=False), 7, 1), (dict(x0='e'), 3, 16),
    (dict(x0='zero', injection='add', groups=[[0], [2, 3], [4]]), 4, 20)])
def test_one_token_with_all_its_loops_is_plain_decoding(tiny, changes, n_loop, T):
    """Past the end of the block of 16, and for a prompt that is longer than it."""
    model = tiny(**RANDOM | changes)
    idx = torch.randint(50, (1, T), generator=torch.Generator().manual_seed(4))
    plan = Plan(model.loop_counts(n_loop), noise=as_noise(1))
    draws = dict(temperature=0.7, top_k=9, seed=3)
    plain = written(model, idx, 20, plan, OneByOne(), **draws)
    never = replace(plan, rule=make_exit('norm', 0))
    waved = written(model, idx, 20, never, Wave(1, n_loop), **draws)
    assert torch.equal(plain[0], waved[0]) and torch.equal(plain[1], waved[1])


def by_hand(model, prompt, new, width, steps, rule, n_loop, seed):
    """
    A wave within one window, token by token, each a dict: the new tokens, their loop steps, and
    what happens in each pass.
    """
    counts = model.loop_counts(n_loop)
    most, end = min(counts) // steps, len(prompt) + new
    groups, cache = range(len(counts)), make_cache(model, counts, 'latest')

    def draw(logits, position):
        return pick(logits[None, None], [position], [seed], 0.8).item()

    def joins(token):
        return dict(input=token, states=None, memo=[None for _ in groups],
                    streak=[0 for _ in groups], age=0, passes=0)
    logits, results = decode.one_pass(model, prompt[None], 0, Plan(counts, rule, cache=cache))
    row, made, trace = prompt.tolist(), [[found['steps_used'][0, -1] for found in results]], []
    row.append(draw(logits[0, -1], len(row)))
    wave = [joins(row[-1])]
    while len(row) < end:
        first = len(row) - 1
        new = torch.full((model.config.n_embd,), math.nan)      # it begins in noise
        warm = [torch.stack([one['states'][g] if one['states'] else new for one in wave])[None]
                for g in groups]
        idx = torch.tensor([[one['input'] for one in wave]])
        span = Span(first, len(wave))
        plan = Plan([steps for _ in groups], span=span, cache=cache, warm=warm)
        x, found = model.hidden(idx, plan)
        ends = [of_group['x'] for of_group in found]
        said = [draw(model.lm_head(x[0, i]), len(row) + i) for i in range(len(wave))]
        for i, one in enumerate(wave):
            one['age'], one['passes'] = one['age'] + 1, one['passes'] + 1
            states = [ends[g][0, i] for g in groups]
            for g in groups if one['states'] else ():
                value, one['memo'][g] = rule.signal(one['states'][g], states[g], one['memo'][g],
                                                    model.readout)
                small = one['age'] > 1 and value < rule.tau
                one['streak'][g] = one['streak'][g] + 1 if small else 0
            one['states'] = states
        n = 0
        while n < len(wave) and (n == 0 or wave[n]['input'] == said[n - 1]) and (
                min(wave[n]['streak']) >= rule.hits or n == 0 and wave[0]['age'] >= most):
            made.append([wave[n]['passes'] * steps for _ in groups])
            row.append(said[n])
            n += 1
        trace.append(dict(place=first, inputs=[one['input'] for one in wave], tokens=said,
                          leave=n, age=[one['age'] for one in wave]))
        for one, token in zip(wave[1:], said):
            if one['input'] != token:
                one |= dict(input=token, age=0)
        wave = [*wave[n:], joins(said[-1])][:min(width, end - len(row))]
    return row[len(prompt):], made, trace


def mean_update(x0, x1, memo, logits_of):
    """The norm of the mean of all updates, from the third on. memo: their sum and number."""
    added = torch.cat((x1 - x0, torch.ones_like(x1[..., :1])), dim=-1)
    memo = added if memo is None else memo + added
    n = memo[..., -1]
    return (memo[..., :-1].norm(dim=-1) / n).where(n > 2, math.nan), memo


@pytest.mark.parametrize('name, tau, how', [
    ('norm', 0.5, dict(width=4, steps=1, n_loop=9)),
    ('kl', 1e-4, dict(width=9, steps=2, n_loop=12)),
    ('accel', 0.3, dict(width=3, steps=2, n_loop=[4, 9])),
    ('accel_rel', 0.2, dict(width=5, steps=1, n_loop=20)),
    ('norm_rel', 0.05, dict(width=40, steps=3, n_loop=30)),
    ('accel_hat', math.inf, dict(width=4, steps=2, n_loop=9)),
    # all tokens leave in one pass, and the wave starts again from one without states
    ('accel', math.inf, dict(width=3, steps=4, n_loop=4)),
    ('norm', 0, dict(width=4, steps=2, n_loop=9)),
    ('mean_update', 0.5, dict(width=4, steps=1, n_loop=20))])
@torch.no_grad()
def test_a_wave_is_what_its_tokens_do(tiny, idx, name, tau, how):
    model = tiny(**RANDOM | dict(block_size=32))
    rule = Exit(mean_update, tau) if name == 'mean_update' else make_exit(name, tau)
    for row, seed in zip(idx[:, :7], (1, 2, 3)):
        trace, expected = [], by_hand(model, row, 20, rule=rule, seed=seed, **how)
        plan = Plan(model.loop_counts(how['n_loop']), rule)
        wave = Wave(how['width'], how['steps'])
        wave.trace = trace
        tokens, steps = written(model, row[None], 20, plan, wave, temperature=0.8, seed=seed)
        assert expected == (tokens[0].tolist(), steps[0].tolist(), trace)
