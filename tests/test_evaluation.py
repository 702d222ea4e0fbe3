"""Held-out losses, by depth too."""
import math

import numpy as np
import pytest
import torch
from conftest import read_csv
from torch.nn.functional import cross_entropy

import data
import results.hop_and_group  # noqa: F401
import tasks
from common import evaluation


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
    x, y = text.held_out(windows, 16)
    for n_loop in 1, 4:
        score = evaluation.evaluate(model, text, n_windows, n_loop)
        assert math.isclose(score.loss, model(x, y, n_loop=n_loop)[1].item(), rel_tol=1e-5)


@pytest.mark.parametrize('task, T', [('calc:reset=0.9', 4), ('hop', 2)])
def test_a_problem_is_solved_if_all_its_labels_are_right(tiny, task, T):
    """In `hop` the first token has no label."""
    model, problems = tiny(vocab_size=13), tasks.Problems(task)
    with torch.no_grad():           # a model that knows one answer only
        model.lm_head.weight.zero_()
        model.ln_f.weight.zero_()
    n = problems.n_held_out(T)
    x, y = problems.held_out(range(n), T)
    model.config.block_size = T
    score = evaluation.evaluate(model, problems, n, 1)
    right = y == 0                  # all logits are equal, so the first word is said
    assert math.isclose(score.accuracy, right[y >= 0].double().mean(), abs_tol=1e-9)
    assert math.isclose(score.solved, (right | (y < 0)).all(dim=1).double().mean(), abs_tol=1e-9)


def test_the_table_by_depth(tiny, monkeypatch, tmp_path):
    """Against the logits, label by label, at 16 and at 40 tokens."""
    monkeypatch.setattr(tasks.Problems, 'n_problems', 30)
    for T in 16, 40:
        model, problems = tiny(vocab_size=13, block_size=T), tasks.Problems('calc')
        scores = {n: evaluation.evaluate(model, problems, 30, n) for n in (1, 2)}
        x, y, depth = (torch.from_numpy(values) for values in problems.all_held_out(T))
        evaluation.save_scores(scores, tmp_path)
        rows = read_csv(tmp_path / 'eval.csv')
        bins = [(row['first'], row['last']) for row in rows if row['loops'] == '1']
        assert bins[:5] == [('0', '0'), ('1', '1'), ('2', '2'), ('3', '4'), ('5', '8')]
        assert bins[-1][1] == str(depth[y >= 0].max().item())
        assert sum(int(row['labels']) for row in rows) == 2 * (y >= 0).sum()
        for row in rows:
            logits = model(x, n_loop=int(row['loops']))[0]
            at = (depth >= int(row['first'])) & (depth <= int(row['last'])) & (y >= 0)
            share = (logits.argmax(-1) == y)[at].double().mean().item()
            loss = cross_entropy(logits[at], y[at]).item()
            assert int(row['labels']) == at.sum()
            assert math.isclose(float(row['accuracy']), share, abs_tol=1e-9)
            assert math.isclose(float(row['loss']), loss, rel_tol=1e-5)


def test_windows_of_a_large_vocabulary_are_evaluated_in_parts(tiny, text):
    """So that their logits fit into memory."""
    model, sizes = tiny(), []
    model.wte.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    model.config.vocab_size = 2 ** 21       # as if: a window then has 128 MiB of logits
    evaluation.evaluate(model, text, 10, 1)
    assert sizes == [4, 4, 2]
