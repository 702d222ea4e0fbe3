"""
Decoding: the prompt at once, then one token at a time.

    python decode.py                    a prompt decoded with every cache policy and some exit rules
    python decode.py --start='def ' --n_loop=12

Prompts go into `stream`, and tokens (B, 1) come out one after another, each with the loop steps
that it took. It knows nothing about text. GPT.stream chooses between it and wave.py.

Of the cache policies (cache.py), `exact` gives what the model gives without a cache. With `latest`
a prompt loops until it has converged, and each new token then reads its converged states.

Geiping 5 and App. D.6: ring, self-speculation, warm start.

    B, T, V    rows; tokens of a pass; vocab_size
    counts     the loop budget of each group
    start      the first token of a row that is in the context window; positions count from there
    cache      the policy's name in `stream`, elsewhere the KeysValues themselves
"""
import math
import time
from dataclasses import replace
from functools import lru_cache, partial

import torch

from cache import KeysValues, Signals, Span
from common.configurator import configure, run
from exits import make_exit
from loops import RecurrentGroup, derived_seed

# -------------------------------------------------------------------------------------------------
start = 'The method returns '
max_new_tokens = 24
n_loop = 8                  # loop steps of the fixed budget, and the budget of the rules
tau = 0.1                   # threshold of norm_rel; accel uses ten times this
ring = 4                    # slots of the ring policy
# -------------------------------------------------------------------------------------------------

POLICIES = ('exact', 'ring', 'latest')
# without a rule, a prompt has converged once no state moves by 1% of its norm or more
CONVERGED = make_exit('norm_rel', 1e-2, past=True)


# the cache, and one pass through it --------------------------------------------------------------

def make_cache(model, counts, policy='exact', ring=8, T_max=None):
    """
    An empty cache: for each layer or group of model.h a list with the KeysValues of its blocks.

    T_max: tokens to hold, block_size by default. ValueError for an unknown policy, or a ring
    without a slot.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown cache policy '{policy}': choose one of {', '.join(POLICIES)}, "
                         'or None to recompute the context')
    if ring < 1:
        raise ValueError(f'the ring must have at least 1 slot, not {ring}')
    T_max = T_max or model.config.block_size
    cache, budgets = [], iter(counts)
    for layer in model.h:
        looped = isinstance(layer, RecurrentGroup)
        n_loop = next(budgets) if looped else 1
        slots = {'exact': n_loop, 'ring': min(ring, n_loop), 'latest': 1}[policy]
        cache.append([KeysValues(slots, T_max) for _ in (layer.core if looped else [layer])])
        if looped and slots == n_loop and policy != 'latest':
            cache[-1][0].signals = Signals(T_max, n_loop)
    return cache


def prefill(model, rows, counts, exit, noise_seed, cache, converge=False):
    """
    Run all tokens of some rows at once, each with its own exit, with an empty cache or none.

    rows: 1-D tensors of any lengths. converge: loop until all tokens have converged, so that later
    ones can read them. Returns the logits (B, V) after each row's last token, its steps_used
    (B, groups), and each group's output for it (B, 1, C).
    """
    # attention is causal, so the padding behind the end of a row is not read
    idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)               # (B, T)
    T = idx.shape[1]
    if converge and T > 1:
        # information needs up to T - 1 extra loop steps to reach the last token
        counts = [n + T - 1 for n in counts]
        exit = replace(exit, past=True) if exit else CONVERGED
    x, states, steps = model.hidden(idx, counts, exit, noise_seed, cache=cache)
    at = torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])
    states = [group.leave(state[at][:, None]) for group, state in zip(model.groups, states)]
    return model.lm_head(x[at]), steps[at], states


def one_token(model, token, position, counts, exit, noise_seed, cache, warm=None):
    """
    One token (B, 1) a row, at this position (an int, or one for each row); returns what prefill
    does. warm: a first state for each group, in place of noise.
    """
    span = Span(position, 1, token.device)
    x, states, steps = model.hidden(token, counts, exit, noise_seed, span, cache, warm)
    states = [group.leave(state) for group, state in zip(model.groups, states)]
    return model.lm_head(x[:, 0]), steps[:, 0], states


@torch.no_grad()
def teacher_forced(model, idx, counts, exit=None, policy='exact', ring=8, noise_seed=0):
    """
    Given tokens idx (B, T), decoded with a cache policy -> logits (B, T, V), and the loop steps
    kept and block maps evaluated of each group, both (B, T, groups).

    With `exact` one pass over the whole sequence is what decoding token by token gives. With any
    other policy, or a rule by_row, each token runs alone and reads what earlier ones have kept.
    """
    whole = policy == 'exact' and not (exit and exit.by_row)
    n = idx.shape[1] if whole else 1                # tokens of a pass
    cache = None if whole else make_cache(model, counts, policy, ring, idx.shape[1])
    parts = []
    for i, tokens in enumerate(idx.split(n, dim=1)):
        trace, span = [], Span(i * n, n, idx.device)
        x, _, steps = model.hidden(tokens, counts, exit, noise_seed, span, cache, trace=trace)
        evals = [entry['evals'] for entry in trace]
        parts.append((model.lm_head(x), steps, torch.stack(evals, dim=-1) if evals else steps))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


# one seed, one text ------------------------------------------------------------------------------

def choose(logits, temperature, top_k, draws):
    """
    Logits (B, V) -> tokens (B, 1), drawn from softmax(logits / temperature), or from its top_k most
    likely tokens; temperature 0 takes the most likely one.

    draws: (seed, position) of each token; nothing else decides the draw. So every way of decoding
    that gives the same logits gives the same text. ValueError for a NaN.
    """
    if not logits.isfinite().all():
        raise ValueError('the logits are not finite: the model or its input holds a NaN or an '
                         'infinity')
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # subtract the largest first, so that a small temperature cannot overflow
    logits = logits.float()
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    noise = torch.stack([gumbel(*draw, logits.shape[-1]) for draw in draws])
    return (logits + noise.to(logits.device)).argmax(dim=-1, keepdim=True)


@lru_cache(maxsize=64)      # drafts and waves draw the token at a position several times
def gumbel(seed, position, V):
    """Noise (V,): argmax(log p + gumbel) is a draw from p (the Gumbel-max trick)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'token', position))
    return -torch.empty(V).exponential_(generator=generator).log()


