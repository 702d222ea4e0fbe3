"""
Exit rules: when may a token stop looping, and when does it have to go on?

    python exits.py                 every rule on a spiral, and a chain of tokens that wake

`algorithm_1` is the paper's Algorithm 1, line by line, for one state, to read and to test against.
`loop` is the same for any rule and many tokens at once; a token alone exits at the same step.

An exit is for good, unless the rule wakes: then a token sleeps while it and all tokens that it
reads are still, and wakes when one of them moves.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.

    k        the loop step, from 1
    x0, x1   the states before and after step k, float32
    delta    x1 - x0, the update (Eq. 1, which counts steps from 0)
    B, T     rows, tokens of a pass
    N        tokens that are awake, of all rows
"""
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

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
#     memo      what the signal passed on in the token's last step, a tensor (..., any) or None; in
#               its first step None. It should tell of that step alone: if the rule wakes, steps
#               that a token sleeps through are not counted
#     read      state (..., C) -> logits (..., V), see Exit.reads
#     value     (...), compared with tau; None while it is undefined, which counts as not small. A
#               yes-or-no signal is 0 where a token may exit and 1 elsewhere, with a tau of 0.5

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
    return divergence.clamp(min=0), log_p1              # rounding must not make it negative


def accel(x0, x1, memo, read):
    """Eq. 5, the acceleration; memo holds the update, in this rule and the next two."""
    delta = x1 - x0
    return None if memo is None else vector_norm(delta - memo, dim=-1), delta


def accel_hat(x0, x1, memo, read):
    """Eq. 6: acceleration over the norms of both updates, in [0, 1] (triangle inequality)."""
    value, delta = accel(x0, x1, memo, read)
    if value is None:
        return None, delta
    return value / (vector_norm(delta, dim=-1) + vector_norm(memo, dim=-1) + EPS), delta


def accel_rel(x0, x1, memo, read):
    """The acceleration over the norm of the state (the paper: "based on ... activations")."""
    value, delta = accel(x0, x1, memo, read)
    return None if value is None else value / (vector_norm(x0, dim=-1) + EPS), delta


def random(x0, x1, memo, read):
    """A coin, to compare the others with: in every step a token exits with probability tau."""
    return torch.rand(x1.shape[:-1], device=x1.device), None


# rules --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Exit:
    """
    A rule: a token is still once its signal has been below tau for `hits` loop steps in a row.

    keep: True, the token keeps the state after the step that triggered the exit; False, the state
    before it, as Algorithm 1 has it.
    wake: a token that is still sleeps until a token that it reads moves, see loop.
    reads: the model's method behind the signal's read(state), see GPT.reader. `readout` is ln_f and
    the head, of each token by itself. Any other method gets whole rows; `through_coda` runs the
    last layers first.

    A rule remembers nothing of a pass, so one object can be used for any number of passes.
    """
    signal: Callable
    tau: float = 1e-2
    hits: int = 1
    keep: bool = True
    wake: bool = False
    reads: str = 'readout'
    name: str = ''

    def streak(self, value, streak):
        """
        The exit decision, Algorithm 1 lines 5 to 13: how many small signals in a row each token has
        had, a NumPy array (N,). value (N,): the newest signals, None = undefined. streak (N,): how
        many before them. ValueError for a NaN.
        """
        if value is None:
            return np.zeros_like(streak)
        value = value.numpy(force=True)         # waits for the device
        if np.count_nonzero(value != value):    # a NaN differs from itself
            raise ValueError(f"the exit rule '{self.name}' met a NaN in the model or its input")
        return (streak + 1) * (value < self.tau)


# the paper's rules and their normalised forms, then a coin. To add a rule, write a signal, and a
# line here: all scripts read this table
EXITS = {
    'norm': Exit(norm),
    'norm_rel': Exit(norm_rel),
    'kl': Exit(kl),
    'accel': Exit(accel, hits=2, keep=False),
    'accel_hat': Exit(accel_hat, hits=2, keep=False),
    'accel_rel': Exit(accel_rel, hits=2, keep=False),
    'random': Exit(random, tau=0.1),
}


