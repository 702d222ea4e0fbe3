"""
A recurrent-depth GPT: the model is a list of layers, some of them loop.

Not run by itself: train.py, sample.py, geometry.py and bench.py build it.

    idx -> (wte + wpe) * sqrt(C) -> each of h: Block | RecurrentGroup -> ln_f -> tied head -> logits

Paper: sec. 2 and App. B (12 layers, groups 4 / 5-6 / 7, learned positions, SiLU, sandwich norm).
Geiping: 3.2 (the sandwich), App. C.1 (init, scale of the embedding).

    B, T    rows and tokens of a pass
    C, V    n_embd, vocab_size
    H, D    n_head, C / H
    h       the layers, each a Block or a RecurrentGroup of Blocks
"""
import math
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral

import torch
import torch.nn as nn
from torch.nn import functional as F

import decode
from cache import Rotary, Span
from checks import check_shape
from linear import Linear
from loops import RecurrentGroup, sample_n_loop


@dataclass
class GPTConfig:
    """What shapes a model, as plain values. The defaults are the paper's (App. B)."""
    block_size: int = 512
    vocab_size: int = 50304         # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False              # in the linear layers of attention and MLP
    # the layers that loop; paper silent: they count from 0
    groups: list = field(default_factory=lambda: [[4], [5, 6], [7]])
    mean_recurrence: float = 12     # r of the lognormal-Poisson draw; its mean is r + 1
    bptt_k: int = 8                 # back-propagated loop steps of each group (Geiping 3.3)
    injection: str = 'concat'       # 'concat' (the paper), 'add', 'none'
    adapter_init: str = 'sum'       # 'sum': starts as x + e; 'random': Geiping
    x0: str = 'noise'               # a group's first state: 'noise' (Geiping), 'zero', 'e'
    norm_inside: bool = True        # the core's norm in every step (Geiping); False: after the last
    step_noise: float = 0.0         # noise added to the state before each step, in units of x^(0)'s
    pos: str = 'learned'            # positions: 'learned' (the paper), 'rotary'
    rope_base: float = 10000.0      # of rotary positions: the slowest pair turns by about 1 / base
    # other looped models differ in these
    loop_norm: bool = True          # a group's own norm; False: none, its last block has one
    sandwich: str = 'sum'           # the second norm: 'sum', n2(x + f(x)); 'branch', x + n2(f(x))
    mlp: str = 'plain'              # 'plain', SiLU; 'gated', SiLU(first half) * second half
    mlp_width: int | None = None    # None = 4 * n_embd
    qk_bias: bool = False           # on queries and keys, before they are turned
    norm_eps: float = 1e-6
    scale_embedding: bool = True    # times sqrt(C)
    last_norm: bool = True          # ln_f
    tied: bool = True               # the head is the embedding
    gate: bool = False              # a learned exit gate, see exits.gate

    def __post_init__(self):
        check_shape(self)
        self.groups = sorted(list(group) for group in self.groups)


