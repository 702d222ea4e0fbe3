import csv
import math
import os
import runpy
import sys

import numpy as np
import pytest
import torch
from test_train import ROOT, TINY, run

import data
import geometry as geo
from model import GPT, GPTConfig


def spiral(rho, theta, K=12, tokens=3):
    """x_k = rho^k R(theta)^k v, in a plane of its own for each token: (K+1, tokens, 6)."""
    g = torch.Generator().manual_seed(0)
    frames = [torch.linalg.qr(torch.randn(6, 2, generator=g, dtype=torch.double))[0] for _ in range(tokens)]
    return torch.stack([torch.stack([rho ** k * (f[:, 0] * math.cos(k * theta) + f[:, 1] * math.sin(k * theta)) for f in frames]) for k in range(K + 1)])


@pytest.fixture
def states():
    return torch.randn(7, 2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_probes_against_naive_loops(states):
    norms, cosines, accels, hats, ratios = geo.step_norm(states), geo.step_cos(states), geo.accel(states), geo.accel_hat(states), geo.contraction(states)
    assert norms.shape == (6, 2, 5) and cosines.shape == accels.shape == hats.shape == ratios.shape == (5, 2, 5)
    for b in range(2):
        for t in range(5):
            d = [states[k + 1, b, t] - states[k, b, t] for k in range(6)]
            for k in range(6):
                assert math.isclose(norms[k, b, t], d[k].square().sum().sqrt(), rel_tol=1e-5)
            for k in range(1, 6):
                a = (d[k] - d[k - 1]).norm()
                assert math.isclose(cosines[k - 1, b, t], (d[k] @ d[k - 1]) / d[k].norm() / d[k - 1].norm(), abs_tol=1e-5)
                assert math.isclose(accels[k - 1, b, t], a, rel_tol=1e-5)
                assert math.isclose(hats[k - 1, b, t], a / (d[k].norm() + d[k - 1].norm()), rel_tol=1e-5)
                assert math.isclose(ratios[k - 1, b, t], d[k].norm() / d[k - 1].norm(), rel_tol=1e-5)


@pytest.mark.parametrize('rho, theta', [(0.5, 0.3), (0.9, 1.2), (0.7, 2.5), (0.8, 0.0)])
def test_a_shrinking_spiral_in_closed_form(rho, theta):
    states = spiral(rho, theta)
    torch.testing.assert_close(geo.contraction(states), torch.full((11, 3), rho), rtol=1e-3, atol=0)
    torch.testing.assert_close(geo.step_cos(states), torch.full((11, 3), math.cos(theta)), rtol=0, atol=1e-3)
    hat = abs(rho * np.exp(1j * theta) - 1) / (1 + rho)        # constant: it never falls, however small the steps
    torch.testing.assert_close(geo.accel_hat(states), torch.full((11, 3), hat), rtol=1e-3, atol=1e-4)


def test_a_straight_line():
    line = torch.arange(9.0)[:, None] * torch.tensor([1.0, 2.0, 2.0])
    assert torch.allclose(geo.step_norm(line), torch.tensor(3.0)) and torch.allclose(geo.step_cos(line), torch.tensor(1.0)) and (geo.accel(line) == 0).all()


def test_dlr_by_hand():
    states = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 3.0]])        # steps of 1 and 3: mean 2
    assert geo.dlr(states, torch.tensor([1.0, 13.0])) == 5
    assert geo.dlr(states, states[-1]) == 0                            # a plain hand-over moves nothing
    assert geo.dlr(torch.stack((states, 2 * states), dim=1), torch.tensor([[1.0, 7.0], [2.0, 6.0]])).tolist() == [2, 0]


def test_pca_keeps_the_distances_of_a_plane():
    g = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(9, 2, generator=g))[0]
    flat = torch.randn(4, 5, 2, generator=g)
    points = geo.pca_2d(flat @ frame.T + 7)
    assert points.shape == (4, 5, 2)
    torch.testing.assert_close(torch.cdist(points.view(-1, 2), points.view(-1, 2)), torch.cdist(flat.view(-1, 2), flat.view(-1, 2)), rtol=1e-3, atol=1e-3)
    assert points[..., 0].var() > points[..., 1].var()
    torch.testing.assert_close(geo.pca(flat @ frame.T, 2), geo.pca((flat @ frame.T).flip(0), 2).flip(0), rtol=1e-3, atol=1e-3)     # the sign is fixed


