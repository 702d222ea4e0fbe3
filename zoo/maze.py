"""
A maze: from each room, which door leads to the goal?

    python -m zoo.maze                          draws a maze with the answers, checks the oracle
    python train.py config/maze.py              trains on mazes of 5 to 9 rooms a side
    python sample.py --out_dir=pretrained/maze --exit accel --length=256
                                                a maze of 16 x 16, solved and drawn

A token is a room, its word the doors that it has, its label the door towards the goal. A room
attends to itself and its four neighbours, and nothing tells it where it is, so a loop step carries
news from a room to the next alone. It comes from two sides: from the goal, and from the dead ends
(where all other doors lead to dead ends, the last one must be right). A search for the shortest
path does all this in microseconds; here nobody told the model how.

    T, side     rooms of a maze, and of each of its sides: T = side * side, row by row
    door        0 north, 1 east, 2 south, 3 west; a room's doors are the sum of 2 ** door
    H, D        heads; width of a head
"""
import math
from collections import deque
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

import tasks
from common.colours import paint
from common.configurator import configure, run
from common.errors import check
from model import GPT, Block, CausalSelfAttention, GPTConfig, attend_near
from tasks import NOT_ASKED

# -------------------------------------------------------------------------------------------------
task = 'maze'           # with other knobs if you like: maze:smallest=5,deep=1
block_size = 81         # T
rows = 100              # mazes to check with the oracle
seed = 0
# -------------------------------------------------------------------------------------------------

STEPS = (-1, 0), (0, 1), (1, 0), (0, -1)        # through a door: rows down, columns to the right
CORRIDORS = '·╵╶└╷│┌├╴┘─┴┐┤┬┼'                  # a letter for the doors of a room
ARROWS = '↑→↓←'
GOAL = 16                                       # added to the doors of the room with the goal


def side_of(T):
    """The rooms of a side. ValueError if T rooms make no square."""
    side = math.isqrt(T)
    check(side > 1 and side * side == T, 'a maze is a square of at least 2 x 2 rooms, and '
          f'{T} rooms make none: 9 x 9 are 81, 16 x 16 are 256, 30 x 30 are 900')
    return side


# the task ----------------------------------------------------------------------------------------

def carve(random, side, deep):
    """
    A maze with one way between any two rooms -> the doors of its rooms (side, side).

    It grows from a room: a new room opens beside one that is there already. deep: always beside the
    newest that has room, which makes long corridors; otherwise beside any.
    """
    doors = np.zeros((side, side), dtype=np.int64)
    first = random.randrange(side), random.randrange(side)
    there = {first}
    growing = [first]
    while growing:
        place = -1 if deep else random.randrange(len(growing))
        row, column = growing[place]
        free = []
        for door, (down, right) in enumerate(STEPS):
            room = row + down, column + right
            if room not in there and 0 <= room[0] < side and 0 <= room[1] < side:
                free.append((door, room))
        if not free:
            growing.pop(place)
            continue
        door, room = random.choice(free)
        doors[row, column] += 1 << door
        doors[room] += 1 << (door + 2) % 4
        there.add(room)
        growing.append(room)
    return doors


def shifted(grid, door, fill):
    """What each room's neighbour behind `door` has: grid (rows, side, side) -> the same shape."""
    down, right = STEPS[door]
    neighbours = np.full_like(grid, fill)
    side = grid.shape[1]
    of = [slice(max(0, -step), side - max(0, step)) for step in (down, right)]
    at = [slice(max(0, step), side - max(0, -step)) for step in (down, right)]
    neighbours[:, of[0], of[1]] = grid[:, at[0], at[1]]
    return neighbours


