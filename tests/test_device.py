"""
What another device would show: training and decoding on torch's meta device, which has shapes and
no numbers, and on a real card that it finds what it finds on the CPU.

    CARD=cuda python -m pytest -q tests/test_device.py
"""
import os

import pytest
import torch
from torch.nn import functional as F

import decode
from cache import Span, make_cache
from compiled import compile_passes
from decode import Drafts, OneByOne, WarmStart, Wave
from exits import make_exit
from loops import Plan, TrainingNoise
from model import GPT

CARD = os.environ.get('CARD')
on_a_card = pytest.mark.skipif(not CARD, reason='needs a card: CARD=cuda')


# the meta device: a tensor that is made on the wrong device is an error ---------------------------

@pytest.mark.parametrize('changes', [dict(), dict(pos='rotary', window=3), dict(groups=[])])
def test_a_step_of_training_is_all_on_one_device(tiny, idx, changes):
    model = tiny(**changes).train().to('meta')
    noise = TrainingNoise()
    idx = idx.to('meta')
    plan = Plan([5, 3][:len(model.groups)], noise=noise, span=Span(0, 16, 'meta'))
    x, _ = model.hidden(idx, plan)
    loss = F.cross_entropy(model.lm_head(x).flatten(0, 1), idx.flatten())
    loss.backward()
    assert loss.device.type == 'meta'
    assert all(p.grad.device.type == 'meta' for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize('changes', [dict(), dict(pos='rotary', window=3)])
def test_fixed_loops_through_a_cache_are_all_on_one_device(tiny, idx, changes):
    model = tiny(x0='zero', **changes).to('meta')
    plan = Plan([3, 2], cache=make_cache(model, [3, 2]))
    for start, T in ((0, 5), (5, 1), (6, 3)):
        logits, _ = decode.one_pass(model, idx[:, start:start + T].to('meta'), start, plan)
        assert logits.shape == (3, T, 50) and logits.device.type == 'meta'


# a card -------------------------------------------------------------------------------------------

WAYS = {
    'fixed': (OneByOne(), 'latest', 4, None), 'warm': (WarmStart(), 'latest', 3, None),
    'ring': (OneByOne(), 3, 6, make_exit('kl', 0.01)), 'drafts': (Drafts(1), 'exact', 3, None),
    'accel': (OneByOne(), 'exact', 8, make_exit('accel', 0.3)),
    'wave': (Wave(4), 'latest', 12, make_exit('norm_rel', 1e-3))}


def write(model, rows, n_new, way):
    """Rows of a text over window moves: tokens and steps, on the CPU."""
    decoder, cache, n_loop, rule = WAYS[way]
    device = model.lm_head.weight.device
    prompts = (torch.arange(3)[None] + torch.arange(rows)[:, None]).to(device)
    plan = Plan(model.loop_counts(n_loop), rule)
    parts = zip(*decode.stream(model, prompts, n_new, plan, decoder, cache, temperature=0.7))
    return [torch.cat(part, dim=1).cpu() for part in parts]


@on_a_card
@pytest.mark.parametrize('way', WAYS)
def test_decoding_finds_what_it_finds_on_the_cpu(tiny, way):
    rows = 1 if way in ('drafts', 'wave') else 2
    for there, here in zip(write(tiny().to(CARD), rows, 30, way), write(tiny(), rows, 30, way)):
        assert torch.equal(there, here)


@on_a_card
@pytest.mark.parametrize('way', ['fixed', 'warm', 'drafts', 'wave'])
def test_recorded_passes_write_the_same(tiny, way):
    """For two texts, each of several windows."""
    eager, recorded = (tiny(n_layer=2, groups=[[1]]).to(CARD) for _ in range(2))
    compile_passes(recorded, {1, 4, 5})
    for n_new in (36, 20):
        for there, here in zip(write(recorded, 1, n_new, way), write(eager, 1, n_new, way)):
            assert torch.equal(there, here)


@on_a_card
@torch.no_grad()
@pytest.mark.parametrize('wake', [False, True])
def test_a_problem_finds_what_it_finds_on_the_cpu(wake):
    """Also the awake tokens alone."""
    found = []
    for device in (CARD, 'cpu'):
        model = GPT.load('pretrained/calc', device=device)
        idx = torch.arange(model.config.block_size, device=device)[None] % 9
        plan = Plan([200], make_exit('accel', 1, wake=wake))
        found.append([part.cpu() for part in decode.read(model, idx, plan)])
    torch.testing.assert_close(*(part[0] for part in found), rtol=0, atol=1e-3)
    assert torch.equal(found[0][2], found[1][2])
