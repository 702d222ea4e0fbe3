"""
Problems that need depth: what loops gain there, and what makes a model use them.

    python -m results.depth             about two hours on two cores; rerun to continue
    python -m results.depth --only_table        results/depth/*.csv -> the tables, nothing is run

Run them in the project's folder. They write the runs to out-depth/PART/VARIANT-SEED. When all are
done they write results/depth/*.csv, the figures of assets/ and the second block of
results/README.md.

Saunshi et al. 2025 (k layers looped L times beside k L layers), Geiping 3.3 (loop draws, bptt_k).

    part        calc, hop, text: k x L; levers: one choice changed
    looped      the config as it is, k layers in its groups, at L loops
    once        the same k layers, without loops
    stack       k L layers in their place
"""
import os
from functools import partial

import numpy as np

import data
import tasks
from common import plots
from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from common.log import by_depth
from results import runs
from results.runs import column, distinct, head, join, line, mean_std, pick

# ------------------------------------------------------------------------------------------------
seeds = [1337, 1, 2]
minutes: float | None = None    # stop after this many and save; None = run to the end
workers = 2                 # trainings at a time, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ------------------------------------------------------------------------------------------------

CALC, HOP = ['config/calc.py'], ['config/calc.py', 'config/hop.py']
# k x L, with one more layer before and one after: configs, k and L
STACKS = dict(calc=(CALC, 1, 8), hop=(HOP, 1, 4), text=([], 4, 4))
# one choice changed, on a shorter calc
SHORT = ['--max_iters=300', '--eval_interval=300', '--eval_loops=[1,4,8,16]', '--keep_iters=[]']
LEVERS = {
    'as it is': [],
    'learned positions': ['--pos=learned'],
    'asked at the last token alone': ['--dataset=calc:dense=False'],
    'random adapter': ['--adapter_init=random'],
    'x0 zero': ['--x0=zero'],
    'x0 e': ['--x0=e'],
    'addition': ['--injection=add'],
    'bptt_k 1': ['--bptt_k=1'],
    'bptt_k full': ['--bptt_k=64'],
    'fixed loop counts': ['--loop_draw=fixed'],
    'uniform draw': ['--loop_draw=uniform'],
}
DEEPER, DEEPER_LOOPS = 'calc:reset=0.04', [4, 8, 16, 24, 32]
BINS = ((0, 4), (5, 8), (9, 12), (13, 16), (17, 23))    # of depth


# what is run ------------------------------------------------------------------------------------

def trainings():
    """{(part, variant, seed): flags of train.py}, in the order in which they run."""
    flags = {}
    for part, (configs, k, L) in STACKS.items():
        for seed in seeds:
            flags[part, 'looped', seed] = configs
            flags[part, 'once', seed] = [*configs, '--groups=[]']
            flags[part, 'stack', seed] = [*configs, '--groups=[]', f'--n_layer={1 + k * L + 1}']
    for seed in seeds:
        for name, changed in LEVERS.items():
            flags['levers', name, seed] = [*CALC, *SHORT, *changed]
    return {key: [*some, '--device=cpu', f'--seed={key[2]}', *more]
            for key, some in flags.items()}


def folder_of(part, variant, seed):
    return os.path.join('out-depth', part, f"{variant.replace(' ', '_')}-{seed}")


# what is gathered -------------------------------------------------------------------------------

def run_row(folder):
    """The parameters of a run's model, and the minutes of its training."""
    model, _ = load_checkpoint(os.path.join(folder, 'ckpt.pt'))
    minutes, = (row['minutes'] for row in runs.minutes_rows(folder) if row['what'] == 'train')
    return dict(parameters=sum(p.numel() for p in model.parameters()), minutes=minutes)


def deeper_rows(folder):
    """Accuracy by depth and loops of problems with fewer resets than in training."""
    model, _ = load_checkpoint(os.path.join(folder, 'ckpt.pt'))
    return by_depth(model, tasks.Problems(DEEPER), DEEPER_LOOPS, 'cpu')


