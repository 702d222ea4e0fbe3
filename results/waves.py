"""
The tables of the questions that only problems with depth can answer (Q4 to Q8), and what to use.

Not run by itself: table.py puts them behind the claims. The rows are questions.py's and bench.py's.

    way         (cache policy, rule, 'True' if it waits for the past, tau)
    early       answers lost because somebody left too early: the full budget has them right
"""
import numpy as np

from results.claims import RULES, SAME, least, ratio_in_words
from results.rows import column, distinct, lines, mean_std, pick

MODELS = ('calc', 'calc groups', 'hop', 'hop groups')
POLICIES = {('exact', ''): 'exact', ('ring', 8.0): 'ring of 8', ('ring', 4.0): 'ring of 4',
            ('ring', 2.0): 'ring of 2', ('latest', ''): 'latest'}


def per_seed(t, variant, cost, **where):
    """The least cost within SAME of the full budget, see claims.least: one value a seed."""
    values = []
    for seed in distinct(pick(t['points'], variant=variant), 'seed'):
        rows = pick(t['points'], variant=variant, seed=seed, **where)
        rows.sort(key=lambda row: row['tau'], reverse=where['rule'] == 'fixed')
        values.append(least(rows, cost, 'gap_high', whole=where['rule'] == 'fixed'))
    return values


def q4(t):
    """Loops that a token needs under each policy."""
    yield lines('Q4: block maps a group', *(f'{name}, {how}' for name in POLICIES.values()
                                            for how in ('fixed', '`norm_rel`')))
    yield '|---' * (1 + 2 * len(POLICIES)) + '|'
    for model in MODELS:
        cells = []
        for cache, slots in POLICIES:
            for rule in ('fixed', 'norm_rel'):
                cells.append(ratio_in_words(per_seed(t, model, 'evals', part='policies',
                                                     cache=cache, slots=slots, rule=rule)))
        yield lines(model, *cells)


def by_rule(t, model, rule, past, cost='evals'):
    return np.array(per_seed(t, model, cost, part='rules', rule=rule, past=past))


def q5(t):
    """What waiting for the past buys."""
    yield lines('Q5: block maps a group, own → waiting', *(f'`{rule}`' for rule in RULES))
    yield '|---' * (1 + len(RULES)) + '|'
    for model in MODELS:
        yield lines(model, *(f"{ratio_in_words(by_rule(t, model, rule, 'False'))} → "
                             f"{ratio_in_words(by_rule(t, model, rule, 'True'))}"
                             for rule in RULES))


def q6(t):
    """Beside the oracles, and the true depth."""
    yield lines('Q6: block maps a group', 'best fixed', 'best rule, own', 'best rule, waiting',
                'oracle of distance', 'oracle of the answer',
                'steps and depth, correlation: own', 'waiting', 'oracle of the answer')
    yield '|---' * 9 + '|'
    for model in MODELS:
        oracle = per_seed(t, model, 'evals', part='rules', rule='oracle')
        cells = [ratio_in_words(per_seed(t, model, 'evals', part='rules', rule='fixed'))]
        alike = []
        for past in ('False', 'True'):
            of_rules = {rule: by_rule(t, model, rule, past) for rule in RULES}
            there = {rule: v for rule, v in of_rules.items() if not np.isnan(v).any()}
            if not there:
                cells.append('none in every seed')
                alike.append('')
                continue
            best = min(there, key=lambda rule: there[rule].mean())
            cells.append(f'{mean_std(there[best])} (`{best}`)')
            alike.append(mean_std(by_rule(t, model, best, past, 'with_depth')))
        answer = pick(t['points'], variant=model, rule='answer')
        yield lines(model, *cells, ratio_in_words(oracle), mean_std(column(answer, 'evals')),
                    *alike, mean_std(column(answer, 'with_depth')))


def q7(t):
    """Answers lost to leaving too early, by depth."""
    taus = (1e-2, 0.1, 0.3, 1.0)
    yield lines('Q7: answers lost, %: shallow / middle / deep third ± over seeds',
                *(f'{how}, τ = {tau:g}' for how in ('own', 'waiting') for tau in taus))
    yield '|---' * (1 + 2 * len(taus)) + '|'
    for model in MODELS:
        for rule in ('norm_rel', 'kl', 'accel'):
            cells = []
            for past in ('False', 'True'):
                for tau in taus:
                    rows = pick(t['points'], variant=model, part='rules', rule=rule, past=past,
                                tau=tau)
                    shallow, middle, deep = (100 * np.array(column(rows, f'early_{i}'))
                                             for i in range(3))
                    cells.append(f'{shallow.mean():.1f} / {middle.mean():.1f} / '
                                 f'{mean_std(deep, 1)}')
            if set(cells) != {'0.0 / 0.0 / 0.0 ± 0.0'}:
                yield lines(f'{model}, `{rule}`', *cells)


