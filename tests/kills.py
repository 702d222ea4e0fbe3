"""
Kill a training run (SIGKILL) at random moments, resume it each time, and compare it with a run that was never stopped.

    python tests/kills.py --kills=20                a minute on two cores

A kill comes when a random iteration has been told, up to two iterations later, and so in a step, an evaluation or a checkpoint; the first
in the start. After each, every checkpoint must be whole; at the end weights, optimiser state and log must be those of the other run.
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
from checkpoint import load_checkpoint  # noqa: E402
from configurator import configure, run  # noqa: E402
from data import make  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
kills = 20
iters = 200
seed: int | None = None     # of the moments; None = another each time
# ---------------------------------------------------------------------------------------------------------------------

SMALL = ['--dataset=book', '--n_layer=4', '--n_embd=32', '--n_head=2', '--groups=[[1],[2]]', '--block_size=32', '--batch_size=4', '--warmup_iters=10', '--dropout=0.1',
         '--ema=0.9', '--eval_interval=20', '--eval_windows=8', '--eval_loops=[1,3]', '--log_interval=3', '--save_interval=5', '--keep_iters=[0,10]', '--device=cpu']


def train(iters, *more):
    return subprocess.Popen([sys.executable, '-u', os.path.join(ROOT, 'train.py'), *SMALL, f'--max_iters={iters}', *more],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b if not isinstance(a, dict) else a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)


def whole(*flags):
    """A run to its end -> what it said, or raises."""
    process = train(*flags)
    told = process.communicate()[0]
    assert process.returncode == 0, told
    return told


def trial(kills, iters, seed=None, whole=whole):
    """In the current folder: kill a run of so many iterations so often -> lines on what is not as it should be."""
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    make('book', 'book.txt')
    whole(iters, '--out_dir=whole')
    draw, wrong, dt = random.Random(seed), [], 0.02
    for n, target in enumerate(sorted(draw.choices(range(iters), k=kills))):
        process, t = train(iters, '--out_dir=killed', '--resume'), None
        if n:
            for line in process.stdout:     # until the target is told
                if line.startswith('iter ') and int(line.split()[1].rstrip(':')) >= target:
                    break
                t, dt = time.time(), (time.time() - t if t else dt)
        time.sleep(draw.uniform(0, 2 * dt if n else 3))
        process.kill()
        process.wait()
        for name in os.listdir('killed') if os.path.exists('killed') else ():
            try:
                if name.endswith('.pt'):
                    load_checkpoint(os.path.join('killed', name))
            except ValueError as error:
                wrong.append(f'after kill {n + 1}: {error}')
    whole(iters, '--out_dir=killed', '--resume')
    a, b = (load_checkpoint(f'{name}/ckpt.pt')[1] for name in ('whole', 'killed'))
    wrong += [f'another {key}' for key in a if key != 'config' and not same(a[key], b[key])]
    a, b = ([{k: v for k, v in row.items() if k not in ('dt_ms', 'tokens_per_s', 'tflops')} for row in csv.DictReader(open(f'{name}/log.csv'))] for name in ('whole', 'killed'))
    wrong += ['an iteration twice in the log'] * (len({row['iter'] for row in b}) < len(b)) + ['another log'] * (a != b)
    return wrong


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        wrong = trial(kills, iters, seed)
        os.chdir(ROOT)
    print(f'{kills} kills in {iters} iterations: ' + ('; '.join(wrong) or 'weights, averaged weights, optimiser state and log are those of the run never stopped, every checkpoint was whole'))
    raise SystemExit(bool(wrong))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
