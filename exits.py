"""
Exit rules: when may a token stop looping?

    python exits.py                     every rule on a spiral and on one token of a model
    python exits.py --turn=20           the same on a spiral that turns less

`algorithm_1` is the paper's Algorithm 1, line by line, for one state, to read and to test
against. The model calls `loop_until_exit`, which runs any rule on many tokens at once. Where the
block map of a token does not depend on other tokens, both let it exit at the same step.
`Exit.decide` alone decides which tokens exit.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.

    k        the loop step, from 1
    x0, x1   the state before and after step k, float32
    delta    x1 - x0, the update (Eq. 1)
    B, T     rows and tokens of a pass
    b        rows that still loop
"""
import math
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Callable

import numpy as np
import torch
from torch.linalg import vector_norm

from common.configurator import configure, imported, run

# -------------------------------------------------------------------------------------------------
n_loop = 16                 # budget of loop steps
shrink = 0.7                # the spiral: each step multiplies the length by this ...
turn = 60.0                 # ... and turns it by this many degrees
# -------------------------------------------------------------------------------------------------

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
#     memo      what this step leaves for the next, a tensor (..., any); None at the first step
#     read      state (..., C) -> logits (..., V), see Exit.reads
#     value     (...), or None while it is undefined

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
    delta = x1 - x0
    if memo is None:
        return None, delta
    norms = vector_norm(delta, dim=-1) + vector_norm(memo, dim=-1)
    return vector_norm(delta - memo, dim=-1) / (norms + EPS), delta


def accel_rel(x0, x1, memo, read):
    """The acceleration over the norm of the state (the paper: "based on ... activations")."""
    delta = x1 - x0
    if memo is None:
        return None, delta
    return vector_norm(delta - memo, dim=-1) / (vector_norm(x0, dim=-1) + EPS), delta


