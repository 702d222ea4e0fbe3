"""
A group of layers that loops: its noise, how its input comes in, the loop, and how often it runs.

model.py puts a RecurrentGroup into its list of layers, (B, T, C) -> (B, T, C):

    x = init_state(e)                       x^(0), noise
    repeat n_loop times, or until an exit rule leaves no token awake:
        x = norm(core(adapter([x ; e])))    Geiping 3.2; the "block map" f of Algorithm 1

Paper: sec. 2 and App. B (groups, noise, draws). Geiping: 3.2 (adapter, norm), 3.3 (truncated
gradients; the draw, Geiping Eq. 1 and 2), App. C.1 (x^(0)).

    e          the stream that enters the group, given to every step
    x          the iterate; float32 always
    k          the loop step, from 1
    B, T, C    rows, tokens, width
"""
import hashlib
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from cache import KeysValues, Span
from exits import Exit, loop

# draws: how often to loop, and the noise ----------------------------------------------------------

def derived_seed(*key):
    """A 63-bit seed from (seed, purpose, iteration, ...). Different keys give unrelated seeds."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], 'little') >> 1


def sample_n_loop(mean_recurrence, generator=None, sigma=0.5):
    """
    How often to loop: n = Poisson(exp(N(log r - sigma^2 / 2, sigma))) + 1, of mean r + 1, the
    lognormal-Poisson draw of Geiping Eq. 1 and 2. sigma is the deviation; Geiping says variance.
    """
    z = torch.randn((), generator=generator)
    log_rate = math.log(mean_recurrence) - sigma ** 2 / 2 + sigma * z
    return 1 + int(torch.poisson(log_rate.exp(), generator=generator))


def truncated_noise(*shape, generator=None, device='cpu'):
    """x^(0) of Geiping App. C.1: a normal of variance 2/5, cut at 3 sigma."""
    # by the inverse normal distribution: twice as fast as redrawing what lies outside 3 sigma
    inside = math.erf(3 / math.sqrt(2))         # the share of a normal within 3 sigma
    uniform = torch.empty(shape, device=device).uniform_(-inside, inside, generator=generator)
    return uniform.erfinv_().mul_(math.sqrt(2) * math.sqrt(2 / 5))


# Two noises, with one method: draw(group, like (B, T, C), pos) -> x^(0) (B, T, C) of a group, for
# the tokens at positions pos

@dataclass(frozen=True)
class TrainingNoise:
    """
    Fresh noise for every group, row and pass. Each of `world` processes draws the noise of the
    whole batch and takes its own rows, so that the number of processes changes nothing.
    """
    generator: torch.Generator | None = None        # None = torch's own
    rank: int = 0
    world: int = 1

    def draw(self, group, like, pos):
        B, T, C = like.shape
        whole = truncated_noise(B * self.world, T, C, generator=self.generator, device=like.device)
        return whole[B * self.rank:B * (self.rank + 1)]


@dataclass(eq=False)
class FixedNoise:
    """The noise of evaluation: a function of (seed, group, position) alone."""
    seed: int = 0
    # of each group at all positions, (block_size, C). A dict: the compiler would trace through a
    # function that has a cache, and it cannot draw noise
    tables: dict = field(default_factory=dict)

    def draw(self, group, like, pos):
        shape = group.block_size, like.shape[-1]
        key = group.index, shape, like.device
        if key not in self.tables:      # drawn on the CPU, so that all devices agree
            seed = derived_seed(self.seed, 'state', group.index, 0)    # 0: as in earlier versions
            generator = torch.Generator().manual_seed(seed)
            self.tables[key] = truncated_noise(*shape, generator=generator).to(like.device)
        return self.tables[key][pos].expand_as(like)


fixed_noise = lru_cache(maxsize=1)(FixedNoise)      # the tables of the last seed are kept


def as_noise(noise, training=False):
    """A seed -> its noise; in training fresh noise, whatever the seed. A noise stays as it is."""
    if hasattr(noise, 'draw'):
        return noise
    return TrainingNoise() if training else fixed_noise(noise)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last axis, (..., C) -> (..., C): in fewer operators on a CPU."""

    def __init__(self, C, eps=1e-6):
        super().__init__(C, eps=eps)
        # as tensors, which are faster than numbers; on the CPU even in a model on the meta device
        self.root = torch.tensor(C ** 0.5, device='cpu')
        self.floor = torch.tensor((C * eps) ** 0.5, device='cpu')

    def forward(self, x):
        if not x.is_cpu:                                    # torch has one kernel for it there
            return super().forward(x)
        # x / sqrt(mean(x^2) + eps) * weight; both sides of the quotient are sqrt(C) times larger
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(self.floor)    # (..., 1)
        return x * (self.root / length) * self.weight


