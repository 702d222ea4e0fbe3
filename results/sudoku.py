"""
What results/sudoku.md shows of a model of Sudoku: solved boards by loops and by starts.

    python -m results.sudoku --out_dir=pretrained/sudoku            -> out/pretrained-sudoku/...
    python -m results.sudoku --file=top95.txt                       the boards of a list
    python -m results.sudoku --ways=['fixed','valid','rest','sleep']    what each board costs

A board is done as soon as its answer is valid, and right, since it has one solution. Answers are
looked at after the numbers of loops in `loops`. A start is other noise, for the boards that are
left; after the first one a candidate skips a step with the chance `skip`.

Ways to stop, for boards one at a time: `fixed`, after the last of `loops`; `valid`, as above;
`rest`, as soon as no candidate moves farther than tau in a step; `sleep`, the exit rule `norm` with
that tau, which computes the awake alone.
"""
import time
from random import Random

import numpy as np
import torch

from cache import Span
from common.checkpoint import open_run
from common.configurator import configure
from common.errors import check, run
from common.files import write_csv
from common.terminal import print_rows
from exits import make_exit
from loops import FixedNoise
from zoo import sudoku

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/sudoku'
kinds = ['singles', 'minimal', '4', '6', '12', '16']    # see boards_of
n_boards = [500, 500, 100, 100, 64, 64]     # of each kind
file: str | None = None     # in place of them the boards of a file, see boards_in
most: int | None = None     # so many of them, evenly spread; None = all
loops = [16, 32, 64, 128, 256]
starts = 8
skip = 0.2                  # in all starts but the first, see loops.RecurrentGroup
ways = []                   # in place of loops and starts: ways to stop
tau = 0.3                   # of rest and sleep: how far a candidate that is still may move
path: str | None = None     # of the CSV; None = sudoku.csv in the folder of the run's results
# -------------------------------------------------------------------------------------------------

AT_ONCE = 6000      # candidates that are computed together


def boards_of(kind, n_boards):
    """
    Held-out boards: minimal ones of 9 x 9, those of 9 x 9 that singles solve, or those of n x n
    that singles solve -> a list of boards, and n.
    """
    random = Random(f'held-out {kind}')
    n = int(kind) if kind.isdigit() else 9
    return [sudoku.minimal_board(random, n, kind != 'minimal')[0] for _ in range(n_boards)], n


def boards_in(file, most=None):
    """The same of a file; lines that do not begin with 81 letters of a board are left out."""
    with open(file) as f:
        lines = [line[:81] for line in f if len(line) > 80 and not line.startswith('#')]
    if most:
        lines = [lines[i] for i in np.linspace(0, len(lines) - 1, most).round().astype(int)]
    boards = [sudoku.board_in(line) for line in lines]
    for line, board in zip(lines, boards):
        check(len(sudoku.search(board, 9) or []) == 1, f'{line} has not one solution')
    return boards, 9


def solve(model, x, start=0, way='valid'):
    """
    Boards x (B, T) from one start -> how many loops each took (B,), whether its answer is valid
    (B,), and whether it has ended by the way before the loops did (B,); sleep is for one board.
    """
    B, T = x.shape
    most = max(loops)
    is_valid = sudoku.Sudokus().valid
    if way == 'sleep':
        trace = []
        logits, _ = model(x, n_loop=most, exit=make_exit('norm', tau, wake=True), trace=trace)
        return (trace[0]['evals'].double().mean(dim=1), is_valid(x, logits.argmax(-1)),
                trace[0]['steps_used'].amax(dim=1) < most)
    group = model.groups[0]
    span = Span(0, T, x.device)
    group.skip = skip if start else 0.0
    model.see(T)
    e = model.embed(x, span.pos).float()
    f = group.map_of_all(e, span)
    states = group.init_state(e, FixedNoise(start), span.pos)
    left = torch.arange(B)
    taken = torch.full((B,), most)
    valid, ended = torch.zeros(2, B, dtype=torch.bool)
    for k in range(1, most + 1):
        before, states = states, f(states, k)
        ends = torch.zeros(len(left), dtype=torch.bool)
        if way == 'rest':
            ends = (states - before).norm(dim=-1).amax(dim=1) < tau
        if k == most or ends.any() or way == 'valid' and k in loops:
            valid[left] = is_valid(x[left], model.through_coda(states).argmax(-1))
            if way == 'valid':
                ends = valid[left]
        if ends.any():
            taken[left[ends]] = k
            ended[left[ends]] = True
            left, states = left[~ends], states[~ends]
            f = group.map_of_all(e[left], span)
        if not len(left):
            break
    return taken, valid, ended


def solve_all(model, x, at_once, *start_and_way):
    """Boards x (N, T), so many at once -> what solve finds of each, and the CPU seconds."""
    begin = time.process_time()
    parts = [solve(model, boards, *start_and_way) for boards in x.split(at_once)]
    return *map(torch.cat, zip(*parts)), time.process_time() - begin


def compare_ways(model, kind, x):
    """A row for each of the ways."""
    rows = []
    for way in ways:
        taken, valid, ended, seconds = solve_all(model, x, 1, 0, way)
        rested = ended & (way in ('rest', 'sleep'))
        rows.append(dict(boards=kind, n=len(x), way=way, solved=valid.sum().item(),
                         loops=round(taken.double().mean().item(), 1), rested=rested.sum().item(),
                         rested_wrong=(rested & ~valid).sum().item(),
                         cpu_seconds=round(seconds, 1)))
    return rows


def by_starts(model, kind, x):
    """A row for each of `loops` of the first start, and one for each later start."""
    rows = []
    left = x
    for start in range(starts):
        taken, valid, _, seconds = solve_all(model, left, max(1, AT_ONCE // x.shape[1]), start)
        for k in loops[-1:] if start else loops:
            solved = len(x) - len(left) + (valid & (taken <= k)).sum().item()
            rows.append(dict(boards=kind, n=len(x), starts=start + 1, loops=k, solved=solved,
                             percent=round(100 * solved / len(x), 2),
                             cpu_seconds=round(seconds, 1)))
        left = left[~valid]
        if not len(left):
            break
    return rows


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    torch.manual_seed(1337)     # of the steps that are skipped
    model, _, _, folder = open_run(out_dir, length=4096)
    if file:
        asked = [(file.rpartition('/')[2], boards_in(file, most))]
    else:
        asked = [(kind, boards_of(kind, number)) for kind, number in zip(kinds, n_boards)]
    rows = []
    for kind, (boards, n) in asked:
        x = torch.from_numpy(np.stack([sudoku.candidates_of(board, n) for board in boards]))
        rows += (compare_ways if ways else by_starts)(model, kind, x)
        write_csv(rows, path or f'{folder}/sudoku.csv')
    print_rows(out_dir, rows, {name: '' for name in rows[-1]})


if __name__ == '__main__':
    configure(globals())
    run(main)
