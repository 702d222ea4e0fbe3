"""
A checkpoint: what a ckpt.pt holds, how it is written and read. (run_folder.py: the folder in which
it stands; resume.py: how a run goes on from it.)

Whenever the program is killed, a whole checkpoint is there: the new one, or the one before. It
holds tensors, numbers, strings, lists and dicts alone: a file with code in it is refused, and the
code does not run. The class of the model is imported by its name, from model.py and zoo/ alone.

    out_dir/ckpt.pt         the last one        out_dir/ckpt.old.pt     the one before
    out_dir/ckpt_ITER.pt    weights kept        out_dir/exits.json      calibrated thresholds

    model         state_dict                    model_args    its Config's arguments
    model_class   its class, 'model:GPT'        config        every knob
    tokenizer     its name                      data          sha256 of the training tokens
    iter_num      iterations done               val_loss      {n_loop: nats}
    own_files     config files with imports: the run may need a part that they define
    and to resume: optimizer, muon {parameter number: state}, trend, spikes (training_log.py)
"""
import errno
import os
import warnings
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from shlex import quote
from typing import NamedTuple

import torch

from common import configurator, distributed
from common.distributed import say
from common.errors import UserError, explain, is_out_of_memory
from common.files import ROOT, new_file
from common.run_folder import find_run

# what every checkpoint has, that of a converted model too
PARTS = 'model_class', 'model_args', 'model', 'config', 'iter_num', 'tokenizer'
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
    # of the loss, see training_log: its trend, and [loss, it] of spikes since the last row
    trend: list = field(default_factory=lambda: [0, 0.0, 0.0])
    spikes: list = field(default_factory=list)
    own_files: list = field(default_factory=list)       # config files with imports


def save_run(run, path, with_optimizer=True):
    """A run -> path. with_optimizer: with all that it takes to resume, not only the weights."""
    if with_optimizer:
        run.saved = run.done
    if distributed.RANK > 0:
        return
    cls = type(run.model)
    checkpoint = dict(model=dict(run.model.state_dict()), model_args=asdict(run.model.config),
                      model_class=f'{cls.__module__}:{cls.__name__}', config=run.knobs,
                      iter_num=run.done, tokenizer=run.tokenizer, data=run.data,
                      val_loss=run.val_loss, own_files=run.own_files)
    if with_optimizer:
        for name, optimizer in run.optimizers.items():
            checkpoint[name] = optimizer.state_dict()['state']
        checkpoint |= dict(trend=run.trend, spikes=run.spikes)
    save_checkpoint(checkpoint, path, keep_old=with_optimizer)


def save_checkpoint(checkpoint, path, keep_old=False):
    """Write a dict of tensors and plain values to path. keep_old: ckpt.pt becomes ckpt.old.pt."""
    try:
        with new_file(path, 'wb', keep_old) as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as error:            # RuntimeError: torch, on a full disk
        is_full = isinstance(error, RuntimeError) or error.errno in DISK_IS_FULL
        advice = 'make room' if is_full else 'make it possible to write there'
        raise UserError(f"cannot write '{path}' ({error}): the earlier file is unchanged; "
                        f'{advice}, then continue with --resume') from error


# reading ------------------------------------------------------------------------------------------

class NotWhole(UserError):
    """The error for a file that is no checkpoint, or not a whole one."""


def class_of(name, from_anywhere=False):
    """
    'MODULE:CLASS' -> the class, a GPT. Importing a file runs it. So a class outside model.py and
    zoo/ is refused, unless the user has named it (from_anywhere) or its file on the command line.
    """
    module, _, attribute = name.rpartition(':')
    file = file_of(module)
    named = [os.path.normpath(path) for path in configurator.own_files]
    is_ours = module == 'model' or module.startswith('zoo.')
    if not (is_ours or from_anywhere or file in named):
        raise UserError(f"the model's class is '{name}', and a file outside zoo/ is imported only "
                        f'if you name it: write {file} behind the script')
    with explain(f"cannot import the model class '{name}'",
                 'write MODULE:CLASS, a subclass of model.GPT such as zoo.ouro:Ouro'):
        cls = getattr(import_module(module), attribute)
        if not (issubclass(cls, torch.nn.Module) and hasattr(cls, 'Config')):
            raise TypeError('no model')
    return cls


def file_of(module):
    """The file of a module beside the programs, as a command line names it: mine.py."""
    return os.path.join(*module.split('.')) + '.py'


def read_checkpoint(path):
    """The dict in a ckpt.pt. ValueError if there is no such file, NotWhole if it is damaged."""
    if not os.path.isfile(path):
        raise UserError(f"no checkpoint at '{path}': {advice_for_missing(path)}")
    try:
        with warnings.catch_warnings(action='ignore'):      # on files that are refused below
            # weights_only: tensors and plain values, no code
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        reason = what_is_wrong(checkpoint)
    except Exception as error:      # torch.load's own words would advise to run the code in a file
        if not can_come_from_content(error):
            raise
        reason = type(error).__name__
    if reason:
        raise NotWhole(f"'{path}' is not a whole checkpoint of this program ({reason}): it may be "
                       'cut short, or hold something else; train again or use another')
    return checkpoint


