"""
Runs of the project's own commands, done once, and what they leave as rows of CSVs.

Not run by itself: run.py and depth.py call it.
"""
import csv
import math
import os
import platform
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def check_knobs(seeds, workers, minutes):
    """ValueError for one that makes no sense; all files that run something have these."""
    if not seeds or workers < 1:
        raise ValueError('--seeds must name one seed at least, and --workers be 1 at least')
    if minutes is not None and not minutes > 0:
        raise ValueError(f'--minutes must be more than 0, not {minutes}')


# commands ---------------------------------------------------------------------------------------

def command(script, *flags, log, until=math.inf, threads=None):
    """
    Run one of the project's scripts, or a module of a folder (zoo.etd). True if it came to its end,
    False if the time was up.

    log: the file that gets its output. until: when (time.time()) it is asked to stop in order, by
    SIGTERM. threads: how many it may use, None for all. ValueError if it fails.
    """
    settings = dict(OMP_NUM_THREADS=str(threads)) if threads else {}
    what = [os.path.join(ROOT, script)] if script.endswith('.py') else ['-m', script]
    settings['PYTHONPATH'] = ROOT
    with open(log, 'a') as out:
        process = subprocess.Popen([sys.executable, '-u', *what, *flags],
                                   stdout=out, stderr=subprocess.STDOUT, env=os.environ | settings)
        stopped = False
        while process.poll() is None:
            if not stopped and time.time() > until:
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(0.2)
    if process.returncode and not stopped:
        raise ValueError(f"`python {' '.join((script, *flags))}` failed: see {log}")
    return not stopped


def once(folder, what, work):
    """
    Do work() unless that was done before. True if it has come to its end, as work() says.

    The minutes that it took, over all pieces, stand in folder/WHAT.minutes, and 'done' behind them.
    """
    path = os.path.join(folder, what + '.minutes')
    took, state = 0.0, ''
    if os.path.exists(path):
        with open(path) as f:
            took, state = f.read().split()
    if state != 'done':
        os.makedirs(folder, exist_ok=True)
        t = time.time()
        state = 'done' if work() else 'begun'
        with open(path, 'w') as f:
            f.write(f'{float(took) + (time.time() - t) / 60:.3f} {state}')
    return state == 'done'


def train(folder, flags, until, threads=None):
    """Train the run in this folder, or go on with it. True if it is done."""
    if time.time() > until:
        return False
    flags = [*flags, '--resume', f'--out_dir={folder}']
    done = once(folder, 'train', partial(command, 'train.py', *flags, until=until, threads=threads,
                                         log=os.path.join(folder, 'train.txt')))
    print(f"{'trained' if done else 'begun  '} {folder}", flush=True)
    return done


# rows of CSVs ---------------------------------------------------------------------

def read_csv(path):
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


def cell(value):
    """What a CSV holds of a value: six digits of a number that is no count."""
    return f'{value:.6g}' if isinstance(value, (float, np.floating)) else value


def write_csv(scale, name, rows):
    """Rows -> results/SCALE/NAME.csv."""
    path = os.path.join('results', scale, name + '.csv')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', newline='') as f:
        # rows of an earlier run may lack a column
        writer = csv.DictWriter(f, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: cell(value) for key, value in row.items()})


def loss_rows(folder):
    """The held-out losses of a run's log: a row for each evaluation and loop count."""
    for row in read_csv(os.path.join(folder, 'log.csv')):
        for key, loss in row.items():
            if key.startswith('val_loss_') and loss:
                yield dict(iteration=row['iter'], loops=key.removeprefix('val_loss_'), loss=loss)


def minutes_rows(folder):
    """What was done in a run's folder, and the minutes that it took."""
    for file in sorted(os.listdir(folder)):
        if file.endswith('.minutes'):
            with open(os.path.join(folder, file)) as f:
                yield dict(what=file.removesuffix('.minutes'), minutes=f.read().split()[0])


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
