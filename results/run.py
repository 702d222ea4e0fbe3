"""
The paper's claims, re-measured: runs the project's own commands and computes the tables from them.

    python -m results.run                           small: the default model, three seeds; about an
                                                    hour on two cores; the same command goes on
    python -m results.run --scale=paper --minutes=9         config/groups.py on one GPU, in pieces
    python -m results.run --only_table              results/*/*.csv -> the tables, nothing is run

Run them in the project's folder. They write the runs to out-claims/SCALE/NAME. When all runs of a
scale are done they write results/SCALE/*.csv, assets/*.png and the tables of results/README.md.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10). Geiping: 3.3, 5, 6 (C11 to C13).

    variant     a training: 'main' is the default model, the rest are open choices and other draws
    run, key    (variant, seed)
"""
import csv
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat

import numpy as np
import torch

import data
from configurator import configure, run
from results import table
from results.measure import geometry_rows

# ------------------------------------------------------------------------------------------------
scale = 'small'             # small, or paper
dataset: str | None = None  # None = pydocs for small, fineweb for paper
seeds = [1337, 1, 2]        # of the small scale; the paper's has the first alone
minutes: float | None = None    # save and stop after so many, to be called again; None = at the end
workers = 2                 # trainings of the small scale at a time, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ------------------------------------------------------------------------------------------------

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# the open choices (Q3): what train.py is called with, beside SHORT
SHORT = ['--max_iters=400', '--warmup_iters=100', '--eval_loops=[4]', '--keep_iters=[]']
CHOICES = {
    'as it is': [],
    'adapter random': ['--adapter_init=random'],
    'addition': ['--injection=add'],
    'x0 zero': ['--x0=zero'],
    'x0 e': ['--x0=e'],
    'norm after the loop': ['--norm_inside=False'],
    'bptt_k 1': ['--bptt_k=1'],
    'bptt_k 8': ['--bptt_k=8'],
    'step noise 0.1': ['--step_noise=0.1'],
}

# the sweeps: all rules as printed, then changes of one (Q2), which count block maps and no time
CHANGED = ['--budgets=[30]', '--epsilons=[]', '--rounds=1']
RULES = {
    'accel': [],
    'accel, step kept': ['--rules=["accel"]', '--keep=True', *CHANGED],
    'accel, one hit': ['--rules=["accel"]', '--hits=1', *CHANGED],
    'accel, one hit, step kept': ['--rules=["accel"]', '--hits=1', '--keep=True', *CHANGED],
    'norm, two hits': ['--rules=["norm"]', '--hits=2', *CHANGED],
}

FIGURES = ('loss.png', 'figure_4.png', 'frontier.png', 'figures/figure_1.png',
           'figures/figure_2.png', 'figures/figure_3a.png', 'figures/figure_5.png',
           'figures/convergence.png')


# what is run ------------------------------------------------------------------------------------

def dataset_name():
    """The data set of this scale."""
    return dataset or dict(small='pydocs', paper='fineweb')[scale]


def trainings():
    """
    {(variant, seed): flags of train.py}, in the order in which they run.

    First what C1 to C12 look at, then the open choices (Q3), then other loop draws (C13).
    """
    if scale == 'paper':
        config_file = os.path.join(ROOT, 'config', 'groups.py')
        keep = '--keep_iters=[0,30,100,300,1000,3000,10000,30000]'
        return {('main', seeds[0]): [config_file, f'--dataset={dataset_name()}', keep]}
    runs = {}
    for seed in seeds:
        runs['main', seed] = ['--keep_iters=[0,30,100,300,700,1400]']
    for seed in seeds:
        for name, flags in CHOICES.items():
            runs[name, seed] = [*flags, *SHORT]
    for seed in seeds:
        for draw in ('fixed', 'uniform'):
            runs[draw, seed] = [f'--loop_draw={draw}', '--keep_iters=[]']
    common = ['--device=cpu', f'--dataset={dataset_name()}']
    return {(variant, seed): [*flags, *common, f'--seed={seed}']
            for (variant, seed), flags in runs.items()}


def folder_of(variant, seed):
    return os.path.join('out-claims', scale, f"{variant.replace(' ', '_')}-{seed}")


def command(script, *flags, log, until=math.inf):
    """
    Run one of the project's scripts. True if it came to its end, False if the time was up.

    log: the file that gets its output. until: when (time.time()) it is asked to stop in order, by
    SIGTERM. ValueError if it fails.
    """
    threads = dict(OMP_NUM_THREADS='1') if scale == 'small' and script == 'train.py' else {}
    with open(log, 'a') as out:
        process = subprocess.Popen([sys.executable, '-u', os.path.join(ROOT, script), *flags],
                                   stdout=out, stderr=subprocess.STDOUT, env=os.environ | threads)
        stopped = False
        while process.poll() is None:
            if not stopped and time.time() > until:
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(0.2)
    if process.returncode and not stopped:
        raise ValueError(f"`python {' '.join((script, *flags))}` failed: see {log}")
    return not stopped


def once(folder, what, work):
    """
    Do work() unless that was done before. True if it has come to its end, as work() says.

    The minutes that it took, over all pieces, stand in folder/WHAT.minutes, and 'done' behind them.
    """
    path = os.path.join(folder, what + '.minutes')
    took, state = 0.0, ''
    if os.path.exists(path):
        with open(path) as f:
            took, state = f.read().split()
    if state != 'done':
        os.makedirs(folder, exist_ok=True)
        t = time.time()
        state = 'done' if work() else 'begun'
        with open(path, 'w') as f:
            f.write(f'{float(took) + (time.time() - t) / 60:.3f} {state}')
    return state == 'done'


