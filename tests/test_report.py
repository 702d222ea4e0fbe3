"""What a run reports: its log, its held-out losses, its health, how far it is."""
import math
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import LastAlone, read_csv
from torch.nn.functional import cross_entropy

import data
import tasks
from common import distributed, plots, report


@pytest.fixture
def text():
    """Ten held-out windows of 16 tokens, the one behind them, and four over."""
    text = data.Text.__new__(data.Text)         # of no file
    text.val = np.random.default_rng(0).integers(50, size=165).astype('<u2')
    return text


def test_the_log_keeps_whole_rows_of_the_iterations_before(tmp_path):
    path = str(tmp_path / 'log.csv')
    report.Log(path, [1, 4], start=0, max_iters=9).add(dict(iter=3, loss=2.5, val_loss_4=2.25))
    with open(path, 'a') as f:
        f.write('8,2.0,' + ',' * 10 + '\n9,1.0')         # a whole row, and one cut short by a kill
    assert [row['iter'] for row in report.read_log(path)] == ['3', '8']
    assert [row['iter'] for row in report.read_log(path, before=8)] == ['3']

    # the log of a run that goes on from iteration 4
    report.Log(path, [1, 4], start=4, max_iters=9).add(dict(iter=4, val_loss_1=2.125))
    rows = report.read_log(path)
    assert [row['iter'] for row in rows] == ['3', '4']
    assert (rows[0]['loss'], rows[0]['val_loss_4']) == ('2.5', '2.25')
    assert rows[1]['val_loss_1'] == '2.125'


def test_time_that_is_left(tmp_path, capsys):
    """Of steps that take a second each, and of evaluations: 2 + 10 FLOPs are left, 0.5 a second."""
    run = SimpleNamespace(spikes=[], trend=[0, 0, 0])
    log = report.Log(str(tmp_path / 'log.csv'), [1], start=0, max_iters=6)
    log.steps = [(2.0, 100, 1), (2.0, 100, 1)]
    log.step(run, 3, 5.5, 1e-3, 1.0, [4], {}, evaluation_flops=10)
    assert '2000 ms, 0.1k tok/s, 24 s left' in capsys.readouterr().out


def test_a_row_behind_half_a_row(tmp_path, monkeypatch):
    """A disk that is full for a while: the rows are there in the end."""
    path = str(tmp_path / 'log.csv')
    log = report.Log(path, [1, 4], start=0, max_iters=9)
    log.add(dict(iter=0, loss=3.0))
    with monkeypatch.context() as patch:
        patch.setattr('builtins.open', mock.Mock(side_effect=OSError(28, 'No space left')))
        for it in 1, 2:
            log.add(dict(iter=it, loss=2.5))
    with open(path, 'a') as f:
        f.write('1,2.')
    log.add(dict(iter=3, loss=2.0))
    assert [row['iter'] for row in report.read_log(path)] == ['0', '1', '2', '3']


@pytest.mark.parametrize('text', ['iter;loss\n0;5.6\n', 'iter,loss\n0.0,5.6\n'])
def test_a_log_that_a_spreadsheet_has_saved(tmp_path, text):
    (tmp_path / 'log.csv').write_text(text)
    with pytest.raises(ValueError, match='log.csv. is not as this program writes it .*: move it'):
        report.read_log(tmp_path / 'log.csv')


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


def test_the_legend_of_figure_4_names_the_rules_of_all_panels(monkeypatch):
    """Each with the colour of its line, where the panels have different rules."""
    drawn = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: drawn.append(figure))
    rows = [dict(run='out', cache=cache, wake=False, rule=rule, tau=tau, ms_per_token=1, ppl=2,
                 ce=3)
            for cache, rule in (('exact', 'kl'), ('latest', 'norm'), ('latest', 'kl'))
            for tau in (0.1, 1.0)]
    plots.figure_4(rows, 'figure_4.png')
    first, *_, last = drawn[0].axes
    legend = first.get_legend()
    colours = {text.get_text(): line.get_color()
               for text, line in zip(legend.get_texts(), legend.get_lines())}
    kl, = first.get_lines()
    norm, kl_again = last.get_lines()
    assert colours == dict(kl=kl.get_color(), norm=norm.get_color())
    assert kl_again.get_color() == kl.get_color() != norm.get_color()


