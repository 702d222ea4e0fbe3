"""
Loop budgets against exit rules on text that the model reads, with the same chances.

    python -m results.reading --out_dir=OUT     OUT/reading.csv, times.csv and along.csv;
                                                results.run does it for each run

A rule has a threshold; a budget has a number of loops for each group. Every kind of decoding tries
as many candidates as the five rules do together, and may flip a coin between two of them in each
window. On half of the windows the cheapest mixture is chosen that costs at most SAME nats a token
above 30 loops, by the upper end of its interval; the other half says what it costs.

    candidate   a way with one value, and what it costs in each window: gap (nats above 30 loops
                under `exact`) and blocks (layers evaluated in the groups, a token), (windows,) each
    along       the same for Algorithm 1 and the step norm, at every checkpoint of the run
"""
import math
import os
import random
from heapq import heappop, heappush

import numpy as np
import torch

import bench
import data
import geometry
from bench import make_point
from common.configurator import configure, pick_device, run
from common.files import write_csv
from decode import use_one_thread

# ------------------------------------------------------------------------------------------------
out_dir: str | None = None
n_windows = 64              # half of them choose
n_along = 48                # windows along training
taus = [30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4]
refine = 3                  # more thresholds, between the last that is good enough and the next
rounds = 16                 # of timing; each has a window of its own
timed_tokens = 8            # in each round, after half a window
device = 'cpu'
# ------------------------------------------------------------------------------------------------

FULL, SAME = 30, 0.005
RULES = 'norm', 'norm_rel', 'kl', 'accel', 'accel_rel'
ALONG = {'norm': {}, 'accel': {}, 'accel, step kept': dict(keep=True)}


# candidates -------------------------------------------------------------------------------------

class Reading:
    """Windows idx, targets (N, T) of a model, decoded in many ways; some of them choose."""

    def __init__(self, model, idx, targets, choosing):
        self.model, self.idx, self.targets, self.choosing = model, idx, targets, choosing
        self.layers = torch.tensor([len(group) for group in model.config.groups]).double()
        self.full = self.losses(make_point(model, FULL, 'fixed'))[0]

    def losses(self, point):
        """The loss of each window, and its blocks a token, (N,) each."""
        log_p, _, evals = bench.log_probabilities(self.model, point, self.idx)
        blocks = (evals.double().mean(dim=1).cpu() * self.layers).sum(dim=1).numpy()
        return bench.cross_entropy(log_p, self.targets), blocks

    def candidate(self, value, rule='fixed', cache='exact', name='', **how):
        point = make_point(self.model, value, rule, cache, cache != 'exact', FULL, **how)
        loss, blocks = self.losses(point)
        gap = np.round(loss - self.full, 5)         # as the CSV has it
        return dict(cache=cache, way=name or rule, value=value, gap=gap,
                    blocks=np.round(blocks, 3), high=bench.interval(gap[self.choosing])[1])

    def thresholds(self, rule, cache='exact', **how):
        """Thresholds from large to small until two are good; then some around the largest good."""
        found = {}
        for tau in taus:
            found[tau] = self.candidate(tau, rule, cache, **how)
            if sum(one['high'] <= SAME for one in found.values()) == 2:
                break
        for _ in range(refine):
            good = max((tau for tau, one in found.items() if one['high'] <= SAME), default=0)
            beyond = min((tau for tau in found if tau > good), default=0)
            if not good or not beyond:
                break
            tau = float(f'{math.sqrt(good * beyond):.3g}')
            found[tau] = self.candidate(tau, rule, cache, **how)
        return list(found.values())

    def budgets(self, most, cache):
        """
        Loops for each group, `most` of them: equal ones until two are good, then always those that
        differ by one loop in one group from the cheapest good one.
        """
        found, queue = {}, []

        def add(counts):
            if counts not in found and 1 <= min(counts) and max(counts) <= FULL:
                found[counts] = one = self.candidate(list(counts), cache=cache)
                if one['high'] <= SAME:
                    heappush(queue, (one['blocks'][self.choosing].mean(), counts))
        n = 0
        while len(queue) < 2 and n < FULL:
            n += 1
            add((n,) * len(self.layers))
        while queue and len(found) < most:
            _, counts = heappop(queue)
            for g in range(len(counts)):
                for more in (-1, 1):
                    add(tuple(n + more * (i == g) for i, n in enumerate(counts)))
        return list(found.values())


def cheapest(candidates, part, flip=True):
    """
    The mixture with the fewest blocks on the choosing windows `part`, (good, other, share): `share`
    of the windows are decoded as the other. None if no candidate is good.

    The upper end of a mixture's gap lies at most on the line between both.
    """
    best = None
    for good in candidates:
        if good['high'] > SAME:
            continue
        for other in candidates if flip else [good]:
            share = 0.0
            if other['high'] > SAME:
                share = (SAME - good['high']) / (other['high'] - good['high'])
            blocks = mixed((good, other, share), 'blocks')[part].mean()
            if best is None or blocks < best[0]:
                best = blocks, (good, other, share)
    return best and best[1]


