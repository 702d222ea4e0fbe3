"""
The paper's claims, each with what was measured and a verdict, computed from results/SCALE/*.csv.

Not run by itself: table.py puts them into results/README.md. Every bound stands in the function of
its claim, or is a name imported below. A mean is over seeds, ± is their standard deviation.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10). Geiping: 3.3, 5, 6 (C11 to C13).

    t           {name of a CSV: its rows}, a row is a dict with numbers as floats
    variant     a training: 'main' is the default model, the rest are open choices and other draws
    k           the loop step, from 0
    CE          cross-entropy, nats a token
    ms          milliseconds a token, with one row in the batch
"""
import csv
import os

import numpy as np

from bench import same as SAME
from geometry import settled_cos, steps_to_a_tenth

HERE = os.path.dirname(os.path.abspath(__file__))
PAPER_TAUS = (1e-5, 1e-4, 1e-3, 1e-2)       # the paper's sweep
CSVS = 'machine steps dlr noise loops spectrum losses minutes bench'.split()
TEXT = ('group', 'from', 'to')              # columns whose digits are names of layers


# rows -------------------------------------------------------------------------------------------

def number(text):
    """A cell of a CSV as a float if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def load(scale, folder=HERE, names=CSVS):
    """The CSVs of a scale: {name: rows}, and the scale itself under 'scale'."""
    t = dict(scale=scale)
    for name in names:
        with open(os.path.join(folder, scale, name + '.csv'), newline='') as f:
            rows = list(csv.DictReader(f))
        t[name] = [{key: text if key in TEXT else number(text) for key, text in row.items()}
                   for row in rows]
    return t


def pick(rows, **conditions):
    """The rows whose columns have these values."""
    return [row for row in rows if all(row[key] == value for key, value in conditions.items())]


def column(rows, key):
    return [row[key] for row in rows]


def distinct(rows, key):
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(column(rows, key)))


def last_checkpoint(rows):
    """The rows of each run's last checkpoint."""
    last = {}
    for row in rows:
        run = row['variant'], row['seed']
        last[run] = max(last.get(run, 0), row['iteration'])
    return [row for row in rows if row['iteration'] == last[row['variant'], row['seed']]]


def mean_std(values, digits=2):
    """'mean ± standard deviation', or the mean alone if there is one value."""
    values = np.array(values, dtype=float)
    text = f'{values.mean():.{digits}f}'
    if len(values) > 1:
        text += f' ± {values.std(ddof=1):.{digits}f}'
    return text


# what the geometry of a group says --------------------------------------------------------------

def curve(rows, key):
    """A column of one group at one checkpoint, in order of k, where it is defined."""
    ordered = sorted(rows, key=lambda row: row['k'])
    return np.array([row[key] for row in ordered if row[key] != ''])


def tenfold_after(rows):
    """Steps until the mean step norm has fallen tenfold; nan if it does not."""
    steps = steps_to_a_tenth(curve(rows, 'norm'))
    return np.nan if steps is None else steps


def settled(rows):
    """The cosine of consecutive steps, where it has settled; nan if rounding hides all steps."""
    return settled_cos(curve(rows, 'norm'), curve(rows, 'cos'), rows[0]['floor'])


def by_group(steps, what, variant='main', checkpoint=max):
    """{group: [what(rows) of each seed]} at the last checkpoint, or (min) at the first."""
    values = {}
    for group in distinct(steps, 'group'):
        for seed in distinct(pick(steps, variant=variant), 'seed'):
            rows = pick(steps, variant=variant, seed=seed, group=group)
            iteration = checkpoint(column(rows, 'iteration'))
            values.setdefault(group, []).append(what(pick(rows, iteration=iteration)))
    return values


def in_words(values, digits=2):
    """{group: values} in a line."""
    return '; '.join(f'{mean_std(v, digits)} (group {group})' for group, v in values.items())


# what the benchmark says ------------------------------------------------------------------------

def sweep(t, rule, tau, key):
    """A column of bench.csv for a rule as printed at one tau: an array, one value a seed."""
    return np.array(column(pick(t['bench'], rules='accel', rule=rule, tau=tau), key))


