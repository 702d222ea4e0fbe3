"""
A public checkpoint's folder -> out_dir/ckpt.pt of ours, shard by shard.

Not run by itself: huginn.py and ouro.py say which architecture they read and what its tensors are
called. A folder is in the layout of the hubs: config.json, *.safetensors (with or without an
index), and where there is one tokenizer.json.

At most one tensor stands in memory beside the model, the files being mapped and not read whole.
Matrices in bfloat16 stay so, all else becomes float32.
"""
import glob
import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from typing import Callable

import torch
from safetensors import SafetensorError, safe_open

from common.checkpoint import save_checkpoint
from memory import require
from model import GPT

BYTES = dict(F32=4, BF16=2, F16=4)         # as they are kept: F16 as float32


@dataclass
class Piece:
    """A public tensor: its shape, and where it goes: rows from `row` on of some of our tensors."""
    shape: tuple
    names: list
    row: int = 0
    change: Callable = lambda tensor: tensor


# numbers that need not be whole, and those that a config.json may lack
REALS = ('rope_base', 'rope_theta', 'mean_recurrence')
OPTIONAL = ('norm_eps', 'rms_norm_eps', 'padded_vocab_size', 'max_position_embeddings',
            'padding_multiple')


def is_count(value):
    return type(value) is int and value > 0


def read_config(path, family, fields, allowed):
    """
    path/config.json -> a dict. ValueError if it is missing, is not of this family (model_type and
    architectures begin with one of these words), lacks one of the fields, or has another value
    than those allowed: {name: values}.
    """
    file = os.path.join(path, 'config.json')
    try:
        with open(file, encoding='utf-8') as f:
            config = json.load(f)
        kinds = [config.get('model_type') or '', *(config.get('architectures') or [])]
        strange = [kind for kind in kinds if kind and not kind.lower().startswith(family)]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read '{file}' ({type(error).__name__}): --path must be a folder "
                         'with config.json and *.safetensors') from None
    wrong = [name for name in fields if not is_count(config.get(name))
             and not (name in REALS and isinstance(config.get(name), float) and config[name] > 0)]
    wrong += [name for name in OPTIONAL if name in config and name not in wrong
              and not is_count(config[name]) and not isinstance(config[name], float)]
    if strange or wrong:
        what = f'is of {strange[0]}' if strange else f"has no number for {', '.join(wrong)}"
        raise ValueError(f"'{file}' {what}: this reads {family[0]} alone")
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ValueError(f"'{file}' has {name} = {config[name]!r}, which this does not know: "
                             f"it reads {' or '.join(map(repr, values))}")
    return config


def shards_of(path):
    """The *.safetensors of the folder. ValueError if there are none, or one of the index is not."""
    index = os.path.join(path, 'model.safetensors.index.json')
    if os.path.exists(index):
        try:
            with open(index, encoding='utf-8') as f:
                names = sorted({os.path.basename(name)
                                for name in json.load(f)['weight_map'].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"'{index}' is no index of shards ({type(error).__name__}): fetch it "
                             'again, or remove it to take all *.safetensors') from None
    else:
        names = sorted(glob.glob('*.safetensors', root_dir=path))
    pickles = [file for kind in ('bin', 'pt', 'pth') for file in glob.glob(f'{path}/*.{kind}')]
    if not names and pickles:
        raise ValueError(f"'{pickles[0]}' may hold code and is not read: take the *.safetensors of "
                         'this model')
    gone = [name for name in names if not os.path.isfile(os.path.join(path, name))]
    if gone or not names:
        raise ValueError(f"there is no '{os.path.join(path, *(gone or ['*.safetensors'])[:1])}': "
                         'fetch the folder again')
    return [os.path.join(path, name) for name in names]


def look(shards):
    """{name: (shard, shape, dtype)} of all tensors. ValueError for a file that is cut short."""
    found = {}
    for shard in shards:
        try:
            with safe_open(shard, framework='pt') as f:
                for name in f.keys():
                    tensor = f.get_slice(name)
                    found[name] = shard, tuple(tensor.get_shape()), tensor.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"'{shard}' is no whole safetensors file ({error}): fetch it "
                             'again') from None
    return found


