"""
A group of layers that loops, its first state, and the draw of how often it loops.

    python loops.py                     loop counts drawn in training, and how the steps of a
                                        trained model shrink
    python loops.py --mean_recurrence=12 --draw=uniform

model.py puts a RecurrentGroup into its list of layers, (B, T, C) -> (B, T, C):

    x = init_state(e)                       x^(0), noise
    repeat n_loop times, or until the exit rule has let every token exit:
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
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
from torch.nn import functional as F

from cache import KeysValues, Span
from common.configurator import configure, run
from exits import loop_until_exit

# -------------------------------------------------------------------------------------------------
mean_recurrence: float = 4.0    # r of the draw, whose mean is r + 1
draw: Literal['lognormal', 'uniform', 'fixed'] = 'lognormal'    # lognormal: Geiping
n_loop = 16                 # loop steps whose norms are shown
# -------------------------------------------------------------------------------------------------


def derived_seed(*key):
    """A 63-bit seed from (seed, purpose, iteration, ...). Different keys give unrelated seeds."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], 'little') >> 1


def sample_n_loop(mean_recurrence, generator=None, sigma=0.5, draw='lognormal'):
    """
    How often to loop: the lognormal-Poisson draw of Geiping Eq. 1 and 2, of mean r + 1.

    n = Poisson(exp(N(log r - sigma^2 / 2, sigma))) + 1. For comparison, two draws of the same
    mean: 'uniform' on 1 ... 2r + 1, and 'fixed' at r + 1 (r rounded).
    """
    r = round(mean_recurrence)
    if draw == 'fixed':
        return r + 1
    if draw == 'uniform':
        return 1 + int(torch.randint(2 * r + 1, (), generator=generator))
    z = torch.randn((), generator=generator)
    log_rate = math.log(mean_recurrence) - sigma ** 2 / 2 + sigma * z
    return 1 + int(torch.poisson(log_rate.exp(), generator=generator))


def truncated_noise(*shape, generator=None, device='cpu'):
    """x^(0) of Geiping App. C.1: a normal of variance 2/5, cut at 3 sigma, like the embedding."""
    # by the inverse normal distribution: twice as fast as redrawing what lies outside 3 sigma
    inside = math.erf(3 / math.sqrt(2))         # the share of a normal within 3 sigma
    uniform = torch.empty(shape, device=device).uniform_(-inside, inside, generator=generator)
    return uniform.erfinv_().mul_(math.sqrt(2) * math.sqrt(2 / 5))


