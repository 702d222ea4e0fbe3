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


class Stopped(SystemExit):
    """The run was asked to stop, by one of stop_signals in one of the processes."""
    code = 130


def read_environment():
    """
    Take RANK, WORLD and LOCAL_RANK from the environment, where torchrun puts them; only train.py
    does. ValueError if they are there without what several processes need to find each other.
    """
    global RANK, WORLD, LOCAL_RANK
    names = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT'
    variables = {name: os.environ[name] for name in names if os.environ.get(name)}
    try:
        rank = int(variables.get('RANK', 0))
        world = int(variables.get('WORLD_SIZE', 1))
        local_rank = int(variables.get('LOCAL_RANK', 0))
        is_alone = (rank, world) == (0, 1)
        is_one_of_several = len(variables) == len(names) and 0 <= local_rank <= rank < world
    except ValueError:
        is_alone = False
        is_one_of_several = False
    if not is_alone and not is_one_of_several:
        values = ', '.join(f'{name}={value}' for name, value in variables.items())
        raise ValueError(f'the environment has {values}, which is not one of several processes '
                         'that torchrun has started: start them with torchrun, or unset these '
                         'variables')
    if world > 1:
        RANK, WORLD, LOCAL_RANK = rank, world, local_rank


def say(line):
    """
    Print a line, in the first process alone. If nobody reads the output any more, this counts as a
    signal to stop.
    """
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
    picked = pick_dtype(dtype, device)
    if dtype == 'bfloat16' and picked == 'float32':
        say('this processor multiplies bfloat16 in software, many times slower: float32 is used')
    return device, torch.autocast(kind, torch.bfloat16) if picked == 'bfloat16' else nullcontext()


def pick_dtype(dtype, device):
    """The knob dtype -> the dtype of matrix products on this device, 'float32' or 'bfloat16'."""
    if dtype not in ('auto', 'float32', 'bfloat16'):
        raise ValueError(f"unknown dtype '{dtype}': choose auto, float32 or bfloat16")
    if dtype == 'auto':
        return 'bfloat16' if device.split(':')[0] == 'cuda' else 'float32'
    if dtype == 'bfloat16' and device == 'cpu' and not cpu_has_bfloat16():
        return 'float32'
    return dtype


def cpu_has_bfloat16():
    """Does torch use instructions of this processor for products in bfloat16?"""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
    """
    Call work() in the first process of each machine, and then in the others, which find the files
    that it has made.
    """
    if LOCAL_RANK > 0:
        dist.barrier()
    try:
        return work()
    finally:                            # after an error the others come to the same one
        if WORLD > 1 and LOCAL_RANK == 0:
            dist.barrier()


def add_up(tensor, dev=None):
    """
    The tensor's sum over all processes, on its device. dev: the device on which the processes
    exchange it, if that is another one.
    """
    if WORLD == 1:
        return tensor
    total = tensor.to(dev)
    dist.all_reduce(total)
    return total.to(tensor.device)


def mean_and_stops(loss, norm):
    """
    This process's loss and gradient norm, two tensors -> three numbers: the mean loss of all
    processes, the norm, which is the same in all of them, and how often they were asked to stop.
    Waits for the device.
    """
    n_signals = torch.full_like(loss, len(stop_signals))
    return add_up(torch.stack((loss / WORLD, norm / WORLD, n_signals))).tolist()


def check_same(mine):
    """ValueError if another process has another value than `mine`, that of this process."""
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
    `with listen():` Ctrl-C, SIGTERM and SIGHUP are noted in stop_signals and do nothing else. A
    second signal of the same kind does what it does without this context. A signal that was ignored
    stays so: nohup protects a run from SIGHUP.
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
    """Raise Stopped, in all processes, if any of them has been asked to stop."""
    n_signals = len(stop_signals)
    if WORLD > 1:
        n_signals = add_up(torch.tensor(n_signals, device=dev)).item()
    if n_signals:
        raise Stopped
