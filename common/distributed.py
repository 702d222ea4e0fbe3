"""
The device, and the processes of a training run: one, or several that torchrun has started.

Every process draws the same random numbers and takes its own rows of the batch, so that the number
of processes changes nothing.

    RANK, WORLD    this process's number; how many there are
    LOCAL_RANK     its number on this machine
    stop_signals   the signals that have asked this process to stop
"""
import os
import signal
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

RANK, WORLD, LOCAL_RANK = (int(os.environ.get(name, default)) for name, default in
                           (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
stop_signals = []


def say(line):
    """print, in the first process alone; if nobody can read it any more, the run is to stop."""
    if RANK == 0:
        try:
            print(line, flush=True)
        except OSError:                 # `... | head` has ended, or the terminal was closed
            stop_signals.append(signal.SIGPIPE)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def pick_device(device='auto', dtype='auto'):
    """The knobs device and dtype -> device, context in which matrix products have that dtype."""
    if device == 'auto':
        best = torch.accelerator.current_accelerator(check_available=True)
        device = best.type if best else 'cpu'
    try:
        torch.ones(1, device=device).item()
    except Exception:                   # each kind of device has an error of its own
        raise ValueError(f"device '{device}' is not available here: choose auto, cuda, mps or cpu"
                         ) from None

    kind = device.split(':')[0]         # cuda:1 -> cuda
    if dtype == 'auto':
        dtype = 'bfloat16' if kind == 'cuda' else 'float32'
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f"unknown dtype '{dtype}': choose auto, float32 or bfloat16")
    return device, torch.autocast(kind, torch.bfloat16) if dtype == 'bfloat16' else nullcontext()


def join(device, dtype):
    """pick_device; each of several processes takes a card (nccl), or all share the CPU (gloo)."""
    if WORLD > 1 and device.startswith('cuda:'):
        raise ValueError(f'device = {device} puts every process on one card: give --device=cuda')
    if WORLD > 1 and device in ('auto', 'cuda') and torch.cuda.is_available():
        device = f'cuda:{LOCAL_RANK}'
        torch.cuda.set_device(device)
    stop_signals.clear()
    dev, autocast = pick_device(device, dtype)
    if WORLD > 1:
        dist.init_process_group('nccl' if dev.startswith('cuda') else 'gloo')
    return dev, autocast


def leave():
    if WORLD > 1:
        dist.destroy_process_group()


def make_once(work):
    """work() in the first process of a machine, then in the others, which find its files."""
    if LOCAL_RANK > 0:
        dist.barrier()
    try:
        return work()
    finally:                            # after an error the others come to the same one
        if WORLD > 1 and LOCAL_RANK == 0:
            dist.barrier()


def add_up(tensor):
    """The tensor's sum over all processes, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def listen():
    """From now on these signals are noted; the second one of a kind ends the program."""
    def note(number, frame):
        stop_signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)


def any_stop(dev):
    """Has any process been asked to stop?"""
    if WORLD == 1:
        return bool(stop_signals)
    return add_up(torch.tensor(len(stop_signals), device=dev)).item() > 0


def check_same(mine):
    """ValueError if the processes do not all have this value."""
    if WORLD == 1:
        return
    every = [None] * WORLD
    dist.all_gather_object(every, mine)
    if any(one != mine for one in every):
        raise ValueError('the machines differ in their knobs, data or checkpoint: data/ and, to '
                         'resume, out_dir must be the same on each')
