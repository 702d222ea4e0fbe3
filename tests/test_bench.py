"""bench.py: quality, the oracle, calibrated thresholds, tables, Ctrl-C, bad input."""
import contextlib
import json
import math
import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conftest
import numpy as np
import pytest
import torch
from conftest import TINY, finished, read_csv, refused

import bench
import data
import decode
from common import plots, report
from common.checkpoint import load_checkpoint
from exits import make_exit

SMALL = ['--taus=[0,1e-2,0.3,100.0]', '--budgets=[1,2,5,2]', '--epsilons=[0.0,0.3]', '--n_loop=5',
         '--n_windows=6', '--device=cpu', '--cache=exact', '--past=False', '--n_prompts=2',
         '--new_tokens=8', '--drafts=[[1,3,4]]', '--waves=[[3,2]]', '--rules=["norm","accel"]']
ONE_RULE = [*SMALL, '--rules=["accel"]']
NINE = [('fixed', 5), ('fixed', 1), ('fixed', 2), ('accel', 0), ('accel', 1e-2), ('accel', 0.3),
        ('accel', 100), ('oracle', 0), ('oracle', 0.3)]     # the points of ONE_RULE, in their order


def names(rows):
    return [(row['rule'], float(row['tau'])) for row in rows]


def value(rows, rule, tau, column='ce', cache='exact', past='False'):
    row, = [row for row in rows if (row['cache'], row['rule'], row['past']) == (cache, rule, past)
            and float(row['tau']) == tau and row['windows']]
    return float(row[column])


@pytest.fixture
def here(here, monkeypatch):
    """In the folder of a run, with no bench.csv yet; figures are drawn and not saved."""
    monkeypatch.setattr(plots.Figure, 'savefig', lambda *how, **more: None)
    Path('out/bench.csv').unlink(missing_ok=True)


@pytest.fixture(scope='module')
def benched(run_folder):
    """A whole benchmark: its rows and what it printed."""
    with contextlib.chdir(run_folder):
        printed = finished(*SMALL, '--cache=["exact","latest"]', '--past=[False,True]',
                           script='bench.py')
        return read_csv('out/bench.csv'), printed


@pytest.fixture(scope='module')
def held_out(run_folder):
    """The model and the six windows that SMALL asks for: idx, targets."""
    with contextlib.chdir(run_folder):
        model, _ = load_checkpoint('out/ckpt.pt')
        text = data.open_data('book')
        last = text.n_held_out(16) - 1
        return model, *text.held_out(np.linspace(0, last, 6).round().astype(int), 16)


# a whole benchmark --------------------------------------------------------------------------------

def test_every_point_once(benched, run_folder):
    rows, printed = benched
    of_rules = [(name, tau) for name in ('norm', 'accel') for tau in (0, 1e-2, 0.3, 100)]
    fixed, oracles = [('fixed', n) for n in (1, 2, 5)], [('oracle', eps) for eps in (0, 0.3)]
    expected = {('exact', 'False'): fixed + oracles + of_rules, ('exact', 'True'): of_rules,
                ('latest', 'False'): fixed + oracles, ('latest', 'True'): of_rules}
    of_windows, others = ([row for row in rows if bool(row['windows']) == has]
                          for has in (True, False))
    for way, points in expected.items():
        mine = [row for row in of_windows if (row['cache'], row['past']) == way]
        assert sorted(names(mine)) == sorted(points)
    assert len(of_windows) == sum(map(len, expected.values()))
    assert names(others) == [('fixed', 3)] + of_rules
    # all but oracles write texts
    of_texts = [row for row in rows if row['prompts']]
    assert of_texts == [row for row in rows if row['rule'] != 'oracle']
    for measured, columns in (of_windows, bench.OF_WINDOWS), (of_texts, bench.OF_TEXTS):
        assert all(math.isfinite(float(row[column])) for row in measured for column in columns)
    for name in ('figure_4', 'ledger'):
        assert os.path.getsize(run_folder / 'out' / f'{name}.png') > 5000


