"""
Tokens out of a model: the prompt at once, then one token at a time, each loop step with its own keys and values.

Not run by itself: GPT.generate and sample.py call it. prompt (B, T) -> tokens, one (B, 1) after another.

Cache policies (slots of keys and values for each looped layer): `exact`, one for each loop step: the same result as the uncached
model; `ring`, the last m steps (Geiping 5); `latest`, one slot, the memory of a model without loops. The last two change the
result. Geiping 5 and App. D.6: ring, self-speculation, warm start. Symbols: n tokens of a row so far, B rows, V vocab_size.
"""
import math

import torch

from loops import KeysValues, RecurrentGroup, Span

POLICIES = ('exact', 'ring', 'latest')


def make_cache(model, counts, policy='exact', ring=8, T_max=None):
    """An empty cache: for each of model.h the KeysValues of its layers. counts: loop budget of each group."""
    if policy not in POLICIES:
        raise ValueError(f"unknown cache policy '{policy}': choose one of {', '.join(POLICIES)}, or None to recompute the context")
    if ring < 1:
        raise ValueError(f'the ring must have at least 1 slot, not {ring}')
    T_max, left = T_max or model.config.block_size, iter(counts)
    cache = []
    for layer in model.h:
        looped = isinstance(layer, RecurrentGroup)
        n = next(left) if looped else 1
        slots = dict(exact=n, ring=min(ring, n), latest=1)[policy]
        cache.append([KeysValues(slots, T_max) for _ in (layer.core if looped else [layer])])
    return cache


def prefill(model, rows, counts, exit, noise_seed, cache):
    """
    All tokens of the rows (1-D tensors of any lengths) at once, each with its own exit, into an empty cache or none.

    Returns logits (B, V) behind each row's last token, its steps_used (B, groups), and each group's last state (B, 1, C).
    """
    idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)       # (B, T); causal, so what stands behind a row is not seen
    last = torch.tensor([len(row) - 1 for row in rows], device=idx.device)
    x, groups = model.hidden(idx, counts, exit, noise_seed, cache=cache)
    at = torch.arange(len(rows), device=idx.device), last
    return model.lm_head(x[at]), stack([used[at] for _, used in groups], x), [state[at][:, None] for state, _ in groups]


def one_token(model, token, start, counts, exit, noise_seed, cache, warm=None):
    """One token (B, 1) a row at position start (int, or a list) -> as prefill. warm: each group's first state, else noise."""
    x, groups = model.hidden(token, counts, exit, noise_seed, Span(start, 1, token.device), cache, warm)
    return model.lm_head(x[:, 0]), stack([used[:, 0] for _, used in groups], x), [state for state, _ in groups]


def stack(steps, x):
    return torch.stack(steps, dim=1) if steps else x.new_zeros(len(x), 0, dtype=torch.long)


