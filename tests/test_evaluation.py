"""Held-out losses, by depth too, and the health of the states."""
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import LastAlone, read_csv
from torch.nn.functional import cross_entropy

import data
import tasks
from common import distributed, evaluation, plots
from common.evaluation import Score
from common.terminal import print_rows


@pytest.fixture
def text():
    """Ten held-out windows of 16 tokens, the one behind them, and four over."""
    text = data.Text.__new__(data.Text)         # of no file
    text.val = np.random.default_rng(0).integers(50, size=165).astype('<u2')
    return text


@pytest.mark.parametrize('n_windows, windows', [(10, range(10)), (4, [0, 3, 6, 9])])
def test_evaluate_is_the_mean_over_counted_windows(tiny, text, n_windows, windows, monkeypatch):
    """Fewer are spread evenly."""
    monkeypatch.setattr(evaluation, 'windows_at_once', lambda config: 3)
    model = tiny()
    scores = evaluation.evaluate(model, text, n_windows, [1, 4], 'cpu')
    x, y = text.held_out(windows, 16)
    assert list(scores) == [1, 4]
    for n_loop, score in scores.items():
        assert math.isclose(score.loss.item(), model(x, y, n_loop=n_loop)[1].item(), rel_tol=1e-5)


def test_accuracy_counts_what_is_asked(tiny, monkeypatch):
    """Against the logits, on a task that asks at one token of a row."""
    monkeypatch.setattr(evaluation, 'windows_at_once', lambda config: 7)
    monkeypatch.setitem(tasks.TASKS, 'last', LastAlone())
    model, problems = tiny(vocab_size=13), tasks.Problems('last', n_problems=40)
    scores = evaluation.evaluate(model, problems, 40, [1, 3], 'cpu')
    x, y = problems.held_out(range(40), 16)
    for n_loop, score in scores.items():
        right = model(x, n_loop=n_loop)[0][:, -1].argmax(-1) == y[:, -1]
        assert math.isclose(score.total().accuracy, right.double().mean(), abs_tol=1e-6)


def test_the_table_by_depth(tiny, monkeypatch, tmp_path, capsys):
    """Printed, and as CSV: against the logits, label by label, at 16 and at 40 tokens."""
    monkeypatch.setattr(plots, 'depth', lambda rows, path: None)
    for T in 16, 40:
        model, problems = tiny(vocab_size=13, block_size=T), tasks.Problems('calc', n_problems=30)
        scores = evaluation.evaluate(model, problems, 30, [1, 2], 'cpu')
        bins = evaluation.depth_bins(problems, T)
        x, y, depth = (torch.from_numpy(values) for values in problems.all_held_out(T))
        assert bins[:3] == [(0, 0), (1, 1), (2, 2)]
        assert len(bins) <= 10 and bins[-2][1] < depth.max() <= bins[-1][1]
        evaluation.print_table(scores, bins)
        _, header, *printed = capsys.readouterr().out.splitlines()
        evaluation.save_table(scores, bins, tmp_path)
        rows = read_csv(tmp_path / 'eval.csv')
        assert len(rows) == 2 * len(bins)
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


def test_bins_of_few_depths_and_of_none(text):
    hop = tasks.Problems('hop:hops=3', n_problems=30)
    assert evaluation.depth_bins(hop, 16) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert evaluation.depth_bins(text, 16) == []
    deep = tasks.Problems('calc:reset=0.001', n_problems=20)
    assert evaluation.depth_bins(deep, 14) == [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 13)]
    assert evaluation.depth_bins(deep, 1200) == [
        (0, 0), (1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512),
        (513, 1024), (1025, 1199)]


def test_a_bin_without_labels_is_left_out(monkeypatch, tmp_path, capsys):
    """Of the table and of eval.csv."""
    monkeypatch.setattr(plots, 'depth', lambda rows, path: None)
    scores = {4: Score(labels=torch.tensor([2.0, 0.0, 4.0]), right=torch.tensor([1.0, 0.0, 4.0]),
                       nats=torch.tensor([3.0, 0.0, 3.0]))}
    bins = [(0, 0), (1, 8), (9, 16)]
    evaluation.print_table(scores, bins)
    *_, header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ['loops', 'loss', '%', 'right', '0', '9-16']
    assert line.split() == ['4', '1.0000', '83.33', '50.00', '100.00']
    evaluation.save_table(scores, bins, tmp_path)
    rows = read_csv(tmp_path / 'eval.csv')
    assert [(row['first'], row['labels'], row['loss']) for row in rows] == [
        ('0', '2', '1.5'), ('9', '4', '0.75')]


