"""
Decoding: what waiting for the past buys, what a cache policy costs, whether calibration keeps its
promise. On problems that need depth and on text, three seeds each.

    python -m results.decoding          45 minutes on two cores; the same command goes on
    python -m results.decoding --only_table     results/decoding/*.csv -> the tables, nothing is run

Run it in the project's folder. The runs are those of results.depth, in out-depth, and `calc` with a
core of two layers; what is not there yet is trained. Then bench.py runs twice on each: its points,
and --calibrate. Writes results/decoding/*.csv, assets/decoding.png and the third block of
results/README.md.

    way         (cache policy, rule or 'fixed', does it wait for the past?)
    evals       block maps a group and token
"""
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import torch

from cache import Span
from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from decode import make_cache, until_settled
from exits import make_exit
from quality import cross_entropy
from results import runs, table
from results.depth import CALC, HOP, folder_of
from results.rows import HERE, column, distinct, lines, load, mean_std, pick
from tasks import Problems

# ------------------------------------------------------------------------------------------------
seeds = [1337, 1, 2]
minutes: float | None = None    # save and stop after so many, to be called again; None = at the end
rules = ['norm_rel', 'kl', 'accel']     # whose points are measured; calibrated are all of them
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
CHUNKS = [1, 2, 4, 8, 12, 24]
TAU = 0.3                   # of norm_rel, with which chunks settle
CSVS = ('machine', 'points', 'calibration', 'chunks')
COLUMNS = ('task', 'seed', 'cache', 'rule', 'past', 'tau', 'ce', 'ce_minus_full', 'diff_low',
           'diff_high', 'accuracy', 'mean_evals', 'ms_per_token')       # of bench.csv, and kept

BEGIN = '<!-- decoding: written by `python -m results.decoding --only_table` -->'
END = '<!-- end of decoding -->'


# what is run ------------------------------------------------------------------------------------

def measure(task, seed, until=math.inf):
    """Train, bench and calibrate one run, each unless that was done. True if all is."""
    part, flags = RUNS[task]
    folder = folder_of(part, 'looped', seed)
    flags = [*flags, '--device=cpu', f'--seed={seed}', *more]
    if not runs.train(folder, flags, until, threads=1):
        return False
    out, log = f'--out_dir={folder}', os.path.join(folder, 'decoding.txt')
    benches = dict(
        points=[f'--rules={json.dumps(rules)}', f'--same={same}', '--n_windows=64',
                '--checks=False', '--least_tau=0', '--epsilons=[1e-3,1e-2,0.1,0.3,0.5,0.7,1.0]'],
        calibration=[f'--calibrate={nats}', f'--n_windows={n_windows}'])
    for name, how in benches.items():
        if time.time() > until:
            return False
        runs.once(folder, name, lambda: runs.command('bench.py', out, *how, log=log, threads=1))
        if name == 'points' and not os.path.exists(os.path.join(folder, 'points.csv')):
            shutil.copyfile(os.path.join(folder, 'bench.csv'), os.path.join(folder, 'points.csv'))
        print(f'{name} of {folder}', flush=True)
    return True


@torch.no_grad()
def chunk_rows(folder, repeats=7):
    """
    A prompt of `calc` under `latest`, in chunks: what a chunk's length costs and gives.

    ce: over the prompt's own labels, 64 problems; steps: loop steps one after another, of the
    slowest problem in each chunk; evals: block maps a token; ms: of one problem, median.
    """
    model, checkpoint = load_checkpoint(os.path.join(folder, 'ckpt.pt'))
    T, counts = model.config.block_size, [30] * len(model.groups)
    idx, targets = Problems(checkpoint['config']['dataset']).held_out(np.arange(64), T)
    rule = make_exit('norm_rel', TAU, past=True)

    def fill(rows, policy, chunk):
        kept, trace, x = make_cache(model, counts, policy, T_max=T, rows=len(rows)), [], []
        for start in range(0, T, chunk):
            new = rows[:, start:start + chunk]
            settle = policy == 'latest'
            how = until_settled(counts, rule, new.shape[1]) if settle else (counts, rule)
            x.append(model.hidden(new, *how, 0, Span(start, new.shape[1]), kept, trace=trace)[0])
        return torch.cat(x, dim=1), [entry['evals'] for entry in trace]

    ways = [('latest', chunk) for chunk in CHUNKS] + [('exact', T)]
    times = {way: [] for way in ways}
    for i in range(repeats):
        for way in ways:        # in turn
            begin = time.perf_counter()
            fill(idx[i:i + 1], *way)
            times[way].append(1000 * (time.perf_counter() - begin))
    for policy, chunk in ways:
        x, evals = fill(idx, policy, chunk)
        ce = cross_entropy(model.lm_head(x).log_softmax(-1), targets).mean()
        yield dict(cache=policy, chunk=chunk, ce=ce,
                   steps=sum(of_chunk.max().item() for of_chunk in evals),
                   evals=torch.cat(evals, dim=1).double().mean().item(),
                   ms=np.median(times[policy, chunk]))


