"""
Sudoku: which digit stands in each cell?

    python tasks.py config/sudoku.py --rows=20          boards with their answers
    python train.py config/sudoku.py                    trains on 4 x 4, 6 x 6 and 9 x 9 cells
    python sample.py --out_dir=pretrained/sudoku --num_starts=8     solves boards and draws them
    python sample.py --out_dir=pretrained/sudoku --start=FILE:board.txt     one from a newspaper
    python -m zoo.sudoku        makes sudoku_boards.txt.xz, the boards of training

A token is a *candidate*, a digit in a cell: a board of n x n cells has n^3 of them. It is given,
ruled out by the digit that is given in its cell, or open; the label of an open one is yes or no.
A candidate reads four *units* of n candidates each: the digits of its cell, and its digit in the
cells of its row, of its column and of its box. In each unit exactly one candidate is right. Nothing
tells a candidate which digit or cell it is, or how large the board is. A search solves such a board
at once; here the units are built in, and what to do with them is learned.

    n           the cells of a side, the digits, and the candidates of a unit
    T           n^3, candidates: digit by digit, cell by cell, row by row
    h, w        rows and columns of a box
    board       (n * n,) digits from 1, 0 = open
    singles     the rule that the last candidate that is left in a unit is right
    H, D        heads; width of a head
"""
import lzma
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch.nn import functional as F

import tasks
from common.configurator import Natural, configure
from common.errors import check, run
from common.terminal import paint
from model import GPT, Block, CausalSelfAttention, GPTConfig, attend_near
from tasks import NOT_ASKED

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3), 12: (3, 4), 16: (4, 4)}       # n: (h, w)
DIGITS = '123456789ABCDEFG'
OPEN, GIVEN, RULED_OUT, NO, YES = range(5)
BOARDS = Path(__file__).with_name('sudoku_boards.txt.xz')
MOST_NODES = 20_000     # of a search for solutions: enough for all boards of 9 x 9 that were tried


def side_of(T):
    """The cells of a side. ValueError if T candidates make no board."""
    sides = {n ** 3: n for n in BOXES}
    check(T in sides, f'{T} candidates make no board: a board of n x n cells has n^3, '
          + ', '.join(f'{T} for {n} x {n}' for T, n in sides.items()))
    return sides[T]


@lru_cache
def units_of(n):
    """
    The units by kind (cell, row, column, box): their members (4, n^2, n), which are candidates; the
    unit of each candidate (4, n^3); and its units' members (n^3, 4 n), which it reads.
    """
    h, w = BOXES[n]
    row, column, digit = np.indices((n, n, n)).reshape(3, -1)
    box = row // h * h + column // w
    unit = np.stack((row * n + column, row * n + digit, column * n + digit, box * n + digit))
    members = np.argsort(unit, axis=1, kind='stable').reshape(4, n * n, n)
    near = np.concatenate([members[kind, unit[kind]] for kind in range(4)], axis=1)
    return members, unit, near


# a search, in sets of candidates that are the bits of one number ----------------------------------

@lru_cache
def bits_of(n):
    """All units, a list of sets; and the rivals of each candidate, the others in its units."""
    units, _, near = units_of(n)
    units = [sum(1 << int(t) for t in unit) for unit in units.reshape(-1, n)]
    rivals = [sum(1 << int(t) for t in {*reads} - {own}) for own, reads in enumerate(near)]
    return units, rivals


def members(candidates):
    """The numbers of the candidates in a set, the last one first."""
    while candidates:
        t = candidates.bit_length() - 1
        candidates ^= 1 << t
        yield t


def fill(board, n):
    """The candidates that the clues of a board leave, a set, and all units."""
    units, rivals = bits_of(n)
    left = (1 << n ** 3) - 1
    for t in np.flatnonzero(candidates_of(board, n) == GIVEN):
        left &= ~rivals[t]
    return left, units


def singles(left, undecided, n, rounds=None):
    """
    Go on with a set of candidates as far as singles lead -> what is left, and the units that are
    undecided yet, the one with the fewest candidates first. If it has none, there is no solution.
    rounds: a list, to which each round adds the set that it finds.
    """
    _, rivals = bits_of(n)
    while True:
        found = 0
        rest = []
        fewest = n + 1
        for unit in undecided:
            inside = left & unit
            count = inside.bit_count()
            if count == 1:
                found |= inside
                continue
            rest.append(unit)
            if count < fewest:
                fewest = count
                rest[0], rest[-1] = rest[-1], rest[0]
        if fewest == 0 or not found:
            return left, rest
        for t in members(found):        # of two rivals neither is left, and their unit is empty
            left &= ~rivals[t]
        undecided = rest
        if rounds is not None:
            rounds.append(found)


