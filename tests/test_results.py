"""The shipped figures, that results/README.md says them, and the machinery on runs made small."""
import os
import re
import time
from functools import partial, partialmethod
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finished, make_book

import bench
import data
import tasks
from bench import log_probabilities, make_point
from common import plots
from common.checkpoint import load_checkpoint
from model import GPTConfig
from results import claims, decoding, depth, measure, questions, run, runs, speed, table, waves, zoo
from results.runs import pick

SEEDS = (1337, 1, 2)


# the page and the shipped figures ---------------------------------------------------------------

@pytest.mark.parametrize('block, module', [('claims', table), ('depth', depth), ('zoo', zoo),
                                           ('decoding', decoding), ('waves', waves)])
def test_the_pages_say_what_the_files_say(block, module):
    name = 'waves.md' if module is waves else 'README.md'
    page = Path(ROOT, 'results', name).read_text(encoding='utf-8')
    begin, end = runs.markers(page, block)
    assert page[begin:end].strip() == module.markdown()


def test_what_the_programs_name_has_rows_of_three_seeds():
    made = {(row['part'], row['variant'], row['seed']) for row in runs.load('depth')['runs']}
    assert made == {*depth.trainings()}
    small, tasks = runs.load('small'), runs.load('tasks', variant='calc groups')
    for t in (small, tasks):
        assert {(row['seed'], row['rules']) for row in pick(t['bench'], variant=t['variant'])} == {
            *product(SEEDS, run.RULES)}
    for name in ('points', 'short'):
        made = {(row['variant'], row['seed']) for row in tasks[name]}
        assert made == {*product(run.TASKS, SEEDS)}, name


# the claims and the table -----------------------------------------------------------------------

def settled_rows(*tenths, cos=0.6):
    return [dict(variant='main', seed=seed, iteration=at, group='1', tenth=tenth, cos=cos,
                 cos_low=cos - 0.1, cos_high=cos + 0.1, cos_std=0.2)
            for seed, tenth in enumerate(tenths) for at in (0.0, 9.0)]


def test_a_claim_holds_in_every_seed():
    for tenths, verdict in (((6.0, 8.0, 10.0), 'reproduced, in 6 to 10'),
                            ((2.0, 2.0, 3.0), 'it falls faster, in 2 to 3'),
                            ((6.0, 8.0, 11.0), 'not reproduced'), ((2.0, ''), 'not reproduced')):
        assert claims.c1(dict(variant='main', settled=settled_rows(*tenths)))[1] == verdict
    # the mean over tokens that still move, at each step; at the fourth hardly any do
    steps = [dict(variant='main', seed=0, iteration=9.0, group='1', k=k, cos_clear=cos, clear=clear)
             for k, cos, clear in ((0, '', 1), (1, 0.2, 1), (2, 0.4, 0.9), (3, 0.8, 0.4),
                                   (4, 0.5, 0.05))]
    t = dict(variant='main', settled=settled_rows(2.0, cos=0.6), steps=steps)
    assert claims.c2(t)[1] == 'reproduced'
    # 0.6 is the mean of two seeds, neither of which is in the range
    t['settled'] = [*settled_rows(2.0, cos=0.3), *settled_rows(2.0, 2.0, cos=0.9)[2:]]
    assert claims.c2(t)[1] == 'not reproduced in 1 of 1 groups'
    steps[2]['cos_clear'] = 0.5
    assert claims.c2(t) == (
        '0.60 ± 0.42 (group 1; over windows ± 0.10)',
        'not reproduced in 1 of 1 groups; the mean of group 1 in 1 of 2 seeds for a while')


def test_the_cheapest_of_equal_quality():
    def points(rule, *points):
        return [dict(seed=1.0, rule=rule, tau=tau, diff_high=high, ms=ms)
                for tau, high, ms in points]
    rows = points('kl', (0.1, 0.006, 1.0), (1e-3, 0.0, 9.0), (1e-2, 0.004, 5.0))
    assert claims.cheapest(rows, 'ms') == [pytest.approx(3.0)]         # half way to the next
    assert claims.cheapest(rows[1:], 'ms') == [5.0]
    assert np.isnan(claims.cheapest(rows[:1], 'ms'))
    # loops are whole, and more of them are better
    fixed = points('fixed', (1, 0.006, 1.0), (2, 0.004, 5.0), (3, 0.0, 9.0))
    assert claims.cheapest(fixed, 'ms') == [5.0]


