"""
The surgery on a plain model: which of its layers stay, which loop, and which tokens it reads.

etd.py is the program that calls this. No weight is trained here; what a looping model needs beyond
the weights of the plain one starts so that one loop is one pass through its layers.

    block     the layers that loop, by their numbers in the plain model
    keep      the layers that run once, before or behind the block
    B, T      rows, tokens of a pass
    C, V      n_embd, vocab_size
"""
import json
from dataclasses import replace

import numpy as np
import torch
import torch.nn as nn

import tasks
from common.tokenizer_json import TokenizerJson
from model import GPT
from zoo.llama import Llama, NormedLlama


class Looped(GPT):
    """A plain model in which layers loop; a group has no norm besides those of its layers."""

    def build(self, config):
        super().build(config)
        for group in self.groups:
            group.norm = nn.Identity()


# the class of a plain model: its class when layers loop, and when a norm closes each loop step, too
CLASSES = {GPT: (Looped, GPT), Llama: (Llama, NormedLlama)}


def new_names(n_layer, block, keep=None):
    """
    The layers {number: its new name} when `block` loops and those of `keep` run once (None = all
    others). ValueError if these are no layers, or one of `keep` lies within the block.
    """
    in_words = f'block = {block}'
    if keep is not None:
        in_words += f' and keep = {keep}'
    else:
        keep = [i for i in range(n_layer) if i not in block]
    before = [i for i in keep if i < block[0]]
    behind = [i for i in keep if i > block[-1]]
    order = before + block + behind
    if order != sorted({*block, *keep}) or not {*order} <= {*range(n_layer)}:
        raise ValueError(f'{in_words} must be layers from 0 to {n_layer - 1}, in order, and the '
                         'block in one piece')
    names = {layer: f'h.{place}' for place, layer in enumerate(before)}
    names |= {layer: f'h.{len(before)}.core.{place}' for place, layer in enumerate(block)}
    names |= {layer: f'h.{len(before) + 1 + place}' for place, layer in enumerate(behind)}
    return names


def renamed(weights, names):
    """A plain model's {name: weight} -> those of the layers in `names`, and of no layer."""
    new = {}
    for name, weight in weights.items():
        if name.startswith('h.'):
            _, layer, rest = name.split('.', maxsplit=2)
            if int(layer) not in names:
                continue
            name = f'{names[int(layer)]}.{rest}'
        new[name] = weight
    return new


def looped(model, block, injection='none', keep=None, norm=False, window=None):
    """
    A plain model -> a model with the same weights in which the layers `block` loop, see new_names.

    With injection 'none' and 'bridge' x^(0) is e, and 0 otherwise: one loop step is one pass. norm:
    a norm closes each step, its weights are 1. window: of attention; None = as before. ValueError
    if its groups have more weights.
    """
    names = new_names(model.config.n_layer, block, keep)
    first = int(names[block[0]].split('.')[1])          # h.2.core.0: layers 2, 3, ... loop
    plain, normed = CLASSES.get(type(model), (type(model), type(model)))
    kind = normed if norm else plain
    config = replace(
        model.config, n_layer=len(names), groups=[list(range(first, first + len(block)))],
        injection=injection, x0='e' if injection in ('none', 'bridge') else 'zero',
        window=model.config.window if window is None else window, mean_recurrence=2)
    with torch.device('meta'):          # the weights are those of the plain model
        new = kind(config)
    new.load_state_dict(renamed(model.state_dict(), names), strict=False, assign=True)
    new.tie()

    # weights that the plain model has not
    group, device = new.groups[0], model.wte.weight.device
    group.adapter.to_empty(device=device)
    with torch.no_grad():
        group.adapter.init_weights()
    if norm:
        group.norm.to_empty(device=device)
        group.norm.reset_parameters()
    if any(weight.is_meta for weight in new.parameters()):
        raise ValueError(f'a {type(model).__name__} does more in a group than in its layers')
    return new.to(device).eval()


@torch.no_grad()
def one_pass(looping, idx):
    """
    The layers of a looping model one after the other, without a loop or its norm: idx (B, T) -> the
    stream behind the block (B, T, C), and the logits (B, T, V).
    """
    x = looping.embed(idx, torch.arange(idx.shape[1], device=idx.device))
    for layer in looping.h:
        if layer in looping.groups:
            for inner in layer.core:
                x = inner(x)
            behind_block = x
        else:
            x = layer(x)
    return behind_block, looping.readout(x)


def set_scale(looping, idx):
    """
    Give the states the size of the stream behind the block in one pass over idx (B, T): the median
    over tokens of its rms. The first token of a row, which may be a sink of attention, is left out.
    """
    stream, _ = one_pass(looping, idx)
    scale = stream[:, 1:].float().square().mean(dim=-1).sqrt().median().item()
    nn.init.constant_(looping.groups[0].norm.weight, scale)
    print(f'the norm of each step has the scale of the stream behind the block, {scale:.3g}')


def forget(looping, seed):
    """Give a looping model random weights. The plain model shares its memory, and loses its own."""
    torch.manual_seed(seed)
    for module in looping.modules():
        if isinstance(module, nn.RMSNorm):
            module.reset_parameters()
    looping.init_weights()


def keep_words(model, encoding, task):
    """
    Keep of embedding and head the tokens in which a task is written, and the end of a text -> their
    encoding. ValueError if the tokenizer cannot be cut so.
    """
    spelled = tasks.Problems(task, encoding).spelled                            # (words, n)
    used = sorted({*spelled.flatten().tolist(), encoding.eot_token})
    number = {old: new for new, old in enumerate(used)}

    # the tokenizer.json of these tokens
    file = json.loads(encoding.tokenizer.to_str())
    vocab = {token: number[i] for token, i in file['model']['vocab'].items() if i in number}
    file['model']['vocab'] = vocab
    file['model']['merges'] = [pair for pair in file['model'].get('merges', [])
                               if {*pair, ''.join(pair)} <= vocab.keys()]
    file['added_tokens'] = [token | dict(id=number[token['id']])
                            for token in file['added_tokens'] if token['id'] in number]
    small = TokenizerJson(json.dumps(file))
    same = tasks.Problems(task, small).spelled == np.vectorize(number.get)(spelled)
    if not same.all() or small.eot_token != number[encoding.eot_token]:
        raise ValueError(f'the words of {task} are not alone in this tokenizer: leave out '
                         '--task_words')

    # their rows
    for table in model.wte, model.lm_head:
        table.weight = nn.Parameter(table.weight[used])
    model.config.vocab_size = len(used)
    model.tie()
    return small
