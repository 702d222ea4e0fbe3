"""
Other looped models and rules beside ours: Ouro with its gate, ETD, Geiping's criteria.

    python -m results.zoo               an hour and a half on two cores; the same command goes on
    python -m results.zoo --only_table  results/zoo/*.csv -> the tables, nothing is run

Run it in the project's folder. It writes its runs to out-zoo, and shares those of results.depth in
out-depth; then results/zoo/*.csv, assets/gate.png and the fourth block of results/README.md.

    part        ouro: the whole stack looped K times, trained in stage I, then its gate in stage II;
                etd: a plain model, its thinking block, and mid-training with that block and others;
                criteria: Geiping's rules on the default run and on calc
    task        text, calc
    evals       block maps a token: of ouro one is the whole stack
"""
import csv
import json
import math
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np

import data
import plots
from configurator import configure, run
from results import runs, table
from results.depth import CALC, folder_of
from results.rows import HERE, column, distinct, lines, load, mean_std, pick
from zoo.huginn import EXITS as CRITERIA
from zoo.ouro import STAGES

# ------------------------------------------------------------------------------------------------
seeds = [1337, 1, 2]
minutes: float | None = None    # save and stop after so many, to be called again; None = at the end
parts = ['ouro', 'etd', 'criteria']
workers = 2                 # runs at a time, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ------------------------------------------------------------------------------------------------

# flags of the trainings. text: half of the default's iterations for Ouro, whose loops all have
# gradients and a loss each
TASKS = dict(text=['--dataset=pydocs', '--keep_iters=[]'], calc=[*CALC, '--keep_iters=[]'])
OURO = dict(text=['--max_iters=750', '--lr_decay_iters=750'], calc=[])
LOOPS = (4, 8)
GATE_ITERS = 300
READ = dict(text=['--dataset=pydocs'], calc=['--dataset=calc', '--batch_size=64', '--bptt_k=8'])
MID = ['--max_iters=300', '--warmup_iters=20', '--learning_rate=1e-3', '--min_lr=1e-4',
       '--mean_recurrence=2', '--keep_iters=[]']
SAME = dict(text=0.005, calc=0.002)     # nats above the best fixed budget: equal quality
BENCH = ['--checks=False', '--rounds=1', '--timed_tokens=1', '--epsilons=[]', '--n_windows=64',
         '--least_tau=0']
GATED = ['--cache=exact', '--rules=["gate","norm_rel","kl","accel"]', '--taus=[1e-3,1e-2,3e-2]',
         '--more_taus=[0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4,0.5,0.6,0.7,0.8,0.9,1.5,3]']
CHECKED = ['--cache=latest', '--n_loop=30', '--taus=[1e-5,1e-4,1e-3,3e-3,1e-2]', '--more_taus='
           '[0.02,0.03,0.05,0.08,0.1,0.13,0.15,0.21,0.26,0.34,0.51,1]', '--rules=' + json.dumps(
               [*(f'zoo.huginn:{name}' for name in CRITERIA), 'norm_rel', 'kl', 'accel'])]
CSVS = ('machine', 'points', 'losses', 'blocks', 'angles', 'minutes')
KEPT = ('cache', 'rule', 'past', 'tau', 'ce', 'ce_minus_full', 'diff_low', 'diff_high', 'accuracy',
        'mean_evals')       # of bench.csv

BEGIN = '<!-- zoo: written by `python -m results.zoo --only_table` -->'
END = '<!-- end of zoo -->'


# what is run ------------------------------------------------------------------------------------

def place(part, task, variant, seed):
    if part == 'criteria':
        return folder_of(task, 'looped', seed)
    return os.path.join('out-zoo', part, f"{task}_{variant.replace(' ', '_')}-{seed}")


def train(folder, seed, flags, until):
    return runs.train(folder, ['--device=cpu', f'--seed={seed}', *flags, *more], until, threads=1)


def bench(folder, name, flags):
    """bench.py on a run, once; bench.csv under a name of its own."""
    def work():
        done = runs.command('bench.py', f'--out_dir={folder}', *BENCH, *flags, threads=1,
                            log=os.path.join(folder, 'bench.txt'))
        shutil.copyfile(f'{folder}/bench.csv', f'{folder}/{name}.csv')
        return done
    runs.once(folder, name, work)
    print(f'{name} of {folder}', flush=True)


