"""
A run on disk that survives a kill at any moment, and going on from it: its checkpoints.

Not run by itself. A checkpoint holds tensors, numbers, strings, lists and dicts only, and is read
as such: a file with code in it is refused, and the code is not run.

    out_dir/ckpt.pt         the last one        out_dir/ckpt.old.pt     the one before
    out_dir/ckpt_ITER.pt    weights kept        out_dir/ema/ckpt.pt     averaged weights

    model         state_dict                    model_args    GPTConfig's arguments
    config        every knob                    iter_num      iterations done
    tokenizer     its name                      data          sha256 of the training tokens
    val_loss      {n_loop: nats}                and to go on: optimizer, muon {parameter number:
                                                state}, trend, spikes (watch.py), ema {name: tensor}
"""
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch

from common.configurator import adopt
from common.distributed import say
from model import GPT, GPTConfig

# knobs that may change within a run: they shape neither the weights nor the columns of the log
FREE_KNOBS = {'out_dir', 'resume', 'max_iters', 'eval_interval', 'eval_windows', 'log_interval',
              'save_interval', 'keep_iters', 'device', 'compile', 'checkpoint_steps',
              'peak_tflops'}


@dataclass
class Run:
    """What a checkpoint holds, and so what it takes to go on."""
    config: dict                # every knob
    model: GPT
    optimizers: dict            # by the name of their state in a checkpoint
    averaged: dict              # name: averaged weight; empty without ema
    tokenizer: str
    data: str                   # sha256 of the training tokens
    start: int                  # iterations done before
    val_loss: dict              # n_loop: nats
    trend: list                 # of the loss, see watch.py
    spikes: list                # [loss, it] since the last row of the log
    # seconds spent on other things than training; not in a checkpoint
    spent: dict = field(default_factory=lambda: dict(checkpoints=0.0, evaluation=0.0))


def save_run(run, it, path, whole=True):
    """A run after `it` iterations -> path. whole: with all that it takes to go on."""
    checkpoint = dict(model=dict(run.model.state_dict()), model_args=asdict(run.model.config),
                      config=run.config, iter_num=it, tokenizer=run.tokenizer, data=run.data,
                      val_loss=run.val_loss)
    if whole:
        checkpoint |= {name: one.state_dict()['state'] for name, one in run.optimizers.items()}
        checkpoint |= dict(trend=run.trend, spikes=run.spikes, ema=run.averaged)
    save_checkpoint(checkpoint, path, keep_old=whole)


def save_checkpoint(checkpoint, path, keep_old=False):
    """
    A dict of tensors and plain values -> path, whole or not at all: after a kill or on a full disk
    what was there before is still there.

    keep_old: it also stays beside the new one, ckpt.pt as ckpt.old.pt. OSError if path cannot be
    written.
    """
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    old = path.removesuffix('.pt') + '.old.pt'
    try:
        # under another name until it is whole and on the disk
        with open(path + '.tmp', 'wb') as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        if keep_old and os.path.exists(path):
            with suppress(FileNotFoundError):
                os.remove(old)
            try:
                os.link(path, old)
            except OSError:         # a file system without links
                os.replace(path, old)
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as error:        # torch's writer has its own for a full disk
        with suppress(OSError):
            os.remove(path + '.tmp')
        raise OSError(f"cannot write '{path}' ({error}): what was there is as it was; make room, "
                      'then go on with --resume') from error


def load_checkpoint(path, device='cpu'):
    """
    out_dir/ckpt.pt -> (model in evaluation, the checkpoint's dict).

    ValueError if it is missing, damaged, or holds code.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint at '{path}': check the path, or train one first with "
                         'python train.py')
    try:
        with warnings.catch_warnings(action='ignore'):      # on files that are refused below
            # tensors and plain values, no code
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
        with torch.device('meta'):      # shapes alone: the weights are those that were read
            model = GPT(GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'], assign=True)
        model.tie()
        assert {'config', 'iter_num', 'tokenizer'} <= set(checkpoint)
    except Exception as error:      # torch.load has a dozen ways to say that a file is not its own
        raise ValueError(f"'{path}' is not a whole checkpoint of this program "
                         f'({type(error).__name__}): it may be cut short, or hold something else; '
                         'train again or use another') from error
    return model.to(device).eval(), checkpoint


def last_checkpoint(out_dir, say=print):
    """
    What --resume goes on from: out_dir/ckpt.pt, or the one before if it is damaged.

    Returns its dict and path, or (None, '') if there is none yet. ValueError if none is whole, or
    if it holds weights alone.
    """
    paths = [os.path.join(out_dir, name) for name in ('ckpt.pt', 'ckpt.old.pt')]
    paths = [path for path in paths if os.path.exists(path)]
    for path in paths:
        try:
            checkpoint = load_checkpoint(path)[1]
            if 'optimizer' not in checkpoint:
                raise ValueError(f"'{path}' holds weights and nothing to resume: start from it "
                                 f'with --init_from={path} and another --out_dir')
            return checkpoint, path
        except ValueError as error:
            if path == paths[-1]:
                raise
            say(f'warning: {error}; going on from {paths[-1]}')
    say(f'no checkpoint in {out_dir} yet: from the beginning')
    return None, ''


def earlier_run(script, shape):
    """
    What a training script is to go on from, by its knobs resume and init_from.

    script: its globals, of which the knobs that were not given are set to those of the earlier run.
    shape: the knobs that the weights of another run must fit. Returns the checkpoint to resume with
    its path, and the one to take weights from: a dict or None. ValueError if they do not fit.
    """
    out_dir, init_from = script['out_dir'], script['init_from']
    saved, path, weights = None, '', None
    if script['resume']:
        saved, path = last_checkpoint(out_dir, say)
    if saved:
        # what were the defaults then, for knobs that were not there yet
        knobs = dict(optimizer='adamw') | vars(GPTConfig(**saved['model_args'])) | saved['config']
        del knobs['out_dir'], knobs['resume']
        adopt(script, knobs, knobs.keys() - FREE_KNOBS, f'the run in {out_dir}')
        if saved['iter_num'] > script['max_iters']:
            raise ValueError(f"the run in {out_dir} has {saved['iter_num']} iterations already: "
                             '--max_iters may be no less')
    elif init_from:
        if os.path.realpath(os.path.dirname(init_from)) == os.path.realpath(out_dir):
            raise ValueError(f'init_from = {init_from} would be written over: take another '
                             '--out_dir')
        weights = load_checkpoint(init_from)[1]
        adopt(script, weights['model_args'], shape, init_from)
    return saved, path, weights
