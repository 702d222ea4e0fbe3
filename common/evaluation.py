"""
Held-out losses, on a task by depth, and the health of a model's states.

Losses are nats per token. Geiping App. C.3: the two collapses of the state.

    examples    a data set or a task: data.Text or tasks.Problems
    loops       the loop counts to evaluate at
    scores      what evaluate returns: {n_loop: Score}
    bins        the first and the last depth of each bin, see depth_bins; [] for a text
"""
import math
import os
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.nn import functional as F

from common import distributed
from common.distributed import say
from common.errors import UserError
from common.files import write_csv

MOST_BINS = 10          # of depths, in a table


class Score(NamedTuple):
    """How well a model predicts held-out labels: three sums for each bin, or over all labels."""
    labels: torch.Tensor    # the number of labels
    right: torch.Tensor     # how many of them the model finds most likely
    nats: torch.Tensor      # the sum of their losses

    @property
    def accuracy(self):
        """The share of the labels that is right, NaN without labels."""
        return self.right / self.labels

    @property
    def loss(self):
        """Nats per label, NaN without labels."""
        return self.nats / self.labels

    def total(self):
        """The Score of all bins together."""
        return Score(self.labels.sum(), self.right.sum(), self.nats.sum())


@torch.no_grad()
def evaluate(model, examples, n_windows, loops, dev, autocast=nullcontext()):
    """
    Evaluate the model at each loop count, on n_windows held-out windows of block_size tokens that
    are spread evenly.

    Returns {n_loop: Score}, whose tensors have an entry for each of depth_bins, or one entry in all
    for a text. Raises Stopped if a signal asks for it. Leaves the model in evaluation.
    """
    model.eval()
    T = model.config.block_size
    numbers = examples.spread(n_windows, T)[distributed.RANK::distributed.WORLD]
    bins = depth_bins(examples, T)
    at_once = windows_at_once(model.config)
    # as many batches in all processes: after each they agree whether to stop
    starts = range(0, math.ceil(n_windows / distributed.WORLD), at_once)
    sums = {}       # the three rows of each Score
    for n_loop in loops:
        sums[n_loop] = torch.zeros(3, len(bins) or 1, dtype=torch.float64)
        for start in starts:
            batch = numbers[start:start + at_once]
            if len(batch):
                sums[n_loop] += score_windows(model, examples, batch, bins, n_loop, dev, autocast)
            distributed.check_stopped(dev)
    return {n_loop: Score(*distributed.add_up(rows, dev)) for n_loop, rows in sums.items()}


def score_windows(model, examples, numbers, bins, n_loop, dev, autocast):
    """The Score of the held-out windows with these numbers, as a tensor (3, bins) of float64."""
    T = model.config.block_size
    x, y = examples.held_out(numbers, T)                                        # (B, T)
    labelled = y >= 0
    with autocast:
        logits = model.logits_at(x.to(dev), labelled.to(dev), n_loop)           # (N, V)
    labels = y[labelled].to(dev)
    nats = F.cross_entropy(logits.float(), labels, reduction='none')
    right = logits.argmax(-1) == labels
    of_labels = torch.stack((torch.ones_like(nats), right, nats)).cpu().double()        # (3, N)
    if not bins:
        return of_labels.sum(dim=1, keepdim=True)
    depths = torch.from_numpy(examples.depths(T)[numbers])[labelled]
    bin_of_label = torch.bucketize(depths, torch.tensor([last for _, last in bins]))
    return torch.zeros(3, len(bins), dtype=torch.float64).index_add_(1, bin_of_label, of_labels)