def measure_ouro(task, loops, seed, until):
    """Both stages, and a frontier of each. True if all is done."""
    first, second = (place('ouro', task, f'{stage} at {loops}', seed) for stage in ('I', 'II'))
    shape = [*TASKS[task], 'config/ouro.py', f'--mean_recurrence={loops - 1}',
             f"--eval_loops={[n for n in (1, 2, 4, 8) if n <= loops]}"]
    if not train(first, seed, [*STAGES['--stage=1'], *shape, *OURO[task]], until):
        return False
    after = [f'--max_iters={GATE_ITERS}', '--warmup_iters=20', '--learning_rate=1e-3',
             '--min_lr=1e-4']
    if not train(second, seed, [*STAGES['--stage=2'], *shape, f'--init_from={first}/ckpt.pt',
                                *after], until):
        return False
    budgets = [f'--n_loop={loops}', f'--budgets={list(range(1, loops))}']
    bench(first, 'points', [*budgets, *GATED, '--rules=["gate"]'])
    bench(second, 'points', [*budgets, *GATED])
    return True


def etd(folder, plain, *flags):
    """zoo/etd.py on a plain run, once."""
    os.makedirs(folder, exist_ok=True)
    runs.once(folder, 'etd', lambda: runs.command(
        'zoo.etd', f'--init_from={plain}/ckpt.pt', f'--out_dir={folder}', *flags, threads=1,
        log=os.path.join(folder, 'etd.txt')))


def measure_etd(task, _, seed, until):
    """A plain model, its block, and mid-training of that block, of others, and of none."""
    plain = place('etd', task, 'plain', seed)
    if not train(plain, seed, [*TASKS[task], '--groups=[]', '--n_layer=6'], until):
        return False
    chosen = place('etd', task, 'knees', seed)
    etd(chosen, plain)
    for name, block in other_blocks(chosen).items():
        etd(place('etd', task, name, seed), plain, f'--block={block}')
    for name in ('knees', 'front', 'back', 'none'):
        start = plain if name == 'none' else place('etd', task, name, seed)
        loops = '[1]' if name == 'none' else '[1,2,3,4]'
        if not train(place('etd', task, f'{name} trained', seed), seed,
                     [*READ[task], f'--init_from={start}/ckpt.pt', f'--eval_loops={loops}', *MID],
                     until):
            return False
    return True


def other_blocks(folder):
    """As many layers as the chosen block has, at the front and at the back."""
    with open(os.path.join(folder, 'angles.csv'), newline='') as f:
        layers = len(list(csv.DictReader(f)))
    from checkpoint import load_checkpoint
    (block,) = load_checkpoint(os.path.join(folder, 'ckpt.pt'))[1]['model_args']['groups']
    n = len(block)
    return dict(front=list(range(n)), back=list(range(layers - n, layers)))


def measure_criteria(task, _, seed, until):
    """Geiping's criteria, and ours, on one frontier, token by token."""
    folder = place('criteria', task, '', seed)
    flags = CALC if task == 'calc' else []
    if not train(folder, seed, flags, until):
        return False
    bench(folder, 'criteria', [*CHECKED, '--n_windows=32'])
    return True


def works():
    """(function, task, loops, seed) of all parts, the first seed first."""
    for seed in seeds:
        for part, task in product(parts, TASKS):
            for loops in LOOPS if part == 'ouro' else [None]:
                yield globals()[f'measure_{part}'], task, loops, seed


# what is gathered -------------------------------------------------------------------------------

def gather():
    """All runs -> results/zoo/*.csv. Of the other parts the rows that are there stay."""
    tables = {name: [] for name in CSVS}
    for name in CSVS[1:]:
        path = os.path.join('results', 'zoo', name + '.csv')
        if os.path.exists(path):
            tables[name] = [row for row in runs.read_csv(path) if row['part'] not in parts]
    tables['machine'] = [runs.machine_row()]
    for seed, task, part in product(seeds, TASKS, parts):
        variants = dict(
            ouro=[f'{stage} at {n}' for stage in ('I', 'II') for n in LOOPS],
            etd=['plain', 'knees', *(f'{name} trained' for name in
                                     ('knees', 'front', 'back', 'none'))],
            criteria=['looped'])[part]
        for variant in variants:
            folder = place(part, task, variant, seed)
            add_run(tables, folder, dict(part=part, task=task, variant=variant, seed=seed))
    for name, rows in tables.items():
        if rows:
            runs.write_csv('zoo', name, rows)


