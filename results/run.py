"""
The paper's claims, re-measured: runs the project's own commands and computes the tables from them.

    python -m results.run                           small: the default model on text, three seeds;
                                                    1.5 hours on two cores; rerun to continue
    python -m results.run --scale=recipe            text with the paper's recipe, two hours
    python -m results.run --scale=tasks             where loops matter: calc and hop, an hour more
    python -m results.run --scale=paper --minutes=9         config/groups.py on one GPU, in pieces
    python -m results.run --only_table              results/*/*.csv -> the tables, nothing is run

Run them in the project's folder. They write the runs to out-claims/SCALE/NAME, and share those of
results.depth in out-depth and of results.waves in out-waves. When all runs of a scale are done they
write results/SCALE/*.csv, assets/*.png and the tables of results/README.md.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10, C14). Geiping: 5, 6 (C11, C12).

    variant     a training. On text 'main' is the default model and 'random' has Geiping's adapter;
                the rest are open choices and other draws; recipe: 'main' and 'random' with the
                paper's recipe; tasks: see TASKS
    run, key    (variant, seed)
"""
import json
import os
from collections import defaultdict
from functools import partial
from typing import Literal

import data
from common.configurator import configure, run
from results import depth, runs, table, waves

# ------------------------------------------------------------------------------------------------
scale: Literal['small', 'recipe', 'tasks', 'paper'] = 'small'
dataset: str | None = None  # None = torchdocs, fineweb for paper; tasks have their own
seeds = [1337, 1, 2]        # the paper's scale uses only the first
minutes: float | None = None    # stop after this many and save; None = run to the end
workers = 2                 # runs at a time on a CPU, with a thread each
more: list = []             # flags for every training, to make it smaller
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
# runs of results.depth that serve here too: {variant: (part, variant there)}
SHARED = dict(small=dict(main=('text', 'looped')), recipe={}, paper={},
              tasks=dict(calc=('calc', 'looped'), hop=('hop', 'looped')))

# the sweeps: the unchanged rules, then one rule changed (Q2), without timing
SWEEP = ['--n_windows=64', '--rounds=4', '--epsilons=[0.3,1,2,4,8]',
         '--budgets=[1,2,3,4,5,6,7,8,10,12,14,16,20,30]']
CHANGED = ['--cache=exact', '--past=False', '--budgets=[30]', '--epsilons=[]', '--rounds=1',
           '--timed_tokens=1']
RULES = {
    'accel': [],
    'accel, step kept': ['--rules=["accel"]', '--keep=True', *CHANGED],
    'accel, one hit': ['--rules=["accel"]', '--hits=1', *CHANGED],
    'accel, one hit, step kept': ['--rules=["accel"]', '--hits=1', '--keep=True', *CHANGED],
    'norm, two hits': ['--rules=["norm"]', '--hits=2', *CHANGED],
}
# the runs that are swept, by all of RULES
SWEPT = 'main', 'random', 'calc groups', 'hop groups'

FIGURES = ('figure_4.png', 'quality.png', 'figures/figure_1.png', 'figures/figure_2.png',
           'figures/figure_3a.png', 'figures/figure_5.png', 'figures/convergence.png')
# the runs whose figures go to assets/ (first seed): the prefix of their names, and which figures
SHOWN = dict(small={'main': ('', FIGURES)}, recipe={'main': ('recipe_', FIGURES)},
             paper={'main': ('paper_', FIGURES)},
             tasks={'calc': ('wave_', FIGURES[-1:]), 'calc groups': ('calc_', FIGURES)})


# what is run ------------------------------------------------------------------------------------

def dataset_name():
    """The data set of this scale; a task needs none."""
    return dataset or dict(tasks=None, paper='fineweb').get(scale, 'torchdocs')


