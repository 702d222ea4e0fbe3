"""
A recurrent-depth GPT: the model is a list of layers, some of which loop.

    idx -> (wte + wpe) * sqrt(C) -> each of h: Block | RecurrentGroup -> ln_f -> tied head -> logits

Paper: sec. 2 and App. B (12 layers, groups 4 / 5-6 / 7, learned positions, SiLU, sandwich norm).
Geiping: 3.1 (GPT.hidden), 3.2 (the sandwich), App. C.1 (init, scale of the embedding).

    B, T    rows and tokens of a pass
    C, V    n_embd, vocab_size
    H, D    n_head, C / H
    h       the layers, each a Block or a RecurrentGroup of Blocks
"""
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from cache import Span
from exits import choose
from loops import INJECTIONS, Plan, RecurrentGroup, RMSNorm, as_noise, sample_n_loop

MOST_LOOPS = 1_000_000
LONG = 64       # in rows of more windows than this, the keys of each window are gathered: faster


@dataclass
class GPTConfig:
    """The shape of a model, by default the paper's (App. B) but for injection."""
    block_size: int = 512
    vocab_size: int = 50304         # GPT-2's 50257, padded to a multiple of 64 for speed
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    # the layers that loop, 'all' = all as one group; paper silent: counted from 0
    groups: list | Literal['all'] = field(default_factory=lambda: [[4], [5, 6], [7]])
    mean_recurrence: float = 12.0   # r: training loops r + 1 times on average
    loop_draw: str = 'lognormal'    # loops in training: Geiping's draw, or 'fixed' at r
    bptt_k: int = 8                 # gradients through the last loop steps (Geiping 3.3)
    injection: str = 'concat'       # how e enters, see loops.INJECTIONS; concat_random: the paper's
    x0: str = 'noise'               # a group's first state: 'noise' (Geiping), 'zero' or 'e'
    norm_inside: bool = True        # the core's norm in every step; False: after the last, see step
    damping: float = 0.0            # share of the old state that a step keeps, see RecurrentGroup
    pos: str = 'learned'            # positions: 'learned' (the paper), 'rotary', 'none'
    rope_base: float = 10000.0      # rotary: the slowest pair turns by 1 / base (Geiping: 50,000)
    window: int | None = None       # attention reads the last `window` tokens; None = all of them
    norm_eps: float = 1e-6          # of all norms

    def __post_init__(self):
        """ValueError where the values do not fit together."""
        if self.injection not in INJECTIONS:
            raise ValueError(f"injection must be one of {', '.join(INJECTIONS)}, not "
                             f"'{self.injection}': one of your own is known once its file is "
                             'imported, or named behind the script')
        known = dict(x0=('noise', 'zero', 'e'), loop_draw=('lognormal', 'fixed'),
                     pos=('learned', 'rotary', 'none'))
        for name, choices in known.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        for name in 'block_size', 'n_layer', 'n_head', 'n_embd', 'bptt_k', 'window':
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name} must be at least 1, not {value}')
        if self.n_embd % self.n_head:
            raise ValueError(f'n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}')
        if not 0 < self.mean_recurrence < math.inf:
            raise ValueError('mean_recurrence must be positive and finite, not '
                             f'{self.mean_recurrence}')
        self.groups = in_order(self.groups, self.n_layer)


@dataclass
class GatedConfig(GPTConfig):
    """The shape of a model whose MLP is a GatedMLP."""
    mlp_width: int | None = None    # None = 8 * n_embd // 3: as many weights as the plain MLP has

    def __post_init__(self):
        super().__post_init__()
        self.mlp_width = self.mlp_width or 8 * self.n_embd // 3


def in_order(groups, n_layer):
    """
    The groups in the order of their layers, lists of ints. ValueError unless they are disjoint runs
    of layers 0 ... n_layer - 1.
    """
    if groups == 'all':
        return [list(range(n_layer))]
    try:
        ordered = sorted(list(group) for group in groups)
        runs = [list(range(group[0], group[-1] + 1)) for group in ordered]
        layers = sum(runs, [])
        if ordered == runs and layers == sorted(set(layers) & set(range(n_layer))):
            return runs
    except (IndexError, TypeError):         # a group is empty; a number stands for a group
        pass
    raise ValueError('groups must be a list of lists such as [[1], [2, 3]]: layers in a row, from '
                     f'0 to {n_layer - 1}, each in one group at most, not {groups}')


