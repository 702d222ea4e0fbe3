"""
Encode, think, decode: which layers of a plain model to loop (Koishekenov et al. 2025, ETD).

    python train.py '--groups=[]' --out_dir=out-plain       a plain model
    python -m zoo.etd --init_from=out-plain/ckpt.pt         finds its thinking block
    python train.py --init_from=out-plain-etd/ckpt.pt --out_dir=out-trained --max_iters=500
                                                            mid-training, with loops
    python -m zoo.etd --init_from=out-smollm2/ckpt.pt '--block=[12,13,14,15]'
                                                            these layers, of any plain model

Prints how far each layer turns the state, the block between the two knees of that curve, and, for
every block of layers or the candidates, the held-out loss when it loops 1 to 4 times. Writes
out_dir/ckpt.pt, blocks.csv, and walk.png: does the loop converge? It starts from the input of the
block, which later steps do not read again, or by the injection `bridge`, whose weights start at 0.
So one loop is the plain model.

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
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

import data
import geometry
from cache import Span
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
from common.files import write_csv
from common.report import evaluate
from geometry import step_cos, step_norm
from loops import Plan
from model import GPT

# -------------------------------------------------------------------------------------------------
init_from: PathName = 'out-plain/ckpt.pt'   # a model without groups
out_dir: PathName | None = None     # None = beside the folder of init_from, with -etd behind it
overwrite = False           # replace the run that out_dir holds
dataset: str | None = None          # held-out text; None = the run's own
block: list | None = None           # loop these layers; None = the best candidate, or by the knees
candidates: list | None = None      # blocks to measure, [[first, last], ...]; None = all
injection: Literal['none', 'bridge'] = 'none'
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


def looped(model, block, injection='none'):
    """
    A plain model -> a model of the same modules that loops the layers `block`, x^(0) = e. Its class
    is Looped for a GPT, and otherwise the model's own. ValueError if its groups have more weights.
    """
    config = replace(model.config, groups=[block], injection=injection, x0='e', mean_recurrence=2)
    with torch.device('meta'):          # the plain model's modules replace these
        new = (Looped if type(model) is GPT else type(model))(config)
    group, before, after = new.groups[0], model.h[:block[0]], model.h[block[-1] + 1:]
    group.core = model.h[block[0]:block[-1] + 1]
    group.adapter.to_empty(device=model.wte.weight.device)
    with torch.no_grad():
        group.adapter.init_weights()
    new.h = nn.ModuleList([*before, group, *after])
    for name in ('wte', 'wpe', 'ln_f', 'lm_head'):
        setattr(new, name, getattr(model, name))
    if any(weight.is_meta for weight in new.parameters()):
        raise ValueError(f'a {type(model).__name__} does more in a group than in its layers')
    return new.eval()


def choose(model, text, idx, dev):
    """
    Print what the angles and the held-out text say -> the block to loop, and a row for each block
    that was measured: held-out nats a token at each of `loops`.
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
    pairs = candidates or ([] if block else combinations_with_replacement(range(n_layer), 2))
    blocks, rows = [list(range(first, last + 1)) for first, last in pairs], []
    blocks += [block] if block and block not in blocks else []
    for layers in blocks:
        nats, _ = evaluate(looped(model, layers), text, n_windows, loops, dev)
        rows.append(dict(block=f'{layers[0]}-{layers[-1]}', layers=len(layers)) | {
            f'loss_{n}': nats[n] for n in loops})
    means = [sum(row[f'loss_{n}'] for n in loops) for row in rows]
    chosen = block or (blocks[means.index(min(means))] if candidates else thinking)
    columns = list(rows[0])[2:]
    print('\nheld-out loss by loops:\n  block     ' + ' '.join(f'{name:>8s}' for name in columns))
    for row in rows:
        mark = '*' if row['block'] == f'{chosen[0]}-{chosen[-1]}' else ' '
        print(f"{mark} {row['block']:9s} " + ' '.join(f'{row[name]:8.4f}' for name in columns))
    print('* the block in ckpt.pt')
    return chosen, rows


