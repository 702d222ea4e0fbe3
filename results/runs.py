"""
What the files of results/ share: commands that are run once, rows of CSVs, lines of tables.

Not run by itself. A row is a dict. The rows that `load` reads have numbers as floats. On the page a
mean is over seeds, and ± is their standard deviation.
"""
import csv
import glob
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.files import new_file, write_csv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HERE = os.path.join(ROOT, 'results')
SAME = 0.005            # nats a token above the full budget that count as equal quality
LAYERS = ('group', 'from', 'to')    # columns whose digits are names of layers


# commands ---------------------------------------------------------------------------------------

def all_done(works, workers):
    """Call all works, `workers` at a time. True if each one returns True (done)."""
    with ThreadPoolExecutor(workers) as pool:
        done = list(pool.map(lambda work: work(), works))
    if not all(done):
        print('time is up: run the same command to continue')
    return all(done)


def command(script, *flags, log, until=math.inf):
    """
    Run one of the project's scripts, or a module of a folder (zoo.etd), with one thread. True if it
    finished, False if the time was up.

    log: the file that gets its output. until: when (time.time()) it is sent SIGTERM. ValueError if
    it fails.
    """
    what = [os.path.join(ROOT, script)] if script.endswith('.py') else ['-m', script]
    settings = os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=ROOT)
    with open(log, 'a') as out:
        process = subprocess.Popen([sys.executable, '-u', *what, *flags], stdout=out,
                                   stderr=subprocess.STDOUT, env=settings)
        stopped = False
        while process.poll() is None:
            if not stopped and time.time() > until:
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(0.2)
    if process.returncode and not stopped:
        raise ValueError(f"`python {' '.join((script, *flags))}` failed: see {log}")
    return not stopped


def once(folder, what, script, *flags, until=math.inf):
    """
    Run a script with --out_dir=folder unless that was done before. True if it is done by now.

    Its output goes to folder/WHAT.txt. folder/WHAT.minutes holds the minutes that it took, over all
    calls, and then 'done' or 'begun'. until: nothing is begun later.
    """
    path = os.path.join(folder, what + '.minutes')
    took, state = 0.0, ''
    if os.path.exists(path):
        with open(path) as f:
            took, state = f.read().split()
    if state != 'done' and time.time() < until:
        os.makedirs(folder, exist_ok=True)
        begin = time.time()
        # only a training can be resumed
        stop = until if script == 'train.py' else math.inf
        done = command(script, *flags, f'--out_dir={folder}', until=stop,
                       log=os.path.join(folder, what + '.txt'))
        state = 'done' if done else 'begun'
        with open(path, 'w') as f:
            f.write(f'{float(took) + (time.time() - begin) / 60:.3f} {state}')
        print(f'{what} {state}: {folder}', flush=True)
    return state == 'done'


def folder_of(variant, seed):
    """The folder of a training that results.run makes."""
    return os.path.join('out-results', f"{re.sub('[ ,:=]+', '_', variant)}-{seed}")


def trained(variants):
    """(variant, seed, folder) of each training of these that is done."""
    for variant in variants:
        done = glob.glob(os.path.join(folder_of(variant, '*'), 'train.minutes'))
        for seed in sorted(int(os.path.dirname(path).rsplit('-', 1)[1]) for path in done):
            yield variant, seed, folder_of(variant, seed)


# rows of CSVs -----------------------------------------------------------------------------------

def read_csv(path):
    """The rows of a file, with strings as values."""
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


