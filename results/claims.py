"""
The paper's claims, each with what was measured and a verdict, computed from results/SCALE/*.csv.

Not run by itself: table.py puts them into results/README.md. Every bound stands in the function of
its claim or above it, once for all regimes. A mean is over seeds, ± is their standard deviation.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10, C14). Geiping: 5, 6 (C11, C12).

    t           {name of a CSV: its rows}, and the variant that the claims are read from
    variant     a training: see run.py
    k           the loop step, from 0
    CE          cross-entropy, nats a token
    ms          milliseconds a token, with one row in the batch
    blocks      layers evaluated in the groups, a token: a group of two layers costs two
"""
import numpy as np

from results.runs import at_checkpoint, column, distinct, mean_std, pick

SAME = 0.005            # nats a token above the full budget that count as equal quality

PAPER_TAUS = (1e-5, 1e-4, 1e-3, 1e-2)       # the paper's sweep; ours extends to 10
RULES = ('norm', 'norm_rel', 'kl', 'accel', 'accel_rel')
NEAR = 0.45, 0.7                            # 0.5 to 0.65, rounded: C2


def of(t, name, **conditions):
    """Rows of the variant that the claims are read from; a missing CSV has none."""
    return pick(t.get(name, []), variant=t['variant'], **conditions)


def trained_loops(t):
    """Mean loops of the draw in training, r + 1."""
    return dict(small=5.0, tasks=9.0, recipe=13.0, paper=13.0)[t['scale']]


def reproduced(holds):
    return 'reproduced' if holds else 'not reproduced'


# what the geometry of a group says --------------------------------------------------------------

def by_group(t, key, which=max):
    """{group: the column's value of each seed} at the last checkpoint, or (min) at the first."""
    rows = at_checkpoint(of(t, 'settled'), which)
    return {group: [np.nan if v == '' else v for v in column(pick(rows, group=group), key)]
            for group in distinct(rows, 'group')}


def before_after(t, key, digits=2):
    """A column of each group before training and after it, in words."""
    before, after = by_group(t, key, min), by_group(t, key)
    return '; '.join(f'group {group}: {np.mean(before[group]):.{digits}f} → '
                     f'{mean_std(after[group], digits)}' for group in after)


# what the benchmark says ------------------------------------------------------------------------

def points(t, rule, rules='accel'):
    """Rows of bench.csv of a rule with `exact`, not waiting for the past; rules: see run.py."""
    return of(t, 'bench', rules=rules, rule=rule, cache='exact', past='False')


def sweep(t, rule, key):
    """A column of bench.csv for a rule: {tau: an array, one value a seed}."""
    rows = points(t, rule)
    return {tau: np.array(column(pick(rows, tau=tau), key)) for tau in distinct(rows, 'tau')}


def cheapest(rows, cost, gap='diff_high'):
    """
    The least cost of a rule's rows whose CE is within SAME of the full budget with 95% confidence:
    an array, one value a seed, nan where no row is.

    Costs are interpolated between the last good row and the next, so that the grid of thresholds
    does not decide; not so for fixed budgets, whose loops are whole. cost, gap: columns.
    """
    return np.array([cheapest_of_seed(pick(rows, seed=seed), cost, gap)
                     for seed in distinct(rows, 'seed')])


def cheapest_of_seed(rows, cost, gap):
    # best quality first: for a rule the smallest threshold, for a budget the most loops
    fixed = rows[0]['rule'] == 'fixed'
    rows = sorted(rows, key=lambda row: row['tau'], reverse=fixed)
    good = [i for i, row in enumerate(rows) if row[gap] <= SAME]
    if not good:
        return np.nan
    here = rows[good[-1]]
    if fixed or good[-1] + 1 == len(rows):
        return here[cost]
    beyond = rows[good[-1] + 1]
    share = (SAME - here[gap]) / (beyond[gap] - here[gap])
    return here[cost] + share * (beyond[cost] - here[cost])


