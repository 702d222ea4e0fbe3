"""
The claims of the papers as numbers with verdicts, and the tables of the pages, from the CSVs.

    python -m results.run --only_table      writes the tables; a test compares them with the pages

A claim is a function of one run, which returns its number and whether the claim holds there, None
if that cannot be told. Its docstring: what the paper says; what the number is; the bound.

Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10, C14). Geiping: 5, 6 (C11, C12).

    r           the rows of one run: {name of a CSV: rows}, see `runs_of`
    way         a way to decode without its threshold, see measure.py
    good        within SAME nats of the full budget, by the upper end of the 95% interval
    blocks      layers evaluated in the groups, a token: a group of two layers costs two
"""
import numpy as np

from results import runs
from results.measure import CHANGED, INF, LATEST, RULES, WAITING
from results.runs import SAME, column, distinct, head, join, line, mean_std, pick

# what the tables call a regime: its scale and variant
REGIMES = {'recipe': ('text', 'recipe'), 'random adapter': ('text', 'random adapter'),
           'default (Muon, r = 4)': ('text', 'default'), '`calc`': ('tasks', 'calc'),
           '`hop`': ('tasks', 'hop'), 'medium, one seed': ('medium', 'medium'),
           'paper scale': ('paper', 'paper')}
PAPER_TAUS = (1e-5, 1e-4, 1e-3, 1e-2)
NEAR = 0.45, 0.7                    # 0.5 to 0.65, rounded: C2
NOISE = 0.05                        # no verdict in time within 5%, or within the A/A difference


# what a run says --------------------------------------------------------------------------------

def runs_of(t, variant):
    """The tables of a scale for each seed of a variant, without those that have no rows of it."""
    seeds = distinct(pick(t.get('losses', []), variant=variant), 'seed')
    tables = {name: rows for name, rows in t.items() if name != 'machine'}
    return [{name: some for name, rows in tables.items()
             if (some := pick(rows, variant=variant, seed=seed))} for seed in seeds]


def last(rows, which=max):
    """The rows of the last (max) or first (min) checkpoint."""
    at = which(column(rows, 'iteration'))
    return pick(rows, iteration=at)


def costs(r, way):
    """
    The fewest blocks with which a way is good, nan if it never is. Of a rule, interpolated between
    its last good threshold and the next; budgets are whole.
    """
    rows = pick(last(r['sweep']), way=way)
    good = [row for row in rows if row['high'] <= SAME]
    if not good:        # no group can spare a loop of the best budget for all groups
        return costs(r, 'fixed') if way == 'by group' else np.nan
    best = min(good, key=lambda row: row['blocks'])
    if way.startswith(('fixed', 'by group')):
        return best['blocks']
    return between(best, min((row for row in rows if row['tau'] > best['tau']),
                             key=lambda row: row['tau'], default=best), 'blocks')


def between(good, beyond, cost):
    """A cost where the upper end of the gap is SAME, on the line from a good row to one beyond."""
    if beyond['high'] <= SAME:
        return good[cost]
    share = (SAME - good['high']) / (beyond['high'] - good['high'])
    return good[cost] + share * (beyond[cost] - good[cost])


def coin(r, way='fixed'):
    """
    A coin flip between two neighbouring budgets in each window: (blocks, time over the better).

    The mean cost and the mean gap lie on the line between both budgets, the interval's end at most.
    Of other ways than 'fixed' the time is nan: the smaller budget was not timed.
    """
    rows = sorted(pick(last(r['sweep']), way=way), key=lambda row: row['tau'])
    i = min(i for i, row in enumerate(rows) if row['high'] <= SAME)
    if way != 'fixed':
        return (between(rows[i], rows[i - 1], 'blocks') if i else rows[i]['blocks']), np.nan
    if not i:
        return rows[i]['blocks'], 1.0
    fewer = rows[i - 1] | dict(over=time(r, 'fixed, fewer'))
    return tuple(between(rows[i] | dict(over=1.0), fewer, cost) for cost in ('blocks', 'over'))


def time(r, way):
    """A way's time over that of the best fixed budget, nan if the way is never good."""
    rows = pick(r['times'], way=way)
    if not rows and way == 'by group':
        return time(r, 'fixed')
    return rows[0]['over'] if rows else np.nan


def faster(r, ratio, than=1.0):
    """Is a ratio of times below a bound? None if it is within the noise of timing."""
    noise = max(NOISE, abs(time(r, 'fixed again') - 1))
    return None if not abs(ratio - than) > noise else bool(ratio < than)


