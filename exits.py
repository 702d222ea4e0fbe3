"""
Exit rules: when may a token stop looping?

    python exits.py                     every rule on a spiral
    python exits.py --turn=20           the same on a spiral that turns less

`algorithm_1` is the paper's Algorithm 1, line by line, for one state, to read and to test
against. `Exit.decide` is the same decision for any rule and many tokens at once: `loop` and waves
ask it. A token alone exits at the same step by both.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.

    k        the loop step, from 1
    x0, x1   the state before and after step k, float32
    delta    x1 - x0, the update (Eq. 1, which counts steps from 0)
    B, T     rows, tokens of a pass
"""
import math
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Real
from typing import Callable

import numpy as np
import torch
from torch.linalg import vector_norm

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


# signals: (x0, x1, memo, read) -> (value, memo) ---------------------------------------------------
#
#     x0, x1    (..., C)
#     memo      what the signal passes on to its next call, a tensor (...) or (..., any); None in a
#               token's first step
#     read      state (..., C) -> logits (..., V), see Exit.reads
#     value     (...), or None while it is undefined, which counts as not small. A yes-or-no signal
#               is 0 where a token may exit and 1 elsewhere, with a tau of 0.5

def norm(x0, x1, memo, read):
    """Eq. 3, the step norm."""
    return vector_norm(x1 - x0, dim=-1), None


def norm_rel(x0, x1, memo, read):
    """The step norm over the norm of the state that the step started from (below Eq. 3)."""
    return vector_norm(x1 - x0, dim=-1) / (vector_norm(x0, dim=-1) + EPS), None


def kl(x0, x1, memo, read):
    """Eq. 4: KL(p^(k) || p^(k-1)) in nats; memo holds log p^(k)."""
    # paper silent on the logits of an early group: here ln_f and the tied head (a logit lens)
    log_p0 = read(x0).float().log_softmax(-1) if memo is None else memo
    log_p1 = read(x1).float().log_softmax(-1)
    divergence = (log_p1.exp() * (log_p1 - log_p0)).sum(-1)
    return divergence.clamp(min=0), log_p1          # rounding must not make it negative


def accel(x0, x1, memo, read):
    """Eq. 5, the acceleration; memo holds the update, in this rule and the next two."""
    delta = x1 - x0
    return None if memo is None else vector_norm(delta - memo, dim=-1), delta


def accel_hat(x0, x1, memo, read):
    """Eq. 6: acceleration over the norms of both updates, in [0, 1] (triangle inequality)."""
    value, delta = accel(x0, x1, memo, read)
    if value is None:
        return None, delta
    norms = vector_norm(delta, dim=-1) + vector_norm(memo, dim=-1)
    return value / (norms + EPS), delta


def accel_rel(x0, x1, memo, read):
    """The acceleration over the norm of the state (the paper: "based on ... activations")."""
    value, delta = accel(x0, x1, memo, read)
    return None if value is None else value / (vector_norm(x0, dim=-1) + EPS), delta


# rules --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Exit:
    """
    A rule: a token exits once its signal has been below tau for `hits` loop steps in a row.

    keep: does the token keep the step that triggered (the default)? Algorithm 1 returns the state
    before it.
    past: wait for the past, see cache.Signals.
    reads: the model's method behind the signal's read(state), see GPT.reader. readout is ln_f and
    the head; through_coda runs the last layers first.
    by_row: all tokens of a row share one signal and exit together, so a pass over a whole sequence
    differs from decoding token by token.

    A rule object remembers nothing of a pass, so it can be used for any number of passes.
    """
    signal: Callable
    tau: float = 1e-2
    hits: int = 1
    keep: bool = True
    past: bool = False
    reads: str = 'readout'
    by_row: bool = False
    name: str = ''

    def decide(self, value, streak):
        """
        The exit decision, Algorithm 1 lines 5 to 12, for any number of tokens at once.

        value: their signals, an array or a number, None while it is undefined. streak: how many
        small values in a row each has had. Returns the new streak, and who exits now.
        """
        streak = 0 if value is None else (streak + 1) * (value < self.tau)
        return streak, streak >= self.hits


# the paper's rules and their normalised forms. To add a rule, write a signal and a line here: all
# scripts read this table
EXITS = {
    'norm': Exit(norm),
    'norm_rel': Exit(norm_rel),
    'kl': Exit(kl),
    'accel': Exit(accel, hits=2, keep=False),
    'accel_hat': Exit(accel_hat, hits=2, keep=False),
    'accel_rel': Exit(accel_rel, hits=2, keep=False),
}


def make_exit(name, tau=None, hits=None, keep=None, past=False):
    """
    The rule called `name`, from EXITS, or MODULE:NAME from the EXITS of another file.

    tau >= 0, hits and keep replace the rule's own where they are given. past: wait for the past.
    ValueError for an unknown name, or a tau or hits that is out of range.
    """
    file, _, short = name.rpartition(':')
    try:
        known = import_module(file).EXITS if file else EXITS
    except Exception as error:          # a user's own module may raise anything
        raise ValueError(f"cannot import the exit rule '{name}' ({type(error).__name__}: {error}): "
                         'write MODULE:NAME, such as zoo.huginn:kl, and in that file EXITS = '
                         '{NAME: Exit(...)}') from None
    if short not in known:
        raise ValueError(f"unknown exit rule '{name}': choose one of {', '.join(known)}")
    rule = known[short]
    tau = rule.tau if tau is None else tau
    if isinstance(tau, bool) or not isinstance(tau, Real) or math.isnan(tau) or tau < 0:
        raise ValueError(f'tau must be a number >= 0, not {tau!r}: the paper sweeps 1e-5 to 1e-2')
    if hits is not None and hits < 1:
        raise ValueError(f'hits must be at least 1, not {hits!r}')
    return replace(
        rule, name=name, past=past,
        tau=float(tau) if tau < 3e38 else math.inf,     # a larger number is infinite in float32
        hits=rule.hits if hits is None else hits,
        keep=rule.keep if keep is None else keep)


