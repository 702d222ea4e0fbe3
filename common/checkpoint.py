"""
Checkpoints: a run on disk that survives a kill at any moment, and how to continue from it.

A checkpoint holds tensors, numbers, strings, lists and dicts only, and is read as such: a file with
code in it is refused without running the code. The class of the model is imported by its name, from
model.py and zoo/ alone.

    out_dir/ckpt.pt         the last one        out_dir/ckpt.old.pt     the one before
    out_dir/ckpt_ITER.pt    weights kept        out_dir/exits.json      calibrated thresholds

    model         state_dict                    model_args    its Config's arguments
    model_class   its class, 'model:GPT'        config        every knob
    tokenizer     its name                      data          sha256 of the training tokens
    iter_num      iterations done               val_loss      {n_loop: nats}
    and to resume: optimizer, muon {parameter number: state}, trend, spikes (log.py)
"""
import glob
import hashlib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from shlex import quote
from textwrap import shorten
from types import NoneType

import torch

from common.configurator import explain, given, plain
from common.distributed import RANK, say
from common.files import new_file, write_json

# knobs that may change within a run: they shape neither the weights nor the columns of the log
FREE_KNOBS = {'out_dir', 'resume', 'overwrite', 'max_iters', 'eval_interval', 'eval_windows',
              'log_interval', 'save_interval', 'keep_iters', 'device', 'compile'}
# fields of the model's Config that may differ from those of the weights that a run starts from
FREE_FIELDS = {'dropout', 'mean_recurrence', 'bptt_k', 'adapter_init', 'step_noise'}


@dataclass
class Run:
    """What a checkpoint holds, and so what it takes to resume."""
    knobs: dict                 # every knob of the training script
    model: torch.nn.Module      # a GPT
    optimizers: dict            # by the name of their state in a checkpoint
    tokenizer: str
    data: str                   # sha256 of the training tokens
    start: int = 0              # iterations done before
    val_loss: dict = field(default_factory=dict)        # n_loop: nats
    trend: list = field(default_factory=lambda: [0, 0.0, 0.0])      # of the loss, see log.py
    spikes: list = field(default_factory=list)          # [loss, it] since the last row of the log


def save_run(run, it, path, whole=True):
    """A run after `it` iterations -> path. whole: with all that it takes to resume."""
    if RANK > 0:
        return
    kind = type(run.model)
    checkpoint = dict(model=dict(run.model.state_dict()), model_args=asdict(run.model.config),
                      model_class=f'{kind.__module__}:{kind.__name__}', config=run.knobs,
                      iter_num=it, tokenizer=run.tokenizer, data=run.data, val_loss=run.val_loss)
    if whole:
        checkpoint |= {name: one.state_dict()['state'] for name, one in run.optimizers.items()}
        checkpoint |= dict(trend=run.trend, spikes=run.spikes)
    save_checkpoint(checkpoint, path, keep_old=whole)


def save_checkpoint(checkpoint, path, keep_old=False):
    """A dict of tensors and plain values -> path; keep_old: ckpt.pt becomes ckpt.old.pt."""
    # RuntimeError: torch, on a full disk
    with (explain(f"cannot write '{path}'", 'the earlier file is unchanged; make room, then '
                  'continue with --resume', (OSError, RuntimeError)),
          new_file(path, 'wb') as f):
        torch.save(checkpoint, f)
        f.flush()
        os.fsync(f.fileno())            # whole on the disk before the earlier file is touched
        if keep_old and os.path.exists(path):
            old = path.removesuffix('.pt') + '.old.pt'
            with suppress(FileNotFoundError):
                os.remove(old)
            try:
                os.link(path, old)
            except OSError:         # a file system without links
                os.replace(path, old)


# the class of a checkpoint's model ----------------------------------------------------------------

def class_of(name, trusted=False):
    """
    'MODULE:CLASS' -> the class, a GPT in model.py or zoo/. Importing a file runs it, so others must
    be named on the command line (trusted).
    """
    module, _, attribute = name.rpartition(':')
    if not trusted and module != 'model' and not module.startswith('zoo.'):
        raise ValueError(f"the model's class is '{name}', but only zoo/ is imported by default: "
                         f'put its file there, or continue with train.py --model={name}')
    with explain(f"cannot import the model class '{name}'",
                 'write MODULE:CLASS, such as zoo.ouro:Ouro'):
        kind = getattr(import_module(module), attribute)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)
            and hasattr(kind, 'Config')):
        raise ValueError(f"'{name}' is not a model class: it must be a subclass of model.GPT")
    return kind


