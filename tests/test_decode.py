"""
Decoding: every way of feeding the tokens gives the same model, with exits and without.
"""
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, TAUS
from test_zoo import CLASSES
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from cache import KeysValues, make_cache
from common.checkpoint import load_checkpoint
from decode import compiled, prefill, teacher_forced, use_one_thread
from decode.compiled import compile_passes
from decode.rows import choose, context_start
from exits import make_exit
from loops import Plan, as_noise
from model import GPT, GPTConfig
from tasks import Problems
from zoo.ouro import Gated

CLOSE = dict(rtol=1e-4, atol=1e-4)
GREEDY, ROTARY = dict(temperature=0), dict(pos='rotary', rope_base=100.0)
SHORT = dict(n_layer=2, groups=[[1]])
ROW = make_exit('zoo.huginn:kl')        # all tokens of a row exit together


def rule_of(name):
    """A case as a rule; ', past' waits for the past, ', coda' reads the model's own logits."""
    if name is None:
        return None
    name, _, how = name.partition(', ')
    # of many tokens the largest is larger
    taus = TAUS | {'zoo.ouro:gate': 0.2} | (dict(accel_hat=0.9) if how == 'past' else {})
    rule = make_exit(name, taus[name], wake=how == 'past')
    return replace(rule, reads='through_coda') if how == 'coda' else rule


def assert_same(generated, other):
    """Two tuples of tensors are equal in every bit."""
    assert all(torch.equal(a, b) for a, b in zip(generated, other, strict=True))


@pytest.mark.parametrize('name, seed, changes', [
    *((name, 0, {}) for name in [None, *TAUS]), (None, 0, dict(step_noise=0.1)),
    *((name and f'{name}, past', 1, ROTARY) for name in [None, *TAUS]),
    *((name, 0, dict(kind=kind, **shape)) for kind, shape in CLASSES.values()
      for name in ['kl', 'accel'] + ['zoo.ouro:gate'] * issubclass(kind, Gated))])
def test_token_by_token_is_the_whole_sequence(tiny, name, seed, changes):
    """With a slot for each step of the budget, one token after another gives what one pass does."""
    model, rule, trace = tiny(**dict(adapter_init='random') | changes), rule_of(name), []
    idx = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(seed))
    logits, _ = model(idx, n_loop=[12, 11], exit=rule, noise_seed=seed, trace=trace)
    steps, evals = (torch.stack([entry[kind] for entry in trace], dim=2)
                    for kind in ('steps_used', 'evals'))
    assert rule is None or len(steps.unique()) > 1
    plan = Plan([12, 11], rule, as_noise(seed))
    whole = teacher_forced(model, idx, plan)
    assert_same(whole, (logits, steps, evals))
    one_by_one = teacher_forced(model, idx, plan, 'ring', 12)
    torch.testing.assert_close(one_by_one[0], logits, **CLOSE)
    assert_same(one_by_one[1:], whole[1:])
    if not changes:     # a lone row is one number where several are an array
        alone = teacher_forced(model, idx[:1], plan, 'ring', 12)
        assert_same(alone[1:], (steps[:1], evals[:1]))


def test_rows_that_exit_as_a_whole_are_decoded_token_by_token(tiny, idx):
    model, rule = tiny(adapter_init='random'), replace(rule_of('kl'), by_row=True)
    exact, ring = (teacher_forced(model, idx, Plan([9, 9], rule), policy, 9)
                   for policy in ('exact', 'ring'))
    assert_same(exact, ring)


# cache policies ----------------------------------------------------------------------------------

@pytest.mark.parametrize('policy, ring', [('ring', 4), ('latest', 8)])
def test_fewer_slots_change_the_result_and_keep_less(tiny, idx, policy, ring):
    model, counts = tiny(adapter_init='random'), [9, 3]
    exact, _, _ = teacher_forced(model, idx, Plan(counts))
    fewer, _, _ = teacher_forced(model, idx, Plan(counts), policy, ring)
    assert 1e-4 < (exact - fewer).abs().max() < 1
    cache = make_cache(model, counts, policy, ring)
    slots = [cache[block].slots for layer in model.h for block in getattr(layer, 'core', [layer])]
    assert slots == dict(ring=[1, 4, 3, 3, 1], latest=[1, 1, 1, 1, 1])[policy]
    if policy == 'latest':
        assert_same(teacher_forced(model, idx, Plan(counts), 'ring', 1)[:1], (fewer,))
    # a token that comes alone waits for no other
    past, own = (teacher_forced(model, idx, Plan([9, 9], rule_of(name)), policy, ring)
                 for name in ('norm, past', 'norm'))
    assert_same(past, own)


