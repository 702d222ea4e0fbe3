"""
The processes of a run: one, or several that torchrun has started, each with a number of its own.

Not run by itself: train.py calls it. Every process draws the same random numbers and takes its own
rows of the batch, so that their number changes nothing.

    RANK, WORLD    this process's number; how many there are
    LOCAL_RANK     its number on this machine
"""
import os

import torch
import torch.distributed as dist

from common.configurator import pick_device

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(name, default)) for name, default in
                           (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))


def say(line):
    """print, in the first process alone."""
    if RANK == 0:
        print(line, flush=True)


def join(device, dtype):
    """
    The knobs device and dtype -> device name, autocast, as configurator.pick_device has them.

    Of several processes each takes a card of its own (nccl), or all share the CPU (gloo).
    """
    if WORLD > 1 and device in ('auto', 'cuda') and torch.cuda.is_available():
        device = f'cuda:{LOCAL_RANK}'
        torch.cuda.set_device(device)
    dev, autocast = pick_device(device, dtype)
    if WORLD > 1:
        dist.init_process_group('nccl' if dev.startswith('cuda') else 'gloo')
    return dev, autocast


def leave():
    if WORLD > 1:
        dist.destroy_process_group()


def one_before_the_others(work):
    """work() in the first process of a machine, and then in the others: it may make files."""
    if LOCAL_RANK > 0:
        dist.barrier()
    result = work()
    if WORLD > 1 and LOCAL_RANK == 0:
        dist.barrier()
    return result


def add_up(tensor):
    """The tensor's sum over all processes, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def any_asked(asked, dev):
    """Whether a process was asked to stop; asked: the signals that came to this one."""
    if WORLD == 1:
        return bool(asked)
    return add_up(torch.tensor(len(asked), device=dev)).item() > 0


def check_same(mine):
    """ValueError if the processes do not all have this value."""
    if WORLD == 1:
        return
    every = [None] * WORLD
    dist.all_gather_object(every, mine)
    if any(one != mine for one in every):
        raise ValueError('the machines differ in their knobs, data or checkpoint: data/ and, to '
                         'resume, out_dir must be the same on each')
