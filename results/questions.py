"""
Where loops matter: what decoding does token by token, as rows for results/tasks/*.csv.

Not run by itself: run.py calls question_rows. Every token of a problem has a label and a depth, the
loop steps that it needs at least, so one can ask what a cache policy, a rule, or an oracle does to
the loops of each, and whether an answer is wrong because it was given too early.

    policy      (cache policy, slots of a ring)
    early       answers that the full budget has right and a point has not: somebody left too early
    evals       block maps a group and token
"""
import numpy as np
import torch

from calibrate import calibrate
from common.checkpoint import load_checkpoint
from exits import make_exit
from quality import Point, accuracy, cross_entropy, interval, log_probabilities
from results.measure import DEEPER, held_out

FULL = 30
BUDGETS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, FULL]
RULES = ['norm', 'norm_rel', 'kl', 'accel', 'accel_rel']
TAUS = [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0]
EPSILONS = [0.3, 1.0, 2.0, 4.0, 8.0]
POLICIES = [('exact', 1), ('ring', 8), ('ring', 4), ('ring', 2), ('latest', 1)]
WINDOWS = dict(policies=96, rules=96, short=128)
PROMISE = 0.005             # nats, of calibration on short problems


def third_of(depth):
    """0, 1, 2 for depths (B, T) in the lower, the middle, the upper third of those there are."""
    return np.minimum(3 * depth // (depth.max() + 1), 2)


def point_row(model, point, idx, targets, depth, full):
    """Decode idx (B, T) at a point -> a row. full: log-probabilities (B, T, V), of the budget."""
    log_p, steps, evals = log_probabilities(model, point, idx)
    gap = cross_entropy(log_p, targets) - cross_entropy(full, targets)
    low, high = interval(gap)
    row = dict(cache=point.cache, slots=point.ring if point.cache == 'ring' else '',
               rule=point.rule, past=point.past, tau=point.tau, gap=gap.mean(), gap_low=low,
               gap_high=high, accuracy=accuracy(log_p, targets).mean(),
               evals=evals.double().mean().item())
    return row | of_depth(steps, depth, targets) | early(log_p, full, targets, depth)


def of_depth(steps, depth, targets):
    """
    How steps (B, T, groups) go with depth (B, T): their correlation over the asked tokens, 0 where
    all tokens take as many steps.
    """
    asked = (targets >= 0).numpy()
    used = steps.double().mean(-1).numpy()[asked]
    return dict(with_depth=np.corrcoef(used, depth[asked])[0, 1] if used.std() else 0.0)


def early(log_p, full, targets, depth):
    """Of all labels, the share that the full budget has right and this has not, by third."""
    lost = ((full.argmax(-1) == targets) & (log_p.argmax(-1) != targets)).numpy()
    asked, third = (targets >= 0).numpy(), third_of(depth)
    return dict(early=lost[asked].mean()) | {
        f'early_{i}': lost[asked & (third == i)].mean() for i in range(3)}


def fixed(model, n, policy=('exact', 1)):
    return Point('fixed', n, [n] * len(model.groups), None, *policy)


def answer_row(model, idx, targets, depth, full):
    """The oracle of the answer: from which fixed budget on a token says what the full one says."""
    needed = torch.ones_like(idx)                                               # (B, T)
    for n in range(1, FULL):
        log_p, _, _ = log_probabilities(model, fixed(model, n), idx)
        needed[log_p.argmax(-1) != full.argmax(-1)] = n + 1
    return dict(cache='exact', slots='', rule='answer', past=False, tau='', gap='', gap_low='',
                gap_high='', accuracy=accuracy(full, targets).mean(),
                evals=needed[targets >= 0].double().mean().item(), early=0.0, early_0=0.0,
                early_1=0.0, early_2=0.0, **of_depth(needed[..., None], depth, targets))


def point_rows(model, dataset):
    """Q4 to Q7: every policy at every budget, every rule by own signals and waiting, oracles."""
    T, groups = model.config.block_size, [FULL] * len(model.groups)
    idx, targets, depth = held_out(dataset, T, WINDOWS['policies'])
    full, _, _ = log_probabilities(model, fixed(model, FULL), idx)
    for policy in POLICIES:
        points = [fixed(model, n, policy) for n in BUDGETS]
        points += [Point('norm_rel', tau, groups, make_exit('norm_rel', tau, past=True), *policy)
                   for tau in TAUS if 1e-3 <= tau <= 3.0]
        for point in points:
            yield dict(part='policies') | point_row(model, point, idx, targets, depth, full)

    idx, targets, depth = held_out(dataset, T, WINDOWS['rules'])
    full, _, _ = log_probabilities(model, fixed(model, FULL), idx)
    points = [fixed(model, n) for n in BUDGETS]
    points += [Point(name, tau, groups, make_exit(name, tau, past=past))
               for name in RULES for past in (False, True) for tau in TAUS]
    points += [Point('oracle', epsilon, groups) for epsilon in EPSILONS]
    for point in points:
        yield dict(part='rules') | point_row(model, point, idx, targets, depth, full)
    yield dict(part='rules') | answer_row(model, idx, targets, depth, full)


def short_rows(model, dataset):
    """Q8: thresholds that keep a promise on shallower problems, and what they cost on others."""
    T, n = model.config.block_size, WINDOWS['short']
    idx, targets, depth = held_out(dataset, T, n)
    order = np.argsort(depth.max(axis=1), kind='stable')
    short, deep = order[:n // 2], order[n // 2:]
    pairs = dict(held=(idx[deep], targets[deep]))
    if dataset in DEEPER:
        pairs['deeper'] = held_out(DEEPER[dataset], T, n // 2)[:2]
    for name, (deep_idx, deep_targets) in pairs.items():
        # calibrate finds with the even windows and checks with the odd ones
        both = [torch.stack(pair, dim=1).flatten(0, 1) for pair in
                ((idx[short], deep_idx), (targets[short], deep_targets))]
        kinds = [(cache, rule, past) for rule in ('norm_rel', 'kl', 'accel')
                 for cache, past in (('exact', False), ('exact', True), ('latest', True))]

        def point(kind, tau):
            cache, rule, past = kind
            return Point(rule, tau, [FULL] * len(model.groups), make_exit(rule, tau, past=past),
                         cache)
        for row in calibrate(model, point, kinds, *both, PROMISE, FULL):
            blank = dict.fromkeys(('upper', 'cost', 'cost_low', 'cost_high', 'evals', 'kept'), '')
            yield dict(where=name) | blank | row


def question_rows(folder):
    """A run of a task -> {name of a CSV: rows}."""
    model, checkpoint = load_checkpoint(f'{folder}/ckpt.pt')
    dataset = checkpoint['config']['dataset']
    return dict(points=list(point_rows(model, dataset)), short=list(short_rows(model, dataset)))
