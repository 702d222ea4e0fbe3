"""
The paper's claims, re-measured: runs the project's own commands and computes the tables from them.

    python -m results.run                           small: the default model on text, three seeds;
                                                    1.5 hours on two cores; the same command goes on
    python -m results.run --scale=tasks             where loops matter: calc and hop, an hour more
    python -m results.run --scale=paper --minutes=9         config/groups.py on one GPU, in pieces
    python -m results.run --only_table              results/*/*.csv -> the tables, nothing is run

Run them in the project's folder. They write the runs to out-claims/SCALE/NAME, and share those of
results.depth in out-depth. When all runs of a scale are done they write results/SCALE/*.csv,
assets/*.png and the tables of results/README.md.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10, C14). Geiping: 3.3, 5, 6 (C11 to C13).

    variant     a training. On text 'main' is the default model and 'random' has Geiping's adapter,
                the rest are open choices and other draws; tasks: see TASKS
    run, key    (variant, seed)
"""
import glob
import json
import math
import multiprocessing
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

import torch

import data
from common.configurator import configure, run
from results import depth, runs, table
from results.measure import geometry_rows, loss_rows
from results.questions import question_rows

# ------------------------------------------------------------------------------------------------
scale = 'small'             # small, tasks, or paper
dataset: str | None = None  # None = pydocs for small, fineweb for paper; tasks have their own
seeds = [1337, 1, 2]        # the paper's scale has the first alone
minutes: float | None = None    # save and stop after so many, to be called again; None = at the end
workers = 2                 # runs at a time on a CPU, with a thread each
more: list = []             # flags for every training, to make it smaller
only: list = []             # variants; [] = all. The rows of the others stay
only_table = False
# ------------------------------------------------------------------------------------------------

# the open choices (Q3): what train.py is called with, beside SHORT
SHORT = ['--max_iters=400', '--warmup_iters=100', '--eval_loops=[4]', '--keep_iters=[]']
CHOICES = {
    'as it is': [],
    'addition': ['--injection=add'],
    'x0 zero': ['--x0=zero'],
    'x0 e': ['--x0=e'],
    'norm after the loop': ['--norm_inside=False'],
    'bptt_k 1': ['--bptt_k=1'],
    'bptt_k 8': ['--bptt_k=8'],
    'step noise 0.1': ['--step_noise=0.1'],
}
# the tasks: one core, and groups as the paper has them
GROUPS = ['--n_layer=5', '--groups=[[1],[2,3]]']
TASKS = {
    'calc': depth.CALC,
    'hop': depth.HOP,
    'calc groups': [*depth.CALC, *GROUPS],
    'hop groups': [*depth.HOP, *GROUPS, '--max_iters=1000'],
}
DRAWS = ('as it is', 'fixed loop counts', 'uniform draw')       # of depth.LEVERS, for C13
VARIANTS = dict(small=['main', 'random', 'fixed', 'uniform', *CHOICES], tasks=[*TASKS, *DRAWS],
                paper=['main'])

# the sweeps: rules as printed, then changes of one (Q2), which count block maps and no time
SWEEP = ['--n_windows=64', '--rounds=4', '--checks=False', '--epsilons=[0.3,1,2,4,8]',
         '--budgets=[1,2,3,4,5,6,7,8,10,12,14,16,20,30]']
CHANGED = ['--cache=exact', '--past=False', '--budgets=[30]', '--epsilons=[]', '--rounds=1',
           '--timed_tokens=1']
RULES = {
    'accel': ['--checks=True', '--json'],
    'accel, step kept': ['--rules=["accel"]', '--keep=True', *CHANGED],
    'accel, one hit': ['--rules=["accel"]', '--hits=1', *CHANGED],
    'accel, one hit, step kept': ['--rules=["accel"]', '--hits=1', '--keep=True', *CHANGED],
    'norm, two hits': ['--rules=["norm"]', '--hits=2', *CHANGED],
}
# the runs that are swept, by all of RULES
SWEPT = 'main', 'random', 'calc groups', 'hop groups'

FIGURES = ('figure_4.png', 'frontier.png', 'figures/figure_1.png', 'figures/figure_2.png',
           'figures/figure_3a.png', 'figures/figure_5.png', 'figures/convergence.png')
# the runs whose figures go to assets/, of the first seed: under which prefix, and which of them
SHOWN = dict(small={'main': ('', FIGURES)}, paper={'main': ('paper_', FIGURES)},
             tasks={'calc': ('wave_', FIGURES[-1:]), 'calc groups': ('calc_', FIGURES)})


