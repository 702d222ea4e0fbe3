"""
What the pages need of one run beyond its log: rows of results/SCALE/*.csv.

    python -m results.measure --out_dir=out         writes out/rows.json, {name of a CSV: its rows}

results.run calls it. It measures the geometry at every checkpoint, decodes held-out windows in
every way (`sweep`, before and after training), and times the ways that are good enough, in turn.

Paper: sec. 3, 4, Eq. 1 and 2. Geiping: sec. 6 (path independence, loss far beyond training).

    states      x^(0) ... x^(K) of one group                                    (K+1, B, T, C)
    way         a way to decode without its threshold, such as 'accel' or 'norm_rel, latest'
    gap         cross-entropy above that of n_loop fixed loops, nats a token
    depth       of a task's label: the fewest loop steps that it needs
"""
import json
import math
import os
import random
from collections import defaultdict
from functools import partial

import numpy as np
import torch
from torch.linalg import vector_norm

import bench
import data
import geometry
from bench import make_point
from common.configurator import configure, pick_device, run
from common.log import evaluate
from exits import Exit
from results.runs import SAME, pick

# ------------------------------------------------------------------------------------------------
out_dir = 'out'
n_loop = 30                 # the full budget: loops of each group
n_windows = 48              # held-out windows of block_size tokens, spread evenly
noise_draws = 4             # of x^(0), for path independence
noise_loops = [4, 8, 30]
dlr_loops = [2, 5, 9, 30]   # K of Eq. 2
loss_loops = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 32, 64, 256]   # loop counts for the loss
budgets = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]  # fixed loops
taus = [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 6.0, 10.0, 16.0, 32.0]
refine = 3                  # more thresholds, between the last good one and the next
epsilons = [0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 4.0, 8.0]     # of the oracle
rounds = 16                 # of timing; each has a window of its own
timed_tokens = 8            # in each round, after half a window
device = 'auto'
# ------------------------------------------------------------------------------------------------

INF = 1e30                  # a threshold that every signal is below


# geometry ---------------------------------------------------------------------------------------

def settled_row(name, measured):
    """Where a group's steps end: how fast, and at what cosine, with 95% intervals over windows."""
    settled = measured['settled']                                               # (B, T)
    windows = np.nanmean(settled, axis=1)
    low, high = bench.interval(windows[~np.isnan(windows)])
    tenth = geometry.steps_to_a_tenth(measured['norm'])
    return dict(group=name, tenth='' if tenth is None else tenth, cos=np.nanmean(settled),
                cos_low=low, cos_high=high, cos_std=np.nanstd(settled))


def dlr_rows(names, model, idx):
    """Drift-to-loop ratios of each hand-off against K, and the jump relative to the path."""
    for K in dlr_loops if len(names) > 1 else ():
        trace = geometry.trace_of(model, idx, K)
        for g in range(len(names) - 1):
            states, following = trace[g]['states'], trace[g + 1]['states']
            ratios = {reading: geometry.dlr(states, following[k]).mean().item()
                      for reading, k in geometry.READINGS.items()}
            # the jump ends at the first iterate of the next group; the path in the loop leaves out
            # the first step, which comes from noise
            jump = vector_norm(following[1] - states[-1], dim=-1)                   # (B, T)
            arc = geometry.step_norm(states)[1:].sum(0)                             # (B, T)
            ratios['jump over arc'] = (jump / arc).mean().item()
            for reading, ratio in ratios.items():
                yield {'from': names[g], 'to': names[g + 1], 'loops': K, 'reading': reading,
                       'ratio': ratio}


def noise_rows(names, model, idx):
    """How far a group's states from different x^(0) lie apart after each of noise_loops."""
    for loops in noise_loops:
        ends = []
        for noise_seed in range(noise_draws):
            trace = geometry.trace_of(model, idx[::8], loops, noise_seed)
            ends.append([group['states'][-1] for group in trace])
        for name, draws in zip(names, zip(*ends)):
            spread = geometry.path_spread(torch.stack(draws))
            yield dict(group=name, loops=loops, largest=spread.max().item())


def loop_rows(model, text, dev):
    """Loss (nats a token) and accuracy by loops."""
    losses, right = evaluate(model, text, n_windows, loss_loops, dev)
    for n in loss_loops:
        yield dict(loops=n, loss=losses[n], accuracy=right[n])


# every way to decode ----------------------------------------------------------------------------

def delayed(x0, x1, memo, read):
    """1.1 times the norm of the step before: Algorithm 1 with this in the place of Eq. 5."""
    return None if memo is None else 1.1 * memo, vector_norm(x1 - x0, dim=-1)


