import math
import os
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from checkpoint import load_checkpoint
from decode import choose
from model import GPT, GPTConfig, pick_device, training_flops


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_no_groups_is_a_plain_sandwich_gpt(tiny, idx):
    model = tiny(groups=[], bias=True)
    p, (B, T), C, H = dict(model.named_parameters()), idx.shape, 16, 2
    x = (p['wte.weight'][idx] + p['wpe.weight'][:T]) * 4.0          # sqrt(16)
    for i in range(5):
        w = lambda name: p[f'h.{i}.{name}.weight']
        lin = lambda name, y: y @ w(name).T + p[f'h.{i}.{name}.bias']
        q, k, v = lin('attn.c_attn', rms(x, w('n1'))).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-1, -2) / (C // H) ** 0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        x = rms(x + lin('attn.c_proj', (att @ v).transpose(1, 2).reshape(B, T, C)), w('n2'))
        hidden = lin('mlp.c_fc', rms(x, w('n3')))
        x = rms(x + lin('mlp.c_proj', hidden * hidden.sigmoid()), w('n4'))
    logits = rms(x, p['ln_f.weight']) @ p['wte.weight'].T
    got, loss = model(idx, idx.roll(-1, 1))
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    log_p = logits.log_softmax(-1)
    naive = -sum(log_p[b, t, idx[b, (t + 1) % T]] for b in range(B) for t in range(T)) / (B * T)
    torch.testing.assert_close(loss, naive, rtol=1e-4, atol=1e-4)


def test_init_by_kind_of_weight():
    torch.manual_seed(0)
    C = 192
    model = GPT(GPTConfig(block_size=256, vocab_size=500, n_layer=12, n_head=3, n_embd=C, bias=True, adapter_init='random'))
    depth = 8 + 12 * 4      # Geiping App. C.1: single layers + r * looped layers = 56
    cut = 0.9866            # a normal cut at 3 sigma keeps this share of its sigma
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == (0 if name.endswith('bias') else 1)).all(), name
            continue
        std = math.sqrt(1 / (5 * C * depth)) if name.endswith('c_proj.weight') else math.sqrt(2 / (5 * C))
        assert abs(p.std() / (std * cut) - 1) < 0.02 and p.abs().max() <= 3 * std * 1.001 and abs(p.mean()) < 0.02 * std, name
    assert model.lm_head.weight is model.wte.weight
    group = GPT(GPTConfig(n_layer=2, n_embd=8, n_head=2, vocab_size=9, groups=[[0]])).groups[0]
    x, e = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(group.adapter(torch.cat((x, e), dim=-1)), x + e)     # adapter_init = 'sum'


def test_h_is_the_list_of_the_design():
    model = GPT(GPTConfig(vocab_size=9, n_embd=12, block_size=4))
    assert [len(layer.core) if hasattr(layer, 'core') else 1 for layer in model.h] == [1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert [i for i, layer in enumerate(model.h) if layer in model.groups] == [4, 5, 6]


def test_loop_counts(tiny):
    from exits import make_exit
    model = tiny()
    assert model.loop_counts() == [3, 3] and model.loop_counts(exit=make_exit('norm', 1e-2)) == [30, 30]
    assert model.loop_counts(4) == [4, 4] and model.loop_counts([1, 2]) == [1, 2]
    model.train()
    draws = [tuple(model.loop_counts()) for _ in range(50)]
    assert len(set(draws)) > 10 and any(a != b for a, b in draws)       # a draw for each group


@pytest.mark.parametrize('changes', [dict(), dict(injection='add'), dict(groups=[]), dict(groups=[[1, 2, 3]], bptt_k=2)])
def test_training_flops_are_those_torch_counts(tiny, changes):
    """But for attention's backward, which recomputes (not counted), and the first looped step with gradient, whose input needs none."""
    model, n_loop = tiny(n_embd=32, vocab_size=64, **changes).train(), [5, 4][:len(changes.get('groups', [1, 2]))]
    idx = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(idx, idx, n_loop=n_loop)[1].backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()['Global'].items() if 'attention' not in str(op)) / idx.numel()
    model.config.block_size = 0         # of the formula: its attention is gone
    assert math.isclose(training_flops(model.config, n_loop), counted, rel_tol=0.015)


