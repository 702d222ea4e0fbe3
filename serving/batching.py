"""
Rows at different loop steps in one batch: continuous depth-wise batching.

    python batching.py --out_dir=out-calc       what it buys, on a checkpoint; also writes figures
    python sample.py --requests=FILE            answers the requests of a file through it

With exits by token a batch in lockstep waits for its slowest row in every group of every token.
Here each row goes on by itself. A tick runs ONE stage for all rows that are at it, each at its own
position and loop step, and a row that ends makes room for the next request:

            tick 1    tick 2    tick 3    tick 4    tick 5
    row 0   k = 1     k = 2               coda      prelude
    row 1   k = 4     k = 5     k = 6
    row 2             k = 1     k = 2

A row gets what it gets alone (decode.stream with prefill_chunk=1): its keys, values and random
numbers are its own. The tokens of a prompt go through the same stages as those that follow, where
there is room in a tick: filled in by themselves, as each row came free, prompts took most of the
time. Bae et al. 2024 has the idea; Geiping 5 the one slot of `latest`, which serves rows at
any depth.

    b        the rows of a tick
    stage    1 prelude; 2 + 2g a loop step of group g; 3 + 2g the layers behind that group, after
             the last group with the head
"""
import os
import time
from collections import Counter
from functools import partial
from math import inf

import numpy as np
import torch

import data
from cache import Span
from common.checkpoint import load_checkpoint
from common.configurator import configure, pick_device, run
from decode import distribution, make_cache, window
from exits import make_exit
from loops import RecurrentGroup

# -------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None      # whose held-out windows the prompts begin; None = the run's own
exit: str | None = 'norm_rel'   # None = fixed loops
tau: float | None = 0.1
n_loop: int | None = None
cache = 'latest'                # or exact
n_requests = 256
prompt_tokens = [1, 4]          # fewest and most of a request; how many is drawn
new_tokens = [4, 32]
temperature = 0.0               # of all requests; on a task a high one makes new problems
slots = [1, 2, 4, 8, 16, 32, 64]    # rows; the other ways run too where they are `compared`
compared = 32
rounds = 3                      # all ways in turn
seed = 0
device = 'auto'
# -------------------------------------------------------------------------------------------------


def fullest(waiting):
    """
    The stage that goes next, of {stage: how many rows are at it}.

    The one with most rows, since a tick for one row takes nearly as long as for many; a loop step
    counts half as much again, for there rows come and go with every tick, while at the others they
    gather. The prelude goes before all: from there rows come to the loops. No row starves.
    """
    if 1 in waiting:
        return 1
    return max(waiting, key=lambda stage: (waiting[stage] * (2 if stage % 2 else 3), stage))


def in_step(waiting):
    """The first stage that has a row: all rows decode token by token, as without this file."""
    return min(waiting)


