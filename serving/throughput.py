"""
What depth-wise batching buys: tokens a second and latency, beside lockstep and one by one.

Not run by itself: `python batching.py` calls `report`. Each way answers the same requests, all
there from the start, in turn, `rounds` times; a figure is the median over rounds.

    depth-wise      batching.serve: rows at any loop step share a tick
    in step         the same code with rows in step: a new request takes a place that is free, but a
                    token waits for the slowest row
    lockstep        decode.stream with as many rows: a batch is done when its longest request is
    one by one      decode.stream with one row

    ideal           all that depth-wise did, in full batches at the measured time of a full one
    tick            (stage, rows, k of the rows, seconds), see batching.serve
    steps           loop steps used, the mean over groups
"""
import csv
import json
import os
import time
from statistics import median

import numpy as np
import torch

from common import plots
from decode import stream
from serving.requests import Request

CONTEXTS, DEPTHS = (0.25, 0.5, 0.75), (1, 2, 4, 8)     # shares of a block; fixed loops


def check_knobs(knobs, block_size):
    for name in ('n_requests', 'compared', 'rounds'):
        if knobs[name] < 1:
            raise ValueError(f'{name} must be at least 1, not {knobs[name]}')
    for name in ('prompt_tokens', 'new_tokens'):
        low, high = knobs[name] if len(knobs[name]) == 2 else (0, 0)
        if not 1 <= low <= high:
            raise ValueError(f'{name} must be [fewest, most], from 1 on, not {knobs[name]}')
    if knobs['prompt_tokens'][1] > block_size:
        raise ValueError(f'prompt_tokens may be no more than block_size = {block_size}')
    if not knobs['slots'] or not all(type(n) is int and n >= 1 for n in knobs['slots']):
        raise ValueError(f"slots must be a list of numbers from 1 on, not {knobs['slots']}")


def make_requests(text, T, n, prompt_tokens, new_tokens, temperature, seed):
    """n requests whose prompts begin held-out windows."""
    if not text.n_held_out(T):
        raise ValueError(f'the held-out text is shorter than {T} tokens: take more of it')
    draw = np.random.default_rng(seed)
    idx, _ = text.held_out(draw.integers(text.n_held_out(T), size=n), T)
    read, made = (draw.integers(low, high + 1, size=n).tolist()
                  for low, high in (prompt_tokens, new_tokens))
    return [Request(idx[i, :read[i]].tolist(), made[i], temperature, seed=i, name=i)
            for i in range(n)]


# the ways: -> {name: [(seconds since the start, steps used (groups,))]} ---------------------------

def through(serve, requests, slots, **how):
    """By batching.serve."""
    begin, made = time.perf_counter(), {}
    for request, _, used in serve(iter(requests), slots=slots, **how):
        made.setdefault(request.name, []).append((time.perf_counter() - begin, used))
    return made


def in_lockstep(model, requests, rows, how):
    """By decode.stream, `rows` requests after another; a row is read up to its own length."""
    begin, made = time.perf_counter(), {}
    for i in range(0, len(requests), rows):
        batch = requests[i:i + rows]
        longest = max(request.max_new_tokens for request in batch)
        prompts = [torch.tensor(request.prompt, device=model.lm_head.weight.device)
                   for request in batch]
        for n, (_, used) in enumerate(stream(
                model, prompts, longest, batch[0].temperature, **how)):
            now = time.perf_counter() - begin
            for row, request in enumerate(batch):
                if n < request.max_new_tokens:
                    made.setdefault(request.name, []).append((now, used[row].cpu().numpy()))
    return made


# figures ------------------------------------------------------------------------------------------

def figures_of(made, requests):
    """Tokens read and made a second; ms to the first token and between two, mean and 95%."""
    first = [1e3 * tokens[0][0] for tokens in made.values()]
    gaps = [1e3 * gap for tokens in made.values() for gap in np.diff([t for t, _ in tokens])] or [0]
    end = max(tokens[-1][0] for tokens in made.values())
    return dict(rate=tokens_of(made, requests) / end, first=np.mean(first),
                first_95=np.percentile(first, 95), gap=np.mean(gaps),
                gap_95=np.percentile(gaps, 95))


def tokens_of(made, requests):
    """How many tokens were read and made."""
    return sum(len(request.prompt) + len(made[request.name]) - 1 for request in requests
               if request.name in made)


def name_of(stage, groups):
    """A stage's number in words, see batching.py."""
    if stage == 1:
        return 'prelude'
    g, behind = divmod(stage - 2, 2)
    if not behind:
        return f'loop {g}'
    return 'coda' if g == groups - 1 else f'hand-off {g}'


def of_stages(ticks, slots, groups):
    """{stage: ticks, their mean occupancy, their share of the time}."""
    seconds = sum(tick[3] for tick in ticks)
    found = {}
    for stage in sorted({tick[0] for tick in ticks}):
        of = [tick for tick in ticks if tick[0] == stage]
        found[name_of(stage, groups)] = dict(
            ticks=len(of), occupancy=np.mean([len(tick[1]) for tick in of]) / slots,
            share=sum(tick[3] for tick in of) / seconds)
    return found


def ideal_seconds(ticks, full, slots):
    """All that was done in `ticks`, in full batches: full {stage: seconds of a full tick}."""
    rows = {}
    for stage, of_tick, _, _ in ticks:
        rows[stage] = rows.get(stage, 0) + len(of_tick)
    return sum(n / slots * full[stage] for stage, n in rows.items())


