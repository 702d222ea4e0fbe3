"""
The KV cache: keys and values of every loop step, and the positions of new tokens.

    python cache.py                     slots of each policy, and what a new token reads

One layer that runs K times makes K different keys for one token, one from each iterate. When a
whole sequence loops side by side, a token at step k attends to the others at their step k. Decoding
token by token must read the same keys, and so the cache has a slot for each loop step:

                  token 0   token 1   token 2 (new)
    slot 0, k=1   key 1     key 1     writes its key 1 here, and reads this line at its step 1
    slot 1, k=2   key 2     key 2     ... at its step 2
    slot 2, k=3   key 3     key 2     ... at its step 3

Token 1 exited after step 2, so a copy of its key 2 stands in the slots of later steps: a token at
step k reads each earlier token at step min(k, the last step that was evaluated for it). Key k is
computed from the state *before* step k. So if a rule throws x^(k) away, slot k still holds the key
of the state that the token keeps. One slot for each loop step is the policy `exact`. With fewer
slots than steps (`ring`, Geiping 5; `latest` has one slot), step k goes to slot (k - 1) % slots.
That takes less memory and changes the result, because older steps are overwritten.

The model looks for a fixed point x = f(x) in which a token's state depends on earlier tokens, so a
cache policy is an iteration scheme. `exact` is Jacobi's: a token at step k reads the earlier ones
as they were at step k. `latest` is Gauss and Seidel's: it reads them as they were at their last
step. `ring` lies in between. Where the last state does not depend on the path, all three reach the
same fixed point. With `exact`, each token that information has to pass through costs up to one more
step; with `latest` all earlier tokens are at their last step before a new one begins.

    B        rows of the batch
    T, end   new tokens; all tokens up to and including them
    H, D     heads; width of a head
    k        the loop step, from 1; a layer outside the groups has only step 1
    cache    of a model: {block: its KeysValues, group: its Moves}, see make_cache
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

FIRST_SLOTS = 32        # slots that are allocated at first; more when a pass reaches them


class Span:
    """
    Where T new tokens stand in their rows: at positions pos, start ... start + T - 1.

    index: their places in the cache. mask (T, end): which tokens each new one may read. None where
    no mask is needed: a single token reads all that is there, and a sequence from position 0 on is
    plainly causal.
    """

    def __init__(self, start=0, T=1, device='cpu'):
        self.start = start
        self.end = start + T
        self.index = slice(start, self.end)
        self.pos = torch.arange(start, self.end, device=device)
        self.mask = None
        if T > 1 and start > 0:
            self.mask = torch.arange(self.end, device=device) <= self.pos[:, None]

    def put(self, kv, slot, new):
        """Write keys and values new (B, T, 2, H, D) into a slot of kv."""
        kv[slot, :, self.index] = new


class KeysValues:
    """
    Keys and values of one layer for up to T_max tokens: kv (slots, B, T_max, 2, H, D).

    It is allocated at the first update, when B, H, D, dtype and device are known, and has more
    slots when a pass takes more steps. Step k is in slot_of(k). The keys of a token that has exited
    or sleeps are copied to the slots of later steps: by `update` while other tokens loop, and by
    `fill` at the end of a pass with an exit rule.

    A subclass overrides slot_of or write (not fill, which fixed loops do not call). It may rely on
    this: a token is first written at k = 1, then at each k while any token of its pass loops. Of a
    token that has exited, or sleeps, `new` holds what the slot of the step before holds (in a ring
    that has wrapped, its own slot): what `write` has put there last. So a subclass that keeps the
    average over the steps leaves that of a sleeping token as it is. But k is not the number of keys
    in that average if the token has slept and woken.
    """

    def __init__(self, slots, T_max):
        self.slots = slots
        self.T_max = T_max
        self.kv = None

    def allocate(self, B, new):
        """Make room for B rows of keys and values like new (..., H, D)."""
        slots = min(self.slots, FIRST_SLOTS)
        self.kv = new.new_zeros(slots, B, self.T_max, 2, *new.shape[-2:])

    def update(self, new, span, k=1, awake=None):
        """
        Write the new tokens' keys and values at loop step k, and read those of all tokens so far.

        new (B, T, 2, H, D) -> keys and values (B, end, 2, H, D) and the mask for attention. awake
        (B, T): which of the new tokens are computed in this step, None = all.
        """
        if self.kv is None:
            self.allocate(len(new), new)
        slot = self.slot_of(k)
        if slot >= len(self.kv):
            # twice as many slots. In all of them earlier tokens have their last keys, which stand
            # in the last slot
            n_more = min(len(self.kv), self.slots - len(self.kv))
            more = self.kv[-1:].expand(n_more, *self.kv.shape[1:])
            self.kv = torch.cat((self.kv, more))
        if awake is not None:
            # the last keys of a token that is not computed stand one slot back. In a ring that has
            # wrapped, this slot keeps what it has, which may be the keys of an older step
            source = self.slot_of(k - 1) if k <= self.slots else slot
            before = self.kv[source]
            new = torch.where(awake[..., None, None, None], new, before[:, span.index])
        self.write(new, slot, span, k)
        # like kv[slot], of which torch.compile would make a graph for each slot
        return self.kv.select(0, slot)[:, :span.end], span.mask

    def update_some(self, new, B, rows, places, near):
        """
        Write the keys and values of N tokens alone, in a cache of one slot and B rows, and read
        those that each of them needs: for exits.loop_awake.

        new (1, N, 2, H, D) of the tokens at places (N,) of rows (N,). near (N, W): the places that
        each of them reads, below 0 = none. Returns what each reads, (1, N, W, 2, H, D), and which
        of these are there (N, W).
        """
        if self.kv is None:
            self.allocate(B, new)
        self.kv[0, rows, places] = new[0]
        return self.kv[0, rows[:, None], near.clamp(min=0)][None], near >= 0

    def slot_of(self, k):
        """The slot that holds loop step k."""
        return (k - 1) % self.slots

    def write(self, new, slot, span, k):
        """Store new (B, T, 2, H, D), the keys and values of step k, in a slot."""
        span.put(self.kv, slot, new)

    def fill(self, span, k):
        """Step k was the last of a pass: copy its keys to the slots of later steps, if any."""
        if k < len(self.kv):
            self.kv[k:, :, span.index] = self.kv[k - 1, :, span.index]


class Moves:
    """
    Who moved at which loop step, see exits.Tokens: moved[b, t, k - 1] of row b and token t.

    A cache with a slot for each step keeps them, so that a token that is decoded alone sleeps and
    wakes as in a pass with the others. Under `latest` it reads their last states, which are still.
    """

    def __init__(self, T_max):
        self.T_max = T_max
        self.moved = None

    def begin(self, B, T, start):
        """Begin a pass of new tokens (B, T): forget what an earlier pass stored for them."""
        if self.moved is None:
            self.moved = np.zeros((B, self.T_max, FIRST_SLOTS), dtype=bool)
        self.start = start
        self.end = start + T
        self.moved[:, start:self.end] = False

    def step(self, moved, k, readers):
        """
        Who of the new tokens moved in step k (B, T), which it stores -> who of them loops in the
        next step (B, T), and if nobody does, whether news of an earlier token is still to come.
        readers: see exits.Tokens.
        """
        if k > self.moved.shape[2]:
            self.moved = np.concatenate((self.moved, np.zeros_like(self.moved)), axis=2)
        self.moved[:, self.start:self.end, k - 1] = moved
        awake = readers(self.moved[:, :self.end, k - 1])[:, self.start:]
        if awake.any():
            return awake, False
        later = self.moved[:, :self.end, k:].any(axis=2)                        # (B, end)
        return awake, readers(later)[:, self.start:].any()


# the cache of a model -----------------------------------------------------------------------------

class Policy(NamedTuple):
    make: Callable              # loop budget, slots of a ring, tokens to hold -> KeysValues
    # do prompts loop until they have converged? For policies under which a new token reads the last
    # states of earlier ones, not those of its own step
    converge: bool = False

    def keeps_every_step(self, n_loop, ring=8):
        """Does each loop step have a slot? A rule that wakes needs that to decode a lone token."""
        return not self.converge and self.make(n_loop, ring, 1).slots == n_loop


# to add a policy, write a line here, and a subclass of KeysValues with a slot_of or a write
POLICIES = {
    'exact': Policy(lambda n_loop, ring, T_max: KeysValues(n_loop, T_max)),
    'ring': Policy(lambda n_loop, ring, T_max: KeysValues(min(n_loop, ring), T_max)),
    'latest': Policy(lambda n_loop, ring, T_max: KeysValues(1, T_max), converge=True),
}


def check_policy(policy, ring):
    """ValueError for an unknown policy, or a ring without a slot."""
    if policy not in POLICIES:
        raise ValueError(f"unknown cache policy '{policy}': choose one of {', '.join(POLICIES)}, "
                         'or None to recompute the context; name a file of your own behind the '
                         'script')
    if ring < 1:
        raise ValueError(f'the ring must have at least 1 slot, not {ring}')


def make_cache(model, counts, policy='exact', ring=8, T_max=None, wakes=False):
    """
    An empty cache: {block: KeysValues} for every block of the model and, if tokens may wake and
    each loop step has a slot, {group: Moves}.

    counts: the loop budget of each group. ring: slots of that policy. T_max: tokens to hold,
    block_size by default and at most. wakes: of the rule of the passes. ValueError for an unknown
    policy, a ring without a slot, or more tokens.
    """
    check_policy(policy, ring)
    block_size = model.config.block_size
    T_max = T_max or block_size
    if T_max > block_size:
        raise ValueError(f'a sequence of {T_max} tokens does not fit block_size = {block_size}')
    cache = {block: KeysValues(1, T_max) for block in model.h if block not in model.groups}
    for group, n_loop in zip(model.groups, counts):
        cache |= {block: POLICIES[policy].make(n_loop, ring, T_max) for block in group.core}
        if wakes and POLICIES[policy].keeps_every_step(n_loop, ring):
            cache[group] = Moves(T_max)
    return cache


# the demonstration --------------------------------------------------------------------------------

n_loop = 8                  # loop steps
ring = 4                    # slots of the ring policy


def main():
    if not 1 <= n_loop <= 100 or ring < 1:
        raise ValueError('n_loop must lie between 1 and 100 to be shown, and ring be at least 1, '
                         f'not {n_loop} and {ring}')
    exited = max(1, n_loop // 2), n_loop        # the last steps of two tokens
    print('slots of a looped layer, and which keys a new token reads at its steps, of two tokens '
          f'that exited\nafter {exited[0]} and {exited[1]}\n')
    print('policy   slots   step ' + ' '.join(f'{k:5d}' for k in range(1, n_loop + 1)))
    for name, policy in POLICIES.items():
        kv = policy.make(n_loop, ring, 3)
        for position, steps in enumerate(exited):
            for k in range(1, steps + 1):       # a key whose value is its loop step
                kv.update(torch.full((1, 1, 2, 1, 1), float(k)), Span(position), k)
            kv.fill(Span(position), steps)
        reads = []
        for k in range(1, n_loop + 1):
            read, _ = kv.update(torch.zeros(1, 1, 2, 1, 1), Span(2), k)
            reads.append(','.join(f'{step:g}' for step in read[0, :2, 0, 0, 0].tolist()))
        print(f'{name:8s} {kv.slots:5d}  reads ' + ' '.join(f'{what:>5s}' for what in reads))


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
