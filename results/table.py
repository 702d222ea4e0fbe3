"""
The tables of results/README.md, so that they cannot drift from what was measured.

    python -m results.run --only_table          writes them between the two markers of that page

A test holds the page to what `markdown` gives. What each claim says is in claims.py.
"""
import os

from geometry import CLEAR
from results.claims import CLAIMS, TASK_CSVS, says, verdicts
from results.claims import CSVS as CLAIM_CSVS
from results.rows import HERE, at_checkpoint, column, distinct, lines, load, mean_std, pick
from results.waves import wave_blocks

BEGIN = '<!-- claims: written by `python -m results.run --only_table` -->'
END = '<!-- end of claims -->'

# the columns of the claims: (scale, variant), and what the page calls it
REGIMES = {('small', 'main'): 'text', ('small', 'random'): 'text, random adapter',
           ('tasks', 'calc groups'): '`calc`', ('tasks', 'hop groups'): '`hop`',
           ('paper', 'main'): 'paper scale'}


def regimes(folder):
    """{what the page calls a regime: its verdicts}, {} where it has not been run."""
    found = {}
    for (scale, variant), name in REGIMES.items():
        there = os.path.exists(os.path.join(folder, scale, 'bench.csv'))
        found[name] = verdicts(load(scale, folder, CLAIM_CSVS, variant)) if there else {}
    return found


def verdict_table(found):
    """Lines of Markdown, one a claim: the verdict in each regime."""
    yield lines('', 'the paper says', 'holds if', *found)
    yield '|---' * (3 + len(found)) + '|'
    for name in CLAIMS:
        cells = [of[name][1] if name in of else '–' if of else 'not run yet'
                 for of in found.values()]
        yield lines(name, *says(name), *cells)


def measured_table(found):
    """Lines of Markdown, one a claim and regime: what was measured."""
    yield lines('', '', 'measured')
    yield '|---|---|---|'
    for name in CLAIMS:
        for regime, of in found.items():
            if name in of:
                yield lines(name, regime, of[name][0])


def choices_table(t):
    """Lines of Markdown, one an open choice (Q3)."""
    groups = distinct(t['steps'], 'group')
    if not pick(t['settled'], variant='as it is'):
        yield 'The short trainings have not been run yet with this optimiser.\n'
    yield lines('choice', 'cosine, settled: groups ' + ', '.join(groups),
                'tokens that turn back, %', "cosine of the slowest eigenvalue's angle",
                'its modulus', 'DLR at 30 loops, to the first iterate', 'loss at 4 loops')
    yield '|---' * 7 + '|'
    for variant in distinct(t['settled'], 'variant'):
        cells = []
        for table, key, digits, scale in (('settled', 'cos', 2, 1), ('settled', 'turning_back', 0,
                                          100), ('spectrum', 'angle', 2, 1),
                                          ('spectrum', 'radius', 2, 1)):
            rows = at_checkpoint(pick(t[table], variant=variant))
            cells.append(', '.join(mean_std([scale * v for v in column(
                pick(rows, group=group), key)], digits) for group in groups))
        drift = at_checkpoint(pick(t['dlr'], variant=variant, reading='first', loops=30.0))
        losses = at_checkpoint(pick(t['losses'], variant=variant, loops=4.0))
        name = dict(main='as it is', random='random adapter', fixed='fixed loop counts',
                    uniform='uniform draw').get(variant)
        if name:        # the full trainings say how long they were
            name += f", {max(column(pick(t['steps'], variant=variant), 'iteration')):,.0f} its"
        yield lines(name or variant, *cells, mean_std(column(drift, 'ratio'), 1),
                    mean_std(column(losses, 'loss'), 3))


def eigenvalue_table(t):
    """Does a token turn back where the slowest eigenvalue has a negative real part?"""
    yield lines('share with a negative real part, %', 'own block: tokens that turn back',
                'that go on', 'slowest of the prefix: tokens that turn back', 'that go on')
    yield '|---' * 5 + '|'
    keys = [f'negative_{what}_{where}' for what in ('own', 'prefix') for where in ('back', 'on')]
    for variant, name in dict(main='as it is', random='random adapter', fixed='fixed loop counts',
                              uniform='uniform draw').items():
        for group in distinct(t['spectrum'], 'group'):
            rows = pick(t['spectrum'], variant=variant, group=group)
            if not rows:
                continue
            cells = [[100 * row[key] for row in rows if row[key] != ''] for key in keys]
            yield lines(f'{name}, group {group}', *(mean_std(c, 0) if c else 'none'
                                                    for c in cells))


