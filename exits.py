"""
Exit rules: when may a token stop looping?

Not run by itself. `algorithm_1` is the paper's Algorithm 1 line by line, for one state. The model uses `loop_until_exit`,
which applies any rule to many tokens at once, each for itself; with `accel` and an f that treats tokens apart the two agree.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.
Symbols: x0 = x^(k-1), x1 = x^(k) = f(x0), delta = x1 - x0 (Eq. 1), k counts loop steps from 1. States are float32.
"""
from dataclasses import dataclass
from math import inf, isnan
from numbers import Real
from typing import Callable

import numpy as np
import torch
from torch.linalg import vector_norm

EPS = 1e-8


def algorithm_1(f, x0, tau, k_max):
    """Algorithm 1 of the paper for ONE state: x0 of any shape, norms over all of it. Returns (x_star, k)."""
    k, delta_prev, prev_small = 0, None, False          # line 1
    while k < k_max:                                    # line 2
        x1 = f(x0)                                      # line 3: one loop step
        delta_cur = x1 - x0                             # line 4: current update
        if delta_prev is not None:                      # line 5
            a = (delta_cur - delta_prev).norm()         # line 6: acceleration, Eq. 5
            small = bool(a < tau)                       # line 7
            if small and prev_small:                    # line 8
                break                                   # line 9: two-hit exit; x1 is thrown away, k does not count it
            prev_small = small                          # line 11
        delta_prev = delta_cur                          # line 13
        x0 = x1                                         # line 14
        k += 1                                          # line 15
    return x0, k                                        # line 17: x_star


# ---------------------------------------------------------------------------------------------------------------------
# signals: (x0, x1, memo, readout) -> (value, memo). x0, x1: (..., C); value: (...), or None while it is undefined;
# memo is whatever the next step needs of this one, None at first. readout: state -> logits (..., V).

def norm(x0, x1, memo, readout):  # Eq. 3
    return vector_norm(x1 - x0, dim=-1), None


def norm_rel(x0, x1, memo, readout):  # below Eq. 3: over the norm of the state the step started from
    return vector_norm(x1 - x0, dim=-1) / (vector_norm(x0, dim=-1) + EPS), None


def kl(x0, x1, memo, readout):  # Eq. 4: KL(p^(k) || p^(k-1)), nats
    # paper silent: which logits inside an early group: ln_f and the tied head on the current state (a logit lens)
    log_p0 = readout(x0).float().log_softmax(-1) if memo is None else memo
    log_p1 = readout(x1).float().log_softmax(-1)
    return (log_p1.exp() * (log_p1 - log_p0)).sum(-1).clamp(min=0), log_p1     # rounding must not make it negative


def accel(x0, x1, memo, readout):  # Eq. 5
    delta = x1 - x0
    return None if memo is None else vector_norm(delta - memo, dim=-1), delta


def accel_hat(x0, x1, memo, readout):  # Eq. 6; in [0, 1] by the triangle inequality
    delta = x1 - x0
    if memo is None:
        return None, delta
    return vector_norm(delta - memo, dim=-1) / (vector_norm(delta, dim=-1) + vector_norm(memo, dim=-1) + EPS), delta


def accel_rel(x0, x1, memo, readout):  # below Eq. 6: the denominator "based on the norm of activations"
    delta = x1 - x0
    return None if memo is None else vector_norm(delta - memo, dim=-1) / (vector_norm(x0, dim=-1) + EPS), delta


# name: (signal, hits: small values in a row that let a token go, keep: is the step that triggered kept?)
EXITS = dict(norm=(norm, 1, True), norm_rel=(norm_rel, 1, True), kl=(kl, 1, True),
             accel=(accel, 2, False), accel_hat=(accel_hat, 2, False), accel_rel=(accel_rel, 2, False))


@dataclass(frozen=True)
class Exit:
    """A rule: a token goes once its signal has been < tau `hits` steps in a row. Holds no state of a pass."""
    name: str
    tau: float
    signal: Callable
    hits: int
    keep: bool


