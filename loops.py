"""
A group of layers that loops, the draw of how often, and the keys and values of each loop step.

Not run by itself: model.py puts a RecurrentGroup into its list of blocks. (B, T, C) -> (B, T, C), float32.

    x = init_state(e)                       x^(0), noise
    repeat n_loop times, or until the exit rule has let every token go:
        x = norm(core(adapter([x ; e])))    Geiping 3.2; Algorithm 1's "block map" f

Paper: sec. 2 and App. B (groups, noise, draws); Geiping 3.2 (adapter, norm), 3.3 (draw: Eq. 1 and 2, truncated gradients), App. C.1
(x^(0)). Symbols: e the stream that enters the group, x the iterate, k the loop step counted from 1, B, T, C, H, D as in model.py.
"""
import hashlib
import math

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from exits import loop_until_exit


def derived_seed(*key):
    """A 63-bit seed from (seed, purpose, iteration, ...): the same key gives the same numbers, another key unrelated ones."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], 'little') >> 1


LOOP_DRAWS = ('lognormal', 'uniform', 'fixed')


def sample_n_loop(mean_recurrence, generator=None, sigma=0.5, draw='lognormal'):
    """
    Lognormal-Poisson draw, Geiping Eq. 1 and 2: n = Poisson(exp(N(log r - sigma^2 / 2, sigma))) + 1, so E[n] = r + 1.

    draw: 'uniform' on 1 ... 2r + 1 and 'fixed' at r + 1 (r rounded) have the same mean.
    """
    if draw != 'lognormal':
        r = round(mean_recurrence)
        return r + 1 if draw == 'fixed' else 1 + int(torch.randint(2 * r + 1, (), generator=generator))
    log_rate = math.log(mean_recurrence) - sigma ** 2 / 2 + sigma * torch.randn((), generator=generator)
    return 1 + int(torch.poisson(log_rate.exp(), generator=generator))


def truncated_noise(*shape, generator=None, device='cpu'):
    """x^(0), Geiping App. C.1: a normal of variance 2/5, cut at 3 sigma, like the scaled embedding."""
    within = math.erf(3 / math.sqrt(2))     # the share of a normal within 3 sigma; by its inverse, twice as fast as rejection
    uniform = torch.empty(shape, device=device).uniform_(-within, within, generator=generator)
    return uniform.erfinv_().mul_(math.sqrt(2) * math.sqrt(2 / 5))


class Span:
    """Where T new tokens stand: at positions start ... start + T - 1, start an int, or (T = 1) a list with one for each row."""

    def __init__(self, start=0, T=1, device='cpu'):
        self.each = torch.tensor(start, device=device) if isinstance(start, list) and len(set(start)) > 1 else None     # (B,)
        self.start = max(start) if isinstance(start, list) else start
        self.end, self.mask = self.start + T, None      # no mask: a lone token sees all, a sequence from position 0 is causal
        self.pos = torch.arange(self.start, self.end, device=device) if self.each is None else self.each[:, None]
        if self.each is not None or T > 1 and self.start > 0:
            seen = torch.arange(self.end, device=device) <= self.pos[..., None]                 # (T, end) or (B, 1, end)
            self.mask = seen.view(-1, 1, T, self.end)                                           # (1 or B, 1, T, end)


class KeysValues:
    """
    Keys and values of one layer for up to T_max tokens, a slot for each loop step: (slots, 2, B, H, T_max, D).

    Loop step k reads and writes slot (k - 1) % slots: one slot for each step (`exact`), fewer (`ring`, Geiping 5), or one
    (`latest`; all that a single-pass layer needs). A token that has stopped looping leaves what its last block map wrote, in
    every slot that it never reached too. With a slot for each step a later token at step k so finds step min(k, its last)
    there; in a shorter ring it finds what was last written there.
    """

    def __init__(self, slots, T_max):
        self.slots, self.T_max, self.kv = slots, T_max, None

    def at(self, span, k=1, rows=None, active=None):
        """
        What attention calls at step k with the new tokens' (2, b, H, T, D): -> those of all tokens so far (2, b, H, end, D), mask.

        rows (b,): which rows these are, None for all. active (b, T): the tokens still looping; the others keep what they left.
        """
        def put(new):
            if self.kv is None:
                self.kv = new.new_zeros(self.slots, 2, new.shape[1], new.shape[2], self.T_max, new.shape[4])
            slot, some = (k - 1) % self.slots, slice(None) if rows is None else rows
            if active is not None:
                left = self.kv[k - 2 if 1 < k <= self.slots else slot, :, some, :, span.start:span.end]
                new = torch.where(active[:, None, :, None], new, left)
            if span.each is None:
                self.kv[slot, :, some, :, span.start:span.end] = new
            else:
                each = torch.arange(len(span.each), device=new.device)[some]
                self.kv[slot][:, each, :, span.each[some]] = new[:, :, :, 0].transpose(0, 1)      # (b, 2, H, D)
            return self.kv[slot, :, some, :, :span.end], span.mask if span.mask is None or len(span.mask) == 1 else span.mask[some]
        return put

    def lone(self, span, k):
        """What the attention of one new token at step k reads, its own place last and still to be written: (2, B, H, end, D)."""
        return self.kv[(k - 1) % self.slots, ..., :span.end, :]

    def leave(self, span, rows, k):
        """Rows (None for all) that stop after step k: their tokens fill the slots that they did not reach."""
        if k >= self.slots:
            return
        if span.each is None:
            some = slice(None) if rows is None else rows
            self.kv[k:, :, some, :, span.start:span.end] = self.kv[k - 1, :, some, :, span.start:span.end]
        else:
            rows = torch.arange(len(span.each), device=self.kv.device) if rows is None else rows
            self.kv[k:, :, rows, :, span.each[rows]] = self.kv[k - 1][:, rows, :, span.each[rows]].unsqueeze(1)  # (b, slots - k, 2, H, D)


class RecurrentGroup(nn.Module):
    """
    Looped layers `core` (a list of blocks) with input injection. index: which group of the model this is, from 0.

    config.injection: 'concat', one Linear(2C -> C) on [x ; e] (Geiping 3.2); 'add', x + e; 'none', nothing, x^(0) is then e.
    """

    def __init__(self, core, config, index=0):
        super().__init__()
        self.core, self.norm = nn.ModuleList(core), nn.RMSNorm(config.n_embd, eps=1e-6)
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False) if config.injection == 'concat' else None
        self.injection, self.bptt_k, self.step_noise = config.injection, config.bptt_k, config.step_noise
        self.x0, self.norm_inside = config.x0 if config.injection != 'none' else 'e', config.norm_inside
        self.block_size, self.index, self.tables = config.block_size, index, {}
        self.rank, self.world, self.generator, self.checkpoint_steps = 0, 1, None, False     # of training, set by train.py
        self.lone = None

    def noise(self, like, purpose, noise_seed, pos):
        """Noise for x^(0) or a step: fresh while training; otherwise a function of (noise_seed, group, purpose, position) alone."""
        if self.training:       # all processes draw the whole batch's, so that their number changes nothing, and take their rows
            B, *shape = like.shape
            return truncated_noise(B * self.world, *shape, generator=self.generator, device=like.device)[B * self.rank:][:B]
        if self.tables.get('seed') != (noise_seed, like.device):
            self.tables = dict(seed=(noise_seed, like.device))
        if purpose not in self.tables:      # drawn on the CPU, so that every device sees the same
            generator = torch.Generator().manual_seed(derived_seed(noise_seed, 'state', self.index, purpose))
            table = truncated_noise(self.block_size, like.shape[-1], generator=generator)
            self.tables[purpose] = table.to(like.device)
        return self.tables[purpose][pos].expand_as(like)

    def init_state(self, e, noise_seed=0, pos=None):
        """x^(0) for the stream e (B, T, C) at positions pos, (T,) or (B, T), 0 ... T-1 unless given. float32."""
        if self.x0 != 'noise':              # with injection 'none' it is e: nothing else would bring the input in
            return e.float() if self.x0 == 'e' else torch.zeros_like(e, dtype=torch.float32)
        return self.noise(e, 0, noise_seed, slice(e.shape[1]) if pos is None else pos)

    def inject(self, e):
        """The part of the adapter that no step changes, once a pass: (weight on x (C, C), e's share of the sum (B, T, C))."""
        if self.injection != 'concat':
            return None, e
        on_x, on_e = self.adapter.weight.chunk(2, dim=1)
        return on_x, F.linear(e, on_e).to(e.dtype)      # a product may be bf16 under autocast, its sum is not

    def step(self, x, e, injected=None, kvs=None):
        """One block map x^(k-1) -> x^(k), (B, T, C) float32. injected = inject(e); kvs: a hook for each layer of the core."""
        on_x, share = self.inject(e) if injected is None else injected
        if self.injection == 'concat':      # = adapter(cat([x, e])), the state kept in float32
            x = F.linear(x, on_x).to(x.dtype) + share
        elif self.injection == 'add':
            x = x + share
        for i, block in enumerate(self.core):
            x = block(x, kvs and kvs[i])
        return self.norm(x) if self.norm_inside else x      # Geiping 3.2: n_c at the end of the core, every step

    def compile_lone(self, **how):
        """Compile the step of one new token a row, once for all positions, loop steps and loop counts. how: torch.compile's."""
        def step(x, on_x, share, *views):
            def put(view):
                def kv(new):        # as KeysValues.at, on a view that ends at the token
                    view[..., -1:, :] = new
                    return view, None
                return kv
            return self.step(x, None, (on_x, share), [put(view) for view in views])
        torch._dynamo.config.recompile_limit = 64       # all groups share this code, and each has a graph or two
        self.lone = torch.compile(step, dynamic=True, **how)

    def forward(self, e, n_loop, exit=None, readout=None, noise_seed=0, span=None, caches=None, x0=None, trace=None):
        """
        e (B, T, C) -> x (B, T, C), steps_used (B, T), evals (B, T): loop steps kept, block maps evaluated.

        n_loop: loops, or k_max with an exit rule. span, caches: where the tokens stand, and the KeysValues of each layer of the
        core; None for a pass over a whole sequence that leaves none. x0: a first state in place of noise. trace: see model.GPT.
        """
        B, T, _ = e.shape
        span = span or Span(0, T, e.device)
        e = e.float()
        x, split = self.init_state(e, noise_seed, span.pos) if x0 is None else x0, self.inject(e)
        if exit is not None and caches is None:     # side by side all tokens are at one step: one slot is exact
            caches = [KeysValues(1, T) for _ in self.core]

        def step(x, k, rows=None, active=None):
            on_x, share = split
            if self.step_noise:     # paper silent: "fresh noise each time"; 0 by default, its own cosines rule it out
                x = x + self.step_noise * self.noise(x, k, noise_seed, span.pos if rows is None or span.each is None else span.pos[rows])
            if self.lone and T == 1 and rows is active is span.each is None and caches and caches[0].kv is not None:
                return self.lone(x, on_x, share, *(c.lone(span, k) for c in caches))
            kvs = caches and [c.at(span, k, rows, active) for c in caches]
            injected = on_x, share if rows is None else share[rows]
            if self.checkpoint_steps and torch.is_grad_enabled():       # the noise is drawn outside: it must be the same again
                return checkpoint(self.step, x, None, injected, kvs, use_reentrant=False)
            return self.step(x, None, injected, kvs)

        states = None
        if exit is not None:
            if self.training:
                raise ValueError('an exit rule works in evaluation only: call model.eval() first')
            leave = lambda rows, k: [c.leave(span, rows, k) for c in caches]
            x, steps_used, evals = loop_until_exit(step, x, n_loop, exit, readout, leave)
        else:
            states = [x]
            for k in range(1, n_loop + 1):
                with torch.set_grad_enabled(torch.is_grad_enabled() and k > n_loop - self.bptt_k):  # Geiping 3.3; e's
                    x = step(x, k)                                                                  # share is outside
                if trace is not None:
                    states.append(x)
                if k == n_loop - self.bptt_k:
                    torch.clear_autocast_cache()    # footgun: weights cast to bf16 without gradient must not be used with it
            evals = steps_used = torch.full((B, T), n_loop, device=e.device)
        x = x if self.norm_inside else self.norm(x)
        if trace is not None:
            trace.append(dict(e=e.detach(), states=states and torch.stack(states).detach(), steps_used=steps_used, evals=evals))
        return x, steps_used, evals