def at_cost(r, way, key, blocks):
    """A column of a way's sweep at this many blocks, interpolated; nan if it never takes so few."""
    rows = sorted(pick(last(r['sweep']), way=way), key=lambda row: row['blocks'])
    few = rows[0]['blocks'] > blocks + 1e-6
    return np.nan if few else np.interp(blocks, column(rows, 'blocks'), column(rows, key))


def breaks_at(r, way):
    """The largest threshold at which a way is good, INF if it is good at every one."""
    good = [row['tau'] for row in pick(last(r['sweep']), way=way) if row['high'] <= SAME]
    return max(good, default=0.0)


def gaps(r, way):
    """{tau: the gap} of a way, over the paper's sweep."""
    return {row['tau']: row['gap'] for row in pick(last(r['sweep']), way=way)
            if row['tau'] in PAPER_TAUS}


# the claims -------------------------------------------------------------------------------------

def c1(r):
    """the step norm falls within 5 to 10 steps; steps to a tenth, the slowest group; at most 10"""
    tenths = [row['tenth'] for row in last(r['settled'])]
    return (np.nan, False) if '' in tenths else (max(tenths), max(tenths) <= 10)


def c2(r):
    """the cosine of consecutive updates settles near 0.5 to 0.65;
    share of groups that settle between 0.45 and 0.7; all of them"""
    near = np.mean([NEAR[0] <= row['cos'] <= NEAR[1] for row in last(r['settled'])])
    return near, near == 1


def c3(r):
    """over training steps fall faster, and cosines come nearer to 0 and grow steadier;
    share of these that hold (a tenth in 0.5 steps less, absolute cosine 0.05 less, its deviation);
    all, in every group"""
    holds = []
    for before, after in zip(last(r['settled'], min), last(r['settled'])):
        holds += [after['tenth'] != '' and (before['tenth'] == ''
                                            or after['tenth'] <= before['tenth'] - 0.5),
                  abs(after['cos']) < abs(before['cos']) - 0.05,
                  after['cos_std'] < before['cos_std']]
    return np.mean(holds), all(holds)


def c4(r):
    """the drift-to-loop ratio is far above 1 (here at K = 9);
    the least ratio of all hand-offs and readings; above 5"""
    rows = [row for row in last(r['dlr']) if row['loops'] == 9 and row['reading'] in (
        'noise', 'first', 'settled')]
    least = min(column(rows, 'ratio'))
    return least, least > 5


def c5(r):
    """tight arcs inside loops, larger jumps between groups;
    a jump over the path of 30 loops after the first step, the least; above 1"""
    least = min(column(pick(last(r['dlr']), loops=30, reading='jump over arc'), 'ratio'))
    return least, least > 1


def c6(r):
    """`accel` takes a third less time at τ = 1e-2 than at 1e-5;
    time at 1e-2 over that at 1e-5; at most 2/3"""
    ratio = time(r, 'accel 0.01') / time(r, 'accel 1e-05')
    return ratio, faster(r, ratio, 2 / 3)


def c7(r):
    """`accel` and KL keep PPL flat over the paper's sweep;
    % that PPL moves by, at most; below 0.5"""
    moved = [abs(np.expm1(gap)) for way in ('accel', 'kl') for gap in gaps(r, way).values()]
    return 100 * max(moved), max(moved) < 0.005


def c8(r):
    """the step norm degrades at τ = 1e-2; nats above the full budget there; above 0.02"""
    gap = gaps(r, 'norm')[1e-2]
    return gap, gap > 0.02


def c9(r):
    """at equal quality `accel` is faster than KL; time of `accel` over that of KL; below 1"""
    ratio = time(r, 'accel') / time(r, 'kl')
    return ratio, faster(r, ratio)


def c10(r):
    """`accel` is robust to the threshold;
    its largest good τ over that of the step norm; at least 10"""
    ratio = breaks_at(r, 'accel') / breaks_at(r, 'norm') if breaks_at(r, 'norm') else np.nan
    return ratio, ratio >= 10


def c11(r):
    """loss improves with loops and stays far past training (Geiping);
    loss at 256 loops minus that at r + 1; below 0.01, and 4 loops better than 1"""
    losses = {row['loops']: row['loss'] for row in r['loops']}
    worse = losses[256] - losses[{'default': 5, 'calc': 9, 'hop': 9, 'medium': 7}.get(
        r['loops'][0]['variant'], 13)]
    return worse, worse < 0.01 and losses[4] < losses[1]


def c12(r):
    """end states do not depend on the noise drawn (Geiping);
    spread over norm after 30 loops, the worst token; below 0.001"""
    worst = max(column(pick(r['noise'], loops=30), 'largest'))
    return worst, worst < 1e-3


