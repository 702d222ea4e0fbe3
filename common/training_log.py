"""
The log of a training run: log.csv, its lines on the screen, loss.png; spikes and numbers in it that
a user must know of.
"""
import csv
import math
import os
from contextlib import contextmanager
from shlex import quote

from common import distributed
from common.distributed import say
from common.errors import UserError, explain
from common.files import write_csv

# log.csv ------------------------------------------------------------------------------------------

@contextmanager
def or_warn(what):
    """
    `with or_warn(what):` an error in this block becomes a warning that begins with `what`. A run
    does not end because a figure cannot be written.
    """
    try:
        yield
    except Exception as error:          # a full disk, no matplotlib, an empty log, ...
        say(f'warning: {what} ({error}): the run goes on without it')


def read_log(path, before=math.inf):
    """log.csv's whole rows of iterations below `before`, each a dict."""
    wrong = f"'{path}' is not as this program writes it"
    with (explain(wrong, 'move it away', (KeyError, ValueError)),
          open(path, newline='', encoding='utf-8') as f):
        rows = [row for row in csv.DictReader(f) if None not in row.values()]
        return [row for row in rows if int(row['iter']) < before]


class Log:
    """
    log.csv and the lines on the screen: a row every log_interval iterations, at each evaluation and
    at the last iteration. Its columns:

        iter            the iteration, from 0
        loss            of this iteration's batch, with its drawn loop counts
        lr              the learning rate
        grad_norm       of the gradient, before it is clipped
        loops           the drawn loop counts (of the last micro step), one per group, as 5/3/8
        dt_ms           milliseconds per iteration, mean since the last row
        tokens_per_s    training tokens per second, of all processes together, since the last row
        tflops          TFLOP/s of one device: the forward pass counts n loops, the backward pass
                        min(bptt_k, n), and with --loss_at=all the coda once for each loss
        spikes          loss spikes since the last row, see is_spike

    and in the rows of evaluations, which are made before the iteration's step:

        val_loss_N      held-out loss at N loops; a column for each of eval_loops
        val_acc_N       on a task, the share of the held-out labels that are right at N loops
        token_corr      see evaluation.health, one number per group
        state_use       the same

    The last row is the evaluation after the last step, and has no other columns. If a larger
    max_iters continues the run, it stays.
    """

    def __init__(self, path, loops, start, max_iters, accuracy=False):
        """loops: the evaluated counts. Rows from `start` on, left by a killed run, are dropped."""
        self.path = path
        self.max_iters = max_iters
        # (seconds, tokens, FLOPs of all processes) of each step since the last row
        self.timings = []
        self.unwritten = []     # rows that could not be written yet
        measures = ['val_loss', 'val_acc'] if accuracy else ['val_loss']
        self.columns = ['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s',
                        'tflops', 'spikes',
                        *(f'{measure}_{n}' for measure in measures for n in loops),
                        'token_corr', 'state_use']
        if distributed.RANK == 0:
            rows = []
            if start and os.path.exists(path):
                rows = read_log(path, start) + self.evaluation_at_the_end(start)
            write_csv(rows, path, self.columns)

    def evaluation_at_the_end(self, start):
        """The row of a run that ended at `start` and goes on; [] if it is evaluated again there."""
        if start == self.max_iters:
            return []
        rows = read_log(self.path, start + 1)
        return [row for row in rows if int(row['iter']) == start and not row['loss']][:1]

    def note_step(self, seconds, tokens, flops):
        """Every iteration calls this, for the speed in the next row. flops: of all processes."""
        self.timings.append((seconds, tokens, flops))

    def report(self, run, it, loss, lr, norm, n_loop, evaluated, evaluation_flops):
        """
        Print a line and add a row: this iteration, and the speed since the last row.

        evaluated: the columns of an evaluation before its step, {} without one. evaluation_flops:
        of the evaluations to come, which take time, too.
        """
        n_steps = len(self.timings)
        seconds, tokens, flops = map(sum, zip(*self.timings))
        seconds = max(1e-6, seconds)        # a coarse clock may say 0
        # the time that is left: the FLOPs that are left, at the speed of these steps
        flops_left = (self.max_iters - it - 1) * flops / n_steps + evaluation_flops
        seconds_left = flops_left * seconds / flops
        dt_ms = 1e3 * seconds / n_steps
        loops = '/'.join(map(str, n_loop))
        say(f'iter {it}: loss {loss:.3f}, loops {loops or "none"}, {dt_ms:.0f} ms, '
            f'{tokens / seconds / 1e3:.1f}k tok/s, {seconds_left:.0f} s left')
        say_spikes(run, it)
        self.add_row(evaluated | dict(
            iter=it, loss=f'{loss:.5f}', lr=f'{lr:.3e}', grad_norm=f'{norm:.4f}', loops=loops,
            dt_ms=f'{dt_ms:.1f}', tokens_per_s=f'{tokens / seconds:.0f}',
            tflops=f'{flops / seconds / 1e12 / distributed.WORLD:.4f}', spikes=len(run.spikes)))
        run.spikes.clear()
        self.timings.clear()

    def add_row(self, row):
        """Append a row to log.csv. What cannot be written now is written with the next row."""
        if distributed.RANK > 0:
            return
        last_write_failed = bool(self.unwritten)
        self.unwritten.append(row)
        try:
            with open(self.path, 'a', newline='', encoding='utf-8') as f:
                writer = csv.DictWriter(f, self.columns)
                if f.tell() == 0:
                    writer.writeheader()
                elif last_write_failed:     # it may have written half a row
                    f.write('\n')
                writer.writerows(self.unwritten)
        except OSError as error:
            say(f'warning: cannot write a row of {self.path} ({error}): the run goes on, and tries '
                'again with the next row')
        else:
            self.unwritten.clear()


