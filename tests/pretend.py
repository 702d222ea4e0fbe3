"""
A pretended accelerator: its tensors are on a device of their own, and the CPU computes them.

    with pretend.device() as counts:        device='auto' picks it
        model.to(pretend.NAME) ...
    counts['wait', 'decode.py:118']         how often that line of the project made the host wait

As on CUDA, these raise: tensors of two devices in one operation (but for CPU scalars in an
elementwise one, and CPU indices), numpy() without force, a generator of another device. As on MPS,
so does float64. Counted by line of the project, tests apart: a `wait` of the host for a result
(item, tolist, cpu, nonzero, a mask as an index), an `upload` that it waits for (an index on the CPU
too) or that it does not (`later`, non_blocking). Not shown: speed, streams, autocast, other
rounding, compilers, several cards. Import this file before the first backward pass.
"""
import traceback
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch._dynamo  # here, as its classes derive from the real torch.Event
from conftest import ROOT
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = 'cuda_pretended'     # scripts ask whether a device's name begins with cuda
aten = torch.ops.aten
COPY, TO = aten.copy_.default, aten._to_copy.default
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
counts, generators = Counter(), {}      # {(what, line): times}, {handle: is it of the device?}


def each(f, x):
    """x with f applied to all that its lists and tuples hold."""
    if isinstance(x, (list, tuple)):
        return type(x)([each(f, member) for member in x])
    return f(x)


def count(what):
    """Count it for the innermost line of the project."""
    lines = (f"{frame.f_code.co_filename.removeprefix(ROOT + '/')}:{number}"
             for frame, number in traceback.walk_stack(None))
    ours = (line for line in lines if not line.startswith(('/', '.', '<', 'tests')))
    counts[what, next(ours, 'elsewhere')] += 1


def run(func, types, args=(), kwargs=None):
    """An operation: check its devices, count what waits, let the CPU compute, wrap the result."""
    cpu = []                    # the CPU's tensors among the arguments
    wrappers = {}               # and those of the device, by the id of what they hold

    def unwrap(x):
        if type(x) is OnDevice:
            return wrappers.setdefault(id(x.raw), x).raw
        if isinstance(x, torch.Tensor):
            cpu.append(x)
        return x

    def wrap(x):
        if isinstance(x, torch.Tensor) and id(x) not in wrappers:
            return OnDevice(x.resolve_conj().resolve_neg())
        return wrappers.get(id(x), x)       # written in place, or only passed on

    raw = each(unwrap, args)
    options = {name: unwrap(x) for name, x in (kwargs or {}).items()}
    # is the result on the device?
    there = type(args[0]) is OnDevice if func is COPY else bool(wrappers)
    if options.get('device'):
        there, options['device'] = options['device'].type == NAME, 'cpu'
    if 'generator' in options and generators.get(options['generator']._cdata, False) != there:
        raise RuntimeError(f'{func}: the generator is of another device')
    if func in (COPY, TO):
        if (type(args[func is COPY]) is OnDevice) != there:             # the source
            count('wait' if not there else 'later' if options.get('non_blocking') else 'upload')
    elif wrappers:
        index = args[1] if func in INDEXES and type(args[0]) is OnDevice else []
        masks = [x for x in index if x is not None and x.dtype == torch.bool]
        for _ in masks if func in INDEXES else WAITS.intersection(func.tags):
            count('wait')
        for x in cpu:
            if any(x is part for part in index):
                count('upload')
            elif x.dim() or x is args[0] or not (index or torch.Tag.pointwise in func.tags):
                raise RuntimeError(f'{func}: expected all tensors to be on the same device, but '
                                   f'one of shape {tuple(x.shape)} is on the CPU')
    out = func(*raw, **options)
    return each(wrap, out) if there else out


class OnDevice(torch.Tensor):
    """A tensor on the device; raw: its values, a CPU tensor."""
    is_cuda, __torch_function__ = True, torch._C._disabled_torch_function_impl
    __torch_dispatch__ = staticmethod(run)      # where modes are off: while a tensor is printed
    __reduce_ex__ = lambda self, protocol: self.raw.__reduce_ex__(protocol)     # for torch.save
    tolist = lambda self: self.cpu().tolist()

    def __new__(cls, raw):
        if raw.dtype == torch.float64:
            raise TypeError('some devices lack float64')
        new = cls._make_wrapper_subclass(cls, raw.shape, raw.stride(), raw.storage_offset(),
                                         dtype=raw.dtype, device=NAME + ':0')
        new.raw = raw
        return new

    def numpy(self, *, force=False):
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        return self.detach().cpu().numpy()


class Generator(torch.Generator):
    def __new__(cls, device='cpu'):
        new = super().__new__(cls)
        generators[new._cdata] = torch.device(device).type == NAME
        return new


class Mode(TorchDispatchMode):
    __torch_dispatch__ = lambda self, *operation: run(*operation)


@contextmanager
def device():
    """In this context there is such a device. Yields the counts {(what, line): times}."""
    counts.clear()
    with (mock.patch('torch.__future__._swap_module_params_on_conversion', True),   # ties stay
          mock.patch('torch.accelerator.current_accelerator', lambda **_: torch.device(NAME)),
          mock.patch('torch.cuda.get_device_name', lambda: 'pretended'),
          mock.patch('torch.Generator', Generator), Mode()):
        yield counts


torch._C._set_only_lift_cpu_tensors(True)       # torch.tensor(..., device=) comes to run(), too
module = backend_registration._DummyBackendModule()
module.is_available = lambda: False
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
