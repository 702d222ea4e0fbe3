"""
A run on disk that survives a kill at any moment: checkpoints, and the log beside them.

Not run by itself. A checkpoint holds tensors, numbers, strings, lists and dicts only, and is read as such: a file with code in it is
refused and the code not run.

    out_dir/ckpt.pt = dict(model=state_dict, model_args=GPTConfig's, config=every knob, iter_num, tokenizer, data=sha256 of the training
                      tokens, val_loss={n_loop: nats}, and to go on: optimizer={parameter number: state}, trend, spikes, ema)
    out_dir/ckpt.old.pt, the one before      out_dir/ckpt_ITER.pt, weights alone      out_dir/log.csv, a row an iteration
"""
import csv
import math
import os
import warnings
from contextlib import suppress

import torch

from model import GPT, GPTConfig


def save_checkpoint(checkpoint, path, keep_old=False):
    """
    A dict of tensors and plain values -> path, whole or not at all: a kill or a full disk leaves what stood there.

    keep_old: what stood there stays beside it, ckpt.pt as ckpt.old.pt. OSError if it cannot be written.
    """
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    old = path.removesuffix('.pt') + '.old.pt'
    try:
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
    except (OSError, RuntimeError) as error:        # torch's writer has its own error for a full disk
        with suppress(OSError):
            os.remove(path + '.tmp')
        raise OSError(f"cannot write '{path}' ({error}): what stood there is as it was; make room, then go on with --resume") from error


def load_checkpoint(path, device='cpu'):
    """out_dir/ckpt.pt -> (model in evaluation, the checkpoint's dict). ValueError if it is missing, damaged or holds code."""
    if not os.path.isfile(path):
        raise ValueError(f"no checkpoint at '{path}': check the path, or train one first with python train.py")
    try:
        with warnings.catch_warnings(action='ignore'):      # torch's asides on files that are refused below
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)   # tensors and plain values, no code
        model = GPT(GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'])
        assert {'config', 'iter_num', 'tokenizer'} <= set(checkpoint)
    except Exception as error:      # torch.load has a dozen ways to say that a file is none of its own
        raise ValueError(f"'{path}' is not a whole checkpoint of this program ({type(error).__name__}): it may be cut short, or hold "
                         'something else; train again or use another') from error
    return model.to(device).eval(), checkpoint


def last_checkpoint(out_dir, say=print):
    """What --resume goes on from: out_dir/ckpt.pt, or the one before if it is damaged -> its dict and path; (None, '') if there is none yet."""
    paths = [path for path in (os.path.join(out_dir, name) for name in ('ckpt.pt', 'ckpt.old.pt')) if os.path.exists(path)]
    for path in paths:
        try:
            checkpoint = load_checkpoint(path)[1]
            if 'optimizer' not in checkpoint:
                raise ValueError(f"'{path}' holds weights and nothing to resume: start from it with --init_from={path} and another --out_dir")
            return checkpoint, path
        except ValueError as error:
            if path == paths[-1]:
                raise
            say(f'warning: {error}; going on from {paths[-1]}')
    say(f'no checkpoint in {out_dir} yet: from the beginning')
    return None, ''


def read_log(path, before=math.inf):
    """log.csv's whole rows of iterations below `before`, each a dict."""
    with open(path, newline='') as f:
        return [row for row in csv.DictReader(f) if None not in row.values() and int(row['iter']) < before]


def open_log(path, columns, before):
    """log.csv, rid of what a killed run wrote after its last checkpoint -> a function that adds a row (a dict)."""
    rows = read_log(path, before) if before and os.path.exists(path) else []
    with open(path + '.tmp', 'w', newline='') as f:
        writer = csv.DictWriter(f, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + '.tmp', path)

    def add(row):
        with open(path, 'a', newline='') as f:
            csv.DictWriter(f, columns).writerow(row)
    return add
