"""Groups that loop: unrolling, draws, noise, truncated gradients, exits side by side."""
import math

import pytest
import torch
from conftest import TAUS, exit_by_hand
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import train
from exits import make_exit
from loops import derived_seed, sample_n_loop

CLOSE = dict(rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------
# looping is unrolling

def unrolled_group(group, config, e, n_loop):
    """norm(core(adapter([x ; e]))) n_loop times, in the words of the paper."""
    starts = dict(noise=group.noise(e, 0, 0, slice(e.shape[1])), zero=torch.zeros_like(e), e=e)
    x = starts['e' if config.injection == 'none' else config.x0]
    for _ in range(n_loop):
        if config.injection == 'concat':
            x = group.adapter(torch.cat((x, e), dim=-1))
        elif config.injection == 'add':
            x = x + e
        for block in group.core:
            x = block(x)
        if config.norm_inside:
            x = group.norm(x)
    return x if config.norm_inside else group.norm(x)


def unrolled(model, idx, n_loop):
    """The logits by a plain stack of n_loop copies of each group."""
    C = model.config.n_embd
    x = (model.wte(idx) + model.wpe(torch.arange(idx.shape[1]))) * C ** 0.5
    for layer in model.h:
        if layer in model.groups:
            x = unrolled_group(layer, model.config, x, n_loop)
        else:
            x = layer(x)
    return F.linear(model.ln_f(x), model.wte.weight)


@pytest.mark.parametrize('changes', [
    dict(adapter_init='random'), dict(injection='add'), dict(injection='none'), dict(x0='zero'),
    dict(x0='e'), dict(norm_inside=False), dict(bias=True, groups=[[0, 1, 2]])])
@pytest.mark.parametrize('n_loop', [1, 4])
def test_looping_is_unrolling(tiny, idx, changes, n_loop):
    model = tiny(**changes)
    logits = model(idx, n_loop=n_loop)[0]
    torch.testing.assert_close(logits, unrolled(model, idx, n_loop), **CLOSE)


def test_each_group_has_its_own_count_and_counts_matter(tiny, idx):
    model, trace = tiny(), []
    logits = model(idx, n_loop=[2, 5], trace=trace)[0]
    assert [entry['states'].shape for entry in trace] == [(3, 3, 16, 16), (6, 3, 16, 16)]
    assert [entry['steps_used'].unique().tolist() for entry in trace] == [[2], [5]]
    assert not torch.allclose(logits, model(idx, n_loop=[2, 4])[0], atol=1e-3)


def test_the_trace_is_the_states_that_the_steps_went_through(tiny, idx):
    model, trace = tiny(), []
    model(idx, n_loop=3, trace=trace)
    for entry, group in zip(trace, model.groups):
        states, e = entry['states'], entry['e']
        torch.testing.assert_close(group.init_state(e), states[0])
        torch.testing.assert_close(group.step(states[1], e), states[2])


def test_the_state_is_float32_under_bf16(tiny, idx):
    model, trace = tiny(), []
    into_block, out_of_attention = [], []
    for block in model.groups[1].core:
        block.register_forward_pre_hook(lambda _, args: into_block.append(args[0].dtype))
        block.attn.register_forward_hook(lambda _, args, y: out_of_attention.append(y.dtype))
    with torch.autocast('cpu', torch.bfloat16):
        model(idx, n_loop=40, trace=trace)
    # 40 steps of two layers: products alone are bf16
    assert into_block == [torch.float32] * 80
    assert out_of_attention == [torch.bfloat16] * 80
    for entry in trace:
        assert entry['states'].dtype == entry['e'].dtype == torch.float32
        assert (entry['states'] != entry['states'].bfloat16().float()).any()


# -------------------------------------------------------------------------------------------------
# gradients, and what training needs

@pytest.mark.parametrize('n_loop, bptt_k', [(5, 2), (5, 5), (3, 8), (4, 1)])
def test_truncated_gradient_is_a_graph_cut_by_hand(tiny, n_loop, bptt_k):
    group = tiny(adapter_init='random', bptt_k=bptt_k).groups[1]
    e, weight = torch.randn(2, 6, 16, requires_grad=True), torch.randn(2, 6, 16)

    def gradients(x):
        e.grad = None
        group.zero_grad()
        (x * weight).sum().backward()
        return [e.grad] + [p.grad for p in group.parameters()]

    got = gradients(group(e, n_loop)[0])
    x = group.init_state(e)
    for k in range(n_loop):
        if k == n_loop - bptt_k:
            x = x.detach()
        x = group.step(x, e)
    for truncated, by_hand in zip(got, gradients(x)):
        assert by_hand.abs().max() > 1e-6
        torch.testing.assert_close(truncated, by_hand, rtol=1e-4, atol=1e-5)


def test_truncated_gradient_reaches_the_weights_under_autocast(tiny):
    group = tiny(bptt_k=1).groups[0]
    # weights that the steps without gradient have cast must not serve the last one
    with torch.autocast('cpu', torch.bfloat16):
        group(torch.randn(2, 6, 16), 4)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in group.parameters())


