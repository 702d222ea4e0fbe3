"""bench.py: quality, the oracle, calibrated thresholds, tables, Ctrl-C, bad input."""
import contextlib
import json
import math
import os
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import finished, read_csv, refused
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import bench
import compiled
import data
import decode
from bench import Point, log_probabilities
from common import evaluation, plots
from common.checkpoint import load_checkpoint
from exits import EXITS, make_exit

SMALL = ['--taus=[0,1e-2,0.3]', '--more_taus=[0.3,100.0]', '--budgets=[1,2,5,2]',
         '--epsilons=[0.0,0.3]', '--n_loop=5', '--n_windows=6', '--rounds=1', '--timed_tokens=2',
         '--device=cpu', '--cache=exact', '--past=False', '--n_prompts=2', '--new_tokens=8',
         '--drafts=[[1,3,4]]', '--waves=[[3,2]]']
RULES = [name for name in EXITS if name != 'accel_hat']       # bench.py's default
ONE_RULE = [*SMALL, '--rules=["accel"]']
NINE = [('fixed', 1), ('fixed', 2), ('fixed', 5), ('accel', 0), ('accel', 1e-2), ('accel', 0.3),
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
        printed = finished(*SMALL, '--least_tau=0.3', '--cache=["exact","latest"]',
                           '--past=[False,True]', script='bench.py')
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
    of_rules = [(name, tau) for name in RULES for tau in (0, 1e-2, 0.3, 100)]
    large = [(name, tau) for name, tau in of_rules if tau >= 0.3]
    bounds = [('fixed', n) for n in (1, 2, 5)] + [('oracle', eps) for eps in (0, 0.3)]
    expected = {('exact', 'False'): of_rules + bounds, ('exact', 'True'): large,
                ('latest', 'False'): bounds, ('latest', 'True'): large}
    of_windows, others = ([row for row in rows if bool(row['windows']) == has]
                          for has in (True, False))
    for way, points in expected.items():
        mine = [row for row in of_windows if (row['cache'], row['past']) == way]
        assert sorted(names(mine)) == sorted(points)
    assert len(of_windows) == sum(map(len, expected.values()))
    assert names(others) == [('fixed', 3)] + [(name, tau) for name in RULES for tau in (1e-2, 0.3)]
    # texts: of all but oracles, rules that wait under `exact` or have a small tau, and the full
    # budget under other policies
    continued = [row for row in rows if row['prompts']]
    assert len(continued) == 3 + 2 * len(RULES) + 2 + 2 * len(RULES) + len(others)
    for measured, columns in (of_windows, bench.OF_WINDOWS), (continued, bench.OF_TEXTS):
        assert all(math.isfinite(float(row[column])) for row in measured for column in columns)
    for name in ('figure_4', 'frontier'):
        assert os.path.getsize(run_folder / 'out' / f'{name}.png') > 5000
    for title in ('within 0.005 nats of the full budget:', "with 95% of the full budget's texts:"):
        assert f'the fastest of each kind {title}' in printed


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
    # the loss of the two texts, and how many of them are equal, by other code
    texts = {n: model.generate(idx[:2, :8], 8, temperature=0, n_loop=n)[0] for n in (5, 2)}
    for n, found in ((5, full), (2, two)):
        logits, _ = model(texts[n][:, :-1], n_loop=5)
        loss = F.cross_entropy(logits[:, 7:].flatten(0, 1), texts[n][:, 8:].flatten())
        assert found['text_loss'] == pytest.approx(loss.item(), rel=1e-5)
    same = (texts[5] == texts[2])[:, 8:]
    assert two['identical'] == same.all(dim=1).double().mean().item()
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
        trace, rule = [], make_exit('norm', 0.3, past=past)
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
    finished(*ONE_RULE, '--hits=1', '--keep=True', '--cache=latest', '--timed_rows=2',
             '--n_windows=1', '--dtype=bfloat16', script='bench.py')
    rows = read_csv('out/bench.csv')
    assert value(rows, 'accel', 100, cache='latest', past='True') == value(
        rows, 'fixed', 2, cache='latest')


def test_budgets_alone(here):
    printed = finished(*SMALL, '--rules=[]', '--taus=[]', '--n_prompts=0', script='bench.py')
    assert 'fixed 5, exact' in printed
    assert names(read_csv('out/bench.csv')) == [row for row in NINE if row[0] != 'accel']


# interrupted --------------------------------------------------------------------------------------

def interrupt(monkeypatch, name, call, before=lambda: None):
    """From now on the given call of decode.name, counted from 1, is a Ctrl-C. Runs bench.py."""
    calls, plain = [], getattr(decode, name)

    def count(*args, **how):
        calls.append(name)
        if len(calls) == call:
            before()
            raise KeyboardInterrupt
        return plain(*args, **how)
    monkeypatch.setattr(decode, name, count)
    done = conftest.run(*ONE_RULE, '--rounds=2', '--timed_tokens=3', script='bench.py')
    assert done.returncode == 130 and done.stderr == '\nstopped\n'


@torch.no_grad()
def test_ctrl_c_in_the_quality_phase_loses_nothing(here, held_out, monkeypatch):
    # before there is anything the old file stays
    Path('out/bench.csv').write_text('of an earlier day')
    interrupt(monkeypatch, 'teacher_forced', 1)
    assert Path('out/bench.csv').read_text() == 'of an earlier day'
    # two windows at once, and for each two a pass of the full budget and of nine points: the 14th
    # is that of the third point, in the second two windows
    monkeypatch.setattr(evaluation, 'windows_at_once', lambda config, most: 2)
    interrupt(monkeypatch, 'teacher_forced', 14)
    rows = read_csv('out/bench.csv')
    assert names(rows) == NINE
    assert [row['windows'] for row in rows] == ['4'] * 2 + ['2'] * 7
    assert {row['ms_per_token'] for row in rows} == {''}
    model, idx, targets = held_out
    for n, windows in (1, 4), (5, 2):
        loss = model(idx[:windows], targets[:windows], n_loop=n)[1].item()
        assert value(rows, 'fixed', n) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize('points, before, after', [(4, 0, 4), (9, 9, 9)])
def test_ctrl_c_in_a_timing_round_loses_nothing(here, monkeypatch, points, before, after):
    """Four points of the first round are timed, or it is over."""
    # two tokens of each point warm up, then each decodes three tokens a round
    at_hand = []
    interrupt(monkeypatch, 'one_token', 2 * 9 + 3 * points + 1,
              lambda: at_hand.extend(read_csv('out/bench.csv')))
    for rows, timed in (at_hand, before), (read_csv('out/bench.csv'), after):
        assert names(rows) == NINE and {row['windows'] for row in rows} == {'6'}
        assert all(float(row['ms_per_token']) > 0 for row in rows[:timed])
        assert all(row['ms_per_token'] == '' for row in rows[timed:])


def test_nothing_that_is_timed_compiles(tiny, idx):
    """The first call of a point compiles; other windows, and a text, do not."""
    torch.compiler.reset()
    counter, model, eager = CompileCounter(), tiny(), tiny()
    point = bench.make_point(model, 3, 'fixed', 'latest')
    compiled.compile_passes(model, backend=counter)
    bench.decode_window(model, point, idx[:1, :6], 4)
    assert counter.frame_count == 1
    bench.decode_window(model, point, idx[[1], :9], 4)
    (text, costs), (other, _) = (bench.continue_prompts(one, point, idx[:1, :4], 5)
                                 for one in (model, eager))
    assert counter.frame_count == 1 and torch.equal(text, other)
    assert (costs['passes'], costs['blocks']) == ([1], [9])


# quality and the oracle ---------------------------------------------------------------------------

def at(model, idx, cache='exact', epsilon=None):
    name = 'oracle' if epsilon is not None else ''
    return log_probabilities(model, Point(name, epsilon, [9, 9], None, cache, 8), idx)


def test_the_oracle_exits_at_the_first_step_within_epsilon(tiny, idx):
    model, trace = tiny(adapter_init='random'), []
    for policy in ('exact', 'latest'):
        torch.testing.assert_close(at(model, idx, cache=policy, epsilon=0),
                                   at(model, idx, cache=policy), rtol=0, atol=1e-4)
    one_token = idx[:, :1]              # no other token's exit changes its path in the first group
    model(one_token, n_loop=9, trace=trace)
    states = trace[0]['states'][:, :, 0]                        # (K+1, B, C)
    near = (states - states[-1]).norm(dim=-1)[1:] < 0.5         # (K, B)
    expected = [int(row.nonzero()[0]) + 1 for row in near.T]
    assert max(expected) < 9
    for policy in ('exact', 'latest'):
        _, *counts = at(model, one_token, cache=policy, epsilon=0.5)
        assert all(steps[:, 0, 0].tolist() == expected for steps in counts)
    # afterwards the model loops to the end again
    assert (at(model, one_token)[1] == 9).all()


def test_the_interval_is_paired():
    """Half a thousandth of a nat in each window: of a normal, the mean ± 1.96 standard errors."""
    rng = np.random.default_rng(0)
    full, difference = rng.standard_normal(400), 5e-4 + 1e-4 * rng.standard_normal(400)
    point = Point('', 0, [], None, 'exact', 1)
    for half in slice(200), slice(200, None):
        point.add(ce=(full + difference)[half], ce_full=full[half])
    mean, low, high = bench.excess(point)
    reach = 1.96 * difference.std() / 400 ** 0.5
    assert [mean - low, high - mean] == pytest.approx([reach, reach], rel=0.06)
    assert mean == pytest.approx(difference.mean())


# thresholds that keep a promise -------------------------------------------------------------------

def test_a_threshold_is_the_largest_that_keeps_its_promise(monkeypatch, capsys):
    """Losses made by hand: tau / 10 on the even windows, twice that on the odd ones; kl 9 more."""
    def quality(model, points, idx, targets, n_loop, seed):
        for point in points:
            loss = point.tau / 10 * (1 + idx[:, 0].double().numpy()) + 9 * (point.rule == 'kl')
            point.add(ce=loss, ce_full=0 * loss, evals=np.ones((len(idx), 1)))
    monkeypatch.setattr(bench, 'quality', quality)
    idx = torch.arange(16)[:, None] % 2
    accel, kl = bench.find_thresholds(
        None, lambda tau, rule, cache, past: Point(rule, tau, [3], None, cache, 1),
        [('accel', 'exact', True), ('kl', 'latest', False)], idx, idx, nats=0.1, n_loop=3)
    assert accel == dict(cache='exact', rule='accel', past=True, tau=1.0, upper=0.1, cost=0.2,
                         cost_low=0.2, cost_high=0.2, evals=1, kept=False)
    assert kl == dict(cache='latest', rule='kl', past=False, tau=None)
    bench.print_rows('title', [accel, kl], dict(rule='', past='', tau='g', cost='+.4f', kept=''))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [], ['title'], ['rule', 'past', 'tau', 'cost', 'kept'],
        ['accel', 'True', '1', '+0.2000', 'False'], ['kl', 'False']]