@pytest.fixture
def problems(wave):
    """A model that has learnt a task with a wave, and 32 of its problems: idx, targets (32, 12)."""
    model, checkpoint = load_checkpoint(wave / 'out' / 'ckpt.pt')
    return model, *Problems(checkpoint['config']['dataset']).held_out(range(32), 12)


def test_policies_end_at_one_fixed_point_and_latest_is_there_first(problems):
    """exact is Jacobi's iteration, latest Gauss and Seidel's."""
    model, idx, targets = problems

    def loss(n, policy):
        logits, _, _ = teacher_forced(model, idx, Plan([n]), policy, 4)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    exact = teacher_forced(model, idx, Plan([30]))[0]
    for policy in ('ring', 'latest'):
        other = teacher_forced(model, idx, Plan([30]), policy, 4)[0]
        torch.testing.assert_close(other, exact, rtol=0, atol=1e-3)
    converged, first = loss(30, 'exact') + 5e-3, {}
    for policy in ('exact', 'latest'):
        first[policy] = next(n for n in range(1, 31) if loss(n, policy) < converged)
    assert first['latest'] <= first['exact'] - 2


@torch.no_grad()
@pytest.mark.parametrize('rule', [None, make_exit('norm_rel', 1e-3)])
def test_with_latest_a_prompt_converges(problems, rule):
    """With a rule and without, where as many loops side by side are not enough."""
    (model, idx, _), counts = problems, [6]
    ends = teacher_forced(model, idx, Plan([30]))[0][:, -1]
    cache = make_cache(model, counts, 'latest')
    logits, steps, _ = prefill(model, idx, Plan(counts, rule, cache=cache), True)
    alone, _, _ = prefill(model, idx, Plan(counts, rule))
    assert 3 * (logits - ends).abs().mean() < (alone - ends).abs().mean()
    assert counts[0] < steps.max() <= counts[0] + 11
    # a prompt of one token has nothing to wait for, and its whole budget without a rule
    one, _, _ = prefill(model, idx[:, :1], Plan(counts, rule), True)
    assert torch.equal(one, prefill(model, idx[:, :1], Plan(counts, rule))[0])


# many tokens -------------------------------------------------------------------------------------

