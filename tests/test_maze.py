"""zoo/maze.py: mazes and their labels; a model whose rooms read the rooms next door."""
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, finished, read_csv, refused

import tasks
from exits import make_exit
from loops import RecurrentGroup
from model import GPT
from results.maze_goals import FIRST_ARROW, wrong_rooms
from tasks import NOT_ASKED
from zoo.maze import ARROWS, GOAL, STEPS, Maze, MazeConfig


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
                down, right = STEPS[door]
                room += 6 * down + right
                assert doors[room] >> (door + 2) % 4 & 1
                n += 1
                assert n <= 36
            assert n == steps[first]


def test_a_maze_can_be_typed():
    problems = tasks.Problems('maze')
    _, y = problems.solve('╶ ─ ┐ ┌ ─ ┘ └ ─ ╴*')
    assert problems.encoding.decode(y[0, :-1]) == '→ → ↓ ↓ ← ← → →'
    with pytest.raises(ValueError, match='arrows are answers'):
        problems.solve('╶ ↑ ┐ ┌ ─ ┘ └ ─ ╴*')


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


@pytest.mark.parametrize(('text', 'T', 'says'), [
    ('maze', 80, 'make none: 9 x 9 are 81'), ('maze', 1, 'make none'),
    ('maze:smallest=1', 36, 'smallest must be 0 or at least 2'),
    ('maze:deep=1.5', 36, r'deep must lie in \[0, 1\]')])
def test_what_makes_no_maze_is_refused(text, T, says):
    with pytest.raises(ValueError, match=says):
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
    torch.testing.assert_close(attention(x), attention.c_proj(y))


@pytest.mark.parametrize('name, damping', [('accel', 0.0), ('norm_rel', 0.0), ('norm_rel', 0.3)])
def test_computing_the_rooms_that_are_awake_changes_nothing(model, name, damping, monkeypatch):
    _, x, *_ = some(rows=3)
    model.groups[0].damping = damping
    idx = torch.from_numpy(x)
    rule = make_exit(name, 0.1 if damping else 0.3, wake=True)
    alone, whole = [], []
    logits, _ = model(idx, exit=rule, n_loop=60, trace=alone)
    monkeypatch.setattr(RecurrentGroup, 'can_compute_awake_alone', lambda *_: False)
    expected, _ = model(idx, exit=rule, n_loop=60, trace=whole)
    assert torch.equal(alone[0]['evals'], whole[0]['evals'])
    assert alone[0]['evals'].float().std() > 0, 'some rooms should sleep'
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_maze_is_read_whole(model):
    with pytest.raises(ValueError, match='a maze is read whole, all 36 rooms'):
        model(torch.zeros(1, 25, dtype=int))
    with pytest.raises(ValueError, match='a maze is read whole'):
        model.generate(torch.zeros(1, 36, dtype=int), 2)


@pytest.mark.parametrize(('changes', 'says'), [
    (dict(block_size=80), 'make none'), (dict(pos='rotary'), "pos must be 'none'")])
def test_the_shape_must_fit_a_maze(changes, says):
    with pytest.raises(ValueError, match=says):
        MazeConfig(**changes)


# what we ship ------------------------------------------------------------------------------------

def shipped(T):
    return GPT.load(f'{ROOT}/pretrained/maze', length=T)


RULE = make_exit('norm_rel', 0.14, wake=True)


@torch.no_grad()
def test_the_shipped_model_solves_larger_mazes_than_those_it_was_trained_on():
    _, x, y, depth = some(rows=4, T=256)
    trace = []
    logits, _ = shipped(256)(torch.from_numpy(x), n_loop=612, exit=RULE, trace=trace)
    right = (logits.argmax(-1).numpy() == y)[y != NOT_ASKED]
    assert right.mean() > 0.99 and depth.max() > 81
    assert trace[0]['evals'].float().mean() < depth.max(), 'rooms sleep meanwhile'


def test_sample_prints_a_solved_maze(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = finished('--out_dir=pretrained/maze', '--exit=accel', '--length=36',
                       script='sample.py')
    maze = re.sub(r'\x1b\[[\d;]*m', '', printed).splitlines()[:13]
    assert maze[0][0] + maze[0][-1] + maze[-1][0] + maze[-1][-1] == '┌┐└┘'
    assert sum(line.count(arrow) for line in maze for arrow in ARROWS) == 35
    assert '35 of 35 answers right' in printed and 'colours start at' in printed
    line = refused('--out_dir=pretrained/maze', '--start=╶ ╴*', script='sample.py')
    assert line.endswith('python -m zoo.maze prints some\n')
    assert 'this prints mazes' in refused('calc', script='zoo/maze.py')
    line = refused('--out_dir=pretrained/maze', '--cache=latest', script='sample.py')
    assert 'a maze is read whole' in line
    line = refused('--out_dir=pretrained/maze', '--damping=1', script='sample.py')
    assert 'damping must lie in [0, 1), not 1' in line
    line = refused('--out_dir=pretrained/maze', '--exit=norm_rel', '--damping=0',
                   script='sample.py')
    assert 'is for the damping of the run: give --tau' in line
    printed = finished('--out_dir=pretrained/maze', '--exit=norm_rel', '--length=36',
                       '--damping=0.3', script='sample.py')
    assert 'pretrained/maze/exits.json)' in printed
    line = refused('--out_dir=pretrained/maze', '--calibrate=0.01', '--damping=0',
                   script='bench.py')
    assert 'leave out --damping' in line


def test_where_two_ways_are_as_short_both_are_right():
    # a ring of four rooms, the goal in the first: the last room may go north or west
    words = np.array([6 + GOAL, 12, 3, 9])
    north, east, south, west = range(FIRST_ARROW, FIRST_ARROW + 4)
    labels = np.array([NOT_ASKED, west, north, north])
    for answers, n in (([north, west, north, north], 0), ([0, west, north, west], 0),
                       ([0, south, north, north], 1), ([0, east, west, south], 3),
                       ([0, 0, 0, 0], 3)):
        assert wrong_rooms(np.array(answers), labels, words) == n


# results/maze.md ---------------------------------------------------------------------------------

def test_the_measurement_counts_rooms_whole_mazes_steps_and_passes(tmp_path):
    path = tmp_path / 'maze.csv'
    finished('--sides=[5]', '--n_mazes=[3]', '--n_loop=[1,64]', "--rules=[['norm_rel',0.1]]",
             f'--path={path}', script='results/maze.py')
    rows = {(row['rule'], row['asked'], row['deep'], row['number']): row for row in read_csv(path)}
    for deep in '0.0', '1.0':
        fixed = rows['fixed', '', deep, '64']
        assert (fixed['rooms'], fixed['whole'], fixed['steps']) == ('100.0', '100.0', '64.0')
        assert float(rows['fixed', '', deep, '1']['rooms']) < 100
        alone, together, asleep = (rows['norm_rel', way, deep, '0.1']
                                   for way in ('alone', 'together', 'asleep'))
        assert float(asleep['rooms']) == 100
        assert abs(float(together['steps']) - float(together['passes'])) < 0.1
        assert float(alone['steps']) <= float(asleep['steps']) <= float(asleep['passes'])
