"""
The claims of the papers, measured again: trains models, measures them, and writes the pages.

    python -m results.run                   text: the paper's recipe, and our default
    python -m results.run --scale=tasks     calc and hop, where loops matter
    python -m results.run --scale=depth     k layers looped L times, beside k L layers
    python -m results.run --scale=levers    what makes a model use loops: calc, one choice changed
    python -m results.run --scale=sizes     the recipe with other widths and lengths of training
    python -m results.run --scale=choices   the recipe with one open choice changed, short runs
    python -m results.run --scale=plain     plain models that train as long as the default
    python -m results.run --scale=medium    config/medium.py and a plain model, on a folder of text
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
import os
import time
from collections import defaultdict
from functools import partial
from typing import Literal

import data
from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from results import claims, runs

# ------------------------------------------------------------------------------------------------
scale: Literal['text', 'tasks', 'depth', 'levers', 'sizes', 'choices', 'plain', 'medium',
               'paper'] = 'text'
dataset: str | None = None  # of the text scales; None = torchdocs, wiki for medium and paper
variants: list = []         # only these; [] = all of the scale
seeds = [1337, 1, 2]        # those of FIRST_SEED use only the first
prompts = 64                # held-out prompts to continue
minutes: float | None = None    # stop after this many and save; None = run to the end
workers = 2                 # runs at a time on a CPU, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ------------------------------------------------------------------------------------------------

RECIPE = ['config/recipe.py']
CALC, HOP = ['config/calc.py'], ['config/calc.py', 'config/hop.py']
GROUPS = ['--n_layer=5', '--groups=[[1],[2,3]]']
SHORT = ['--max_iters=400', '--eval_loops=[4]', '--keep_iters=[]']
SHORT_CALC = [*CALC, '--max_iters=300', '--eval_interval=300', '--eval_loops=[1,4,8,16]',
              '--keep_iters=[]']
ONCE = '--groups=[]'
FIRST_SEED = 'sizes', 'plain', 'medium', 'paper'
# {scale: {variant: flags of train.py}}
SCALES = dict(
    text={'recipe': RECIPE, 'random adapter': [*RECIPE, '--adapter_init=random'], 'default': []},
    tasks={'calc': [*CALC, *GROUPS], 'hop': [*HOP, *GROUPS, '--max_iters=1000']},
    depth={'calc: 1 x 8 looped': CALC, 'calc: 1 x 1': [*CALC, ONCE],
           'calc: 8 x 1': [*CALC, ONCE, '--n_layer=10'],
           'hop: 1 x 4 looped': HOP, 'hop: 1 x 1': [*HOP, ONCE],
           'hop: 4 x 1': [*HOP, ONCE, '--n_layer=6']},
    levers={name: [*SHORT_CALC, *flags] for name, flags in {
        'as it is': [], 'learned positions': ['--pos=learned'],
        'asked at the last token alone': ['--dataset=calc:dense=False'],
        'random adapter': ['--adapter_init=random'], 'x0 zero': ['--x0=zero'],
        'x0 e': ['--x0=e'], 'addition': ['--injection=add'], 'bptt_k 1': ['--bptt_k=1'],
        'bptt_k full': ['--bptt_k=64'], 'fixed loop counts': ['--loop_draw=fixed'],
        'uniform draw': ['--loop_draw=uniform']}.items()},
    # the recipe itself has C = 96 and 1,500 iterations
    sizes={f'C = {width}, {n} iterations': [*RECIPE, f'--n_embd={width}', f'--max_iters={n}',
                                            '--keep_iters=[0,100,300,700,1500,3000]']
           for width, n in ((48, 1500), (192, 1500), (96, 500), (96, 4500))},
    choices={name: [*RECIPE, *SHORT, *flags] for name, flags in {
        'as it is': [], 'addition': ['--injection=add'], 'x0 zero': ['--x0=zero'],
        'x0 e': ['--x0=e'], 'norm after the loop': ['--norm_inside=False'],
        'bptt_k 1': ['--bptt_k=1'], 'step noise 0.1': ['--step_noise=0.1']}.items()},
    # a plain iteration takes less time, so there are more of them
    plain={f'{n} layers, lr {rate:g}': [ONCE, f'--n_layer={n}', f'--max_iters={iters}',
                                        '--keep_iters=[]', f'--learning_rate={rate}']
           for n, iters, rates in ((6, 2900, (2.5e-3, 5e-3, 1e-2)),
                                   (18, 950, (1.25e-3, 2.5e-3, 5e-3, 1e-2)))
           for rate in rates},
    medium={'medium': ['config/medium.py'],
            'medium plain': ['config/medium.py', ONCE, '--max_iters=2900']},
    paper={'paper': ['config/groups.py', '--keep_iters=[0,30,100,300,1000,3000,10000,30000]']})
# what is measured of a run: flags of results.measure
GEOMETRY = ['--tables=["settled","dlr","loops"]']
PART = ['--tables=["settled","dlr","loops","sweep","times"]',
        '--only_ways=["fixed","norm","norm_rel","kl","accel","accel_rel"]']
MEASURE = dict(choices=GEOMETRY, depth=['--tables=["deeper"]'], sizes=PART,
               medium=['--n_windows=12', '--refine=1', '--rounds=6'],
               paper=['--n_windows=8', '--refine=1'])
TEXTS = ['--cache=latest', '--n_windows=64', '--epsilons=[]', '--rounds=1', '--timed_tokens=1',
         '--prompt_tokens=12', '--new_tokens=36', "--rules=['norm_rel']", '--least_tau=3e-3',
         '--taus=[1e-3,3e-3,1e-2,3e-2]', '--more_taus=[]', '--waves=[[8,1],[8,2]]',
         '--budgets=[2,3,4,5,6,8,10,12]', '--drafts=[[1,6],[2,6],[3,8],[3,12]]']
FEWER = dict(sizes=['--taus=[3e-3,1e-2]', '--drafts=[]', '--n_prompts=16'],
             medium=['--n_prompts=8'])


def chosen():
    """[(variant, seed)], in the order in which they run."""
    some = seeds[:1] if scale in FIRST_SEED else seeds
    return [(variant, seed) for seed in some for variant in variants or SCALES[scale]]


def train(variant, seed, until):
    flags = [*SCALES[scale][variant], f'--seed={seed}', *more]
    if name := text_of(variant):
        flags.append(f'--dataset={name}')
    if scale != 'paper':
        flags.append('--device=cpu')
    return runs.train(runs.folder_of(variant, seed), flags, until)


def text_of(variant):
    """The data set of a training on text, None of one on a task."""
    if CALC[0] in SCALES[scale][variant]:
        return None
    return dataset or ('wiki' if scale in ('medium', 'paper') else 'torchdocs')


def is_looped(variant):
    return ONCE not in SCALES[scale][variant] and scale != 'levers'


def measure(variant, seed, until):
    """The geometry, the sweep and its times. True if it is done."""
    return not is_looped(variant) or runs.once(
        runs.folder_of(variant, seed), 'rows', 'results.measure', *MEASURE.get(scale, []),
        until=until)


def texts(variant, seed, until):
    """Whole continuations. True if they are done."""
    if scale in ('tasks', 'depth', 'choices', 'paper') or not is_looped(variant):
        return True
    return runs.once(runs.folder_of(variant, seed), 'texts', 'bench.py', *TEXTS,
                     f'--n_prompts={prompts}', *FEWER.get(scale, []), until=until)


def bytes_per_token(name):
    """Of a data set's held-out text; '' for a task."""
    if name is None:
        return ''
    val = data.open_data(name).meta['val']
    return val['bytes'] / val['tokens']


