"""The shipped figures, that results/README.md says them, and the machinery on runs made small."""
import json
import os
import time
from functools import partialmethod
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT
from test_train import TINY

import calibrate
import data
import tasks
from common.checkpoint import load_checkpoint
from results import claims, measure, questions, run, runs, table, waves
from results.rows import load

SEEDS = (1337, 1, 2)
SHIPPED = load('small', names=claims.CSVS)
TASKS = load('tasks', names=[*claims.CSVS, *claims.TASK_CSVS], variant='calc groups')


# the shipped figures, looked at without the table's own words -----------------------------------

def test_readme_says_what_the_files_say():
    with open(os.path.join(ROOT, 'results', 'README.md'), encoding='utf-8') as f:
        text = f.read()
    assert text.split(table.BEGIN)[1].split(table.END)[0].strip() == table.markdown()


def test_three_seeds_of_everything():
    for t in (SHIPPED, TASKS):
        for name in ('steps', 'settled', 'losses', 'spectrum'):
            for variant in claims.distinct(t[name], 'variant'):
                rows = claims.pick(t[name], variant=variant)
                assert sorted(claims.distinct(rows, 'seed')) == sorted(SEEDS), (name, variant)
        swept = {(row['variant'], row['seed'], row['rules']) for row in t['bench']}
        assert {(seed, rules) for variant, seed, rules in swept if variant == t['variant']} == {
            (seed, rules) for seed in SEEDS for rules in run.RULES}
    for name in ('points', 'short', 'phases'):
        assert {(row['variant'], row['seed']) for row in TASKS[name]} == {
            (variant, seed) for variant in run.TASKS for seed in SEEDS}


def test_c1_step_norms_fall():
    rows = claims.at_checkpoint(claims.pick(SHIPPED['steps'], variant='main'))
    for seed in SEEDS:
        for group in ('1', '2-3', '4'):
            norms = claims.column(claims.pick(rows, seed=seed, group=group), 'norm')
            assert len(norms) == 30 and max(norms[10:]) < norms[0] / 100


def test_c11_loops_help_and_stay():
    for seed in SEEDS:
        rows = claims.pick(SHIPPED['loops'], seed=seed, variant='main')
        losses = {row['loops']: row['loss'] for row in rows}
        assert losses[1] > losses[2] + 0.005 > losses[4]
        assert all(abs(losses[n] - losses[8]) < 1e-3 for n in (16, 64, 256))


def test_loops_matter_on_the_tasks():
    for variant in run.TASKS:
        for seed in SEEDS:
            rows = claims.pick(TASKS['loops'], seed=seed, variant=variant, where='held out')
            right = {row['loops']: row['accuracy'] for row in rows}
            assert right[1] < 0.92 and right[32] > 0.98


def test_waiting_loses_fewer_answers_than_own_signals():
    for variant in ('calc', 'calc groups'):
        for seed in SEEDS:
            lost = {past: claims.pick(TASKS['points'], variant=variant, seed=seed, part='rules',
                                      rule='norm_rel', past=past, tau=0.1)[0]['early']
                    for past in ('False', 'True')}
            assert lost['True'] == 0 and lost['False'] > 0.001


# the claims and the table -----------------------------------------------------------------------

def shipped_with(**tables):
    return dict(scale='small', variant='main', **tables)


def settled_rows(*tenths, cos=0.6):
    return [dict(variant='main', seed=seed, iteration=at, group='1', tenth=tenth, cos=cos,
                 cos_low=cos - 0.1, cos_high=cos + 0.1, cos_std=0.2)
            for seed, tenth in enumerate(tenths) for at in (0.0, 9.0)]


@pytest.mark.parametrize('tenths, verdict', [
    ((6.0, 8.0, 10.0), 'reproduced, in 6 to 10'), ((2.0, 2.0, 3.0), 'it falls faster, in 2 to 3'),
    ((6.0, 8.0, 11.0), 'not reproduced'), ((2.0, 2.0, ''), 'not reproduced')])
def test_a_seed_that_never_falls_fails_the_claim(tenths, verdict):
    assert claims.c1(shipped_with(settled=settled_rows(*tenths)))[1] == verdict