@pytest.mark.parametrize('n_windows, windows', [(10, range(10)), (4, [0, 3, 6, 9])])
def test_evaluate_is_the_mean_over_counted_windows(tiny, text, n_windows, windows, monkeypatch):
    """Fewer are spread evenly."""
    monkeypatch.setattr(report, 'windows_at_once', lambda config: 3)
    model = tiny()
    sums = report.evaluate(model, text, n_windows, [1, 4], 'cpu')
    x, y = text.held_out(windows, 16)
    assert list(sums) == [1, 4]
    for n_loop, (_, loss) in report.totals_of(sums).items():
        assert math.isclose(loss, model(x, y, n_loop=n_loop)[1].item(), rel_tol=1e-5)


def test_accuracy_counts_what_is_asked(tiny, monkeypatch):
    """Against the logits, on a task that asks at one token of a row."""
    monkeypatch.setattr(report, 'windows_at_once', lambda config: 7)
    monkeypatch.setitem(tasks.TASKS, 'last', LastAlone())
    model, problems = tiny(vocab_size=13), tasks.Problems('last', n_problems=40)
    sums = report.evaluate(model, problems, 40, [1, 3], 'cpu')
    x, y = problems.held_out(range(40), 16)
    for n_loop, (share, _) in report.totals_of(sums).items():
        right = model(x, n_loop=n_loop)[0][:, -1].argmax(-1) == y[:, -1]
        assert math.isclose(share, right.double().mean(), abs_tol=1e-6)


def test_the_table_by_depth(tiny, monkeypatch, tmp_path, capsys):
    """Printed, and as CSV: against the logits, label by label, at 16 and at 40 tokens."""
    monkeypatch.setattr(plots, 'depth', lambda rows, path: None)
    for T in 16, 40:
        model, problems = tiny(vocab_size=13, block_size=T), tasks.Problems('calc', n_problems=30)
        sums = report.evaluate(model, problems, 30, [1, 2], 'cpu')
        columns = report.depths_of(problems, T)
        x, y, depth = (torch.from_numpy(values) for values in problems.all_held_out(T))
        assert columns[:3] == [(0, 0), (1, 1), (2, 2)]
        assert len(columns) <= 10 and columns[-2][1] < depth.max() <= columns[-1][1]
        report.print_table(sums, columns)
        _, header, *printed = capsys.readouterr().out.splitlines()
        report.save_table(sums, columns, tmp_path)
        rows = read_csv(tmp_path / 'eval.csv')
        assert len(rows) == 2 * len(columns)
        for row in rows:
            logits = model(x, n_loop=int(row['loops']))[0]
            at = (depth >= int(row['first'])) & (depth <= int(row['last']))
            share = (logits.argmax(-1) == y)[at].double().mean().item()
            loss = cross_entropy(logits[at], y[at]).item()
            assert int(row['labels']) == at.sum()
            assert math.isclose(float(row['accuracy']), share, abs_tol=1e-9)
            assert math.isclose(float(row['loss']), loss, rel_tol=1e-5)
            line = next(line.split() for line in printed if line.split()[0] == row['loops'])
            assert f'{100 * share:.2f}' in line
            first, last = row['first'], row['last']
            assert (first if first == last else f'{first}-{last}') in header.split()


def test_columns_of_few_depths_and_of_none(text):
    hop = tasks.Problems('hop:hops=3', n_problems=30)
    assert report.depths_of(hop, 16) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert report.depths_of(text, 16) == []
    deep = tasks.Problems('calc:reset=0.001', n_problems=20)
    assert report.depths_of(deep, 14) == [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 13)]
    assert report.depths_of(deep, 1200) == [
        (0, 0), (1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512),
        (513, 1024), (1025, 1199)]


def test_a_column_without_labels_has_no_number(capsys):
    report.print_table({4: torch.tensor([[2.0, 0.0], [1.0, 0.0], [3.0, 0.0]])}, [(0, 0), (1, 8)])
    *_, header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ['loops', 'loss', '%', 'right', '0', '1-8']
    assert line.split() == ['4', '1.5000', '50.00', '50.00', '-']


def test_labels_count_alike_where_rows_have_more_or_fewer(tiny, monkeypatch):
    """The loss is that of all labels, not the mean of batches."""
    monkeypatch.setattr(report, 'windows_at_once', lambda config: 2)
    class Uneven(tasks.Problems):
        def make(self, rng, rows, T):
            x, y, depth = super().make(rng, rows, T)
            y[::2, 3:] = tasks.NOT_ASKED
            return x, y, depth

    model, problems = tiny(vocab_size=13), Uneven('calc', n_problems=9)
    sums = report.evaluate(model, problems, 9, [2], 'cpu')
    x, y, _ = (torch.from_numpy(values) for values in problems.all_held_out(16))
    _, loss = report.totals_of(sums)[2]
    assert math.isclose(loss, model(x, y, n_loop=2)[1].item(), rel_tol=1e-5)


