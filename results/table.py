"""
The tables behind the claims in results/README.md, so that they cannot drift from what was measured.

    python -m results.run --only_table          writes them between two markers of that page

A test compares the page with what `markdown` gives. What each claim says is in claims.py; the rows
of Q4 to Q8 come from questions.py and bench.py.

    t, small, tasks     the CSVs of a scale, see runs.load
    way                 (cache policy, rule, 'True' if it waits for the past, tau)
"""
import os

import numpy as np

from geometry import CLEAR
from results import runs
from results.claims import CLAIMS, RULES, SAME, cheapest, ratio_in_words, says, sweep, verdicts
from results.runs import at_checkpoint, column, distinct, head, join, line, mean_std, pick

# the columns of the claims: (scale, variant), and what the page calls it
REGIMES = {('small', 'main'): 'text', ('small', 'random'): 'text, random adapter',
           ('recipe', 'main'): "text, the paper's recipe",
           ('tasks', 'calc groups'): '`calc`', ('tasks', 'hop groups'): '`hop`',
           ('paper', 'main'): 'paper scale'}
# the full trainings among those of Q3
FULL = dict(main='as it is', random='random adapter', fixed='fixed loop counts',
            uniform='uniform draw')
MODELS = ('calc', 'calc groups', 'hop', 'hop groups')
POLICIES = {('exact', ''): 'exact', ('ring', 8.0): 'ring of 8', ('ring', 4.0): 'ring of 4',
            ('ring', 2.0): 'ring of 2', ('latest', ''): 'latest'}
WAYS = (('exact', 'False', 'own'), ('exact', 'True', 'waiting'), ('latest', 'True', '`latest`'))


# the claims -------------------------------------------------------------------------------------

def regimes(folder):
    """{what the page calls a regime: its verdicts}, {} where it has not been run."""
    found = {}
    for (scale, variant), name in REGIMES.items():
        there = os.path.exists(os.path.join(folder, scale, 'settled.csv'))
        found[name] = verdicts(runs.load(scale, folder, variant)) if there else {}
    return found


def verdict_table(found):
    """A line for each claim: the verdict in each regime."""
    yield from head('', 'the paper says', 'holds if', *found)
    for name in CLAIMS:
        cells = [of[name][1] if name in of else '–' if of else 'not run yet'
                 for of in found.values()]
        yield line(name, *says(name), *cells)


def measured_table(found):
    """A line for each claim and regime: what was measured."""
    yield from head('', '', 'measured')
    for name in CLAIMS:
        for regime, of in found.items():
            if name in of:
                yield line(name, regime, of[name][0])


def choices_table(t):
    """A line for each open choice (Q3)."""
    groups = distinct(t['steps'], 'group')
    yield from head('choice', 'cosine, settled: groups ' + ', '.join(groups),
                    'tokens that turn back, %', 'DLR at 30 loops, to the first iterate',
                    'loss at 4 loops')
    for variant in distinct(t['settled'], 'variant'):
        rows = at_checkpoint(pick(t['settled'], variant=variant))
        of_groups = [pick(rows, group=group) for group in groups]
        cells = [', '.join(mean_std(column(some, 'cos')) for some in of_groups),
                 ', '.join(mean_std(100 * np.array(column(some, 'turning_back')), 0)
                           for some in of_groups)]
        drift = at_checkpoint(pick(t['dlr'], variant=variant, reading='first', loops=30.0))
        losses = pick(t['losses'], variant=variant, loops=4.0)
        name = variant
        if variant in FULL:     # the full trainings say how long they were
            last = max(column(pick(t['steps'], variant=variant), 'iteration'))
            name = f'{FULL[variant]}, {last:,.0f} its'
        yield line(name, *cells, mean_std(column(drift, 'ratio'), 1),
                   mean_std(column(losses, 'loss'), 3))


def accel_table(found):
    """Is acceleration a signal of its own? Block maps of both at equal tau, and their ratio."""
    taus = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3)
    yield from head('block maps of `accel` minus those of `norm` at τ',
                    *(f'{tau:g}' for tau in taus), 'acceleration over step norm',
                    'correlation of their logarithms')
    for name, t in found.items():
        accel, norm = (sweep(t, rule, 'mean_evals') for rule in ('accel', 'norm'))
        rows = [row for row in at_checkpoint(pick(t['steps'], variant=t['variant']))
                if row['k'] >= 1 and row['norm'] > CLEAR * row['floor']]
        of_seeds = [[np.mean(column(pick(rows, seed=seed), key)) for seed in distinct(rows, 'seed')]
                    for key in ('accel_over_norm', 'accel_alike')]
        yield line(name, *(mean_std(accel[tau] - norm[tau]) for tau in taus),
                   *(mean_std(values) for values in of_seeds))


