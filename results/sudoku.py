"""
What results/sudoku.md shows of a model of Sudoku: solved boards by loops and by starts.

    python -m results.sudoku --out_dir=pretrained/sudoku            -> out/pretrained-sudoku/...
    python -m results.sudoku --file=top95.txt                       the boards of a list
    python -m results.sudoku --ways=['fixed','valid','rest','sleep']    what each board costs

A board is done as soon as its answer is valid, which the rules alone tell; answers are looked at
after the numbers of loops in `loops`. A start is other noise, for the boards that are left.

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
ways = []                   # in place of loops and starts: ways to stop
tau = 0.3                   # of rest and sleep: how far a candidate that is still may move
path: str | None = None     # of the CSV; None = sudoku.csv in the folder of the run's results
# -------------------------------------------------------------------------------------------------

AT_ONCE = 6000      # candidates that are computed together


def boards_of(kind, n_boards):
    """
    Held-out boards: minimal ones of 9 x 9, those of 9 x 9 that singles solve, or those of n x n
    that singles solve -> a list of pairs, board and solution, and n.
    """
    random = Random(f'held-out {kind}')
    n = int(kind) if kind.isdigit() else 9
    return [sudoku.minimal_board(random, n, kind != 'minimal') for _ in range(n_boards)], n


def boards_in(file, most=None):
    """The same of a file; lines that do not begin with 81 letters of a board are left out."""
    with open(file) as f:
        lines = [line[:81] for line in f if len(line) > 80 and not line.startswith('#')]
    if most:
        lines = [lines[i] for i in np.linspace(0, len(lines) - 1, most).round().astype(int)]
    pairs = []
    for line in lines:
        board = sudoku.board_in(line)
        solutions = sudoku.search(board, 9)
        check(solutions and len(solutions) == 1, f'{line} has not one solution')
        pairs.append((board, solutions[0]))
    return pairs, 9


def solve(model, x, start=0, way='valid'):
    """
    Boards x (B, T) from one start -> how many loops each took (B,), its answer (B, T), and whether
    it has ended by the way before the loops did (B,); sleep is for one board.
    """
    B, T = x.shape
    most = max(loops)
    if way == 'sleep':
        trace = []
        logits, _ = model(x, n_loop=most, exit=make_exit('norm', tau, wake=True), trace=trace)
        return (trace[0]['evals'].double().mean(dim=1), logits.argmax(-1),
                trace[0]['steps_used'].amax(dim=1) < most)
    group = model.groups[0]
    span = Span(0, T, x.device)
    model.see(T)
    e = model.embed(x, span.pos).float()
    f = group.map_of_all(e, span)
    states = group.init_state(e, FixedNoise(start), span.pos)
    left = torch.arange(B)
    taken = torch.full((B,), most)
    ended = torch.zeros(B, dtype=torch.bool)
    answers = torch.zeros_like(x)
    for k in range(1, most + 1):
        before, states = states, f(states, k)
        ends = torch.zeros(len(left), dtype=torch.bool)
        if way == 'rest':
            ends = (states - before).norm(dim=-1).amax(dim=1) < tau
        if k == most or ends.any() or way == 'valid' and k in loops:
            guesses = model.through_coda(states).argmax(-1)
            answers[left] = guesses
            if way == 'valid':
                ends = torch.from_numpy(sudoku.Sudokus().valid(x[left].numpy(), guesses.numpy()))
        if ends.any():
            taken[left[ends]] = k
            ended[left[ends]] = True
            left, states = left[~ends], states[~ends]
            f = group.map_of_all(e[left], span)
        if not len(left):
            break
    return taken, answers, ended


def compare_ways(model, kind, x, y):
    """A row for each of the ways."""
    rows = []
    for way in ways:
        begin = time.process_time()
        results = [solve(model, board[None], way=way) for board in x]
        seconds = time.process_time() - begin
        taken, answers, ended = map(torch.cat, zip(*results))
        right = ((answers == y) | (y < 0)).all(dim=1)
        rested = ended & (way in ('rest', 'sleep'))
        rows.append(dict(boards=kind, n=len(x), way=way, solved=right.sum().item(),
                         loops=round(taken.double().mean().item(), 1), rested=rested.sum().item(),
                         rested_wrong=(rested & ~right).sum().item(),
                         cpu_seconds=round(seconds, 1)))
    return rows


def by_starts(model, kind, x, y):
    """A row for each start and each of `loops`, until all boards are solved."""
    rows = []
    left = torch.arange(len(x))
    for start in range(starts):
        begin = time.process_time()
        parts = [solve(model, x[some], start)
                 for some in left.split(max(1, AT_ONCE // x.shape[1]))]
        taken, answers, ended = map(torch.cat, zip(*parts))
        right = ((answers == y[left]) | (y[left] < 0)).all(dim=1)
        check(torch.equal(right, ended), 'a valid answer is the right one')
        before = len(x) - len(left)
        for k in loops:
            solved = before + (ended & (taken <= k)).sum().item()
            rows.append(dict(boards=kind, n=len(x), starts=start + 1, loops=k, solved=solved,
                             percent=round(100 * solved / len(x), 2),
                             cpu_seconds=round(time.process_time() - begin, 1)))
        left = left[~ended]
        if not len(left):
            break
    return rows


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    model, _, _, folder = open_run(out_dir, length=4096)
    if file:
        asked = [(file.rpartition('/')[2], boards_in(file, most))]
    else:
        asked = [(kind, boards_of(kind, number)) for kind, number in zip(kinds, n_boards)]
    rows = []
    for kind, (pairs, n) in asked:
        x = torch.from_numpy(np.stack([sudoku.candidates_of(board, n) for board, _ in pairs]))
        y = torch.from_numpy(np.stack([sudoku.labels_of(*pair, n) for pair in pairs]))
        rows += compare_ways(model, kind, x, y) if ways else by_starts(model, kind, x, y)
        write_csv(rows, path or f'{folder}/sudoku.csv')
    print_rows(out_dir, rows, {name: '' for name in rows[-1]})


if __name__ == '__main__':
    configure(globals())
    run(main)
