"""bench.py: quality is the model's own, costs and thresholds by hand, and whole runs."""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import finished, refused

import bench
import data
from common.evaluation import spread
from common.files import read_csv, sha256_of
from exits import make_exit
from model import GPT
from tasks import Calc

SMALL = ['--taus=[0,0.3,100.0]', '--budgets=[1,2,5]', '--n_loop=5', '--n_windows=6', '--device=cpu',
         '--n_prompts=2', '--new_tokens=8', "--rules=['norm','accel']",
         "--decoder=['drafts:loops=1,check=3','wave:width=3,steps=2']"]


@pytest.fixture
def fresh(run_folder, monkeypatch):
    """In the folder of a run, with no thresholds yet."""
    monkeypatch.chdir(run_folder)
    Path('out/exits.json').unlink(missing_ok=True)


@pytest.fixture
def knobs(monkeypatch):
    """knobs(n_loop=3): sets knobs of bench.py for one test."""
    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(bench, name, value)
    return change


def value(rows, name, column):
    row, = [row for row in rows if row['name'] == name]
    return float(row[column])


# a whole run --------------------------------------------------------------------------------------

def test_a_whole_run(fresh):
    printed = finished(*SMALL, "--cache=['exact','latest']", script='bench.py')
    rows = read_csv('out/bench.csv')
    names = [f'loops {n}, {cache}' for n in (1, 2, 5) for cache in ('exact', 'latest')]
    names += [f'{rule} {tau}, {cache}' for rule in ('norm', 'accel') for tau in ('0', '0.3', '100')
              for cache in ('exact', 'latest')]
    names += ['drafts:loops=1,check=3, loops 3', 'wave:width=3,steps=2, norm_rel 0.003']
    names += [f'wave:width=3,steps=2, {rule} {tau}' for rule in ('norm', 'accel')
              for tau in ('0', '0.3', '100')]
    assert rows[0]['name'] == 'loops 5, exact'
    assert sorted(row['name'] for row in rows) == sorted(names)
    assert {row['kind'] for row in rows} == {'fixed loops', 'exit rules', 'drafts', 'wave'}
    for row in rows:
        for column in 'ms_per_token', 'blocks', 'identical':
            assert math.isfinite(float(row[column])), row['name']
        has_quality = row['kind'] in ('fixed loops', 'exit rules')
        assert (row['ce'] != '') == has_quality, row['name']
    # the table has all rows, the fastest first
    table = [line for line in printed.splitlines() if line.startswith(tuple(names))][-len(rows):]
    times = [float(line.split()[-1]) for line in table]
    assert times == sorted(times)
    assert Path('out/figure_4.png').stat().st_size > 5000

    model = GPT.load('out')
    text = data.open_data('book')
    idx, targets = text.held_out(spread(text, 6, 16), 16)
    with torch.no_grad():
        for n in 1, 2, 5:
            logits, loss = model(idx, targets, n_loop=n)
            right = (logits.argmax(-1) == targets).double().mean()
            for column, number in dict(ce=loss, accuracy=right, mean_evals=n).items():
                found = value(rows, f'loops {n}, exact', column)
                assert found == pytest.approx(float(number), rel=2e-6)
        trace = []
        _, loss = model(idx, targets, n_loop=5, exit=make_exit('norm', 0.3), trace=trace)
        evals = np.mean([entry['evals'].double().mean() for entry in trace])
    assert value(rows, 'norm 0.3, exact', 'ce') == pytest.approx(loss.item(), rel=1e-6)
    assert value(rows, 'norm 0.3, exact', 'mean_evals') == pytest.approx(evals)
    assert value(rows, 'loops 5, exact', 'ce_minus_full') == 0
    # Algorithm 1 at a huge tau: the second hit comes at step 3
    assert value(rows, 'accel 100, exact', 'mean_evals') == 3

    # what a text costs: two groups of one layer each, and as many layers as loops
    assert value(rows, 'loops 5, exact', 'blocks') == 10
    assert value(rows, 'loops 2, exact', 'blocks') == 4
    texts = {n: model.generate(idx[:2, :8], 8, temperature=0, n_loop=n)[0] for n in (5, 2)}
    for method in (bench.Method(3, 'exact', None, 'drafts:loops=1,check=3'),
                   bench.Method(5, 'exact', make_exit('norm', 0.3))):
        written = [bench.time_to_write(model, method, prompt[None], 8)[1] for prompt in idx[:2, :8]]
        assert value(rows, method.columns()['name'], 'blocks') == np.mean(written)
    same = (texts[5] == texts[2]).all(dim=1).double().mean().item()
    assert value(rows, 'loops 2, exact', 'identical') == same
    assert value(rows, 'loops 5, exact', 'identical') == 1


