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
import hashlib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import NoneType

import torch

from common.configurator import given, imported, plain
from common.distributed import RANK, say

# knobs that may change within a run: they shape neither the weights nor the columns of the log
FREE_KNOBS = {'out_dir', 'resume', 'max_iters', 'eval_interval', 'eval_windows', 'log_interval',
              'save_interval', 'keep_iters', 'device', 'compile'}
# fields of the model's Config that may differ from those of the weights that a run starts from
FREE_FIELDS = {'dropout', 'mean_recurrence', 'bptt_k', 'adapter_init', 'step_noise'}


@dataclass
class Run:
    """What a checkpoint holds, and so what it takes to resume."""
    config: dict                # every knob
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
                      model_class=f'{kind.__module__}:{kind.__name__}', config=run.config,
                      iter_num=it, tokenizer=run.tokenizer, data=run.data, val_loss=run.val_loss)
    if whole:
        checkpoint |= {name: one.state_dict()['state'] for name, one in run.optimizers.items()}
        checkpoint |= dict(trend=run.trend, spikes=run.spikes)
    save_checkpoint(checkpoint, path, keep_old=whole)


def save_checkpoint(checkpoint, path, keep_old=False):
    """
    A dict of tensors and plain values -> path, whole or not at all: a kill or a full disk leaves
    the earlier file. keep_old: keep that file, ckpt.pt as ckpt.old.pt. OSError if path cannot be
    written.
    """
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    try:
        # under another name until it is whole and on the disk
        with open(path + '.tmp', 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if keep_old and os.path.exists(path):
            old = path.removesuffix('.pt') + '.old.pt'
            with suppress(FileNotFoundError):
                os.remove(old)
            try:
                os.link(path, old)
            except OSError:         # a file system without links
                os.replace(path, old)
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as error:        # RuntimeError: torch, on a full disk
        with suppress(OSError):
            os.remove(path + '.tmp')
        raise OSError(f"cannot write '{path}' ({error}): the earlier file is unchanged; make "
                      'room, then continue with --resume') from error


# the class of a checkpoint's model ----------------------------------------------------------------

def class_of(name, trusted=False):
    """
    'MODULE:CLASS' -> the class, a GPT. ValueError if it is not one, or not in model.py or zoo/:
    importing a file runs it, so others must be named on the command line (trusted).
    """
    module = name.partition(':')[0]
    if not trusted and module != 'model' and not module.startswith('zoo.'):
        raise ValueError(f"the model's class is '{name}', but only zoo/ is imported by default: "
                         f'put its file there, or continue with train.py --model={name}')
    kind = imported(name, 'model class', 'zoo.ouro:Ouro')
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)
            and hasattr(kind, 'Config')):
        raise ValueError(f"'{name}' is not a model class: it must be a subclass of model.GPT")
    return kind


# the fields that GPTConfig once had for the models of zoo/, with their values in a GPT
ONCE_FIELDS = dict(loop_norm=True, sandwich='sum', mlp='plain', qk_bias=False, scale_embedding=True,
                   last_norm=True, tied=True, gate=False)
ONCE_CLASSES = {
    'model:GPT': {},
    'zoo.ouro:Gated': dict(gate=True),
    'zoo.etd:Looped': dict(loop_norm=False),
    'zoo.huginn:Huginn': dict(mlp='gated', qk_bias=True),
    'zoo.ouro:Ouro': dict(sandwich='branch', mlp='gated', scale_embedding=False, last_norm=False,
                          tied=False, gate=True),
}


def class_and_args(checkpoint):
    """The name of a checkpoint's class and its Config's arguments, of older checkpoints too."""
    args = dict(checkpoint['model_args'])
    if 'model_class' in checkpoint:
        return checkpoint['model_class'], args
    width, eps = args.pop('mlp_width', None) or 4 * args['n_embd'], args.pop('norm_eps', 1e-6)
    once = ONCE_FIELDS | {name: args.pop(name) for name in ONCE_FIELDS if name in args}
    for name, changed in ONCE_CLASSES.items():
        if once == ONCE_FIELDS | changed:
            if 'mlp' in changed:        # such models have two fields of their own
                return name, args | dict(mlp_width=width, norm_eps=eps)
            if (width, eps) == (4 * args['n_embd'], 1e-6):
                return name, args
    raise ValueError('the checkpoint is of an older version, and no class of this version has its '
                     f'architecture: {once}, mlp_width = {width}, norm_eps = {eps}')