# what is run ------------------------------------------------------------------------------------

def dataset_name():
    """The data set of this scale; a task needs none."""
    return dataset or dict(small='pydocs', tasks=None, paper='fineweb')[scale]


def trainings_of_scale():
    """{(variant, seed): (its folder, flags of train.py)}, in the order in which they run."""
    if scale == 'paper':
        config_file = os.path.join(runs.ROOT, 'config', 'groups.py')
        keep = '--keep_iters=[0,30,100,300,1000,3000,10000,30000]'
        return {('main', seeds[0]): (folder_of('main', seeds[0]),
                                     [config_file, f'--dataset={dataset_name()}', keep, *more])}
    flags, shared = {}, {}      # shared: the part and the variant of a run of results.depth
    if scale == 'tasks':
        flags |= TASKS
        flags |= {draw: [*depth.CALC, *depth.SHORT, *depth.LEVERS[draw]] for draw in DRAWS}
        shared |= dict(calc=('calc', 'looped'), hop=('hop', 'looped'))
        shared |= {draw: ('levers', draw) for draw in DRAWS}
    else:
        # what C1 to C12 look at, other loop draws (C13), the open choices (Q3)
        flags |= dict(main=[], random=['--adapter_init=random'],
                      fixed=['--loop_draw=fixed', '--keep_iters=[]'],
                      uniform=['--loop_draw=uniform', '--keep_iters=[]'])
        flags |= {name: [*changed, *SHORT] for name, changed in CHOICES.items()}
        if dataset is None:
            shared['main'] = 'text', 'looped'
        flags = {name: [*some, f'--dataset={dataset_name()}'] for name, some in flags.items()}
    found = {}
    for variant in only or flags:
        for seed in seeds:
            folder = folder_of(variant, seed)
            if variant in shared:
                folder = depth.folder_of(*shared[variant], seed)
            found[variant, seed] = folder, [*flags[variant], '--device=cpu', f'--seed={seed}',
                                            *more]
    return found


def folder_of(variant, seed):
    return os.path.join('out-claims', scale, f"{variant.replace(' ', '_')}-{seed}")


def measure(folder, variant, of_tasks, until, threads):
    """The geometry of a run, and of a task's its questions, into rows.json. True if it is done."""
    if time.time() > until:
        return False
    if threads:
        torch.set_num_threads(threads)

    def work():
        if of_tasks and variant in DRAWS:
            rows = loss_rows(folder)
        else:
            rows = geometry_rows(folder, of_tasks or variant not in CHOICES)
        if of_tasks and variant in TASKS:
            rows |= question_rows(folder)
        with open(os.path.join(folder, 'rows.json'), 'w') as f:
            json.dump({name: list(some) for name, some in rows.items()}, f, default=float)
        return True
    runs.once(folder, 'rows', work)
    print(f'measured {folder}', flush=True)
    return True


def sweep_all(folder, until, threads):
    """All of RULES on a run, one after another. True if they are done."""
    for name in reversed(RULES):        # 'accel' is the last one: its figures stay
        if time.time() > until:
            return False
        runs.once(folder, f'bench {name}', partial(sweep, folder, name, threads))
        print(f'swept {folder}: {name}', flush=True)
    return True


def sweep(folder, name, threads):
    """One of RULES on a run: bench.csv under a name of its own."""
    log = os.path.join(folder, 'bench.txt')
    flags = [f'--out_dir={folder}', *SWEEP, *RULES[name]]
    runs.command('bench.py', *flags, log=log, threads=threads)
    shutil.copyfile(os.path.join(folder, 'bench.csv'), os.path.join(folder, f'bench {name}.csv'))
    if name == 'accel':         # what a check costs
        shutil.copyfile(os.path.join(folder, 'bench.json'), os.path.join(folder, 'sweep.json'))
    return True


# what is gathered: the CSVs ---------------------------------------------------------------------

def point_of(row):
    """A row of bench.csv -> what the claims need of it; blocks: layers evaluated in the groups."""
    layers = {key: key.count('-') + 1 for key in row if key.startswith('evals_')}
    blocks = sum(float(row[key]) * n for key, n in layers.items())
    kept = ('cache', 'rule', 'past', 'tau', 'windows', 'ce_minus_full', 'diff_low', 'diff_high',
            'accuracy', 'mean_steps', 'mean_evals', 'ms_per_token')
    return {key: row[key] for key in kept} | dict(blocks=blocks)


