"""
How fast decoding is, as ratios of things that are timed in turn.

    python -m results.speed                     all of it: twenty minutes, most of which compile
    python -m results.speed --only=passes       at the paper's shape, with random weights

A ratio is the median of all rounds.
"""
from copy import deepcopy
from functools import partial
from itertools import product
from timeit import timeit
from typing import Literal

import numpy as np
import torch

from cache import Span, make_cache
from common.checkpoint import open_run
from common.configurator import configure, run
from decode import compile_passes, prefill
from exits import make_exit
from loops import Plan
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------
only: Literal['all', 'passes', 'texts'] = 'all'
rounds = 9                  # of each comparison
new_tokens = 48             # of a text
# ------------------------------------------------------------------------------------------------


def in_turn(*works, repeats):
    """Call each work once to warm up, then all in turn -> their seconds (works, repeats)."""
    times = [[timeit(work, number=1) for work in works] for _ in range(1 + repeats)]
    return np.array(times[1:]).T


def shown(ratios):
    """Their median and quartiles."""
    return '{:.2f} ({:.2f}, {:.2f})'.format(*np.percentile(ratios, [50, 25, 75]))


@torch.no_grad()
def passes():
    """
    A pass over new tokens at the paper's shape, the 33rd and following of a window of 512: over one
    token with 12 and 30 loops, and compiled over eager.
    """
    idx, first = torch.randint(50257, (1, 48)), 32

    def passes_of(model):
        """A function of (tokens, loops)."""
        cache = make_cache(model, [1] * 3, 'latest')
        prefill(model, [idx[0, :first]], Plan([1] * 3, cache=cache))

        def one_pass(tokens, loops):
            plan = Plan([loops] * 3, span=Span(first, tokens), cache=cache, width=tokens)
            x, _ = model.hidden(idx[:, first:first + tokens], plan)
            model.lm_head(x)
        return one_pass
    model = GPT(GPTConfig()).eval()
    eager = passes_of(model)
    cases = [(1, 12), (1, 30), *product((1, 2, 4, 8, 16), (1, 2, 3))]
    times = in_turn(*(partial(eager, *case) for case in cases), repeats=rounds)
    for case, seconds in zip(cases, times):
        ratios = (f'{np.median(seconds / others):.2f}' for others in times[:2])
        tokens, loops = case
        print(f'passes: {tokens} tokens, {loops} loops: {1e3 * np.median(seconds):.2f} ms; '
              f'over one token with 12 and 30 loops {", ".join(ratios)}')

    other = deepcopy(model)
    compile_passes(other, 8)
    compiled = passes_of(other)
    for case in (1, 4), (1, 12), (8, 1), (8, 2):
        fast, slow = in_turn(partial(compiled, *case), partial(eager, *case), repeats=2 * rounds)
        print('passes: {} tokens, {} loops: compiled'.format(*case), shown(fast / slow), flush=True)


def texts():
    """Texts by pretrained/text: two threads, and compiled passes, over one thread."""
    model, compiled = (open_run('pretrained/text', quiet=True)[0] for _ in range(2))
    torch.set_num_threads(1)
    compile_passes(compiled, 8)

    def write(model, threads, how):
        torch.set_num_threads(threads)
        list(model.stream([torch.tensor([*b'The method returns '])], new_tokens, 0, **how))
    rules = [make_exit('norm_rel', 0.05), make_exit('accel', 0.5), make_exit('norm_rel', 0.003)]
    latest = dict(cache='latest')
    for name, how in {
            '8 loops, latest': dict(n_loop=8) | latest, '8 loops, exact': dict(n_loop=8),
            'norm_rel, exact': dict(exit=rules[0]), 'accel, latest': dict(exit=rules[1]) | latest,
            'drafts, 2 of 8': dict(n_loop=8, draft_loops=2),
            'wave, 8 x 1': dict(exit=rules[2], wave=8)}.items():
        begin = timeit(partial(write, compiled, 1, how), number=1)
        one, two, fast = in_turn(partial(write, model, 1, how), partial(write, model, 2, how),
                                 partial(write, compiled, 1, how), repeats=2 * rounds)
        print(f'texts: {name}: {1e3 * np.median(one) / new_tokens:.2f} ms a token; two threads '
              f'{shown(two / one)}, compiled {shown(fast / one)} after {begin:.0f} s', flush=True)


def main():
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    for measure in (passes, texts):
        if only in ('all', measure.__name__):
            measure()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
