"""
Continuous depth-wise batching: many requests in one batch, each row at its own loop step.

    python -m serving.batching --requests=FILE      answer a file with a JSON object on each line
    python -m serving.batching                      speed-up over static batches, random requests

A line of the file, of which only the prompt is required; it may also have a top_k, and a name that
comes back with the answer in place of the line's number:

    {"prompt": "def f(", "max_new_tokens": 40, "temperature": 0.8, "seed": 1}

When each token exits on its own, a batch in lockstep waits for its slowest row in every group, for
every token. Here a tick runs one stage of the model for all rows that are at it, each at its own
position and loop step, and a row whose request has ended takes the next one:

            tick 1    tick 2    tick 3    tick 4    tick 5
    row 0   k = 2     k = 3               coda      prelude, k = 1
    row 1   k = 5     k = 6     k = 7
    row 2             k = 2     k = 3

A row gets what it would get alone from decode.one_token: it has its own keys, values and random
numbers. Its prompt goes through the same stages, one token after another. The idea is from Bae et
al. 2024; the one slot of `latest` (Geiping 5) serves rows at any loop step.

    B, b    rows of the batch; those of a tick
    k       the loop step of a row, from 1
"""
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from cache import Span, make_cache
from common.checkpoint import open_run
from common.configurator import configure, convert, did_you_mean, given, pick_device, run
from data import EOT, get_encoding
from decode import Text, check, choose, stream, use_one_thread, window
from exits import Exit, Step, make_exit, on_device
from loops import Plan, RecurrentGroup

# -------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
requests: str | None = None     # a file of JSON lines to answer; None = time random ones
n_requests = 128            # random requests, if there is no file
rows = 32                   # of the batch
exit: str | None = 'norm_rel'   # None = fixed loops
tau: float | None = 0.1     # None = the rule's default
n_loop: int | list | None = None    # for all groups or each; None = mean_recurrence, 30 with a rule
temperature: float = 0.0    # of requests that give none; 0 = greedy
seed = 0                    # of requests that give none, and of the random ones
device = 'auto'
# -------------------------------------------------------------------------------------------------

FIXED = Exit(lambda x0, x1, memo, read: (None, None))       # its signal is undefined at every step


@dataclass(eq=False)
class Request:
    """A prompt to continue, as a list of tokens, of which the last block_size are read."""
    prompt: list
    max_new_tokens: int = 100
    temperature: int | float = 0.0      # 0 = greedy
    top_k: int | None = None            # sample among the k likeliest tokens; None = all
    seed: int = 0                       # of the tokens drawn
    stop: int | None = None             # the token that ends the answer
    name: str | int | None = None       # comes back with the answer


# the batch ----------------------------------------------------------------------------------------

class Stage(NamedTuple):
    """
    What a row runs in one tick: a further loop step of the group at this place of model.h, or the
    single-pass layers from there on, up to and with the first loop step of a group, or the head.
    """
    layer: int
    looping: bool


PRELUDE = Stage(0, looping=False)


class Row:
    """A request in a row of the batch, and how far it has come."""

    def __init__(self, request, block_size):
        self.request, self.tokens, self.stage = request, request.prompt[-block_size:], PRELUDE
        self.cut = len(request.prompt) - len(self.tokens)       # draws count these tokens, too
        # the first token of its context window, and the current token's position in it
        self.start, self.pos = 0, 0
        self.used, self.steps = {}, []      # loop steps: {group: of this token}; of all new tokens


def draw(logits, rows):
    """Logits (b, V) -> a token for each row, drawn as its request says. ValueError for a NaN."""
    tokens, ways = {}, [(row.request.temperature, row.request.top_k) for row in rows]
    for way in set(ways):
        same = [i for i in range(len(rows)) if ways[i] == way]
        draws = [(rows[i].request.seed, rows[i].cut + len(rows[i].tokens)) for i in same]
        drawn = choose(logits if len(same) == len(rows) else logits[same], *way, draws)
        tokens |= zip(same, Text.numbers(drawn))
    return [tokens[i] for i in range(len(rows))]