def test_the_paper_s_range_of_cosines():
    # the mean over tokens that still move, at each step; at the fourth hardly any do
    steps = [dict(variant='main', seed=0, iteration=9.0, group='1', k=float(k), cos_clear=cos,
                  clear=clear) for k, cos, clear in ((0, '', 1.0), (1, 0.2, 1.0), (2, 0.4, 0.9),
                                                     (3, 0.8, 0.4), (4, 0.5, 0.05))]
    t = shipped_with(settled=settled_rows(2.0, cos=0.6), steps=steps)
    assert claims.c2(t)[1] == 'reproduced'
    one_seed, other = (settled_rows(2.0, cos=cos) for cos in (0.3, 0.9))       # 0.6 in the mean
    t = shipped_with(settled=[*one_seed, *(row | dict(seed=1) for row in other)], steps=steps)
    assert claims.c2(t)[1] == 'not reproduced in 1 of 1 groups'
    t = shipped_with(settled=settled_rows(2.0, 2.0, cos=0.9), steps=steps)
    words, verdict = claims.c2(t)
    assert verdict == 'not reproduced in 1 of 1 groups'
    assert words == '0.90 ± 0.00 (group 1; over windows ± 0.10)'
    steps[2]['cos_clear'] = 0.5
    assert claims.c2(t)[1] == f'{verdict}; the mean of group 1 in 1 of 2 seeds for a while'


def test_mean_and_standard_deviation():
    assert claims.mean_std([1, 2, 3]) == '2.00 ± 1.00'
    assert claims.mean_std([1.25], 1) == '1.2'


def test_the_cheapest_of_equal_quality():
    def point(tau, high, ms):
        return dict(seed=1.0, variant='main', rules='accel', rule='kl', tau=tau, diff_high=high,
                    ms=ms, cache='exact', past='False')
    points = [point(1e-3, 0.0, 9.0), point(1e-2, 0.004, 5.0), point(0.1, 0.006, 1.0)]
    t = shipped_with(bench=points)
    assert claims.cheapest(t, 'kl', 'ms') == [pytest.approx(3.0)]      # half way to the next
    assert claims.cheapest(t, 'kl', 'ms', taus=(1e-3, 1e-2)) == [5.0]
    assert np.isnan(claims.cheapest(t, 'kl', 'ms', taus=(0.1,)))
    assert np.isnan(claims.cheapest(t, 'kl', 'ms', past='True'))
    assert claims.least(points, 'ms', whole=True) == 5.0                # loops are whole


def test_a_paired_interval():
    low, high = claims.paired(np.array([0.0, 0.1, 0.2]))
    assert (low, high) == pytest.approx((0.1 - 0.2484, 0.1 + 0.2484), abs=1e-4)


def test_what_is_good_everywhere_and_never_slow_is_the_advice():
    def swept(variant, ways):
        return [dict(variant=variant, seed=1.0, rules='accel', cache=cache, rule=rule, past='False',
                     tau=tau, diff_high=high, ms_per_token=ms)
                for cache, rule, tau, high, ms in ways]
    fixed = ('exact', 'fixed', 8.0, 0.0, 10.0)
    text = dict(variant='main', bench=swept('main', [
        fixed, ('latest', 'kl', 0.1, 0.0, 2.0), ('latest', 'norm', 0.1, 0.0, 5.0)]))
    tasks = dict(bench=[
        *swept('calc groups', [fixed, ('latest', 'kl', 0.1, 0.1, 2.0),
                               ('latest', 'norm', 0.1, 0.0, 5.0)]),
        *swept('hop groups', [fixed, ('latest', 'norm', 0.1, 0.0, 8.0)])])
    said = list(waves.advice(text, tasks))[2:]
    assert '`--exit=kl --tau=0.1 --cache=latest` | 0.20 (text)' in said[0]
    assert '`--exit=norm --tau=0.1 --cache=latest` | 0.50 (calc)' in said[1]
    assert '`--exit=norm --tau=0.1 --cache=latest` | 0.80 (hop)' in said[2]
    assert '`--exit=norm --tau=0.1 --cache=latest` | 0.50 (text), 0.50 (calc), 0.80' in said[3]


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
    leading = measure.spectrum(group, e, x)[:, -1]

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


def test_a_token_inherits_the_slowest_mode_before_it():
    own = torch.tensor([[0.1, -0.5, 0.3, 0.6j]])
    assert measure.slowest_so_far(own).tolist() == [[
        pytest.approx(value) for value in (0.1, -0.5, -0.5, 0.6j)]]


