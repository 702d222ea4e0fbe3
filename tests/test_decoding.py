"""What the page says of decoding: the shipped figures, the tables, the machinery."""
import os

import conftest
import pytest
from conftest import ROOT
from test_results import Inline

from results import decoding, runs, table
from results.rows import load


@pytest.fixture(scope='module')
def shipped():
    return load('decoding', names=decoding.CSVS)


def test_readme_says_what_the_files_say():
    with open(os.path.join(ROOT, 'results', 'README.md'), encoding='utf-8') as f:
        text = f.read()
    between = text.split(decoding.BEGIN)[1].split(decoding.END)[0].strip()
    assert between == decoding.markdown()


def test_waiting_and_latest_where_depth_matters(shipped):
    """calc: what waits leaves later than its own signals say, and latest needs few steps."""
    fixed, past, latest = (decoding.least(shipped, 'mean_evals', task='calc', **way) for way in (
        dict(cache='exact', rule='fixed'),
        dict(cache='exact', rule='norm_rel', past='True'),
        dict(cache='latest', rule='norm_rel')))
    for seed in range(3):
        assert fixed[seed] >= 10 and past[seed] <= 5.5 and latest[seed] <= 2.6


def test_a_way_is_read_where_it_is_cheapest_and_good():
    def row(evals, above, seed, cache='exact'):
        return dict(task='calc', seed=seed, cache=cache, rule='kl', past='True', tau=evals / 10,
                    mean_evals=evals, ce_minus_full=above, ms_per_token=2 * evals)
    t = dict(points=[row(9, 0, 1), row(5, 0.001, 1), row(4, 0.003, 1), row(6, 0, 2),
                     row(1, 0, 1, cache='latest'), row(2, 0.1, 2, cache='latest')])
    exact = dict(task='calc', cache='exact', rule='kl', past='True')
    assert decoding.least(t, 'mean_evals', **exact) == [5, 6]
    assert decoding.least(t, 'tau', **exact) == [0.5, 0.6]
    assert decoding.least(t, 'ms_per_token', **exact | dict(cache='latest')) == [2]


def test_all_is_run_once_and_gathered(wave, tmp_path, monkeypatch):
    """On one run made tiny, in this process."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'out-depth' / 'wave' / 'looped-1'
    folder.mkdir(parents=True)
    os.symlink(wave / 'out' / 'ckpt.pt', folder / 'ckpt.pt')
    (folder / 'train.minutes').write_text('1.000 done')
    calls = []

    def command(script, *flags, log, until=None, threads=None):
        calls.append(script)
        done = conftest.run(*flags, '--timed_tokens=2', '--n_loop=12', '--more_taus=[0.3]',
                            '--rules=["norm_rel"]', '--budgets=[1,3]', '--taus=[1e-2]',
                            '--epsilons=[1.0]', '--rounds=1', '--device=cpu',
                            script=script)
        assert done.returncode == 0, done.stderr
        return True
    monkeypatch.setattr(runs, 'command', command)
    monkeypatch.setattr(table, 'write', lambda begin, end, lines: calls.append(lines))
    for name, setting in dict(RUNS=dict(calc=('wave', [])), seeds=[1], rules=['norm_rel'],
                              n_windows=16, CHUNKS=[1, 12], ThreadPoolExecutor=Inline,
                              HERE='results').items():
        monkeypatch.setattr(decoding, name, setting)
    monkeypatch.setattr(decoding, 'markdown', lambda: 'the page')
    monkeypatch.setattr(decoding, 'minutes', 1e-9)
    decoding.main()
    assert calls == []
    monkeypatch.setattr(decoding, 'minutes', None)
    decoding.main()
    assert calls == ['bench.py', 'bench.py', 'the page']
    t = load('decoding', 'results', decoding.CSVS)
    ways = {(row['cache'], row['rule'], row['past']) for row in t['points']}
    assert ways == {(cache, rule, 'False') for cache in ('exact', 'latest')
                    for rule in ('fixed', 'oracle')} | {
        ('exact', 'norm_rel', 'False'), ('exact', 'norm_rel', 'True'),
        ('latest', 'norm_rel', 'True')}
    one, whole, exact = t['chunks']
    assert one['evals'] < whole['evals'] and one['steps'] > whole['steps']
    assert len(t['calibration']) == 3
    calls.clear()
    decoding.main()
    assert calls == ['the page']


def test_bad_input(monkeypatch):
    monkeypatch.setattr(decoding, 'seeds', [])
    with pytest.raises(ValueError, match='--seeds must name one'):
        decoding.main()