def full_ticks(ticks, slots):
    """{stage: seconds of a full tick}: the mean of those with nine tenths of the rows, or most."""
    full = {}
    for stage in {tick[0] for tick in ticks}:
        of = [(len(rows), seconds) for other, rows, _, seconds in ticks if other == stage]
        enough = min(0.9 * slots, max(of)[0])
        full[stage] = np.mean([seconds for rows, seconds in of if rows >= enough])
    return full


# the report ---------------------------------------------------------------------------------------

@torch.no_grad()
def report(model, text, serve, in_step, how, knobs):
    """Measure all ways, print the tables, and write batching.csv, .json and two figures."""
    T, groups, slots = model.config.block_size, len(model.groups), knobs['compared']
    asked = [knobs[name] for name in ('prompt_tokens', 'new_tokens', 'temperature', 'seed')]
    requests = make_requests(text, T, knobs['n_requests'], *asked)
    few = requests[:max(1, len(requests) // 8)]         # one by one they take long
    ticks = []
    ways = {
        'depth-wise': lambda: through(serve, requests, slots, ticks=ticks),
        'in step': lambda: through(serve, requests, slots, next_stage=in_step),
        'lockstep': lambda: in_lockstep(model, requests, slots, how),
        'one by one': lambda: in_lockstep(model, few, 1, how)}
    through(serve, few, slots)                          # warm up
    found, ideals, made = {way: [] for way in ways}, [], {}
    for _ in range(knobs['rounds']):
        ticks.clear()
        for way, work in ways.items():
            made[way] = work()
            found[way].append(figures_of(made[way], requests))
        seconds = ideal_seconds(ticks, full_ticks(ticks, slots), slots)
        ideals.append(tokens_of(made['depth-wise'], requests) / seconds)
    steps = np.array([used.mean() for tokens in made['depth-wise'].values() for _, used in tokens]
                     if groups else [0.0])
    print(f'{len(requests)} requests, {tokens_of(made["depth-wise"], requests)} tokens, '
          f'{slots} rows; loop steps a token {steps.mean():.2f} +- {steps.std():.2f} (std over '
          f'tokens), cache {how["cache"]}, {torch.get_num_threads()} threads')
    rows = print_ways(found, ideals)
    stages = of_stages(ticks, slots, groups)
    for name, of in stages.items():
        print(f"  {name:11s} {of['ticks']:6d} ticks, {100 * of['occupancy']:3.0f}% of the rows, "
              f"{100 * of['share']:3.0f}% of the time")

    # how cost grows: with rows, with context, with depth
    growth = grow(model, text, serve, requests, asked, T, knobs)
    folder = knobs['out_dir']
    plots.throughput(growth, os.path.join(folder, 'throughput.png'))
    plots.schedule(ticks[len(ticks) // 2:][:150], slots, os.path.join(folder, 'schedule.png'))
    with open(os.path.join(folder, 'batching.csv'), 'w', newline='') as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with open(os.path.join(folder, 'batching.json'), 'w') as f:
        json.dump(dict(config=knobs, ways=rows, stages=stages, growth=growth,
                       steps=dict(mean=steps.mean(), std=steps.std())), f, indent=1, default=float)
    print(f'{folder}: batching.csv, batching.json, throughput.png, schedule.png')


def print_ways(found, ideals):
    """The table of the ways -> its rows, the median over rounds of each figure."""
    rows = [dict(way=way) | {key: median(one[key] for one in figures) for key in figures[0]}
            for way, figures in found.items()]
    rows.append(dict.fromkeys(rows[0], '') | dict(way='ideal', rate=median(ideals)))
    print(f"{'':11s} tokens/s  depth-wise over it   ms to first   95%   ms a token   95%")
    for row in rows:
        times = '' if row['way'] == 'ideal' else (f"{row['first']:15.0f} {row['first_95']:5.0f}"
                                                  f"{row['gap']:13.1f} {row['gap_95']:5.1f}")
        # of rounds, since the machine changes between them
        ratio = median(a['rate'] / b for a, b in zip(found['depth-wise'], ideals)) \
            if row['way'] == 'ideal' else median(
                a['rate'] / b['rate'] for a, b in zip(found['depth-wise'], found[row['way']]))
        row['ratio'] = ratio
        print(f"{row['way']:11s} {row['rate']:8.0f} {ratio:19.2f} {times}")
    return rows


def grow(model, text, serve, requests, asked, T, knobs):
    """Tokens a second: {'rows' | 'context' | 'loops': [(x, tokens a second)]}."""
    def rate(some, slots, **how):
        return figures_of(through(serve, some, slots, **how), some)['rate']

    some, found = requests[:max(knobs['slots'])], dict(rows=[], context=[], loops=[])
    for slots in knobs['slots']:
        found['rows'].append((slots, rate(some[:max(8, 2 * slots)], slots)))
    for share in CONTEXTS:
        n = max(1, int(share * T))
        long = make_requests(text, T, knobs['compared'], (n, n), (4, 4), *asked[2:])
        found['context'].append((n, rate(long, knobs['compared'])))
    for loops in DEPTHS if model.groups else ():
        found['loops'].append((loops, rate(some, knobs['compared'], n_loop=loops, exit=None)))
    for name, points in found.items():
        shown = ', '.join(f'{x}: {y:.0f}' for x, y in points)
        print(f"tokens/s by {name}: {shown}")
    return found