class Mazes:
    """
    Mazes with one way between any two rooms, and a goal in one of them.

    The label of a room is the door towards the goal, its depth the number of doors on the way
    there; who looks at dead ends, too, needs fewer steps (see above). A share `deep` of the mazes
    have long corridors, the others are bushy (see carve). The sides run from that of the board down
    to `smallest` (0 = all fill the board), problem by problem: a smaller maze lies somewhere on the
    board, and the rooms around it have neither doors nor labels. The goal has no label either.
    """

    def __call__(self, rng, rows, T, smallest=0, deep=0.5):
        side = side_of(T)
        check(smallest == 0 or 2 <= smallest, f'smallest must be 0 or at least 2, not {smallest}')
        check(0 <= deep <= 1, f'deep must lie in [0, 1], not {deep}')
        random = Random(int(rng.integers(2 ** 62)))     # for single numbers faster than numpy's
        n_sides = 1 + max(0, side - smallest) if smallest else 1
        doors = np.zeros((rows, side, side), dtype=np.int64)
        depth = np.full((rows, side, side), -1)         # -1: not known yet
        goals = np.zeros((rows, side, side), dtype=bool)
        for b in range(rows):
            n = side - b % n_sides
            top = random.randrange(side - n + 1)
            left = random.randrange(side - n + 1)
            maze = carve(random, n, random.random() < deep)
            doors[b, top:top + n, left:left + n] = maze
            goals[b, top + random.randrange(n), left + random.randrange(n)] = True

        # from the goals outwards: a room is known as soon as one behind its doors is
        label = np.full((rows, side, side), NOT_ASKED)
        depth[goals] = 0
        known = 0
        while known < (known := (depth >= 0).sum()):
            before = depth.copy()
            for door in range(4):
                behind = shifted(before, door, -1)
                finds = (depth < 0) & (doors >> door & 1 > 0) & (behind >= 0)
                depth[finds] = behind[finds] + 1
                label[finds] = 2 * GOAL + door
        x = doors + GOAL * goals
        return tuple(grid.reshape(rows, T) for grid in (x, label, depth.clip(0)))

    def words(self):
        return [*CORRIDORS, *(f'{letter}*' for letter in CORRIDORS), *ARROWS]

    def oracle(self, words):
        """Search breadth first from the goals, room by room; where both are as near, the first."""
        side = side_of(len(words))
        check(not {*words} & {*ARROWS}, 'arrows are answers, and no rooms')
        answers = [None] * len(words)
        todo = deque(room for room, word in enumerate(words) if word.endswith('*'))
        seen = set(todo)
        while todo:
            room = todo.popleft()
            for door, (down, right) in enumerate(STEPS):
                # the neighbour on that side, if it is there and has a door on the other side
                row = room // side - down
                column = room % side - right
                behind = row * side + column
                if not (0 <= row < side and 0 <= column < side) or behind in seen:
                    continue
                if CORRIDORS.index(words[behind][0]) >> door & 1:
                    answers[behind] = ARROWS[door]
                    seen.add(behind)
                    todo.append(behind)
        return answers

    def picture(self, x, y, guesses, steps):
        """
        A maze in lines of text: walls, and in each room the arrow of its guess on the colour of the
        loop steps that it took; ! beside a wrong one. x, y, guesses, steps: (T,); steps None = no
        colours.
        """
        side = side_of(len(x))
        doors = (x % GOAL).reshape(side, side)
        # walls run between the corners of rooms: is there one to the north or west of each room?
        padded = np.pad(doors, ((0, 1), (0, 1)))
        north = np.ones((side + 1, side + 1), dtype=bool)
        west = np.ones((side + 1, side + 1), dtype=bool)
        north[1:side, :] = padded[1:side] & 1 == 0
        west[:, 1:side] = padded[:, 1:side] & 8 == 0
        north[:, side] = False
        west[side, :] = False

        lines = []
        for row in range(side + 1):
            corners = ''
            rooms = ''
            for column in range(side + 1):
                walls = [row > 0 and west[row - 1, column], north[row, column], west[row, column],
                         column > 0 and north[row, column - 1]]
                corner = CORRIDORS[sum(1 << door for door in range(4) if walls[door])]
                corners += corner.replace('·', ' ') + ('───' if north[row, column] else '   ')
                rooms += '│' if west[row, column] else ' '
                if row < side and column < side:
                    room = row * side + column
                    cell = self.letter(x[room], y[room], guesses[room])
                    rooms += cell if steps is None else paint(cell, steps[room])
            lines += [corners.rstrip(), rooms.rstrip()]
        return '\n'.join(lines[:-1])

    def letter(self, word, label, guess):
        """What stands in a room of the picture, three letters."""
        if word >= GOAL:
            return ' ◎ '
        if label == NOT_ASKED:
            return '   '
        arrow = ARROWS[guess - 2 * GOAL] if guess >= 2 * GOAL else '?'
        return f' {arrow} ' if guess == label else f' {arrow}!'


tasks.TASKS['maze'] = Mazes()


