"""
Public checkpoints: a folder in the format of the hubs -> out_dir/ckpt.pt in our format.

Each model's file (huginn.py, llama.py, ouro.py) has a function `translate` that says what our
config and our weights are, given those of the folder. A folder holds config.json, *.safetensors and
usually a tokenizer.json.

The files are mapped into memory and keep their dtype, such as bfloat16; loading our checkpoint
makes it float32. The classes that public models share are at the end.
"""
import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from textwrap import shorten

import torch
import torch.nn as nn
from safetensors.torch import load_file
from torch.nn import functional as F

from common.checkpoint import Run, class_of, save_run
from common.errors import explain
from common.run_folder import check_free, only_writer, start_over
from common.tokenizer_json import ENDS, TokenizerJson, check_settings
from model import GPTConfig

# for `translate` ----------------------------------------------------------------------------------

def require(public, **supported):
    """ValueError if config.json's dict has another value for one of these than we support."""
    for name, value in supported.items():
        if public.get(name, value) != value:
            raise ValueError(f'{name} = {public[name]!r}, and only {value!r} is supported')


def rope_base(public):
    """
    The base of the rotary positions in config.json's dict. ValueError if queries and keys turn in
    another way than with that base alone, or if a token does not see all tokens before it.
    """
    rope = (public.get('rope_scaling') or {}) | (public.get('rope_parameters') or {})
    plain = dict(rope_type='default', type='default', partial_rotary_factor=1.0)
    others = dict.fromkeys(rope.keys() - plain.keys() - {'rope_theta'})
    require(public | rope, **plain, **others, use_sliding_window=False)
    for layer_type in public.get('layer_types') or []:
        require(dict(layer_types=layer_type), layer_types='full_attention')
    return (public | rope)['rope_theta']        # in rope_parameters since transformers 5


def rename(tensors, names):
    """
    Public tensors {name: tensor} -> the same by our names, and by their own those not in `names`,
    except tables of rotary positions, which our model computes.

    names: {our name: public name, or several, separated by spaces}. Several tensors are put one
    below the other. KeyError for a name that is missing.
    """
    renamed, used = {}, set()
    for ours, theirs in names.items():
        theirs = theirs.split()
        used.update(theirs)
        parts = [tensors[name] for name in theirs]
        renamed[ours] = parts[0] if len(parts) == 1 else torch.cat(parts)
    for name, tensor in tensors.items():
        if name not in used and not name.endswith(('rotary_emb.inv_freq', 'freqs_cis')):
            renamed[name] = tensor
    return renamed


def per_layer(ours, n, names):
    """
    What `rename` needs for n layers. ours: what comes before the number in our names, such as 'h.'.
    names: {our name: public names} of the weights of a layer.
    """
    weights = {}
    for i in range(n):
        for name, theirs in names.items():
            parts = [f'model.layers.{i}.{part}.weight' for part in theirs.split()]
            weights[f'{ours}{i}.{name}.weight'] = ' '.join(parts)
    return weights


def adjacent(weight, n_head):
    """
    Weights (rows, C) of queries or keys whose rotary pairs are the rows (i, i + D / 2) of a head ->
    the same for pairs (2 i, 2 i + 1), which model.Rotary turns. D: rows of a head.
    """
    halves = weight.unflatten(0, (n_head, 2, -1))                   # (n_head, 2, D / 2, C)
    return halves.transpose(1, 2).reshape(weight.shape)


def turn(public, tensors, rows=adjacent):
    """The tensors {name: tensor}, of which those of queries and keys become rows(tensor, heads)."""
    n_head = public['num_attention_heads']
    n_kv_head = public.get('num_key_value_heads') or n_head
    turned = {}
    for name, tensor in tensors.items():
        if '.q_proj.' in name:
            tensor = rows(tensor, n_head)
        elif '.k_proj.' in name:
            tensor = rows(tensor, n_kv_head)
        turned[name] = tensor
    return turned


# a folder -> a checkpoint -------------------------------------------------------------------------

def read_file(path, name, load=lambda file: json.loads(Path(file).read_bytes())):
    """What the file `name` of a folder holds; ValueError if it is missing or not whole."""
    with explain(f'cannot read {name}', 'give --path a whole folder (a clone needs git lfs pull)'):
        return load(os.path.join(path, name))


def read_weights(path):
    """
    The tensors of a folder, {name: tensor}: those of model.safetensors and of what its index names,
    or else of all *.safetensors. ValueError if there are none, or two of one name.
    """
    index = 'model.safetensors.index.json'
    there = set(glob.glob('*.safetensors', root_dir=path))
    named = there & {'model.safetensors'}
    if os.path.exists(os.path.join(path, index)):
        named |= set(read_file(path, index)['weight_map'].values())
    tensors = {}
    for name in sorted(named or there):
        more = read_file(path, name, load_file)
        if twice := tensors.keys() & more.keys():
            raise ValueError(f'{name} has {min(twice)} again: leave one set of weights there')
        tensors |= more
    if not tensors:         # clone: tied weights share their memory
        raise ValueError('it has no *.safetensors: download them, or make them there of '
                         'pytorch_model.bin, python -c "import torch, safetensors.torch as s; '
                         "s.save_file({k: x.clone() for k, x in torch.load('pytorch_model.bin')"
                         ".items()}, 'model.safetensors')\"")
    return tensors


