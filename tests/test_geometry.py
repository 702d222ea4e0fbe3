import contextlib
import csv
import math
import os

import conftest
import numpy as np
import pytest
import torch
from test_train import TINY, make_book

import data
import geometry as geo
from common.checkpoint import load_checkpoint
from model import GPT, GPTConfig

FIGURES = ['accel_hat', 'contraction', 'convergence', 'figure_1', 'figure_2', 'figure_3a',
           'figure_5', 'path_independence', 'stability']


# probes -------------------------------------------------------------------------------------------

def test_probes_against_naive_loops():
    states = torch.randn(7, 2, 8, generator=torch.Generator().manual_seed(1))
    norms, cosines = geo.step_norm(states), geo.step_cos(states)
    accels, hats, ratios = geo.accel(states), geo.accel_hat(states), geo.contraction(states)
    assert norms.shape == (6, 2)
    assert all(values.shape == (5, 2) for values in (cosines, accels, hats, ratios))
    for t in range(2):
        d = [states[k + 1, t] - states[k, t] for k in range(6)]
        for k in range(6):
            assert math.isclose(norms[k, t], d[k].square().sum().sqrt(), rel_tol=1e-5)
        for k in range(1, 6):
            now, before, a = d[k].norm(), d[k - 1].norm(), (d[k] - d[k - 1]).norm()
            is_ = [values[k - 1, t].item() for values in (cosines, accels, hats, ratios)]
            right = [(d[k] @ d[k - 1]) / now / before, a, a / (now + before), now / before]
            assert np.allclose(is_, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('rho, theta', [(0.5, 0.3), (0.9, 1.2), (0.7, 2.5), (0.8, 0.0)])
def test_a_shrinking_spiral_in_closed_form(rho, theta):
    k = torch.arange(13, dtype=torch.double)
    turn = torch.stack(((k * theta).cos(), (k * theta).sin()), dim=1)           # (13, 2)
    states = rho ** k[:, None] * turn
    hat = abs(rho * np.exp(1j * theta) - 1) / (1 + rho)     # constant, however small the steps are
    for probe, value in ((geo.contraction, rho), (geo.step_cos, math.cos(theta)),
                         (geo.accel_hat, hat)):
        assert np.allclose(probe(states), np.full(11, value), rtol=1e-3, atol=1e-3)


def test_dlr_by_hand():
    states = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 3.0]])     # steps of 1 and 3: mean 2
    assert geo.dlr(states, torch.tensor([1.0, 13.0])) == 5
    assert geo.dlr(states, states[-1]) == 0         # a plain hand-over moves nothing
    two = torch.stack((states, 2 * states), dim=1)
    assert geo.dlr(two, torch.tensor([[1.0, 7.0], [2.0, 6.0]])).tolist() == [2, 0]


def test_pca_keeps_the_distances_of_a_plane():
    g = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(9, 2, generator=g))[0]
    flat = torch.randn(4, 5, 2, generator=g)
    points = geo.pca_2d(flat @ frame.T + 7)
    assert points.shape == (4, 5, 2)
    is_, was = points.view(-1, 2), flat.view(-1, 2)
    torch.testing.assert_close(torch.cdist(is_, is_), torch.cdist(was, was), rtol=1e-3, atol=1e-3)
    assert points[..., 0].var() > points[..., 1].var()
    # the sign is fixed, whatever the order of the states
    again = geo.pca_2d((flat @ frame.T + 7).flip(0)).flip(0)
    torch.testing.assert_close(points, again, rtol=1e-3, atol=1e-3)


def test_path_spread():
    same = torch.randn(1, 5, 8).expand(3, 5, 8)
    assert geo.path_spread(same).abs().max() < 1e-6
    apart = torch.tensor([[[3.0, 1.0]], [[3.0, -1.0]]])
    assert math.isclose(geo.path_spread(apart), 1 / 3, rel_tol=1e-6)


def test_motions():
    turn = torch.arange(31.0)
    circle = torch.stack((turn.cos(), turn.sin()), dim=1)
    assert geo.motion(circle) == geo.motion(1e-3 * circle) == 'orbit'
    assert geo.motion(turn[:, None] * torch.tensor([1.0, 0.5])) == 'slider'
    assert geo.motion(0.5 ** turn[:, None] * circle) == 'fixed point'
    assert geo.motion(torch.stack((turn, 0.3 * turn.sin()), dim=1)) == 'slider'


