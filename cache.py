"""
The KV cache: keys and values of each loop step, and the positions of new tokens.

One layer that runs K times makes K different keys for one token, one from each iterate. When a
whole sequence loops side by side, a token at step k attends to the others at their step k. Decoding
token by token must read the same keys, and so the cache has a slot for each loop step:

                  token 0   token 1   token 2 (new)
    slot 0, k=1   key 1     key 1     writes its key 1 here, and reads this line at its step 1
    slot 1, k=2   key 2     key 2     ... at its step 2
    slot 2, k=3   key 3     key 2     ... at its step 3

Token 1 exited after step 2, so a copy of its key 2 stands in the slots of later steps (Geiping App.
D.5). Key k is computed from the state *before* step k. So if a rule throws x^(k) away, key k is
still that of the state that the token keeps.

This is the cache 'exact'. 'latest' has one slot, which each step overwrites: a new token reads the
last keys of earlier ones. A number of slots in between is a ring (Geiping 5): step k goes to slot
(k - 1) % slots.

    B        rows
    T, end   new tokens of a pass; all tokens up to and including them
    H, D     heads, width of a head
    k        the loop step, from 1; a layer outside the groups has only step 1
"""
import torch


class Span:
    """
    Where T new tokens stand in their rows. pos (a tensor) and here (a slice): start ...
    start + T - 1. mask (T, end): which tokens each new one may read; None where none is needed: a
    single token reads all that is there, and a sequence from position 0 on is plainly causal.

    all_of: a pass that is compiled or recorded must not depend on where it stands, so it reads all
    these tokens of the cache, through the mask.
    """

    def __init__(self, start=0, T=1, device='cpu', all_of=None):
        self.start = start
        self.here = slice(start, start + T)
        self.end = all_of or start + T
        self.at_any_place = all_of is not None
        self.pos = torch.arange(start, start + T, device=device)
        self.mask = None
        if self.at_any_place or T > 1 and start > 0:
            self.mask = torch.arange(self.end, device=device) <= self.pos[:, None]


class KeysValues:
    """Keys and values of one layer for up to T_max tokens: kv (slots, B, T_max, 2, H, D)."""

    def __init__(self, slots, T_max):
        self.slots = slots
        self.T_max = T_max
        self.kv = None      # until the first update, when B, H, D, dtype and device are known

    def slot_of(self, k):
        """The slot that holds loop step k."""
        return (k - 1) % self.slots

    def allocate(self, B, new):
        """Make room for B rows of keys and values like new (..., H, D), if there is none yet."""
        if self.kv is None:
            self.kv = new.new_zeros(self.slots, B, self.T_max, 2, *new.shape[-2:])

    def update(self, new, span, k=1, awake=None):
        """
        Write keys and values of new tokens at loop step k, new (B, T, 2, H, D) -> those of all
        tokens so far (B, end, 2, H, D), and the mask for attention. awake (B, T): which of the new
        tokens are awake in this step, None = all, as in step 1; the others keep their last keys
        (in a ring that has wrapped, maybe older ones).
        """
        self.allocate(len(new), new)
        slot = self.slot_of(k)
        if awake is not None:
            # the last keys of a token that is not computed stand one slot back; in a ring that has
            # wrapped it keeps its slot, as a token that has exited leaves it (see fill)
            source = self.slot_of(k - 1) if k <= self.slots else slot
            before = self.kv[source, :, span.here]
            new = torch.where(awake[..., None, None, None], new, before)
        if span.at_any_place:
            # by index tensors: with numbers, the compiler would copy the whole cache in each step
            rows = torch.arange(len(new), device=new.device)[:, None]
            self.kv[torch.full_like(rows, slot), rows, span.pos] = new
        else:
            self.kv[slot, :, span.here] = new
        # as kv[slot], with which torch.compile would build one graph for each slot
        return self.kv.select(0, slot)[:, :span.end], span.mask

    def update_some(self, new, B, rows, pos, near):
        """
        The same for N tokens alone, at pos (N,) of rows (N,), in a cache of one slot and B rows.
        new (1, N, 2, H, D). near (N, W): the positions that each of them reads, below 0 = none ->
        what each reads (1, N, W, 2, H, D), and which of these are there (N, W).
        """
        self.allocate(B, new)
        self.kv[0, rows, pos] = new[0]
        return self.kv[0, rows[:, None], near.clamp(min=0)][None], near >= 0

    def fill(self, span, k):
        """Step k was the last of a pass: copy its keys to the slots of later steps, if any."""
        if k < self.slots:
            self.kv[k:, :, span.here] = self.kv[k - 1, :, span.here]


def slots_of(policy, n_loop):
    """How many slots a cache has: 'exact', 'latest' or a number of slots, for n_loop steps."""
    if policy == 'exact':
        return n_loop
    if policy == 'latest':
        return 1
    if isinstance(policy, int) and policy >= 1:
        return min(policy, n_loop)
    raise ValueError(f"cache must be 'exact', 'latest' or a number of slots, not {policy!r}")


def make_cache(model, counts, policy='exact', T_max=None):
    """
    An empty cache: {block: its KeysValues}. counts: the loop budget of each group. policy: see
    slots_of. T_max: tokens to hold, None = block_size.
    """
    T_max = T_max or model.config.block_size
    layers = {block: KeysValues(1, T_max) for block in model.h if block not in model.groups}
    for group, n_loop in zip(model.groups, counts, strict=True):
        layers |= {block: KeysValues(slots_of(policy, n_loop), T_max) for block in group.core}
    return layers