class Batch:
    """B rows, each with a Row or None, and the tensors that they keep from tick to tick."""

    def __init__(self, model, B, counts, rule):
        self.model, self.rule, self.rows = model, rule, [None] * B
        groups = [i for i, layer in enumerate(model.h) if isinstance(layer, RecurrentGroup)]
        self.counts = dict(zip(groups, counts))
        # the state; what e adds to each loop step; the loop step, the exit rule's memo and streak
        weight = model.lm_head.weight
        self.x, self.from_e = torch.zeros(2, B, 1, model.config.n_embd, device=weight.device)
        self.memo = None
        self.k, self.streak = np.zeros((2, B), dtype=np.int64)
        # keys and values, which one pass of all rows allocates
        self.cache = make_cache(model, counts, 'latest')
        idx = torch.zeros(B, 1, dtype=torch.long, device=weight.device)
        model.hidden(idx, Plan([1] * len(counts), cache=self.cache))

    def run(self, stage, numbers):
        """Run a stage for the rows that wait for it. Returns logits (b, V) after the head."""
        rows, at = [self.rows[i] for i in numbers], on_device(numbers, self.x)
        span = Span([row.pos if row else 0 for row in self.rows], 1, self.x.device)
        plan = Plan(self.counts, span=span, cache=self.cache)
        if stage.looping:
            return self.loop_step(stage.layer, rows, numbers, at, plan)

        # the single-pass layers, up to the head
        x, pos = self.x[at], span.pos_of(at)
        if stage == PRELUDE:
            tokens = [[row.tokens[row.start + row.pos]] for row in rows]
            x = self.model.embed(torch.tensor(tokens, device=x.device), pos)    # (b, 1, C)
        else:
            x = self.model.h[stage.layer - 1].output(x)
        for i in range(stage.layer, len(self.model.h)):
            layer = self.model.h[i]
            if isinstance(layer, RecurrentGroup):
                # ... or up to the first loop step of a group
                self.x[at] = layer.init_state(x, pos=pos)
                self.from_e[at] = layer.adapter.from_e(x).float()
                self.k[numbers] = self.streak[numbers] = 0
                return self.loop_step(i, rows, numbers, at, plan)
            x = layer(x, plan.hook(layer, Step(rows=at)), pos)
        return self.model.readout(x)[:, 0]

    def loop_step(self, layer, rows, numbers, at, plan):
        """One loop step of a group, with each row at a k of its own; see exits.Looping."""
        k, x0 = self.k[numbers] + 1, self.x[at]
        every = len(rows) == len(self.rows)         # reads all keys, without a copy
        step = Step(k, None if every else at)
        x1 = self.model.h[layer].block_map(plan, self.from_e, step)(x0)

        # the rule's signal; either all rows are at their first step or none is
        read = partial(self.model.reader(self.rule, plan), rows=at)
        memo = None if self.memo is None or k[0] == 1 else self.memo[at]
        value, memo = self.rule.signal(x0, x1, memo, read)
        if memo is not None:
            if self.memo is None:
                self.memo = memo.new_zeros(len(self.rows), *memo.shape[1:])
            self.memo[at] = memo
        value = None if value is None else value[:, 0].numpy(force=True)        # (b,)

        # which rows exit, and which take the new state?
        last = k == self.counts[layer]
        self.streak[numbers], exits, takes = self.rule.decide(value, self.streak[numbers], last)
        if not np.all(takes):
            x1 = torch.where(on_device(takes, x1)[:, None, None], x1, x0)
        self.x[at], self.k[numbers], steps_used = x1, k, k - 1 + takes

        # rows that exit go on to the next layers; their keys serve later tokens
        for row, exited, used in zip(rows, exits, steps_used.tolist()):
            row.stage = Stage(layer + 1, looping=False) if exited else Stage(layer, looping=True)
            row.used[layer] = used

    def next_tokens(self, numbers, logits):
        """
        Move rows that have run the head, logits (b, V), to their next token, and draw it if the
        prompt has been read. Yields answers, see serve.
        """
        rows = [self.rows[number] for number in numbers]
        for row in rows:
            row.stage, row.pos = PRELUDE, row.pos + 1
        ready = [i for i, row in enumerate(rows) if row.start + row.pos == len(row.tokens)]
        for i, token in zip(ready, draw(logits[ready], [rows[i] for i in ready])):
            row, request = rows[i], rows[i].request
            row.tokens.append(token)
            row.steps.append(list(row.used.values()))
            start = window(len(row.tokens), self.model.config.block_size)
            if start != row.start:          # the window has moved: read it from its start
                row.start, row.pos = start, 0
            if len(row.steps) == request.max_new_tokens or token == request.stop:
                self.rows[numbers[i]] = None
                yield request, row.tokens[len(request.prompt) - row.cut:], row.steps


@torch.no_grad()
def serve(model, requests, rows=32, n_loop=None, exit=None):
    """
    Answer requests, an iterator of Request, in a batch of `rows`.

    Yields (request, its new tokens, their loop steps [[of each group]]), in the order in which they
    end. n_loop, exit: see decode.stream. ValueError for n_loop out of range, step_noise, a NaN.
    """
    if model.config.step_noise:
        raise ValueError('rows at different loop steps need a model with step_noise = 0, not '
                         f'{model.config.step_noise}')
    batch = Batch(model, rows, model.loop_counts(n_loop, exit), exit or FIXED)
    requests = iter(requests)
    while True:
        # free rows take the next requests
        for number, row in enumerate(batch.rows):
            if row is None and (request := next(requests, None)):
                batch.rows[number] = Row(request, model.config.block_size)
        waiting = Counter(row.stage for row in batch.rows if row)
        if not waiting:
            return
        # schedule the stage with most rows, because a tick for one row takes nearly as long as one
        # for many; a loop step counts 1.5 times, as the other stages gather more rows meanwhile
        stage = max(waiting, key=lambda stage: waiting[stage] * (1.5 if stage.looping else 1))
        numbers = np.array([i for i, row in enumerate(batch.rows) if row and row.stage == stage])
        # run it
        logits = batch.run(stage, numbers)
        if logits is not None:
            yield from batch.next_tokens(numbers, logits)


