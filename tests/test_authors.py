"""results/authors.py by hand."""
import torch

from exits import EXITS
from results.authors import kl_diff, norm_diff


def test_the_values_of_two_successive_steps_are_compared():
    x = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[3.0, 6.0]]])       # steps of length 5 and 2
    value, memo = norm_diff(x[0], x[1], None, None)
    assert value.isnan().all()
    assert norm_diff(x[1], x[2], memo, None)[0].item() == 3

    x = torch.tensor([[[0.5, 0.5]], [[0.8, 0.2]], [[0.5, 0.5]]])
    value, memo = kl_diff(x[0], x[1], None, torch.log)
    assert value.isnan().all()
    first = 0.8 * torch.tensor(1.6).log() + 0.2 * torch.tensor(0.4).log()
    second = 0.5 * torch.tensor(0.625).log() + 0.5 * torch.tensor(2.5).log()
    value, _ = kl_diff(x[1], x[2], memo, torch.log)
    torch.testing.assert_close(value, (first - second).abs()[None])


def test_means_are_compared_and_not_a_mean_of_comparisons():
    # two tokens, whose steps are 2 and 1 long, then 1 and 2
    x = torch.tensor([[[0.0], [0.0]], [[2.0], [1.0]], [[3.0], [3.0]]])
    _, memo = norm_diff(x[0], x[1], None, None)
    assert norm_diff(x[1], x[2], memo, None)[0].tolist() == [1, 1]
    rule = EXITS['norm_diff_mean']
    _, memo = rule.signal(x[0], x[1], None, None)
    assert rule.signal(x[1], x[2], memo, None)[0].tolist() == [0, 0]
