"""
Checkpoints: a run on disk that survives a kill at any moment. (resume.py continues one.)

A checkpoint holds tensors, numbers, strings, lists and dicts only, and is read as such: a file with
code in it is refused without running the code. The class of the model is imported by its name, from
model.py and zoo/ alone.

    out_dir/ckpt.pt         the last one        out_dir/ckpt.old.pt     the one before
    out_dir/ckpt_ITER.pt    weights kept        out_dir/exits.json      calibrated thresholds

    model         state_dict                    model_args    its Config's arguments
    model_class   its class, 'model:GPT'        config        every knob
    tokenizer     its name                      data          sha256 of the training tokens
    iter_num      iterations done               val_loss      {n_loop: nats}
    own_files     config files with imports: the run may need a part that they define
    and to resume: optimizer, muon {parameter number: state}, trend, spikes (report.py)
"""
import errno
import glob
import os
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from shlex import quote
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout

from common import configurator, distributed
from common.configurator import ROOT, explain
from common.files import check_writable, new_file

# what every checkpoint has
PARTS = 'model_class', 'model_args', 'model', 'config', 'iter_num', 'tokenizer'
# what a run and the programs that look at it write into its folder. A new run refuses to start in a
# folder with one of them; --overwrite removes them, since they contradict the new weights
FILES_OF_RUN = ('ckpt.pt', 'ckpt*.pt', 'log.csv', 'loss.png', 'eval.csv', 'depth.png',
                'tokenizer.json', 'exits.json', 'bench.csv', 'bench.json', 'figure_4.png',
                'ledger.png', 'blocks.csv', 'figures/figure_[1235]*.*', 'figures/convergence.*',
                'figures/two_scales.*', 'figures/wave.*')
RESUMED = 'ckpt.pt', 'ckpt.old.pt'
DISK_IS_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


@dataclass
class Run:
    """What a checkpoint holds, and so what it takes to resume."""
    knobs: dict                 # every knob of the training script
    model: torch.nn.Module      # a GPT
    optimizers: dict            # by the name of their state in a checkpoint
    tokenizer: str
    data: str                   # sha256 of the training tokens
    done: int = 0               # iterations
    saved: int = 0              # of them when ckpt.pt was written
    val_loss: dict = field(default_factory=dict)        # n_loop: nats
    trend: list = field(default_factory=lambda: [0, 0.0, 0.0])      # of the loss: report.is_spike
    spikes: list = field(default_factory=list)          # [loss, it] since the last row of the log
    own_files: list = field(default_factory=list)       # config files with imports


def save_run(run, path, whole=True):
    """A run -> path. whole: with all that it takes to resume."""
    if whole:
        run.saved = run.done
    if distributed.RANK > 0:
        return
    cls = type(run.model)
    checkpoint = dict(model=dict(run.model.state_dict()), model_args=asdict(run.model.config),
                      model_class=f'{cls.__module__}:{cls.__name__}', config=run.knobs,
                      iter_num=run.done, tokenizer=run.tokenizer, data=run.data,
                      val_loss=run.val_loss, own_files=run.own_files)
    if whole:
        for name, optimizer in run.optimizers.items():
            checkpoint[name] = optimizer.state_dict()['state']
        checkpoint |= dict(trend=run.trend, spikes=run.spikes)
    save_checkpoint(checkpoint, path, keep_old=whole)


def save_checkpoint(checkpoint, path, keep_old=False):
    """A dict of tensors and plain values -> path; keep_old: ckpt.pt becomes ckpt.old.pt."""
    try:
        with new_file(path, 'wb', keep_old) as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as error:            # RuntimeError: torch, on a full disk
        is_full = isinstance(error, RuntimeError) or error.errno in DISK_IS_FULL
        advice = 'make room' if is_full else 'make it possible to write there'
        raise ValueError(f"cannot write '{path}' ({error}): the earlier file is unchanged; "
                         f'{advice}, then continue with --resume') from error


class NotWhole(ValueError):
    """A file that is no checkpoint, or not a whole one."""


# the class of a checkpoint's model ----------------------------------------------------------------

