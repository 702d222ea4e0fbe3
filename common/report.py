"""
What a training run says: log.csv and the lines on the screen, held-out losses, the health of its
states, loss spikes, bad numbers.

Not run by itself: train.py calls it. Losses are nats per token. Geiping App. C.3 (the two collapses
of the state, the correlation of tokens).

    examples    a data set or a task: data.Text or tasks.Problems
    loops       the loop counts to evaluate at
    sums        what evaluate returns
"""
import csv
import math
import os
from contextlib import contextmanager, nullcontext
from shlex import quote

import torch
from torch.nn import functional as F

from common import distributed
from common.configurator import explain
from common.distributed import say
from common.files import write_csv

MOST_COLUMNS = 10       # of a table by depth


@contextmanager
def or_warn(what):
    """In this context a file that cannot be written is a warning: no figure is worth a run."""
    try:
        yield
    except Exception as error:          # a full disk, no matplotlib, an empty log, ...
        say(f'warning: {what} ({error}): the run goes on without it')


# the log ------------------------------------------------------------------------------------------

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
        token_corr      see health, one number per group
        state_use       see health, one number per group

    The last row is the evaluation after the last step, and has no other columns.
    """

    def __init__(self, path, loops, start, max_iters, accuracy=False):
        """loops: the evaluated counts. Rows from `start` on, left by a killed run, are dropped."""
        self.path = path
        self.max_iters = max_iters
        self.steps = []         # (seconds, tokens, FLOPs of all processes) of each step since a row
        self.unwritten = []     # rows
        measures = ['val_loss', 'val_acc'] if accuracy else ['val_loss']
        self.columns = ['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s',
                        'tflops', 'spikes',
                        *(f'{measure}_{n}' for measure in measures for n in loops),
                        'token_corr', 'state_use']
        if distributed.RANK == 0:
            rows = read_log(path, start) if start and os.path.exists(path) else []
            write_csv(rows, path, self.columns)

    def step(self, run, it, loss, lr, norm, n_loop, evaluated, evaluation_flops):
        """
        Print a line and add a row: this iteration, and the speed since the last row.

        evaluated: the columns of an evaluation before its step, {} without one. evaluation_flops:
        of the evaluations to come, which take time, too.
        """
        n_steps = len(self.steps)
        seconds = max(1e-6, sum(seconds for seconds, _, _ in self.steps))       # a coarse clock
        tokens = sum(tokens for _, tokens, _ in self.steps)
        flops = sum(flops for _, _, flops in self.steps)
        flops_left = (self.max_iters - it - 1) * flops / n_steps + evaluation_flops
        seconds_left = flops_left * seconds / flops
        dt_ms = 1e3 * seconds / n_steps
        loops = '/'.join(map(str, n_loop))
        say(f'iter {it}: loss {loss:.3f}, loops {loops or "none"}, {dt_ms:.0f} ms, '
            f'{tokens / seconds / 1e3:.1f}k tok/s, {seconds_left:.0f} s left')
        say_spikes(run, it)
        self.add(evaluated | dict(
            iter=it, loss=f'{loss:.5f}', lr=f'{lr:.3e}', grad_norm=f'{norm:.4f}', loops=loops,
            dt_ms=f'{dt_ms:.1f}', tokens_per_s=f'{tokens / seconds:.0f}',
            tflops=f'{flops / seconds / 1e12 / distributed.WORLD:.4f}', spikes=len(run.spikes)))
        run.spikes.clear()
        self.steps.clear()

    def add(self, row):
        """Append a row to log.csv. What cannot be written now is written with the next row."""
        if distributed.RANK > 0:
            return
        is_again = bool(self.unwritten)
        self.unwritten.append(row)
        try:
            with open(self.path, 'a', newline='', encoding='utf-8') as f:
                writer = csv.DictWriter(f, self.columns)
                if f.tell() == 0:
                    writer.writeheader()
                elif is_again:          # it may have written half a row
                    f.write('\n')
                writer.writerows(self.unwritten)
        except OSError as error:
            say(f'warning: cannot write a row of {self.path} ({error}): the run goes on, and tries '
                'again with the next row')
        else:
            self.unwritten.clear()


def is_spike(loss, trend):
    """Is this loss far above those before it? trend: see next_trend; not before 50 of them."""
    count, mean, variance = trend
    return count >= 50 and loss > mean + max(6 * math.sqrt(variance), 0.2)


def next_trend(trend, loss):
    """
    The trend [count, mean, variance] of the losses, with one more loss: exponential running means
    over about 50 iterations, and plain ones over the first 50.
    """
    count, mean, variance = trend
    share = max(1 / (count + 1), 0.02)
    off = loss - mean
    return [count + 1, mean + share * off, (1 - share) * (variance + share * off ** 2)]


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
        raise ValueError(f'not finite at iteration {run.done}: loss {loss}, gradient norm {norm}, '
                         f'loops {n_loop}, learning rate {lr:.2e}. No weight was touched: {advice} '
                         'with a lower learning rate')


def draw_losses(log, loops, out_dir):
    """loss.png from log.csv."""
    if distributed.RANK == 0:
        with or_warn(f'no {out_dir}/loss.png'):
            from common import plots  # here, since matplotlib takes a second to import
            plots.losses(read_log(log.path), loops, os.path.join(out_dir, 'loss.png'))


# held-out losses ---------------------------------------------------------------------------------

def windows_at_once(config, most=64):
    """
    How many windows of block_size tokens to evaluate together: at most 0.5 GiB of logits, or of
    attention weights where the windows are long.
    """
    of_a_token = max(config.vocab_size, config.n_head * config.block_size)
    return max(1, min(most, 2 ** 27 // (config.block_size * of_a_token)))


def depths_of(examples, T):
    """
    The depths of held-out labels, in at most ten columns of a table: the first and the last depth
    of each. Where there are more depths the columns double: (0, 0), (1, 1), (2, 2), (3, 4), (5, 8)
    ... A text has no depths: [].
    """
    if not examples.is_task:
        return []
    deepest = int(examples.depths(T).max())
    if deepest < MOST_COLUMNS:
        return [(depth, depth) for depth in range(deepest + 1)]
    n_doublings = math.ceil(math.log2(deepest))                 # from 1 to the deepest
    last = 2 ** max(0, n_doublings - (MOST_COLUMNS - 2))
    columns = [(0, 0), (1, last)]
    while last < deepest:
        columns.append((last + 1, min(2 * last, deepest)))
        last *= 2
    return columns


@torch.no_grad()
def evaluate(model, examples, n_windows, loops, dev, autocast=nullcontext()):
    """
    What the model makes of n_windows held-out windows of block_size tokens, evenly spread, at each
    loop count.

    Returns {n_loop: sums (3, columns)}, float64: labels, right ones and nats in each column of
    depths_of, or in one column of all. Stopped if a signal asks for it. The model is left in
    evaluation.
    """
    model.eval()
    T = model.config.block_size
    numbers = examples.spread(n_windows, T)[distributed.RANK::distributed.WORLD]
    columns = depths_of(examples, T)
    at_once = windows_at_once(model.config)
    # as many batches in all processes: after each they agree whether to stop
    starts = range(0, math.ceil(n_windows / distributed.WORLD), at_once)
    sums = {}
    for n_loop in loops:
        sums[n_loop] = torch.zeros(3, len(columns) or 1, dtype=torch.float64)
        for start in starts:
            some = numbers[start:start + at_once]
            if len(some):
                sums[n_loop] += sums_of(model, examples, some, columns, n_loop, dev, autocast)
            distributed.check_stopped(dev)
    return {n_loop: distributed.add_up(part, dev) for n_loop, part in sums.items()}


def sums_of(model, examples, numbers, columns, n_loop, dev, autocast):
    """evaluate's sums (3, columns) of the held-out windows with these numbers."""
    T = model.config.block_size
    x, y = examples.held_out(numbers, T)                                        # (B, T)
    labelled = y >= 0
    with autocast:
        logits = model.logits_at(x.to(dev), labelled.to(dev), n_loop)           # (N, V)
    labels = y[labelled].to(dev)
    nats = F.cross_entropy(logits.float(), labels, reduction='none')
    right = logits.argmax(-1) == labels
    of_labels = torch.stack((torch.ones_like(nats), right, nats)).cpu().double()        # (3, N)
    if not columns:
        return of_labels.sum(dim=1, keepdim=True)
    depth = torch.from_numpy(examples.depths(T)[numbers])[labelled]
    column = torch.bucketize(depth, torch.tensor([last for _, last in columns]))
    return torch.zeros(3, len(columns), dtype=torch.float64).index_add_(1, column, of_labels)


