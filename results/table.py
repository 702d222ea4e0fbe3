"""
The tables of results/README.md, so that they cannot drift from what was measured.

    python -m results.run --only_table          writes them between the two markers of that page

A test holds the page to what `markdown` gives. What each claim says is in claims.py.
"""
import os

from results.claims import (
    HERE,
    by_group,
    column,
    distinct,
    last_checkpoint,
    load,
    mean_std,
    pick,
    settled,
    verdicts,
)

BEGIN = '<!-- claims: written by `python -m results.run --only_table` -->'
END = '<!-- end of claims -->'

# the trainings that a claim is read from
RUNS = dict(main='C1 C2 C3 C4 C5 C11 C12', draws='C13', sweeps='C6 C7 C8 C9 C10 Q1 Q2')


def claims_table(small, paper):
    """Lines of Markdown, one a claim; small and paper: what `verdicts` gives, {} if not run."""
    yield '| | the paper says | small scale: measured | verdict | runs | paper scale |'
    yield '|---|---|---|---|---|---|'
    for name, (claim, measured, verdict) in small.items():
        runs, = (kind for kind, names in RUNS.items() if name in names.split())
        at_paper_scale = 'not run yet'
        if name in paper:
            at_paper_scale = f'{paper[name][1]}; **{paper[name][2]}**'
        yield f'| {name} | {claim} | {measured} | **{verdict}** | {runs} | {at_paper_scale} |'


def choices_table(t):
    """Lines of Markdown, one an open choice (Q3)."""
    groups = distinct(t['steps'], 'group')
    yield ('| choice | cosine, settled: groups ' + ', '.join(groups)
           + " | cosine of the leading eigenvalue's angle, same groups | its modulus "
           '| tokens that turn back, % | DLR, to the first iterate | loss at 4 loops |')
    yield '|---|---|---|---|---|---|---|'
    for variant in distinct(t['steps'], 'variant'):
        yield choice_row(t, variant, groups)


def choice_row(t, variant, groups):
    """The line of one training: its geometry at the last checkpoint, and its loss."""
    cos = [mean_std(values) for values in by_group(t['steps'], settled, variant).values()]
    angle, modulus, back = [], [], []
    for group in groups:
        rows = pick(t['spectrum'], variant=variant, group=group)
        angle.append(mean_std(column(rows, 'cos')))
        modulus.append(mean_std(column(rows, 'radius')))
        back.append(mean_std([100 * share for share in column(rows, 'turning_back')], 0))
    drift = last_checkpoint(pick(t['dlr'], variant=variant, reading='first'))
    losses = last_checkpoint(pick(t['losses'], variant=variant, loops=4))

    # the full trainings say how long they were
    name = dict(main='as it is', fixed='fixed loop counts', uniform='uniform draw').get(variant)
    if name:
        iterations = max(column(pick(t['steps'], variant=variant), 'iteration'))
        name += f', {iterations:,.0f} iterations'
    cells = [name or variant, ', '.join(cos), ', '.join(angle), ', '.join(modulus),
             ', '.join(back), mean_std(column(drift, 'ratio'), 1),
             mean_std(column(losses, 'loss'), 3)]
    return '| ' + ' | '.join(cells) + ' |'


def minutes_line(t):
    """Minutes by the clock of each kind of run: two trainings run at a time, sweeps alone."""
    spent = dict(main=0.0, choices=0.0, draws=0.0, sweeps=0.0)
    for row in t['minutes']:
        if row['what'].startswith('bench'):
            spent['sweeps'] += row['minutes']
        elif row['what'] == 'train':
            kind = dict(main='main', fixed='draws', uniform='draws').get(row['variant'], 'choices')
            spent[kind] += row['minutes'] / 2
    each = ', '.join(f'{kind} {minutes:.0f}' for kind, minutes in spent.items())
    return f'Minutes: {each}, together {sum(spent.values()):.0f}.'


def markdown(folder=HERE):
    """What stands between the markers: the machine, the claims, the open choices."""
    t, paper = load('small', folder), {}
    if os.path.exists(os.path.join(folder, 'paper', 'bench.csv')):
        paper = verdicts(load('paper', folder))
    machine, = t['machine']
    seeds = len(distinct(t['bench'], 'seed'))
    where = (f"{seeds} seeds on {machine['cores']:g} shared cores of an {machine['machine']}, "
             f"torch {machine['torch']}, {machine['date']}. {minutes_line(t)}")

    short = max(column(pick(t['losses'], variant='as it is'), 'iteration'))
    q3 = (f'Q3, the open choices ({short:.0f} iterations unless the row says more, '
          'last checkpoint):')
    small = claims_table(verdicts(t), paper)
    return '\n'.join([where, '', *small, '', q3, '', *choices_table(t)])


def write(begin, end, lines, folder=HERE):
    """Put lines between two markers of the folder's README.md."""
    path = os.path.join(folder, 'README.md')
    with open(path, encoding='utf-8') as f:
        before, rest = f.read().split(begin)
    after = rest.split(end)[1]
    with open(path, 'w', encoding='utf-8') as f:
        f.write(f'{before}{begin}\n{lines}\n{end}{after}')