EXITS = {'delayed': Exit(delayed, hits=2, keep=False)}
RULES = {name: dict(rule=name) for name in ('norm', 'norm_rel', 'kl', 'accel', 'accel_rel')}
# Algorithm 1 and the step norm with one part changed
CHANGED = {
    'delayed norm': dict(rule='results.measure:delayed'),
    'norm, two hits': dict(rule='norm', hits=2),
    'accel, one hit': dict(rule='accel', hits=1),
    'accel, step kept': dict(rule='accel', keep=True),
    'accel, one hit, step kept': dict(rule='accel', hits=1, keep=True)}
# waiting for the past, and keeping only the last loop step in the cache
WAITING = {f'{name}, waiting': dict(rule=name, past=True) for name in ('norm_rel', 'kl', 'accel')}
LATEST = {f'{name}, latest': dict(rule=name, cache='latest', past=name != 'fixed')
          for name in ('fixed', 'norm_rel', 'kl', 'accel')}
# {way: the arguments of make_point}
WAYS = (dict(fixed=dict(rule='fixed'), oracle=dict(rule='oracle')) | RULES | CHANGED | WAITING
        | LATEST)


def values_of(way):
    """The budgets or thresholds at which a way is swept; small ones only of the paper's rules."""
    if WAYS[way]['rule'] in ('fixed', 'oracle'):
        return [*budgets, n_loop] if way.startswith('fixed') else epsilons
    return [tau for tau in [*taus, INF] if way in RULES or tau >= 1e-3]


def sweep_rows(model, idx, targets, depth, ways):
    """
    Decode idx (B, T) in these ways, at every threshold -> a row each, then the budgets by group.

    Between the last threshold of a rule that is good enough and the next one, more are tried, so
    that the list of taus does not decide what a rule costs.
    """
    layers = torch.tensor([len(group) for group in model.config.groups]).double()
    full, _, _ = bench.log_probabilities(model, make_point(model, n_loop, 'fixed'), idx)

    def row_of(way, value):
        like = 'fixed' if way == 'by group' else way
        point = make_point(model, value, n_loop=n_loop, **WAYS[like])
        log_p, steps, evals = bench.log_probabilities(model, point, idx)
        evals = evals.cpu().double().mean(dim=(0, 1))                           # (groups,)
        gap = bench.cross_entropy(log_p, targets) - bench.cross_entropy(full, targets)
        low, high = bench.interval(gap)
        row = dict(way=way, tau='-'.join(map(str, value)) if way == 'by group' else value,
                   gap=gap.mean(), low=low, high=high, blocks=(evals * layers).sum().item(),
                   evals=evals.mean().item())
        if depth is not None:
            row |= dict(with_depth=with_depth(steps, depth, targets),
                        **early(log_p, full, targets, depth))
        return row

    for way in ways:
        rows = {value: row_of(way, value) for value in values_of(way)}
        for _ in range(0 if WAYS[way]['rule'] == 'fixed' else refine):
            good = max((tau for tau, row in rows.items() if row['high'] <= SAME), default=INF)
            beyond = min((tau for tau in rows if tau > good), default=INF)
            if beyond == INF:
                break
            tau = math.sqrt(good * beyond)
            rows[tau] = row_of(way, tau)
        yield from rows.values()
        if way == 'fixed':
            enough = min(n for n, row in rows.items() if row['high'] <= SAME)
            yield from by_group(partial(row_of, 'by group'), [enough] * len(layers))


def by_group(row_of, counts):
    """
    Fixed loops for each group: from equal counts on, the group that can spare a loop with the least
    gap loses one, until none can. row_of(counts) -> a row, yielded for each trial.
    """
    while counts:
        trials = [[n - (i == g) for i, n in enumerate(counts)]
                  for g in range(len(counts)) if counts[g] > 1]
        rows = [row_of(trial) for trial in trials]
        yield from rows
        good = [(row['high'], trial) for row, trial in zip(rows, trials) if row['high'] <= SAME]
        counts = min(good)[1] if good else None


def with_depth(steps, depth, targets):
    """
    The correlation of steps (B, T, groups) and depth (B, T) over the tokens that have a label, 0
    if all take equally many steps.
    """
    labelled = (targets >= 0).numpy(force=True)
    used = steps.cpu().double().mean(-1).numpy()[labelled]
    return np.corrcoef(used, depth[labelled])[0, 1] if used.std() else 0.0


def early(log_p, full, targets, depth):
    """
    The share of labels that the full budget gets right and log_p wrong: of all, and of the
    deepest tenth, or of all labels as deep as its shallowest.
    """
    lost = (full.argmax(-1) == targets) & (log_p.argmax(-1) != targets)
    lost, labelled = lost.numpy(force=True), (targets >= 0).numpy(force=True)
    deep = depth >= np.quantile(depth[labelled], 0.9)
    return dict(lost=lost[labelled].mean(), lost_deep=lost[labelled & deep].mean())


