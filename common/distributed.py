"""
The device, the processes of a training run, and the signals that stop it.

One process, or several that torchrun has started. Every process draws the same random numbers and
takes its own rows of the batch. So the number of processes changes rounding alone where all rows
have equally many labels; elsewhere the mean over each process's labels has the same weight.

    RANK, WORLD    this process's number; how many there are
    LOCAL_RANK     its number on this machine
    stop_signals   the signals that have asked this process to stop
"""
import os
import signal
import sys
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

# of a process that is alone; `read_environment` sets them, so read them as distributed.RANK
RANK = 0
WORLD = 1
LOCAL_RANK = 0
stop_signals = []


class Stopped(Exception):
    """The run was asked to stop, by one of stop_signals in one of the processes."""

    @property
    def number(self):
        return stop_signals[0] if stop_signals else signal.SIGTERM


def read_environment():
    """
    Take RANK, WORLD and LOCAL_RANK from the environment, where torchrun puts them; only train.py
    does. ValueError if they are there without what several processes need to find each other.
    """
    global RANK, WORLD, LOCAL_RANK
    found = {name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR',
                                                 'MASTER_PORT') if os.environ.get(name)}
    try:
        rank = int(found.get('RANK', 0))
        world = int(found.get('WORLD_SIZE', 1))
        local_rank = int(found.get('LOCAL_RANK', 0))
        fits = (rank, world) == (0, 1) or len(found) == 5 and 0 <= local_rank <= rank < world
    except ValueError:
        fits = False
    if not fits:
        values = ', '.join(f'{name}={value}' for name, value in found.items())
        raise ValueError(f'the environment has {values}, which is not one of several processes '
                         'that torchrun has started: start them with torchrun, or unset these '
                         'variables')
    if world > 1:
        RANK, WORLD, LOCAL_RANK = rank, world, local_rank


def say(line):
    """print, in the first process alone; if nobody can read it any more, the run is to stop."""
    if RANK == 0:
        try:
            print(line, flush=True)
        except OSError:                 # `... | head` has ended, or the terminal was closed
            stop_signals.append(getattr(signal, 'SIGPIPE', 13))         # Windows has none
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# the device ---------------------------------------------------------------------------------------

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


def can_compile(dev):
    """
    Does torch.compile work on this device? It needs a C++ compiler for a CPU, and Triton for a
    GPU. If not, a line says why.
    """
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=dev))
    except Exception as error:          # each kind of device has an error of its own
        say(f"training goes on without torch.compile, which fails here: "
            f"{' '.join(str(error).split())[:200]}")
        return False
    return True


# the processes ------------------------------------------------------------------------------------

def start_processes(device, dtype):
    """
    pick_device, and connect the processes if there are several: each takes a card (nccl), or all
    share the CPU (gloo).
    """
    if WORLD > 1 and device.startswith('cuda:'):
        raise ValueError(f'device = {device} puts every process on one card: give --device=cuda')
    if WORLD > 1 and device in ('auto', 'cuda') and torch.cuda.is_available():
        device = f'cuda:{LOCAL_RANK}'
        torch.cuda.set_device(device)
    dev, autocast = pick_device(device, dtype)
    if WORLD > 1:
        dist.init_process_group('nccl' if dev.startswith('cuda') else 'gloo')
    return dev, autocast


def end_processes():
    """Disconnect the processes, if there are several."""
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


def add_up(tensor, dev=None):
    """The tensor's sum over all processes. dev: where they exchange it, None = where it is."""
    if WORLD == 1:
        return tensor
    there = tensor.to(dev)
    dist.all_reduce(there)
    return there.to(tensor.device)


def mean_and_stops(loss, norm):
    """
    This process's loss and gradient norm, tensors -> the mean loss, the norm (all have the same),
    and how often the processes were asked to stop, as numbers. Waits for the device.
    """
    n_signals = torch.full_like(loss, len(stop_signals))
    return add_up(torch.stack((loss / WORLD, norm / WORLD, n_signals))).tolist()


def check_same(mine):
    """ValueError if the processes do not all have this value."""
    if WORLD == 1:
        return
    values = [None] * WORLD
    dist.all_gather_object(values, mine)
    if any(value != mine for value in values):
        raise ValueError('the machines differ in their knobs, data or checkpoint: data/ and, to '
                         'resume, out_dir must be the same on each')


# signals ------------------------------------------------------------------------------------------

@contextmanager
def listen():
    """
    In this context Ctrl-C, SIGTERM and SIGHUP are noted in stop_signals, and a second one of a kind
    does what it did before. One that was ignored stays so: nohup protects a run from SIGHUP.
    """
    handlers = {}       # number of a signal: its handler before

    def note(number, frame):
        stop_signals.append(number)
        signal.signal(number, handlers[number])

    for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):
        number = getattr(signal, name, None)            # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_stopped(dev):
    """Stopped if any process has been asked to stop: all of them raise it at the same place."""
    asked = len(stop_signals)
    if WORLD > 1:
        asked = add_up(torch.tensor(asked, device=dev)).item()
    if asked:
        raise Stopped