def row_seeds(seed, n):
    """The seeds of n rows: seed + i for row i, or a list of them. None draws from torch's."""
    if seed is None:
        seed = torch.randint(2 ** 62, ()).item()
    seeds = [seed + i for i in range(n)] if isinstance(seed, int) else seed
    if len(seeds) != n:
        raise ValueError(f'seed must be an int, or one for each of the {n} rows, not {seed}')
    return seeds


def window(n, block_size):
    """
    Where the context window of a row of n tokens begins.

    At 0 while all tokens fit. When the block is full, the window moves on by half a block, so that
    every later token has at least half a block of context.
    """
    hop = max(1, block_size // 2)
    return hop * max(0, math.ceil((n - block_size) / hop))


# many tokens -------------------------------------------------------------------------------------

@torch.no_grad()
def stream(model, rows, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None,
           cache='exact', noise_seed=0, ring=8, stop=None, warm_start=False, draft_loops=None,
           seed=None):
    """
    Yield (token (B, 1), steps_used (B, groups)), max_new_tokens times or until all rows have ended.

    rows: B prompts, 1-D int64 tensors of any lengths, of which the last block_size tokens are used.
    With cache 'exact' or None each row gets the tokens that it would get alone (without
    warm_start). n_loop, exit, noise_seed: see GPT.forward. temperature, top_k: see choose. seed: of
    the tokens drawn, see row_seeds; a draw depends on the position in the whole prompt.
    cache, ring: the policy and its slots; None = recompute the context for every token.
    stop: the token that ends a row, which then yields `stop` with 0 steps.
    warm_start: a token's loops start from the last state of the token before (Geiping App. D.6).
    draft_loops: self-speculation with this many loops (Geiping 5), see speculate.

    ValueError for what is out of range or does not fit together, and for a NaN.
    """
    check(rows, max_new_tokens, temperature, top_k)
    if warm_start and cache is None:
        raise ValueError("warm_start needs a cache: cache='exact', 'ring' or 'latest'")
    counts, block = model.loop_counts(n_loop, exit), model.config.block_size
    seeds = row_seeds(seed, len(rows))
    cut = [max(0, len(row) - block) for row in rows]        # draws count these tokens too
    rows = [row[-block:] for row in rows]
    T_max = min(block, max(map(len, rows)) + max_new_tokens)
    new_cache = partial(make_cache, model, counts, cache, ring, T_max)
    if draft_loops is not None:
        if not 1 <= draft_loops < min(counts, default=1):
            raise ValueError(f'draft_loops must lie between 1 and n_loop - 1, not {draft_loops}')
        if len(rows) != 1 or cache != 'exact' or warm_start:
            raise ValueError("draft_loops works on one row with cache='exact', without warm_start")

        def draw(logits, n):        # tokens n, n + 1, ... of the row, from logits (T, V)
            draws = [(seeds[0], cut[0] + n + i) for i in range(len(logits))]
            return choose(logits, temperature, top_k, draws)
        yield from speculate(model, rows[0], max_new_tokens, counts, exit, noise_seed, draft_loops,
                             stop, new_cache, draw)
        return

    # the cache, the starts of the rows' windows, their last states, who has ended
    kept, starts, warm, ended = None, None, None, torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(max_new_tokens):
        # the next logits: run the whole window if it is new, otherwise the last token alone
        starts_before, starts = starts, [window(len(row), block) for row in rows]
        if kept is None or starts != starts_before:
            kept = new_cache() if cache else None
            contexts = [row[start:] for row, start in zip(rows, starts)]
            logits, steps, warm = prefill(model, contexts, counts, exit, noise_seed, kept,
                                          cache == 'latest')
        else:
            positions = [len(row) - 1 - start for row, start in zip(rows, starts)]
            last = torch.stack([row[-1:] for row in rows])
            logits, steps, warm = one_token(model, last, positions, counts, exit, noise_seed, kept,
                                            warm if warm_start else None)

        # a token for each row; a row that has ended yields `stop`
        draws = [(of_row, first + len(row)) for of_row, first, row in zip(seeds, cut, rows)]
        token = choose(logits, temperature, top_k, draws)                       # (B, 1)
        token[ended], steps[ended] = stop or 0, 0
        yield token, steps
        rows = [torch.cat((row, new)) for row, new in zip(rows, token)]
        if stop is not None:
            ended = token[:, 0] == stop
            if ended.all():
                return


def speculate(model, row, max_new_tokens, counts, exit, noise_seed, draft_loops, stop, new_cache,
              draw, ahead=4):
    """
    stream for one row (n,): draft up to `ahead` tokens with draft_loops, then run them side by side
    with all loops, and keep those that agree. Draft and check use the same draws, so that the text
    is that of plain decoding.
    """
    kept, start, made, block = None, None, 0, model.config.block_size
    while made < max_new_tokens:
        start_before, start = start, window(len(row), block)
        if start != start_before:
            kept = new_cache()
            logits, steps, _ = prefill(model, [row[start:]], counts, exit, noise_seed, kept)
            tokens = [draw(logits, len(row))]
        else:
            # the last token is in the row and not yet in the cache: draft what follows it
            position = len(row) - 1 - start
            room = min(ahead, kept[0][0].T_max - 1 - position, max_new_tokens - made - 1)
            draft = [row[None, -1:]]
            for i in range(room):
                logits, _, _ = one_token(model, draft[-1], position + i,
                                         [draft_loops] * len(counts), None, noise_seed, kept)
                draft.append(draw(logits, len(row) + i))
            # all loops on all of them at once, which overwrites the keys and values of the draft
            span = Span(position, len(draft), row.device)
            x, _, steps = model.hidden(torch.cat(draft, dim=1), counts, exit, noise_seed, span,
                                       kept)
            tokens, steps = draw(model.lm_head(x[0]), len(row)).split(1), steps[0]
            # keep them up to the first token that differs from the draft, and that token too
            right = [bool(a == b) for a, b in zip(tokens, draft[1:])] + [False]
            tokens = tokens[:right.index(False) + 1]
        for token, used in zip(tokens, steps.split(1)):
            row, made = torch.cat((row, token[0])), made + 1
            yield token, used
            if stop is not None and token == stop:
                return


def check(rows, max_new_tokens, temperature, top_k):
    """ValueError for what no way of decoding can do."""
    if not rows or min(map(len, rows)) == 0:
        raise ValueError('the prompt is empty: give every row at least one token')
    if max_new_tokens <= 0:
        raise ValueError(f'max_new_tokens must be positive, not {max_new_tokens}')
    if temperature != 0 and not 1e-6 <= temperature < 1e30:
        raise ValueError(f'temperature must be >= 1e-6, or 0 (greedy), not {temperature}')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k must be at least 1, not {top_k}')


# the demonstration --------------------------------------------------------------------------------

def main():
    from common.checkpoint import open_run
    model, *_ = open_run('pretrained/text')
    prompt = torch.tensor([*start.encode()])
    rules = [None, make_exit('norm_rel', tau), make_exit('accel', 10 * tau)]
    ways = [(f'{policy or "no cache"}, {f"{rule.name} {rule.tau:g}" if rule else "fixed"}',
             dict(cache=policy, exit=rule)) for policy in (*POLICIES, None) for rule in rules]
    if n_loop > 2:
        ways.append(('exact, drafts of 2 loops', dict(cache='exact', draft_loops=2)))
    reference = None
    print(f'{"":28s}   equal tokens   loop steps   ms a token')
    for name, how in ways:
        begin = time.perf_counter()
        tokens, steps = zip(*stream(model, [prompt], max_new_tokens, temperature=0, n_loop=n_loop,
                                    ring=ring, **how))
        ms = 1e3 * (time.perf_counter() - begin) / len(tokens)
        reference = reference or tokens
        same = sum(bool(a == b) for a, b in zip(tokens, reference))
        print(f'{name:28s} {same:12d} of {len(tokens)} '
              f'{torch.cat(steps).float().mean():11.2f} {ms:12.1f}')
    print('\nequal tokens: as in the first line. With `latest` the prompt may loop beyond the '
          'budget, until it has converged.\nThe steps of drafts are not counted.')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