def window(n, block_size):
    """First position seen with n tokens: all while they fit; then the window moves on by half a block whenever it is full."""
    hop = max(1, block_size // 2)
    return hop * max(0, -(-(n - block_size) // hop))


def choose(logits, temperature, top_k):
    """Logits (B, V) -> tokens (B, 1), from torch's generator."""
    if not logits.isfinite().all():
        raise ValueError('the logits are not finite: the model or its input holds a NaN or an infinity')
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1)


@torch.no_grad()
def stream(model, rows, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None, cache='exact', noise_seed=0, ring=8,
           stop=None, warm_start=False, draft_loops=None):
    """
    Yield (token (B, 1), steps_used (B, groups)) until max_new_tokens, or until every row has said the token `stop`.

    rows: a list of B prompts, 1-D int64 tensors of any lengths; with cache 'exact' or None each row comes out as it would alone
    (greedily, and without warm_start). A row that has stopped costs nothing more and yields `stop` with 0 steps. cache, ring: the policy and its slots; None =
    recompute the context. warm_start: a token's loops start from the last state of the token before it (Geiping App. D.6).
    draft_loops: self-speculation with so many loops (Geiping 5), greedy, one row; the tokens are those of plain greedy decoding.

    The window: of a prompt longer than block_size the last block_size tokens are seen. When the block is full, the window moves
    on by half a block and is prefilled again, so that every later token sees at least half a block.
    ValueError for an empty prompt, max_new_tokens <= 0, temperature < 0, top_k < 1, ring < 1, draft_loops >= n_loop, NaN.
    """
    counts, block = model.loop_counts(n_loop, exit), model.config.block_size
    check(rows, max_new_tokens, temperature, top_k, cache, warm_start)
    rows = [row[-block:] for row in rows]
    T_max = min(block, max(map(len, rows)) + max_new_tokens)
    if draft_loops is not None:
        yield from speculate(model, rows, max_new_tokens, temperature, counts, exit, cache, noise_seed, draft_loops, warm_start, stop, T_max)
        return
    live, kept, firsts, warm = list(range(len(rows))), None, None, None     # the rows that go on; their cache, windows, states
    for _ in range(max_new_tokens):
        seen = [window(len(rows[b]), block) for b in live]
        if kept is None or seen != firsts:
            kept, firsts = make_cache(model, counts, cache, ring, T_max) if cache else None, seen
            logits, steps, warm = prefill(model, [rows[b][s:] for b, s in zip(live, seen)], counts, exit, noise_seed, kept)
        else:
            at = [len(rows[b]) - 1 - s for b, s in zip(live, seen)]
            last = torch.stack([rows[b][-1:] for b in live])
            logits, steps, warm = one_token(model, last, at, counts, exit, noise_seed, kept, warm if warm_start else None)
        token = torch.full((len(rows), 1), stop or 0, device=logits.device)
        used = steps.new_zeros(len(rows), steps.shape[1])
        token[live], used[live] = choose(logits, temperature, top_k), steps
        rows = [torch.cat((row, token[b])) for b, row in enumerate(rows)]
        yield token, used
        on = [i for i, b in enumerate(live) if stop is None or rows[b][-1] != stop]
        if len(on) < len(live):
            live, firsts, warm = [live[i] for i in on], [firsts[i] for i in on], [state[on] for state in warm]
            for layers in kept or []:
                for layer in layers:
                    layer.kv = layer.kv[:, :, on]
            if not live:
                return


def speculate(model, rows, max_new_tokens, temperature, counts, exit, cache, noise_seed, draft_loops, warm_start, stop, T_max, ahead=4):
    """stream, by drafting up to `ahead` tokens with draft_loops and verifying them side by side with all loops; see there."""
    if warm_start:
        raise ValueError('warm_start and draft_loops do not go together: give one of them')
    if not counts or not 1 <= draft_loops < min(counts):
        raise ValueError(f'draft_loops must lie between 1 and n_loop - 1 = {min(counts, default=1) - 1}, not {draft_loops}')
    if temperature != 0 or len(rows) != 1 or cache != 'exact':
        raise ValueError("draft_loops works greedily, on one row, with an exact cache: temperature=0, cache='exact'")
    row, kept, first, made, block = rows[0], None, None, 0, model.config.block_size
    while made < max_new_tokens:
        seen = window(len(row), block)
        if seen != first:
            kept, first = make_cache(model, counts, T_max=T_max), seen
            logits, steps, _ = prefill(model, [row[first:]], counts, exit, noise_seed, kept)
            tokens = [choose(logits, 0, None)]
        else:
            at = len(row) - 1 - first       # the last token is in the row, not yet in the cache
            draft = [row[None, -1:]]
            for i in range(min(ahead, T_max - 1 - at, max_new_tokens - made - 1)):
                logits, _, _ = one_token(model, draft[-1], at + i, [draft_loops] * len(counts), None, noise_seed, kept)
                draft.append(choose(logits, 0, None))
            x, groups = model.hidden(torch.cat(draft, dim=1), counts, exit, noise_seed, Span(at, len(draft), row.device), kept)
            tokens = choose(model.lm_head(x[0]), 0, None).split(1)              # what all loops say behind each of them
            steps = stack([used[0] for _, used in groups], x)                   # (T, groups)
            right = [bool(a == b) for a, b in zip(tokens, draft[1:])] + [False]
            tokens = tokens[:right.index(False) + 1]                            # up to the first that the draft got wrong
        for token, used in zip(tokens, steps.split(1)):
            row, made = torch.cat((row, token[0])), made + 1
            yield token, used
            if stop is not None and token == stop:
                return


def check(rows, max_new_tokens, temperature, top_k, cache, warm_start):
    if not rows or min(map(len, rows)) == 0:
        raise ValueError('the prompt is empty: give every row at least one token')
    if max_new_tokens <= 0:
        raise ValueError(f'max_new_tokens must be positive, not {max_new_tokens}')
    if temperature < 0:
        raise ValueError(f'temperature must be >= 0 (0 is greedy), not {temperature}')
    if top_k is not None and top_k < 1:
        raise ValueError(f'top_k must be at least 1, not {top_k}')
    if warm_start and cache is None:
        raise ValueError("warm_start needs a cache: cache='exact', 'ring' or 'latest'")


def generate(model, idx, max_new_tokens, lengths=None, stop=None, **how):
    """
    idx (B, T) -> (idx (B, T + new), steps_used (B, new, groups)); how: see stream.

    lengths: of rows that are shorter than T, padded behind; a row's new tokens come right behind its own, then padding again.
    """
    if lengths is not None and (len(lengths) != len(idx) or not all(0 < n <= idx.shape[1] for n in lengths)):
        raise ValueError(f'lengths must hold a number from 1 to {idx.shape[1]} for each of the {len(idx)} rows, not {lengths}: no prompt is empty')
    rows = list(idx) if lengths is None else [row[:n] for row, n in zip(idx, lengths)]
    tokens, steps = zip(*stream(model, rows, max_new_tokens, stop=stop, **how))
    tokens = torch.cat(tokens, dim=1)           # (B, new)
    out = torch.cat((idx, torch.full_like(tokens, stop or 0)), dim=1)
    for b, row in enumerate(rows):
        out[b, len(row):] = stop or 0
        out[b, len(row):len(row) + tokens.shape[1]] = tokens[b]
    return out, torch.stack(steps, dim=1)
