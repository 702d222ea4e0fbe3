"""
How fast decoding is, as ratios of things timed in turn in one run. Each line names what is compared with what.

    python tests/decode_speed.py                    all but the GPU's
    python tests/decode_speed.py --only=stream      one of them: uncached, products, stream, adaptive, gpu

Random weights but for `uncached` and `adaptive`, which take the checkpoint in out_dir.
"""
import copy
import os
import sys
import time

import torch
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import configure, run  # noqa: E402
from decode import make_cache, one_token, prefill, stream  # noqa: E402
from exits import make_exit  # noqa: E402
from checkpoint import load_checkpoint  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
only = ''                   # one figure; empty = all that this machine can run
out_dir = 'out'
rounds = 9                  # of each comparison; the median is told
new_tokens = 64             # of `products`
compile = True              # measure the compiled step too: half a minute
threads = 0                 # 0 = torch's choice; `products` always takes 1
# ---------------------------------------------------------------------------------------------------------------------


def clock(f):
    t = time.perf_counter()
    f()
    return time.perf_counter() - t


def in_turn(*fs, repeats=None):
    """Each f once to warm up, then all in turn, `rounds` times -> a list of seconds for each f."""
    for f in fs:
        f()
    times = [[clock(f) for f in fs] for _ in range(repeats or rounds)]
    return [list(column) for column in zip(*times)]


