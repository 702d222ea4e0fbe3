"""
What the files of results/ share: commands that are run once, rows of CSVs, lines of tables.

Not run by itself. A row is a dict. The rows that `load` reads have numbers as floats.
"""
import csv
import glob
import lzma
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from common.files import new_file, write_csv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HERE, ASSETS = os.path.join(ROOT, 'results'), os.path.join(ROOT, 'assets')


# commands ---------------------------------------------------------------------------------------

def all_done(works, workers):
    """Call all works, `workers` at a time."""
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda work: work(), works))


def once(folder, what, script, *flags):
    """
    Run one of the project's scripts, or a module of a folder (results.reading), on one thread with
    --out_dir=folder, unless that was done before. ValueError if it fails.

    Its output goes to folder/WHAT.txt, and then the minutes that it took to folder/WHAT.minutes.
    """
    log, done = (os.path.join(folder, f'{what}.{kind}') for kind in ('txt', 'minutes'))
    if os.path.exists(done):
        return
    os.makedirs(folder, exist_ok=True)
    begin = time.time()
    with open(log, 'a') as out:
        failed = subprocess.run(
            [sys.executable, '-u', *([os.path.join(ROOT, script)] if script.endswith('.py') else
                                     ['-m', script]), *flags, f'--out_dir={folder}'],
            stdout=out, stderr=subprocess.STDOUT,
            env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=ROOT)).returncode
    if failed:
        raise ValueError(f"`python {' '.join((script, *flags))}` failed: see {log}")
    with open(done, 'w') as f:
        f.write(f'{(time.time() - begin) / 60:.3f}')
    print(f'{what} done: {folder}', flush=True)


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
    """The rows of a file, which may be compressed, with strings as values."""
    with (lzma.open if path.endswith('.xz') else open)(path, 'rt', newline='') as f:
        return list(csv.DictReader(f))


def number(text):
    """A cell of a CSV as a float if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def load(path):
    """The rows of results/PATH by run, {variant: {seed: rows}}, with numbers as floats."""
    found, path = {}, os.path.join(HERE, path)
    for row in read_csv(path) if os.path.exists(path) else ():
        row = {key: number(text) for key, text in row.items()}
        found.setdefault(row['variant'], {}).setdefault(int(row['seed']), []).append(row)
    return found


def save(path, rows, order):
    """
    Write rows to results/PATH, and the machine beside them. Rows that other runs have there stay.

    order: the variants, in the order of the rows.
    """
    measured, path = {(row['variant'], str(row['seed'])) for row in rows}, f'{HERE}/{path}'
    if os.path.exists(path):
        rows = rows + [row for row in read_csv(path) if row['variant'] in order
                       and (row['variant'], row['seed']) not in measured]
    if not measured:
        return
    rows.sort(key=lambda row: (order.index(row['variant']), int(row['seed'])))
    columns = list(dict.fromkeys(key for row in rows for key in row))   # some rows lack a column
    rows = [{key: row.get(key, '') for key in columns} for row in rows]
    write_csv(rows, path.removesuffix('.xz'))
    if path.endswith('.xz'):
        with open(path.removesuffix('.xz'), 'rb') as f, new_file(path, 'wb') as packed:
            packed.write(lzma.compress(f.read(), preset=9 | lzma.PRESET_EXTREME))
        os.remove(path.removesuffix('.xz'))
    write_csv([machine_row()], os.path.join(os.path.dirname(path), 'machine.csv'))


def machine_row():
    """The machine that this runs on."""
    with open('/proc/cpuinfo') as f:
        name = re.search('model name.*: (.*)|$', f.read())[1]
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
            yield dict(what=what, minutes=f.read())


# the pages --------------------------------------------------------------------------------------

def ratio(pairs, axis=0):
    """The total of the first of each pair over that of the second, along an axis of (..., n, 2)."""
    totals = pairs.sum(axis=axis)                                               # (..., 2)
    return totals[..., 0] / totals[..., 1]


def spread(values, digits=2):
    """The mean over seeds, and the least and the largest."""
    low, high = (f'{value:.{digits}f}' for value in (min(values), max(values)))
    return f'{np.mean(values):.{digits}f}' + f' ({low} to {high})' * (low != high)


def line(*cells):
    """A line of a Markdown table."""
    return '| ' + ' | '.join(map(str, cells)) + ' |'


def head(*cells):
    """The first two lines of a Markdown table."""
    return line(*cells), '|---' * len(cells) + '|'


def markers(page, block):
    """Where the text between `<!-- BLOCK: ... -->` and `<!-- end of BLOCK -->` begins and ends."""
    begin = re.search(f'<!-- {block}: .* -->\n', page).end()
    return begin, page.index(f'<!-- end of {block} -->')


def write(page, block, text):
    """Put a text between the markers of a block in a page of this folder."""
    path = os.path.join(HERE, page)
    with open(path, encoding='utf-8') as f:
        page = f.read()
    begin, end = markers(page, block)
    with new_file(path, encoding='utf-8') as f:
        f.write(f'{page[:begin]}{text}\n{page[end:]}')