def alike_rows(model, idx):
    """The share of tokens that exit at the same step by `accel` and the delayed norm, by tau."""
    for tau in taus:
        points = [make_point(model, tau, n_loop=n_loop, **WAYS[way])
                  for way in ('accel', 'delayed norm')]
        evals = [bench.log_probabilities(model, point, idx)[2].cpu() for point in points]
        yield dict(tau=tau, same=(evals[0] == evals[1]).double().mean().item(),
                   accel=evals[0].double().mean().item(), delayed=evals[1].double().mean().item())


# time -------------------------------------------------------------------------------------------

def time_rows(model, idx, sweep):
    """
    ms a token of each way where it is just good enough, and `over`: this over that of the best
    fixed budget, with its 95% interval over rounds. All take turns, in another order each round.

    'fixed again' is the best fixed budget a second time; 'fixed, fewer' is the next smaller one,
    for a coin flip between both. 'accel 1e-05' and 'accel 0.01' are the ends of the paper's sweep.
    """
    good = sorted((row for row in sweep if row['high'] <= SAME), key=lambda row: -row['blocks'])
    best = {row['way']: row['tau'] for row in good}         # the fewest blocks last
    fewer = [n for n in budgets if n < best['fixed']]
    best |= {'fixed again': best['fixed'], 'fixed, fewer': max(fewer, default=best['fixed']),
             'accel 1e-05': 1e-5, 'accel 0.01': 1e-2}
    points = {}
    for way, tau in best.items():
        value = [int(n) for n in tau.split('-')] if way == 'by group' else tau
        like = way if way in WAYS else 'accel' if way.startswith('accel') else 'fixed'
        points[way] = make_point(model, value, n_loop=n_loop, **WAYS[like])
    start, order, times = idx.shape[1] // 2, list(points), {way: [] for way in points}
    for i in range(-1, rounds):         # the first round only warms up
        random.Random(i).shuffle(order)
        window = idx[i % len(idx)][None, :start + timed_tokens]
        for way in order:
            ms = bench.decode_window(model, points[way], window, start)
            if i >= 0:
                times[way].append(np.mean(ms))
    for way, tau in best.items():
        over, low, high = bench.times_as_long(times[way], times['fixed'])
        yield dict(way=way, tau=tau, ms=np.median(times[way]), over=over, low=low, high=high)


# thresholds -------------------------------------------------------------------------------------

def promise_rows(model, idx, targets, depth):
    """
    Thresholds and fixed budgets that cost at most SAME on half of the windows, and what they cost
    on the others. On a task they are found on the shallower half.
    """
    if depth is not None:
        order = np.argsort(depth.max(axis=1), kind='stable')
        # find_thresholds chooses on the even windows and measures on the odd ones
        turns = order.reshape(2, -1).T.flatten()
        idx, targets = idx[turns], targets[turns]
    rules = [(rule, cache, past) for rule in ('norm_rel', 'kl', 'accel')
             for cache, past in (('exact', False), ('exact', True), ('latest', True))]
    fixed = [('fixed', cache, False) for cache in ('exact', 'latest')]
    for kinds, grid in (rules, None), (fixed, [*budgets, n_loop]):
        yield from bench.find_thresholds(model, partial(make_point, model, n_loop=n_loop), kinds,
                                         idx, targets, SAME, n_loop, grid=grid)


# a run ------------------------------------------------------------------------------------------

def main():
    # the run, and held-out windows of its text
    dev, _ = pick_device(device, 'float32')
    models, last = geometry.load_run(out_dir, dev)
    text, idx, targets, depth = data.held_out(last, n_windows, dev=dev)         # (n_windows, T)
    names = ['-'.join(map(str, layers)) for layers in last['model_args']['groups']]
    rows = defaultdict(list)

    def add(table, new):
        rows[table] += [dict(iteration=iteration, **row) for row in new]

    # along training; most of it before and after training only
    for iteration, model in models.items():
        measured = geometry.measure(model, idx, n_loop)
        add('settled', [settled_row(name, curves) for name, curves in zip(names, measured)])
        if iteration in (min(models), max(models)):
            add('dlr', dlr_rows(names, model, idx))
            add('alike', alike_rows(model, idx))
            ways = WAYS if iteration == max(models) else ('fixed', 'norm', 'kl', 'accel')
            add('sweep', sweep_rows(model, idx, targets, depth, ways))

    # after training only
    add('noise', noise_rows(names, model, idx))
    add('loops', loop_rows(model, text, dev))
    add('promises', promise_rows(model, idx, targets, depth))
    add('times', time_rows(model, idx, pick(rows['sweep'], iteration=iteration)))
    with open(os.path.join(out_dir, 'rows.json'), 'w') as f:
        json.dump(rows, f, default=float)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
