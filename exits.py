"""
Exit rules: when may a token stop looping?

Not run by itself. `algorithm_1` is the paper's Algorithm 1 line by line, for one state. The model
uses `loop_until_exit`: any rule on many tokens at once, each for itself or waiting for those before
it. With `accel`, for itself, and a block map that treats tokens apart, the two agree.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.

    k        the loop step, from 1
    x0, x1   the state before and after step k; float32
    delta    x1 - x0, the update (Eq. 1)
    B, T     rows and tokens of a pass
    b        rows of which some token still loops
"""
from dataclasses import dataclass
from functools import partial
from math import inf, isnan
from numbers import Real
from typing import Callable

import numpy as np
import torch
from torch.linalg import vector_norm

from common.configurator import imported

EPS = 1e-8


def algorithm_1(f, x0, tau, k_max):
    """Algorithm 1 for ONE state: x0 of any shape, norms over all of it. Returns (x_star, k)."""
    k, delta_prev, prev_small = 0, None, False          # line 1
    while k < k_max:                                    # line 2
        x1 = f(x0)                                      # line 3: one loop step
        delta_cur = x1 - x0                             # line 4: current update
        if delta_prev is not None:                      # line 5
            a = (delta_cur - delta_prev).norm()         # line 6: acceleration, Eq. 5
            small = bool(a < tau)                       # line 7
            if small and prev_small:                    # line 8
                break                                   # line 9: two hits; x1 is thrown away
            prev_small = small                          # line 11
        delta_prev = delta_cur                          # line 13
        x0 = x1                                         # line 14
        k += 1                                          # line 15
    return x0, k                                        # line 17: x_star


# signals: (x0, x1, memo, readout) -> (value, memo) -----------------------------------------------
#
#     x0, x1    (..., C)
#     memo      whatever the next step needs of this one; None at the first step
#     readout   state (..., C) -> logits (..., V)
#     value     (...), or None while it is undefined

def norm(x0, x1, memo, readout):
    """Eq. 3, the step norm."""
    return vector_norm(x1 - x0, dim=-1), None


def norm_rel(x0, x1, memo, readout):
    """The step norm over the norm of the state that the step started from (below Eq. 3)."""
    return vector_norm(x1 - x0, dim=-1) / (vector_norm(x0, dim=-1) + EPS), None


def kl(x0, x1, memo, readout):
    """Eq. 4: KL(p^(k) || p^(k-1)) in nats; memo holds log p^(k)."""
    # paper silent: which logits inside an early group: ln_f and the tied head (a logit lens)
    log_p0 = readout(x0).float().log_softmax(-1) if memo is None else memo
    log_p1 = readout(x1).float().log_softmax(-1)
    divergence = (log_p1.exp() * (log_p1 - log_p0)).sum(-1)
    return divergence.clamp(min=0), log_p1          # rounding must not make it negative


def accel(x0, x1, memo, readout):
    """Eq. 5, the acceleration; memo holds the update, in this rule and the next two."""
    delta = x1 - x0
    return None if memo is None else vector_norm(delta - memo, dim=-1), delta


def accel_hat(x0, x1, memo, readout):
    """Eq. 6: over the norms of both updates, and so in [0, 1] by the triangle inequality."""
    delta = x1 - x0
    if memo is None:
        return None, delta
    norms = vector_norm(delta, dim=-1) + vector_norm(memo, dim=-1)
    return vector_norm(delta - memo, dim=-1) / (norms + EPS), delta


def accel_rel(x0, x1, memo, readout):
    """The acceleration over the norm of the state: a denominator "based on ... activations"."""
    delta = x1 - x0
    if memo is None:
        return None, delta
    return vector_norm(delta - memo, dim=-1) / (vector_norm(x0, dim=-1) + EPS), delta


def gate(x0, x1, memo, readout):
    """Ouro: the share of the exit probability that is left after k steps, prod (1 - lambda)."""
    goes_on = torch.sigmoid(-readout(x1).float()).squeeze(-1)       # 1 - lambda, of the gate
    left = goes_on if memo is None else memo * goes_on
    return left, left


# name: (signal, hits: small values in a row that let a token go, keep: the step that triggered?,
#        and where they differ from 'lens' and 1e-2: what it reads, its usual tau)
EXITS = {
    'norm': (norm, 1, True),
    'norm_rel': (norm_rel, 1, True),
    'kl': (kl, 1, True),
    'accel': (accel, 2, False),
    'accel_hat': (accel_hat, 2, False),
    'accel_rel': (accel_rel, 2, False),
}
# for models that have what it reads
LEARNED = {'gate': (gate, 1, True, 'gate', 0.5)}


@dataclass(frozen=True)
class Exit:
    """
    A rule: a token goes once its signal has been below tau for `hits` steps in a row.

    keep: whether it takes the state of the step that triggered, or the one before. past: does it
    wait_for_past? reads: what its `readout` is, the logits by ln_f and head ('lens'), by way of the
    coda's layers ('coda') or the model's 'gate'; with 'coda', or 'row', where a row leaves as one,
    a pass over a whole row is not what decoding gives. A rule remembers nothing of a pass.
    """
    name: str
    tau: float
    signal: Callable
    hits: int
    keep: bool
    past: bool = False
    reads: str = 'lens'