def add_run(tables, folder, key):
    """The rows of one run's files."""
    tables['minutes'] += [key | row for row in runs.minutes_rows(folder)]
    points = 'criteria.csv' if key['part'] == 'criteria' else 'points.csv'
    for name, file in dict(points=points, blocks='blocks.csv', angles='angles.csv').items():
        path = os.path.join(folder, file)
        for row in runs.read_csv(path) if os.path.exists(path) else []:
            if name == 'points':
                row = {name: row[name] for name in KEPT}
            tables[name].append(key | row)
    if os.path.exists(os.path.join(folder, 'log.csv')):
        last = runs.read_csv(os.path.join(folder, 'log.csv'))[-1]
        tables['losses'] += [
            key | dict(loops=name.removeprefix('val_loss_'), loss=loss,
                       accuracy=last.get(name.replace('loss', 'acc'), ''))
            for name, loss in last.items() if name.startswith('val_loss_') and loss]


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
    yield lines('Ouro, held-out loss at loops', 1, 2, 4, 8)
    yield '|---|---|---|---|---|'
    for task, n in product(TASKS, LOOPS):
        rows = pick(t['losses'], part='ouro', task=task, variant=f'I at {n}')
        yield lines(f'{task}, trained at {n}', *at_loops(rows, (1, 2, 4, 8), task))


def least(rows, same, fixed):
    """
    For each seed the fewest block maps within `same` nats of the best of the `fixed` rows, and its
    tau. Not of the full budget: a model may grow worse with loops.
    """
    for seed in distinct(rows, 'seed'):
        best = min(column(pick(fixed, seed=seed), 'ce'))
        good = [row for row in pick(rows, seed=seed) if row['ce'] <= best + same]
        if good:
            best = min(good, key=lambda row: row['mean_evals'])
            yield best['mean_evals'], best['tau']


def ways_of(rows):
    """Each rule, by own signals and waiting: (its name, its rows)."""
    for rule, past in dict.fromkeys((row['rule'], row['past']) for row in rows):
        waits = past == 'True' and any(row['cache'] == 'exact' for row in rows)
        yield rule + (', past' if waits else ''), pick(rows, rule=rule, past=past)


def gate_table(t):
    """Block maps at equal quality of the gate and of rules without training, in one model."""
    of_second = pick(t['points'], part='ouro', variant=f'II at {LOOPS[0]}')
    ways = [name for name, _ in ways_of(of_second)]
    cells = {('gate after stage I' + (', past' if ', past' in name else '')): {} for name in ways
             if name.startswith('gate')} | {name: {} for name in ways}
    columns = list(product(TASKS, LOOPS))
    for task, n in columns:
        for stage in ('I', 'II'):
            rows = pick(t['points'], part='ouro', task=task, variant=f'{stage} at {n}')
            fixed = pick(rows, rule='fixed')
            for name, of_way in ways_of(rows):
                if stage == 'I' and not name.startswith('gate'):
                    continue
                name = name.replace('gate', 'gate after stage I') if stage == 'I' else name
                cells[name][task, n] = in_words(of_way, SAME[task], fixed)
    yield lines('passes through the stack', *(f'{task}, {n} loops, within {SAME[task]:g} nats'
                                              for task, n in columns))
    yield '|---' * (1 + len(columns)) + '|'
    for name, row in cells.items():
        yield lines(name, *(row.get(key, '') for key in columns))


def in_words(rows, same, fixed):
    """Mean ± std of the fewest block maps, and the thresholds of the seeds."""
    found, n_seeds = list(least(rows, same, fixed)), len(distinct(rows, 'seed'))
    if len(found) < n_seeds:
        return f'{len(found)} of {n_seeds} seeds get there'
    evals, taus = zip(*found)
    return f"{mean_std(evals)} ({', '.join(f'{tau:g}' for tau in taus)})"


def criteria_table(t):
    """Geiping's criteria beside ours, on the default run and on calc, decoding with `latest`."""
    yield lines('block maps a group and token, `latest`', *(f'{task}, within {SAME[task]:g} nats'
                                                           for task in TASKS), 'at his threshold')
    yield '|---' * (2 + len(TASKS)) + '|'
    rows = pick(t['points'], part='criteria')
    for name, of_way in ways_of(rows):
        own = ''
        short = name.removeprefix('zoo.huginn:')
        if short != name:
            usual = CRITERIA[short][4]
            own = '; '.join(at_tau(pick(of_way, task=task), usual, task) for task in TASKS)
        yield lines(name, *(in_words(pick(of_way, task=task), SAME[task],
                                     pick(rows, rule='fixed', task=task)) for task in TASKS), own)


def at_tau(rows, tau, task):
    """Block maps and nats above the full budget at the threshold nearest to tau."""
    nearest = min(column(rows, 'tau'), key=lambda other: abs(math.log(other / tau)))
    at = pick(rows, tau=nearest)
    return (f"{task} {np.mean(column(at, 'mean_evals')):.1f} maps, "
            f"{np.mean(column(at, 'ce_minus_full')):+.4f}")