def gather():
    """
    All runs of the scale that are there -> results/SCALE/*.csv, where the rows of other runs stay.
    """
    tables = defaultdict(list)
    for variant, seed, folder in runs.found(SCALES[scale]):
        model, _ = load_checkpoint(os.path.join(folder, 'ckpt.pt'))
        new = dict(losses=runs.last_losses(folder), minutes=runs.minutes_rows(folder),
                   texts=runs.text_rows(folder),
                   models=[dict(parameters=sum(p.numel() for p in model.parameters()),
                                bytes_per_token=bytes_per_token(text_of(variant)))])
        if os.path.exists(rows := os.path.join(folder, 'rows.json')):
            with open(rows) as f:
                new |= json.load(f)
        for name, rows in new.items():
            tables[name] += [dict(variant=variant, seed=seed) | row for row in rows]
    runs.save(scale, tables, order=list(SCALES[scale]))


def main():
    until = runs.deadline(seeds, workers, minutes)
    unknown = set(variants) - set(SCALES[scale])
    if unknown:
        raise ValueError(f"--variants: {', '.join(sorted(unknown))} is not of --scale={scale}: "
                         f"{', '.join(SCALES[scale])}")
    if not only_table:
        for name in {text_of(variant) for variant, _ in chosen()} - {None}:
            if time.time() < until:
                data.open_data(name)        # made once, before the trainings start
        # the ways of a run are timed in turn, so another process slows all of them alike
        for phase in (train, measure, texts):
            works = [partial(phase, *key, until) for key in chosen()]
            if not runs.all_done(works, 1 if scale == 'paper' else workers):
                return
        gather()
    claims.write_pages()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
