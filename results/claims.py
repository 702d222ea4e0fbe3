"""
The paper's claims, each with what was measured and a verdict, computed from results/SCALE/*.csv.

Not run by itself: table.py puts them into results/README.md. Every bound stands in the function of
its claim or above it, once for all regimes. A mean is over seeds, ± is their standard deviation.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10, C14). Geiping: 3.3, 5, 6 (C11 to C13).

    t           {name of a CSV: its rows}, and the variant that the claims are read from; a row is a
                dict with numbers as floats
    variant     a training: see run.py
    k           the loop step, from 0
    CE          cross-entropy, nats a token
    ms          milliseconds a token, with one row in the batch
    blocks      layers evaluated in the groups, a token: a group of two layers costs two
"""
import numpy as np

from bench import same as SAME
from results.rows import at_checkpoint, column, distinct, mean_std, pick

PAPER_TAUS = (1e-5, 1e-4, 1e-3, 1e-2)       # the paper's sweep; ours goes on to 10
RULES = ('norm', 'norm_rel', 'kl', 'accel', 'accel_rel')
CSVS = 'machine steps settled dlr noise loops spectrum losses minutes bench checks budgets'.split()
TASK_CSVS = ('phases', 'points', 'short')
NEAR = 0.45, 0.7                            # 0.5 to 0.65, rounded: C2
STUDENT = 4.303                             # 97.5% of t with two degrees of freedom: three seeds


def of(t, name, **conditions):
    """Rows of the variant that the claims are read from."""
    return pick(t[name], variant=t['variant'], **conditions)


def trained_loops(t):
    """Mean loops of the draw in training, r + 1."""
    return dict(small=5.0, tasks=9.0, paper=13.0)[t['scale']]


def reproduced(holds):
    return 'reproduced' if holds else 'not reproduced'


# what the geometry of a group says --------------------------------------------------------------

def by_group(t, key, which=max, table='settled'):
    """{group: the column's value of each seed} at the last checkpoint, or (min) at the first."""
    rows = at_checkpoint(of(t, table), which)
    return {group: [np.nan if v == '' else v for v in column(pick(rows, group=group), key)]
            for group in distinct(rows, 'group')}


def before_after(t, key, digits=2):
    """A column of each group before training and after it, in words."""
    before, after = by_group(t, key, min), by_group(t, key)
    return '; '.join(f'group {group}: {np.mean(before[group]):.{digits}f} → '
                     f'{mean_std(after[group], digits)}' for group in after)


# what the benchmark says ------------------------------------------------------------------------

def sweep(t, rule, tau, key):
    """A column of bench.csv for a rule as printed at one tau: an array, one value a seed."""
    return np.array(column(of(t, 'bench', rules='accel', rule=rule, tau=tau, cache='exact',
                              past='False'), key))


def taus_of(t, rule):
    return distinct(of(t, 'bench', rules='accel', rule=rule, cache='exact', past='False'), 'tau')


def cheapest(t, rule, cost, taus=None, rules='accel', cache='exact', past='False'):
    """
    The least cost of a rule whose CE is within SAME of the full budget with 95% confidence: an
    array, one value a seed, nan where no point is.

    Between the last point that is good enough and the next one it is interpolated, so that the grid
    of thresholds does not decide; a fixed budget's loops are whole. cost: a column. taus: None =
    all. rules: the variant of the rule.
    """
    rows = [row for row in of(t, 'bench', rules=rules, rule=rule, cache=cache, past=past)
            if taus is None or row['tau'] in taus]
    costs = []
    for seed in distinct(of(t, 'bench'), 'seed'):
        # from the best quality on: of a rule small thresholds, of a budget many loops
        mine = sorted(pick(rows, seed=seed), key=lambda row: row['tau'], reverse=rule == 'fixed')
        costs.append(least(mine, cost, whole=rule == 'fixed'))
    return np.array(costs)


def least(rows, cost, gap='diff_high', whole=False):
    """
    Of rows from good to bad: the cost where the upper end of the loss crosses SAME, or nan. whole:
    of the last good row.
    """
    good = [i for i, row in enumerate(rows) if row[gap] <= SAME]
    if not good:
        return np.nan
    here = rows[good[-1]]
    if whole or good[-1] + 1 == len(rows):
        return here[cost]
    beyond = rows[good[-1] + 1]
    share = (SAME - here[gap]) / (beyond[gap] - here[gap])
    return here[cost] + share * (beyond[cost] - here[cost])


