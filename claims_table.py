"""
results/SCALE/*.csv -> the tables of claims in README.md, so that they cannot drift from what was measured.

Not run by itself: `python claims.py --only_table` writes them between the markers, a test holds README.md to them. Every verdict is computed, by
the bound that stands beside it here. A mean is over seeds, +- their standard deviation; CE in nats a token, ms a token at batch 1.
"""
import csv
import os

import numpy as np

BEGIN, END = '<!-- claims: written by `python claims.py --only_table` -->', '<!-- end of claims -->'
HERE = os.path.dirname(os.path.abspath(__file__))
CLEAR = 30          # as in geometry.py: a direction counts while the step is so many rounding floors long
SAME = 0.005        # nats: equal quality, as in bench.py
PAPER_TAUS = (1e-5, 1e-4, 1e-3, 1e-2)


def value(text):
    try:
        return float(text)
    except ValueError:
        return text


def load(scale, name):
    """A CSV as a list of dicts, numbers as floats."""
    with open(os.path.join(HERE, 'results', scale, name + '.csv'), newline='') as f:
        return [{key: value(text) if key not in ('group', 'from', 'to') else text for key, text in row.items()} for row in csv.DictReader(f)]


def pick(rows, **conditions):
    return [row for row in rows if all(row[key] == wanted for key, wanted in conditions.items())]


def of(rows, key):
    """The values of a column, once each, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def told(values, digits=2):
    """mean +- standard deviation, or the mean alone where there is one."""
    values = np.array(values, dtype=float)
    mean = f'{values.mean():.{digits}f}'
    return mean + (f' ± {values.std(ddof=1):.{digits}f}' if len(values) > 1 else '')


# what a curve says ----------------------------------------------------------------------------------------------------

def curve(rows, key):
    """A group's curve over k, where it is defined."""
    return np.array([row[key] for row in sorted(rows, key=lambda row: row['k']) if row[key] != ''])


def tenth(rows):
    """Steps until the mean step norm has fallen tenfold; nan if it does not."""
    norms = curve(rows, 'norm')
    below = np.nonzero(norms <= norms[0] / 10)[0]
    return below[0] if len(below) else np.nan


def settled(rows):
    """Mean cosine of the last three steps that are clear of rounding."""
    norms, cos = curve(rows, 'norm'), curve(rows, 'cos')
    sound = cos[norms[1:] > CLEAR * rows[0]['floor']]
    return sound[-3:].mean() if len(sound) else np.nan


def by_group(steps, what, variant='main', first=False):
    """{group: what(curve) of each seed}, of the last checkpoint, or of the first."""
    found = {}
    for group in of(steps, 'group'):
        for seed in of(pick(steps, variant=variant), 'seed'):
            rows = pick(steps, variant=variant, seed=seed, group=group)
            at = (min if first else max)(row['iteration'] for row in rows)
            found.setdefault(group, []).append(what(pick(rows, iteration=at)))
    return found


def last(rows):
    """The rows of each run's last checkpoint."""
    at = {}
    for row in rows:
        at[row['variant'], row['seed']] = max(at.get((row['variant'], row['seed']), 0), row['iteration'])
    return [row for row in rows if row['iteration'] == at[row['variant'], row['seed']]]


def groups_told(found, digits=2):
    return '; '.join(f'{told(values, digits)} (group {group})' for group, values in found.items())


# the claims: each returns (what the paper says, what was measured, verdict) -----------------------------------------------

def says(yes, no='not reproduced'):
    return 'reproduced' if yes else no


def c1(t):
    steps = by_group(t['steps'], tenth)
    return 'the step norm falls within 5 to 10 steps', f'tenfold after {groups_told(steps, 1)} steps', says(all(np.nanmax(v) <= 10 for v in steps.values()))


def c2(t):
    cos = by_group(t['steps'], settled)
    near = [group for group, v in cos.items() if 0.45 <= np.mean(v) <= 0.7]
    return 'the cosine of consecutive updates settles near 0.5 to 0.65', groups_told(cos), says(len(near) == len(cos), f"not reproduced in {len(cos) - len(near)} of {len(cos)} groups")


def c3(t):
    norm, cos = ([by_group(t['steps'], what, first=first) for first in (True, False)] for what in (tenth, settled))
    faster, turned = (sum(np.mean(after[g]) < np.mean(before[g]) - margin for g in before) for (before, after), margin in ((norm, 0.5), (cos, 0.05)))
    n = len(norm[0])
    line = '; '.join(f'group {g}: a tenth after {np.mean(norm[0][g]):.1f} → {np.mean(norm[1][g]):.1f} steps, cosine {np.mean(cos[0][g]):.2f} → {np.mean(cos[1][g]):.2f}' for g in norm[0])
    return 'both strengthen over training', line, says(faster == turned == n, f'in part: norms fall faster in {faster} of {n} groups, the mean cosine falls by 0.05 or more in {turned}')