def windows_at_once(config, most=64):
    """
    How many windows of block_size tokens to evaluate together: at most 0.5 GiB of logits, or of
    attention weights where the windows are long.
    """
    most_numbers = 2 ** 27          # 0.5 GiB of float32
    numbers_per_token = max(config.vocab_size, config.n_head * config.block_size)
    numbers_per_window = config.block_size * numbers_per_token
    return max(1, min(most, most_numbers // numbers_per_window))


# tables by depth ----------------------------------------------------------------------------------

def depth_bins(examples, T):
    """
    The depths of held-out labels in at most ten bins: the first and the last depth of each. Where
    there are more depths the bins double: (0, 0), (1, 1), (2, 2), (3, 4), (5, 8) ... A text has no
    depths: [].
    """
    if not examples.is_task:
        return []
    deepest = int(examples.depths(T).max())
    if deepest < MOST_BINS:
        return [(depth, depth) for depth in range(deepest + 1)]
    n_doublings = math.ceil(math.log2(deepest))                 # from 1 to the deepest
    last = 2 ** max(0, n_doublings - (MOST_BINS - 2))
    bins = [(0, 0), (1, last)]
    while last < deepest:
        bins.append((last + 1, min(2 * last, deepest)))
        last *= 2
    return bins


def without_empty_bins(scores, bins):
    """The scores and their bins without the bins that hold no label. ValueError if none has one."""
    if not bins:
        return scores, bins
    first_score = next(iter(scores.values()))       # there are as many labels at all loop counts
    has_labels = first_score.labels > 0
    if not has_labels.any():
        raise UserError('no held-out window has a label: give a larger --eval_windows, or longer '
                        'windows')
    kept = {n_loop: Score(*(numbers[has_labels] for numbers in score))
            for n_loop, score in scores.items()}
    return kept, [bins[i] for i in has_labels.nonzero().flatten().tolist()]


def print_table(scores, bins):
    """Print a line for each loop count: loss, % of all labels that are right, and % by depth."""
    scores, bins = without_empty_bins(scores, bins)
    header = f'{"loops":>5} {"loss":>8} {"% right":>8}'
    if bins:
        say(' ' * (len(header) + 1) + '% right by depth of the label')
    titles = [f'{first}-{last}' if last > first else f'{first}' for first, last in bins]
    width = 1 + max(map(len, ['100.00', *titles]))
    say(header + ''.join(title.rjust(width) for title in titles))
    for n_loop, score in scores.items():
        total = score.total()
        line = f'{n_loop:5d} {total.loss:8.4f} {100 * total.accuracy:8.2f}'
        if bins:
            line += ''.join(f'{100 * share:{width}.2f}' for share in score.accuracy.tolist())
        say(line)


def save_table(scores, bins, folder):
    """
    folder/eval.csv: loops, the first and the last depth of a bin (empty for a text), its number of
    labels, the share of them that is right (accuracy), nats per label (loss). A bin without labels
    has no row. On a task also depth.png, a picture of it.
    """
    if distributed.RANK > 0:
        return
    scores, bins = without_empty_bins(scores, bins)
    rows = []
    for n_loop, score in scores.items():
        for i, (first, last) in enumerate(bins or [('', '')]):
            rows.append(dict(loops=n_loop, first=first, last=last, labels=int(score.labels[i]),
                             accuracy=score.accuracy[i].item(), loss=score.loss[i].item()))
    write_csv(rows, os.path.join(folder, 'eval.csv'))
    if bins:
        from common import plots  # here, since matplotlib takes a second to import
        plots.depth(rows, os.path.join(folder, 'depth.png'))


# during training ----------------------------------------------------------------------------------

def evaluate_run(run, examples, n_windows, loops, dev, autocast):
    """
    Evaluate the run as it is now, print what comes out, and keep its held-out losses in the run.
    Returns evaluate's scores, and what they say as columns of log.csv.
    """
    T = run.model.config.block_size
    n_for_health = min(8, examples.n_held_out(T), windows_at_once(run.model.config))
    # the shapes differ from training's, so this runs without the compiler
    with torch.compiler.set_stance('force_eager'):
        scores = evaluate(run.model, examples, n_windows, loops, dev, autocast)
        idx, _ = examples.held_out(range(n_for_health), T)
        health_of_groups = health(run.model, idx.to(dev), autocast)
    run.model.train()
    totals = {n_loop: score.total() for n_loop, score in scores.items()}
    run.val_loss.update({n_loop: total.loss.item() for n_loop, total in totals.items()})
    say_losses(run.done, n_windows, totals, examples.is_task)
    # while the learning rate warms up, bad values mean nothing
    if run.done >= run.knobs['warmup_iters']:
        for line in warnings_of(health_of_groups, run.model.config.groups):
            say(f'warning: iter {run.done}: {line}')
    return scores, log_columns(totals, health_of_groups, examples.is_task)


def say_losses(it, n_windows, totals, is_task):
    """Print held-out losses, and on a task accuracies. totals: {n_loop: Score of all labels}."""
    losses = ', '.join(f"{total.loss:.4f} at {n} {'loop' if n == 1 else 'loops'}"
                       for n, total in totals.items())
    say(f'iter {it}: held-out loss over {n_windows:,} windows: {losses}')
    if is_task:
        shares = ', '.join(f'{100 * total.accuracy:.2f}% at {n}' for n, total in totals.items())
        say(f'iter {it}: accuracy: {shares}')


def log_columns(totals, health_of_groups, is_task):
    """The columns of log.csv, {name: text}, of say_losses' totals and of what health returns."""
    columns = {f'val_loss_{n}': f'{total.loss:.5f}' for n, total in totals.items()}
    if is_task:
        columns |= {f'val_acc_{n}': f'{total.accuracy:.5f}' for n, total in totals.items()}
    if health_of_groups:
        token_corrs, state_uses = zip(*health_of_groups)
        columns['token_corr'] = '/'.join(f'{value:.3f}' for value in token_corrs)
        columns['state_use'] = '/'.join(f'{value:.3f}' for value in state_uses)
    return columns


# the health of the states -------------------------------------------------------------------------

@torch.no_grad()
def health(model, idx, autocast=nullcontext()):
    """
    Geiping's two collapses (App. C.3), measured on tokens idx (B, T) with a model in evaluation.
    Returns (token_corr, state_use) for each group.

    token_corr is the mean cosine between the last states of different tokens of a window. At 1 all
    tokens have the same state. state_use is ||f(x) - f(noise)|| / ||f(x)||, where f is a loop step
    and x the last state. At 0 the core ignores its state, and looping is useless.
    """
    T = idx.shape[1]
    trace = []
    values = []
    with autocast:
        model(idx, n_loop=max(1, round(model.config.mean_recurrence)), trace=trace)
        for group, entry in zip(model.groups, trace):
            e, x = entry['e'], entry['states'][-1]                              # (B, T, C)
            # the sum of the cosines of all pairs of tokens is the squared length of the sum of
            # their unit vectors, minus the T pairs of a token with itself
            unit_vectors = F.normalize(x, dim=-1)
            sum_of_cosines = unit_vectors.sum(1).square().sum(-1) - T
            token_corr = sum_of_cosines.mean() / max(1, T * (T - 1))            # 0 for one token
            from_x = group.step(x, e)
            from_noise = group.step(group.init_state(e), e)
            state_use = (from_x - from_noise).norm() / from_x.norm()
            values.append((token_corr.item(), state_use.item()))
    return values


def warnings_of(health_of_groups, groups):
    """A warning for each bad value that health returned."""
    for group, (token_corr, state_use) in zip(groups, health_of_groups):
        if token_corr > 0.95:
            yield (f'in group {group} the states of all tokens are nearly the same (token_corr '
                   f'{token_corr:.2f}): lower the learning rate or start again')
        if state_use < 0.02:
            yield (f'the core of group {group} ignores its state (state_use {state_use:.3f}), so '
                   'more loops change nothing: lower the learning rate or start again')
