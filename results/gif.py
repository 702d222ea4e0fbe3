"""
Pictures that move: a maze (README.md) or a Sudoku (sudoku.md) while it is solved, loop by loop.

    python -m results.gif               -> assets/maze.gif
    python -m results.gif sudoku        -> assets/sudoku.gif
"""
import io
import math
from typing import Literal

import numpy as np
import torch
from PIL import Image

from common import plots
from common.configurator import configure
from common.errors import run
from exits import make_exit
from model import GPT
from results.maze import mazes
from zoo import sudoku
from zoo.maze import DIRECTIONS, GOAL

# -------------------------------------------------------------------------------------------------
kind: Literal['maze', 'sudoku'] = 'maze'
# -------------------------------------------------------------------------------------------------

SIDE = 16
ARROWS = np.array([(right, -down) for down, right in DIRECTIONS])       # to the right, up
BOARD = '4.....8.5.3..........7......2.....6.....8.4......1.......6.3.7.5..2.....1.4......'
BLACK, RED, GREY, VIOLET = (.07, .07, .07), (.78, .16, .16), (.86, .87, .89), (.7, .55, .96)


def solve(name, x, n_loop, *rule):
    """
    A problem x (1, T) -> in K loops how much each state changes (K, T), from 0 for a thousandth of
    it to 1 for all, nan where it sleeps, and in the end everywhere; and the logits (K, T, V).
    """
    model = GPT.load(f'pretrained/{name}', length=x.shape[1])
    trace = []
    model(x, n_loop=n_loop, exit=make_exit(*rule, wake=True), trace=trace, keep_states=True)
    states = trace[0]['states'][:, 0]                                           # (K+1, T, C)
    changes = states.diff(dim=0).norm(dim=-1) / states[:-1].norm(dim=-1)
    changes[changes == 0] = torch.nan       # asleep
    changes[-1] = torch.nan
    return 1 + np.log10(changes.numpy().clip(1e-9)) / 3, model.through_coda(states[1:])


def solved_maze():
    """A maze (T,), and for each loop (T,): work, the door taken, its probability, is it right?"""
    x, y, _ = mazes(SIDE, 1, 1.0)
    work, logits = solve('maze', x, 2 * SIDE * SIDE + 100, 'norm_rel', 0.14)
    sure, doors = logits.softmax(-1)[..., 2 * GOAL:2 * GOAL + 4].max(dim=-1)
    is_right = logits.argmax(-1) == y
    return x[0].numpy(), list(zip(work, doors.numpy(), sure.numpy(), is_right.numpy()))


def draw_maze(ax, maze, work, doors, sure, is_right):
    """One loop: rooms that are awake are coloured, and the less sure an arrow is, the paler."""
    ax.imshow(work.reshape(SIDE, SIDE), cmap='viridis', vmin=0, vmax=1)
    rooms = maze < GOAL                 # all but the one with the goal
    colour = np.where(is_right[:, None], (*BLACK, 1), (*RED, 1))
    colour[:, 3] = .12 + .88 * sure
    places = np.flatnonzero(rooms)
    ax.quiver(places % SIDE, places // SIDE, *ARROWS[doors[rooms]].T,
              color=colour[rooms], pivot='mid', scale=1.6, scale_units='x', width=.008,
              headwidth=3.4, headlength=3, headaxislength=3)
    goal = rooms.argmin()
    ax.plot(goal % SIDE, goal // SIDE, 'o', color='#2e7d32', markersize=9)
    for door, (down, right) in enumerate(DIRECTIONS):
        walls = np.flatnonzero(maze >> door & 1 == 0)
        x, y = walls % SIDE + right / 2, walls // SIDE + down / 2
        ax.plot((x - down / 2, x + down / 2), (y - right / 2, y + right / 2), color='#22252b',
                lw=1.3)
    ax.set(xlim=(-.55, SIDE - .45), ylim=(SIDE - .45, -.55))


def solved_board():
    """The first of Norvig's hard boards (81,), and for each loop (T,): work, belief."""
    board = sudoku.board_in(BOARD)
    x = sudoku.candidates_of(board, 9)
    work, logits = solve('sudoku', torch.from_numpy(x)[None], 256, 'norm', 0.1)
    belief = logits[..., [sudoku.NO, sudoku.YES]].softmax(-1)[..., 1]
    return board, list(zip(work, np.where(x == sudoku.OPEN, belief, x == sudoku.GIVEN)))


def draw_board(ax, board, work, belief):
    """One loop: cells at work are coloured, and the less the model believes, the paler a digit."""
    solution, = sudoku.search(board, 9)
    most = np.nan_to_num(work).reshape(81, 9, 1).max(axis=1)            # white: asleep
    colours = 1 - most.clip(0, 1).round(1) * (1 - np.array(VIOLET))
    colours[board > 0] = GREY
    ax.imshow(colours.reshape(9, 9, 3), extent=(0, 9, 9, 0))
    for cell, likely in enumerate(belief.reshape(81, 9)):
        row, column = divmod(cell, 9)
        best = likely.argmax()
        if (likely > .5).sum() == 1:
            ax.text(column + .5, row + .52, best + 1, ha='center', va='center_baseline', size=17,
                    weight='bold' if board[cell] else 'normal', alpha=likely[best],
                    color=BLACK if best + 1 == solution[cell] else RED)
            continue
        for digit, share in enumerate(likely):
            ax.text(column + (digit % 3 + .5) / 3, row + (digit // 3 + .53) / 3, digit + 1, size=7,
                    ha='center', va='center_baseline', alpha=.08 + .92 * share.round(1))
    for line in range(10):
        ax.plot((0, 9, np.nan, line, line), (line, line, np.nan, 0, 9), color='#22252b',
                lw=.5 if line % 3 else 1.8)


@torch.no_grad()
def main():
    is_maze = kind == 'maze'
    problem, loops = solved_maze() if is_maze else solved_board()
    every = math.ceil(len(loops) / 70)          # at most seventy frames
    frames = []
    for loop in [*loops[every - 1:-1:every], loops[-1]]:
        figure, [[ax]] = plots.panels(1, 3.6, 3.6)
        figure.subplots_adjust(0, 0, 1, 1)
        ax.set_axis_off()
        (draw_maze if is_maze else draw_board)(ax, problem, *loop)
        png = io.BytesIO()
        figure.savefig(png, dpi=100)
        frames.append(Image.open(png).convert('RGB'))
    some = np.concatenate([np.asarray(image) for image in frames[::8]])
    palette = Image.fromarray(some).quantize(64, Image.Quantize.MAXCOVERAGE)
    frames = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in frames]
    frames[0].save(f'assets/{kind}.gif', save_all=True, append_images=frames[1:], loop=0,
                   optimize=True, duration=[150 if is_maze else 100] * (len(frames) - 1) + [3000])
    print(f'assets/{kind}.gif: {len(loops)} loops')


if __name__ == '__main__':
    configure(globals(), positional='kind')
    run(main)
