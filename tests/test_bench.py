"""bench.py: quality, time, calibrated thresholds, tables and figures, Ctrl-C, bad input."""
import contextlib
import json
import math
import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from unittest import mock

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finished, read_csv, refused

import bench
import data
import tasks
from common import calibration, comparison, plots, points
from common.checkpoint import load_checkpoint
from decode import defaults, measure
from exits import EXITS, make_exit

SMALL = ['--taus=[0,0.3,100.0]', '--budgets=[1,2,5,2]', '--n_loop=5', '--n_windows=6',
         '--device=cpu', '--n_prompts=2', '--new_tokens=8', '--drafts=[[1,3,4]]',
         '--waves=[[3,2]]', '--rules=["norm","accel"]']
ONE_RULE = [*SMALL, '--rules=["accel"]']
TO_CALIBRATE = [flag for flag in SMALL if not flag.startswith('--n_prompts')] + ['--n_windows=16']
TAUS = 0, 0.3, 100
SIX = ['fixed 5, exact', 'fixed 1, exact', 'fixed 2, exact',
         *(f'accel, exact, tau {tau:g}' for tau in TAUS)]       # of ONE_RULE, with a quality
OF_WINDOWS = ['ce', 'ppl', 'ce_minus_full', 'diff_low', 'diff_high', 'accuracy', 'mean_evals',
              'most_evals', 'last_step']
OF_PROMPTS = ['identical', 'passes', 'blocks', 'ms_per_token', 'ms_low', 'ms_high']
DRAFTS_AND_WAVES = ['4 drafted by 1 loops, checked by 3',
                    *(f'wave of 3, 2 loops a pass, accel, tau {tau:g}' for tau in TAUS)]


def fixed(n):
    return points.Method(points.Kind.FIXED, n, 'exact')


def names(rows):
    return [row['name'] for row in rows]


def value(rows, name, column='ce'):
    row, = [row for row in rows if row['name'] == name]
    return float(row[column])


@pytest.fixture
def here(here, monkeypatch):
    """In the folder of a run, with no results yet; figures are drawn and not saved."""
    monkeypatch.setattr(plots.Figure, 'savefig', lambda *how, **more: None)
    for name in ('bench.csv', 'exits.json'):
        Path('out', name).unlink(missing_ok=True)


def test_matplotlib_is_loaded_at_the_end_alone():
    code = "import sys, bench; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


