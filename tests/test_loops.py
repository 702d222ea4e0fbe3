import math

import pytest
import torch
from conftest import TAUS
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import train
from exits import EXITS, make_exit
from loops import derived_seed, sample_n_loop
from model import GPTConfig


def unrolled(model, idx, n_loop):
    """The logits by a plain stack of n_loop copies of each group, in the words of the paper: norm(core(adapter([x ; e])))."""
    x = (model.wte(idx) + model.wpe(torch.arange(idx.shape[1]))) * model.config.n_embd ** 0.5
    for layer in model.h:
        if layer in model.groups:
            start = model.config.x0 if layer.injection != 'none' else 'e'
            e, x = x, dict(noise=layer.noise(x, 0, 0, slice(x.shape[1])), zero=torch.zeros_like(x), e=x)[start]
            for _ in range(n_loop):
                x = layer.adapter(torch.cat((x, e), dim=-1)) if layer.injection == 'concat' else x + e * (layer.injection == 'add')
                for block in layer.core:
                    x = block(x)
                x = layer.norm(x) if layer.norm_inside else x
            x = x if layer.norm_inside else layer.norm(x)
        else:
            x = layer(x)
    return F.linear(model.ln_f(x), model.wte.weight)


@pytest.mark.parametrize('changes', [dict(adapter_init='random'), dict(injection='add'), dict(injection='none'), dict(x0='zero'), dict(x0='e'),
                                     dict(norm_inside=False), dict(bias=True, groups=[[0, 1, 2]])])
@pytest.mark.parametrize('n_loop', [1, 4])
def test_looping_is_unrolling(tiny, idx, changes, n_loop):
    model = tiny(**changes)
    torch.testing.assert_close(model(idx, n_loop=n_loop)[0], unrolled(model, idx, n_loop), rtol=1e-4, atol=1e-4)


def test_each_group_has_its_own_count_and_counts_matter(tiny, idx):
    model, trace = tiny(), []
    logits = model(idx, n_loop=[2, 5], trace=trace)[0]
    assert [t['states'].shape for t in trace] == [(3, 3, 16, 16), (6, 3, 16, 16)]
    assert [t['steps_used'].unique().tolist() for t in trace] == [[2], [5]]
    assert not torch.allclose(logits, model(idx, n_loop=[2, 4])[0], atol=1e-3)
    for t, group in zip(trace, model.groups):           # the trace is the states that the steps went through
        torch.testing.assert_close(group.step(t['states'][1], t['e']), t['states'][2])
        torch.testing.assert_close(group.init_state(t['e']), t['states'][0])


@pytest.mark.parametrize('n_loop, bptt_k', [(5, 2), (5, 5), (3, 8), (4, 1)])
def test_truncated_gradient_is_a_graph_cut_by_hand(tiny, n_loop, bptt_k):
    group = tiny(adapter_init='random', bptt_k=bptt_k).groups[1]
    e = torch.randn(2, 6, 16, requires_grad=True)
    weight = torch.randn(2, 6, 16)
    (group(e, n_loop)[0] * weight).sum().backward()
    got = [e.grad] + [p.grad for p in group.parameters()]
    e.grad = None
    group.zero_grad()
    x = group.init_state(e)
    for k in range(n_loop):
        if k == n_loop - bptt_k:
            x = x.detach()
        x = group.step(x, e)
    (x * weight).sum().backward()
    for a, b in zip(got, [e.grad] + [p.grad for p in group.parameters()]):
        assert b.abs().max() > 1e-6
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_truncated_gradient_reaches_the_weights_under_autocast(tiny):
    group = tiny(bptt_k=1).groups[0]
    e = torch.randn(2, 6, 16)
    with torch.autocast('cpu', torch.bfloat16):         # the casts of the steps without gradient must not serve the last one
        group(e, 4)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in group.parameters())


def test_gradient_reaches_the_layers_before_a_group_through_e_alone(tiny, idx):
    model = tiny(bptt_k=1).train()
    model(idx, idx, n_loop=6)[1].backward()
    assert all(p.grad.abs().max() > 0 for p in model.h[0].parameters())