def test_a_table_is_put_between_its_markers(tmp_path):
    text = 'before\n<!-- a: by `x` -->\n{}\n<!-- end of a -->\n<!-- b: -->\n<!-- end of b -->\n'
    (tmp_path / 'README.md').write_text(text.format('old'))
    for _ in range(2):      # written again, it stays as it is
        runs.write('a', 'new', tmp_path)
        assert (tmp_path / 'README.md').read_text() == text.format('new')


# what is measured of a run ----------------------------------------------------------------------

def test_tokens_that_still_move():
    """Two tokens on a line."""
    def states(first, second):
        return torch.tensor([first, second]).T[:, None, :, None]                # (K+1, 1, 2, 1)
    # the first goes straight on; the second turns back and then trembles, which does not count
    first, *rows = measure.step_rows(
        '1', states([0.0, 4, 6, 7, 7.5], [0.0, 4, 2, 2.1, 1.0]), floor=0.01)
    assert [row['clear'] for row in rows] == [1, 0.5, 0.5]
    assert [row['cos_clear'] for row in rows] == [0, 1, 1]
    assert first['norm'] == 4 and 'cos_clear' not in first


def test_answers_lost_and_the_oracle_of_the_answer(wave, monkeypatch):
    full = torch.tensor([[[0.0, 9], [0, 9], [9, 0]]])           # says 1, 1, 0
    point = torch.tensor([[[0.0, 9], [9, 0], [0, 9]]])          # says 1, 0, 1
    # the third label is wrong in the full budget too: nothing is lost there
    assert questions.early(point, full, torch.tensor([[1, 1, 1]]), np.array([[0, 4, 8]])) == dict(
        early=pytest.approx(1 / 3), early_0=0, early_1=1, early_2=0)
    # in a model nothing is lost with the full budget, and the oracle needs less
    model, checkpoint = load_checkpoint(wave / 'out' / 'ckpt.pt')
    windows = measure.held_out(checkpoint['config']['dataset'], model.config.block_size, 32)
    monkeypatch.setattr(questions, 'FULL', 6)
    full, _, _ = log_probabilities(model, make_point(model, 6, 'fixed'), windows[0])
    row, one = (questions.point_row(model, make_point(model, n, 'fixed'), *windows, full)
                for n in (6, 1))
    assert (row['gap'], row['early'], row['evals']) == (0, 0, 6)
    assert 1 <= questions.answer_row(model, *windows, full)['evals'] < 6
    shares = [(questions.third_of(windows[2]) == i).mean() for i in range(3)]
    assert one['gap'] > 0.01 and one['early'] == pytest.approx(
        sum(share * one[f'early_{i}'] for i, share in enumerate(shares)))


# the machinery ----------------------------------------------------------------------------------

def change(monkeypatch, module, **settings):
    for name, value in settings.items():
        monkeypatch.setattr(module, name, value)


def in_process(monkeypatch, folder, data_set, more):
    """
    The commands of results/ run in this process, in a folder with a data set and our configs. more:
    further flags of a script, None = do not run it. Returns a list of what is called.
    """
    monkeypatch.chdir(folder)
    Path('config').symlink_to(Path(ROOT, 'config'))
    Path('book.txt').write_text(' '.join(f'{i} and {i * i} are friends;' for i in range(900)))
    data.make(data_set, 'book.txt')
    calls = []

    def command(script, *flags, **how):
        calls.append(script)
        path = script if script.endswith('.py') else script.replace('.', '/') + '.py'
        if more.get(script, ()) is not None:
            finished(*flags, *more.get(script, ()), script=path)
        return True
    # all_done: signals need the main thread
    change(monkeypatch, runs, command=command, write=lambda block, text: calls.append(block),
           all_done=lambda works, workers: all([work() for work in works]))
    few = partialmethod(tasks.Problems.__init__, held_out=32)
    change(monkeypatch, tasks.Problems, __init__=few)
    figures = ('losses', 'depth', 'figure_4', 'frontier')
    change(monkeypatch, plots, **dict.fromkeys(figures, lambda *args: None))
    return calls


@pytest.mark.parametrize('scale, dataset, only', [
    ('small', 'book', ['main', 'as it is']), ('tasks', None, ['calc groups', 'calc']),
    ('paper', 'book', ['main'])])
