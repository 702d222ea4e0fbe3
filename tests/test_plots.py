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


def test_every_rule_has_a_style():
    assert set(plots.STYLES) == {*EXITS}
    assert len(set(plots.STYLES.values())) == len(plots.STYLES)
    # other rules too, and it does not change from process to process
    others = [plots.style(f'rule_{i}') for i in range(50)]
    assert set(others) == set(plots.OTHER_STYLES)
    assert others[:3] == [plots.OTHER_STYLES[i] for i in (1, 3, 1)]


def test_each_way_to_decode_has_its_panels(drawn):
    """Own signals, waiting, latest: the rules alone, their points in the order of tau."""
    rows = [dict(cache=cache, rule=rule, past=past, tau=tau, extension=tau > 1e-2, ce=2 + tau,
                 ppl=7 + tau, ms_per_token='' if rule == 'kl' else 5 - tau)     # kl: not timed
            for rule, cache, past in (('fixed', 'exact', False), ('mine', 'exact', False),
                                      ('norm', 'exact', True), ('kl', 'latest', True))
            for tau in (0.1, 1e-3, 1e-2)]
    plots.figure_4(rows, 'figure_4.png')
    panels = drawn['figure_4.png'].axes
    assert [ax.get_title() for ax in panels] == [
        title for title in ('exact, own', 'exact, past', 'latest') for _ in range(3)]
    line, = panels[0].get_lines()
    assert line.get_xdata().tolist() == [1e-3, 1e-2, 0.1]
    assert line.get_ydata().tolist() == [4.999, 4.99, 4.9]
    assert (line.get_label(), line.get_color(), line.get_marker()) == (
        'mine', *plots.style('mine'))
    times, losses = (panels[i].get_lines()[0].get_ydata() for i in (6, 8))
    assert np.isnan(times).all() and losses.tolist() == [2.001, 2.01, 2.1]


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