def worst_ce(t, rule, taus):
    """The largest CE above that of the full budget among taus, mean over seeds, nats."""
    return max(sweep(t, rule, tau, 'ce_minus_full').mean() for tau in taus)


def cheapest(t, rule, cost, taus=None, rules='accel'):
    """
    The least cost of a rule within SAME of the full budget: an array, one value a seed, or nan.

    cost: 'ms_per_token' or 'mean_evals'. taus: None = all. rules: the variant of the rule.
    """
    rows = [row for row in pick(t['bench'], rules=rules, rule=rule)
            if row['ce_minus_full'] <= SAME and (taus is None or row['tau'] in taus)]
    return np.array([min(column(pick(rows, seed=seed), cost), default=np.nan)
                     for seed in distinct(t['bench'], 'seed')])


# the claims: each returns (what the paper says, what was measured, the verdict) -----------------

def reproduced(holds):
    return 'reproduced' if holds else 'not reproduced'


def c1(t):
    claim = 'the step norm falls within 5 to 10 steps'
    steps = by_group(t['steps'], tenfold_after)
    holds = all(np.max(values) <= 10 for values in steps.values())
    return claim, f'tenfold after {in_words(steps, 1)} steps', reproduced(holds)


def c2(t):
    claim = 'the cosine of consecutive updates settles near 0.5 to 0.65'
    cos = by_group(t['steps'], settled)
    far = [group for group, values in cos.items() if not 0.45 <= np.mean(values) <= 0.7]
    verdict = f'not reproduced in {len(far)} of {len(cos)} groups' if far else 'reproduced'
    return claim, in_words(cos), verdict


def c3(t):
    claim = 'both strengthen over training'
    groups = distinct(t['steps'], 'group')
    faster, turned, lines = 0, 0, []
    steps = [by_group(t['steps'], tenfold_after, checkpoint=at) for at in (min, max)]
    cosines = [by_group(t['steps'], settled, checkpoint=at) for at in (min, max)]
    for group in groups:
        steps_before, steps_after = (np.mean(values[group]) for values in steps)
        cos_before, cos_after = (np.mean(values[group]) for values in cosines)
        faster += steps_after < steps_before - 0.5
        turned += cos_after < cos_before - 0.05
        lines.append(f'group {group}: a tenth after {steps_before:.1f} → {steps_after:.1f} steps, '
                     f'cosine {cos_before:.2f} → {cos_after:.2f}')
    verdict = 'reproduced'
    if not faster == turned == len(groups):
        verdict = (f'in part: norms fall faster in {faster} of {len(groups)} groups, '
                   f'the mean cosine falls by 0.05 or more in {turned}')
    return claim, '; '.join(lines), verdict


def c4(t):
    claim = 'the drift-to-loop ratio is far above 1 at the hand-offs'
    rows = pick(t['dlr'], variant='main')
    last = last_checkpoint(rows)
    first, end, noise = (column(pick(last, reading=reading), 'ratio')
                         for reading in ('first', 'settled', 'noise'))
    before = column(pick(rows, reading='first', iteration=0), 'ratio')
    measured = (f"{mean_std(first, 1)} to the next group's first iterate, "
                f'{mean_std(end, 1)} to its last, {mean_std(noise, 1)} to its noise; '
                f'before training {mean_std(before, 1)} to the first')
    verdict = reproduced(min(first + end + noise) > 5)
    if np.mean(before) > 5:
        verdict += ', before training too'
    return claim, measured, verdict


def c5(t):
    claim = 'tight arcs inside loops, larger jumps between groups'
    rows = last_checkpoint(pick(t['dlr'], variant='main', reading='jump over arc'))
    ratios = column(rows, 'ratio')
    measured = (f'a jump is {mean_std(ratios, 1)} times as long as the whole path in the loop '
                'after its first step')
    return claim, measured, reproduced(min(ratios) > 1)


def c6(t):
    claim = ('`accel` takes a third less time or better from τ = 1e-5 to 1e-2 '
             '(580 → 360 ms, 0.62)')
    slow, fast = (sweep(t, 'accel', tau, 'ms_per_token') for tau in (1e-5, 1e-2))
    ratio = fast / slow
    measured = f'{mean_std(slow, 1)} → {mean_std(fast, 1)} ms, {mean_std(ratio)} of the time'
    return claim, measured, reproduced(ratio.mean() <= 2 / 3)


