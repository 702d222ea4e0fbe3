"""
What results/maze.md shows of a model of mazes: right rooms, whole mazes, exit rules; its picture.

    python -m results.maze --out_dir=pretrained/maze                    -> results/maze/shipped.csv
    python -m results.maze --edits=20                                   -> results/maze/edits.csv
    python -m results.maze --gif=assets/maze.gif --out_dir=pretrained/maze

Half of the mazes have long corridors, the others are bushy (zoo/maze.py). The rules are asked in
three ways: each room alone, whose exit is for good; all rooms together, until the largest signal is
small; asleep until news arrives.

    T, K    rooms; loop steps
    pieces, depth_of_wrong      wrong rooms of the CSV's row: in how many connected pieces they lie,
                and their mean depth as a share of the deepest room's
    NAME_wrong, NAME_steps      in edits.csv: wrong rooms and steps per room of a solve from the
                start, and of the REPAIRS
"""
import copy
import math
import os
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

import tasks
from cache import KeysValues
from common.checkpoint import open_run
from common.configurator import PathName, configure, run
from common.files import write_csv
from decode.defaults import waking_budget
from exits import make_exit
from loops import Plan
from page.__main__ import SEED_MAZE
from tasks import NOT_ASKED

# -------------------------------------------------------------------------------------------------
out_dir: PathName = 'pretrained/maze'
sides = [9, 16, 30]
n_mazes = [64, 24, 3]      # of each side, and of each of the two ways to carve
n_loop = [16, 32, 64, 128, 256, 512]    # fixed loops; beyond twice the rooms and 100 none are tried
rules = [['norm_rel', 0.2], ['accel', 3.0]]
asked = ['alone', 'together', 'asleep']     # how the rules are asked
path: PathName = ''         # of the CSV; empty = results/maze/NAME.csv, NAME that of out_dir
gif: PathName = ''          # draw a maze of 16 x 16 that is being solved, and measure nothing
edits = 0                   # > 0: move the goal of a solved maze so often, and measure nothing else
seed = 5                    # of the mazes
# -------------------------------------------------------------------------------------------------


def mazes(side, n, deep):
    """n mazes -> tokens, labels and depths of the rooms, (n, T) each."""
    rng = np.random.default_rng([seed, side, int(deep)])
    x, y, depth = tasks.Problems(f'maze:deep={deep}').make(rng, n, side * side)
    return torch.from_numpy(x), torch.from_numpy(y), depth


def pieces(x, wrong):
    """In how many pieces the wrong rooms (T,) of a maze x (T,) lie: doors join the rooms of one."""
    side = math.isqrt(len(x))
    steps = -side, 1, side, -1                  # behind the doors in the order of a room's bits
    left = {*np.flatnonzero(wrong).tolist()}
    n = 0
    while left:
        n += 1
        reached = [left.pop()]
        while reached:
            room = reached.pop()
            for door, step in enumerate(steps):
                if x[room] >> door & 1 and room + step in left:
                    left.remove(room + step)
                    reached.append(room + step)
    return n


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
    budget = waking_budget(side * side)
    methods = {('fixed', '', loops): None for loops in n_loop if loops <= budget}
    if model.groups:
        for name, tau in rules:
            rule = make_exit(name, tau)
            of_name = dict(alone=rule, together=together(rule),
                           asleep=make_exit(name, tau, wake=True))
            methods |= {(name, way, tau): of_name[way] for way in asked}
    else:
        methods = {('plain', '', 1): None}

    sums = {method: np.zeros(7) for method in methods}
    problems = tqdm(list(zip(x, y, depths)), desc=f'{side} x {side}', leave=False, disable=None)
    for idx, labels, depth in problems:
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
            sums[method] += (wrong.sum(), has_label.sum(), not wrong.any(), evals, passes,
                             (depth[wrong] / depth.max()).sum(), pieces(idx.numpy(), wrong))
    rows = []
    for (name, way, number), totals in sums.items():
        wrong, labels, whole, evals, passes, depth_of_wrong, n_pieces = totals
        rooms = round(100 * (1 - wrong / labels), 3)
        rows.append(dict(side=side, deep=deep, mazes=n, deepest=round(depths.max(axis=1).mean(), 1),
                         rule=name, asked=way, number=number,
                         rooms=rooms, whole=round(100 * whole / n, 1),
                         steps=round(evals / n, 2), passes=round(passes / n, 1),
                         wrong=int(wrong), pieces=int(n_pieces),
                         depth_of_wrong=round(depth_of_wrong / wrong, 2) if wrong else ''))
    return rows


