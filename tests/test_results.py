"""The shipped figures, that the pages say them, and the machinery on runs made small."""
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finished, make_book

from common import plots
from model import GPTConfig
from results import reading, run, runs, speed, writing

PAGES = run.tables()


# the pages and the shipped figures --------------------------------------------------------------

@pytest.mark.parametrize('page, block', PAGES)
def test_the_pages_say_what_the_files_say(page, block):
    text = Path(ROOT, 'results', page).read_text(encoding='utf-8')
    begin, end = runs.markers(text, block)
    assert text[begin:end].strip() == PAGES[page, block]


@pytest.mark.parametrize('measured, path', [
    ('writing', writing.GATHERED), ('reading', 'reading/windows.csv.xz'),
    ('reading', 'reading/times.csv'), ('along', 'reading/along.csv'),
    ('train', 'trained/losses.csv')])
def test_all_runs_are_there(measured, path):
    found = {(row['variant'], int(row['seed'])) for row in runs.read_csv(f'{runs.HERE}/{path}')}
    assert found == {(name, seed) for seed in run.seeds for name in run.TRAININGS
                     if measured == 'train' or (
                         run.KEPT in run.TRAININGS[name] if measured == 'along' else
                         measured in run.MEASURED.get(name, {}))}


# text that is written ---------------------------------------------------------------------------

def test_the_fastest_setting_that_is_good_enough_is_chosen():
    def rows(**of):
        return [dict(setting=setting, **some) for setting, values in of.items() for some in values]

    def texts(right):           # of ten
        return [dict(identical=float(i < right)) for i in range(10)]
    names = dict(a='fixed 4, latest', b='fixed 5, latest', c='fixed 6-5, latest',
                 d='fixed 5, exact', e='fixed 5, drafts 4 x 2', f='accel 0.1, wave 8 x 1',
                 g='norm_rel 1e-05, exact', h='accel 3, latest', i='fixed 4, latest, warm start')
    right = dict(a=9, b=10, c=10, d=9, f=9, g=10, h=3, i=10)
    ms = dict(a=[1, 2], b=[3, 3], c=[2, 3], d=[1, 1], e=[1, 1], f=[2, 2], g=[9, 9], h=[0, 0],
              i=[4, 4])
    best = writing.chosen(dict(
        choose=rows(**{names[key]: texts(n) for key, n in right.items()},
                    **{'norm_rel 1, wave 4 x 1': texts(10)[:3]}),       # not all of its texts
        trial=rows(**{names[key]: [dict(ms=value) for value in some] for key, some in ms.items()},
                   **{'norm_rel 1, wave 4 x 1': [dict(ms=0)]})))
    at = {level: {family: key for (some, family), setting in best.items() if some == level
                  for key, name in names.items() if name == setting} for level in writing.LEVELS}
    wave, accel = 'a wave', 'a wave, committed by accel'
    everywhere = {'loops for each group': 'c', 'an exit rule': 'g',
                  'fixed loops, warm start': 'i'}
    # drafts have the fidelity of the budget that checks them
    assert at[0.9] == everywhere | {'fixed loops': 'd', 'drafts': 'e', wave: 'f', accel: 'f'}
    assert at[0.95] == at[0.99] == everywhere | {'fixed loops': 'b'}


def test_times_over_fixed_loops_are_of_the_same_prompts():
    fixed, wave = 'fixed 4, latest', 'accel 1, wave 8 x 1'
    factors = {fixed: 2.0, wave: 3.0, fixed + ', again': 2.2, wave + ', as sample.py': 2.5}
    rows = dict(
        choose=[dict(setting=name, identical=1.0) for name in (fixed, wave)],
        trial=[dict(setting=name, ms=1.0) for name in (fixed, wave, wave + ', compiled')],
        score=[dict(setting=name, prompt=i, ms=i * factor) for name, factor in factors.items()
               for i in (range(8, 0, -1) if name == wave else range(1, 9))],
        # the same loops beside what is compiled
        compiled=[dict(setting=name, prompt=i, ms=i * factor) for i in range(1, 9)
                  for name, factor in ((fixed, 4.0), (wave + ', compiled', 2.0))])
    scored = writing.Scored(rows)
    for family, ratio in (('a wave', 1.5), ('fixed loops', 1), (writing.AGAIN, 1.1),
                          (writing.SAMPLE, 1.25), ('a wave, compiled', 0.5)):
        assert scored.over_fixed(0.95, family) == pytest.approx([ratio] * 3)
    assert scored.over_fixed(0.95, 'drafts') is scored.over_fixed(0.9, writing.AGAIN) is None
    assert scored.get(wave, 'ms').mean() == 13.5