def test_runs_beside(benched, held_out, here):
    """Each run is measured as it is alone, a plain model at one point. The data must be equal."""
    finished(*TINY, '--groups=[]', '--out_dir=plain', '--max_iters=2')
    finished(*ONE_RULE, "--beside=['plain']", script='bench.py')
    *together, plain = read_csv('out/bench.csv')
    alone = {row['name']: row for row in benched[0]}
    for row in together:
        for key in 'run', 'ce', 'identical', 'blocks':
            assert row[key] == alone[row['name']][key], (row['name'], key)
    _, idx, targets = held_out
    with torch.no_grad():
        _, loss = load_checkpoint('plain/ckpt.pt')[0](idx, targets)
    assert float(plain['ce']) == pytest.approx(loss.item(), rel=1e-6)
    assert (plain['run'], plain['kind'], plain['mean_evals']) == ('plain', 'no loops', '')
    assert float(plain['ms_per_token']) > 0 and plain['identical'] == plain['passes'] == '1.0'
    assert 'no recurrent groups' in refused('--out_dir=plain', '--calibrate=1', script='bench.py')
    finished(*TINY, '--dataset=calc', '--block_size=16', '--out_dir=other', '--max_iters=2',
             '--eval_windows=2')
    assert 'other was trained on other data' in refused("--beside=['other']", script='bench.py')


def test_the_fastest_of_each_kind(benched):
    rows, printed = benched
    title = "the fastest of each kind with 95% of the full budget's texts:"
    table = printed.partition(title)[2].split('\n\n')[0].splitlines()[2:]
    good = sorted((row for row in rows if row['identical'] and float(row['identical']) >= 0.95),
                  key=lambda row: float(row['ms_per_token']))
    best = {row['kind']: row['name'] for row in reversed(good)}
    assert {'fixed budgets, exact', 'rules, exact', 'rules, exact, past'} <= best.keys()
    assert [line.split('  ')[0] for line in table] == [
        row['name'] for row in good if best[row['kind']] == row['name']]


@torch.no_grad()
def test_what_continuations_cost(benched, held_out):
    rows, _ = benched
    model, idx, _ = held_out
    of = {(row['kind'], row['rule'], float(row['tau'])): {
        name: float(row[name]) for name in (*bench.OF_TEXTS, 'prompts')}
        for row in rows if row['prompts']}
    full, two = of['fixed budgets, exact', 'fixed', 5], of['fixed budgets, exact', 'fixed', 2]
    assert full['identical'] == full['passes'] == 1
    assert full['prompts'] == 2 and full['blocks'] == 10 and two['blocks'] == 4      # two groups
    # how many of the two texts are equal, by other code
    texts = {n: model.generate(idx[:2, :8], 8, temperature=0, n_loop=n)[0] for n in (5, 2)}
    assert two['identical'] == (texts[5] == texts[2]).all(dim=1).double().mean().item()
    # a draft of one loop is checked by three
    assert of['drafts', 'fixed', 3]['blocks'] > 6
    # a wave has up to three tokens, each pass with two loop steps
    for wave in (found for (kind, *_), found in of.items() if kind == 'waves'):
        assert 4 * wave['passes'] < wave['blocks'] <= 12 * wave['passes']


@torch.no_grad()
def test_quality_is_the_models_own(benched, held_out):
    rows, _ = benched
    model, idx, targets = held_out
    for n in (1, 2, 5):
        logits, loss = model(idx, targets, n_loop=n)
        right = (logits.argmax(-1) == targets).double().mean()
        for column, number in dict(ce=loss, ppl=loss.exp(), accuracy=right, mean_evals=n).items():
            assert math.isclose(value(rows, 'fixed', n, column), number, rel_tol=2e-6)
    for past in (False, True):
        trace, rule = [], make_exit('norm', 0.3, wake=past)
        loss = model(idx, targets, n_loop=5, exit=rule, trace=trace)[1].item()
        evals = [entry['evals'].double().mean().item() for entry in trace]
        ce, *found = (value(rows, 'norm', 0.3, column, past=str(past))
                      for column in ('ce', 'evals_1', 'evals_2'))
        assert ce == pytest.approx(loss, rel=1e-6)
        assert found == pytest.approx(evals) and evals[0] != evals[1]
    assert value(rows, 'fixed', 5, 'ce_minus_full') == 0
    # Algorithm 1 at a huge tau: the second hit comes at step 3
    assert value(rows, 'accel', 100, 'mean_evals') == 3


def test_a_rule_with_one_part_changed(here):
    """One hit comes at the first check, at step 2, which is kept: two fixed loops in all."""
    finished(*ONE_RULE, '--hits=1', '--keep=True', '--cache=latest', '--n_windows=1',
             '--n_prompts=0', '--dtype=bfloat16', script='bench.py')
    rows = read_csv('out/bench.csv')
    assert value(rows, 'accel', 100, cache='latest', past='True') == value(
        rows, 'fixed', 2, cache='latest')


