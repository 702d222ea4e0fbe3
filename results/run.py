"""
The claims of the papers, measured again: trains models, measures them, and writes the pages.

    python -m results.run                   text: the paper's recipe, and our default
    python -m results.run --scale=tasks     calc and hop, where loops matter
    python -m results.run --scale=paper --minutes=9     config/groups.py on one GPU, in pieces
    python -m results.run --only_table      results/*/*.csv -> the pages, nothing is run

Run them in the project's folder; the same command continues after a stop. A training goes to
out-results/VARIANT-SEED. Then results.measure and, on text, bench.py with whole continuations run
on it. The rows of all runs that are there go to results/SCALE/*.csv, from which claims.py writes
the pages.

    variant     a training: the name of its flags in SCALES
    texts       continuations of held-out prompts, by every kind of decoding
"""
import json
import math
import os
import time
from collections import defaultdict
from functools import partial
from typing import Literal

import data
from common.configurator import configure, run
from results import claims, runs

# ------------------------------------------------------------------------------------------------
scale: Literal['text', 'tasks', 'paper'] = 'text'
dataset: str | None = None  # of text and paper; None = torchdocs for text, wiki for paper
variants: list = []         # only these; [] = all of the scale
seeds = [1337, 1, 2]        # paper uses only the first
minutes: float | None = None    # stop after this many and save; None = run to the end
workers = 2                 # runs at a time on a CPU, with a thread each
only_table = False
# ------------------------------------------------------------------------------------------------

RECIPE = ['config/recipe.py']
FIVE_LAYERS = ['--n_layer=5', '--groups=[[1],[2,3]]']
# {scale: {variant: flags of train.py}}
SCALES = dict(
    text={'recipe': RECIPE, 'random adapter': [*RECIPE, '--adapter_init=random'], 'default': []},
    tasks={'calc': ['config/calc.py', *FIVE_LAYERS],
           'hop': ['config/calc.py', 'config/hop.py', *FIVE_LAYERS, '--max_iters=1000']},
    paper={'paper': ['config/groups.py', '--keep_iters=[0,30,100,300,1000,3000,10000,30000]']})
# flags of results.measure, and of bench.py for whole continuations
MEASURE = dict(paper=['--n_windows=8', '--refine=1'])
TEXTS = ['--cache=latest', '--n_windows=64', '--epsilons=[]', '--rounds=1', '--timed_tokens=1',
         '--n_prompts=64', '--prompt_tokens=12', '--new_tokens=36', "--rules=['norm_rel']",
         '--least_tau=3e-3', '--taus=[1e-3,3e-3,1e-2,3e-2]', '--more_taus=[]',
         '--waves=[[8,1],[8,2]]', '--budgets=[2,3,4,5,6,8,10,12]',
         '--drafts=[[1,6],[2,6],[3,8],[3,12]]']


def chosen():
    """[(variant, seed)], in the order in which they run."""
    some = seeds[:1] if scale == 'paper' else seeds
    return [(variant, seed) for seed in some for variant in variants or SCALES[scale]]


def text_of():
    """The data set of the scale's trainings, None if they are on tasks."""
    return None if scale == 'tasks' else dataset or dict(text='torchdocs', paper='wiki')[scale]


def work(what, variant, seed, until):
    """Train, measure (rows: geometry, sweep, times) or continue texts. True if that is done."""
    train = [*SCALES[scale][variant], f'--seed={seed}', '--resume']
    if text_of():
        train.append(f'--dataset={text_of()}')
    if scale != 'paper':
        train.append('--device=cpu')
    command = dict(train=['train.py', *train], texts=['bench.py', *TEXTS],
                   rows=['results.measure', *MEASURE.get(scale, [])])[what]
    return runs.once(runs.folder_of(variant, seed), what, *command, until=until)


def gather():
    """All runs of the scale that are there -> results/SCALE/*.csv; rows of other runs stay."""
    tables = defaultdict(list)
    for variant, seed, folder in runs.trained(SCALES[scale]):
        new = dict(losses=runs.last_losses(folder), minutes=runs.minutes_rows(folder),
                   texts=runs.text_rows(folder))
        if os.path.exists(path := os.path.join(folder, 'rows.json')):
            with open(path) as f:
                new |= json.load(f)
        for name, rows in new.items():
            tables[name] += [dict(variant=variant, seed=seed) | row for row in rows]
    runs.save(scale, tables, order=list(SCALES[scale]))


def main():
    if not seeds or workers < 1:
        raise ValueError('--seeds must name at least one seed, and --workers be at least 1')
    if minutes is not None and not minutes > 0:
        raise ValueError(f'--minutes must be more than 0, not {minutes}')
    until = math.inf if minutes is None else time.time() + 60 * minutes
    unknown = set(variants) - set(SCALES[scale])
    if unknown:
        raise ValueError(f"--variants: {', '.join(sorted(unknown))} is not of --scale={scale}: "
                         f"{', '.join(SCALES[scale])}")
    if not only_table:
        if text_of() and time.time() < until:
            data.open_data(text_of())       # made once, before the trainings start
        # the ways of a run are timed in turn, so another process slows all of them alike
        for what in ('train', 'rows', 'texts') if scale == 'text' else ('train', 'rows'):
            works = [partial(work, what, *key, until) for key in chosen()]
            if not runs.all_done(works, 1 if scale == 'paper' else workers):
                return
        gather()
    claims.write_pages()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