def test_the_mean_cosine_of_tokens_that_still_move():
    """The first of two tokens goes straight on, the second turns back and then trembles."""
    first = torch.tensor([0.0, 4, 6, 7, 7.5])
    second = torch.tensor([0.0, 4, 2, 2.001, 1.0])      # what it does after trembling is not told
    states = torch.stack((first, second), dim=1)[:, None, :, None]              # (K+1, 1, 2, 1)
    curves = dict.fromkeys(('norm', 'norm_std', 'cos', 'cos_std'), [0.0] * 4)
    rows = list(measure.step_rows('1', curves | dict(floor_float32=0.01), states))
    assert [row['clear'] for row in rows] == [1, 1, 0.5, 0.5]
    assert [row['cos_clear'] for row in rows] == ['', 0, 1, 1]


def test_who_waits_and_who_works():
    """Two tokens on a line: the first arrives at step 1, the second at step 3."""
    first = torch.tensor([0.0, 4, 4, 4, 4])
    second = torch.tensor([0.0, 1, 2, 4, 4.01])
    states = torch.stack((first, second), dim=1)[:, None, :, None]              # (K+1, 1, 2, 1)
    rows = list(measure.phase_rows('1', states, 1e-9, np.array([[0, 1]])))
    # steps 1 ... 3, of which those of the first token have no length
    assert [(row['depth'], row['phase'], row['steps']) for row in rows] == [
        (1, 'working', 2), (1, 'settled', 1)]
    assert rows[0]['cos'] == pytest.approx(1.0)


# the questions ----------------------------------------------------------------------------------

def wave_windows(wave):
    model, checkpoint = load_checkpoint(wave / 'out' / 'ckpt.pt')
    return model, *measure.held_out(checkpoint['config']['dataset'], model.config.block_size, 32)


def test_answers_lost_by_depth():
    full = torch.tensor([[[0.0, 9], [0, 9], [9, 0]]])           # says 1, 1, 0
    point = torch.tensor([[[0.0, 9], [9, 0], [0, 9]]])          # says 1, 0, 1
    targets, depth = torch.tensor([[1, 1, 1]]), np.array([[0, 4, 8]])
    # the third label is wrong in the full budget too: nothing is lost there
    assert questions.early(point, full, targets, depth) == dict(
        early=pytest.approx(1 / 3), early_0=0, early_1=1, early_2=0)


def test_the_oracle_of_the_answer_and_the_full_budget(wave, monkeypatch):
    """With the full budget nothing is lost; the oracle needs no more than the last one to agree."""
    model, idx, targets, depth = wave_windows(wave)
    monkeypatch.setattr(questions, 'FULL', 6)
    full, _, _ = questions.log_probabilities(model, questions.fixed(model, 6), idx)
    row = questions.point_row(model, questions.fixed(model, 6), idx, targets, depth, full)
    assert (row['gap'], row['early'], row['evals']) == (0, 0, 6)
    answer = questions.answer_row(model, idx, targets, depth, full)
    assert 1 <= answer['evals'] < 6
    one = questions.point_row(model, questions.fixed(model, 1), idx, targets, depth, full)
    shares = [(questions.third_of(depth) == i).mean() for i in range(3)]
    assert one['gap'] > 0.01 and one['early'] == pytest.approx(
        sum(share * one[f'early_{i}'] for i, share in enumerate(shares)))


# the machinery ----------------------------------------------------------------------------------