# the model ---------------------------------------------------------------------------------------

@dataclass
class MazeConfig(GPTConfig):
    """block_size is the number of rooms, a square. Rooms have no positions: pos must be 'none'."""
    block_size: int = 81
    pos: str = 'none'

    def __post_init__(self):
        super().__post_init__()
        side_of(self.block_size)
        check(self.pos == 'none', f"a room does not know where it is: pos must be 'none', not "
              f"'{self.pos}'")


class RoomAttention(CausalSelfAttention):
    """A room reads the rooms next door and itself; each head learns how much it likes each."""

    def __init__(self, config):
        super().__init__(config)
        self.side = side_of(config.block_size)
        self.window = 5                 # a room reads this many others, as in a window
        # a score for each direction and head; a vector, so that no weight decay pulls at it
        self.direction = nn.Parameter(torch.zeros(5 * config.n_head))

    def near(self, pos):
        """The rooms (T, 5) that rooms at pos (T,) read: behind each door, and itself; -1 = none."""
        row = pos // self.side
        column = pos % self.side
        places = []
        for down, right in STEPS:
            inside = (0 <= row + down) & (row + down < self.side)
            inside &= (0 <= column + right) & (column + right < self.side)
            places.append(torch.where(inside, pos + down * self.side + right, -1))
        return torch.stack([*places, pos], dim=1)

    def reads_few(self, end):
        return True

    def readers(self, moved):
        """moved (B, T), a NumPy mask -> who reads a room that moved: itself and its neighbours."""
        grid = moved.reshape(-1, self.side, self.side)
        reads = grid.copy()
        for door in range(4):
            reads |= shifted(grid, door, False)
        return reads.reshape(moved.shape)

    def next_door(self, kv):
        """Keys and values kv (B, T, 2, H, D) -> those that each room reads (B, T, 5, 2, H, D)."""
        # shifted slices: the backward pass of an index would take most of the time in training
        grid = F.pad(kv.flatten(2).unflatten(1, (self.side, self.side)), (0, 0, 1, 1, 1, 1))
        end = self.side + 1
        places = []
        for down, right in (*STEPS, (0, 0)):
            places.append(grid[:, 1 + down:end + down, 1 + right:end + right].flatten(1, 2))
        return torch.stack(places, dim=2).unflatten(-1, kv.shape[2:])

    def forward(self, x, hook=None, pos=None):
        """As in the model; with pos and a hook, for some rooms, see RecurrentGroup."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q = qkv[:, :, 0]
        kv = qkv[:, :, 1:]
        there = None
        gathered = False
        if hook is not None:
            kv, there, gathered = hook(kv)
        if not gathered:                # the keys and values of the whole maze
            kv = self.next_door(kv)
            there = self.near(torch.arange(T, device=x.device)) >= 0
        y = attend_near(q, kv, there, self.direction.view(5, self.n_head))
        return self.c_proj(y.reshape(B, T, C))


class MazeBlock(Block):
    attention = RoomAttention


class Maze(GPT):
    """A model of mazes. It reads a maze whole, block_size rooms at once."""
    Config, block = MazeConfig, MazeBlock

    def hidden(self, idx, plan):
        T = idx.shape[1]
        check(T == self.config.block_size and plan.span.start == 0, 'a maze is read whole, all '
              f'{self.config.block_size} rooms in one pass, and not {T} tokens from token '
              f'{plan.span.start} on: choose --length, and no other cache than exact')
        return super().hidden(idx, plan)


# the demonstration -------------------------------------------------------------------------------

def main():
    problems = tasks.Problems(task)
    check(problems.name == 'maze',
          f'this prints mazes: python tasks.py {task} prints other problems')
    check(seed >= 0, f'seed must be at least 0, not {seed}')
    x, y, depth = problems.make(np.random.default_rng(seed), rows, block_size)
    print(problems.task.picture(x[0], y[0], y[0], None))
    print(f'{task}: the door towards the goal (◎), at most {depth[0].max()} doors away')
    wrong = problems.wrong_rows(x, y)
    print(f'{rows} mazes, {depth.max(axis=1).mean():.0f} deep on average: the oracle disagrees '
          f'with {len(wrong)}')
    if wrong:
        raise SystemExit(1)


if __name__ == '__main__':
    configure(globals(), positional='task')
    run(main)
