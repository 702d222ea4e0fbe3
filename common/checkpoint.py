"""
The folder of a run: its checkpoints, and whether it is free.

    out_dir/ckpt.pt         the last one        out_dir/ckpt_ITER.pt    weights kept
    out_dir/ckpt_best.pt    the weights with the lowest held-out loss of all eval_loops

A checkpoint is a dict of tensors and plain values, written whole or not at all.

    model         state_dict                    model_args    its Config's arguments
    model_class   its class, 'model:GPT'        config        every knob
    tokenizer     its name                      data          sha256 of what it is trained on
    iter_num      iterations done
    and to resume: optimizers {name: state}; in ckpt_best.pt: best (held-out loss, of what)

read_checkpoint adds `path`, that of the file, and `folder`, where it stands; load_checkpoint adds
`damping`, that of the run, and puts the model's own Config into model_args.
"""
import os
import sys
from dataclasses import asdict
from glob import escape, glob
from importlib import import_module

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from common.configurator import plain
from common.errors import check, explain
from common.files import ROOT, new_file, read_json, sha256_of


def checkpoint_of(model, config, tokenizer, data, iter_num=0):
    """What every checkpoint holds."""
    cls = type(model)
    return dict(model=dict(model.state_dict()), model_args=plain(asdict(model.config)),
                model_class=f'{cls.__module__}:{cls.__name__}', config=plain(config),
                tokenizer=tokenizer, data=data, iter_num=iter_num)


def save_checkpoint(checkpoint, path):
    try:
        with new_file(path, 'wb') as f:
            torch.save(checkpoint, f)
    except (OSError, RuntimeError) as error:        # on a full disk torch raises a RuntimeError
        raise OSError(f"cannot write '{path}' ({error}): the earlier file is unchanged") from error


# reading ------------------------------------------------------------------------------------------

def read_checkpoint(path):
    """A ckpt.pt's dict. path: of the file or its folder; pretrained/ is found from anywhere."""
    path = str(path)
    if path.startswith('pretrained/') and not os.path.exists(path):
        path = os.path.join(ROOT, path)
    if os.path.isdir(path) or not path.endswith('.pt'):
        path = os.path.join(path, 'ckpt.pt')
    check(os.path.exists(path), f"no checkpoint at '{path}': check the path, or train one first "
          'with python train.py --out_dir=...')
    with explain(f"'{path}' is not a whole checkpoint", 'restore it, or use another'):
        objects = get_unsafe_globals_in_checkpoint(path)
        # torch's own words would advise to run the code in the file
        checkpoint = None if objects else torch.load(path, map_location='cpu', weights_only=True)
    check(not objects, f"'{path}' holds {', '.join(objects)} besides tensors and plain values: "
          'they may run code, so none is read. If you trust the file, read it by torch.load with '
          'weights_only=False, and save it without them')
    needed = {'model', 'model_args', 'model_class', 'config', 'tokenizer'}
    check(isinstance(checkpoint, dict) and needed <= checkpoint.keys(),
          f"'{path}' is not a checkpoint of this program: use another")
    return checkpoint | dict(path=path, folder=os.path.dirname(path) or '.')


def class_of(name, named=False):
    """
    'MODULE:CLASS' -> the class, a GPT. Importing a file runs it, so one outside model.py and zoo/
    is refused unless it is loaded already, or `named` by the user.
    """
    module, _, attribute = name.partition(':')
    check(named or module == 'model' or module.startswith('zoo.') or module in sys.modules,
          f'the class of the model is {name}, which is not loaded: if it is yours, import its '
          f'file, {module.replace(".", "/")}.py, or name it after the script')
    with explain(f"cannot import the model class '{name}'",
                 'write MODULE:CLASS, a subclass of model.GPT such as zoo.ouro:Ouro'):
        cls = getattr(import_module(module), attribute)
        cls.Config      # an AttributeError unless it is a GPT
    return cls


