"""
Decoding: prompts in, tokens out.

    python decode.py                    a prompt decoded with every cache policy and some exit rules
    python decode.py --start='def ' --n_loop=12

`stream` reads prompts and yields new tokens (B, 1), each with the loop steps that it took. It keeps
the rows, moves their context windows, draws the tokens and knows when to stop. What comes next in a
window is made in one of three ways: OneByOne, Drafts, or a Wave (waves.py). It knows nothing about
text.

Of the cache policies (cache.py), `exact` gives what the model gives without a cache. With `latest`
a prompt loops until it has converged, and each new token then reads its converged states.

Geiping 5 and App. D.6: ring, self-speculation, warm start.

    B, T, V    rows; tokens of a pass; vocab_size
    plan       a loops.Plan: the loop budget, the rule, the noise and the cache of all passes
    start      the first token of a row that is in the context window; positions count from there
"""
import math
import os
import time
from dataclasses import replace
from functools import lru_cache
from numbers import Integral

import torch

from cache import POLICIES, Span, make_cache
from exits import make_exit
from loops import Plan, as_noise, derived_seed
from model import of_groups
from waves import Wave

# without a rule, a prompt has converged once no state moves by 1% of its norm or more
CONVERGED = make_exit('norm_rel', 1e-2, past=True)


# one pass -----------------------------------------------------------------------------------------

def prefill(model, idx, plan, converge=False):
    """
    Run all tokens idx (B, T) at once; each exits on its own. plan.cache must be empty or None.

    converge: loop until all tokens have converged, so that later ones can read them. Returns the
    logits (B, V) after the last token, its steps_used (B, groups), and each group's output for it
    (B, 1, C).
    """
    T = idx.shape[1]
    if converge and T > 1:
        # information needs up to T - 1 extra loop steps to reach the last token
        rule = replace(plan.exit, past=True) if plan.exit else CONVERGED
        plan = replace(plan, counts=[n + T - 1 for n in plan.counts], exit=rule)
    return last_of(model, idx, replace(plan, span=Span(0, T, idx.device)))


def one_token(model, token, position, plan, warm=None):
    """
    One token (B, 1) at this position; returns what prefill does. warm: a first state for each
    group, in place of noise.
    """
    return last_of(model, token, replace(plan, span=Span(position, 1, token.device), warm=warm))


def last_of(model, idx, plan):
    """A pass over idx (B, T) -> logits, steps_used and states of the last token."""
    x, found = model.hidden(idx, plan)
    states = [group.output(one['x'][:, -1:]) for group, one in zip(model.groups, found)]
    return model.lm_head(x[:, -1]), of_groups(found, 'steps_used', idx)[:, -1], states


@torch.no_grad()
def teacher_forced(model, idx, plan, policy='exact', ring=8):
    """
    Given tokens idx (B, T), decoded with a cache policy -> logits (B, T, V), and the loop steps
    kept and block maps evaluated of each group, both (B, T, groups).

    With `exact`, or without a cache (None), one pass over the whole sequence is what decoding token
    by token gives. With any other policy, or a rule by_row, each token runs alone and reads what
    earlier ones have kept.
    """
    whole = policy in ('exact', None) and not (plan.exit and plan.exit.by_row)
    n = idx.shape[1] if whole else 1                # tokens of a pass
    cache = None if whole else make_cache(model, plan.counts, policy or 'exact', ring, idx.shape[1])
    parts = []
    for i, tokens in enumerate(idx.split(n, dim=1)):
        span = Span(i * n, n, idx.device)
        x, found = model.hidden(tokens, replace(plan, span=span, cache=cache))
        parts.append((model.lm_head(x), *(of_groups(found, name, tokens)
                                          for name in ('steps_used', 'evals'))))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


# one seed, one text ------------------------------------------------------------------------------

def choose(logits, temperature, top_k, draws):
    """
    Logits (B, V) -> tokens (B, 1), drawn from softmax(logits / temperature), or from its top_k most
    likely tokens; temperature 0 takes the most likely one. -1 where logits are not finite, which
    Rows.numbers finds.

    draws: (seed, position) of each token; nothing else decides the draw. So every way of decoding
    that gives the same logits gives the same text.
    """
    finite = logits.isfinite().all(dim=-1, keepdim=True)                        # (B, 1)
    if temperature != 0:
        # subtract the largest first, so that a small temperature cannot overflow
        logits = logits.float()
        logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            least = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        noise = torch.stack([gumbel(*draw, logits.shape[-1]) for draw in draws])
        logits = logits + noise.to(logits.device)
    return logits.argmax(dim=-1, keepdim=True).where(finite, -1)


