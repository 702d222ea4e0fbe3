"""
What exit rules take at equal quality, from results/claims.csv, which claims.sh writes.

    python -m results.claims

Equal quality means that the loss is at most 0.005 nats above that of 30 fixed loops, by the upper
end of a 95% interval over windows. The largest threshold of equal quality lies between two that
were measured, and is interpolated; so are the loop steps there. `>` stands before a number if even
the largest threshold that was measured has equal quality.
"""
from common.errors import run
from common.files import read_csv
from common.terminal import print_rows

QUALITY = 0.005         # nats


def at_equal_quality(rows):
    """Rows of one rule by tau -> the largest tau of equal quality, and the loop steps there."""
    below = None
    for row in rows:
        if float(row['diff_high']) > QUALITY:
            break
        below = row
    else:
        return f"> {float(below['tau']):g}", f"{float(below['mean_evals']):.2f}"
    if below is None:
        return 'none', ''
    low, high = float(below['diff_high']), float(row['diff_high'])
    share = (QUALITY - low) / (high - low)
    first, last = float(below['tau']), float(row['tau'])
    tau = first * (last / first) ** share
    first, last = float(below['mean_evals']), float(row['mean_evals'])
    return f'{tau:.2g}', f'{first + share * (last - first):.2f}'


def main():
    rules = {}
    for row in read_csv('results/claims.csv'):
        if row['kind'] == 'exit rules':
            rules.setdefault((row['run'], row['rule'].split(':')[-1]), []).append(row)
    table = []
    for (run_name, rule), rows in rules.items():
        rows.sort(key=lambda row: float(row['tau']))
        nats = {float(row['tau']): float(row['ce_minus_full']) for row in rows}
        tau, steps = at_equal_quality(rows)
        table.append(dict(run=run_name, rule=rule, tau=tau, steps=steps, at_small=nats[0.01],
                          worst=max(nats.values())))
    print_rows('the largest tau of equal quality, loop steps there, nats lost at tau = 0.01, and '
               'at most', table, dict(run='', rule='', tau='', steps='', at_small='.5f',
                                      worst='.4f'))


if __name__ == '__main__':
    run(main)
