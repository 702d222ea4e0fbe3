"""
Continuous depth-wise batching: many requests in one batch, each row at its own loop step.

    python -m serving.batching --requests=FILE      answer a file of JSON lines, see requests.py
    python -m serving.batching                      speed-up over static batches, random requests

When each token exits on its own, a batch in lockstep waits for its slowest row in every group, for
every token. Here a tick runs one stage of the model for all rows that are at it, each at its own
position and loop step, and a row whose request has ended takes the next one:

            tick 1    tick 2    tick 3    tick 4    tick 5
    row 0   k = 2     k = 3               coda      prelude, k = 1
    row 1   k = 5     k = 6     k = 7
    row 2             k = 2     k = 3

A row gets what it would get alone from decode.one_token: it has its own keys, values
and random numbers. Its prompt goes through the same stages, one token after another. The
idea is from Bae et al. 2024; the one slot of `latest` (Geiping 5) serves rows at any loop step.

    B, b    rows of the batch; those of a tick
    g       a recurrent group, from 0
    k       the loop step of a row, from 1
"""
import random
import time
from collections import Counter
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from cache import Span
from common.checkpoint import open_run
from common.configurator import configure, given, pick_device, run
from data import get_encoding
from decode import choose, make_cache, stream, window
from exits import Exit, make_exit, on_device
from loops import RecurrentGroup
from serving.requests import Request, answer, read

# -------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
requests: str | None = None     # a file of JSON lines to answer; None = time random ones
n_requests = 128            # random requests, if there is no file
rows = 32                   # of the batch
exit: str | None = 'norm_rel'   # None = fixed loops
tau: float | None = 0.1     # None = the rule's default
past = False                # exit only once all earlier tokens have converged, with --cache=exact
n_loop: int | list | None = None    # for all groups or each; None = mean_recurrence, 30 with a rule
cache: Literal['latest', 'exact'] = 'latest'
temperature: float = 0.0    # of requests that give none; 0 = greedy
seed = 0                    # of requests that give none, and of the random ones
device = 'auto'
# -------------------------------------------------------------------------------------------------

FIXED = Exit(lambda x0, x1, memo, read: (None, None))       # its signal is undefined at every step


class Stage(NamedTuple):
    """
    What a row runs in one tick. Stages compare in the order in which a token passes them.

    kind: 'layers' = the single-pass layers before group g and then its first loop step, or the coda
    and the head after the last group; 'loop' = a further loop step of group g.
    """
    g: int
    kind: str


PRELUDE = Stage(0, 'layers')


def next_stage(waiting):
    """
    {stage: how many rows wait for it} -> the stage of the next tick: the one with most rows,
    because a tick for one row takes nearly as long as one for many.

    Rows at a loop step count 1.5 times: the other stages can wait, and gather more rows meanwhile.
    The prelude goes first, because it feeds the loops.
    """
    if PRELUDE in waiting:
        return PRELUDE
    return max(waiting, key=lambda stage: ((3 if stage.kind == 'loop' else 2) * waiting[stage],
                                           stage))


# the batch ----------------------------------------------------------------------------------------

class Row:
    """A request in a row of the batch, and how far it has come."""

    def __init__(self, request, n_groups):
        self.request, self.tokens = request, list(request.prompt)
        self.stage, self.steps_used = PRELUDE, [0] * n_groups
        # the first token of its context window, and the current token's position in it
        self.start, self.pos = 0, 0


def draw(logits, rows):
    """Logits (b, V), finite -> a token for each row, drawn as its request says."""
    tokens = torch.zeros(len(rows), 1, dtype=torch.long, device=logits.device)
    ways = [(row.request.temperature, row.request.top_k) for row in rows]
    for way in set(ways):
        same = [i for i in range(len(rows)) if ways[i] == way]
        keys = [(rows[i].request.seed, len(rows[i].tokens)) for i in same]
        tokens[same] = choose(logits[same], *way, keys)
    return tokens[:, 0].tolist()


