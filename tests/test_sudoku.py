"""zoo/sudoku.py: boards, a search and its cases, and a model whose candidates read their units."""
import re
from random import Random

import numpy as np
import pytest
import torch
from conftest import check_awake_alone, finished, refused

import tasks
from cache import Span
from exits import make_exit
from loops import Plan
from tasks import NOT_ASKED
from zoo import sudoku
from zoo.sudoku import BOXES, GIVEN, YES, Sudoku, SudokuConfig

HARD = '4.....8.5.3..........7......2.....6.....8.4......1.......6.3.7.5..2.....1.4......'

@pytest.fixture
def model():
    """Random weights as they come."""
    torch.manual_seed(0)
    return Sudoku(SudokuConfig(block_size=4096, vocab_size=5, n_layer=2, n_head=4, n_embd=16,
                               groups=[[0]], mean_recurrence=4)).eval()


def some(n, rows=2, text='sudoku', seed=0):
    problems = tasks.Problems(text)
    return problems, *problems.make(np.random.default_rng(seed), rows, n ** 3)


def fingerprints(solutions):
    """
    Solutions of 9 x 9 (N, 81) -> a set of tuples, one for each: the same for all shuffles of a
    solution, and rarely for two others. Where digits stand in one row, which stand there in
    another? This permutes them; counted are the digits that stay in so many repetitions of it, for
    all two rows, in a band or not, and for all two columns.
    """
    a, b = np.triu_indices(9, 1)
    sides = []
    for grid in (solutions.reshape(-1, 9, 9) - 1, solutions.reshape(-1, 9, 9).swapaxes(1, 2) - 1):
        step = np.take_along_axis(grid[:, b], grid[:, a].argsort(axis=2), axis=2)   # (N, 36, 9)
        number = np.broadcast_to(a // 3 == b // 3, step.shape[:2]).astype(int)
        image = step
        for _ in range(5):
            image = np.take_along_axis(step, image, axis=2)
            number = 10 * number + (image == np.arange(9)).sum(axis=2)
        sides.append(np.sort(number, axis=1).tolist())
    return {tuple(sorted(map(tuple, pair))) for pair in zip(*sides)}


def shuffle(n, random):
    """
    One of the ways to move the candidates of a board in which all rules stay: where those of the
    new board come from, (n^3,). It shuffles digits, bands, stacks, rows and columns.
    """
    h, w = BOXES[n]
    order = []
    for size in (h, w):
        bands = random.sample(range(n // size), n // size)
        order.append([size * band + line for band in bands
                      for line in random.sample(range(size), size)])
    grid = np.arange(n ** 3).reshape(n, n, n)
    return grid[np.ix_(*order, random.sample(range(n), n))].flatten()


# boards ------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', BOXES)
def test_a_board_has_one_solution_which_keeps_the_rules_and_the_oracle_finds_it(n):
    problems, x, y, depth = some(n)
    assert problems.wrong_rows(x, y) == []
    assert problems.task.valid(x, y).all()
    assert ((y != NOT_ASKED) == (depth > 0)).all()


def test_a_board_has_no_clue_that_could_go():
    for seed in range(3):
        board, _ = sudoku.minimal_board(Random(seed), 9)
        for cell in np.flatnonzero(board):
            easier = board.copy()
            easier[cell] = 0
            assert len(sudoku.search(easier, 9)) == 2


def test_no_held_out_solution_is_a_shuffle_of_one_of_training():
    solutions = np.array([sudoku.solution_of(9, i) for i in range(len(sudoku.pool(9)))])
    training = fingerprints(solutions)
    assert len(training) > 0.999 * len(solutions)
    for seed, solution in enumerate(solutions[:5]):
        y = sudoku.labels_of(0 * solution, solution, 9)
        moved = y[shuffle(9, Random(seed))].reshape(81, 9).argmax(axis=1) + 1
        assert (moved != solution).any() and fingerprints(moved) < training
        assert fingerprints(moved.reshape(9, 9).T) < training
    x, y, _ = tasks.Problems('sudoku').all_held_out(729)
    right = ((x == GIVEN) | (y == YES)).reshape(-1, 81, 9).argmax(axis=2) + 1
    assert len(right) == 200
    assert not training & fingerprints(right)


def test_a_training_batch_has_boards_of_one_size_with_one_solution():
    problems = tasks.Problems('sudoku')
    shapes = set()
    for seed in range(12):
        x, y = problems.batch(np.random.default_rng(seed), 2, 729)
        shapes.add(tuple(x.shape))
        assert problems.wrong_rows(x.numpy(), y.numpy()) == []
    assert shapes == {(6, 64), (6, 216), (2, 729)}


def test_depth_is_the_round_in_which_singles_fill_a_cell():
    """Two rows lack a digit. In a hard board singles fill some cells and never reach others."""
    depth = sudoku.depths_of(sudoku.board_in('123. 341. 2143 4321'), 4).reshape(16, 4)
    assert depth.max(axis=1).tolist() == [0, 0, 0, 1, 0, 0, 0, 1] + 8 * [0]
    hard = sudoku.board_in(HARD)
    depth = sudoku.depths_of(hard, 9).reshape(81, 9)
    assert (depth[hard > 0] == 0).all() and depth.max() == 81
    assert (depth.min(axis=1) == depth.max(axis=1)).all()
    assert len(np.unique(depth)) > 2


# a board that somebody types ---------------------------------------------------------------------

def test_a_typed_board_is_read_and_solved():
    problems = tasks.Problems('sudoku')
    x, y = problems.solve(HARD)
    lines = '\n'.join(HARD[9 * row:9 * row + 9].replace('.', '0') for row in range(9))
    assert np.array_equal(problems.solve(lines)[0], x)
    assert problems.task.valid(x, y).all() and (x == GIVEN).sum() == 17
    assert not problems.task.valid(x, np.full_like(y, YES)).any()
    _, *digits = sudoku.random_solution(Random(0), 16)
    large, _ = problems.solve('.' + ''.join(sudoku.DIGITS[digit - 1] for digit in digits))
    assert large.shape == (1, 4096)


@pytest.mark.parametrize('board, says', [
    (HARD[1:], '80'), (HARD.replace('4', 'X', 1), 'X'), (HARD.replace('.', '4', 1), 'twice'),
    (HARD[:1] + '9' + HARD[2:], 'no solution'), (81 * '.', 'more than one'),
    ('5' + 15 * '.', '5'), (HARD, 'not decided')])
def test_a_board_that_makes_no_sense_is_refused(board, says, monkeypatch):
    if says == 'not decided':
        monkeypatch.setattr(sudoku, 'MOST_NODES', 10)
    with pytest.raises(ValueError, match=says):
        tasks.Problems('sudoku').solve(board)


def test_the_picture_has_boxes_bold_clues_and_a_mark_at_wrong_digits():
    problems = tasks.Problems('sudoku')
    x, y = problems.solve('1.34 3412 2143 432.')
    guesses = y[0].copy()
    guesses[4 * 15:] = [sudoku.NO, YES, sudoku.NO, sudoku.NO]
    picture = problems.task.picture(x[0], y[0], guesses, None)
    assert picture.splitlines() == [' 1  2 │ 3  4 ', ' 3  4 │ 1  2 ', '──────┼──────',
                                    ' 2  1 │ 4  3 ', ' 4  3 │ 2  2!']
    coloured = problems.task.picture(x[0], y[0], guesses, np.arange(64))
    assert re.sub(r'\x1b\[[\d;]*m', '', coloured) == picture
    assert '\x1b[1m 1 \x1b[0m' in coloured and '48;5' in coloured


# the model ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('n', BOXES)
def test_a_candidate_reads_its_four_units_as_the_rules_have_them(n, model):
    attention = model.groups[0].core[0].attn
    attention.n = n
    h, w = BOXES[n]
    number = np.arange(n ** 3)
    row, column, digit = number // n ** 2, number // n % n, number % n
    box = row // h * n + column // w
    units = [(row, column), (row, digit), (column, digit), (box, digit)]
    together = [np.all([place[:, None] == place for place in unit], axis=0) for unit in units]
    near = attention.near(torch.arange(n ** 3)).view(n ** 3, 4, n)
    for kind, expected in enumerate(together):
        reads = np.zeros((n ** 3, n ** 3), dtype=bool)
        reads[number[:, None], near[:, kind]] = True
        assert np.array_equal(reads, expected)
    some = number[::37]
    moved = number == some[:, None]
    assert np.array_equal(attention.readers(moved), np.any(together, axis=0)[some])


def test_each_head_attends_to_the_unit_of_its_kind(model):
    attention = model.groups[0].core[0].attn
    attention.n = 4
    x = torch.randn(2, 64, 16)
    q, k, v = attention.c_attn(x).view(2, 64, 3, 4, 4).permute(2, 0, 3, 1, 4)   # (B, H, T, D) each
    bias = torch.full((4, 64, 64), -torch.inf)
    near = attention.near(torch.arange(64)).view(64, 4, 4)
    for head in range(4):
        bias[head].scatter_(1, near[:, head], 0)
    sharpness = np.log(4) / np.log(9)
    y = ((sharpness * q @ k.mT / 2 + bias).softmax(-1) @ v).transpose(1, 2).reshape(2, 64, 16)
    torch.testing.assert_close(attention(x), attention.c_proj(y))


@pytest.mark.parametrize('n', [4, 6, 9])
def test_computing_the_candidates_that_are_awake_changes_nothing(n, model):
    _, x, *_ = some(n)
    check_awake_alone(model, torch.from_numpy(x), make_exit('norm', 0.5, wake=True))


@torch.no_grad()
@pytest.mark.parametrize('n', [4, 6, 9, 12])
def test_a_shuffled_board_has_shuffled_logits(n, model):
    """With the first states shuffled alike; a move that breaks the rules does not."""
    _, x, *_ = some(n, rows=1)
    first = torch.randn(1, n ** 3, 16)

    def logits(moved):
        plan = Plan([16], span=Span(0, n ** 3, 'cpu'), warm=[first[:, moved]])
        return model.lm_head(model.hidden(torch.from_numpy(x[:, moved]), plan)[0])[0]

    expected = logits(np.arange(n ** 3))
    for seed in range(3):
        moved = shuffle(n, Random(seed))
        torch.testing.assert_close(logits(moved), expected[moved], atol=1e-4, rtol=1e-4)
    wrong = np.arange(n ** 3).reshape(n, n, n)[np.roll(np.arange(n), 1)].flatten()
    assert not torch.allclose(logits(wrong), expected[wrong], atol=1e-2)


@pytest.mark.parametrize('shape', [dict(n_head=3, n_embd=48), dict(pos='rotary'),
                                   dict(block_size=700)])
def test_a_shape_that_fits_no_board_is_refused(shape):
    with pytest.raises(ValueError):
        SudokuConfig(**shape)


def test_a_board_is_read_whole(model):
    with pytest.raises(ValueError):
        model(torch.zeros(1, 65, dtype=int))
    with pytest.raises(ValueError):
        model.generate(torch.zeros(1, 64, dtype=int), 2)


# what we ship ------------------------------------------------------------------------------------

def test_the_shipped_model_solves_hard_boards():
    """Those that one start leaves, others solve; the answer is drawn, and known to be valid."""
    flags = '--out_dir=pretrained/sudoku', '--device=cpu', '--num_samples=4', '--seed=2'
    assert '\nnot solved: 1 of 4' in finished(*flags, script='sample.py')
    printed = finished(*flags, '--num_starts=8', script='sample.py')
    assert '\nsolved\n' in printed and 'computed 256.0 times' not in printed     # all tries count
    right, asked = re.search(r'--- (\d+) of (\d+) answers right', printed).groups()
    assert right == asked and printed.count('┼') == 16


@pytest.mark.parametrize('name, flag', [
    ('sudoku', '--start=' + HARD[1:]), ('sudoku', '--length=700'), ('sudoku', '--num_starts=0'),
    ('calc', '--num_starts=2')])        # a task that cannot check its answers
def test_bad_input_is_one_line(name, flag):
    refused(f'--out_dir=pretrained/{name}', flag, script='sample.py')
