"""
The rows of a batch while they are continued: context windows, and the draws of the next tokens.

One seed gives one text: the token at a position is drawn by (seed, position) alone, however it is
decoded.

    B, T, V    rows; tokens of a pass; vocab_size
    start      the first token of a row that is in the context window; positions count from there
"""
import math
from functools import lru_cache
from numbers import Integral

import torch

from loops import derived_seed


def choose(logits, temperature, top_k, draws):
    """
    Logits (B, V) -> tokens (B, 1), drawn from softmax(logits / temperature), or from its top_k most
    likely tokens; temperature 0 takes the most likely one. -1 where logits are not finite, which
    Rows.numbers finds.

    draws: (seed, position) of each token; nothing else decides the draw. So every way of decoding
    that gives the same logits gives the same text.
    """
    finite = logits.isfinite().all(dim=-1, keepdim=True)                        # (B, 1)
    if temperature != 0:
        # subtract the largest first, so that a small temperature cannot overflow
        logits = logits.float()
        logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            least = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        noise = torch.stack([gumbel(*draw, logits.shape[-1]) for draw in draws])
        logits = logits + noise.to(logits.device)
    return logits.argmax(dim=-1, keepdim=True).where(finite, -1)


@lru_cache(maxsize=64)      # drafts and waves draw the token at a position several times
def gumbel(seed, position, V):
    """Noise (V,): argmax(log p + gumbel) is a draw from p (the Gumbel-max trick)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'token', position))
    return -torch.empty(V).exponential_(generator=generator).log()


def window(n, block_size):
    """
    Where the context window of a row of n tokens begins.

    At 0 while all tokens fit. When the block is full, the window moves on by half a block, so that
    every later token has at least half a block of context.
    """
    hop = max(1, block_size // 2)
    return hop * max(0, math.ceil((n - block_size) / hop))


class Rows:
    """
    Rows of tokens idx (B, n) that are being continued: their context window, and the draws of what
    follows.

    The last block_size tokens are kept. seed: row i has seed + i, or give a list of them; None
    draws it from torch's. start: where the context window begins.
    """

    def __init__(self, idx, block_size, temperature=1.0, top_k=None, seed=None):
        if seed is None:
            seed = torch.randint(2 ** 62, ()).item()
        if isinstance(seed, Integral):
            seed = [int(seed) + i for i in range(len(idx))]
        if len(seed) != len(idx):
            raise ValueError(f'seed must be an int, or one for each of the {len(idx)} rows, not '
                             f'{seed}')
        self.seeds, self.idx, self.start = seed, idx[:, -block_size:], 0
        self.cut = idx.shape[1] - self.idx.shape[1]     # draws count these tokens too
        self.block_size, self.temperature, self.top_k = block_size, temperature, top_k

    @property
    def window(self):
        """The tokens that the context window holds."""
        return self.idx[:, self.start:]

    @property
    def last(self):
        """The last token of each row (B, 1), which no pass has read yet."""
        return self.idx[:, -1:]

    @property
    def position(self):
        """Its position in the context window."""
        return self.idx.shape[1] - 1 - self.start

    def draw(self, logits, skip=0):
        """
        Logits (B, T, V) -> the next T tokens of each row (B, T). skip: how many tokens that are not
        in the rows yet come before these.
        """
        B, T, _ = logits.shape
        n = self.cut + self.idx.shape[1] + skip
        draws = [(seed, n + i) for seed in self.seeds for i in range(T)]
        return choose(logits.flatten(0, 1), self.temperature, self.top_k, draws).view(B, T)

    @staticmethod
    def numbers(tokens):
        """
        Tokens that were drawn, of any shape, as a list of ints. Here, and for the signals of exit
        rules, the host waits for the device. ValueError if their logits were not finite.
        """
        numbers = tokens.flatten().tolist()
        if min(numbers) < 0:
            raise ValueError('the logits are not finite: the model or its input holds a NaN or an '
                             'infinity')
        return numbers

    def append(self, token):
        """A token (B, 1)."""
        self.idx = torch.cat((self.idx, token), dim=1)
        self.start = window(self.idx.shape[1], self.block_size)
