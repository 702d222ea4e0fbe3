"""Groups that loop: unrolling, draws, noise, gradients, exits side by side."""
import math

import pytest
import torch
from torch.nn import functional as F

from cache import Span
from exits import make_exit
from loops import Plan, RMSNorm, TrainingNoise, fixed_noise, sample_n_loop

CLOSE = dict(rtol=1e-4, atol=1e-4)


def unrolled_group(group, config, e, n_loop):
    """norm(core(adapter([x ; e]))) n_loop times, in the words of the paper."""
    noise = fixed_noise(0).draw(group, e, slice(e.shape[1]))
    starts = dict(noise=noise, zero=torch.zeros_like(e), e=e)
    x = starts['e' if config.injection == 'none' else config.x0]
    for _ in range(n_loop):
        if config.injection.startswith('concat'):
            x = group.adapter(torch.cat((x, e), dim=-1))
        elif config.injection == 'add':
            x = x + e
        for block in group.core:
            x = block(x)
        if config.norm_inside:
            x = group.norm(x)
    return x if config.norm_inside else group.norm(x)


@pytest.mark.parametrize('changes', [
    dict(injection='concat_random'), dict(injection='add'), dict(injection='none'), dict(x0='zero'),
    dict(x0='e'), dict(norm_inside=False), dict(groups=[[0, 1, 2]])])
def test_looping_is_unrolling(tiny, idx, changes):
    """The model is a plain stack of n_loop copies of each group, each with a count of its own."""
    model = tiny(**changes)
    counts = [1, 4][-len(model.groups):]
    x = (model.wte(idx) + model.wpe(torch.arange(16))) * 16 ** 0.5              # sqrt(C)
    rest = iter(counts)
    for layer in model.h:
        if layer in model.groups:
            x = unrolled_group(layer, model.config, x, next(rest))
        else:
            x = layer(x)
    logits = F.linear(model.ln_f(x), model.wte.weight)
    torch.testing.assert_close(model(idx, n_loop=counts)[0], logits, **CLOSE)


def test_the_trace_is_the_states_that_the_steps_went_through(tiny, idx):
    model, trace = tiny(), []
    model(idx, n_loop=[2, 5], trace=trace)
    for entry, group, n in zip(trace, model.groups, (2, 5)):
        states, from_e = entry['states'], group.adapter.from_e(entry['e'])
        assert states.shape == (n + 1, 3, 16, 16) and not states.requires_grad
        assert (entry['steps_used'] == n).all() and (entry['evals'] == n).all()
        torch.testing.assert_close(group.init_state(entry['e']), states[0])
        for k in range(1, n + 1):
            torch.testing.assert_close(group.step(states[k - 1], from_e), states[k])
        assert not any(entry[name].requires_grad for name in ('states', 'x', 'e'))


@torch.no_grad()
def test_the_states_of_a_run_with_a_rule_are_recorded_if_asked_for(tiny, idx):
    """A sleeping token's state repeats; the states after its steps are those of fixed loops."""
    model, plain, trace = tiny(window=3, pos='rotary', n_layer=3, groups=[[1]]), [], []
    rule = make_exit('norm', 0.5, wake=True)
    logits, _ = model(idx, n_loop=14, exit=rule, trace=plain)
    again, _ = model(idx, n_loop=14, exit=rule, trace=trace, keep_states=True)
    states = trace[0]['states'].flatten(1, 2)                                   # (K+1, B T, C)
    assert plain[0]['states'] is None and torch.equal(again, logits)
    assert torch.equal(states[-1], trace[0]['x'].flatten(0, 1))
    for k, awake in enumerate(trace[0]['awake'], start=1):
        moved = (states[k] != states[k - 1]).any(-1).nonzero().flatten().tolist()
        assert set(moved) <= set(awake.tolist())
    assert len(trace[0]['awake'][-1]) < 48 and len(states) == len(trace[0]['awake']) + 1


def test_a_damped_step_goes_a_part_of_the_way(tiny, idx):
    group, damped = tiny().groups[1], tiny(damping=0.3).groups[1]
    x, e = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(damped.step(x, e), 0.3 * x + 0.7 * group.step(x, e))


def test_a_token_that_skips_a_step_keeps_its_state(tiny):
    group = tiny().groups[1]
    x, e = torch.randn(2, 3, 16, 16)
    plain = group.step(x, e)
    group.skip = 0.5
    after = group.step(x, e)
    took = (after == plain).all(dim=-1)                                             # (3, 16)
    assert 0 < took.sum() < took.numel()
    assert torch.equal(after, torch.where(took[..., None], plain, x))