def cost_of(t, rule, cost, rules='accel'):
    return cheapest(points(t, rule, rules), cost)


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
    if not (all_of <= 10).all():        # nan (it never falls) fails too
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
    The number of seeds in which, at some loop step, at least a tenth of the tokens still move and
    their mean cosine lies in the paper's range.
    """
    rows = [row for row in at_checkpoint(of(t, 'steps', group=group))
            if row['k'] >= 1 and row['clear'] >= 0.1 and NEAR[0] <= row['cos_clear'] <= NEAR[1]]
    return len(distinct(rows, 'seed'))


def c3(t):
    """
    both strengthen over training: faster decay, updates nearer to orthogonal, steadier cosines

    in every group, means over seeds: steps to a tenth fall by 0.5, the absolute cosine by 0.05, and
    its standard deviation over tokens falls
    """
    groups = by_group(t, 'cos')
    moved = {}
    for key, least_move in dict(tenth=0.5, cos=0.05, cos_std=0.0).items():
        before, after = by_group(t, key, min), by_group(t, key)
        moved[key] = sum(abs(np.mean(after[g])) < abs(np.mean(before[g])) - least_move
                         for g in groups)
    n = len(groups)
    measured = (f"cosine {before_after(t, 'cos')}; its standard deviation over tokens "
                f"{before_after(t, 'cos_std', 3)}; for steps see C1")
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
    return measured, f'only from {min(far):g} loops on: it grows with K'


def c5(t):
    """
    tight arcs inside loops, larger jumps between groups

    at 30 loops, a jump is longer than the loop's path after the first step, in every seed
    """
    rows = of(t, 'dlr', reading='jump over arc', loops=30.0)
    before, after = (column(at_checkpoint(rows, which), 'ratio') for which in (min, max))
    measured = (f'length of a jump over that of the path after the first step: '
                f'{mean_std(before)} → {mean_std(after)}')
    verdict = reproduced(min(after) > 1)
    if min(after) > 1 and max(before) < min(after):
        verdict += ', learnt'
    return measured, verdict


def c6(t):
    """
    `accel` takes at least a third less time at τ = 1e-2 than at 1e-5 (580 → 360 ms, 0.62)

    the mean over seeds is at most 2/3
    """
    words, holds = [], {}
    for rule in RULES:
        ms, maps = (sweep(t, rule, key) for key in ('ms_per_token', 'mean_evals'))
        ratio = ms[1e-2] / ms[1e-5]
        words.append(f'`{rule}` {mean_std(ratio)} ({np.mean(maps[1e-2] / maps[1e-5]):.2f})')
        holds[rule] = ratio.mean() <= 2 / 3
    measured = f"of the time (of the block maps): {', '.join(words)}"
    verdict = reproduced(holds['accel'])
    if sum(holds.values()) > 1 and holds['accel']:
        verdict += f' (for {sum(holds.values())} of {len(RULES)} rules)'
    return measured, verdict


def c7(t):
    """
    `accel` and KL keep PPL flat over the sweep

    within 0.5% in every seed, at every τ of the paper
    """
    worst = {}
    for rule in RULES:
        # of a seed and a tau; PPL = exp(CE), so a difference of CE is a ratio of PPL
        gaps = sweep(t, rule, 'ce_minus_full')
        worst[rule] = np.abs(np.expm1([gaps[tau] for tau in PAPER_TAUS])).max()
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
    gaps = sweep(t, 'norm', 'ce_minus_full')
    measured = 'CE above that of the full budget: ' + ', '.join(
        f'{mean_std(gap, 4)} at τ = {tau:g}' for tau, gap in gaps.items() if tau >= 1e-3)
    if gaps[1e-2].mean() > 0.02:
        return measured, 'reproduced'
    beyond = [tau for tau, gap in gaps.items() if gap.mean() > 0.02]
    return measured, f'at another τ: from {min(beyond):g} on' if beyond else 'not reproduced'


def c9(t):
    """
    at equal quality `accel` is faster than KL

    in the mean over seeds, with 50,304 tokens
    """
    ratio = cost_of(t, 'accel', 'ms_per_token') / cost_of(t, 'kl', 'ms_per_token')
    measured = f'time of `accel` over that of KL: {ratio_in_words(ratio)}'
    if t['scale'] == 'paper':
        return measured, reproduced(np.mean(ratio) < 1)
    return measured, 'not testable at this vocabulary'


def c10(t):
    """
    `accel` is robust to the threshold (here τ from 1e-5 to 10)

    at no τ more than 0.005 nats, mean over seeds
    """
    gaps = {rule: max(sweep(t, rule, 'ce_minus_full').values(), key=np.mean) for rule in RULES}
    worst = {rule: gap.mean() for rule, gap in gaps.items()}
    fewest = min(column(points(t, 'accel'), 'mean_evals'))
    measured = 'worst CE above that of the full budget: ' + ', '.join(
        f'`{rule}` {mean_std(gap, 4)}' for rule, gap in gaps.items())
    measured += f'; up to there `accel` takes {fewest:.1f} block maps or more'
    verdict = reproduced(worst['accel'] <= SAME)
    others = [f'`{rule}`' for rule in RULES if rule != 'accel' and worst[rule] <= SAME]
    return measured, verdict + (', and so is ' + ', '.join(others) if others else '')


def c11(t):
    """
    loss improves with test-time loops and stays stable far past training (Geiping)

    lower at 4 loops than at 1 in every seed; from those of training to 256 never 0.01 worse
    """
    rows = of(t, 'loops')
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
    rows = of(t, 'noise')
    worst = {n: [max(column(pick(rows, loops=n, seed=seed), 'largest'))
                 for seed in distinct(rows, 'seed')] for n in distinct(rows, 'loops')}
    measured = 'spread over norm, the worst token, by seed: ' + ', '.join(
        f'{min(values):.0e} to {max(values):.0e} after {n:g} loops' for n, values in worst.items())
    return measured, reproduced(max(worst[30.0]) < 1e-3)


def c14(t):
    """
    `accel` is faster than the step norm at equal quality (the headline)

    in every seed
    """
    ratio = cost_of(t, 'accel', 'ms_per_token') / cost_of(t, 'norm', 'ms_per_token')
    blocks = cost_of(t, 'accel', 'blocks') / cost_of(t, 'norm', 'blocks')
    measured = (f'`accel` over `norm`: time {ratio_in_words(ratio)}, blocks '
                f'{ratio_in_words(blocks)}')
    least_blocks = np.min(list(sweep(t, 'accel', 'blocks').values()), axis=0)
    if (cost_of(t, 'accel', 'blocks') == least_blocks).all():
        measured += ', its fewest up to τ = 10'
    if np.isnan(ratio).any():
        return measured, 'undecided'
    return measured, reproduced(ratio.max() < 1)


def best_budgets(t):
    """For each seed the fixed loops by group with the fewest blocks within SAME: blocks, loops."""
    best = []
    for seed in distinct(of(t, 'budgets'), 'seed'):
        good = [row for row in of(t, 'budgets', seed=seed) if row['gap_high'] <= SAME]
        best.append(min(good, key=lambda row: row['blocks'],
                        default=dict(blocks=np.nan, budget='none')))
    return column(best, 'blocks'), column(best, 'budget')


def q1(t):
    """does any per-token rule beat a fixed budget, and how far is the oracle of distance?"""
    words, blocks, ms = [], {}, {}
    for rule in ('fixed', *RULES, 'oracle'):
        blocks[rule] = cost_of(t, rule, 'blocks')
        words.append(f'`{rule}` {ratio_in_words(blocks[rule])}')
        if rule != 'oracle':            # whose choices are not timed
            ms[rule] = cost_of(t, rule, 'ms_per_token')
            words[-1] += f' ({mean_std(ms[rule], 1)} ms)'
    by_group_blocks, budgets = best_budgets(t)
    words.append(f"fixed by group {ratio_in_words(by_group_blocks)} ({', '.join(budgets)})")
    fixed = np.minimum(blocks['fixed'], by_group_blocks)
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
        # unchanged rules share one sweep
        rules = 'accel' if change in ('accel', 'norm') else change
        blocks[change] = cost_of(t, change.split(',')[0], 'blocks', rules)
    each = '; '.join(f'{change} {ratio_in_words(values)}' for change, values in blocks.items())
    good = [change for change in changes if change.startswith('accel')
            and (blocks[change] <= blocks['norm']).all()]
    verdict = f"no more blocks than the step norm in every seed: {'; '.join(good) or 'none'}"
    return f'blocks within {SAME} nats: {each}', verdict


CLAIMS = dict(C1=c1, C2=c2, C3=c3, C4=c4, C5=c5, C6=c6, C7=c7, C8=c8, C9=c9, C10=c10, C11=c11,
              C12=c12, C14=c14, Q1=q1, Q2=q2)


def says(name):
    """What the paper says, or what is asked, and when it holds: a claim's two paragraphs."""
    said, _, holds = CLAIMS[name].__doc__.partition('\n\n')
    return ' '.join(said.split()), ' '.join(holds.split())


def verdicts(t):
    """{name: (what was measured, the verdict)}, without a sweep only of what needs none."""
    return {name: claim(t) for name, claim in CLAIMS.items()
            if 'bench' in t or name in ('C1', 'C2', 'C3', 'C4', 'C5', 'C11', 'C12')}
