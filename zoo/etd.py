"""
Encode, think, decode: which layers of a plain model to loop (Koishekenov et al. 2025, ETD), and a
cut of a plain model that loops (McLeish et al. 2025).

    python train.py '--groups=[]' --out_dir=out-plain       a plain model
    python -m zoo.etd --init_from=out-plain/ckpt.pt         finds its thinking block
    python train.py --init_from=out-plain-etd/ckpt.pt --out_dir=out-trained --max_iters=500
                                                            mid-training, with loops
    python -m zoo.etd --init_from=out-smollm2/ckpt.pt '--block=[12,13,14,15]'
                                                            these layers, of any plain model
    python -m zoo.etd --init_from=out-smollm2/ckpt.pt '--keep=[0,1]' '--block=[14]' --window=16 \\
        --dataset=calc --task_words                         a cut: layers 0 and 1, then 14 in a loop

Writes out_dir/ckpt.pt, and blocks.csv if it has measured blocks.

ETD: all layers stay. It prints how far each layer turns the state, the block between the two knees
of that curve, and, for every block of layers or the candidates, the held-out loss when it loops 1
to 4 times. The loop starts from the input of the block, which later steps do not read again, or by
the injection `bridge`, whose weights start at 0. So one loop is the plain model.

A cut: the layers of --keep run once, before or behind the block; the others are gone. The loop
starts from 0, each step gets the input (x + e at first), and a norm closes it. The norm keeps the
state as large as the stream behind the block is without a loop, which is measured.

The curve of angles falls from the front to its lowest layer and rises to the back. The knee of a
side is its point farthest below the chord from the side's end to the lowest layer, with both axes
scaled to 0 ... 1. The thinking block goes from knee to knee, inclusive.

    angle       arccos(cosine) / pi of the states before and after a layer, at the last token, the
                mean over held-out windows
"""
import os
from dataclasses import asdict
from itertools import combinations_with_replacement
from shlex import quote
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

import data
import tasks
from common.checkpoint import Run, load_checkpoint, save_run
from common.configurator import PathName, configure, run
from common.distributed import pick_device
from common.encoding import kind_of
from common.evaluation import evaluate
from common.files import check_writable, write_csv
from common.run_folder import check_free, find_checkpoint, only_writer, start_over
from zoo.surgery import (  # noqa: F401, older checkpoints name zoo.etd:Looped
    Looped,
    forget,
    keep_words,
    looped,
    new_names,
    one_pass,
    renamed,
    set_scale,
)

# -------------------------------------------------------------------------------------------------
init_from: PathName = 'out-plain/ckpt.pt'   # a model without groups
out_dir: PathName | None = None     # None = beside the folder of init_from, with -etd behind it
overwrite = False           # replace the run that out_dir holds
dataset: str | None = None          # held-out text, or a task; None = the run's own
block: list | None = None           # loop these layers; None = the best candidate, or by the knees
candidates: list | None = None      # blocks to measure, [[first, last], ...]; None = all
keep: list | None = None            # a cut: the layers that run once; None = all others
injection: Literal['none', 'bridge', 'concat'] | None = None    # None = concat in a cut, or none
norm: bool | None = None    # does a norm close each loop step? None = in a cut
window: int | None = None   # attention reads the last `window` tokens; None = as before
task_words = False          # embedding and head keep the tokens of the task `dataset` alone
random: int | None = None   # a seed: random weights in the same shape, to compare
loops = [1, 2, 3, 4]        # loop counts at which blocks are measured
n_windows = 64              # held-out windows
device = 'auto'
# -------------------------------------------------------------------------------------------------


# which layers ------------------------------------------------------------------------------------

@torch.no_grad()
def angles(model, idx):
    """The angle of each layer (L,), over windows idx (B, T); model: a plain one."""
    x = model.embed(idx, torch.arange(idx.shape[1], device=idx.device))
    turns = []
    for layer in model.h:
        before, x = x, layer(x)
        one, other = (state[:, -1].cpu().double() for state in (before, x))     # (B, C) each
        cosine = F.cosine_similarity(one, other, dim=-1).clamp(-1, 1)
        turns.append(cosine.arccos().mean().item() / np.pi)
    return np.array(turns)


