"""
What a training run says of its steps: log.csv, the lines on the screen, loss spikes, bad numbers.
"""
import csv
import math
import os
from shlex import quote

from common.configurator import explain
from common.distributed import RANK, WORLD, say
from common.files import write_csv


def read_log(path, before=math.inf):
    """log.csv's whole rows of iterations below `before`, each a dict."""
    wrong = explain(f"'{path}' is not as this program writes it", 'move it away',
                    (KeyError, ValueError))
    with open(path, newline='') as f, wrong:
        rows = [row for row in csv.DictReader(f) if None not in row.values()]
        return [row for row in rows if int(row['iter']) < before]


class Log:
    """log.csv and the lines on the screen. results/speed.md explains the columns."""

    def __init__(self, path, loops, start, max_iters, accuracy=False):
        """loops: the evaluated counts. Rows from `start` on, left by a killed run, are dropped."""
        self.path, self.max_iters = path, max_iters
        self.steps = []     # seconds, tokens, FLOPs (of all processes) of each step since a row
        kinds = ['val_loss', 'val_acc'] if accuracy else ['val_loss']
        self.columns = ['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s',
                        'tflops', 'spikes', *(f'{kind}_{n}' for kind in kinds for n in loops),
                        'token_corr', 'state_use']
        if RANK == 0:
            rows = read_log(path, start) if start and os.path.exists(path) else []
            write_csv(rows, path, self.columns)

    def step(self, run, it, loss, lr, norm, n_loop, held_out):
        """
        Print a line and add a row: this iteration, and the speed since the last row.

        held_out: the columns that evaluation.report found before it, {} without one.
        """
        seconds, tokens, flops = map(sum, zip(*self.steps))
        dt_ms = 1e3 * seconds / len(self.steps)
        rate = tokens / seconds
        tflops = flops / seconds / 1e12 / WORLD                     # of one device
        loops = '/'.join(map(str, n_loop))
        seconds_left = dt_ms / 1e3 * (self.max_iters - it - 1)
        say(f'iter {it}: loss {loss:.3f}, loops {loops or "none"}, {dt_ms:.0f} ms, '
            f'{rate / 1e3:.1f}k tok/s, {seconds_left:.0f} s left')
        if run.spikes:
            highest, at = max(run.spikes)
            say(f'warning: iter {it}: loss spikes since iteration {it + 1 - len(self.steps)}: '
                f'{len(run.spikes)}, the highest {highest:.2f} at iteration {at} (running mean '
                f'{run.trend[1]:.2f}); if they continue, lower the learning rate')
        self.add(held_out | dict(
            iter=it, loss=f'{loss:.5f}', lr=f'{lr:.3e}', grad_norm=f'{norm:.4f}', loops=loops,
            dt_ms=f'{dt_ms:.1f}', tokens_per_s=f'{rate:.0f}', tflops=f'{tflops:.4f}',
            spikes=len(run.spikes)))
        run.spikes.clear()
        self.steps.clear()

    def add(self, row):
        if RANK == 0:
            with open(self.path, 'a', newline='') as f:
                csv.DictWriter(f, self.columns).writerow(row)


def is_spike(loss, trend):
    """Is this loss far above those before it? Updates trend: [count, mean, variance] of losses."""
    count, mean, variance = trend
    spike = count >= 50 and loss > mean + max(6 * math.sqrt(variance), 0.2)
    share, off = max(1 / (count + 1), 0.02), loss - mean
    trend[:] = [count + 1, mean + share * off, (1 - share) * (variance + share * off ** 2)]
    return spike


def check_finite(loss, norm, n_loop, it, lr, out_dir):
    """ValueError if the loss or the gradient's norm is NaN or infinite."""
    if not math.isfinite(loss + norm):
        last = os.path.join(out_dir, 'ckpt.pt')
        how = (f'continue from the last checkpoint (--init_from={quote(last)} --out_dir=...)'
               if os.path.exists(last) else 'start again')
        raise ValueError(f'not finite at iteration {it}: loss {loss}, gradient norm {norm}, loops '
                         f'{n_loop}, learning rate {lr:.2e}. No weight was touched: {how} with a '
                         'lower learning rate')
