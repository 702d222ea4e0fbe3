"""
A recurrent-depth GPT: the model is a list of blocks, some of them looped.

Not run by itself: train.py, sample.py, geometry.py and bench.py build it. tokens (B, T) -> logits (B, T, V).

    idx -> (wte + wpe) * sqrt(C) -> for each of h: Block | RecurrentGroup -> ln_f -> tied head -> logits

Paper: sec. 2 and App. B (12 layers, groups 4 / 5-6 / 7, learned positions, SiLU, sandwich norm); Geiping 3.2 (the sandwich),
App. C.1 (init, embedding scale). Symbols: B batch, T tokens, C n_embd, V vocab_size, H n_head, D = C / H.
"""
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Integral

import torch
import torch.nn as nn
from torch.nn import functional as F

import decode
from loops import RecurrentGroup, Span, sample_n_loop


ONE_ROW = 2 ** 19


@dataclass
class GPTConfig:
    """All that shapes a model; plain values. The defaults are the paper's (App. B). ValueError if they do not fit together."""
    block_size: int = 512
    vocab_size: int = 50304         # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False              # in the linear layers of attention and MLP
    groups: list = field(default_factory=lambda: [[4], [5, 6], [7]])    # paper silent: layer numbers count from 0
    mean_recurrence: float = 12     # r of the lognormal-Poisson draw; its mean is r + 1
    bptt_k: int = 8                 # back-propagated loop steps of each group (Geiping 3.3)
    injection: str = 'concat'       # 'concat' (the paper), 'add', 'none'
    adapter_init: str = 'sum'       # 'sum': starts as x + e; 'random': Geiping
    x0: str = 'noise'               # a group's first state: 'noise' (Geiping), 'zero', 'e'
    norm_inside: bool = True        # the norm at the end of the core in every step (Geiping); False: once, after the last
    step_noise: float = 0.0         # noise added to the state before each step, in units of x^(0)'s

    def __post_init__(self):
        for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'mean_recurrence', 'bptt_k'):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} must be positive, not {getattr(self, name)}')
        if self.n_embd % self.n_head:
            raise ValueError(f'n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}')
        for name, known in dict(injection=('concat', 'add', 'none'), adapter_init=('sum', 'random'), x0=('noise', 'zero', 'e')).items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} '{getattr(self, name)}': choose one of {', '.join(known)}")
        seen = set()
        for group in self.groups:
            if not isinstance(group, (list, tuple)) or not group or not all(isinstance(i, Integral) for i in group):
                raise ValueError(f'a group is a list of layer numbers with at least one in it, not {group!r}: groups = {self.groups}')
            if list(group) != list(range(group[0], group[0] + len(group))):
                raise ValueError(f'the layers of a group must follow one another, {list(group)} do not: groups = {self.groups}')
            if group[0] < 0 or group[-1] >= self.n_layer:
                raise ValueError(f'group {list(group)} is out of range: n_layer = {self.n_layer}, layers 0 to {self.n_layer - 1}')
            if seen & set(group):
                raise ValueError(f'groups overlap: layer {min(seen & set(group))} is in two of {self.groups}')
            seen |= set(group)
        self.groups = sorted(list(group) for group in self.groups)


class Linear(nn.Linear):
    """nn.Linear, but one row on a CPU goes through oneDNN, which reads a large weight with all cores; torch's choice uses one."""

    def forward(self, x):
        if x.numel() == self.in_features and self.weight.numel() > ONE_ROW and x.device.type == 'cpu' and not torch.is_grad_enabled() \
                and x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled('cpu') and not torch.compiler.is_compiling():
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, 'none', [], '')
        return super().forward(x)


class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, kv=None):
        """x (B, T, C) -> (B, T, C). kv: the hook of loops.KeysValues, which gives the keys and values of earlier tokens too."""
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)      # (3, B, H, T, D)
        q, (k, v), mask = qkv[0], qkv[1:], None
        if kv is not None:
            (k, v), mask = kv(qkv[1:])
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, mask is None and T > 1)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(F.silu(self.c_fc(x)))


