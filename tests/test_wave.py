"""Waves: the text of the full budget, several tokens at once."""
import math

import pytest
import torch
from conftest import finished, read_csv, refused
from PIL import Image
from test_decode import ROTARY, assert_same, rule_of

from cache import Span, make_cache
from common.checkpoint import open_run
from decode import prefill
from decode.rows import choose
from exits import Exit, make_exit
from loops import Plan

RANDOM = dict(adapter_init='random')


@pytest.fixture(scope='module')
def trained():
    """The pretrained model, a prompt (1, 19), and [(knobs, waves, text of the full budget)]."""
    model, *_ = open_run('pretrained/text')
    prompt = torch.tensor([[*b'The method returns ']])
    ways = (dict(temperature=0), dict(wave=8)), (dict(temperature=1.0, top_k=9, seed=5),
                                                 dict(wave=5, wave_steps=3))
    return model, prompt, [
        (how, wave, model.generate(prompt, 34, n_loop=32, cache='exact', **how)[0])
        for how, wave in ways]


@pytest.mark.parametrize('changes, n_loop, T', [
    ({}, 5, 5), (dict(pos='rotary', norm_inside=False), [4, 7], 1), (dict(x0='e'), 3, 16),
    (dict(x0='zero', injection='add', groups=[[0], [2, 3], [4]]), 4, 20)])
def test_one_token_with_all_its_loops_is_plain_decoding(tiny, changes, n_loop, T):
    """Past the end of the block of 16, and for a prompt that is longer than it."""
    model = tiny(**RANDOM | changes)
    idx = torch.randint(50, (1, T), generator=torch.Generator().manual_seed(4))
    how = dict(n_loop=n_loop, noise_seed=1, temperature=0.7, top_k=9, seed=3)
    plain = model.generate(idx, 20, cache='latest', **how)
    waved = model.generate(idx, 20, wave=1, wave_steps=n_loop, **how)
    assert torch.equal(plain[0], waved[0]) and torch.equal(plain[1], waved[1])


