"""
Public checkpoints: a folder in the format of the hubs -> out_dir/ckpt.pt in our format.

Not run by itself: huginn.py and ouro.py say which models they read and how the tensors of such a
model are named. A folder holds config.json, *.safetensors (with or without an index) and usually a
tokenizer.json.

The files are mapped into memory and read one tensor at a time. Where all weights are in bfloat16
our checkpoint keeps them so; loading it makes them float32. The classes that both public models
share are at the end.

    C, W    n_embd; width of the gated MLP
"""
import glob
import json
import math
import os
import shutil
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from torch.nn import functional as F

import data
from common.checkpoint import Run, class_of, save_run
from model import GPTConfig

BYTES = dict(F32=4, BF16=2, F16=2)      # of a number, by the name of its dtype


@dataclass
class Piece:
    """A public tensor of this shape; after `change` it fills our weights `names` from `row` on."""
    shape: tuple
    names: list
    row: int = 0
    change: Callable = lambda tensor: tensor


# config.json --------------------------------------------------------------------------------------

def read_config(path, family, defaults, allowed):
    """
    path/config.json -> a dict. defaults: the numbers that we need, with the value to use for a
    missing one; 0 = required. allowed: {name: values that we support}.

    ValueError if the file is missing, or is not of a model of this family.
    """
    file = os.path.join(path, 'config.json')
    try:
        with open(file, encoding='utf-8') as f:
            config = defaults | json.load(f)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read '{file}' ({type(error).__name__}): --path must be a folder "
                         'with config.json and *.safetensors') from None
    for name, default in defaults.items():
        if type(config[name]) not in (int, type(default)) or not config[name] > 0:
            raise ValueError(f"'{file}' has no number for {name}: only {family} can be read")
    for name, values in allowed.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(f"'{file}' has {name} = {config[name]!r}: only {family} with "
                             f"{' or '.join(map(repr, values))} can be read")
    return config


# the tensors --------------------------------------------------------------------------------------

def headers_of(path):
    """
    {name: (file, shape, dtype)} of all tensors in path/*.safetensors. ValueError if there is no
    such file, or one that is cut short.
    """
    headers, shards = {}, sorted(glob.glob(os.path.join(path, '*.safetensors')))
    if not shards:
        raise ValueError(f"there is no '{path}/*.safetensors': take a folder with such files: "
                         'others may hold code and are not read')
    for shard in shards:
        try:
            with safe_open(shard, framework='pt') as f:
                for name in f.keys():
                    tensor = f.get_slice(name)
                    headers[name] = shard, tuple(tensor.get_shape()), tensor.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"'{shard}' is not a complete safetensors file ({error}): get it "
                             'again') from None
    return headers


def differences(headers, pieces, ignored):
    """What is wrong, a line each: tensors that are missing, left over, or of another shape."""
    wrong = [f'missing: {name} {piece.shape}' for name, piece in pieces.items()
             if name not in headers]
    for name, (_, shape, dtype) in headers.items():
        if name not in pieces:
            if not name.endswith(tuple(ignored)):
                wrong.append(f'left over: {name} {shape}')
        elif shape != pieces[name].shape:
            wrong.append(f'shape: {name} is {shape}, not {pieces[name].shape}')
        elif dtype not in BYTES:
            wrong.append(f'dtype: {name} is {dtype}, not one of {", ".join(BYTES)}')
    return wrong


def convert(path, out_dir, model_class, config, pieces, ignored=(), dry_run=False):
    """
    Read the folder into out_dir/ckpt.pt, or with dry_run only print what there is.

    model_class, config: 'MODULE:CLASS' of the model, and its shape. pieces: {public name: Piece}.
    ignored: endings of names of tensors that are not weights. ValueError if anything does not fit;
    nothing is written then.
    """
    # what there is, and whether it fits
    headers = headers_of(path)
    wrong = differences(headers, pieces, ignored)
    total = 0
    for name, (file, shape, dtype) in headers.items():
        size = math.prod(shape) * BYTES.get(dtype, 0)
        total += size
        if dry_run:
            print(f'{os.path.basename(file)}  {name}  {shape}  {dtype}  {size:,} bytes')
    if dry_run:
        print(*wrong, sep='\n', end='\n' if wrong else '')
    print(f'{path}: {len(headers)} tensors, {total:,} bytes')
    if wrong:
        more = f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''
        raise ValueError(f"'{path}' does not hold what its config.json says: {wrong[0]}{more}")
    tokenizer = os.path.join(path, 'tokenizer.json')
    if os.path.exists(tokenizer):
        n_vocab = data.get_encoding(tokenizer).n_vocab
        if n_vocab > config.vocab_size:
            raise ValueError(f"'{tokenizer}' has {n_vocab} tokens, and the model "
                             f'{config.vocab_size}: take the one that came with the weights')
    if dry_run:
        return

    # each public tensor into its rows of ours
    dtypes = {headers[name][2] for name in pieces}
    with torch.device('meta'):          # shapes alone
        model = class_of(model_class)(config)
    model.to(torch.bfloat16 if dtypes == {'BF16'} else torch.float32).to_empty(device='cpu')
    model.tie()
    weights = model.state_dict()
    for name, piece in pieces.items():
        with safe_open(headers[name][0], framework='pt') as f:
            tensor = piece.change(f.get_tensor(name))
        for ours in piece.names:
            weights[ours][piece.row:piece.row + len(tensor)] = tensor

    # the checkpoint, with the tokenizer beside it
    os.makedirs(out_dir, exist_ok=True)
    ours = None
    if os.path.exists(tokenizer):
        ours = shutil.copyfile(tokenizer, os.path.join(out_dir, 'tokenizer.json'))
    run = Run(dict(dataset='', out_dir=out_dir), model, {}, tokenizer=ours, data='')
    save_run(run, 0, os.path.join(out_dir, 'ckpt.pt'), whole=False)
    print(f'{out_dir}/ckpt.pt: python sample.py --out_dir={out_dir}' if ours else
          f'{out_dir}/ckpt.pt: {path} has no tokenizer.json, so it works on tokens and not on text')


# what both models have ----------------------------------------------------------------------------

@dataclass
class PublicConfig(GPTConfig):
    mlp_width: int | None = None    # None = 8 * n_embd // 3: as many weights as the plain MLP has
    norm_eps: float = 1e-6          # of all norms

    def __post_init__(self):
        super().__post_init__()
        self.mlp_width = self.mlp_width or 8 * self.n_embd // 3


class GatedMLP(nn.Module):
    """(B, T, C) -> (B, T, C) through a width of W: SiLU(first half) * second half."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.mlp_width, bias=config.bias)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)                                # (B, T, W) each
        return self.c_proj(F.silu(gate) * up)


def set_eps(model):
    """Set the epsilon of all norms, once they have been built."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = model.config.norm_eps