def gather():
    """All runs -> results/decoding/*.csv."""
    points, calibration, chunks = [], [], []
    for task, (part, _) in RUNS.items():
        for seed in seeds:
            folder, key = folder_of(part, 'looped', seed), dict(task=task, seed=seed)
            points += [key | row for row in runs.read_csv(os.path.join(folder, 'points.csv'))]
            with open(os.path.join(folder, 'exits.json')) as f:
                for row in json.load(f)['exits']:
                    blank = dict.fromkeys(('upper', 'cost', 'cost_low', 'cost_high', 'evals',
                                           'kept'), '')
                    calibration.append(key | blank | row | dict(tau=row['tau'] or ''))
            if task == 'calc':
                chunks += [dict(seed=seed) | row for row in chunk_rows(folder)]
    points = [{name: row[name] for name in COLUMNS} for row in points]
    tables = dict(machine=[runs.machine_row()], points=points, calibration=calibration,
                  chunks=chunks)
    for name, rows in tables.items():
        runs.write_csv('decoding', name, rows)
    os.makedirs('assets', exist_ok=True)
    first = folder_of(RUNS['calc'][0], 'looped', seeds[0])
    shutil.copyfile(os.path.join(first, 'frontier.png'), os.path.join('assets', 'decoding.png'))


# the tables -------------------------------------------------------------------------------------

def least(t, key, **way):
    """Of one way, at the fastest point within `same` of the full budget: a value for each seed."""
    values = []
    for seed in distinct(t['points'], 'seed'):
        rows = [row for row in pick(t['points'], seed=seed, **way) if row['ce_minus_full'] <= same]
        if rows:
            values.append(min(rows, key=lambda row: row['mean_evals'])[key])
    return values


def ways_table(t, task):
    """A line for each way to decode: block maps, time over the exact fixed budget's, its taus."""
    yield lines(task, 'block maps a group and token', 'ms a token, over fixed loops with `exact`',
                'at tau or loops')
    yield '|---|---|---|---|'
    fixed = np.array(least(t, 'ms_per_token', task=task, cache='exact', rule='fixed'))
    rows = pick(t['points'], task=task)
    for way in dict.fromkeys((row['cache'], row['rule'], row['past']) for row in rows):
        way = dict(zip(('cache', 'rule', 'past'), way))
        waits = way['past'] == 'True' and way['cache'] == 'exact'
        name = f"`{way['cache']}` {way['rule']}{', past' if waits else ''}"
        if way['rule'] == 'oracle':
            name += ' (of distance)'
        evals = least(t, 'mean_evals', task=task, **way)
        if len(evals) < len(fixed):
            yield lines(name, f'{len(evals)} of {len(fixed)} seeds get there', '', '')
            continue
        times = np.array(least(t, 'ms_per_token', task=task, **way)) / fixed
        taus = ', '.join(f'{tau:g}' for tau in least(t, 'tau', task=task, **way))
        yield lines(name, mean_std(evals), mean_std(times), taus)


def policies_table(t):
    """Fixed loops, `exact` beside `latest`: the loss above the full budget's."""
    loops = [1, 2, 3, 4, 6, 8, 12, 16]
    yield lines('nats above the full budget, at fixed loops', *loops)
    yield '|---' * (1 + len(loops)) + '|'
    for task in RUNS:
        for policy in ('exact', 'latest'):
            rows = pick(t['points'], task=task, cache=policy, rule='fixed')
            yield lines(f'{task}, `{policy}`',
                        *(mean_std(column(pick(rows, tau=n), 'ce_minus_full'), 4) for n in loops))


