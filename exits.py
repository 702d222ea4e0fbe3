"""
Exit rules: when may a token stop looping, and when does it have to go on?

`algorithm_1` is the paper's Algorithm 1, line by line, for one state, to read and to test against.
`loop` is the same for any rule and many tokens at once; for one token it keeps the same steps.

An exit is for good, unless the rule wakes: then a token sleeps while it and all tokens that it
reads are still, and wakes when one of them moves.

Paper: Eq. 3 (step norm), Eq. 4 (KL), Eq. 5 and 6 (acceleration), Algorithm 1.

    k        the loop step, from 1
    x0, x1   the states before and after step k, float32
    delta    x1 - x0, the update (Eq. 1, which counts steps from 0)
    B, T, C  rows, tokens of a pass, width; V words
    N        tokens that take a step, of all rows
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
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


# signals: (x0, x1, memo, logits_of) -> (value, memo) ----------------------------------------------
#
#     x0, x1      (..., C)
#     memo        what the signal returned after the token's last step, None in its first one: a
#                 tensor (..., any) in every step, or always None. If the rule wakes, a token that
#                 falls asleep takes one step of length 0, from x to x, whose memo it has after
#                 waking: a signal that divides by the length of the last step must survive a 0
#                 and stay small there (accel_hat does not)
#     logits_of   state (..., C) -> logits (..., V), see Exit.reads
#     value       (...), compared with tau. NaN in a token's first two steps: not known yet, and not
#                 small. A yes-or-no signal is 0 where a token may exit and 1 elsewhere, with a tau
#                 of 0.5

def norm(x0, x1, memo, logits_of):
    """Eq. 3, the step norm."""
    return vector_norm(x1 - x0, dim=-1), None


def norm_rel(x0, x1, memo, logits_of):
    """The step norm over the norm of the state that the step started from (below Eq. 3)."""
    return vector_norm(x1 - x0, dim=-1) / (vector_norm(x0, dim=-1) + EPS), None


def kl(x0, x1, memo, logits_of):
    """Eq. 4: KL(p^(k) || p^(k-1)) in nats; the next memo is log p^(k)."""
    # paper silent on the logits of an early group: here ln_f and the tied head (a logit lens)
    log_p0 = logits_of(x0).float().log_softmax(-1) if memo is None else memo
    log_p1 = logits_of(x1).float().log_softmax(-1)
    divergence = (log_p1.exp() * (log_p1 - log_p0)).sum(-1)
    return divergence.clamp(min=0), log_p1              # rounding must not make it negative


def accel(x0, x1, memo, logits_of):
    """Eq. 5, the acceleration; the next memo is the update, in this rule and the next two."""
    delta = x1 - x0
    if memo is None:                                    # it needs two updates
        return torch.full_like(delta[..., 0], torch.nan), delta
    return vector_norm(delta - memo, dim=-1), delta


def accel_hat(x0, x1, memo, logits_of):
    """
    Eq. 6: acceleration over the norms of both updates. The paper says [0, 2]; by the triangle
    inequality it is [0, 1]. Steps of one length with cosine c have sqrt((1 - c) / 2): at rest, too,
    it is not small. With waking it stops late: a token that has just woken has 1, and moves.
    """
    value, delta = accel(x0, x1, memo, logits_of)
    if memo is not None:
        value = value / (vector_norm(delta, dim=-1) + vector_norm(memo, dim=-1) + EPS)
    return value, delta


def accel_rel(x0, x1, memo, logits_of):
    """The acceleration over the norm of the state (the paper: "based on ... activations")."""
    value, delta = accel(x0, x1, memo, logits_of)
    return value / (vector_norm(x0, dim=-1) + EPS), delta


def random(x0, x1, memo, logits_of):
    """A coin, to compare the others with: in every step a token exits with probability tau."""
    return torch.rand(x1.shape[:-1], device=x1.device), None


# rules --------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Exit:
    """
    A rule: a token is still once its signal has been below tau for `hits` loop steps in a row.
    """
    signal: Callable
    tau: float = 1e-2
    hits: int = 1
    keep: bool = True           # keep the state after the step that triggers; Algorithm 1 does not
    wake: bool = False          # asleep until a token that it reads moves, see loop
    reads: str = 'readout'      # the model's method behind logits_of, see GPT.logits_at
    name: str = ''

    def observe(self, x0, x1, memo, logits_of):
        """The signal of a step -> its value (...) and new memo. ValueError for anything else."""
        pair = self.signal(x0, x1, memo, logits_of)
        shape = x1.shape[:-1]
        is_right = isinstance(pair, tuple) and len(pair) == 2 and np.shape(pair[0]) == shape
        if not is_right or pair[1] is not None and np.shape(pair[1])[:len(shape)] != shape:
            raise ValueError(f"the signal of the exit rule '{self.name}' must return a pair: one "
                             f'value for each token, {tuple(shape)}, and its memo, None or a '
                             'tensor (..., any)')
        return pair

    def check_value(self, value, x1, evals):
        """
        Check a signal: value (N,), a NumPy array, of the step to x1 (N, C). evals: an int, or (N,):
        how many steps each token has computed. ValueError if a value is NaN because a state is not
        finite, or in the third step or later.
        """
        unknown = np.isnan(value)
        if unknown.any():
            check_finite(x1)
            if (unknown & (evals >= 3)).any():
                raise ValueError(f"the signal of the exit rule '{self.name}' is NaN after three "
                                 'loop steps or more. It must be a number then, also for a token '
                                 'that has just woken, whose memo is that of a step of length 0')


def check_finite(x):
    """ValueError if a state is not finite."""
    if not math.isfinite(x.abs().max().item()):
        raise ValueError('a state is NaN or infinite: the weights or the input are broken')


# the paper's rules and their normalised forms, then a coin; paper silent on the state that norm and
# kl return: here the one after the step that triggers. To add a rule, write a signal and a line
# here: all scripts read it
EXITS = {
    'norm': Exit(norm),
    'norm_rel': Exit(norm_rel),
    'kl': Exit(kl),
    'accel': Exit(accel, hits=2, keep=False),
    'accel_hat': Exit(accel_hat, tau=0.9, hits=2, keep=False),
    'accel_rel': Exit(accel_rel, hits=2, keep=False),
    'random': Exit(random, tau=0.1),
}


# many tokens at once ------------------------------------------------------------------------------

def loop(f, x, k_max, rule, logits_at=None, readers=None, record=None):
    """
    Loop from x^(0) (B, T, C) until no token is awake, for k_max steps at most. Returns the last
    states (B, T, C), and two NumPy arrays (B, T): the number of the last step kept, which counts
    steps asleep, too, and how many steps were computed.

    f(x, k, at): step k of the tokens `at` -> their states after it (N, C). x (B T, C): the states
    of all tokens; `at` (N,) numbers those that are awake, b T + t.
    logits_at(states, at, x): the logits of the tokens `at` in these states (N, C).
    readers(moved): who reads one that moved, itself or not, (B, T) -> (B, T); None: nobody wakes.
    record(awake, x): called after each step with who was awake (B, T), and x (B T, C): copy it.

    A token *moves* in a step unless the rule has found it still. Who moved loops in the next step.
    If the rule wakes, so do all who read one that moved; the others sleep, and keep state, keys,
    values and streak until a token that they read moves. Two rows of four tokens after a step, with
    a window of 2 (each reads itself and the token before it) and hits = 2:

        streak  [[0, 2, 1, 0],      moved  [[1, 0, 1, 1],      awake next  [[1, 1, 1, 1],
                 [2, 1, 2, 4]]              [0, 1, 0, 0]]                   [0, 1, 1, 0]]

    The streak of a sleeping token stays. Set to 0 on waking, a token of a rule with two hits would
    move in its first step, however small that is, and wake its readers, and they theirs: to the end
    of the row, or for ever where tokens read each other.
    """
    B, T, C = x.shape
    x = x.reshape(B * T, C).clone()                 # the states of all tokens
    memos = None                                    # of each token
    awake = np.ones((B, T), dtype=bool)
    streak = np.zeros((B, T), dtype=int)            # small signals in a row
    kept, evals = np.zeros((2, B, T), dtype=int)    # the last step kept, steps computed
    for k in range(1, k_max + 1):
        # a step of the tokens that are awake, and its signal
        at = numbers_of(awake, x)
        x1 = f(x, k, at)
        value, memos = signal_at(rule, x1, memos, at, x, logits_at)
        value = value.numpy(force=True)
        evals += awake
        rule.check_value(value, x1, evals[awake])
        streak[awake] = (streak[awake] + 1) * (value < rule.tau)

        # tokens that moved go on and, if tokens may wake, all who read one of them
        moved = streak < rule.hits
        next_awake = moved | readers(moved) if readers else moved

        # Algorithm 1 throws away a step after which the token does not go on
        keeps = awake if rule.keep else awake & next_awake
        taken = numbers_of(keeps[awake], x)     # rows of x1
        x[at[taken]] = x1[taken]
        kept[keeps] = k
        if record:
            record(awake, x)

        # who falls asleep changes no more: its memo becomes that of a step without a change, with
        # which the rule compares its first step after waking
        falls = awake & ~next_awake
        if readers and memos is not None and falls.any():
            rests = numbers_of(falls, x)
            _, memos = signal_at(rule, x[rests], memos, rests, x, logits_at)
        awake = next_awake
        if not awake.any():
            break
    check_finite(x)
    return x.view(B, T, C), kept, evals


def numbers_of(mask, like):
    """The numbers of the True places in a NumPy mask, a tensor (N,) on the device of `like`."""
    at = torch.from_numpy(mask.ravel().nonzero()[0])
    return at.to(like.device, non_blocking=like.is_cuda)


def signal_at(rule, x1, memos, at, x, logits_at):
    """
    The signal of the tokens `at` in their step from x (B T, C) to x1 (N, C) -> its value (N,), and
    the memos of all tokens (B T, any), or None.
    """
    memo = None if memos is None else memos[at]
    logits_of = partial(logits_at, at=at, x=x) if logits_at else None
    value, memo = rule.observe(x[at], x1, memo, logits_of)
    if len(at) == len(x):               # the memos of all tokens
        return value, memo
    if (memo is None) != (memos is None):
        raise ValueError(f"the signal of the exit rule '{rule.name}' must return a memo in every "
                         'step, or in none')
    if memo is not None:
        memos[at] = memo
    return value, memos


# which rule ---------------------------------------------------------------------------------------

def make_exit(name, tau=None, wake=False):
    """
    The rule called `name`, from EXITS, or MODULE:NAME from the EXITS of another file. tau replaces
    the rule's own. ValueError for an unknown name, and for a tau that is no number >= 0.
    """
    file, _, short = name.rpartition(':')
    try:
        rules = import_module(file).EXITS if file else EXITS
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import the exit rule '{name}' ({error}): write NAME or MODULE:"
                         'NAME such as zoo.huginn:kl (bench.py: NAME:TAU)') from error
    if short not in rules:
        close = get_close_matches(short, rules, n=1)
        hint = f": did you mean '{close[0]}'?" if close else ''
        raise ValueError(f"unknown exit rule '{name}'{hint} (there are {', '.join(rules)}; write "
                         'MODULE:NAME for one in another file)')
    rule = rules[short]
    tau = rule.tau if tau is None else float(tau)
    if not tau >= 0:
        raise ValueError(f'tau must be a number >= 0, not {tau}')
    # one rule has one name: mine:best is `best` if mine.py enters it in this table
    name = short if rules is EXITS else name
    return replace(rule, name=name, tau=tau, wake=wake)


def choose(exit=None, tau=None, wake=False, policy='auto', decoder=None, rows=()):
    """
    Which rule, which threshold and which cache? -> an Exit or None, the cache policy, and in words
    where the threshold comes from, '' if it was given. All programs that read exits.json ask here.

    exit        an Exit is taken as it is. None = the decoder's own rule, or none: fixed loops
    tau         the first of these that is there: what is given; the decoder's own threshold, for
                its own rule; the row of this rule and policy in `rows`; the rule's own
    policy      see cache.slots_of; 'auto' = what the decoder needs, or 'exact'
    decoder     a decode.Decoder, which may need a cache and have a rule of its own; None = neither
    rows        of the model's exits.json, dicts with rule, cache and tau; the first one counts

    ValueError for what does not fit together.
    """
    needed = decoder.needs_cache if decoder else None
    if policy == 'auto':
        policy = needed or 'exact'
    own_rule, own_tau = decoder.default_rule if decoder and decoder.default_rule else (None, None)
    exit = own_rule if exit is None else exit

    if exit is None or isinstance(exit, Exit):
        if tau is not None or wake:
            raise ValueError('tau and wake need the name of an exit rule, such as accel')
        return exit, policy, ''
    if not isinstance(exit, str):
        raise ValueError(f'exit must be a rule or its name, such as accel, not {exit!r}')
    rule = make_exit(exit, tau, wake)
    if tau is not None:
        return rule, policy, ''
    if rule.name == own_rule:
        return replace(rule, tau=own_tau), policy, "the decoder's own"
    for row in rows:
        if (row['rule'], row['cache']) == (rule.name, policy):
            return replace(rule, tau=row['tau']), policy, 'exits.json'
    is_known = any(row['rule'] == rule.name for row in rows)
    what = f'with cache {policy}' if is_known else 'for this model'
    return rule, policy, f'not measured {what}'