def class_of(name, trusted=False):
    """
    'MODULE:CLASS' -> the class, a GPT in model.py or zoo/. Importing a file runs it, so others must
    be named on the command line (trusted).
    """
    module, _, attribute = name.rpartition(':')
    if not trusted and module != 'model' and not module.startswith('zoo.'):
        raise ValueError(f"the model's class is '{name}', but only zoo/ is imported by default: "
                         f'put its file there, or continue with train.py --model_class={name}')
    with explain(f"cannot import the model class '{name}'",
                 'write MODULE:CLASS, a subclass of model.GPT such as zoo.ouro:Ouro'):
        cls = getattr(import_module(module), attribute)
        if not (issubclass(cls, torch.nn.Module) and hasattr(cls, 'Config')):
            raise TypeError('no model')
    return cls


def read_checkpoint(path):
    """The dict in a ckpt.pt. ValueError if there is no such file, NotWhole if it is damaged."""
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint at '{path}': {instead_of(path)}")
    try:
        with warnings.catch_warnings(action='ignore'):      # on files that are refused below
            # tensors and plain values, no code
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        missing = [part for part in PARTS if part not in checkpoint]
        if missing:
            raise KeyError(missing[0])
    except Exception as error:      # torch.load's own words would advise to run the code in a file
        # no content of a file causes these: another file or this one cannot be opened, ...
        if isinstance(error, OSError) and error.filename is not None:
            raise
        if isinstance(error, ImportError) or configurator.is_out_of_memory(error):
            raise
        raise NotWhole(f"'{path}' is not a whole checkpoint of this program "
                       f'({type(error).__name__}): it may be cut short, or hold something else; '
                       'train again or use another') from error
    return checkpoint


def load_checkpoint(path, device='cpu', trusted='', length=None):
    """
    out_dir/ckpt.pt -> model (float32, in evaluation), dict.

    trusted: the name of a class outside zoo/ that may be imported. length: another block_size, in
    tokens; ValueError if the positions are learned ones, which end where training's did.
    """
    checkpoint = read_checkpoint(path)
    name = str(checkpoint['model_class'])
    part = expect_files(checkpoint.get('own_files', ()))
    cls = class_of(name, trusted=name == trusted)
    unfit = f"the model in '{path}' does not fit this program"
    advice = f'{part}; if its class has changed, train again'
    with explain(unfit, advice, (TypeError, ValueError)):
        config = cls.Config(**checkpoint['model_args'])
    if length is not None:
        config = at_length(config, length, path)
    with torch.device('meta'):          # shapes alone: the weights are those that were read
        model = cls(config)
    with explain(unfit, advice, (RuntimeError, TypeError)):         # which keys or shapes
        model.load_state_dict(checkpoint['model'], assign=True)
    model.tie()
    checkpoint['model_args'] = asdict(model.config)     # with fields that are newer than the file
    checkpoint['folder'] = os.path.dirname(path) or '.'     # of tokenizer.json
    return model.float().to(device).eval(), checkpoint


def expect_files(own_files):
    """
    What to say where a part of the model is missing: to name its file. own_files: the run's config
    files with imports. If some were not given this time, every error ends with it from now on.
    """
    given = {os.path.basename(file) for file in configurator.own_files}
    missing = [file for file in own_files if os.path.basename(file) not in given]
    if not missing:
        return ('if it has a part of your own, name its file behind the script, as in `python '
                'sample.py mine.py`')
    hint = (f"the run was trained with {' '.join(missing)}: if a part is missing, name that file "
            'behind the script')
    configurator.hints[:] = [hint]
    return hint


def instead_of(path):
    """What to do where a checkpoint is missing."""
    folder = os.path.dirname(path) or '.'
    before = os.path.join(folder, 'ckpt.old.pt')
    if os.path.isfile(before):
        return (f"the one before it is there: rename '{before}', or python train.py --resume "
                f'--out_dir={quote(folder)} goes on from it')
    config = f"config/{folder.removeprefix('out-')}.py"         # out-calc: config/calc.py
    if folder == 'out':
        command = 'python train.py'
    elif folder.startswith('out-') and os.path.exists(os.path.join(ROOT, config)):
        command = f'python train.py {config} (see its first lines)'
    else:
        command = f'python train.py --out_dir={quote(folder)}'
    return f'check the path, or train one first with {command}'


