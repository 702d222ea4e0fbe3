import csv
import os

import numpy as np
import pytest

from common import plots
from exits import EXITS


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


def test_every_rule_has_a_style():
    assert set(plots.STYLES) == {*EXITS, 'fixed', 'oracle'}
    assert len(set(plots.STYLES.values())) == len(plots.STYLES)
    # other rules too, and it does not change from process to process
    others = [plots.style(f'rule_{i}') for i in range(50)]
    assert set(others) == set(plots.OTHER_STYLES)
    assert others[:3] == [plots.OTHER_STYLES[i] for i in (1, 3, 1)]


def test_each_way_to_decode_has_its_panels(drawn):
    """Own signals, waiting, latest; each beside the fixed budgets of its policy."""
    rows = [*bench_rows('fixed'), *bench_rows('mine'), *bench_rows('norm', past=True),
            *bench_rows('fixed', cache='latest'), *bench_rows('kl', cache='latest', past=True)]
    rows[-1]['ms_per_token'] = ''               # not timed
    plots.figure_4(rows, 'figure_4.png')
    plots.quality(rows, 0.005, 'quality.png')
    titles = ['exact, own', 'exact, past', 'latest']

    # Fig. 4 has the rules alone; its points are in the order of tau
    by_tau = drawn['figure_4.png'].axes
    assert [ax.get_title() for ax in by_tau] == [title for title in titles for _ in range(3)]
    line, = by_tau[0].get_lines()
    assert line.get_xdata().tolist() == [1e-3, 1e-2, 0.1]
    assert line.get_ydata().tolist() == [5, 4, 3]

    # that of the quality has all; its points are in the order of what they cost
    by_cost = drawn['quality.png'].axes
    assert [ax.get_title() for ax in by_cost] == 2 * titles
    points = [{bars.get_label(): len(bars.lines[0].get_xdata()) for bars in ax.containers}
              for ax in by_cost]
    assert points[:3] == [dict(fixed=3, mine=3), dict(fixed=3, norm=3), dict(fixed=3, kl=3)]
    assert points[5] == dict(fixed=3, kl=2)
    line = by_cost[3].containers[1].lines[0]
    assert (line.get_color(), line.get_marker()) == plots.style('mine')
    assert line.get_xdata().tolist() == [3, 4, 5]
    assert np.allclose(line.get_ydata(), [0.02, 0.01, 0.0])


def test_error_bars_reach_from_low_to_high(drawn):
    rows = bench_rows('accel')
    plots.quality(rows, 0.005, 'quality.png')
    for ax in drawn['quality.png'].axes:
        bars, = ax.containers[0].lines[2]       # a vertical line for each point
        ends = sorted(segment[:, 1].tolist() for segment in bars.get_segments())
        assert np.allclose(ends, [[row['diff_low'], row['diff_high']] for row in rows])
    # an interval that misses the mean has no bar on that side
    below, above = plots.error_bars(bench_rows('kl', above=-0.0005))
    assert np.allclose(below, 0.001) and (above == 0).all()


def test_losses_of_a_log(drawn):
    """A log.csv holds text, and nothing where an iteration was not evaluated."""
    rows = [dict(iter='0', loss='', val_loss_1='5.5', val_loss_4='5.25'),
            dict(iter='1', loss='5.0', val_loss_1='', val_loss_4=''),
            dict(iter='2', loss='4.5', val_loss_1='4.75', val_loss_4='4.0')]
    plots.losses(rows, [1, 4], 'loss.png')
    ax, = drawn['loss.png'].axes
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ['training, drawn loops', 'held-out, 1 loop', 'held-out, 4 loops']
    curves = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.get_lines()]
    assert curves == [([1, 2], [5.0, 4.5]), ([0, 2], [5.5, 4.75]), ([0, 2], [5.25, 4.0])]


def test_curves_are_grey_where_they_are_not_clear_of_rounding(tmp_path):
    curve = dict(norm=np.array([1, 0.1, 0.02, 1e-4]), norm_std=np.full(4, 0.01),
                 cos=np.array([0.9, 0.8, 0.7]), cos_std=np.full(3, 0.1),
                 floor_float32=1e-3, floor_bfloat16=0.1)
    clear = dict(norm=1, cos=30)        # a direction needs a step 30 floors long, a norm only one
    for name in clear:
        path = str(tmp_path / 'new' / f'{name}.png')
        plots.curves({0: [curve], 7: [curve]}, [[4, 5]], name, name, clear[name], path)
        assert os.path.getsize(path) > 5000
        with open(tmp_path / 'new' / f'{name}.csv') as f:
            rows = [row for row in csv.DictReader(f) if row['iteration'] == '7']
        assert {row['group'] for row in rows} == {'[4, 5]'}
        assert [float(row['mean']) for row in rows] == curve[name].tolist()
        expected = dict(norm=['01', '11', '21', '30'], cos=['11', '20', '30'])
        assert [row['k'] + row['clear_of_rounding'] for row in rows] == expected[name]