# a file of requests -------------------------------------------------------------------------------

# what a line may give, and the types of that
KEYS = {field.name: field.type for field in fields(Request) if field.name != 'stop'}
KEYS['prompt'] = str


def parse(values, encoding, usual):
    """A line's JSON -> Request. usual: {field: value}, the defaults. ValueError if bad."""
    if not isinstance(values, dict) or 'prompt' not in values:
        raise ValueError('a request is a JSON object with a prompt')
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"unknown key '{key}'{did_you_mean(key, KEYS)} (a request has "
                             f'{", ".join(KEYS)})')
        convert(key, value, KEYS[key])
    prompt = encoding.encode(values['prompt'], allowed_special={EOT})
    request = Request(**usual | values | dict(prompt=prompt))
    check([prompt], request.max_new_tokens, request.temperature, request.top_k)
    return request


def answer(model, path, encoding, **how):
    """
    Print a JSON object for each line of the file, in the order in which they end: its name, and
    text, tokens, mean loop steps of each group, and seconds since the start; or its error.
    ValueError if no line is a request.
    """
    begin, answered = time.perf_counter(), 0

    def read():
        usual = dict(temperature=temperature, seed=seed, stop=encoding.eot_token)
        with open(path, encoding='utf-8-sig', errors='replace') as f:
            for n, line in enumerate(f, start=1):
                name = n
                try:
                    if line.strip():
                        values = json.loads(line)
                        if isinstance(values, dict):
                            name = values.get('name', n)
                        yield parse(values, encoding, usual | dict(name=n))
                except (ValueError, RecursionError) as error:
                    error = ' '.join(str(error).split())
                    print(json.dumps(dict(name=name, error=f'line {n}: {error}')), flush=True)

    for request, tokens, steps in serve(model, read(), rows, **how):
        # a padded vocabulary has tokens without text
        text = encoding.decode([token for token in tokens if token < encoding.n_vocab])
        line = dict(name=request.name, text=text, tokens=tokens,
                    steps=np.mean(steps, axis=0).round(2).tolist(),
                    seconds=round(time.perf_counter() - begin, 3))
        print(json.dumps(line), flush=True)
        answered += 1
    if not answered:
        raise ValueError(f"'{path}' has no request: write lines like {{\"prompt\": \"def \"}}")


# the demonstration --------------------------------------------------------------------------------

def show_gain(model, **how):
    """Time random requests in static batches and with rows at different loop steps, in turn."""
    rng, words = random.Random(seed), range(model.config.vocab_size)
    here = model.lm_head.weight.device
    workload = [Request(rng.choices(words, k=rng.randint(1, 4)), rng.randint(4, 32), temperature,
                        seed=i) for i in range(n_requests)]
    ms = []
    for _ in range(3):
        begin = time.perf_counter()
        for i in range(0, n_requests, rows):    # a batch takes as long as its longest request
            batch = workload[i:i + rows]
            prompts = [torch.tensor(request.prompt, device=here) for request in batch]
            longest = max(request.max_new_tokens for request in batch)
            list(stream(model, prompts, longest, temperature, cache='latest', **how))
        between = time.perf_counter()
        steps = [np.mean(used) for _, _, steps in serve(model, workload, rows, **how)
                 for used in steps]
        ms.append([between - begin, time.perf_counter() - between])
    static, ours = 1e3 * np.median(ms, axis=0) / len(steps)
    print(f'{n_requests} requests, {rows} rows, {len(steps)} new tokens of {np.mean(steps):.2f} +- '
          f'{np.std(steps):.2f} loop steps\nstatic batches: {static:.2f} ms a token\nrows at '
          f'different loop steps: {ours:.2f} ms a token, {static / ours:.2f} times as fast')


# the program --------------------------------------------------------------------------------------

def main():
    if not exit and 'tau' in given:
        raise ValueError('--tau needs an exit rule: add --exit=norm_rel')
    if n_requests < 1 or rows < 1:
        raise ValueError(f'n_requests and rows must be at least 1, not {n_requests}, {rows}')
    dev, _ = pick_device(device, 'float32')
    only_file = '' if requests else 'it can only answer --requests=FILE'
    # quiet, because stdout is for the answers
    model, checkpoint, folder, _ = open_run(out_dir, dev, only_file, quiet=bool(requests))
    how = dict(n_loop=n_loop, exit=make_exit(exit, tau) if exit else None)
    use_one_thread(model)
    if requests:
        answer(model, requests, get_encoding(checkpoint['tokenizer'], folder), **how)
    else:
        show_gain(model, **how)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