@pytest.mark.parametrize('flag, word', [
    ('--rules=["accell"]', "'accel'"), ('--rules=missing:rule', 'missing'), ('--taus=[-1]', 'tau'),
    ('--budgets=[0]', 'n_loop'), ('--cache=newest', 'newest'), ('--wake', '--wake'),
    ('--decoder=drafts:loops=3,check=3', 'drafts'), ('--decoder=wave:width=0', 'width'),
    ('--new_tokens=1', 'new_tokens'), ('--store', '--calibrate'), ('--n_windows=9999', 'windows'),
    ('--rules=[norm,kl]', 'quote'), ('--calibrate --n_windows=2', 'n_windows')])
def test_bad_input_is_refused_before_the_work(fresh, flag, word):
    Path('out/bench.csv').unlink(missing_ok=True)
    line = refused(*SMALL, *flag.split(), script='bench.py')
    assert line.startswith('error: ') and word in line
    assert not Path('out/bench.csv').exists()


def test_a_rule_that_is_not_compiled_says_so(knobs):
    """A wave applies its rule between passes, so these are compiled."""
    knobs(compile=True)
    rule = make_exit('norm', 1.0)
    names = [bench.Method(3, 'exact', rule, decoder).columns()['name']
             for decoder in ('one_by_one', 'wave')]
    assert names == ['norm 1, exact, not compiled', 'wave, norm 1']


# problems -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('cache, wake, expected', [
    ('exact', None, ['loops 116, exact', 'norm 0.3, exact, wake']),
    ('exact', [False, True], ['loops 116, exact', 'norm 0.3, exact', 'norm 0.3, exact, wake']),
    ('exact', False, ['loops 30, exact', 'norm 0.3, exact']),
    (['exact', 'latest'], None, ['loops 116, exact', 'norm 0.3, exact, wake', 'loops 116, latest',
                                 'norm 0.3, latest']),
    ('latest', None, ['loops 30, exact', 'loops 30, latest', 'norm 0.3, latest'])])
def test_tokens_of_a_problem_wake_where_they_can(tiny, knobs, cache, wake, expected):
    """They have the budget for it; decoders write no answers."""
    knobs(cache=cache, wake=wake, budgets=[], taus=[0.3], rules=['norm'])
    methods = bench.methods_of(tiny(block_size=8), Calc())
    assert [method.columns()['name'] for method in methods] == expected
    assert bench.methods_of(tiny(groups=[]), Calc()) == [bench.Method(0)]


def test_a_task(sums_run, monkeypatch):
    monkeypatch.chdir(sums_run)
    flags = ['--n_loop=9', '--n_windows=20', '--n_prompts=1', '--device=cpu']
    finished(*flags, '--budgets=[2]', '--taus=[0.3]', '--rules=accel', script='bench.py')
    full, _, rule = read_csv('out/bench.csv')
    assert (rule['kind'], full['n_loop']) == ('exit rules', '9')
    assert (rule['wake'], rule['identical'], rule['blocks']) == ('True', '', '')
    problems = data.open_data('calc:p=2,reset=0.1')
    numbers = spread(problems, 20, 12)
    assert float(rule['deepest']) == problems.all_held_out(12)[2][numbers].max(axis=1).mean()
    method = bench.Method(9, 'exact', make_exit('accel', 0.3, wake=True))
    idx, targets = problems.held_out(numbers, 12)
    _, right, labels, _, rested = bench.quality(GPT.load('out'), method, idx, targets)
    wanted = (right == labels).mean(), rested.mean(), np.mean((right == labels) & (rested > 0))
    assert [float(rule[name]) for name in ('solved', 'rested', 'both')] == [*wanted]
    assert 'leave out --compile' in refused(*flags, '--compile', script='bench.py')


