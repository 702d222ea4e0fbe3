"""
The picture of README: a maze of 16 x 16 rooms while it is solved, loop by loop.

    python -m results.maze_gif          -> assets/maze.gif

    T       256 rooms
"""
import io
import math

import numpy as np
import torch
from PIL import Image

from common import plots
from common.errors import run
from exits import make_exit
from model import GPT
from results.maze import mazes
from zoo.maze import DIRECTIONS, GOAL

SIDE = 16
GIF = 'assets/maze.gif'
ARROWS = np.array([(right, -down) for down, right in DIRECTIONS])       # to the right, up


@torch.no_grad()
def solved():
    """
    A maze (T,), and for each loop four arrays (T,): the relative change of each state, nan where
    the room sleeps, and in the end everywhere; the door taken; its probability; is it right?
    """
    model = GPT.load('pretrained/maze', length=SIDE * SIDE)
    x, y, _ = mazes(SIDE, 1, 1.0)
    trace = []
    model(x, n_loop=2 * SIDE * SIDE + 100, exit=make_exit('norm_rel', 0.14, wake=True),
          trace=trace, keep_states=True)
    states = trace[0]['states'][:, 0]                                           # (K+1, T, C)
    changes = states.diff(dim=0).norm(dim=-1) / states[:-1].norm(dim=-1)        # (K, T)
    changes[changes == 0] = torch.nan       # asleep
    changes[-1] = torch.nan
    logits = model.through_coda(states[1:])                                     # (K, T, V)
    sure, doors = logits.softmax(-1)[..., 2 * GOAL:2 * GOAL + 4].max(dim=-1)
    loops = zip(changes.numpy(), doors.numpy(), sure.numpy(), (logits.argmax(-1) == y).numpy())
    return x[0].numpy(), list(loops)


def draw(ax, maze, change, doors, sure, is_right):
    """One loop: rooms that are awake are coloured, and the less sure an arrow is, the paler."""
    ax.imshow(1 + np.log10(change.clip(1e-9)).reshape(SIDE, SIDE) / 3, cmap='viridis', vmin=0,
              vmax=1)
    rooms = maze < GOAL                 # all but the one with the goal
    colour = np.where(is_right[:, None], (.07, .07, .07, 1), (.78, .16, .16, 1))
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
    ax.set_axis_off()


def main():
    maze, loops = solved()
    every = math.ceil(len(loops) / 70)          # at most seventy frames
    frames = []
    for loop in [*loops[every - 1:-1:every], loops[-1]]:
        figure, [[ax]] = plots.panels(1, 3.6, 3.6)
        figure.subplots_adjust(0, 0, 1, 1)
        draw(ax, maze, *loop)
        png = io.BytesIO()
        figure.savefig(png, dpi=100)
        frames.append(Image.open(png).convert('RGB'))
    palette = frames[len(frames) // 3].quantize(64, Image.Quantize.MAXCOVERAGE)
    frames = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in frames]
    frames[0].save(GIF, save_all=True, append_images=frames[1:], loop=0, optimize=True,
                   duration=[150] * (len(frames) - 1) + [3000])
    print(f'{GIF}: {len(loops)} loops')


if __name__ == '__main__':
    run(main)