@lru_cache(maxsize=64)      # drafts and waves draw the token at a position several times
def gumbel(seed, position, V):
    """Noise (V,): argmax(log p + gumbel) is a draw from p (the Gumbel-max trick)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'token', position))
    return -torch.empty(V).exponential_(generator=generator).log()


def window(n, block_size):
    """
    Where the context window of a row of n tokens begins.

    At 0 while all tokens fit. When the block is full, the window moves on by half a block, so that
    every later token has at least half a block of context.
    """
    hop = max(1, block_size // 2)
    return hop * max(0, math.ceil((n - block_size) / hop))


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


class Rows:
    """
    Rows of tokens idx (B, n) that are being continued: their context window, and the draws of what
    follows.

    The last block_size tokens are kept. seed: row i has seed + i, or give a list of them; None
    draws it from torch's. start: where the context window begins.
    """

    def __init__(self, idx, block_size, temperature=1.0, top_k=None, seed=None):
        if seed is None:
            seed = torch.randint(2 ** 62, ()).item()
        if isinstance(seed, Integral):
            seed = [int(seed) + i for i in range(len(idx))]
        if len(seed) != len(idx):
            raise ValueError(f'seed must be an int, or one for each of the {len(idx)} rows, not '
                             f'{seed}')
        self.seeds, self.idx, self.start = seed, idx[:, -block_size:], 0
        self.cut = idx.shape[1] - self.idx.shape[1]     # draws count these tokens too
        self.block_size, self.temperature, self.top_k = block_size, temperature, top_k

    @property
    def window(self):
        """The tokens that the context window holds."""
        return self.idx[:, self.start:]

    @property
    def last(self):
        """The last token of each row (B, 1), which no pass has read yet."""
        return self.idx[:, -1:]

    @property
    def position(self):
        """Its position in the context window."""
        return self.idx.shape[1] - 1 - self.start

    def draw(self, logits, skip=0):
        """
        Logits (B, T, V) -> the next T tokens of each row (B, T). skip: how many tokens that are not
        in the rows yet come before these.
        """
        B, T, _ = logits.shape
        n = self.cut + self.idx.shape[1] + skip
        draws = [(seed, n + i) for seed in self.seeds for i in range(T)]
        return choose(logits.flatten(0, 1), self.temperature, self.top_k, draws).view(B, T)

    @staticmethod
    def numbers(tokens):
        """
        Tokens that were drawn, of any shape, as a list of ints. Here, and for the signals of exit
        rules, the host waits for the device. ValueError if their logits were not finite.
        """
        numbers = tokens.flatten().tolist()
        if min(numbers) < 0:
            raise ValueError('the logits are not finite: the model or its input holds a NaN or an '
                             'infinity')
        return numbers

    def append(self, token):
        """A token (B, 1)."""
        self.idx = torch.cat((self.idx, token), dim=1)
        self.start = window(self.idx.shape[1], self.block_size)


# many tokens --------------------------------------------------------------------------------------

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
    waves.Wave). passes: a list, see loops.Plan.

    ValueError for what is out of range or does not fit together, and for a NaN.
    """
    check(idx, max_new_tokens, temperature, top_k)
    rows = Rows(idx, model.config.block_size, temperature, top_k, seed)
    plan = Plan(model.loop_counts(n_loop, exit), exit, as_noise(noise_seed), passes=passes)
    way = (Wave(model, plan, wave, wave_steps, trace) if wave else
           OneByOne(model, warm_start) if draft_loops is None else
           Drafts(plan, draft_loops, draft_tokens))
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


# three ways to make the next tokens; the third is waves.Wave --------------------------------------
#
#     cache                     the only cache policy that it works with, None = any
#     begin(token, states)      a window has been read: its first new token (B, 1), and what the
#                               groups put out for the token before that, (B, 1, C) each
#     next_tokens(model, plan, rows, most)
#                               at most `most` tokens, [(token (B, 1), steps_used (B, groups), its
#                               B numbers), ...]

class OneByOne:
    """
    A token a pass. warm_start: its loops start from what the groups put out for the token before
    it, not from noise (Geiping App. D.6).
    """
    cache = None

    def __init__(self, model, warm_start=False):
        if warm_start and not all(group.adapter.reads_e for group in model.groups):
            raise ValueError('warm_start begins with the states of another token, so it needs a '
                             'model whose loop steps read their input')
        self.warm_start, self.states = warm_start, None

    def begin(self, token, states):
        self.states = states

    def next_tokens(self, model, plan, rows, most):
        warm = self.states if self.warm_start else None
        logits, steps, self.states = one_token(model, rows.last, rows.position, plan, warm)
        token = rows.draw(logits[:, None])
        return [(token, steps, rows.numbers(token))]