def c14(r):
    """`accel` is faster than the step norm at equal quality (the headline);
    time of `accel` over that of the step norm; below 1"""
    ratio = time(r, 'accel') / time(r, 'norm')
    return ratio, faster(r, ratio)


def c14_blocks(r):
    """the same without a clock; blocks of `accel` over those of the step norm; below 1"""
    ratio = costs(r, 'accel') / costs(r, 'norm')
    return ratio, ratio < 1


def q1(r):
    """a rule that decides for each token beats a fixed budget;
    time of the best rule over that of the best budget; below 1"""
    budget = min(1.0, coin(r)[1], time(r, 'by group'))
    ratio = np.nanmin([time(r, rule) for rule in RULES]) / budget
    return ratio, faster(r, ratio)


def q1_blocks(r):
    """the same without a clock;
    blocks of the best rule over those of the best budget, coin flips included; below 1"""
    ratio = (np.nanmin([costs(r, rule) for rule in RULES])
             / min(coin(r)[0], costs(r, 'by group')))
    return ratio, ratio < 1


def q1_latest(r):
    """the same with `latest`;
    blocks of the best rule over those of a coin flip between two budgets; below 1"""
    rules = [costs(r, f'{rule}, latest') for rule in ('norm_rel', 'kl', 'accel')]
    ratio = np.nanmin(rules) / coin(r, 'fixed, latest')[0]
    return ratio, ratio < 1


def q2(r):
    """the acceleration knows more than the norm of the step before;
    blocks of `accel` over those of the delayed norm; below 0.98"""
    ratio = costs(r, 'accel') / costs(r, 'delayed norm')
    return ratio, ratio < 0.98


CLAIMS = {'C1': c1, 'C2': c2, 'C3': c3, 'C4': c4, 'C5': c5, 'C6': c6, 'C7': c7, 'C8': c8,
          'C9': c9, 'C10': c10, 'C11': c11, 'C12': c12, 'C14': c14, 'C14b': c14_blocks, 'Q1': q1,
          'Q1b': q1_blocks, 'Q1c': q1_latest, 'Q2': q2}


# tables -----------------------------------------------------------------------------------------

def number(value):
    return f'{value:.0e}' if 0 < abs(value) < 5e-3 or abs(value) >= 1e3 else f'{value:.2f}'


def cell(claim, of):
    """The claim's mean over seeds, and in how many it holds; ? where some cannot be told."""
    if not of:
        return '–'
    values, holds = zip(*(claim(r) for r in of))
    share = f'{holds.count(True)}/{len(holds)}'
    words = {len(holds): '**yes**', 0: 'no'}.get(holds.count(True), share)
    if None in holds:
        words = f'? ({share})'
    known = [value for value in values if not np.isnan(value)]
    return f'{number(np.mean(known))} {words}' if known else f'none {words}'


def swept(tables):
    """{what the tables call a regime: the rows of its seeds} of those that have been swept."""
    return {name: some for name, (scale, variant) in REGIMES.items()
            if (some := [r for r in runs_of(tables.get(scale, {}), variant) if 'sweep' in r])}


def verdicts(regimes):
    """A line for each claim: its number and verdict in each regime."""
    yield from head('', 'the claim', 'the number', 'holds if', *regimes)
    for name, claim in CLAIMS.items():
        says = ' '.join(claim.__doc__.split()).split('; ')
        yield line(name, *says, *(cell(claim, of) for of in regimes.values()))


def answer(regimes):
    """A line for each way: its blocks at equal quality, and its time over the best fixed budget."""
    yield from head('', *regimes)
    ways = {'one budget for all groups': 'fixed', 'a budget for each group': 'by group',
            'a coin flip between two budgets': 'coin', '`norm`': 'norm', '`norm_rel`': 'norm_rel',
            '`kl`': 'kl', '`accel`': 'accel', '`accel_rel`': 'accel_rel',
            'the delayed norm': 'delayed norm', 'the oracle of distance': 'oracle',
            'A/A: the first line timed again': 'fixed again',
            '`latest`: one budget for all groups': 'fixed, latest',
            '`latest`: a coin flip': 'coin, latest',
            '`latest`: `norm_rel`': 'norm_rel, latest'}
    for words, way in ways.items():
        cells = []
        for of in regimes.values():
            pairs = [coin(r, way.replace('coin', 'fixed')) if way.startswith('coin') else
                     (costs(r, way.removesuffix(' again')), time(r, way))
                     for r in of]
            blocks, over = (column(pairs, i) for i in (0, 1))
            timed = '' if way == 'fixed' or np.isnan(over).any() else f' ({mean_std(over)})'
            cells.append(blocks_in_words(blocks) + timed)
        yield line(words, *cells)
    for words, kind in {'drafts, checked': 'drafts', 'a wave': 'waves'}.items():
        cells = []
        for of in regimes.values():
            times = over_fixed(of, kind)
            no_budget = any('texts' in r for r in of)
            cells.append(mean_std(times) if times else 'no budget is good' if no_budget else '–')
        yield line(words, *cells)