def knee(curve):
    """The knee of a falling curve (n,): the place farthest below its chord, or else the end."""
    n, fall = len(curve), curve[0] - curve[-1]
    if n < 3 or fall <= 0:
        return n - 1
    below = np.linspace(1, 0, n) - (curve - curve[-1]) / fall
    return int(below.argmax()) if below.max() > 1e-9 else n - 1


def thinking_block(curve):
    """Angles (L,) -> the layers from the knee of the front to that of the back."""
    lowest = int(curve.argmin())
    first = knee(curve[:lowest + 1])
    last = len(curve) - 1 - knee(curve[lowest:][::-1])
    return list(range(first, last + 1))


def choose(model, text, idx, dev):
    """
    Print what the angles and the held-out text say -> the block to loop, and a row for each block
    that was measured: held-out nats per token at each of `loops`.
    """
    n_layer, curve = model.config.n_layer, angles(model, idx)
    thinking = thinking_block(curve)
    print(f'{init_from}, {n_windows} held-out windows; angle of each layer, over pi:')
    print('  ' + '  '.join(f'{i}: {angle:.3f}' for i, angle in enumerate(curve)))
    print(f'encoder {list(range(thinking[0]))}, thinking block {thinking}, '
          f'decoder {list(range(thinking[-1] + 1, n_layer))}')
    if len(thinking) > n_layer / 2 and not (block or candidates):
        print(f'the knees say little: their block is {len(thinking)} of {n_layer} layers; give '
              '--block, or --candidates to compare some')

    # what the blocks give at these loop counts, without any training
    pairs = candidates
    if pairs is None:
        pairs = [] if block else combinations_with_replacement(range(n_layer), 2)
    blocks = [list(range(first, last + 1)) for first, last in pairs]
    if block and block not in blocks:
        blocks.append(block)
    rows = []
    for layers in blocks:
        looping = looped(model, layers, injection or 'none')
        scores = evaluate(looping, text, n_windows, loops, dev)
        rows.append(dict(block=f'{layers[0]}-{layers[-1]}', layers=len(layers))
                    | {f'loss_{n}': score.total().loss.item() for n, score in scores.items()})
    columns = [f'loss_{n}' for n in loops]
    means = [sum(row[column] for column in columns) for row in rows]
    best = blocks[means.index(min(means))]
    chosen = block or (best if candidates else thinking)

    print('\nheld-out loss by loops:\n  block     ' + ' '.join(f'{name:>8s}' for name in columns))
    for row, layers in zip(rows, blocks):
        mark = '*' if layers == chosen else ' '
        print(f"{mark} {row['block']:9s} " + ' '.join(f'{row[name]:8.4f}' for name in columns))
    print('* the block in ckpt.pt')
    return chosen, rows


# the run -----------------------------------------------------------------------------------------

def check_knobs(model):
    """ValueError if the knobs do not fit the model, or one another."""
    if model.groups:
        raise ValueError(f'the model in {init_from} is a {type(model).__name__} with groups '
                         f'{model.config.groups}: train a plain one with python train.py '
                         "'--groups=[]' --out_dir=out-plain")
    if n_windows < 1:
        raise ValueError(f'n_windows must be at least 1, not {n_windows}')
    for pair in candidates or []:
        if (not isinstance(pair, list) or [*map(type, pair)] != [int, int] or pair[0] > pair[1]):
            raise ValueError(f'candidates must be pairs [first, last] of layers, not {candidates}')
    if [] in (block, candidates, loops):
        raise ValueError('block, candidates and loops must not be empty')
    if not all(type(n) is int for n in [*loops, *(block or []), *(keep or [])]):
        raise ValueError('block, keep and loops must be lists of whole numbers')
    if keep is not None and not block:
        raise ValueError('a cut needs the layers that loop: give a --block beside --keep')
    if block:
        new_names(model.config.n_layer, block, keep)        # which refuses what are no layers


