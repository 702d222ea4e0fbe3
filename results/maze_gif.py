"""
The picture of README: a maze of 16 x 16 rooms while it is solved, loop by loop.

    python -m results.maze_gif          -> assets/maze.gif
"""
import math
import os
from dataclasses import replace

import numpy as np
import torch

from common.checkpoint import open_run
from common.configurator import configure
from common.errors import run
from exits import make_exit
from results.maze import mazes

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/maze'
gif = 'assets/maze.gif'
rule = 'norm_rel'
tau = 0.14
# -------------------------------------------------------------------------------------------------

ROOM = 22                   # pixels
VIRIDIS = ('#472d7b', '#3b528b', '#2c728e', '#21918c', '#28ae80', '#5ec962', '#addc30', '#fde725')
ARROWS = np.array([(-.28, -.05), (.06, -.05), (.06, -.2), (.32, 0), (.06, .2), (.06, .05),
                   (-.28, .05)])        # one that points to the right
TURNS = np.array([[[0, -1], [1, 0]], [[1, 0], [0, 1]], [[0, 1], [-1, 0]], [[-1, 0], [0, -1]]])


@torch.no_grad()
def main():
    """The passes over a maze of 16 x 16, as the page shows them -> a GIF."""
    from PIL import Image
    model, *_ = open_run(out_dir, length=256)
    x, y, depth = mazes(16, 1, 1.0)
    waking = make_exit(rule, tau, wake=True)
    steps = []                      # the states of the awake rooms before and after each loop step

    def watched(x0, x1, memo, read):
        steps.append((x0, x1))
        return waking.signal(x0, x1, memo, read)
    trace = []
    model(x, n_loop=2 * 256 + 100, exit=replace(waking, signal=watched), trace=trace)
    awake = trace[0]['awake']       # their places

    frames = []
    every = math.ceil(len(awake) / 70)          # at most seventy frames
    state = torch.empty(1, 256, model.config.n_embd)
    for k, (places, (before, after)) in enumerate(zip(awake, steps), start=1):
        state[0, places] = after
        if k % every and k < len(awake):
            continue
        change = np.zeros(256)
        change[places] = (after - before).norm(dim=-1) / before.norm(dim=-1)
        logits = model.through_coda(state)[0]
        sure, door = logits.softmax(-1)[:, 32:36].max(dim=-1)
        is_awake = np.zeros(256, dtype=bool)
        is_awake[places] = k < len(awake)
        right = (logits.argmax(-1) == y[0]).numpy()
        frames.append(frame(x[0].numpy(), door.numpy(), sure.numpy(), is_awake, change, right))
    several = Image.new('RGB', (frames[0].width, 8 * frames[0].height))     # their colours
    for place, image in enumerate(frames[::len(frames) // 8][:8]):
        several.paste(image, (0, place * image.height))
    palette = several.quantize(96)
    frames = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in frames]
    frames[0].save(gif, save_all=True, append_images=frames[1:], loop=0, optimize=True,
                   duration=[150] * (len(frames) - 1) + [3000])
    print(f'{gif}: {os.path.getsize(gif) / 1e3:.0f} kB, {len(awake)} loops, the deepest room '
          f'{depth.max()} doors away')


def frame(x, doors_taken, sure, awake, change, right):
    """One picture of a maze: all (T,)."""
    from PIL import Image, ImageDraw
    side = 16
    scale = 2                                   # drawn larger, then reduced
    size = scale * ROOM
    image = Image.new('RGB', (side * size + 4, side * size + 4), 'white')
    pen = ImageDraw.Draw(image)
    for room in range(side * side):
        left = room % side * size + 2
        top = room // side * size + 2
        fill = '#ffffff'
        if awake[room]:
            share = 1 + np.log10(max(change[room], 1e-9)) / 3
            fill = VIRIDIS[round(7 * min(1, max(0, share)))]
        pen.rectangle((left, top, left + size, top + size), fill=fill)
        middle = np.array((left + size / 2, top + size / 2))
        if x[room] >= 16:
            pen.ellipse((*(middle - .3 * size), *(middle + .3 * size)), fill='#2e7d32')
            continue
        dark = not awake[room] or change[room] > .1
        colour = np.array((17, 17, 17) if dark else (255, 255, 255))
        if not right[room]:
            colour = np.array((198, 40, 40) if dark else (255, 138, 128))
        ground = np.array([int(fill[i:i + 2], 16) for i in (1, 3, 5)])
        share = .12 + .88 * sure[room]
        mixed = tuple((share * colour + (1 - share) * ground).astype(int).tolist())
        points = middle + size * ARROWS @ TURNS[doors_taken[room]].T
        pen.polygon([tuple(point) for point in points], fill=mixed)
    for room in range(side * side):
        left = room % side * size + 2
        top = room // side * size + 2
        right_edge, bottom = left + size, top + size
        lines = ((left, top, right_edge, top), (right_edge, top, right_edge, bottom),
                 (left, bottom, right_edge, bottom), (left, top, left, bottom))
        for door, line in enumerate(lines):
            if not x[room] >> door & 1:
                pen.line(line, fill='#22252b', width=4)
    return image.reduce(scale)


if __name__ == '__main__':
    configure(globals())
    run(main)
