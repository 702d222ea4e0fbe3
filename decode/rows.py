"""
The rows of a batch while they are continued: their context windows, and the next tokens' draws.

One seed gives one text: the token at a position is drawn by (seed, position) alone, however it is
decoded.

    B, T, V    rows; tokens of a pass; vocab_size
    start      the first token of a row that is in the context window; positions count from there
"""
import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import torch

from loops import derived_seed


@dataclass(frozen=True)
class Sampling:
    """
    How the next token is drawn from its logits.

    temperature: 0 takes the most likely token. top_k: draw among so many most likely ones, None =
    all. seed: row i has seed + i, or give a list with one for each row; None = draw it from torch's
    generator. ValueError for a temperature or top_k that is out of range.
    """
    temperature: float = 1.0
    top_k: int | None = None
    seed: int | list | None = None

    def __post_init__(self):
        if self.temperature != 0 and not 1e-6 <= self.temperature < 1e30:
            raise ValueError('temperature must be >= 1e-6, or 0 (greedy), not '
                             f'{self.temperature}')
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f'top_k must be at least 1, not {self.top_k}')


def choose(logits, temperature, top_k, draws):
    """
    Logits (B, V) -> tokens (B, 1), drawn from softmax(logits / temperature), or from its top_k most
    likely tokens; temperature 0 takes the most likely one.

    draws: (seed, position) of each token; nothing else decides the draw. So every decoder that
    computes the same logits gives the same text.
    """
    if temperature != 0:
        # subtract the largest first, so that a small temperature cannot overflow
        logits = logits.float()
        logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
        if top_k is not None and top_k < logits.shape[-1]:
            least = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        noise = torch.stack([gumbel(*draw, logits.shape[-1]) for draw in draws])
        logits = logits + noise.to(logits.device)
    return logits.argmax(dim=-1, keepdim=True)


@lru_cache(maxsize=64)      # drafts and waves draw the token at a position several times
def gumbel(seed, position, V):
    """Noise (V,): argmax(log p + gumbel) is a draw from p (the Gumbel-max trick)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'token', position))
    return -torch.empty(V).exponential_(generator=generator).log()


def context_start(n, block_size):
    """
    Where the context window of a row of n tokens begins.

    At 0 while all tokens fit. When the block is full, the context moves on by half a block, so that
    every later token has at least half a block of context.
    """
    hop = max(1, block_size // 2)
    return hop * max(0, math.ceil((n - block_size) / hop))


class Rows:
    """
    Rows of tokens idx (B, n) that are being continued: their context window, the draws of what
    follows, and which of them have ended.

    The last block_size tokens are kept. stop: the tokens that end a row. start: where the context
    window begins.
    """

    def __init__(self, idx, block_size, sampling, stop=()):
        seed = sampling.seed
        if seed is None:
            seed = torch.randint(2 ** 62, ()).item()
        if isinstance(seed, Integral):
            seed = [int(seed) + i for i in range(len(idx))]
        if len(seed) != len(idx):
            raise ValueError(f'seed must be an int, or one for each of the {len(idx)} rows, not '
                             f'{seed}')
        self.seeds = seed
        self.sampling = sampling
        self.block_size = block_size
        self.idx = idx[:, -block_size:]
        self.cut = idx.shape[1] - self.idx.shape[1]     # draws count these tokens too
        self.start = 0
        self.finite = torch.ones((), dtype=torch.bool, device=idx.device)   # all logits so far
        self.stop = list(stop)
        self.stop_on_device = torch.tensor(self.stop, device=idx.device)
        self.ended = [False] * len(idx)         # has the row said one of `stop`?

    @property
    def context(self):
        """The tokens in the context window (B, T)."""
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
        self.finite = self.finite & logits.isfinite().all()
        n = self.cut + self.idx.shape[1] + skip
        draws = [(seed, n + i) for seed in self.seeds for i in range(T)]
        tokens = choose(logits.flatten(0, 1), self.sampling.temperature, self.sampling.top_k, draws)
        return tokens.view(B, T)

    def numbers(self, tokens):
        """
        Drawn tokens of any shape -> a flat list of ints. The host waits for the device here, and
        where an exit rule needs its signals. ValueError if any logits so far were not finite.
        """
        # in one copy to the host: the tokens, and behind them whether all logits were finite
        values = torch.cat((tokens.flatten(), self.finite[None])).tolist()
        finite = bool(values.pop())
        if not finite:
            raise ValueError('the logits are not finite: the model or its input holds a NaN or an '
                             'infinity')
        return values

    def repeat_stop(self, token, steps_used):
        """
        A new token (B, 1) and its loop steps (B, groups). A row that has ended gets its stop token
        again, with 0 steps.
        """
        if not any(self.ended):
            return token, steps_used
        # the last token of such a row is a stop; so the device need not be waited for
        ended = torch.isin(self.last, self.stop_on_device)                      # (B, 1)
        return token.masked_fill(ended, self.stop[0]), steps_used.masked_fill(ended, 0)

    def append(self, token, numbers):
        """The next token of each row (B, 1), and its numbers, B ints."""
        self.idx = torch.cat((self.idx, token), dim=1)
        self.start = context_start(self.idx.shape[1], self.block_size)
        self.ended = [ended or number in self.stop
                      for ended, number in zip(self.ended, numbers)]
