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
import json
import math
import os
import random
from collections import Counter, defaultdict
from heapq import heappop, heappush
from itertools import product

import numpy as np
import torch

import bench
import data
import geometry
from bench import make_point
from common import plots
from common.configurator import configure, pick_device, run
from common.files import write_csv
from decode import use_one_thread
from results import runs
from results.runs import head, line, spread

# ------------------------------------------------------------------------------------------------
out_dir: str | None = None
n_windows = 64              # half of them choose
n_along = 32                # windows along training
taus = [30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4]
refine = 3                  # more thresholds, between the last that is good enough and the next
rounds = 16                 # of timing; each has a window of its own
timed_tokens = 8            # in each round, after half a window
device = 'cpu'
# ------------------------------------------------------------------------------------------------

FULL, SAME = 30, 0.005
RULES = 'norm', 'norm_rel', 'kl', 'accel', 'accel_rel'
LEAST = 12                  # blocks of three loops in the four layers of the groups
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


# tables -----------------------------------------------------------------------------------------

WAYS = 'one budget', 'budgets', *RULES, 'the best rule'
CHOOSING, SCORING = slice(0, None, 2), slice(1, None, 2)


class Chosen:
    """What the rows of a run say: the mixture of each way, and its cost on other windows."""

    def __init__(self, rows, times):
        windows, ms = defaultdict(list), defaultdict(list)
        for row in rows:
            windows[row['cache'], row['way'], str(row['value'])].append((row['gap'], row['blocks']))
        candidates = []
        for (cache, way, value), costs in windows.items():
            gap, blocks = np.array(costs).T                                     # (windows,)
            candidates.append(dict(cache=cache, way=way, value=json.loads(value), gap=gap,
                                   blocks=blocks, high=bench.interval(gap[CHOOSING])[1]))
        self.tried = Counter((one['cache'], one['way'] == 'fixed') for one in candidates)
        self.of = ways_of(candidates, CHOOSING)
        for row in times:
            ms[row['cache'], row['way'], str(row['value'])].append(row['ms'])
        self.ms = {key: np.median(values) for key, values in ms.items()}

    def costs(self, *key):
        """gap and blocks of each scoring window."""
        return (mixed(self.of[key], name)[SCORING] for name in ('gap', 'blocks'))

    def time(self, cache, way):
        """ms a token."""
        if 'again' in way:
            return self.ms[cache, 'again', '']
        good, other, share = self.of[cache, way]
        good, other = (self.ms[cache, one['way'], str(one['value'])] for one in (good, other))
        return (1 - share) * good + share * other

    def over(self, a, b):
        """Blocks of a way over those of another, and the ends of the interval over windows."""
        pairs = np.stack([list(self.costs(*key))[1] for key in (a, b)], axis=1)
        return runs.ratio(pairs), *bench.interval(pairs, runs.ratio)


def all_chosen():
    """{model: {seed: Chosen}} of the rows that have been gathered."""
    times = runs.load('reading/times.csv')
    return {name: {seed: Chosen(rows, times[name][seed]) for seed, rows in of.items()}
            for name, of in runs.load('reading/windows.csv.xz').items()}


def costs_table(models):
    """Blocks of each way on the scoring windows, and its time over that of the first line."""
    first = 'exact', WAYS[0]
    yield from head('cache', 'way', *models)
    for cache, way in [*product(('exact', 'latest'), WAYS), ('exact', 'the first line again')]:
        cells = []
        for of in models.values():
            good = [one for one in of.values() if one.of.get((cache, way))]
            cells.append(spread([list(one.costs(cache, way))[1].mean() for one in good], 1) if good
                         else '' if 'again' in way else '–')
            cells[-1] += f', good in {len(good)} of {len(of)} seeds' * (0 < len(good) < len(of))
            if way not in RULES and (cache, way) != first:
                over = [one.time(cache, way) / one.time(*first) for one in good or of.values()]
                cells[-1] += f'; time {spread(over)}'
        yield line(cache, way, *cells)


def gaps_table(models):
    """Nats above 30 loops on the scoring windows, and in how many seeds the promise was kept."""
    yield from head('cache', 'way', *models)
    for cache, way in product(('exact', 'latest'), WAYS):
        gaps = [[next(one.costs(cache, way)).mean() for one in of.values() if one.of[cache, way]]
                for of in models.values()]
        yield line(cache, way, *(
            f'{np.mean(some):+.4f}, {sum(gap <= SAME for gap in some)} of {len(some)}' if some
            else '–' for some in gaps))


