"""
Other looped models and rules beside ours: Ouro with its gate, ETD, Geiping's criteria.

    python -m results.zoo               an hour and a half on two cores; rerun to continue
    python -m results.zoo --only_table  results/zoo/*.csv -> the tables, nothing is run

Run it in the project's folder. It writes its runs to out-zoo, shares two with results.run in
out-results, and then writes results/zoo/*.csv and the tables of results/zoo.md.

    part        ouro: the whole stack looped K times, trained in stage I, then its gate in stage II;
                etd: a plain model, its thinking block, and mid-training with that block and others;
                criteria: Geiping's rules on the default run and on calc
    task        text, calc
    evals       block maps a token; in ouro a block map is the whole stack
"""
import json
import os
import time
from collections import defaultdict
from functools import partial
from itertools import product

import numpy as np

import data
from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from results import runs
from results.run import CALC
from results.runs import column, distinct, fewest_maps, head, join, line, mean_std, pick
from zoo.etd import thinking_block
from zoo.huginn import EXITS as CRITERIA

# ------------------------------------------------------------------------------------------------
seeds = [1337, 1, 2]
minutes: float | None = None    # stop after this many and save; None = run to the end
workers = 2                 # runs at a time, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ------------------------------------------------------------------------------------------------

# flags of the trainings. text: half of the default's iterations for Ouro, whose loops all have
# gradients and a loss each
TASKS = dict(text=['--dataset=torchdocs', '--keep_iters=[]'], calc=[*CALC, '--keep_iters=[]'])
OURO = dict(text=['--max_iters=750'], calc=[])
GATE = ['--model=zoo.ouro:OuroGateOnly', '--optimizer=adamw', '--max_iters=300',
        '--warmup_iters=20', '--learning_rate=1e-3']
READ = dict(text=['--dataset=torchdocs'], calc=['--dataset=calc', '--batch_size=64', '--bptt_k=8'])
MID = ['--max_iters=300', '--warmup_iters=20', '--learning_rate=1e-3', '--mean_recurrence=2',
       '--keep_iters=[]']
BENCH = ['--rounds=1', '--timed_tokens=1', '--epsilons=[]', '--n_windows=64',
         '--least_tau=0']
GATED = ['--cache=exact', '--rules=["zoo.ouro:gate","norm_rel","kl","accel"]',
         '--taus=[1e-3,1e-2,3e-2]',
         '--more_taus=[0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4,0.5,0.6,0.7,0.8,0.9,1.5,3]']
CHECKED = ['--cache=latest', '--n_loop=30', '--taus=[1e-5,1e-4,1e-3,3e-3,1e-2]', '--more_taus='
           '[0.02,0.03,0.05,0.08,0.1,0.13,0.15,0.21,0.26,0.34,0.51,1]', '--rules=' + json.dumps(
               [*(f'zoo.huginn:{name}' for name in CRITERIA), 'norm_rel', 'kl', 'accel'])]

SAME = dict(text=0.005, calc=0.002)     # nats above the best fixed budget: equal quality
LOOPS = (4, 8)                          # of Ouro, in training
BLOCKS = ('knees', 'front', 'back', 'none')     # where the loops of ETD's mid-training are


# what is run ------------------------------------------------------------------------------------

def place(part, task, variant, seed):
    if part == 'criteria':
        return runs.folder_of('calc: 1 x 8 looped' if task == 'calc' else 'default', seed)
    return os.path.join('out-zoo', part, f"{task}_{variant.replace(' ', '_')}-{seed}")


def train(folder, seed, flags, until):
    return runs.train(folder, ['--device=cpu', f'--seed={seed}', *flags, *more], until)


def measure_ouro(task, seed, until, loops):
    """Both stages, and a benchmark of the second. True if all is done."""
    first, second = (place('ouro', task, f'{stage} at {loops}', seed) for stage in ('I', 'II'))
    shape = [*TASKS[task], 'config/ouro.py', f'--mean_recurrence={loops - 1}',
             f"--eval_loops={[n for n in (1, 2, 4, 8) if n <= loops]}"]
    bench = [*BENCH, f'--n_loop={loops}', f'--budgets={list(range(1, loops))}', *GATED]
    return (train(first, seed, [*shape, *OURO[task]], until)
            and train(second, seed, [*shape, f'--init_from={first}/ckpt.pt', *GATE], until)
            and runs.bench(second, 'points', bench, until))


