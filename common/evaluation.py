"""
Held-out losses, on a task by depth, and the health of a model's states.

Losses are nats per token. Geiping App. C.3: the two collapses of the state.

    examples    a data set or a task: data.Text or tasks.Problems
    loops       the loop counts to evaluate at
    sums        what evaluate returns
    columns     of a table: the first and the last depth of each, see depths_of; [] for a text
"""
import math
import os
from contextlib import nullcontext

import torch
from torch.nn import functional as F

from common import distributed
from common.distributed import say
from common.files import write_csv

MOST_COLUMNS = 10       # of a table by depth


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


def windows_at_once(config, most=64):
    """
    How many windows of block_size tokens to evaluate together: at most 0.5 GiB of logits, or of
    attention weights where the windows are long.
    """
    of_a_token = max(config.vocab_size, config.n_head * config.block_size)
    return max(1, min(most, 2 ** 27 // (config.block_size * of_a_token)))


def share_and_loss(sums):
    """Sums (3,) of labels, right ones and nats -> the share of right labels, nats per label."""
    labels, right, nats = sums.tolist()
    if labels == 0:
        return math.nan, math.nan
    return right / labels, nats / labels


def totals_of(sums):
    """evaluate's sums -> {n_loop: (share of all labels that is right, nats per label)}."""
    return {n_loop: share_and_loss(of_columns.sum(dim=1)) for n_loop, of_columns in sums.items()}


# tables by depth ----------------------------------------------------------------------------------

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


def with_labels(sums, columns):
    """evaluate's sums and depths_of's columns, without columns that hold no label."""
    if not columns:
        return sums, columns
    labels, _, _ = next(iter(sums.values()))        # as many at all loop counts
    held = [number for number in range(len(columns)) if labels[number] > 0]
    if not held:
        raise ValueError('no held-out window has a label: give a larger --eval_windows, or longer '
                         'windows')
    return ({n_loop: of_columns[:, held] for n_loop, of_columns in sums.items()},
            [columns[number] for number in held])


def print_table(sums, columns):
    """
    Print evaluate's sums: loops, loss, % of labels that are right, and these by depth. columns: of
    depths_of.
    """
    sums, columns = with_labels(sums, columns)
    header = f'{"loops":>5} {"loss":>8} {"% right":>8}'
    if columns:
        say(' ' * (len(header) + 1) + '% right by depth of the label')
    titles = [f'{first}-{last}' if last > first else f'{first}' for first, last in columns]
    width = 1 + max(map(len, ['100.00', *titles]))
    say(header + ''.join(title.rjust(width) for title in titles))
    for n_loop, (share, loss) in totals_of(sums).items():
        line = f'{n_loop:5d} {loss:8.4f} {100 * share:8.2f}'
        for _, of_column in zip(columns, sums[n_loop].T):
            share, _ = share_and_loss(of_column)
            line += f'{100 * share:.2f}'.rjust(width)
        say(line)


def save_table(sums, columns, folder):
    """
    folder/eval.csv: loops, the first and the last depth of a column (empty for a text), its number
    of labels, the share of them that is right (accuracy), nats per label (loss). On a task also
    depth.png, a picture of it. columns: of depths_of; one without labels has no row.
    """
    if distributed.RANK > 0:
        return
    sums, columns = with_labels(sums, columns)
    rows = []
    for n_loop, of_columns in sums.items():
        for (first, last), of_column in zip(columns or [('', '')], of_columns.T):
            accuracy, loss = share_and_loss(of_column)
            rows.append(dict(loops=n_loop, first=first, last=last, labels=int(of_column[0]),
                             accuracy=accuracy, loss=loss))
    write_csv(rows, os.path.join(folder, 'eval.csv'))
    if columns:
        from common import plots  # here, since matplotlib takes a second to import
        plots.depth(rows, os.path.join(folder, 'depth.png'))


# during training ----------------------------------------------------------------------------------

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


# the health of the states -------------------------------------------------------------------------

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
