import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, finished, read_csv, refused
from PIL import Image

import data
import geometry as geo
from cache import Span
from common.checkpoint import load_checkpoint
from common.thresholds import save_thresholds, threshold_key
from exits import make_exit
from loops import Plan
from model import GPT, GPTConfig

SMALL = ['--n_loop=8', '--n_windows=3', '--device=cpu']
FIGURES = ['convergence', 'figure_1', 'figure_2', 'figure_3a', 'figure_5']


def test_ratios_by_hand():
    states = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 3.0]])     # steps of 1 and 3: mean 2
    assert geo.dlr(states, torch.tensor([1.0, 13.0])) == 5
    assert geo.dlr(states, states[-1]) == 0         # a plain hand-over moves nothing
    two = torch.stack((states, 2 * states), dim=1)
    assert geo.dlr(two, torch.tensor([[1.0, 7.0], [2.0, 6.0]])).tolist() == [2, 0]
    assert geo.steps_to_a_tenth(np.array([99, 10, 4, 1, 0.5, 2])) == 2
    assert geo.steps_to_a_tenth(np.array([99, 10, 4, 2, 1.5])) == math.inf


def test_pca_keeps_the_distances_of_a_plane():
    g = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(9, 2, generator=g))[0]
    flat = torch.randn(4, 5, 2, generator=g)
    points = geo.pca_2d(flat @ frame.T + 7)
    assert points.shape == (4, 5, 2)
    is_, was = points.view(-1, 2), flat.view(-1, 2)
    torch.testing.assert_close(torch.cdist(is_, is_), torch.cdist(was, was), rtol=1e-3, atol=1e-3)
    assert points[..., 0].var() > points[..., 1].var()
    # the largest entry of an axis is positive
    line = torch.tensor([[-2.0], [1.0], [1.0]])
    for axis in ([3.0, -4.0], [-3.0, 4.0]):
        along = geo.pca_2d(line * torch.tensor(axis))[:, :1]
        torch.testing.assert_close(along, 5 * line * np.sign(axis[1]))
    # states of one dimension lie on a line
    assert geo.pca_2d(torch.tensor([[3.0], [1.0], [2.0]])).tolist() == [[1, 0], [-1, 0], [0, 0]]


def test_a_sink_is_left_out(tiny, idx):
    """A first token of a hundred times the norm; all probes are then those of the others."""
    states = torch.randn(5, 2, 16, 8)
    assert geo.first_of(states) == 0
    states[:, :, 0] *= 100
    assert geo.first_of(states) == 1
    model = tiny(groups=[[1]])
    plain, = geo.measure(model, idx, 4)
    trace = geo.trace_of(model, idx, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geo, 'first_of', lambda states: 1)
        found, = geo.measure(model, idx, 4)
    others = geo.step_norm(trace[0]['states'][:, :, 1:]).flatten(1).mean(dim=1)
    np.testing.assert_allclose(found['norm'][0], others, rtol=1e-6)
    assert (plain['first'], found['first']) == (0, 1) and plain['floor'] != found['floor']


def test_rounding_floor_tells_the_dtypes_apart(tiny):
    group = tiny().groups[0]
    e = torch.randn(2, 6, 16)
    states = group(e, Plan([12], span=Span(0, 6), keep_states=True))[1]['states']
    float32, bfloat16 = (geo.rounding_floor(group, states, e, dtype)
                         for dtype in (torch.float32, torch.bfloat16))
    assert 1e-8 < float32 < 1e-5 and 1e-3 < bfloat16 < 1
    assert next(group.parameters()).dtype == torch.float32


def test_the_settled_cosine_is_of_the_last_step_clear_of_rounding():
    # one token in two dimensions: straight on, straight on, back, and then steps of rounding
    steps = torch.tensor([[1.0, 0], [0.5, 0], [-0.3, 0], [0.001, 0], [0.5, 0]])
    states = torch.cat((torch.zeros(1, 2), steps.cumsum(0))).view(6, 1, 1, 2)
    assert geo.last_clear_cos(states, floor=0.001).tolist() == [[pytest.approx(-1.0)]]
    assert geo.last_clear_cos(states, floor=0.015).tolist() == [[pytest.approx(1.0)]]
    assert geo.last_clear_cos(states, floor=1.0).isnan().all()


