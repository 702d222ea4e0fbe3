"""
What bench.py measures: methods, points, and the row of a point in bench.csv.

A point is a method of one model, with what was measured of it on windows and on prompts. `row_of`
makes its row, and says what each column means.
"""
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch


class Kind(StrEnum):
    """The column `kind`: what a way to decode is."""
    PLAIN = 'no loops'          # the model has no groups
    FIXED = 'fixed loops'
    RULE = 'exit rules'
    DRAFTS = 'drafts'
    WAVE = 'waves'


@dataclass(frozen=True)
class Method:
    """
    A way to decode. To add one, name its kind above, say below what it is called, and make its
    methods in methods_of of bench.py.
    """
    kind: Kind
    n_loop: int                         # the loop budget of each group
    policy: str                         # of the cache
    rule: Any = None                    # an exits.Exit: of exit rules and waves
    draft_loops: int | None = None      # of drafts: few loops that write some tokens ...
    draft_tokens: int | None = None     # ... and how many, before n_loop loops check them
    wave: int | None = None             # of a wave: its tokens ...
    wave_steps: int | None = None       # ... and the loop steps of a pass

    @property
    def family(self):
        """What methods share that differ only in their threshold or number of fixed loops."""
        if self.kind is Kind.FIXED:
            return f'fixed loops, {self.policy}'
        if self.kind is Kind.RULE:
            return f'{self.rule.name}, {self.policy}' + (', wake' if self.rule.wake else '')
        if self.kind is Kind.WAVE:
            return f'wave of {self.wave}, {self.wave_steps} loops a pass, {self.rule.name}'
        return str(self.kind)

    @property
    def label(self):
        """The method in words."""
        if self.kind is Kind.FIXED:
            return f'fixed {self.n_loop}, {self.policy}'
        if self.kind is Kind.DRAFTS:
            return (f'{self.draft_tokens} drafted by {self.draft_loops} loops, checked by '
                    f'{self.n_loop}')
        if self.rule:
            return f'{self.family}, tau {self.rule.tau:g}'
        return self.family

    def arguments(self):
        """Those of GPT.stream, a dict."""
        arguments = dict(n_loop=self.n_loop, cache=self.policy, exit=self.rule)
        if self.kind is Kind.DRAFTS:
            arguments |= dict(draft_loops=self.draft_loops, draft_tokens=self.draft_tokens)
        if self.kind is Kind.WAVE:
            arguments |= dict(wave=self.wave, wave_steps=self.wave_steps)
        return arguments


class WindowResult(NamedTuple):
    """What is measured of a point on one window."""
    nats: float                 # the sum over its labels
    right: float                # how many of its labels are right
    labels: float               # how many there are
    evals: np.ndarray           # (groups,) block maps computed for a token, on average
    most_evals: int | None      # the most for one of its tokens; None = nothing loops
    last_step: int | None       # the last loop step that one of them keeps


class PromptResult(NamedTuple):
    """What is measured of a point on the text after one prompt; on a task, on one problem."""
    ms: float                           # milliseconds per token
    passes: float | None = None         # of the model, for a new token; None = a problem
    blocks: float | None = None         # layers computed in the groups for a new token
    text: torch.Tensor | None = None    # the new tokens (1, new)


@dataclass(eq=False)
class Point:
    """A method of one model, and what has been measured of it so far."""
    run: str                        # the folder of the model
    model: torch.nn.Module
    method: Method
    reference: 'Point | None' = None    # the full budget of this model; None = this point itself
    windows: list = field(default_factory=list)     # a WindowResult for each
    prompts: list = field(default_factory=list)     # a PromptResult for each

    def __post_init__(self):
        self.reference = self.reference or self


# the row of a point -------------------------------------------------------------------------------

