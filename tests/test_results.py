"""The shipped figures, that the pages say them, and the machinery on runs made small."""
import os
import re
import subprocess
import time
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finished, make_book

import bench
import tasks
from common import plots
from model import GPTConfig
from results import claims, measure, run, runs, speed

PAGES = claims.blocks()


# the pages and the shipped figures --------------------------------------------------------------

@pytest.mark.parametrize('page, block', PAGES)
def test_the_pages_say_what_the_files_say(page, block):
    text = Path(ROOT, 'results', page).read_text(encoding='utf-8')
    begin, end = runs.markers(text, block)
    assert text[begin:end].strip() == PAGES[page, block]


@pytest.mark.parametrize('scale', ['text', 'tasks'])
def test_all_runs_of_a_scale_are_there(scale, monkeypatch):
    monkeypatch.setattr(run, 'scale', scale)
    made = {(row['variant'], row['seed']) for row in runs.load(scale)['losses']}
    assert made >= {*run.chosen()}


# the claims and the tables ----------------------------------------------------------------------

def swept(way, *points):
    return [dict(way=way, iteration=9.0, tau=tau, high=high, blocks=blocks)
            for tau, high, blocks in points]


def test_the_cheapest_of_equal_quality():
    rows = swept('kl', (0.1, 0.006, 1.0), (1e-3, 0.0, 9.0), (1e-2, 0.004, 5.0))
    assert claims.costs(dict(sweep=rows), 'kl') == pytest.approx(3)         # half way to the next
    assert claims.costs(dict(sweep=rows[1:]), 'kl') == 5.0
    assert np.isnan(claims.costs(dict(sweep=rows[:1]), 'kl'))
    assert claims.breaks_at(dict(sweep=rows), 'kl') == 1e-2
    # loops are whole, more of them are better, and a coin flip lies between two of them
    fixed = swept('fixed', (1, 0.008, 4.0), (2, 0.003, 8.0), (3, 0.0, 12.0))
    r = dict(sweep=fixed, times=[dict(way='fixed, fewer', over=0.5)])
    assert claims.costs(r, 'fixed') == 8.0
    assert claims.coin(r) == pytest.approx((8 - 0.4 * 4, 1 - 0.4 * 0.5))
    # at one cost: the ends of intervals, interpolated; fewer than four blocks there are none
    assert claims.at_cost(r, 'fixed', 'high', 6.0) == pytest.approx(0.0055)
    assert claims.at_cost(r, 'fixed', 'high', 4.0) == 0.008
    assert np.isnan(claims.at_cost(r, 'fixed', 'high', 3.9))


def test_no_verdict_within_the_noise_of_timing():
    def r(again):
        return dict(times=[dict(way='fixed again', over=again)])
    assert claims.faster(r(1.0), 0.9) is True and claims.faster(r(1.0), 1.1) is False
    assert claims.faster(r(1.0), 0.97) is None and claims.faster(r(0.8), 0.9) is None

    def settled(*cosines):
        return [dict(settled=[dict(iteration=9.0, cos=cos)]) for cos in cosines]
    assert claims.cell(claims.c2, settled(0.5, 0.6)) == '1.00 **yes**'
    assert claims.cell(claims.c2, settled(0.5, 0.8)) == '0.50 1/2'
    assert claims.cell(claims.c2, settled(-0.9)) == '0.00 no'
    assert claims.cell(claims.c2, []) == '–'
    assert claims.cell(lambda r: (2.0, r), [True, None]) == '2.00 ? (1/2)'


def test_a_table_is_put_between_its_markers(tmp_path):
    text = 'before\n<!-- a: by `x` -->\n{}\n<!-- end of a -->\n<!-- b: -->\n<!-- end of b -->\n'
    (tmp_path / 'README.md').write_text(text.format('old'))
    for _ in range(2):      # written again, it stays as it is
        runs.write('a', 'new', tmp_path)
        assert (tmp_path / 'README.md').read_text() == text.format('new')