def ratio_in_words(values):
    """Ratios of all seeds, or how many seeds have one."""
    values = np.array(values)
    there = values[~np.isnan(values)]
    if len(there) < len(values):
        return f'none in {len(values) - len(there)} of {len(values)} seeds'
    return mean_std(there)


# the claims: each returns (what was measured, the verdict) ----------------------------------------

def c1(t):
    """
    the step norm falls within 5 to 10 steps

    to a tenth (our reading) of that at k = 1, in every group and seed
    """
    tenths = by_group(t, 'tenth')
    all_of = np.concatenate(list(tenths.values()))
    if not (all_of <= 10).all():        # nan, where it never falls, is not
        verdict = 'not reproduced'
    else:
        verdict = 'reproduced' if (all_of >= 5).all() else 'it falls faster'
        verdict += f', in {min(all_of):g} to {max(all_of):g}'
    return f"tenfold, from k = 1 on: {before_after(t, 'tenth', 1)} steps", verdict


def c2(t):
    """
    the cosine of consecutive updates settles near 0.5 to 0.65

    0.45 to 0.7 in every seed of the group
    """
    low, high = by_group(t, 'cos_low'), by_group(t, 'cos_high')
    words, passes, near = [], [], 0
    for group, cos in by_group(t, 'cos').items():
        near += NEAR[0] <= min(cos) and max(cos) <= NEAR[1]
        width = np.subtract(high[group], low[group]).mean() / 2
        words.append(f'{mean_std(cos)} (group {group}; over windows ± {width:.2f})')
        there = seeds_near(t, group)
        if there:
            passes.append(f'the mean of group {group} in {there} of {len(cos)} seeds for a while')
    verdict = 'reproduced' if near == len(words) else (
        f'not reproduced in {len(words) - near} of {len(words)} groups')
    return '; '.join(words), '; '.join([verdict, *passes])


def seeds_near(t, group):
    """
    In how many seeds the mean over the tokens that still move, of which there is at least a tenth,
    comes into the paper's range at some loop step.
    """
    rows = [row for row in at_checkpoint(of(t, 'steps', group=group))
            if row['k'] >= 1 and row['clear'] >= 0.1 and NEAR[0] <= row['cos_clear'] <= NEAR[1]]
    return len(distinct(rows, 'seed'))


def c3(t):
    """
    both strengthen over training: faster decay, updates nearer to orthogonal, steadier cosines

    in every group: the mean over seeds falls by half a step, the size of the mean cosine by 0.05,
    its standard deviation over tokens at all
    """
    groups = by_group(t, 'cos')
    moved = {}
    for key, least_move in dict(tenth=0.5, cos=0.05, cos_std=0.0).items():
        before, after = by_group(t, key, min), by_group(t, key)
        moved[key] = sum(abs(np.mean(after[g])) < abs(np.mean(before[g])) - least_move
                         for g in groups)
    n = len(groups)
    measured = (f"cosine {before_after(t, 'cos')}; its standard deviation over tokens "
                f"{before_after(t, 'cos_std', 3)}; steps see C1")
    verdict = 'reproduced' if all(count == n for count in moved.values()) else (
        f"of {n} groups: faster in {moved['tenth']}, nearer to orthogonal in {moved['cos']}, "
        f"steadier in {moved['cos_std']}")
    return measured, verdict


def c4(t):
    """
    the drift-to-loop ratio is far above 1 at the hand-offs

    above 5 after training in every reading, hand-off and seed
    """
    rows = of(t, 'dlr')
    if not rows:
        return 'one group', 'no hand-off'
    words, bounds = [], {}
    for K in (2.0, 5.0, 9.0, 30.0):
        readings = []
        for reading in ('first', 'settled', 'noise'):
            before, after = (pick(at_checkpoint(rows, which), loops=K, reading=reading)
                             for which in (min, max))
            of_seeds = [np.mean(column(pick(after, seed=seed), 'ratio'))
                        for seed in distinct(after, 'seed')]
            readings.append(f"{np.mean(column(before, 'ratio')):.1f} → {mean_std(of_seeds, 1)}")
            bounds.setdefault(K, []).append(min(column(after, 'ratio')))
        words.append(f"K = {K:g}: {', '.join(readings)}")
    measured = ("to the next group's first iterate, its last, its noise, "
                f"before → after training: {'; '.join(words)}")
    far = [K for K, some in bounds.items() if min(some) > 5]
    if len(far) in (0, len(bounds)):
        return measured, reproduced(far)
    return measured, f'from {min(far):g} loops on: K sets it'