def by_hand(model, prompt, new, width, steps, rule, n_loop, seed):
    """
    A wave within one window, token by token, each a dict: the new tokens, their loop steps, and
    what happens in each pass.
    """
    counts, steps = model.loop_counts(n_loop, rule is not None), model.loop_counts(steps)
    most, end = max(-(-n // k) for n, k in zip(counts, steps)), len(prompt) + new
    groups, cache = range(len(steps)), make_cache(model, counts, 'latest')

    def draw(logits, position):
        return choose(logits[None], 0.8, None, [(seed, position)]).item()

    def joins(token):
        return dict(input=token, states=None, memo=[None] * len(steps), streak=[0] * len(steps),
                    age=0, passes=0)
    logits, used, _ = prefill(model, prompt[None], Plan(counts, rule, cache=cache), converge=True)
    row, made, trace = prompt.tolist(), [used[0].tolist()], []
    row.append(draw(logits[0], len(row)))
    wave = [joins(row[-1])]
    while len(row) < end:
        first = len(row) - 1
        new = torch.full((model.config.n_embd,), math.nan)      # never read
        known = torch.tensor([one['states'] is not None for one in wave])
        warm = [torch.stack([one['states'][g] if one['states'] else new for one in wave])[None]
                for g in groups]
        idx = torch.tensor([[one['input'] for one in wave]])
        span = Span(first, len(wave))
        x, found = model.hidden(idx, Plan(steps, span=span, cache=cache, warm=warm,
                                             warm_tokens=known))
        ends = [of_group['x'] for of_group in found]
        said = [draw(model.lm_head(x[0, i]), len(row) + i) for i in range(len(wave))]
        for i, one in enumerate(wave):
            one['age'], one['passes'] = one['age'] + 1, one['passes'] + 1
            states = [ends[g][0, i] for g in groups]
            for g in groups if one['states'] and rule else ():
                value, one['memo'][g] = rule.signal(one['states'][g], states[g], one['memo'][g],
                                                    model.reader(rule))
                small = value is not None and one['age'] > 1 and value < rule.tau
                one['streak'][g] = one['streak'][g] + 1 if small else 0
            one['states'] = states
        n = 0
        while n < len(wave) and (n == 0 or wave[n]['input'] == said[n - 1]) and (
                rule and min(wave[n]['streak']) >= rule.hits
                or n == 0 and wave[0]['age'] >= most):
            made.append([wave[n]['passes'] * k for k in steps])
            row.append(said[n])
            n += 1
        trace.append(dict(position=first, inputs=[one['input'] for one in wave], tokens=said,
                          leave=n, age=[one['age'] for one in wave]))
        for one, token in zip(wave[1:], said):
            if one['input'] != token:
                one |= dict(input=token, age=0)
        wave = [*wave[n:], joins(said[-1])][:min(width, end - len(row))]
    return row[len(prompt):], made, trace


@pytest.mark.parametrize('name, tau, how', [
    ('norm', 0.5, dict(width=4, steps=1, n_loop=9)),
    ('kl', 1e-4, dict(width=9, steps=2, n_loop=12)),
    ('accel', 0.3, dict(width=3, steps=[1, 2], n_loop=[4, 9])),
    ('accel_rel', 0.2, dict(width=5, steps=1, n_loop=20)),
    ('norm_rel', 0.05, dict(width=40, steps=3, n_loop=30)),
    ('accel_hat', math.inf, dict(width=4, steps=2, n_loop=9)),
    # all tokens leave in one pass, and the wave starts again from one without states
    ('accel', math.inf, dict(width=3, steps=4, n_loop=4)),
    ('norm', 0, dict(width=4, steps=2, n_loop=9)),
    (None, None, dict(width=4, steps=2, n_loop=9))])
@torch.no_grad()
def test_a_wave_is_what_its_tokens_do(tiny, idx, name, tau, how):
    model, rule = tiny(**RANDOM | dict(block_size=32)), make_exit(name, tau) if name else None
    for row, seed in zip(idx[:, :7], (1, 2, 3)):
        trace, expected = [], by_hand(model, row, 20, rule=rule, seed=seed, **how)
        made = model.stream(row[None], 20, exit=rule, wave=how['width'], wave_steps=how['steps'],
                            n_loop=how['n_loop'], temperature=0.8, seed=seed, trace=trace)
        tokens, steps = zip(*made)
        assert expected == ([token.item() for token in tokens],
                            [used[0].tolist() for used in steps], trace)


@pytest.mark.parametrize('name, tau', [('norm_rel', 1e-4), ('kl', 1e-7), (None, None)])
def test_a_converged_wave_has_the_text_of_the_full_budget(trained, name, tau):
    model, prompt, ways = trained
    rule = make_exit(name, tau) if name else None
    for how, wave, full in ways:
        waved, steps = model.generate(prompt, 34, n_loop=32, exit=rule, **how, **wave)
        assert torch.equal(waved, full)
        if name:
            assert steps[:, 1:].float().mean() < 20


def test_a_wave_ends_at_stop(trained):
    (model, prompt, _), trace = trained, []
    how = dict(temperature=0, n_loop=30, exit=make_exit('norm_rel', 0.3), wave=6)
    tokens = [token.item() for token, _ in model.stream(prompt, 20, trace=trace, **how)]
    # a stop in the middle of what one pass commits
    one = next(one for one in trace if one['leave'] > 1)
    n = one['position'] - 19 + 2
    assert tokens.index(tokens[n - 1]) == n - 1
    stopped, _ = model.generate(prompt, 20, stop=tokens[n - 1], **how)
    assert stopped[0, 19:].tolist() == tokens[:n]


def test_the_gif_is_what_is_printed(tmp_path, monkeypatch):
    """A frame for each pass; the framed cells are the text, from its second new token on."""
    monkeypatch.chdir(tmp_path)
    shown = finished('--animate', '--max_new_tokens=6', script='decode/wave.py')
    with Image.open('out/text/figures/wave.gif') as gif:
        assert gif.n_frames == shown.count('\n   ') and gif.info['loop'] == 0
    rows = read_csv('out/text/figures/wave.csv')
    committed = ''.join(row['text'] for row in rows if row['committed'] == '1')
    model, *_ = open_run('pretrained/text')
    prompt = torch.tensor([[*b'The method returns ']])
    text = model.generate(prompt, 6, temperature=0, n_loop=30, cache='latest')[0]
    assert committed == bytes(text[0, 20:].tolist()).decode()
    assert any(row['revised'] == '1' for row in rows) and rows[0]['loop_steps'] == '1'
    assert 'there are none' in refused('--animate', '--max_new_tokens=1', script='decode/wave.py')
    assert '--wave must be at least 1' in refused('--wave=0', script='decode/wave.py')


@pytest.mark.parametrize('how, words', [
    (dict(wave=-1), 'not -1'), (dict(wave_steps=0), 'wave_steps must be an int from 1'),
    (dict(cache='exact'), "wave needs cache='latest', not 'exact'"),
    (dict(rows=2), 'wave needs one row, not 2'),
    (dict(draft_loops=2), 'wave and draft_loops are two'),
    (dict(warm_start=True), 'leave out wave'),
    (dict(groups=[]), 'recurrent groups'), (dict(injection='none'), 'recurrent groups'),
    (dict(step_noise=0.1), 'without step_noise'),
    (dict(exit=Exit(None, reads='through_coda', name='x')), 'rule that reads'),
    (dict(exit=Exit(None, by_row=True, name='x')), 'rule that reads')])
def test_bad_input(tiny, idx, how, words):
    changes = {name: how.pop(name) for name in ('groups', 'injection', 'step_noise')
               if name in how}
    rows = how.pop('rows', 1)
    with pytest.raises(ValueError, match=words):
        tiny(**changes).generate(idx[:rows], 2, **dict(wave=4) | how)


# one seed, one text -------------------------------------------------------------------------------

@pytest.mark.parametrize('name, changes, how', [
    (None, ROTARY | dict(step_noise=0.05), dict(temperature=0.8)),
    ('kl, coda', ROTARY, dict(temperature=1.5, top_k=7)), ('accel', {}, dict(temperature=0.8)),
    ('accel, past', ROTARY | dict(step_noise=0.05), dict(temperature=1.5))])
def test_one_seed_is_one_text(tiny, idx, name, changes, how):
    """However it is decoded: with a cache or without, in a batch, with drafts, in two parts."""
    model = tiny(**RANDOM | changes)
    how |= dict(n_loop=6, exit=rule_of(name))
    text, steps = model.generate(idx, 14, seed=[7, 8, 20], **how)
    assert_same(model.generate(idx, 14, seed=[7, 8, 20], cache=None, **how), (text, steps))
    assert_same(model.generate(idx[:2], 14, seed=7, **how), (text[:2], steps[:2]))
    for b, seed in enumerate((7, 8, 20)):
        row, alone = idx[b:b + 1], (text[b:b + 1], steps[b:b + 1])
        assert_same(model.generate(row, 14, seed=seed, **how), alone)
        drafted = model.generate(row, 14, seed=seed, cache='exact', draft_loops=2, **how)
        assert_same(drafted, alone)
    # a text that is continued from its 24 tokens, of which the model sees the last block of 16
    again = model.generate(text[:, :24], 6, seed=[7, 8, 20], **how)
    assert_same(again, (text, steps[:, 8:]))


def test_without_a_seed_torch_decides(tiny, idx):
    model = tiny()
    torch.manual_seed(0)
    one, two = (model.generate(idx, 8)[0] for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(model.generate(idx, 8)[0], one) and not torch.equal(one, two)
    assert not torch.equal(one[0, 16:], one[1, 16:])
    with pytest.raises(ValueError, match='one for each of the 3 rows'):
        model.generate(idx, 8, seed=[1, 2])