# goals that move ---------------------------------------------------------------------------------

# how a maze is solved and repaired: the threshold of norm_rel, and do settled rooms sleep?
REPAIRS = dict(asleep=(0.2, True), smaller=(0.05, True), awake=(0.2, False))


def settle(group, e, x, keys, awake, tau=0.2, sleeps=True):
    """
    Loop as the page does, until all rooms are settled -> the last states (1, T, C), and how many
    block maps were computed.

    e (1, T, C) and x (1, T, C): what enters the loop, and the states to start from. keys: of each
    block of the core, and changed here. awake (T,): the rooms of the first step.
    """
    T = e.shape[1]
    f = group.block_map_awake(e, Plan(counts=[]), keys)
    x = x.clone()
    n_computed = 0
    for k in range(1, waking_budget(T) + 1):
        places = torch.from_numpy(np.flatnonzero(awake))
        before = x[0, places]
        after = f(before, k, torch.zeros_like(places), places)
        change = (after - before).norm(dim=-1) / before.norm(dim=-1)
        x[0, places] = after
        n_computed += len(places)
        moved = np.zeros(T, dtype=bool)
        moved[places] = change >= tau
        if not moved.any():
            break
        awake = group.core[0].attn.readers(moved[None])[0] if sleeps else np.full(T, True)
    return x, n_computed


def enters(model, words):
    """What enters the loop, (1, T, C), of a maze (T,)."""
    trace = []
    model(words[None], n_loop=1, trace=trace)
    return trace[0]['e']


def solve(group, e, *rule):
    """From the start: the states, how many block maps were computed, and the keys."""
    T = e.shape[1]
    keys = {block: KeysValues(1, T) for block in group.core}
    x, n_computed = settle(group, e, group.init_state(e), keys, np.full(T, True), *rule)
    return x, n_computed, keys


def repair(group, e_before, e, x, keys, tau=0.2, sleeps=True):
    """After an edit: the same as settle, from the states x and the keys of the solved maze."""
    news = (e != e_before).any(-1).numpy()
    awake = group.core[0].attn.readers(news)[0] if sleeps else np.full(e.shape[1], True)
    keys = {block: copy.deepcopy(kv) for block, kv in keys.items()}
    return settle(group, e, x, keys, awake, tau, sleeps)


