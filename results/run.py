"""
All that the pages measure at the present commit: trains models, measures them, writes the tables.

    python -m results.run                   continues if it is called again
    python -m results.run --variants="['default']" --seeds=[1337]
    python -m results.run --only_table      results/*/*.csv -> the pages, nothing is run

Run them in the project's folder. A training goes to out-results/VARIANT-SEED. Then results.reading
and results.writing run on it. Their rows go to results/reading/ and results/writing/, from which
the tables are written into the pages.

    variant     a training: the name of its flags in TRAININGS
"""
import os
from functools import partial

import data
from common.configurator import configure, run
from results import reading, runs, writing
from results.runs import head, line, spread
from tasks import TASKS

# ------------------------------------------------------------------------------------------------
dataset = 'torchdocs'       # of the trainings on text
variants: list = []         # only these; [] = all
seeds = [1337, 1, 2]
workers = 2                 # runs at a time, with a thread each
only_table = False
# ------------------------------------------------------------------------------------------------

# ten checkpoints, evenly in log time, and the start; or none
KEPT, NONE = '--keep_iters=[0,50,73,106,155,227,331,483,705,1028]', '--keep_iters=[]'
RECIPE = ['config/recipe.py', KEPT]
ONE_LOOP = ['--mean_recurrence=0.5', '--loop_draw=fixed', NONE]
PLAIN, MIDDLE = '--groups=[]', '--groups=[[1]]'
THREE, LONGER = '--n_layer=3', '--max_iters=4500'
FIVE_LAYERS = ['--n_layer=5', '--groups=[[1],[2,3]]', NONE]
TRAININGS = {   # {variant: flags of train.py}
    'recipe': RECIPE, 'random adapter': [*RECIPE, '--adapter_init=random'], 'default': [KEPT],
    'default, trained at one loop': ONE_LOOP,
    'default, trained at one loop, x0 zero': [*ONE_LOOP, '--x0=zero'],
    'six plain layers': [PLAIN, NONE],
    'three layers, one loops': [THREE, MIDDLE, NONE],
    'three plain layers': [THREE, PLAIN, NONE],
    'three layers, one loops, 4,500 iterations': [THREE, MIDDLE, LONGER, NONE],
    'three plain layers, 4,500 iterations': [THREE, PLAIN, LONGER, NONE],
    'calc': ['config/calc.py', *FIVE_LAYERS],
    'hop': ['config/calc.py', 'config/hop.py', *FIVE_LAYERS, '--max_iters=1000']}
PROBLEMS = ['--n_windows=256']
MEASURED = {    # {variant: {module of results/: its flags}}
    'recipe': dict(reading=[], writing=[]), 'random adapter': dict(reading=[]),
    'default': dict(reading=[], writing=[]), 'calc': dict(reading=PROBLEMS),
    'hop': dict(reading=PROBLEMS)}
LOOPS = 1, 4, 8             # of train.py's last evaluation
# {a file in a run's folder: where its rows are gathered}
GATHERED = {'writing.csv': 'writing/texts.csv.xz', 'reading.csv': 'reading/windows.csv.xz',
            'times.csv': 'reading/times.csv', 'along.csv': 'reading/along.csv'}


def work(what, variant, seed):
    """Train a model, or measure it."""
    if what == 'train':
        script, flags = 'train.py', [f'--dataset={dataset}', *TRAININGS[variant], '--resume',
                                     '--device=cpu', f'--seed={seed}']
    else:
        script, flags = f'results.{what}', MEASURED[variant][what]
    runs.once(runs.folder_of(variant, seed), what, script, *flags)


def gather():
    """All runs that are there -> results/*/*.csv; rows of other runs stay."""
    found = {name: [] for name in ('trained/losses.csv', 'trained/minutes.csv', *GATHERED.values())}
    for variant, seed, folder in runs.trained(TRAININGS):
        new = {'trained/losses.csv': runs.last_losses(folder),
               'trained/minutes.csv': runs.minutes_rows(folder)}
        for name, path in GATHERED.items():
            if os.path.exists(os.path.join(folder, name)):
                new[path] = runs.read_csv(os.path.join(folder, name))
        for path, rows in new.items():
            found[path] += [dict(variant=variant, seed=seed) | row for row in rows]
    for path, rows in found.items():
        runs.save(path, rows, order=list(TRAININGS))


def trained():
    """A line for each training on text: its held-out loss by loops, nats a byte."""
    yield from head('', *(f'at {n} loop' + 's' * (n > 1) for n in LOOPS))
    for variant, of in runs.load('trained/losses.csv').items():
        if variant in TASKS:
            continue
        losses = ([row['loss'] for rows in of.values() for row in rows if row['loops'] == n]
                  for n in LOOPS)
        yield line(variant, *(spread(some, 3) if some else '–' for some in losses))


def tables():
    """{(page, block): its Markdown}."""
    return reading.tables() | writing.tables() | {('README.md', 'trained'): '\n'.join(trained())}


def main():
    if not seeds or workers < 1:
        raise ValueError('--seeds must name at least one seed, and --workers be at least 1')
    unknown = set(variants) - set(TRAININGS)
    if unknown:
        raise ValueError(f"--variants: {', '.join(sorted(unknown))} is none of "
                         f"{', '.join(TRAININGS)}")
    if not only_table:
        data.open_data(dataset)             # made once, before the trainings start
        for what in ('train', 'reading', 'writing'):
            works = [partial(work, what, variant, seed) for seed in seeds
                     for variant in variants or TRAININGS
                     if what == 'train' or what in MEASURED.get(variant, {})]
            runs.all_done(works, workers)
        gather()
    for (page, block), text in tables().items():
        runs.write(page, block, text)
    for measured in reading, writing:
        measured.figures()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