class Rotary(nn.Module):
    """Rotary positions: adjacent pairs of numbers are turned by position times speed."""

    def __init__(self, config):
        super().__init__()
        D = config.n_embd // config.n_head
        # on the CPU, even when load_checkpoint builds the model on the meta device
        place, pair = (torch.arange(n, device='cpu') for n in (config.block_size, D // 2))
        angle = place[:, None] * config.rope_base ** -(2 * pair / D)        # (block_size, D / 2)
        self.register_buffer('cos', angle.cos(), persistent=False)
        self.register_buffer('sin', angle.sin(), persistent=False)

    def forward(self, x, pos):
        """x (B, T, H, D); computes in float32. pos (T,); None = 0 ... T - 1."""
        pos = slice(x.shape[1]) if pos is None else pos
        cos, sin = (table[pos][..., None, :] for table in (self.cos, self.sin))
        pairs = x.float().unflatten(-1, (-1, 2))                    # (B, T, H, D / 2, 2)
        if torch.compiler.is_compiling():       # the compiler fuses these; it lacks complex numbers
            a, b = pairs.unbind(-1)
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        else:                                   # the same, in a quarter of the time on a CPU
            turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
        return turned.flatten(-2).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """
    Each token reads all tokens up to itself, or the last `window` of them.

    A subclass can override each of its three steps alone: queries_keys_values, bring_in and attend.
    To let tokens read other places than a window, override `near`, `readers` (the same the
    other way round, which nothing checks) and `reads_few`; if these places have scores, `bias`.
    RoomAttention in zoo/maze.py does all of this.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.n_head      # fewer, if heads share keys and values
        self.window = config.window
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.rotary = Rotary(config) if config.pos == 'rotary' else None

    def forward(self, x, hook=None, pos=None):
        """
        x (B, T, C) -> (B, T, C). hook: of the cache, which brings in earlier tokens, see
        KeysValues.update. pos (T,): positions, if they are not 0 ... T - 1.
        """
        q, kv = self.queries_keys_values(x, pos)
        kv, mask = self.bring_in(kv, hook, pos)
        return self.c_proj(self.attend(q, kv, mask).flatten(2))

    def qkv(self, x):
        """x (B, T, C) -> queries, keys and values in one (B, T, any), before rotary positions."""
        return self.c_attn(x)

    def queries_keys_values(self, x, pos=None):
        """x (B, T, C) -> queries (B, T, H, D), and keys and values (B, T, 2, n_kv_head, D)."""
        qkv = self.qkv(x).unflatten(-1, (self.n_head + 2 * self.n_kv_head, -1))
        if self.rotary is not None:
            qk, v = qkv.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=2)
            qkv = torch.cat((self.rotary(qk, pos), v), dim=2)
        q, kv = qkv.split((self.n_head, 2 * self.n_kv_head), dim=2)
        return q, kv.unflatten(2, (2, self.n_kv_head))

    def bring_in(self, kv, hook=None, pos=None):
        """
        Keys and values of the new tokens -> those that they read, and a mask, in two layouts:

            kv (B, end, 2, H, D)        of all tokens; mask (T, end), None = causal
            kv (B, T, W, 2, H, D)       gathered for each token; mask (T, W): which are there

        Gathered are windows in long rows or with a bias, and what the hook update_some returns.
        """
        kv, mask = (kv, None) if hook is None else hook(kv)
        end = kv.shape[1]
        if self.reads_few(end) and kv.dim() == 5:       # not gathered yet
            pos = torch.arange(end, device=kv.device) if pos is None else pos
            kv, mask = self.within_window(kv, pos)
        return kv, mask

    def attend(self, q, kv, mask):
        """Queries (B, T, H, D) over kv and mask as bring_in returns them -> (B, T, H, D)."""
        if kv.shape[-2] < self.n_head:      # neighbouring heads share keys and values
            kv = kv.repeat_interleave(self.n_head // kv.shape[-2], dim=-2)
        is_gathered = kv.dim() == 6
        if is_gathered:
            return attend_near(q, kv, mask, self.bias())
        q, (k, v) = q.transpose(1, 2), kv.transpose(1, 3).unbind(2)             # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                           is_causal=mask is None and q.shape[2] > 1)
        return y.transpose(1, 2)

    # who reads whom

    def bias(self):
        """What is added to the scores of the places of `near`, (W, H), or 0."""
        return 0.0

    def near(self, pos):
        """The positions (T, any) that tokens at pos (T,) read, each once; below 0 = none."""
        return pos[:, None] - torch.arange(self.window - 1, -1, -1, device=pos.device)

    def readers(self, moved):
        """moved (B, T), a NumPy mask -> who reads a token that moved (B, T)."""
        if self.window is None or self.window >= moved.shape[1]:
            return np.logical_or.accumulate(moved, axis=1)
        reads = moved.copy()
        for distance in range(1, self.window):
            reads[:, distance:] |= moved[:, :-distance]
        return reads

    def reads_few(self, end):
        """Does a token in a row of `end` tokens read few of them, those of `near`?"""
        return self.window is not None and end > self.window

    def within_window(self, kv, pos):
        """What tokens at pos (T,) read of kv (B, end, 2, H, D), and a mask, see bring_in."""
        end = kv.shape[1]
        near = self.near(pos)                                                   # (T, window)
        if end > LONG * near.shape[1] or torch.is_tensor(self.bias()):      # scores need this
            return kv[:, near.clamp(min=0)], near >= 0
        # a column more, for the places that are not there
        mask = torch.zeros(len(pos), end + 1, dtype=torch.bool, device=kv.device)
        mask.scatter_(1, near.where(near >= 0, end), True)
        return kv, mask[:, :end]


def attend_near(q, kv, there, bias=0.0):
    """
    Attention of queries q (B, T, H, D), each over keys and values of its own, kv (B, T, W, 2, H,
    D), as far as they are there (T, W) -> (B, T, H, D). bias (W, H) is added to the scores.
    """
    k, v = kv.float().unbind(3)                                                 # (B, T, W, H, D)
    scores = (q.float()[:, :, None] * k).sum(-1) / math.sqrt(q.shape[-1])       # (B, T, W, H)
    weights = (scores + bias).masked_fill(~there[..., None], -math.inf).softmax(dim=2)
    return (weights[..., None] * v).sum(2).to(q.dtype)


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(F.silu(self.c_fc(x)))


class GatedMLP(nn.Module):
    """(B, T, C) -> (B, T, C) through a width of W = mlp_width: SiLU(first half) * second half."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 2 * config.mlp_width, bias=False)
        self.c_proj = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)                                # (B, T, W) each
        return self.c_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Geiping's sandwich (3.2), of (B, T, C): a norm before each branch, and one after the sum."""
    attention, feed_forward = CausalSelfAttention, MLP      # the classes of the branches

    def __init__(self, config):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = (RMSNorm(config.n_embd, config.norm_eps)
                                              for _ in range(4))
        self.attn = self.attention(config)
        self.mlp = self.feed_forward(config)

    def forward(self, x, hook=None, pos=None):
        x = self.n2(x + self.attn(self.n1(x), hook, pos))
        return self.n4(x + self.mlp(self.n3(x)))


class GPT(nn.Module):
    """
    The paper's model. To define another, write a subclass (see zoo/): Config is the dataclass of
    its shape, block the class of its layers, group_norm that of the norm of a group, `build` makes
    its modules, `embed` and `readout` are its two ends, and `loss` is what training lowers. The
    init knows the output projection of a branch by its name, c_proj.
    """
    Config, block, group_norm = GPTConfig, Block, RMSNorm
    scaled = True           # is the embedding scaled by sqrt(C)?
    exit_rows = ()          # of its exits.json, set by checkpoint.open_run; see exits.choose

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.build(config)
        self.tie()
        self.init_weights()

    def build(self, config):
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        learned = config.pos == 'learned'
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
        # each group takes the place of its layers, from the back so that layer numbers stay right
        layers = [self.block(config) for _ in range(config.n_layer)]
        for g, group in reversed(list(enumerate(config.groups))):
            start, end = group[0], group[-1] + 1
            layers[start:end] = [RecurrentGroup(layers[start:end], config, g, self.group_norm)]
        self.h = nn.ModuleList(layers)
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def tie(self):
        """Make head and embedding one weight; called again after weights are loaded."""
        self.lm_head.weight = self.wte.weight

    @property
    def groups(self):
        return [layer for layer in self.h if isinstance(layer, RecurrentGroup)]

    @torch.no_grad()
    def init_weights(self):
        """Takase's init, of linear layers and embeddings alone (Geiping App. C.1)."""
        config = self.config
        adapters = {part for group in self.groups for part in group.adapter.modules()}
        for name, module in self.named_modules():
            if name.endswith('.adapter'):               # an injection initialises itself
                module.init_weights()
            if module in adapters or not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            if getattr(module, 'bias', None) is not None:
                nn.init.zeros_(module.bias)
            if module is self.lm_head and module.weight is self.wte.weight:     # done already
                continue
            variance = 2 / (5 * config.n_embd)
            if name.endswith('c_proj'):
                variance = 1 / (5 * config.n_embd * effective_depth(config))
            std = math.sqrt(variance)
            nn.init.trunc_normal_(module.weight, 0.0, std, -3 * std, 3 * std)

    def embed(self, idx, pos):
        """Tokens (B, T) at positions (T,) -> the stream (B, T, C)."""
        x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe(pos)
        # paper silent: Geiping scales the tokens (App. C.1); here positions, too
        return x * math.sqrt(self.config.n_embd) if self.scaled else x

    def readout(self, x):
        """State (..., C) -> logits (..., V), which exit rules read by default."""
        return self.lm_head(self.ln_f(x))

    def through_coda(self, x, plan=None):
        """The layers after the last group, then readout."""
        # the keys that these layers write here are overwritten when the pass itself reaches them
        last = max(i for i, layer in enumerate(self.h) if isinstance(layer, RecurrentGroup))
        x = self.h[last].output(x)
        for layer in self.h[last + 1:]:
            x = layer(x, plan.hook(layer), plan.span.pos) if plan else layer(x)
        return self.readout(x)

    def logits_at(self, plan):
        """
        -> the logits_at of exits.loop, which calls the method that plan.rule.reads names. Any but
        readout gets whole rows (B, T, C), in which the other tokens have the states that they keep.
        ValueError if this model has no such method.
        """
        rule = plan.rule
        method = getattr(self, rule.reads, None)
        if method is None:
            raise ValueError(f"the exit rule '{rule.name}' needs a model with the method "
                             f'{rule.reads}, see zoo/')
        if rule.reads == 'readout':
            return lambda states, at, x: method(states)

        def of_whole_rows(states, at, x):
            x = x.clone()
            x[at] = states
            logits = method(x.view(-1, len(plan.span.pos), x.shape[-1]), plan)      # (B, T, any)
            return logits.flatten(0, 1)[at]
        return of_whole_rows

    def draw_loops(self, generator=None):
        """How often each group loops in a training pass: a list, one count per group."""
        config = self.config
        if config.loop_draw == 'fixed':
            return [max(1, round(config.mean_recurrence)) for _ in config.groups]
        return [sample_n_loop(config.mean_recurrence, generator) for _ in config.groups]

    def loop_counts(self, n_loop=None, has_rule=False):
        """n_loop, as forward takes it -> a list, one count per group. has_rule: may tokens exit?"""
        config = self.config
        if n_loop is None and self.training:
            return self.draw_loops()
        if n_loop is None:
            # paper silent on an exit rule's budget: the 30 loops of its Fig. 5, unless the model
            # knows no other number than that of its training
            may_differ = has_rule and config.loop_draw != 'fixed'
            n_loop = 30 if may_differ else max(1, round(config.mean_recurrence))
        n_groups = len(config.groups)
        counts = list(n_loop) if isinstance(n_loop, (list, tuple)) else [n_loop] * n_groups
        if len(counts) != n_groups or not all(n in range(1, MOST_LOOPS + 1) for n in counts):
            raise ValueError(f'n_loop must be an int from 1 to {MOST_LOOPS:,}, or one for each of '
                             f'the {n_groups} groups, not {n_loop!r}')
        return list(map(int, counts))

    def forward(self, idx, targets=None, n_loop=None, exit=None, noise_seed=0, trace=None,
                keep_states=False):
        """
        idx (B, T) tokens -> logits (B, T, V) and the loss: mean cross-entropy against targets
        (B, T) in nats per token, None without targets.

        n_loop: loop budget, an int for all groups or one for each. None = a draw while training,
        otherwise see loop_counts. exit: the name of a rule, whose exits are final, or an Exit, such
        as make_exit('accel', tau=1, wake=True) of exits.py; n_loop is then its k_max, and the loss
        has no backward pass. noise_seed: of x^(0) in evaluation; or a noise, see loops.as_noise.
        trace: a list, to which each group appends its results, see
        RecurrentGroup.forward, without gradients. keep_states: record all states with a rule, too;
        without one they always are. ValueError if T > block_size or n_loop does not fit the groups.
        """
        rule, _, _ = choose(exit, policy='exact', rows=self.exit_rows)      # tau: of exits.json
        plan = Plan(self.loop_counts(n_loop, rule is not None), rule,
                    as_noise(noise_seed, self.training), Span(0, idx.shape[1], idx.device),
                    keep_states=trace is not None and (rule is None or keep_states))
        x, results = self.hidden(idx, plan)
        if trace is not None:
            for result in results:
                trace.append({key: value.detach() if torch.is_tensor(value) else value
                              for key, value in result.items()})
        logits = self.lm_head(x)                                                # (B, T, V)
        loss = None if targets is None else self.loss(logits, targets, results)
        return logits, loss

    def loss(self, logits, targets, results):
        """See forward. results: of the groups in the pass that gave the logits (B, T, V)."""
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def hidden(self, idx, plan):
        """idx (B, T) -> what the head reads (B, T, C), and the results of each group, a dict."""
        if plan.span.end > self.config.block_size:
            raise ValueError(f'a sequence of {plan.span.end} tokens does not fit block_size = '
                             f'{self.config.block_size}')
        logits_at = self.logits_at(plan) if plan.rule else None     # only kl and the like call it
        x = self.embed(idx, plan.span.pos)
        results = []
        for layer in self.h:
            if isinstance(layer, RecurrentGroup):
                x, result = layer(x, plan, logits_at)
                results.append(result)
            else:
                x = layer(x, plan.hook(layer), plan.span.pos)
        return self.ln_f(x), results

    # decoding and checkpoints are built on top of the model, so these import them when called
    @classmethod
    def load(cls, folder, length=None, device='cpu', damping=None):
        """
        The model of FOLDER/ckpt.pt in evaluation: of the run's own class, or of the subclass whose
        load this is. length, damping: in place of the run's block_size (for rotary positions) and
        damping. ValueError if there is no such checkpoint.
        """
        from common.checkpoint import open_run
        return open_run(folder, device, length=length, damping=damping,
                        cls=None if cls is GPT else cls)[0]

    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, n_loop=None, exit=None,
               cache='auto', noise_seed=0, decoder=None, seed=0):
        """
        A generator of the new tokens after prompts idx (B, T), some at a time: tokens (B, t), and
        loop steps (B, t, groups), see decode.stream. n_loop, exit, noise_seed: see forward. cache:
        see exits.choose. temperature, top_k, seed: see decode.stream. decoder: a decode.Decoder, or
        its name with arguments, such as 'wave:width=8'; None = one_by_one.
        """
        import decode
        if self.training:           # each pass would draw other loop counts and other noise
            raise ValueError('text is written in evaluation only: call model.eval() first')
        decoder = decode.decoder_of(decoder) or decode.OneByOne()
        rule, cache, _ = choose(exit, policy=cache, decoder=decoder, rows=self.exit_rows)
        plan = Plan(self.loop_counts(n_loop, rule is not None), rule, as_noise(noise_seed))
        return decode.stream(self, idx, max_new_tokens, plan, decoder, cache, seed=seed,
                             temperature=temperature, top_k=top_k)

    def generate(self, idx, max_new_tokens, *settings, **more):
        """
        Continue idx (B, T) -> (idx (B, T + new), steps_used (B, new, groups)): the new tokens, and
        the loop steps kept in the pass that has predicted each. The other arguments: see stream.
        """
        tokens, steps_used = zip(*self.stream(idx, max_new_tokens, *settings, **more))
        return torch.cat((idx, *tokens), dim=1), torch.cat(steps_used, dim=1)