def gather():
    """All runs -> results/depth/*.csv."""
    tables = dict(accuracy=[], runs=[], deeper=[])
    for part, variant, seed in trainings():
        folder, key = folder_of(part, variant, seed), dict(part=part, variant=variant, seed=seed)
        tables['accuracy'] += [key | row for row in runs.last_losses(folder)]
        tables['runs'].append(key | run_row(folder))
        if (part, variant) == ('calc', 'looped'):
            tables['deeper'] += [dict(seed=seed) | row for row in deeper_rows(folder)]
    runs.save('depth', tables)
    return tables


def draw_figures(tables):
    """The first seed: its losses on text, and its depths on problems deeper than in training."""
    runs.show(os.path.join(folder_of('text', 'looped', seeds[0]), 'loss.png'))
    plots.depth(pick(tables['deeper'], seed=seeds[0]), 'out-depth/deeper.png')
    runs.show('out-depth/deeper.png')


# the tables -------------------------------------------------------------------------------------

def percent(rows, digits=1):
    return mean_std([100 * share for share in column(rows, 'accuracy')], digits)


def stacks_table(t):
    """k x L: a line for each problem and shape."""
    yield from head('', 'block evaluations', 'parameters', 'minutes', 'at these',
                    'at 32 loops (text 8)')
    for part, (_, k, L) in STACKS.items():
        for variant in ('looped', 'once', 'stack'):
            rows = pick(t['accuracy'], part=part, variant=variant)
            trained = pick(t['runs'], part=part, variant=variant)
            shown = percent if part != 'text' else lambda r: mean_std(column(r, 'loss'), 3)
            end = max(column(rows, 'loops'))
            name = dict(looped=f'{k} x {L} looped', once=f'{k} x 1', stack=f'{k * L} x 1')[variant]
            blocks = 2 + (k if variant == 'once' else k * L)
            yield line(f'{part}: {name}', blocks, f"{trained[0]['parameters']:,.0f}",
                       mean_std(column(trained, 'minutes'), 1),
                       shown(pick(rows, loops=L if variant == 'looped' else 1)),
                       shown(pick(rows, loops=end)) if variant == 'looped' else '')


def levers_table(t):
    """A line for each changed choice: accuracy in percent by loops, minutes."""
    rows = pick(t['accuracy'], part='levers')
    loops = distinct(rows, 'loops')
    yield from head('', *(f'{n:g}' for n in loops), 'minutes')
    for variant in distinct(rows, 'variant'):
        spent = column(pick(t['runs'], part='levers', variant=variant), 'minutes')
        yield line(variant, *(percent(pick(rows, variant=variant, loops=n)) for n in loops),
                   mean_std(spent, 1))


def deeper_table(t):
    """A line for each loop count: accuracy in percent by depth of the label."""
    yield from head('loops', *(f'depth {low} to {high}' for low, high in BINS))
    for n in DEEPER_LOOPS:
        cells = []
        for low, high in BINS:
            rows = [row for row in pick(t['deeper'], loops=n) if low <= row['depth'] <= high]
            by_seed = [pick(rows, seed=seed) for seed in distinct(rows, 'seed')]
            cells.append(mean_std([100 * right_share(some) for some in by_seed], 1))
        yield line(n, *cells)


def right_share(rows):
    """The share of right labels over rows by depth."""
    return np.average(column(rows, 'accuracy'), weights=column(rows, 'labels'))


def markdown(folder=runs.HERE):
    """The block `depth` of results/README.md."""
    t = runs.load('depth', folder)
    return join([
        [f'{runs.machine_of(t)}; trainings of one thread, two at a time.'],
        ['**k x L**, % right, and on text the loss:'], stacks_table(t),
        ['**Deeper than usual**: `calc` trained with resets at 1/5 of the tokens, tested with '
         'resets at 1/25; % right:'], deeper_table(t),
        ['**What makes a model use loops**: `calc`, 300 iterations, one choice changed; % right:'],
        levers_table(t)])


# the run ----------------------------------------------------------------------------------------

def main():
    until = runs.deadline(seeds, workers, minutes)
    if not only_table:
        data.open_data('torchdocs')     # made once, before the trainings start
        works = [partial(runs.train, folder_of(*key), flags, until)
                 for key, flags in trainings().items()]
        if not runs.all_done(works, workers):
            return
        draw_figures(gather())
    runs.write('depth', markdown())


if __name__ == '__main__':
    config = configure(globals())
    run(main)