def test_sample_uses_the_thresholds_that_the_command_finds(here):
    """Of a rule in three ways; of a wave, the largest tau that keeps half of the prompts' texts."""
    finished(*SMALL, '--rules=["kl"]', '--cache=["exact","latest"]', '--past=[False,True]',
             '--calibrate=9', '--n_windows=16', '--fidelity=1', script='bench.py')
    _, waiting, latest, row = json.loads(Path('out/exits.json').read_text())['exits']
    model, _ = load_checkpoint('out/ckpt.pt')
    book = data.open_data('book')
    idx, targets = book.held_out(data.spread(book, 16, 16), 16)
    # the cost on the odd windows, by other code
    with torch.no_grad():
        rule = make_exit('kl', waiting['tau'], past=True)
        loss, full = (model(idx[1::2], targets[1::2], n_loop=5, exit=exit)[1]
                      for exit in (rule, None))
    assert waiting['past'] and waiting['cost'] == pytest.approx((loss - full).item(), abs=1e-6)
    printed = finished('--exit=kl', '--tau=auto', '--n_loop=5', '--max_new_tokens=3',
                       script='sample.py')
    assert latest['cache'] == 'latest' and 'mean loop steps' in printed

    assert (row['wave'], row['rule'], row['cache']) == ([3, 2], 'norm_rel', 'latest')
    prompts = idx[:, :8]

    def same(tau, half):
        rule, n_equal = make_exit('norm_rel', tau), 0
        for prompt in prompts[half].split(1):
            full, _ = model.generate(prompt, 8, temperature=0, n_loop=5)
            waved, _ = model.generate(prompt, 8, temperature=0, n_loop=5, exit=rule, wave=3,
                                      wave_steps=2)
            n_equal += torch.equal(waved, full)
        return n_equal / 8
    assert same(row['tau'], slice(8)) == 1 and same(row['tau'], slice(8, None)) == row['identical']
    larger = [tau for tau in bench.TAU_GRID if row['tau'] < tau <= 1]
    assert not larger or same(larger[-1], slice(8)) < 1
    printed = finished('--wave=3', '--wave_steps=2', '--n_loop=5', '--max_new_tokens=3',
                       script='sample.py')
    assert f"by waves of 3 x 2, norm_rel {row['tau']:g};" in printed


