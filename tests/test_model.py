"""The model around its loops: blocks, init, configs, loop counts, cost."""
import math

import pytest
import torch

from exits import Exit
from loops import INJECTIONS, Injection
from model import GPT, GPTConfig, flops_per_token

CLOSE = dict(rtol=1e-4, atol=1e-4)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x, base):
    """Rotary positions by hand: x (B, H, T, D), each adjacent pair as a complex number."""
    D = x.shape[-1]
    speed = torch.tensor([base ** (-2 * i / D) for i in range(D // 2)])
    angle = torch.arange(x.shape[2])[:, None] * speed                           # (T, D / 2)
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.exp(1j * angle)
    return torch.stack((pairs.real, pairs.imag), dim=-1).flatten(-2)


def block_by_hand(x, params, config):
    """A block in plain products. params: its parameters by name."""
    def linear(name, y):
        return y @ params[f'{name}.weight'].T

    def norm(name, y):
        return rms(y, params[f'{name}.weight'])

    B, T, C = x.shape
    D = C // 2
    q, k, v = linear('attn.c_attn', norm('n1', x)).split(C, dim=-1)
    q, k, v = (part.view(B, T, 2, D).transpose(1, 2) for part in (q, k, v))
    if config.pos == 'rotary':
        q, k = turned(q, config.rope_base), turned(k, config.rope_base)
    later = torch.ones(T, T).triu(1).bool()
    scores = q @ k.transpose(-1, -2) / D ** 0.5                                 # (B, H, T, T)
    y = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    x = norm('n2', x + linear('attn.c_proj', y.transpose(1, 2).reshape(B, T, C)))
    hidden = linear('mlp.c_fc', norm('n3', x))
    return norm('n4', x + linear('mlp.c_proj', hidden * hidden.sigmoid()))


@pytest.mark.parametrize('positions', [{}, dict(pos='rotary', rope_base=100.0)])
def test_no_groups_is_a_plain_sandwich_gpt(tiny, idx, positions, monkeypatch):
    model = tiny(groups=[], **positions)
    params = dict(model.named_parameters())
    x = params['wte.weight'][idx]
    if not positions:
        x = x + params['wpe.weight'][:16]
    assert ('wpe.weight' in params) == (not positions) and 'rotary' not in ' '.join(params)
    x = x * 4.0                                                                 # sqrt(16)
    for i in range(5):
        x = block_by_hand(x, dict(model.h[i].named_parameters()), model.config)
    logits = rms(x, params['ln_f.weight']) @ params['wte.weight'].T

    targets = idx.roll(-1, 1)
    got, loss = model(idx, targets)
    torch.testing.assert_close(got, logits, **CLOSE)
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)       # it gets other formulas
    torch.testing.assert_close(model(idx)[0], logits, **CLOSE)
    log_p = logits.log_softmax(-1).gather(2, targets[..., None])                # (B, T, 1)
    torch.testing.assert_close(loss, -log_p.mean(), **CLOSE)


def test_init_by_kind_of_weight():
    torch.manual_seed(0)
    C = 192
    model = GPT(GPTConfig(block_size=256, vocab_size=500, n_layer=12, n_head=3, n_embd=C,
                          injection='concat_random'))
    depth = 8 + 12 * 4          # Geiping App. C.1: single layers + r * looped layers = 56
    cut = 0.9866                # a normal cut at 3 sigma keeps this share of its sigma
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
            continue
        std = math.sqrt(1 / (5 * C * depth) if name.endswith('c_proj.weight') else 2 / (5 * C))
        assert abs(p.std() / (std * cut) - 1) < 0.02, name
        assert 2.9 * std < p.abs().max() <= 3 * std * 1.001, name
        assert abs(p.mean()) < 0.02 * std, name
    assert model.lm_head.weight is model.wte.weight


def test_the_adapter_starts_as_a_sum():
    model = GPT(GPTConfig(n_layer=2, n_embd=8, n_head=2, vocab_size=9, groups=[[0]]))
    x, e = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(model.groups[0].adapter(torch.cat((x, e), dim=-1)), x + e)


def test_an_injection_initialises_itself(monkeypatch):
    """The model's init leaves what an injection has made alone, its linear layers too."""
    class Film(Injection):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Linear(config.n_embd, config.n_embd)
            torch.nn.init.zeros_(self.scale.weight)
            torch.nn.init.ones_(self.scale.bias)
    monkeypatch.setitem(INJECTIONS, 'film', Film)
    adapter = GPT(GPTConfig(n_embd=12, n_layer=3, groups=[[1]], injection='film')).groups[0].adapter
    assert not adapter.scale.weight.any() and (adapter.scale.bias == 1).all()


def test_h_is_the_list_of_blocks_and_groups():
    model = GPT(GPTConfig(vocab_size=9, n_embd=12, block_size=4, groups=[[7], [4], (5, 6)]))
    assert model.config.groups == [[4], [5, 6], [7]]
    layers = [len(layer.core) if layer in model.groups else 1 for layer in model.h]
    assert layers == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert [(i, layer.index) for i, layer in enumerate(model.h) if layer in model.groups] == [
        (4, 0), (5, 1), (6, 2)]


def test_loop_counts(tiny):
    model = tiny()
    assert model.loop_counts() == [3, 3]                                # mean_recurrence
    assert tiny(mean_recurrence=0.3).loop_counts() == [1, 1]
    assert model.loop_counts(has_rule=True) == [30, 30]
    assert model.loop_counts(4) == [4, 4] and model.loop_counts(10_000) == [10_000, 10_000]
    assert model.loop_counts([1, 2]) == [1, 2]
    fixed = tiny(loop_draw='fixed')
    assert fixed.loop_counts() == fixed.loop_counts(has_rule=True) == [3, 3]
    assert fixed.train().loop_counts() == [3, 3]
    # in training a draw for each group
    model.train()
    draws = {tuple(model.loop_counts()) for _ in range(50)}
    assert len(draws) > 10 and any(a != b for a, b in draws)
    with pytest.raises(ValueError):         # so each call would write another text
        model.generate(torch.zeros(1, 4, dtype=torch.long), 2)


def test_flops_of_a_token_by_hand():
    shape = dict(block_size=10, vocab_size=100, n_layer=4, n_head=1, n_embd=8, groups=[[1, 2]],
                 bptt_k=2)
    block = 2 * 12 * 64 + 4 * 10 * 8            # its matrices, and attention to 10 tokens
    once, half = 2 * block + 2 * 8 * 100, 2 * 64
    model = GPT(GPTConfig(**shape))
    assert flops_per_token(model, [5]) == once + half + 5 * (2 * block + half)
    # backward twice as much again, through the last two steps
    assert flops_per_token(model, [5], training=True) == 3 * (once + half) + (
        5 + 2 * 2) * (2 * block + half)
    added = GPT(GPTConfig(**shape, injection='add'))
    assert flops_per_token(added, [1], True) == 3 * (once + 2 * block)


@pytest.mark.parametrize('changes', [
    dict(n_embd=16, n_head=3), dict(injection='ad'), dict(loop_draw='uniform'), dict(x0='f'),
    dict(pos='left'), dict(mean_recurrence=0),
    *(dict(groups=groups) for groups in (
        [[1, 2], [2]], [[5]], [[-1]], [[1, 3]], [[]], [['1']], [1], 'every', [[2, 1]]))], ids=str)
def test_bad_config(changes):
    with pytest.raises(ValueError):
        GPTConfig(**dict(n_layer=5, groups=[[1]]) | changes)


@pytest.mark.parametrize('T, how', [
    (17, {}), (16, dict(exit=Exit(None, reads='gate_logit'))),
    *((16, dict(n_loop=n_loop)) for n_loop in (0, -1, [2], [2, 0], 1_000_001))], ids=str)
def test_bad_input(tiny, T, how):
    with pytest.raises(ValueError):
        tiny()(torch.zeros(1, T, dtype=torch.long), **how)
