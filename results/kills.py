"""
Kill a training run (SIGKILL) at random moments, resume it each time, and compare the result with a
run that was never stopped.

    python -m results.kills --kills=20              a minute on two cores

The first kill comes while the program starts, each other one up to 0.1 s (some iterations) after a
random iteration is printed: during a step, an evaluation or a save. After each kill every
checkpoint must be whole. At the end weights, optimiser state and log must be equal.
"""
import contextlib
import glob
import os
import random
import subprocess
import sys
import tempfile
import time

import torch

from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from data import make
from results.runs import ROOT, read_csv

# ------------------------------------------------------------------------------------------------
kills = 20
iters = 200
# ------------------------------------------------------------------------------------------------

SMALL = [
    '--dataset=book', '--n_layer=4', '--n_embd=32', '--n_head=2', '--groups=[[1],[2]]',
    '--block_size=32', '--batch_size=4', '--warmup_iters=10', '--dropout=0.1',
    '--eval_interval=20', '--eval_windows=8', '--eval_loops=[1,3]', '--log_interval=3',
    '--save_interval=5', '--keep_iters=[0,10]', '--device=cpu']
TIMES = ('dt_ms', 'tokens_per_s', 'tflops')     # columns of the log that may differ


def start(iters, *flags):
    """A training run as a process."""
    script = os.path.join(ROOT, 'train.py')
    return subprocess.Popen([sys.executable, '-u', script, *SMALL, f'--max_iters={iters}', *flags],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | dict(OMP_NUM_THREADS='1'))


def to_the_end(iters, *flags):
    """A training run to its end. AssertionError if it fails."""
    process = start(iters, *flags)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed


def same(a, b):
    """Are two values of a checkpoint equal, tensors bit for bit?"""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def differences(folder, other):
    """How the run in `other` differs from the one in `folder`: a line each."""
    a, b = (load_checkpoint(os.path.join(name, 'ckpt.pt'))[1] for name in (folder, other))
    for key in a:
        if key != 'config' and not same(a[key], b[key]):
            yield f'{key} differs'
    logs = [[{key: row[key] for key in row if key not in TIMES} for row in
             read_csv(os.path.join(name, 'log.csv'))] for name in (folder, other)]
    if logs[0] != logs[1]:
        yield 'log differs'


def trial(kills, iters, whole=to_the_end):
    """
    In the current folder: kill a run of `iters` iterations `kills` times -> what is wrong, by line.
    whole(iters, *flags) trains to the end; the tests do that in their own process.
    """
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    make('book', 'book.txt')
    whole(iters, '--out_dir=whole')
    wrong = []
    for n, target in enumerate(sorted(random.choices(range(iters), k=kills))):
        process = start(iters, '--out_dir=killed', '--resume')
        # the first dies while it starts, the others soon after they have printed the iteration
        for line in process.stdout if n else ():
            if line.startswith('iter ') and int(line.split()[1].rstrip(':')) >= target:
                break
        time.sleep(random.uniform(0, 0.1 if n else 3))
        process.kill()
        process.wait()
        for path in glob.glob('killed/*.pt'):
            try:
                load_checkpoint(path)
            except ValueError as error:
                wrong.append(f'after kill {n + 1}: {error}')
    whole(iters, '--out_dir=killed', '--resume')
    return wrong + list(differences('whole', 'killed'))


def main():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        wrong = trial(kills, iters)
    good = ('weights, optimiser state and log equal those of a run never stopped, and every '
            'checkpoint was whole')
    print(f'{kills} kills in {iters} iterations: {"; ".join(wrong) or good}')
    raise SystemExit(bool(wrong))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