# many tokens at once ------------------------------------------------------------------------------
#
# All tokens of a pass loop side by side until each has exited. Two rows of four tokens after a step
# (o: still loops, x: has exited):
#
#     row 0    o x o o      active  [[1, 0, 1, 1],    who still loops
#     row 1    x o x x               [0, 1, 0, 0]]
#                           streak  [[0, 2, 1, 0],    small signals in a row so far; two let a
#                                    [3, 1, 2, 4]]    token exit, if hits is 2

def loop(f, x, k_max, rule, read=None, signals=None):
    """
    Loop from x^(0) (B, T, C) until `rule` has let every token exit, for k_max steps at most.

    f(x, k, active): step k -> the states after it. active (B, T), on the device, None = all: tokens
    that have exited keep their keys and values. read: see Exit.reads. signals: a cache.Signals, if
    the rule waits for the past.

    Returns x_star, and NumPy arrays (B, T) of the loop steps kept and the block maps evaluated.
    """
    # who still loops, on the host, where the decision is made, and on the device
    active, on_device = np.ones(x.shape[:2], dtype=bool), None
    steps_used, evals = np.full((2, *active.shape), k_max)
    streak, memo = 0, None
    for k in range(1, k_max + 1):
        x1 = f(x, k, on_device)
        value, memo = rule.signal(x, x1, memo, read)
        value = on_host(value, rule, k)
        if signals and value is not None:
            value = signals.wait(value, active, k)
        streak, exits = rule.decide(value, streak)
        exits, looped = active & exits, on_device
        if exits.any():
            steps_used[exits], evals[exits] = k - (not rule.keep), k
            active = active & ~exits
            on_device = torch.from_numpy(active).to(x.device, non_blocking=x.is_cuda)
        # who takes the new state: all that looped in this step; without keep, those that go on
        takes = looped if rule.keep else on_device
        x = x1 if takes is None else torch.where(takes[..., None], x1, x)
        if not active.any():
            break
    return x, steps_used, evals


def on_host(value, rule, k):
    """A signal as a number or a NumPy array; this waits for the device. ValueError for a NaN."""
    if value is None:
        return None
    if value.dtype == torch.bool:
        raise ValueError(f"the signal of rule '{rule.name}' is True or False: give a number, which "
                         'is small where a token may exit')
    value = value.item() if value.numel() == 1 else value.numpy(force=True)
    if math.isnan(value.max() if isinstance(value, np.ndarray) else value):
        raise ValueError(f"the state is not finite at loop step {k}: rule '{rule.name}' met a NaN "
                         'in the model or its input')
    return value


# the demonstration --------------------------------------------------------------------------------

n_loop = 16                 # budget of loop steps
shrink = 0.7                # the spiral: each step multiplies the length by this ...
turn = 60.0                 # ... and turns it by this many degrees
TAUS = dict(norm=1, norm_rel=0.1, kl=1e-2, accel=1, accel_hat=0.9, accel_rel=0.1)


def main():
    if not 1 <= n_loop <= 1000:
        raise ValueError(f'n_loop must lie between 1 and 1000 to be shown, not {n_loop}')
    # a spiral in the plane, whose two coordinates stand for logits
    angle = math.radians(turn)
    rotate = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    f, start, columns = lambda x: shrink * rotate @ x, torch.tensor([16.0, 0.0]), []
    # the signals of each rule, step by step until it exits
    for name in EXITS:
        rule, values = make_exit(name, TAUS.get(name)), []

        def signal(x0, x1, memo, read):
            value, memo = rule.signal(x0, x1, memo, read)
            values.append('' if value is None else f'{value.item():.2e}')
            return value, memo
        _, kept, evals = loop(lambda x, k, active: (f(x[0, 0]))[None, None], start[None, None],
                              n_loop, replace(rule, signal=signal), read=lambda x: x)
        columns.append([name, *values, *[''] * (n_loop - len(values)), f'{rule.tau:g}',
                        kept.item(), evals.item()])
    print(f'a spiral: x <- {shrink} x, turned by {turn:g} degrees')
    width = 2 + max(9, *map(len, EXITS))
    for what, *line in zip(('k', *range(1, n_loop + 1), 'tau', 'kept', 'evals'), *columns):
        print(f'{what:>7}' + ''.join(f'{cell:>{width}}' for cell in line))
    _, k = algorithm_1(f, start, TAUS['accel'], n_loop)
    print(f'algorithm_1 keeps {k} steps, like `accel`. A column ends where the rule exits; kept: '
          'steps in the\nresult; evals: block maps. Every step shrinks by the same factor, so '
          'relative signals are constant.')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