# text that is read ------------------------------------------------------------------------------

def candidate(way, value, gap, blocks):
    gap = np.full(4, gap)
    return dict(cache='exact', way=way, value=value, gap=gap, blocks=np.full(4, blocks),
                high=gap[0])


def test_the_cheapest_mixture_of_equal_quality():
    good, better, beyond = (candidate('kl', *some) for some in (
        (1e-2, 0.004, 5.0), (1e-3, 0.0, 9.0), (0.1, 0.006, 1.0)))
    mixture = reading.cheapest([better, good, beyond], reading.CHOOSING)
    assert mixture[0] is better and mixture[1] is beyond
    assert mixture[2] == pytest.approx(5 / 6)
    assert reading.mixed(mixture, 'blocks') == pytest.approx([9 - 8 * 5 / 6] * 4)
    assert reading.mixed(mixture, 'gap') == pytest.approx([0.005] * 4)
    assert reading.cheapest([better, good, beyond], reading.CHOOSING, flip=False)[1] is good
    assert reading.cheapest([beyond], reading.CHOOSING) is None
    # one budget has as many loops in every group
    found = reading.ways_of([candidate('fixed', [2, 2], 0.0, 6.0), candidate('fixed', [1, 2], 0.0,
                             5.0), good, candidate('accel', 1.0, 0.0, 4.0)], reading.CHOOSING)
    blocks = {way: mixture and reading.mixed(mixture, 'blocks')[0]
              for (cache, way), mixture in found.items() if cache == 'exact'}
    assert blocks == {'one budget': 6, 'budgets': 5, 'norm': None, 'norm_rel': None, 'kl': 5,
                      'accel': 4, 'accel_rel': None, 'the best rule': 4}


def test_budgets_are_searched_around_the_cheapest_good_one():
    tried = []

    class Two(reading.Reading):
        layers, choosing = torch.ones(2), reading.CHOOSING

        def __init__(self):
            pass

        def candidate(self, value, **how):
            tried.append(tuple(value))
            good = value[0] >= 2 and value[1] >= 1
            return candidate('fixed', value, 0.0 if good else 1.0, float(sum(value)))
    assert len(Two().budgets(8, 'exact')) == len(tried) == len({*tried})
    assert tried == [(1, 1), (2, 2), (3, 3), (1, 2), (3, 2), (2, 1), (2, 3), (3, 1)]


def test_thresholds_are_refined_around_the_largest_good_one():
    class One(reading.Reading):
        def __init__(self):
            pass

        def candidate(self, tau, rule, cache, **how):
            return candidate(rule, tau, 0.0 if tau <= 0.2 else 1.0, 1.0)
    found = [one['value'] for one in One().thresholds('norm')]
    assert found == [30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.173, 0.228, 0.199]


def test_a_line_through_the_checkpoints_of_all_runs(monkeypatch):
    x = np.linspace(-0.8, 0.9, 10)
    parts = np.stack([x, 1.4 - 0.5 * x], axis=1)
    slope, at, explained = reading.fit([parts[:4], parts[4:]])
    assert slope == pytest.approx([-0.5] * 3) and at == pytest.approx([1.1] * 3)
    assert explained == pytest.approx([1.0] * 3)
    row = dict(cos_0=0.5, cos_1=0.7, norm=10.0, accel=15.0) | {'accel, step kept': 12.0}
    monkeypatch.setattr(runs, 'load', lambda path: {'a': {1: [row, row | dict(norm=20.0)]}})
    assert reading.along_points(False)['a', 1].tolist() == [[0.6, 1.5, 1.2], [0.6, 0.75, 0.6]]
    assert len(reading.along_points(True)['a', 1]) == 1         # ten blocks are less than 3 loops


# the machinery ----------------------------------------------------------------------------------

def test_a_table_is_put_between_its_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'HERE', str(tmp_path))
    text = 'before\n<!-- a: by `x` -->\n{}\n<!-- end of a -->\n<!-- b: -->\n<!-- end of b -->\n'
    (tmp_path / 'README.md').write_text(text.format('old'))
    for _ in range(2):      # written again, it stays as it is
        runs.write('README.md', 'a', 'new')
        assert (tmp_path / 'README.md').read_text() == text.format('new')