def numbers(figure, *columns, **where):
    """Columns of a figure's numbers, (len(columns), rows), of the rows with these values."""
    rows = [row for row in read_csv(f'out/figures/{figure}.csv') if where.items() <= row.items()]
    return np.array([[float(row[column]) for row in rows] for column in columns])


def used_by(model, idx, rule, n_loop=8, tau=None):
    """The loop steps (G, T) of a rule on one window."""
    trace = []
    with torch.no_grad():
        model(idx, n_loop=n_loop, exit=make_exit(rule, tau), trace=trace)
    return torch.cat([entry['steps_used'] for entry in trace])


def test_figures_and_their_numbers(here):
    """Of a tiny run with checkpoints of iterations 0, 3 and 12."""
    # for one of the two rules bench.py has found a threshold, which is large here
    taus = dict(accel=99.0, norm_rel=None)
    row = threshold_key(make_exit('accel'), 'exact', 8) | dict(tau=taus['accel'])
    save_thresholds('out', load_checkpoint('out/ckpt.pt')[1], [row])
    shown = finished(*SMALL, script='geometry.py')
    files = [f'{name}.{kind}' for name in FIGURES for kind in ('png', 'csv')]
    assert sorted(os.listdir('out/figures')) == sorted(files)
    assert all(os.path.getsize(f'out/figures/{name}.png') > 9000 for name in FIGURES)

    # the numbers of the last checkpoint once more, by the probes
    model, _ = load_checkpoint('out/ckpt.pt')
    text = data.open_data('book')       # three windows spread over the held-out text
    last = text.n_held_out(16) - 1
    assert last > 10
    idx, _ = text.held_out([0, round(last / 2), last], 16)
    trace = []
    with torch.no_grad():
        model(idx, n_loop=8, trace=trace)
    first, second = (entry['states'] for entry in trace)

    # the curves
    for name, probe, k_first in (('figure_3a', geo.step_norm, 0), ('figure_5', geo.step_cos, 1)):
        assert {*numbers(name, 'iteration')[0]} == {0, 3, 12}
        for group, states in (('[1]', first), ('[2]', second)):
            values = probe(states).flatten(1)
            k, *found = numbers(name, 'k', 'mean', 'std', group=group, iteration='12')
            assert k.tolist() == list(range(k_first, k_first + len(values)))
            assert np.allclose(found, [values.mean(1), values.std(1)], rtol=1e-3)

    # the three hand-offs, in the figure and in the printed row
    printed, = re.findall(r'^ +12  1 .*', shown, re.MULTILINE)
    for reading, k in dict(noise=0, first=1, settled=-1).items():
        found = numbers('figure_2', 'mean', 'std', iteration='12', reading=reading)
        ratio = geo.dlr(first, second[k])
        assert np.allclose(found[:, 0], [ratio.mean(), ratio.std()], rtol=1e-3)
        assert f'{ratio.mean():.1f} +- {ratio.std():.1f}' in printed
    steps = geo.steps_to_a_tenth(geo.step_norm(first).mean((1, 2)).numpy())
    settled = geo.last_clear_cos(first, float(printed.split()[4].split('/')[0])).nanmean()
    assert printed.split()[2:4] == [str(steps), f'{settled:.2f}']
    sentence, after = shown.partition('\nafter 12 iterations:\n')[2].split('\n')[:2]
    assert sentence.startswith('group [1]: steps ') and sentence.endswith(
        f'; cosine {settled:.2f}; the jump is {ratio.mean():.1f} mean steps')
    assert after.startswith('group [2]: steps ')

    # the paths of the first and the last token to settle, and the exits of both rules
    used = {rule: used_by(model, idx[:1], rule, tau=tau) for rule, tau in taus.items()}
    assert used['accel'].max() < used_by(model, idx[:1], 'accel').min()
    total = sum(used.values()).sum(0)
    path, lengths = geo.paths(torch.stack((first, second))[:, :, 0])
    assert {*numbers('figure_1', 'token')[0]} == {total.argmin().item(), total.argmax().item()}
    for t in (total.argmin(), total.argmax()):
        pc1, pc2, length, *exits = numbers('figure_1', 'pc1', 'pc2', 'length', *used,
                                           token=str(t.item()))
        assert np.allclose([pc1, pc2], path[:, :, t].reshape(-1, 2).T, atol=1e-4)
        assert np.allclose(length, lengths[:, :, t].flatten(), atol=1e-4)
        for rule, column in zip(used, exits):
            assert column.tolist() == used[rule][:, t].repeat_interleave(8).tolist()

    # the heat map, the text of its tokens
    (cell,), = numbers('convergence', 'distance', group='[2]', token='5', k='2')
    assert math.isclose(cell, (second[2, 0, 5] - second[-1, 0, 5]).norm(), rel_tol=1e-3)
    words = [row['text'] for row in read_csv('out/figures/convergence.csv')
             if (row['group'], row['k']) == ('[1]', '0')]
    assert ''.join(words) == bytes(idx[0].tolist()).decode()