def test_the_draw_against_its_formula():
    r, sigma, n = 12, 0.5, 20000
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([sample_n_loop(r, generator) for _ in range(n)]).double()
    # P(n = m + 1) = integral over z ~ N(0, 1) of Poisson(m; exp(log r - sigma^2 / 2 + sigma z)), Geiping Eq. 1 and 2
    z = torch.linspace(-6, 6, 2001).double()
    density = torch.exp(-z ** 2 / 2)
    rate = torch.exp(math.log(r) - sigma ** 2 / 2 + sigma * z)
    m = torch.arange(150).double()
    pmf = (torch.exp(m[:, None] * rate.log() - rate - torch.lgamma(m[:, None] + 1)) * density).sum(1) / density.sum()
    cdf = pmf.cumsum(0)
    quantile = lambda q: int((cdf >= q).nonzero()[0]) + 1
    assert abs(pmf.sum() - 1) < 1e-6 and abs((pmf * (m + 1)).sum() - (r + 1)) < 1e-3
    assert abs(draws.mean() - (r + 1)) < 4 * draws.std() / n ** 0.5
    assert draws.median() == quantile(0.5) and abs(draws.quantile(0.99) - quantile(0.99)) <= 1
    assert draws.min() >= 1
    same = [sample_n_loop(r, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert same[0] == same[1]


@pytest.mark.parametrize('draw', ['uniform', 'fixed'])
def test_other_draws_have_the_same_mean(draw):
    n = [sample_n_loop(4, torch.Generator().manual_seed(i), draw=draw) for i in range(2000)]
    assert abs(sum(n) / len(n) - 5) < 0.2 and set(n) == ({5} if draw == 'fixed' else set(range(1, 10)))


def test_processes_share_the_noise_of_one(tiny):
    """Each takes its rows of the whole batch's draw, and so their number changes nothing."""
    group, e, rows = tiny().train().groups[0], torch.zeros(6, 4, 16), []
    for group.world, group.rank in [(1, 0), (3, 0), (3, 1), (3, 2)]:
        torch.manual_seed(0)
        rows.append(group.init_state(e[:6 // group.world]))
    assert torch.equal(rows[0], torch.cat(rows[1:]))


def test_checkpointed_steps_keep_less_and_give_the_same_gradients(tiny, idx):
    def gradients(checkpoint_steps):
        model, kept = tiny(bptt_k=4, dropout=0.1, step_noise=0.1).train(), []
        for group in model.groups:
            group.checkpoint_steps = checkpoint_steps
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss = model(idx, idx, n_loop=6)[1]
        loss.backward()
        return [p.grad for p in model.parameters()], sum(kept)
    (a, a_kept), (b, b_kept) = gradients(False), gradients(True)
    assert all(torch.equal(x, y) for x, y in zip(a, b)) and b_kept < a_kept / 2


def test_no_draw_recompiles(tiny, idx):
    """At most three graphs for each length of core (without gradient, the first step with, the others) and one for all plain blocks."""
    model, counter, counts = tiny(n_layer=9, groups=[[1], [2, 3], [4, 5, 6], [7]], bptt_k=2).train(), CompileCounter(), []
    train.compile_layers(model, backend=counter)
    for n in range(1, 13):
        model(idx, idx, n_loop=[n, 13 - n, 1 + n % 3, 4])[1].backward()
        counts.append(counter.frame_count)
    assert counts[3] == counts[-1] == 3 * 3 + 1


def test_initial_state_noise(tiny):
    model = tiny(n_embd=64, block_size=512)
    e = torch.zeros(4, 512, 64)
    first, second = (g.init_state(e) for g in model.groups)
    assert abs(first[0].std() - 0.4 ** 0.5) < 0.02 and first.abs().max() <= 3 * 0.4 ** 0.5 + 1e-6 and abs(first[0].mean()) < 0.02
    # in evaluation: a function of seed, group and position alone
    assert torch.equal(first[0], first[3]) and not torch.equal(first, second)
    assert torch.equal(model.groups[0].init_state(e[:1, :5], pos=torch.arange(7, 12))[0], first[0, 7:12])
    assert not torch.equal(model.groups[0].init_state(e, noise_seed=1), first)
    # in training: fresh for each row and pass
    group = model.train().groups[0]
    a, b = group.init_state(e), group.init_state(e)
    assert not torch.equal(a, b) and not torch.equal(a[0], a[1])


def test_step_noise(tiny, idx):
    quiet, noisy = tiny(), tiny(step_noise=0.5)
    states = []
    for model in (quiet, noisy, noisy):
        trace = []
        model(idx, n_loop=12, trace=trace)
        states.append(trace[0]['states'])
    assert torch.equal(states[1], states[2])                                    # evaluation repeats itself
    moved = lambda s: (s[-1] - s[-2]).norm()
    assert moved(states[1]) > 5 * moved(states[0])                              # and each step has noise of its own


def test_the_state_is_float32_under_bf16(tiny, idx):
    model, trace, inner = tiny(), [], []
    for block in model.groups[1].core:
        block.register_forward_pre_hook(lambda _, args: inner.append(args[0].dtype))
        block.attn.register_forward_hook(lambda _, args, out: inner.append(out.dtype))
    with torch.autocast('cpu', torch.bfloat16):
        model(idx, n_loop=40, trace=trace)
    assert set(inner) == {torch.float32, torch.bfloat16} and inner[::2] == [torch.float32] * 80     # products alone are bf16
    for t in trace:
        assert t['states'].dtype == t['e'].dtype == torch.float32
        assert (t['states'] != t['states'].bfloat16().float()).any()


@pytest.mark.parametrize('name', EXITS)
def test_exit_of_a_pass_freezes_state_keys_and_values(tiny, idx, name):
    """Token by token in plain lists, as DESIGN has it: a later token at step k attends to an earlier one's step min(k, its last)."""
    model, rule, trace = tiny(adapter_init='random'), make_exit(name, TAUS[name]), []
    for p in model.parameters():        # livelier than the initial weights, so that tokens differ in their steps
        if p.dim() == 2:
            p.data *= 1.5
    with torch.no_grad():
        model(idx[:1], n_loop=12, exit=rule, trace=trace)
        for t, group in zip(trace, model.groups):
            seen = [[] for _ in group.core]     # for each layer and earlier token: its inputs n1(x), step by step
            starts = group.init_state(t['e'])
            for pos in range(16):
                x, e, memo, small, inputs = starts[0, pos], t['e'][0, pos], None, [], [[] for _ in group.core]
                for k in range(1, 13):
                    h = group.adapter(torch.cat((x, e)))
                    for layer, block in enumerate(group.core):
                        inputs[layer].append(block.n1(h))
                        context = torch.stack([past[min(k, len(past)) - 1] for past in seen[layer]] + [inputs[layer][-1]])
                        h = block.n2(h + block.attn(context[None])[0, -1])
                        h = block.n4(h + block.mlp(block.n3(h)))
                    y = group.norm(h)
                    value, memo = rule.signal(x, y, memo, model.readout)
                    small.append(value is not None and bool(value < rule.tau))
                    go = len(small) >= rule.hits and all(small[-rule.hits:])
                    x, used = (y, k) if rule.keep or not go else (x, k - 1)
                    if go:
                        break
                for layer in range(len(group.core)):
                    seen[layer].append(inputs[layer])
                assert (t['steps_used'][0, pos], t['evals'][0, pos]) == (used, k)
                if t is trace[0]:       # the groups touch: what the first returns is the e of the second
                    torch.testing.assert_close(trace[1]['e'][0, pos], x, rtol=1e-4, atol=1e-4)
    assert len(torch.cat([t['evals'] for t in trace]).unique()) > 1


@pytest.mark.parametrize('name', EXITS)
def test_exit_is_causal_and_rows_do_not_meet(tiny, idx, name):
    model, rule, trace, alone, front = tiny(), make_exit(name, TAUS[name]), [], [], []
    logits = model(idx, exit=rule, trace=trace)[0]
    torch.testing.assert_close(logits[1:2], model(idx[1:2], exit=rule, trace=alone)[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[:, :9], model(idx[:, :9], exit=rule, trace=front)[0], rtol=1e-4, atol=1e-4)
    for t, a, f in zip(trace, alone, front):
        assert torch.equal(t['steps_used'][1:2], a['steps_used']) and torch.equal(t['steps_used'][:, :9], f['steps_used'])


@pytest.mark.parametrize('name', EXITS)
def test_tau_zero_is_the_full_budget(tiny, idx, name):
    model = tiny()
    torch.testing.assert_close(model(idx, n_loop=7, exit=make_exit(name, 0.0))[0], model(idx, n_loop=7)[0], rtol=1e-5, atol=1e-5)


def test_an_exit_while_training_is_refused(tiny, idx):
    with pytest.raises(ValueError, match='evaluation only'):
        tiny().train()(idx, exit=make_exit('accel', 1e-2))


def test_seeds_derive_from_every_part_of_their_key():
    keys = [(0, 'noise', 1, 0), (1, 'noise', 1, 0), (0, 'loops', 1, 0), (0, 'noise', 2, 0), (0, 'noise', 1, 1), (0, 'noise', 11)]
    seeds = [derived_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and seeds == [derived_seed(*key) for key in keys] and all(0 <= s < 2 ** 63 for s in seeds)


@pytest.mark.parametrize('groups, word', [([[1, 2], [2]], 'overlap'), ([[5]], 'out of range'), ([[-1]], 'out of range'), ([[1, 3]], 'follow'),
                                          ([[2, 1]], 'follow'), ([[]], 'at least one'), ([1], 'list of layer numbers'), ([['1']], 'list of layer')])
def test_bad_groups(groups, word):
    with pytest.raises(ValueError, match=word):
        GPTConfig(n_layer=5, groups=groups)


@pytest.mark.parametrize('n_loop', [0, -1, 2.5, [2], [2, 0], 'many'])
def test_bad_n_loop(tiny, idx, n_loop):
    with pytest.raises(ValueError, match='n_loop must be an int >= 1'):
        tiny()(idx, n_loop=n_loop)
