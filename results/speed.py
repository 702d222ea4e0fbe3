"""
How fast decoding and training are, as ratios of things that are timed in turn.

    python -m results.speed                     all of it: a minute on two cores
    python -m results.speed --only=machinery    one of adaptive, checks, passes, machinery

`adaptive` uses the checkpoint in out_dir and random weights at the paper's shape, `passes` only the
latter. A ratio is the median of all rounds.

    counts      loops of each group
"""
import os
import time
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import torch

from cache import KeysValues, Span
from common.checkpoint import load_checkpoint
from common.configurator import configure, run
from decode import make_cache, one_token, prefill
from exits import EXITS, make_exit
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------
only: Literal['all', 'adaptive', 'checks', 'passes', 'machinery'] = 'all'
out_dir = 'out'
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

def decode_last(model, prompt, counts, rule, n):
    """
    A function that decodes the last n tokens of the prompt (1, T) one by one, with a cache that
    holds the others.
    """
    cache = make_cache(model, counts)
    prefill(model, [prompt[0, :-n]], counts, rule, 0, cache)

    def decode():
        for t in range(prompt.shape[1] - n, prompt.shape[1]):
            one_token(model, prompt[:, t:t + 1], t, counts, rule, 0, cache)
    return decode


@torch.no_grad()
def adaptive():
    """Time of a token with an exit rule over that of a fixed budget with as many block maps."""
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
            works = [decode_last(model, prompt, *way, n) for way in ways]
            ours, at_low, at_high = in_turn(*works, repeats=repeats)
            share = (evals - low).mean()
            fixed = (1 - share) * at_low + share * at_high
            print(f'adaptive: C = {model.config.n_embd}, {name} at tau {tau:g}, {evals.mean():.2f} '
                  f'block maps a group: {ms(ours, n)} a token, a fixed budget of the same mean '
                  f'{ms(fixed, n)}; {ratio(ours, fixed)}')


@torch.no_grad()
def checks():
    """What a rule's check adds to a loop step of one layer, for a single token."""
    for shape in (dict(n_embd=96, n_head=2, vocab_size=257), dict()):
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
        x, _ = model.hidden(idx[:, first:first + tokens], [loops] * 3, span=Span(first, tokens),
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


def main():
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    for measure in (adaptive, checks, passes, machinery):
        if only in ('all', measure.__name__):
            measure()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