class Batch:
    """B rows, each with a Row or None, and the tensors that they keep from tick to tick."""

    def __init__(self, model, B, counts, rule, policy, noise_seed):
        self.model, self.counts, self.rule, self.noise_seed = model, counts, rule, noise_seed
        self.rows, C = [None] * B, model.config.n_embd
        # the groups, and the single-pass layers before, between and behind them
        self.groups = [i for i, layer in enumerate(model.h) if isinstance(layer, RecurrentGroup)]
        ends = [-1, *self.groups, len(model.h)]
        self.single = [range(a + 1, b) for a, b in zip(ends, ends[1:])]
        # the state and e's share of a loop step; the loop step, the exit rule's memo and streak
        self.x, self.share = torch.zeros(2, B, 1, C, device=model.lm_head.weight.device)
        self.on_x = [model.h[i].inject(self.x)[0] for i in self.groups]
        self.memo, self.k, self.streak = None, *np.zeros((2, B), dtype=np.int64)
        # keys and values, which one pass of all rows allocates
        self.cache, self.one_slot = make_cache(model, counts, policy), policy == 'latest'
        self.signals = [self.cache[i][0].signals if rule.past else None for i in self.groups]
        idx = torch.zeros(B, 1, dtype=torch.long, device=self.x.device)
        model.hidden(idx, [1] * len(counts), cache=self.cache)

    def run(self, stage, numbers):
        """Run a stage for the rows that wait for it. Returns logits (b, V) after the head."""
        rows, at = [self.rows[i] for i in numbers], on_device(numbers, self.x)
        span = Span([row.pos if row else 0 for row in self.rows], 1, self.x.device)
        if stage.kind == 'loop':
            return self.loop_step(stage.g, rows, numbers, at, span)

        # the single-pass layers
        x, pos = self.x[at], span.pos[at] if span.ragged else span.pos
        if stage == PRELUDE:
            tokens = [[row.tokens[row.start + row.pos]] for row in rows]
            x = self.model.embed(torch.tensor(tokens, device=x.device), pos)    # (b, 1, C)
        else:
            x = self.model.groups[stage.g - 1].leave(x)
        for i in self.single[stage.g]:
            x = self.model.h[i](x, self.cache[i][0].at(span=span, rows=at), pos)
        if stage.g == len(self.groups):
            return self.model.readout(x)[:, 0]

        # the first loop step
        group = self.model.groups[stage.g]
        self.x[at] = group.init_state(x, self.noise_seed, pos)
        self.share[at] = group.inject(x)[1].float()
        if self.signals[stage.g]:
            self.signals[stage.g].begin(span, len(self.rows), numbers)
        self.k[numbers] = self.streak[numbers] = 0
        for row in rows:
            row.stage = Stage(stage.g, 'loop')
        return self.loop_step(stage.g, rows, numbers, at, span)

    def loop_step(self, g, rows, numbers, at, span):
        """One loop step of group g, with each row at a k of its own; see exits.loop_until_exit."""
        layer, k = self.groups[g], self.k[numbers] + 1
        every = self.one_slot and len(rows) == len(self.rows)       # reads keys without a copy
        x0 = self.x[at]
        x1 = self.model.h[layer].step_of_pass(
            x0, on_device(k, x0), None if every else at, injected=(self.on_x[g], self.share),
            noise_seed=self.noise_seed, span=span, caches=self.cache[layer])

        # the rule's signal; either all rows are at their first step or none is
        read = partial(self.model.reader(self.rule, span, self.cache), rows=at)
        memo = None if self.memo is None or k[0] == 1 else self.memo[at]
        value, memo = self.rule.signal(x0, x1, memo, read)
        if memo is not None:
            if self.memo is None:
                self.memo = memo.new_zeros(len(self.rows), *memo.shape[1:])
            self.memo[at] = memo
        value = None if value is None else value[:, 0].numpy(force=True)        # (b,)
        if self.signals[g] and value is not None:
            active = np.ones((len(rows), 1), dtype=bool)
            value = self.signals[g].wait(value[:, None], active, k[:, None], numbers)[:, 0]

        # which rows exit, and which take the new state?
        streak, exits, takes = self.rule.decide(value, self.streak[numbers],
                                                last=k == self.counts[g])
        if not np.all(takes):
            x1 = torch.where(on_device(takes, x1)[:, None, None], x1, x0)
        self.x[at] = x1
        self.k[numbers], self.streak[numbers], steps_used = k, streak, k - 1 + takes

        # rows that exit go on to the next layers; their keys serve later steps of other tokens
        for i in np.flatnonzero(exits):
            rows[i].stage, rows[i].steps_used[g] = Stage(g + 1, 'layers'), int(steps_used[i])
        for step in set(k[exits].tolist()) if not self.one_slot else ():
            for kept in self.cache[layer]:
                kept.fill(on_device(numbers[exits & (k == step)], x1), step, span)

    def postprocess(self, numbers, logits):
        """
        Move rows that have run the head, logits (b, V), to their next token, and draw it if the
        prompt has been read. Yields answers, see serve.
        """
        ready = []
        for i, (number, finite) in enumerate(zip(numbers, logits.isfinite().all(dim=-1).tolist())):
            row = self.rows[number]
            row.stage, row.pos = PRELUDE, row.pos + 1
            if not finite:
                # the next request masks the keys that it finds here, but a NaN passes a mask
                for kept in sum(self.cache, []):
                    kept.keys[:, number] = kept.values[:, number] = 0
                self.rows[number] = None
                yield row.request, ValueError('the logits are not finite: the model holds a NaN or '
                                              'an infinity'), None
            elif row.start + row.pos == len(row.tokens):
                ready.append(i)

        tokens = draw(logits[ready], [self.rows[number] for number in numbers[ready]])
        for number, token in zip(numbers[ready], tokens):
            row = self.rows[number]
            row.tokens.append(token)
            start = window(len(row.tokens), self.model.config.block_size)
            if start != row.start:          # the window has moved: read it from its start
                row.start, row.pos = start, 0
            made = len(row.tokens) - len(row.request.prompt)
            if made == row.request.max_new_tokens or token == row.request.stop:
                self.rows[number] = None
            yield row.request, token, np.array(row.steps_used)