def q8(t):
    """Thresholds found on short problems, asked for deep ones."""
    ways = (('exact', 'False', 'own'), ('exact', 'True', 'waiting'), ('latest', 'True', '`latest`'))
    rules = distinct(t['short'], 'rule')
    yield lines('Q8: cost on deep problems, nats (promises kept)',
                *(f'`{rule}`, {name}' for rule in rules for *_, name in ways))
    yield '|---' * (1 + len(rules) * len(ways)) + '|'
    for model in MODELS:
        for where in distinct(pick(t['short'], variant=model), 'where'):
            cells = []
            for rule in rules:
                for cache, past, _ in ways:
                    rows = [row for row in pick(t['short'], variant=model, where=where, rule=rule,
                                                cache=cache, past=past) if row['tau'] != '']
                    kept = column(rows, 'kept').count('True')
                    cells.append(f"{mean_std(column(rows, 'cost'), 4)} ({kept} of {len(rows)})"
                                 if rows else 'no τ')
            yield lines(f'{model}, {where}', *cells)


def phases(t):
    """What the cosines do where tokens wait, work, and have settled."""
    bins = ((0, 2), (3, 5), (6, 9), (10, 99))
    yield lines('cosine of consecutive steps by depth', *(
        f'{phase}, {low} to {high}' if high < 99 else f'{phase}, {low} on'
        for phase in ('waiting', 'working', 'settled') for low, high in bins))
    yield '|---' * (1 + 3 * len(bins)) + '|'
    for model in MODELS:
        for group in distinct(pick(t['phases'], variant=model), 'group'):
            cells = []
            for phase in ('waiting', 'working', 'settled'):
                for low, high in bins:
                    rows = [row for row in pick(t['phases'], variant=model, group=group,
                                                phase=phase) if low <= row['depth'] <= high]
                    of_seeds = [np.average(column(some, 'cos'), weights=column(some, 'steps'))
                                for seed in distinct(rows, 'seed')
                                for some in [pick(rows, seed=seed)]
                                if sum(column(some, 'steps')) >= 30]
                    cells.append(mean_std(of_seeds) if of_seeds else '')
            yield lines(f'{model}, group {group}', *cells)


def in_time(t):
    """
    {way: time over that of the fastest fixed budget of `exact`, one a seed}, of ways within SAME of
    the full budget with 95% confidence in every seed; way: (cache, rule, past, tau)
    """
    swept = pick(t['bench'], variant=t['variant'], rules='accel')
    seeds, times = distinct(swept, 'seed'), {}
    for seed in seeds:
        rows = [row for row in pick(swept, seed=seed)
                if row['diff_high'] <= SAME and row['rule'] != 'oracle']
        fixed = min(row['ms_per_token'] for row in rows
                    if (row['cache'], row['rule']) == ('exact', 'fixed'))
        for row in rows:
            way = row['cache'], row['rule'], row['past'], row['tau']
            times.setdefault(way, []).append(row['ms_per_token'] / fixed)
    return {way: some for way, some in times.items() if len(some) == len(seeds)}


def advice(small, tasks):
    """Use this rule, at this tau, with this cache: computed, a line for each regime."""
    times = dict(text=in_time(small), calc=in_time(tasks | dict(variant='calc groups')),
                 hop=in_time(tasks | dict(variant='hop groups')))
    yield lines('where', 'use', 'time over that of the best fixed budget of `exact`')
    yield '|---|---|---|'
    regimes = {name: [name] for name in times} | {'one does not know which': list(times)}
    for name, of in regimes.items():
        ways = set.intersection(*(set(times[regime]) for regime in of))
        worst = {way: max(np.mean(times[regime][way]) for regime in of) for way in ways}
        if not worst:
            yield lines(name, 'no way is good enough in every seed', '')
            continue
        best = min(worst, key=worst.get)
        each = ', '.join(f'{mean_std(times[regime][best])} ({regime})' for regime in of)
        yield lines(name, in_words(best), each)


def in_words(way):
    cache, rule, past, tau = way
    if rule == 'fixed':
        return f'{tau:g} loops for every token, `--cache={cache}`'
    waits = ' --past' if past == 'True' and cache == 'exact' else ''
    return f'`--exit={rule} --tau={tau:g}{waits} --cache={cache}`'


def wave_blocks(small, tasks):
    """Lists of lines of Markdown for table.py."""
    return [
        [f'**Where tokens wait and work**: {phases.__doc__}'], phases(tasks),
        [f'**Q4 to Q8**, within {SAME} nats of the full budget with 95% confidence. Q4: what does '
         'a cache policy do to the loops that a token needs?'], q4(tasks),
        ['Q5: what does waiting for the past buy?'], q5(tasks),
        ['Q6: how far is each from the oracles, and do steps follow depth?'], q6(tasks),
        ['Q7: how often is an answer lost because somebody left too early?'], q7(tasks),
        ['Q8: does a threshold found on the shallower half hold on the deeper one?'], q8(tasks),
        [f'**What to use**, computed: the fastest way within {SAME} nats in every seed; of several '
         'regimes the one whose worst is best.'], advice(small, tasks)]