def test_gradient_reaches_the_layers_before_a_group_through_e_alone(tiny, idx):
    model = tiny(bptt_k=1).train()
    model(idx, idx, n_loop=6)[1].backward()
    assert all(p.grad.abs().max() > 0 for p in model.h[0].parameters())


def test_checkpointed_steps_keep_less_and_give_the_same_gradients(tiny, idx):
    def gradients(checkpoint_steps):
        model, kept = tiny(bptt_k=4, dropout=0.1, step_noise=0.1).train(), []
        for group in model.groups:
            group.checkpoint_steps = checkpoint_steps

        def pack(x):
            kept.append(x.numel())
            return x

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(idx, idx, n_loop=6)[1]
        loss.backward()
        return [p.grad for p in model.parameters()], sum(kept)

    plain, plain_kept = gradients(False)
    checkpointed, checkpointed_kept = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed))
    assert checkpointed_kept < plain_kept / 2


def test_no_draw_recompiles(tiny, idx):
    """
    For each length of core at most three graphs: without gradient, the first step with it, the
    others. And one for all plain blocks.
    """
    model = tiny(n_layer=9, groups=[[1], [2, 3], [4, 5, 6], [7]], bptt_k=2).train()
    counter, graphs = CompileCounter(), []
    train.compile_layers(model, backend=counter)
    for n in range(1, 13):
        model(idx, idx, n_loop=[n, 13 - n, 1 + n % 3, 4])[1].backward()
        graphs.append(counter.frame_count)
    assert graphs[3] == graphs[-1] == 3 * 3 + 1


def test_an_exit_while_training_is_refused(tiny, idx):
    with pytest.raises(ValueError, match='evaluation only'):
        tiny().train()(idx, exit=make_exit('accel', 1e-2))


# -------------------------------------------------------------------------------------------------
# draws and noise

def loop_probabilities(r, sigma, most=150):
    """
    P(n) of the lognormal-Poisson draw for n = 1 ... most, by Geiping Eq. 1 and 2.

    P(n = m + 1) is the integral over z ~ N(0, 1) of Poisson(m; exp(log r - sigma^2 / 2 + sigma z)).
    """
    z = torch.linspace(-6, 6, 2001).double()
    density = torch.exp(-z ** 2 / 2)
    rate = torch.exp(math.log(r) - sigma ** 2 / 2 + sigma * z)
    m = torch.arange(most).double()[:, None]
    poisson = torch.exp(m * rate.log() - rate - torch.lgamma(m + 1))            # (most, 2001)
    return (poisson * density).sum(1) / density.sum()


def test_the_draw_against_its_formula():
    r, n_draws = 12, 20000
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([sample_n_loop(r, generator) for _ in range(n_draws)]).double()

    probabilities = loop_probabilities(r, sigma=0.5)
    n = torch.arange(1, 151)
    assert abs(probabilities.sum() - 1) < 1e-6
    assert abs((probabilities * n).sum() - (r + 1)) < 1e-3

    def quantile(q):
        return int(n[probabilities.cumsum(0) >= q][0])

    assert abs(draws.mean() - (r + 1)) < 4 * draws.std() / n_draws ** 0.5
    assert draws.median() == quantile(0.5)
    assert abs(draws.quantile(0.99) - quantile(0.99)) <= 1
    assert draws.min() >= 1


