"""
What a training run says: held-out losses and the health of its states, log.csv and the lines on
the screen, loss spikes, bad numbers.

Geiping App. C.3 (the two collapses of the state, the correlation of tokens).
"""
import csv
import math
import os
from contextlib import nullcontext
from itertools import product
from shlex import quote

import numpy as np
import torch
from torch.nn import functional as F

from common.configurator import explain
from common.distributed import RANK, WORLD, add_up, any_stop, say
from common.files import write_csv

# the log ------------------------------------------------------------------------------------------

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


# held-out losses ---------------------------------------------------------------------------------

def spread(text, n, T):
    """The numbers (n,) of n held-out windows of T tokens, evenly spread. ValueError if too few."""
    there = text.n_held_out(T)
    if n > there:
        raise ValueError(f'the held-out text has {there} windows of {T} tokens, fewer than {n}: '
                         'lower --n_windows')
    return np.linspace(0, there - 1, n).round().astype(int)


def windows_at_once(config, most=64):
    """How many windows of block_size tokens to evaluate together: at most 0.5 GiB of logits."""
    return max(1, min(most, 2 ** 27 // (config.block_size * config.vocab_size)))


@torch.no_grad()
def evaluate(model, text, n_windows, loops, dev, autocast=nullcontext()):
    """
    Held-out loss and accuracy at each loop count, over n_windows windows, evenly spread.

    Returns ({n_loop: nats a token}, {n_loop: share of right labels}), or None if asked to stop.
    The model is left in evaluation.
    """
    model.eval()
    T, batch = model.config.block_size, windows_at_once(model.config)
    numbers = spread(text, n_windows, T)[RANK::WORLD]
    # as many batches in all processes: after each they agree whether to stop
    starts = range(0, math.ceil(n_windows / WORLD), batch)
    sums = {n_loop: torch.zeros(3, device=dev) for n_loop in loops}     # loss, right, labels
    for n_loop, start in product(loops, starts):
        if len(mine := numbers[start:start + batch]):
            x, y = (tokens.to(dev) for tokens in text.held_out(mine, T))
            known = y >= 0
            with autocast:
                logits = model.logits_at(x, known, n_loop)
            loss, right = F.cross_entropy(logits.float(), y[known]), logits.argmax(-1) == y[known]
            sums[n_loop] += torch.stack((loss * len(x), right.sum(), known.sum()))
        if any_stop(dev):
            return None
    sums = {n_loop: add_up(values).tolist() for n_loop, values in sums.items()}
    return ({n_loop: loss / n_windows for n_loop, (loss, _, _) in sums.items()},
            {n_loop: right / known for n_loop, (_, right, known) in sums.items()})


@torch.no_grad()
def report_depth(model, text, loops, dev, autocast, out_dir):
    """Accuracy on a task by depth and loops: a table on the screen, depth.csv and depth.png."""
    from common import plots  # here, since matplotlib takes a second to import
    model.eval()
    x, y, depth = (torch.from_numpy(part) for part in text.with_depth(model.config.block_size))
    known, rows = y >= 0, []
    depth, y = depth[known], y[known]
    depths = depth.unique().tolist()
    say('accuracy by depth of the label (across) and loops (down):')
    say('      ' + ''.join(f'{d:6d}' for d in depths))
    at_once = windows_at_once(model.config)
    for n_loop in loops:
        with autocast, torch.compiler.set_stance('force_eager'):
            guesses = [model.logits_at(part.to(dev), labelled.to(dev), n_loop).argmax(-1).cpu()
                       for part, labelled in zip(x.split(at_once), known.split(at_once))]
        right = torch.cat(guesses) == y
        shares = [right[depth == d].double() for d in depths]
        rows += [dict(loops=n_loop, depth=d, labels=len(share), accuracy=share.mean().item())
                 for d, share in zip(depths, shares)]
        say(f'{n_loop:5d} ' + ''.join(f'{share.mean():6.3f}' for share in shares))
    plots.depth(rows, os.path.join(out_dir, 'depth.png'))


def report(run, it, n_windows, text, loops, dev, autocast):
    """Print held-out losses and health -> columns of the log, or None if asked to stop."""
    # the shapes differ from training's, so this runs without the compiler
    with torch.compiler.set_stance('force_eager'):
        found = evaluate(run.model, text, n_windows, loops, dev, autocast)
        if found is None:
            return None
        T = run.model.config.block_size
        count = min(8, text.n_held_out(T), windows_at_once(run.model.config))
        idx, _ = text.held_out(range(count), T)
        values = health(run.model, idx.to(dev), autocast)
    run.model.train()
    losses, accuracies = found
    run.val_loss.update(losses)
    say(f'iter {it}: held-out loss over {n_windows:,} windows: ' + ', '.join(
        f"{loss:.4f} at {n} loop{'s' if n > 1 else ''}" for n, loss in losses.items()))
    row = {f'val_loss_{n}': f'{loss:.5f}' for n, loss in losses.items()}
    if text.is_task:
        say(f'iter {it}: accuracy: ' + ', '.join(
            f"{100 * share:.2f}% at {n}" for n, share in accuracies.items()))
        row |= {f'val_acc_{n}': f'{share:.5f}' for n, share in accuracies.items()}
    # while the learning rate warms up, bad values mean nothing
    if it >= run.knobs['warmup_iters']:
        for line in warnings_of(values, run.model.config.groups):
            say(f'warning: iter {it}: {line}')
    for name, of_groups in zip(('token_corr', 'state_use'), zip(*values)):
        row[name] = '/'.join(f'{value:.3f}' for value in of_groups)
    return row


# health ------------------------------------------------------------------------------------------

@torch.no_grad()
def health(model, idx, autocast=nullcontext()):
    """
    Geiping's two collapses (App. C.3) on tokens idx (B, T): each group's (token_corr, state_use),
    of a model in evaluation.

    token_corr: mean cosine between the last states of different tokens of a window; 1 = all tokens
    have become one. state_use: ||f(x) - f(noise)|| / ||f(x)||, x the last state; 0 = the core
    ignores its state, and looping is useless.
    """
    trace, values = [], []
    with autocast:
        model(idx, n_loop=max(1, round(model.config.mean_recurrence)), trace=trace)
        for group, entry in zip(model.groups, trace):
            e, x = entry['e'], entry['states'][-1]                              # (B, T, C)
            T = x.shape[1]
            # the cosines of all pairs: the squared sum of the unit vectors, minus T self-pairs
            unit = F.normalize(x, dim=-1)
            pairs = unit.sum(1).square().sum(-1) - T
            token_corr = pairs.mean() / (T * (T - 1))
            settled = group.step(x, e)
            fresh = group.step(group.init_state(e), e)
            state_use = (settled - fresh).norm() / settled.norm()
            values.append((token_corr.item(), state_use.item()))
    return values


def warnings_of(values, groups):
    """A warning for each bad value that health returned."""
    for group, (token_corr, state_use) in zip(groups, values):
        if token_corr > 0.95:
            yield (f'in group {group} the states of all tokens are nearly the same (token_corr '
                   f'{token_corr:.2f}): lower the learning rate or start again')
        if state_use < 0.02:
            yield (f'the core of group {group} ignores its state (state_use {state_use:.3f}), so '
                   'more loops change nothing: lower the learning rate or start again')
