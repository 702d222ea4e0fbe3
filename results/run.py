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
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import data
from configurator import configure, run
from results import runs, table
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

# how the small scale is trained: not as the default, which is Muon's and shorter
ADAMW = ['--optimizer=adamw', '--learning_rate=3e-3', '--min_lr=3e-4', '--warmup_iters=200',
         '--max_iters=1900', '--eval_interval=700']
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
SWEEP = ['--cache=exact', '--past=False', '--rounds=4', '--n_windows=64', '--checks=False',
         '--epsilons=[1e-3,1e-2,0.1,0.3,0.5,0.7,1.0]']
RULES = {
    'accel': [],
    'accel, step kept': ['--rules=["accel"]', '--keep=True', *CHANGED],
    'accel, one hit': ['--rules=["accel"]', '--hits=1', *CHANGED],
    'accel, one hit, step kept': ['--rules=["accel"]', '--hits=1', '--keep=True', *CHANGED],
    'norm, two hits': ['--rules=["norm"]', '--hits=2', *CHANGED],
}

FIGURES = ('figure_4.png', 'frontier.png', 'figures/figure_1.png', 'figures/figure_2.png',
           'figures/figure_3a.png', 'figures/figure_5.png', 'figures/convergence.png')


# what is run ------------------------------------------------------------------------------------

def dataset_name():
    """The data set of this scale."""
    return dataset or dict(small='pydocs', paper='fineweb')[scale]


def trainings_of_scale():
    """
    {(variant, seed): flags of train.py}, in the order in which they run.

    First what C1 to C12 look at, then the open choices (Q3), then other loop draws (C13).
    """
    if scale == 'paper':
        config_file = os.path.join(runs.ROOT, 'config', 'groups.py')
        keep = '--keep_iters=[0,30,100,300,1000,3000,10000,30000]'
        return {('main', seeds[0]): [config_file, f'--dataset={dataset_name()}', keep]}
    found = {}
    for seed in seeds:
        found['main', seed] = ['--keep_iters=[0,30,100,300,700,1400]']
    for seed in seeds:
        for name, flags in CHOICES.items():
            found[name, seed] = [*flags, *SHORT]
    for seed in seeds:
        for draw in ('fixed', 'uniform'):
            found[draw, seed] = [f'--loop_draw={draw}', '--keep_iters=[]']
    common = ['--device=cpu', f'--dataset={dataset_name()}']
    return {(variant, seed): [*ADAMW, *flags, *common, f'--seed={seed}']
            for (variant, seed), flags in found.items()}


def folder_of(variant, seed):
    return os.path.join('out-claims', scale, f"{variant.replace(' ', '_')}-{seed}")


def sweep(folder, name):
    """One of RULES on a run: bench.csv under a name of its own."""
    log = os.path.join(folder, 'bench.txt')
    runs.command('bench.py', f'--out_dir={folder}', *SWEEP, *RULES[name], log=log)
    shutil.copyfile(os.path.join(folder, 'bench.csv'), os.path.join(folder, f'bench {name}.csv'))
    return True


# what is gathered: the CSVs ---------------------------------------------------------------------

def gather(trainings):
    """All runs -> results/SCALE/*.csv."""
    tables = dict(bench=[])
    for variant, seed in trainings:
        folder = folder_of(variant, seed)
        new = geometry_rows(folder, follow_loss=variant == 'main')
        new |= dict(losses=runs.loss_rows(folder), minutes=runs.minutes_rows(folder))
        for name, rows in new.items():
            rows = [dict(variant=variant, seed=seed, **row) for row in rows]
            tables.setdefault(name, []).extend(rows)
        if variant == 'main':
            for name in RULES:
                rows = runs.read_csv(os.path.join(folder, f'bench {name}.csv'))
                tables['bench'] += [dict(seed=seed, rules=name, **row) for row in rows]
    runs.write_csv(scale, 'machine', [runs.machine_row()])
    for name, rows in tables.items():
        runs.write_csv(scale, name, rows)


def draw_figures(folder):
    """geometry.py on a run; its figures, and those of the sweep, go to assets/."""
    log = os.path.join(folder, 'geometry.txt')
    work = partial(runs.command, 'geometry.py', f'--out_dir={folder}', log=log)
    runs.once(folder, 'geometry', work)
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


def run_all(trainings, until):
    """Train and sweep all that is not done yet. True if nothing is left to do."""
    data.open_data(dataset_name())  # made once, before all the trainings want it
    threads, at_a_time = (1, workers) if scale == 'small' else (None, 1)
    with ThreadPoolExecutor(at_a_time) as pool:
        done = pool.map(lambda key: runs.train(folder_of(*key), [*trainings[key], *more], until,
                                               threads), trainings)
        if not all(list(done)):
            return False

    # the sweeps have the machine to themselves; the one of all rules is the last: its figure stays
    for variant, seed in trainings:
        if variant == 'main':
            folder = folder_of(variant, seed)
            for name in reversed(RULES):
                if time.time() > until:
                    return False
                runs.once(folder, f'bench {name}', partial(sweep, folder, name))
    return True


def main():
    check_knobs()
    if not only_table:
        trainings = trainings_of_scale()
        until = time.time() + 60 * minutes if minutes else math.inf
        if not run_all(trainings, until):
            print('the time is up: the same command goes on')
            return
        gather(trainings)
        draw_figures(folder_of('main', seeds[0]))
    table.write(table.BEGIN, table.END, table.markdown())


if __name__ == '__main__':
    config = configure(globals())
    run(main)
