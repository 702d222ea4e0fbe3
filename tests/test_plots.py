import ast
import csv
import glob
import os

import matplotlib.axes
import numpy as np
import pytest
from conftest import ROOT, TAUS

from common import plots


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved from here on, {path: figure}; no file is written."""
    figures = {}

    def save(figure, path, header=None, table=None):
        figures[path] = figure
    monkeypatch.setattr(plots, 'save', save)
    return figures


def bench_rows(rule, above=0.002, cache='exact', past=False):
    """Three points of a rule whose interval is 0.001 below and `above` above the mean."""
    rows = []
    for i, tau in enumerate((1e-3, 1e-2, 0.1)):
        ce = 0.01 * i
        rows.append(dict(cache=cache, rule=rule, past=past, tau=tau,
                         extension=tau > 1e-2, ce=2 + ce, ppl=7.4 + ce, ce_minus_full=ce,
                         diff_low=ce - 0.001, diff_high=ce + above,
                         mean_evals=9.0 - i, ms_per_token=5.0 - i))
    return rows


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def imports(path):
    """Names of all modules that a source file imports, anywhere in it."""
    with open(path, encoding='utf-8') as f:
        tree = ast.parse(f.read())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split('.')[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split('.')[0])
    return names


def test_plots_alone_imports_matplotlib_and_nothing_of_ours():
    sources = glob.glob(os.path.join(ROOT, '*.py'))
    for folder in ('config', 'results', 'zoo'):
        sources += glob.glob(os.path.join(ROOT, folder, '**', '*.py'), recursive=True)
    those = [os.path.relpath(path, ROOT) for path in sources if 'matplotlib' in imports(path)]
    assert those == ['plots.py']
    ours = {os.path.splitext(os.path.basename(path))[0] for path in sources}
    assert not imports(os.path.join(ROOT, 'plots.py')) & ours


def test_every_shipped_rule_has_a_style_of_its_own():
    assert set(plots.STYLES) >= {*TAUS, 'fixed', 'oracle'}
    assert len(set(plots.STYLES.values())) == len(plots.STYLES)


def test_an_unknown_rule_gets_a_style_that_stays():
    names = [f'rule_{i}' for i in range(50)]
    styles = [plots.style(name) for name in names]
    assert styles == [plots.style(name) for name in names]
    assert plots.style('rule_0') == ('#8C6D31', 'p')           # in this process as in any other
    assert len(set(styles)) > 10 and not set(styles) & set(plots.STYLES.values())


def test_figures_of_a_rule_that_nobody_knows(drawn):
    rows = bench_rows('fixed') + bench_rows('mine') + bench_rows('kl') + bench_rows('oracle')
    plots.figure_4(rows, 'figure_4.png')
    plots.frontier(rows, 0.005, 'frontier.png')
    colour, marker = plots.style('mine')

    # Fig. 4 has the rules alone; its points are in the order of tau
    by_tau = drawn['figure_4.png'].axes[0]
    assert labels(by_tau) == ['mine', 'kl']
    line = by_tau.get_lines()[0]
    assert (line.get_color(), line.get_marker()) == (colour, marker)
    assert line.get_xdata().tolist() == [1e-3, 1e-2, 0.1]
    assert line.get_ydata().tolist() == [5, 4, 3]

    # the frontier has all; its points are in the order of what they cost
    by_evals, by_ms = drawn['frontier.png'].axes
    assert labels(by_evals) == ['fixed', 'mine', 'kl', 'oracle']
    line = by_ms.containers[1].lines[0]
    assert (line.get_color(), line.get_marker()) == (colour, marker)
    assert line.get_xdata().tolist() == [3, 4, 5]
    assert np.allclose(line.get_ydata(), [0.02, 0.01, 0.0])


def test_each_way_to_decode_has_its_panels(drawn):
    """Own signals, waiting, latest; each beside the fixed budgets of its policy."""
    rows = [*bench_rows('fixed'), *bench_rows('norm'), *bench_rows('norm', past=True),
            *bench_rows('fixed', cache='latest'), *bench_rows('kl', cache='latest', past=True)]
    rows[-1]['ms_per_token'] = ''               # not timed
    plots.figure_4(rows, 'figure_4.png')
    plots.frontier(rows, 0.005, 'frontier.png')
    titles = ['exact, own', 'exact, past', 'latest']
    by_tau, by_cost = drawn['figure_4.png'].axes, drawn['frontier.png'].axes
    assert [ax.get_title() for ax in by_tau] == [title for title in titles for _ in range(3)]
    assert [ax.get_title() for ax in by_cost] == 2 * titles
    assert [len(ax.get_lines()) for ax in by_tau] == 9 * [1]
    rules = [[bars.get_label() for bars in ax.containers] for ax in by_cost]
    assert rules == 2 * [['fixed', 'norm'], ['fixed', 'norm'], ['fixed', 'kl']]
    points = [[len(bars.lines[0].get_xdata()) for bars in ax.containers] for ax in by_cost]
    assert points == 5 * [[3, 3]] + [[3, 2]]


def test_error_bars_reach_from_low_to_high(drawn, monkeypatch):
    bars, draw = [], matplotlib.axes.Axes.errorbar

    def errorbar(ax, x, y, yerr=None, **how):
        bars.append((np.array(y), np.array(yerr)))
        return draw(ax, x, y, yerr, **how)
    monkeypatch.setattr(matplotlib.axes.Axes, 'errorbar', errorbar)
    rows = bench_rows('accel')
    plots.frontier(rows, 0.005, 'frontier.png')
    assert len(bars) == 2
    for y, (below, above) in bars:
        assert np.allclose(sorted(y - below), [row['diff_low'] for row in rows])
        assert np.allclose(sorted(y + above), [row['diff_high'] for row in rows])
        assert np.allclose(below, 0.001) and np.allclose(above, 0.002)


def test_an_interval_that_misses_the_mean_has_no_bar_on_that_side():
    below, above = plots.error_bars(bench_rows('kl', above=-0.0005))
    assert np.allclose(below, 0.001) and (above == 0).all()


def test_shaded_is_what_lies_beyond_the_paper(drawn):
    rows = bench_rows('norm')
    plots.figure_4(rows, 'all.png')
    plots.figure_4([row for row in rows if not row['extension']], 'paper.png')
    (patch,), none = (drawn[path].axes[0].patches for path in ('all.png', 'paper.png'))
    assert np.isclose(patch.get_x(), 1.5e-2) and np.isclose(patch.get_width(), 0.135)
    assert not none


def test_losses_out_of_a_log(drawn):
    """A log.csv has text in it, and nothing where an iteration was not evaluated."""
    rows = [dict(iter='0', loss='', val_loss_1='5.5', val_loss_4='5.25'),
            dict(iter='1', loss='5.0', val_loss_1='', val_loss_4=''),
            dict(iter='2', loss='4.5', val_loss_1='4.75', val_loss_4='4.0')]
    plots.losses(rows, [1, 4], 'loss.png')
    ax, = drawn['loss.png'].axes
    assert labels(ax) == ['training, drawn loops', 'held-out, 1 loop', 'held-out, 4 loops']
    curves = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.get_lines()]
    assert curves == [([1, 2], [5.0, 4.5]), ([0, 2], [5.5, 4.75]), ([0, 2], [5.25, 4.0])]


def test_what_rounding_has_a_say_in_is_grey(tmp_path):
    """A direction needs a step 30 floors long, a step norm only one."""
    curve = dict(norm=np.array([1, 0.1, 0.02, 1e-4]), norm_std=np.full(4, 0.01),
                 cos=np.array([0.9, 0.8, 0.7]), cos_std=np.full(3, 0.1),
                 floor_float32=1e-3, floor_bfloat16=0.1)
    path = str(tmp_path / 'new' / 'cos.png')
    plots.figure_5({0: [curve], 7: [curve]}, [[4, 5]], 30, 4, path)
    plots.figure_3a({0: [curve], 7: [curve]}, [[4, 5]], str(tmp_path / 'norm.png'))
    rows = {}
    for name in ('new/cos', 'norm'):
        assert os.path.getsize(tmp_path / f'{name}.png') > 5000
        with open(tmp_path / f'{name}.csv') as f:
            rows[name] = list(csv.DictReader(f))
    cos, norm = ([row for row in rows[name] if row['iteration'] == '7'] for name in rows)
    assert {row['group'] for row in cos} == {'[4, 5]'}
    assert [(row['k'], row['mean'], row['clear_of_rounding']) for row in cos] == [
        ('1', '0.9', '1'), ('2', '0.8', '0'), ('3', '0.7', '0')]
    assert [(row['k'], row['clear_of_rounding']) for row in norm] == [
        ('0', '1'), ('1', '1'), ('2', '1'), ('3', '0')]