def make_exit(name, tau=None, hits=None, wake=False):
    """
    The rule called `name`, from EXITS, or MODULE:NAME from the EXITS of another file. tau and hits
    replace the rule's own. ValueError for an unknown name, and for a tau that is no number >= 0.
    """
    file, _, short = name.rpartition(':')
    try:
        rules = import_module(file).EXITS if file else EXITS
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import the exit rule '{name}' ({error}): write MODULE:NAME, such "
                         'as zoo.huginn:kl') from error
    if short not in rules:
        raise ValueError(f"unknown exit rule '{name}': choose one of {', '.join(rules)}; name a "
                         'file of your own behind the script, or write MODULE:NAME')
    rule = rules[short]
    tau = rule.tau if tau is None else float(tau)
    if not tau >= 0:
        raise ValueError(f'tau must be a number >= 0, not {tau}')
    return replace(rule, name=name, tau=tau, wake=wake, hits=rule.hits if hits is None else hits)


def stored_tau(folders, name, cache):
    """
    The threshold of the rule `name` with this cache, from the first exits.json in the folders that
    has a row for it; None if no file has one. ValueError for a damaged file.
    """
    for folder in folders:
        for row in stored_exits(folder):
            if (row['rule'], row['cache']) == (name, cache):
                return row['tau']
    return None


def stored_exits(folder):
    """
    The rows of folder/exits.json, at most one for each rule and cache; [] if there is no file.
    ValueError if it is damaged. bench.py --calibrate and pretrained/make.py write them:

        rule, cache, tau    the threshold is taken whether tokens wake or not
        cost                nats per token above the full budget; on a task wrong answers
        wake                was it found with tokens that wake?
        how                 and by what evidence?
    """
    path = os.path.join(folder, 'exits.json')
    if not os.path.exists(path):
        return []
    try:
        with open(path, encoding='utf-8') as f:
            rows = json.load(f)['exits']
        for row in rows:
            row['rule'], row['cache'], float(row['tau'])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is damaged ({type(error).__name__}: {error}): delete it, "
                         'or give --tau') from error
    return rows


# many tokens at once ------------------------------------------------------------------------------

def loop(f, x, k_max, rule, read=None, readers=None, diary=None):
    """
    Loop from x^(0) (B, T, C) until no token is awake, for k_max steps at most. Returns the last
    states (B, T, C), and two NumPy arrays (B, T): the number of the last step kept, which counts
    steps asleep, too, and how many steps were computed.

    f(x, k, at): step k of the tokens `at`, from their states (N, C) to those after it. `at` numbers
    the tokens of all rows, b * T + t: a tensor (N,), or slice(None) for all of them.
    read(states, at, x): what the signal reads of the tokens `at`, from their states (N, C). x (B T,
    C): the states that all tokens keep, for a signal that looks at other tokens, too.
    diary: a list, to which each step appends `at` as an array.

    A token *moves* in a step unless the rule has found it still. Who moved loops in the next step.
    If the rule wakes, so do all who read one that moved, readers(moved (B, T)) -> (B, T); the
    others sleep, and keep state, keys, values and streak until a token that they read moves. Two
    rows of four tokens after a step, with a window of 2 (each reads itself and the token before it)
    and hits = 2:

        streak  [[0, 2, 1, 0],      moved  [[1, 0, 1, 1],      awake  [[1, 1, 1, 1],
                 [3, 1, 2, 4]]              [0, 1, 0, 0]]              [0, 1, 1, 0]]

    The streak of a sleeping token stays. Set to 0, a token that wakes would count as moving until
    it has had `hits` small values again; it would wake its readers, and they theirs, without end.
    """
    B, T, _ = x.shape
    x = x.flatten(0, 1)                     # (B T, C)
    memos = None                            # (B T, any)
    awake = np.ones(B * T, dtype=bool)      # who loops in the next step
    streak = np.zeros(B * T, dtype=int)     # small signals in a row
    kept = np.zeros(B * T, dtype=int)
    evals = np.zeros(B * T, dtype=int)

    def read_now(states):
        return read(states, at, x)

    for k in range(1, k_max + 1):
        # step k of those who are awake
        at = on_device(awake, x)
        x0 = rows_of(x, at)                                                     # (N, C)
        x1 = f(x0, k, at)
        memo = None if memos is None else rows_of(memos, at)
        value, memo = rule.signal(x0, x1, memo, read_now)
        if memo is not None:
            memos = with_rows(memos, at, memo)
        evals += awake
        if diary is not None:
            diary.append(np.flatnonzero(awake))

        # who loops in the next step
        streak[awake] = rule.streak(value, streak[awake])
        moved = awake & (streak < rule.hits)
        after = moved
        if readers is not None:
            after = readers(moved.reshape(B, T)).flatten()

        # Algorithm 1 throws the step that triggered away: a token that falls asleep now keeps the
        # state before it, whose keys and values this step has computed. A still one that goes on
        # looping keeps the step
        takes = awake if rule.keep else awake & after
        if isinstance(at, slice) and 0 < np.count_nonzero(after) < B * T:
            # from now on some rows change: a memo, or whoever gave x, may hold these very tensors
            x = x.clone()
            memos = None if memos is None else memos.clone()
        if np.count_nonzero(takes):
            new = rows_of(x1, on_device(takes[awake], x))
            x = with_rows(x, on_device(takes, x), new)
            kept[takes] = k

        # while a token slept its state did not change: its memo is that of a step from x to x
        woken = after & ~awake
        if memos is not None and np.count_nonzero(woken):
            at = on_device(woken, x)
            memos[at] = rule.signal(x[at], x[at], memos[at], read_now)[1]
        awake = after
        if not np.count_nonzero(awake):         # like any(), in a quarter of its time
            break
    return x.view(B, T, -1), kept.reshape(B, T), evals.reshape(B, T)