def load_checkpoint(path, device='cpu', trusted=''):
    """out_dir/ckpt.pt -> model (float32, in evaluation), dict. trusted: a class outside zoo/."""
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint at '{path}': check the path, or train one first with "
                         'python train.py')
    broken = (f"'{path}' is not a whole checkpoint of this program (%s): it may be cut short, hold "
              'something else, or be of a class that has changed; train again or use another')
    try:
        with warnings.catch_warnings(action='ignore'):      # on files that are refused below
            # tensors and plain values, no code
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        parts = dict(model=dict, model_args=dict, model_class=str, config=dict, iter_num=int,
                     tokenizer=(str, NoneType))
        if not all(isinstance(checkpoint[part], kind) for part, kind in parts.items()):
            raise TypeError
    except Exception as error:      # torch.load has a dozen ways to say that a file is not its own
        raise ValueError(broken % type(error).__name__) from error

    name = checkpoint['model_class']
    kind = class_of(name, trusted=name == trusted)
    try:
        with torch.device('meta'):      # shapes alone: the weights are those that were read
            model = kind(kind.Config(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'], assign=True)
        model.tie()
    except RuntimeError as error:       # which keys or shapes do not match
        raise ValueError(broken % shorten(str(error), 400)) from error
    except Exception as error:
        raise ValueError(broken % type(error).__name__) from error
    checkpoint['model_args'] = asdict(model.config)     # with fields that are newer than the file
    return model.float().to(device).eval(), checkpoint


def find_run(out_dir, quiet=False):
    """
    The knob out_dir -> the folder to read ckpt.pt from, and the folder to write results to.

    None is out/ if that holds a ckpt.pt and pretrained/text otherwise, and a line says which.
    pretrained/ is found from any folder. Results of its models, and of others in a folder that is
    read-only, go to out/NAME, so that those of a run in out/ stay.
    """
    if out_dir is None:
        out_dir = 'out' if os.path.exists('out/ckpt.pt') else 'pretrained/text'
        if not quiet:
            print(f'model: {out_dir}/ckpt.pt')
    source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(out_dir) and out_dir.split('/')[0] == 'pretrained':
        out_dir = os.path.join(source, out_dir)
    inside = os.path.realpath(out_dir).startswith(os.path.realpath(f'{source}/pretrained') + os.sep)
    if inside or os.path.isdir(out_dir) and not os.access(out_dir, os.W_OK):
        return out_dir, os.path.join('out', os.path.basename(os.path.realpath(out_dir)))
    return out_dir, out_dir


def open_run(out_dir, dev='cpu', if_plain='', quiet=False):
    """
    The model of a run, its checkpoint, the folder to read from, and the one to write to (find_run).

    if_plain: how the ValueError for a model without recurrent groups ends; '' = no error.
    """
    folder, results = find_run(out_dir, quiet)
    model, checkpoint = load_checkpoint(os.path.join(folder, 'ckpt.pt'), dev)
    if if_plain and not model.groups:
        raise ValueError(f'the model in {folder} has no recurrent groups, so {if_plain}')
    return model, checkpoint, folder, results


# what a run continues from ------------------------------------------------------------------------

def check_free(out_dir, overwrite, choice=''):
    """ValueError if out_dir holds a run, unless that is to be overwritten. choice: another flag."""
    paths = [path for path in (f'{out_dir}/ckpt.pt', f'{out_dir}/ckpt.old.pt')
             if os.path.exists(path)]
    if paths and not overwrite:
        done = ''
        with suppress(Exception):       # a damaged file is a run, too
            done = torch.load(paths[0], weights_only=True, mmap=True, map_location='cpu')
            done = f" of {done['iter_num']:,} iterations"
        raise ValueError(f'{out_dir} holds a run{done}: {choice}--overwrite starts over, or give '
                         'another --out_dir')


def start_over(out_dir):
    """Remove the checkpoints of an earlier run, so that nothing continues from them."""
    for path in (*glob.glob(f'{glob.escape(out_dir)}/ckpt*.pt'), f'{out_dir}/exits.json'):
        if RANK == 0 and os.path.exists(path):
            os.remove(path)


def last_checkpoint(out_dir, trusted=''):
    """What --resume continues from, its dict and path: ckpt.pt, or ckpt.old.pt if damaged."""
    paths = [f'{out_dir}/{name}' for name in ('ckpt.pt', 'ckpt.old.pt')
             if os.path.exists(f'{out_dir}/{name}')]
    for path in paths:
        try:
            checkpoint = load_checkpoint(path, trusted=trusted)[1]
            if 'optimizer' not in checkpoint:
                raise ValueError(f"'{path}' holds weights and nothing to resume: start from it "
                                 f'with --init_from={quote(path)} and another --out_dir')
            return checkpoint, path
        except ValueError as error:
            if path == paths[-1]:
                raise
            say(f'warning: {error}; resuming {paths[-1]}')
    say(f'no checkpoint in {out_dir} yet: starting a new run')
    return {}, ''


def earlier_run(script):
    """
    What a training script continues from, as its knobs resume, init_from and model say.

    script: its globals. Knobs that were not given are set to those of the earlier run. Returns the
    earlier checkpoint, {} if there is none, and its path if that run is resumed, '' otherwise.
    """
    out_dir, init_from, knobs = (script[name] for name in ('out_dir', 'init_from', 'knobs'))
    if find_run(out_dir)[1] != out_dir:
        raise ValueError(f'{out_dir} is read-only: choose another --out_dir, and --init_from to '
                         'continue from its weights')
    before, resumed = last_checkpoint(out_dir, script['model']) if script['resume'] else ({}, '')
    if resumed:
        earlier = before['model_args'] | before['config']
        earlier |= dict(model=before['model_class'], out_dir=out_dir)
        fixed = earlier.keys() - FREE_KNOBS
    elif init_from:
        if os.path.realpath(os.path.dirname(init_from)) == os.path.realpath(out_dir):
            raise ValueError(f'init_from = {init_from} would be overwritten: take another '
                             '--out_dir')
        check_free(out_dir, script['overwrite'], '--resume continues it, ')
        before = load_checkpoint(init_from, trusted=script['model'])[1]
        earlier = before['model_args'] | dict(model=before['model_class'])
        fixed = before['model_args'].keys() - FREE_FIELDS
    else:
        check_free(out_dir, script['overwrite'], '--resume continues it, ')
        return {}, ''

    # the knobs of the earlier run, except those that were given
    changed = []
    for key in sorted(knobs.keys() & earlier.keys()):
        if key not in given:
            script[key] = knobs[key] = earlier[key]
        elif key in fixed and plain(knobs[key]) != earlier[key]:
            changed.append(f'{key} = {knobs[key]} (it was {earlier[key]})')
    if changed:
        raise ValueError(f'{resumed or init_from} had other knobs: {", ".join(changed)}; leave '
                         'them out, or train in another --out_dir')
    if resumed and before['iter_num'] > knobs['max_iters']:
        raise ValueError(f"the run in {out_dir} has {before['iter_num']} iterations already: "
                         '--max_iters may not be smaller')
    return before, resumed


# calibrated thresholds: written by bench.py --calibrate, read by --tau=auto -----------------------

def hash_of_weights(checkpoint):
    """sha256 of a checkpoint's weights: its thresholds belong to them alone."""
    digest = hashlib.sha256()
    for name, weight in sorted(checkpoint['model'].items()):
        digest.update(name.encode() + weight.float().numpy(force=True).tobytes())
    return digest.hexdigest()


def save_thresholds(out_dir, checkpoint, rows, **about):
    """Write out_dir/exits.json. rows: dicts of cache, rule, past, tau and costs."""
    write_json(dict(weights=hash_of_weights(checkpoint)) | about | dict(exits=rows),
               os.path.join(out_dir, 'exits.json'))


def of_threshold(exit, cache, ring, n_loop, wave=None):
    """All that a threshold was found for, as plain values. n_loop: counts; wave: [width, steps]."""
    cache = cache or 'exact'            # without a cache the result is that of exact
    return plain(dict(rule=exit.name, hits=exit.hits, keep=exit.keep, cache=cache,
                      past=exit.past or cache != 'exact',       # prompts wait
                      ring=ring if cache == 'ring' else None, n_loop=n_loop, wave=wave))


def read_tau(out_dir, checkpoint, wanted):
    """The threshold in exits.json that was found for what of_threshold returns."""
    path = os.path.join(out_dir, 'exits.json')
    how = 'python bench.py --calibrate=0.005 (and the same --out_dir, if you gave one)'
    with explain(f"--tau=auto cannot read '{path}'", f'make it with {how}'), open(path) as f:
        found = json.load(f)
        weights = found['weights']
        taus = [row['tau'] for row in found['exits'] if wanted.items() <= row.items()]
    if weights != hash_of_weights(checkpoint):
        raise ValueError(f"the thresholds in '{path}' were found for other weights: find new "
                         f'ones with {how}')
    if not taus or taus[0] is None:     # null: no threshold was good enough
        wanted = ', '.join(f'{name} = {value}' for name, value in wanted.items())
        raise ValueError(f"'{path}' has no threshold for {wanted}: give --tau=NUMBER, or see what "
                         f'{how} finds')
    return taus[0]
