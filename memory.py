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
    group = '/sys/fs/cgroup/memory'
    if os.path.exists(f'{group}.max') and os.path.exists(f'{group}.current'):
        with open(f'{group}.max') as most, open(f'{group}.current') as now:
            most, now = most.read().strip(), int(now.read())
        with open(f'{group}.stat') as f:        # what files are cached can be dropped
            now -= sum(int(line.split()[1]) for line in f if line.startswith('inactive_file '))
        limits += [int(most) - now] if most.isdigit() else []
    return min(limits)


class TooLarge(ValueError):
    """What was asked for needs more memory than there is."""
    every_process = True        # one card may be fuller than the next, so each says so itself


def require(needed, device, what, knobs):
    """
    TooLarge, a ValueError, if `needed` bytes are more than the device has left.

    what: the thing that needs them, and knobs: which to lower, both in words for the message.
    """
    there = available(device)
    if needed > there:
        raise TooLarge(f'{what} would take {needed / 2 ** 30:,.1f} GiB of memory, and {device} '
                       f'has {there / 2 ** 30:,.1f} GiB left: lower {knobs}')


def windows_at_once(config, most=64):
    """How many windows of block_size tokens to evaluate together: at most 0.5 GiB of logits."""
    return max(1, min(most, 2 ** 27 // (config.block_size * config.vocab_size)))


def states_bytes(config, n_loop, windows):
    """What a pass takes that keeps the states of all loop steps: float32, as a list and stacked."""
    states = len(config.groups) * (n_loop + 1)
    return 2 * 4 * states * windows * config.block_size * config.n_embd


def block_weights(config):
    """How many weights the matrices of a layer have."""
    C, width = config.n_embd, config.mlp_width or 4 * config.n_embd
    return 4 * C ** 2 + (3 if config.mlp == 'gated' else 2) * width * C


def training_bytes(config, batch, checkpoint_steps=False, copies=4):
    """
    About what a training step on `batch` sequences takes, float32: the weights and what is as large
    as they are (`copies`: they, their gradients, the optimiser's two moments), the states that the
    backward pass needs, and the logits.
    """
    C, looped = config.n_embd, sum(map(len, config.groups))
    weights = config.n_layer * block_weights(config) + (config.vocab_size + config.block_size) * C
    weights += 2 * len(config.groups) * C ** 2
    # a block keeps about 16 numbers a token and coordinate, in each step that has gradients
    steps = 1 if checkpoint_steps else min(config.bptt_k, config.mean_recurrence + 1)
    states = 16 * C * (config.n_layer - looped + looped * steps)
    logits = 3 * config.vocab_size
    return 4 * (copies * weights + batch * config.block_size * (states + logits))