def train(key, flags, until):
    """Train one run, or go on with it. True if it is done."""
    if time.time() > until:
        return False
    folder = folder_of(*key)
    log = os.path.join(folder, 'train.txt')
    flags = [*flags, *more, '--resume', f'--out_dir={folder}']
    done = once(folder, 'train', partial(command, 'train.py', *flags, log=log, until=until))
    print(f"{'trained' if done else 'begun  '} {folder}", flush=True)
    return done


def sweep(folder, name):
    """One of RULES on a run: bench.csv under a name of its own."""
    log = os.path.join(folder, 'bench.txt')
    command('bench.py', f'--out_dir={folder}', *RULES[name], '--checks=False', log=log)
    shutil.copyfile(os.path.join(folder, 'bench.csv'), os.path.join(folder, f'bench {name}.csv'))
    return True


# what is gathered: the CSVs ---------------------------------------------------------------------

def read_csv(path):
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


def cell(value):
    """What a CSV holds of a value: six digits of a number that is no count."""
    return f'{value:.6g}' if isinstance(value, (float, np.floating)) else value


def write_csv(name, rows):
    """Rows -> results/SCALE/NAME.csv."""
    path = os.path.join('results', scale, name + '.csv')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', newline='') as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: cell(value) for key, value in row.items()})


def loss_rows(folder):
    """The held-out losses of a run's log: a row for each evaluation and loop count."""
    for row in read_csv(os.path.join(folder, 'log.csv')):
        for key, loss in row.items():
            if key.startswith('val_loss_') and loss:
                yield dict(iteration=row['iter'], loops=key.removeprefix('val_loss_'), loss=loss)


def minutes_rows(folder):
    """What was done in a run's folder, and the minutes that it took."""
    for file in sorted(os.listdir(folder)):
        if file.endswith('.minutes'):
            with open(os.path.join(folder, file)) as f:
                yield dict(what=file.removesuffix('.minutes'), minutes=f.read().split()[0])


def machine_row():
    """The machine that this runs on: its GPU, or else its processor."""
    name = platform.processor()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            models = [line.split(':')[1].strip() for line in f if line.startswith('model name')]
        name = models[0] if models else name
    return dict(machine=name, cores=os.cpu_count(), torch=torch.__version__,
                date=time.strftime('%Y-%m-%d'))


def gather(runs):
    """All runs -> results/SCALE/*.csv."""
    tables = dict(bench=[])
    for variant, seed in runs:
        folder = folder_of(variant, seed)
        new = geometry_rows(folder, follow_loss=variant == 'main')
        new |= dict(losses=loss_rows(folder), minutes=minutes_rows(folder))
        for name, rows in new.items():
            rows = [dict(variant=variant, seed=seed, **row) for row in rows]
            tables.setdefault(name, []).extend(rows)
        if variant == 'main':
            for name in RULES:
                rows = read_csv(os.path.join(folder, f'bench {name}.csv'))
                tables['bench'] += [dict(seed=seed, rules=name, **row) for row in rows]
    write_csv('machine', [machine_row()])
    for name, rows in tables.items():
        write_csv(name, rows)


def draw_figures(folder):
    """geometry.py on a run; its figures, and those of the sweep, go to assets/."""
    log = os.path.join(folder, 'geometry.txt')
    once(folder, 'geometry', partial(command, 'geometry.py', f'--out_dir={folder}', log=log))
    os.makedirs('assets', exist_ok=True)
    prefix = 'paper_' if scale == 'paper' else ''
    for figure in FIGURES:
        path = os.path.join(folder, figure)
        if os.path.exists(path):
            shutil.copyfile(path, os.path.join('assets', prefix + os.path.basename(figure)))


# the run ----------------------------------------------------------------------------------------

def check_knobs():
    if scale not in ('small', 'paper'):
        raise ValueError(f"unknown scale '{scale}': choose small or paper")
    if not seeds or workers < 1:
        raise ValueError('--seeds must name one seed at least, and --workers be 1 at least')
    if minutes is not None and not minutes > 0:
        raise ValueError(f'--minutes must be more than 0, not {minutes}')


def run_all(runs, until):
    """Train and sweep all that is not done yet. True if nothing is left to do."""
    data.open_data(dataset_name())  # made once, before all the trainings want it
    with ThreadPoolExecutor(workers if scale == 'small' else 1) as pool:
        if not all(list(pool.map(train, runs, runs.values(), repeat(until)))):
            return False

    # the sweeps have the machine to themselves; the one of all rules is the last: its figure stays
    for variant, seed in runs:
        if variant == 'main':
            folder = folder_of(variant, seed)
            for name in reversed(RULES):
                if time.time() > until:
                    return False
                once(folder, f'bench {name}', partial(sweep, folder, name))
    return True


def main():
    check_knobs()
    if not only_table:
        runs = trainings()
        until = time.time() + 60 * minutes if minutes else math.inf
        if not run_all(runs, until):
            print('the time is up: the same command goes on')
            return
        gather(runs)
        draw_figures(folder_of('main', seeds[0]))
    table.write()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