def test_path_spread():
    same = torch.randn(1, 5, 8).expand(3, 5, 8)
    assert geo.path_spread(same).abs().max() < 1e-6
    apart = torch.tensor([[[3.0, 1.0]], [[3.0, -1.0]]])
    assert math.isclose(geo.path_spread(apart), 1 / 3, rel_tol=1e-6)


def test_motions():
    turn = torch.arange(31.0)
    circle = torch.stack((turn.cos(), turn.sin()), dim=1)
    assert geo.motion(circle) == 'orbit'
    assert geo.motion(turn[:, None] * torch.tensor([1.0, 0.5])) == 'slider'
    assert geo.motion(0.5 ** turn[:, None] * circle) == 'fixed point'
    assert geo.motion(torch.stack((turn, 0.3 * turn.sin()), dim=1)) == 'slider'


def test_rounding_floor_tells_the_dtypes_apart(tiny):
    group = tiny().groups[0]
    e = torch.randn(2, 6, 16)
    trace = []
    group(e, 12, trace=trace)
    floors = [geo.rounding_floor(group, trace[0]['states'], e, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert 1e-8 < floors[0] < 1e-5 and 1e-3 < floors[1] < 1 and next(group.parameters()).dtype == torch.float32


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A tiny run with checkpoints of iterations 0, 3 and 12."""
    folder, before = tmp_path_factory.mktemp('run'), os.getcwd()
    os.chdir(folder)
    (folder / 'book.txt').write_text(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    data.make('book', 'book.txt')
    assert run(*TINY).returncode == 0
    os.chdir(before)
    return folder


def look(*args):
    sys.argv = ['geometry.py', '--n_loop=8', '--n_windows=3', '--most_loops=4', '--device=cpu', *args]
    runpy.run_path(os.path.join(ROOT, 'geometry.py'), run_name='__main__')


def test_figures_and_their_numbers(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    look()
    out = capsys.readouterr().out
    names = ['accel_hat', 'contraction', 'convergence', 'figure_1', 'figure_2', 'figure_3a', 'figure_3b', 'figure_5', 'figure_6', 'path_independence', 'stability']
    assert sorted(os.listdir('out/figures')) == sorted(f'{name}.{kind}' for name in names for kind in ('png', 'csv'))
    assert all(os.path.getsize(f'out/figures/{name}.png') > 9000 for name in names)
    rows = {name: list(csv.DictReader(open(f'out/figures/{name}.csv'))) for name in names}
    # the numbers of the last checkpoint once more, by the probes
    model, _ = geo.load_checkpoint('out/ckpt.pt')
    idx, targets = data.windows(data.load('book')[1], [0, 16, 32], 16)
    trace = []
    with torch.no_grad():
        model(idx, n_loop=8, trace=trace)
        for row in rows['stability']:
            assert math.isclose(float(row['loss']), model(idx, targets, n_loop=int(row['loops']))[1], rel_tol=1e-5)
    for name, probe, first in (('figure_3a', geo.step_norm, 0), ('figure_5', geo.step_cos, 1), ('contraction', geo.contraction, 1), ('accel_hat', geo.accel_hat, 1)):
        for g, group in enumerate(('[1]', '[2]')):
            got = [row for row in rows[name] if (row['group'], row['iteration']) == (group, '12')]
            values = probe(trace[g]['states']).flatten(1)
            assert [int(row['k']) for row in got] == list(range(first, first + len(values)))
            assert np.allclose([float(row['mean']) for row in got], values.mean(1), rtol=1e-4) and np.allclose([float(row['std']) for row in got], values.std(1), rtol=1e-3)
    assert {row['iteration'] for row in rows['figure_3a']} == {'0', '3', '12'}
    ratio = geo.dlr(trace[0]['states'], trace[1]['states'][1])
    mean, = [float(row['mean']) for row in rows['figure_2'] if (row['iteration'], row['reading']) == ('12', 'first')]
    assert math.isclose(mean, ratio.mean(), rel_tol=1e-4)
    distance = (trace[1]['states'][2, 0, 5] - trace[1]['states'][-1, 0, 5]).norm()
    cell, = [float(row['distance']) for row in rows['convergence'] if (row['group'], row['token'], row['k']) == ('[2]', '5', '2')]
    assert math.isclose(cell, distance, rel_tol=1e-3)
    assert all(word in out for word in ('steps to a tenth', 'spread over norm', 'motions', '(i) step norms', '(ii) the cosine', '(iii) both strengthen'))


def test_what_the_summary_says_is_computed(capsys):
    curve = lambda norm, cos: dict(norm=np.array(norm), cos=np.array(cos), floor_float32=1e-7, floor_bfloat16=1e-2)
    slow, fast = curve([1, 0.9, 0.8, 0.7], [0.9, 0.9, 0.9]), curve([1, 0.05, 0.01, 0.001], [0.6, 0.6, 0.55])
    drift = {f'dlr_{r}{end}': 5.0 for r in ('noise', 'first', 'settled') for end in ('', '_std')}
    geo.summary({0: [slow | drift, slow], 9: [fast | drift, fast]}, [[1], [2]], {9: [1e-7, 1e-7]}, {1: 2.0}, [{'orbit': 3}, {'orbit': 3}])
    good = capsys.readouterr().out
    assert '10 steps: shown; tenfold after 1, 1' in good and '0.65: shown; 0.58, 0.58' in good and 'larger: shown' in good
    geo.summary({0: [fast | drift, fast], 9: [slow | drift, slow]}, [[1], [2]], {9: [1e-7, 1e-7]}, {1: 2.0}, [{'orbit': 3}, {'orbit': 3}])
    assert capsys.readouterr().out.count('NOT shown') == 3


@pytest.mark.parametrize('args, words', [
    (['--out_dir=nowhere'], "no checkpoint at 'nowhere/ckpt.pt'"), (['--n_loop=3'], 'n_loop must be at least 4'), (['--noise_draws=1'], 'noise_draws'),
    (['--n_windows=99999'], 'windows of 16 tokens'), (['--dataset=nothing'], 'python data.py nothing'), (['--out_dir=mixed'], 'is of another run than ckpt.pt (n_embd = 32)'),
    (['--out_dir=plain'], 'no recurrent groups'), (['--out_dir=later'], 'another run than ckpt.pt (a later iteration)'), (['--dataset=words'], 'reads bytes tokens')])
def test_bad_input(trained, monkeypatch, capsys, args, words):
    monkeypatch.chdir(trained)
    good = torch.load('out/ckpt.pt', weights_only=True)

    def another(path, iter_num=12, **changes):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        shape = good['model_args'] | {k: v for k, v in changes.items() if k in good['model_args']}
        torch.save(good | dict(model=GPT(GPTConfig(**shape)).state_dict(), model_args=shape, iter_num=iter_num, config=good['config'] | changes), path)
    if 'mixed' in args[0]:
        another('mixed/ckpt.pt')
        another('mixed/ckpt_000003.pt', 3, n_embd=32)
    if 'later' in args[0]:
        another('later/ckpt.pt', 4)
        another('later/ckpt_000008.pt', 8)
    if 'words' in args[0]:
        os.makedirs('data/words', exist_ok=True)
        for name in ('train.bin', 'val.bin', 'meta.json'):
            content = open(f'data/book/{name}', 'rb').read()
            open(f'data/words/{name}', 'wb').write(content.replace(b'"bytes",', b'"gpt2",') if name == 'meta.json' else content)
    if 'plain' in args[0]:
        another('plain/ckpt.pt', groups=[])
    with pytest.raises(SystemExit, match='2'):
        look(*args)
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and words in error
