"""
Exit rules: when may a token stop looping?

Not run by itself. `algorithm_1` is the paper's Algorithm 1 line by line, for one state. The model uses `loop_until_exit`,
which applies any rule to many tokens at once, each for itself; with `accel` and an f that treats tokens apart the two agree.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.
Symbols: x0 = x^(k-1), x1 = x^(k) = f(x0), delta = x1 - x0 (Eq. 1), k counts loop steps from 1. States are float32.
"""
from dataclasses import dataclass
from math import isnan
from typing import Callable

import torch

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
    return (x1 - x0).norm(dim=-1), None


def norm_rel(x0, x1, memo, readout):  # below Eq. 3: over the norm of the state the step started from
    return (x1 - x0).norm(dim=-1) / (x0.norm(dim=-1) + EPS), None


def kl(x0, x1, memo, readout):  # Eq. 4: KL(p^(k) || p^(k-1)), nats
    # paper silent: which logits inside an early group: ln_f and the tied head on the current state (a logit lens)
    log_p0 = readout(x0).float().log_softmax(-1) if memo is None else memo
    log_p1 = readout(x1).float().log_softmax(-1)
    return (log_p1.exp() * (log_p1 - log_p0)).sum(-1).clamp(min=0), log_p1     # rounding must not make it negative


def accel(x0, x1, memo, readout):  # Eq. 5
    delta = x1 - x0
    return None if memo is None else (delta - memo).norm(dim=-1), delta


def accel_hat(x0, x1, memo, readout):  # Eq. 6; in [0, 1] by the triangle inequality
    delta = x1 - x0
    if memo is None:
        return None, delta
    return (delta - memo).norm(dim=-1) / (delta.norm(dim=-1) + memo.norm(dim=-1) + EPS), delta


def accel_rel(x0, x1, memo, readout):  # below Eq. 6: the denominator "based on the norm of activations"
    delta = x1 - x0
    return None if memo is None else (delta - memo).norm(dim=-1) / (x0.norm(dim=-1) + EPS), delta


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
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or isnan(tau) or tau < 0:
        raise ValueError(f'tau must be a number >= 0, not {tau!r}: the paper sweeps 1e-5 to 1e-2')
    if hits is not None and hits < 1:
        raise ValueError(f'hits must be at least 1, not {hits!r}')
    signal, own_hits, own_keep = EXITS[name]
    return Exit(name, float(tau), signal, own_hits if hits is None else hits, own_keep if keep is None else keep)


def loop_until_exit(step, x, k_max, rule, readout=None, on_leave=None):
    """
    Loop every token until `rule` lets it go, at most k_max steps.

    x: (B, T, C) float32, the states x^(0). step(x, k, rows, active) -> next states (b, T, C) of the rows still looping:
    x (b, T, C), rows (b,) their indices into B or None for all of them, active (b, T) which of their tokens still loop; of
    the others the result is not looked at. on_leave(rows, k): these rows are done, k block maps were evaluated on them.
    Returns x_star (B, T, C), steps_used (B, T) loop steps kept, evals (B, T) block maps evaluated, both int64.
    """
    B, T, _ = x.shape
    x_star = torch.empty_like(x)
    steps_used, evals = torch.zeros(2, B, T, dtype=torch.long, device=x.device)
    left, rows, memo = list(range(B)), None, None           # the rows still looping; every tensor below holds only those
    active, steps = torch.ones_like(steps_used, dtype=torch.bool), steps_used.clone()
    hits, maps = steps, steps
    for k in range(1, k_max + 1):
        x1 = step(x, k, rows, active if T > 1 else None)    # a row of one token still loops, or it would have left
        value, memo = rule.signal(x, x1, memo, readout)
        go = torch.zeros_like(active)
        if value is not None:
            hits = (hits + 1) * (value < rule.tau)
            go = active & (hits >= rule.hits)
        moves = active if rule.keep else active & ~go       # Algorithm 1 breaks before x_0 <- x_1 and k <- k + 1
        x, steps, maps = torch.where(moves[..., None], x1, x), steps + moves, maps + active
        active = active & ~go
        broken = torch.zeros_like(active) if value is None else value.isnan()
        row = (active.any(dim=1) + 2 * broken.any(dim=1)).tolist()                      # the one host sync of a step
        if max(row) > 1:
            raise ValueError(f"the state is not finite at loop step {k}: rule '{rule.name}' met a NaN in the model or its input")
        loops_on = [on and k < k_max for on in row]
        if all(loops_on):
            continue
        done = [i for i, on in enumerate(loops_on) if not on]
        gone = torch.tensor([left[i] for i in done], device=x.device)
        x_star[gone], steps_used[gone], evals[gone] = x[done], steps[done], maps[done]
        if on_leave is not None:
            on_leave(gone, k)
        stay = [i for i, on in enumerate(loops_on) if on]
        if not stay:
            break
        left = [left[i] for i in stay]
        rows, x, active, hits, steps, maps = torch.tensor(left, device=x.device), x[stay], active[stay], hits[stay], steps[stay], maps[stay]
        memo = None if memo is None else memo[stay]
    return x_star, steps_used, evals