# the questions that only problems with depth can answer; their docstrings are the headings ------

def maps_of(t, variant, **where):
    """The least block maps within SAME of the full budget, see claims.cheapest."""
    return cheapest(pick(t['points'], variant=variant, **where), 'evals', 'gap_high')


def q4(t):
    """Q4: what does a cache policy do to the loops that a token needs?"""
    ways = [(*policy, rule) for policy in POLICIES for rule in ('fixed', 'norm_rel')]
    yield from head('Q4: block maps a group', *(
        f"{POLICIES[cache, slots]}, {'fixed' if rule == 'fixed' else '`norm_rel`'}"
        for cache, slots, rule in ways))
    for model in MODELS:
        yield line(model, *(
            ratio_in_words(maps_of(t, model, part='policies', cache=cache, slots=slots, rule=rule))
            for cache, slots, rule in ways))


def q5(t):
    """Q5: what does waiting for the past buy?"""
    yield from head('Q5: block maps a group, own → waiting', *(f'`{rule}`' for rule in RULES))
    for model in MODELS:
        yield line(model, *(' → '.join(
            ratio_in_words(maps_of(t, model, part='rules', rule=rule, past=past))
            for past in ('False', 'True')) for rule in RULES))


def q6(t):
    """Q6: how far is each rule from the oracles, and do steps follow depth?"""
    yield from head('Q6: block maps a group', 'best fixed', 'best rule, own', 'best rule, waiting',
                    'oracle of distance', 'oracle of the answer',
                    'steps and depth, correlation: own', 'waiting', 'oracle of the answer')
    for model in MODELS:
        best = [best_rule(t, model, past) for past in ('False', 'True')]
        fixed, oracle = (ratio_in_words(maps_of(t, model, part='rules', rule=rule))
                         for rule in ('fixed', 'oracle'))
        answer = pick(t['points'], variant=model, rule='answer')
        yield line(model, fixed, *(maps for maps, _ in best), oracle,
                   mean_std(column(answer, 'evals')), *(alike for _, alike in best),
                   mean_std(column(answer, 'with_depth')))


def best_rule(t, model, past):
    """The rule with the fewest block maps; its correlation of steps and depth; both in words."""
    maps = {rule: maps_of(t, model, part='rules', rule=rule, past=past) for rule in RULES}
    everywhere = [rule for rule in RULES if not np.isnan(maps[rule]).any()]
    if not everywhere:
        return 'none in every seed', ''
    best = min(everywhere, key=lambda rule: maps[rule].mean())
    rows = pick(t['points'], variant=model, part='rules', rule=best, past=past)
    return (f'{mean_std(maps[best])} (`{best}`)',
            mean_std(cheapest(rows, 'with_depth', 'gap_high')))


def q7(t):
    """Q7: how often is an answer lost because a token exited too early?"""
    columns = [(past, tau) for past in ('False', 'True') for tau in (1e-2, 0.1, 0.3, 1.0)]
    yield from head('Q7: answers lost, %: shallow / middle / deep third ± over seeds', *(
        f"{'waiting' if past == 'True' else 'own'}, τ = {tau:g}" for past, tau in columns))
    for model in MODELS:
        for rule in ('norm_rel', 'kl', 'accel'):
            cells = []
            for past, tau in columns:
                rows = pick(t['points'], variant=model, part='rules', rule=rule, past=past, tau=tau)
                shallow, middle, deep = (100 * np.array(column(rows, f'early_{i}'))
                                         for i in range(3))
                cells.append(f'{shallow.mean():.1f} / {middle.mean():.1f} / {mean_std(deep, 1)}')
            if set(cells) != {'0.0 / 0.0 / 0.0 ± 0.0'}:
                yield line(f'{model}, `{rule}`', *cells)


