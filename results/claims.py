"""
The verdicts of claims.md from the CSVs that claims.sh writes.

    python -m results.claims

Prints for each number its smallest and largest value over three seeds, by model, and in how many of
the nine trainings a claim holds. `0` behind a model is the same model before training.

Equal quality means that the loss is at most 0.005 nats above that of 30 fixed loops, by the upper
end of the 95% interval. What a rule takes there lies between two thresholds that were measured, and
is interpolated.
"""
from collections import defaultdict

from common.errors import run
from common.files import read_csv

QUALITY = 0.005         # nats
MODELS = ['recipe', 'default', 'calc']
LOOPS = dict(recipe=13, default=5, calc=9)      # r + 1, the mean in training


def show(title, values, holds=None):
    """values: {run: number}; holds: a condition on one number."""
    print(f'\n{title}')
    for label in dict.fromkeys(name.rsplit('-', 1)[0] for name in values):
        of_model = [value for name, value in values.items() if name.rsplit('-', 1)[0] == label]
        print(f'    {label:20} {min(of_model):.4g} to {max(of_model):.4g}')
    if holds:
        trained = [holds(value) for name, value in values.items() if '0' not in name]
        untrained = [holds(value) for name, value in values.items() if '0' in name]
        print(f'    holds in {sum(trained)} of {len(trained)}'
              + (f', untrained in {sum(untrained)} of {len(untrained)}' if untrained else ''))


def grouped(path, key):
    """{(run or run before training, *key): rows} of a table by checkpoint."""
    rows = defaultdict(list)
    for row in read_csv(path):
        model, seed = row['run'].rsplit('-', 1)
        name = f'{model}-{seed}' if row['iteration'] != '0' else f'{model}0-{seed}'
        rows[name, *(row[part] for part in key)].append(row)
    return rows


# geometry -----------------------------------------------------------------------------------------

def geometry():
    tenth = {}          # loop steps until the mean step is a tenth of the second one, by group
    for (name, group), rows in grouped('results/steps.csv', ['group']).items():
        norms = {int(row['k']): float(row['mean']) for row in rows}
        tenth[name, group] = next((k for k in sorted(norms) if norms[k] < norms[1] / 10), 99)
    settled = {}        # the last cosine that is no rounding, and its spread over tokens, by group
    spread = {}
    for (name, group), rows in grouped('results/angles.csv', ['group']).items():
        last = max(rows, key=lambda row: int(row['k']))
        settled[name, group] = float(last['mean'])
        spread[name, group] = float(last['std'])

    show('1. loop steps until the mean step is a tenth of the second, in the slowest group',
         of_groups(tenth, max), lambda steps: steps <= 10)
    show('2. settled cosine, smallest', of_groups(settled, min))
    show('2. settled cosine, largest', of_groups(settled, max))
    outside = {name for (name, _), value in settled.items() if not 0.45 <= value <= 0.7}
    all_inside = {name: name not in outside for name, _ in settled}
    show('2. all settled cosines between 0.45 and 0.7', all_inside, bool)
    pairs = [(key, (key[0].replace('-', '0-'), key[1])) for key in tenth if '0-' not in key[0]]
    print('\n3. with training, of', len(pairs), 'groups:',
          sum(tenth[new] < tenth[old] for new, old in pairs), 'reach a tenth earlier,',
          sum(tenth[new] > tenth[old] for new, old in pairs), 'later;',
          sum(abs(settled[new]) < abs(settled[old]) - 0.05 for new, old in pairs),
          'have a cosine closer to 0;', sum(spread[new] < spread[old] for new, old in pairs),
          'have steadier angles')
    ratios = defaultdict(dict)
    for (name, reading, origin), rows in grouped('results/jumps.csv', ['reading', 'from']).items():
        ratios[reading][name, origin] = float(rows[0]['mean'])
    for reading, values in ratios.items():
        show(f'4. a jump to the {reading} state over the mean step, the smallest hand-over',
             of_groups(values, min), lambda ratio: ratio > 5)


def of_groups(values, which):
    """{(run, group): number} -> {run: which of its numbers}."""
    by_run = defaultdict(list)
    for (name, _), value in values.items():
        by_run[name].append(value)
    return {name: which(numbers) for name, numbers in by_run.items()}


# exit rules ---------------------------------------------------------------------------------------