def test_budgets_alone(here):
    printed = finished(*SMALL, '--rules=[]', '--n_prompts=0', script='bench.py')
    assert 'fixed 5, exact' in printed
    assert names(read_csv('out/bench.csv')) == [row for row in NINE if row[0] != 'accel']


# interrupted --------------------------------------------------------------------------------------

def interrupt(name, call, before=lambda: None):
    """Run bench.py with a Ctrl-C in the given call of decode.name, counted from 1."""
    calls, plain = count(1), getattr(decode, name)

    def spy(*args, **how):
        if next(calls) == call:
            before()
            raise KeyboardInterrupt
        return plain(*args, **how)
    with mock.patch.object(decode, name, spy):
        done = conftest.run(*ONE_RULE, script='bench.py')
    assert done.returncode == 130 and done.stderr == '\nstopped\n'


def test_ctrl_c_loses_nothing(here, monkeypatch):
    # before there is anything the old file stays
    Path('out/bench.csv').write_text('of an earlier day')
    interrupt('teacher_forced', 1)
    assert Path('out/bench.csv').read_text() == 'of an earlier day'
    # two windows at once, and for each two a pass of the seven points and two passes of both
    # oracles: the 14th is that of the third point, in the second two windows
    with monkeypatch.context() as patch:
        patch.setattr(report, 'windows_at_once', lambda config, most: 2)
        interrupt('teacher_forced', 14)
    rows = read_csv('out/bench.csv')
    assert names(rows) == NINE and {row['ms_per_token'] for row in rows} == {''}
    assert [row['windows'] for row in rows] == ['4'] * 2 + ['2'] * 7
    # the second text of three of the twelve points that write; each has written an untimed one
    at_hand = []
    interrupt('stream', 12 + 12 + 4, lambda: at_hand.extend(read_csv('out/bench.csv')))
    for rows, twice in (at_hand, 0), (read_csv('out/bench.csv'), 3):
        assert names(rows)[:9] == NINE and {row['windows'] for row in rows[:9]} == {'6'}
        assert [row['prompts'] for row in rows if row['rule'] != 'oracle'] == (
            ['2'] * twice + ['1'] * (12 - twice))


# quality and the oracle ---------------------------------------------------------------------------

@torch.no_grad()
@pytest.mark.parametrize('policy', ['exact', 'latest'])
def test_the_oracle_exits_at_the_first_step_within_epsilon(tiny, idx, monkeypatch, policy):
    monkeypatch.setattr(bench, 'n_loop', 9)
    model, trace = tiny(adapter_init='random'), []

    def at(epsilon, idx):
        return bench.decode_given(bench.make_point(model, 'oracle', epsilon, policy), idx)
    full, _ = bench.decode_given(bench.make_point(model, 'fixed', 9, policy), idx)
    torch.testing.assert_close(at(0, idx)[0], full, rtol=0, atol=1e-4)
    one_token = idx[:, :1]              # no other token's exit changes its path in the first group
    model(one_token, n_loop=9, trace=trace)
    states = trace[0]['states'][:, :, 0]                        # (K+1, B, C)
    near = (states - states[-1]).norm(dim=-1)[1:] < 0.5         # (K, B)
    expected = [int(row.nonzero()[0]) + 1 for row in near.T]
    assert max(expected) < 9
    _, evals = at(0.5, one_token)
    assert evals[:, 0, 0].tolist() == expected
    # more tokens: each knows its own last states
    assert torch.equal(at(0.5, idx)[1][:, :1], evals)


def test_the_interval_is_paired():
    """Half a thousandth of a nat in each window: of a normal, the mean ± 1.96 standard errors."""
    rng = np.random.default_rng(0)
    ce, difference = rng.standard_normal(400), 5e-4 + 1e-4 * rng.standard_normal(400)
    mean, low, high = bench.excess(*(SimpleNamespace(measured=dict(ce=list(values)))
                                     for values in (ce + difference, [*ce, 9.0])))
    reach = 1.96 * difference.std() / 400 ** 0.5
    assert [mean - low, high - mean] == pytest.approx([reach, reach], rel=0.06)
    assert mean == pytest.approx(difference.mean())


# thresholds that keep a promise -------------------------------------------------------------------

