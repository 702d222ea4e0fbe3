"""The shipped figures, that results/README.md says them, and the machinery on runs made small."""
import os
import time
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_train import TINY

import data
from results import claims, measure, run, runs, table

SEEDS = (1337, 1, 2)
SHIPPED = claims.load('small')


# the shipped figures, looked at without the table's own words -----------------------------------

def test_readme_says_what_the_files_say():
    with open(os.path.join(ROOT, 'results', 'README.md'), encoding='utf-8') as f:
        text = f.read()
    assert text.split(table.BEGIN)[1].split(table.END)[0].strip() == table.markdown()


def test_three_seeds_of_everything():
    for name in ('steps', 'dlr', 'losses', 'spectrum'):
        for variant in ('main', 'fixed', 'uniform', *run.CHOICES):
            rows = claims.pick(SHIPPED[name], variant=variant)
            assert claims.distinct(rows, 'seed') == [*SEEDS], (name, variant)
    swept = {(row['seed'], row['rules']) for row in SHIPPED['bench']}
    assert swept == {(seed, rules) for seed in SEEDS for rules in run.RULES}


def test_c1_step_norms_fall():
    rows = claims.last_checkpoint(claims.pick(SHIPPED['steps'], variant='main'))
    for seed in SEEDS:
        for group in ('1', '2-3', '4'):
            norms = claims.column(claims.pick(rows, seed=seed, group=group), 'norm')
            assert len(norms) == 30 and max(norms[8:]) < norms[0] / 100


def test_c4_drift_is_larger_than_the_steps():
    rows = claims.last_checkpoint(claims.pick(SHIPPED['dlr'], variant='main'))
    ratios = [row['ratio'] for row in rows if row['reading'] in ('first', 'settled', 'noise')]
    assert len(ratios) == 3 * 2 * 3 and min(ratios) > 5


def test_c7_small_taus_cost_nothing():
    rows = [row for row in claims.pick(SHIPPED['bench'], rules='accel')
            if row['rule'] in ('accel', 'kl') and row['tau'] <= 1e-4]
    assert len(rows) == 12 and all(abs(row['ce_minus_full']) < 1e-3 for row in rows)


def test_c11_loops_help_and_stay():
    for seed in SEEDS:
        rows = claims.pick(SHIPPED['loops'], seed=seed)
        losses = {row['loops']: row['loss'] for row in rows}
        assert losses[1] > losses[2] + 0.05 > losses[4]
        assert all(abs(losses[n] - losses[8]) < 1e-3 for n in (16, 64, 256))


def test_c12_the_noise_is_forgotten():
    spreads = claims.column(claims.pick(SHIPPED['noise'], variant='main'), 'spread')
    assert len(spreads) == 9 and max(spreads) < 1e-4


# the claims and the table -----------------------------------------------------------------------

def test_curves_by_hand():
    rows = [dict(k=k, norm=10.0 * 0.5 ** k, cos=0.6 if k else '', floor=0.01)
            for k in (3, 0, 1, 2, 4, 5, 6)]
    assert claims.tenfold_after(rows) == 4
    assert np.isnan(claims.tenfold_after(rows[1:3]))
    assert claims.settled(rows) == pytest.approx(0.6)
    rows[-1]['cos'] = -1.0          # its norm, 0.16, is below 30 times the floor: not looked at
    assert claims.settled(rows) == pytest.approx(0.6)


def test_mean_and_standard_deviation():
    assert claims.mean_std([1, 2, 3]) == '2.00 ± 1.00'
    assert claims.mean_std([1.25], 1) == '1.2'


def test_the_cheapest_of_equal_quality():
    def point(tau, gap, ms):
        return dict(seed=1.0, rules='accel', rule='kl', tau=tau, ce_minus_full=gap, ms_per_token=ms)
    t = dict(bench=[point(1e-3, 0.0, 9.0), point(1e-2, 0.004, 5.0), point(0.1, 0.02, 1.0)])
    assert claims.cheapest(t, 'kl', 'ms_per_token') == [5.0]
    assert claims.cheapest(t, 'kl', 'ms_per_token', taus=(1e-3,)) == [9.0]
    assert np.isnan(claims.cheapest(t, 'kl', 'ms_per_token', taus=(0.1,)))


def test_the_table_is_put_between_the_markers(tmp_path):
    page = tmp_path / 'README.md'
    page.write_text(f'before\n{table.BEGIN}\nold\n{table.END}\nafter\n', encoding='utf-8')
    for _ in range(2):      # written again, it stays as it is
        table.write(table.BEGIN, table.END, 'new', tmp_path)
        text = page.read_text(encoding='utf-8')
        assert text == f'before\n{table.BEGIN}\nnew\n{table.END}\nafter\n'


# the geometry -----------------------------------------------------------------------------------

def test_the_leading_eigenvalue(tiny):
    """A small push of the last token shrinks from step to step as the eigenvalue says."""
    # float64 states from which one loop step no longer moves
    model, trace = tiny(), []
    idx = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    model(idx, n_loop=60, trace=trace)
    group, e, x = model.groups[0], trace[0]['e'].double(), trace[0]['states'][-1].double()
    group.double()
    leading = measure.spectrum(group, e, x)

    # the push, 14 steps long
    push = torch.randn(2, 16, generator=torch.Generator().manual_seed(1)).double() * 1e-6
    with torch.no_grad():
        for _ in range(200):
            x = group.step(x, e)
        pushed, norms = x.clone(), []
        pushed[:, -1] += push
        for _ in range(14):
            pushed = group.step(pushed, e)
            norms.append((pushed - x)[:, -1].norm(dim=-1))
    rate = (norms[-1] / norms[-7]) ** (1 / 6)
    torch.testing.assert_close(rate, leading.abs().double(), rtol=0.1, atol=0)


