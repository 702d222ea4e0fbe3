"""
How fast a training was, beside what its card can do.

    python -m results.speed config/groups.py --dataset=wiki --max_iters=200     train.py's arguments

Prints the medians of tokens per second and FLOPs in log.csv, without the first two rows, which
compile; the memory; and how much of the card's FLOPs that is. They are measured by products of two
bfloat16 matrices.
"""
import csv
import statistics
import sys
import time

import torch

import train
from common import configurator


def peak(dev, n):
    """TFLOP/s of products of two matrices (n, n)."""
    x = torch.randn(n, n, device=dev, dtype=torch.bfloat16)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(20):
            y = x @ x
        y[0, 0].item()      # waits for the device
        times.append(time.perf_counter() - begin)
    return 20 * 2 * n ** 3 / min(times) / 1e12


def main():
    train.main(*sys.argv[1:])
    with open(f'{train.out_dir}/log.csv') as file:
        rows = [row for row in csv.DictReader(file) if row['tflops']][2:]
    rate = statistics.median(float(row['tokens_per_s']) for row in rows)
    tflops = statistics.median(float(row['tflops']) for row in rows)
    memory = ''
    if torch.cuda.is_available():
        memory = f'{torch.cuda.max_memory_allocated() / 2 ** 30:.1f} GiB, '
        most = peak('cuda', 8192)
    else:
        most = peak('cpu', 256)
    print(f'{rate:.0f} tokens/s, {memory}{tflops:.4g} TFLOP/s, which is {tflops / most:.3f} of '
          f'{most:.4g}')


if __name__ == '__main__':
    configurator.run(main)