def c5(t):
    """
    tight arcs inside loops, larger jumps between groups

    a jump is longer than the whole path after its first step, at 30 loops, in every seed
    """
    rows = of(t, 'dlr', reading='jump over arc', loops=30.0)
    if not rows:
        return 'one group', 'no hand-off'
    before, after = (column(at_checkpoint(rows, which), 'ratio') for which in (min, max))
    measured = (f'a jump over the whole path in the loop after its first step: '
                f'{mean_std(before)} → {mean_std(after)}')
    verdict = reproduced(min(after) > 1)
    if min(after) > 1 and max(before) < min(after):
        verdict += ', learnt'
    return measured, verdict


def c6(t):
    """
    `accel` takes a third less time or better from τ = 1e-5 to 1e-2 (580 → 360 ms, 0.62)

    the mean over seeds is at most 2/3
    """
    ratios = {rule: sweep(t, rule, 1e-2, 'ms_per_token') / sweep(t, rule, 1e-5, 'ms_per_token')
              for rule in RULES}
    maps = {rule: sweep(t, rule, 1e-2, 'mean_evals') / sweep(t, rule, 1e-5, 'mean_evals')
            for rule in RULES}
    measured = 'of the time (of the block maps): ' + ', '.join(
        f'`{rule}` {mean_std(ratio)} ({np.mean(maps[rule]):.2f})' for rule, ratio in ratios.items())
    holds = {rule: ratio.mean() <= 2 / 3 for rule, ratio in ratios.items()}
    verdict = reproduced(holds['accel'])
    if sum(holds.values()) > 1 and holds['accel']:
        verdict += f' (for {sum(holds.values())} of {len(RULES)} rules)'
    return measured, verdict


def c7(t):
    """
    `accel` and KL keep PPL flat over the sweep

    to 0.5%, in every seed, at every τ of the paper's
    """
    worst = {}
    for rule in RULES:
        # of a seed and a tau; PPL = exp(CE), so a difference of CE is a ratio of PPL
        worst[rule] = np.abs([np.expm1(sweep(t, rule, tau, 'ce_minus_full'))
                              for tau in PAPER_TAUS]).max()
    measured = 'PPL moves by at most: ' + ', '.join(
        f'`{rule}` {100 * share:.2f}%' for rule, share in worst.items())
    verdict = reproduced(max(worst['accel'], worst['kl']) < 0.005)
    if verdict == 'not reproduced' and min(worst['accel'], worst['kl']) < 0.005:
        verdict += ' for ' + ('`kl`' if worst['kl'] >= 0.005 else '`accel`')
    return measured, verdict


def c8(t):
    """
    the step norm degrades beyond τ = 1e-3, sharply at 1e-2

    by 0.02 nats at 1e-2, mean over seeds
    """
    gaps = {tau: sweep(t, 'norm', tau, 'ce_minus_full') for tau in taus_of(t, 'norm')}
    measured = 'CE above that of the full budget: ' + ', '.join(
        f'{mean_std(gap, 4)} at τ = {tau:g}' for tau, gap in gaps.items() if tau >= 1e-3)
    if gaps[1e-2].mean() > 0.02:
        return measured, 'reproduced'
    beyond = [tau for tau, gap in gaps.items() if gap.mean() > 0.02]
    return measured, f'at another τ: from {min(beyond):g} on' if beyond else 'not reproduced'


def c9(t):
    """
    at equal quality `accel` is faster than KL

    in the mean over seeds, with 50,304 words
    """
    ratio = cheapest(t, 'accel', 'ms_per_token') / cheapest(t, 'kl', 'ms_per_token')
    checks = {row['model']: 100 * row['us'] / row['step_us']
              for row in of(t, 'checks', rule='kl')}
    shares = ', '.join(f'{share:.0f}% at {model}' for model, share in checks.items())
    measured = (f'time of `accel` over that of KL: {ratio_in_words(ratio)}; a check of KL, of a '
                f'loop step: {shares}')
    if t['scale'] == 'paper':
        return measured, reproduced(np.mean(ratio) < 1)
    return measured, 'not testable at this vocabulary'


