"""
The numbers of claims.md, from the CSVs that claims.sh writes.

    python -m results.claims

Geometry, of each training before (iteration 0) and after: `tenth` is in how many loop steps after
the second one the mean step is a tenth of it, in the slowest group; `cosines` are those of a
token's last two steps above rounding, by group; the smallest jump ends in the next group's noise,
first or last state, in mean steps.

Rules: equal quality means that the loss is at most 0.005 nats above that of 30 fixed loops, by the
upper end of a 95% interval over windows. The largest threshold of equal quality lies between two
that were measured, and is interpolated; so are the loop steps there, and the time. If even the
largest one that was measured has equal quality, it is that one.
"""
from common.errors import run
from common.files import read_csv
from common.terminal import print_rows

QUALITY = 0.005         # nats
READINGS = 'noise', 'first', 'last'
MEAN_RECURRENCE = dict(recipe=12, default=4, calc=8)


def table(name, **where):
    """The rows of results/NAME.csv that have these values."""
    return [row for row in read_csv(f'results/{name}.csv') if where.items() <= row.items()]


# geometry -----------------------------------------------------------------------------------------

def steps_to_a_tenth(run_name, iteration):
    """By group: in how many loop steps after the second one the mean step is a tenth of it."""
    norms = {}
    for row in table('steps', run=run_name, iteration=iteration):
        norms.setdefault(row['group'], []).append(float(row['mean']))
    return [next(k for k, norm in enumerate(of_group[1:]) if norm <= of_group[1] / 10)
            for of_group in norms.values()]


def settled_cosines(run_name, iteration):
    """By group: mean and deviation over tokens of a token's last cosine above rounding."""
    return [f"{float(row['mean']):.2f} ± {float(row['std']):.2f}"
            for row in table('settled', run=run_name, iteration=iteration)]


def print_geometry():
    rows = []
    for name in dict.fromkeys(row['run'] for row in table('steps')):
        for iteration in dict.fromkeys(row['iteration'] for row in table('steps', run=name)):
            row = dict(run=name, iteration=iteration, tenth=max(steps_to_a_tenth(name, iteration)),
                       cosines=', '.join(settled_cosines(name, iteration)))
            for reading in READINGS:
                jumps = table('jumps', run=name, iteration=iteration, reading=reading)
                row[reading] = min(float(jump['mean']) for jump in jumps)
            rows.append(row)
    print_rows('steps, angles, and the smallest jump to', rows, dict(
        run='', iteration='', tenth='', cosines='', noise='.1f', first='.1f', last='.1f'))


# exit rules ---------------------------------------------------------------------------------------

def rules_of_runs():
    """{run: {rule: its rows of claims.csv by tau}}; fixed loops are a rule with tau = 1 / loops."""
    runs = {}
    for row in table('claims'):
        rule = row['rule'].split(':')[-1] if row['kind'] == 'exit rules' else 'fixed'
        tau = float(row['tau'] or 1 / int(row['n_loop']))
        of_run = runs.setdefault(row['run'].removeprefix('claims-'), {})
        of_run.setdefault(rule, []).append(row | dict(tau=tau))
    for of_run in runs.values():
        for rows in of_run.values():
            rows.sort(key=lambda row: row['tau'])
    return runs


def at_equal_quality(rows):
    """Rows of one rule by tau -> {column: its value at the largest tau of equal quality}."""
    losses = [float(row['diff_high']) for row in rows]
    n = next((i for i, loss in enumerate(losses) if loss > QUALITY), len(rows))
    if n == 0:
        return None
    below, above, share = rows[n - 1], rows[n - 1], 0
    if n < len(rows):       # between two thresholds
        above = rows[n]
        share = (QUALITY - losses[n - 1]) / (losses[n] - losses[n - 1])
    values = dict(tau=below['tau'] * (above['tau'] / below['tau']) ** share)
    for name in 'mean_evals', 'ms_per_token':
        if below.get(name):
            values[name] = (1 - share) * float(below[name]) + share * float(above[name])
    return values


def steps_and_tau(rows):
    values = at_equal_quality(rows)
    if values is None:
        return 'none'
    tau = f" ({values['tau']:.2g})" if rows[0]['rule'] else ''
    return f"{values['mean_evals']:.1f}{tau}"


def ms(rows):
    values = at_equal_quality(rows)
    return f"{values['ms_per_token']:.2f}" if values and 'ms_per_token' in values else None


def time_saved(rows):
    times = {row['tau']: row.get('ms_per_token') for row in rows}
    return f'{float(times[0.01]) / float(times[1e-5]):.2f}' if times.get(0.01) else None


def print_rules():
    tables = {'loop steps at equal quality (the largest tau)': steps_and_tau,
              'ms per token there': ms, 'time at tau = 0.01 over that at 1e-5': time_saved}
    runs = rules_of_runs()
    for title, cell in tables.items():
        rows = [dict(run=name) | {rule: cell(rows) for rule, rows in of_run.items()}
                for name, of_run in runs.items()]
        rows = [row for row in rows if any(list(row.values())[1:])]
        print_rows(title, rows, {name: '' for name in rows[0]})


KINDS = {'default': ['default-1', 'default-2', 'default-3'],
         'recipe': ['recipe-1', 'recipe-2', 'recipe-3'], 'task 1, 3': ['calc-1', 'calc-3'],
         'task 2': ['calc-2'], 'pretrained/text': ['text'], 'pretrained/calc': ['calc']}


def print_kinds():
    """The same by kind of model: least and largest of the seeds."""
    def share_of_fixed(of_run, rule):
        values = at_equal_quality(of_run[rule])
        return values and values['mean_evals'] / at_equal_quality(of_run['fixed'])['mean_evals']

    def lost(of_run, rule):
        return next(float(row['ce_minus_full']) for row in of_run[rule] if row['tau'] == 0.01)

    runs = rules_of_runs()
    rules = [rule for rule in runs['text'] if rule != 'fixed']
    for title, value, digits in (('nats lost at tau = 0.01', lost, 3),
                                 ('loop steps over fixed loops, equal quality', share_of_fixed, 2)):
        rows = [dict(model=kind) | {rule: span([value(runs[name], rule) for name in names], digits)
                                    for rule in rules}
                for kind, names in KINDS.items()]
        print_rows(title, rows, {name: '' for name in rows[0]})


def span(values, digits):
    """Least and largest: `0.90 to 0.98`, or one if they are the same; none if one is missing."""
    if None in values:
        return 'none'
    # + 0 makes 0 of -0
    low, high = (f'{round(value, digits) + 0:.{digits}f}' for value in (min(values), max(values)))
    return low if low == high else f'{low} to {high}'


# loops --------------------------------------------------------------------------------------------

def print_loops():
    rows = []
    for name in dict.fromkeys(row['run'] for row in table('loops')):
        r = MEAN_RECURRENCE[name.split('-')[0]]
        losses = {}
        for row in table('loops', run=name):    # on a task, of each depth
            total, labels = losses.get(int(row['loops']), (0, 0))
            n = int(row['labels'])
            losses[int(row['loops'])] = total + n * float(row['loss']), labels + n
        losses = {count: total / labels for count, (total, labels) in losses.items()}
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