def variants():
    """{variant: flags of train.py}, in the order in which they run."""
    if scale == 'paper':
        return dict(main=['config/groups.py', '--keep_iters=[0,30,100,300,1000,3000,10000,30000]'])
    if scale == 'tasks':
        return TASKS
    if scale == 'recipe':
        return dict(main=['config/recipe.py'], random=['config/recipe.py', '--adapter_init=random'])
    # the variants of the claims, other loop draws, the open choices (Q3)
    full = dict(main=[], random=['--adapter_init=random'],
                fixed=['--loop_draw=fixed', '--keep_iters=[]'],
                uniform=['--loop_draw=uniform', '--keep_iters=[]'])
    return full | {name: [*changed, *SHORT] for name, changed in CHOICES.items()}


def trainings():
    """{(variant, seed): flags of train.py}."""
    shared = [] if scale == 'paper' else ['--device=cpu']
    if dataset_name():
        shared.append(f'--dataset={dataset_name()}')
    return {(variant, seed): [*flags, *shared, f'--seed={seed}', *more]
            for variant, flags in variants().items()
            for seed in (seeds[:1] if scale == 'paper' else seeds)}


def folder_of(variant, seed):
    if variant in SHARED[scale] and dataset is None:
        return depth.folder_of(*SHARED[scale][variant], seed)
    if (scale, variant, dataset) == ('recipe', 'main', None):
        return waves.folder_of('recipe', seed)
    return os.path.join('out-claims', scale, f"{variant.replace(' ', '_')}-{seed}")


def train(key, flags, until):
    return runs.train(folder_of(*key), flags, until)


def measure(key, _, until):
    """Measure what the claims need: geometry, and on a task decoding. True if it is done."""
    (variant, _), flags = key, []
    if variant not in SWEPT and variant not in TASKS:
        flags = ['--tables=["steps","settled","dlr","loops"]']
    return runs.once(folder_of(*key), 'rows', 'results.measure', *flags, until=until)


def sweep(key, _, until):
    """All of RULES on a run that is swept, one after another. True if they are done."""
    names = reversed(RULES) if key[0] in SWEPT else []      # 'accel' last: its figures stay
    return all(runs.bench(folder_of(*key), f'bench {name}', [*SWEEP, *RULES[name]], until)
               for name in names)


# what is gathered: the CSVs ---------------------------------------------------------------------

def gather():
    """All runs -> results/SCALE/*.csv."""
    tables = defaultdict(list)
    for variant, seed in trainings():
        folder = folder_of(variant, seed)
        with open(os.path.join(folder, 'rows.json')) as f:
            new = json.load(f)
        new |= dict(losses=runs.last_losses(folder), minutes=runs.minutes_rows(folder))
        if variant in SWEPT:
            new['bench'] = [dict(rules=name) | row for name in RULES
                            for row in runs.bench_rows(folder, f'bench {name}')]
        for name, rows in new.items():
            tables[name] += [dict(variant=variant, seed=seed) | row for row in rows]
    runs.save(scale, tables)


def draw_figures():
    """geometry.py on some runs; its figures, and those of the sweep, go to assets/."""
    for variant, (prefix, figures) in SHOWN[scale].items():
        folder = folder_of(variant, seeds[0])
        runs.once(folder, 'geometry', 'geometry.py')
        for figure in figures:
            runs.show(os.path.join(folder, figure), prefix + os.path.basename(figure))


# the run ----------------------------------------------------------------------------------------

def main():
    until = runs.deadline(seeds, workers, minutes)
    if scale == 'tasks' and dataset:
        raise ValueError('--dataset: the tasks have data of their own')
    if not only_table:
        if dataset_name():
            data.open_data(dataset_name())      # made once, before the trainings start
        # a sweep times its points in turn, so another process slows all of them alike
        for phase in (train, measure, sweep):
            works = [partial(phase, *of, until) for of in trainings().items()]
            if not runs.all_done(works, 1 if scale == 'paper' else workers):
                return
        draw_figures()
        gather()
    runs.write('claims', table.markdown())


if __name__ == '__main__':
    config = configure(globals())
    run(main)
