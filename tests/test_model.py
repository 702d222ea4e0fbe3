"""The model without its loops: blocks, init, configs, loop counts, plain generation."""
import math

import pytest
import torch
from conftest import SYSTEMS

from decode import choose
from exits import make_exit
from model import GPT, GPTConfig

CLOSE = dict(rtol=1e-4, atol=1e-4)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.fixture(params=SYSTEMS)
def tiny(request, tiny):
    """The small model, as ours and with what other systems have."""
    return lambda **changes: tiny(**SYSTEMS[request.param] | changes)


def turned(x, base):
    """Rotary positions by hand: x (B, H, T, D), each adjacent pair as a complex number."""
    D = x.shape[-1]
    speed = torch.tensor([base ** (-2 * i / D) for i in range(D // 2)])
    angle = torch.arange(x.shape[2])[:, None] * speed                           # (T, D / 2)
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.exp(1j * angle)
    return torch.stack((pairs.real, pairs.imag), dim=-1).flatten(-2)


def block_by_hand(x, params, config):
    """A block in plain products, as config says. params: its parameters by name."""
    def linear(name, y):
        return y @ params[f'{name}.weight'].T + params[f'{name}.bias']

    def norm(name, y):
        return rms(y, params[f'{name}.weight'])

    def branch(name, x, y):
        return x + norm(name, y) if config.sandwich == 'branch' else norm(name, x + y)

    # attention
    B, T, C = x.shape
    D = C // 2
    q, k, v = linear('attn.c_attn', norm('n1', x)).split(C, dim=-1)
    if config.qk_bias:
        q, k = q + params['attn.qk_bias'][:C], k + params['attn.qk_bias'][C:]
    q, k, v = (part.view(B, T, 2, D).transpose(1, 2) for part in (q, k, v))
    if config.pos == 'rotary':
        q, k = turned(q, config.rope_base), turned(k, config.rope_base)
    later = torch.ones(T, T).triu(1).bool()
    scores = q @ k.transpose(-1, -2) / D ** 0.5                                 # (B, H, T, T)
    y = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    x = branch('n2', x, linear('attn.c_proj', y.transpose(1, 2).reshape(B, T, C)))
    # MLP, with SiLU
    hidden = linear('mlp.c_fc', norm('n3', x))
    if config.mlp == 'gated':
        gate, up = hidden.split(config.mlp_width, dim=-1)
        return branch('n4', x, linear('mlp.c_proj', gate * gate.sigmoid() * up))
    return branch('n4', x, linear('mlp.c_proj', hidden * hidden.sigmoid()))


def test_no_groups_is_a_plain_sandwich_gpt(tiny, idx):
    model = tiny(groups=[], bias=True)
    params, config, (B, T) = dict(model.named_parameters()), model.config, idx.shape
    x = params['wte.weight'][idx]
    if config.pos == 'learned':
        x = x + params['wpe.weight'][:T]
    x = x * (4.0 if config.scale_embedding else 1.0)                            # sqrt(16)
    for i in range(5):
        prefix = f'h.{i}.'
        x = block_by_hand(x, {name.removeprefix(prefix): p for name, p in params.items()
                              if name.startswith(prefix)}, config)
    x = rms(x, params['ln_f.weight']) if config.last_norm else x
    logits = x @ params['wte.weight' if config.tied else 'lm_head.weight'].T

    targets = idx.roll(-1, 1)
    got, loss = model(idx, targets)
    torch.testing.assert_close(got, logits, **CLOSE)
    log_p = logits.log_softmax(-1)
    nats = [-log_p[b, t, targets[b, t]] for b in range(B) for t in range(T)]
    torch.testing.assert_close(loss, sum(nats) / len(nats), **CLOSE)


def test_init_by_kind_of_weight():
    torch.manual_seed(0)
    C = 192
    model = GPT(GPTConfig(block_size=256, vocab_size=500, n_layer=12, n_head=3, n_embd=C, bias=True,
                          adapter_init='random'))
    depth = 8 + 12 * 4          # Geiping App. C.1: single layers + r * looped layers = 56
    cut = 0.9866                # a normal cut at 3 sigma keeps this share of its sigma
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith('bias') else 1)).all(), name
            continue
        std = math.sqrt(2 / (5 * C))
        if name.endswith('c_proj.weight'):
            std = math.sqrt(1 / (5 * C * depth))
        assert abs(p.std() / (std * cut) - 1) < 0.02, name
        assert p.abs().max() <= 3 * std * 1.001, name
        assert abs(p.mean()) < 0.02 * std, name
    assert model.lm_head.weight is model.wte.weight


def test_the_adapter_starts_as_a_sum():
    model = GPT(GPTConfig(n_layer=2, n_embd=8, n_head=2, vocab_size=9, groups=[[0]]))
    x, e = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(model.groups[0].adapter(torch.cat((x, e), dim=-1)), x + e)


def test_h_is_the_list_of_blocks_and_groups():
    model = GPT(GPTConfig(vocab_size=9, n_embd=12, block_size=4))
    layers = [len(layer.core) if layer in model.groups else 1 for layer in model.h]
    assert layers == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert [i for i, layer in enumerate(model.h) if layer in model.groups] == [4, 5, 6]


def test_loop_counts(tiny):
    model = tiny()
    assert model.loop_counts() == [3, 3]                                # mean_recurrence
    assert model.loop_counts(exit=make_exit('norm', 1e-2)) == [30, 30]
    assert model.loop_counts(4) == [4, 4]
    assert model.loop_counts([1, 2]) == [1, 2]
    # in training a draw for each group
    model.train()
    draws = [tuple(model.loop_counts()) for _ in range(50)]
    assert len(set(draws)) > 10
    assert any(a != b for a, b in draws)


def test_generate_is_the_argmax_of_the_whole_context(tiny, idx):
    model, T, new = tiny(), 5, 30
    out, steps = model.generate(idx[:, :T], new, temperature=0)
    assert out.shape == (3, T + new) and steps.shape == (3, new, 2)
    assert (steps == 3).all()
    # a block of 16 tokens is seen whole; when it is full the window moves on by half a block
    windows = [(0, range(5, 17)), (8, range(17, 25)), (16, range(25, 33)), (24, range(33, 35))]
    for start, lengths in windows:
        for t in lengths:
            logits = model(out[:, start:t])[0]
            assert torch.equal(out[:, t], logits[:, -1].argmax(-1)), t


def test_a_long_prompt_is_its_last_block(tiny):
    model, prompt = tiny(), torch.randint(50, (1, 40))
    out, _ = model.generate(prompt, 6, temperature=0)
    of_last_block, _ = model.generate(prompt[:, -16:], 6, temperature=0)
    assert torch.equal(out[:, :40], prompt)
    assert torch.equal(out[:, 40:], of_last_block[:, 16:])


def test_choose():
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4000, 1)
    assert (choose(logits, 0, None) == 1).all()
    assert set(choose(logits, 1.0, 2).unique().tolist()) == {1, 3}
    share = (choose(logits, 0.5, None) == 1).float().mean()
    assert abs(share - (logits[0] / 0.5).softmax(0)[1]) < 0.03