def c10(t):
    """
    `accel` is robust to the threshold (here τ from 1e-5 to 10)

    at no τ more than 0.005 nats, mean over seeds
    """
    gaps = {rule: max((sweep(t, rule, tau, 'ce_minus_full') for tau in taus_of(t, rule)),
                      key=np.mean) for rule in RULES}
    worst = {rule: gap.mean() for rule, gap in gaps.items()}
    fewest = min(sweep(t, 'accel', tau, 'mean_evals').min() for tau in taus_of(t, 'accel'))
    measured = 'worst CE above that of the full budget: ' + ', '.join(
        f'`{rule}` {mean_std(gap, 4)}' for rule, gap in gaps.items())
    measured += f'; `accel` never takes fewer than {fewest:.1f} block maps'
    verdict = reproduced(worst['accel'] <= SAME)
    others = [f'`{rule}`' for rule in RULES if rule != 'accel' and worst[rule] <= SAME]
    return measured, verdict + (', and so is ' + ', '.join(others) if others else '')


def c11(t):
    """
    loss improves with test-time loops and stays stable far past training (Geiping)

    less at 4 loops than at 1 in every seed, and from those of training to 256 never 0.01 more
    """
    rows = [row for row in of(t, 'loops') if row['where'] == 'held out']
    losses = {n: np.array(column(pick(rows, loops=n), 'loss')) for n in distinct(rows, 'loops')}
    trained = trained_loops(t)
    worse = max((losses[n] - losses[trained]).max() for n in losses if n > trained)
    flat = [n for n in losses if abs(np.mean(losses[n] - losses[max(losses)])) < SAME]
    measured = ', '.join(f'{mean_std(losses[n], 3)} at {n:g}' for n in losses if n <= 32)
    measured += f'; from {trained:g} to {max(losses):g} worse by at most {max(worse, 0):.0e}'
    verdict = reproduced((losses[1.0] > losses[4.0]).all() and worse < 0.01)
    return measured, f'{verdict}, flat from {min(flat):g} loops on'


def c12(t):
    """
    end states do not depend on the noise drawn (Geiping)

    after 30 loops the worst token's spread is below a thousandth of its norm
    """
    worst = {n: [max(column(of(t, 'noise', loops=n, seed=seed), 'largest'))
                 for seed in distinct(of(t, 'noise'), 'seed')]
             for n in distinct(of(t, 'noise'), 'loops')}
    measured = 'spread over norm, the worst token, by seed: ' + ', '.join(
        f'{min(values):.0e} to {max(values):.0e} after {n:g} loops' for n, values in worst.items())
    return measured, reproduced(max(worst[30.0]) < 1e-3)


def c13(t):
    """
    the lognormal-Poisson draw is at least as good as uniform counts of the same mean (Geiping;
    fixed counts are ours)

    at r + 1 loops the paired difference is not above 0 with 95% confidence
    """
    names = dict(small=('main', 'fixed', 'uniform'),
                 tasks=('as it is', 'fixed loop counts', 'uniform draw'))[t['scale']]
    trained = trained_loops(t)
    if len({tuple(distinct(pick(t['loops'], variant=name), 'seed')) for name in names}) > 1:
        return 'not run yet', 'not run yet'
    words, verdicts = [], []
    wheres = [w for w in distinct(pick(t['loops'], variant=names[0]), 'where')]
    for where in wheres:
        for n in (1.0, trained, 32.0):
            values = {name: np.array(column(pick(t['loops'], variant=name, loops=n, where=where),
                                            'loss')) for name in names}
            each = []
            for other in names[1:]:
                low, high = paired(values[names[0]] - values[other])
                each.append(f'{np.mean(values[names[0]] - values[other]):+.3f} [{low:+.3f}, '
                            f'{high:+.3f}]')
                if n == trained and where == 'held out' and other == names[2]:
                    verdicts.append('undecided' if low < 0 < high else reproduced(high <= 0))
            words.append(f"{where}, {n:g} loops: {' and '.join(each)}")
    which = 'one looped layer, 300 iterations: ' if t['scale'] == 'tasks' else ''
    return (which + 'loss minus that of fixed and of uniform counts, paired over seeds [95%]: '
            + '; '.join(words)), verdicts[0] + f' at {trained:g} loops'


def paired(differences):
    """95% interval of a mean over three seeds, by Student's t; nan for one."""
    if len(differences) != 3:
        return np.nan, np.nan
    half = STUDENT * differences.std(ddof=1) / 3 ** 0.5
    return differences.mean() - half, differences.mean() + half