# injections: how e enters each step ---------------------------------------------------------------

class Injection(nn.Module):
    """How e comes into a loop step. An injection initialises itself, maybe in init_weights."""
    reads_e = True          # does the input come in? If not, only x^(0) can bring it in
    weights_of_e = 0        # how many weights from_e multiplies e with, once a pass

    def __init__(self, config=None):
        super().__init__()

    def init_weights(self):
        """GPT.init_weights calls it, in the order of the layers."""

    def from_e(self, e):
        """What all steps of a pass take from e (B, T, C), computed once: one tensor (B, T, any)."""
        return e

    def join(self, x, from_e):
        """The state with the input in it, (B, T, C) in float32, which goes into the core."""
        raise NotImplementedError


class ConcatRandom(nn.Linear, Injection):
    """One Linear(2C -> C) on [x ; e] (Geiping 3.2), computed as the sum of its two halves."""

    def __init__(self, config):
        super().__init__(2 * config.n_embd, config.n_embd, bias=False)
        self.weights_of_e = config.n_embd ** 2

    def init_weights(self):
        std = math.sqrt(2 / (5 * self.out_features))        # Geiping App. C.1
        nn.init.trunc_normal_(self.weight, 0.0, std, -3 * std, 3 * std)

    def from_e(self, e):
        return F.linear(e, self.weight[:, e.shape[-1]:])

    def join(self, x, from_e):
        return F.linear(x, self.weight[:, :x.shape[-1]]) + from_e


class Concat(ConcatRandom):
    """The same, but it differs from the paper: it starts as x + e."""

    def init_weights(self):
        super().init_weights()          # drawn, so that all later weights are as in ConcatRandom
        self.weight.copy_(torch.eye(self.out_features).repeat(1, 2))


class Add(Injection):
    """x + e."""

    def join(self, x, from_e):
        return x + from_e


class NoInjection(Injection):
    """x alone; x^(0) is then e."""
    reads_e = False

    def join(self, x, from_e):
        return x


# to add one, write an Injection and a line here: GPTConfig.injection is one of these names
INJECTIONS = {'concat': Concat, 'concat_random': ConcatRandom, 'add': Add, 'none': NoInjection}


# a pass, and the group ----------------------------------------------------------------------------

@dataclass(frozen=True)
class Plan:
    """
    How a pass of tokens goes through the model. Counts, rule and noise are the user's. decode.py
    sets a cache for each context window, a span for each pass, and warm for some decoders.
    """
    counts: list                        # the loop budget of each group
    rule: Exit | None = None            # who exits, and when; None = all loops of the budget
    noise: FixedNoise | TrainingNoise = fixed_noise(0)
    span: Span | None = None            # the positions of the tokens of a pass
    cache: dict | None = None           # see cache.make_cache; None = no tokens but those of a pass
    warm: list | None = None            # first states (B, T, C) of each group; NaN = x^(0)
    keep_states: bool = False           # record the states of all steps
    passes: list | None = None          # decode.one_pass appends its evals, (B, T, groups)

    def hook(self, block):
        """KeysValues.update for a block that runs once; None without a cache."""
        return partial(self.cache[block].update, span=self.span) if self.cache else None