def share_and_loss(sums):
    """Sums (3,) of labels, right ones and nats -> the share of right labels, nats per label."""
    labels, right, nats = sums.tolist()
    return (right / labels, nats / labels) if labels else (math.nan, math.nan)


def totals_of(sums):
    """evaluate's sums -> {n_loop: (share of all labels that is right, nats per label)}."""
    return {n_loop: share_and_loss(of_columns.sum(dim=1)) for n_loop, of_columns in sums.items()}


def print_table(sums, columns):
    """Print evaluate's sums: loops, loss, % of labels that are right, and these by depth."""
    header = f'{"loops":>5} {"loss":>8} {"% right":>8}'
    if columns:
        say(' ' * (len(header) + 1) + '% right by depth of the label')
    titles = [f'{first}-{last}' if last > first else f'{first}' for first, last in columns]
    width = 1 + max(map(len, ['100.00', *titles]))
    say(header + ''.join(title.rjust(width) for title in titles))
    for n_loop, (share, loss) in totals_of(sums).items():
        line = f'{n_loop:5d} {loss:8.4f} {100 * share:8.2f}'
        for _, column in zip(titles, sums[n_loop].T):
            share, _ = share_and_loss(column)
            line += ('-' if math.isnan(share) else f'{100 * share:.2f}').rjust(width)
        say(line)