def test_context_start():
    starts = [context_start(n, 16) for n in (1, 16, 17, 24, 25, 32, 33)]
    assert starts == [0, 0, 8, 8, 16, 16, 24]
    for block in (1, 2, 5, 16):
        for n in range(1, 60):
            in_context = n - context_start(n, block)
            assert min(n, block // 2) <= in_context <= block


@pytest.mark.parametrize('name, T, changes', [
    (None, 5, {}), ('kl', 1, {}), ('accel, past', 16, ROTARY), (None, 9, ROTARY | dict(groups=[]))])
def test_generate_is_the_argmax_of_the_whole_context(tiny, idx, name, T, changes):
    """With a cache and without, and past the block of 16, where the window moves on."""
    model = tiny(adapter_init='random', **changes)
    how = dict(exit=rule_of(name), n_loop=10, noise_seed=1)
    out, steps = model.generate(idx[:2, :T], 20, **how, **GREEDY)
    assert out.shape == (2, T + 20) and steps.shape == (2, 20, len(model.groups))
    assert_same(model.generate(idx[:2, :T], 20, cache=None, **how, **GREEDY), (out, steps))
    for t in range(T, T + 20):
        trace = []
        logits, _ = model(out[:, context_start(t, 16):t], trace=trace, **how)
        assert torch.equal(out[:, t], logits[:, -1].argmax(-1))
        for g, entry in enumerate(trace):
            assert torch.equal(steps[:, t - T, g], entry['steps_used'][:, -1])
    # of a long prompt the last block
    long, _ = model.generate(out, 6, **how, **GREEDY)
    of_last_block, _ = model.generate(out[:, -16:], 6, **how, **GREEDY)
    assert torch.equal(long[:, :T + 20], out)
    assert torch.equal(long[:, T + 20:], of_last_block[:, 16:])


@pytest.mark.parametrize('name', [None, 'norm', 'norm, past'])
def test_rows_stop_at_a_token(tiny, idx, name):
    model, how = tiny(adapter_init='random'), dict(n_loop=6, exit=rule_of(name))
    free, free_steps = model.generate(idx[:, :5], 20, **how, **GREEDY)
    new = free[:, 5:].tolist()
    # one that row 0 or 1 says while the last row goes on
    stop = next(token for said in zip(*new) for token in said[:2] if token not in new[2][:5])
    out, steps = model.generate(idx[:, :5], 20, stop=stop, **how, **GREEDY)
    lengths = [row.index(stop) + 1 if stop in row else 20 for row in new]
    for b, n in enumerate(lengths):
        assert_same((out[b, :5 + n], steps[b, :n]), (free[b, :5 + n], free_steps[b, :n]))
        assert (out[b, 5 + n:] == stop).all() and (steps[b, n:] == 0).all()
    assert steps.shape[1] == max(lengths) > min(lengths)


def test_choose():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(4000, 1)
    keys = [(seed, seed % 7) for seed in range(4000)]
    assert (choose(logits, 0, None, keys) == 1).all()
    assert set(choose(logits, 1.0, 2, keys).unique().tolist()) == {1, 3}
    assert (choose(1e30 * logits, 1e-6, 9, keys) == 1).all()          # nothing overflows
    # bfloat16 is computed in float32
    rough = torch.randn(4000, 99, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(choose(rough, 0.7, 3, keys), choose(rough.float(), 0.7, 3, keys))
    for temperature, top_k in ((1.0, None), (2.0, None), (0.7, 3)):
        counts = choose(logits, temperature, top_k, keys)[:, 0].bincount(minlength=4)
        p = (logits[0] / temperature).masked_fill(torch.arange(4) < 4 - (top_k or 4), -math.inf)
        expected = 4000 * p.softmax(0)
        chi_squared = ((counts - expected) ** 2 / expected)[expected > 0].sum()
        assert chi_squared < 16.3               # 3 degrees of freedom: 1 in 1000 is above


@pytest.mark.parametrize('name, draft_loops, new, changes', [
    (None, 1, 14, ROTARY), ('kl', 9, 3, {}), ('accel, past', 2, 14, {})])
def test_speculative_is_greedy(tiny, idx, name, draft_loops, new, changes):
    model, prompt = tiny(adapter_init='random', **changes), idx[:1, :6]
    how = dict(n_loop=10, exit=rule_of(name), **GREEDY)
    plain = model.generate(prompt, new, **how)
    assert_same(model.generate(prompt, new, draft_loops=draft_loops, **how), plain)
    # and it ends at the same token
    tokens = plain[0][0, 6:].tolist()
    stop = tokens[-2]
    n = tokens.index(stop) + 1
    stopped = model.generate(prompt, new, stop=[257, stop], draft_loops=draft_loops, **how)
    assert_same(stopped, (plain[0][:, :6 + n], plain[1][:, :n]))


def test_good_drafts_take_few_full_passes(tiny, idx):
    """Four drafts and the token after them, as often as all agree with all loops."""
    model, loops_of_pass = tiny(block_size=64), []
    model.groups[1].register_forward_pre_hook(
        lambda _, args: loops_of_pass.append(args[1].counts[1]))
    model.generate(idx[:1, :6], 40, n_loop=12, draft_loops=11, **GREEDY)
    assert loops_of_pass.count(12) == 1 + math.ceil(39 / 5)
    assert loops_of_pass.count(11) == 7 * 4 + 3


@pytest.mark.parametrize('how', [{}, dict(draft_loops=1, cache='exact'), dict(wave=3)])
def test_a_nan_stops_with_a_clear_error(tiny, idx, how):
    """At a later position, after the tokens before it; a draft may come upon it, too."""
    model = tiny()
    model.wpe.weight.data[9] = math.nan
    tokens, expected = model.stream(idx[:1, :6], 9, n_loop=3, seed=0, **how), []
    with pytest.raises(ValueError, match='not finite'):
        for token, _ in tokens:
            expected.append(token.item())
    assert 0 < len(expected) <= 4 and min(expected) >= 0


@pytest.mark.parametrize('how, words', [
    (dict(max_new_tokens=0), 'max_new_tokens'),
    (dict(temperature=1e-7), 'temperature'),
    (dict(top_k=0), 'top_k'),
    (dict(cache='ring', ring=0), 'ring must have at least 1'),
    (dict(cache='newest'), 'unknown cache policy .newest.'),
    (dict(cache=''), "unknown cache policy ''"),
    (dict(warm_start=True, cache=None), 'needs a cache'),
    (dict(draft_loops=3, n_loop=3), 'must lie between 1 and n_loop - 1, not 3'),
    (dict(draft_loops=1), 'needs one row'),
    (dict(warm_start=True, injection='none'), 'loop steps read their input'),
    (dict(cache='latest', exit=make_exit('norm', wake=True)), "waking needs .* 'latest' does not"),
    (dict(exit=replace(ROW, reads='stars')), 'needs the method stars'), (dict(seed=[1]), 'each of'),
    (dict(draft_loops=2, exit=ROW, rows=1), "rule 'zoo.huginn:kl' reads all tokens of a pass"),
    (dict(idx=torch.zeros(1, 0, dtype=torch.long)), 'prompt is empty')])
def test_bad_input(tiny, idx, how, words):
    how = dict(idx=idx, max_new_tokens=1, rows=3, injection='concat') | how
    model, rows = tiny(injection=how.pop('injection')), how.pop('rows')
    with pytest.raises(ValueError, match=words):
        model.stream(how.pop('idx')[:rows, :9], **how)          # at once, not at the first token


def test_numbers_of_numpy_are_numbers(tiny, idx):
    how, n = dict(temperature=0.8, cache='exact'), np.int64(3)
    plain = tiny().generate(idx[:2], 5, n_loop=3, seed=3, noise_seed=3, **how)
    assert_same(tiny().generate(idx[:2], 5, n_loop=n, seed=n, noise_seed=n, **how), plain)


@pytest.mark.parametrize('seed, name, tau', [(9, 'norm_rel', 0.3), (16, 'kl', 0.02)])
def test_what_a_rejected_draft_signalled_is_forgotten(seed, name, tau):
    """Drafts with a rule that waits for the past give the text and steps of plain decoding."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(block_size=24, vocab_size=11, n_layer=4, n_head=2, n_embd=8,
                          groups=[[1], [2]], pos='rotary', adapter_init='random')).eval()
    for p in model.parameters():
        p.data.mul_(1.5)
    how = dict(n_loop=12, exit=make_exit(name, tau, wake=True), cache='exact', **GREEDY)
    idx = torch.randint(11, (1, 4))
    assert_same(model.generate(idx, 18, draft_loops=1, **how), model.generate(idx, 18, **how))


def test_narrow_models_decode_with_one_thread(monkeypatch):
    """But OMP_NUM_THREADS decides if it is set, and wide models keep their threads."""
    for n_embd, settings, calls in (96, {}, 1), (768, {}, 0), (96, {'OMP_NUM_THREADS': '2'}, 0):
        monkeypatch.setattr('os.environ', settings)
        with mock.patch('torch.set_num_threads') as setter:
            use_one_thread(SimpleNamespace(config=SimpleNamespace(n_embd=n_embd)))
        assert setter.call_count == calls, (n_embd, settings)


# files and classes -------------------------------------------------------------------------------

def test_a_file_of_the_package_runs_and_a_decoder_is_imported_when_it_is_chosen():
    """
    And once: a wave that runs `python -m decode.wave` has no second copy of its class. All in one
    Python of its own, in which a RuntimeWarning is an error.
    """
    code = """
import contextlib, runpy, sys
import decode, sample
print(*{'decode.drafts', 'decode.wave', 'decode.compiled'} & set(sys.modules))
for module in 'decode', 'decode.compiled':
    sys.argv[1:] = ['--help']
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name='__main__', alter_sys=True)
sys.argv[1:] = ['--max_new_tokens=2']
runpy.run_module('decode.wave', run_name='__main__', alter_sys=True)
print(len([kind for kind in object.__subclasses__() if kind.__name__ == 'Wave']))
"""
    done = subprocess.run([sys.executable, '-W', 'error::RuntimeWarning', '-c', code], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == '', done.stderr
    assert done.stdout.startswith('\n') and done.stdout.endswith('\n1\n')
    for module in 'decode', 'decode.compiled':
        assert f'python -m {module}' in done.stdout


# compiled ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('how, rows, changes, graphs', [
    (dict(cache='latest', n_loop=2), 3, ROTARY | SHORT, 1),
    (dict(cache='exact', n_loop=2, draft_loops=1), 1, SHORT, 2),
    (dict(n_loop=6, wave=4, wave_steps=2, exit=make_exit('norm_rel', 0.3)), 1, SHORT, 1),
    # the first step of each length of core, the others, and the plain layers
    (dict(cache='exact', n_loop=6, exit=make_exit('accel', 2.0, wake=True)), 1, ROTARY, 4)])
def test_compiled_texts_are_those_of_eager(tiny, how, rows, changes, graphs):
    """A text of three tokens compiles all passes; another, over window moves, no further one."""
    torch.compiler.reset()
    counter, compiled, eager = CompileCounter(), tiny(**changes), tiny(**changes)
    compile_passes(compiled, 5, backend=counter)
    for seed, new in (1, 3), (2, 36):
        prompts = torch.arange(3)[None] + torch.arange(rows)[:, None] + seed
        texts = [zip(*model.stream(prompts, new, temperature=0.7, seed=seed, **how))
                 for model in (eager, compiled)]
        assert_same(*(map(torch.cat, text) for text in texts))
        assert counter.frame_count == graphs


@pytest.mark.parametrize('how', [
    dict(cache='exact', n_loop=2, draft_loops=1),
    dict(n_loop=6, wave=8, exit=make_exit('norm_rel', 0.3))])
def test_compiled_passes_are_not_wider_than_the_context(tiny, how):
    torch.compiler.reset()
    changes = ROTARY | dict(block_size=4)
    compiled, eager = tiny(**changes), tiny(**changes)
    compile_passes(compiled, how.get('wave', 5), backend='eager')
    texts = [zip(*model.stream(torch.arange(3)[None], 12, temperature=0, **how))
             for model in (eager, compiled)]
    assert_same(*(map(torch.cat, text) for text in texts))


def test_where_compiling_fails_decoding_goes_on(tiny, capsys):
    def fails(graph, inputs):
        raise RuntimeError('there is no compiler')
    model, how = tiny(**SHORT), dict(temperature=0, cache='exact', n_loop=1)
    expected = list(model.stream(torch.arange(3)[None], 8, **how))
    compile_passes(model, backend=fails)
    try:
        for pair, other in zip(model.stream(torch.arange(3)[None], 8, **how), expected):
            assert_same(pair, other)
        line, = [line for line in capsys.readouterr().err.splitlines() if 'failed' in line]
        assert 'goes on without' in line and 'there is no compiler' in line
    finally:
        torch.compiler.set_stance('default')


def test_a_cache_that_has_got_more_slots_is_recorded_anew(monkeypatch):
    """A graph reads and writes the memory that the keys and values had when it was recorded."""
    recorded = []

    def record(run):
        recorded.append(run)
        return run(), lambda: None
    monkeypatch.setattr(compiled, 'record', record)
    kv = KeysValues(4, 4)
    kv.kv = torch.zeros(1, 1, 4, 2, 1, 1)
    plan = Plan([1], span=compiled.AnyPlace(1, 1, 4, 4, 'cpu'), cache={'block': kv})
    passes = compiled.RecordedPasses(lambda idx, plan: (idx, []))
    for _ in range(3):
        passes(torch.zeros(1, 1), plan)         # the first one is not recorded
    assert len(recorded) == 1
    kv.kv = torch.cat((kv.kv, kv.kv))
    passes(torch.zeros(1, 1), plan)
    assert len(recorded) == 2
