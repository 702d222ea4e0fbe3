"""
Ouro (Zhu et al. 2025): tested on tiny random weights, never loaded with its real ones.

A looped model with a learned exit gate, which any model of ours can have, and its training; arXiv
2510.25741.

    python -m zoo.ouro --path=FOLDER                a public checkpoint -> out-ouro/ckpt.pt
    python -m zoo.ouro --path=FOLDER --dry_run      names, shapes, bytes; what is missing
    python sample.py --out_dir=out-ouro --exit=zoo.ouro:gate --tau=0.5 --n_loop=4
    python train.py config/ouro.py                  stage I: model and gate, a loss at every loop
    python train.py config/ouro_gate.py             stage II: the gate alone -> out-ouro-2

Any model with groups gets its gate in stage I with train.py --model_class=zoo.ouro:Gated
--loop_draw=fixed --init_from=CHECKPOINT, in stage II with config/ouro_gate.py
--model_class=zoo.ouro:GateOnly --init_from=CHECKPOINT, each with an --out_dir of its own. If there
are several groups, each has its own exits; an early group's losses come from ln_f and the head on
its states.

The published code runs all loops and selects a step afterwards. Here a token exits, by the rule
`gate`, at the first step at which its exit probabilities sum up to q = 1 - tau.

    lambda_t    sigmoid of the gate on the state after loop step t (after its norm)
    p_t         lambda_t prod (1 - lambda) of the steps before; the last step takes the rest
    L_t         cross-entropy at step t, nats per token
    K, N        loop steps; tokens that have a label
"""
import torch
import torch.nn as nn
from torch.nn import functional as F

from cache import Span
from common.configurator import PathName, configure, run
from exits import Exit
from loops import Plan, as_noise
from model import GPT, Block
from zoo.public import GatedMLP, PublicConfig, convert, per_layer, rename, require, rope_base, turn

# -------------------------------------------------------------------------------------------------
path: PathName = ''         # the folder
out_dir: PathName = 'out-ouro'
overwrite = False           # replace the run that out_dir holds
dry_run = False             # look, and write nothing
# -------------------------------------------------------------------------------------------------

BETA = 0.05                 # stage I: weight of the entropy in the loss
SLOPE, LEAST = 50, 0.005    # stage II: an improvement above LEAST nats is worth another step


# the gate -----------------------------------------------------------------------------------------

def gate_signal(x0, x1, memo, read):
    """The exit probability that is left after k steps, prod (1 - lambda)."""
    left = torch.sigmoid(-read(x1).float())
    left = left if memo is None else memo * left
    return left, left


EXITS = {'gate': Exit(gate_signal, tau=0.5, reads='gate_logit')}


def exit_log_p(gates):
    """Gate logits (K, N) -> log p_t (K, N)."""
    none = torch.zeros_like(gates[:1])
    left = torch.cat((none, F.logsigmoid(-gates[:-1]).cumsum(0)))       # log prod (1 - lambda)
    return left + torch.cat((F.logsigmoid(gates[:-1]), none))           # the last takes the rest


class Gated(GPT):
    """Any model of ours with an exit gate. In training mode its loss is that of stage I."""

    def build(self, config):
        if not config.groups:
            raise ValueError('an exit gate needs groups that loop, and groups = []: give some, '
                             "such as '--groups=[[1]]'")
        super().build(config)
        self.gate = nn.Linear(config.n_embd, 1)

    def gate_logit(self, x, plan=None):
        """State (..., C) -> the logit of lambda (...); what the rule `gate` reads."""
        return self.gate(x).squeeze(-1)

    def forward(self, idx, targets=None, n_loop=None, exit=None, noise_seed=0, trace=None):
        """As in GPT, but in training mode the loss is the mean of stage_loss over the groups."""
        if not self.training or targets is None:
            return super().forward(idx, targets, n_loop, exit, noise_seed, trace)
        counts = self.loop_counts(n_loop, exit is not None)
        plan = Plan(counts, exit, as_noise(noise_seed, self.training),
                    Span(0, idx.shape[1], idx.device), keep_states=True)
        _, entries = self.hidden(idx, plan)
        if trace is not None:
            trace += entries
        labelled = targets.flatten() >= 0
        labels = targets.flatten()[labelled]                                    # (N,)
        losses = []
        for group, entry in zip(self.groups, entries):
            # L_t after every loop step, and the gate there
            read = self.through_coda if group is self.groups[-1] else self.readout
            states = entry['states'][1:]                                        # (K, B, T, C)
            nats = []
            for state in states:
                logits = read(state)                                            # (B, T, V)
                nats.append(F.cross_entropy(logits.flatten(0, 1)[labelled].float(), labels,
                                            reduction='none'))
            gates = self.gate_logit(states.flatten(1, 2)[:, labelled])          # (K, N)
            losses.append(self.stage_loss(torch.stack(nats), gates))
        return logits, torch.stack(losses).mean()

    def stage_loss(self, nats, gates):
        """Stage I, sum_t p_t L_t - beta H(p): L_t (K, N), gate logits (K, N) -> the mean."""
        log_p = exit_log_p(gates)
        return (log_p.exp() * (nats + BETA * log_p)).sum(0).mean()