def accel_table(found):
    """Is acceleration a signal of its own? Block maps of both at equal tau, and their ratio."""
    taus = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3)
    yield lines('block maps of `accel` minus those of `norm` at τ', *(f'{tau:g}' for tau in taus),
                'acceleration over step norm', 'correlation of their logarithms')
    yield '|---' * (3 + len(taus)) + '|'
    for name, t in found.items():
        evals = {rule: pick(t['bench'], variant=t['variant'], rules='accel', rule=rule,
                            cache='exact', past='False') for rule in ('accel', 'norm')}
        cells = [mean_std([a - n for a, n in zip(*(column(pick(evals[rule], tau=tau), 'mean_evals')
                                                  for rule in ('accel', 'norm')))]) for tau in taus]
        rows = [row for row in at_checkpoint(pick(t['steps'], variant=t['variant']))
                if row['k'] >= 1 and row['norm'] > CLEAR * row['floor']]
        of_seeds = [[sum(column(of, key)) / len(of) for of in
                     (pick(rows, seed=seed) for seed in distinct(rows, 'seed'))]
                    for key in ('accel_over_norm', 'accel_alike')]
        yield lines(name, *cells, *(mean_std(values) for values in of_seeds))


def minutes_line(t, full):
    """The machines, and minutes by the clock of each kind of run, of which two go at a time."""
    machines = ' and an '.join(f"{row['machine']} ({row['date']})" for row in t['machine'])
    spent = dict(trainings=0.0, measured=0.0, sweeps=0.0)
    kinds = dict(train='trainings', rows='measured')
    for row in t['minutes']:
        if row['what'] in kinds or row['what'].startswith('bench '):
            spent[kinds.get(row['what'], 'sweeps')] += row['minutes'] / 2
    each = ', '.join(f'{kind} {minutes:.0f}' for kind, minutes in spent.items())
    return f'{full} on an {machines}: {each}, together {sum(spent.values()):.0f} minutes'


def markdown(folder=HERE):
    """What stands between the markers: the machine, the claims, the open choices, the waves."""
    found = regimes(folder)
    small = load('small', folder, CLAIM_CSVS)
    said = [minutes_line(small, 'text')]
    t = {'text': small}
    tasks = None
    if found['`calc`']:
        tasks = load('tasks', folder, [*CLAIM_CSVS, *TASK_CSVS], variant='calc groups')
        t |= {'`calc`': tasks, '`hop`': tasks | dict(variant='hop groups')}
        said.append(minutes_line(tasks, 'tasks'))
    seeds = len(distinct(small['bench'], 'seed'))
    blocks = [
        [f"{seeds} seeds, two shared cores, torch {small['machine'][0]['torch']}. "
         f"{'; '.join(said)}."],
        ['**Verdicts**:'], verdict_table(found),
        ['**What was measured**:'], measured_table(found),
        ['**Is acceleration a signal of its own?** Own signals, `exact`; the ratio is the median '
         'over tokens, mean over steps that are clear of rounding:'], accel_table(t),
        ['**Q3, the open choices** on text (400 iterations unless the row says more):'],
        choices_table(small),
        ['**Eigenvalues and tokens that turn back**, text:'], eigenvalue_table(small)]
    if tasks:
        blocks += wave_blocks(small, tasks)
    return '\n\n'.join('\n'.join(block) for block in blocks)


def write(begin, end, lines, folder=HERE):
    """Put lines between two markers of the folder's README.md."""
    path = os.path.join(folder, 'README.md')
    with open(path, encoding='utf-8') as f:
        before, rest = f.read().split(begin)
    after = rest.split(end)[1]
    with open(path, 'w', encoding='utf-8') as f:
        f.write(f'{before}{begin}\n{lines}\n{end}{after}')