def mixed(mixture, key):
    """gap or blocks of each window, expected over the coin, (windows,)."""
    good, other, share = mixture
    return (1 - share) * good[key] + share * other[key]


def is_equal(candidate):
    """Is this a budget with as many loops in all groups?"""
    return candidate['way'] == 'fixed' and len({*candidate['value']}) == 1


def ways_of(candidates, part):
    """{(cache, way): the cheapest mixture}: an equal budget, budgets, each rule, any rule."""
    chosen = {}
    for cache in ('exact', 'latest'):
        mine = [one for one in candidates if one['cache'] == cache]
        rules = [one for one in mine if one['way'] != 'fixed']
        budgets = [one for one in mine if one['way'] == 'fixed']
        chosen[cache, 'one budget'] = cheapest(filter(is_equal, budgets), part, flip=False)
        chosen[cache, 'budgets'] = cheapest(budgets, part)
        for rule in RULES:
            chosen[cache, rule] = cheapest([one for one in rules if one['way'] == rule], part)
        chosen[cache, 'the best rule'] = cheapest(rules, part)
    return chosen


# time -------------------------------------------------------------------------------------------

def time_rows(model, idx, chosen):
    """
    ms a token of the parts of the chosen mixtures, in turn, in another order each round; and of
    one budget again.
    """
    points = {}
    for (cache, way), mixture in chosen.items():
        for one in mixture[:2] if mixture and way not in RULES else ():
            points[cache, one['way'], str(one['value'])] = make_point(
                model, one['value'], one['way'], cache, cache != 'exact', FULL)
    one_budget = chosen['exact', 'one budget']
    points['exact', 'again', ''] = make_point(model, one_budget[0]['value'], 'fixed')
    start, order = idx.shape[1] // 2, list(points)
    for i in range(-1, rounds):         # the first round only warms up
        random.Random(i).shuffle(order)
        window = idx[i % len(idx)][None, :start + timed_tokens]
        for key in order:
            ms = np.mean(bench.decode_window(model, points[key], window, start))
            if i >= 0:
                yield dict(zip(('cache', 'way', 'value'), key)) | dict(round=i, ms=f'{ms:.4f}')


# along training ---------------------------------------------------------------------------------

def along_rows(models, idx, targets):
    """
    At every checkpoint: the settled cosine of each group, and the fewest blocks of Algorithm 1 and
    of the step norm at equal quality, chosen and counted on the same windows.
    """
    for iteration, model in models.items():
        reading = Reading(model, idx, targets, slice(None))
        row = dict(iteration=iteration, loss=f'{reading.full.mean():.4f}')
        for g, curves in enumerate(geometry.measure(model, idx[::2], FULL)):
            row[f'cos_{g}'] = f"{np.nanmean(curves['settled']):.4f}"
        for name, how in ALONG.items():
            found = reading.thresholds(name.split(',')[0], name=name, **how)
            best = cheapest(found, slice(None))
            row[name] = f"{mixed(best, 'blocks').mean():.3f}" if best else ''
        yield row


# a run ------------------------------------------------------------------------------------------

def main():
    dev, _ = pick_device(device, 'float32')
    models, last = geometry.load_run(out_dir, dev)
    model = models[max(models)]
    use_one_thread(model)
    _, idx, targets, _ = data.held_out(last, n_windows, dev=dev)                # (n_windows, T)
    reading = Reading(model, idx, targets, slice(0, None, 2))
    candidates = []
    for cache in ('exact', 'latest'):
        rules = [one for rule in RULES for one in reading.thresholds(rule, cache)]
        candidates += rules + reading.budgets(len(rules), cache)
    chosen = ways_of(candidates, reading.choosing)
    write_csv([dict(cache=one['cache'], way=one['way'], value=str(one['value']), window=i,
                    gap=f'{gap:.5f}', blocks=f'{blocks:.3f}')
               for one in candidates for i, (gap, blocks) in enumerate(zip(one['gap'],
                                                                           one['blocks']))],
              os.path.join(out_dir, 'reading.csv'))
    write_csv(list(time_rows(model, idx, chosen)), os.path.join(out_dir, 'times.csv'))
    for (cache, way), mixture in chosen.items():
        if mixture:
            print(cache, way, mixture[0]['value'], mixture[1]['value'], f'{mixture[2]:.2f}',
                  f"{mixed(mixture, 'blocks')[1::2].mean():.2f}", flush=True)
    _, idx, targets, _ = data.held_out(last, n_along, dev=dev)
    models.pop(0, None)
    write_csv(list(along_rows(models, idx, targets)), os.path.join(out_dir, 'along.csv'))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