def c4(t):
    rows = last(pick(t['dlr'], variant='main'))
    readings = {r: [row['ratio'] for row in pick(rows, reading=r)] for r in ('first', 'settled', 'noise')}
    before = [row['ratio'] for row in pick(t['dlr'], variant='main', reading='first', iteration=0)]
    return ('the drift-to-loop ratio is far above 1 at the hand-offs', f"{told(readings['first'], 1)} to the next group's first iterate, {told(readings['settled'], 1)} to its last, "
            f"{told(readings['noise'], 1)} to its noise; before training {told(before, 1)} to the first", says(min(map(min, readings.values())) > 5) + ', before training too' * bool(np.mean(before) > 5))


def c5(t):
    ratios = [row['ratio'] for row in last(pick(t['dlr'], variant='main', reading='jump over arc'))]
    return 'tight arcs inside loops, larger jumps between groups', f'a jump is {told(ratios, 1)} times as long as the whole path in the loop after its first step', says(min(ratios) > 1)


def ms(t, rule, tau, rules='accel'):
    return np.array([row['ms_per_token'] for row in pick(t['bench'], rule=rule, tau=tau, rules=rules)])


def ce(t, rule, tau, rules='accel'):
    return np.array([row['ce_minus_full'] for row in pick(t['bench'], rule=rule, tau=tau, rules=rules)])


def c6(t):
    ratio = ms(t, 'accel', 1e-2) / ms(t, 'accel', 1e-5)
    return '`accel` takes a third less time or better from τ = 1e-5 to 1e-2 (580 → 360 ms, 0.62)', f"{told(ms(t, 'accel', 1e-5), 1)} → {told(ms(t, 'accel', 1e-2), 1)} ms, {told(ratio)} of the time", says(ratio.mean() <= 2 / 3)


def c7(t):
    worst = {rule: max(np.abs(np.expm1(ce(t, rule, tau))).max() for tau in PAPER_TAUS) for rule in ('accel', 'kl')}
    return '`accel` and KL keep PPL flat over the sweep', ', '.join(f'{rule}: within {100 * w:.2f}% of the full budget' for rule, w in worst.items()), says(max(worst.values()) < 0.005)


def c8(t):
    at = {tau: ce(t, 'norm', tau) for tau in (1e-3, 1e-2, 1.0)}
    return ('the step norm degrades beyond τ = 1e-3, sharply at 1e-2', ', '.join(f'{told(v, 4)} nats at {tau:g}' for tau, v in at.items()) + ' over the full budget', says(at[1e-2].mean() > 0.02))


def fastest(t, rule, seed, taus=None, cost='ms_per_token', rules='accel'):
    """The cheapest point of a rule within SAME of the full budget."""
    rows = [row for row in pick(t['bench'], rule=rule, seed=seed, rules=rules) if row['ce_minus_full'] <= SAME and (taus is None or row['tau'] in taus)]
    return min(rows, key=lambda row: row[cost])


def c9(t):
    ratios = {name: [fastest(t, 'accel', s, taus)['ms_per_token'] / fastest(t, 'kl', s, taus)['ms_per_token'] for s in of(t['bench'], 'seed')]
              for name, taus in (('over the sweep of the paper', PAPER_TAUS), ('with τ up to 10', None))}
    return 'at equal quality `accel` is faster than KL', 'time of `accel` over KL: ' + ', '.join(f'{told(v)} {name}' for name, v in ratios.items()), says(np.mean(ratios['with τ up to 10']) < 1)


def c10(t):
    worst = lambda rule, taus: max(ce(t, rule, tau).mean() for tau in taus)
    every = [tau for tau in of(pick(t['bench'], rule='accel'), 'tau') if tau <= 1]
    line = ', '.join(f'`{rule}` {worst(rule, PAPER_TAUS):+.4f}, {worst(rule, every):+.4f}' for rule in ('accel', 'norm', 'kl'))
    robust = {rule: worst(rule, every) <= SAME for rule in ('accel', 'norm')}
    return '`accel` is robust to the threshold', f'worst CE over the full budget, over the sweep and with τ up to 1: {line}', says(robust['accel']) + ', but so is the step norm' * bool(robust['accel'] and robust['norm'])


