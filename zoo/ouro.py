"""
Ouro, a looped model with a learned exit gate (Zhu et al. 2025, arXiv 2510.25741), and its training.

    python -m zoo.ouro --path=FOLDER                the public layout -> out-ouro/ckpt.pt
    python -m zoo.ouro --path=FOLDER --dry_run      names, shapes, bytes; what is missing
    python sample.py --out_dir=out-ouro --exit=gate --tau=0.5 --n_loop=4
    python -m zoo.ouro --stage=1 config/ouro.py     trains model and gate, a loss at every loop
    python -m zoo.ouro --stage=2 --init_from=out-ouro/ckpt.pt --out_dir=out-ouro-2 --max_iters=300
                                                    trains the gate alone

A stage takes the flags and config files of train.py, and --init_from any checkpoint of ours, which
gets a gate if it has none; of several groups each has its own exits, and the losses of an early
group are those of ln_f and head on its states.

Every public port runs all the loops and selects afterwards. Here the rule `gate` (exits.py) lets a
token go at the first step at which the exit probability has summed up to q = 1 - tau.

    lambda_t    sigmoid of the gate on the state after loop step t (after its norm)
    p_t         lambda_t prod (1 - lambda) before it; the last step takes the rest
    L_t         cross-entropy at step t, nats a token
    K, N        loop steps; tokens that have a label
"""
import os
import runpy
import sys

import torch
from torch.nn import functional as F

from common.configurator import configure, run, stop
from model import GPTConfig
from zoo.public import Piece, load, read_config

# -------------------------------------------------------------------------------------------------
path = ''                   # the folder
out_dir = 'out-ouro'
block_size: int | None = None   # tokens of context; None = as config.json says, 4096 at most
dry_run = False             # look, and write nothing
# -------------------------------------------------------------------------------------------------

BETA = 0.05                 # stage I: nats of loss that a nat of entropy is worth
SLOPE, LEAST = 50, 0.005    # stage II: an improvement of so many nats is worth another step
STAGES = {
    '--stage=1': ['--objective=zoo.ouro:stage_1', '--gate', '--loop_draw=fixed',
                  '--out_dir=out-ouro'],
    '--stage=2': ['--objective=zoo.ouro:stage_2', '--gate', '--loop_draw=fixed',
                  '--out_dir=out-ouro-2', '--optimizer=adamw', '--keep_iters=[]'],
}


# its training: objectives of train.py -------------------------------------------------------------

def exit_log_p(gates):
    """Gate logits (K, N) -> log p_t (K, N)."""
    none = torch.zeros_like(gates[:1])
    left = torch.cat((none, F.logsigmoid(-gates[:-1]).cumsum(0)))       # log prod (1 - lambda)
    return left + torch.cat((F.logsigmoid(gates[:-1]), none))           # the last takes the rest


def every_loop(model, idx, targets, n_loop):
    """For each group L_t (K, N) and the states (K, N, C); idx, targets (B, T)."""
    trace, asked = [], targets.flatten() >= 0
    labels = targets.flatten()[asked]                                           # (N,)
    model.hidden(idx, n_loop, trace=trace)
    for entry, group in zip(trace, model.groups):
        read = model.through_coda if group is model.groups[-1] else model.readout
        states = entry['states'][1:]                                            # (K, B, T, C)
        nats = [F.cross_entropy(read(x).flatten(0, 1)[asked].float(), labels, reduction='none')
                for x in states]
        yield torch.stack(nats), states.flatten(1, 2)[:, asked]


def stage_1(model, x, y, n_loop):
    """sum_t p_t L_t - beta H(p), the mean over tokens and groups; model and gate together."""
    losses = []
    for nats, states in every_loop(model, x, y, n_loop):
        log_p = exit_log_p(model.gate(states).squeeze(-1))
        losses.append((log_p.exp() * (nats + BETA * log_p)).sum(0).mean())
    return torch.stack(losses).mean()


def stage_2(model, x, y, n_loop):
    """
    The gate alone: cross-entropy of going on, 1 - lambda_t, to w_t = sigmoid(50 (I_t - .005)), with
    I_t = max(0, L_(t-1) - L_t), for t from 2 on.
    """
    with torch.no_grad():
        every = list(every_loop(model, x, y, n_loop))
    losses = []
    for nats, states in every:
        wanted = torch.sigmoid(SLOPE * ((nats[:-1] - nats[1:]).clamp(min=0) - LEAST))
        gates = model.gate(states[1:]).squeeze(-1)                              # (K - 1, N)
        losses.append(F.binary_cross_entropy_with_logits(-gates, wanted))
    return torch.stack(losses).mean()


