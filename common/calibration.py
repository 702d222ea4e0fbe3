"""
Calibration: thresholds that keep a promise, for bench.py --calibrate.

Not run by itself. The paper leaves tau to be tuned by hand. Here it is the largest of some taus
that keeps a promise:

    a rule      costs at most so many nats per label more than the full budget
    a wave      writes the texts of the full budget, at least a share of them

Half of the windows choose the threshold, and the other half score it. A threshold may be cheap by
chance on the windows that choose it, so there the choice is strict: the upper end of the 95%
interval of the cost must keep the promise. On the other half the mean cost is compared: it is
`kept` of exits.json. A share of texts has no interval, and is compared as it is.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from common.measure import HeldOut, continue_prompt, measure_quality
from common.points import Kind, Point, column, excess, identical
from common.tables import print_rows
from common.thresholds import command_for, save_thresholds, threshold_key, thresholds_of
from decode import use_one_thread


class Verdict(NamedTuple):
    """What a threshold costs on one half of the windows."""
    costs: dict                 # as exits.json has them
    mean_keeps: bool            # does the mean keep the promise?
    upper_end_keeps: bool       # does the upper end of its 95% interval keep it too?


class Half(NamedTuple):
    """Half of the windows, and the full budget on them, which is measured when it is needed."""
    held_out: HeldOut
    reference: Point

    def point(self, method):
        """A point of another method, of the same model."""
        return Point(self.reference.run, self.reference.model, method, self.reference)


def judge_loss(method, nats, conditions, tau, half):
    """Does the rule with this threshold cost at most so many nats per label on half the windows?"""
    point = half.point(method.with_tau(tau))
    not_measured = [each for each in (half.reference, point) if not each.windows]
    measure_quality(not_measured, half.held_out.idx, half.held_out.targets, conditions)
    cost, low, high = excess(point, conditions.seed)
    evals = column(point.windows, 'evals').mean()
    costs = dict(cost=cost, cost_low=low, cost_high=high, evals=evals)
    return Verdict(costs, mean_keeps=bool(cost <= nats), upper_end_keeps=bool(high <= nats))


def judge_texts(method, fidelity, conditions, tau, half):
    """Does the wave with this threshold leave at least this share of the texts as they are?"""
    point = half.point(method.with_tau(tau))
    use_one_thread(point.model)
    for each in half.reference, point:
        if not each.prompts:
            each.prompts += [continue_prompt(each, prompt, conditions)
                             for prompt in half.held_out.prompts]
    share = identical(point)
    kept = share >= fidelity
    return Verdict(dict(identical=share), mean_keeps=kept, upper_end_keeps=kept)


class Family(NamedTuple):
    """A rule under a cache policy, or a wave: everything of a method but its threshold."""
    words: str
    key: dict           # its threshold_key
    promise: dict       # nats or texts, as exits.json has them
    judge: Callable     # (tau, half of the windows) -> Verdict


def family_of(method, nats, fidelity, conditions):
    """
    A method, whatever its threshold -> its Family. nats: what a rule promises to cost at most.
    fidelity: the share of texts that a wave promises to leave as they are.
    """
    if method.kind is Kind.WAVE:
        of_wave = [method.wave, method.wave_steps]
        promise = dict(texts=fidelity)
        judge = partial(judge_texts, method, fidelity, conditions)
    else:
        of_wave = None
        promise = dict(nats=nats)
        judge = partial(judge_loss, method, nats, conditions)
    key = threshold_key(method.rule, method.policy, conditions.ring, of_wave)
    return Family(method.family, key, promise, judge)


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
    The table of calibrated thresholds, a row for each family, and how to use one of them.

    results: the folder of exits.json. folder: that of the model. flag_of_rule: {name of a rule: its
    --exit}.
    """
    rows = [dict(name=family.words) | row for family, row in zip(families, rows)]
    formats = dict(name='', tau='g', cost='+.4f', cost_low='+.4f', cost_high='+.4f', evals='.2f',
                   identical='.3f', kept='')
    print_rows('the largest tau that keeps the promise on half of the windows, and what it costs '
               'on the others:', rows, formats)
    if any(row.get('kept') is False for row in rows):
        print('\nkept = False: on the other windows it breaks the promise. It is in the file, and '
              'sample.py says so.\nMore windows (--n_windows) choose better.')
    without = [row['name'] for row in rows if row['tau'] is None]
    if without:
        print(f'\nno threshold was found for {"; ".join(without)}: none of taus keeps the promise')
    kept = [row for row in rows if row.get('kept')]
    print(f'\n{results}/exits.json')
    if kept:
        row = min(kept, key=lambda row: row.get('evals', math.inf))     # waves come last
        flags = [f'--out_dir={folder}', f"--exit={flag_of_rule[row['rule']]}"]
        if row['wave']:
            width, steps = row['wave']
            flags += [f'--wave={width}', f'--wave_steps={steps}']
        print(f"{row['name']}: {command_for('sample.py', row, is_task, *flags)}")