def row_of(point, deepest=None, seed=0):
    """
    A point -> its row of bench.csv, {column: value}; None, an empty cell: not measured.

    Columns that end in _low and _high are the ends of a 95% interval, bootstrapped over the windows
    or prompts with this seed. deepest: the column.
    """
    method = point.method
    rule = method.rule
    windows = point.windows
    prompts = point.prompts
    ce = per_label(point, 'nats')
    ce_minus_full, diff_low, diff_high = excess(point, seed)
    mean_evals, evals_of_groups = mean_block_maps(point)
    ms = column(prompts, 'ms')
    ms_low, ms_high = interval(ms, medians, seed)
    return dict(
        # the method
        run=point.run,                  # the folder of the model
        name=method.label,
        family=method.family,
        kind=method.kind,
        cache=method.policy,
        n_loop=method.n_loop,
        rule=rule.name if rule else None,
        tau=rule.tau if rule else None,
        wake=rule.wake if rule else None,
        draft_loops=method.draft_loops,
        draft_tokens=method.draft_tokens,
        wave=method.wave,
        wave_steps=method.wave_steps,

        # quality
        windows=len(windows) or None,
        deepest=deepest if windows else None,       # of a problem: the depth of its deepest label
        ce=ce,                                      # nats per token that has a label
        ppl=np.exp(ce) if windows else None,
        ce_minus_full=ce_minus_full,                # ce above that of the full budget
        diff_low=diff_low,
        diff_high=diff_high,
        accuracy=per_label(point, 'right'),         # the share of labels that are right, 0 to 1
        mean_evals=mean_evals,                      # block maps (loop steps) computed for a token
        most_evals=mean(windows, 'most_evals'),     # of a window: the most for one token ...
        last_step=mean(windows, 'last_step'),       # ... and the last that a token keeps
        **evals_of_groups,                          # evals_GROUP: mean_evals of a group

        # time
        prompts=len(prompts) or None,
        identical=identical(point),                 # the share of texts of the full budget, 0 to 1
        passes=mean(prompts, 'passes'),             # of the model, for a new token
        blocks=mean(prompts, 'blocks'),             # layers computed in the groups, for a new token
        # milliseconds, the median over the prompts; on a task for reading a problem. Reading a
        # prompt is not timed, but if the text outgrows block_size, reading the moved window is
        ms_per_token=np.median(ms) if prompts else None,
        ms_low=ms_low,
        ms_high=ms_high)


def column(results, name):
    """One field of a list of WindowResult or PromptResult -> an array."""
    return np.array([getattr(result, name) for result in results])


def mean(results, name):
    """The mean of a field; None if it was not measured."""
    if not results or getattr(results[0], name) is None:
        return None
    return column(results, name).mean()


def mean_block_maps(point):
    """The block maps that were computed for a token: of all groups, and {evals_GROUP: of each}."""
    names = ['evals_' + '-'.join(map(str, layers)) for layers in point.model.config.groups]
    if not names or not point.windows:
        return None, dict.fromkeys(names)
    evals = column(point.windows, 'evals').mean(axis=0)                         # (groups,)
    return evals.mean(), dict(zip(names, evals))


def per_label(point, name):
    """A sum over windows, such as nats, divided by the number of their labels."""
    if not point.windows:
        return None
    return column(point.windows, name).sum() / column(point.windows, 'labels').sum()


def excess(point, seed=0):
    """
    The nats per label that a point costs more than its reference: the mean, and the ends of its 95%
    interval. The reference may have been measured on more windows, and only those of both count.
    """
    if not point.windows:
        return None, None, None
    labels = column(point.windows, 'labels')
    of_reference = column(point.reference.windows, 'nats')[:len(labels)]
    difference = column(point.windows, 'nats') - of_reference
    low, high = interval(np.stack((difference, labels), axis=1), ratios_of_sums, seed)
    return difference.sum() / labels.sum(), low, high


def identical(point):
    """
    The share of prompts that a point continues as its reference does; None on a task. The reference
    may have been given more prompts, and only those of both count.
    """
    if not point.prompts or point.prompts[0].text is None:
        return None
    pairs = zip(point.prompts, point.reference.prompts)
    return float(np.mean([torch.equal(own.text, other.text) for own, other in pairs]))


def interval(values, statistic, seed, draws=2000):
    """
    The ends of the 95% bootstrap interval of a statistic of values (N, ...); None, None for fewer
    than two values. statistic: (draws, N, ...) -> (draws,).
    """
    if len(values) < 2:
        return None, None
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(values[picks]), [2.5, 97.5])


def medians(values):
    """(draws, N) -> (draws,)."""
    return np.median(values, axis=1)


def ratios_of_sums(pairs):
    """(draws, N, 2) -> (draws,): the sum of the first column over that of the second."""
    sums = pairs.sum(axis=1)
    return sums[:, 0] / sums[:, 1]
