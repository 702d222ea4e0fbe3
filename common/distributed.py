"""
The processes of a training run, and the signals that stop it.

torchrun starts several processes. All draw the same random numbers, and each takes its own rows of
the batch, so their number changes rounding alone. There is one exception: where rows have different
numbers of labels, each process's mean counts the same.
"""
import os
import signal
import sys
from contextlib import contextmanager

import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.device import pick_device

WORLD = int(os.environ.get('WORLD_SIZE', 1))                        # how many processes
RANK = int(os.environ.get('RANK', 0)) if WORLD > 1 else 0           # the number of this one


@contextmanager
def processes(device, dtype):
    """
    `with processes(device, dtype) as (dev, autocast):` what pick_device returns. In this block the
    processes are connected, and at its end they wait for one another.
    """
    if WORLD > 1:
        # if it is loaded later, it holds the threads of the group beyond its end, and a thread that
        # outlives Python aborts the process
        import torch._dynamo  # noqa: F401
        dist.init_process_group()       # nccl for tensors of a card, gloo for those of the CPU
        if device in ('auto', 'cuda') and torch.cuda.is_available():
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
    yield pick_device(device, dtype)
    if WORLD > 1:           # not after an error, since the others may wait for something else
        dist.barrier()
        dist.destroy_process_group()


def say(line):
    """Print a line, in the first process alone."""
    if RANK == 0:
        print(line, flush=True)


def add_up(tensor):
    """The tensor's sum over all processes, in place."""
    if WORLD > 1:
        dist.all_reduce(tensor)
    return tensor


def average(tensors):
    """Replace each tensor by its mean over all processes, at once."""
    if WORLD > 1:
        vector_to_parameters(add_up(parameters_to_vector(tensors)).div_(WORLD), tensors)


@contextmanager
def noting_signals():
    """
    `with noting_signals() as signals:` the first Ctrl-C, the first SIGTERM and the first SIGHUP
    go into this list, with a word to the user; the next of that kind acts at once (torchrun sends a
    SIGTERM after a Ctrl-C). One that was ignored stays so: nohup does that to SIGHUP.
    """
    stop_signals = []
    before = {}         # {number of a signal: its handler}

    def note(number, frame):
        stop_signals.append(number)
        signal.signal(number, before[number])
        if RANK == 0:
            print('stopping after this step, to save; the same signal again stops at once',
                  file=sys.stderr, flush=True)

    # Windows has no SIGHUP
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, 'SIGHUP', signal.SIGTERM)}:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield stop_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
