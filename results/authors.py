"""
Exit rules as the published code of the paper's authors has them, beside those of its text.

    python bench.py '--rules=["accel","results.authors:norm_diff"]' --out_dir=RUN
    python sample.py --exit=results.authors:accel_once --tau=0.1

That code (github.com/tomoqt/Latent_ttc, branch hausdorff_experiment, commit e599faa) compares the
values of two successive loop steps, and one small value is enough:

    norm_diff       | ||delta^(k)|| - ||delta^(k-1)|| |     in its words, the step norm
    kl_diff         | KL^(k) - KL^(k-1) |                   KL
    accel_once      ||delta^(k) - delta^(k-1)||             the acceleration

All three keep the state after the step that triggered. It takes the mean over the tokens of one
context; the rules NAME_mean do so, over all tokens that are read together. Its s_k counts from what
the adapter puts out, which a rule does not see, so here delta is the update of a whole loop step.

By the triangle inequality norm_diff is never above accel_once.
"""
from dataclasses import replace

import torch
from torch.linalg import vector_norm

from exits import EXITS, Exit, accel, kl


def norm_diff(x0, x1, memo, read):
    """How much the length of the update has changed, (...); memo: the length of the last one."""
    length = vector_norm(x1 - x0, dim=-1)
    return None if memo is None else (length - memo).abs(), length


def kl_diff(x0, x1, memo, read):
    """How much Eq. 4 has changed, (...); memo: log p^(k) (..., V), and behind it KL^(k)."""
    log_p0 = None if memo is None else memo[..., :-1]
    divergence, log_p1 = kl(x0, x1, log_p0, read)
    value = None if memo is None else (divergence - memo[..., -1]).abs()
    return value, torch.cat((log_p1, divergence[..., None]), dim=-1)


def mean_of(signal):
    """The same signal as a mean over all tokens that are asked, so that they exit together."""
    def mean(x0, x1, memo, read):
        value, memo = signal(x0, x1, memo, read)
        return None if value is None else value.mean().expand_as(value), memo
    return mean


EXITS |= {
    'norm_diff': Exit(norm_diff),
    'kl_diff': Exit(kl_diff),
    'accel_once': Exit(accel),
}
for name in 'norm_diff', 'kl_diff', 'accel_once':
    EXITS[f'{name}_mean'] = replace(EXITS[name], signal=mean_of(EXITS[name].signal))
