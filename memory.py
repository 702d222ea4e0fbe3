"""
How much memory something would take, said before it is taken.

Not run by itself: the scripts call `require` before they allocate. All sizes are bytes.
"""
import math
import os

import torch


def available(device='cpu'):
    """Bytes that can still be had: of the card, or of this machine and the container around it."""
    if device.startswith('cuda'):
        return torch.cuda.mem_get_info(device)[0]
    limits = [math.inf]
    if hasattr(os, 'sysconf'):
        limits.append(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))
    if os.path.exists('/proc/meminfo'):
        with open('/proc/meminfo') as f:
            kilobytes = [line.split()[1] for line in f if line.startswith('MemAvailable')]
        limits += [1024 * int(k) for k in kilobytes]
    if os.path.exists('/sys/fs/cgroup/memory.max'):
        with open('/sys/fs/cgroup/memory.max') as f:
            limits += [int(line) for line in f if line.strip().isdigit()]
    return min(limits)


def require(needed, device, what, knobs):
    """
    ValueError if `needed` bytes are more than the device has left.

    what: the thing that needs them, and knobs: which to lower, both in words for the message.
    """
    there = available(device)
    if needed > there:
        raise ValueError(f'{what} would take {needed / 2 ** 30:,.1f} GiB of memory, and {device} '
                         f'has {there / 2 ** 30:,.1f} GiB left: lower {knobs}')


def windows_at_once(config, most=64):
    """How many windows of block_size tokens to evaluate together: at most 0.5 GiB of logits."""
    return max(1, min(most, 2 ** 27 // (config.block_size * config.vocab_size)))


def states_bytes(config, n_loop, windows):
    """What a pass takes that keeps the states of all loop steps: float32, as a list and stacked."""
    states = len(config.groups) * (n_loop + 1)
    return 2 * 4 * states * windows * config.block_size * config.n_embd


def training_bytes(config, batch, checkpoint_steps=False):
    """
    About what a training step on `batch` sequences takes, float32: weights, gradients, AdamW's two
    moments, the states that the backward pass needs, and the logits.
    """
    C, looped = config.n_embd, sum(map(len, config.groups))
    weights = 12 * config.n_layer * C ** 2 + (config.vocab_size + config.block_size) * C
    weights += 2 * len(config.groups) * C ** 2
    # a block keeps about 16 numbers a token and coordinate, in each step that has gradients
    steps = 1 if checkpoint_steps else min(config.bptt_k, config.mean_recurrence + 1)
    states = 16 * C * (config.n_layer - looped + looped * steps)
    logits = 3 * config.vocab_size
    return 4 * (4 * weights + batch * config.block_size * (states + logits))
