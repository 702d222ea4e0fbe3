"""
The numbers of claims.md, from the CSVs that claims.sh writes.

    python -m results.claims

Geometry, of each training before (iteration 0) and after: `tenth` is in how many loop steps after
the second one the mean step is a tenth of it, in the slowest group; `cosines` are those of
successive steps at the last step above rounding, by group; the smallest jump ends in the next
group's noise, first or last state, in mean steps.

Rules: equal quality means that the loss is at most 0.005 nats above that of 30 fixed loops, by the
upper end of a 95% interval over windows. The largest threshold of equal quality lies between two
that were measured, and is interpolated; so are the loop steps there, and the time. `>` stands
before a number if even the largest threshold that was measured has equal quality.
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


def last_cosines(run_name, iteration):
    """By group: mean and deviation of the cosine at the last step above rounding."""
    last = {row['group']: (float(row['mean']), float(row['std']))
            for row in table('angles', run=run_name, iteration=iteration)}
    return list(last.values())


def print_geometry():
    rows = []
    for name in dict.fromkeys(row['run'] for row in table('steps')):
        for iteration in dict.fromkeys(row['iteration'] for row in table('steps', run=name)):
            cosines = [f'{mean:.2f} ± {std:.2f}' for mean, std in last_cosines(name, iteration)]
            row = dict(run=name, iteration=iteration, tenth=max(steps_to_a_tenth(name, iteration)),
                       cosines=', '.join(cosines))
            for reading in READINGS:
                jumps = table('jumps', run=name, iteration=iteration, reading=reading)
                row[reading] = min(float(jump['mean']) for jump in jumps)
            rows.append(row)
    print_rows('steps, angles, and the smallest jump to', rows, dict(
        run='', iteration='', tenth='', cosines='', noise='.1f', first='.1f', last='.1f'))


# exit rules ---------------------------------------------------------------------------------------

def at_equal_quality(rows):
    """Rows of one rule by tau -> the largest tau of equal quality, loop steps and time there."""
    below = None
    for row in rows:
        if float(row['diff_high']) > QUALITY:
            break
        below = row
    else:
        return f"> {float(below['tau']):g}", f"{float(below['mean_evals']):.2f}", ''
    if below is None:
        return 'none', '', ''
    low, high = float(below['diff_high']), float(row['diff_high'])
    share = (QUALITY - low) / (high - low)

    def between(column):
        first, last = float(below[column]), float(row[column])
        return first + share * (last - first)
    first, last = float(below['tau']), float(row['tau'])
    time = f"{between('ms_per_token'):.2f}" if row.get('ms_per_token') else ''
    return f'{first * (last / first) ** share:.2g}', f"{between('mean_evals'):.2f}", time


def print_rules():
    rules = {}
    for row in table('claims', kind='exit rules'):
        rules.setdefault((row['run'], row['rule'].split(':')[-1]), []).append(row)
    for row in table('claims', kind='fixed loops'):     # the fewest loops, as if they were a rule
        rules.setdefault((row['run'], 'fixed'), []).append(row | dict(tau=-int(row['n_loop'])))
    rows = []
    for (name, rule), of_rule in rules.items():
        of_rule.sort(key=lambda row: float(row['tau']))
        nats = {float(row['tau']): float(row['ce_minus_full']) for row in of_rule}
        tau, steps, time = at_equal_quality(of_rule)
        times = {float(row['tau']): row.get('ms_per_token') for row in of_rule}
        ratio = float(times[0.01]) / float(times[1e-5]) if times.get(0.01) else ''
        rows.append(dict(
            run=name.removeprefix('claims-'), rule=rule, tau=tau if rule != 'fixed' else '',
            steps=steps, ms=time, at_small=nats.get(0.01), worst=max(nats.values()),
            time=f'{ratio:.2f}' if ratio else ''))
    print_rows('the largest tau of equal quality, loop steps and ms there; nats lost at tau = '
               '0.01, and at most; time at 0.01 over that at 1e-5', rows,
               dict(run='', rule='', tau='', steps='', ms='', at_small='.5f', worst='.4f', time=''))


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
    print_loops()


if __name__ == '__main__':
    run(main)