def c14(t):
    """
    `accel` is faster than the step norm at equal quality (the headline)

    in every seed
    """
    ratio = cheapest(t, 'accel', 'ms_per_token') / cheapest(t, 'norm', 'ms_per_token')
    blocks = cheapest(t, 'accel', 'blocks') / cheapest(t, 'norm', 'blocks')
    measured = (f'`accel` over `norm`: time {ratio_in_words(ratio)}, blocks '
                f'{ratio_in_words(blocks)}')
    least_blocks = [min(column(of(t, 'bench', rules='accel', rule='accel', cache='exact',
                                  past='False', seed=seed), 'blocks'))
                    for seed in distinct(of(t, 'bench'), 'seed')]
    if (cheapest(t, 'accel', 'blocks') == least_blocks).all():
        measured += ', and `accel` can take no fewer than here'
    if np.isnan(ratio).any():
        return measured, 'undecided'
    return measured, reproduced(ratio.max() < 1)


def best_budgets(t):
    """The fewest blocks of fixed loops that differ by group, within SAME: one value a seed."""
    found = []
    for seed in distinct(of(t, 'budgets'), 'seed'):
        good = [row for row in of(t, 'budgets', seed=seed) if row['gap_high'] <= SAME]
        best = min(good, key=lambda row: row['blocks'], default=dict(blocks=np.nan, budget='none'))
        found.append((best['blocks'], best['budget']))
    return found


def q1(t):
    """does any per-token rule beat a fixed budget, and how far is the oracle of distance?"""
    words, blocks, ms = [], {}, {}
    for rule in ('fixed', *RULES, 'oracle'):
        blocks[rule] = cheapest(t, rule, 'blocks')
        words.append(f'`{rule}` {ratio_in_words(blocks[rule])}')
        if rule != 'oracle':            # its choices cost what no rule could spend
            ms[rule] = cheapest(t, rule, 'ms_per_token')
            words[-1] += f' ({mean_std(ms[rule], 1)} ms)'
    budgets = best_budgets(t)
    words.append(f'fixed by group {ratio_in_words([b for b, _ in budgets])} '
                 f"({', '.join(name for _, name in budgets)})")
    fixed = np.minimum(blocks['fixed'], [b for b, _ in budgets])
    fewer = [f'`{rule}`' for rule in RULES if (blocks[rule] < fixed).all()]
    faster = [f'`{rule}`' for rule in RULES if (ms[rule] < ms['fixed']).all()]
    verdict = (f"in blocks {', '.join(fewer) or 'none'}; in time {', '.join(faster) or 'none'} "
               '(in every seed)')
    return f'blocks within {SAME} nats: {"; ".join(words)}', verdict


def q2(t):
    """what do the second hit and the thrown-away step buy?"""
    changes = ('accel', 'accel, one hit', 'accel, step kept', 'accel, one hit, step kept',
               'norm', 'norm, two hits')
    blocks = {}
    for change in changes:
        # as printed, all rules are in one sweep
        rules = 'accel' if change in ('accel', 'norm') else change
        blocks[change] = cheapest(t, change.split(',')[0], 'blocks', rules=rules)
    each = '; '.join(f'{change} {ratio_in_words(values)}' for change, values in blocks.items())
    good = [change for change in changes if change.startswith('accel')
            and (blocks[change] <= blocks['norm']).all()]
    verdict = f"no more blocks than the step norm in every seed: {'; '.join(good) or 'none'}"
    return f'blocks within {SAME} nats: {each}', verdict


CLAIMS = dict(C1=c1, C2=c2, C3=c3, C4=c4, C5=c5, C6=c6, C7=c7, C8=c8, C9=c9, C10=c10, C11=c11,
              C12=c12, C13=c13, C14=c14, Q1=q1, Q2=q2)


def says(name):
    """What the paper says, or what is asked, and when it holds: a claim's two paragraphs."""
    said, _, holds = CLAIMS[name].__doc__.partition('\n\n')
    return ' '.join(said.split()), ' '.join(holds.split())


def verdicts(t):
    """{name: (what was measured, the verdict)} of the claims that the variant has runs for."""
    names = list(CLAIMS)
    if t['variant'] not in ('main', 'calc groups') or t['scale'] == 'paper':
        names.remove('C13')         # other draws are trained beside these alone
    return {name: CLAIMS[name](t) for name in names}
