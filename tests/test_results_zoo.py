"""What the page says of other looped models: the shipped figures, the tables, the machinery."""
import os
from functools import partialmethod

import conftest
import pytest
from conftest import ROOT
from test_results import Inline

import data
import tasks
from common import plots
from results import runs, table
from results import zoo as figures
from results import zoo_table as tables
from results.rows import distinct, load, pick


def test_readme_says_what_the_files_say():
    with open(os.path.join(ROOT, 'results', 'README.md'), encoding='utf-8') as f:
        text = f.read()
    assert text.split(figures.BEGIN)[1].split(figures.END)[0].strip() == figures.markdown()


def test_three_seeds_of_everything():
    t = load('zoo', names=tables.CSVS)
    for name in ('points', 'losses', 'blocks'):
        for task in ('text', 'calc'):
            for part in distinct(t[name], 'part'):
                rows = pick(t[name], task=task, part=part)
                assert set(distinct(rows, 'seed')) == {1337, 1, 2}, (name, task, part)


def test_the_cheapest_of_equal_quality():
    def row(seed, evals, ce, tau=0):
        return dict(seed=seed, mean_evals=evals, ce=ce, tau=tau)
    rows = [row(1, 4, 1.0, 0.1), row(1, 3, 1.001, 0.2), row(1, 2, 1.01, 0.3), row(2, 4, 1.1, 0.1)]
    fixed = [row(1, 9, 1.5), row(1, 8, 1.0), row(2, 8, 1.0)]        # the best is not the last
    assert list(tables.least(rows, 0.002, fixed)) == [(3, 0.2)]
    assert tables.in_words(rows, 0.002, fixed) == '1 of 2 seeds get there'
    assert tables.in_words(rows[:3], 0.002, fixed) == '3.00 (0.2)'


def test_all_is_run_once_and_gathered(tmp_path, monkeypatch):
    """One seed of calc, made tiny, in this process."""
    monkeypatch.chdir(tmp_path)
    os.symlink(os.path.join(ROOT, 'config'), 'config')
    (tmp_path / 'book.txt').write_text(' '.join(f'{i} and {i * i};' for i in range(900)))
    data.make('pydocs', 'book.txt')
    calls = []

    def command(script, *flags, log, until=None, threads=None):
        calls.append(script)
        path = script if script.endswith('.py') else script.replace('.', '/') + '.py'
        small = {'bench.py': ['--n_windows=2', '--n_loop=2', '--budgets=[1]', '--taus=[1e-2]',
                              '--more_taus=[0.3]', '--timed_tokens=1', '--device=cpu'],
                 'zoo.etd': ['--n_windows=2', '--device=cpu']}.get(script, [])
        done = conftest.run(*flags, *small, script=path)
        assert done.returncode == 0, done.stderr
        return True
    monkeypatch.setattr(runs, 'command', command)
    monkeypatch.setattr(plots, 'losses', lambda *args: None)
    monkeypatch.setattr(plots, 'depth', lambda *args: None)
    few = partialmethod(tasks.Problems.__init__, held_out=16)
    monkeypatch.setattr(tasks.Problems, '__init__', few)
    more = ['--max_iters=2', '--warmup_iters=1', '--batch_size=4', '--eval_windows=2']
    for name, setting in dict(
            TASKS=dict(calc=[*figures.CALC, '--n_embd=16', '--keep_iters=[]']), LOOPS=(2,),
            seeds=[1], more=more, ThreadPoolExecutor=Inline).items():
        monkeypatch.setattr(figures, name, setting)
    monkeypatch.setattr(tables, 'LOOPS', (2,))
    monkeypatch.setattr(tables, 'TASKS', ('calc',))
    monkeypatch.setattr(tables.markdown, '__defaults__', ('results',))
    monkeypatch.setattr(table, 'write', lambda begin, end, lines: calls.append(lines))
    monkeypatch.setattr(figures, 'minutes', 1e-9)
    figures.main()
    assert calls == []
    monkeypatch.setattr(figures, 'minutes', None)
    figures.main()
    page = calls.pop()
    assert sorted(calls) == ['bench.py'] * 3 + ['train.py'] * 8 + ['zoo.etd'] * 3
    assert 'gate after stage I' in page and 'calc, trained at 2' in page
    assert 'zoo.huginn:latent-diff' in page and "the knees' block, mid-trained" in page
    calls.clear()
    figures.main()
    assert calls == [page]


@pytest.mark.parametrize('knob, value, words', [
    ('seeds', [], '--seeds'), ('minutes', 0, '--minutes'), ('parts', ['no'], 'parts')])
def test_bad_input(monkeypatch, knob, value, words):
    monkeypatch.setattr(figures, knob, value)
    with pytest.raises(ValueError, match=words):
        figures.main()