def robustness_table(t):
    """Rules under `exact` on calc, own and past: the loss above the full budget's, by tau."""
    taus = [tau for tau in distinct(pick(t['points'], rule='kl'), 'tau') if tau >= 1e-3]
    yield lines('`calc`, `exact`: nats above the full budget at tau', *(f'{tau:g}' for tau in taus))
    yield '|---' * (1 + len(taus)) + '|'
    for rule in distinct(t['points'], 'rule'):
        if rule not in ('fixed', 'oracle'):
            for past in ('False', 'True'):
                rows = pick(t['points'], task='calc', cache='exact', rule=rule, past=past)
                yield lines(rule + (', past' if past == 'True' else ''),
                            *(mean_std(column(pick(rows, tau=tau), 'ce_minus_full'), 4)
                              for tau in taus))


def calibration_table(t):
    """How often a calibrated threshold keeps its promise on the other half, by task and way."""
    ways = dict.fromkeys((row['cache'], row['past']) for row in t['calibration'])
    yield lines(f'promises of {nats:g} nats kept, of those given', *(
        f"`{cache}`{', past' if past == 'True' and cache == 'exact' else ''}"
        for cache, past in ways), 'worst')
    yield '|---' * (2 + len(ways)) + '|'
    for task in RUNS:
        of_task = [row for row in pick(t['calibration'], task=task) if row['tau'] != '']
        cells = []
        for cache, past in ways:
            kept = column(pick(of_task, cache=cache, past=past), 'kept')
            cells.append(f"{kept.count('True')} of {len(kept)}")
        yield lines(task, *cells, f"{max(column(of_task, 'cost')):+.4f}")


def chunks_table(t):
    """A prompt of 24 tokens of calc in chunks."""
    yield lines('`calc`, a prompt of 24 tokens, chunks of', 'loop steps one after another',
                'block maps a token', 'ms, over the whole at once', 'CE of its labels')
    yield '|---|---|---|---|---|'
    whole = np.array(column(pick(t['chunks'], cache='latest', chunk=max(CHUNKS)), 'ms'))
    for cache, chunk in dict.fromkeys((row['cache'], row['chunk']) for row in t['chunks']):
        rows = pick(t['chunks'], cache=cache, chunk=chunk)
        yield lines(f'{chunk:g}' if cache == 'latest' else f'{chunk:g}, `{cache}`',
                    mean_std(column(rows, 'steps'), 1), mean_std(column(rows, 'evals')),
                    mean_std(np.array(column(rows, 'ms')) / whole),
                    mean_std(column(rows, 'ce'), 4))


def markdown(folder=HERE):
    """What stands between the markers of decoding."""
    t = load('decoding', folder, CSVS)
    machine, = t['machine']
    given = [row for row in t['calibration'] if row['tau'] != '']
    kept = column(given, 'kept').count('True')
    blocks = [
        [f"{machine['cores']:g} cores of an {machine['machine']}, torch {machine['torch']}, "
         f"{machine['date']}; {len(distinct(t['points'], 'seed'))} seeds. Each line is the point "
         f'with the fewest block maps whose loss is within {same:g} nats of the full budget.'],
        *(ways_table(t, task) for task in RUNS),
        ['**Policies**:'], policies_table(t),
        ['**Thresholds**:'], robustness_table(t),
        [f'**Calibration** ({n_windows} windows, half to find the largest tau and half to check): '
         f'{kept} of {len(given)} promises kept, {100 * kept / len(given):.0f}%.'],
        calibration_table(t),
        ['**Chunks**, `latest`, until `norm_rel` waiting for the past is below '
         f'{TAU:g}:'], chunks_table(t)]
    return '\n\n'.join('\n'.join(block) for block in blocks)


# the run ----------------------------------------------------------------------------------------

def main():
    runs.check_knobs(seeds, workers, minutes)
    if not only_table:
        until = time.time() + 60 * minutes if minutes else math.inf
        with ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(lambda of: measure(*of, until), product(RUNS, seeds)))
        if not all(done):
            print('the time is up: the same command goes on')
            return
        gather()
    table.write(BEGIN, END, markdown())


if __name__ == '__main__':
    config = configure(globals())
    run(main)