def compile_layers(model):
    """Compile each block and loop step; loop counts never recompile."""
    # three graphs for each core length: no gradients, the first step with them, later ones
    torch._dynamo.config.recompile_limit = 64
    for layer in model.h:
        name = 'step' if isinstance(layer, RecurrentGroup) else 'forward'
        setattr(layer, name, torch.compile(getattr(layer, name)))


def effective_depth(config):
    """l = single layers + r * looped layers: 8 + 12 * 4 = 56 for the paper's model."""
    looped = sum(map(len, config.groups))
    return config.n_layer - looped + config.mean_recurrence * looped


def flops_per_token(model, n_loop, training=False):
    """
    FLOPs per token of a forward pass with n_loop[g] loops of group g: two for each weight of a
    matrix, and attention over all the tokens that a token may read. In training the backward pass
    is added: twice as many, through the last min(bptt_k, n_loop[g]) steps only.
    """
    def weights(module):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)
    config = model.config
    once = 3 if training else 1
    attention = 2 * min(config.block_size, config.window or config.block_size) * config.n_embd
    flops = once * weights(model.lm_head)
    for layer in model.h:
        if isinstance(layer, RecurrentGroup):
            n = n_loop[layer.index]
            of_e = layer.adapter.weights_of_e       # once per pass
            steps = n + 2 * min(config.bptt_k, n) if training else n
            flops += once * of_e
            flops += steps * (weights(layer) - of_e + len(layer.core) * attention)
        else:
            flops += once * (weights(layer) + attention)
    return 2 * flops