def make_exit(name, tau=None, hits=None, keep=None, past=False):
    """
    The rule called `name` (of EXITS, or MODULE:NAME, of the EXITS in another file) at threshold
    tau >= 0, None = the rule's usual one.

    hits and keep replace the rule's own. past: wait for the past, see wait_for_past. ValueError for
    an unknown name, or a tau or hits that is out of range.
    """
    file, colon, short = name.rpartition(':')
    known = imported(f'{file}:EXITS', 'rules', 'zoo.huginn:kl') if colon else EXITS | LEARNED
    if not isinstance(known, dict) or short not in known:
        raise ValueError(f"unknown exit rule '{name}': choose one of {', '.join(known)}")
    signal, own_hits, own_keep, *more = known[short]
    reads, own_tau = more or ('lens', 1e-2)
    tau = own_tau if tau is None else tau
    if isinstance(tau, bool) or not isinstance(tau, Real) or isnan(tau) or tau < 0:
        raise ValueError(f'tau must be a number >= 0, not {tau!r}: the paper sweeps 1e-5 to 1e-2')
    if hits is not None and hits < 1:
        raise ValueError(f'hits must be at least 1, not {hits!r}')
    # the signals are float32, in which a larger tau is infinite
    tau = float(tau) if tau < 3e38 else inf
    return Exit(name, tau, signal, own_hits if hits is None else hits,
                own_keep if keep is None else keep, past, reads)


# many tokens at once -----------------------------------------------------------------------------

NO_HITS = np.zeros((), dtype=np.int64)


def wait_for_past(value, active, before=None):
    """
    Each signal (b, T) -> the largest among it and those of earlier tokens that still loop: one that
    stands still may be waiting for them. before (b, 1): of earlier passes, see cache.Signals.
    """
    if active.shape[1] > 1:
        value = np.maximum.accumulate(np.where(active, value, -inf), axis=1)
    return value if before is None else np.maximum(value, before)


def count_hits(value, hits, rule, k):
    """
    How many small values in a row each token has had: (b, T), or NO_HITS where that is 0 for all.

    value: the signal at step k, (b, T) or a number; hits: what this returned before.
    """
    lowest = value if isinstance(value, float) else value.min()     # NaN if there is one
    if lowest >= rule.tau:
        return NO_HITS
    if isnan(lowest):
        raise ValueError(f"the state is not finite at loop step {k}: rule '{rule.name}' met a NaN "
                         'in the model or its input')
    return (hits + 1) * np.less(value, rule.tau)


def loop_until_exit(step, x, k_max, rule, readout=None, on_leave=lambda rows, k: None,
                    signals=None):
    """
    Loop every token until `rule` lets it go, at most k_max steps.

    x (B, T, C) float32: the states x^(0). step(x, k, rows, active) -> the next states (b, T, C) of
    the rows that still loop: x (b, T, C) are their states, rows (b,) their numbers, None for all;
    active (b, T) their tokens that still loop, None for all. What step returns for a token that has
    stopped is ignored. on_leave(rows, k): these rows (None for all) are done after k block maps.
    signals: those of earlier passes, for a rule that waits for the past.

    Returns x_star (B, T, C), steps_used (B, T), the loop steps kept, and evals (B, T), the block
    maps evaluated. ValueError where the signal is no number.
    """
    B, T, _ = x.shape
    x_star = torch.empty_like(x)
    steps_used, evals = np.zeros((2, B, T), dtype=np.int64)
    # of the rows that still loop: their numbers, their looping tokens, and what the rule remembers
    looping, active, hits, memo = np.arange(B), np.ones((B, T), dtype=bool), NO_HITS, None
    rows = mask = None          # looping and active on the device; None while that is all of them
    for k in range(1, k_max + 1):
        # one block map, and what the rule says of it
        x1 = step(x, k, rows, mask)
        if mask is not None:
            x1 = torch.where(mask[..., None], x1, x)
        read = partial(readout, rows=rows) if rule.reads == 'coda' else readout
        value, memo = rule.signal(x, x1, memo, read)
        if value is not None:
            # the one time in a step that the host waits for the device; a number needs no array
            value = value.item() if value.numel() == 1 else value.numpy(force=True)
            if rule.past:
                value = (signals.wait(value, active, k, looping) if signals
                         else wait_for_past(value, active))
            hits = count_hits(value, hits, rule, k)

        # the common step: no token has hits enough, and all go on
        enough = active if hits is NO_HITS else active & (hits >= rule.hits)
        if k < k_max and (hits is NO_HITS or not enough.any()):
            x = x1
            continue

        # these end here. Does a token take this step? Algorithm 1 breaks before x_0 <- x_1
        ends = active if k == k_max else enough
        takes = active if rule.keep or hits is NO_HITS else active & ~enough
        if takes.all():
            x = x1
        elif takes.any():
            x = torch.where(on_device(takes, x)[..., None], x1, x)
        row, token = ends.nonzero()
        steps_used[looping[row], token] = k - 1 + takes[row, token]
        evals[looping[row], token] = k
        active = active & ~ends

        # a row leaves the batch with the last of its tokens
        stays = active.any(axis=1)
        if not stays.any() and len(looping) == B:       # all rows together
            x_star = x
            on_leave(None, k)
            break
        if not stays.all():
            gone = on_device(looping[~stays], x)
            x_star[gone] = x[on_device(np.flatnonzero(~stays), x)]
            on_leave(gone, k)
            if not stays.any():
                break
            staying = on_device(np.flatnonzero(stays), x)
            looping, active, hits = looping[stays], active[stays], hits[stays]
            x, memo = x[staying], None if memo is None else memo[staying]
            rows = on_device(looping, x)
        mask = None if active.all() else on_device(active, x)
    return x_star, on_device(steps_used, x), on_device(evals, x)


def on_device(array, x):
    """A numpy array where x is."""
    return torch.from_numpy(array).to(x.device, non_blocking=True)