@torch.no_grad()
def walk(looping, idx, path):
    """
    Does the loop converge? Medians of 12 loops over the tokens of idx (B, T), without the first one
    of a window, which may be a sink of attention with a norm of thousands.
    """
    plan = Plan([12], span=Span(0, idx.shape[1], idx.device), keep_states=True)
    states = looping.hidden(idx, plan)[1][0]['states'][:, :, 1:]                # (13, B, T - 1, C)
    size, step, cos, accel = (probe.flatten(1).median(1).values.tolist() for probe in (
        states[:-1].norm(dim=-1), *(f(states) for f in (step_norm, step_cos, geometry.accel))))
    relative = [a / b for a, b in zip(step, size)]
    print(f'12 loops: the state goes from {size[0]:.3g} to {size[-1]:.3g}, its update goes from '
          f'{relative[0]:.2g} to {relative[-1]:.2g} of that, the cosine of two updates from '
          f'{cos[0]:.2f} to {cos[-1]:.3f}')
    figure, [[left, right]] = plots.panels(2, 4.4, 3.4)
    for label, values in {'state': size, 'update': step, 'update / state': relative,
                          'acceleration': accel}.items():
        left.plot(range(12 - len(values), 12), values, marker='.', label=label)
    right.plot(range(1, 12), cos, marker='.')
    left.set(yscale='log', xlabel='loop step k', ylabel='norm')
    left.legend(frameon=False, fontsize=8, ncols=2, loc=(0.02, 0.31))
    right.set(xlabel='loop step k', ylabel='cosine of consecutive updates')
    figure.tight_layout()
    plots.save(figure, path, ['k', 'state', 'update', 'relative', 'cosine', 'acceleration'],
               zip(range(12), size, step, relative, [None, *cos], [None, *accel]))


def main():
    # the plain model
    dev, _ = pick_device(device, 'float32')
    model, checkpoint = load_checkpoint(init_from, dev)
    if model.groups:
        raise ValueError(f'the model in {init_from} is a {type(model).__name__} with groups '
                         f'{model.config.groups}: train a plain one with python train.py '
                         "'--groups=[]' --out_dir=out-plain")
    if n_windows < 1:
        raise ValueError(f'n_windows must be at least 1, not {n_windows}')
    if not all(isinstance(pair, list) and [*map(type, pair)] == [int, int]
               for pair in candidates or []):
        raise ValueError(f'candidates must be pairs [first, last] of layers, not {candidates}')
    if [] in (block, candidates, loops) or not all(type(n) is int for n in loops):
        raise ValueError('block, candidates and loops must not be empty, and loops whole numbers')
    out = out_dir or (os.path.dirname(init_from) + '-etd').lstrip('-')
    check_free(out, overwrite, init_from)

    # the block; without held-out text, one that was given is taken as it is
    chosen, rows, name = block, [], dataset or checkpoint['config']['dataset']
    if name or not block:
        text, idx, *_ = data.held_out(checkpoint, n_windows, name, dev)     # (n_windows, T)
        chosen, rows = choose(model, text, idx, dev)
    looping = looped(model, chosen, injection)      # ValueError if block cannot be a group
    some = torch.arange(model.config.block_size, device=dev)[None] % model.config.vocab_size
    with torch.no_grad():
        error = (looping(some, n_loop=1)[0] - model(some)[0]).abs().max().item()
    print(f'one loop against the plain model: logits differ by {error:.1g}')
    if not error < 1e-3:
        raise ValueError(f'one loop of a {type(model).__name__} is not the plain model')

    # files, with as many bits of a weight as before
    knobs, tokenizer = checkpoint['config'] | asdict(looping.config), checkpoint['tokenizer']
    with only_writer(out):
        start_over(out, overwrite)
        if rows:
            walk(looping, idx[:8], os.path.join(out, 'walk.png'))
            write_csv(rows, os.path.join(out, 'blocks.csv'))
        if '.json' in (tokenizer or ''):
            data.get_encoding(tokenizer, checkpoint['folder']).save(out)
        for key, weight in model.named_parameters():
            weight.data = weight.to(checkpoint['model'][key].dtype)
        save_run(Run(knobs, looping, {}, tokenizer, checkpoint['data']), 0,
                 os.path.join(out, 'ckpt.pt'), whole=False)
    print(f"{out}: ckpt.pt{', blocks.csv, walk.png' if rows else ''}\nnext: python train.py "
          f"--init_from={quote(out)}/ckpt.pt --dataset={quote(name or 'NAME')} "
          f'--out_dir={quote(out)}-trained')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
