"""zoo/sudoku.py: boards, a search and its cases, and a model whose candidates read their units."""
from random import Random

import numpy as np
import pytest
import torch

import tasks
from tasks import NOT_ASKED
from zoo import sudoku
from zoo.sudoku import BOXES, GIVEN, Sudoku, SudokuConfig

HARD = '4.....8.5.3..........7......2.....6.....8.4......1.......6.3.7.5..2.....1.4......'
# two digits of two rows can change places
TWO = ('9.6.7.4.3' '...4..2..' '.7..23.1.' '5.....1..' '.4.2.8.6.' '..3.....5' '.3.7...5.' '..7..5...'
       '4.5.1.7.8')


@pytest.fixture
def model():
    """Random weights as they come."""
    torch.manual_seed(0)
    return Sudoku(SudokuConfig(vocab_size=5, n_layer=2, n_head=4, n_embd=16, groups=[[0]],
                               mean_recurrence=4)).eval()


def some(n, rows=2, text='sudoku', seed=0):
    problems = tasks.Problems(text)
    return problems, *problems.make(np.random.default_rng(seed), rows, n ** 3)


def fingerprint(solution):
    """
    The same for all shuffles of a solution of 9 x 9, and rarely for another one: of each two rows
    in a band, and of each two others, the lengths of the cycles in which one digit leads to the one
    that stands beside it in the other row; the same of columns.
    """
    both = []
    for grid in (solution.reshape(9, 9), solution.reshape(9, 9).T):
        cycles = []
        for a in range(9):
            for b in range(a):
                leads = dict(zip(grid[a].tolist(), grid[b].tolist()))
                lengths = []
                while leads:
                    first = digit = next(iter(leads))
                    length = 0
                    while digit in leads:
                        digit = leads.pop(digit)
                        length += 1
                    lengths.append(length)
                    assert digit == first
                cycles.append((a // 3 == b // 3, *sorted(lengths)))
        both.append(tuple(sorted(cycles)))
    return tuple(sorted(both))


# boards ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', BOXES)
def test_a_board_has_one_solution_which_keeps_the_rules_and_the_oracle_finds_it(n):
    problems, x, y, depth = some(n)
    assert problems.wrong_rows(x, y) == []
    assert problems.task.valid(x, y).all()
    assert ((y != NOT_ASKED) == (depth > 0)).all()
    # without any clue more it has two
    board = np.where((x[0] == GIVEN).reshape(-1, n).any(1), (x[0] == GIVEN).reshape(-1, n).argmax(1) + 1, 0)
    if n == 9:
        board[np.flatnonzero(board)[0]] = 0
        assert len(sudoku.search(board, n)) == 2


def test_no_held_out_solution_is_a_shuffle_of_one_of_training():
    training = {fingerprint(solution) for solution, _ in sudoku.pool(9)}
    assert len(training) > 990
    solution, _ = sudoku.pool(9)[0]
    assert fingerprint(sudoku.shuffled(solution[None], 9, Random(0))[0]) in training
    problems = tasks.Problems('sudoku')
    x, y, _ = problems.all_held_out(729)
    right = ((x == GIVEN) | (y == sudoku.YES)).reshape(-1, 81, 9).argmax(axis=2) + 1
    assert len(right) == 200
    assert not training & {fingerprint(solution) for solution in right}