def read_folder(path):
    """config.json's dict, the tensors {name: tensor} and the tokenizer (or None) of a folder."""
    public, tensors = read_file(path, 'config.json'), read_weights(path)
    tokenizer = Path(path, 'tokenizer.json')
    if not tokenizer.exists():
        return public, tensors, None
    read_file(path, 'tokenizer.json')           # a clone may have none, but a pointer
    with explain('cannot read tokenizer.json', 'take the file that came with the weights'):
        text = with_end(tokenizer.read_text('utf-8'), public.get('eos_token_id'))
        encoding = TokenizerJson(text)
    check_settings(encoding, path)
    return public, tensors, encoding


def with_end(text, eos):
    """
    The text of a tokenizer.json in which the token number `eos` (a list: the first one) ends each
    text. As it is if that token's name says so already, or if eos is None.
    """
    from tokenizers import Tokenizer
    number = eos[0] if isinstance(eos, list) else eos
    name = None if number is None else Tokenizer.from_str(text).id_to_token(number)
    if name is None or name in ENDS:
        return text
    settings = json.loads(text)
    before = settings.get('post_processor') or dict(type='Sequence', processors=[])
    steps = before['processors'] if before['type'] == 'Sequence' else [before]
    if not any(step['type'] == 'TemplateProcessing' for step in steps):
        text_alone = [dict(Sequence=dict(id='A', type_id=0))]
        steps.append(dict(type='TemplateProcessing', single=text_alone, pair=[], special_tokens={}))
    for step in steps:
        if step['type'] == 'TemplateProcessing':
            step['single'].append(dict(SpecialToken=dict(id=name, type_id=0)))
            step['special_tokens'][name] = dict(id=name, ids=[number], tokens=[name])
    return json.dumps(settings | dict(post_processor=dict(type='Sequence', processors=steps)))


def convert(model_class, translate, path, out_dir, overwrite=False, dry_run=False,
            read=read_folder):
    """
    Read `path` into out_dir/ckpt.pt, or with dry_run only print what there is.

    model_class: 'MODULE:CLASS' of the model. translate: config.json's dict and the tensors,
    {name: tensor} -> the model's config, its state_dict. read: what reads `path`, see read_folder.
    ValueError if anything does not fit; nothing is written then.
    """
    try:
        # what there is
        public, tensors, encoding = read(path)
        size = sum(tensor.nbytes for tensor in tensors.values())
        print(f'{path}: {len(tensors)} tensors, {size:,} bytes')
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f'{name} has a NaN or an infinity: download it again')
        if dry_run:
            for name, tensor in tensors.items():
                print(f'{name}  {tuple(tensor.shape)}  {tensor.dtype}  {tensor.nbytes:,} bytes')
                tensors[name] = tensor.to('meta')       # shapes alone, as in the model below

        # as our weights: load_state_dict refuses what is missing, left over or of another shape
        config, weights = translate(public, tensors)
        with torch.device('meta'):
            model = class_of(model_class)(config)
        model.load_state_dict(weights, assign=True)
        if encoding and encoding.n_vocab > config.vocab_size:
            raise ValueError(f'the tokenizer has more than the {config.vocab_size} tokens of the '
                             'model: take the one that came with the weights')
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError,
            RuntimeError) as error:
        lacks = 'it lacks ' if isinstance(error, KeyError) else ''
        raise ValueError(f"'{path}' cannot be read as {model_class}: {lacks}"
                         + shorten(str(error), 400)) from error
    if dry_run:
        return

    # the checkpoint, with the tokenizer beside it
    check_free(out_dir, overwrite)
    model.tie()
    name = encoding.name if encoding else None
    with only_writer(out_dir):
        start_over(out_dir, overwrite)
        if encoding:
            encoding.save(out_dir)
        save_run(Run(dict(dataset='', out_dir=out_dir), model, {}, tokenizer=name, data=''),
                 os.path.join(out_dir, 'ckpt.pt'), with_optimizer=False)
    if encoding:
        print(f'{out_dir}/ckpt.pt: python sample.py --out_dir={quote(out_dir)}')
    else:
        print(f'{out_dir}/ckpt.pt: {path} has no tokenizer.json, so it works on tokens and not on '
              'text')


# what the public models have ----------------------------------------------------------------------

@dataclass
class PublicConfig(GPTConfig):
    mlp_width: int | None = None    # None = 8 * n_embd // 3: as many weights as the plain MLP has

    def __post_init__(self):
        super().__post_init__()
        self.mlp_width = self.mlp_width or 8 * self.n_embd // 3


class GatedMLP(nn.Module):
    """(B, T, C) -> (B, T, C) through a width of W = mlp_width: SiLU(first half) * second half."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.mlp_width, bias=False)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)                                # (B, T, W) each
        return self.c_proj(F.silu(gate) * up)