def gather(trainings):
    """All runs -> results/SCALE/*.csv."""
    tables = {}
    for path in glob.glob(os.path.join('results', scale, '*.csv')) if only else []:
        rows = [row for row in runs.read_csv(path) if row.get('variant') not in only]
        tables[os.path.basename(path).removesuffix('.csv')] = rows
    here, before = runs.machine_row(), tables.get('machine', [])
    tables['machine'] = [row for row in before if row['machine'] != here['machine']] + [here]
    for (variant, seed), (folder, _) in trainings.items():
        with open(os.path.join(folder, 'rows.json')) as f:
            new = json.load(f)
        new |= dict(losses=runs.loss_rows(folder), minutes=runs.minutes_rows(folder))
        for name, rows in new.items():
            rows = [dict(variant=variant, seed=seed, **row) for row in rows]
            tables.setdefault(name, []).extend(rows)
        for name in RULES if variant in SWEPT else ():
            rows = runs.read_csv(os.path.join(folder, f'bench {name}.csv'))
            tables.setdefault('bench', []).extend(
                dict(variant=variant, seed=seed, rules=name) | point_of(row) for row in rows)
        if variant in SWEPT:
            with open(os.path.join(folder, 'sweep.json')) as f:
                tables.setdefault('checks', []).extend(
                    dict(variant=variant, seed=seed, model=model, rule=rule, us=us, step_us=step)
                    for model, rule, us, step in json.load(f)['checks'])
    for name, rows in tables.items():
        if name != 'machine':
            rows.sort(key=lambda row: VARIANTS[scale].index(row['variant']))
        if rows:
            runs.write_csv(scale, name, rows)


def draw_figures(folder, prefix, figures):
    """geometry.py on a run; its figures, and those of the sweep, go to assets/."""
    log = os.path.join(folder, 'geometry.txt')
    work = partial(runs.command, 'geometry.py', f'--out_dir={folder}', log=log)
    runs.once(folder, 'geometry', work)
    os.makedirs('assets', exist_ok=True)
    for figure in figures:
        path = os.path.join(folder, figure)
        if os.path.exists(path):
            shutil.copyfile(path, os.path.join('assets', prefix + os.path.basename(figure)))


# the run ----------------------------------------------------------------------------------------

def check_knobs():
    if scale not in ('small', 'tasks', 'paper'):
        raise ValueError(f"unknown scale '{scale}': choose small, tasks or paper")
    runs.check_knobs(seeds, workers, minutes)
    if scale == 'tasks' and dataset:
        raise ValueError('--dataset: the tasks have data of their own')
    if not set(only) <= set(VARIANTS[scale]):
        raise ValueError(f"--only: choose from {', '.join(VARIANTS[scale])}")


def run_all(trainings, until):
    """Train, measure and sweep all that is not done yet. True if nothing is left to do."""
    if dataset_name():
        data.open_data(dataset_name())      # made once, before all the trainings want it
    threads, at_a_time = (None, 1) if scale == 'paper' else (1, workers)
    with ThreadPoolExecutor(at_a_time) as pool:
        done = pool.map(lambda of: runs.train(*of, until, threads), trainings.values())
        if not all(list(done)):
            return False
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(at_a_time, context) as pool:
        waiting = []
        for (variant, _), (folder, _) in trainings.items():
            waiting.append(pool.submit(measure, folder, variant, scale == 'tasks', until, threads))
        if not all([one.result() for one in waiting]):
            return False

    # a sweep times its points in turn, so what a neighbour takes, it takes from all alike
    with ThreadPoolExecutor(at_a_time) as pool:
        done = [pool.submit(sweep_all, folder, until, threads)
                for (variant, _), (folder, _) in trainings.items() if variant in SWEPT]
        return all([one.result() for one in done])


def main():
    check_knobs()
    if not only_table:
        trainings = trainings_of_scale()
        until = time.time() + 60 * minutes if minutes else math.inf
        if not run_all(trainings, until):
            print('the time is up: the same command goes on')
            return
        gather(trainings)
        for variant, shown in SHOWN[scale].items():
            if only and variant not in only:
                continue
            draw_figures(trainings[variant, seeds[0]][0], *shown)
    table.write(table.BEGIN, table.END, table.markdown())


if __name__ == '__main__':
    config = configure(globals())
    run(main)