def median(values):
    return sorted(values)[len(values) // 2]


def ratio(a, b):
    pairs = sorted(x / y for x, y in zip(a, b))
    return f'{median(pairs):.2f} (of {len(pairs)} pairs, quartiles {pairs[len(pairs) // 4]:.2f} {pairs[3 * len(pairs) // 4]:.2f})'


@torch.no_grad()
def uncached():
    """A token with a cache, with it and a compiled step, and without, context full: the default checkpoint, and the paper's shape with random weights."""
    model, _ = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'))
    full_context(model, 8, rounds)
    full_context(GPT(GPTConfig()).eval(), 12, 2)


def compiled(model):
    model = copy.deepcopy(model)
    for group in model.groups if compile else ():
        group.compile_lone()
    return model


def full_context(model, n_loop, repeats):
    block, n = model.config.block_size, 4
    prompt = torch.randint(model.config.vocab_size, (1, block))
    counts = model.loop_counts(n_loop)

    def cached(model):
        cache = make_cache(model, counts)
        prefill(model, [prompt[0, :block - n]], counts, None, 0, cache)
        return lambda: [one_token(model, prompt[:, t:t + 1], t, counts, None, 0, cache) for t in range(block - n, block)]

    def recomputed():
        for i in range(n):
            prefill(model, [prompt[0, :block - n + i + 1]], counts, None, 0, None)

    slow, fast, faster = in_turn(recomputed, cached(model), cached(compiled(model)), repeats=repeats)
    print(f'uncached: block {block}, C = {model.config.n_embd}, {n_loop} loops, the last {n} tokens: {1e3 * median(slow) / n:.2f} ms a token without a cache, {1e3 * median(fast) / n:.2f} with it, '
          f'{1e3 * median(faster) / n:.2f} and compiled; ratios to the first {ratio(slow, fast)}, {ratio(slow, faster)}')


@torch.no_grad()
def products():
    """One thread, 8 layers, the middle 4 looped 32 times, C = 256, V = 512, prompt 64: ms a token over the bare products'."""
    torch.set_num_threads(1)
    C, loops = 256, 32
    model = GPT(GPTConfig(block_size=256, vocab_size=512, n_layer=8, n_head=4, n_embd=C, groups=[[2, 3, 4, 5]])).eval()
    prompt = torch.randint(512, (64,))

    def decode(model, seconds):
        steps = stream(model, [prompt], new_tokens + 1, temperature=0, n_loop=loops)
        next(steps)         # the prompt
        seconds.append(clock(lambda: list(steps)))

    x, hidden = torch.randn(1, 1, C), torch.randn(1, 1, 4 * C)
    blocks = [layer for layer in model.h if layer not in model.groups] + list(model.groups[0].core) * loops

    def bare():
        for _ in range(new_tokens):
            for b in blocks:
                F.linear(x, b.attn.c_attn.weight), F.linear(x, b.attn.c_proj.weight), F.linear(x, b.mlp.c_fc.weight), F.linear(hidden, b.mlp.c_proj.weight)
            for _ in range(loops):
                F.linear(x, model.groups[0].inject(x)[0])
            F.linear(x, model.lm_head.weight)

    ours, quick, both = [], [], compiled(model)
    *_, floor = in_turn(lambda: decode(model, ours), lambda: decode(both, quick), bare)
    print(f'products: {1e3 * median(ours[1:]) / new_tokens:.1f} ms a token, compiled {1e3 * median(quick[1:]) / new_tokens:.1f}, bare products {1e3 * median(floor) / new_tokens:.1f}; '
          f'ratios to the last {ratio(ours[1:], floor)}, {ratio(quick[1:], floor)}')


@torch.no_grad()
def weights_stream():
    """12 layers, C = 768, V = 50304, groups 4 / 5-6 / 7 at 12 loops: a token over a copy of as many bytes as the weights that it
    touches, those of a looped layer once a step."""
    model = GPT(GPTConfig()).eval()
    counts = model.loop_counts(12)
    cache = make_cache(model, counts, T_max=160)
    prefill(model, [torch.randint(50257, (128,))], counts, None, 0, cache)
    token = torch.randint(50257, (1, 1))
    touched = sum(p.numel() for p in model.lm_head.parameters())
    for layer in model.h:
        times = 12 if layer in model.groups else 1
        touched += times * sum(p.numel() for name, p in layer.named_parameters() if 'adapter' not in name)
        touched += (times + 1) * 768 * 768 * (layer in model.groups)
    block = torch.randn(touched // 4)               # well past the caches; copied four times
    copy = torch.empty_like(block)
    whole, read = in_turn(lambda: one_token(model, token, 128, counts, None, 0, cache), lambda: [copy.copy_(block) for _ in range(4)])
    print(f'stream: {1e3 * median(whole):.1f} ms a token; as many bytes as the weights it touches, {4 * touched / 1e9:.2f} GB, are copied in '
          f'{1e3 * median(read):.1f} ms; ratio {ratio(whole, read)}')


@torch.no_grad()
def adaptive():
    """
    ms a token with an exit rule over that of a fixed budget of the same mean number of block maps: the default checkpoint, and the
    paper's shape with random weights.
    """
    model, _ = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'))
    for name in ('norm', 'accel'):
        same_mean(model, name, 0.1, 12, 3 * rounds)
    model = GPT(GPTConfig(block_size=64)).eval()
    for name in ('norm', 'accel'):
        same_mean(model, name, 1.0, 6, min(rounds, 5))


def same_mean(model, name, tau, n, repeats):
    rule, block = make_exit(name, tau), model.config.block_size
    prompt, trace = torch.randint(32, 127, (1, block)), []
    model(prompt, n_loop=30, exit=rule, trace=trace)
    evals = [t['evals'][0, block - n:].float().mean().item() for t in trace]

    def decode(counts, rule):
        cache = make_cache(model, counts)
        prefill(model, [prompt[0, :block - n]], counts, rule, 0, cache)
        return clock(lambda: [one_token(model, prompt[:, t:t + 1], t, counts, rule, 0, cache) for t in range(block - n, block)])

    low, high = ([int(e) + up for e in evals] for up in (0, 1))         # a budget of the same mean lies between two whole ones
    times = [(decode([30] * len(evals), rule), decode(low, None), decode(high, None)) for _ in range(repeats + 1)][1:]
    share = sum(e - int(e) for e in evals) / len(evals)
    fixed = [(1 - share) * b + share * c for _, b, c in times]
    print(f'adaptive: C = {model.config.n_embd}, {name} at tau {tau:g}, {sum(evals) / len(evals):.2f} block maps a group: {1e3 * median([t[0] for t in times]) / n:.2f} ms a token, '
          f'fixed budget of the same mean {1e3 * median(fixed) / n:.2f}; ratio {median(sorted(t[0] / f for t, f in zip(times, fixed))):.2f}')


@torch.no_grad()
def gpu():
    """The paper's model on CUDA, accel at tau = 1e-2, prompt 128 + 128 tokens, batch 1 and 32."""
    if not torch.cuda.is_available():
        return print('gpu: no CUDA device here, not run')
    torch.backends.cuda.matmul.allow_tf32 = False
    model = GPT(GPTConfig()).cuda().eval()
    for B in (1, 32):
        rows = list(torch.randint(50257, (B, 128), device='cuda'))
        for _ in range(2):
            steps = stream(model, rows, 129, temperature=0, n_loop=30, exit=make_exit('accel', 1e-2))
            next(steps)
            torch.cuda.synchronize()
            seconds = clock(lambda: (list(steps), torch.cuda.synchronize()))
        print(f'gpu: {torch.cuda.get_device_name()}, batch {B}: {1e3 * seconds / 128:.2f} ms a token, {B * 128 / seconds:.0f} tokens/s')


def main():
    if threads:
        torch.set_num_threads(threads)
    print(f'torch {torch.__version__}, {torch.get_num_threads()} threads')
    figures = dict(uncached=uncached, stream=weights_stream, adaptive=adaptive, products=products, gpu=gpu)
    if only and only not in figures:
        raise ValueError(f"unknown figure '{only}': choose one of {', '.join(figures)}")
    for name, f in figures.items():
        if not only or name == only:
            f()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
