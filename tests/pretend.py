"""
A pretended accelerator: its tensors are on a device of their own, and the CPU computes them.

    with pretend.device() as counts:        device='auto' picks it
        model.to(pretend.NAME) ...
    counts['wait', 'decode.py:118']         how often that line of the project made the host wait

As on CUDA, these raise: tensors of two devices in one operation (but CPU scalars may be in an
elementwise one, and CPU tensors may be indices), numpy() without force, a generator of another
device. As on MPS, so does float64. What is counted, by line of the project, tests apart:

    wait      the host waits for a result: item, tolist, cpu, nonzero, a mask as an index ...
    upload    a copy to the device that the host waits for, or an index on the CPU
    later     a copy to the device that it does not wait for (non_blocking)
    sync      accelerator.synchronize

Not shown: speed, streams, other rounding, compilers, several cards. Import this file before the
first backward pass, since autograd looks for devices once.
"""
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from conftest import ROOT
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = 'cuda_pretended'     # scripts ask whether a device's name begins with cuda
aten = torch.ops.aten
COPY, TO = aten.copy_.default, aten._to_copy.default
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default,
         aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor}
# of the lists of CUDA's autocast, what a model here may call
AUTOCAST = {torch.bfloat16: 'linear matmul mm bmm addmm baddbmm scaled_dot_product_attention',
            torch.float32: 'softmax.int log_softmax.int nll_loss exp sum sum.dim_IntList cumsum '
                           'prod norm.Scalar linalg_vector_norm'}
counts, generators = Counter(), {}      # generators: those of the device, by their handles


def each(f, x):
    """x with f applied to all that its lists, tuples and dicts hold."""
    if isinstance(x, dict):
        return {key: each(f, value) for key, value in x.items()}
    return type(x)([each(f, one) for one in x]) if isinstance(x, (list, tuple)) else f(x)


def count(what):
    """Count it for the innermost line of the project."""
    frame, line = sys._getframe(), 'elsewhere'
    while frame and line == 'elsewhere':
        path = frame.f_code.co_filename.removeprefix(ROOT + '/')
        line = line if path.startswith(('tests', '.', '/', '<')) else f'{path}:{frame.f_lineno}'
        frame = frame.f_back
    counts[what, line] += 1


def run(func, types, args=(), kwargs=None):
    """An operation: check its devices, count what waits, let the CPU compute, wrap the result."""
    tensors, wrappers = [], {}

    def unwrap(x):
        tensors.extend([x] if isinstance(x, torch.Tensor) else [])
        return wrappers.setdefault(id(x.raw), x).raw if type(x) is OnDevice else x

    def wrap(x):            # what is written in place, or comes back as it was, keeps its wrapper
        if not isinstance(x, torch.Tensor) or id(x) in wrappers:
            return wrappers.get(id(x), x)
        return OnDevice(x.resolve_conj().resolve_neg())
    raw, options = each(unwrap, (args, kwargs or {}))
    # is the result on the device?
    there = type(args[0]) is OnDevice if func is COPY else bool(wrappers)
    if options.get('device'):
        there, options['device'] = options['device'].type == NAME, 'cpu'
    generator = options.get('generator')
    if generator is not None and (generator._cdata in generators) != there:
        raise RuntimeError(f'{func}: the generator is of another device')
    if func not in (COPY, TO):
        check(func, args, tensors)
    elif (type(args[func is COPY]) is OnDevice) != there:               # the source
        count('wait' if not there else 'later' if options.get('non_blocking') else 'upload')
    out = func(*raw, **options)
    return each(wrap, out) if there else out


def check(func, args, tensors):
    """RuntimeError where CUDA has one for tensors of two devices; count waits and uploads."""
    cpu = [x for x in tensors if type(x) is not OnDevice]
    if len(cpu) == len(tensors):
        return
    index = args[1] if func in INDEXES and type(args[0]) is OnDevice else []
    waits = [x for x in index if x is not None and x.dtype == torch.bool]
    uploads = [x for x in cpu if any(x is one for one in index)]
    for what in ['wait'] * (len(waits) + (func in WAITS)) + ['upload'] * len(uploads):
        count(what)
    scalars = index or torch.Tag.pointwise in func.tags
    for x in cpu:
        if all(x is not one for one in index) and (x.dim() or not scalars or x is args[0]):
            raise RuntimeError(f'{func}: expected all tensors to be on the same device, but one '
                               f'of shape {tuple(x.shape)} is on the CPU')


class OnDevice(torch.Tensor):
    """A tensor on the device; raw: its values, a CPU tensor."""
    is_cuda, __torch_function__ = True, torch._C._disabled_torch_function_impl
    __torch_dispatch__ = staticmethod(run)      # where modes are off: while a tensor is printed
    __reduce_ex__ = lambda self, protocol: self.raw.__reduce_ex__(protocol)     # for torch.save
    tolist = lambda self: self.cpu().tolist()

    @staticmethod
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
        generators.update({new._cdata: new} if torch.device(device).type == NAME else {})
        return new


class Mode(TorchDispatchMode):
    __torch_dispatch__ = lambda self, *how: run(*how)


@contextmanager
def device():
    """In this context there is such a device. Yields the counts {(what, line): times}."""
    counts.clear()
    with ExitStack() as stack:
        for name, value in {'Generator': Generator, 'cuda.get_device_name': lambda: 'pretended',
                            'accelerator.current_accelerator': lambda **_: torch.device(NAME),
                            'accelerator.synchronize': lambda *_: count('sync')}.items():
            stack.enter_context(mock.patch(f'torch.{name}', value))
        # module.to(device) keeps tied weights tied; torch.tensor(..., device=) comes here, too
        for switch in (torch.__future__.set_swap_module_params_on_conversion,
                       torch._C._set_only_lift_cpu_tensors):
            switch(True)
            stack.callback(switch, False)
        stack.enter_context(Mode())
        yield counts


def autocast(op, dtype, *how, **options):
    """An operation under autocast: its floating-point tensors have this dtype."""
    def cast(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(key):
        return op(*each(cast, how), **each(cast, options))


module = backend_registration._DummyBackendModule()
module.get_amp_supported_dtype, module.is_available = lambda: [torch.bfloat16], lambda: False
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
rest, library = torch.library.Library('_', 'IMPL'), torch.library.Library('aten', 'IMPL')
rest.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')
for dtype, names in AUTOCAST.items():
    for name in names.split():
        op, _, overload = name.partition('.')
        op = getattr(getattr(aten, op), overload or 'default')
        library.impl(name, partial(autocast, op, dtype), 'AutocastPrivateUse1')