@torch.no_grad()
def check_one_loop(model, looping, may_differ):
    """
    Print how much one loop differs from the plain model, or in a cut from one pass through its
    layers. ValueError for more than rounding, unless there is a norm in the loop (may_differ).
    """
    T, V = model.config.block_size, model.config.vocab_size
    idx = torch.arange(T, device=model.wte.weight.device)[None] % V
    is_whole = keep is None and window is None
    wanted = model(idx)[0] if is_whole else one_pass(looping, idx)[1]
    error = (looping(idx, n_loop=1)[0] - wanted).abs().max().item()
    print(f"one loop against {'the plain model' if is_whole else 'these layers in one pass'}: "
          f'logits differ by {error:.1g}')
    if not may_differ and not error < 1e-3:
        raise ValueError(f'one loop of a {type(model).__name__} is not the plain model')


def folder_beside(path):
    """The folder of a checkpoint with -etd behind its name."""
    folder = os.path.normpath(os.path.dirname(path))
    if os.path.basename(folder) in ('.', '..'):         # no name
        folder = os.path.abspath(folder)
    return f'{folder}-etd'


def operate(model, chosen, idx):
    """
    The model in which the layers `chosen` loop, as the knobs say. idx (B, T): problems or text, at
    which the norm's scale is measured. Prints how far one loop is from these layers in one pass.
    """
    is_cut = keep is not None
    normed = is_cut if norm is None else norm
    looping = looped(model, chosen, injection or ('concat' if is_cut else 'none'), keep, normed,
                     window)
    if random is not None:
        forget(looping, random)
    if normed:
        set_scale(looping, idx[:8])
    check_one_loop(model, looping, may_differ=normed)
    return looping


def save(looping, checkpoint, chosen, encoding, out):
    """
    The looping model's ckpt.pt and the tokenizer.json of its tokens, None if it reads others.
    checkpoint: the plain model's, whose weights keep their number of bits.
    """
    on_disk = renamed(checkpoint['model'], new_names(checkpoint['model_args']['n_layer'], chosen,
                                                     keep))
    for key, weight in looping.named_parameters():
        if key in on_disk:
            weight.data = weight.to(on_disk[key].dtype)
    knobs = checkpoint['config'] | asdict(looping.config)
    tokenizer = encoding.name if encoding else checkpoint['tokenizer']
    if encoding:
        encoding.save(out)
    save_run(Run(knobs, looping, {}, tokenizer, checkpoint['data']),
             os.path.join(out, 'ckpt.pt'), with_optimizer=False)


def main():
    # the plain model
    dev, _ = pick_device(device, 'float32')
    path = find_checkpoint(init_from)
    model, checkpoint = load_checkpoint(path, dev)
    check_knobs(model)
    out = out_dir or folder_beside(path)
    check_free(out, overwrite, path)
    check_writable(out)
    encoding = None
    if kind_of(checkpoint['tokenizer']) == 'stored':
        encoding = data.open_encoding(checkpoint['tokenizer'], checkpoint['folder'])

    # held-out text or problems. A block that was given needs none, but the norm's scale does
    name = dataset or checkpoint['config']['dataset']
    if task_words and (encoding is None or not tasks.is_task(name)):
        raise ValueError('task_words is for a task, named by --dataset, in the tokens of a '
                         'tokenizer.json')
    text, idx = None, None
    if name or norm or keep is not None or not block:
        text, idx, *_ = data.held_out_windows(checkpoint, n_windows, name, dev)     # (n_windows, T)

    # which layers loop, and the model in which they do
    chosen, rows = block, []
    if keep is None and text:
        chosen, rows = choose(model, text, idx, dev)
    looping = operate(model, chosen, idx)
    if task_words:
        encoding = keep_words(looping, encoding, name)
        print(f'{encoding.n_vocab} of {model.config.vocab_size:,} tokens are left')

    # files
    with only_writer(out):
        start_over(out, overwrite)
        if rows:
            write_csv(rows, os.path.join(out, 'blocks.csv'))
        save(looping, checkpoint, chosen, encoding, out)
    print(f"{out}: ckpt.pt{', blocks.csv' if rows else ''}\nnext: python train.py "
          f"--init_from={quote(out)}/ckpt.pt --dataset={quote(name or 'NAME')} "
          f'--out_dir={quote(out)}-trained')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
