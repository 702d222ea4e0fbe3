"""Which optimiser has which weights, and that Muon is torch's."""
from functools import partial

import pytest
import torch

from common.optim import Muon, make_optimizers

SETTINGS = (3e-3, 0.1)      # learning rate, weight decay


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_each_weight_has_one_optimizer_and_decay_is_on_matrices(tiny, kind):
    model, decays = tiny(), {}
    optimizers = make_optimizers(model, kind, *SETTINGS)
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            assert group['lr'] == 3e-3 and group.get('betas', (0.9, 0.95)) == (0.9, 0.95)
            decays |= {id(p): (name, group['weight_decay']) for p in group['params']}
    assert sum(len(group['params']) for optimizer in optimizers.values()
               for group in optimizer.param_groups) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        inner = kind == 'muon' and name.startswith('h.') and p.dim() == 2
        expected = ('muon' if inner else 'adamw', 0.1 if p.dim() == 2 else 0.0)
        assert decays[id(p)] == expected, name


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