def q8(t):
    """Q8: does a threshold found on the shallower half hold on the deeper one?"""
    columns = [(rule, *way) for rule in distinct(t['short'], 'rule') for way in WAYS]
    yield from head('Q8: cost on deep problems, nats (promises kept)',
                    *(f'`{rule}`, {name}' for rule, _, _, name in columns))
    for model in MODELS:
        of_model = pick(t['short'], variant=model)
        cells = []
        for rule, cache, past, _ in columns:
            rows = [row for row in pick(of_model, rule=rule, cache=cache, past=past)
                    if row['tau'] != '']
            kept = column(rows, 'kept').count('True')
            cells.append(f"{mean_std(column(rows, 'cost'), 4)} ({kept} of {len(rows)})"
                         if rows else 'no τ')
        yield line(model, *cells)


# what to use ------------------------------------------------------------------------------------

def in_time(t):
    """
    {way: its time over that of the fastest fixed budget of `exact`, by seed}, for the ways within
    SAME of the full budget with 95% confidence in every seed.
    """
    swept = pick(t['bench'], variant=t['variant'], rules='accel')
    seeds, times = distinct(swept, 'seed'), {}
    for seed in seeds:
        rows = [row for row in pick(swept, seed=seed)
                if row['diff_high'] <= SAME and row['rule'] != 'oracle']
        fixed = min(column(pick(rows, cache='exact', rule='fixed'), 'ms_per_token'))
        for row in rows:
            way = row['cache'], row['rule'], row['past'], row['tau']
            times.setdefault(way, []).append(row['ms_per_token'] / fixed)
    return {way: some for way, some in times.items() if len(some) == len(seeds)}


def advice(small, tasks):
    """The recommended rule, tau and cache, computed: a line for each regime."""
    times = dict(text=in_time(small), calc=in_time(tasks | dict(variant='calc groups')),
                 hop=in_time(tasks | dict(variant='hop groups')))
    yield from head('where', 'use', 'time over that of the best fixed budget of `exact`')
    regimes = {name: [name] for name in times} | {'any of these': list(times)}
    for name, of in regimes.items():
        ways = set.intersection(*(set(times[regime]) for regime in of))
        worst = {way: max(np.mean(times[regime][way]) for regime in of) for way in ways}
        if not worst:
            yield line(name, 'no way is good enough in every seed', '')
            continue
        best = min(worst, key=worst.get)
        each = ', '.join(f'{mean_std(times[regime][best])} ({regime})' for regime in of)
        yield line(name, in_words(best), each)


def in_words(way):
    cache, rule, past, tau = way
    if rule == 'fixed':
        return f'{tau:g} loops for every token, `--cache={cache}`'
    waits = ' --past' if past == 'True' and cache == 'exact' else ''
    return f'`--exit={rule} --tau={tau:g}{waits} --cache={cache}`'


# the page ---------------------------------------------------------------------------------------

def markdown(folder=runs.HERE):
    """The block `claims` of the page: the machine, the claims, the open choices, the questions."""
    found = regimes(folder)
    small, tasks = runs.load('small', folder), runs.load('tasks', folder, 'calc groups')
    t = {'text': small, '`calc`': tasks, '`hop`': tasks | dict(variant='hop groups')}
    return join([
        [f"{len(distinct(small['bench'], 'seed'))} seeds. "
         f"Text: {runs.machine_of(small)}. "
         f"The paper's recipe: {runs.machine_of(runs.load('recipe', folder))}. "
         f"Tasks: {runs.machine_of(tasks)}."],
        ['**Verdicts**:'], verdict_table(found),
        ['**What was measured**:'], measured_table(found),
        ['**Is acceleration a signal of its own?** With `exact`, no waiting; the ratio is the '
         'median over tokens, mean over steps that are clear of rounding:'], accel_table(t),
        ['**Q3, the open choices** on text (400 iterations unless the row says more):'],
        choices_table(small),
        [f'**Q4 to Q8**, within {SAME} nats of the full budget with 95% confidence. '
         + q4.__doc__], q4(tasks),
        [q5.__doc__], q5(tasks), [q6.__doc__], q6(tasks), [q7.__doc__], q7(tasks),
        [q8.__doc__], q8(tasks),
        [f'**What to use**, computed: the fastest way within {SAME} nats in every seed; for '
         'several regimes, the way with the best worst time.'], advice(small, tasks)])