def test_a_group_in_words():
    found = dict(norm=(np.array([9, 8, 2, 0.5]), None), settled=0.256,
                 dlr=dict(noise=(7, 1), settled=(5.86, 1)))
    assert geo.in_words([2, 3], found) == (
        'group [2, 3]: steps fall to a tenth in 2 loops; cosine 0.26; the jump is 5.9 mean steps')
    found = dict(norm=(np.array([9, 8, 2, 1]), None), settled=math.nan, dlr={})
    assert geo.in_words([4], found) == (
        'group [4]: steps do not fall to a tenth in 4 loops; no step is clear of rounding')


def test_longer_and_deeper_problems_than_in_training(tmp_path, monkeypatch):
    """Of a model with rotary positions; the white line of the heat map is their depth."""
    monkeypatch.chdir(tmp_path)
    lines, plain = [], geo.plots.save

    def save(figure, path, *numbers):
        lines.extend(line.get_xdata() for ax in figure.axes for line in ax.lines
                     if line.get_label() == 'depth of the label')
        plain(figure, path, *numbers)
    monkeypatch.setattr('common.plots.save', save)
    printed = finished(*SMALL, '--out_dir=pretrained/calc', '--dataset=calc:reset=0.01',
                       '--length=60', script='geometry.py')
    assert '3 held-out windows of 60 tokens' in printed
    checkpoint = load_checkpoint(f'{ROOT}/pretrained/calc/ckpt.pt', length=60)[1]
    depth = data.held_out_windows(checkpoint, 3, 'calc:reset=0.01')[3][0]
    assert lines[0][:-1].tolist() == depth.tolist() and depth.max() > 24
    assert len(read_csv('out/calc/figures/convergence.csv')) == 60 * 8


def test_a_folder_that_cannot_be_written_is_found_before_the_work(here, monkeypatch):
    shutil.copytree('out', 'locked', ignore=shutil.ignore_patterns('figures'))
    Path('locked/figures').touch()
    monkeypatch.setattr('data.held_out_windows', lambda *_: pytest.fail('the work began'))
    assert "cannot write into 'locked/figures'" in refused(*SMALL, '--out_dir=locked',
                                                           script='geometry.py')


@pytest.mark.parametrize('backend, kept', [
    ('module://matplotlib_inline.backend_inline', 'agg'), ('svg', 'svg')])
def test_the_backend_of_a_notebook(backend, kept):
    """It may be one that is not installed here; one that is stays."""
    code = ('from common import plots; import matplotlib, os; '
            'print(matplotlib.rcParams["backend"], os.environ["MPLBACKEND"])')
    done = subprocess.run([sys.executable, '-c', code], text=True, capture_output=True, cwd=ROOT,
                          env=os.environ | dict(MPLBACKEND=backend))
    assert done.stdout.split() == [kept, backend], done.stderr


def test_a_path_keeps_its_jumps():
    """Two groups of noise and two states, which lie in a plane: steps of 5 and 2, a jump of 12."""
    states = torch.tensor([[[9.0, -9, 7], [1, 0, 0], [4, 4, 0]],
                           [[8.0, 9, 9], [4, 4, 12], [4, 4, 14]]])
    path, lengths = geo.paths(states[:, :, None])
    assert lengths[..., 0].tolist() == [[0, 5], [12, 2]]
    is_, was = path.view(-1, 2), states[:, 1:].reshape(-1, 3)
    torch.testing.assert_close(torch.cdist(is_, is_), torch.cdist(was, was), rtol=1e-4, atol=1e-4)


