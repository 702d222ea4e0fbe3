"""
What results/maze.md shows of a model of mazes: right rooms and whole mazes, by doors at random, by
fixed loops, and by exit rules with rooms that exit for good or sleep until news arrives.

    python -m results.maze --out_dir=pretrained/maze        -> out/maze/maze.csv
"""
import numpy as np
import torch

import tasks
from common.checkpoint import open_run
from common.configurator import configure
from common.errors import run
from common.files import write_csv
from common.terminal import print_rows
from exits import make_exit
from tasks import NOT_ASKED
from zoo.maze import GOAL

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/maze'
sides = [9, 16, 30]
n_mazes = [64, 24, 3]      # of each side, and of each of the two ways to carve
n_loop = [64, 128, 256]     # fixed loops
rules = [['norm_rel', 0.14], ['accel', 0.7]]
wake = [False, True]
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
path: str | None = None     # of the CSV; None = maze.csv in the folder of the run's results
seed = 5                    # of the mazes
# -------------------------------------------------------------------------------------------------

def mazes(side, n, deep):
    """n mazes -> tokens, labels and depths of the rooms, (n, side * side) each."""
    rng = np.random.default_rng([seed, side, int(deep)])
    x, y, depth = tasks.Problems(f'maze:deep={deep}').make(rng, n, side * side)
    return torch.from_numpy(x), torch.from_numpy(y), depth


def methods(model):
    """Ways to solve a maze: the fields of a row of the CSV that name it."""
    chance = [dict(rule='chance', number=None, wake=None)]
    if not model.groups:
        return chance + [dict(rule='plain', number=1, wake=None)]
    fixed = [dict(rule='fixed', number=loops, wake=None) for loops in n_loop]
    exits = [dict(rule=name, number=tau, wake=waking) for name, tau in rules for waking in wake]
    return chance + fixed + exits


def solve(model, x, rule, number, wake=None):
    """One maze (1, T) -> the doors taken (1, T), and the loop steps of a room in the mean."""
    if rule == 'chance':
        has_door = x[0, :, None] >> torch.arange(4) & 1                         # (T, 4)
        return 2 * GOAL + has_door.double().multinomial(1).T, 0
    if rule in ('plain', 'fixed'):
        return model(x, n_loop=number)[0].argmax(-1), number
    trace = []
    logits, _ = model(x, n_loop=2 * x.shape[1] + 100, exit=make_exit(rule, number, wake=wake),
                      trace=trace)
    return logits.argmax(-1), trace[0]['evals'].double().mean().item()


@torch.no_grad()
def main():
    rows = []
    for side, n in zip(sides, n_mazes, strict=True):
        model, _, _, folder = open_run(out_dir, length=side * side, damping=damping)
        for deep in 0.0, 1.0:
            x, y, depths = mazes(side, n, deep)
            has_label = y != NOT_ASKED
            for method in methods(model):
                solved = [solve(model, idx[None], **method) for idx in x]
                wrong = (torch.cat([doors for doors, _ in solved]) != y) & has_label
                rows.append(dict(
                    damping=model.config.damping, side=side, deep=deep, mazes=n,
                    deepest=round(depths.max(axis=1).mean(), 1), **method,
                    rooms=round(100 * (1 - (wrong.sum() / has_label.sum()).item()), 3),
                    whole=round(100 * (~wrong.any(dim=1)).float().mean().item(), 1),
                    steps=round(np.mean([steps for _, steps in solved]), 2),
                    wrong=wrong.sum().item()))
            write_csv(rows, path or f'{folder}/maze.csv')
    print_rows(out_dir, rows, {name: '' for name in rows[-1]})


if __name__ == '__main__':
    configure(globals())
    run(main)
