"""zoo/maze.py: mazes and their labels; a model whose rooms read the rooms next door."""
import re

import numpy as np
import pytest
import torch
from conftest import check_awake_alone

import tasks
from exits import make_exit
from model import GPT
from tasks import NOT_ASKED
from zoo.maze import DIRECTIONS, GOAL, Maze, MazeConfig


@pytest.fixture
def model():
    """Random weights, on a board of 6 x 6, as they come but for the scores of directions."""
    torch.manual_seed(0)
    model = Maze(MazeConfig(block_size=36, vocab_size=36, n_layer=3, n_head=4, n_embd=16,
                            groups=[[1]], mean_recurrence=4)).eval()
    for block in model.modules():
        if hasattr(block, 'direction'):
            torch.nn.init.normal_(block.direction)
    return model


def some(text='maze', rows=8, T=36, seed=0):
    problems = tasks.Problems(text)
    return problems, *problems.make(np.random.default_rng(seed), rows, T)


# the task ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('text', ['maze', 'maze:smallest=2', 'maze:deep=1', 'maze:deep=0'])
def test_the_arrows_lead_to_the_goal_through_doors_in_as_many_steps_as_the_depth(text):
    problems, x, y, depth = some(text)
    assert problems.wrong_rows(x, y) == []
    for doors, label, steps in zip(x, y, depth):
        assert (doors >= GOAL).sum() == 1
        for first in np.flatnonzero(label != NOT_ASKED):
            room = first
            n = 0
            while doors[room] < GOAL:
                door = label[room] - 2 * GOAL
                assert doors[room] >> door & 1
                down, right = DIRECTIONS[door]
                room += 6 * down + right
                assert doors[room] >> (door + 2) % 4 & 1
                n += 1
                assert n <= 36
            assert n == steps[first]


def test_a_smaller_maze_lies_on_a_board_whose_other_rooms_have_neither_doors_nor_labels():
    problems, x, y, _ = some('maze:smallest=3', rows=8)
    labels = (y != NOT_ASKED).sum(axis=1)
    assert labels.tolist() == [n * n - 1 for n in (6, 5, 4, 3, 6, 5, 4, 3)]
    outside = (y == NOT_ASKED) & (x < GOAL)
    assert (x[outside] == 0).all() and outside.sum() == 2 * (11 + 20 + 27)


def test_deep_mazes_are_deeper_than_bushy_ones():
    depths = [some(f'maze:deep={deep}', rows=40, T=256)[3].max(axis=1).mean() for deep in (0, 1)]
    assert depths[1] > 2 * depths[0]


def test_the_oracle_knows_cycles_two_goals_and_rooms_that_are_cut_off():
    problems = tasks.Problems('maze')
    _, y = problems.solve('┌ ┐* └ ┘')                           # a ring: the shorter way
    assert problems.encoding.decode(y[0, [0, 2, 3]]) == '→ → ↑'
    _, y = problems.solve('╶* ─ ╴* · · · · · ·')                # two goals; rooms without doors
    assert y[0].tolist() == [NOT_ASKED, 2 * GOAL + 3] + 7 * [NOT_ASKED]
    with pytest.raises(ValueError):
        problems.solve('╶ ↑ ┐* ╴')


@pytest.mark.parametrize('text, T', [('maze', 80), ('maze', 1), ('maze:smallest=1', 36),
                                     ('maze:deep=1.5', 36)])
def test_what_makes_no_maze_is_refused(text, T):
    with pytest.raises(ValueError):
        some(text, T=T)


def test_the_picture_has_walls_where_there_are_no_doors_and_marks_wrong_rooms():
    problems = tasks.Problems('maze')
    x, y = problems.solve('╷ ╷* └ ┘')
    guesses = y[0].copy()
    guesses[0] = 2 * GOAL
    picture = problems.task.picture(x[0], y[0], guesses, None)
    assert picture.splitlines() == ['┌───┬───┐', '│ ↑!│ ◎ │', '│   ╵   │', '│ →   ↑ │', '└───────┘']
    coloured = problems.task.picture(x[0], y[0], guesses, np.array([1, 2, 30, 200]))
    assert re.sub(r'\x1b\[[\d;]*m', '', coloured) == picture and coloured.count('\x1b[0m') == 4


# the model ---------------------------------------------------------------------------------------

def test_a_room_reads_itself_and_its_neighbours_and_they_are_who_reads_it(model):
    attention = model.groups[0].core[0].attn
    near = attention.near(torch.arange(36))
    reads = np.zeros((36, 36), dtype=bool)
    for room, places in enumerate(near.tolist()):
        reads[room, [place for place in places if place >= 0]] = True
    assert sorted(reads.sum(axis=1)) == 4 * [3] + 16 * [4] + 16 * [5]
    assert np.array_equal(attention.readers(np.eye(36, dtype=bool)), reads.T)


def test_attention_is_a_softmax_over_the_rooms_next_door(model):
    attention = model.groups[0].core[0].attn
    x = torch.randn(2, 36, 16)
    q, k, v = attention.c_attn(x).view(2, 36, 3, 4, 4).permute(2, 0, 3, 1, 4)   # (B, H, T, D) each
    bias = torch.full((4, 36, 36), -torch.inf)
    for room, places in enumerate(attention.near(torch.arange(36)).tolist()):
        for direction, place in enumerate(places):
            if place >= 0:
                bias[:, room, place] = attention.direction.view(5, 4)[direction]
    scores = q @ k.mT / 2 + bias
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 36, 16)
    torch.testing.assert_close(attention(x), attention.c_proj(y))       # in a row of few windows


@pytest.mark.parametrize('name, damping', [('accel', 0.0), ('norm_rel', 0.0), ('norm_rel', 0.3)])
def test_computing_the_rooms_that_are_awake_changes_nothing(model, name, damping):
    _, x, *_ = some(rows=3)
    model.groups[0].damping = damping
    rule = make_exit(name, 0.1 if damping else 0.3, wake=True)
    check_awake_alone(model, torch.from_numpy(x), rule)


def test_a_maze_is_read_whole(model):
    with pytest.raises(ValueError):
        model(torch.zeros(1, 25, dtype=int))
    with pytest.raises(ValueError):
        model.generate(torch.zeros(1, 36, dtype=int), 2)
    with pytest.raises(ValueError):
        MazeConfig(pos='rotary')


# what we ship ------------------------------------------------------------------------------------

@torch.no_grad()
def test_the_shipped_model_solves_larger_mazes_than_those_it_was_trained_on():
    _, x, y, depth = some(rows=4, T=256)
    trace = []
    model = GPT.load('pretrained/maze', length=256)
    rule = make_exit('norm_rel', 0.14, wake=True)
    logits, _ = model(torch.from_numpy(x), n_loop=612, exit=rule, trace=trace)
    right = (logits.argmax(-1).numpy() == y)[y != NOT_ASKED]
    assert right.mean() > 0.99 and depth.max() > 81
    assert trace[0]['evals'].float().mean() < depth.max(), 'rooms sleep meanwhile'
