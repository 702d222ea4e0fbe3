"""
Decoding: prompts in, tokens out.

    python -m decode                    a prompt decoded with every cache policy and some exit rules
    python -m decode --start='def ' --n_loop=12
    python -m decode.wave               a wave, pass by pass
    python -m decode.compiled           what torch.compile saves

`stream` reads prompts and yields new tokens (B, 1), each with the loop steps that it took. It knows
nothing about text. GPT.stream and GPT.generate are the same for plain arguments.

    defaults.py   what is meant where nothing is said, such as cache='auto'
    rows.py       the rows of a batch: their context windows, the draws of their next tokens
    passes.py     one pass of the model: a prompt, one token, given tokens; OneByOne
    drafts.py     Drafts: guess some tokens with few loops, check them with all
    wave.py       Wave: several tokens at once, each at its own depth
    compiled.py   the same passes by torch.compile, or recorded as CUDA graphs
    measure.py    how good and how fast a way to decode is, for bench.py

Three words, here and in sample.py and bench.py: the arguments are a `decoding`, the object that
makes the next tokens is a `decoder`, and the decoding in words, in a printed line, is a `label`.

Of the cache policies (cache.py), `exact` gives what the model gives without a cache. With `latest`
a prompt loops until it has converged, and each new token then reads its converged states.
"""
import os
from dataclasses import replace
from numbers import Integral

import torch

from cache import check_policy, make_cache
from decode.passes import NewToken, OneByOne, prefill, teacher_forced  # noqa: F401
from decode.rows import Rows, Sampling  # noqa: F401


def make_decoder(warm_start=False, draft_loops=None, draft_tokens=4, wave=0, wave_steps=1,
                 trace=None):
    """
    The arguments -> a decoder: Wave of `wave` tokens, Drafts with `draft_loops` loops, or OneByOne.
    ValueError if they ask for two of them. It is imported only if it is chosen.
    """
    if wave and draft_loops is not None:
        raise ValueError('wave and draft_loops are two decoders: give one of them')
    if warm_start and (wave or draft_loops is not None):
        raise ValueError('warm_start is for one token after another: leave out wave and '
                         'draft_loops, or warm_start')
    if wave:
        from decode.wave import Wave
        return Wave(wave, wave_steps, trace)
    if draft_loops is not None:
        from decode.drafts import Drafts
        return Drafts(draft_loops, draft_tokens)
    return OneByOne(warm_start)


def use_one_thread(model):
    """
    Decode a model narrower than 768 with one thread of a CPU from now on. A second thread brings
    nothing, and on busy cores the two wait for each other: three to four times slower when another
    program runs (pretrained/text, two cores). OMP_NUM_THREADS, if it is set, decides instead.
    """
    if model.config.n_embd < 768 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)


def check(idx, max_new_tokens, policy, ring, decoder):
    """ValueError for what is out of range or does not fit together."""
    if policy is not None:
        check_policy(policy, ring)
    if not isinstance(idx, torch.Tensor) or idx.dim() != 2:
        raise ValueError('the prompts must be one tensor (B, T): B rows of T tokens each')
    if idx.numel() == 0:
        raise ValueError('the prompt is empty: give every row at least one token')
    if max_new_tokens <= 0:
        raise ValueError(f'max_new_tokens must be positive, not {max_new_tokens}')
    if decoder.policy and policy != decoder.policy:
        raise ValueError(f"{decoder.name} needs cache='{decoder.policy}', not {policy!r}")
    if decoder.policy and len(idx) > 1:
        raise ValueError(f'{decoder.name} needs one row, not {len(idx)}')
    if policy is None and isinstance(decoder, OneByOne) and decoder.warm_start:
        raise ValueError("warm_start needs a cache: cache='exact', 'ring' or 'latest'")


def stream(model, idx, max_new_tokens, sampling, plan, decoder, policy='exact', ring=8, stop=(),
           converge=False):
    """
    A generator of (token (B, 1), steps_used (B, groups)), max_new_tokens times or until all rows
    have ended.

    idx: prompts (B, T), of which the last block_size tokens are used. With the policy 'exact' or
    None each row gets the tokens that it would get alone (without warm_start). sampling: how tokens
    are drawn; a draw depends on the position in the whole prompt. plan: loop budget, exit rule and
    noise. decoder: see make_decoder. policy, ring: of the cache, and its slots; None = no cache.
    stop: the token, or a list of tokens, that end a row, which then yields the first one with 0
    steps. converge: does a prompt loop until it has converged? Nothing is left open here: see
    defaults.py.

    ValueError at once for what is out of range or does not fit together; for a NaN when the
    generator comes upon it.
    """
    decoder.start(model, plan)
    check(idx, max_new_tokens, policy, ring, decoder)
    model.check_tokens(idx)
    if plan.rule:
        model.reader(plan.rule)         # a ValueError if the model has not what the rule reads
    if isinstance(stop, Integral):
        stop = [stop]
    rows = Rows(idx, model.config.block_size, sampling, stop or ())
    return continue_rows(model, rows, max_new_tokens, plan, decoder, policy, ring, converge)


@torch.no_grad()
def continue_rows(model, rows, max_new_tokens, plan, decoder, policy, ring, converge):
    """Yield the new tokens of rows, see stream."""
    T_max = min(rows.block_size, rows.idx.shape[1] + max_new_tokens)
    wakes = plan.rule is not None and plan.rule.wake
    read_from = None            # where the context window began that has been read
    n_new = 0
    while n_new < max_new_tokens:
        if policy is None or read_from != rows.start:
            # the first time round, and whenever the context window has moved (or there is no
            # cache): read it at once
            read_from = rows.start
            if policy is not None:
                cache = make_cache(model, plan.counts, policy, ring, T_max, wakes)
                plan = replace(plan, cache=cache)
            logits, steps_used, outputs = prefill(model, rows.context, plan, converge)
            token = rows.draw(logits[:, None])
            new_tokens = [NewToken(token, steps_used, rows.numbers(token))]
            decoder.begin(token, outputs)
        else:
            new_tokens = decoder.next_tokens(model, plan, rows, max_new_tokens - n_new)
        for token, steps_used, numbers in new_tokens:
            token, steps_used = rows.repeat_stop(token, steps_used)
            yield token, steps_used
            rows.append(token, numbers)
            n_new += 1
            if all(rows.ended):
                return
