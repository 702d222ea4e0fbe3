"""
How fast decoding and training are, as ratios of things that are timed in turn.

    python -m results.speed                     all of it: two minutes on two cores
    python -m results.speed --only=products     one of uncached, stream, products ...

`uncached` and `adaptive` take the checkpoint in out_dir, the others random weights. A ratio is the
median of all rounds.

    counts      loops of each group
    cache       for each layer the keys and values of the tokens so far, see decode.py
"""
import os
import time
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from decode import make_cache, one_token, prefill
from exits import make_exit
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------
only: Literal['all', 'uncached', 'stream', 'products', 'adaptive', 'machinery'] = 'all'
out_dir = 'out'
rounds = 9                  # of each comparison
new_tokens = 64             # of `products`
batch_size = 16             # of `machinery`, in which windows have 48 tokens
injection = 'concat'        # of its looped model
# ------------------------------------------------------------------------------------------------

LAST = 4        # tokens decoded at the end of a full context


def seconds_of(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(*works, repeats=None):
    """Call each work once to warm up, then all in turn -> their seconds (works, repeats)."""
    times = [[seconds_of(work) for work in works] for _ in range(1 + (repeats or rounds))]
    return np.array(times[1:]).T


def ms(seconds, tokens=1):
    """The median, in milliseconds a token."""
    return f'{1e3 * np.median(seconds) / tokens:.2f} ms'


def ratio(a, b):
    """The median of the ratios of pairs, with its quartiles."""
    low, median, high = np.percentile(a / b, [25, 50, 75])
    return f'ratio {median:.2f} (quartiles {low:.2f}, {high:.2f})'


# decoding ---------------------------------------------------------------------------------------

def decode_last(model, prompt, counts, cached=True, rule=None, n=LAST):
    """
    A function that decodes the last n tokens of the prompt (1, T) one by one, with a cache that
    holds the others, or without a cache: then the whole context again for each.
    """
    cache = make_cache(model, counts)
    prefill(model, [prompt[0, :-n]], counts, rule, 0, cache)

    def decode():
        for t in range(prompt.shape[1] - n, prompt.shape[1]):
            if cached:
                one_token(model, prompt[:, t:t + 1], t, counts, rule, 0, cache)
            else:
                prefill(model, [prompt[0, :t + 1]], counts, rule, 0, None)
    return decode


@torch.no_grad()
def uncached():
    """A token without a cache over one with it, at the end of a full context."""
    trained, _ = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'))
    for model, n_loop, repeats in ((trained, 8, rounds), (GPT(GPTConfig()).eval(), 12, 2)):
        counts, block = model.loop_counts(n_loop), model.config.block_size
        prompt = torch.randint(model.config.vocab_size, (1, block))
        works = [decode_last(model, prompt, counts, cached) for cached in (False, True)]
        slow, fast = in_turn(*works, repeats=repeats)
        print(f'uncached: block {block}, C = {model.config.n_embd}, {n_loop} loops: '
              f'{ms(slow, LAST)} a token without a cache, {ms(fast, LAST)} with it; '
              f'{ratio(slow, fast)}')


@torch.no_grad()
def stream():
    """A token of the paper's shape at 12 loops over a copy of as many bytes as its weights have."""
    model = GPT(GPTConfig()).eval()
    counts, C = model.loop_counts(12), model.config.n_embd
    # the weights that a token touches: those of a looped layer in every step, but the half of the
    # adapter that reads e once
    touched = model.lm_head.weight.numel()
    for layer in model.h:
        n = sum(p.numel() for p in layer.parameters())
        touched += 12 * (n - C * C) + C * C if layer in model.groups else n
    source = torch.randn(touched // 4)              # well beyond the caches; copied four times
    target = torch.empty_like(source)
    token, copied = in_turn(decode_last(model, torch.randint(50257, (1, 129)), counts, n=1),
                            lambda: [target.copy_(source) for _ in range(4)])
    print(f"stream: {ms(token)} a token; {4 * touched / 1e9:.2f} GB, as many bytes as the weights "
          f'that it touches, are copied in {ms(copied)}; {ratio(token, copied)}')


@torch.no_grad()
def products():
    """A token over its bare matrix products: four layers looped 32 times, C = 256, one thread."""
    n_threads, n_loop = torch.get_num_threads(), 32
    torch.set_num_threads(1)
    model = GPT(GPTConfig(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=256,
                          groups=[[2, 3, 4, 5]])).eval()
    group, prompt = model.groups[0], torch.randint(512, (1, 64 + new_tokens))
    blocks = [layer for layer in model.h if layer is not group] + n_loop * list(group.core)
    x, hidden = torch.randn(1, 1, model.config.n_embd), torch.randn(1, 1, 4 * model.config.n_embd)

    def bare_products():
        on_x, on_e = group.adapter.weight.chunk(2, dim=1)
        for _ in range(new_tokens):
            for block in blocks:
                for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc):
                    F.linear(x, layer.weight)
                F.linear(hidden, block.mlp.c_proj.weight)
            F.linear(x, on_e)
            for _ in range(n_loop):
                F.linear(x, on_x)
            F.linear(x, model.lm_head.weight)
    ours, bare = in_turn(decode_last(model, prompt, [n_loop], n=new_tokens), bare_products)
    torch.set_num_threads(n_threads)
    print(f'products: {ms(ours, new_tokens)} a token, bare products {ms(bare, new_tokens)}; '
          f'{ratio(ours, bare)}')


@torch.no_grad()
def adaptive():
    """A token with an exit rule over one with a fixed budget of the same mean of block maps."""
    trained, _ = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'))
    paper = GPT(GPTConfig(block_size=64)).eval()
    for model, tau, n, repeats in ((trained, 0.1, 12, 3 * rounds), (paper, 1.0, 6, min(rounds, 5))):
        prompt = torch.randint(32, 127, (1, model.config.block_size))
        for name in ('norm', 'accel'):
            rule, trace = make_exit(name, tau), []
            model(prompt, n_loop=30, exit=rule, trace=trace)
            evals = np.array([group['evals'][0, -n:].double().mean().item() for group in trace])
            # a budget of the same mean lies between two whole ones
            low = evals.astype(int)
            ways = [([30] * len(evals), rule), (low.tolist(), None), ((low + 1).tolist(), None)]
            works = [decode_last(model, prompt, counts, rule=exit, n=n) for counts, exit in ways]
            ours, at_low, at_high = in_turn(*works, repeats=repeats)
            share = (evals - low).mean()
            fixed = (1 - share) * at_low + share * at_high
            print(f'adaptive: C = {model.config.n_embd}, {name} at tau {tau:g}, {evals.mean():.2f} '
                  f'block maps a group: {ms(ours, n)} a token, a fixed budget of the same mean '
                  f'{ms(fixed, n)}; {ratio(ours, fixed)}')


# training ---------------------------------------------------------------------------------------

def machinery():
    """Training the default model at 5 loops over training as many plain layers."""
    idx = torch.randint(257, (batch_size, 48))

    def train(model, optimizer):
        for _ in range(4):
            model(idx, idx, n_loop=5)[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    works = []
    for groups, n_layer in (([[1], [2, 3], [4]], 6), ([], 22)):
        model = GPT(GPTConfig(block_size=48, vocab_size=257, n_layer=n_layer, n_head=2, n_embd=96,
                              groups=groups, bptt_k=5, injection=injection))
        works.append(partial(train, model, torch.optim.AdamW(model.parameters(), lr=1e-4)))
    looped, plain = in_turn(*works)
    print('machinery: 6 layers, of which 4 loop 5 times, and 22 plain layers, C = 96: tokens/s, '
          f'{ratio(plain, looped)}')


def main():
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    for measure in (uncached, stream, products, adaptive, machinery):
        if only in ('all', measure.__name__):
            measure()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