class RecurrentGroup(nn.Module):
    """
    Looped layers `core` (a list of blocks), which get `e` in every step.

    index: which group of the model this is, from 0. config.injection says how e comes in: 'concat',
    one Linear(2C -> C) on [x ; e] (Geiping 3.2); 'add', x + e; 'none', not at all, and x^(0) is e.
    To add one, extend GPTConfig, __init__, inject and step; model.flops_per_token if it multiplies
    matrices; wave.can_wave and find_unused_parameters in train.py if a step may not read e.
    """

    def __init__(self, core, config, index=0):
        super().__init__()
        C = config.n_embd
        self.core = nn.ModuleList(core)
        self.norm = nn.RMSNorm(C, eps=1e-6)
        self.adapter = None
        if config.injection == 'concat':
            self.adapter = nn.Linear(2 * C, C, bias=False)
        self.index, self.block_size = index, config.block_size
        self.injection, self.norm_inside = config.injection, config.norm_inside
        self.bptt_k, self.step_noise = config.bptt_k, config.step_noise
        # paper silent: with injection 'none' only x^(0) can bring in the input
        self.x0 = 'e' if config.injection == 'none' else config.x0
        # for training, set by train.py: rank, world size, noise generator
        self.rank, self.world, self.generator = 0, 1, None
        # for evaluation: the noise of each position, see `noise`
        self.tables, self.tables_of = {}, None

    def noise(self, like, k, noise_seed, pos):
        """Noise (B, T, C) for x^(0) (k = 0), or to be added before step k. pos: see Span."""
        if self.training:
            # every process draws the noise of the whole batch and takes its own rows, so that the
            # number of processes changes nothing
            B, T, C = like.shape
            whole = truncated_noise(B * self.world, T, C, generator=self.generator,
                                    device=like.device)
            return whole[B * self.rank:B * (self.rank + 1)]
        # in evaluation, noise depends only on (noise_seed, group, k, position): a table for each k,
        # kept for the last noise seed used, and drawn on the CPU so that all devices agree
        if self.tables_of != (noise_seed, like.device):
            self.tables, self.tables_of = {}, (noise_seed, like.device)
        if k not in self.tables:
            generator = torch.Generator()
            generator.manual_seed(derived_seed(noise_seed, 'state', self.index, k))
            table = truncated_noise(self.block_size, like.shape[-1], generator=generator)
            self.tables[k] = table.to(like.device)                              # (block_size, C)
        return self.tables[k][pos].expand_as(like)

    def init_state(self, e, noise_seed=0, pos=None):
        """x^(0) for e (B, T, C) at positions pos, (T,) or (B, 1), 0 ... T - 1 by default."""
        if self.x0 == 'e':
            return e.float()
        if self.x0 == 'zero':
            return torch.zeros_like(e, dtype=torch.float32)
        return self.noise(e, 0, noise_seed, slice(e.shape[1]) if pos is None else pos)

    def inject(self, e):
        """What all steps share: the adapter's weight for x, and what e adds (B, T, C)."""
        if self.injection != 'concat':
            return None, e
        on_x, on_e = self.adapter.weight.chunk(2, dim=1)                        # (C, C) each
        # under autocast the product is bf16, but the sum must be float32
        return on_x, F.linear(e, on_e).to(e.dtype)

    def step(self, x, e, injected=None, updates=None, pos=None):
        """
        One block map x^(k-1) -> x^(k), (B, T, C) float32.

        injected: inject(e), if computed already; e is then not used. updates: a cache hook for
        each layer of the core, see KeysValues.update. pos: positions, 0 ... T - 1 by default.
        """
        on_x, share = self.inject(e) if injected is None else injected
        # x = adapter([x ; e]): e's half is the same in every step, so it is computed once
        if self.injection == 'concat':
            x = F.linear(x, on_x).to(x.dtype) + share
        elif self.injection == 'add':
            x = x + share
        for i, block in enumerate(self.core):
            x = block(x, None if updates is None else updates[i], pos)
        # Geiping 3.2: the norm n_c closes the core, in every step
        return self.norm(x) if self.norm_inside else x

    def leave(self, x):
        """The last state -> what the next layer gets."""
        return x if self.norm_inside else self.norm(x)

    def step_of_pass(self, x, k, rows=None, active=None, *, injected, noise_seed, span, caches):
        """Step k of a pass. rows, active: which rows and tokens loop, see exits.loop_until_exit."""
        pos = span.pos[rows] if rows is not None and span.ragged else span.pos
        # paper silent; off by default, since noise in every step rules out the paper's own cosines
        if self.step_noise:
            x = x + self.step_noise * self.noise(x, k, noise_seed, pos)
        # the hooks that write and read the keys and values of step k
        updates = None
        if caches is not None:
            updates = [c.at(span=span, k=k, rows=rows, active=active) for c in caches]
        if rows is not None:
            on_x, share = injected
            injected = on_x, share[rows]
        return self.step(x, None, injected, updates, pos)

    def loop(self, f, x, n_loop, states=None):
        """n_loop steps from x, with gradients through the last bptt_k. states: see states_of."""
        for k in range(1, n_loop + 1):
            # Geiping 3.3. e's share is computed before, so e has gradients whatever bptt_k is
            with_gradient = torch.is_grad_enabled() and k > n_loop - self.bptt_k
            with torch.set_grad_enabled(with_gradient):
                x = f(x, k)
            if states is not None:
                states[k] = x
            if k == n_loop - self.bptt_k:
                # autocast keeps bf16 copies of the weights, made without gradients: drop these, or
                # the later steps would use them, and the weights would get no gradient
                torch.clear_autocast_cache()
        return x

    def forward(self, e, n_loop, exit=None, read=None, noise_seed=0, span=None, caches=None,
                x0=None, trace=None):
        """
        e (B, T, C) -> the last states (B, T, C), see leave; steps_used (B, T), the loop steps kept;
        evals (B, T), the block maps evaluated.

        read: see GPT.reader. span, caches: where the tokens stand, and the KeysValues of each layer
        of the core; None for a pass over a whole sequence. x0: x^(0) of the first tokens. The rest:
        see GPT.forward. ValueError for an exit rule while training.
        """
        if exit is not None and self.training:
            raise ValueError('an exit rule works in evaluation only: call model.eval() first')
        # the first state, and the block map of this pass
        B, T, _ = e.shape
        span = span or Span(0, T, e.device)
        e = e.float()
        x = self.init_state(e, noise_seed, span.pos)
        if x0 is not None:
            x = torch.cat((x0, x[:, x0.shape[1]:]), dim=1)
        if exit is not None and caches is None:
            # a token that has exited must keep its keys, so a rule always needs a cache; one slot
            # is enough, as all tokens are at the same step
            caches = [KeysValues(1, T) for _ in self.core]
        f = partial(self.step_of_pass, injected=self.inject(e), noise_seed=noise_seed, span=span,
                    caches=caches)

        # loop n_loop times, or until the rule has let every token exit
        states = None
        if exit is None:
            states = None if trace is None else states_of(x, n_loop, self.training)
            x = self.loop(f, x, n_loop, states)
            steps_used = evals = torch.full((B, T), n_loop, device=e.device)
        else:
            def fill_slots(rows, k):
                for c in caches:
                    c.fill(rows, k, span)
            signals = caches[0].signals if exit.past else None
            if signals:
                signals.begin(span, B)
            x, steps_used, evals = loop_until_exit(f, x, n_loop, exit, read, fill_slots, signals)
        if trace is not None:
            if self.training:       # with their gradients, for losses like that of zoo/ouro.py
                states = torch.stack(states)                                    # (K+1, B, T, C)
            elif states is not None:
                e, states = e.detach(), states.detach()
            trace.append(dict(e=e, states=states, steps_used=steps_used, evals=evals))
        return x, steps_used, evals


