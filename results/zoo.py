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

import data
from common import plots
from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from results import runs, table
from results.depth import CALC, folder_of
from results.rows import load, pick
from results.zoo_table import CSVS, LOOPS, markdown
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
GATE_ITERS = 300
READ = dict(text=['--dataset=pydocs'], calc=['--dataset=calc', '--batch_size=64', '--bptt_k=8'])
MID = ['--max_iters=300', '--warmup_iters=20', '--learning_rate=1e-3', '--min_lr=1e-4',
       '--mean_recurrence=2', '--keep_iters=[]']
BENCH = ['--checks=False', '--rounds=1', '--timed_tokens=1', '--epsilons=[]', '--n_windows=64',
         '--least_tau=0']
GATED = ['--cache=exact', '--rules=["gate","norm_rel","kl","accel"]', '--taus=[1e-3,1e-2,3e-2]',
         '--more_taus=[0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4,0.5,0.6,0.7,0.8,0.9,1.5,3]']
CHECKED = ['--cache=latest', '--n_loop=30', '--taus=[1e-5,1e-4,1e-3,3e-3,1e-2]', '--more_taus='
           '[0.02,0.03,0.05,0.08,0.1,0.13,0.15,0.21,0.26,0.34,0.51,1]', '--rules=' + json.dumps(
               [*(f'zoo.huginn:{name}' for name in CRITERIA), 'norm_rel', 'kl', 'accel'])]
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


PARTS = dict(ouro=measure_ouro, etd=measure_etd, criteria=measure_criteria)


def works():
    """(function, task, loops, seed) of all parts, the first seed first."""
    for seed in seeds:
        for part, task in product(parts, TASKS):
            for loops in LOOPS if part == 'ouro' else [None]:
                yield PARTS[part], task, loops, seed


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


# the run ----------------------------------------------------------------------------------------

def main():
    runs.check_knobs(seeds, workers, minutes)
    if not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts must be some of {', '.join(PARTS)}, not {parts}")
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