def rules():
    """{(table, run): {rule: rows by tau}}."""
    tables = defaultdict(lambda: defaultdict(list))
    for row in read_csv('results/claims.csv'):
        if row['kind'] == 'exit rules':
            table, name = row['run'].split('-', 1)
            rule = row['rule'].split(':')[-1]
            tables[table, name][rule].append(row)
    for of_run in tables.values():
        for rows in of_run.values():
            rows.sort(key=lambda row: float(row['tau']))
    return tables


def at_equal_quality(rows, column):
    """A column of a rule at the largest tau of equal quality; tau itself on a logarithmic scale."""
    below = None
    for row in rows:
        cost = float(row['diff_high'])
        if cost > QUALITY:
            break
        below = row
    if below is None:
        return float('nan')
    if below is row:                                    # even the largest tau is good enough
        return float(row[column])
    share = (QUALITY - float(below['diff_high'])) / (cost - float(below['diff_high']))
    first, last = float(below[column]), float(row[column])
    if column == 'tau':
        return first * (last / first) ** share
    return first + share * (last - first)


def at(rows, tau, column):
    return next(float(row[column]) for row in rows if float(row['tau']) == tau)


def exits():
    trained = {name: of_run for (table, name), of_run in rules().items()
               if table == 'claims' and not name.startswith('untrained')}
    for rule in 'accel', 'kl', 'norm', 'accel_once', 'kl_diff', 'norm_diff':
        show(f'5. {rule}: the largest cost in nats for tau from 1e-5 to 1e-2',
             {name: max(at(of_run[rule], tau, 'ce_minus_full') for tau in (1e-5, 1e-3, 1e-2))
              for name, of_run in trained.items()}, lambda cost: cost < QUALITY)
    show('5. Algorithm 1: time at tau = 1e-2 over that at 1e-5',
         {name: (at(of_run['accel'], 1e-2, 'ms_per_token')
                 / at(of_run['accel'], 1e-5, 'ms_per_token'))
          for name, of_run in trained.items()}, lambda ratio: ratio <= 2 / 3)
    for rule in 'norm', 'norm_twice', 'accel', 'norm_diff', 'accel_once':
        show(f'6. {rule}: nats lost at the largest tau, 10',
             {name: at(of_run[rule], 10, 'ce_minus_full') for name, of_run in trained.items()})
        show(f'6. {rule}: the largest tau of equal quality',
             {name: at_equal_quality(of_run[rule], 'tau') for name, of_run in trained.items()})
    for one, other in (('accel', 'norm'), ('accel_once', 'norm_diff'), ('accel_once', 'norm')):
        show(f'7. the largest tau of equal quality: {one} over {other}',
             compared(trained, one, other, 'tau'), lambda ratio: ratio >= 10)
    for one, other in (('accel', 'norm'), ('accel', 'kl'), ('accel_once', 'norm_diff'),
                       ('accel_once', 'kl_diff'), ('accel_once', 'norm')):
        for column in 'mean_evals', 'ms_per_token':
            show(f'8. {column} at equal quality: {one} over {other}',
                 compared(trained, one, other, column), lambda ratio: ratio < 0.95)
    for (table, name), of_run in rules().items():
        if table == 'means':
            print(name, {rule: round(at_equal_quality(rows, 'tau'), 4)
                         for rule, rows in of_run.items()})


def compared(trained, one, other, column):
    """One rule's number at equal quality over another's, by run."""
    return {name: at_equal_quality(of_run[one], column) / at_equal_quality(of_run[other], column)
            for name, of_run in trained.items()}


def more_loops():
    losses = defaultdict(dict)
    for row in read_csv('results/loops.csv'):
        if row.get('data'):
            sums = losses[row['run']].setdefault(int(row['loops']), [0, 0])
            sums[0] += float(row['loss']) * int(row['labels'])
            sums[1] += int(row['labels'])
    means = {name: {n: nats / labels for n, (nats, labels) in of_run.items()}
             for name, of_run in losses.items()}
    show('9. nats at 256 loops above those at r + 1',
         {name: of_run[256] - of_run[LOOPS[name.rsplit('-', 1)[0]]]
          for name, of_run in means.items()}, lambda cost: cost < 0.01)
    show('9. nats at one loop above those at 30',
         {name: of_run[1] - of_run[30] for name, of_run in means.items()})


def main():
    geometry()
    exits()
    more_loops()


if __name__ == '__main__':
    run(main)