def states_of(x, n_loop, training):
    """Room for the states x^(0) ... x^(n_loop), with x^(0) in it."""
    # a list keeps gradients; one tensor, allocated first, fails early if memory is short
    states = [x] * (n_loop + 1) if training else x.new_empty(n_loop + 1, *x.shape)
    states[0] = x
    return states


# the demonstration --------------------------------------------------------------------------------

@torch.no_grad()
def main():
    # how often training loops
    if not 0 < mean_recurrence <= 100:
        raise ValueError(f'mean_recurrence must lie between 0 and 100, not {mean_recurrence}')
    generator = torch.Generator().manual_seed(0)
    draws = [sample_n_loop(mean_recurrence, generator, draw=draw) for _ in range(10_000)]
    print(f'10,000 {draw} draws at r = {mean_recurrence:g}: mean {sum(draws) / 10_000:.2f}, '
          f'at most {max(draws)}')
    for n in range(1, min(max(draws), round(4 * mean_recurrence) + 4) + 1):
        share = draws.count(n) / 10_000
        print(f'{n:5d} {100 * share:5.1f}% ' + '#' * round(300 * share))

    # the step norms of a trained model's first group
    from common.checkpoint import open_run
    model, *_ = open_run('pretrained/text')
    prompt, trace = 'Returns a new tensor with the same data', []
    model(torch.tensor([[*prompt.encode()]]), n_loop=n_loop, trace=trace)
    norms = trace[0]['states'].diff(dim=0).norm(dim=-1).mean(dim=(1, 2)).tolist()       # (K,)
    print(f'\nstep norms in the first group of pretrained/text, mean over the tokens of {prompt!r}')
    for k, norm in enumerate(norms, start=1):
        print(f'{k:5d} {norm:9.2e}')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