def load_checkpoint(path, dev='cpu', length=None, damping=None, cls=None):
    """
    A checkpoint -> its model, float32 and in evaluation, and what else it holds.

    length: a block_size, if positions are not learned. damping, cls: others than the run's.
    """
    checkpoint = read_checkpoint(path)
    cls = cls or class_of(checkpoint['model_class'])
    args = checkpoint['model_args']
    checkpoint['damping'] = args.get('damping', 0.0)        # that of the run
    changes = dict(block_size=length, damping=damping)
    args = args | {name: value for name, value in changes.items() if value is not None}
    with explain(f"a {checkpoint['model_class']} does not fit a {cls.__name__}",
                 'leave out what you changed', (RuntimeError, TypeError)):
        config = cls.Config(**args)
        with torch.device('meta'):      # shapes alone: the weights are those that were read
            model = cls(config)
        model.load_state_dict(checkpoint['model'], assign=True)
    model.tie()
    # as loaded, and with fields that are newer than the file
    checkpoint['model_args'] = asdict(config)
    return model.float().eval().to(dev), checkpoint


def open_run(out_dir=None, dev='cpu', **changes):
    """
    The run in out_dir -> its model, what else its ckpt.pt holds, the folder of that file, and where
    results are written. None = out/ if that holds a ckpt.pt, and pretrained/text otherwise.
    changes: see load_checkpoint. The model gets the rows of exits.json as exit_rows, unless
    its damping is changed: first those in the folder of results, then those beside the weights.
    """
    if out_dir is None:
        out_dir = 'out' if os.path.exists('out/ckpt.pt') else 'pretrained/text'
    model, checkpoint = load_checkpoint(out_dir, dev, **changes)
    folder = checkpoint['folder']
    results = folder_of_results(folder)
    if model.config.damping == checkpoint['damping']:       # with which they were measured
        path = checkpoint['path']
        model.exit_rows = [row for place in dict.fromkeys((results, folder))
                           for row in stored_exits(place, path)]
    return model, checkpoint, folder, results


def folder_of_results(folder):
    """Where results go: to the folder of the run, or of pretrained/NAME to out/pretrained-NAME."""
    above, name = os.path.split(os.path.realpath(folder))
    is_pretrained = above == os.path.realpath(os.path.join(ROOT, 'pretrained'))
    return f'out/pretrained-{name}' if is_pretrained else folder


def stored_exits(folder, weights):
    """
    The rows of folder/exits.json, at most one for each rule and cache; [] if there is no such file,
    or if it was measured with other weights than those in the file `weights`. It holds `weights`,
    their sha256, and `exits`, the rows:

        rule, cache, tau    the threshold is taken whether tokens wake or not
        cost                nats per token above the full budget; on a task wrong answers
        wake                was it found with tokens that wake?
        how                 and by what evidence?
    """
    path = os.path.join(folder, 'exits.json')
    if not os.path.exists(path):
        return []
    stored = read_json(path)
    return stored['exits'] if stored.get('weights') == sha256_of(weights) else []


# a run to write -----------------------------------------------------------------------------------

def check_free(out_dir, overwrite=False):
    """ValueError if out_dir holds a run, or weights of one, that may not be overwritten."""
    found = {os.path.basename(path) for path in glob(os.path.join(escape(out_dir), 'ckpt*.pt'))}
    check(overwrite or found <= {'ckpt_000000.pt'}, f'{out_dir} holds a run: '
          '--overwrite replaces it, --resume continues a ckpt.pt, or give another --out_dir')


def start_over(out_dir):
    """Remove an earlier run: its weights, tables and figures, and no other file."""
    for pattern in ('ckpt.pt', 'ckpt_best*.pt', 'ckpt_[0-9]*.pt', 'log.csv', 'log_before_*.csv',
                    'loss.png', 'eval.csv', 'eval_*.csv', 'exits.json', 'bench.csv',
                    'figure_4.*', 'figures/*.png', 'figures/*.csv'):
        for path in glob(os.path.join(escape(out_dir), pattern)):
            os.remove(path)