@pytest.mark.parametrize('changes, words', [
    (dict(n_embd=16, n_head=3), 'not divisible'),
    (dict(n_layer=0), 'positive'),
    (dict(injection='mul'), 'injection'),
    (dict(adapter_init='one'), 'adapter_init')])
def test_bad_config(tiny, changes, words):
    with pytest.raises(ValueError, match=words):
        tiny(**changes)


@pytest.mark.parametrize('groups, words', [
    ([[1, 2], [2]], 'overlap'),
    ([[5]], 'out of range'),
    ([[-1]], 'out of range'),
    ([[1, 3]], 'follow'),
    ([[2, 1]], 'follow'),
    ([[]], 'at least one'),
    ([1], 'list of layer numbers'),
    ([['1']], 'list of layer numbers')])
def test_bad_groups(groups, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(n_layer=5, groups=groups)


@pytest.mark.parametrize('n_loop', [0, -1, 2.5, [2], [2, 0], 'many'])
def test_bad_n_loop(tiny, idx, n_loop):
    with pytest.raises(ValueError, match='n_loop must be an int >= 1'):
        tiny()(idx, n_loop=n_loop)


def test_too_many_tokens(tiny):
    with pytest.raises(ValueError, match='17 tokens does not fit block_size'):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


def test_rotary_positions_have_no_weights(tiny, idx):
    model = tiny(pos='rotary')
    assert not any('wpe' in name or 'rotary' in name for name in model.state_dict())
    # the order of the tokens counts all the same
    swapped = idx[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(model(idx)[0][:, -1], model(swapped)[0][:, -1], atol=1e-3)
    with pytest.raises(ValueError, match='n_embd / n_head must be even, not 3'):
        GPTConfig(n_embd=6, n_head=2, pos='rotary')
