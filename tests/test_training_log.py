"""The log of a run: whole rows, the time that is left, loss spikes."""
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from common import plots, training_log


def test_the_log_keeps_whole_rows_of_the_iterations_before(tmp_path):
    path = str(tmp_path / 'log.csv')
    log = training_log.Log(path, [1, 4], start=0, max_iters=9)
    log.add_row(dict(iter=3, loss=2.5, val_loss_4=2.25))
    with open(path, 'a') as f:
        f.write('8,2.0,' + ',' * 10 + '\n9,1.0')         # a whole row, and one cut short by a kill
    assert [row['iter'] for row in training_log.read_log(path)] == ['3', '8']
    assert [row['iter'] for row in training_log.read_log(path, before=8)] == ['3']

    # the log of a run that goes on from iteration 4
    training_log.Log(path, [1, 4], start=4, max_iters=9).add_row(dict(iter=4, val_loss_1=2.125))
    rows = training_log.read_log(path)
    assert [row['iter'] for row in rows] == ['3', '4']
    assert (rows[0]['loss'], rows[0]['val_loss_4']) == ('2.5', '2.25')
    assert rows[1]['val_loss_1'] == '2.125'


def test_the_evaluation_at_the_end_stays_if_the_run_goes_on(tmp_path):
    """Not if the end is where it was: it is evaluated again there."""
    path = str(tmp_path / 'log.csv')
    for max_iters in 9, 12, 9:
        log = training_log.Log(path, [1], start=0, max_iters=9)
        log.add_row(dict(iter=8, loss=2.5))
        log.add_row(dict(iter=9, val_loss_1=2.25))
        training_log.Log(path, [1], start=9, max_iters=max_iters)
        wanted = ['8', '9'] if max_iters == 12 else ['8']
        assert [row['iter'] for row in training_log.read_log(path)] == wanted
    # the row of an iteration at which the run was killed has a loss, and is written again
    log = training_log.Log(path, [1], start=9, max_iters=12)
    log.add_row(dict(iter=9, loss=2.5, val_loss_1=2.25))
    training_log.Log(path, [1], start=9, max_iters=12)
    assert [row['iter'] for row in training_log.read_log(path)] == ['8']


def test_time_that_is_left(tmp_path, capsys):
    """Of steps that take a second each, and of evaluations: 2 + 10 FLOPs are left, 0.5 a second."""
    run = SimpleNamespace(spikes=[], trend=[0, 0, 0])
    log = training_log.Log(str(tmp_path / 'log.csv'), [1], start=0, max_iters=6)
    log.timings = [(2.0, 100, 1), (2.0, 100, 1)]
    log.report(run, 3, 5.5, 1e-3, 1.0, [4], {}, evaluation_flops=10)
    assert '2000 ms, 0.1k tok/s, 24 s left' in capsys.readouterr().out


def test_a_row_behind_half_a_row(tmp_path, monkeypatch):
    """A disk that is full for a while: the rows are there in the end."""
    path = str(tmp_path / 'log.csv')
    log = training_log.Log(path, [1, 4], start=0, max_iters=9)
    log.add_row(dict(iter=0, loss=3.0))
    with monkeypatch.context() as patch:
        patch.setattr('builtins.open', mock.Mock(side_effect=OSError(28, 'No space left')))
        for it in 1, 2:
            log.add_row(dict(iter=it, loss=2.5))
    with open(path, 'a') as f:
        f.write('1,2.')
    log.add_row(dict(iter=3, loss=2.0))
    assert [row['iter'] for row in training_log.read_log(path)] == ['0', '1', '2', '3']


@pytest.mark.parametrize('text', ['iter;loss\n0;5.6\n', 'iter,loss\n0.0,5.6\n'])
def test_a_log_that_a_spreadsheet_has_saved(tmp_path, text):
    (tmp_path / 'log.csv').write_text(text)
    with pytest.raises(ValueError, match='log.csv. is not as this program writes it .*: move it'):
        training_log.read_log(tmp_path / 'log.csv')


def test_the_figure_of_a_log(monkeypatch):
    """A log.csv holds text, and nothing where an iteration was not evaluated."""
    drawn = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: drawn.append(figure))
    rows = [dict(iter='0', loss='', val_loss_1='5.5', val_loss_4='5.25'),
            dict(iter='1', loss='5.0', val_loss_1='', val_loss_4=''),
            dict(iter='2', loss='4.5', val_loss_1='4.75', val_loss_4='4.0')]
    plots.losses(rows, [1, 4], 'loss.png')
    ax, = drawn[0].axes
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ['training, drawn loops', 'held-out, 1 loop', 'held-out, 4 loops']
    curves = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.get_lines()]
    assert curves == [([1, 2], [5.0, 4.5]), ([0, 2], [5.5, 4.75]), ([0, 2], [5.25, 4.0])]


def test_spikes():
    trend = [0, 0.0, 0.0]
    draw = np.random.default_rng(0)
    for i in range(400):                # falls, with noise
        loss = 5 * 0.99 ** i + draw.normal(0, 0.1)
        assert not training_log.is_spike(loss, trend)
        trend = training_log.next_trend(trend, loss)
    assert training_log.is_spike(2.0, trend) and not training_log.is_spike(0.2, trend)


def test_spikes_from_before_a_resumption_are_told(tmp_path, capsys):
    """They are those since the last row, in an earlier call, too."""
    run = SimpleNamespace(spikes=[[4.5, 7], [3.0, 9]], trend=[99, 2.0, 0.1])
    log = training_log.Log(str(tmp_path / 'log.csv'), [1], start=9, max_iters=20)
    log.timings = [(1.0, 100, 1)]
    log.report(run, 9, 2.0, 1e-3, 1.0, [4], {}, evaluation_flops=0)
    assert ('loss spikes since the last row of log.csv: 2, the highest 4.50 at iteration 7 '
            in capsys.readouterr().out)
    assert training_log.read_log(log.path)[0]['spikes'] == '2' and not run.spikes