def test_a_draw_comes_from_its_generator():
    same = [sample_n_loop(12, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert same[0] == same[1]
    assert len({sample_n_loop(12, torch.Generator().manual_seed(seed)) for seed in range(20)}) > 5


@pytest.mark.parametrize('draw, values', [('uniform', set(range(1, 10))), ('fixed', {5})])
def test_other_draws_have_the_same_mean(draw, values):
    draws = [sample_n_loop(4, torch.Generator().manual_seed(seed), draw=draw)
             for seed in range(2000)]
    assert abs(sum(draws) / len(draws) - 5) < 0.2
    assert set(draws) == values


def test_seeds_derive_from_every_part_of_their_key():
    keys = [(0, 'noise', 1, 0), (1, 'noise', 1, 0), (0, 'loops', 1, 0), (0, 'noise', 2, 0),
            (0, 'noise', 1, 1), (0, 'noise', 11)]
    seeds = [derived_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [derived_seed(*key) for key in keys]
    assert all(0 <= seed < 2 ** 63 for seed in seeds)


def test_first_states_are_a_cut_normal(tiny):
    e, std = torch.zeros(4, 512, 64), 0.4 ** 0.5
    for group in tiny(n_embd=64, block_size=512).groups:
        x0 = group.init_state(e)
        assert abs(x0[0].std() - std) < 0.02
        assert abs(x0[0].mean()) < 0.02
        assert x0.abs().max() <= 3 * std + 1e-6


def test_first_states_in_evaluation_depend_on_seed_group_and_position_alone(tiny):
    model, e = tiny(), torch.zeros(4, 16, 16)
    group, other = model.groups
    x0 = group.init_state(e)
    assert torch.equal(x0[0], x0[3])
    at_7 = group.init_state(e[:1, :5], pos=torch.arange(7, 12))
    assert torch.equal(at_7[0], x0[0, 7:12])
    assert not torch.equal(x0, other.init_state(e))
    assert not torch.equal(x0, group.init_state(e, noise_seed=1))
    assert torch.equal(x0, group.init_state(e))         # another seed in between changes nothing


def test_first_states_in_training_are_fresh_for_each_row_and_pass(tiny):
    group, e = tiny().train().groups[0], torch.zeros(4, 16, 16)
    a, b = group.init_state(e), group.init_state(e)
    assert not torch.equal(a, b)
    assert not torch.equal(a[0], a[1])


def test_processes_share_the_noise_of_one(tiny):
    """Each takes its rows of the whole batch's draw, and so their number changes nothing."""
    group = tiny().train().groups[0]

    def first_states(world, rank):
        group.world, group.rank = world, rank
        torch.manual_seed(0)
        return group.init_state(torch.zeros(6 // world, 4, 16))

    of_three = [first_states(3, rank) for rank in range(3)]
    assert torch.equal(first_states(1, 0), torch.cat(of_three))


def test_step_noise(tiny, idx):
    def states_of(model):
        trace = []
        model(idx, n_loop=12, trace=trace)
        return trace[0]['states']

    def last_update(states):
        return (states[-1] - states[-2]).norm()

    quiet, noisy = states_of(tiny()), states_of(tiny(step_noise=0.5))
    # evaluation repeats itself, and yet each step has noise of its own
    assert torch.equal(noisy, states_of(tiny(step_noise=0.5)))
    assert last_update(noisy) > 5 * last_update(quiet)


# -------------------------------------------------------------------------------------------------
# exits, all tokens of a pass side by side

def block_map_by_hand(group, x, e, k, earlier):
    """
    Loop step k of one token, x and e (C,) -> its next state, and what it shows in each layer.

    earlier: for each layer, for each earlier token, a list of what it showed step by step. A token
    meets an earlier one as it was at step min(k, the last step that one took).
    """
    shown = []
    x = group.adapter(torch.cat((x, e)))
    for block, tokens in zip(group.core, earlier):
        shown.append(block.n1(x))
        context = [steps[min(k, len(steps)) - 1] for steps in tokens] + [shown[-1]]
        attended = block.attn(torch.stack(context)[None])[0, -1]
        x = block.n2(x + attended)
        x = block.n4(x + block.mlp(block.n3(x)))
    return group.norm(x), shown


@pytest.mark.parametrize('name', TAUS)
def test_exit_of_a_pass_freezes_state_keys_and_values(tiny, idx, name):
    """The pass of a whole row, once more in plain lists, token by token and step by step."""
    model, rule, trace = tiny(adapter_init='random'), make_exit(name, TAUS[name]), []
    for p in model.parameters():        # livelier than at the start, so that tokens differ in steps
        if p.dim() == 2:
            p.data *= 1.5
    with torch.no_grad():
        model(idx[:1], n_loop=12, exit=rule, trace=trace)

    for entry, group in zip(trace, model.groups):
        e, starts = entry['e'][0], group.init_state(entry['e'])[0]              # (T, C)
        earlier = [[] for _ in group.core]
        for t in range(16):
            own = [[] for _ in group.core]

            def step(x, k):
                x, shown = block_map_by_hand(group, x, e[t], k, earlier)
                for steps, now in zip(own, shown):
                    steps.append(now)
                return x

            with torch.no_grad():
                x, steps_used, evals = exit_by_hand(step, starts[t], 12, rule, model.readout)
            for tokens, steps in zip(earlier, own):
                tokens.append(steps)
            assert (entry['steps_used'][0, t], entry['evals'][0, t]) == (steps_used, evals)
            if entry is trace[0]:       # the groups touch: what one returns is the e of the next
                torch.testing.assert_close(trace[1]['e'][0, t], x, **CLOSE)
    assert len(torch.cat([entry['evals'] for entry in trace]).unique()) > 1


@pytest.mark.parametrize('name', TAUS)
def test_exit_is_causal_and_rows_do_not_meet(tiny, idx, name):
    model, rule = tiny(), make_exit(name, TAUS[name])

    def logits_and_steps(idx):
        trace = []
        logits, _ = model(idx, exit=rule, trace=trace)
        return logits, torch.stack([entry['steps_used'] for entry in trace], dim=2)

    logits, steps = logits_and_steps(idx)
    row_alone, row_steps = logits_and_steps(idx[1:2])
    torch.testing.assert_close(logits[1:2], row_alone, **CLOSE)
    assert torch.equal(steps[1:2], row_steps)
    front, front_steps = logits_and_steps(idx[:, :9])
    torch.testing.assert_close(logits[:, :9], front, **CLOSE)
    assert torch.equal(steps[:, :9], front_steps)


@pytest.mark.parametrize('name', TAUS)
def test_tau_zero_is_the_full_budget(tiny, idx, name):
    model = tiny()
    never = model(idx, n_loop=7, exit=make_exit(name, 0.0))[0]
    torch.testing.assert_close(never, model(idx, n_loop=7)[0], rtol=1e-5, atol=1e-5)