def c7(t):
    claim = '`accel` and KL keep PPL flat over the sweep'
    worst = {}
    for rule in ('accel', 'kl'):
        # of a seed and a tau; PPL = exp(CE), so a difference of CE is a ratio of PPL
        gaps = [np.expm1(sweep(t, rule, tau, 'ce_minus_full')) for tau in PAPER_TAUS]
        worst[rule] = np.abs(gaps).max()
    measured = ', '.join(f'{rule}: within {100 * share:.2f}% of the full budget'
                         for rule, share in worst.items())
    return claim, measured, reproduced(max(worst.values()) < 0.005)


def c8(t):
    claim = 'the step norm degrades beyond τ = 1e-3, sharply at 1e-2'
    gaps = {tau: sweep(t, 'norm', tau, 'ce_minus_full') for tau in (1e-3, 1e-2, 1.0)}
    each = ', '.join(f'{mean_std(gap, 4)} at τ = {tau:g}' for tau, gap in gaps.items())
    return claim, f'CE above that of the full budget: {each}', reproduced(gaps[1e-2].mean() > 0.02)


def c9(t):
    claim = 'at equal quality `accel` is faster than KL'
    paper, wide = (cheapest(t, 'accel', 'ms_per_token', taus)
                   / cheapest(t, 'kl', 'ms_per_token', taus) for taus in (PAPER_TAUS, None))
    measured = (f'time of `accel` over that of KL: {mean_std(paper)} over the sweep of the paper, '
                f'{mean_std(wide)} with τ up to 10')
    return claim, measured, reproduced(np.mean(wide) < 1)


def c10(t):
    claim = '`accel` is robust to the threshold'
    up_to_1 = [tau for tau in distinct(pick(t['bench'], rule='accel'), 'tau') if tau <= 1]
    gaps = {rule: (worst_ce(t, rule, PAPER_TAUS), worst_ce(t, rule, up_to_1))
            for rule in ('accel', 'norm', 'kl')}
    each = ', '.join(f'`{rule}` {narrow:+.4f}, {wide:+.4f}'
                     for rule, (narrow, wide) in gaps.items())
    measured = f'worst CE above that of the full budget, in the sweep and with τ up to 1: {each}'
    verdict = reproduced(gaps['accel'][1] <= SAME)
    if max(gaps['accel'][1], gaps['norm'][1]) <= SAME:
        verdict += ', but so is the step norm'
    return claim, measured, verdict


def c11(t):
    claim = 'loss improves with test-time loops and stays stable far past training (Geiping)'
    losses = {n: column(pick(t['loops'], loops=n), 'loss') for n in distinct(t['loops'], 'loops')}
    trained = 8 if t['scale'] == 'small' else 32        # loops that training has often drawn

    # each seed beyond those loops, and the first count that is already as good
    moves = [abs(far - near) for n in losses if n > trained
             for far, near in zip(losses[n], losses[trained])]
    flat = [n for n in losses if abs(np.mean(losses[n]) - np.mean(losses[trained])) < SAME]
    improves = all(one > four for one, four in zip(losses[1], losses[4]))

    each = ', '.join(f'{mean_std(losses[n], 3)} at {n:g}' for n in losses if n <= trained)
    measured = (f'{each} loops (on the first 24 held-out windows); '
                f'from there to {max(losses):g} it moves by at most {max(moves):.0e}')
    verdict = reproduced(improves and max(moves) < 0.01)
    return claim, measured, f'{verdict}, flat from {flat[0]:g} loops on'


def c12(t):
    claim = 'end states do not depend on the noise drawn (Geiping)'
    worst = max(column(pick(t['noise'], variant='main'), 'spread'))
    return claim, f'spread over norm at most {worst:.0e}', reproduced(worst < 1e-3)