def on_device(mask, like):
    """The places in a NumPy mask, a tensor on the device of `like`; slice(None) for all."""
    if np.count_nonzero(mask) == len(mask):
        return slice(None)
    return torch.from_numpy(np.flatnonzero(mask)).to(like.device, non_blocking=like.is_cuda)


def rows_of(x, at):
    """The rows of x at these places: x itself for slice(None), else a copy."""
    return x if isinstance(at, slice) else x[at]


def with_rows(x, at, new):
    """x with new rows at these places, which are written into x; `new` itself for slice(None)."""
    if isinstance(at, slice):
        return new
    x[at] = new
    return x


# the demonstration --------------------------------------------------------------------------------

TAUS = dict(norm=1, norm_rel=0.1, kl=1e-2, accel=1, accel_hat=0.9, accel_rel=0.1)


def main():
    show_spiral()
    show_waking()


def show_spiral():
    """Every rule on a spiral in the plane, whose two coordinates stand for logits."""
    turn = torch.tensor([[0.5, -0.75 ** 0.5], [0.75 ** 0.5, 0.5]])      # by 60 degrees
    start = torch.tensor([16.0, 0.0])
    print('a spiral: x <- 0.7 x, turned by 60 degrees. kept: steps in the result\n\n'
          'rule         tau  kept  computed  signals')
    for name, tau in TAUS.items():
        values = []

        def signal(x0, x1, memo, read, name=name):
            value, memo = EXITS[name].signal(x0, x1, memo, read)
            values.append('-' if value is None else f'{value.item():.2g}')
            return value, memo

        rule = replace(make_exit(name, tau), signal=signal)
        _, kept, evals = loop(lambda x, k, at: 0.7 * x @ turn.T, start[None, None], 16, rule,
                              read=lambda states, at, x: states)
        print(f'{name:10s} {tau:5g} {kept.item():5d} {evals.item():9d}  {" ".join(values)}')
    _, k = algorithm_1(lambda x: 0.7 * turn @ x, start, TAUS['accel'], 16)
    print(f'\nalgorithm_1 keeps {k} steps, like accel. Every step shrinks by the same factor, so '
          'relative\nsignals are constant.\n')


def show_waking():
    """A chain of tokens, each of which copies the one before it: who is awake in each step?"""
    T = 12

    def next_one(moved):            # a token is read by itself and by the one after it
        return moved | np.pad(moved, ((0, 0), (1, 0)))[:, :-1]

    whole = torch.zeros(T, 1)

    def copy(x, k, at):
        whole[at] = x
        return torch.cat((torch.ones(1, 1), whole[:-1]))[at]

    print('a chain: a token becomes 1 when the one before it has. o: awake in this step\n')
    found = []
    for wake, readers in ((False, None), (True, next_one)):
        diary = []
        rule = make_exit('norm', 0.5, wake=wake)
        x, _, evals = loop(copy, torch.zeros(1, T, 1), 2 * T, rule, readers=readers, diary=diary)
        found.append(f'{int(x.sum())} of {T} right, {evals.mean():.1f} steps per token')
    for k, awake in enumerate(diary, start=1):
        print(f'{k:4d}  ' + ''.join('o' if t in awake else '.' for t in range(T)))
    print(f'\nasleep until news arrives: {found[1]}. If an exit is for good: {found[0]}.')


if __name__ == '__main__':
    main()