def test_rounding_floor_tells_the_dtypes_apart(tiny):
    group, trace = tiny().groups[0], []
    e = torch.randn(2, 6, 16)
    group(e, 12, trace=trace)
    states = trace[0]['states']
    float32, bfloat16 = (geo.rounding_floor(group, states, e, dtype)
                         for dtype in (torch.float32, torch.bfloat16))
    assert 1e-8 < float32 < 1e-5 and 1e-3 < bfloat16 < 1
    assert next(group.parameters()).dtype == torch.float32


def test_steps_to_a_tenth():
    assert geo.steps_to_a_tenth(np.array([99, 10, 4, 1, 0.5, 2])) == 2
    assert geo.steps_to_a_tenth(np.array([99, 10, 4, 2, 1.5])) is None


def test_the_settled_cosine_is_of_the_last_step_clear_of_rounding():
    # one token in two dimensions: straight on, straight on, back, and then steps of rounding
    steps = torch.tensor([[1.0, 0], [0.5, 0], [-0.3, 0], [0.001, 0], [0.5, 0]])
    states = torch.cat((torch.zeros(1, 2), steps.cumsum(0))).view(6, 1, 1, 2)
    assert geo.last_clear_cos(states, floor=0.001).tolist() == [[pytest.approx(-1.0)]]
    assert geo.last_clear_cos(states, floor=0.015).tolist() == [[pytest.approx(1.0)]]
    assert geo.last_clear_cos(states, floor=1.0).isnan().all()


# a run --------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The folder of a tiny run with checkpoints of iterations 0, 3 and 12."""
    folder = tmp_path_factory.mktemp('run')
    with contextlib.chdir(folder):
        make_book()
        assert conftest.run(*TINY).returncode == 0
    return folder


def look(*args):
    small = ['--n_loop=8', '--n_windows=3', '--most_loops=4', '--device=cpu']
    return conftest.run(*small, *args, script='geometry.py')


def read_figure(name):
    with open(f'out/figures/{name}.csv') as f:
        return list(csv.DictReader(f))


def test_figures_and_their_numbers(trained, monkeypatch):
    monkeypatch.chdir(trained)
    done = look()
    assert done.returncode == 0, done.stderr
    files = [f'{name}.{kind}' for name in FIGURES for kind in ('png', 'csv')]
    assert sorted(os.listdir('out/figures')) == sorted(files)
    assert all(os.path.getsize(f'out/figures/{name}.png') > 9000 for name in FIGURES)

    # the numbers of the last checkpoint once more, by the probes
    model, _ = load_checkpoint('out/ckpt.pt')
    text = data.open_data('book')       # three windows spread over the held-out text
    last = text.n_held_out(16) - 1
    assert last > 10
    idx, targets = text.held_out([0, round(last / 2), last], 16)
    trace = []
    with torch.no_grad():
        model(idx, n_loop=8, trace=trace)
        for row in read_figure('stability'):
            loss = model(idx, targets, n_loop=int(row['loops']))[1]
            assert math.isclose(float(row['loss']), loss, rel_tol=1e-5)
    first, second = (entry['states'] for entry in trace)

    # the curves
    probes = dict(figure_3a=(geo.step_norm, 0), figure_5=(geo.step_cos, 1),
                  contraction=(geo.contraction, 1), accel_hat=(geo.accel_hat, 1))
    for name, (probe, k_first) in probes.items():
        rows = read_figure(name)
        assert {row['iteration'] for row in rows} == {'0', '3', '12'}
        for group, states in (('[1]', first), ('[2]', second)):
            mine = [row for row in rows if (row['group'], row['iteration']) == (group, '12')]
            values = probe(states).flatten(1)
            ks = list(range(k_first, k_first + len(values)))
            mean, std = ([float(row[key]) for row in mine] for key in ('mean', 'std'))
            assert [int(row['k']) for row in mine] == ks
            assert np.allclose(mean, values.mean(1), rtol=1e-4)
            assert np.allclose(std, values.std(1), rtol=1e-3)

    # a hand-off, a cell of the heat map, the text of its tokens
    ratio, = [row['mean'] for row in read_figure('figure_2')
              if (row['iteration'], row['reading']) == ('12', 'first')]
    assert math.isclose(float(ratio), geo.dlr(first, second[1]).mean(), rel_tol=1e-4)
    shown, = [row['distance'] for row in read_figure('convergence')
              if (row['group'], row['token'], row['k']) == ('[2]', '5', '2')]
    distance = (second[2, 0, 5] - second[-1, 0, 5]).norm()
    assert math.isclose(float(shown), distance, rel_tol=1e-3)
    words = [row['text'] for row in read_figure('convergence')
             if (row['group'], row['k']) == ('[1]', '0')]
    assert ''.join(words) == bytes(idx[0].tolist()).decode()
    assert geo.text_of(torch.tensor([10, 300]), 'bytes') == [r'\n', '?']
    assert geo.text_of(torch.tensor([10, 300]), None) == ['10', '300']