def test_all_is_run_once_and_gathered(tmp_path, monkeypatch, scale, dataset, only):
    calls = in_process(monkeypatch, tmp_path, 'book', {
        'bench.py': ['--n_windows=4', '--timed_tokens=1', '--rounds=1', '--n_loop=6',
                     '--epsilons=[0.3]', '--prompt_tokens=2', '--device=cpu', '--past=False',
                     '--cache=exact', '--budgets=[2]', '--more_taus=[3]'],
        'results.measure': ['--n_windows=4', '--n_loop=8', '--noise_draws=2', '--noise_loops=[30]',
                            '--budgets=[1,2]', '--short_windows=16',
                            '--loss_loops=[1,4,5,9,13,32,64]', '--device=cpu'],
        'geometry.py': None})
    small = [flag for flag in TINY if '--dataset' not in flag]
    change(monkeypatch, run, scale=scale, seeds=[1], dataset=dataset,
           more=[*small, '--eval_loops=[1,4,8]', '--keep_iters=[0]'])
    change(monkeypatch, questions, FULL=4, BUDGETS=[1, 4], RULES=['norm_rel'], TAUS=[0.1],
           POLICIES=[('exact', 1), ('ring', 2)])
    change(monkeypatch, bench, TAU_GRID=[1.0, 0.01])
    change(monkeypatch, table, markdown=lambda: '')
    flags = run.variants()
    change(monkeypatch, run, variants=lambda: {name: flags[name] for name in only},
           SHOWN={scale: {only[0]: ('', [])}})
    run.main()
    n = len(only)
    assert calls == [*['train.py'] * n, *['results.measure'] * n, *['bench.py'] * len(run.RULES),
                     'geometry.py', 'claims']
    t = runs.load(scale, 'results', 'calc groups' if scale == 'tasks' else 'main')
    assert len(claims.verdicts(t)) == 15
    calls.clear()
    run.main()      # what is done is not done again
    assert calls == ['claims'] and runs.load(scale, 'results', t['variant']) == t


def test_the_zoo_is_run_once_and_gathered(tmp_path, monkeypatch):
    calls = in_process(monkeypatch, tmp_path, 'torchdocs', {
        'bench.py': ['--n_windows=2', '--n_loop=2', '--budgets=[1]', '--taus=[1e-2]',
                     '--more_taus=[0.3]', '--timed_tokens=1', '--device=cpu'],
        'zoo.etd': ['--n_windows=2', '--device=cpu']})
    change(monkeypatch, zoo, TASKS=dict(calc=[*zoo.CALC, '--n_embd=16', '--keep_iters=[]']),
           LOOPS=(2,), seeds=[1], more=['--max_iters=2', '--warmup_iters=1', '--batch_size=4',
                                        '--eval_windows=2'])
    change(monkeypatch, zoo.markdown, __defaults__=('results',))
    change(monkeypatch, runs, write=lambda block, text: calls.append(text))
    zoo.main()
    page = calls.pop()
    assert sorted(calls) == ['bench.py'] * 2 + ['train.py'] * 8 + ['zoo.etd'] * 3
    assert '| gate, past |' in page and 'calc, trained at 2' in page
    assert 'zoo.huginn:latent-diff' in page and "the knees' block, mid-trained" in page
    calls.clear()
    zoo.main()
    assert calls == [page]


def test_depth_is_run_once_and_gathered(tmp_path, monkeypatch):
    calls = in_process(monkeypatch, tmp_path, 'torchdocs', {})
    tiny = ['--n_embd=16', '--max_iters=4', '--warmup_iters=1', '--batch_size=4',
            '--eval_windows=4', '--keep_iters=[]', '--mean_recurrence=2', '--log_interval=2']
    change(monkeypatch, depth, seeds=[1], more=tiny, STACKS=dict(calc=(depth.CALC, 1, 2)),
           LEVERS={'x0 zero': ['--x0=zero']}, markdown=lambda: '')
    for _ in range(2):      # what is done is not done again
        depth.main()
    assert calls == ['train.py'] * 4 + ['depth'] * 2
    t = runs.load('depth', 'results')
    assert {(row['part'], row['variant'], row['seed']) for row in t['runs']} == {*depth.trainings()}
    looped, plain = (pick(t['runs'], part='calc', variant=name)[0]['parameters']
                     for name in ('looped', 'stack'))
    block, around = 12 * 16 ** 2 + 4 * 16, 13 * 16 + 16     # norms; embedding and last norm
    assert looped == 3 * block + around + 2 * 16 ** 2 + 16 and plain == 4 * block + around
    assert {row['seed'] for row in t['deeper']} == {1}