def test_a_threshold_is_the_largest_that_keeps_its_promise(tiny, monkeypatch, capsys):
    """Losses made by hand: tau / 10 on the even windows, twice that on the odd ones; kl 9 more."""
    def quality(points, idx, targets):
        for point in points:
            of_rule = point.tau / 10 * (1 + idx[:, 0].double().numpy()) + 9 * (point.rule == 'kl')
            point.measured['ce'].extend((point.rule != 'fixed') * of_rule)
            point.measured['evals'].extend(np.ones((len(idx), 2)))
    for name, value in dict(quality=quality, calibrate=0.1, taus=[0.1, 1.0, 3.0], past=True,
                            cache='exact', rules=['accel', 'kl']).items():
        monkeypatch.setattr(bench, name, value)
    idx = torch.arange(16)[:, None] % 2
    accel, kl = bench.find_thresholds(tiny(), idx, idx, idx[:0, None])
    assert accel.items() >= dict(cache='exact', rule='accel', past=True, tau=1.0, cost=0.2,
                                 cost_low=0.2, cost_high=0.2, evals=1).items()
    assert (kl['rule'], kl['tau']) == ('kl', None) and 'cost' not in kl
    bench.print_rows('title', [accel, kl], dict(rule='', past='', tau='g', cost='+.4f'))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [], ['title'], ['rule', 'past', 'tau', 'cost'], ['accel', 'True', '1', '+0.2000'],
        ['kl', 'True']]


def test_sample_uses_the_thresholds_that_the_command_finds(here):
    """Of a rule in three ways; of a wave with its share of texts on the odd windows."""
    finished(*SMALL, '--rules=["kl"]', '--cache=["exact","latest"]', '--past=[False,True]',
             '--calibrate=9', '--n_windows=16', '--fidelity=0.8', '--taus=[1e-3,0.1,10.0]',
             script='bench.py')
    _, waiting, latest, wave = json.loads(Path('out/exits.json').read_text())['exits']
    model, _ = load_checkpoint('out/ckpt.pt')
    book = data.open_data('book')
    idx, targets = book.held_out(data.spread(book, 16, 16), 16)
    # the cost on the odd windows, by other code
    with torch.no_grad():
        rule = make_exit('kl', waiting['tau'], wake=True)
        loss, full = (model(idx[1::2], targets[1::2], n_loop=5, exit=exit)[1]
                      for exit in (rule, None))
    assert waiting['past'] and waiting['cost'] == pytest.approx((loss - full).item(), abs=1e-6)
    assert (wave['wave'], wave['rule'], wave['cache']) == ([3, 2], 'norm_rel', 'latest')
    rule, how, n_equal = make_exit('norm_rel', wave['tau']), dict(temperature=0, n_loop=5), 0
    for prompt in idx[1::2, :8].split(1):
        waved = model.generate(prompt, 8, exit=rule, wave=3, wave_steps=2, **how)[0]
        n_equal += torch.equal(waved, model.generate(prompt, 8, **how)[0])
    assert wave['identical'] == n_equal / 8

    for flags, line in (['--exit=kl'], f"at most 5 loops, kl with tau = {latest['tau']:g}"), (
            ['--wave=3', '--wave_steps=2'], f"waves of 3 x 2, norm_rel with tau = {wave['tau']:g}"):
        printed = finished(*flags, '--n_loop=5', '--max_new_tokens=3', script='sample.py')
        assert f'{line} (out/exits.json)' in printed


# bad input, seeds ---------------------------------------------------------------------------------

@pytest.mark.parametrize('flag, words', [
    ('--new_tokens=1', 'new_tokens must be'), ('--cache=newest', "unknown cache policy 'newest'"),
    ('--waves=[8]', 'and waves of two'), ('--drafts=[[3,3,4]]', 'draft_loops must lie between'),
    ('--dataset=group', 'same number of tokens'), ('--budgets=[0]', 'n_loop must be an int from 1'),
    ('--calibrate=0.1', 'n_windows must be at least 16')])
def test_bad_input(here, flag, words):
    assert words in refused(*SMALL, flag, script='bench.py')


def test_the_seed_reaches_the_noise_of_continuations(tiny, idx, monkeypatch):
    """The draws of prompt i have seed + i."""
    model = tiny(adapter_init='random')
    monkeypatch.setattr(bench, 'temperature', 1.5)
    point = bench.make_point(model, 'fixed', 3)
    for seed, number in ((0, 0), (4, 0), (4, 2)):
        monkeypatch.setattr(bench, 'seed', seed)
        new, _ = bench.continue_prompt(point, idx[:1, :6], 7, number)
        wanted, _ = model.generate(idx[:1, :6], 7, 1.5, n_loop=3, noise_seed=seed,
                                   seed=seed + number)
        assert torch.equal(new, wanted[:, 6:])