# tables and figures -------------------------------------------------------------------------------

def test_the_fastest_of_each_kind():
    waits, plain = make_exit('kl', 1.0, past=True), make_exit('kl', 1.0)
    points = [Point('fixed', 6, [], None, 'latest', 8), Point('kl', 1.0, [], plain, 'exact', 8),
              Point('kl', 1.0, [], waits, 'exact', 8), Point('kl', 1.0, [], waits, 'latest', 8),
              Point('fixed', 8, [], None, 'exact', 8, draft_loops=2, draft_tokens=4),
              Point('kl', 0.1, [], plain, 'latest', 8, wave=8, wave_steps=1),
              Point('kl', 1.0, [], plain, 'latest', 8, wave=8, wave_steps=1)]
    for point, ms in zip(points, (4, 5, 6, 7, 3, 8, 2)):
        point.add(ms_text=[ms - 1, ms, ms + 1] * 9)
    rows = [bench.make_row(point, []) | dict(point=point) for point in points]
    best = bench.fastest_of_kind(rows, 'ms_text')
    assert [(row['kind'], row['name'], row['times']) for row in best] == [
        ('waves', 'kl 1, wave 8 x 1', 1), ('drafts', 'fixed 8, drafts 4 x 2', 1.5),
        ('fixed budgets, latest', 'fixed 6, latest', 2), ('rules, exact', 'kl 1, exact', 2.5),
        ('rules, exact, past', 'kl 1, exact, past', 3), ('rules, latest', 'kl 1, latest', 3.5)]
    assert all(row['times_low'] < row['times'] < row['times_high'] for row in best[1:])
    assert best[0]['times_low'] == best[0]['times_high'] == 1
    assert bench.fastest_of_kind([], 'ms_text') == []