def save_table(sums, columns, folder):
    """
    folder/eval.csv: loops, the first and the last depth of a column (empty for a text), its number
    of labels, the share of them that is right (accuracy), nats per label (loss). On a task also
    depth.png, a picture of it.
    """
    if distributed.RANK > 0:
        return
    rows = []
    for n_loop, of_columns in sums.items():
        for (first, last), part in zip(columns or [('', '')], of_columns.T):
            accuracy, loss = share_and_loss(part)
            rows.append(dict(loops=n_loop, first=first, last=last, labels=int(part[0]),
                             accuracy=accuracy, loss=loss))
    write_csv(rows, os.path.join(folder, 'eval.csv'))
    if columns:
        from common import plots  # here, since matplotlib takes a second to import
        plots.depth(rows, os.path.join(folder, 'depth.png'))


# an evaluation during training --------------------------------------------------------------------

def evaluate_run(run, examples, n_windows, loops, dev, autocast):
    """
    Evaluate the run as it is now, print what comes out, and keep its held-out losses in the run.
    Returns evaluate's sums and the columns of log.csv.
    """
    T = run.model.config.block_size
    few = range(min(8, examples.n_held_out(T), windows_at_once(run.model.config)))
    # the shapes differ from training's, so this runs without the compiler
    with torch.compiler.set_stance('force_eager'):
        sums = evaluate(run.model, examples, n_windows, loops, dev, autocast)
        values = health(run.model, examples.held_out(few, T)[0].to(dev), autocast)
    run.model.train()
    totals = totals_of(sums)
    run.val_loss.update({n_loop: loss for n_loop, (_, loss) in totals.items()})
    say_losses(run.done, n_windows, totals, examples.is_task)
    # while the learning rate warms up, bad values mean nothing
    if run.done >= run.knobs['warmup_iters']:
        for line in warnings_of(values, run.model.config.groups):
            say(f'warning: iter {run.done}: {line}')
    return sums, columns_of(totals, values, examples.is_task)


def say_losses(it, n_windows, totals, is_task):
    """Print held-out losses, and on a task accuracies. totals: see totals_of."""
    losses = ', '.join(f"{loss:.4f} at {n} {'loop' if n == 1 else 'loops'}"
                       for n, (_, loss) in totals.items())
    say(f'iter {it}: held-out loss over {n_windows:,} windows: {losses}')
    if is_task:
        shares = ', '.join(f'{100 * share:.2f}% at {n}' for n, (share, _) in totals.items())
        say(f'iter {it}: accuracy: {shares}')


def columns_of(totals, values, is_task):
    """What totals_of and health say, as columns of log.csv."""
    columns = {f'val_loss_{n}': f'{loss:.5f}' for n, (_, loss) in totals.items()}
    if is_task:
        columns |= {f'val_acc_{n}': f'{share:.5f}' for n, (share, _) in totals.items()}
    for name, of_groups in zip(('token_corr', 'state_use'), zip(*values)):
        columns[name] = '/'.join(f'{value:.3f}' for value in of_groups)
    return columns


@torch.no_grad()
def health(model, idx, autocast=nullcontext()):
    """
    Geiping's two collapses (App. C.3) on tokens idx (B, T): each group's (token_corr, state_use),
    of a model in evaluation.

    token_corr: mean cosine between the last states of different tokens of a window; 1 = all tokens
    have become one. state_use: ||f(x) - f(noise)|| / ||f(x)||, x the last state; 0 = the core
    ignores its state, and looping is useless.
    """
    T = idx.shape[1]
    trace = []
    values = []
    with autocast:
        model(idx, n_loop=max(1, round(model.config.mean_recurrence)), trace=trace)
        for group, entry in zip(model.groups, trace):
            e, x = entry['e'], entry['states'][-1]                              # (B, T, C)
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
