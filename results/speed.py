"""
How fast decoding and training are, as ratios of things that are timed in turn.

    python -m results.speed                     all of it: twenty minutes, most of which compile
    python -m results.speed --only=machinery    checks, passes, texts, machinery

All of it but `texts` uses random weights. A ratio is the median of all rounds.
"""
from copy import deepcopy
from functools import partial
from itertools import product
from timeit import timeit
from typing import Literal

import numpy as np
import torch

from cache import KeysValues, Span, make_cache
from common.checkpoint import open_run
from common.configurator import configure, run
from decode import compile_passes, prefill
from exits import EXITS, make_exit
from loops import Plan
from model import GPT, GPTConfig

# ------------------------------------------------------------------------------------------------
only: Literal['all', 'checks', 'passes', 'texts', 'machinery'] = 'all'
rounds = 9                  # of each comparison
new_tokens = 48             # of a text
injection = 'concat'        # of the looped model in `machinery`
# ------------------------------------------------------------------------------------------------


def in_turn(*works, repeats):
    """Call each work once to warm up, then all in turn -> their seconds (works, repeats)."""
    times = [[timeit(work, number=1) for work in works] for _ in range(1 + repeats)]
    return np.array(times[1:]).T


def shown(ratios):
    """Their median and quartiles."""
    return '{:.2f} ({:.2f}, {:.2f})'.format(*np.percentile(ratios, [50, 25, 75]))


# decoding ---------------------------------------------------------------------------------------

@torch.no_grad()
def checks():
    """What a rule's check adds to a loop step of one layer, for a single token."""
    for shape in (dict(n_embd=96, n_head=2, vocab_size=257),
                  dict(n_embd=192, n_head=4, vocab_size=4096), dict()):
        model = GPT(GPTConfig(block_size=64, n_layer=2, groups=[[0]], **shape)).eval()
        group, e, n = model.groups[0], torch.randn(1, 1, model.config.n_embd), 8

        def loop(rule):
            cache = {block: KeysValues(n, 1) for block in group.core}
            read = model.reader(rule) if rule else None
            group(e, Plan([n], rule, span=Span(), cache=cache, read=read))
        for name in EXITS:
            works = partial(loop, make_exit(name, 0.0)), partial(loop, None)
            checked, plain = in_turn(*works, repeats=3 * rounds)
            print(f'checks: C = {model.config.n_embd}, V = {model.config.vocab_size}: {name} adds '
                  f'{100 * np.median(checked / plain - 1):.0f}% to a loop step')


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


# training ---------------------------------------------------------------------------------------

def machinery():
    """Training speed of an equally deep plain stack over the default model's at 5 loops."""
    idx = torch.randint(257, (16, 48))

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
    looped, plain = in_turn(*works, repeats=rounds)
    print('machinery: 6 layers, of which 4 loop 5 times, and 22 plain layers, C = 96: tokens/s, '
          f'ratio {shown(plain / looped)}')


def main():
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    for measure in (checks, passes, texts, machinery):
        if only in ('all', measure.__name__):
            measure()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
