"""
What a goal that moves, or a wall that opens, leaves behind in a solved maze: see results/maze.md.

    python -m results.maze_goals        -> edits.csv, walls.csv, every_goal.csv in results/maze

The model goes on from the states of the solved maze, as the page does.

    T, C        rooms; width of a state
    NAME_wrong, NAME_steps      in the CSVs: wrong rooms and steps per room of a solve from the
                start, and of each of the REPAIRS
"""
import copy

import numpy as np
import torch

import tasks
from cache import KeysValues
from common.checkpoint import open_run
from common.configurator import PathName, configure, run
from common.files import write_csv
from decode.defaults import waking_budget
from loops import Plan
from page.__main__ import SEED_MAZE
from results.maze import mazes
from tasks import NOT_ASKED
from zoo.maze import GOAL, side_of

# -------------------------------------------------------------------------------------------------
out_dir: PathName = 'pretrained/maze'
edits = 20                  # goals, and walls, of each maze
folder: PathName = 'results/maze'       # of the CSVs
seed = 5                    # of the goals and walls
# -------------------------------------------------------------------------------------------------

problems = tasks.Problems('maze:deep=1')

EAST = 1
SOUTH = 2
FIRST_ARROW = 2 * GOAL      # the word of the arrow to the north, see zoo.maze

# how a maze is solved and repaired: the threshold of norm_rel, and do settled rooms sleep?
REPAIRS = dict(asleep=(0.14, True), smaller=(0.035, True), awake=(0.14, False))


def settle(group, e, x, keys, awake, tau=0.14, sleeps=True):
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


def repair(group, e_before, e, x, keys, tau=0.14, sleeps=True):
    """After an edit: the same as settle, from the states x and the keys of the solved maze."""
    news = (e != e_before).any(-1).numpy()
    awake = group.core[0].attn.readers(news)[0] if sleeps else np.full(e.shape[1], True)
    keys = {block: copy.deepcopy(kv) for block, kv in keys.items()}
    return settle(group, e, x, keys, awake, tau, sleeps)


def goals(words, rng):
    """Mazes (T,) like this one whose goal has moved, by chance: {the goal's room: maze}."""
    moved = {}
    for room in rng.choice(np.flatnonzero(words < GOAL), edits, replace=False):
        moved[room] = words % GOAL
        moved[room][room] += GOAL
    return moved


def every_goal(words, rng):
    """The same with the goal in each other room."""
    rooms = np.flatnonzero(words < GOAL)
    return {room: words % GOAL + GOAL * (torch.arange(len(words)) == room) for room in rooms}


def walls(words, rng):
    """Mazes (T,) like this one in which a wall has opened, by chance: {(room, door): maze}."""
    side = side_of(len(words))
    closed = []
    for room, doors in enumerate(words.tolist()):
        if room % side < side - 1 and not doors & 1 << EAST:
            closed.append((room, EAST, room + 1))
        if room + side < len(words) and not doors & 1 << SOUTH:
            closed.append((room, SOUTH, room + side))
    opened = {}
    for number in rng.choice(len(closed), edits, replace=False):
        room, door, other = closed[number]
        maze = words.clone()
        maze[room] += 1 << door
        maze[other] += 1 << (door + 2) % 4
        opened[room, door] = maze
    return opened


def wrong_rooms(answers, labels, words):
    """
    How many of the rooms (T,) with a label point along no shortest way? An opened wall can make two
    ways that are as short, of which the label is one.
    """
    side = side_of(len(words))
    steps = np.array([-side, 1, side, -1])
    depth = np.where(words >= GOAL, 0, len(words))
    asked = np.flatnonzero(labels != NOT_ASKED)
    for _ in asked:                                             # each pass goes a door further
        depth[asked] = 1 + depth[asked + steps[labels[asked] - FIRST_ARROW]]
    doors = answers[asked] - FIRST_ARROW
    points = (0 <= doors) & (doors < 4)                         # at an arrow
    doors = doors.clip(0, 3)
    behind = (asked + steps[doors]).clip(0, len(words) - 1)
    right = points & (words[asked] >> doors & 1 > 0) & (depth[behind] == depth[asked] - 1)
    return np.count_nonzero(~right)


def eight_mazes():
    """
    {name: maze (256,)}. Seven are drawn by chance. The last is the first maze of the page, which
    was chosen because most moved goals are repaired in it.
    """
    def of_seed(number):
        x, _, _ = problems.make(np.random.default_rng(number), 1, 256)
        return torch.from_numpy(x[0])
    tried = {'deep-3': of_seed(0)}
    for name, deep in (('deep', 1.0), ('bushy', 0.0)):
        for number, words in enumerate(mazes(16, 3, deep)[0]):
            tried[f'{name}-{number}'] = words
    tried['page'] = of_seed(SEED_MAZE)
    return tried


@torch.no_grad()
def rows_of(model, tried, make_edits):
    """
    Rows of a CSV: the mazes `tried` are edited, each time from the states of the solved maze. Wrong
    rooms and steps per room: from the start, and by each of the repairs.
    """
    group, = model.groups
    rows = []
    for number, (name_of_maze, words) in enumerate(tried.items()):
        e = enters(model, words)
        solved = {name: solve(group, e, *rule) for name, rule in REPAIRS.items()}
        rng = np.random.default_rng([seed, number])
        for place, edited in make_edits(words, rng).items():
            labels = problems.solve(problems.encoding.decode(edited))[1][0]
            e_edited = enters(model, edited)
            states = dict(start=solve(group, e_edited)[:2])
            for name, rule in REPAIRS.items():
                x, _, keys = solved[name]
                states[name] = repair(group, e, e_edited, x, keys, *rule)
            row = {'maze': name_of_maze, 'wall' if make_edits is walls else 'goal': place}
            for name, (x, n_computed) in states.items():
                answers = model.through_coda(x)[0].argmax(-1).numpy()
                row[f'{name}_wrong'] = wrong_rooms(answers, labels, edited.numpy())
                row[f'{name}_steps'] = round(n_computed / len(words), 1)
            rows.append(row)
            print(' '.join(f'{value!s:>7}' for value in row.values()))
    return rows


def main():
    model, *_ = open_run(out_dir, length=256)
    tried = eight_mazes()
    write_csv(rows_of(model, tried, goals), f'{folder}/edits.csv')
    write_csv(rows_of(model, tried, walls), f'{folder}/walls.csv')
    first = dict(page=tried['page'])
    write_csv(rows_of(model, first, every_goal), f'{folder}/every_goal.csv')


if __name__ == '__main__':
    configure(globals())
    run(main)
