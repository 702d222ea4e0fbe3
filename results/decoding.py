"""
Decoding: what waiting for the past buys, what a cache policy costs, whether calibration keeps its
promise. On problems that need depth and on text, three seeds each.

    python -m results.decoding          45 minutes on two cores; rerun to continue
    python -m results.decoding --only_table     results/decoding/*.csv -> the tables, nothing is run

Run it in the project's folder. The runs are those of results.depth, in out-depth, and `calc` with a
core of two layers; missing runs are trained. Then bench.py runs twice on each: its points,
and --calibrate. Writes results/decoding/*.csv, assets/decoding.png and the third block of
results/README.md.

    way         (cache policy, rule or 'fixed', does it wait for the past?)
    evals       block maps a group and token
"""
import json
import os
from functools import partial
from itertools import product

import numpy as np

from common.configurator import configure, run
from results import runs
from results.depth import CALC, HOP, folder_of
from results.runs import column, distinct, fewest_maps, head, join, line, mean_std, pick

# ------------------------------------------------------------------------------------------------
seeds = [1337, 1, 2]
minutes: float | None = None    # stop after this many and save; None = run to the end
rules = ['norm_rel', 'kl', 'accel']     # rules to measure; calibration uses bench.py's default ones
same = 0.002                # nats above the full budget that count as equal quality
nats = 0.005                # what calibration promises
n_windows = 256             # of calibration, half for finding and half for checking
workers = 2                 # runs at a time, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ------------------------------------------------------------------------------------------------

# the runs: (part, flags of its training)
RUNS = dict(calc=('calc2', [*CALC, '--n_layer=4', '--groups=[[1,2]]']), hop=('hop', HOP),
            text=('text', []))


# what is run ------------------------------------------------------------------------------------

def measure(task, seed, until):
    """Train, bench and calibrate one run. True if all is done."""
    part, flags = RUNS[task]
    folder = folder_of(part, 'looped', seed)
    points = [f'--rules={json.dumps(rules)}', f'--same={same}', '--n_windows=64',
              '--least_tau=0', '--epsilons=[1e-3,1e-2,0.1,0.3,0.5,0.7,1.0]']
    calibration = [f'--calibrate={nats}', f'--n_windows={n_windows}']
    return (runs.train(folder, [*flags, '--device=cpu', f'--seed={seed}', *more], until)
            and runs.bench(folder, 'points', points, until)
            and runs.once(folder, 'calibration', 'bench.py', *calibration, until=until))


def gather():
    """All runs -> results/decoding/*.csv."""
    tables = dict(points=[], calibration=[])
    for task, seed in product(RUNS, seeds):
        folder, key = folder_of(RUNS[task][0], 'looped', seed), dict(task=task, seed=seed)
        tables['points'] += [key | row for row in runs.bench_rows(folder, 'points')]
        with open(os.path.join(folder, 'exits.json')) as f:
            tables['calibration'] += [key | row for row in json.load(f)['exits']]
    runs.save('decoding', tables)
    first = folder_of(RUNS['calc'][0], 'looped', seeds[0])
    runs.show(os.path.join(first, 'quality.png'), 'decoding.png')


# the tables -------------------------------------------------------------------------------------

def least(t, key, **way):
    """A column of one way, by seed: where block maps are fewest within `same` of full budget."""
    rows = pick(t['points'], **way)
    return column(fewest_maps(rows, lambda row: row['ce_minus_full'] <= same), key)


def ways_table(t, task):
    """A line for each way: block maps, time over the exact fixed budget's, tau in each seed."""
    yield from head(task, 'block maps a group and token',
                    'ms a token, over fixed loops with `exact`', 'at tau or loops')
    fixed = np.array(least(t, 'ms_per_token', task=task, cache='exact', rule='fixed'))
    rows = pick(t['points'], task=task)
    for cache, rule, past in dict.fromkeys((r['cache'], r['rule'], r['past']) for r in rows):
        way = dict(task=task, cache=cache, rule=rule, past=past)
        name = f"`{cache}` {rule}{', past' if past == 'True' and cache == 'exact' else ''}"
        if rule == 'oracle':
            name += ' (of distance)'
        evals = least(t, 'mean_evals', **way)
        if len(evals) < len(fixed):
            yield line(name, f'reached in {len(evals)} of {len(fixed)} seeds', '', '')
            continue
        times = np.array(least(t, 'ms_per_token', **way)) / fixed
        taus = ', '.join(f'{tau:g}' for tau in least(t, 'tau', **way))
        yield line(name, mean_std(evals), mean_std(times), taus)


def given(t):
    """The rows of calibration that have found a threshold."""
    return [row for row in t['calibration'] if row['tau'] != '']


def calibration_table(t):
    """How often a calibrated threshold keeps its promise on the other half, by task and way."""
    ways = dict.fromkeys((row['cache'], row['past']) for row in t['calibration'])
    yield from head(f'thresholds that cost at most {nats:g} nats', *(
        f"`{cache}`{', past' if past == 'True' and cache == 'exact' else ''}"
        for cache, past in ways), 'worst')
    for task in RUNS:
        rows, cells = pick(given(t), task=task), []
        for cache, past in ways:
            kept = column(pick(rows, cache=cache, past=past), 'kept')
            cells.append(f"{kept.count('True')} of {len(kept)}")
        yield line(task, *cells, f"{max(column(rows, 'cost')):+.4f}")


def markdown(folder=runs.HERE):
    """The block `decoding` of results/README.md."""
    t = runs.load('decoding', folder)
    promises = column(given(t), 'kept')
    kept = promises.count('True')
    return join([
        [f"{runs.machine_of(t)}; {len(distinct(t['points'], 'seed'))} seeds. Each line is the "
         f'point with the fewest block maps whose loss is within {same:g} nats of the full '
         'budget.'],
        *(ways_table(t, task) for task in RUNS),
        [f'**Calibration** ({n_windows} windows, half to find the largest tau and half to check): '
         f'{kept} of {len(promises)} promises kept, {100 * kept / len(promises):.0f}%.'],
        calibration_table(t)])


# the run ----------------------------------------------------------------------------------------

def main():
    until = runs.deadline(seeds, workers, minutes)
    if not only_table:
        works = [partial(measure, task, seed, until) for task, seed in product(RUNS, seeds)]
        if not runs.all_done(works, workers):
            return
        gather()
    runs.write('decoding', markdown())


if __name__ == '__main__':
    config = configure(globals())
    run(main)