def test_the_gif_is_of_the_model(here, monkeypatch):
    """A frame for each loop step until the exit, and the next tokens of that step's state."""
    monkeypatch.setattr('common.plots.save', lambda *args: None)        # the other figures
    finished(*SMALL, '--n_loop=3', '--animate', script='geometry.py')
    with Image.open('out/figures/two_scales.gif') as gif:
        gif.seek(gif.n_frames - 1)          # the last picture is held
        assert gif.size == (800, 500) and gif.info['loop'] == 0 and gif.info['duration'] > 900
    rows = read_csv('out/figures/two_scales.csv')
    model, _ = load_checkpoint('out/ckpt.pt')
    idx, _ = data.open_data('book').held_out([0], 16)
    t = int(rows[0]['token'])
    used = used_by(model, idx, 'norm_rel', 3)[:, t].clamp(min=2)
    assert [row['k'] for row in rows] == [str(k) for n in used for k in range(1, n + 1)]
    with torch.no_grad():
        p = model(idx, n_loop=[3, int(used[1])])[0][0, t].softmax(-1).topk(5).values
    assert np.allclose([float(rows[-1][f'p_{i}']) for i in range(1, 6)], p, atol=1e-4)


def test_curves_are_grey_where_they_are_not_clear_of_rounding(tmp_path):
    """A direction needs a step 30 floors long, a norm only one."""
    found = dict(norm=(np.array([1, 0.1, 0.02, 1e-4]), np.full(4, 0.01)),
                 cos=(np.array([0.9, 0.8, 0.7]), np.full(3, 0.1)),
                 floor=dict(float32=1e-3, bfloat16=0.1))
    for name, file, expected in (('norm', 'figure_3a', ['01', '11', '21', '30']),
                                 ('cos', 'figure_5', ['11', '20', '30'])):
        geo.figure_3a_or_5(name, {0: [found], 7: [found]}, [[4, 5]], tmp_path)
        rows = [row for row in read_csv(tmp_path / f'{file}.csv') if row['iteration'] == '7']
        assert {row['group'] for row in rows} == {'[4, 5]'}
        assert [float(row['mean']) for row in rows] == found[name][0].tolist()
        assert [row['k'] + row['clear_of_rounding'] for row in rows] == expected


def test_texts_of_tokens():
    encoding = data.open_encoding('bytes')
    assert geo.texts_of([65, 10, 226, 300], encoding) == ['A', '\n', r'\xe2', '#300']
    assert geo.texts_of([65, 300], None) == ['#65', '#300']


def another_run(folder, name='ckpt.pt', **changes):
    """A copy of out/ckpt.pt in folder, with some model arguments changed."""
    good = torch.load('out/ckpt.pt', weights_only=True)
    args = good['model_args'] | changes
    os.makedirs(folder, exist_ok=True)
    torch.save(good | dict(model=GPT(GPTConfig(**args)).state_dict(), model_args=args),
               os.path.join(folder, name))


def test_bad_input(here):
    another_run('plain', groups=[])
    another_run('one', groups=[[1]])
    another_run('mixed')
    another_run('mixed', name='ckpt_000003.pt', groups=[[1]])
    for flag, words in (
            ('--out_dir=plain', 'no recurrent groups'), ('--n_loop=1', 'n_loop must be at least 2'),
            ('--n_windows=0', 'n_windows at least 1'), ('--out_dir=one', 'has only one'),
            ('--out_dir=mixed', 'ckpt_000003.pt and ckpt.pt are of different runs'),
            ('--length=20', 'has learned positions')):
        assert words in refused(*SMALL, '--animate', flag, script='geometry.py')
    another_run('blocked')
    os.makedirs('blocked/figures/figure_5.png')
    with mock.patch('geometry.measure', side_effect=AssertionError):
        line = refused(*SMALL, '--out_dir=blocked', script='geometry.py')
    assert "'blocked/figures/figure_5.png' is a folder" in line


def test_weights_that_are_not_finite(here):
    """Of a kept checkpoint, in a folder whose name looks like a pattern."""
    shutil.copytree('out', 'out[1]')
    checkpoint = torch.load('out[1]/ckpt_000003.pt', weights_only=True)
    checkpoint['model']['ln_f.weight'][0] = checkpoint['model']['wte.weight'][:] = math.nan
    torch.save(checkpoint, 'out[1]/ckpt_000003.pt')
    line = refused(*SMALL, '--out_dir=out[1]', script='geometry.py')
    assert 'the states are not finite' in line