def test_each_way_to_decode_has_its_panels(monkeypatch):
    """Own signals, waiting. A rule of another file has a style too."""
    drawn = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: drawn.append(figure))
    rows = [dict(kind=kind, rule=rule, tau=tau, ce=2 + tau, ppl=7 + tau, ms_per_token=5 - tau)
            for kind, rule in (('rules, exact', 'mine'), ('rules, exact, past', 'norm'))
            for tau in (1e-3, 1e-2, 0.1)]
    bench.figure_4(rows, 'figure_4.png')
    panels = drawn[0].axes
    assert [ax.get_title() for ax in panels] == ['exact'] * 3 + ['exact, past'] * 3
    lines = [panels[i].get_lines()[0] for i in (0, 5)]
    assert [line.get_ydata().tolist() for line in lines] == [[4.999, 4.99, 4.9],
                                                             [2.001, 2.01, 2.1]]
    assert [line.get_marker() for line in lines] == ['X', bench.STYLES['norm'][1]]


@pytest.mark.parametrize('flag, words', [
    ('--prompt_tokens=15', 'do not fit block_size = 16'),
    ('--cache=newest', "unknown cache policy 'newest'"), ('--rounds=0', 'rounds must be'),
    ('--n_prompts=-1', 'n_prompts must be'), ('--waves=[8]', 'and waves of two'),
    ('--waves=[[0,1]]', 'wave'), ('--drafts=[[3,3,4]]', 'draft_loops must lie between 1 and'),
    ('--calibrate=0', 'must be more than 0 nats'), ('--dataset=calc', 'has 13 of calc:p=5'),
    ('--ring=4', 'add --cache=ring'),
    ('--calibrate=0.1', '6 windows are too few to halve: --n_windows=16'),
    ('--budgets=[0]', 'n_loop must be an int from 1')])
