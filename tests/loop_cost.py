"""
What the loop machinery costs in training: tokens/s of a looped model over those of a plain one.

    python tests/loop_cost.py                       the default model
    python tests/loop_cost.py --n_embd=768 --n_head=12 --rounds=5           another

The plain GPT has as many layers as the looped one evaluates blocks. Both do forward, full
back-propagation and an AdamW step. They run in turn, round by round, and the ratio is of each pair.
"""
import os
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common.configurator import configure, run  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

# ------------------------------------------------------------------------------------------------
rounds = 15
iters = 4                   # training iterations a round
n_loop = 5
n_layer = 6
groups = [[1], [2, 3], [4]]
n_head = 2
n_embd = 96
block_size = 48
batch_size = 16
vocab_size = 257
injection = 'concat'
# ------------------------------------------------------------------------------------------------


def train(model, optimizer, idx):
    """`iters` training iterations on idx (B, T) -> seconds."""
    model.train()
    t = time.perf_counter()
    for _ in range(iters):
        _, loss = model(idx, idx, n_loop=n_loop)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - t


def main():
    # two models that evaluate as many blocks
    n_plain = n_layer + (n_loop - 1) * sum(map(len, groups))
    shape = dict(block_size=block_size, vocab_size=vocab_size, n_head=n_head, n_embd=n_embd,
                 injection=injection, bptt_k=n_loop)
    looped = GPT(GPTConfig(n_layer=n_layer, groups=groups, **shape))
    plain = GPT(GPTConfig(n_layer=n_plain, groups=[], **shape))
    pair = [(model, torch.optim.AdamW(model.parameters(), lr=1e-4)) for model in (looped, plain)]

    # a warm-up, then both in turn
    idx = torch.randint(vocab_size, (batch_size, block_size))
    ratios = []
    for i in range(rounds + 1):
        looped_s, plain_s = (train(model, optimizer, idx) for model, optimizer in pair)
        if i:
            ratios.append(plain_s / looped_s)
    ratios.sort()
    low, median, high = (ratios[share * len(ratios) // 4] for share in (1, 2, 3))
    print(f'{n_layer} layers, groups {groups} at {n_loop} loops, against {n_plain} plain layers, '
          f'C = {n_embd}, {batch_size} x {block_size} tokens, {torch.get_num_threads()} threads')
    print(f'tokens/s, looped over plain: median {median:.3f}, quartiles {low:.3f} {high:.3f}')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