def draw_losses(log, loops, out_dir):
    """loss.png from log.csv."""
    if distributed.RANK == 0:
        with or_warn(f'no {out_dir}/loss.png'):
            from common import plots  # here, since matplotlib takes a second to import
            plots.losses(read_log(log.path), loops, os.path.join(out_dir, 'loss.png'))


# spikes, and numbers that are not finite ----------------------------------------------------------

def note_loss(run, loss, it):
    """Follow the loss of a run: note it if it is a spike, and update the trend."""
    if is_spike(loss, run.trend):
        run.spikes.append([loss, it])
    run.trend = next_trend(run.trend, loss)


def is_spike(loss, trend):
    """
    Is this loss far above the losses before it, which are summed up in a trend (see next_trend)?
    The first 50 losses of a run are never spikes.
    """
    count, mean, variance = trend
    return count >= 50 and loss > mean + max(6 * math.sqrt(variance), 0.2)


def next_trend(trend, loss):
    """
    The trend [count, mean, variance] of the losses, with one more loss: exponential running means
    over about 50 iterations, and plain ones over the first 50.
    """
    count, mean, variance = trend
    weight = max(1 / (count + 1), 0.02)         # of this loss
    deviation = loss - mean
    new_mean = mean + weight * deviation
    new_variance = (1 - weight) * (variance + weight * deviation ** 2)
    return [count + 1, new_mean, new_variance]


def say_spikes(run, it):
    """A warning at iteration `it` if there were spikes since the last row of the log."""
    if run.spikes:
        highest, at = max(run.spikes)
        say(f'warning: iter {it}: loss spikes since the last row of log.csv: '
            f'{len(run.spikes)}, the highest {highest:.2f} at iteration {at} (running mean '
            f'{run.trend[1]:.2f}); if they continue, lower the learning rate')


def check_finite(run, loss, norm, n_loop, lr):
    """ValueError if the loss or the gradient's norm is NaN or infinite."""
    if not math.isfinite(loss + norm):
        last = os.path.join(run.knobs['out_dir'], 'ckpt.pt')
        advice = 'start again'
        if run.saved:
            advice = ('continue from the last checkpoint '
                      f'(--init_from={quote(last)} --out_dir=...)')
        raise UserError(f'not finite at iteration {run.done}: loss {loss}, gradient norm {norm}, '
                        f'loops {n_loop}, learning rate {lr:.2e}. No weight was touched: {advice} '
                        'with a lower learning rate')