def test_rows_of_earlier_runs_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variant, seed, loss in ('a', 10, 1.5), ('a', 9, 2.5), ('b', 3, 3.5), ('a', 10, 4.5):
        losses = [dict(variant=variant, seed=seed, loss=loss)]
        runs.save('text', dict(losses=losses), ['b', 'a'])
    # the last of each run, by variant and seed
    assert [[*row.values()] for row in runs.load('text', 'results')['losses']] == [
        ['b', 3, 3.5], ['a', 9, 2.5], ['a', 10, 4.5]]


# what is measured of a run ----------------------------------------------------------------------

def test_answers_lost():
    full = torch.tensor([[[0.0, 9], [0, 9], [9, 0]]])           # says 1, 1, 0
    point = torch.tensor([[[0.0, 9], [9, 0], [0, 9]]])          # says 1, 0, 1
    # the third label is wrong in the full budget too: nothing is lost there
    for depth_of, deep in ((np.array([[0, 4, 8]]), 0.0), (np.array([[0, 8, 8]]), 0.5)):
        assert measure.early(point, full, torch.tensor([[1, 1, 1]]), depth_of) == dict(
            lost=pytest.approx(1 / 3), lost_deep=deep)


def test_the_delayed_norm_is_that_of_the_step_before():
    """On a line, with steps of 8 and 4."""
    x = torch.tensor([[0.0], [8], [12]])
    value, memo = measure.delayed(x[0], x[1], None, None)
    assert value is None and measure.delayed(x[1], x[2], memo, None)[0] == pytest.approx(8.8)


def test_budgets_by_group_lose_loops_while_they_are_good():
    tried = []

    def row_of(counts):
        tried.append(counts)
        return dict(high=0.0 if counts[0] >= 2 and counts[1] >= 1 else 1.0)
    assert len([*measure.by_group(row_of, [3, 2])]) == len(tried)
    assert tried == [[2, 2], [3, 1], [1, 2], [2, 1], [1, 1]]


# the machinery ----------------------------------------------------------------------------------

def change(monkeypatch, module, **settings):
    for name, value in settings.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize('scale, variant, dataset', [
    ('text', 'recipe', 'book'), ('tasks', 'calc', None)])
def test_all_is_run_once_and_gathered(tmp_path, monkeypatch, scale, variant, dataset):
    """The commands run in this process, made small, on a data set of this folder."""
    monkeypatch.chdir(tmp_path)
    Path('config').symlink_to(Path(ROOT, 'config'))
    make_book()
    small = {
        'bench.py': ['--n_windows=4', '--n_prompts=2', '--prompt_tokens=2', '--new_tokens=3',
                     '--n_loop=6', '--budgets=[2]', '--device=cpu', '--drafts=[[1,2]]',
                     '--waves=[[2,1]]'],
        'results.measure': ['--n_windows=16', '--n_loop=6', '--noise_draws=2', '--noise_loops=[30]',
                            '--budgets=[1,4]', '--dlr_loops=[9,30]', '--taus=[1e-5,1e-4,1e-3,1e-2]',
                            '--loss_loops=[1,4,9,13,32,256]', '--rounds=1', '--epsilons=[1]',
                            '--refine=1', '--timed_tokens=2', '--device=cpu'],
        'train.py': [*(flag for flag in TINY if '--dataset' not in flag), '--eval_loops=[1,4]',
                     '--keep_iters=[0]']}
    calls = []

    def command(script, *flags, **how):
        calls.append(script)
        path = script.removesuffix('.py').replace('.', '/') + '.py'
        finished(*flags, *small[script], script=path)
        return True
    # all_done: signals need the main thread
    change(monkeypatch, runs, command=command,
           all_done=lambda works, workers: all([work() for work in works]))
    change(monkeypatch, tasks.Problems,
           __init__=partialmethod(tasks.Problems.__init__, held_out=32))
    change(monkeypatch, plots.Figure, savefig=lambda *args, **how: None)
    change(monkeypatch, run, scale=scale, seeds=[1], dataset=dataset, variants=[variant])
    change(monkeypatch, bench, TAU_GRID=[1.0, 0.01])
    change(monkeypatch, claims, write_pages=lambda: calls.append('pages'))
    run.main()
    assert calls == ['train.py', 'results.measure', *['bench.py'] * (scale == 'text'), 'pages']
    t = runs.load(scale, 'results')
    made = claims.blocks('results')
    r, = claims.runs_of(t, variant)
    assert {row['way'] for row in r['sweep']} == {*measure.WAYS, 'by group'}
    assert all(len(claim(r)) == 2 for claim in claims.CLAIMS.values())
    assert f'| {variant} | 0 | 1.00' in made['details.md', 'details']
    assert made['README.md', 'answer'].count('|\n') == 17
    calls.clear()
    run.main()      # what is done is not done again
    assert calls == ['pages'] and runs.load(scale, 'results') == t


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
    works = [partial(runs.once, folder, 'train', 'train.py', *flags, '--resume', until=0.5)
             for folder in ('out', 'later')]
    assert not runs.all_done(works, workers=1)
    assert 'stopped after iteration' in printed.read_text() and os.path.exists('out/ckpt.pt')
    assert not os.path.exists('later')
    assert 'time is up: run the same command to continue' in capsys.readouterr().out
    assert list(runs.minutes_rows('out')) == [dict(what='train', minutes='0.017')]  # by that clock


