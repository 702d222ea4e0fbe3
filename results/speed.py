"""
How long a pass over several tokens takes at the paper's shape, and what compiling it brings.

    OMP_NUM_THREADS=1 python -m results.speed   four minutes, some of which compile

What is compared is timed in turn; a ratio is the median of all rounds. Random weights.
"""
from copy import deepcopy
from functools import partial
from itertools import product
from timeit import timeit

import numpy as np
import torch

from cache import Span, make_cache
from common.configurator import configure, run
from decode import compile_passes, prefill
from loops import Plan
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------
rounds = 9                  # of each comparison
# ------------------------------------------------------------------------------------------------


def in_turn(*works, repeats):
    """Call each work once to warm up, then all in turn -> their seconds (works, repeats)."""
    times = [[timeit(work, number=1) for work in works] for _ in range(1 + repeats)]
    return np.array(times[1:]).T


@torch.no_grad()
def main():
    """
    A pass over new tokens at the paper's shape, the 33rd and following of a window of 512: over one
    token with 12 and 30 loops, and compiled over eager.
    """
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
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
        print(f'{tokens} tokens, {loops} loops: {1e3 * np.median(seconds):.2f} ms; '
              f'over one token with 12 and 30 loops {", ".join(ratios)}')

    other = deepcopy(model)
    compile_passes(other, 8)
    compiled = passes_of(other)
    for case in (1, 4), (1, 12), (8, 1), (8, 2):
        fast, slow = in_turn(partial(compiled, *case), partial(eager, *case), repeats=2 * rounds)
        ratio = np.percentile(fast / slow, [50, 25, 75])
        print('{} tokens, {} loops: compiled {:.2f} ({:.2f}, {:.2f})'.format(*case, *ratio))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
