"""
Where loops matter: what decoding does token by token, as rows for results/tasks/*.csv.

Not run by itself: measure.py calls point_rows and short_rows. Every token of a problem has a label
and a depth, the fewest loop steps that it needs, so one can ask what a cache policy, a rule or an
oracle does to the loops of each token, and whether an answer is wrong because the token exited too
early.

    policy      (cache policy, slots of a ring)
    early       answers that the full budget gets right and a point gets wrong
    evals       block maps a group and token
"""
from functools import partial

import numpy as np
import torch

from bench import cross_entropy, find_thresholds, interval, log_probabilities, make_point

FULL = 30
BUDGETS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, FULL]
RULES = ['norm', 'norm_rel', 'kl', 'accel', 'accel_rel']
TAUS = [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0]
EPSILONS = [0.3, 1.0, 2.0, 4.0, 8.0]
POLICIES = [('exact', 1), ('ring', 8), ('ring', 4), ('ring', 2), ('latest', 1)]
PROMISE = 0.005             # nats, of calibration on short problems


def third_of(depth):
    """0, 1, 2 for depths (B, T) in the lower, the middle, the upper third of their range."""
    return np.minimum(3 * depth // (depth.max() + 1), 2)


def point_row(model, point, idx, targets, depth, full):
    """Decode idx (B, T) at a point -> a row. full: log-probabilities (B, T, V), full budget."""
    log_p, steps, evals = log_probabilities(model, point, idx)
    gap = cross_entropy(log_p, targets) - cross_entropy(full, targets)
    low, high = interval(gap)
    row = dict(cache=point.cache, slots=point.ring if point.cache == 'ring' else '',
               rule=point.rule, past=point.past, tau=point.tau, gap=gap.mean(), gap_low=low,
               gap_high=high, evals=evals.double().mean().item(),
               with_depth=with_depth(steps, depth, targets))
    return row | early(log_p, full, targets, depth)


def with_depth(steps, depth, targets):
    """
    The correlation of steps (B, T, groups) and depth (B, T) over the tokens that have a label, 0
    if all take equally many steps.
    """
    asked = (targets >= 0).numpy(force=True)
    used = steps.double().mean(-1).numpy(force=True)[asked]
    return np.corrcoef(used, depth[asked])[0, 1] if used.std() else 0.0


def early(log_p, full, targets, depth):
    """The share of labels that the full budget gets right and log_p wrong, also by third."""
    lost = (full.argmax(-1) == targets) & (log_p.argmax(-1) != targets)
    lost, asked = lost.numpy(force=True), (targets >= 0).numpy(force=True)
    third = third_of(depth)
    return dict(early=lost[asked].mean()) | {
        f'early_{i}': lost[asked & (third == i)].mean() for i in range(3)}


def answer_row(model, idx, targets, depth, full):
    """The oracle of the answer: the fixed budget from which on a token agrees with the full one."""
    make = partial(make_point, model, n_loop=FULL)
    needed = torch.ones_like(idx)                                               # (B, T)
    for n in range(1, FULL):
        log_p, _, _ = log_probabilities(model, make(n, 'fixed'), idx)
        needed[log_p.argmax(-1) != full.argmax(-1)] = n + 1
    return dict(part='rules', rule='answer', evals=needed[targets >= 0].double().mean().item(),
                with_depth=with_depth(needed[..., None], depth, targets))


def point_rows(model, idx, targets, depth):
    """Q4 to Q7: every policy at every budget, every rule with and without waiting, oracles."""
    make = partial(make_point, model, n_loop=FULL)
    full, _, _ = log_probabilities(model, make(FULL, 'fixed'), idx)
    points = []
    for policy, ring in POLICIES:
        points += [('policies', make(n, 'fixed', policy, ring=ring)) for n in BUDGETS]
        points += [('policies', make(tau, 'norm_rel', policy, True, ring=ring))
                   for tau in TAUS if tau >= 1e-3]
    points += [('rules', make(n, 'fixed')) for n in BUDGETS]
    points += [('rules', make(tau, name, past=past))
               for name in RULES for past in (False, True) for tau in TAUS]
    points += [('rules', make(epsilon, 'oracle')) for epsilon in EPSILONS]
    for part, point in points:
        yield dict(part=part) | point_row(model, point, idx, targets, depth, full)
    yield answer_row(model, idx, targets, depth, full)


def short_rows(model, idx, targets, depth):
    """
    Q8: thresholds that cost at most PROMISE on the shallower half of the windows, and their cost
    on the other half.
    """
    order = np.argsort(depth.max(axis=1), kind='stable')
    # find_thresholds chooses on the even windows and measures on the odd ones
    turns = order.reshape(2, -1).T.flatten()
    kinds = [(rule, cache, past) for rule in ('norm_rel', 'kl', 'accel')
             for cache, past in (('exact', False), ('exact', True), ('latest', True))]
    yield from find_thresholds(model, partial(make_point, model, n_loop=FULL), kinds, idx[turns],
                               targets[turns], PROMISE, FULL)
