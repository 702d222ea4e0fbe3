"""
Held-out losses, on a task by depth. Losses are nats per label.

    examples    a data set or a task: data.Text or tasks.Problems
    scores      {n_loop: Score}
"""
import os
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from common import distributed
from common.errors import check
from common.files import read_csv, write_csv


class Score(NamedTuple):
    """How well a model predicts held-out labels. A text has one depth, 0."""
    loss: float                 # nats per label
    accuracy: float             # the share of the labels that the model finds most likely
    solved: float               # the share of the windows in which all labels are right
    by_depth: torch.Tensor      # (3, depths): labels, how many of them are right, their nats


@torch.no_grad()
def evaluate(model, examples, n_windows, n_loop, dev='cpu', autocast=nullcontext()):
    """The Score of a model in evaluation at a loop count, on n_windows evenly spread windows."""
    T = model.config.block_size
    numbers = spread(examples, n_windows, T)[distributed.RANK::distributed.WORLD]
    depths = torch.zeros(1, dtype=torch.long).expand(examples.n_held_out(T), T)
    if examples.is_task:
        depths = torch.from_numpy(examples.all_held_out(T)[2]).long()
    by_depth = torch.zeros(3, int(depths.max()) + 1, dtype=torch.float64)
    solved = torch.zeros((), dtype=torch.float64)
    at_once = windows_at_once(model.config)
    for start in range(0, len(numbers), at_once):
        batch = numbers[start:start + at_once]
        x, y = examples.held_out(batch, T)                                      # (B, T)
        labelled = y >= 0
        with autocast:
            logits, _ = model(x.to(dev), n_loop=n_loop)                         # (B, T, V)
        nats = F.cross_entropy(logits[labelled.to(dev)].float(), y[labelled].to(dev),
                               reduction='none').cpu()                          # (N,)
        right = logits.argmax(-1).cpu() == y                                    # (B, T)
        of_labels = torch.stack((torch.ones_like(nats), right[labelled], nats)).double()    # (3, N)
        by_depth.index_add_(1, depths[batch][labelled], of_labels)
        solved += (right | ~labelled).all(dim=1).sum()
    by_depth = distributed.add_up(by_depth)
    n_labels, n_right, nats = by_depth.sum(dim=1).tolist()
    share_solved = distributed.add_up(solved).item() / n_windows
    return Score(nats / n_labels, n_right / n_labels, share_solved, by_depth)


def spread(examples, n, T):
    """The numbers of n held-out windows, evenly spread (n,). ValueError if there are fewer."""
    n_all = examples.n_held_out(T)
    check(n <= n_all, f'there are only {n_all} held-out windows of {T} tokens, not {n}')
    return np.linspace(0, n_all - 1, n).round().astype(int)


def windows_at_once(config):
    """How many windows to evaluate together: 64, or fewer, so that they fit into half a GiB."""
    numbers_per_token = max(config.vocab_size, config.n_head * config.block_size)
    return max(1, min(64, 2 ** 27 // (config.block_size * numbers_per_token)))


# tables -------------------------------------------------------------------------------------------

def table_of(scores):
    """
    Scores -> dicts, one for each loop count and bin with labels: loops, the first and the last
    depth of the bin, its labels, the share of them that is right (accuracy), nats per label (loss).
    The bins are 0, 1, 2, 3-4, 5-8, 9-16 and so on.
    """
    rows = []
    for n_loop, score in scores.items():
        deepest = score.by_depth.shape[1] - 1
        first = last = 0
        while first <= deepest:
            labels, right, nats = score.by_depth[:, first:last + 1].sum(dim=1).tolist()
            if labels:
                rows.append(dict(loops=n_loop, first=first, last=min(last, deepest),
                                 labels=int(labels), accuracy=right / labels, loss=nats / labels))
            first, last = last + 1, max(1, 2 * last)
    return rows


def save_scores(scores, folder, suffix=''):
    """
    The table_of scores -> folder/eval{suffix}.csv. With a suffix, rows of other loop counts stay
    that the file has already.
    """
    if distributed.RANK > 0:
        return
    path = os.path.join(folder, f'eval{suffix}.csv')
    rows = table_of(scores)
    if suffix and os.path.exists(path):
        rows += [row for row in read_csv(path) if int(row['loops']) not in scores]
        rows.sort(key=lambda row: int(row['loops']))
    write_csv(rows, path)
