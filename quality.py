"""
How good is the model at a point: a way to choose the loops of each token, and a cache policy?

Not run by itself: bench.py makes the points. With `exact` a pass over whole windows gives what
decoding gives (a test holds that), so it stands for it. With any other policy the windows are fed
token by token, their rows side by side, each token upon the keys and values that this policy kept.
(What an oracle knows differs: the end of a pass in which nobody left, or, token by token, of one
upon what the earlier tokens left.)

    B, T, V         rows, tokens of a window, vocabulary
    steps, evals    loop steps kept, block maps evaluated
    CE              cross-entropy, nats a token
"""
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

import memory
from cache import Span
from decode import make_cache
from exits import Exit


@dataclass
class Point:
    """One way to choose the loops of each token, and what has been measured of it so far."""
    rule: str                   # an exit rule, 'fixed' or 'oracle'
    tau: float                  # its threshold; of a fixed budget its loops, of an oracle epsilon
    loops: list                 # loop budget of each group
    exit: Exit | None = None
    cache: str = 'exact'
    ring: int = 8               # slots of the policy 'ring'
    extension: bool = False     # beyond the paper's sweep
    figures: list = field(default_factory=list)     # of `quality`: a dict for each batch of windows
    # for each protocol: ms of each timed token, and the tokens of each round
    times: dict = field(default_factory=lambda: dict(cached=[], paper=[]))
    tokens: dict = field(default_factory=lambda: dict(cached=[], paper=[]))

    @property
    def past(self):
        """Do its tokens wait for the past? Where one comes alone (`latest`), in a prompt."""
        return self.exit is not None and self.exit.past


# the oracle ---------------------------------------------------------------------------------------

class Oracle:
    """
    While entered, each group lets a token go at the first step that is within eps of its last one.

    To know its last iterate a group has to loop to the end before it starts. No exit rule can do
    that: a rule sees one step at a time, and what a later group receives depends on where the
    earlier ones stopped. So the group's forward itself is replaced, and put back at the end.
    """

    def __init__(self, model, eps):
        self.model, self.eps = model, eps

    def __enter__(self):
        for group in self.model.groups:
            group.forward = oracle_forward(group.forward, self.eps)

    def __exit__(self, *_):
        for group in self.model.groups:
            del group.forward           # the class's own shows again


def oracle_forward(whole, eps):
    """A RecurrentGroup's forward `whole` -> one with the oracle as its exit rule."""
    def forward(e, n, exit=None, readout=None, noise_seed=0, span=None, caches=None, x0=None,
                trace=None):
        # what this leaves in the cache is written over
        last, _, _ = whole(e, n, None, None, noise_seed, span, caches)          # (B, T, C)

        def signal(x, x1, memo, readout):
            memo = last if memo is None else memo       # later: of the rows that still loop
            return vector_norm(x1 - memo, dim=-1), memo

        rule = Exit('oracle', eps, signal, 1, True)
        return whole(e, n, rule, readout, noise_seed, span, caches, x0, trace)
    return forward


# logits at a point --------------------------------------------------------------------------------

@torch.no_grad()
def whole_windows(model, point, idx, seed=0):
    """idx (B, T) in one pass -> log-probabilities (B, T, V), steps and evals (B, T, groups)."""
    trace = []
    with Oracle(model, point.tau) if point.rule == 'oracle' else nullcontext():
        logits, _ = model(idx, n_loop=point.loops, exit=point.exit, noise_seed=seed, trace=trace)
    return logits.float().log_softmax(-1), *counts_of(trace, idx)


@torch.no_grad()
def token_by_token(model, point, idx, seed=0):
    """The same, each token upon what the point's cache policy kept of those before it."""
    B, T = idx.shape
    kept = make_cache(model, point.loops, point.cache, point.ring, T, rows=B)
    parts = []
    with Oracle(model, point.tau) if point.rule == 'oracle' else nullcontext():
        for t in range(T):
            trace, new, span = [], idx[:, t:t + 1], Span(t, 1, idx.device)
            x, _ = model.hidden(new, point.loops, point.exit, seed, span, kept, trace=trace)
            parts.append((model.lm_head(x).float().log_softmax(-1), *counts_of(trace, new)))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


def counts_of(trace, idx):
    """What model.forward left in a trace of idx (B, T) -> steps, evals (B, T, groups)."""
    none = idx.new_zeros(*idx.shape, 0)         # a model may have no groups
    return tuple(torch.cat([none, *(entry[name][..., None] for entry in trace)], dim=-1)
                 for name in ('steps_used', 'evals'))


def log_probabilities(model, point, idx, seed=0):
    """Decoding the windows idx (B, T) at a point: see token_by_token."""
    row_by_row = point.exit is not None and point.exit.reads in ('coda', 'row')
    how = whole_windows if point.cache == 'exact' and not row_by_row else token_by_token
    return how(model, point, idx, seed)


# figures ------------------------------------------------------------------------------------------

def window_means(values):
    """Values of tokens (B, T, ...) -> their mean in each window (B, ...), a float64 array."""
    return values.cpu().double().mean(dim=1).numpy()


def cross_entropy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> nats an asked token in each window (B,), float64."""
    nats = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), reduction='none')     # 0 if not asked
    asked = (targets >= 0).float().mean(dim=1)
    return (nats.view(targets.shape).mean(dim=1) / asked).double().cpu().numpy()


def accuracy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> share of the asked tokens that are right (B,), float64."""
    right = (log_p.argmax(-1) == targets).sum(dim=1)
    return (right / (targets >= 0).sum(dim=1)).double().cpu().numpy()


@torch.no_grad()
def quality(model, points, idx, targets, n_loop, seed=0):
    """
    Every point over windows idx, targets (N, T), a batch of B windows after another.

    Adds to each point's figures, for each batch and of each window in it; the full budget is that
    of n_loop fixed loops with `exact`:

        ce, ce_full     (B,) CE of the point and of the full budget
        accuracy        (B,) share of tokens whose likeliest next token is the right one
        agreement       (B,) share of tokens whose likeliest next token is the full budget's
        kl              (B,) KL(full budget || point), nats a token
        steps, evals    (B, groups)
    """
    full_budget = Point('fixed', n_loop, [n_loop] * len(model.groups))
    batch = memory.windows_at_once(model.config, len(idx))
    for x, y in zip(idx.split(batch), targets.split(batch)):
        full, _, _ = whole_windows(model, full_budget, x, seed)             # (B, T, V)
        ce_full = cross_entropy(full, y)
        for point in points:
            log_p, steps, evals = log_probabilities(model, point, x, seed)
            point.figures.append(dict(
                ce=cross_entropy(log_p, y),
                ce_full=ce_full,
                accuracy=accuracy(log_p, y),
                agreement=window_means(log_p.argmax(-1) == full.argmax(-1)),
                kl=window_means((full.exp() * (full - log_p)).sum(-1)),
                steps=window_means(steps),
                evals=window_means(evals)))


def figures_of(point):
    """What quality has added to a point, all windows together: {name: (windows, ...)}."""
    names = point.figures[0]
    return {name: np.concatenate([part[name] for part in point.figures]) for name in names}


def interval(values, statistic=np.mean, draws=2000, seed=0):
    """95% bootstrap interval of a statistic over the first axis."""
    values = np.asarray(values)
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(values[picks], axis=1), [2.5, 97.5])
