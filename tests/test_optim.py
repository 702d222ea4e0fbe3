"""Which optimiser has which weights, and how the average of the weights moves."""
from functools import partial

import pytest
import torch

from common.optim import Muon, make_optimizers, move_average

HOW = (3e-3, 0.1, (0.9, 0.95))


def test_decay_on_matrices_only(tiny):
    model = tiny(bias=True)
    adamw, = make_optimizers(model, 'adamw', *HOW).values()
    matrices, vectors = adamw.param_groups
    assert all(p.dim() == 2 for p in matrices['params'])
    assert all(p.dim() == 1 for p in vectors['params'])
    assert (matrices['weight_decay'], vectors['weight_decay']) == (0.1, 0.0)
    assert len(matrices['params']) + len(vectors['params']) == len(list(model.parameters()))


def test_muon_has_the_matrices_of_blocks_and_adapters(tiny):
    model = tiny(bias=True)
    adamw, muon = make_optimizers(model, 'muon', *HOW).values()
    inner = {id(p) for p in muon.param_groups[0]['params']}
    others = {id(p) for group in adamw.param_groups for p in group['params']}
    for name, p in model.named_parameters():
        assert (id(p) in inner) == (name.startswith('h.') and p.dim() == 2), name
        assert (id(p) in others) != (id(p) in inner), name


def test_a_step_of_muon_is_as_large_as_one_of_adamw(tiny, idx):
    """Root mean square of the step over the learning rate, weight decay off: near 0.2 for both."""
    sizes = {}
    for kind in ('adamw', 'muon'):
        model = tiny(n_embd=64).train()
        optimizers = make_optimizers(model, kind, 1e-3, 0.0, (0.9, 0.95))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        torch.manual_seed(0)
        model(idx, idx, n_loop=3)[1].backward()
        for one in optimizers.values():
            one.step()
        p = model.h[0].attn.c_attn.weight
        step = p.detach() - before['h.0.attn.c_attn.weight']
        sizes[kind] = step.square().mean().sqrt().item() / 1e-3
    assert 0.1 < sizes['muon'] < 0.4
    assert sizes['adamw'] == pytest.approx(1, abs=0.1)      # its first step is the sign alone


def test_muon_is_that_of_torch(tiny, idx):
    """Steps of it end where torch's do, up to torch's bfloat16."""
    ends = []
    for kind in (Muon, partial(torch.optim.Muon, adjust_lr_fn='match_rms_adamw')):
        model = tiny(n_embd=32).train()
        inner = [p for name, p in model.named_parameters() if name.startswith('h.') and p.dim() > 1]
        before = [p.detach().clone() for p in inner]
        muon = kind(inner, lr=1e-2, weight_decay=0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            model(idx, idx, n_loop=2)[1].backward()
            muon.step()
            muon.zero_grad()
        ends.append([(p - start).detach() for p, start in zip(inner, before)])
    for ours, theirs in zip(*ends):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_the_average_is_quick_at_first(tiny):
    model, other = tiny(seed=0), tiny(seed=1)
    averaged = {name: p.detach().clone() for name, p in other.named_parameters()}
    start = averaged['wte.weight'].clone()
    move_average(averaged, model, decay=0.99, it=0)
    torch.testing.assert_close(averaged['wte.weight'], start.lerp(model.wte.weight, 0.9))
    start = averaged['wte.weight'].clone()
    move_average(averaged, model, decay=0.99, it=10 ** 6)
    torch.testing.assert_close(averaged['wte.weight'], start.lerp(model.wte.weight, 0.01))