class RecurrentGroup(nn.Module):
    """
    Looped layers `core` (a list of blocks), which get `e` in every step. index: its number. norm:
    the class of the norm that closes the core.

    If the core maps some states x to y and y to x, they swing for ever, and no exit rule finds them
    still, unless they are close together. With damping d a step goes a part of the way only,
    x + (1 - d) (f(x) - x): it has the same fixed points, and such states can come to rest. d can be
    changed after training.

    skip: the chance that a token skips a step, which keeps the fixed points, too. States that find
    none when all tokens step together may find one when each steps in its own time. Not with an
    exit rule, to which a skipped step looks like rest.
    """
    skip = 0.0

    def __init__(self, core, config, index=0, norm=RMSNorm):
        super().__init__()
        C = config.n_embd
        self.core = nn.ModuleList(core)
        self.norm = norm(C, config.norm_eps)
        self.adapter = INJECTIONS[config.injection](config)
        self.index = index
        self.block_size = config.block_size
        self.norm_inside = config.norm_inside
        self.bptt_k = config.bptt_k
        self.damping = config.damping
        # paper silent: if no step reads the input, only x^(0) can bring it in
        self.x0 = config.x0 if self.adapter.reads_e else 'e'

    def init_state(self, e, noise=0, pos=None):
        """x^(0) for e (B, T, C) at positions pos (T,), None = 0 ... T - 1. noise: see as_noise."""
        if self.x0 == 'e':
            return e.float()
        if self.x0 == 'zero':
            return torch.zeros_like(e, dtype=torch.float32)
        # paper: "each time the block is applied", read as Geiping's: once per pass
        noise = as_noise(noise, self.training)
        return noise.draw(self, e, slice(e.shape[1]) if pos is None else pos)

    def step(self, x, from_e, hooks=None, pos=None):
        """
        One loop step x^(k-1) -> x^(k), (B, T, C) float32. from_e: adapter.from_e(e), computed once
        for all steps. hooks: of each block of the core, see KeysValues.update. pos: positions, None
        = 0 ... T - 1.
        """
        before = x
        x = self.adapter.join(x, from_e)
        for i, block in enumerate(self.core):
            x = block(x, hooks[i] if hooks else None, pos)
        # Geiping's text has this norm n_c in every step (3.2), the published code after the last
        # alone (zoo/huginn.py); both have n_c before the head once more, where ln_f stands here
        if self.norm_inside:
            x = self.norm(x)
        if self.damping:            # not in the papers
            x = x + self.damping * (before - x)
        if self.skip:               # nor this: an asynchronous update
            skips = torch.rand(*x.shape[:-1], 1, device=x.device) < self.skip
            x = torch.where(skips, before, x)
        return x

    def output(self, x):
        """The last state -> what the next layer gets."""
        return x if self.norm_inside else self.norm(x)

    def forward(self, e, plan, logits_at=None):
        """
        e (B, T, C) -> what the next layer gets (B, T, C), and the results of the group, a dict:

            e, x            what entered; the last states (B, T, C)
            states          with plan.keep_states: all states (K+1, B, T, C)
            steps_used      (B, T): the last step kept; with waking, steps asleep count
            evals           (B, T): the steps in which it was awake
            awake           with a rule: a list of arrays, the numbers b T + t of the tokens that
                            were awake in each step

        logits_at: see exits.loop. ValueError for a rule while training.
        """
        e = e.float()
        n_loop = plan.counts[self.index]
        x = self.init_state(e, plan.noise, plan.span.pos)
        if plan.warm:
            warm = plan.warm[self.index]
            x = torch.where(warm.isnan(), x, warm)

        if plan.rule is not None:
            x, result = self.loop_with_exits(x, e, plan, logits_at)
            return self.output(x), dict(e=e, x=x) | result

        f = self.map_of_all(e, plan.span, plan.cache)
        states = [x]
        for k in range(1, n_loop + 1):
            # Geiping 3.3: gradients through the last bptt_k steps
            with torch.no_grad() if k <= n_loop - self.bptt_k else nullcontext():
                x = f(x, k)
            if plan.keep_states:
                states.append(x)
        states = torch.stack(states) if plan.keep_states else None              # (K+1, B, T, C)
        steps = torch.full(e.shape[:2], n_loop, device=e.device)
        return self.output(x), dict(e=e, x=x, states=states, steps_used=steps, evals=steps)

    def loop_with_exits(self, x, e, plan, logits_at):
        """exits.loop from x^(0) (B, T, C) -> the last states, and the results."""
        if self.training:
            raise ValueError('an exit rule works in evaluation only: call model.eval() first')
        B, T, C = x.shape
        # a token that is not computed must keep its keys, so a rule always needs a cache; one slot
        # is enough for a single pass, where all tokens are at the same step
        cache = plan.cache or {block: KeysValues(1, T) for block in self.core}

        attention = self.core[0].attn           # all blocks of a core read alike
        # `readers` knows one layer. With a window and a core of two, a token's news reaches two
        # windows in a step; who stands in the second wakes later, once one in the first has moved
        readers = attention.readers if plan.rule.wake else None
        # to compute the awake alone is cheaper if each reads few, and needs the one slot made above
        if attention.reads_few(T) and plan.cache is None:
            f = self.map_of_awake(e, cache)
        else:
            f_of_all = self.map_of_all(e, plan.span, cache)

            # as exits.loop wants it: the tokens `at`, computed among all of them
            def f(x, k, at):
                awake = None
                if len(at) < len(x):            # with all awake no mask is needed
                    awake = torch.zeros(B * T, dtype=torch.bool, device=x.device)
                    awake = awake.index_fill(0, at, True).view(B, T)
                return f_of_all(x.view(B, T, C), k, awake).flatten(0, 1)[at]

        diary = []              # of each step: the numbers of the awake tokens, b T + t
        states = [x]

        def record(awake, x):
            diary.append(np.flatnonzero(awake))
            if plan.keep_states:
                states.append(x.view(B, T, C).clone())

        x, kept, evals = loop(f, x, plan.counts[self.index], plan.rule, logits_at, readers, record)
        n_steps = len(diary)
        for block in self.core:
            cache[block].fill(plan.span, n_steps)
        steps_used, evals = torch.from_numpy(np.stack((kept, evals))).to(       # one upload
            x.device, non_blocking=x.is_cuda)
        return x, dict(states=torch.stack(states) if plan.keep_states else None,
                       steps_used=steps_used, evals=evals, awake=diary)

    def map_of_all(self, e, span, cache=None):
        """
        The block map that computes all tokens: f(x, k), (B, T, C) -> (B, T, C), states before and
        after step k. awake (B, T): the others keep their keys.
        """
        # e's share of every step, computed once and outside no_grad: the steps with gradients pass
        # them on to e. Under autocast a product is bf16, and the state must stay float32
        from_e = self.adapter.from_e(e).to(e.dtype)
        caches = [cache[block] for block in self.core] if cache else []

        def f(x, k, awake=None):
            # each block writes into its own cache; a partial would be compiled anew for each k
            hooks = [lambda new, kv=kv: kv.update(new, span, k, awake) for kv in caches]
            return self.step(x, from_e, hooks, span.pos)
        return f

    def map_of_awake(self, e, cache):
        """
        The block map of exits.loop, which computes the tokens `at` alone: for an attention that
        reads few places, and tokens that begin at position 0.
        """
        B, T, _ = e.shape
        attention = self.core[0].attn
        from_e = self.adapter.from_e(e).to(e.dtype).flatten(0, 1)               # (B T, C)

        def f(x, k, at):
            rows, pos = at // T, at % T                                         # (N,) each
            near = attention.near(pos)                                          # (N, window)
            hooks = [partial(cache[block].update_some, B=B, rows=rows, pos=pos, near=near)
                     for block in self.core]
            # as one row of N tokens: `near` says what each reads, not its place there
            return self.step(x[at][None], from_e[at][None], hooks, pos)[0]
        return f


def of_groups(results, name, like):
    """steps_used or evals of all groups, (B, T, groups), for tokens `like` (B, T)."""
    if not results:             # a model may have no groups
        return like.new_zeros(*like.shape, 0)
    return torch.stack([result[name] for result in results], dim=-1)
