"""
How long does a token take at a point: a way to choose the loops of each token, and a cache policy?

Not run by itself: bench.py makes the points, and times them in turn. On CUDA the clock is that of
its events, elsewhere the processor's.

    protocol    'cached': with keys and values kept; 'paper': the whole context again for each token
    B, T        rows, tokens of a window
"""
import time

import numpy as np
import torch

from cache import KeysValues, Span
from decode import make_cache, one_token, prefill
from exits import EXITS, make_exit
from quality import log_probabilities


def timer(device):
    """A function that returns the seconds since it was last called, on CUDA by its events."""
    on_cuda = device.startswith('cuda')

    def now():
        if not on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    last = now()

    def lap():
        nonlocal last
        before, last = last, now()
        if not on_cuda:
            return last - before
        last.synchronize()
        return before.elapsed_time(last) / 1e3
    return lap


@torch.no_grad()
def decode_window(model, point, idx, start, protocol, device, seed=0):
    """
    Decode positions start ... of idx (B, T) one by one, with a cache or without, see protocol.

    Returns the seconds of each position and the likeliest next tokens (B, T - start).
    """
    # looking ahead is no part of the oracle's time: the loops that it takes are only run again
    schedule = None
    if point.rule == 'oracle':          # the most of any row, of each group at each position
        schedule = log_probabilities(model, point, idx, seed)[2].amax(dim=0).tolist()
    if protocol == 'cached':
        B, T = idx.shape
        kept = make_cache(model, point.loops, point.cache, point.ring, T, rows=B)
        prefill(model, list(idx[:, :start]), point.loops, point.exit, seed, kept,
                settle=point.cache == 'latest')
    lap, seconds, tokens = timer(device), [], []
    for t in range(start, idx.shape[1]):
        loops = schedule[t] if schedule else point.loops
        lap()
        if protocol == 'cached':
            new = idx[:, t:t + 1]
            logits, _, _ = one_token(model, new, t, loops, point.exit, seed, kept)
        else:
            logits, _, _ = prefill(model, list(idx[:, :t + 1]), loops, point.exit, seed, None)
        tokens.append(logits.argmax(-1))
        seconds.append(lap())
    return seconds, torch.stack(tokens, dim=1)


def warm_up(model, points, prompts, start, protocol, device, seed=0):
    """Decode two tokens each way, so that no round pays for what happens only once."""
    began = time.perf_counter()
    for point in {(p.cache, p.rule, p.past): p for p in points}.values():
        if protocol in protocols_of(point, [protocol]):
            decode_window(model, point, prompts[:, :start + 2], start, protocol, device, seed)
    print(f'warm-up {time.perf_counter() - began:.1f} s')


def protocols_of(point, protocols):
    """Those in which a point is timed: the context anew is what `exact` computes."""
    return [p for p in protocols if p == 'cached' or point.cache == 'exact']


def time_round(model, points, prompts, start, protocols, device, seed=0):
    """Time every point on prompts (B, T), in turn: what slows the machine down slows all alike."""
    for point in points:
        for protocol in protocols_of(point, protocols):
            seconds, tokens = decode_window(model, point, prompts, start, protocol, device, seed)
            point.times[protocol] += [1e3 * s for s in seconds]
            point.tokens[protocol].append(tokens)


@torch.no_grad()
def check_costs(model, repeats=15, n=8):
    """
    What the check of each rule adds to a loop step of the first group, for one token.

    n: loop steps of a pass. Yields (rule, microseconds, microseconds of a step without).
    """
    group, C = model.groups[0], model.config.n_embd
    e = torch.randn(1, 1, C, device=model.lm_head.weight.device)
    lap = timer(e.device.type)
    # kl apart: its head sweeps what the others have in the processor's caches
    others = [name for name in EXITS if name != 'kl']
    for names in (others, ['kl']):
        times = {name: [] for name in (None, *names)}
        for _ in range(repeats + 1):
            for name in times:
                rule = make_exit(name, 0.0) if name else None
                caches = [KeysValues(n, 1) for _ in group.core]
                lap()
                group(e, n, rule, model.readout, 0, Span(0, 1, e.device), caches)
                times[name].append(lap() / n)
        step = np.median(times[None][1:])       # the first pass warms up
        for name in names:
            added = np.median(np.subtract(times[name], times[None])[1:])
            yield name, 1e6 * added, 1e6 * step
