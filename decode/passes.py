"""
One pass of the model: a prompt, one token, or given tokens; and the plainest decoder.

Geiping 5, App. D.6: ring, warm start.

    B, T, V    rows; tokens of a pass; vocab_size
    plan       a loops.Plan: the loop budget, the rule, the noise and the cache of all passes
"""
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cache import Span, make_cache
from exits import make_exit
from loops import of_groups

# without a rule, a prompt has converged once no state moves by 1% of its norm or more. A token that
# is still may only be waiting for news from earlier ones, so it wakes when one of them moves
CONVERGED = make_exit('norm_rel', 1e-2, wake=True)


def plan_of_prompt(plan, T, converge):
    """
    The plan by which a prompt of T tokens is read: `plan`, unless the prompt has to converge first,
    so that the tokens after it read its last states. sample.py prints it.
    """
    if not converge or T == 1:
        return plan
    rule = replace(plan.rule, wake=True) if plan.rule else CONVERGED
    # information needs up to T - 1 extra loop steps to reach the last token
    return replace(plan, counts=[n + T - 1 for n in plan.counts], rule=rule)


def prefill(model, idx, plan, converge=False):
    """
    Run all tokens idx (B, T) at once; each exits on its own. plan.cache must be empty or None.

    converge: see plan_of_prompt. Returns the logits (B, V) after the last token, its steps_used
    (B, groups), and each group's output for it (B, 1, C).
    """
    T = idx.shape[1]
    plan = plan_of_prompt(plan, T, converge)
    return last_of(model, idx, replace(plan, span=Span(0, T, idx.device)))


def one_token(model, token, position, plan, warm=None):
    """
    One token (B, 1) at this position; returns what prefill does. warm: a first state for each
    group, in place of noise.
    """
    return last_of(model, token, replace(plan, span=Span(position, 1, token.device), warm=warm))


def last_of(model, idx, plan):
    """A pass over idx (B, T) -> logits, steps_used and each group's output, of the last token."""
    x, results = model.hidden(idx, plan)
    outputs = [group.output(result['x'][:, -1:]) for group, result in zip(model.groups, results)]
    return model.lm_head(x[:, -1]), of_groups(results, 'steps_used', idx)[:, -1], outputs


def reads_whole(rule, policy):
    """
    Are given tokens read in one pass? With `exact`, or without a cache (None), that is what
    decoding token by token gives, unless a rule decides for all tokens of a pass at once.
    """
    return policy in ('exact', None) and not (rule and rule.by_row)


@torch.no_grad()
def teacher_forced(model, idx, plan, policy='exact', ring=8):
    """
    Given tokens idx (B, T), decoded with a cache policy -> logits (B, T, V), and the loop steps
    kept and block maps evaluated of each group, both (B, T, groups).

    All tokens are read in one pass if reads_whole says so. Otherwise each token runs alone and
    reads what earlier ones have kept.
    """
    whole = reads_whole(plan.rule, policy)
    n = idx.shape[1] if whole else 1                # tokens of a pass
    cache = None
    if not whole:
        wakes = plan.rule is not None and plan.rule.wake
        cache = make_cache(model, plan.counts, policy or 'exact', ring, idx.shape[1], wakes)
    parts = []
    for i, tokens in enumerate(idx.split(n, dim=1)):
        span = Span(i * n, n, idx.device)
        x, results = model.hidden(tokens, replace(plan, span=span, cache=cache))
        parts.append((model.lm_head(x), of_groups(results, 'steps_used', tokens),
                      of_groups(results, 'evals', tokens)))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


# decoders: OneByOne, drafts.Drafts, wave.Wave ----------------------------------------------------
#
#     policy                    the only cache policy that it works with, None = any
#     name                      the knob that chooses it, for errors
#     start(model, plan)        called first. ValueError if they do not fit
#     begin(token, outputs)     a context window has been read: its first new token (B, 1), and what
#                               the groups put out for the token before that, (B, 1, C) each
#     next_tokens(model, plan, rows, most)
#                               -> a list of at most `most` NewTokens

class NewToken(NamedTuple):
    token: torch.Tensor         # (B, 1)
    steps_used: torch.Tensor    # (B, groups)
    numbers: list               # the token of each row on the host, B ints


@dataclass
class OneByOne:
    """
    A decoder with one token a pass. warm_start: its loops start from what the groups put out for
    the token before it, not from noise (Geiping App. D.6).
    """
    warm_start: bool = False
    policy, name = None, 'one token a pass'

    def start(self, model, plan):
        if self.warm_start and not all(group.adapter.reads_e for group in model.groups):
            raise ValueError('warm_start begins with the states of another token, so it needs a '
                             'model whose loop steps read their input')

    def begin(self, token, outputs):
        self.outputs = outputs

    def next_tokens(self, model, plan, rows, most):
        warm = self.outputs if self.warm_start else None
        logits, steps_used, self.outputs = one_token(model, rows.last, rows.position, plan, warm)
        token = rows.draw(logits[:, None])
        return [NewToken(token, steps_used, rows.numbers(token))]