@pytest.mark.parametrize('knob, value, words', [
    ('variants', ['huge'], 'huge is not of --scale=text: recipe'), ('workers', 0, 'be at least 1'),
    ('minutes', -1.0, '--minutes'), ('seeds', [], 'name at least one')])
def test_bad_input(knob, value, words, monkeypatch):
    monkeypatch.setattr(run, knob, value)
    with pytest.raises(ValueError, match=words):
        run.main()


def test_a_command_that_fails_names_its_log(tmp_path):
    with pytest.raises(ValueError, match='`python nowhere.py --n_loop=3` failed: see .*log.txt'):
        runs.command('nowhere.py', '--n_loop=3', log=tmp_path / 'log.txt')
    assert "can't open file" in (tmp_path / 'log.txt').read_text()


def test_every_figure_of_speed(monkeypatch, capsys):
    small = dict(n_embd=24, n_head=2, block_size=130)
    change(monkeypatch, speed, rounds=1, GPTConfig=lambda **shape: GPTConfig(**shape | small),
           new_tokens=4, compile_passes=lambda model, width: None)
    speed.main()
    printed = capsys.readouterr().out
    assert float(re.search(r'ratio ([\d.]+) ', printed)[1]) > 0
    assert printed.count('\nchecks: ') == 18 and printed.count('\npasses: ') == 21
    assert printed.count('\ntexts: ') == 6


def test_the_scripts_take_every_command_for_a_gpu(tmp_path, monkeypatch):
    """Those that gpu.sh gives to a `python` that notes them, and fails a step at first."""
    noted, fake = tmp_path / 'noted', tmp_path / 'python'
    fake.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" . >> {noted}; test "$FAILS" != "$1"\n')
    fake.chmod(0o755)
    where = {name: str(tmp_path / name) for name in ('OUT', 'WORK', 'PAPER')}

    def call(fails):
        noted.write_text('')
        settings = dict(PATH=f"{tmp_path}:{os.environ['PATH']}", DATASET='none', FAILS=fails)
        done = subprocess.run(['bash', os.path.join(ROOT, 'results', 'gpu.sh'), str(tmp_path)],
                              env=os.environ | where | settings, capture_output=True, text=True)
        assert not done.stderr
        return done, [line.split('\0') for line in noted.read_text().split('\0.\0')[:-1]]
    done, commands = call(fails='geometry.py')
    assert done.returncode == 1 and 'geometry-60000.failed' in done.stdout
    assert sum(script == 'bench.py' for script, *_ in commands) == 10
    monkeypatch.chdir(ROOT)
    for script, *flags in commands:
        if script == '-c':
            compile(flags[0], 'gpu.sh', 'exec')
            script, *flags = flags[1:]
        if script == '-m':
            _, file, _, names = flags
            tests = Path(file).read_text()
            assert all(re.search(rf'def test_\w*{name}', tests) for name in names.split(' or '))
        else:
            assert 'knobs (' in finished(*flags, '--help', script=script)
    # what is done is not done again
    for path in tmp_path.glob('*/*.failed'):
        path.unlink()
    done, commands = call(fails='')
    assert done.returncode == 0 and {script for script, *_ in commands} == {'geometry.py'}