def c13(t):
    claim = ('the lognormal-Poisson draw is at least as good as fixed and uniform counts '
             'of the same mean (Geiping)')
    names = dict(main='lognormal-Poisson', fixed='fixed', uniform='uniform')
    losses = {}
    for draw in names:
        rows = last_checkpoint(pick(t['losses'], variant=draw))
        losses[draw] = {n: column(pick(rows, loops=n), 'loss') for n in (1, 4, 8)}
    each = '; '.join(f'{names[draw]}: ' + ', '.join(mean_std(v, 3) for v in by_loops.values())
                     for draw, by_loops in losses.items())

    # at 4 and 8 loops: no worse than another draw by more than the spread over seeds
    gaps, good = {}, True
    for other in ('fixed', 'uniform'):
        gap = {n: np.mean(losses['main'][n]) - np.mean(losses[other][n]) for n in (1, 4, 8)}
        spread = SAME
        if len(losses[other][4]) > 1:
            spread = np.sqrt(np.var(losses[other][4], ddof=1) + np.var(losses['main'][4], ddof=1))
        good = good and max(gap[4], gap[8]) <= spread
        gaps[other] = gap
    fixed, uniform = gaps.values()
    verdict = (f'{reproduced(good)} at 4 and 8 loops, within the spread ({fixed[8]:+.3f} against '
               f'fixed, {uniform[8]:+.3f} against uniform); '
               f'at 1 loop {fixed[1]:+.3f} and {uniform[1]:+.3f}')
    return claim, f'held-out loss at 1, 4, 8 loops: {each}', verdict


def q1(t):
    claim = 'does any per-token rule beat a fixed budget, and how far is it from the oracle?'
    times, each = {}, []
    for rule in ('fixed', 'norm', 'norm_rel', 'kl', 'accel', 'accel_rel', 'oracle'):
        line = f"`{rule}` {mean_std(cheapest(t, rule, 'mean_evals'))}"
        if rule != 'oracle':        # its choices cost what no rule could spend
            times[rule] = cheapest(t, rule, 'ms_per_token')
            line += f' ({mean_std(times[rule], 1)} ms)'
        each.append(line)
    faster = [rule for rule in times if np.mean(times[rule]) < np.mean(times['fixed'])]
    verdict = 'yes: ' + ', '.join(faster) if faster else 'no rule beats it in time'
    measured = f'block maps a group within {SAME} nats of the full budget: {"; ".join(each)}'
    return claim, measured, verdict


def q2(t):
    claim = 'what do the second hit and the thrown-away step buy?'
    changes = ('accel', 'accel, one hit', 'accel, step kept', 'accel, one hit, step kept',
               'norm', 'norm, two hits')
    evals = {}
    for change in changes:
        rule = change.split(',')[0]
        rules = 'accel' if change == 'norm' else change     # as printed, all rules are in one run
        evals[change] = cheapest(t, rule, 'mean_evals', rules=rules)
    each = '; '.join(f"{'accel as printed' if change == 'accel' else change}: {mean_std(values)}"
                     for change, values in evals.items())
    measured = f'block maps a group within {SAME} nats of the full budget: {each}'

    # the changes that need no more block maps than the step norm, to a tenth of one
    bound = np.mean(evals['norm']) + 0.1
    good = [change for change in changes
            if change.startswith('accel') and np.mean(evals[change]) <= bound]
    smallest = min(good, key=lambda change: change.count(','), default=None)
    if smallest == 'accel':
        return claim, measured, 'as printed it is not dominated'
    rest = 'so is every change tried'
    if smallest:
        rest = 'the smallest change that is not: ' + smallest.removeprefix('accel, ')
    return claim, measured, f'as printed it is dominated by the step norm; {rest}'


CLAIMS = dict(C1=c1, C2=c2, C3=c3, C4=c4, C5=c5, C6=c6, C7=c7, C8=c8, C9=c9, C10=c10,
              C11=c11, C12=c12, C13=c13, Q1=q1, Q2=q2)


def verdicts(t):
    """{name: (what the paper says, what was measured, the verdict)} for the CSVs of a scale."""
    names = list(CLAIMS)
    if t['scale'] != 'small':       # other draws are trained at the small scale only
        names.remove('C13')
    return {name: CLAIMS[name](t) for name in names}
