"""
The numbers of claims.md, from the CSVs that claims.sh writes.

    python -m results.claims

Geometry, of each training before (iteration 0) and after: `tenth` is in how many loop steps after
the second one the mean step is a tenth of it, in the slowest group; `cosines` are those of a
token's last two steps above rounding, by group; the smallest jump ends in the next group's noise,
first or last state, in mean steps.

Rules: equal quality means that the loss is at most 0.005 nats above that of 30 fixed loops, by the
upper end of a 95% interval over windows. The largest threshold of equal quality lies between two
that were measured, if it is not the largest of them, and is interpolated; so are the loop steps
there, and the time. `saves` is the time at tau = 0.01 over that at 1e-5.
"""
import numpy as np

from common.errors import run
from common.files import read_csv
from common.terminal import print_rows

QUALITY = 0.005         # nats
MEAN_RECURRENCE = dict(recipe=12, default=4, calc=8)
KINDS = {'default': ['default-1', 'default-2', 'default-3'],
         'recipe': ['recipe-1', 'recipe-2', 'recipe-3'], 'task 1, 3': ['calc-1', 'calc-3'],
         'task 2': ['calc-2'], 'pretrained/text': ['text'], 'pretrained/calc': ['calc']}


def grouped(name, *columns):
    """The rows of results/NAME.csv that agree in these columns: {their values: rows}."""
    groups = {}
    for row in read_csv(f'results/{name}.csv'):
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def print_geometry():
    jumps = grouped('jumps', 'run', 'iteration', 'reading')
    settled = grouped('settled', 'run', 'iteration')
    rows = {}
    for (name, iteration, _), steps in grouped('steps', 'run', 'iteration', 'group').items():
        norms = [float(step['mean']) for step in steps]
        tenth = next(k for k, norm in enumerate(norms[1:]) if norm <= norms[1] / 10)
        row = rows.setdefault((name, iteration), dict(run=name, iteration=iteration, tenth=0))
        row['tenth'] = max(row['tenth'], tenth)
    for key, row in rows.items():
        row['cosines'] = ', '.join(f"{float(group['mean']):.2f} ± {float(group['std']):.2f}"
                                   for group in settled[key])
        for reading in 'noise', 'first', 'last':
            row[reading] = min(float(jump['mean']) for jump in jumps[*key, reading])
    print_rows('steps, angles, and the smallest jump to', rows.values(), dict(
        run='', iteration='', tenth='', cosines='', noise='.1f', first='.1f', last='.1f'))


def rules_of_runs():
    """{(run, rule): its rows of claims.csv by tau}; fixed loops have tau = 1 / loops."""
    rules = {}
    for (name, kind, rule), rows in grouped('claims', 'run', 'kind', 'rule').items():
        rows = [row | dict(tau=float(row['tau'] or 1 / int(row['n_loop']))) for row in rows]
        rule = rule.split(':')[-1] if kind == 'exit rules' else 'fixed'
        rules[name.removeprefix('claims-'), rule] = sorted(rows, key=lambda row: row['tau'])
    return rules


def at_equal_quality(rows):
    """Rows of one rule by tau -> {column: its value at the largest tau of equal quality}."""
    losses = [float(row['diff_high']) for row in rows]
    n = next((i for i, loss in enumerate(losses) if loss > QUALITY), len(rows))
    if n == 0:
        return {}
    below, above, share = rows[n - 1], rows[n - 1], 0
    if n < len(rows):       # between two thresholds
        above = rows[n]
        share = (QUALITY - losses[n - 1]) / (losses[n] - losses[n - 1])
    values = dict(tau=below['tau'] * (above['tau'] / below['tau']) ** share)
    for name in 'mean_evals', 'ms_per_token':
        if below[name]:
            values[name] = (1 - share) * float(below[name]) + share * float(above[name])
    return values


def print_rules():
    rows = []
    for (name, rule), measured in rules_of_runs().items():
        row = dict(run=name, rule=rule) | at_equal_quality(measured)
        times = {line['tau']: line['ms_per_token'] for line in measured}
        if times.get(0.01):
            row['saves'] = float(times[0.01]) / float(times[1e-5])
        rows.append(row)
    print_rows('loop steps and ms per token at equal quality, and the largest tau', rows, dict(
        run='', rule='', mean_evals='.1f', tau='.2g', ms_per_token='.2f', saves='.2f'))


def print_kinds():
    """By kind of model: least and largest of the seeds."""
    rules = rules_of_runs()
    rows = []
    for kind, names in KINDS.items():
        fixed = [at_equal_quality(rules[name, 'fixed'])['mean_evals'] for name in names]
        for rule in [rule for name, rule in rules if name == 'text' and rule != 'fixed']:
            of_seeds = [rules[name, rule] for name in names]
            lost = [float(row['ce_minus_full']) for of_seed in of_seeds for row in of_seed
                    if row['tau'] == 0.01]
            steps = [at_equal_quality(of_seed).get('mean_evals') for of_seed in of_seeds]
            share = 'none'
            if None not in steps:
                share = span([n / n_fixed for n, n_fixed in zip(steps, fixed)], 2)
            rows.append(dict(model=kind, rule=rule, lost=span(lost, 3), share=share))
    print_rows('nats lost at tau = 0.01; share of the loop steps of fixed loops, equal quality',
               rows, dict(model='', rule='', lost='', share=''))


def span(values, digits):
    """Least and largest: `0.90 to 0.98`, or one if they are the same."""
    low, high = (f'{value:z.{digits}f}' for value in (min(values), max(values)))    # z: no -0
    return low if low == high else f'{low} to {high}'


def print_loops():
    rows = []
    for (name,), of_run in grouped('loops', 'run').items():
        r = MEAN_RECURRENCE[name.split('-')[0]]
        losses = {}
        for count in r + 1, 256:        # on a task there is a row for each depth
            of_count = [row for row in of_run if int(row['loops']) == count]
            losses[count] = np.average([float(row['loss']) for row in of_count],
                                       weights=[int(row['labels']) for row in of_count])
        rows.append(dict(run=name, loops=r + 1, loss=losses[r + 1],
                         more=losses[256] - losses[r + 1]))
    print_rows('the loss at r + 1 loops, and what 256 add', rows,
               dict(run='', loops='', loss='.4f', more='.4f'))


def main():
    print_geometry()
    print_rules()
    print_kinds()
    print_loops()


if __name__ == '__main__':
    run(main)
