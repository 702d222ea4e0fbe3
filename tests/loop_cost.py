"""
What the loop machinery costs: training tokens/s with groups at a fixed n_loop and full back-propagation, over those of a plain
GPT with as many block evaluations.

    python tests/loop_cost.py --rounds=15           the default model; --n_embd=768 --n_head=12 ... for another

The two are run in turn, round by round; the ratio is of each pair. Forward, backward, AdamW step.
"""
import os
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure, run  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
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
# ---------------------------------------------------------------------------------------------------------------------


def main():
    looped = sum(map(len, groups))
    shape = dict(block_size=block_size, vocab_size=vocab_size, n_head=n_head, n_embd=n_embd, injection=injection, bptt_k=n_loop)
    models = [GPT(GPTConfig(n_layer=n_layer, groups=groups, **shape)), GPT(GPTConfig(n_layer=n_layer + (n_loop - 1) * looped, groups=[], **shape))]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4) for m in models]
    idx = torch.randint(vocab_size, (batch_size, block_size))

    def train(i):
        t = time.perf_counter()
        for _ in range(iters):
            models[i].train()(idx, idx, n_loop=n_loop)[1].backward()
            optimizers[i].step()
            optimizers[i].zero_grad()
        return time.perf_counter() - t

    train(0), train(1)
    pairs = [(train(0), train(1)) for _ in range(rounds)]
    ratios = sorted(plain / loops for loops, plain in pairs)
    print(f'{n_layer} layers, groups {groups} at {n_loop} loops, against {n_layer + (n_loop - 1) * looped} plain layers, C = {n_embd}, '
          f'{batch_size} x {block_size} tokens, {torch.get_num_threads()} threads')
    print(f'tokens/s, looped over plain: median {ratios[len(ratios) // 2]:.3f}, quartiles {ratios[len(ratios) // 4]:.3f} {ratios[3 * len(ratios) // 4]:.3f}')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