def number(text):
    """A cell of a CSV as a float if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def load(scale, folder=HERE):
    """The CSVs of a scale for the tables, {name: rows} with numbers as floats."""
    tables = {}
    for path in glob.glob(os.path.join(folder, scale, '*.csv')):
        tables[os.path.basename(path).removesuffix('.csv')] = [
            {key: text if key in LAYERS else number(text) for key, text in row.items()}
            for row in read_csv(path)]
    return tables


def save(scale, tables, order):
    """
    {name: rows} -> results/SCALE/*.csv, and the machine beside them. Rows of earlier runs stay.

    order: the variants, in the order of the rows.
    """
    folder = os.path.join('results', scale)
    os.makedirs(folder, exist_ok=True)
    measured = {(row['variant'], str(row['seed'])) for row in tables['losses']}
    for name, rows in tables.items():
        path = os.path.join(folder, name + '.csv')
        if os.path.exists(path):
            rows = rows + [row for row in read_csv(path) if row['variant'] in order
                           and (row['variant'], row['seed']) not in measured]
        rows.sort(key=lambda row: (order.index(row['variant']), int(row['seed'])))
        if rows:
            write_table(path, rows)
    write_table(os.path.join(folder, 'machine.csv'), [machine_row()])


def write_table(path, rows):
    # some rows lack a column; six digits of a number that is not a count
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_csv([{key: f'{value:.6g}' if isinstance(value, (float, np.floating)) else value
                for key, value in row.items()} for row in rows], path, columns)


def machine_row():
    """The machine that this runs on: its GPU, or else its processor."""
    name = platform.processor()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            models = [line.split(':')[1].strip() for line in f if line.startswith('model name')]
        name = models[0] if models else name
    return dict(machine=name, cores=os.cpu_count(), torch=torch.__version__,
                date=time.strftime('%Y-%m-%d'))


def last_losses(folder):
    """The held-out losses at the end of a run, and accuracies on a task, by loops."""
    row = read_csv(os.path.join(folder, 'log.csv'))[-1]
    for key, loss in row.items():
        if key.startswith('val_loss_'):
            n = key.removeprefix('val_loss_')
            yield dict(loops=n, loss=loss, accuracy=row.get(f'val_acc_{n}', ''))


def minutes_rows(folder):
    """What was done in a run's folder, and the minutes that it took."""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), '*.minutes'))):
        with open(path) as f:
            what = os.path.basename(path).removesuffix('.minutes')
            yield dict(what=what, minutes=f.read().split()[0])


def text_rows(folder):
    """The points of bench.py's continuations in this folder, none if there were none."""
    path = os.path.join(folder, 'bench.csv')
    rows = read_csv(path) if os.path.exists(path) else []
    columns = ('kind', 'cache', 'rule', 'tau', 'draft_loops', 'wave', 'wave_steps', 'prompts',
               'identical', 'text_loss', 'passes', 'block_maps', 'ms_text')
    return [{key: row[key] for key in columns} for row in rows if row['prompts']]


# rows for tables --------------------------------------------------------------------------------

def pick(rows, **conditions):
    """The rows whose columns have these values."""
    return [row for row in rows if all(row[key] == value for key, value in conditions.items())]


def column(rows, key):
    return [row[key] for row in rows]


def distinct(rows, key):
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(column(rows, key)))


# the page ---------------------------------------------------------------------------------------

def mean_std(values, digits=2):
    """'mean ± standard deviation', or the mean alone if there is one value."""
    values = np.array(values, dtype=float)
    text = f'{values.mean():.{digits}f}'
    if len(values) > 1:
        text += f' ± {values.std(ddof=1):.{digits}f}'
    return text


def line(*cells):
    """A line of a Markdown table."""
    return '| ' + ' | '.join(map(str, cells)) + ' |'


def head(*cells):
    """The first two lines of a Markdown table."""
    return line(*cells), '|---' * len(cells) + '|'


def machine_of(t):
    """Where the rows of a scale were measured, and how long that took, in words."""
    row, = t['machine']
    words = f"{row['cores']:g} cores of an {row['machine']}, torch {row['torch']}, {row['date']}"
    if 'minutes' in t:
        spent = sum(column(t['minutes'], 'minutes'))
        words += f', {spent:.0f} minutes of runs, two at a time'
    return words


def join(blocks):
    """Paragraphs and tables, each an iterable of lines -> Markdown."""
    return '\n\n'.join('\n'.join(block) for block in blocks)


def markers(page, block):
    """Where the text between `<!-- BLOCK: ... -->` and `<!-- end of BLOCK -->` begins and ends."""
    begin = re.search(f'<!-- {block}: .* -->\n', page).end()
    return begin, page.index(f'<!-- end of {block} -->')


def write(block, text, folder=HERE, page='README.md'):
    """Put a text between the markers of a block in a page of the folder."""
    path = os.path.join(folder, page)
    with open(path, encoding='utf-8') as f:
        page = f.read()
    begin, end = markers(page, block)
    with new_file(path, encoding='utf-8') as f:
        f.write(f'{page[:begin]}{text}\n{page[end:]}')
