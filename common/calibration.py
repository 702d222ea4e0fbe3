"""
Calibration: thresholds that keep a promise, for bench.py --calibrate.

The paper leaves tau to be tuned by hand. Here it is the largest of some taus that keeps a promise:

    a rule      costs at most so many nats per label more than the full budget
    a wave      writes the texts of the full budget, at least a share of them

Half of the windows choose the threshold, and the other half score it. A threshold may be cheap by
chance on the windows that choose it, so there the choice is strict: the upper end of the 95%
interval of the cost must keep the promise. On the other half the mean cost is compared: it is
`kept` of exits.json. A share of texts has no interval, and is compared as it is.
"""
from collections.abc import Callable
from typing import NamedTuple

from common.tables import print_rows
from common.thresholds import command_for, save_thresholds, thresholds_of


class Verdict(NamedTuple):
    """What a threshold costs on one half of the windows."""
    costs: dict                 # as exits.json has them
    mean_keeps: bool            # does the mean keep the promise?
    upper_end_keeps: bool       # does the upper end of its 95% interval keep it too?


class Family(NamedTuple):
    """A rule under a cache policy, or a wave: everything of a method but its threshold."""
    words: str
    key: dict           # its threshold_key
    promise: dict       # nats or texts, as exits.json has them
    judge: Callable     # (tau, half of the windows) -> Verdict


def calibrate(families, taus, even, odd, results, checkpoint):
    """
    Find the threshold of each family, print it, and add it to results/exits.json at once, in place
    of an earlier one -> its rows. even, odd: the two halves of the windows, as `judge` takes them.
    """
    try:
        stored = thresholds_of(results, checkpoint)
    except ValueError as error:
        print(f'warning: {error}. It is replaced')
        stored = []
    rows = []
    for family in families:
        row = family.key | family.promise | largest_tau(family.judge, taus, even, odd)
        rows.append(row)
        outcome = 'none of taus keeps the promise'
        if row['tau'] is not None:
            outcome = f"tau = {row['tau']:g}"
        print(f'{family.words}: {outcome}', flush=True)
        save_thresholds(results, checkpoint, [*stored, *rows])
    return rows


def largest_tau(judge, taus, even, odd):
    """
    The largest tau whose cost keeps the promise on the even half, with the upper end of its
    interval too, and what it costs on the odd half: a dict, as exits.json has them.
    """
    for tau in sorted(taus, reverse=True):
        if judge(tau, even).upper_end_keeps:
            verdict = judge(tau, odd)
            return dict(tau=tau, **verdict.costs, kept=verdict.mean_keeps)
    return dict(tau=None)


def report(families, rows, results, folder, is_task, flag_of_rule):
    """
    Print the table of calibrated thresholds, a row for each family, and how to use one of them.

    results: the folder of exits.json. folder, flag_of_rule: see command_of.
    """
    named = [dict(name=family.words) | row for family, row in zip(families, rows)]
    formats = dict(name='', tau='g', cost='+.4f', cost_low='+.4f', cost_high='+.4f', evals='.2f',
                   identical='.3f', kept='')
    print_rows('the largest tau that keeps the promise on half of the windows, and what it costs '
               'on the others:', named, formats)
    kept = [row for row in named if row['tau'] is not None and row['kept']]
    broken = [row for row in named if row['tau'] is not None and not row['kept']]
    without = [row['name'] for row in named if row['tau'] is None]
    if broken:
        print('\nkept = False: on the other windows it breaks the promise. It is in the file, and '
              'sample.py says so.\nMore windows (--n_windows) choose better.')
    if without:
        print(f'\nno threshold was found for {"; ".join(without)}: none of taus keeps the promise')
    print(f'\n{results}/exits.json')
    if kept:
        # the rule with the fewest loop steps; loop steps of waves are not measured here
        rules = [row for row in kept if not row['wave']]
        best = min(rules, key=lambda row: row['evals']) if rules else kept[0]
        print(f"{best['name']}: {command_of(best, folder, is_task, flag_of_rule)}")


def command_of(row, folder, is_task, flag_of_rule):
    """
    The command of sample.py that decodes with the threshold of a row. folder: that of the model.
    flag_of_rule: {name of a rule: its --exit}.
    """
    flags = [f'--out_dir={folder}', f"--exit={flag_of_rule[row['rule']]}"]
    if row['wave']:
        width, steps = row['wave']
        flags += [f'--wave={width}', f'--wave_steps={steps}']
    return command_for('sample.py', row, is_task, *flags)