def test_generate_is_the_argmax_of_the_whole_context(tiny, idx):
    model, n, T = tiny(), 30, 5
    out, steps = model.generate(idx[:, :T], n, temperature=0)
    assert out.shape == (3, T + n) and steps.shape == (3, n, 2) and (steps == 3).all()
    for t in range(T, T + n):       # beyond the block of 16 the window starts at 8, then 16, ...: at least half a block is seen
        start = 0 if t <= 16 else 8 if t <= 24 else 16 if t <= 32 else 24
        assert torch.equal(out[:, t], model(out[:, start:t])[0][:, -1].argmax(-1))


def test_a_long_prompt_is_its_last_block(tiny):
    model, long = tiny(), torch.randint(50, (1, 40))
    out, _ = model.generate(long, 6, temperature=0)
    assert torch.equal(out[:, :40], long) and torch.equal(out[:, 40:], model.generate(long[:, -16:], 6, temperature=0)[0][:, 16:])


def test_choose():
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4000, 1)
    assert (choose(logits, 0, None) == 1).all()
    assert set(choose(logits, 1.0, 2).unique().tolist()) == {1, 3}
    share = (choose(logits, 0.5, None) == 1).float().mean()
    assert abs(share - (logits[0] / 0.5).softmax(0)[1]) < 0.03


@pytest.mark.parametrize('how, word', [(dict(max_new_tokens=0), 'max_new_tokens'), (dict(temperature=-1), 'temperature'), (dict(top_k=0), 'top_k')])
def test_generate_bad_input(tiny, idx, how, word):
    with pytest.raises(ValueError, match=word):
        tiny().generate(**dict(idx=idx, max_new_tokens=1) | how)
    with pytest.raises(ValueError, match='empty'):
        tiny().generate(idx[:, :0], 1)


def test_config_errors(tiny):
    for changes, word in [(dict(n_embd=16, n_head=3), 'not divisible'), (dict(n_layer=0), 'positive'), (dict(injection='mul'), 'injection'),
                          (dict(adapter_init='one'), 'adapter_init')]:
        with pytest.raises(ValueError, match=word):
            tiny(**changes)
    with pytest.raises(ValueError, match='does not fit block_size'):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


def test_pick_device():
    assert pick_device('cpu', 'float32')[0] == 'cpu' and pick_device()[0] in ('cpu', 'cuda', 'mps')
    for args, word in [(('tpu',), 'not available'), (('cuda:99',), 'not available'), (('cpu', 'float16'), 'unknown dtype')] + [(('cuda',), 'not available')] * (not torch.cuda.is_available()):
        with pytest.raises(ValueError, match=word):
            pick_device(*args)


class Code:
    def __reduce__(self):
        return os.mkdir, ('code-was-run',)


def test_load_checkpoint(tiny, idx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, good = tiny(), tmp_path / 'ckpt.pt'
    torch.save(dict(model=model.state_dict(), model_args=vars(model.config), config={}, iter_num=3, tokenizer='bytes'), good)
    loaded, _ = load_checkpoint(str(good))
    assert not loaded.training and torch.equal(loaded(idx)[0], model(idx)[0])
    bad = dict(cut=good.read_bytes()[:5000], text=b'no checkpoint', empty=b'', code=pickle.dumps(Code()))
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    torch.save(dict(model={}, model_args=vars(model.config)), 'weights')
    torch.save([1, 2], 'list')
    torch.save(dict(model=model.state_dict(), model_args=vars(model.config)), 'bare')
    torch.save(dict(model=Code()), 'zipped-code')
    for name in (*bad, 'weights', 'list', 'bare', 'zipped-code'):
        with pytest.raises(ValueError, match='not a whole checkpoint'):
            load_checkpoint(name)
    assert not os.path.exists('code-was-run')
    with pytest.raises(ValueError, match='no checkpoint at .*python train.py'):
        load_checkpoint('nowhere/ckpt.pt')