def test_bad_input(here, flag, words):
    assert words in refused(*SMALL, flag, script='bench.py')


def test_the_seed_reaches_the_noise_of_continuations(tiny, idx):
    """The draws of prompt i have seed + i."""
    model, point = tiny(adapter_init='random'), bench.make_point(tiny(), 3, 'fixed')
    for seed, number in ((0, 0), (4, 0), (4, 2)):
        new, _ = bench.continue_prompts(model, point, idx[:1, :6], 7, 1.5, seed, [number])
        wanted, _ = model.generate(idx[:1, :6], 7, 1.5, n_loop=3, noise_seed=seed,
                                   seed=seed + number)
        assert torch.equal(new, wanted[:, 6:])


@torch.no_grad()
def test_rows_that_are_continued_together(tiny, idx):
    """They get the texts and blocks of each alone, by fixed loops and by a rule."""
    model = tiny(adapter_init='random')
    for cache, rule in ('latest', 'fixed'), ('exact', 'norm_rel'), ('latest', 'accel'):
        point = bench.make_point(model, 5 if rule == 'fixed' else 0.5, rule, cache, n_loop=9)
        texts, costs = bench.continue_prompts(model, point, idx[:3, :6], 7, 0.8, 2, range(3))
        for i in range(3):
            text, alone = bench.continue_prompts(model, point, idx[i:i + 1, :6], 7, 0.8, 2, [i])
            assert torch.equal(text, texts[i:i + 1])
            assert alone['blocks'] == [costs['blocks'][i]]
    assert costs['passes'] == [1, 1, 1] and len({*costs['blocks']}) > 1
    assert len({*costs['ms_text']}) == 1


def test_drafts_of_any_length_check_the_same_text(tiny, idx):
    model = tiny(adapter_init='random')
    full, _ = bench.continue_prompts(model, bench.make_point(model, 6, 'fixed'), idx[:1, :4], 10)
    passes = []
    for ahead in (1, 3, 8):
        point = bench.make_point(model, 6, 'fixed', draft_loops=5, draft_tokens=ahead)
        text, costs = bench.continue_prompts(model, point, idx[:1, :4], 10)
        passes += costs['passes']
        assert torch.equal(text, full)
    # of nine tokens: a pass for each draft, and a check
    assert passes[0] >= (5 + 4) / 9 and len({*passes}) == 3