def c11(t):
    by_loops, settled_at = {n: [row['loss'] for row in pick(t['loops'], loops=n)] for n in of(t['loops'], 'loops')}, 8 if t['scale'] == 'small' else 32
    far = max(abs(a - b) for n in by_loops if n > settled_at for a, b in zip(by_loops[n], by_loops[settled_at]))
    flat = [n for n in by_loops if abs(np.mean(by_loops[n]) - np.mean(by_loops[settled_at])) < SAME][0]
    return ('loss improves with test-time loops and stays stable far past training (Geiping)', ', '.join(f'{told(by_loops[n], 3)} at {n:g}' for n in by_loops if n <= settled_at)
            + f' loops (on the first 24 held-out windows); from there to {max(by_loops):g} it moves by at most {far:.0e}', says(all(a > b for a, b in zip(by_loops[1], by_loops[4])) and far < 0.01, 'not reproduced') + f', flat from {flat:g} loops on')


def c12(t):
    worst = max(row['spread'] for row in pick(t['noise'], variant='main'))
    return 'end states do not depend on the noise drawn (Geiping)', f'spread over norm at most {worst:.0e}', says(worst < 1e-3)


def c13(t):
    by_draw = {draw: {n: [row['loss'] for row in last(pick(t['losses'], variant=draw)) if row['loops'] == n] for n in (1, 4, 8)} for draw in ('main', 'fixed', 'uniform')}
    line = '; '.join(f"{'lognormal-Poisson' if draw == 'main' else draw}: " + ', '.join(told(v, 3) for v in found.values()) for draw, found in by_draw.items())
    gap = {d: [np.mean(by_draw['main'][n]) - np.mean(by_draw[d][n]) for n in (1, 4, 8)] for d in ('fixed', 'uniform')}
    spread = {d: np.sqrt(np.var(by_draw[d][4], ddof=1) + np.var(by_draw['main'][4], ddof=1)) if len(by_draw[d][4]) > 1 else SAME for d in gap}
    good = all(max(gap[d][1:]) <= spread[d] for d in gap)
    return 'the lognormal-Poisson draw is at least as good as fixed and uniform counts of the same mean (Geiping)', f'held-out loss at 1, 4, 8 loops: {line}', says(good, 'not reproduced') + f" at 4 and 8 loops, within the spread ({gap['fixed'][2]:+.3f} against fixed, {gap['uniform'][2]:+.3f} against uniform); at 1 loop {gap['fixed'][0]:+.3f} and {gap['uniform'][0]:+.3f}"


def q1(t):
    seeds, found = of(t['bench'], 'seed'), {}
    for rule in ('fixed', 'norm', 'norm_rel', 'kl', 'accel', 'accel_rel', 'oracle'):
        found[rule] = [(fastest(t, rule, s, cost='mean_evals')['mean_evals'], fastest(t, rule, s)['ms_per_token']) for s in seeds]
    line = '; '.join(f'`{rule}` {told([e for e, _ in v])}' + f' ({told([m for _, m in v], 1)} ms)' * (rule != 'oracle') for rule, v in found.items())
    beats = [rule for rule in found if rule not in ('fixed', 'oracle') and np.mean([m for _, m in found[rule]]) < np.mean([m for _, m in found['fixed']])]
    return 'does any per-token rule beat a fixed budget, and how far is the oracle?', f'block maps a group within {SAME} nats of the full budget: {line}', ('yes: ' + ', '.join(beats)) if beats else 'no rule beats it in time'


def q2(t):
    seeds, evals = of(t['bench'], 'seed'), {}
    for rules in ('accel', 'accel, one hit', 'accel, step kept', 'accel, one hit, step kept', 'norm', 'norm, two hits'):
        from_runs, rule = 'accel' if rules == 'norm' else rules, rules.split(',')[0]
        evals[rules] = [fastest(t, rule, s, cost='mean_evals', rules=from_runs)['mean_evals'] for s in seeds]
    line = '; '.join(f"{'accel as printed' if rules == 'accel' else rules}: {told(v)}" for rules, v in evals.items())
    good = [rules for rules, v in evals.items() if rules.startswith('accel') and np.mean(v) <= np.mean(evals['norm']) + 0.1]
    smallest = min(good, key=lambda rules: rules.count(','), default=None)
    return ('what do the second hit and the thrown-away step buy?', f'block maps a group within {SAME} nats of the full budget: {line}',
            'as printed it is not dominated' if smallest == 'accel' else f"as printed it is dominated by the step norm; {f'the smallest change that is not: {smallest[7:]}' if smallest else 'so is every change tried'}")


