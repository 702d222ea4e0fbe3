"""
Exit rules: when may a token stop looping, and when does it have to go on?

    python exits.py                     every rule on a spiral, and a chain of tokens that wake
    python exits.py --turn=20           the same on a spiral that turns less

`algorithm_1` is the paper's Algorithm 1, line by line, for one state, to read and to test
against. `Exit.decide` is the same decision for any rule and many tokens at once: `loop`,
`loop_awake` and waves ask it. A token alone exits at the same step by both.

An exit is for good, unless the rule wakes (`wake`): then a token sleeps while it and all tokens
that it reads are still, and wakes when one of them moves. Problems that are read as a whole go
through `loop_awake`, which computes the awake tokens alone if attention has a window; all else goes
through `loop`.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.

    k        the loop step, from 1
    x0, x1   the state before and after step k, float32
    delta    x1 - x0, the update (Eq. 1, which counts steps from 0)
    B, T     rows, tokens of a pass
    N        tokens that are awake, of all rows
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
#               token's first step. If the rule wakes, it should tell of the last step alone, since
#               steps that a token sleeps through may not be counted
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


def confidence(x0, x1, memo, read):
    """1 - the largest probability, the softmax response of CALM (Schuster et al. 2022)."""
    return 1 - read(x1).float().softmax(-1).amax(-1), None


def random(x0, x1, memo, read):
    """
    A coin, to compare the others with: a token exits with probability tau in every step, so after
    1 / tau steps on average. The coin is torch's generator: seed it to repeat a pass.
    """
    return torch.rand(x1.shape[:-1], device=x1.device), None


# rules --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Exit:
    """
    A rule: a token exits once its signal has been below tau for `hits` loop steps in a row.

    keep: True, the token keeps the state after the step that triggered the exit; False, the state
    before it, as Algorithm 1 has it.
    wake: an exit can be undone. The token is asleep until a token that it reads moves, see Tokens.
    reads: the model's method behind the signal's read(state), see GPT.reader. readout is ln_f and
    the head; through_coda runs the last layers first.
    by_row: all tokens of a row share one signal and exit together, as the published criteria of
    Huginn do (zoo/huginn.py). A pass over a whole sequence then differs from decoding token by
    token.

    A rule object remembers nothing of a pass, so it can be used for any number of passes.
    """
    signal: Callable
    tau: float = 1e-2
    hits: int = 1
    keep: bool = True
    wake: bool = False
    reads: str = 'readout'
    by_row: bool = False
    name: str = ''

    def decide(self, value, streak):
        """
        The exit decision, Algorithm 1 lines 5 to 12, for any number of tokens at once.

        value: their signals, an array or a number, None while it is undefined. streak: how many
        small values in a row each has had, likewise. Returns the new streak, and who is still: who
        has had `hits` of them.
        """
        small = False if value is None else value < self.tau
        streak = np.where(small, streak + 1, 0)
        return streak, streak >= self.hits


# the paper's rules and their normalised forms, then the two that every comparison needs. To add a
# rule, write a signal and a line here: all scripts read this table
EXITS = {
    'norm': Exit(norm),
    'norm_rel': Exit(norm_rel),
    'kl': Exit(kl),
    'accel': Exit(accel, hits=2, keep=False),
    'accel_hat': Exit(accel_hat, hits=2, keep=False),
    'accel_rel': Exit(accel_rel, hits=2, keep=False),
    'confidence': Exit(confidence),
    'random': Exit(random, tau=0.1),
}


def make_exit(name, tau=None, hits=None, keep=None, wake=False):
    """
    The rule called `name`, from EXITS, or MODULE:NAME from the EXITS of another file. A file that
    adds its rule to EXITS needs no MODULE: to name it where it is a config file; the rule is called
    NAME either way, so its calibrated threshold is found either way.

    tau >= 0, hits and keep replace the rule's own where they are given. wake: see Exit. ValueError
    for an unknown name, or a tau or hits that is out of range.
    """
    file, _, short = name.rpartition(':')
    try:
        known = import_module(file).EXITS if file else EXITS
    except Exception as error:          # a user's own module may raise anything
        raise ValueError(f"cannot import the exit rule '{name}' ({type(error).__name__}: {error}): "
                         'write MODULE:NAME, such as zoo.huginn:kl, and in that file from exits '
                         'import EXITS, Exit and EXITS[NAME] = Exit(...)') from None
    if short not in known:
        raise ValueError(f"unknown exit rule '{name}': choose one of {', '.join(known)}; name "
                         'a file of your own behind the script, or write MODULE:NAME')
    rule = known[short]
    tau = rule.tau if tau is None else tau
    if isinstance(tau, bool) or not isinstance(tau, Real) or math.isnan(tau) or tau < 0:
        raise ValueError(f'tau must be a number >= 0, not {tau!r}: the paper sweeps 1e-5 to 1e-2')
    if hits is not None and hits < 1:
        raise ValueError(f'hits must be at least 1, not {hits!r}')
    return replace(
        rule, wake=wake, name=short if EXITS.get(short) is rule else name,
        tau=float(tau) if tau < 3e38 else math.inf,     # a larger number is infinite in float32
        hits=rule.hits if hits is None else hits,
        keep=rule.keep if keep is None else keep)


# many tokens at once ------------------------------------------------------------------------------

class Tokens:
    """
    Who of the tokens (B, T) of a pass loops, exits, sleeps and wakes: NumPy arrays, on the host.

    A token *moves* in a step unless its rule has found it still, Exit.decide. Who moved loops in
    the next step. If the rule wakes, so do all who read one that moved; the others sleep: they keep
    state, keys, values and streak until a token that they read moves. Two rows of four tokens after
    a step, with a window of 2 (each reads itself and the token before it) and hits = 2:

        streak  [[0, 2, 1, 0],      moved  [[1, 0, 1, 1],      awake  [[1, 1, 1, 1],
                 [3, 1, 2, 4]]              [0, 1, 0, 0]]              [0, 1, 1, 0]]

    So `after` sets: streak, small signals in a row; moved, computed and streak < hits; awake, those
    who read one that moved. The streak of a sleeping token stays. Set to 0, a token that wakes
    would count as moving until it has had `hits` small values again; it would wake its readers, and
    they theirs, without end.

    readers: moved (B, T) -> who reads one that moved (B, T); None, an exit is for good. moves: a
    cache.Moves, if earlier tokens of the rows are in the cache.

    steps_used: the last step whose result a token keeps. evals: the steps in which it was computed.
    diary: a list, to which each step appends who was computed in it, as numbers b * T + t.
    """

    def __init__(self, B, T, rule, readers=None, moves=None, diary=None):
        self.rule, self.readers, self.moves, self.diary = rule, readers, moves, diary
        self.awake = np.ones((B, T), dtype=bool)        # who loops in the next step
        self.takes = None                               # who takes the state after the last step
        self.streak = np.zeros((B, T), dtype=int)       # small signals in a row
        self.steps_used = np.zeros((B, T), dtype=int)
        self.evals = np.zeros((B, T), dtype=int)

    def after(self, value, k):
        """
        Step k is done, with these signals (B, T) or a number, None = undefined; those of sleeping
        tokens do not matter. Returns whether all is done.
        """
        computed = self.awake
        streak, still = self.rule.decide(value, self.streak)
        self.streak = np.where(computed, streak, self.streak)
        moved = computed & ~still

        # who loops in the next step
        news = False                                        # of earlier tokens, still to come
        if self.readers is None:
            self.awake = moved
        elif self.moves is None:
            self.awake = self.readers(moved)
        else:
            self.awake, news = self.moves.step(moved, k, self.readers)

        # Algorithm 1 throws the step that triggered away: a token that falls asleep now keeps the
        # state before it, whose keys and values this step has computed. Only a token that falls
        # asleep loses the step; a still one that goes on looping keeps it
        self.takes = computed if self.rule.keep else computed & self.awake
        self.steps_used[self.takes] = k
        self.evals += computed
        if self.diary is not None:
            self.diary.append(np.flatnonzero(computed))
        return not (news or self.awake.any())


def loop(f, x, k_max, rule, read=None, readers=None, moves=None, diary=None):
    """
    Loop from x^(0) (B, T, C) until no token is awake, for k_max steps at most.

    f(x, k, awake): step k -> the states after it. awake (B, T), on the device, None = all: who is
    computed; the others keep their keys and values. read: see Exit.reads. readers, moves, diary:
    see Tokens.

    Returns x_star, NumPy arrays (B, T) of the loop steps kept and the block maps evaluated, and the
    number of steps.
    """
    tokens = Tokens(*x.shape[:2], rule, readers, moves, diary)
    memo = None
    awake = None
    for k in range(1, k_max + 1):
        x1 = f(x, k, awake)
        if readers is not None:         # f computes all tokens; who sleeps keeps its state
            x1 = take(x1, x, awake)
        value, memo = rule.signal(x, x1, memo, read)
        done = tokens.after(on_host(value, rule, k), k)
        x = take(x1, x, on_device(tokens.takes, x))
        if done:
            break
        awake = on_device(tokens.awake, x)
    return x, tokens.steps_used, tokens.evals, k


def take(new, old, mask):
    """The new states (..., C) for the tokens of a mask (...), None = all; old ones for the rest."""
    if mask is None:
        return new
    return torch.where(mask[..., None], new, old)


def on_device(mask, like):
    """A NumPy mask as a tensor on the device of `like`, without waiting; None if all are True."""
    return None if mask.all() else torch.from_numpy(mask).to(like.device, non_blocking=like.is_cuda)


def loop_awake(f, x, k_max, rule, read, readers, diary=None):
    """
    Loop as `loop` does, from x^(0) (B, T, C), but compute only the tokens that are awake.

    Tokens, signals and results are those of `loop`; what differs is who is computed. There f gets
    all tokens (B, T, C) in every step. Here f(x, k, rows, places) is step k of the N tokens that
    are awake, at places (N,) of rows (N,): from their states (N, C) to those after it. The rule
    must wake, and its memo may hold nothing but the last step.
    """
    tokens = Tokens(*x.shape[:2], rule, readers, diary=diary)
    x = x.clone()                           # x^(0) may be kept by who drew it
    memos = None                            # of all tokens, (B, T, any)
    slept = np.zeros(x.shape[:2], dtype=bool)
    for k in range(1, k_max + 1):
        computed = tokens.awake
        rows, places = (torch.from_numpy(index).to(x.device) for index in np.nonzero(computed))
        x0 = x[rows, places]                                                    # (N, C)
        memo = None if memos is None else memos[rows, places]
        woken = slept[computed]                                                 # (N,)
        if memo is not None and woken.any():
            # while a token slept, its state did not change: give it the memo of a step from x0 to
            # x0, which `loop` would have made
            woken = torch.from_numpy(woken).to(x.device)
            memo[woken] = rule.signal(x0[woken], x0[woken], memo[woken], read)[1]
        x1 = f(x0, k, rows, places)
        value, memo = rule.signal(x0, x1, memo, read)
        if not isinstance(memo, torch.Tensor | None):
            raise ValueError(f"the memo of the rule '{rule.name}' must be a tensor or None, not a "
                             f'{type(memo).__name__}: stack its parts')
        if memo is not None and memos is None:
            memos = memo.new_zeros(*x.shape[:2], *memo.shape[1:])
        if memo is not None:
            memos[rows, places] = memo

        values = None
        if value is not None:
            values = np.zeros(computed.shape)
            values[computed] = on_host(value, rule, k)
        done = tokens.after(values, k)
        x[rows, places] = take(x1, x0, on_device(tokens.takes[computed], x))
        slept = ~computed
        if done:
            break
    return x, tokens.steps_used, tokens.evals, k


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
TAUS = dict(norm=1, norm_rel=0.1, kl=1e-2, accel=1, accel_hat=0.9, accel_rel=0.1, confidence=0.4)


def main():
    if not 1 <= n_loop <= 1000:
        raise ValueError(f'n_loop must lie between 1 and 1000 to be shown, not {n_loop}')
    # a spiral in the plane, whose two coordinates stand for logits
    angle = math.radians(turn)
    rotate = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    start = torch.tensor([16.0, 0.0])

    def f(x):
        return shrink * rotate @ x

    print(f'a spiral: x <- {shrink} x, turned by {turn:g} degrees')
    columns = [['k', *range(1, n_loop + 1), 'tau', 'kept', 'evals']]
    columns += [signals_of(make_exit(name, TAUS.get(name)), f, start) for name in EXITS]
    width = 2 + max(9, *map(len, EXITS))
    for head, *cells in zip(*columns):
        print(f'{head:>7}' + ''.join(f'{cell:>{width}}' for cell in cells))
    _, k = algorithm_1(f, start, TAUS['accel'], n_loop)
    print(f'algorithm_1 keeps {k} steps, like `accel`. A column ends where the rule exits; kept: '
          'steps in the\nresult; evals: block maps. Every step shrinks by the same factor, so '
          'relative signals are constant.\n')
    show_waking()


def signals_of(rule, f, start):
    """The column of a rule: its name, its signals until it exits, tau, and steps kept, computed."""
    values = []

    def signal(x0, x1, memo, read):
        value, memo = rule.signal(x0, x1, memo, read)
        values.append('' if value is None else f'{value.item():.2e}')
        return value, memo

    def step(x, k, awake):
        return f(x[0, 0])[None, None]

    _, kept, evals, _ = loop(step, start[None, None], n_loop, replace(rule, signal=signal),
                             read=lambda x: x)
    blanks = [''] * (n_loop - len(values))
    return [rule.name, *values, *blanks, f'{rule.tau:g}', kept.item(), evals.item()]


def show_waking():
    """A chain of tokens, each of which copies the one before it: who is awake in each step?"""
    T = 12
    lines = []

    def copy(x, k, awake):
        lines.append('o' * T if awake is None else ''.join('.o'[one] for one in awake[0].tolist()))
        return torch.cat((torch.ones(1, 1, 1), x[:, :-1]), dim=1)

    def next_one(moved):            # a token is read by itself and by the one after it
        return moved | np.pad(moved, ((0, 0), (1, 0)))[:, :-1]

    found = {}
    for wake, readers in {False: None, True: next_one}.items():
        lines.clear()
        rule = make_exit('norm', 0.5, wake=wake)
        x, _, evals, _ = loop(copy, torch.zeros(1, T, 1), 2 * T, rule, readers=readers)
        found[wake] = f'{int(x.sum())} of {T} right, {evals.mean():.1f} steps per token'
    print('a chain: a token becomes 1 when the one before it has. o: awake in this step\n'
          + '\n'.join(f'{k:7d}  {line}' for k, line in enumerate(lines, start=1)))
    print(f'asleep until news arrives: {found[True]}. If an exit is for good: {found[False]}.')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