@pytest.mark.parametrize('path', ['text/losses.csv', 'text/losses.csv.xz'])
def test_rows_of_earlier_runs_stay(tmp_path, monkeypatch, path):
    monkeypatch.setattr(runs, 'HERE', str(tmp_path))
    for variant, seed, loss in ('a', 10, 1.5), ('a', 9, 2.5), ('b', 3, 3.5), ('a', 10, 4.5):
        runs.save(path, [dict(variant=variant, seed=seed, loss=loss)], ['b', 'a'])
    # the last of each run, by variant and seed
    assert runs.load(path) == {
        'b': {3: [dict(variant='b', seed=3, loss=3.5)]},
        'a': {9: [dict(variant='a', seed=9, loss=2.5)], 10: [dict(variant='a', seed=10, loss=4.5)]}}
    assert sorted(path.name for path in (tmp_path / 'text').iterdir()) == [
        os.path.basename(path), 'machine.csv']


def change(monkeypatch, module, **settings):
    for name, value in settings.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize('variant', ['default', 'random adapter'])
def test_all_is_run_once_and_gathered(tmp_path, monkeypatch, variant):
    """The commands run in this process, made small, on a data set of this folder."""
    monkeypatch.chdir(tmp_path)
    Path('config').symlink_to(Path(ROOT, 'config'))
    Path('assets').mkdir()
    make_book()
    small = {
        'results.writing': [
            '--n_prompts=8', '--prompt_tokens=2', '--new_tokens=3', '--n_trial=1', '--n_batch=2',
            '--loops=[1,2,30]', '--taus=[1.0,1e-3]', '--drafts=[[1,2]]', '--waves=[[2,1]]',
            '--batches=[1,2]', '--compiled=False'],
        'results.reading': ['--n_windows=4', '--n_along=2', '--taus=[100.0,1e-4]',
                            '--refine=1', '--rounds=1', '--timed_tokens=2'],
        'train.py': [*(flag for flag in TINY if '--dataset' not in flag), '--eval_loops=[1,4]',
                     '--keep_iters=[0,1]']}
    calls = []

    def call(command, stdout, **how):
        script = command[2] if command[2] != '-m' else command[3]
        name = script.removeprefix(ROOT + '/')
        calls.append(name)
        path = name.removesuffix('.py').replace('.', '/') + '.py'
        finished(*command[4 if command[2] == '-m' else 3:], *small[name], script=path)
        return subprocess.CompletedProcess(command, 0)
    change(monkeypatch, runs.subprocess, run=call)
    change(monkeypatch, runs, HERE=str(tmp_path / 'results'), ASSETS=str(tmp_path / 'assets'),
           all_done=lambda works, workers: [work() for work in works],
           machine_row=lambda: dict(machine='an abacus'))
    change(monkeypatch, plots.Figure, savefig=lambda *args, **how: None)
    change(monkeypatch, run, seeds=[1], dataset='book', variants=[variant])
    Path('results').mkdir()
    on_text = variant == 'default'
    for page in 'README.md', 'reading.md', 'writing.md':
        Path('results', page).write_text(''.join(
            f'<!-- {block}: x -->\n<!-- end of {block} -->\n' for of, block in PAGES if of == page))
    run.main()
    assert calls == ['train.py', 'results.reading', *['results.writing'] * on_text]
    text = {page: Path('results', page).read_text() for page in ('reading.md', 'writing.md')}
    assert '| exact | one budget | ' in text['reading.md']
    assert not on_text or '| fixed loops | 1.00 | 1.00 | 1.00 |' in text['writing.md']
    assert {row['iteration'] for row in runs.load('reading/along.csv')[variant][1]} == {1, 12}
    losses = runs.load('trained/losses.csv')[variant][1]
    assert [row['loops'] for row in losses] == [1, 4]
    calls.clear()
    run.main()      # what is done is not done again
    assert not calls and text == {page: Path('results', page).read_text() for page in text}


@pytest.mark.parametrize('knob, value, words', [
    ('variants', ['huge'], 'huge is none of recipe, '), ('workers', 0, 'be at least 1'),
    ('seeds', [], 'name at least one')])
def test_bad_input(knob, value, words, monkeypatch):
    monkeypatch.setattr(run, knob, value)
    with pytest.raises(ValueError, match=words):
        run.main()


def test_a_command_that_fails_names_its_log(tmp_path):
    with pytest.raises(ValueError, match='`python nowhere.py --n_loop=3` failed: see .*a.txt'):
        runs.once(tmp_path, 'a', 'nowhere.py', '--n_loop=3')
    assert "can't open file" in (tmp_path / 'a.txt').read_text()
    assert not (tmp_path / 'a.minutes').exists()


def test_passes_at_the_papers_shape(monkeypatch, capsys):
    small = dict(n_embd=24, n_head=2, block_size=130)
    change(monkeypatch, speed, rounds=1, GPTConfig=lambda **shape: GPTConfig(**shape | small),
           compile_passes=lambda model, width: None)
    speed.main()
    assert len(re.findall(r'\d tokens, \d+ loops: ', capsys.readouterr().out)) == 21


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