def test_last_cos_stops_at_the_first_step_that_rounding_hides():
    # one token in two dimensions: straight on, straight on, back, and then steps of rounding
    steps = torch.tensor([[1.0, 0], [0.5, 0], [-0.3, 0], [0.001, 0], [0.5, 0]])
    states = torch.cat((torch.zeros(1, 2), steps.cumsum(0))).view(6, 1, 1, 2)
    assert measure.last_cos(states, floor=0.001).tolist() == pytest.approx([-1.0])
    assert measure.last_cos(states, floor=0.015).tolist() == pytest.approx([1.0])


# the machinery ----------------------------------------------------------------------------------

class Inline:
    """A pool whose work is done at once, in this thread: signals need the main one."""

    def __init__(self, workers):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    map = staticmethod(map)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """results/run.py on runs made tiny, in this process; the names of what it calls, in order."""
    monkeypatch.chdir(tmp_path)
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(900)))
    data.make('book', 'book.txt')
    calls = []

    def command(script, *flags, log, until=None, threads=None):
        calls.append(script)
        # geometry.py has its own tests, and one sweep will do for all
        if script == 'geometry.py' or calls.count('bench.py') > 1:
            return True
        done = conftest.run(*flags, script=script)
        assert done.returncode == 0, done.stderr
        return True

    sweep = ['--n_windows=4', '--timed_tokens=1', '--rounds=1', '--n_loop=6', '--budgets=[2]',
             '--epsilons=[0.3]', '--prompt_tokens=2', '--device=cpu']
    monkeypatch.setattr(runs, 'command', command)
    settings = dict(dataset='book', seeds=[1], workers=1,
                    CHOICES={'as it is': []}, RULES=dict.fromkeys(run.RULES, sweep),
                    more=[*TINY, '--eval_loops=[1,4,8]', '--keep_iters=[0]'],
                    ThreadPoolExecutor=Inline)
    for name, setting in settings.items():
        monkeypatch.setattr(run, name, setting)
    smaller = dict(N_LOOP=8, N_WINDOWS=4, NOISE_DRAWS=2, LOOPS=(1, 4, 8, 32, 64))
    for name, setting in smaller.items():
        monkeypatch.setattr(measure, name, setting)
    monkeypatch.setattr(table, 'write', lambda begin, end, lines: calls.append('table'))
    return calls


@pytest.mark.parametrize('scale, trainings', [('small', 4), ('paper', 1)])
def test_all_is_run_once_and_gathered(small, monkeypatch, scale, trainings):
    monkeypatch.setattr(run, 'scale', scale)
    run.main()
    assert small == ['train.py'] * trainings + ['bench.py'] * 5 + ['geometry.py', 'table']
    assert len(claims.verdicts(claims.load(scale, 'results'))) == (15 if scale == 'small' else 14)
    prefix = 'paper_' if scale == 'paper' else ''
    assert os.path.exists(f'assets/{prefix}figure_4.png')
    if scale == 'small':
        assert table.markdown('results').count('| not run yet |') == 15

    # what is done is not done again
    small.clear()
    run.main()
    assert small == ['table']


def test_pieces_stop_and_go_on(small, monkeypatch, capsys):
    monkeypatch.setattr(run, 'minutes', 1e-9)
    run.main()
    assert small == []
    assert 'the time is up: the same command goes on' in capsys.readouterr().out


def test_a_training_is_asked_to_stop_in_order(tmp_path, monkeypatch):
    """A piece's end is a SIGTERM: it saves, and the next piece resumes."""
    monkeypatch.chdir(tmp_path)
    with open('book.txt', 'w') as f:
        f.write('many words ' * 900)
    data.make('book', 'book.txt')

    def printed():
        with open('piece.txt') as f:
            return f.read()

    # a clock by which the time is up as soon as the run is under way
    clock = SimpleNamespace(time=lambda: float('iter 0:' in printed()), sleep=time.sleep)
    monkeypatch.setattr(runs, 'time', clock)
    flags = [*TINY, '--max_iters=1000000', '--out_dir=out-piece', '--resume']
    assert not runs.command('train.py', *flags, until=0.5, log='piece.txt')
    assert 'stopped after iteration' in printed() and os.path.exists('out-piece/ckpt.pt')


def test_a_command_that_fails_names_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='`python nowhere.py --n_loop=3` failed: see log.txt'):
        runs.command('nowhere.py', '--n_loop=3', log='log.txt')
    with open('log.txt') as f:
        assert "can't open file" in f.read()


@pytest.mark.parametrize('knob, value, words', [
    ('scale', 'large', "unknown scale 'large': choose small or paper"),
    ('seeds', [], '--seeds must name one'),
    ('workers', 0, '--workers'),
    ('minutes', -1.0, '--minutes must be')])
def test_bad_input(knob, value, words, monkeypatch):
    monkeypatch.setattr(run, knob, value)
    with pytest.raises(ValueError, match=words):
        run.main()