def load_checkpoint(path, device='cpu', trusted=''):
    """
    out_dir/ckpt.pt -> (model in evaluation, float32; the checkpoint's dict).

    trusted: MODULE:CLASS of a model that is not in zoo/, but may be imported.
    ValueError if the file is missing, damaged, holds code, or is of a class that is not imported.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint at '{path}': check the path, or train one first with "
                         'python train.py')
    broken = (f"'{path}' is not a whole checkpoint of this program (%s): it may be cut short, or "
              'hold something else; train again or use another')
    try:
        with warnings.catch_warnings(action='ignore'):      # on files that are refused below
            # tensors and plain values, no code
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        kinds = dict(model=dict, model_args=dict, config=dict, iter_num=int,
                     tokenizer=(str, NoneType))
        for name, kind in kinds.items():
            if not isinstance(checkpoint[name], kind):
                raise TypeError
    except Exception as error:      # torch.load has a dozen ways to say that a file is not its own
        raise ValueError(broken % type(error).__name__) from error

    name, args = class_and_args(checkpoint)
    kind = class_of(name, trusted=name == trusted)
    try:
        with torch.device('meta'):      # shapes alone: the weights are those that were read
            model = kind(kind.Config(**args))
        model.load_state_dict(checkpoint['model'], assign=True)
        model.tie()
    except Exception as error:
        raise ValueError(broken % type(error).__name__) from error
    checkpoint |= dict(model_class=name, model_args=asdict(model.config))
    return model.float().to(device).eval(), checkpoint


def find_run(out_dir, quiet=False):
    """
    The knob out_dir -> the folder to read ckpt.pt from, and the folder to write results to.

    None is out/ if that holds a ckpt.pt and pretrained/text otherwise, and a line says which.
    pretrained/ is beside the source files; results of its models go to out/.
    """
    if out_dir is None:
        out_dir = 'out' if os.path.exists('out/ckpt.pt') else 'pretrained/text'
        if not quiet:
            print(f'model: {out_dir}/ckpt.pt')
    source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(out_dir) and out_dir.split('/')[0] == 'pretrained':
        out_dir = os.path.join(source, out_dir)
    pretrained = os.path.realpath(os.path.join(source, 'pretrained'))
    inside = os.path.realpath(out_dir).startswith(pretrained + os.sep)
    return out_dir, 'out' if inside else out_dir


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

def last_checkpoint(out_dir, trusted=''):
    """
    What --resume continues from: out_dir/ckpt.pt, or the one before if it is damaged.

    Returns its dict and path, or ({}, '') if there is none yet. ValueError if none is whole, or if
    it holds weights alone.
    """
    paths = [f'{out_dir}/{name}' for name in ('ckpt.pt', 'ckpt.old.pt')
             if os.path.exists(f'{out_dir}/{name}')]
    for path in paths:
        try:
            checkpoint = load_checkpoint(path, trusted=trusted)[1]
            if 'optimizer' not in checkpoint:
                raise ValueError(f"'{path}' holds weights and nothing to resume: start from it "
                                 f'with --init_from={path} and another --out_dir')
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

    script: its globals. Knobs that were not given are set to those of the earlier run.
    Returns the earlier checkpoint, {} if there is none, and its path if that run is resumed, ''
    otherwise. ValueError if it does not fit.
    """
    out_dir, init_from, config = (script[name] for name in ('out_dir', 'init_from', 'config'))
    if find_run(out_dir)[1] != out_dir:
        raise ValueError(f'{out_dir} is read-only: choose another --out_dir, and --init_from to '
                         'continue from its weights')
    before, resumed = last_checkpoint(out_dir, script['model']) if script['resume'] else ({}, '')
    if resumed:
        # before it was a knob, the optimizer was AdamW
        knobs = dict(optimizer='adamw') | before['model_args'] | before['config']
        knobs |= dict(model=before['model_class'], out_dir=out_dir)
        fixed = knobs.keys() - FREE_KNOBS
    elif init_from:
        if os.path.realpath(os.path.dirname(init_from)) == os.path.realpath(out_dir):
            raise ValueError(f'init_from = {init_from} would be overwritten: take another '
                             '--out_dir')
        before = load_checkpoint(init_from, trusted=script['model'])[1]
        knobs = before['model_args'] | dict(model=before['model_class'])
        fixed = before['model_args'].keys() - FREE_FIELDS
    else:
        return {}, ''

    # the knobs of the earlier run, except those that were given
    changed = []
    for key in sorted(config.keys() & knobs.keys()):
        if key not in given:
            script[key] = config[key] = knobs[key]
        elif key in fixed and plain(config[key]) != knobs[key]:
            changed.append(f'{key} = {config[key]} (it was {knobs[key]})')
    if changed:
        raise ValueError(f'{resumed or init_from} had other knobs: {", ".join(changed)}; leave '
                         'them out, or train in another --out_dir')
    if resumed and before['iter_num'] > config['max_iters']:
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
    """out_dir/exits.json, whole or not at all. rows: dicts of cache, rule, past, tau and costs."""
    path = os.path.join(out_dir, 'exits.json')
    os.makedirs(out_dir, exist_ok=True)
    with open(path + '.tmp', 'w') as f:
        json.dump(dict(weights=hash_of_weights(checkpoint)) | about | dict(exits=rows), f, indent=1)
    os.replace(path + '.tmp', path)


def read_tau(out_dir, checkpoint, cache, rule, past, wave=0, wave_steps=1):
    """
    The threshold of a rule in out_dir/exits.json; without a cache (None) it is that of `exact`.
    With a wave it is the one calibrated for such a wave.

    ValueError if there is none, or if it was found for another checkpoint.
    """
    path = os.path.join(out_dir, 'exits.json')
    how = 'python bench.py --calibrate=0.005 (and the same --out_dir, if you gave one)'
    try:
        with open(path) as f:
            found = json.load(f)
        weights = found['weights']
        taus = {(row['cache'], row['rule'], row['past'], *row.get('wave', ())): row['tau']
                for row in found['exits']}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--tau=auto cannot read '{path}' ({type(error).__name__}): make it with "
                         f'{how}') from error
    if weights != hash_of_weights(checkpoint):
        raise ValueError(f"the thresholds in '{path}' were found for other weights: find new "
                         f'ones with {how}')
    cache = cache or 'exact'
    past = past or cache != 'exact'     # prompts wait
    key = cache, rule, past, *((wave, wave_steps) if wave else ())
    if taus.get(key) is None:       # null: no threshold was good enough
        raise ValueError(f"'{path}' has no threshold for cache = {cache}, exit = {rule}, past = "
                         f'{past}, wave = {wave}: give --tau=NUMBER, or see what {how} finds')
    return taus[key]
