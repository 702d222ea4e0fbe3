"""
Comparison: the table at the end of bench.py, figure_4.png and ledger.png, from rows of bench.csv.

The first row of a run is its full budget, with which the others are compared.
"""
import os

from common.points import Kind
from common.tables import print_rows

# columns of the table, and how they are printed
FORMATS = dict(ce_minus_full='+.4f', accuracy='.3f', mean_evals='.2f', identical='.3f',
               blocks='.2f', ms_per_token='.2f')


def report(rows, results, is_task, fidelity):
    """
    Draw the figures of all rows into the folder `results`, and print the table. fidelity: the share
    of the full budget's texts, or on a task of its right answers, that a row needs for the table.
    """
    from common import plots  # here, since matplotlib takes a second to import
    timed = [row for row in rows if row['prompts']]
    of_rules = [row for row in rows if row['kind'] is Kind.RULE]
    figures = []
    if of_rules:
        figures.append('figure_4.png')
        plots.figure_4(of_rules, os.path.join(results, 'figure_4.png'))
    if timed:
        figures.append('ledger.png')
        plots.ledger(dots_of(timed, is_task, fidelity), os.path.join(results, 'ledger.png'),
                     'share of right answers' if is_task else 'held-out loss (nats per token)',
                     is_task)
    drawn = f'; {" and ".join(figures)} beside it' if figures else ''
    print(f'\n{results}/bench.csv has all {len(rows)} points{drawn}')

    several_runs = len({row['run'] for row in rows}) > 1
    formats = (dict(run='') if several_runs else {}) | dict(name='') | FORMATS
    if not timed:
        print_rows('quality:', rows, formats)
        return
    table = rows_of_table(timed, is_task, fidelity)
    share = f'{100 * fidelity:g}%'
    what = 'right answers' if is_task else 'texts'
    shown = {row['family'] for row in table}
    families = dict.fromkeys(row['family'] for row in timed)
    without = [family for family in families if family not in shown]
    if without:
        print(f"not in the table, since no setting keeps {share} of the full budget's {what}: "
              f'{"; ".join(without)}')
    print_rows(f'the full budget, and of each family the fastest with {share} of its {what}:',
               table, formats)


def rows_of_table(rows, is_task, fidelity):
    """Of each run the full budget, and the fastest row of each family that is faithful to it."""
    table = []
    for run in dict.fromkeys(row['run'] for row in rows):
        of_run = [row for row in rows if row['run'] == run]
        full = of_run[0]
        fastest = {}
        for row in sorted(of_run, key=lambda row: row['ms_per_token']):
            if is_faithful(row, full, is_task, fidelity):
                fastest.setdefault(row['family'], row)
        table += [full, *(row for row in fastest.values() if row is not full)]
    return table


def is_faithful(row, full, is_task, fidelity):
    """Has it enough of the full budget's texts; on a task, of its right answers?"""
    if is_task:
        return row['accuracy'] >= fidelity * full['accuracy']
    return row['identical'] >= fidelity


def dots_of(rows, is_task, fidelity):
    """The dots of ledger.png, quality against time: of all rows whose quality is known."""
    quality = 'accuracy' if is_task else 'ce'
    of_loops = {(row['run'], row['n_loop']): row[quality] for row in rows
                if row['kind'] is Kind.FIXED and row['cache'] == 'exact'}
    dots = []
    for row in rows:
        height = quality_of(row, quality, of_loops, fidelity)
        if height is not None:
            dots.append(dict(run=row['run'], kind=label_of(row), ms=row['ms_per_token'],
                             height=height, plain=row['kind'] is Kind.PLAIN))
    return dots


def quality_of(row, quality, of_loops, fidelity):
    """
    What a row has in the column `quality`. Drafts and waves have nothing there, and get what the
    fixed loops have whose text they write: {(run, loops): quality} in of_loops. None if it is not
    known.
    """
    same_loops = of_loops.get((row['run'], row['n_loop']))
    if row['kind'] is Kind.DRAFTS:      # they write the text of the loops that check them
        return same_loops
    if row['kind'] is Kind.WAVE:        # it may write another text than its full budget
        return same_loops if row['identical'] >= fidelity else None
    return row[quality]


def label_of(row):
    """What ledger.png calls the kind of decoding of a row."""
    label = str(row['kind'])
    if row['kind'] in (Kind.FIXED, Kind.RULE):
        label += f", {row['cache']}"
    if row['kind'] is Kind.RULE and row['wake']:
        label += ', wake'
    return label