def train(stage, args):
    """train.py with a stage's objective; args: further flags and config files."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.argv = ['train.py', *STAGES[stage], *args]
    runpy.run_path(os.path.join(folder, 'train.py'), run_name='__main__')


# the model ----------------------------------------------------------------------------------------

FIELDS = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
          'num_attention_heads', 'rope_theta', 'total_ut_steps')


def config_of(public, block_size=None):
    """config.json's dict -> GPTConfig."""
    steps, layers = public['total_ut_steps'], public['num_hidden_layers']
    return GPTConfig(
        block_size=(min(4096, public.get('max_position_embeddings', 4096)) if block_size is None
                    else block_size),
        vocab_size=public['vocab_size'], n_layer=layers, n_head=public['num_attention_heads'],
        n_embd=public['hidden_size'], groups=[list(range(layers))], mean_recurrence=steps,
        bptt_k=steps, injection='none', x0='e', pos='rotary', rope_base=public['rope_theta'],
        sandwich='branch', mlp='gated', mlp_width=public['intermediate_size'],
        norm_eps=public.get('rms_norm_eps', 1e-6), scale_embedding=False, last_norm=False,
        tied=False, gate=True)


def pieces_of(config):
    """GPTConfig -> {public name: Piece}."""
    C, H, V, W = config.n_embd, config.n_head, config.vocab_size, config.mlp_width

    def adjacent(rows):
        """Half-split rotary pairs (i, i + D / 2) of each head -> adjacent ones (2 i, 2 i + 1)."""
        return rows.view(H, 2, C // H // 2, C).transpose(1, 2).reshape(C, C)

    pieces = {
        'model.embed_tokens.weight': Piece((V, C), ['wte.weight']),
        'model.norm.weight': Piece((C,), ['h.0.norm.weight']),
        'model.early_exit_gate.weight': Piece((1, C), ['gate.weight']),
        'model.early_exit_gate.bias': Piece((1,), ['gate.bias']),
        'lm_head.weight': Piece((V, C), ['lm_head.weight']),
    }
    norms = ('input_layernorm', 'input_layernorm_2', 'post_attention_layernorm',
             'post_attention_layernorm_2')
    for i in range(config.n_layer):
        public, ours = f'model.layers.{i}.', f'h.0.core.{i}.'
        attn, fc = [ours + 'attn.c_attn.weight'], [ours + 'mlp.c_fc.weight']
        pieces |= {
            public + 'self_attn.q_proj.weight': Piece((C, C), attn, 0, adjacent),
            public + 'self_attn.k_proj.weight': Piece((C, C), attn, C, adjacent),
            public + 'self_attn.v_proj.weight': Piece((C, C), attn, 2 * C),
            public + 'self_attn.o_proj.weight': Piece((C, C), [ours + 'attn.c_proj.weight']),
            public + 'mlp.gate_proj.weight': Piece((W, C), fc),
            public + 'mlp.up_proj.weight': Piece((W, C), fc, W),
            public + 'mlp.down_proj.weight': Piece((C, W), [ours + 'mlp.c_proj.weight'])}
        pieces |= {f'{public}{name}.weight': Piece((C,), [f'{ours}n{n}.weight'])
                   for n, name in enumerate(norms, 1)}
    return pieces


def main():
    public = read_config(path, ('ouro',), FIELDS, {})
    allowed = dict(hidden_act=['silu'], rope_scaling=[None], tie_word_embeddings=[False],
                   num_key_value_heads=[public['num_attention_heads']],
                   head_dim=[public['hidden_size'] // public['num_attention_heads']])
    read_config(path, ('ouro',), FIELDS, allowed)
    shape = config_of(public, block_size)
    load(path, out_dir, shape, pieces_of(shape), (), dry_run)


if __name__ == '__main__':
    stages = [arg for arg in sys.argv if arg.startswith('--stage')]
    if stages:
        if stages[0] not in STAGES:
            stop(f'{stages[0]} is no stage: say --stage=1 or --stage=2')
        train(stages[0], [arg for arg in sys.argv[1:] if arg != stages[0]])
    else:
        config = configure(globals())
        run(main)