@pytest.fixture(scope='module')
def benched(run_folder):
    """A whole benchmark: its rows and what it printed."""
    with contextlib.chdir(run_folder):
        printed = finished(*SMALL, '--cache=["exact","latest"]', '--wake=[False,True]',
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


@pytest.fixture(scope='module')
def calc(run_folder):
    """A model of a task in the folder calc, and the flags of a small benchmark of it."""
    with contextlib.chdir(run_folder):
        finished(*TINY, '--dataset=calc', '--block_size=8', '--out_dir=calc', '--max_iters=2',
                 '--eval_windows=2', '--pos=rotary')
    return ['--out_dir=calc', '--n_windows=3', '--budgets=[2]', '--taus=[0.3]', '--n_prompts=1',
            '--rules=["accel"]', '--device=cpu']


# a whole benchmark --------------------------------------------------------------------------------

def test_every_point_once(benched, run_folder):
    rows, printed = benched
    with_quality = [f'fixed {n}, {policy}' for n in (1, 2, 5) for policy in ('exact', 'latest')]
    with_quality += [f'{rule}, {how}, tau {tau:g}' for rule in ('norm', 'accel') for tau in TAUS
                     for how in ('exact', 'exact, wake', 'latest')]
    others = ['4 drafted by 1 loops, checked by 3',
              *(f'wave of 3, 2 loops a pass, {rule}, tau {tau:g}'
                for rule in ('norm', 'accel') for tau in TAUS)]
    assert rows[0]['name'] == 'fixed 5, exact'
    assert sorted(names(row for row in rows if row['windows'])) == sorted(with_quality)
    assert sorted(names(row for row in rows if not row['windows'])) == sorted(others)
    assert {row['prompts'] for row in rows} == {'2'}
    for row in rows:
        columns = [*OF_PROMPTS, *(OF_WINDOWS if row['windows'] else ())]
        assert all(math.isfinite(float(row[column])) for column in columns), row['name']
    for name in ('figure_4', 'ledger'):
        assert os.path.getsize(run_folder / 'out' / f'{name}.png') > 5000


def test_it_says_how_long_it_takes_and_what_it_does(benched):
    _, printed = benched
    start, _, work = printed.partition('all of it will take about ')
    assert start.rstrip().endswith('moment ...') and 'quality:' not in start
    assert int(work.split(' s\n')[0]) < 600
    lines = [line for line in work.splitlines() if line.startswith(('quality', 'time'))]
    assert lines[0] == 'quality: fixed loops, exact' and 'quality: accel, exact, wake' in lines
    assert lines[-1] == 'time: prompt 2 of 2, at all points in turn'
    # the short table is the last thing
    assert ' with 95% of its texts:' in printed.split('\n\n')[-1]


def test_runs_beside(benched, held_out, here, monkeypatch):
    """Each run is measured as it is alone, a plain model at one point. The data must be equal."""
    widths = []
    monkeypatch.setattr('decode.use_one_thread', lambda model: widths.append(model.config.n_embd))
    finished(*TINY, '--groups=[]', '--out_dir=plain', '--max_iters=2', '--n_embd=32')
    finished(*ONE_RULE, "--beside=['plain']", script='bench.py')
    # the widest model decides on the threads of all: for the estimate, and for the times
    assert widths == [32, 32]
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


def test_the_table_has_the_fastest_of_each_family(benched):
    rows, printed = benched
    title = "the full budget, and of each family the fastest with 95% of its texts:"
    table = printed.partition(title)[2].splitlines()[2:]
    good = sorted((row for row in rows if float(row['identical']) >= 0.95),
                  key=lambda row: float(row['ms_per_token']))
    best = {row['family']: row['name'] for row in reversed(good)}
    assert {'fixed loops, exact', 'norm, exact', 'accel, exact, wake'} <= best.keys()
    expected = [row['name'] for row in good if best[row['family']] == row['name']]
    expected = ['fixed 5, exact'] + [name for name in expected if name != 'fixed 5, exact']
    assert [line.split('  ')[0] for line in table] == expected


@torch.no_grad()
def test_what_continuations_cost(benched, held_out):
    rows, _ = benched
    model, idx, _ = held_out
    of = {row['name']: {name: float(row[name]) for name in (*OF_PROMPTS, 'prompts')}
          for row in rows}
    full, two = of['fixed 5, exact'], of['fixed 2, exact']
    assert full['identical'] == full['passes'] == 1
    assert full['prompts'] == 2 and full['blocks'] == 10 and two['blocks'] == 4      # two groups
    # how many of the two texts are equal, by other code
    texts = {n: model.generate(idx[:2, :8], 8, temperature=0, n_loop=n)[0] for n in (5, 2)}
    assert two['identical'] == (texts[5] == texts[2]).all(dim=1).double().mean().item()
    # a draft of one loop is checked by three
    assert of['4 drafted by 1 loops, checked by 3']['blocks'] > 6
    # a wave has up to three tokens, each pass with two loop steps
    for name, wave in of.items():
        assert not name.startswith('wave') or (
            4 * wave['passes'] < wave['blocks'] <= 12 * wave['passes'])


@torch.no_grad()
def test_quality_is_the_models_own(benched, held_out):
    rows, _ = benched
    model, idx, targets = held_out
    for n in (1, 2, 5):
        logits, loss = model(idx, targets, n_loop=n)
        right = (logits.argmax(-1) == targets).double().mean()
        for column, number in dict(ce=loss, ppl=loss.exp(), accuracy=right, mean_evals=n).items():
            assert math.isclose(value(rows, f'fixed {n}, exact', column), number, rel_tol=2e-6)
    for wake, name in (False, 'norm, exact, tau 0.3'), (True, 'norm, exact, wake, tau 0.3'):
        trace, rule = [], make_exit('norm', 0.3, wake=wake)
        loss = model(idx, targets, n_loop=5, exit=rule, trace=trace)[1].item()
        evals = [entry['evals'].double().mean().item() for entry in trace]
        assert value(rows, name) == pytest.approx(loss, rel=1e-6)
        measured = [value(rows, name, column) for column in ('evals_1', 'evals_2')]
        assert measured == pytest.approx(evals) and evals[0] != evals[1]
    assert value(rows, 'fixed 5, exact', 'ce_minus_full') == 0
    # Algorithm 1 at a huge tau: the second hit comes at step 3
    assert value(rows, 'accel, exact, tau 100', 'mean_evals') == 3


def test_quality_alone(here):
    printed = finished(*ONE_RULE, '--n_prompts=0', '--n_windows=1', script='bench.py')
    assert 'prompts of' not in printed
    rows = read_csv('out/bench.csv')
    assert names(rows) == SIX and 'fixed 1, exact ' in printed
    # one window has no interval
    assert {row['diff_low'] for row in rows} == {row['ms_per_token'] for row in rows} == {''}
    assert all(float(row['ce']) > 0 for row in rows)


# labels -------------------------------------------------------------------------------------------

def some_labels(idx, targets):
    """Of row i the first i labels alone."""
    keep = torch.arange(idx.shape[1]) < torch.arange(len(idx))[:, None]
    return idx, targets.where(keep, -100)


@torch.no_grad()
def test_each_label_counts_once(held_out, monkeypatch):
    """Rows have unequal numbers of labels, and one has none: sums are divided by all labels."""
    model, idx, targets = held_out
    idx, targets = some_labels(idx, targets)
    monkeypatch.setattr(measure, 'windows_at_once', lambda config, most: 4)
    full = points.Point('', model, fixed(5))
    point = points.Point('', model, fixed(1), full)
    measure.measure_quality([full, point], idx, targets, measure.Conditions())
    row = points.row_of(point)
    logits, loss = model(idx, targets, n_loop=1)
    right = (logits.argmax(-1) == targets)[targets >= 0].double().mean()
    assert row['ce'] == pytest.approx(loss.item(), rel=1e-6)
    assert row['accuracy'] == pytest.approx(right.item())
    difference = loss - model(idx, targets, n_loop=5)[1]
    assert row['ce_minus_full'] == pytest.approx(difference.item(), rel=1e-3)
    assert row['diff_low'] < row['ce_minus_full'] < row['diff_high']


def test_windows_without_a_label_are_left_out(held_out, capsys):
    idx, targets = some_labels(*held_out[1:])
    assert bench.have_labels(targets).tolist() == [False] + [True] * 5
    assert '1 of 6 windows have no label' in capsys.readouterr().out
    with pytest.raises(ValueError, match='none of the 1 windows has a label'):
        bench.have_labels(targets[:1])


def blank(monkeypatch, n):
    """From now on the first n held-out windows have no label, and lie deeper than all others."""
    held_out_windows = data.held_out_windows

    def blanked(*args):
        text, idx, targets, depth = held_out_windows(*args)
        targets[:n] = -100
        if depth is not None:
            depth[:n] = 1000
        return text, idx, targets, depth
    monkeypatch.setattr('data.held_out_windows', blanked)


def test_windows_without_a_label_are_not_counted_for_a_calibration(here, monkeypatch):
    blank(monkeypatch, 1)
    line = refused(*TO_CALIBRATE, '--calibrate=1', script='bench.py')
    assert '--calibrate needs 16 windows with a label, and there are 15' in line


def test_windows_without_a_label_have_no_depth(here, calc, monkeypatch):
    blank(monkeypatch, 1)
    finished(*calc, '--rules=[]', script='bench.py')
    assert all(0 < float(row['deepest']) < 8 for row in read_csv('calc/bench.csv'))


def windows_of(nats, labels):
    """What is measured on windows, made by hand."""
    return [points.WindowResult(n, 0, n_labels, np.ones(2), 1, 1)
            for n, n_labels in zip(nats, labels)]


def test_the_interval_is_paired_and_of_a_ratio():
    """
    Half a thousandth of a nat in each label, of which windows have one or nine: the mean ± 1.96
    standard errors of a ratio of sums.
    """
    rng = np.random.default_rng(0)
    labels = rng.choice([1, 9], size=400)
    nats = 100 * rng.standard_normal(400)
    difference = labels * (5e-4 + 1e-4 * rng.standard_normal(400))
    full, point = (points.Point('', None, fixed(n)) for n in (5, 1))
    point.reference = full
    full.windows = windows_of([*nats, 9.0], [*labels, 1])
    point.windows = windows_of(nats + difference, labels)
    mean, low, high = points.excess(point)
    assert mean == pytest.approx(difference.sum() / labels.sum())
    reach = 1.96 * (difference - mean * labels).std() / 400 ** 0.5 / labels.mean()
    assert [mean - low, high - mean] == pytest.approx([reach, reach], rel=0.06)


def test_a_task_has_no_blank_rows(here, calc):
    """Drafts and waves write no answers; one problem has no interval; a rule wakes, with room."""
    flags = calc
    printed = finished(*flags, script='bench.py')
    rows = read_csv('calc/bench.csv')
    assert names(rows) == ['fixed 116, exact', 'fixed 2, exact', 'accel, exact, wake, tau 0.3']
    for row in rows:
        assert row['ms_per_token'] and row['ms_low'] == row['ms_high'] == '' and row['accuracy']
    title, head, *table = printed.split('\n\n')[-1].strip().splitlines()
    assert '95% of its right answers' in title and 'identical' not in head
    assert all(len(line.split()) >= len(head.split()) for line in table)
    # a problem is read in one pass, of which nothing is compiled
    line = refused(*flags, '--compile', script='bench.py')
    assert '--compile is for passes after a prompt' in line
    # longer and other problems than in training
    finished(*flags, '--length=24', '--dataset=calc:reset=0.5', script='bench.py')
    rows = read_csv('calc/bench.csv')
    assert names(rows)[0] == 'fixed 148, exact'
    model, _ = load_checkpoint('calc/ckpt.pt', length=24)
    idx, targets = tasks.Problems('calc:reset=0.5').held_out([0, 1024, 2047], 24)
    with torch.no_grad():
        _, loss = model(idx, targets, n_loop=2)
    assert value(rows, 'fixed 2, exact') == pytest.approx(loss.item(), rel=1e-5)
    assert 'learned positions' in refused('--length=24', script='bench.py')


@pytest.mark.parametrize('tokenizer, fits', [('gpt2', True), ('chars', False)])
def test_public_models_of_other_tokens_cannot_be_compared(tiny, monkeypatch, tokenizer, fits):
    """They have no data of ours, so that only their tokenizers say what they read."""
    other = tiny(), dict(data='', tokenizer=tokenizer), 'other', ''
    monkeypatch.setattr(bench, 'open_run', lambda *args, **how: other)
    monkeypatch.setattr(bench, 'beside', ['other'])
    held_out = bench.HeldOut(torch.zeros(2, 8), None, None, is_task=False)
    refusal = pytest.raises(ValueError, match='other was trained on other data, or with another')
    with contextlib.nullcontext() if fits else refusal:
        assert bench.points_of_others(dict(data='', tokenizer='gpt2'), held_out)


# interrupted --------------------------------------------------------------------------------------

def interrupt(place, name, call, before=lambda: None):
    """Run bench.py with a Ctrl-C in the given call of place.name, counted from 1."""
    calls, plain = count(1), getattr(place, name)

    def spy(*args, **how):
        if next(calls) == call:
            before()
            raise KeyboardInterrupt
        return plain(*args, **how)
    with mock.patch.object(place, name, spy):
        done = conftest.run(*ONE_RULE, script='bench.py')
    assert done.returncode == 130 and done.stderr == '\nstopped\n'


def test_ctrl_c_loses_nothing(here):
    import decode
    import model
    # before there is anything the old file stays
    Path('out/bench.csv').write_text('of an earlier day')
    interrupt(decode, 'teacher_forced', 1)
    assert Path('out/bench.csv').read_text() == 'of an earlier day'
    # the six points are tried; then the three budgets are measured, and the rule begins
    interrupt(decode, 'teacher_forced', 6 + 3 + 2)
    rows = read_csv('out/bench.csv')
    assert names(rows) == SIX[:4] and {row['ms_per_token'] for row in rows} == {''}
    assert {row['windows'] for row in rows} == {'6'}
    # the second text of three of the ten points; each has begun one before
    at_hand = []
    interrupt(model.GPT, 'stream', 10 + 10 + 4, lambda: at_hand.extend(read_csv('out/bench.csv')))
    for rows, twice in (at_hand, 0), (read_csv('out/bench.csv'), 3):
        assert names(rows) == SIX + DRAFTS_AND_WAVES
        assert {row['windows'] for row in rows[:6]} == {'6'}
        assert [row['prompts'] for row in rows] == ['2'] * twice + ['1'] * (10 - twice)


# thresholds that keep a promise -------------------------------------------------------------------

def by_hand(points, idx, targets, conditions):
    """
    Losses made by hand: tau / 10 on the even windows, twice that on the odd ones; kl 9 more. Of
    norm tau / 10 on the even windows, and 1.6 on the last one alone.
    """
    number = idx[:, 0].numpy()
    odd = number % 2
    for point in points:
        nats = np.zeros(len(idx))
        rule = point.method.rule
        if rule:
            name, tau = rule.name, rule.tau
            nats = dict(accel=tau / 10 * (1 + odd), kl=tau + 9 + odd,
                        norm=tau / 10 * (1 - odd) + 1.6 * (number == 15))[name]
        point.windows += windows_of(nats, np.ones(len(idx)))


def test_a_threshold_is_the_largest_that_keeps_its_promise(tiny, tmp_path, monkeypatch, capsys):
    """And it says whether it does on windows that did not choose it."""
    monkeypatch.setattr(measure, 'measure_quality', by_hand)
    for name, value in dict(calibrate=0.1, taus=[0.1, 1.0, 3.0], wake=True,
                            rules=['accel', 'kl', 'norm'], waves=[]).items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.chdir(tmp_path)
    idx, stored = torch.arange(16)[:, None], dict(model=tiny().state_dict())
    full = points.Point('', tiny(), fixed(5))
    held_out = bench.HeldOut(idx, idx, prompts=idx, is_task=False)
    families, rows = bench.calibrate_all(full, held_out, stored, 'out')
    accel, kl, norm = rows
    assert accel.items() >= dict(cache='exact', rule='accel', wake=True, tau=1.0, nats=0.1,
                                 evals=1).items()
    assert [accel[name] for name in ('cost', 'cost_low', 'cost_high')] == pytest.approx([0.2] * 3)
    assert (kl['rule'], kl['tau']) == ('kl', None) and 'cost' not in kl
    assert norm['cost'] == pytest.approx(0.2) and norm['cost_low'] == 0
    assert accel['kept'] is norm['kept'] is False
    assert json.loads(Path('out/exits.json').read_text())['exits'] == [accel, kl, norm]
    assert 'kl, exact, wake: none of taus keeps the promise' in capsys.readouterr().out
    calibration.report(families, rows, 'out', 'out', False, {})
    printed = capsys.readouterr().out
    assert 'accel, exact, wake    1  +0.2000' in printed and 'breaks the promise' in printed
    assert 'no threshold was found for kl, exact, wake' in printed
    # none has kept its promise, so none is advised
    assert 'python' not in printed and printed.endswith('out/exits.json\n')


def test_a_calibration_keeps_the_rows_of_others(here):
    """Of the same weights; a broken file is replaced with a warning, those of others without."""
    flags = ['--device=cpu', '--waves=[]', '--calibrate=9', '--n_windows=16', '--n_loop=3']

    def calibrated(rule, *more):
        printed = finished(*flags, f"--rules=['{rule}']", *more, script='bench.py')
        rows = json.loads(Path('out/exits.json').read_text())['exits']
        return printed, [(row['rule'], row['wake'], row['tau']) for row in rows]
    _, rows = calibrated('norm')
    assert rows == [('norm', False, 30)]
    _, rows = calibrated('accel', '--wake')
    assert rows == [('norm', False, 30), ('accel', True, 30)]
    _, rows = calibrated('norm', '--taus=[0.5]', '--wake=[False,True]')
    assert rows == [('norm', False, 0.5), ('accel', True, 30), ('norm', True, 0.5)]
    # Ctrl-C keeps what was found
    with mock.patch('os.fsync', side_effect=[None, KeyboardInterrupt]):
        stopped = conftest.run(*flags, "--rules=['kl','norm']", '--taus=[7.0]', script='bench.py')
    assert stopped.returncode == 130
    rows = json.loads(Path('out/exits.json').read_text())['exits']
    assert [row['tau'] for row in rows] == [0.5, 30, 0.5, 7]
    Path('out/exits.json').write_text('{"weights": ')
    printed, rows = calibrated('kl')
    assert rows == [('kl', False, 30)] and "warning: cannot read 'out/exits.json'" in printed
    text = json.loads(Path('out/exits.json').read_text()) | dict(weights='those of another run')
    Path('out/exits.json').write_text(json.dumps(text))
    assert calibrated('norm')[1] == [('norm', False, 30)]


def test_sample_uses_the_thresholds_that_the_command_finds(here):
    """Of a rule in three ways; of a wave with its share of texts on the odd windows."""
    finished(*TO_CALIBRATE, '--rules=["kl"]', '--cache=["exact","latest"]', '--wake=[False,True]',
             '--calibrate=9', '--fidelity=0.8', '--taus=[1e-3,0.1,10.0]', script='bench.py')
    _, waking, latest, wave = json.loads(Path('out/exits.json').read_text())['exits']
    model, _ = load_checkpoint('out/ckpt.pt')
    book = data.open_data('book')
    idx, targets = book.held_out(book.spread(16, 16), 16)
    # the cost on the odd windows, by other code
    with torch.no_grad():
        rule = make_exit('kl', waking['tau'], wake=True)
        loss, full = (model(idx[1::2], targets[1::2], n_loop=5, exit=exit)[1]
                      for exit in (rule, None))
    assert waking['wake'] and waking['cost'] == pytest.approx((loss - full).item(), abs=1e-6)
    assert (latest['wake'], latest['cache'], wave['cache']) == (False, 'latest', 'latest')
    # a wave by the rule that was asked for
    assert (wave['wave'], wave['rule']) == ([3, 2], 'kl')
    rule, how, n_equal = make_exit('kl', wave['tau']), dict(temperature=0, n_loop=5), 0
    for prompt in idx[1::2, :8].split(1):
        waved = model.generate(prompt, 8, exit=rule, wave=3, wave_steps=2, **how)[0]
        n_equal += torch.equal(waved, model.generate(prompt, 8, **how)[0])
    assert wave['identical'] == n_equal / 8 and wave['kept'] == (n_equal >= 7)

    # whatever the budget
    for flags, line in (
            (['--exit=kl', '--cache=latest'], f"kl with tau = {latest['tau']:g}"),
            (['--exit=kl', '--wave=3', '--wave_steps=2'], f"kl with tau = {wave['tau']:g}")):
        for n_loop in 5, 7:
            printed = finished(*flags, f'--n_loop={n_loop}', '--max_new_tokens=3',
                               script='sample.py')
            assert f'{line} (out/exits.json' in printed


def test_a_calibration_ends_with_the_command_that_uses_it(here, monkeypatch):
    """With the policy, and the file of a rule of one's own, which has one name."""
    Path('rank.py').write_text('from exits import EXITS, Exit, norm\n'
                               "EXITS['rank'] = Exit(norm, tau=0.1)\n")
    monkeypatch.syspath_prepend('.')
    monkeypatch.setitem(EXITS, 'rank', None)        # at the end of the test it goes
    flags = ['--device=cpu', '--waves=[]', '--calibrate=9', '--n_windows=16', '--n_loop=3']
    for files, name in (['rank.py'], 'rank'), ([], 'rank:rank'):
        del EXITS['rank']
        printed = finished(*files, *flags, f"--rules=['{name}']", '--cache=latest',
                           script='bench.py')
        command = ['python sample.py', *files, '--out_dir=out', f'--exit={name}', '--cache=latest']
        line, last = printed.splitlines()[-2:]
        assert line == f"rank, latest: {' '.join(command)}"
        assert last == 'the promise holds under this budget: give --n_loop=3 there, too'
        row, = json.loads(Path('out/exits.json').read_text())['exits']
        assert row['rule'] == 'rank'
        used = finished(*command[1:], '--max_new_tokens=2', '--n_loop=3', script='sample.py')
        assert 'rank with tau = 30 (out/exits.json)' in used
    printed = finished(*flags, '--rules=["norm"]', '--wake', '--cache=ring', script='bench.py')
    assert printed.splitlines()[-2] == (
        'norm, ring, wake: python sample.py --out_dir=out --exit=norm --cache=ring --wake=True '
        '--ring=8')


# bad input, seeds ---------------------------------------------------------------------------------

@pytest.mark.parametrize('flag, words', [
    ('--new_tokens=1', 'new_tokens must be'), ('--cache=newest', "unknown cache policy 'newest'"),
    ('--waves=[8]', 'waves must be lists of two'), ('--drafts=[["1",2,3]]', 'drafts must be lists'),
    ('--drafts=[[3,3,4]]', 'draft_loops must lie between'), ('--rules=[1]', 'rules must be as in'),
    ('--dataset=group', 'choose'), ('--budgets=[0]', 'budgets must be whole'),
    ('--calibrate=0.1', 'n_windows must be at least 16'), ('--seed=-1', 'seed must lie between'),
    ('--fidelity=95', 'fidelity is a share'), ('--taus=[-1]', 'taus must be numbers'),
    ('--taus=[None]', 'taus must be numbers'), ('--budgets=[1,[2]]', 'budgets must be whole'),
    ('--cache=[]', 'cache must not be empty'), ('--wake=[]', 'wake must not be empty'),
    ('--rules=["accell"]', "unknown exit rule 'accell'"), ('--beside=[1]', 'beside must be as in'),
    ('--wake=["x"]', 'wake must be as in --wake="[False, True]"')])
def test_bad_input_is_refused_before_the_work(here, flag, words):
    with mock.patch('data.held_out_windows', side_effect=AssertionError) if 'seed' in flag else (
            contextlib.nullcontext()):
        assert words in refused(*SMALL, flag, script='bench.py')
    assert not os.path.exists('out/bench.csv')


def test_waking_needs_a_policy_that_keeps_every_step(here):
    line = refused(*SMALL, '--wake', '--cache=latest', script='bench.py')
    assert 'keeps every loop step' in line and '--cache=exact' in line


@pytest.mark.parametrize('cache, expected', [
    ('latest', ['fixed 30, exact', 'fixed 30, latest', 'accel, latest, tau 0.3']),
    (['exact', 'latest'], ['fixed 116, exact', 'fixed 116, latest',
                           'accel, exact, wake, tau 0.3', 'accel, latest, tau 0.3'])])
def test_on_a_task_a_rule_wakes_where_it_can(tiny, monkeypatch, cache, expected):
    """Nobody gave --wake. The budget is for waking if a policy lets a rule wake."""
    for knob, value in dict(cache=cache, budgets=[], taus=[0.3], rules=['accel']).items():
        monkeypatch.setattr(bench, knob, value)
    labels = [point.method.label for point in bench.points_of('', tiny(), T=8)]
    assert labels == expected
    monkeypatch.setattr(bench, 'wake', True)
    with pytest.raises(ValueError, match='--wake needs a cache that keeps every loop step'):
        bench.points_of('', tiny(), T=8)


@pytest.mark.parametrize('cache, ring', [('ring', 64), ('ring', 8), ('ring', 116), ('exact', 8),
                                         ('latest', 8)])
def test_a_rule_of_a_task_is_measured_as_sample_decodes_it(tiny, monkeypatch, cache, ring):
    """A ring of 64 keeps 30 loops, but not the 116 with which tokens of this problem wake."""
    for knob, value in dict(cache=cache, ring=ring, rules=['accel']).items():
        monkeypatch.setattr(bench, knob, value)
    model = tiny()
    decoding = defaults.choose(model, make_exit('accel'), T=8, cache=cache, ring=ring)
    full = bench.full_budget(model, T=8)
    method, = bench.rules_to_measure(model, full.n_loop, T=8)
    assert [full.n_loop] * 2 == decoding.counts
    assert method.rule.wake == decoding.rule.wake


def test_what_is_not_measured_is_said(here, monkeypatch):
    """There are no more prompts than windows; a calibration has no use for some knobs."""
    alone = ['--budgets=[]', '--taus=[]', '--drafts=[]', '--waves=[]', '--n_prompts=9']
    printed = finished(*SMALL, *alone, '--n_windows=1', '--prompt_tokens=99', script='bench.py')
    assert '1 windows of 16 tokens give 1 prompts of 16 tokens\n' in printed
    assert names(read_csv('out/bench.csv')) == ['fixed 5, exact']
    settings = json.loads(Path('out/bench.json').read_text())
    assert settings.items() >= dict(iteration=12, device='cpu', dtype='float32', seed=0, ring=8,
                                    temperature=0, prompt_tokens=16, new_tokens=8,
                                    threads=torch.get_num_threads()).items()

    monkeypatch.setattr('data.held_out_windows', mock.Mock(side_effect=ValueError('enough')))
    done = conftest.run(*TO_CALIBRATE, '--calibrate=9', script='bench.py')
    assert '--budgets and --drafts have no threshold, and are not measured' in done.stdout
    line = refused(*TO_CALIBRATE, '--calibrate=9', '--n_prompts=2', script='bench.py')
    assert '--calibrate measures all windows of one run, not compiled: leave out --n_p' in line


@pytest.mark.parametrize('flags', [SMALL, [*TO_CALIBRATE, '--calibrate=1']])
def test_a_folder_that_cannot_be_written_is_found_before_the_work(here, monkeypatch, flags):
    Path('file').write_text('no folder')
    monkeypatch.setattr('decode.teacher_forced', mock.Mock(side_effect=AssertionError('too late')))
    with mock.patch('common.checkpoint.find_run', lambda *args: ('out', 'file/results')):
        assert "cannot write into 'file/results'" in refused(*flags, script='bench.py')
    for name in 'bench.csv', 'exits.json':
        os.mkdir(f'out/{name}')
        assert f"'out/{name}' is a folder" in refused(*flags, script='bench.py')
        os.rmdir(f'out/{name}')


def test_the_seed_reaches_the_noise_of_continuations(tiny, idx):
    """The draws of prompt i have seed + i."""
    model = tiny(adapter_init='random')
    point = points.Point('', model, fixed(3))
    for seed, number in ((0, 0), (4, 0), (4, 2)):
        conditions = measure.Conditions(new_tokens=7, temperature=1.5, seed=seed)
        new = measure.continue_prompt(point, idx[:1, :6], conditions, number).text
        wanted, _ = model.generate(idx[:1, :6], 7, 1.5, n_loop=3, noise_seed=seed,
                                   seed=seed + number)
        assert torch.equal(new, wanted[:, 6:])


def test_a_coin_falls_the_same_way_each_time(tiny, idx):
    """A rule may draw random numbers; the points measured before it do not change them."""
    coin = points.Method(points.Kind.RULE, 9, 'exact', make_exit('random', 0.3))
    point = points.Point('', tiny(), coin)
    conditions = measure.Conditions(new_tokens=7)
    (logits, _, evals), _, again = (measure.decode_given(point, idx[rows], conditions)
                                    for rows in (slice(None), slice(2), slice(None)))
    assert torch.equal(evals, again[1]) and len(evals.unique()) > 2
    texts = [measure.continue_prompt(point, idx[:1, :6], conditions).text for _ in range(2)]
    assert torch.equal(*texts)


# figures ------------------------------------------------------------------------------------------

def test_a_dot_has_the_quality_of_its_texts():
    """
    That of drafts is the one of their check under exact, however far it is from the full budget;
    that of a wave the full budget's, if it writes its texts.
    """
    def row(kind, n_loop, ce, same, cache='exact'):
        return dict(run='a', kind=kind, n_loop=n_loop, ce=ce, identical=same, cache=cache,
                    ms_per_token=1.0, wake=None)
    Kind = points.Kind
    rows = [row(Kind.FIXED, 9, 1.0, 1), row(Kind.FIXED, 4, 2.0, 0.1),
            row(Kind.FIXED, 4, 7.0, 0.1, 'latest'), row(Kind.DRAFTS, 4, None, 0.1),
            row(Kind.WAVE, 9, None, 0.99, 'latest'), row(Kind.WAVE, 9, None, 0.5, 'latest')]
    heights = [dot['height'] for dot in comparison.dots_of(rows, False, 0.95)]
    assert heights == [1, 2, 7, 2, 1]


def test_the_ledger_names_every_run(monkeypatch):
    """Also one that begins with _, one with math, and two that end alike."""
    runs = ['_x', 'o1/', 'a/out', 'b/out', r'$\frac$', '..']
    dots = [dict(run=run, kind=f'${i % 2}$_kind', ms=1 + i, height=2, plain=i == 0)
            for i, run in enumerate(runs)]
    figures = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: figures.append(figure))
    plots.ledger(dots, 'ledger.png', 'held-out loss')
    figure, = figures
    figure.savefig(os.devnull, format='png')
    legend = figure.axes[0].get_legend()
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ['_x', 'o1', 'a/out', 'b/out', r'$\frac$', '..', '$0$_kind', '$1$_kind']
    assert not any(text.get_parse_math() for text in legend.get_texts())