def measure_etd(task, seed, until):
    """A plain model, its block, and mid-training of that block, of others, and of none."""
    plain, chosen = (place('etd', task, variant, seed) for variant in ('plain', 'knees'))
    start = f'--init_from={plain}/ckpt.pt'
    if not (train(plain, seed, [*TASKS[task], '--groups=[]', '--n_layer=6'], until)
            and runs.once(chosen, 'etd', 'zoo.etd', start, until=until)):
        return False
    # as many layers as the chosen block has, at the front and at the back
    shape = load_checkpoint(os.path.join(chosen, 'ckpt.pt'))[1]['model_args']
    n, layers = len(shape['groups'][0]), list(range(shape['n_layer']))
    for name, block in dict(front=layers[:n], back=layers[-n:]).items():
        folder = place('etd', task, name, seed)
        if not runs.once(folder, 'etd', 'zoo.etd', start, f'--block={block}', until=until):
            return False
    for name in BLOCKS:
        weights, loops = place('etd', task, name, seed), '[1,2,3,4]'
        if name == 'none':
            weights, loops = plain, '[1]'
        flags = [*READ[task], f'--init_from={weights}/ckpt.pt', f'--eval_loops={loops}', *MID]
        if not train(place('etd', task, f'{name} trained', seed), seed, flags, until):
            return False
    return True


def measure_criteria(task, seed, until):
    """Geiping's criteria, and ours, token by token."""
    folder = place('criteria', task, '', seed)
    return (train(folder, seed, CALC if task == 'calc' else [], until)
            and runs.bench(folder, 'criteria', [*BENCH, *CHECKED, '--n_windows=32'], until))


def works(until):
    """What there is to do, the first seed first."""
    for seed, part, task in product(seeds, PARTS, TASKS):
        if part == 'ouro':
            yield from (partial(measure_ouro, task, seed, until, loops) for loops in LOOPS)
        else:
            yield partial(PARTS[part], task, seed, until)


PARTS = dict(ouro=measure_ouro, etd=measure_etd, criteria=measure_criteria)


# what is gathered -------------------------------------------------------------------------------

def gather():
    """All runs -> results/zoo/*.csv."""
    tables = defaultdict(list)
    variants = dict(ouro=[f'{stage} at {n}' for stage in ('I', 'II') for n in LOOPS],
                    etd=['plain', 'knees', *(f'{name} trained' for name in BLOCKS)],
                    criteria=['looped'])
    for seed, task, part in product(seeds, TASKS, PARTS):
        for variant in variants[part]:
            key = dict(part=part, task=task, variant=variant, seed=seed)
            for name, rows in rows_of(place(part, task, variant, seed), part).items():
                tables[name] += [key | row for row in rows]
    runs.save('zoo', tables)


def rows_of(folder, part):
    """{name of a CSV: the rows of one run}."""
    rows = dict(minutes=runs.minutes_rows(folder))
    points = 'criteria' if part == 'criteria' else 'points'
    if os.path.exists(os.path.join(folder, points + '.csv')):
        rows['points'] = [row | dict(rule=row['rule'].removeprefix('zoo.ouro:'))
                          for row in runs.bench_rows(folder, points)]
    for name in ('blocks', 'angles'):
        path = os.path.join(folder, name + '.csv')
        if os.path.exists(path):
            rows[name] = runs.read_csv(path)
    if os.path.exists(os.path.join(folder, 'log.csv')):
        rows['losses'] = runs.last_losses(folder)
    return rows


# the tables -------------------------------------------------------------------------------------

def at_loops(rows, loops, task):
    """Cells: the loss by loops, and on calc the share of right answers in percent behind it."""
    for n in loops:
        at = pick(rows, loops=n)
        cell = mean_std(column(at, 'loss'), 3) if at else ''
        if at and task == 'calc':
            cell += f"; {100 * np.mean(column(at, 'accuracy')):.1f}%"
        yield cell


def ouro_table(t):
    """The loss at each loop count after stage I; stage II changes the gate alone."""
    yield from head('Ouro, held-out loss at loops', 1, 2, 4, 8)
    for task, n in product(TASKS, LOOPS):
        rows = pick(t['losses'], part='ouro', task=task, variant=f'I at {n}')
        yield line(f'{task}, trained at {n}', *at_loops(rows, (1, 2, 4, 8), task))