def search(board, n, most=2, random=None, nodes=MOST_NODES):
    """
    The first `most` solutions of a board, a list, by branching on the unit with the fewest
    candidates, at most `nodes` times: then None. random: a Random, which shuffles the branches.
    """
    _, rivals = bits_of(n)
    todo = [fill(board, n)]
    solutions = []
    while todo and len(solutions) < most:
        nodes -= 1
        if nodes < 0:
            return None
        left, undecided = singles(*todo.pop(), n)
        if not undecided:
            solutions.append(np.array([t % n + 1 for t in sorted(members(left))]))
            continue
        branches = [(left & ~rivals[t], undecided) for t in members(left & undecided[0])]
        if random:
            random.shuffle(branches)
        todo += branches
    return solutions


# boards -------------------------------------------------------------------------------------------

def random_solution(random, n):
    """A board without open cells, by a random search that begins anew where it goes on too long."""
    found = None
    while not found:
        found = search(np.zeros(n * n, dtype=np.int64), n, 1, random, nodes=40 * n)
    return found[0]


def minimal_board(random, n, by_singles=False):
    """
    A board (n^2,) of which no clue could go, and its solution: with fewer clues it would have
    another solution, or, by_singles, singles would not solve it.
    """
    solution = random_solution(random, n)
    board = solution.copy()
    for cell in random.sample(range(n * n), n * n):
        board[cell] = 0
        if by_singles:
            fits = singles(*fill(board, n), n)[1] == []
        else:
            fits = len(search(board, n)) == 1
        if not fits:
            board[cell] = solution[cell]
    return board, solution


def board_in(text):
    """Letters -> a board: blanks and line ends are skipped, . and 0 are open cells."""
    return np.array([DIGITS.find(letter) + 1 for letter in ''.join(text.split()).upper()])


@lru_cache
def pool(n):
    """The boards of training (1000 or more, n^2): 4 x 4 and 6 x 6 made here, 9 x 9 read."""
    if n == 9:
        with lzma.open(BOARDS, 'rt') as f:
            return np.array([board_in(line) for line in f])
    random = Random(f'training {n}')
    return np.array([minimal_board(random, n, by_singles=True)[0] for _ in range(1000)])


@lru_cache(maxsize=None)
def solution_of(n, number):
    """The solution of a board in pool(n)."""
    return search(pool(n)[number], n, 1)[0]


# the task ----------------------------------------------------------------------------------------

def candidates_of(board, n):
    """The tokens of the candidates of a board, (n^3,)."""
    given = board[:, None] == np.arange(1, n + 1)
    return np.where(given, GIVEN, np.where(board[:, None] > 0, RULED_OUT, OPEN)).flatten()


def is_right(x, guesses):
    """Which candidates are given or guessed to be right."""
    return (x == GIVEN) | (x == OPEN) & (guesses == YES)


def labels_of(board, solution, n):
    """The labels of the candidates of a board with this solution, (n^3,)."""
    y = np.where(solution[:, None] == np.arange(1, n + 1), YES, NO)
    y[board > 0] = NOT_ASKED
    return y.flatten()