def at_length(config, length, path):
    """A model's Config with another block_size, on which no weight of rotary positions depends."""
    trained = config.block_size
    if length < 1:
        raise ValueError(f'length must be at least 1 token, not {length}')
    if length != trained and config.pos == 'learned':
        raise ValueError(f"the model in '{path}' has learned positions for {trained} tokens, so "
                         f'length = {length} is not possible: leave it out, or train with '
                         '--pos=rotary')
    return replace(config, block_size=length)


def find_run(out_dir, quiet=False):
    """
    The knob out_dir -> the folder to read ckpt.pt from, and the folder to write results to.

    None is out/ if that holds a ckpt.pt and pretrained/text otherwise; a line says which, unless
    quiet. pretrained/ is found from any folder. Results of its models, and of others in a folder
    that is read-only, go to out/NAME, so that those of a run in out/ stay.
    """
    if out_dir is None:
        out_dir = 'out' if os.path.exists('out/ckpt.pt') else 'pretrained/text'
        if not quiet:
            print(f'model: {out_dir}/ckpt.pt')
    if not os.path.exists(out_dir) and out_dir.split('/')[0] == 'pretrained':
        out_dir = os.path.join(ROOT, out_dir)
    if is_read_only(out_dir):
        return out_dir, os.path.join('out', os.path.basename(os.path.realpath(out_dir)))
    return out_dir, out_dir


def is_read_only(folder):
    """Is it a folder of pretrained/, or one in which this user may not write?"""
    pretrained = os.path.realpath(os.path.join(ROOT, 'pretrained'))
    return (os.path.realpath(folder).startswith(pretrained + os.sep)
            or os.path.isdir(folder) and not os.access(folder, os.W_OK))


class OpenRun(NamedTuple):
    """A run to read from."""
    model: torch.nn.Module      # in evaluation, float32
    checkpoint: dict            # what else its ckpt.pt holds
    folder: str                 # where ckpt.pt stands
    results: str                # where results are written, see find_run


def open_run(out_dir, dev='cpu', if_plain='', quiet=False, length=None):
    """
    The run in out_dir (None: see find_run) -> OpenRun.

    if_plain: how the ValueError for a model without recurrent groups ends; '' = no error. length:
    tokens of context, if not those of training, see load_checkpoint.
    """
    folder, results = find_run(out_dir, quiet)
    path = os.path.join(folder, 'ckpt.pt')
    model, checkpoint = load_checkpoint(path, dev, length=length)
    if if_plain and not model.groups:
        raise ValueError(f'the model in {folder} has no recurrent groups, so {if_plain}')
    if configurator.hints and not quiet:        # it was read, but maybe as another model
        print(*configurator.hints)
    return OpenRun(model, checkpoint, folder, results)


# the folder of a run ------------------------------------------------------------------------------

def files_of_run(out_dir):
    """What out_dir holds of a run and of its results: of FILES_OF_RUN what is there, in order."""
    found = []
    for pattern in FILES_OF_RUN:
        found += sorted(glob.glob(os.path.join(glob.escape(out_dir), pattern)))
    return list(dict.fromkeys(found))


def check_free(out_dir, overwrite, init_from=''):
    """ValueError if out_dir holds a run and overwrite is off, or if it is the run of init_from."""
    if init_from and os.path.realpath(os.path.dirname(init_from)) == os.path.realpath(out_dir):
        raise ValueError(f'init_from = {init_from} would be overwritten: take another --out_dir')
    if not overwrite and (found := files_of_run(out_dir)):
        first = os.path.relpath(found[0], out_dir)
        resumes = 'python train.py --resume continues it, ' if first in RESUMED else ''
        raise ValueError(f'{out_dir} holds a run ({first}): --overwrite starts over, {resumes}or '
                         'give another --out_dir')


def only_writer(out_dir):
    """`with only_writer(out_dir):` ValueError if another program writes into out_dir now."""
    if distributed.RANK > 0:
        return nullcontext()
    check_writable(out_dir)
    try:
        # the end of the block frees it, or the system if we are killed
        return FileLock(f'{out_dir}/.lock', timeout=0).acquire()
    except Timeout:
        raise ValueError(f'another program writes into {out_dir}: wait for its end, or give '
                         'another --out_dir') from None


def start_over(out_dir, overwrite):
    """Remove what an earlier run has left, if overwrite allows it: it may have begun just now."""
    if distributed.RANK == 0:
        check_free(out_dir, overwrite)
        for path in files_of_run(out_dir):
            os.remove(path)