def blocks_in_words(blocks):
    return 'not always good' if np.isnan(blocks).any() else mean_std(blocks, 1)


def over_fixed(of, kind):
    """The time of the best drafts or wave over the best fixed budget's, by seed; see fastest."""
    pairs = [[fastest(pick(r['texts'], kind=some)) for some in (kind, 'fixed budgets, latest')]
             for r in of if 'texts' in r]
    return [a['ms_text'] / b['ms_text'] for a, b in pairs if a and b]


def fastest(rows, fidelity=0.95):
    """The fastest of these points with enough texts that are the full budget's; None if none is."""
    return min((row for row in rows if row['identical'] >= fidelity),
               key=lambda row: row['ms_text'], default=None)


def settled(tables, scales, along=False):
    """Settled cosines of each group, by seed, at the end of every training, or along it."""
    yield from head('', 'iteration', 'settled cosine of each group, by seed')
    for scale in scales:
        t = tables.get(scale, {}).get('settled', [])
        for variant in distinct(t, 'variant'):
            rows = pick(t, variant=variant)
            for at in distinct(rows if along else last(rows), 'iteration'):
                of = pick(rows, iteration=at)
                yield line(variant, f'{at:g}', ' · '.join(
                    ' '.join(f'{cos:.2f}' for cos in column(pick(of, seed=seed), 'cos'))
                    for seed in distinct(of, 'seed')))


def changes(regimes):
    """What changes of Algorithm 1, waiting and `latest` cost: blocks at equal quality."""
    yield from head('', *regimes)
    for way in (*list(CHANGED)[1:], *WAITING, 'kl, latest', 'accel, latest'):   # not the first
        blocks = [[costs(r, way) for r in of] for of in regimes.values()]
        yield line(way, *map(blocks_in_words, blocks))
    shares = [[100 * row['same'] for r in of for row in last(r['alike']) if 1e-3 <= row['tau'] <= 1]
              for of in regimes.values()]
    yield line('% of tokens that exit at the same step by accel and the delayed norm (τ 1e-3 to 1)',
               *(f'{min(some):.0f} to {max(some):.0f}' for some in shares))


def thresholds(regimes):
    """The largest good threshold of each rule."""
    yield from head('', *regimes)
    for way in RULES:
        taus = [[breaks_at(r, way) for r in of] for of in regimes.values()]
        yield line(f'`{way}`', *(', '.join('∞' if tau == INF else f'{tau:.3g}' for tau in some)
                                 for some in taus))


def promises(regimes):
    """
    Calibrated thresholds and budgets: how many cost at most what they promise on the other half, by
    the mean, and in brackets by the upper end of its interval.
    """
    # fixed loops? the cache policy; does the rule wait?
    kinds = {'own signals': (False, 'exact', 'False'), 'waiting': (False, 'exact', 'True'),
             'latest': (False, 'latest', 'True'), 'fixed loops, exact': (True, 'exact', 'False'),
             'fixed loops, latest': (True, 'latest', 'False')}
    yield from head('promises kept', *kinds, 'worst cost, nats')
    for name, of in regimes.items():
        rows = [row for r in of for row in r.get('promises', []) if row['tau'] != '']
        if rows:
            some = ([row for row in rows if kind == (
                row['rule'] == 'fixed', row['cache'], row['past'])] for kind in kinds.values())
            yield line(name, *map(kept, some), f"{max(column(rows, 'cost')):+.4f}")


def kept(rows):
    """How many of these promises hold, by the mean and by the upper end of its interval."""
    holds = [sum(cost <= SAME for cost in column(rows, key)) for key in ('cost', 'cost_high')]
    return f'{holds[0]} ({holds[1]}) of {len(rows)}' if rows else '–'


