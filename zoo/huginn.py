"""
Huginn, Geiping's recurrent-depth model, as a checkpoint of ours, and his exit criteria.

    python -m zoo.huginn --path=FOLDER              the public layout -> out-huginn/ckpt.pt
    python -m zoo.huginn --path=FOLDER --dry_run    names, shapes, bytes; what is missing
    python sample.py --out_dir=out-huginn --exit=zoo.huginn:kl
    python bench.py --rules="['zoo.huginn:latent-diff','kl']"       on any other model too

FOLDER has config.json, *.safetensors and tokenizer.json. What differs from our default is a line
each of GPTConfig: a gated MLP, a bias on queries and keys, rotary positions, the group's norm after
the loop and not in it. ln_f serves twice, after the loop and after the coda.

Geiping: 3.2, App. C.1 (the model), 6.1 and App. D.6 (the criteria; values and thresholds as in the
code published with it).

    b, T        rows that still loop, their tokens in this pass
    V           vocab_size
"""
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

from common.configurator import configure, run
from model import GPTConfig
from zoo.public import Piece, load, read_config

# -------------------------------------------------------------------------------------------------
path = ''                   # the folder
out_dir = 'out-huginn'
block_size: int | None = None   # tokens of context; None = as config.json says
dry_run = False             # look, and write nothing
# -------------------------------------------------------------------------------------------------


# criteria: signals as in exits.py, whose value is that of a whole row -----------------------------
#
# A row leaves as one, at its mean (of states) or with its last token (of logits); of tokens that
# come one by one each is a row. Logits are read by way of the coda.

def of_row(signal, which):
    """A signal of tokens (b, T) -> the same of rows. which: 'mean' or 'last'."""
    def of_rows(x0, x1, memo, readout):
        value, memo = signal(x0, x1, memo, readout)
        row = value.mean(dim=1, keepdim=True) if which == 'mean' else value[:, -1:]
        return row.expand_as(value), memo
    return of_rows


def latent_diff(x0, x1, memo, readout):
    """The update over the norm of the new state."""
    return vector_norm(x1 - x0, dim=-1) / vector_norm(x1, dim=-1), None


def cosine(x0, x1, memo, readout):
    """One less the cosine of the states before and after the step."""
    return 1 - F.cosine_similarity(x0, x1, dim=-1), None


def kl(x0, x1, memo, readout):
    """KL(p^(k-1) || p^(k)), the other way round than the paper's Eq. 4; p^(0) is uniform."""
    log_p1 = readout(x1).float().log_softmax(-1)
    return divergence(memo, log_p1), log_p1


def minp_kl(x0, x1, memo, readout):
    """kl of p in which whatever is below a tenth of the largest counts as 1 / V."""
    p = readout(x1).float().softmax(-1)
    p = torch.where(p < 0.1 * p.amax(-1, keepdim=True), 1 / p.shape[-1], p)
    log_p1 = (p / p.sum(-1, keepdim=True)).log()
    return divergence(memo, log_p1), log_p1


def divergence(log_p0, log_p1):
    if log_p0 is None:
        log_p0 = torch.full_like(log_p1, 1 / log_p1.shape[-1]).log()
    return (log_p0.exp() * (log_p0 - log_p1)).sum(-1)


def entropy_diff(x0, x1, memo, readout):
    """How much the entropy of p changes, nats; before the first step it counts as 100."""
    log_p1 = readout(x1).float().log_softmax(-1)
    entropy = -(log_p1.exp() * log_p1).sum(-1)
    return (entropy - (100.0 if memo is None else memo)).abs(), entropy


def argmax_stability(x0, x1, memo, readout):
    """1 / (1 + n) once the likeliest token has stayed for n steps: tau 1 / 5 asks for five."""
    token = readout(x1).argmax(-1)
    if memo is None:
        stayed = torch.zeros_like(token)
    else:
        last, stayed = memo.unbind(-1)
        stayed = (stayed + 1) * (token == last)
    return 1 / (1 + stayed.float()), torch.stack((token, stayed), dim=-1)


