"""
How fast decoding is, as ratios of things that are timed in turn. Each line says what it compares.

    python tests/decode_speed.py                    all but the GPU's: two minutes on two cores
    python tests/decode_speed.py --only=stream      one: uncached, stream, adaptive, products, gpu

`uncached` and `adaptive` take the checkpoint in out_dir; all others have random weights.

    counts      loops of each group
    cache       for each layer the keys and values of the tokens so far, see decode.py
"""
import copy
import os
import sys
import time
from functools import partial

import torch
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common.checkpoint import load_checkpoint  # noqa: E402
from common.configurator import configure, run  # noqa: E402
from decode import compile_one_token, make_cache, one_token, prefill, stream  # noqa: E402
from exits import make_exit  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

# ------------------------------------------------------------------------------------------------
only = ''                   # one figure; empty = all that this machine can run
out_dir = 'out'
rounds = 9                  # of each comparison; the median is printed
new_tokens = 64             # of `products`
compile = True              # measure the compiled step too: half a minute
threads = 0                 # 0 = torch's choice; `products` always takes 1
# ------------------------------------------------------------------------------------------------

LAST = 4        # tokens decoded at the end of a full context
LOOPED = 32     # loops of `products`


# timing -----------------------------------------------------------------------------------------

def clock(f):
    """Seconds that f() takes."""
    t = time.perf_counter()
    f()
    return time.perf_counter() - t


def in_turn(*fs, repeats=None):
    """Each f once to warm up, then all in turn, `rounds` times -> a list of seconds for each f."""
    for f in fs:
        f()
    times = [[clock(f) for f in fs] for _ in range(repeats or rounds)]
    return [list(column) for column in zip(*times)]


