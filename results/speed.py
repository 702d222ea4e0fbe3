"""
How fast decoding and training are, as ratios of things that are timed in turn.

    python -m results.speed                     all of it: a minute on two cores
    python -m results.speed --only=machinery    checks, passes, machinery, products

All of it uses random weights. A ratio is the median of all rounds.

    counts      loops of each group
"""
import time
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import torch

from cache import KeysValues, Span
from common.configurator import configure, run
from decode import make_cache, prefill
from exits import EXITS, make_exit
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------
only: Literal['all', 'checks', 'passes', 'machinery', 'products'] = 'all'
rounds = 9                  # of each comparison
batch_size = 16             # of `machinery`, in which windows have 48 tokens
injection = 'concat'        # of the looped model in `machinery`
# ------------------------------------------------------------------------------------------------


def seconds_of(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(*works, repeats=None):
    """Call each work once to warm up, then all in turn -> their seconds (works, repeats)."""
    times = [[seconds_of(work) for work in works] for _ in range(1 + (repeats or rounds))]
    return np.array(times[1:]).T


def ms(seconds, tokens):
    """The median, in milliseconds a token."""
    return f'{1e3 * np.median(seconds) / tokens:.2f} ms'


def ratio(a, b):
    """The median of the ratios of pairs, with its quartiles."""
    low, median, high = np.percentile(a / b, [25, 50, 75])
    return f'ratio {median:.2f} (quartiles {low:.2f}, {high:.2f})'


# decoding ---------------------------------------------------------------------------------------

@torch.no_grad()
def checks():
    """What a rule's check adds to a loop step of one layer, for a single token."""
    for shape in (dict(n_embd=96, n_head=2, vocab_size=257),
                  dict(n_embd=192, n_head=4, vocab_size=4096), dict()):
        model = GPT(GPTConfig(block_size=64, n_layer=2, groups=[[0]], **shape)).eval()
        group, e, n = model.groups[0], torch.randn(1, 1, model.config.n_embd), 8

        def loop(rule):
            read = model.reader(rule) if rule else None
            group(e, n, rule, read, 0, Span(), [KeysValues(n, 1)])
        for name in EXITS:
            works = partial(loop, make_exit(name, 0.0)), partial(loop, None)
            checked, plain = in_turn(*works, repeats=3 * rounds)
            print(f'checks: C = {model.config.n_embd}, V = {model.config.vocab_size}: {name} adds '
                  f'{100 * np.median(checked / plain - 1):.0f}% to a loop step')


@torch.no_grad()
def passes():
    """A pass over the tokens of a wave at the paper's shape; one token with 12 and 30 loops."""
    model, first = GPT(GPTConfig(block_size=64)).eval(), 32
    idx = torch.randint(50257, (1, first + 16))
    cache = make_cache(model, [1] * 3, 'latest')
    prefill(model, [idx[0, :first]], [1] * 3, None, 0, cache)

    def one_pass(tokens, loops):
        x, *_ = model.hidden(idx[:, first:first + tokens], [loops] * 3, span=Span(first, tokens),
                             cache=cache)
        model.lm_head(x)
    cases = [(1, 12), (1, 30), *product((1, 2, 4, 8, 16), (1, 2, 3))]
    times = in_turn(*(partial(one_pass, *case) for case in cases))
    for case, seconds in zip(cases, times):
        ratios = (f'{np.median(seconds / others):.2f}' for others in times[:2])
        print('passes: {} tokens, {} loops: '.format(*case) + f'{ms(seconds, 1)}; over one token '
              f'with 12 and 30 loops {", ".join(ratios)}')


# training ---------------------------------------------------------------------------------------

def machinery():
    """Training speed of an equally deep plain stack over the default model's at 5 loops."""
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


def products():
    """A training step of config/medium.py's shape, and its matrix products alone."""
    model = GPT(GPTConfig(block_size=128, vocab_size=4096, n_layer=12, n_head=4, n_embd=192,
                          groups=[[4], [5, 6], [7]], bptt_k=4))
    idx, shapes = torch.randint(4096, (batch_size, 128)), []
    hooks = [layer.register_forward_hook(lambda layer, args, _: shapes.append((
        args[0].flatten(0, -2).shape[0], *layer.weight.shape, torch.is_grad_enabled())))
        for layer in model.modules() if isinstance(layer, torch.nn.Linear)]

    def step():
        torch.manual_seed(0)
        model(idx, idx, n_loop=7)[1].backward()
        model.zero_grad()
    step()
    for hook in hooks:
        hook.remove()
    # with gradients a layer has three products: of the forward pass, and of both gradients
    operands = {shape: (torch.randn(shape[0], shape[2]), torch.randn(shape[1], shape[2]),
                        torch.randn(shape[0], shape[1])) for shape in set(shapes)}

    def bare():
        for shape in shapes:
            x, w, grad = operands[shape]
            x @ w.T
            if shape[3]:
                grad @ w, grad.T @ x
    whole, alone = in_turn(step, bare, repeats=3)
    flops = sum(2 * rows * a * b * (3 if grad else 1) for rows, a, b, grad in shapes)
    print(f'products: {flops / 1e9:.0f} GFLOP, {flops / np.median(whole) / 1e9:.0f} GFLOP/s in a '
          f'training step, {flops / np.median(alone) / 1e9:.0f} alone: {ratio(alone, whole)}')


def main():
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    for measure in (checks, passes, machinery, products):
        if only in ('all', measure.__name__):
            measure()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
