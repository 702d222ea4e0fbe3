"""
What the claims need from a run beyond geometry.py's figures, as rows of results/SCALE/*.csv.

    python -m results.measure --out_dir=out         writes out/rows.json, {name of a CSV: its rows}

results.run calls it. Measures tokens that turn back, jumps relative to paths, and on a task the
rows of questions.py.

Paper: sec. 3, Eq. 1 and 2. Geiping: sec. 6 (path independence, loss far beyond training).

    e, x        the stream that enters a group; its state                       (B, T, C)
    states      x^(0) ... x^(K) of one group                                    (K+1, B, T, C)
    trace       what each group records in one pass: dict(e, states, ...)
"""
import json
import os
from collections import defaultdict
from itertools import product

import numpy as np
import torch
from torch.linalg import vector_norm

import data
import geometry
from bench import excess, interval, make_point, quality
from common.configurator import configure, pick_device, run
from common.log import evaluate
from results.questions import point_rows, short_rows

# ------------------------------------------------------------------------------------------------
out_dir = 'out'
tables: list = []           # compute only these; [] = all. `points` and `short` need a task
n_loop = 30                 # loops of each group
n_windows = 96              # held-out windows of block_size tokens, spread evenly
noise_draws = 4             # of x^(0), for path independence
noise_loops = [4, 8, 30]
dlr_loops = [2, 5, 9, 30]   # K of Eq. 2; r + 1 is 5 on text and 9 on the tasks
loss_loops = [1, 2, 4, 5, 8, 9, 13, 16, 32, 64, 256]    # loop counts for the loss
budgets: list | None = None     # fixed loops of each group; None = BUDGETS
short_windows = 128         # of `short`, an even number: half of them are shallow problems
device = 'auto'
# ------------------------------------------------------------------------------------------------

# fixed loops of each group, by the number of groups
BUDGETS = {1: range(1, 17), 2: (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), 3: (1, 2, 3, 4, 5)}


# steps ------------------------------------------------------------------------------------------

def step_rows(name, states, floor):
    """
    A row for each step of a group: its norm and its acceleration, over tokens.

    cos_clear: the mean cosine of tokens whose steps so far are all clear of rounding; `clear` is
    their share. floor: the rounding floor.
    """
    norms, accels, cosines = (probe(states) for probe in (
        geometry.step_norm, geometry.accel, geometry.step_cos))
    clear = (norms > geometry.CLEAR * floor).long().cumprod(0).bool()           # (K, B, T)
    for k in range(len(norms)):
        row = dict(group=name, k=k, norm=norms[k].mean().item(), floor=floor,
                   clear=clear[k].float().mean().item())
        if k:       # the first step has none before it
            pairs = torch.stack((norms[k], accels[k - 1])).flatten(1).clamp(min=1e-30).log()
            row |= dict(accel_over_norm=(pairs[1] - pairs[0]).median().exp().item(),
                        accel_alike=torch.corrcoef(pairs)[0, 1].item())
            if clear[k].any():
                row['cos_clear'] = cosines[k - 1][clear[k]].mean().item()
        yield row


def settled_row(name, measured):
    """Where a group's steps end: how fast, and at what cosine, with 95% intervals over windows."""
    settled = measured['settled']                                               # (B, T)
    windows = np.nanmean(settled, axis=1)
    low, high = interval(windows[~np.isnan(windows)])
    tenth = geometry.steps_to_a_tenth(measured['norm'])
    return dict(group=name, tenth='' if tenth is None else tenth, cos=np.nanmean(settled),
                cos_low=low, cos_high=high, cos_std=np.nanstd(settled),
                turning_back=np.nanmean(settled < 0))


# between groups, and far beyond training --------------------------------------------------------

def dlr_rows(names, model, idx):
    """Drift-to-loop ratios of each hand-off against K, and the jump relative to the path."""
    for K in dlr_loops if len(names) > 1 else ():
        trace = geometry.trace_of(model, idx, K)
        for g in range(len(names) - 1):
            states, following = trace[g]['states'], trace[g + 1]['states']
            ratios = {reading: geometry.dlr(states, following[k]).mean().item()
                      for reading, k in dict(noise=0, first=1, settled=-1).items()}
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
            trace = geometry.trace_of(model, idx[::12], loops, noise_seed)
            ends.append([group['states'][-1] for group in trace])
        for name, draws in zip(names, zip(*ends)):
            spread = geometry.path_spread(torch.stack(draws))
            yield dict(group=name, loops=loops, largest=spread.max().item())


def loop_rows(model, dataset, dev):
    """Loss (nats a token) and accuracy by loops."""
    losses, right = evaluate(model, data.open_data(dataset), n_windows, loss_loops, dev)
    model.eval()
    for n in loss_loops:
        yield dict(loops=n, loss=losses[n], accuracy=right[n])


def budget_rows(model, idx, targets):
    """Fixed loops that differ by group: loss above that of n_loop loops, and blocks evaluated."""
    groups = model.config.groups
    loops = product(budgets or BUDGETS[len(groups)], repeat=len(groups))
    points = [make_point(model, list(counts), 'fixed') for counts in loops]
    quality(model, points, idx, targets, n_loop)
    for point in points:
        yield dict(budget='-'.join(map(str, point.loops)), gap_high=excess(point)[2],
                   blocks=np.dot(point.loops, [len(layers) for layers in groups]))


# a run ------------------------------------------------------------------------------------------

def held_out(dataset, T, n, dev='cpu'):
    """
    n held-out windows, spread evenly: idx, targets (n, T) on a device, and of a task the depth
    (n, T) of each token, else None.
    """
    text = data.open_data(dataset)
    numbers = data.spread(text, n, T)
    depth = text.with_depth(T)[2][numbers] if hasattr(text, 'with_depth') else None
    return *(tokens.to(dev) for tokens in text.held_out(numbers, T)), depth


def main():
    # the run, and held-out windows of its text
    dev, _ = pick_device(device, 'float32')
    models, last = geometry.load_run(out_dir, dev)
    dataset, T = last['config']['dataset'], last['model_args']['block_size']
    idx, targets, depth = held_out(dataset, T, n_windows, dev)
    names = ['-'.join(map(str, layers)) for layers in last['model_args']['groups']]
    rows = defaultdict(list)

    def add(table, new):
        if table in tables or not tables:       # else the generator `new` is never computed
            rows[table] += [dict(iteration=iteration, **row) for row in new]

    # along training; most of it before and after training only
    for iteration, model in models.items():
        measured = geometry.measure(model, idx, n_loop)
        add('settled', [settled_row(name, curves) for name, curves in zip(names, measured)])
        if iteration in (min(models), max(models)):
            trace = geometry.trace_of(model, idx, n_loop)
            for name, curves, traced in zip(names, measured, trace):
                add('steps', step_rows(name, traced['states'], curves['floor_float32']))
            add('dlr', dlr_rows(names, model, idx))

    # after training only
    add('noise', noise_rows(names, model, idx))
    add('loops', loop_rows(model, dataset, dev))
    add('budgets', budget_rows(model, idx[:64], targets[:64]))
    if depth is not None:
        add('points', point_rows(model, idx, targets, depth))
        add('short', short_rows(model, *held_out(dataset, T, short_windows, dev)))
    with open(os.path.join(out_dir, 'rows.json'), 'w') as f:
        json.dump(rows, f, default=float)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