class GateOnly(Gated):
    """A Gated model in stage II, which trains only the gate."""

    def build(self, config):
        super().build(config)
        self.requires_grad_(False)
        self.gate.requires_grad_(True)

    def stage_loss(self, nats, gates):
        """
        Stage II: cross-entropy of the probability to loop on, 1 - lambda_t, for the target
        sigmoid(50 (I_t - .005)), where I_t = max(0, L_(t-1) - L_t), for t from 2 on.
        """
        wanted = torch.sigmoid(SLOPE * ((nats[:-1] - nats[1:]).clamp(min=0) - LEAST))
        if not len(wanted):             # one loop: there is nothing to choose
            return 0 * gates.sum()
        return F.binary_cross_entropy_with_logits(-gates[1:], wanted)


# the model ----------------------------------------------------------------------------------------

class OuroBlock(Block):
    """The second norm of each branch is on the branch, not on the sum."""
    feed_forward = GatedMLP

    def forward(self, x, hook=None, pos=None):
        x = x + self.n2(self.attn(self.n1(x), hook, pos).to(x.dtype))
        x = x + self.n4(self.mlp(self.n3(x)).to(x.dtype))
        return x


class Ouro(Gated):
    """Ouro's blocks; the embedding is not scaled, and no norm follows the one in the loop."""
    Config, block = PublicConfig, OuroBlock

    def build(self, config):
        super().build(config)
        self.ln_f = nn.Identity()

    def tie(self):
        """The head has weights of its own."""

    def embed(self, idx, pos):
        x = self.wte(idx)
        return x if self.wpe is None else x + self.wpe(pos)


class OuroGateOnly(GateOnly, Ouro):
    """An Ouro in stage II."""


# public checkpoints -------------------------------------------------------------------------------

# the weights of a block: our name, public names
NAMES = {'attn.c_attn': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
         'attn.c_proj': 'self_attn.o_proj', 'mlp.c_fc': 'mlp.gate_proj mlp.up_proj',
         'mlp.c_proj': 'mlp.down_proj', 'n1': 'input_layernorm', 'n2': 'input_layernorm_2',
         'n3': 'post_attention_layernorm', 'n4': 'post_attention_layernorm_2'}


def translate(public, tensors):
    """config.json's dict and the public tensors -> PublicConfig, our state_dict; see public.py."""
    require(public, hidden_act='silu', tie_word_embeddings=False)
    steps, layers = public['total_ut_steps'], public['num_hidden_layers']
    config = PublicConfig(
        block_size=min(4096, public.get('max_position_embeddings', 4096)),
        vocab_size=public['vocab_size'], n_layer=layers, n_head=public['num_attention_heads'],
        n_embd=public['hidden_size'], groups=[list(range(layers))], mean_recurrence=steps,
        bptt_k=steps, injection='none', x0='e', pos='rotary', rope_base=rope_base(public),
        mlp_width=public['intermediate_size'], norm_eps=public.get('rms_norm_eps', 1e-6))

    names = {'wte.weight': 'model.embed_tokens.weight', 'h.0.norm.weight': 'model.norm.weight',
             'gate.weight': 'model.early_exit_gate.weight',
             'gate.bias': 'model.early_exit_gate.bias', 'lm_head.weight': 'lm_head.weight'}
    names |= per_layer('h.0.core.', layers, NAMES)
    return config, rename(turn(public, tensors), names)


if __name__ == '__main__':
    config = configure(globals())
    run(lambda: convert('zoo.ouro:Ouro', translate, **config))