@torch.no_grad()
def serve(model, requests, rows=32, n_loop=None, exit=None, cache='latest', noise_seed=0):
    """
    Answer requests, an iterator of Request (or None while there is none), in a batch of `rows`.

    Yields (request, token, steps_used (groups,)) for each token as it comes. A request that is bad,
    or meets a NaN, yields (request, ValueError, None) once; other requests continue. n_loop, exit,
    cache, noise_seed: see decode.stream. ValueError for rows, cache or n_loop out of range, or
    step_noise.
    """
    if rows < 1:
        raise ValueError(f'rows must be at least 1, not {rows}')
    if model.config.step_noise:
        raise ValueError('rows at different loop steps need a model with step_noise = 0, not '
                         f'{model.config.step_noise}')
    batch = Batch(model, rows, model.loop_counts(n_loop, exit), exit or FIXED, cache, noise_seed)
    requests, more = iter(requests), True
    while more or any(batch.rows):
        # free rows take the next requests
        for number in [i for i in range(rows) if more and batch.rows[i] is None]:
            request = next(requests, 'no more')
            more = request != 'no more'
            if request is None or not more:
                break
            try:
                request.check(model.config)
                batch.rows[number] = Row(request, len(model.groups))
            except ValueError as error:
                yield request, error, None
        waiting = Counter(row.stage for row in batch.rows if row)
        if not waiting:
            time.sleep(1e-3)        # until there is a request
            continue
        # schedule
        stage = next_stage(waiting)
        numbers = np.array([i for i, row in enumerate(batch.rows) if row and row.stage == stage])
        # run
        logits = batch.run(stage, numbers)
        # postprocess
        if logits is not None:
            yield from batch.postprocess(numbers, logits)


# the demonstration --------------------------------------------------------------------------------

def in_static_batches(model, requests, **how):
    """Answer requests by decode.stream: a batch takes as long as its longest request."""
    for i in range(0, len(requests), rows):
        batch = requests[i:i + rows]
        prompts = [torch.tensor(one.prompt, device=model.lm_head.weight.device) for one in batch]
        longest = max(one.max_new_tokens for one in batch)
        yield from stream(model, prompts, longest, temperature, **how)


def show_gain(model, how):
    """Time random requests in static batches and with rows at different loop steps, in turn."""
    draw, words = random.Random(seed), range(model.config.vocab_size)
    asked = [Request(draw.choices(words, k=draw.randint(1, 4)), draw.randint(4, 32), temperature,
                     seed=i) for i in range(n_requests)]
    ms = []
    for _ in range(3):
        begin = time.perf_counter()
        list(in_static_batches(model, asked, **how))
        between = time.perf_counter()
        steps = [used.mean() for _, _, used in serve(model, asked, rows, **how)]
        ms.append([1e3 * (between - begin) / len(steps),
                   1e3 * (time.perf_counter() - between) / len(steps)])
    static, ours = np.median(ms, axis=0)
    print(f'{n_requests} requests, {rows} rows, {len(steps)} new tokens of {np.mean(steps):.2f} +- '
          f'{np.std(steps):.2f} loop steps\nstatic batches: {static:.2f} ms a token\nrows at '
          f'different loop steps: {ours:.2f} ms a token, {static / ours:.2f} times as fast')


# the program --------------------------------------------------------------------------------------

def check_knobs():
    """ValueError for knobs that are out of range, or that cannot be used together."""
    if not exit and (past or 'tau' in given):
        raise ValueError('--past and --tau need an exit rule: add --exit=norm_rel')
    if past and cache == 'latest':
        raise ValueError('--past needs --cache=exact: with latest a token reads the last states '
                         'of earlier ones, so it need not wait')
    if n_requests < 1 or rows < 1:
        raise ValueError(f'n_requests and rows must be at least 1, not {n_requests}, {rows}')


def main():
    check_knobs()
    dev, _ = pick_device(device, 'float32')
    rule = make_exit(exit, tau, past=past) if exit else None
    only_file = 'it can only answer --requests=FILE, with --exit=None'
    model, checkpoint, folder, _ = open_run(out_dir, dev, only_file if rule or not requests else '',
                                            quiet=bool(requests))       # stdout is for the answers
    how = dict(n_loop=n_loop, exit=rule, cache=cache)
    if requests:
        encoding = get_encoding(checkpoint['tokenizer'], folder)
        usual = dict(temperature=temperature, seed=seed, stop=encoding.eot_token)
        answer(lambda asked: serve(model, asked, rows, **how), read(requests, encoding, usual),
               encoding)
    else:
        show_gain(model, how)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
