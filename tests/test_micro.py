"""micro.py: the same model, exits, sleep and training as the project's own files; a run."""
import sys

import pytest
import torch
from torch.nn import functional as F

import micro
from exits import make_exit
from model import GPT, GPTConfig

CLOSE = dict(rtol=1e-5, atol=1e-5)
NAMES = dict(qkv='attn.c_attn', attn_out='attn.c_proj', mlp_in='mlp.c_fc', mlp_out='mlp.c_proj')


def real_name(name):
    """A weight's name in micro.GPT -> its name in model.GPT."""
    return '.'.join(NAMES.get(part, part) for part in name.split('.'))


class Noise:
    """x^(0) of each group (4, T, C), the same for both models."""

    def __init__(self):
        self.normal = torch.randn(3, 4, 16, 64, generator=torch.Generator().manual_seed(2))

    def draw(self, group, like, pos):
        return 0.4 ** 0.5 * self.normal[group.index]


@pytest.fixture
def pair(monkeypatch):
    """micro.GPT, model.GPT with the same weights and noise, and tokens with targets (4, T)."""
    monkeypatch.setattr(micro, 'T', 16)
    torch.manual_seed(1)
    small = micro.GPT()
    for p in small.parameters():        # so that tokens exit at different steps
        torch.nn.init.normal_(p, float(p.dim() == 1), 0.08)
    real = GPT(GPTConfig(16, micro.vocab, micro.n_layer, micro.H, micro.C, groups=micro.groups,
                         mean_recurrence=micro.r, bptt_k=micro.bptt))
    weights = {real_name(name): p.detach() for name, p in small.named_parameters()}
    real.load_state_dict(weights | {'lm_head.weight': small.wte.weight})
    noise, x = Noise(), torch.randint(micro.vocab, (4, 17))
    draws = iter(noise.normal)
    monkeypatch.setattr(torch, 'randn_like', lambda e: next(draws))
    return small, real, noise, x[:, :-1], x[:, 1:]


@torch.no_grad()
def test_fixed_loops(pair):
    small, real, noise, x, _ = pair
    want, _ = real.eval()(x, n_loop=[3, 1, 4], noise_seed=noise)
    torch.testing.assert_close(small.eval()(x, [3, 1, 4])[0], want, **CLOSE)


@pytest.mark.parametrize('tau', [0, 0.3, 1, 3, float('inf')])
@torch.no_grad()
def test_algorithm_1(pair, tau):
    small, real, noise, x, _ = pair
    rule, trace = make_exit('accel', tau), []
    want, _ = real.eval()(x, n_loop=20, exit=rule, noise_seed=noise, trace=trace)
    got, found = small.eval()(x, [20] * 3, tau)
    for ours, theirs in zip(found, trace, strict=True):
        assert torch.equal(ours, theirs['steps_used'])
        assert tau in (0, float('inf')) or len(ours.unique()) > 2
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize('wake', [True, False])
@pytest.mark.parametrize('tau', [0.1, 1])
@torch.no_grad()
def test_sleep_and_waking(wake, tau):
    """Tokens that read the two before them are awake as often, and end in the same states."""
    torch.manual_seed(1)
    real = GPT(GPTConfig(64, 9, 1, 2, 16, groups=[[0]], pos='rotary', window=3)).eval()
    for p in real.parameters():
        torch.nn.init.normal_(p, float(p.dim() == 1), 0.3)
    trace, awake = [], []
    want, _ = real(torch.randint(9, (2, 64)), n_loop=40, trace=trace,
                   exit=make_exit('accel', tau, wake=wake))
    group, e = real.groups[0], trace[0]['e']

    def f(x, who):
        awake.append(who)
        return group.step(x, group.adapter.from_e(e))

    def readers(moved):
        return moved | F.pad(moved, (1, -1)) | F.pad(moved, (2, -2))
    x, _ = micro.loop(f, group.init_state(e), 40, tau, readers if wake else None)
    evals = torch.stack(awake).sum(0)
    assert torch.equal(evals, trace[0]['evals']) and len(evals.unique()) > 3
    torch.testing.assert_close(real.lm_head(real.ln_f(x)), want, rtol=1e-3, atol=1e-3)


def test_a_training_step(pair):
    small, real, noise, x, y = pair
    n_loop = [micro.bptt + 2, 1, micro.bptt]        # more steps than have gradients, and fewer
    # eps hides the rounding of gradients near 0, which AdamW's first step would blow up
    one, other = (torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3) for m in (small, real))
    loss = real.train()(x, y, n_loop=n_loop, noise_seed=noise)[1]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(real.parameters(), 1.0)
    other.step()
    assert micro.train_step(small, one, x, y, n_loop) == pytest.approx(loss.item(), rel=1e-6)
    weights = {real_name(name): p for name, p in small.named_parameters()}
    torch.testing.assert_close(weights, dict(real.named_parameters()), **CLOSE)


def test_a_run(tmp_path, monkeypatch, capsys):
    """All of it on a text of one's own, in small."""
    book = tmp_path / 'book.txt'
    book.write_text('The quick brown fox jumps over the lazy dog. ' * 30)
    for knob, value in dict(iterations=100, T=16, C=8).items():
        monkeypatch.setattr(micro, knob, value)
    monkeypatch.setattr(sys, 'argv', ['micro.py', str(book)])
    micro.main()
    printed = capsys.readouterr().out
    assert 2.5 < float(printed.split('loss ')[1].split()[0]) < 4
    assert printed.count('held-out loss') == 7
    assert '\n3 of 16 tokens right' in printed and '\n16 of 16 tokens right' in printed