def make_exit(name, tau, hits=None, keep=None):
    """The rule called `name` (one of EXITS) at threshold tau >= 0; hits and keep override the rule's own. ValueError else."""
    if name not in EXITS:
        raise ValueError(f"unknown exit rule '{name}': choose one of {', '.join(EXITS)}")
    if isinstance(tau, bool) or not isinstance(tau, Real) or isnan(tau) or tau < 0:
        raise ValueError(f'tau must be a number >= 0, not {tau!r}: the paper sweeps 1e-5 to 1e-2')
    if hits is not None and hits < 1:
        raise ValueError(f'hits must be at least 1, not {hits!r}')
    signal, own_hits, own_keep = EXITS[name]
    tau = float(tau) if tau < 3e38 else inf        # beyond float32, in which the signals are
    return Exit(name, tau, signal, own_hits if hits is None else hits, own_keep if keep is None else keep)


def loop_until_exit(step, x, k_max, rule, readout=None, on_leave=None):
    """
    Loop every token until `rule` lets it go, at most k_max steps.

    x: (B, T, C) float32, the states x^(0). step(x, k, rows, active) -> next states (b, T, C) of the rows still looping:
    x (b, T, C); rows (b,) their indices into B, None for all; active (b, T) which of their tokens still loop, None for all: of
    the others the result is not looked at. on_leave(rows, k): these rows are done after k block maps, None for all at once.
    Returns x_star (B, T, C), steps_used (B, T) loop steps kept, evals (B, T) block maps evaluated. ValueError at a NaN.
    """
    B, T, _ = x.shape
    x_star, (steps_used, evals) = torch.empty_like(x), np.zeros((2, B, T), dtype=np.int64)
    left, active, hits = np.arange(B), np.ones((B, T), dtype=bool), np.zeros((B, T), dtype=np.int64)    # of the rows still looping
    rows, mask, memo = None, None, None
    there = lambda array: torch.from_numpy(array).to(x.device, non_blocking=True)
    for k in range(1, k_max + 1):
        x1 = step(x, k, rows, mask)
        value, memo = rule.signal(x, x1, memo, readout)
        go = None
        if value is not None:
            value = value.item() if value.numel() == 1 else value.numpy(force=True)     # the one host sync of a step
            low = value if value.__class__ is float else value.min()                        # with a NaN among them, NaN
            if low < rule.tau:
                hits = (hits + 1) * (value < rule.tau)
                go = active & (hits >= rule.hits)
            elif low >= rule.tau:
                hits.fill(0)
            else:
                raise ValueError(f"the state is not finite at loop step {k}: rule '{rule.name}' met a NaN in the model or its input")
        if k < k_max and (go is None or not go.any()):      # the common step
            x = x1 if mask is None else torch.where(mask[..., None], x1, x)
            continue
        go = np.zeros_like(active) if go is None else go
        moves = active if rule.keep else active & ~go       # Algorithm 1 breaks before x_0 <- x_1 and k <- k + 1
        x = x1 if moves.all() else torch.where(there(moves)[..., None], x1, x) if moves.any() else x
        end = active if k == k_max else go
        row, token = end.nonzero()
        steps_used[left[row], token], evals[left[row], token] = k - 1 + moves[row, token], k
        active = active & ~end
        on = active.any(axis=1)
        if not on.all():
            done, gone = there((~on).nonzero()[0]), None if len(left) == B and not on.any() else there(left[~on])
            if gone is None:
                x_star = x
            else:
                x_star[gone] = x[done]
            if on_leave is not None:
                on_leave(gone, k)
            if not on.any():
                break
            stay = there(on.nonzero()[0])
            left, active, hits, x, memo = left[on], active[on], hits[on], x[stay], None if memo is None else memo[stay]
            rows = there(left)
        mask = None if active.all() else there(active)
    return x_star, there(steps_used), there(evals)