def test_the_state_is_float32_under_bf16(tiny, idx):
    model, trace = tiny(), []
    into_block, out_of_attention = [], []
    for block in model.groups[1].core:
        block.register_forward_pre_hook(lambda _, args: into_block.append(args[0].dtype))
        block.attn.register_forward_hook(lambda _, args, y: out_of_attention.append(y.dtype))
    with torch.autocast('cpu', torch.bfloat16):
        model(idx, n_loop=4, trace=trace)
    # 4 steps of two layers: products alone are bf16
    assert into_block == [torch.float32] * 8
    assert out_of_attention == [torch.bfloat16] * 8
    for entry in trace:
        assert entry['states'].dtype == entry['e'].dtype == torch.float32
        assert (entry['states'] != entry['states'].bfloat16().float()).any()


# gradients, and what training needs --------------------------------------------------------------

def test_the_norm_is_that_of_torch():
    """Values and gradients, a row of zeros too."""
    ours, torchs = RMSNorm(8, 0.5), torch.nn.RMSNorm(8, eps=0.5)
    torch.nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict())
    x = torch.cat((torch.randn(2, 3, 8), torch.zeros(2, 1, 8), 1e-4 * torch.randn(2, 1, 8)), dim=1)
    for dtype, tol in ((torch.float32, dict(rtol=1e-5, atol=1e-6)),
                       (torch.bfloat16, dict(rtol=0.05, atol=0.2))):
        found = []
        for norm in ours.to(dtype), torchs.to(dtype):
            x1 = x.to(dtype, copy=True).requires_grad_()
            y = norm(x1)
            found.append([y, *torch.autograd.grad(y.square().sum(), (x1, norm.weight))])
        assert found[0][0].dtype == dtype
        torch.testing.assert_close(*found, **tol)


def test_truncated_gradient_reaches_the_weights_under_autocast(tiny):
    group = tiny(bptt_k=1).groups[0]
    # weights that the steps without gradient have cast must not serve the last one
    with torch.autocast('cpu', torch.bfloat16):
        x, _ = group(torch.randn(2, 6, 16), Plan([4], span=Span(0, 6)))
        x.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in group.parameters())


# draws and noise ---------------------------------------------------------------------------------

def test_the_draw_against_its_formula():
    """
    Geiping Eq. 1 and 2: P(m + 1) is the integral over z ~ N(0, 1) of
    Poisson(m; exp(log r - sigma^2 / 2 + sigma z)).
    """
    r, sigma, n_draws = 12, 0.5, 20000
    z, m = torch.linspace(-6, 6, 2001).double(), torch.arange(150).double()[:, None]
    density = torch.exp(-z ** 2 / 2)
    rate = torch.exp(math.log(r) - sigma ** 2 / 2 + sigma * z)
    poisson = torch.exp(m * rate.log() - rate - torch.lgamma(m + 1))            # (150, 2001)
    p = (poisson * density).sum(1) / density.sum()
    assert abs((p * (m[:, 0] + 1)).sum() - (r + 1)) < 1e-3

    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([sample_n_loop(r, generator) for _ in range(n_draws)])
    shares = torch.bincount(draws - 1, minlength=150)[:150] / n_draws
    assert (shares.cumsum(0) - p.cumsum(0)).abs().max() < 1.63 / n_draws ** 0.5     # Kolmogorov


def test_first_states_are_a_cut_normal(tiny):
    e, std = torch.zeros(1, 512, 64), 0.4 ** 0.5
    groups = tiny(n_embd=64, block_size=512).groups
    for group, noise in zip(groups, (fixed_noise(0), TrainingNoise())):
        x0 = group.init_state(e, noise)
        assert abs(x0.std() - 0.9866 * std) < 0.01      # of a normal cut at 3 sigma
        assert abs(x0.mean()) < 0.02
        assert 2.9 * std < x0.abs().max() <= 3 * std + 1e-6


def test_first_states_in_evaluation_depend_on_seed_group_and_position_alone(tiny):
    model, e = tiny(), torch.zeros(4, 16, 16)
    group, other = model.groups
    x0 = group.init_state(e)
    assert torch.equal(x0[0], x0[3]) and not torch.equal(x0[0, 0], x0[0, 1])
    assert torch.equal(group.init_state(e[:1, :5], pos=torch.arange(7, 12))[0], x0[0, 7:12])
    assert not torch.equal(x0, other.init_state(e))
    assert not torch.equal(x0, group.init_state(e, noise=1))
    assert torch.equal(x0, group.init_state(e))         # another seed in between changes nothing


def test_in_training_each_row_and_pass_has_its_own_noise(tiny):
    """test_train.py compares one process with two."""
    group, e = tiny().train().groups[0], torch.zeros(2, 4, 16)
    for noise in (0, TrainingNoise(torch.Generator())):
        first, second = group.init_state(e, noise), group.init_state(e, noise)
        assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