class Inline:
    """A pool whose work is done at once, in this thread: signals need the main one."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    map = staticmethod(map)

    def submit(self, work, *args):
        value = work(*args)
        return SimpleNamespace(result=lambda: value)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """results/run.py on runs made tiny, in this process; the names of what it calls, in order."""
    monkeypatch.chdir(tmp_path)
    os.symlink(os.path.join(ROOT, 'config'), 'config')
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(900)))
    data.make('book', 'book.txt')
    calls = []

    def command(script, *flags, log, until=None, threads=None):
        calls.append(script)
        # geometry.py has its own tests, and one sweep of a run will do for all
        folder, = (flag.split('=')[1] for flag in flags if flag.startswith('--out_dir'))
        if script == 'geometry.py' or os.path.exists(os.path.join(folder, 'bench.json')):
            return True
        done = conftest.run(*flags, script=script)
        assert done.returncode == 0, done.stderr
        if script == 'bench.py':        # what a check costs is not measured here
            with open(os.path.join(folder, 'bench.json'), 'w') as f:
                json.dump(dict(checks=[['C = 16', 'kl', 1.0, 2.0]]), f)
        return True

    sweep = ['--n_windows=4', '--timed_tokens=1', '--rounds=1', '--n_loop=6', '--budgets=[2]',
             '--epsilons=[0.3]', '--prompt_tokens=2', '--device=cpu', '--checks=False',
             '--cache=exact', '--past=False']
    monkeypatch.setattr(runs, 'command', command)
    tiny = [flag for flag in TINY if '--dataset' not in flag]
    settings = dict(seeds=[1], workers=1, CHOICES={'as it is': []}, SWEEP=[],
                    RULES=dict.fromkeys(run.RULES, sweep),
                    more=[*tiny, '--eval_loops=[1,4,8]', '--keep_iters=[0]'],
                    ThreadPoolExecutor=Inline, ProcessPoolExecutor=Inline)
    for name, setting in settings.items():
        monkeypatch.setattr(run, name, setting)
    smaller = dict(N_LOOP=8, N_WINDOWS=4, NOISE_DRAWS=2, NOISE_LOOPS=(4, 30), SPECTRUM_WINDOWS=1,
                   LOOPS=(1, 4, 5, 9, 13, 32, 64), BUDGETS={2: (1, 2)})
    for name, setting in smaller.items():
        monkeypatch.setattr(measure, name, setting)
    for name, setting in dict(FULL=4, BUDGETS=[1, 4], RULES=['norm_rel'], TAUS=[0.1],
                              POLICIES=[('exact', 1), ('ring', 2)],
                              WINDOWS=dict(policies=4, rules=4, short=32)).items():
        monkeypatch.setattr(questions, name, setting)
    monkeypatch.setattr(calibrate, 'TAUS', [1.0, 0.01])
    few = partialmethod(tasks.Problems.__init__, held_out=32)
    monkeypatch.setattr(tasks.Problems, '__init__', few)
    monkeypatch.setattr(torch, 'set_num_threads', lambda n: None)
    monkeypatch.setattr(table, 'write', lambda begin, end, lines: calls.append('table'))
    monkeypatch.setattr(table, 'markdown', lambda: '')
    return calls


@pytest.mark.parametrize('scale, only', [('small', ['main', 'as it is']),
                                         ('tasks', ['calc groups', 'as it is']), ('paper', [])])
def test_all_is_run_once_and_gathered(small, monkeypatch, scale, only):
    for name, value in dict(scale=scale, only=only,
                            dataset=None if scale == 'tasks' else 'book').items():
        monkeypatch.setattr(run, name, value)
    run.main()
    shown = [variant for variant in run.SHOWN[scale] if variant in only or not only]
    assert small == (['train.py'] * max(len(only), 1) + ['bench.py'] * len(run.RULES)
                     + ['geometry.py'] * len(shown) + ['table'])
    names = [*claims.CSVS, *(claims.TASK_CSVS if scale == 'tasks' else ())]
    t = load(scale, 'results', names, 'calc groups' if scale == 'tasks' else 'main')
    assert len(claims.verdicts(t)) == (15 if scale == 'paper' else 16)

    # what is done is not done again, and the rows of what is not asked for stay
    small.clear()
    if only:
        monkeypatch.setattr(run, 'only', only[1:])
    run.main()
    assert small == ['table']
    again = load(scale, 'results', names, t['variant'])
    assert all(again[name] == t[name] for name in names if name != 'minutes')


def test_pieces_stop_and_go_on(small, monkeypatch, capsys):
    monkeypatch.setattr(run, 'minutes', 1e-9)
    monkeypatch.setattr(run, 'dataset', 'book')
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
    ('scale', 'large', "unknown scale 'large': choose small, tasks or paper"),
    ('only', ['men'], '--only: choose from main, random'),
    ('seeds', [], '--seeds must name one'),
    ('workers', 0, '--workers'),
    ('minutes', -1.0, '--minutes must be')])
def test_bad_input(knob, value, words, monkeypatch):
    monkeypatch.setattr(run, knob, value)
    with pytest.raises(ValueError, match=words):
        run.main()