class Batch:
    """A fixed number of rows, some of them busy. stage: see the top; -1 where there is room."""

    def __init__(self, model, slots, counts, rule, policy, noise_seed):
        config, self.model, self.counts, self.rule = model.config, model, counts, rule
        self.policy, self.noise_seed, self.T_max = policy, noise_seed, config.block_size
        self.dev = model.lm_head.weight.device
        autocast = torch.is_autocast_enabled(self.dev.type)
        dtype = torch.get_autocast_dtype(self.dev.type) if autocast else model.wte.weight.dtype
        # the layers before, between and behind the groups
        self.groups = [i for i, layer in enumerate(model.h) if isinstance(layer, RecurrentGroup)]
        ends = [-1, *self.groups, len(model.h)]
        self.single = [range(a + 1, b) for a, b in zip(ends, ends[1:])]
        # a place for each row: keys and values, state, e's share, what the rule remembers
        self.kept = make_cache(model, counts, policy, rows=slots)
        for layer in sum(self.kept, []):
            layer.keys = torch.zeros(layer.slots, slots, config.n_head, self.T_max,
                                     config.n_embd // config.n_head, dtype=dtype, device=self.dev)
            layer.values = torch.zeros_like(layer.keys)
        self.x, self.share = torch.zeros(2, slots, 1, config.n_embd, device=self.dev).unbind()
        self.memo = None
        self.on_x = [model.h[i].inject(self.x)[0] for i in self.groups]
        # its stage, loop step and hits; the start of its window, and the place there of its token
        self.stage, self.k, self.hits, self.start, self.pos = np.full((5, slots), -1)
        self.used = np.zeros((slots, len(counts)), dtype=np.int64)
        self.request, self.generator = [None] * slots, [None] * slots
        self.tokens, self.made = [[] for _ in range(slots)], [0] * slots
        # waiting for the past: the largest signal up to each place, at each step; see cache.Signals
        self.signals = [np.full((slots, 1 + self.T_max, n), -inf) for n in counts
                        if rule and rule.past and policy == 'exact']

    def admit(self, request):
        """A request into a free row."""
        row = self.request.index(None)
        self.request[row], self.tokens[row] = request, list(request.prompt)
        self.made[row], self.stage[row], self.start[row], self.pos[row] = 0, 1, 0, 0
        self.generator[row] = torch.Generator(self.dev).manual_seed(request.seed)

    def tick(self, stage, rows):
        """Run a stage for the rows (b,) that are at it. Yields answers, see serve."""
        span = Span(np.maximum(self.pos, 0).tolist(), 1, self.dev)      # of all rows
        at = torch.from_numpy(rows).to(self.dev)
        pos = span.pos[at] if span.ragged else span.pos
        every = len(rows) == len(self.stage) and self.policy == 'latest'    # read without a copy
        where = dict(span=span, rows=None if every else at)
        work = self.single_layers if stage % 2 else self.loop_step
        return work((stage - 1) // 2, rows, at, pos, where)

    def single_layers(self, j, rows, at, pos, where):
        """The layers before group j, with the embedding before the first; or the coda and head."""
        x = self.x[at]
        if j == 0:
            now = [[self.tokens[row][self.start[row] + self.pos[row]]] for row in rows]
            x = self.model.embed(torch.tensor(now, device=self.dev), pos)
        for i in self.single[j]:
            x = self.model.h[i](x, self.kept[i][0].at(**where), pos)
        if j == len(self.groups):
            yield from self.answer(rows, self.model.readout(x)[:, 0])           # (b, V)
            return
        group = self.model.h[self.groups[j]]
        self.x[at] = group.init_state(x, self.noise_seed, pos)
        self.share[at] = group.inject(x)[1].to(x.dtype)
        if self.signals:
            self.signals[j][rows, self.pos[rows] + 1] = -inf
        self.stage[rows], self.k[rows], self.hits[rows] = 2 + 2 * j, 0, 0

    def loop_step(self, g, rows, at, pos, where):
        """One loop step of group g, of each row its own k."""
        i, x0, k = self.groups[g], self.x[at], self.k[rows] + 1
        group, steps = self.model.h[i], torch.from_numpy(k).to(self.dev)
        updates = [kept.at(**where, k=steps) for kept in self.kept[i]]
        x1 = group.step(x0, None, (self.on_x[g], self.share[at]), updates, pos)

        # whose last step was it, and who takes it? Algorithm 1 breaks before x_0 <- x_1
        done, takes, nan = k >= self.counts[g], True, ()
        if self.rule:
            value = self.signal(g, rows, at, x0, x1, k)                         # (b,)
            self.hits[rows] = (self.hits[rows] + 1) * (value < self.rule.tau)
            enough, nan = self.hits[rows] >= self.rule.hits, rows[np.isnan(value)]
            done, takes = done | enough, self.rule.keep | ~enough
        if not np.all(takes):
            x1 = torch.where(torch.from_numpy(takes).to(self.dev)[:, None, None], x1, x0)
        self.x[at], self.k[rows] = x1, k
        self.used[rows, g] = k - 1 + takes
        self.stage[rows[done]] += 1
        if not group.norm_inside:
            self.x[rows[done]] = group.norm(self.x[rows[done]])
        for step in np.unique(k[done]) if self.kept[i][0].slots > 1 else ():    # for later steps
            of_step = torch.from_numpy(rows[done & (k == step)]).to(self.dev)
            for layer in self.kept[i]:
                layer.fill(of_step, int(step), where['span'])
        for row in nan:
            yield self.end(row, ValueError('the state is no number: a NaN in the model'))

    def signal(self, g, rows, at, x0, x1, k):
        """The rule's signals (b,), inf while undefined; a row at its first step has no memo."""
        value, first = np.full(len(rows), inf), k == 1
        apart = self.memo is not None and first.any() and not first.all()
        for of in (np.flatnonzero(first), np.flatnonzero(~first)) if apart else [slice(None)]:
            row = at[of]
            memo = None if first[of][0] or self.memo is None else self.memo[row]
            known, memo = self.rule.signal(x0[of], x1[of], memo, self.model.reader(self.rule))
            if known is not None:
                value[of] = known[:, 0].numpy(force=True)
            if memo is not None and self.memo is None:      # once, when all are at their first
                self.memo = memo.new_zeros(len(self.stage), *memo.shape[1:])
            if memo is not None:
                self.memo[row] = memo
        if self.signals:
            place, seen = self.pos[rows], self.signals[g]
            value = np.maximum(value, seen[rows, place, k - 1])
            seen[rows, place + 1, k - 1] = np.where(value < inf, value, -inf)
        return value

    def answer(self, rows, logits):
        """Where each row goes on; a token for those at their last one, logits (b, V)."""
        likeliest, finite = logits.argmax(-1).tolist(), logits.isfinite().all(-1).tolist()
        asked, shares = [self.request[row] for row in rows], {}
        for how in {(request.temperature, request.top_k) for request in asked}:
            shares[how] = distribution(logits, *how) if how[0] else None            # (b, V)
        for i, row in enumerate(rows):
            request, tokens = asked[i], self.tokens[row]
            if not finite[i]:
                yield self.end(row, ValueError('the logits are no numbers: a NaN in the model'))
                continue
            self.stage[row], self.pos[row] = 1, self.pos[row] + 1
            if self.start[row] + self.pos[row] < len(tokens):       # more of its prompt
                continue
            token, share = likeliest[i], shares[request.temperature, request.top_k]
            if share is not None:
                token = torch.multinomial(share[i], 1, generator=self.generator[row]).item()
            tokens.append(token)
            self.made[row] += 1
            start = window(len(tokens), self.T_max)
            if start != self.start[row]:        # the window has moved: again from its beginning
                self.start[row], self.pos[row] = start, 0
            if self.made[row] == request.max_new_tokens or token == request.stop:
                self.end(row)
            yield request, token, self.used[row].copy()

    def end(self, row, error=None):
        """Make room -> what is said of a request that failed."""
        request, self.request[row], self.stage[row], self.pos[row] = self.request[row], None, -1, 0
        if error:           # no NaN may stay: a mask does not hide it
            for layer in sum(self.kept, []):
                layer.keys[:, row] = layer.values[:, row] = 0
        return request, error, None


@torch.no_grad()
def serve(model, requests, slots=32, n_loop=None, exit=None, cache='latest', noise_seed=0,
          next_stage=fullest, ticks=None):
    """
    Answer requests, an iterator of Request (or None while there is none), `slots` at a time.

    Yields (request, token, steps_used (groups,)) for each token as it comes. A request that is bad,
    or meets a NaN, yields once (request, ValueError, None), and the others go on. n_loop, exit,
    cache, noise_seed: as decode.stream. ticks: a list, to fill with (stage, rows, k of the rows,
    seconds). ValueError for slots < 1, a `ring`, a rule that reads the coda, noise in every step.
    """
    reads_coda, noise = exit is not None and exit.reads == 'coda', model.config.step_noise
    if slots < 1 or cache not in ('exact', 'latest') or reads_coda or noise:
        raise ValueError("batching takes slots >= 1, cache='exact' or 'latest', no rule that reads "
                         f'the coda and no step_noise, not {slots}, {cache!r}, '
                         f'{exit and exit.name}, {noise}')
    batch = Batch(model, slots, model.loop_counts(n_loop, exit), exit, cache, noise_seed)
    requests, more = iter(requests), True
    while True:
        # as many requests as there is room for
        while more and None in batch.request:
            request = next(requests, 'no more')
            more = request != 'no more'
            if request is None or not more:
                break
            if problem := request.problem(model.config):
                yield request, ValueError(problem), None
            else:
                batch.admit(request)
        waiting = Counter(batch.stage[batch.stage >= 0].tolist())
        if not waiting and not more:
            return
        if not waiting:         # nobody asks
            time.sleep(1e-3)
            continue
        stage, begin = next_stage(waiting), time.perf_counter()
        rows = np.flatnonzero(batch.stage == stage)
        answers = list(batch.tick(stage, rows))
        if ticks is not None:
            ticks.append((stage, rows, batch.k[rows], time.perf_counter() - begin))
        yield from answers


def main():
    from serving import (
        throughput,  # here, since it draws figures, and matplotlib takes a second to import
    )
    dev, _ = pick_device(device, 'float32')
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    throughput.check_knobs(config, model.config.block_size)
    text = data.open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                          model.config.vocab_size)
    if exit and not model.groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: --exit=None')
    how = dict(n_loop=n_loop, exit=make_exit(exit, tau) if exit else None, cache=cache)
    throughput.report(model, text, partial(serve, model, **how), in_step, how, config)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
