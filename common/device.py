"""The device of a program, the dtype of its matrix products, and its threads."""
import os
from contextlib import nullcontext

import torch

from common.errors import explain


def pick_device(device='auto', dtype='auto'):
    """The knobs device and dtype -> device, context in which matrix products have that dtype."""
    if device == 'auto':
        best = torch.accelerator.current_accelerator(check_available=True)
        device = best.type if best else 'cpu'
    with explain(f"device '{device}' is not available here", 'choose auto, cuda, mps or cpu'):
        torch.empty(1, device=device)
    kind = device.split(':')[0]         # cuda:1 -> cuda
    if dtype == 'bfloat16' or dtype == 'auto' and kind == 'cuda':
        return device, torch.autocast(kind, torch.bfloat16)
    return device, nullcontext()


def use_one_thread(model):
    """Decode with one thread of a CPU from now on, unless OMP_NUM_THREADS is set."""
    # a second thread brings a narrow model nothing, and on busy cores the two wait for each other
    if model.config.n_embd < 768 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)