def test_what_rests(sums_run, monkeypatch):
    """A problem rests if its loops end before the budget; with a tau of 0 none does. And times."""
    model = GPT.load(sums_run / 'out')
    seconds = iter(range(9))
    monkeypatch.setattr(bench, 'now', lambda: next(seconds))
    assert bench.time_to_read(model, bench.Method(3), torch.zeros(1, 8).long()) == 1000 / 8
    assert bench.time_to_write(model, bench.Method(3), torch.zeros(1, 2).long(), 6)[0] == 1000 / 5
    problems = data.open_data('calc:p=2,reset=0.1')
    idx, targets = problems.held_out(np.arange(20), 12)
    for name, tau, budget in ('norm', 1.0, 8), ('accel', 1.0, 9), ('norm', 0.0, 8):
        rule = make_exit(name, tau, wake=True)
        rested = bench.quality(model, bench.Method(budget, 'exact', rule), idx, targets)[4]
        for problem, rests in zip(idx, rested):
            trace = []
            model(problem[None], n_loop=budget, exit=rule, trace=trace)
            assert rests == (len(trace[0]['awake']) < budget)
        assert bool(rested.any()) == (tau > 0)


def test_what_thresholds_cost_on_problems(sums_run, monkeypatch):
    """A table, by other code; --store=0.3 stores that threshold, and nothing else stores any."""
    monkeypatch.chdir(sums_run)
    flags = ['--rules=norm', '--device=cpu', '--calibrate', '--n_windows=20']
    printed = finished(*flags, script='bench.py')
    assert not Path('out/exits.json').exists()
    rows = {}
    for line in printed.splitlines():
        words = line.split()
        if len(words) == 4 and words[0][0].isdigit():
            rows[float(words[0])] = list(map(float, words[1:]))
    assert list(rows) == bench.TAUS[::-1]

    x, y, _ = data.open_data('calc:p=2,reset=0.1').make(
        np.random.default_rng([*b'thresholds']), 20, 12)
    model = GPT.load('out')
    for tau in 0.001, 30:
        trace = []
        with torch.no_grad():
            logits, _ = model(torch.from_numpy(x), n_loop=124, trace=trace,
                              exit=make_exit('norm', tau, wake=True))
        wrong = logits.argmax(-1).numpy() != y
        evals = trace[0]['evals'].double().mean().item()
        assert rows[tau] == [(~wrong).all(axis=1).sum(), wrong.sum(), round(evals, 2)]
    for wrong in [*flags, '--store'], [*flags[1:], '--store=1']:
        assert 'one rule and a threshold' in refused(*wrong, script='bench.py')
    finished(*flags, '--store=0.3', script='bench.py')
    row, = json.loads(Path('out/exits.json').read_text())['exits']
    assert (row['rule'], row['tau'], row['cost']) == ('norm', 0.3, rows[0.3][1])
    Path('out/exits.json').unlink()


# the interval, and thresholds of a text -----------------------------------------------------------

def found(nats, labels):
    """What bench.quality returns, by hand: one loop step, all answers wrong, none at rest."""
    nats, labels = np.array(nats, dtype=float), np.array(labels, dtype=float)
    return np.stack((nats, 0 * nats, labels, 0 * nats + 1, 0 * nats))