def what_is_wrong(checkpoint):
    """Why this cannot be a checkpoint, in a few words; '' if it may be one."""
    if not isinstance(checkpoint, dict):
        return 'no dict'
    missing = [part for part in PARTS if part not in checkpoint]
    if missing:
        return f"no {', '.join(missing)}"
    kinds = dict(model=dict, model_args=dict, model_class=str, config=dict, iter_num=int,
                 tokenizer=str | None, own_files=list)
    wrong = [part for part, kind in kinds.items()
             if part in checkpoint and not isinstance(checkpoint[part], kind)]
    return f"a wrong {', '.join(wrong)}" if wrong else ''


def can_come_from_content(error):
    """Can the content of a file cause this error? If not, the file may be good."""
    cannot_open = isinstance(error, OSError) and error.filename is not None
    cannot_import = isinstance(error, ImportError)
    return not (cannot_open or cannot_import or is_out_of_memory(error))


def load_checkpoint(path, device='cpu', named_class='', length=None, damping=None):
    """
    out_dir/ckpt.pt -> model (float32, in evaluation), dict.

    named_class: the model class that the user has named, which may stand outside zoo/. length:
    another block_size, in tokens; ValueError if the positions are learned ones, which end where
    training's did. damping: another than the run's, see loops.RecurrentGroup.
    """
    checkpoint = read_checkpoint(path)
    name = str(checkpoint['model_class'])
    cls = class_of(name, from_anywhere=name == named_class)
    config = config_in(checkpoint, cls, path)
    if length is not None:
        config = at_length(config, length, path)
    checkpoint['damping_of_run'] = config.damping
    if damping is not None:
        config = replace(config, damping=damping)
    model = build_model(cls, config, checkpoint, path)
    checkpoint['model_args'] = asdict(model.config)     # with fields that are newer than the file
    checkpoint['folder'] = os.path.dirname(path) or '.'     # of tokenizer.json
    return model.to(device), checkpoint


def config_in(checkpoint, cls, path):
    """The Config of a checkpoint's model. ValueError if the class does not have its fields."""
    with explain_unfit(checkpoint, path, (TypeError, ValueError)):
        return cls.Config(**checkpoint['model_args'])


def build_model(cls, config, checkpoint, path):
    """A checkpoint's model, on the CPU and in evaluation. ValueError if its weights do not fit."""
    with torch.device('meta'):          # shapes alone: the weights are those that were read
        model = cls(config)
    with explain_unfit(checkpoint, path, (RuntimeError, TypeError)):        # which keys or shapes
        model.load_state_dict(checkpoint['model'], assign=True)
    model.tie()
    return model.float().eval()


def explain_unfit(checkpoint, path, errors):
    """errors.explain for a checkpoint whose model this program cannot build."""
    advice = note_on_files(checkpoint)
    if not advice:
        advice = ('if it has a part of your own, name its file behind the script, as in `python '
                  'sample.py mine.py`')
    return explain(f"the model in '{path}' does not fit this program",
                   f'{advice}; if its class has changed, train again', errors)


def note_on_files(checkpoint):
    """
    The note that the run was trained with config files that the command line does not name; '' if
    it names them all. They may define a part of the model, or its task.
    """
    named = {os.path.basename(file) for file in configurator.own_files}
    missing = [file for file in checkpoint.get('own_files', ())
               if os.path.basename(file) not in named]
    if not missing:
        return ''
    return (f"the run was trained with {' '.join(missing)}: if a part is missing, name that file "
            'behind the script')


def say_own_files(checkpoint):
    """Print note_on_files: the model was read, but maybe as another one."""
    note = note_on_files(checkpoint)
    if note:
        say(note)


def advice_for_missing(path):
    """What to do if there is no checkpoint at this path."""
    folder = os.path.dirname(path) or '.' if path.endswith('.pt') else path
    earlier = os.path.join(folder, 'ckpt.old.pt')
    if os.path.isfile(earlier):
        return (f"the one before it is there: rename '{earlier}', or python train.py --resume "
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
        raise UserError(f'length must be at least 1 token, not {length}')
    if length != trained and config.pos == 'learned':
        raise UserError(f"the model in '{path}' has learned positions for {trained} tokens, so "
                        f'length = {length} is not possible: leave it out, or train with '
                        '--pos=rotary')
    return replace(config, block_size=length)


# a whole run --------------------------------------------------------------------------------------

class OpenRun(NamedTuple):
    """A run to read from."""
    model: torch.nn.Module      # in evaluation, float32
    checkpoint: dict            # what else its ckpt.pt holds
    folder: str                 # where ckpt.pt stands
    results: str                # where results are written, see run_folder.find_run


def open_run(out_dir, dev='cpu', needs_groups='', quiet=False, length=None, damping=None):
    """
    The run in out_dir (None: see run_folder.find_run) -> OpenRun.

    needs_groups: if the model must have recurrent groups, the end of the ValueError for one without
    them; '' if it need not. length: tokens of context, if not those of training, and damping: see
    load_checkpoint.
    """
    folder, results = find_run(out_dir, quiet)
    path = os.path.join(folder, 'ckpt.pt')
    model, checkpoint = load_checkpoint(path, dev, length=length, damping=damping)
    if needs_groups and not model.groups:
        raise UserError(f'the model in {folder} has no recurrent groups, so {needs_groups}')
    if not quiet:
        say_own_files(checkpoint)
    return OpenRun(model, checkpoint, folder, results)