def etd_table(t):
    """Plain and damped loops of the block that the knees give, then after mid-training."""
    loops = (1, 2, 3, 4)
    yield lines('ETD, held-out loss at loops', *loops)
    yield '|---|---|---|---|---|'
    for task in TASKS:
        for kind, words in dict(loss='not trained', damped='not trained, damped').items():
            rows = chosen_rows(t, task)
            yield lines(f'{task}, the knees\' block, {words}',
                        *(mean_std(column(rows, f'{kind}_{n}'), 3) for n in loops))
        for name in ('knees', 'front', 'back', 'none'):
            rows = pick(t['losses'], part='etd', task=task, variant=f'{name} trained')
            words = 'no block' if name == 'none' else f"the {name}' block" if name == 'knees' \
                else f'as many layers at the {name}'
            yield lines(f'{task}, {words}, mid-trained', *at_loops(rows, loops, task))


def chosen_rows(t, task):
    """The rows of blocks.csv of the chosen block, a seed each."""
    found = []
    for seed in distinct(t['angles'], 'seed'):
        block = block_of(t, task, seed)
        found += pick(t['blocks'], part='etd', task=task, variant='knees', seed=seed,
                      block=f'{block[0]}-{block[-1]}')
    return found


def block_of(t, task, seed):
    from zoo.etd import thinking_block
    curve = column(pick(t['angles'], part='etd', task=task, variant='knees', seed=seed),
                   'angle_over_pi')
    return thinking_block(np.array(curve))


def blocks_table(t):
    """Every block of layers at two loops, without training: the mean over seeds above one loop."""
    rows = pick(t['blocks'], part='etd', variant='knees')
    yield lines('block, two loops without training: nats above one loop', *TASKS,
                *(f'{task}, damped' for task in TASKS))
    yield '|---' * (1 + 2 * len(TASKS)) + '|'
    for block in distinct(rows, 'block'):
        cells = [mean_std([row[f'{kind}_2'] - row['loss_1'] for row in
                           pick(rows, task=task, block=block)], 3)
                 for kind in ('loss', 'damped') for task in TASKS]
        yield lines(block, *cells)


def markdown(folder=HERE):
    """What stands between the markers of the zoo."""
    t = load('zoo', folder, CSVS)
    machine, = t['machine']
    spent = ', '.join(f"{part} {sum(column(pick(t['minutes'], part=part), 'minutes')):.0f}"
                      for part in distinct(t['minutes'], 'part'))
    chosen = '; '.join(
        f'{task} ' + ', '.join(f'{b[0]}-{b[-1]}' for b in
                               (block_of(t, task, seed) for seed in distinct(t['angles'], 'seed')))
        for task in TASKS)
    blocks = [
        [f"{machine['cores']:g} cores of an {machine['machine']}, torch {machine['torch']}, "
         f"{machine['date']}; {len(distinct(t['points'], 'seed'))} seeds; minutes by part: "
         f'{spent}. Equal quality: so many nats above the best fixed budget of the same model and '
         'seed; in brackets the thresholds of the seeds.'],
        ['**Ouro**:'], ouro_table(t),
        ['**Its gate** beside rules that need no training, `exact`:'], gate_table(t),
        ["**Geiping's criteria**:"], criteria_table(t),
        [f'**ETD**, six layers; the blocks of the knees: {chosen}.'], etd_table(t),
        blocks_table(t)]
    return '\n\n'.join('\n'.join(block) for block in blocks)


# the run ----------------------------------------------------------------------------------------

def main():
    runs.check_knobs(seeds, workers, minutes)
    if not parts or not set(parts) <= {'ouro', 'etd', 'criteria'}:
        raise ValueError(f'parts must be some of ouro, etd, criteria, not {parts}')
    if not only_table:
        until = time.time() + 60 * minutes if minutes else math.inf
        data.open_data('pydocs')        # made once, before all the trainings want it
        with ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(lambda of: of[0](*of[1:], until), works()))
        if not all(done):
            print('the time is up: the same command goes on')
            return
        gather()
        draw()
    table.write(BEGIN, END, markdown())


def draw():
    """The first seed's frontier of calc at most loops -> assets/gate.png."""
    rows = pick(load('zoo', 'results', CSVS)['points'], part='ouro', task='calc',
                variant=f'II at {LOOPS[-1]}', seed=seeds[0])
    if rows:
        plots.gate(rows, os.path.join('assets', 'gate.png'))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
