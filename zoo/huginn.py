"""
Huginn (Geiping et al.): tested on tiny random weights, never loaded with its real ones.

The recurrent-depth model and its exit criteria.

    python -m zoo.huginn --path=FOLDER              a public checkpoint -> out-huginn/ckpt.pt
    python -m zoo.huginn --path=FOLDER --dry_run    names, shapes, bytes; what is missing
    python sample.py --out_dir=out-huginn --exit=zoo.huginn:kl
    python bench.py --rules="['zoo.huginn:latent-diff','kl']"       on any other model too

FOLDER has config.json, *.safetensors and tokenizer.json. A Huginn differs from our model in a gated
MLP and in a bias on queries and keys; the rest are values of GPTConfig: rotary positions, and the
group's norm after the loop, not in every step. ln_f serves twice, after the loop and after the
coda.

Geiping: 3.2, App. C.1 (the model), 6.1 and App. D.6 (the criteria; values and thresholds as in the
code published with it).

    B, T        rows, tokens of a pass
    V           vocab_size
"""
import torch
import torch.nn as nn
from torch.linalg import vector_norm
from torch.nn import functional as F

from common.configurator import PathName, configure, run
from exits import Exit
from model import GPT, Block, CausalSelfAttention
from zoo.public import GatedMLP, PublicConfig, convert, rename, require

# -------------------------------------------------------------------------------------------------
path: PathName = ''         # the folder
out_dir: PathName = 'out-huginn'
overwrite = False           # replace the run that out_dir holds
dry_run = False             # look, and write nothing
# -------------------------------------------------------------------------------------------------


# the model ----------------------------------------------------------------------------------------

class BiasedAttention(CausalSelfAttention):
    """Attention with a bias on queries and keys, added before rotary positions."""

    def __init__(self, config):
        super().__init__(config)
        self.qk_bias = nn.Parameter(torch.zeros(2 * config.n_embd))

    def qkv(self, x):
        qkv = super().qkv(x)                                                    # (B, T, 3C)
        return qkv + F.pad(self.qk_bias, (0, x.shape[-1])).to(qkv.dtype)


class HuginnBlock(Block):
    attention, feed_forward = BiasedAttention, GatedMLP


class Huginn(GPT):
    Config, block = PublicConfig, HuginnBlock


# criteria: signals as in exits.py -----------------------------------------------------------------

def latent_diff(x0, x1, memo, read):
    """The update over the norm of the new state."""
    return vector_norm(x1 - x0, dim=-1) / vector_norm(x1, dim=-1), None


def cosine(x0, x1, memo, read):
    """1 - cosine of the states before and after the step."""
    return 1 - F.cosine_similarity(x0, x1, dim=-1), None


def kl(x0, x1, memo, read):
    """KL(p^(k-1) || p^(k)), in the reverse order of the paper's Eq. 4; p^(0) is uniform."""
    log_p1 = read(x1).float().log_softmax(-1)
    return divergence(memo, log_p1), log_p1


def minp_kl(x0, x1, memo, read):
    """kl of p after all entries below a tenth of the largest are replaced by 1 / V."""
    p = read(x1).float().softmax(-1)
    p = torch.where(p < 0.1 * p.amax(-1, keepdim=True), 1 / p.shape[-1], p)
    log_p1 = (p / p.sum(-1, keepdim=True)).log()
    return divergence(memo, log_p1), log_p1


def divergence(log_p0, log_p1):
    if log_p0 is None:
        log_p0 = torch.full_like(log_p1, 1 / log_p1.shape[-1]).log()
    return (log_p0.exp() * (log_p0 - log_p1)).sum(-1)


def entropy_diff(x0, x1, memo, read):
    """By how much the entropy of p changes, in nats; before the first step it counts as 100."""
    log_p1 = read(x1).float().log_softmax(-1)
    entropy = -(log_p1.exp() * log_p1).sum(-1)
    return (entropy - (100.0 if memo is None else memo)).abs(), entropy


def argmax_stability(x0, x1, memo, read):
    """1 / (1 + n), where the most likely token has not changed for n steps."""
    token = read(x1).argmax(-1)
    if memo is None:
        unchanged = torch.zeros_like(token)
    else:
        token_before, unchanged = memo.unbind(-1)
        unchanged = (unchanged + 1) * (token == token_before)
    return 1 / (1 + unchanged.float()), torch.stack((token, unchanged), dim=-1)


# the published thresholds; 1 / 5 in argmax-stability stands for five steps
EXITS = {
    'latent-diff': Exit(latent_diff, 0.03),
    'cosine': Exit(cosine, 1e-3),
    'kl': Exit(kl, 1e-3, reads='through_coda'),
    'minp-kl': Exit(minp_kl, 1e-5, reads='through_coda'),
    'entropy-diff': Exit(entropy_diff, 1e-3, reads='through_coda'),
    'argmax-stability': Exit(argmax_stability, 1 / 5, reads='through_coda'),
}


# public checkpoints -------------------------------------------------------------------------------

# the weights of a block: our name, public name
NAMES = {'attn.c_attn.weight': 'attn.Wqkv.weight', 'attn.qk_bias': 'attn.qk_bias',
         'attn.c_proj.weight': 'attn.proj.weight', 'mlp.c_fc.weight': 'mlp.fc.weight',
         'mlp.c_proj.weight': 'mlp.proj.weight',
         **{f'n{i}.weight': f'norm_{i}.weight' for i in (1, 2, 3, 4)}}


def translate(public, tensors):
    """config.json's dict and the public tensors -> PublicConfig, our state_dict; see public.py."""
    require(public, block_class_name='SandwichBlock', norm_class_name='RMSNorm_llama',
            mlp_class_name='GatedMLP', nonlin_name='SiLU', injection_type='linear',
            state_init='like-init', qk_bias=True, bias=False, tie_embeddings=True)
    g = public['n_layers_in_prelude']               # and the number of the layer that is the group
    looped = public['n_layers_in_recurrent_block']
    after = public['n_layers_in_coda']
    config = PublicConfig(
        block_size=public['block_size'], vocab_size=len(tensors['transformer.wte.weight']),
        n_layer=g + looped + after, n_head=public['n_heads'], n_embd=public['n_embd'],
        groups=[list(range(g, g + looped))], mean_recurrence=public['mean_recurrence'],
        bptt_k=public['mean_backprop_depth'], injection='concat_random', norm_inside=False,
        pos='rotary', rope_base=public['rope_base'], mlp_width=public['intermediate_size'],
        norm_eps=public.get('norm_eps', 1e-6))

    # the head is the embedding, and one norm stands in two places
    names = {'wte.weight': 'wte.weight', 'lm_head.weight': 'wte.weight',
             f'h.{g}.adapter.weight': 'adapter.weight',
             f'h.{g}.norm.weight': 'ln_f.weight', 'ln_f.weight': 'ln_f.weight'}
    blocks = {f'h.{i}.': f'prelude.{i}.' for i in range(g)}
    blocks |= {f'h.{g}.core.{i}.': f'core_block.{i}.' for i in range(looped)}
    blocks |= {f'h.{g + 1 + i}.': f'coda.{i}.' for i in range(after)}
    for ours, theirs in blocks.items():
        names |= {ours + new: theirs + old for new, old in NAMES.items()}
    tensors = {name: x.flatten() if 'qk_bias' in name else x for name, x in tensors.items()}
    return config, rename(tensors, {new: f'transformer.{old}' for new, old in names.items()})


if __name__ == '__main__':
    config = configure(globals())
    run(lambda: convert('zoo.huginn:Huginn', translate, **config))