def test_figure_4_has_a_line_for_each_rule_and_run(monkeypatch):
    rows = [dict(run=run, cache='exact', wake=wake, rule=rule, tau=tau, ms_per_token=tau, ppl=2.0,
                 ce=1.0) for run in ('a', 'b_$') for wake in (False, True)
            for rule in ('_mine', 'kl') for tau in (0.1, 1.0)]
    figures = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: figures.append(figure))
    plots.figure_4(rows, 'figure_4.png')
    figure, = figures
    figure.savefig(os.devnull, format='png')
    titles = [ax.get_title() for ax in figure.axes[::3]]
    assert titles == [f'{run}, exact{more}' for run in ('a', 'b_$')
                      for more in ('', ', wake')]
    assert {len(ax.get_lines()) for ax in figure.axes} == {2}
    texts = figure.axes[0].get_legend().get_texts()
    assert [text.get_text() for text in texts] == ['_mine', 'kl']


def test_the_legend_of_figure_4_names_the_rules_of_all_panels(monkeypatch):
    """Each with the colour of its line, where the panels have different rules."""
    drawn = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: drawn.append(figure))
    rows = [dict(run='out', cache=cache, wake=False, rule=rule, tau=tau, ms_per_token=1, ppl=2,
                 ce=3)
            for cache, rule in (('exact', 'kl'), ('latest', 'norm'), ('latest', 'kl'))
            for tau in (0.1, 1.0)]
    plots.figure_4(rows, 'figure_4.png')
    first, *_, last = drawn[0].axes
    legend = first.get_legend()
    colours = {text.get_text(): line.get_color()
               for text, line in zip(legend.get_texts(), legend.get_lines())}
    kl, = first.get_lines()
    norm, kl_again = last.get_lines()
    assert colours == dict(kl=kl.get_color(), norm=norm.get_color())
    assert kl_again.get_color() == kl.get_color() != norm.get_color()