# rules --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Exit:
    """
    A rule: a token exits once its signal has been below tau for `hits` loop steps in a row.

    keep: does the token keep the step that triggered? Algorithm 1 returns the state before it.
    past: wait for the past, see wait_for_past.
    reads: the model's method (state, rows, span, cache) that the signal calls as `read`. readout is
    ln_f and the head; through_coda runs the last layers first.
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

    def decide(self, value, streak, last):
        """
        The exit decision, Algorithm 1 lines 5 to 14, for any number of tokens at once.

        value: their signals, an array or a number, None while it is undefined. streak: how many
        small values in a row each has had. last: is this the last step of the budget? Returns
        (streak, exits, takes): the new streak, who exits now, and who takes the new state x1.
        """
        if value is None:
            return 0, last, True
        streak = (streak + 1) * (value < self.tau)
        triggered = streak >= self.hits
        # x ^ True is `not x`, for a bool as well as for an array of them
        return streak, triggered | last, self.keep | (triggered ^ True)


# the paper's rules and their normalised forms; to add one, write a signal and a line here
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
    file, colon, short = name.rpartition(':')
    known = imported(f'{file}:EXITS', 'rules', 'zoo.huginn:kl') if colon else EXITS
    if not isinstance(known, dict) or short not in known:
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

def wait_for_past(value, active, before=None):
    """
    Each token's signal (b, T) -> the largest among its own and those of earlier tokens of its row
    that still loop (active): a token that seems converged may not have their information yet.

    before (b, 1): the largest signal of tokens of earlier passes, see cache.Signals.
    """
    if active.shape[1] > 1:
        value = np.maximum.accumulate(np.where(active, value, -np.inf), axis=1)
    return value if before is None else np.maximum(value, before)


def loop_until_exit(step, x, k_max, rule, read=None, on_exit=lambda rows, k: None, signals=None):
    """
    Loop each token until `rule` lets it exit, at most k_max steps.

    x (B, T, C) float32: the states x^(0). step(x, k, rows, active) computes step k of the b rows
    that still loop, from their states x (b, T, C) to the next ones. rows (b,): their numbers;
    active (b, T): the tokens that still loop; None = all. read(x, rows): see Exit. on_exit(rows, k)
    is called when all tokens of these rows (None = all) have exited, the last one at step k.
    signals: those of earlier passes (cache.Signals), for a rule that waits for the past.

    Returns x_star (B, T, C); steps_used (B, T), the loop steps kept; evals (B, T), the block maps
    evaluated. ValueError if a signal is NaN.
    """
    B, T, _ = x.shape
    x_star = torch.empty_like(x)
    steps_used, evals = np.zeros((2, B, T), dtype=np.int64)
    rows, active, streak, memo = np.arange(B), np.ones((B, T), dtype=bool), 0, None
    on_rows = on_active = None      # rows and active on the device; None = all
    for k in range(1, k_max + 1):
        # one block map; a token that has exited keeps its state
        x1 = step(x, k, on_rows, on_active)
        if on_active is not None:
            x1 = torch.where(on_active[..., None], x1, x)

        # which tokens exit, and which take the new state?
        value, memo = rule.signal(x, x1, memo, read and partial(read, rows=on_rows))
        value = on_host(value, rule, k)
        if rule.past and value is not None:
            value = (signals.wait(value, active, k, rows) if signals
                     else wait_for_past(value, active))
        streak, exits, takes = rule.decide(value, streak, last=k == k_max)
        if exits is False or not (active & exits).any():        # the common step: nobody exits
            x = x1
            continue
        exits = active & exits
        takes = np.broadcast_to(takes, exits.shape)
        x = x1 if takes.all() else torch.where(on_device(takes, x)[..., None], x1, x)
        row, token = exits.nonzero()
        steps_used[rows[row], token] = k - 1 + takes[exits]
        evals[rows[row], token] = k
        active = active & ~exits

        # rows whose tokens have all exited leave the batch
        stay = active.any(axis=1)
        if not stay.all():
            leave_batch(x_star, x, rows, stay, partial(on_exit, k=k))
            if not stay.any():
                break
            streak = np.broadcast_to(streak, exits.shape)[stay]
            rows, active = rows[stay], active[stay]
            staying = on_device(np.flatnonzero(stay), x)
            x, memo = x[staying], None if memo is None else memo[staying]
            on_rows = on_device(rows, x)
        on_active = None if active.all() else on_device(active, x)
    return x_star, on_device(steps_used, x), on_device(evals, x)


def leave_batch(x_star, x, rows, stay, on_exit):
    """Rows leave the batch: copy their states to x_star, and call on_exit with their numbers."""
    if len(rows) == len(x_star) and not stay.any():     # all rows together, without an index
        x_star.copy_(x)
        on_exit(None)
    else:
        gone = on_device(rows[~stay], x)
        x_star[gone] = x[on_device(np.flatnonzero(~stay), x)]
        on_exit(gone)


def on_host(value, rule, k):
    """A signal as a number or a NumPy array; this waits for the device. ValueError for a NaN."""
    if value is None:
        return None
    value = value.item() if value.numel() == 1 else value.numpy(force=True)
    if math.isnan(value.max() if isinstance(value, np.ndarray) else value):
        raise ValueError(f"the state is not finite at loop step {k}: rule '{rule.name}' met a NaN "
                         'in the model or its input')
    return value


def on_device(array, x):
    """A NumPy array as a tensor on the device of x."""
    return torch.from_numpy(np.array(array)).to(x.device, non_blocking=True)     # a writable copy


# the demonstration --------------------------------------------------------------------------------

TAUS = dict(norm=1, norm_rel=0.1, kl=1e-2, accel=1, accel_hat=0.9, accel_rel=0.1)


def show(title, states, read):
    """Print the signals of one token's states (K+1, C), step by step until each rule exits."""
    columns = []
    for name in EXITS:
        rule, values = make_exit(name, TAUS.get(name)), []

        def recorded(*args):
            value, memo = rule.signal(*args)
            values.append('' if value is None else f'{value.item():.2e}')
            return value, memo
        _, kept, evals = loop_until_exit(
            lambda x, k, *_: states[k].view(1, 1, -1), states[0].view(1, 1, -1), len(states) - 1,
            replace(rule, signal=recorded), lambda x, rows: read(x))
        values += [''] * (len(states) - 1 - len(values))
        columns.append([name, *values, f'{rule.tau:g}', kept.item(), evals.item()])
    print(f'\n{title}')
    for what, *line in zip(('k', *range(1, len(states)), 'tau', 'kept', 'evals'), *columns):
        print(f'{what:>7}' + ''.join(f'{cell:>11}' for cell in line))


@torch.no_grad()
def main():
    if not 1 <= n_loop <= 1000:
        raise ValueError(f'n_loop must lie between 1 and 1000 to be shown, not {n_loop}')
    # a spiral in the plane, whose two coordinates stand for logits
    angle = math.radians(turn)
    rotate = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    spiral = [torch.tensor([16.0, 0.0])]
    for _ in range(n_loop):
        spiral.append(shrink * rotate @ spiral[-1])
    show(f'a spiral: x <- {shrink} x, turned by {turn:g} degrees', torch.stack(spiral), lambda x: x)
    _, k = algorithm_1(lambda x: shrink * rotate @ x, spiral[0], TAUS['accel'], n_loop)
    print(f'algorithm_1 keeps {k} steps, like `accel`')

    # the last token of a prompt, in the first group of a trained model
    from common.checkpoint import open_run
    model, *_ = open_run('pretrained/text')
    prompt, trace = 'Returns a new tensor', []
    model(torch.tensor([[*prompt.encode()]]), n_loop=n_loop, trace=trace)
    show(f'the last token of {prompt!r}, first group of pretrained/text',
         trace[0]['states'][:, 0, -1], model.readout)
    print('\nA column ends where the rule exits. kept: loop steps in the result; evals: block maps '
          'computed.\nA spiral shrinks by the same factor in each step, so its relative signals '
          'are constant.')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
