"""
Decoding: prompts in, tokens out.

    python -m decode                    a prompt decoded with every cache policy and some exit rules
    python -m decode --start='def ' --n_loop=12
    python -m decode.wave               a wave, pass by pass
    python -m decode.compiled           what torch.compile saves

`stream` reads prompts and yields new tokens (B, 1), each with the loop steps that it took. It knows
nothing about text.

    rows.py       the rows of a batch: their context windows, the draws of their next tokens
    passes.py     one pass of the model: a prompt, one token, given tokens; OneByOne
    drafts.py     Drafts: guess some tokens with few loops, check them with all
    wave.py       Wave: several tokens at once, each at its own depth
    compiled.py   the same passes by torch.compile

Of the cache policies (cache.py), `exact` gives what the model gives without a cache. With `latest`
a prompt loops until it has converged, and each new token then reads its converged states.
"""
import os
from dataclasses import replace

import torch

from cache import POLICIES, make_cache
from decode.passes import OneByOne, prefill, teacher_forced  # noqa: F401
from decode.rows import Rows
from loops import Plan, as_noise


def check(idx, max_new_tokens, temperature, top_k):
    """ValueError for what no way of decoding can do."""
    if not isinstance(idx, torch.Tensor) or idx.dim() != 2:
        raise ValueError('the prompts must be one tensor (B, T): B rows of T tokens each')
    if idx.numel() == 0:
        raise ValueError('the prompt is empty: give every row at least one token')
    if max_new_tokens <= 0:
        raise ValueError(f'max_new_tokens must be positive, not {max_new_tokens}')
    if temperature != 0 and not 1e-6 <= temperature < 1e30:
        raise ValueError(f'temperature must be >= 1e-6, or 0 (greedy), not {temperature}')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k must be at least 1, not {top_k}')


def use_one_thread(model):
    """
    Decode a model narrower than 768 with one thread of a CPU from now on. A second one brings
    nothing, and on busy cores the two wait for each other (results/speed.md). OMP_NUM_THREADS, if
    it is set, decides instead.
    """
    if model.config.n_embd < 768 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)


@torch.no_grad()
def stream(model, idx, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None,
           cache='auto', noise_seed=0, ring=8, stop=None, seed=None, warm_start=False,
           draft_loops=None, draft_tokens=4, wave=0, wave_steps=1, trace=None, passes=None):
    """
    Yield (token (B, 1), steps_used (B, groups)), max_new_tokens times or until all rows have ended.

    idx: prompts (B, T), of which the last block_size tokens are used. With cache 'exact' or None
    each row gets the tokens that it would get alone (without warm_start). n_loop, exit, noise_seed:
    see GPT.forward. temperature, top_k: see choose. seed: of the tokens drawn, see Rows; a draw
    depends on the position in the whole prompt.
    cache, ring: the policy and its slots; None = recompute the context for every token; 'auto' =
    'exact', and 'latest' with a wave. (sample.py gives 'latest'.)
    stop: the token, or a list of tokens, that end a row, which then yields the first one with 0
    steps.
    The next tokens come one by one (warm_start: see OneByOne), as drafts (draft_loops,
    draft_tokens: see Drafts), or as a wave (wave, its width; wave_steps; trace, a list: see
    wave.Wave). passes: a list, see loops.Plan.

    ValueError for what is out of range or does not fit together, and for a NaN.
    """
    check(idx, max_new_tokens, temperature, top_k)
    rows = Rows(idx, model.config.block_size, temperature, top_k, seed)
    plan = Plan(model.loop_counts(n_loop, exit), exit, as_noise(noise_seed), passes=passes)
    if wave:
        from decode.wave import Wave
        way = Wave(model, plan, wave, wave_steps, trace)
    elif draft_loops is not None:
        from decode.drafts import Drafts
        way = Drafts(plan, draft_loops, draft_tokens)
    else:
        way = OneByOne(model, warm_start)
    if cache == 'auto':
        cache = way.cache or 'exact'
    if warm_start and cache is None:
        raise ValueError("warm_start needs a cache: cache='exact', 'ring' or 'latest'")
    alone = len(idx) == 1 and not warm_start and not (wave and draft_loops is not None)
    if way.cache and not (alone and cache == way.cache):
        raise ValueError(f"{way.name} needs one row, cache='{way.cache}' and no other way of "
                         f'decoding, not {len(idx)} row(s) with cache={cache!r}')
    T_max = min(rows.block_size, rows.idx.shape[1] + max_new_tokens)

    start, made, ended, over = None, 0, [False] * len(idx), None
    stop = [stop] if isinstance(stop, int) else stop or []
    ends = torch.tensor(stop, device=idx.device)
    while made < max_new_tokens:
        if cache is None or start != rows.start:
            # a new window is read at once, up to its first new token
            start = rows.start
            plan = replace(plan, cache=cache and make_cache(model, plan.counts, cache, ring, T_max))
            converge = bool(cache) and POLICIES[cache].converge
            logits, steps, states = prefill(model, rows.window, plan, converge)
            token = rows.draw(logits[:, None])
            new = [(token, steps, rows.numbers(token))]
            way.begin(token, states)
        else:
            new = way.next_tokens(model, plan, rows, max_new_tokens - made)
        for token, steps, numbers in new:
            if any(ended):
                token, steps = token.masked_fill(over, stop[0]), steps.masked_fill(over, 0)
            yield token, steps
            rows.append(token)
            made += 1
            if stop:
                ended = [end or number in stop for end, number in zip(ended, numbers)]
                if all(ended):
                    return
                over = torch.isin(token, ends)                                  # (B, 1)


def generate(model, idx, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None,
             cache='auto', noise_seed=0, **more):
    """
    Continue idx (B, T) -> (idx (B, T + new), steps_used (B, new, groups)): the new tokens, and the
    loop steps that each of them took. The arguments: see stream.
    """
    tokens, steps = zip(*stream(model, idx, max_new_tokens, temperature, top_k, n_loop, exit,
                                cache, noise_seed, **more))
    return torch.cat((idx, *tokens), dim=1), torch.stack(steps, dim=1)