class Block(nn.Module):
    """x = n2(x + attn(n1(x))); x = n4(x + mlp(n3(x))): the sandwich of Geiping 3.2. (B, T, C) float32 -> the same."""

    def __init__(self, config):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(config.n_embd, eps=1e-6) for _ in range(4))
        self.attn, self.mlp, self.drop = CausalSelfAttention(config), MLP(config), nn.Dropout(config.dropout)

    def forward(self, x, kv=None):
        x = self.n2(x + self.drop(self.attn(self.n1(x), kv)))
        return self.n4(x + self.drop(self.mlp(self.n3(x))))


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        blocks, first = [Block(config) for _ in range(config.n_layer)], {group[0]: group for group in config.groups}
        self.h, i = nn.ModuleList(), 0
        while i < config.n_layer:
            group = first.get(i)
            self.h.append(RecurrentGroup([blocks[j] for j in group], config, config.groups.index(group)) if group else blocks[i])
            i += len(group) if group else 1
        self.ln_f = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight   # tied
        self.init_weights()

    @property
    def groups(self):
        return [layer for layer in self.h if isinstance(layer, RecurrentGroup)]

    @torch.no_grad()
    def init_weights(self):
        """Takase's init as Geiping App. C.1 has it: variance 2 / (5C), out-projections 1 / (5Cl), l the effective depth."""
        config, looped = self.config, sum(map(len, self.config.groups))
        depth = config.n_layer - looped + config.mean_recurrence * looped       # l = 8 + 12 * 4 = 56 for the paper's model
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.zeros_(p) if name.endswith('bias') else nn.init.ones_(p)
                continue
            std = math.sqrt(1 / (5 * config.n_embd * depth) if name.endswith('c_proj.weight') else 2 / (5 * config.n_embd))
            nn.init.trunc_normal_(p, 0.0, std, -3 * std, 3 * std)
        if config.injection == 'concat' and config.adapter_init == 'sum':       # differs from the paper: starts as x + e
            for group in self.groups:
                group.adapter.weight.copy_(torch.eye(config.n_embd).repeat(1, 2))

    def readout(self, x):
        """State (..., C) -> logits (..., V)."""
        return self.lm_head(self.ln_f(x))

    def loop_counts(self, n_loop=None, exit=None):
        """n_loop as forward takes it -> a list with one count for each group."""
        n_groups = len(self.config.groups)
        if n_loop is None and self.training:
            return [sample_n_loop(self.config.mean_recurrence) for _ in range(n_groups)]    # one draw governs a group
        if n_loop is None:      # paper silent: the budget of an exit rule: the 30 loops of its Fig. 5
            n_loop = max(1, round(self.config.mean_recurrence)) if exit is None else 30
        counts = list(n_loop) if isinstance(n_loop, (list, tuple)) else [n_loop] * n_groups
        if len(counts) != n_groups or not all(isinstance(n, Integral) and n >= 1 for n in counts):
            raise ValueError(f'n_loop must be an int >= 1, or one for each of the {n_groups} groups, not {n_loop!r}')
        return counts

    def forward(self, idx, targets=None, n_loop=None, exit=None, noise_seed=0, trace=None):
        """
        idx (B, T) tokens -> logits (B, T, V), loss: mean cross-entropy against targets (B, T) in nats a token, None without.

        n_loop: loop budget, an int for all groups or one for each; None = a draw while training, else mean_recurrence, or 30
        with an exit rule. exit: a rule of exits.make_exit; n_loop is then its k_max. noise_seed: x^(0) in evaluation is a
        function of (noise_seed, group, position) alone; in training it comes fresh from torch's generator.
        trace: a list, to which each group appends dict(e=(B, T, C), states=(K+1, B, T, C) or None with an exit rule,
        steps_used=(B, T), evals=(B, T)). ValueError if T > block_size or n_loop does not fit the groups.
        """
        x, _ = self.hidden(idx, self.loop_counts(n_loop, exit), exit, noise_seed, trace=trace)
        logits = self.lm_head(x)        # (B, T, V)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def hidden(self, idx, counts, exit=None, noise_seed=0, span=None, cache=None, warm=None, trace=None):
        """
        idx (B, T) -> what the head reads (B, T, C), and each group's (x (B, T, C), steps_used (B, T)).

        counts: loops of each group. span, cache: where the tokens stand, and for each of h the KeysValues of its layers (see
        decode.py). warm: a first state for each group in place of noise.
        """
        T = idx.shape[1]
        span = span or Span(0, T, idx.device)
        if span.end > self.config.block_size:
            raise ValueError(f'a sequence of {span.end} tokens does not fit block_size = {self.config.block_size}')
        x = self.drop((self.wte(idx) + self.wpe(span.pos)) * math.sqrt(self.config.n_embd))     # (B, T, C)
        groups = []
        for i, layer in enumerate(self.h):
            if isinstance(layer, RecurrentGroup):
                g = len(groups)
                x, steps_used, _ = layer(x, counts[g], exit, self.readout, noise_seed, span, cache and cache[i], warm and warm[g], trace)
                groups.append((x, steps_used))
            else:
                x = layer(x, cache and cache[i][0].at(span))
        return self.ln_f(x), groups

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None, cache='exact', noise_seed=0, **more):
        """
        Continue idx (B, T) -> (idx (B, T + new), steps_used (B, new, groups), the loop steps that chose each new token).

        n_loop, exit, noise_seed as in forward; temperature 0 is greedy; cache: 'exact', 'ring', 'latest', or None = recompute
        the context for each token. See decode.stream for the rest, the window beyond block_size, and what raises ValueError.
        """
        return decode.generate(self, idx, max_new_tokens, temperature=temperature, top_k=top_k, n_loop=n_loop, exit=exit, cache=cache,
                               noise_seed=noise_seed, **more)


def pick_device(device='auto', dtype='auto'):
    """Knobs -> (device name, autocast context); auto is the best this machine has. ValueError for what it lacks."""
    found = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if device == 'auto':
        device = next(d for d, there in found.items() if there)
    kind = device.split(':')[0]
    try:
        there = found.get(kind) and torch.empty(0, device=device) is not None
    except RuntimeError:        # no such index
        there = False
    if not there:
        raise ValueError(f"device '{device}' is not available here: choose one of auto, {', '.join(d for d in found if found[d])}")
    if dtype == 'auto':
        dtype = 'bfloat16' if kind == 'cuda' else 'float32'
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f"unknown dtype '{dtype}': choose auto, float32 or bfloat16")
    return device, torch.autocast(kind, torch.bfloat16) if dtype == 'bfloat16' else nullcontext()


def training_flops(config, n_loop):
    """
    FLOPs a token of a training pass at these loops a group: forward times n, backward (twice as dear) times min(bptt_k, n).

    Two for each weight of a matrix product, and attention to the whole window, as MFU is usually counted.
    """
    C, looped = config.n_embd, sum(map(len, config.groups))
    block = 2 * 12 * C ** 2 + 4 * config.block_size * C
    half = 2 * C ** 2 if config.injection == 'concat' else 0        # of the adapter: on e once a pass, on x every step
    flops = 3 * ((config.n_layer - looped) * block + 2 * C * config.vocab_size)
    for layers, n in zip(config.groups, n_loop):
        flops += 3 * half + (len(layers) * block + half) * (n + 2 * min(config.bptt_k, n))
    return flops