def test_a_report_is_bounded_by_its_logits(tiny, text):
    """Its losses, and its look at the health of the states."""
    model, sizes = tiny(), []
    model.wte.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    model.config.vocab_size = 2 ** 21       # as if: a window then has 128 MiB of logits
    run = SimpleNamespace(model=model, val_loss={}, knobs=dict(warmup_iters=0), done=7)
    _, row = report.evaluate_run(run, text, 10, [1], 'cpu', nullcontext())
    assert sizes == [4, 4, 2, 4]        # the last one for health
    assert list(row) == ['val_loss_1', 'token_corr', 'state_use']
    assert row['val_loss_1'] == f'{run.val_loss[1]:.5f}'


def test_two_processes_share_the_windows(tiny, text, monkeypatch):
    """Nine windows, of which one has five: they look for signals equally often all the same."""
    model, parts, looks = tiny(), [], []
    monkeypatch.setattr(report, 'windows_at_once', lambda config: 2)
    whole = report.evaluate(model, text, 9, [4], 'cpu')[4]
    monkeypatch.setattr(distributed, 'WORLD', 2)
    monkeypatch.setattr(distributed, 'add_up', lambda sums, dev: sums)
    for rank in range(2):
        monkeypatch.setattr(distributed, 'RANK', rank)
        monkeypatch.setattr(distributed, 'check_stopped', lambda dev: looks.append(rank))
        parts.append(report.evaluate(model, text, 9, [4], 'cpu')[4])
    assert [part[0].item() for part in parts] == [5 * 16, 4 * 16]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=0)
    assert looks == [0] * 3 + [1] * 3


def test_spikes():
    trend = [0, 0.0, 0.0]
    draw = np.random.default_rng(0)
    for i in range(400):                # falls, with noise
        loss = 5 * 0.99 ** i + draw.normal(0, 0.1)
        assert not report.is_spike(loss, trend)
        trend = report.next_trend(trend, loss)
    assert report.is_spike(2.0, trend) and not report.is_spike(0.2, trend)


def test_spikes_from_before_a_resumption_are_told(tmp_path, capsys):
    """They are those since the last row, in an earlier call, too."""
    run = SimpleNamespace(spikes=[[4.5, 7], [3.0, 9]], trend=[99, 2.0, 0.1])
    log = report.Log(str(tmp_path / 'log.csv'), [1], start=9, max_iters=20)
    log.steps = [(1.0, 100, 1)]
    log.step(run, 9, 2.0, 1e-3, 1.0, [4], {}, evaluation_flops=0)
    assert ('loss spikes since the last row of log.csv: 2, the highest 4.50 at iteration 7 '
            in capsys.readouterr().out)
    assert report.read_log(log.path)[0]['spikes'] == '2' and not run.spikes


def test_health_shows_the_two_collapses(tiny, idx):
    model, trace = tiny(), []
    values = report.health(model, idx)
    assert not list(report.warnings_of(values, model.config.groups))
    # the correlation is the mean cosine of pairs of tokens
    model(idx, n_loop=3, trace=trace)
    for (token_corr, _), entry in zip(values, trace, strict=True):
        x = entry['states'][-1].unbind(1)                                       # T of (B, C)
        cosines = [torch.cosine_similarity(x[i], x[j]) for i in range(16) for j in range(i)]
        assert math.isclose(token_corr, torch.stack(cosines).mean(), abs_tol=1e-5)
    with torch.no_grad():
        # all tokens alike: every position reads the same
        model.wte.weight.copy_(model.wte.weight[:1].expand(50, -1))
        model.wpe.weight.zero_()
        # a core that ignores its state: no weight on x, the left half of [x ; e]
        for group in model.groups:
            group.adapter.weight[:, :16] = 0
    values = report.health(model, idx)
    for token_corr, state_use in values:
        assert token_corr > 0.999 and state_use < 1e-5
    # values just within the bounds, and just beyond them
    lines = list(report.warnings_of([(0.94, 0.021), (0.96, 0.019)], [[1], [2, 3]]))
    assert len(lines) == 2 and 'nearly the same' in lines[0] and 'ignores its state' in lines[1]
    assert all('group [2, 3]' in line for line in lines)