class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.qk_bias = nn.Parameter(torch.zeros(2 * config.n_embd)) if config.qk_bias else None
        self.rotary = Rotary(config) if config.pos == 'rotary' else None

    def forward(self, x, update=None, pos=None):
        """
        x (B, T, C) -> (B, T, C).

        update: a cache hook, which brings in earlier tokens. pos: where rotary positions differ
        from 0 ... T - 1.
        """
        B, T, C = x.shape
        qkv = self.c_attn(x)                                                    # (B, T, 3C)
        if self.qk_bias is not None:
            qkv = qkv + F.pad(self.qk_bias, (0, C)).to(qkv.dtype)
        qkv = qkv.view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.transpose(1, 3).unbind(2)                                 # (B, H, T, D) each
        if self.rotary is not None:
            q, k = self.rotary(q, pos), self.rotary(k, pos)
        mask = None
        if update is not None:
            k, v, mask = update(k, v)                                           # (B, H, end, D)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and T > 1)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y)


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        width, self.gated = config.mlp_width or 4 * config.n_embd, config.mlp == 'gated'
        self.c_fc = Linear(config.n_embd, width * (1 + self.gated), bias=config.bias)
        self.c_proj = Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x):
        x = self.c_fc(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.c_proj(F.silu(gate) * up)
        return self.c_proj(F.silu(x))


class Block(nn.Module):
    """The sandwich of Geiping 3.2, (B, T, C) -> (B, T, C): a norm before and after each branch."""

    def __init__(self, config):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(config.n_embd, eps=config.norm_eps)
                                              for _ in range(4))
        self.norm_branch = config.sandwich == 'branch'
        self.attn = CausalSelfAttention(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, update=None, pos=None):
        y = self.drop(self.attn(self.n1(x), update, pos)).to(x.dtype)
        x = x + self.n2(y) if self.norm_branch else self.n2(x + y)
        y = self.drop(self.mlp(self.n3(x))).to(x.dtype)
        x = x + self.n4(y) if self.norm_branch else self.n4(x + y)
        return x


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = None
        if config.pos == 'learned':
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        # each group takes the place of its layers, from the back so that layer numbers stay right
        layers = [Block(config) for _ in range(config.n_layer)]
        for index, group in reversed(list(enumerate(config.groups))):
            start, end = group[0], group[-1] + 1
            layers[start:end] = [RecurrentGroup(layers[start:end], config, index)]
        self.h = nn.ModuleList(layers)
        norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.ln_f = norm if config.last_norm else nn.Identity()
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie()
        self.gate = nn.Linear(config.n_embd, 1) if config.gate else None
        self.init_weights()

    def tie(self):
        if self.config.tied:
            self.lm_head.weight = self.wte.weight

    @property
    def groups(self):
        return [layer for layer in self.h if isinstance(layer, RecurrentGroup)]

    @torch.no_grad()
    def init_weights(self):
        """Takase's init, as Geiping App. C.1 has it, with the effective depth l."""
        config = self.config
        # l = single layers + r * looped layers: 8 + 12 * 4 = 56 for the paper's model
        looped = sum(map(len, config.groups))
        depth = config.n_layer - looped + config.mean_recurrence * looped
        for name, p in self.named_parameters():
            if name.endswith('bias'):
                nn.init.zeros_(p)
            elif p.dim() < 2:
                nn.init.ones_(p)
            else:
                variance = 2 / (5 * config.n_embd)
                if name.endswith('c_proj.weight'):
                    variance = 1 / (5 * config.n_embd * depth)
                std = math.sqrt(variance)
                nn.init.trunc_normal_(p, 0.0, std, -3 * std, 3 * std)
        if config.injection == 'concat' and config.adapter_init == 'sum':
            # differs from the paper: the adapter starts as x + e
            for group in self.groups:
                group.adapter.weight.copy_(torch.eye(config.n_embd).repeat(1, 2))

    def embed(self, idx, pos):
        """Tokens (B, T) at positions (T,) or (B, 1) -> the stream (B, T, C)."""
        x = self.wte(idx).float()
        if self.wpe is not None:
            x = x + self.wpe(pos)
        # differs from the paper: tokens and positions are scaled (Geiping)
        return self.drop(x * math.sqrt(self.config.n_embd) if self.config.scale_embedding else x)

    def readout(self, x):
        """State (..., C) -> logits (..., V)."""
        return self.lm_head(self.ln_f(x))

    def through_coda(self, x, rows=None, span=None, cache=None):
        """The same by way of the layers behind the last group; rows: of the batch, None for all."""
        last = max(i for i, layer in enumerate(self.h) if isinstance(layer, RecurrentGroup))
        x = x if self.config.norm_inside else self.h[last].norm(x)
        span = span or Span(0, x.shape[1], x.device)
        pos = span.pos[rows] if rows is not None and span.ragged else span.pos
        for i in range(last + 1, len(self.h)):
            x = self.h[i](x, cache[i][0].at(span=span, rows=rows) if cache else None, pos)
        return self.readout(x)

    def reader(self, exit, span=None, cache=None):
        """What a rule reads of a state (b, T, C), see exits.Exit; ValueError without a gate."""
        if exit is None or exit.reads in ('lens', 'row'):
            return self.readout
        if exit.reads == 'coda':
            return partial(self.through_coda, span=span, cache=cache)
        if self.gate is None:
            raise ValueError(f"the exit rule '{exit.name}' needs a model with a gate, and this one "
                             'has none: train one with python -m zoo.ouro, or choose another rule')
        return self.gate

    def loop_counts(self, n_loop=None, exit=None):
        """n_loop, as forward takes it -> a list with one count for each group."""
        n_groups = len(self.config.groups)
        if n_loop is None and self.training:        # one draw governs a group
            return [sample_n_loop(self.config.mean_recurrence) for _ in range(n_groups)]
        if n_loop is None and exit is None:
            n_loop = max(1, round(self.config.mean_recurrence))
        elif n_loop is None:
            n_loop = 30         # paper silent: the budget of an exit rule, the loops of its Fig. 5
        counts = list(n_loop) if isinstance(n_loop, (list, tuple)) else [n_loop] * n_groups
        right = all(isinstance(n, Integral) and n >= 1 for n in counts)
        if len(counts) != n_groups or not right:
            raise ValueError(f'n_loop must be an int >= 1, or one for each of the {n_groups} '
                             f'groups, not {n_loop!r}')
        return counts

    def forward(self, idx, targets=None, n_loop=None, exit=None, noise_seed=0, trace=None):
        """
        idx (B, T) tokens -> logits (B, T, V) and the loss: mean cross-entropy against targets
        (B, T) in nats a token, None without targets.

        n_loop: loop budget, an int for all groups or one for each. None = a draw while training,
        otherwise mean_recurrence, or 30 with an exit rule. exit: a rule of exits.make_exit; n_loop
        is then its k_max. noise_seed: in evaluation x^(0) is a function of (noise_seed, group,
        position) alone; in training it comes fresh from torch's generator.
        trace: a list, to which each group appends dict(e=(B, T, C), states=(K+1, B, T, C) or None
        with an exit rule, steps_used=(B, T), evals=(B, T)).
        ValueError if T > block_size, or n_loop does not fit the groups.
        """
        x, _ = self.hidden(idx, self.loop_counts(n_loop, exit), exit, noise_seed, trace=trace)
        logits = self.lm_head(x)                                                # (B, T, V)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return logits, loss

    def hidden(self, idx, counts, exit=None, noise_seed=0, span=None, cache=None, warm=None,
               trace=None):
        """
        idx (B, T) -> what the head reads (B, T, C), and where each group ended: a list of its
        (x (B, T, C), steps_used (B, T)).

        counts: loops of each group. span, cache: where the tokens stand, and for each of h the
        KeysValues of its blocks (decode.py). warm: a first state for each group.
        """
        span = span or Span(0, idx.shape[1], idx.device)
        if span.end > self.config.block_size:
            raise ValueError(f'a sequence of {span.end} tokens does not fit block_size = '
                             f'{self.config.block_size}')
        x, reader = self.embed(idx, span.pos), self.reader(exit, span, cache)
        # through the list of layers
        ends = []
        for i, layer in enumerate(self.h):
            kept = cache[i] if cache else None
            if isinstance(layer, RecurrentGroup):
                g = len(ends)
                x, steps_used, _ = layer(x, counts[g], exit, reader, noise_seed, span, kept,
                                         warm[g] if warm else None, trace)
                ends.append((x, steps_used))
            else:
                x = layer(x, kept[0].at(span=span) if kept else None, span.pos)
        return self.ln_f(x), ends

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None,
                 cache='exact', noise_seed=0, **more):
        """
        Continue idx (B, T) -> (idx (B, T + new), steps_used (B, new, groups)): the new tokens, and
        the loop steps that chose each of them.

        n_loop, exit, noise_seed as in forward. temperature 0 is greedy. cache: 'exact', 'ring',
        'latest', or None = recompute the context for each token. See decode.stream for the rest,
        for the window beyond block_size, and for what raises ValueError.
        """
        return decode.generate(self, idx, max_new_tokens, temperature=temperature, top_k=top_k,
                               n_loop=n_loop, exit=exit, cache=cache, noise_seed=noise_seed, **more)