# name: (signal, hits, keep, what it reads, his threshold)
EXITS = {
    'latent-diff': (of_row(latent_diff, 'mean'), 1, True, 'row', 0.03),
    'cosine': (of_row(cosine, 'mean'), 1, True, 'row', 1e-3),
    'kl': (of_row(kl, 'last'), 1, True, 'coda', 1e-3),
    'minp-kl': (of_row(minp_kl, 'last'), 1, True, 'coda', 1e-5),
    'entropy-diff': (of_row(entropy_diff, 'last'), 1, True, 'coda', 1e-3),
    'argmax-stability': (of_row(argmax_stability, 'last'), 1, True, 'coda', 1 / 5),
}


# the model ----------------------------------------------------------------------------------------

FIELDS = ('n_embd', 'n_heads', 'intermediate_size', 'block_size', 'vocab_size', 'rope_base',
          'n_layers_in_prelude', 'n_layers_in_recurrent_block', 'n_layers_in_coda',
          'mean_recurrence', 'mean_backprop_depth')
ALLOWED = dict(block_class_name=['SandwichBlock'], norm_class_name=['RMSNorm_llama'],
               mlp_class_name=['GatedMLP'], nonlin_name=['SiLU'], injection_type=['linear'],
               state_init=['like-init'], qk_bias=[True], bias=[False], tie_embeddings=[True])


def config_of(public, block_size=None):
    """config.json's dict -> GPTConfig."""
    before, looped = public['n_layers_in_prelude'], public['n_layers_in_recurrent_block']
    multiple = public.get('padding_multiple', 1)
    padded = multiple * -(-public['vocab_size'] // multiple)
    return GPTConfig(
        block_size=public['block_size'] if block_size is None else block_size,
        vocab_size=public.get('padded_vocab_size', padded),
        n_layer=before + looped + public['n_layers_in_coda'], n_head=public['n_heads'],
        n_embd=public['n_embd'], groups=[list(range(before, before + looped))],
        mean_recurrence=public['mean_recurrence'], bptt_k=public['mean_backprop_depth'],
        adapter_init='random', norm_inside=False, pos='rotary', rope_base=public['rope_base'],
        mlp='gated', mlp_width=public['intermediate_size'], qk_bias=True,
        norm_eps=public.get('norm_eps', 1e-6))


def pieces_of(config):
    """GPTConfig -> {public name: Piece}."""
    C, H, V = config.n_embd, config.n_head, config.vocab_size
    W, (group,) = config.mlp_width, config.groups
    g = group[0]
    pieces = {
        'transformer.wte.weight': Piece((V, C), ['wte.weight']),
        'transformer.adapter.weight': Piece((C, 2 * C), [f'h.{g}.adapter.weight']),
        # one norm in two places
        'transformer.ln_f.weight': Piece((C,), ['ln_f.weight', f'h.{g}.norm.weight']),
    }
    blocks = {f'transformer.prelude.{i}.': f'h.{i}.' for i in range(g)}
    blocks |= {f'transformer.core_block.{i}.': f'h.{g}.core.{i}.' for i in range(len(group))}
    blocks |= {f'transformer.coda.{i}.': f'h.{g + 1 + i}.'
               for i in range(config.n_layer - group[-1] - 1)}
    for public, ours in blocks.items():
        pieces |= {
            public + 'attn.Wqkv.weight': Piece((3 * C, C), [ours + 'attn.c_attn.weight']),
            public + 'attn.qk_bias': Piece((2, 1, H, C // H), [ours + 'attn.qk_bias'],
                                           change=torch.flatten),
            public + 'attn.proj.weight': Piece((C, C), [ours + 'attn.c_proj.weight']),
            public + 'mlp.fc.weight': Piece((2 * W, C), [ours + 'mlp.c_fc.weight']),
            public + 'mlp.proj.weight': Piece((C, W), [ours + 'mlp.c_proj.weight'])}
        pieces |= {f'{public}norm_{i}.weight': Piece((C,), [f'{ours}n{i}.weight'])
                   for i in (1, 2, 3, 4)}
    return pieces


def main():
    public = read_config(path, ('huginn', 'raven'), FIELDS, ALLOWED)
    shape = config_of(public, block_size)
    # the table of rotary positions, and the head, which is the embedding
    ignored = ['freqs_cis', 'lm_head.weight']
    load(path, out_dir, shape, pieces_of(shape), ignored, dry_run)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