class Drafts:
    """
    Self-speculation (Geiping 5): draft up to `tokens` tokens with few loops, then run them side by
    side with all loops, and keep those that agree. Draft and check use the same draws, so that the
    text is that of plain decoding.
    """
    cache, name = 'exact', 'draft_loops'

    def __init__(self, plan, loops, tokens=4):
        if not 1 <= loops < min(plan.counts, default=1):
            raise ValueError(f'draft_loops must lie between 1 and n_loop - 1, not {loops}')
        if plan.exit and plan.exit.by_row:
            raise ValueError(f"the rule '{plan.exit.name}' reads all tokens of a pass at once, so "
                             'drafts would change the text: choose another, or leave out drafts')
        if tokens < 1:
            raise ValueError(f'draft_tokens must be at least 1, not {tokens}')
        self.loops, self.tokens = loops, tokens

    def begin(self, token, states):
        """Nothing to remember: a draft starts from the cache alone."""

    def next_tokens(self, model, plan, rows, most):
        # less than `tokens` if the window or `most` lacks room (the check adds one token)
        few = replace(plan, counts=[self.loops] * len(plan.counts), exit=None)
        position = rows.position
        room = min(self.tokens, rows.block_size - 1 - position, most - 1)
        tokens = [rows.last]
        for i in range(room):
            logits, _, _ = one_token(model, tokens[-1], position + i, few)
            # the check finds a NaN, too; until then the draft is any token
            tokens.append(rows.draw(logits[:, None], skip=i).clamp(min=0))
        # check: all loops on all of them at once, which overwrites the keys and values of the draft
        inputs = torch.cat(tokens, dim=1)               # last, d1, d2 ...: (1, 1 + room)
        span = Span(position, 1 + room, inputs.device)
        x, found = model.hidden(inputs, replace(plan, span=span, width=1 + self.tokens))
        made = rows.draw(model.lm_head(x))              # t1, t2, t3 ...: (1, 1 + room)
        # keep t1, t2 ... up to and including the first that differs from its draft. Later drafts
        # leave keys behind the last token; they are overwritten before anything reads them
        numbers = rows.numbers(torch.cat((inputs[:, 1:], made), dim=1))
        drafts, numbers = numbers[:room], numbers[room:]
        agree = next((i for i in range(room) if drafts[i] != numbers[i]), room)
        steps = of_groups(found, 'steps_used', inputs)[0].split(1)
        return list(zip(made.split(1, dim=1), steps, zip(numbers)))[:agree + 1]


# the demonstration --------------------------------------------------------------------------------

start = 'The method returns '
max_new_tokens = 24
n_loop = 8                  # loop steps of the fixed budget, and the budget of the rules
tau = 0.1                   # threshold of norm_rel; accel uses ten times this
ring = 4                    # slots of the ring policy


def main():
    from common.checkpoint import open_run
    model, *_ = open_run('pretrained/text')
    use_one_thread(model)
    prompt = torch.tensor([[*start.encode()]])
    rules = [None, make_exit('norm_rel', tau), make_exit('accel', 10 * tau)]
    ways = [(f'{policy or "no cache"}, {f"{rule.name} {rule.tau:g}" if rule else "fixed"}',
             dict(cache=policy, exit=rule)) for policy in (*POLICIES, None) for rule in rules]
    if n_loop > 2:
        ways.append(('exact, drafts of 2 loops', dict(cache='exact', draft_loops=2)))
    reference = None
    print(f'{"":28s}   equal tokens   loop steps   ms a token')
    for name, how in ways:
        begin = time.perf_counter()
        tokens, steps = zip(*stream(model, prompt, max_new_tokens, temperature=0, n_loop=n_loop,
                                    ring=ring, **how))
        ms = 1e3 * (time.perf_counter() - begin) / len(tokens)
        reference = reference or tokens
        same = sum(bool(a == b) for a, b in zip(tokens, reference))
        print(f'{name:28s} {same:12d} of {len(tokens)} '
              f'{torch.cat(steps).float().mean():11.2f} {ms:12.1f}')
    print('\nequal tokens: as in the first line. With `latest` the prompt may loop beyond the '
          'budget, until it has converged.\nThe steps of drafts are not counted.')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