def compare(found, pieces, ignored):
    """What is wrong, a line each: tensors that are missing, left over, or of another shape."""
    wrong = [f'missing: {name} {piece.shape}' for name, piece in pieces.items()
             if name not in found]
    for name, (_, shape, dtype) in found.items():
        if name in pieces and shape != tuple(pieces[name].shape):
            wrong.append(f'shape: {name} is {shape}, and config.json asks for '
                         f'{tuple(pieces[name].shape)}')
        elif name in pieces and dtype not in BYTES:
            wrong.append(f'dtype: {name} is {dtype}, and not one of {", ".join(BYTES)}')
        elif name not in pieces and not name.endswith(tuple(ignored)):
            wrong.append(f'left over: {name} {shape}')
    return wrong


def load(path, out_dir, config, pieces, ignored=(), dry_run=False):
    """
    Read the folder into out_dir/ckpt.pt, or with dry_run only say what there is.

    config: the GPTConfig to build. pieces: {public name: Piece}. ignored: endings of names of
    tensors that are not weights. ValueError if anything does not fit; out_dir is untouched then.
    """
    shards = shards_of(path)
    found = look(shards)
    wrong = compare(found, pieces, ignored)
    with torch.device('meta'):
        weights = GPT(config).state_dict()
    bytes_of = {name: math.prod(shape) * BYTES.get(dtype, 0)
                for name, (_, shape, dtype) in found.items()}
    total = sum(bytes_of.values())
    if dry_run:
        for name, (shard, shape, dtype) in found.items():
            print(f'{os.path.basename(shard)}  {name}  {shape}  {dtype}  {bytes_of[name]:,} bytes')
    numbers = sum(math.prod(shape) for _, shape, _ in found.values())
    largest = max(map(os.path.getsize, shards))
    print(f'{path}: {len(found)} tensors in {len(shards)} file(s), {numbers:,} numbers, '
          f'{total:,} bytes; reading takes at most {(total + largest) / 2 ** 30:.2f} GiB')
    if wrong:
        more = f' (and {len(wrong) - 1} more)' if len(wrong) > 1 and not dry_run else ''
        if dry_run:
            print('\n'.join(wrong))
        raise ValueError(f"'{path}' does not hold what its config.json says: {wrong[0]}{more}")
    tokenizer = os.path.join(path, 'tokenizer.json')
    if os.path.exists(tokenizer):
        from encoding import get_encoding
        has = get_encoding(tokenizer).n_vocab       # what is wrong with it is said before writing
        if has > config.vocab_size:
            raise ValueError(f"'{tokenizer}' has {has} tokens, and the model {config.vocab_size}: "
                             'take the one that came with the weights')
    if dry_run:
        return
    require(total + largest, 'cpu', f"'{path}'", 'nothing: it needs a larger machine')

    # each public tensor into its rows of ours
    read = {}
    for shard in shards:
        with safe_open(shard, framework='pt') as f:
            for name in f.keys():
                piece = pieces.get(name)
                tensor = piece and piece.change(f.get_tensor(name))
                for ours in piece.names if piece else []:
                    if ours not in read:
                        shape = weights[ours].shape
                        dtype = torch.bfloat16 if len(shape) > 1 < shape[0] and all(
                            found[name][2] == 'BF16' for name, piece in pieces.items()
                            if ours in piece.names) else torch.float32
                        read[ours] = torch.empty(shape, dtype=dtype)
                    read[ours][piece.row:piece.row + len(tensor)] = tensor
    if config.tied:
        read['lm_head.weight'] = read['wte.weight']

    # beside it the tokenizer
    os.makedirs(out_dir, exist_ok=True)
    ours = None
    if os.path.exists(tokenizer):
        ours = shutil.copyfile(tokenizer, os.path.join(out_dir, 'tokenizer.json'))
    save_checkpoint(dict(model=read, model_args=asdict(config), iter_num=0, tokenizer=ours,
                         config=dict(dataset='', out_dir=out_dir), val_loss={}, data=''),
                    os.path.join(out_dir, 'ckpt.pt'))
    print(f'{out_dir}/ckpt.pt: python sample.py --out_dir={out_dir}' if ours else
          f'{out_dir}/ckpt.pt; without a tokenizer.json in {path} there is no text, the rest works')