def questions(models):
    """The best rule over budgets: in blocks, and in time; of each seed."""
    yield from head('the best rule over budgets', *models)
    for cache in ('exact', 'latest'):
        keys = [(cache, way) for way in ('the best rule', 'budgets')]
        cells, times = [], []
        for of in models.values():
            found = [one.over(*keys) for one in of.values()]
            less, more = sum(high < 1 for *_, high in found), sum(low > 1 for _, low, _ in found)
            cells.append(f'{spread([over for over, *_ in found])}; fewer in {less}, more in {more} '
                         f'of {len(of)}')
            times.append(spread([one.time(*keys[0]) / one.time(*keys[1]) for one in of.values()]))
        yield line(f'`{cache}`, blocks', *cells)
        yield line(f'`{cache}`, time', *times)


# does the cosine explain what the acceleration costs? ---------------------------------------------

def along_points(floor):
    """
    {run: (checkpoints, 3)}: the mean settled cosine of the groups, and the blocks of Algorithm 1,
    and of it with the step kept, over those of the step norm.

    floor: leave out the checkpoints at which the step norm takes fewer than three loops, as
    Algorithm 1 cannot take fewer.
    """
    found = {}
    for name, of in runs.load('reading/along.csv').items():
        for seed, rows in of.items():
            points = [[np.mean([value for key, value in row.items() if key.startswith('cos_')
                                and value != '']), row['accel'] / row['norm'],
                       row['accel, step kept'] / row['norm']]
                      for row in rows if '' not in (row['accel'], row['norm'])
                      and (row['norm'] >= LEAST or not floor)]
            found[name, seed] = np.array(points).reshape(-1, 3)
    return found


def fit(points, draws=2000):
    """
    A line through points (n, 2) of each run: its slope, its value at a cosine of 0.6, and the share
    of the variance that it explains; each with the ends of its interval over runs, (3, 3).
    """
    def line_of(parts):
        x, y = np.concatenate(parts).T
        slope, offset = np.polyfit(x, y, 1)
        return slope, offset + 0.6 * slope, np.corrcoef(x, y)[0, 1] ** 2
    rng = np.random.default_rng(0)
    drawn = [line_of([points[i] for i in rng.integers(len(points), size=len(points))])
             for _ in range(draws)]
    return np.array([line_of(points), *np.percentile(drawn, [2.5, 97.5], axis=0)]).T


def along_table():
    """The lines, over all runs."""
    yield from head('blocks over those of the step norm', 'checkpoints', 'checkpoints, runs',
                    'slope with the cosine', 'at a cosine of 0.6', 'variance explained')
    for floor, (i, words) in product((False, True), enumerate(('Algorithm 1', 'step kept'), 1)):
        found = [some[:, [0, i]] for some in along_points(floor).values() if len(some)]
        cells = ['–'] * 3
        if len(found) > 1:
            cells = [f'{value:.2f} ({low:.2f} to {high:.2f})' for value, low, high in fit(found)]
        yield line(words, 'the norm takes 3 loops or more' if floor else 'all',
                   f'{sum(map(len, found))}, {len(found)}', *cells)


def figures():
    """The ratios against the settled cosine, a dot for each checkpoint."""
    found = along_points(False)
    if len(found) < 2:
        return
    figure, [axes] = plots.panels(2, 4, 3.2, sharey=True)
    above = along_points(True)
    for i, (ax, words) in enumerate(zip(axes, ('Algorithm 1', 'Algorithm 1, step kept')), 1):
        for name, marker, colour in zip(dict.fromkeys(name for name, _ in found), 'o^s',
                                        plots.COLOURS):
            for points, how in (found, dict(mfc='none')), (above, dict(label=name)):
                some = np.concatenate([value for key, value in points.items() if key[0] == name])
                ax.plot(some[:, 0], some[:, i], marker, color=colour, ms=5, alpha=0.7, **how)
        slope, at, _ = fit([some[:, [0, i]] for some in above.values() if len(some)])[:, 0]
        x = np.array([-0.6, 1])
        ax.plot(x, at + slope * (x - 0.6), color='0.4', lw=1, label='line through the filled ones')
        ax.plot([], [], 'o', color='0.5', mfc='none', ms=5, label='hollow: norm below 3 loops')
        ax.axhline(1, color='0.8', lw=1, zorder=0)
        ax.axvspan(0.5, 0.65, color='0.93', zorder=0, label="the paper's cosines")
        ax.set(title=words, xlabel='settled cosine, mean over groups')
    axes[0].set_ylabel('blocks over those of the step norm')
    axes[1].legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
    figure.tight_layout()
    plots.save(figure, os.path.join(runs.ASSETS, 'along.png'))


def tables():
    """{(page, block): its Markdown}."""
    models = all_chosen()
    made = dict(costs=costs_table(models), gaps=gaps_table(models), questions=questions(models),
                along=along_table())
    return {('reading.md', block): '\n'.join(lines) for block, lines in made.items()}


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
    models.pop(0, None)
    if len(models) > 1:
        _, idx, targets, _ = data.held_out(last, n_along, dev=dev)
        write_csv(list(along_rows(models, idx, targets)), os.path.join(out_dir, 'along.csv'))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