def ways_of(rows):
    """Each rule, with and without waiting: (its name, conditions for its rows)."""
    for rule, past in dict.fromkeys((row['rule'], row['past']) for row in rows):
        waits = past == 'True' and any(row['cache'] == 'exact' for row in rows)
        yield rule + (', past' if waits else ''), dict(rule=rule, past=past)


def fewest(rows, same, fixed):
    """
    In words: the fewest block maps within `same` nats of each seed's best `fixed` row, and their
    thresholds. Not the full budget's loss, because more loops may be worse.
    """
    seeds = distinct(rows, 'seed')
    best = {seed: min(column(pick(fixed, seed=seed), 'ce')) for seed in seeds}
    found = fewest_maps(rows, lambda row: row['ce'] <= best[row['seed']] + same)
    if len(found) < len(seeds):
        return f'{len(found)} of {len(seeds)} seeds reach this'
    taus = ', '.join(f'{tau:g}' for tau in column(found, 'tau'))
    return f"{mean_std(column(found, 'mean_evals'))} ({taus})"


def gate_table(t):
    """Block maps at equal quality of the gate and of rules without training, in one model."""
    columns, points = list(product(TASKS, LOOPS)), pick(t['points'], part='ouro')
    yield from head('passes through the stack', *(f'{task}, {n} loops, within {SAME[task]:g} nats'
                                                  for task, n in columns))
    for name, way in ways_of(points):
        cells = []
        for task, n in columns:
            rows = pick(points, task=task, variant=f'II at {n}')
            cells.append(fewest(pick(rows, **way), SAME[task], pick(rows, rule='fixed')))
        yield line(name, *cells)


def criteria_table(t):
    """Geiping's criteria beside ours, on the default run and on calc, decoding with `latest`."""
    yield from head('block maps a group and token, `latest`', *(
        f'{task}, within {SAME[task]:g} nats' for task in TASKS))
    rows = pick(t['points'], part='criteria')
    for name, way in ways_of(rows):
        yield line(name, *(
            fewest(pick(rows, task=task, **way), SAME[task], pick(rows, rule='fixed', task=task))
            for task in TASKS))


def etd_table(t):
    """Plain and damped loops of the block that the knees give, then after mid-training."""
    loops = (1, 2, 3, 4)
    names = dict(knees="the knees' block", front='as many layers at the front',
                 back='as many layers at the back', none='no block')
    yield from head('ETD, held-out loss at loops', *loops)
    for task in TASKS:
        rows = pick(t['blocks'], part='etd', task=task, variant='knees')
        rows = [row for row in rows if row['block'] == block_of(t, task, row['seed'])]
        for kind, words in dict(loss='not trained', damped='not trained, damped').items():
            yield line(f"{task}, the knees' block, {words}",
                       *(mean_std(column(rows, f'{kind}_{n}'), 3) for n in loops))
        for name, words in names.items():
            rows = pick(t['losses'], part='etd', task=task, variant=f'{name} trained')
            yield line(f'{task}, {words}, mid-trained', *at_loops(rows, loops, task))


def block_of(t, task, seed):
    """The block that the knees give, as blocks.csv names it."""
    rows = pick(t['angles'], part='etd', task=task, variant='knees', seed=seed)
    block = thinking_block(np.array(column(rows, 'angle_over_pi')))
    return f'{block[0]}-{block[-1]}'


def markdown(folder=runs.HERE):
    """The block `zoo` of results/zoo.md."""
    t = runs.load('zoo', folder)
    chosen = '; '.join(
        f'{task} ' + ', '.join(block_of(t, task, seed) for seed in distinct(t['angles'], 'seed'))
        for task in TASKS)
    return join([
        [f"{runs.machine_of(t)}; {len(distinct(t['points'], 'seed'))} seeds. Nats are counted "
         'above the best fixed budget of the same model and seed; in brackets the '
         'thresholds of the seeds.'],
        ['**Ouro**:'], ouro_table(t),
        ['**Its gate** beside rules that need no training, `exact`:'], gate_table(t),
        ["**Geiping's criteria**:"], criteria_table(t),
        [f'**ETD**, six layers; the blocks of the knees: {chosen}.'], etd_table(t)])


# the run ----------------------------------------------------------------------------------------

def main():
    until = runs.deadline(seeds, workers, minutes)
    if not only_table:
        if time.time() < until:
            data.open_data('torchdocs')     # made once, before the trainings start
        if not runs.all_done(works(until), workers):
            return
        gather()
    runs.write('zoo', markdown(), page='zoo.md')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