def another_run(folder, name='ckpt.pt', iter_num=12, **changes):
    """A copy of out/ckpt.pt in folder, with some knobs and model arguments changed."""
    good = torch.load('out/ckpt.pt', weights_only=True)
    args = good['model_args']
    args = args | {key: value for key, value in changes.items() if key in args}
    changed = dict(model=GPT(GPTConfig(**args)).state_dict(), model_args=args, iter_num=iter_num,
                   config=good['config'] | changes)
    os.makedirs(folder, exist_ok=True)
    torch.save(good | changed, os.path.join(folder, name))


def test_checkpoints_of_one_run_may_differ_in_how_it_was_logged(trained, monkeypatch):
    monkeypatch.chdir(trained)
    another_run('logged', eval_interval=7, device='elsewhere', max_iters=12)
    another_run('logged', name='ckpt_000003.pt', iter_num=3, keep_iters=[3], max_iters=3)
    models, last = geo.load_run('logged', 'cpu')
    assert list(models) == [3, 12] and last['iter_num'] == 12
    another_run('logged', name='ckpt_000003.pt', iter_num=3, learning_rate=0.5)
    with pytest.raises(ValueError, match='another run than ckpt.pt .learning_rate = 0.5.'):
        geo.load_run('logged', 'cpu')
    another_run('later', iter_num=4)
    another_run('later', name='ckpt_000008.pt', iter_num=8)
    with pytest.raises(ValueError, match='is later than ckpt.pt: resume the run'):
        geo.load_run('later', 'cpu')


# what it says -------------------------------------------------------------------------------------

def test_what_the_summary_says_is_computed(capsys):
    def curves(norm, cos):
        return dict(norm=np.array(norm), cos=np.array(cos), settled=np.array([cos[-1], np.nan]),
                    floor_float32=1e-7, floor_bfloat16=1e-2)

    def says(before, after):
        motions = [['orbit', 'slider', 'orbit']] * 2
        measured = {0: [before | drift, before], 9: [after | drift, after]}
        geo.summary([[1], [2]], measured, {9: [1e-7, 1e-7]}, {1: 2.0}, motions)
        return capsys.readouterr().out

    slow = curves([9, 1, 0.9, 0.8, 0.7], [0.9, 0.9, 0.9, 0.9])
    fast = curves([9, 1, 0.05, 0.01, 0.001], [0.6, 0.6, 0.55, 0.58])
    drift = {}
    for reading in ('noise', 'first', 'settled'):
        drift |= {f'dlr_{reading}': 5.0, f'dlr_{reading}_std': 5.0}
    good = says(slow, fast)
    assert '10 steps: shown; they fall to a tenth after 1, 1' in good
    assert '0.65: shown; it settles at 0.58, 0.58' in good and 'than steps: shown' in good
    assert 'in 2 of 2 groups' in good and 'above 1 in 2 of 2 readings' in good
    assert 'group 1: 2 orbit, 1 slider; group 2: 2 orbit, 1 slider' in good
    assert 'group 1 1.0e-07, group 2 1.0e-07\nheld-out loss by loops: 1: 2.0000\n' in good
    assert 'in 0 of 2 groups, the cosine has fallen by at least 0.05 in 0' in says(slow, slow)
    bad = says(fast, slow)
    assert bad.count('NOT shown') == 3 and bad.count('over 5') == 4


@pytest.mark.parametrize('args, words', [
    (['--out_dir=nowhere'], "no checkpoint at 'nowhere/ckpt.pt'"),
    (['--out_dir=plain'], 'no recurrent groups'),
    (['--n_loop=3'], 'n_loop must be at least 4'),
    (['--n_loop=100000000'], 'n_loop must be an int from 1 to 10,000'),
    (['--n_windows=99999'], 'windows of 16 tokens: lower --n_windows'),
    (['--dataset=nothing'], 'python data.py nothing'),
])
def test_bad_input(trained, monkeypatch, args, words):
    monkeypatch.chdir(trained)
    another_run('plain', groups=[])
    done = look(*args)
    assert done.returncode == 2
    assert done.stderr.count('\n') == 1 and words in done.stderr