def test_the_interval_is_paired_and_of_a_ratio():
    """Half a thousandth of a nat per label, of which windows have one or nine: as a bootstrap."""
    rng = np.random.default_rng(0)
    labels = rng.choice([1, 9], size=400)
    nats = 100 * rng.standard_normal(400)
    difference = labels * (5e-4 + 1e-4 * rng.standard_normal(400))
    cost, low, high = bench.excess(found(nats + difference, labels), found(nats, labels))
    assert cost == pytest.approx(difference.sum() / labels.sum())
    picks = rng.integers(400, size=(4000, 400))
    draws = difference[picks].sum(axis=1) / labels[picks].sum(axis=1)
    ends = np.percentile(draws, [2.5, 97.5])
    assert [low - cost, high - cost] == pytest.approx([*(ends - cost)], rel=0.05)
    assert np.isnan(bench.excess(found([2], [1]), found([1], [1]))[1:]).all()


def test_a_threshold_is_the_largest_that_keeps_the_loss(tiny, knobs, tmp_path, monkeypatch):
    """
    On even windows, by the upper end; odd windows say the cost. Losses by hand: accel tau / 10 on
    even windows and twice that on odd ones, norm 9 more, kl 0.1 on half of the even windows.
    """
    def by_hand(model, method, idx, targets):
        n = np.arange(16)
        nats = 0 * n
        if method.rule:
            tau = method.rule.tau
            nats = dict(accel=tau / 10 * (1 + n % 2), norm=9 + tau + 0 * n,
                        kl=0.1 * (n % 4 == 0))[method.rule.name]
        return found(nats, np.ones(16))

    monkeypatch.setattr(bench, 'quality', by_hand)
    knobs(calibrate=True, most_nats=0.1, taus=[3.0, 0.1, 1.0], rules=['accel', 'norm', 'kl'],
          cache='latest')
    others = [dict(rule=rule, cache=cache, tau=7.0)
              for rule, cache in (('accel', 'exact'), ('norm', 'latest'), ('accel', 'latest'))]
    path = tmp_path / 'exits.json'
    weights = tmp_path / 'ckpt.pt'
    weights.touch()
    path.write_text(json.dumps(dict(weights=sha256_of(weights), exits=others)))
    idx = torch.zeros(16, 4, dtype=torch.long)
    model = tiny()
    bench.store_rows(bench.thresholds_of(model, bench.methods_of(model), idx, idx, False),
                     str(tmp_path), weights)
    exact, accel, kl = json.loads(path.read_text())['exits']
    assert exact == others[0]           # of a cache that was not asked for
    assert (accel['rule'], accel['cache'], accel['tau'], accel['wake']) == (
        'accel', 'latest', 1.0, False)
    assert accel['cost'] == pytest.approx(0.2)
    assert (kl['rule'], kl['tau']) == ('kl', 3.0)       # 0.05 on average, 0.09 at its upper end
    knobs(most_nats=0.08)
    rows = bench.thresholds_of(model, bench.methods_of(model), idx, idx, False)
    assert rows['accel', 'latest']['tau'] == 0.1
    assert rows['kl', 'latest'] is None                 # its upper end is above 0.08


def test_sample_takes_the_threshold_that_was_found(fresh):
    flags = ['--calibrate', '--most_nats=9', '--taus=[0.001,0.25]', '--n_windows=16',
             '--n_loop=5', '--device=cpu', '--rules=["kl","kl:7"]']
    finished(*flags, script='bench.py')
    assert not Path('out/exits.json').exists()
    finished(*flags, '--store', script='bench.py')
    row, = json.loads(Path('out/exits.json').read_text())['exits']
    assert (row['rule'], row['cache'], row['tau'], row['wake']) == ('kl', 'exact', 7.0, False)
    flags = ['--exit=kl', '--max_new_tokens=3', '--device=cpu']
    assert 'kl with tau = 7' in finished(*flags, script='sample.py')
    assert 'kl with tau = 0.01' in finished(*flags, '--cache=latest', script='sample.py')