def waiting(of, loops=4):
    """
    On `calc`, the runs `of`, at the cost of 4 fixed loops: % of the deepest tenth of the labels
    that the full budget has right and the way wrong; the correlation of a token's steps with its
    depth.
    """
    yield from head('', '% of the deepest answers lost', 'correlation of steps and depth')
    of_a_loop = pick(of[0]['sweep'], way='fixed', tau=1)[0]['blocks']
    for way in ('fixed', *RULES, *WAITING, *LATEST):
        lost, follows = ([at_cost(r, way, key, loops * of_a_loop) for r in of]
                         for key in ('lost_deep', 'with_depth'))
        yield line(way, *(['takes more'] * 2 if np.isnan(lost).any() else
                          [mean_std(100 * np.array(lost), 1), f'{np.mean(follows):.2f}']))


def untrained(regimes):
    """Before training: blocks at equal quality of the ways that were swept then."""
    yield from head('before training, blocks', 'fixed', 'norm', 'kl', 'accel')
    for name, of in regimes.items():
        before = [dict(sweep=last(r['sweep'], min)) for r in of
                  if len(distinct(r['sweep'], 'iteration')) > 1]
        if before:
            yield line(name, *(mean_std([costs(r, way) for r in before], 1)
                               for way in ('fixed', 'norm', 'kl', 'accel')))


def texts(tables):
    """A line for each run: of each kind of decoding the fastest point with enough fidelity."""
    kinds = ('fixed budgets, latest', 'rules, latest', 'drafts', 'waves')
    yield from head('run', 'fixed loops', 'a rule that stops', 'drafts', 'a wave')
    for scale, variant in REGIMES.values():
        for r in runs_of(tables.get(scale, {}), variant):
            if 'texts' not in r:
                continue
            best = [fastest(pick(r['texts'], kind=kind)) for kind in kinds]
            yield line(f"{variant}, seed {r['texts'][0]['seed']:g}",
                       *('none' if row is None else point_in_words(row, best[0]) for row in best))


def point_in_words(row, fixed):
    """A point: what it is, its fidelity, ms a token, and its time over that of fixed loops."""
    name = f"{row['tau']:g} loops" if row['rule'] == 'fixed' else f"{row['rule']} {row['tau']:g}"
    if row['wave'] != '':
        name = f"{row['wave']:g} x {row['wave_steps']:g}, {name}"
    if row['draft_loops'] != '':
        name = f"{row['draft_loops']:g} of {row['tau']:g}"
    over = f" (**{row['ms_text'] / fixed['ms_text']:.2f}**)" if fixed else ''
    return f"{name}: {100 * row['identical']:.0f}%, {row['ms_text']:.2f} ms{over}"


def plain(tables):
    """The loss of plain models, and minutes of training, next to those of looped ones."""
    yield from head('', 'loss', 'minutes')
    for scale in ('text', 'plain', 'medium'):
        t = tables.get(scale, {})
        for variant in distinct(t.get('losses', []), 'variant'):
            for r in runs_of(t, variant):
                spent = column(pick(r['minutes'], what='train'), 'minutes')
                yield line(f"{variant}, seed {r['losses'][0]['seed']:g}",
                           f"{min(column(r['losses'], 'loss')):.3f}", f'{sum(spent):.1f}')


# the pages --------------------------------------------------------------------------------------

def write_pages(folder=runs.HERE):
    """Write the tables of the pages."""
    for (page, block), text in blocks(folder).items():
        runs.write(block, text, folder, page)


def blocks(folder=runs.HERE):
    """{(page, block): its text}, for the parts that have been measured."""
    scales = ('text', 'tasks', 'sizes', 'choices', 'plain', 'medium', 'paper')
    tables = {scale: t for scale in scales if (t := runs.load(scale, folder))}
    regimes = swept(tables)
    where = [f'{scale}: {runs.machine_of(tables[scale])}.'
             for scale in ('text', 'tasks', 'sizes', 'medium', 'paper') if scale in tables]
    made = {('README.md', 'answer'): [answer(regimes)],
            ('README.md', 'verdicts'): [verdicts(regimes)],
            ('README.md', 'settled'): [settled(tables, ('text', 'tasks', 'medium', 'paper'))],
            ('README.md', 'changes'): [changes(regimes)],
            ('details.md', 'details'): [
                where, ['**The largest τ within 0.005 nats**, by seed'], thresholds(regimes),
                ['**Calibrated thresholds**'], promises(regimes),
                ['**Before training**'], untrained(regimes),
                ['**Settled cosines**'], settled(tables, tables, along=True),
                ['**Loss and minutes of training**'], plain(tables)],
            ('waves.md', 'waves'): [texts(tables)]}
    if '`calc`' in regimes:
        made['README.md', 'waiting'] = [waiting(regimes['`calc`'])]
    return {key: join(some) for key, some in made.items()}