def test_decoding_is_run_once_and_gathered(wave, tmp_path, monkeypatch):
    calls = in_process(monkeypatch, tmp_path, 'book', {
        'bench.py': ['--timed_tokens=2', '--n_loop=12', '--more_taus=[0.3]', '--budgets=[1,3]',
                     '--rules=["norm_rel"]', '--taus=[1e-2]', '--epsilons=[1.0]', '--rounds=1',
                     '--n_windows=16', '--device=cpu']})
    folder = Path('out-depth', 'wave', 'looped-1')
    folder.mkdir(parents=True)
    (folder / 'ckpt.pt').symlink_to(wave / 'out' / 'ckpt.pt')
    (folder / 'train.minutes').write_text('1.000 done')
    change(monkeypatch, decoding, RUNS=dict(calc=('wave', [])), seeds=[1], n_windows=16,
           markdown=lambda: '')
    for _ in range(2):
        decoding.main()
    assert calls == ['bench.py'] * 2 + ['decoding'] * 2
    t = runs.load('decoding', 'results')
    assert {(row['cache'], row['rule'], row['past']) for row in t['points']} == {
        *((cache, rule, 'False') for cache in ('exact', 'latest') for rule in ('fixed', 'oracle')),
        ('exact', 'norm_rel', 'False'), ('exact', 'norm_rel', 'True'),
        ('latest', 'norm_rel', 'True')}
    assert len(t['calibration']) == 3


def test_waves_are_run_once_and_gathered(tmp_path, monkeypatch):
    calls = in_process(monkeypatch, tmp_path, 'torchdocs', {
        'bench.py': ['--timed_tokens=1', '--n_loop=4', '--prompt_tokens=4', '--new_tokens=3',
                     '--device=cpu']})
    small = ['--n_embd=16', '--max_iters=2', '--warmup_iters=1', '--eval_windows=2']
    change(monkeypatch, waves, seeds=[1], prompts=4, more=[], fidelity=0,
           RUNS=dict(default=(small, ['--budgets=[2]', '--drafts=[[1,2]]'], [2, 1])))
    change(monkeypatch, waves.markdown, __defaults__=('results',))
    change(monkeypatch, runs, write=lambda block, text, page: calls.append(text))
    waves.main()
    page = calls.pop()
    assert calls == ['train.py'] + ['bench.py'] * 3
    assert page.count('| default, seed 1 | 2 loops: ') == 2 and '| `accel_rel` | ' in page
    calls.clear()
    waves.main()
    assert calls == [page]


def test_works_end_in_order_when_the_time_is_up(tmp_path, monkeypatch, capsys):
    """A training gets a SIGTERM, saves, and goes on later; nothing new is begun."""
    monkeypatch.chdir(tmp_path)
    make_book()
    # a clock by which the time is up as soon as the run is under way
    printed = Path('out/train.txt')
    clock = SimpleNamespace(sleep=time.sleep, time=lambda: float(
        printed.exists() and 'iter 0:' in printed.read_text()))
    monkeypatch.setattr(runs, 'time', clock)
    flags = [*TINY, '--max_iters=1000000']
    works = [partial(runs.train, folder, flags, 0.5) for folder in ('out', 'later')]
    assert not runs.all_done(works, workers=1)
    assert 'stopped after iteration' in printed.read_text() and os.path.exists('out/ckpt.pt')
    assert not os.path.exists('later')
    assert 'time is up: run the same command to continue' in capsys.readouterr().out
    assert list(runs.minutes_rows('out')) == [dict(what='train', minutes='0.017')]  # by that clock


@pytest.mark.parametrize('module, knob, value, words', [
    (decoding, 'seeds', [], 'name at least one'), (run, 'workers', 0, 'be at least 1'),
    (zoo, 'minutes', -1.0, '--minutes'), (depth, 'seeds', [], 'name at least one')])
def test_bad_input(module, knob, value, words, monkeypatch):
    monkeypatch.setattr(module, knob, value)
    with pytest.raises(ValueError, match=words):
        module.main()


def test_a_command_that_fails_names_its_log(tmp_path):
    with pytest.raises(ValueError, match='`python nowhere.py --n_loop=3` failed: see .*log.txt'):
        runs.command('nowhere.py', '--n_loop=3', log=tmp_path / 'log.txt')
    assert "can't open file" in (tmp_path / 'log.txt').read_text()


def test_every_figure_of_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_book()
    finished(*TINY, '--max_iters=2', '--keep_iters=[]')
    small = dict(n_embd=24, n_head=2, block_size=130)
    change(monkeypatch, speed, rounds=2, batch_size=2,
           GPTConfig=lambda **shape: GPTConfig(**shape | small))
    speed.main()
    ratios = [float(value) for value in re.findall(r'ratio ([\d.]+) ', capsys.readouterr().out)]
    assert len(ratios) == 5 and min(ratios) > 0