def depths_of(board, n):
    """The round in which singles fill the cell of each candidate (n^3,), n^2 if they never do."""
    rounds = []
    singles(*fill(board, n), n, rounds)
    depths = np.where(board > 0, 0, n * n)
    for number, found in enumerate(rounds, 1):
        for t in members(found):
            depths[t // n] = min(depths[t // n], number)
    return depths.repeat(n)


@dataclass
class Sudokus(tasks.Task):
    """
    Boards of which no clue can go: without it one of 9 x 9 has a second solution. Boards of other
    sizes, and with_singles those of 9 x 9, too, are solved by singles, and without it are not. The
    depth of a cell that singles never fill is n^2, more than any round.

    A batch of training has, with a chance of 4 in 6, boards of 9 x 9 with 0 to `more` clues more,
    or else 4 x 4 or 6 x 6, three times as many, with up to half of the open cells as clues; sizes
    above T are left out. Of boards with square boxes half have rows for columns. In other shuffles
    the model would see no difference.
    """
    with_singles: bool = False
    more: Natural = 15

    most_held_out = 200 * 729
    shows_deepest = False

    def __call__(self, rng, rows, T):
        n = side_of(T)
        random = Random(int(rng.integers(2 ** 62)))
        problems = []
        for _ in range(rows):
            board, solution = minimal_board(random, n, self.with_singles or n != 9)
            problems.append((candidates_of(board, n), labels_of(board, solution, n),
                             depths_of(board, n)))
        return tuple(map(np.stack, zip(*problems)))

    def batch(self, rng, rows, T):
        random = Random(int(rng.integers(2 ** 62)))
        n = random.choice([side for side in (4, 6, 9, 9, 9, 9) if side <= side_of(T)])
        rows *= 1 if n == 9 else 3
        xs = []
        ys = []
        for _ in range(rows):
            number = random.randrange(len(pool(n)))
            board = pool(n)[number].copy()
            solution = solution_of(n, number)
            open_cells = np.flatnonzero(board == 0).tolist()
            most = min(self.more, len(open_cells)) if n == 9 else len(open_cells) // 2
            more = random.randint(0, most)
            for cell in random.sample(open_cells, more):
                board[cell] = solution[cell]
            h, w = BOXES[n]
            if h == w and random.random() < 0.5:        # rows for columns
                board, solution = (grid.reshape(n, n).T.flatten() for grid in (board, solution))
            xs.append(candidates_of(board, n))
            ys.append(labels_of(board, solution, n))
        return np.stack(xs), np.stack(ys)

    def budget(self, T, wakes=True):
        return 256

    def words(self):
        return ['?', '+', '-', 'no', 'yes']

    def read(self, text):
        """
        A board as somebody types it, in any number of lines -> the words of its candidates: n^2
        letters row by row, 1 to 9 and then A to G, . or 0 for an open cell.
        """
        letters = ''.join(text.split()).upper()
        sides = {n * n: n for n in BOXES}
        check(len(letters) in sides, f'a board has {", ".join(map(str, sides))} letters, row by '
              f'row, and not {len(letters)} (one in a file: FILE:board.txt)')
        n = sides[len(letters)]
        unknown = {*letters} - {'.', '0', *DIGITS[:n]}
        check(not unknown, f'a board of {n} x {n} has the digits {DIGITS[:n]}, and . or 0 for an '
              f'open cell, but no {" ".join(unknown)}')
        return ' '.join(self.words()[token] for token in candidates_of(board_in(letters), n))

    def oracle(self, words):
        """Search for the solution. ValueError if there is none, or two, or it takes too long."""
        n = side_of(len(words))
        given = np.array(words) == '+'
        board = given.reshape(n * n, n) @ np.arange(1, n + 1)
        check(given[units_of(n)[0]].sum(axis=-1).max() < 2,
              'a digit is given twice in a row, column or box')
        solutions = search(board, n, nodes=MOST_NODES)
        check(solutions is not None, f'not decided after {MOST_NODES:,} branches of a search: the '
              'board may have one solution, several, or none')
        check(solutions, 'the board has no solution')
        check(len(solutions) == 1, 'the board has more than one solution')
        labels = labels_of(board, solutions[0], n)
        return [None if label == NOT_ASKED else self.words()[label] for label in labels]

    def valid(self, x, guesses):
        """
        Which boards x (B, T) are solved by the guesses (B, T), as the rules alone tell (B,): of
        the given candidates and those that are guessed to be right, each unit has one.
        """
        units, _, _ = units_of(side_of(x.shape[1]))
        return (is_right(x, guesses)[:, units].sum(axis=-1) == 1).all(axis=(1, 2))

    def picture(self, x, y, guesses, steps):
        """
        A board in lines of text: a digit that is guessed with a ! if it is wrong, or ? where there
        are none or two of them. x, y, guesses, steps: (T,); steps None = plain letters, otherwise
        clues are bold, and guesses on the colour of the loop steps of their cell.
        """
        n = side_of(len(x))
        h, w = BOXES[n]
        right = is_right(x, guesses)
        wrong = (y != NOT_ASKED) & (right != (y == YES))
        is_clue, right, wrong = (mask.reshape(n * n, n) for mask in (x == GIVEN, right, wrong))
        cells = []
        for cell in range(n * n):
            text = f' {DIGITS[right[cell].argmax()]}' if right[cell].sum() == 1 else ' ?'
            text += '!' if wrong[cell].any() else ' '
            if steps is not None and is_clue[cell].any():
                text = f'\x1b[1m{text}\x1b[0m'
            elif steps is not None:
                text = paint(text, steps[n * cell:n * cell + n].max())
            cells.append(text)
        lines = []
        for row in range(n):
            if row and row % h == 0:
                lines.append('┼'.join(['─' * 3 * w] * (n // w)))
            boxes = [''.join(cells[n * row + left:n * row + left + w]) for left in range(0, n, w)]
            lines.append('│'.join(boxes))
        return '\n'.join([*lines, ''])


tasks.TASKS['sudoku'] = Sudokus


# the model ---------------------------------------------------------------------------------------

@dataclass
class SudokuConfig(GPTConfig):
    """A board of block_size candidates is the largest. They have no positions: pos is 'none'."""
    block_size: int = 729
    pos: str = 'none'

    def __post_init__(self):
        super().__post_init__()
        side_of(self.block_size)
        check(self.pos == 'none', "a candidate does not know where it is: pos must be 'none', not "
              f"'{self.pos}'")
        check(self.n_head % 4 == 0, 'n_head must be a multiple of 4, a head or more for each kind '
              f'of unit, not {self.n_head}')


@lru_cache
def by_units(n, device):
    """
    Numbers of candidates and kinds, 4 t + kind: in the order of the units, kind by kind, and the
    places in that order of all of them, (4 n^3,) each.
    """
    units, _, _ = units_of(n)
    order = (4 * units + np.arange(4)[:, None, None]).reshape(-1)
    return tuple(torch.from_numpy(table).to(device) for table in (order, np.argsort(order)))


class UnitAttention(CausalSelfAttention):
    """
    A quarter of the heads reads the cell, a quarter the row, then the column, then the box of a
    candidate. n: of the boards that are read now, see Sudoku.see.

    Scores grow with log n. Otherwise attention among sixteen is less sharp than among nine, and a
    model of smaller boards solves none of 16 x 16.
    """
    n = 9

    def near(self, pos):
        """The candidates (T, 4 n) that those at pos (T,) read, one unit after another."""
        _, _, near = units_of(self.n)
        return torch.from_numpy(near).to(pos.device)[pos]

    def reads_few(self, end):
        return True

    def readers(self, moved):
        """moved (B, T), a NumPy mask -> who reads a candidate that moved: its units."""
        units, unit, _ = units_of(self.n)
        moved = moved[:, units].any(axis=-1)                                    # (B, 4, n^2)
        return np.any([moved[:, kind, unit[kind]] for kind in range(4)], axis=0)

    def within_window(self, kv, pos):
        return kv, None         # a head reads one kind of unit, see attend

    def attend(self, q, kv, mask):
        """q (B, T, H, D) over kv of a whole board (B, T, 2, H, D), or of what is near, gathered."""
        B, T = q.shape[:2]
        H = self.n_head // 4
        q = math.log(self.n, 9) * q
        if kv.dim() == 6:               # of what is near, a head reads the unit of its kind
            kv = kv.unflatten(2, (4, -1)).unflatten(-2, (4, H))         # (B, T, 4, n, 2, 4, H, D)
            kv = kv.diagonal(dim1=2, dim2=5).movedim(-1, -3).flatten(-3, -2)    # (B, T, n, 2, H, D)
            return attend_near(q, kv, mask[:, :self.n])
        order, places = by_units(self.n, q.device)
        parts = torch.cat((q[:, :, None], kv), dim=2).unflatten(3, (4, H)).transpose(2, 3)
        parts = parts.reshape(B, 4 * T, -1).index_select(1, order)
        parts = parts.view(B, 4 * self.n ** 2, self.n, 3, H, -1)
        q, k, v = parts.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)         # (B, 4 n^2 H, n, D) each
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.unflatten(1, (-1, H)).transpose(2, 3).reshape(B, 4 * T, -1).index_select(1, places)
        return y.view(B, T, self.n_head, -1)


class SudokuBlock(Block):
    attention = UnitAttention


class Sudoku(GPT):
    """A model of boards. It reads them whole, of any size up to block_size."""
    Config, block = SudokuConfig, SudokuBlock

    def see(self, T):
        """Tell the layers the size of the boards that come, of T candidates each."""
        n = side_of(T)
        for module in self.modules():
            if isinstance(module, UnitAttention):
                module.n = n

    def hidden(self, idx, plan):
        T = idx.shape[1]
        check(plan.span.start == 0 and T > 1, 'a board is read whole: choose no other cache than '
              'exact')
        self.see(T)
        return super().hidden(idx, plan)


# the boards of training ---------------------------------------------------------------------------

def main():
    """Write 5,000 boards, one in a line."""
    random = Random(1)
    boards = [minimal_board(random, 9)[0] for _ in range(5000)]
    with lzma.open(BOARDS, 'wt', preset=9) as f:
        for board in boards:
            print(''.join(map(str, board)), file=f)


if __name__ == '__main__':
    configure(globals())
    run(main)