def test_a_task_none_of_whose_windows_has_a_label_is_refused(tmp_path):
    """It is not taken for a text, which has one row per loop count."""
    scores = {4: Score(*torch.zeros(3, 2))}
    with pytest.raises(ValueError, match='no held-out window has a label'):
        evaluation.print_table(scores, [(0, 0), (1, 1)])
    with pytest.raises(ValueError, match='no held-out window has a label'):
        evaluation.save_table(scores, [(0, 0), (1, 1)], tmp_path)


def test_a_table_of_rows_without_a_value(capsys):
    print_rows('quality:', [dict(ce=None)], dict(ce='.2f'))
    assert capsys.readouterr().out == '\nquality: no values\n'


def test_labels_count_alike_where_rows_have_more_or_fewer(tiny, monkeypatch):
    """The loss is that of all labels, not the mean of batches."""
    monkeypatch.setattr(evaluation, 'windows_at_once', lambda config: 2)
    class Uneven(tasks.Problems):
        def make(self, rng, rows, T):
            x, y, depth = super().make(rng, rows, T)
            y[::2, 3:] = tasks.NOT_ASKED
            return x, y, depth

    model, problems = tiny(vocab_size=13), Uneven('calc', n_problems=9)
    scores = evaluation.evaluate(model, problems, 9, [2], 'cpu')
    x, y, _ = (torch.from_numpy(values) for values in problems.all_held_out(16))
    loss = scores[2].total().loss
    assert math.isclose(loss, model(x, y, n_loop=2)[1].item(), rel_tol=1e-5)


def test_a_report_is_bounded_by_its_logits(tiny, text):
    """Its losses, and its look at the health of the states."""
    model, sizes = tiny(), []
    model.wte.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    model.config.vocab_size = 2 ** 21       # as if: a window then has 128 MiB of logits
    run = SimpleNamespace(model=model, val_loss={}, knobs=dict(warmup_iters=0), done=7)
    _, row = evaluation.evaluate_run(run, text, 10, [1], 'cpu', nullcontext())
    assert sizes == [4, 4, 2, 4]        # the last one for health
    assert list(row) == ['val_loss_1', 'token_corr', 'state_use']
    assert row['val_loss_1'] == f'{run.val_loss[1]:.5f}'


def test_two_processes_share_the_windows(tiny, text, monkeypatch):
    """Nine windows, of which one has five: they look for signals equally often all the same."""
    model, parts, looks = tiny(), [], []
    monkeypatch.setattr(evaluation, 'windows_at_once', lambda config: 2)
    whole = evaluation.evaluate(model, text, 9, [4], 'cpu')[4]
    monkeypatch.setattr(distributed, 'WORLD', 2)
    monkeypatch.setattr(distributed, 'add_up', lambda tensor, dev: tensor)
    for rank in range(2):
        monkeypatch.setattr(distributed, 'RANK', rank)
        monkeypatch.setattr(distributed, 'check_stopped', lambda dev: looks.append(rank))
        parts.append(torch.stack(evaluation.evaluate(model, text, 9, [4], 'cpu')[4]))
    assert [part[0].item() for part in parts] == [5 * 16, 4 * 16]
    torch.testing.assert_close(sum(parts), torch.stack(whole), rtol=1e-5, atol=0)
    assert looks == [0] * 3 + [1] * 3


def test_health_shows_the_two_collapses(tiny, idx):
    model, trace = tiny(), []
    values = evaluation.health(model, idx)
    assert not list(evaluation.warnings_of(values, model.config.groups))
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
    values = evaluation.health(model, idx)
    for token_corr, state_use in values:
        assert token_corr > 0.999 and state_use < 1e-5
    # of a single token there are no pairs
    values = evaluation.health(model, idx[:, :1])
    assert all(abs(token_corr) < 1e-5 for token_corr, _ in values)
    # values just within the bounds, and just beyond them
    lines = list(evaluation.warnings_of([(0.94, 0.021), (0.96, 0.019)], [[1], [2, 3]]))
    assert len(lines) == 2 and 'nearly the same' in lines[0] and 'ignores its state' in lines[1]
    assert all('group [2, 3]' in line for line in lines)
