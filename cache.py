"""
Keys and values of every loop step, and the places where tokens stand.

Not run by itself: loops.py and decode.py hand the `update` of a KeysValues to each attention.

One layer that runs K times makes K different keys for one token, one from each iterate. When a
whole sequence loops side by side, a token at step k meets the others at their step k. Decoding
token by token must meet the same keys, and so the cache has a slot for each loop step:

                  token 0   token 1   token 2 (new)
    slot 0, k=1   key 1     key 1     writes its key 1 here, and reads this line at its step 1
    slot 1, k=2   key 2     key 2     ... at its step 2
    slot 2, k=3   key 3     key 2     token 1 stopped after step 2: its key 2 stands here too

So a token at step k meets every earlier one at step min(k, the last step that was evaluated on that
one; `accel` evaluates one more than it keeps). That is the policy `exact`. With fewer slots than
steps (`ring`, Geiping 5; `latest` has one slot) step k goes to slot (k - 1) % slots: less memory
and another path, since older steps are written over.

A sequence looks for states x = f(x) in which a token's state depends on those before it, so a
policy is a scheme to solve that by iteration:

    exact     at step k all tokens as they were at step k             Jacobi
    latest    the earlier tokens as they are at the end, settled      Gauss-Seidel
    ring      something in between

Where loops are path independent all end at the same fixed point. They differ in memory, and in the
steps to get there: what has to pass through many tokens moves on by one block map a step with
`exact`, while with `latest` a new token finds it beside it.

    B, b     rows of the batch; those of them that still loop
    T, end   new tokens; all tokens up to and with them
    H, D     heads; width of a head
    k        the loop step, from 1; a layer outside the groups has step 1 alone
"""
from functools import partial

import numpy as np
import torch
import torch.nn as nn

from exits import wait_for_past


class Span:
    """
    Where T new tokens stand in their rows: at positions start ... start + T - 1.

    start: an int, or for T = 1 a list with the position in each row.
    pos: the positions, (T,), or (B, 1) where the rows differ (`ragged`). end: one past the last.
    mask (1 or B, 1, T, end): what each new token may see. None where no mask is needed: a single
    token sees all that is there, and a sequence from position 0 on is plainly causal.
    """

    def __init__(self, start=0, T=1, device='cpu'):
        starts = start if isinstance(start, list) else [start]
        self.starts = np.array(starts)
        self.start, self.end = max(starts), max(starts) + T
        self.ragged = len(set(starts)) > 1
        if self.ragged:
            self.pos = torch.tensor(starts, device=device)[:, None]             # (B, 1)
        else:
            self.pos = torch.arange(self.start, self.end, device=device)        # (T,)
        self.mask = None
        if self.ragged or T > 1 and self.start > 0:
            visible = torch.arange(self.end, device=device) <= self.pos[..., None]
            self.mask = visible.view(-1, 1, T, self.end)                # (1 or B, 1, T, end)


