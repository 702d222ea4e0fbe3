"""
Exit rules as the published code of the paper's authors has them, beside those of its text.

    python bench.py '--rules=["accel","results.authors:norm_diff"]' --out_dir=RUN
    python sample.py --exit=results.authors:accel_once --tau=0.1

That code (github.com/tomoqt/Latent_ttc, branch hausdorff_experiment, commit e599faa) compares the
values of two successive loop steps, and one small value is enough:

    norm_diff       | ||delta^(k)|| - ||delta^(k-1)|| |     in its words, the step norm
    kl_diff         | KL^(k) - KL^(k-1) |                   KL
    accel_once      ||delta^(k) - delta^(k-1)||             the acceleration

All three keep the state after the step that triggered. The code takes one value for all tokens of a
context, which exit together: NAME_mean, but of KL it takes the sum. Its delta and KL count from
what the adapter puts out, which a rule does not see; here they count from the state.
"""
from functools import partial

import torch
from torch.linalg import vector_norm

from exits import EXITS, Exit, accel, kl


def pooled(values, of_all):
    """The values (...) as they are, or their mean for each token."""
    return values.mean().repeat(values.shape) if of_all else values


def norm_diff(x0, x1, memo, logits_of, of_all=False):
    """How much the length of the update has changed, (...); memo: the length of the last one."""
    length = pooled(vector_norm(x1 - x0, dim=-1), of_all)
    memo = torch.full_like(length, torch.nan) if memo is None else memo
    return (length - memo).abs(), length


def kl_diff(x0, x1, memo, logits_of, of_all=False):
    """How much Eq. 4 has changed, (...); memo: log p^(k) (..., V), and behind it KL^(k)."""
    divergence, log_p1 = kl(x0, x1, None if memo is None else memo[..., :-1], logits_of)
    divergence = pooled(divergence, of_all)
    before = torch.full_like(divergence, torch.nan) if memo is None else memo[..., -1]
    return (divergence - before).abs(), torch.cat((log_p1, divergence[..., None]), dim=-1)


def accel_mean(x0, x1, memo, logits_of):
    """The mean of Eq. 5, (...); memo as there."""
    value, memo = accel(x0, x1, memo, logits_of)
    return pooled(value, True), memo


EXITS |= {
    'norm_diff': Exit(norm_diff),
    'kl_diff': Exit(kl_diff),
    'accel_once': Exit(accel),
    'norm_diff_mean': Exit(partial(norm_diff, of_all=True)),
    'kl_diff_mean': Exit(partial(kl_diff, of_all=True)),
    'accel_once_mean': Exit(accel_mean),
}