def quantile(values, quarters):
    """1, 2 or 3 quarters: the lower quartile, the median or the upper one."""
    return sorted(values)[quarters * len(values) // 4]


def ms(seconds, tokens=1):
    """The median in milliseconds a token."""
    return 1e3 * quantile(seconds, 2) / tokens


def ratio(a, b):
    """Median and quartiles of the pairs' ratios, in words."""
    ratios = [x / y for x, y in zip(a, b)]
    low, median, high = (quantile(ratios, quarters) for quarters in (1, 2, 3))
    return f'{median:.2f} (of {len(ratios)} pairs, quartiles {low:.2f} {high:.2f})'


# the pieces that are timed ----------------------------------------------------------------------

def compiled(model):
    """A copy of the model whose step of one token is compiled; as it is with --compile=False."""
    model = copy.deepcopy(model)
    if compile:
        compile_one_token(model)
    return model


def filled_cache(model, prompt, counts, rule=None, n=LAST):
    """A cache that holds the prompt (1, block_size) but for its last n tokens."""
    cache = make_cache(model, counts)
    prefill(model, [prompt[0, :-n]], counts, rule, 0, cache)
    return cache


def decode_last(model, prompt, counts, cache, rule=None, n=LAST):
    """The last n tokens of the prompt, one by one, with the cache."""
    block = model.config.block_size
    for t in range(block - n, block):
        one_token(model, prompt[:, t:t + 1], t, counts, rule, 0, cache)


def recompute_last(model, prompt, counts, n=LAST):
    """The same without a cache: the whole context anew for each token."""
    block = model.config.block_size
    for t in range(block - n, block):
        prefill(model, [prompt[0, :t + 1]], counts, None, 0, None)


# the figures ------------------------------------------------------------------------------------

@torch.no_grad()
def uncached():
    """A token without a cache over one with it, and over one with a compiled step, context full."""
    model, _ = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'))
    full_context(model, 8, rounds)
    full_context(GPT(GPTConfig()).eval(), 12, 2)


def full_context(model, n_loop, repeats):
    block, C = model.config.block_size, model.config.n_embd
    prompt = torch.randint(model.config.vocab_size, (1, block))
    counts = model.loop_counts(n_loop)
    quick = compiled(model)
    slow, fast, faster = in_turn(
        partial(recompute_last, model, prompt, counts),
        partial(decode_last, model, prompt, counts, filled_cache(model, prompt, counts)),
        partial(decode_last, quick, prompt, counts, filled_cache(quick, prompt, counts)),
        repeats=repeats)
    print(f'uncached: block {block}, C = {C}, {n_loop} loops, the last {LAST} tokens: '
          f'{ms(slow, LAST):.2f} ms a token without a cache, {ms(fast, LAST):.2f} with it, '
          f'{ms(faster, LAST):.2f} and compiled; '
          f'ratios to the first {ratio(slow, fast)}, {ratio(slow, faster)}')


def decode_greedily(model, prompt, seconds):
    """new_tokens behind the prompt; the seconds without the prompt's are added to the list."""
    steps = stream(model, [prompt], new_tokens + 1, temperature=0, n_loop=LOOPED)
    next(steps)         # the prompt
    seconds.append(clock(partial(list, steps)))


def bare_products(model, blocks, x, hidden):
    """The matrix products of new_tokens tokens and nothing else. x (1, 1, C), hidden (1, 1, 4C)."""
    on_x, on_e = model.groups[0].adapter.weight.chunk(2, dim=1)
    for _ in range(new_tokens):
        for block in blocks:
            F.linear(x, block.attn.c_attn.weight)
            F.linear(x, block.attn.c_proj.weight)
            F.linear(x, block.mlp.c_fc.weight)
            F.linear(hidden, block.mlp.c_proj.weight)
        for _ in range(LOOPED):
            F.linear(x, on_x)
            F.linear(x, on_e)
        F.linear(x, model.lm_head.weight)


@torch.no_grad()
def products():
    """
    A token over its bare matrix products, on one thread.

    8 layers, the middle 4 looped 32 times, C = 256, V = 512, a prompt of 64 tokens.
    """
    torch.set_num_threads(1)
    C = 256
    model = GPT(GPTConfig(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=C,
                          groups=[[2, 3, 4, 5]])).eval()
    prompt = torch.randint(512, (64,))
    single = [layer for layer in model.h if layer not in model.groups]
    blocks = single + LOOPED * list(model.groups[0].core)
    x, hidden = torch.randn(1, 1, C), torch.randn(1, 1, 4 * C)

    # decode_greedily leaves its times in lists; what in_turn takes of it holds the prompt too
    ours, quick = [], []
    *_, floor = in_turn(partial(decode_greedily, model, prompt, ours),
                        partial(decode_greedily, compiled(model), prompt, quick),
                        partial(bare_products, model, blocks, x, hidden))
    ours, quick = ours[1:], quick[1:]       # without the warm-up
    print(f'products: {ms(ours, new_tokens):.1f} ms a token, compiled {ms(quick, new_tokens):.1f}, '
          f'bare products {ms(floor, new_tokens):.1f}; '
          f'ratios to the last {ratio(ours, floor)}, {ratio(quick, floor)}')


def numbers_touched(model, n_loop):
    """How many weights one token touches, those of a looped layer once a step."""
    touched = sum(p.numel() for p in model.lm_head.parameters())
    C = model.config.n_embd
    for layer in model.h:
        looped = layer in model.groups
        times = n_loop if looped else 1
        own = [p.numel() for name, p in layer.named_parameters() if 'adapter' not in name]
        touched += times * sum(own)
        if looped:      # of the adapter x's half in each step, e's half once
            touched += (n_loop + 1) * C * C
    return touched


def copy_often(target, source, times):
    for _ in range(times):
        target.copy_(source)


@torch.no_grad()
def weights_stream():
    """
    A token over a copy of as many bytes as the weights that it touches.

    12 layers, C = 768, V = 50304, groups 4 / 5-6 / 7 at 12 loops.
    """
    model = GPT(GPTConfig()).eval()
    counts = model.loop_counts(12)
    cache = make_cache(model, counts, T_max=160)
    prefill(model, [torch.randint(50257, (128,))], counts, None, 0, cache)
    token = torch.randint(50257, (1, 1))
    touched = numbers_touched(model, 12)
    quarter = torch.randn(touched // 4)             # well past the caches; copied four times
    whole, read = in_turn(partial(one_token, model, token, 128, counts, None, 0, cache),
                          partial(copy_often, torch.empty_like(quarter), quarter, 4))
    print(f'stream: {ms(whole):.1f} ms a token; as many bytes as the weights it touches, '
          f'{4 * touched / 1e9:.2f} GB, are copied in {ms(read):.1f} ms; '
          f'ratio {ratio(whole, read)}')


@torch.no_grad()
def adaptive():
    """A token with an exit rule over one with a fixed budget of the same mean of block maps."""
    model, _ = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'))
    for name in ('norm', 'accel'):
        same_mean(model, name, 0.1, 12, 3 * rounds)
    model = GPT(GPTConfig(block_size=64)).eval()
    for name in ('norm', 'accel'):
        same_mean(model, name, 1.0, 6, min(rounds, 5))


def same_mean(model, name, tau, n, repeats):
    """The last n tokens of a full context, with the rule and with fixed budgets."""
    rule, prompt = make_exit(name, tau), torch.randint(32, 127, (1, model.config.block_size))
    trace = []
    model(prompt, n_loop=30, exit=rule, trace=trace)
    evals = [group['evals'][0, -n:].float().mean().item() for group in trace]

    # a budget of the same mean lies between two whole ones
    low = [int(e) for e in evals]
    high = [count + 1 for count in low]
    settings = [([30] * len(evals), rule), (low, None), (high, None)]
    times = []
    for _ in range(repeats + 1):
        row = []
        for counts, exit in settings:
            cache = filled_cache(model, prompt, counts, exit, n)
            row.append(clock(partial(decode_last, model, prompt, counts, cache, exit, n)))
        times.append(row)

    # the round that warmed up is left out
    with_rule, at_low, at_high = zip(*times[1:])
    share = sum(e - int(e) for e in evals) / len(evals)
    fixed = [(1 - share) * a + share * b for a, b in zip(at_low, at_high)]
    ratios = [a / b for a, b in zip(with_rule, fixed)]
    print(f'adaptive: C = {model.config.n_embd}, {name} at tau {tau:g}, '
          f'{sum(evals) / len(evals):.2f} block maps a group: {ms(with_rule, n):.2f} ms a token, '
          f'fixed budget of the same mean {ms(fixed, n):.2f}; ratio {quantile(ratios, 2):.2f}')


def decode_and_wait(steps):
    """All tokens that are left, and until the device has computed them."""
    for _ in steps:
        pass
    torch.cuda.synchronize()


@torch.no_grad()
def gpu():
    """The paper's model on CUDA, accel at tau = 1e-2, prompt 128 + 128 tokens, batch 1 and 32."""
    if not torch.cuda.is_available():
        print('gpu: no CUDA device here, not run')
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    model, rule = GPT(GPTConfig()).cuda().eval(), make_exit('accel', 1e-2)
    for B in (1, 32):
        rows = list(torch.randint(50257, (B, 128), device='cuda'))
        for _ in range(2):      # the first warms up
            steps = stream(model, rows, 129, temperature=0, n_loop=30, exit=rule)
            next(steps)         # the prompts
            torch.cuda.synchronize()
            seconds = clock(partial(decode_and_wait, steps))
        print(f'gpu: {torch.cuda.get_device_name()}, batch {B}: '
              f'{1e3 * seconds / 128:.2f} ms a token, {B * 128 / seconds:.0f} tokens/s')


FIGURES = dict(uncached=uncached, stream=weights_stream, adaptive=adaptive, products=products,
               gpu=gpu)


def main():
    if only and only not in FIGURES:
        raise ValueError(f"unknown figure '{only}': choose one of {', '.join(FIGURES)}")
    if threads:
        torch.set_num_threads(threads)
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    for name, measure in FIGURES.items():
        if not only or name == only:
            measure()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