@torch.no_grad()
def of_goals(model):
    """
    Rows of a CSV: the goal of each of eight mazes of 16 x 16 moves to `edits` rooms drawn by
    chance, each time from the states of the solved maze. Wrong rooms and steps per room: from the
    start, and by each of the repairs. Seven mazes are drawn by chance. The last is the first maze
    of the page, which was chosen because moved goals are repaired in it.
    """
    group, = model.groups
    problems = tasks.Problems('maze:deep=1')

    def of_seed(number):
        x, _, _ = problems.make(np.random.default_rng(number), 1, 256)
        return torch.from_numpy(x[0])
    tried = {'deep-3': of_seed(0)}
    for name, deep in (('deep', 1.0), ('bushy', 0.0)):
        for number, words in enumerate(mazes(16, 3, deep)[0]):
            tried[f'{name}-{number}'] = words
    tried['page'] = of_seed(SEED_MAZE)
    rows = []
    for number, (name_of_maze, words) in enumerate(tried.items()):
        e = enters(model, words)
        solved = {name: solve(group, e, *rule) for name, rule in REPAIRS.items()}
        rng = np.random.default_rng([seed, number])
        for goal in rng.choice(np.flatnonzero(words < 16), edits, replace=False):
            moved = words % 16
            moved[goal] += 16
            labels = problems.solve(problems.encoding.decode(moved))[1]
            e_moved = enters(model, moved)
            states = dict(start=solve(group, e_moved)[:2])
            for name, rule in REPAIRS.items():
                x, _, keys = solved[name]
                states[name] = repair(group, e, e_moved, x, keys, *rule)
            row = dict(maze=name_of_maze, goal=goal)
            for name, (x, n_computed) in states.items():
                answers = model.through_coda(x)[0].argmax(-1).numpy()
                row[f'{name}_wrong'] = ((answers != labels) & (labels != NOT_ASKED)).sum()
                row[f'{name}_steps'] = round(n_computed / len(words), 1)
            rows.append(row)
            print(' '.join(f'{value!s:>7}' for value in row.values()))
    return rows


def main():
    if gif:
        return draw()
    if edits:
        model, *_ = open_run(out_dir, length=256)
        where = path or 'results/maze/edits.csv'
        write_csv(of_goals(model), where)
        print(where)
        return
    if len(n_mazes) != len(sides):
        raise ValueError(f'n_mazes must have a number for each of the sides {sides}')
    name = os.path.basename(os.path.normpath(out_dir))
    where = path or f'results/maze/{"shipped" if name == "maze" else name}.csv'
    os.makedirs(os.path.dirname(where) or '.', exist_ok=True)
    rows = []
    for side, n in zip(sides, n_mazes):
        model, *_ = open_run(out_dir, length=side * side)
        for deep in 0.0, 1.0:
            of_side = rows_of(model, side, n, deep)
            rows += of_side
            for row in of_side:
                print(' '.join(f'{value!s:>9}' for value in row.values()))
            write_csv(rows, where)
    print(where)


# the picture -------------------------------------------------------------------------------------

ROOM = 22                   # pixels
VIRIDIS = ('#472d7b', '#3b528b', '#2c728e', '#21918c', '#28ae80', '#5ec962', '#addc30', '#fde725')
ARROWS = np.array([(-.28, -.05), (.06, -.05), (.06, -.2), (.32, 0), (.06, .2), (.06, .05),
                   (-.28, .05)])        # one that points to the right
TURNS = np.array([[[0, -1], [1, 0]], [[1, 0], [0, 1]], [[0, 1], [-1, 0]], [[-1, 0], [0, -1]]])


@torch.no_grad()
def draw():
    """The passes over a maze of 16 x 16, as the page shows them -> a GIF."""
    from PIL import Image
    model, *_ = open_run(out_dir, length=256)
    x, y, depth = mazes(16, 1, 1.0)
    name, tau = rules[0]
    rule = make_exit(name, tau, wake=True)
    states = []

    def watched(x0, x1, memo, read):
        states.append((x0, x1))
        return rule.signal(x0, x1, memo, read)
    # all rooms are computed, and only those that are awake take the new state
    model.groups[0].can_compute_awake_alone = lambda *_: False
    trace = []
    model(x, n_loop=waking_budget(256), exit=replace(rule, signal=watched), trace=trace)
    awake = trace[0]['awake']

    frames = []
    every = math.ceil(len(awake) / 70)          # at most seventy frames
    for k, (before, state) in enumerate(states, start=1):
        if k % every and k < len(states):
            continue
        change = ((state - before).norm(dim=-1) / before.norm(dim=-1))[0].numpy()
        logits = model.through_coda(state)[0]
        sure, door = logits.softmax(-1)[:, 32:36].max(dim=-1)
        is_awake = np.zeros(256, dtype=bool)
        is_awake[awake[k - 1]] = k < len(states)
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