class Rotary(nn.Module):
    """Rotary positions: adjacent pairs (x0, x1), (x2, x3), ... turned by position times speed."""

    def __init__(self, config):
        super().__init__()
        D = config.n_embd // config.n_head
        # on the CPU, also where the weights are shapes alone (checkpoint.py)
        place, pair = (torch.arange(n, device='cpu') for n in (config.block_size, D // 2))
        angle = place[:, None] * config.rope_base ** -(2 * pair / D)        # (block_size, D / 2)
        self.register_buffer('cos', angle.cos(), persistent=False)
        self.register_buffer('sin', angle.sin(), persistent=False)

    def forward(self, x, pos):
        """x (B, H, T, D), in float32 inside. pos (T,) or (B, T); None = 0 ... T - 1."""
        pos = slice(x.shape[2]) if pos is None else pos[:, None] if pos.dim() == 2 else pos
        cos, sin = self.cos[pos], self.sin[pos]                     # (T, D / 2) or (B, 1, T, D / 2)
        pairs = x.float().unflatten(-1, (-1, 2))                    # (B, H, T, D / 2, 2)
        if torch.compiler.is_compiling():       # it knows no complex numbers, and fuses these
            x0, x1 = pairs.unbind(-1)
            turned = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1)
        else:                                   # the same, in a quarter of the time on a CPU
            turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
        return turned.flatten(-2).to(x.dtype)


class KeysValues:
    """
    Keys and values of one layer for up to T_max tokens, both (slots, B, H, T_max, D).

    They are allocated at the first update, when B, H, D, dtype and device are known.
    """

    def __init__(self, slots, T_max):
        self.slots, self.T_max = slots, T_max
        self.keys = self.values = None
        self.signals = None         # of the first layer of a group, see Signals

    def update(self, keys, values, span, k=1, rows=None, active=None):
        """
        Write what the new tokens have at loop step k, and read what is there for all tokens so far.

        keys, values (b, H, T, D) -> keys, values (b, H, end, D) and the mask for attention.
        k: the same for all, or (b,), where rows are at steps of their own and `rows` says which.
        rows (b,): which rows these are, None for all. active (b, T): the tokens that still loop,
        None for all; a token that has stopped keeps what its last block map left in the slots.
        """
        if self.keys is None:
            B, H, _, D = keys.shape
            self.keys = keys.new_zeros(self.slots, B, H, self.T_max, D)
            self.values = torch.zeros_like(self.keys)
        slot = (k - 1) % self.slots if self.slots > 1 else 0
        b = slice(None) if rows is None else rows
        new = slice(span.start, span.end)
        if active is not None:
            # with a slot for each step, what a stopped token left moves on from slot to slot; in a
            # shorter ring each slot keeps what was last written there. (Ragged rows have one token
            # each, so that a row of theirs leaves as a whole, and active is None.)
            last = k - 2 if 1 < k <= self.slots else slot
            active = active[:, None, :, None]
            keys = torch.where(active, keys, self.keys[last, b, :, new])
            values = torch.where(active, values, self.values[last, b, :, new])
        if span.ragged:
            row, pos = self.places(span, rows)
            self.keys[slot, row, :, pos] = keys[:, :, 0]                        # (b, H, D)
            self.values[slot, row, :, pos] = values[:, :, 0]
        else:
            self.keys[slot, b, :, new] = keys
            self.values[slot, b, :, new] = values
        mask = span.mask
        if rows is not None and mask is not None and len(mask) > 1:
            mask = mask[rows]
        if rows is None:
            return self.keys[slot, :, :, :span.end], self.values[slot, :, :, :span.end], mask
        # slots and rows as one dimension: to select from it is the fastest copy
        at = slot * self.keys.shape[1] + rows
        keys, values = (store.flatten(0, 1)[:, :, :span.end].index_select(0, at)
                        for store in (self.keys, self.values))
        return keys, values, mask

    def at(self, **where):
        """The hook for attention, keys, values -> all keys, all values, mask; where: see update."""
        return partial(self.update, **where)

    def fill(self, rows, k, span):
        """Rows (None for all) stop after step k: it stands for the later steps in their slots."""
        if k >= self.slots:
            return
        for store in (self.keys, self.values):
            if span.ragged:
                row, pos = self.places(span, rows)
                store[k:, row, :, pos] = store[k - 1][row, :, pos].unsqueeze(1)     # (b, 1, H, D)
            else:
                b, new = slice(None) if rows is None else rows, slice(span.start, span.end)
                store[k:, b, :, new] = store[k - 1, b, :, new]

    def places(self, span, rows):
        """Row numbers and positions (b,) of ragged rows."""
        row = torch.arange(len(span.pos), device=self.keys.device) if rows is None else rows
        return row, span.pos[row, 0]

    def views(self, span, k):
        """What one new token a row will read at step k, (B, H, end, D) each, itself the last."""
        slot = (k - 1) % self.slots
        return self.keys[slot, :, :, :span.end], self.values[slot, :, :, :span.end]

    def keep_rows(self, rows):
        """Forget all but these rows of the batch."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        if self.signals and self.signals.largest is not None:
            self.signals.largest = self.signals.largest[rows]


class Signals:
    """
    For rules that wait for the past: the largest signal of the tokens of a row up to each place, of
    those that looped at each step, (rows, 1 + T_max, k_max); -inf where there was none. Places
    count from 1, so that there is one before the first token.

    So a token that comes alone waits as it would beside the others. Only `exact` has them: `latest`
    shows a new token the others as they ended, and there is nothing to wait for.
    """

    def __init__(self, T_max, k_max):
        self.shape, self.largest = (1 + T_max, k_max), None

    def begin(self, span, rows):
        """A pass over new tokens; what an earlier one left at their places is forgotten."""
        if self.largest is None:
            self.largest = np.full((rows, *self.shape), -np.inf, dtype=np.float32)
        self.lone = rows == 1 and span.end == span.start + 1
        if self.lone:       # one token, in a fraction of the time
            self.earlier = self.largest[0, span.start].tolist()             # (k_max,)
            self.new = self.largest[0, span.end]
            self.new.fill(-np.inf)
            return
        row, place = np.arange(rows)[:, None], span.starts[:, None]
        self.ragged = (row, place + 1) if span.ragged else None
        if span.ragged:
            self.earlier = self.largest[row, place]                         # (rows, 1, k_max)
            self.largest[self.ragged] = -np.inf
        else:
            self.earlier = self.largest[:, span.start:span.start + 1]       # (rows, 1, k_max)
            self.new = self.largest[:, span.start + 1:span.end + 1]         # (rows, T, k_max)
            self.new.fill(-np.inf)

    def wait(self, value, active, k, looping):
        """wait_for_past of the rows looping (b,) at step k, for earlier passes too; it is kept."""
        if self.lone:
            value = max(value, self.earlier[k - 1])
            self.new[k - 1] = value
            return value
        rows = slice(None) if len(looping) == len(self.largest) else looping
        value = wait_for_past(value, active, self.earlier[rows, :, k - 1])
        if self.ragged:
            row, place = self.ragged
            self.largest[row[rows], place[rows], k - 1] = value
        else:
            self.new[rows, :, k - 1] = value
        return value
