"""
Encode, think, decode: which layers of a plain model to loop (Koishekenov et al. 2025, ETD).

    python train.py '--groups=[]' --out_dir=out-plain       a plain model
    python -m zoo.etd --init_from=out-plain/ckpt.pt         finds its thinking block -> out-etd
    python train.py --init_from=out-etd/ckpt.pt --out_dir=out-etd-trained --max_iters=500
                                                            mid-training, with loops

Prints how far each layer turns the state, the block between the two knees of that curve, and, for
every block of layers, the held-out loss when it loops 1 to 4 times. Writes out_dir/ckpt.pt,
angles.png and blocks.csv. The block loops without injection from x^(0) = e, so that one loop is the
plain model.

The curve falls from the front to its lowest layer and rises to the back. The knee of a
side is its point farthest below the chord from the side's end to the lowest layer, with both axes
scaled to 0 ... 1. The thinking block goes from knee to knee, inclusive.

    angle       arccos(cosine) / pi of the states before and after a layer, at the last token, the
                mean over held-out windows
"""
import os
from dataclasses import asdict, replace
from itertools import combinations_with_replacement
from shlex import quote

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

import data
from common import plots
from common.checkpoint import (
    Run,
    check_free,
    load_checkpoint,
    only_writer,
    save_run,
    start_over,
)
from common.configurator import PathName, configure, run
from common.distributed import pick_device
from common.evaluation import evaluate
from common.files import write_csv
from model import GPT

# -------------------------------------------------------------------------------------------------
init_from: PathName = 'out-plain/ckpt.pt'   # a model without groups
out_dir: PathName = 'out-etd'
overwrite = False           # replace the run that out_dir holds
dataset: str | None = None          # held-out text; None = the run's own
block: list | None = None           # loop these layers; None = the block that the knees give
loops = [1, 2, 3, 4]
n_windows = 64
device = 'auto'
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def angles(model, idx):
    """The angle of each layer (L,), over windows idx (B, T); model: a plain one."""
    x, turns = model.embed(idx, torch.arange(idx.shape[1], device=idx.device)), []
    for layer in model.h:
        before, x = x, layer(x)
        last = (state[:, -1].cpu().double() for state in (before, x))           # (B, C) each
        cosine = F.cosine_similarity(*last, dim=-1).clamp(-1, 1)
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


class Looped(GPT):
    """A plain model in which layers loop; a group has no norm besides those of its layers."""
    __module__ = 'zoo.etd'          # for the checkpoint, even if this file runs as __main__

    def build(self, config):
        super().build(config)
        for group in self.groups:
            group.norm = nn.Identity()


def looped(model, block):
    """A plain model -> a model of the same modules that loops the layers `block`, x^(0) = e."""
    config = replace(model.config, groups=[block], injection='none', x0='e', mean_recurrence=2)
    with torch.device('meta'):          # the plain model's modules replace these
        new = Looped(config)
    group, before, after = new.groups[0], model.h[:block[0]], model.h[block[-1] + 1:]
    group.core = model.h[block[0]:block[-1] + 1]
    new.h = nn.ModuleList([*before, group, *after])
    for name in ('wte', 'wpe', 'ln_f', 'lm_head'):
        setattr(new, name, getattr(model, name))
    return new.eval()


def every_block(model, text, dev):
    """A row for each block of adjacent layers: held-out nats a token at each of `loops`."""
    for first, last in combinations_with_replacement(range(model.config.n_layer), 2):
        layers = list(range(first, last + 1))
        nats, _ = evaluate(looped(model, layers), text, n_windows, loops, dev)
        yield dict(block=f'{first}-{last}', layers=len(layers)) | {
            f'loss_{n}': nats[n] for n in loops}


def draw(curve, block, path):
    """The angle by which each layer turns the state; shaded, the thinking block."""
    figure, [[ax]] = plots.panels(1, 5.2, 3.4)
    ax.axvspan(block[0] - 0.4, block[-1] + 0.4, color='0.9')
    ax.plot(range(len(curve)), curve, marker='o', color=plots.COLOURS[0])
    ax.set(xlabel='layer', ylabel='angle over pi', title='The thinking block, between two knees')
    plots.save(figure, path, ['layer', 'angle_over_pi'], enumerate(curve))


def main():
    # the plain model, and held-out text
    dev, _ = pick_device(device, 'float32')
    model, checkpoint = load_checkpoint(init_from, dev)
    if type(model) is not GPT or model.groups:
        raise ValueError(f'the model in {init_from} is a {type(model).__name__} with groups '
                         f'{model.config.groups}: train a plain one with python train.py '
                         "'--groups=[]' --out_dir=out-plain")
    if n_windows < 1:
        raise ValueError(f'n_windows must be at least 1, not {n_windows}')
    check_free(out_dir, overwrite, init_from)
    text, idx, *_ = data.held_out(checkpoint, n_windows, dataset, dev)          # (n_windows, T)

    # its thinking block
    curve = angles(model, idx)
    thinking = thinking_block(curve)
    chosen = block or thinking
    looping = looped(model, chosen)         # ValueError if block cannot be a group
    print(f'{init_from}, {n_windows} held-out windows; angle of each layer, over pi:')
    print('  ' + '  '.join(f'{i}: {angle:.3f}' for i, angle in enumerate(curve)))
    print(f'encoder {list(range(thinking[0]))}, thinking block {thinking}, '
          f'decoder {list(range(thinking[-1] + 1, model.config.n_layer))}')

    # what every block gives at these loop counts, without any training
    rows = list(every_block(model, text, dev))
    columns = list(rows[0])[2:]
    print('\nheld-out loss by loops:\n  block     ' + ' '.join(f'{name:>8s}' for name in columns))
    for row in rows:
        mark = '*' if row['block'] == f'{chosen[0]}-{chosen[-1]}' else ' '
        print(f"{mark} {row['block']:9s} " + ' '.join(f'{row[name]:8.4f}' for name in columns))
    print('* the block in ckpt.pt')

    # files
    knobs = checkpoint['config'] | asdict(looping.config)
    with only_writer(out_dir):
        start_over(out_dir, overwrite)
        draw(curve, thinking, os.path.join(out_dir, 'angles.png'))
        write_csv(rows, os.path.join(out_dir, 'blocks.csv'))
        save_run(Run(knobs, looping, {}, checkpoint['tokenizer'], checkpoint['data']), 0,
                 os.path.join(out_dir, 'ckpt.pt'), whole=False)
    print(f'{out_dir}: ckpt.pt, blocks.csv, angles.png\nnext: python train.py '
          f'--init_from={quote(out_dir)}/ckpt.pt --out_dir={quote(out_dir)}-trained')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
