"""
What results/maze.md shows of a model of mazes: right rooms, whole mazes, exit rules.

    python -m results.maze --out_dir=pretrained/maze        -> out/maze/maze.csv

Half of the mazes have long corridors, the others are bushy (zoo/maze.py). The rules are asked in
three ways: each room alone, whose exit is for good; all rooms together, until the largest signal is
small; asleep until news arrives.

    T, K    rooms; loop steps
"""
from dataclasses import replace

import numpy as np
import torch

import tasks
from common.checkpoint import open_run
from common.configurator import configure
from common.errors import run
from common.files import write_csv
from exits import make_exit
from tasks import NOT_ASKED

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/maze'
sides = [9, 16, 30]
n_mazes = [64, 24, 3]      # of each side, and of each of the two ways to carve
n_loop = [16, 32, 64, 128, 256, 512]    # fixed loops; beyond twice the rooms and 100 none are tried
rules = [['norm_rel', 0.2], ['accel', 3.0]]
asked = ['alone', 'together', 'asleep']     # how the rules are asked
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
path: str | None = None     # of the CSV; None = maze.csv in the folder of the run's results
seed = 5                    # of the mazes
# -------------------------------------------------------------------------------------------------


def mazes(side, n, deep):
    """n mazes -> tokens, labels and depths of the rooms, (n, T) each."""
    rng = np.random.default_rng([seed, side, int(deep)])
    x, y, depth = tasks.Problems(f'maze:deep={deep}').make(rng, n, side * side)
    return torch.from_numpy(x), torch.from_numpy(y), depth


def together(rule):
    """The rule asked of all rooms at once: the signal of each is the largest of all."""
    def signal(x0, x1, memo, read):
        value, memo = rule.signal(x0, x1, memo, read)
        if value is not None:
            value = value.amax(dim=-1, keepdim=True).expand_as(value)
        return value, memo
    return replace(rule, signal=signal)


@torch.no_grad()
def rows_of(model, side, n, deep):
    """Rows of the CSV: what the model makes of n mazes, one after another."""
    x, y, depths = mazes(side, n, deep)
    budget = 2 * side * side + 100
    methods = {('fixed', '', loops): None for loops in n_loop if loops <= budget}
    if model.groups:
        for name, tau in rules:
            rule = make_exit(name, tau)
            of_name = dict(alone=rule, together=together(rule),
                           asleep=make_exit(name, tau, wake=True))
            methods |= {(name, way, tau): of_name[way] for way in asked}
    else:
        methods = {('plain', '', 1): None}

    sums = {method: np.zeros(5) for method in methods}
    for idx, labels in zip(x, y):
        has_label = labels != NOT_ASKED
        states = []
        if model.groups:        # all fixed counts in one pass: the layers after the loop read each
            trace = []
            model(idx[None], n_loop=max(method[2] for method in methods if not method[1]),
                  trace=trace)
            states = trace[0]['states']                                         # (K+1, 1, T, C)
        for method, rule in methods.items():
            evals = passes = method[2]
            if rule is not None:
                trace = []
                logits, _ = model(idx[None], n_loop=budget, exit=rule, trace=trace)
                evals = trace[0]['evals'].double().mean().item()
                passes = trace[0]['evals'].max().item()
                if rule.wake:
                    passes = len(trace[0]['awake'])
            elif model.groups:
                logits = model.through_coda(states[method[2]])
            else:
                logits, _ = model(idx[None])
            wrong = ((logits[0].argmax(-1) != labels) & has_label).numpy()
            sums[method] += wrong.sum(), has_label.sum(), not wrong.any(), evals, passes
    rows = []
    for (name, way, number), totals in sums.items():
        wrong, labels, whole, evals, passes = totals
        rooms = round(100 * (1 - wrong / labels), 3)
        rows.append(dict(damping=model.config.damping, side=side, deep=deep, mazes=n,
                         deepest=round(depths.max(axis=1).mean(), 1), rule=name, asked=way,
                         number=number, rooms=rooms, whole=round(100 * whole / n, 1),
                         steps=round(evals / n, 2), passes=round(passes / n, 1), wrong=int(wrong)))
    return rows


def main():
    if len(n_mazes) != len(sides):
        raise ValueError(f'n_mazes must have a number for each of the sides {sides}')
    rows = []
    for side, n in zip(sides, n_mazes):
        model, _, _, folder = open_run(out_dir, length=side * side, damping=damping)
        where = path or f'{folder}/maze.csv'
        for deep in 0.0, 1.0:
            of_side = rows_of(model, side, n, deep)
            rows += of_side
            for row in of_side:
                print(' '.join(f'{value!s:>9}' for value in row.values()))
            write_csv(rows, where)
    print(where)


if __name__ == '__main__':
    configure(globals())
    run(main)
