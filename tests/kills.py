"""
Kill a training run (SIGKILL) at random moments, resume it each time, and compare it with a run
that was never stopped.

    python tests/kills.py --kills=20                a minute on two cores

A kill comes up to two iterations after a random iteration was printed, and so in a step, in an
evaluation or in a checkpoint. The first comes while the program starts. After each kill every
checkpoint must be whole. At the end the weights, the optimiser state and the log must be those of
the other run.
"""
import csv
import os
import random
import subprocess
import sys
import tempfile
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from common.checkpoint import load_checkpoint  # noqa: E402
from common.configurator import configure, run  # noqa: E402
from data import make  # noqa: E402

# ------------------------------------------------------------------------------------------------
kills = 20
iters = 200
seed: int | None = None     # of the moments; None = another each time
# ------------------------------------------------------------------------------------------------

SMALL = [
    '--dataset=book', '--n_layer=4', '--n_embd=32', '--n_head=2', '--groups=[[1],[2]]',
    '--block_size=32', '--batch_size=4', '--warmup_iters=10', '--dropout=0.1', '--ema=0.9',
    '--eval_interval=20', '--eval_windows=8', '--eval_loops=[1,3]', '--log_interval=3',
    '--save_interval=5', '--keep_iters=[0,10]', '--device=cpu']
TIMES = ('dt_ms', 'tokens_per_s', 'tflops')     # columns of the log that may differ


def train(iters, *flags):
    """A training run of so many iterations, as a process."""
    script = os.path.join(ROOT, 'train.py')
    return subprocess.Popen([sys.executable, '-u', script, *SMALL, f'--max_iters={iters}', *flags],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def whole(iters, *flags):
    """A training run to its end -> what it printed. AssertionError if it fails."""
    process = train(iters, *flags)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    return printed


def same(a, b):
    """Are two values of a checkpoint equal, tensors bit for bit?"""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def wait_for(target, process, iteration_s):
    """Read a run's lines until one is of iteration `target` -> seconds between the last two."""
    before = None
    for line in process.stdout:
        if line.startswith('iter ') and int(line.split()[1].rstrip(':')) >= target:
            break
        now = time.time()
        if before:
            iteration_s = now - before
        before = now
    return iteration_s


def damaged(folder):
    """What is wrong with the checkpoints in a folder: a line each."""
    for name in os.listdir(folder) if os.path.exists(folder) else ():
        if name.endswith('.pt'):
            try:
                load_checkpoint(os.path.join(folder, name))
            except ValueError as error:
                yield str(error)


def differences(folder, other):
    """How the run in `other` differs from the one in `folder`: a line each."""
    a, b = (load_checkpoint(os.path.join(name, 'ckpt.pt'))[1] for name in (folder, other))
    for key in a:
        if key != 'config' and not same(a[key], b[key]):
            yield f'another {key}'
    logs = []
    for name in (folder, other):
        with open(os.path.join(name, 'log.csv')) as f:
            rows = list(csv.DictReader(f))
        logs.append([{key: row[key] for key in row if key not in TIMES} for row in rows])
    if len({row['iter'] for row in logs[1]}) < len(logs[1]):
        yield 'an iteration twice in the log'
    if logs[0] != logs[1]:
        yield 'another log'


def trial(kills, iters, seed=None, whole=whole):
    """
    In the current folder: kill a run of so many iterations so often -> what is wrong, a line each.

    whole(iters, *flags) trains to the end; the tests do that in their own process.
    """
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    make('book', 'book.txt')
    whole(iters, '--out_dir=whole')
    draw, wrong, iteration_s = random.Random(seed), [], 0.02
    targets = sorted(draw.choices(range(iters), k=kills))
    for n, target in enumerate(targets):
        process = train(iters, '--out_dir=killed', '--resume')
        delay_s = draw.uniform(0, 3)        # the first kill: somewhere in the start
        if n:
            iteration_s = wait_for(target, process, iteration_s)
            delay_s = draw.uniform(0, 2 * iteration_s)
        time.sleep(delay_s)
        process.kill()
        process.wait()
        wrong += [f'after kill {n + 1}: {line}' for line in damaged('killed')]
    whole(iters, '--out_dir=killed', '--resume')
    return wrong + list(differences('whole', 'killed'))


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        wrong = trial(kills, iters, seed)
        os.chdir(ROOT)
    good = ('weights, averaged weights, optimiser state and log are those of the run never '
            'stopped, every checkpoint was whole')
    print(f'{kills} kills in {iters} iterations: {"; ".join(wrong) or good}')
    raise SystemExit(bool(wrong))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