CLAIMS = dict(C1=c1, C2=c2, C3=c3, C4=c4, C5=c5, C6=c6, C7=c7, C8=c8, C9=c9, C10=c10, C11=c11, C12=c12, C13=c13, Q1=q1, Q2=q2)
FROM = dict(main='C1 C2 C3 C4 C5 C11 C12', draws='C13', sweeps='C6 C7 C8 C9 C10 Q1 Q2')       # which runs a claim is read from
NAMES = ('machine', 'steps', 'dlr', 'noise', 'loops', 'spectrum', 'losses', 'minutes', 'bench')


def tables_of(scale):
    return {name: load(scale, name) for name in NAMES} | dict(scale=scale)


def claims(scale):
    """{name: (the paper's words, what was measured, verdict)}."""
    t = tables_of(scale)
    return {name: claim(t) for name, claim in CLAIMS.items() if name != 'C13' or scale == 'small'}       # other draws are trained at the small scale


def choices(t):
    """Q3: the open choices, a line of Markdown each."""
    groups = of(t['steps'], 'group')
    yield '| choice | cosine, settled: groups ' + ', '.join(groups) + ' | cosine of the leading eigenvalue\'s angle, same groups | its modulus | tokens that turn back, % | DLR, to the first iterate | loss at 4 loops |'
    yield '|---|---|---|---|---|---|---|'
    for variant in of(t['steps'], 'variant'):
        cos = by_group(t['steps'], settled, variant)
        leading = [[told([row[key] for row in pick(t['spectrum'], variant=variant, group=g)]) for g in groups] for key in ('cos', 'radius')]
        back = [told([100 * row['turning_back'] for row in pick(t['spectrum'], variant=variant, group=g)], 0) for g in groups]
        ratio = [row['ratio'] for row in last(pick(t['dlr'], variant=variant, reading='first'))]
        loss = [row['loss'] for row in last(pick(t['losses'], variant=variant)) if row['loops'] == 4]
        name = {'main': 'as it is, {} iterations', 'fixed': 'fixed loop counts, {} iterations', 'uniform': 'uniform draw, {} iterations'}.get(variant, variant)
        name = name.format(f"{max(row['iteration'] for row in pick(t['steps'], variant=variant)):,.0f}")
        yield f"| {name} | {', '.join(told(v) for v in cos.values())} | {', '.join(leading[0])} | {', '.join(leading[1])} | {', '.join(back)} | {told(ratio, 1)} | {told(loss, 3)} |"


def markdown():
    """Both tables of README.md."""
    small, t = claims('small'), tables_of('small')
    paper = claims('paper') if os.path.exists(os.path.join(HERE, 'results', 'paper', 'bench.csv')) else {}
    minutes = dict.fromkeys(('main', 'choices', 'draws', 'sweeps'), 0.0)        # as they passed: two trainings ran at a time
    for row in t['minutes']:
        kind = 'sweeps' if row['what'].startswith('bench') else dict(main='main', fixed='draws', uniform='draws').get(row['variant'], 'choices')
        minutes[kind] += row['minutes'] * (1.0 if kind == 'sweeps' else 0.5 if row['what'] == 'train' else 0.0)
    machine, = t['machine']
    lines = [f"{len(of(t['bench'], 'seed'))} seeds on {machine['cores']:g} shared cores of an {machine['machine']}, torch {machine['torch']}, {machine['date']}. Minutes: "
             + ', '.join(f'{kind} {spent:.0f}' for kind, spent in minutes.items()) + f', together {sum(minutes.values()):.0f}.', '',
             '| | the paper says | small scale: measured | verdict | runs | paper scale |', '|---|---|---|---|---|---|']
    for name, (claim, measured, verdict) in small.items():
        runs, = (kind for kind, names in FROM.items() if name in names.split())
        lines.append(f"| {name} | {claim} | {measured} | **{verdict}** | {runs} | {f'{paper[name][1]}; **{paper[name][2]}**' if name in paper else 'not run yet'} |")
    return '\n'.join([*lines, '', f"Q3, the open choices ({max(row['iteration'] for row in t['losses'] if row['variant'] == 'as it is'):.0f} iterations unless it says more, last checkpoint):", '', *choices(t)])


def write():
    """README.md with the tables between the markers."""
    path = os.path.join(HERE, 'README.md')
    with open(path, encoding='utf-8') as f:
        text = f.read()
    before, rest = text.split(BEGIN)
    with open(path, 'w', encoding='utf-8') as f:
        f.write(before + BEGIN + '\n' + markdown() + '\n' + END + rest.split(END)[1])
