"""results/decoding.py: its rows and tables, a whole run made tiny, bad input."""
import os

import conftest
import pytest

from results import decoding, runs


def test_a_way_is_read_where_it_is_cheapest_and_good():
    def row(evals, above, seed, cache='exact'):
        return dict(task='calc', seed=seed, cache=cache, rule='kl', past='True', tau=evals / 10,
                    mean_evals=evals, ce_minus_full=above, ms_per_token=2 * evals)
    t = dict(points=[row(9, 0, 1), row(5, 0.001, 1), row(4, 0.003, 1), row(6, 0, 2),
                     row(1, 0, 1, cache='latest'), row(2, 0.1, 2, cache='latest')])
    assert decoding.least(t, 'mean_evals', cache='exact') == [5, 6]
    assert decoding.least(t, 'tau', cache='exact') == [0.5, 0.6]
    assert decoding.least(t, 'ms_per_token', cache='latest') == [2]


def test_all_is_run_once_and_gathered(wave, tmp_path, monkeypatch):
    """On one run, in this process."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'out-depth' / 'wave' / 'looped-1'
    folder.mkdir(parents=True)
    os.symlink(wave / 'out' / 'ckpt.pt', folder / 'ckpt.pt')
    (folder / 'train.minutes').write_text('1.000 done')
    calls = []

    def command(script, *flags, **how):
        calls.append(script)
        done = conftest.run(*flags, '--timed_tokens=2', '--n_loop=12', '--more_taus=[0.3]',
                            '--rules=["norm_rel"]', '--budgets=[1,3]', '--taus=[1e-2]',
                            '--epsilons=[1.0]', '--rounds=1', '--device=cpu', script=script)
        assert done.returncode == 0, done.stderr
        return True
    monkeypatch.setattr(runs, 'command', command)
    monkeypatch.setattr(runs, 'write', lambda block, text: calls.append(text))
    monkeypatch.setattr(decoding, 'markdown', lambda: 'the page')
    for name, setting in dict(RUNS=dict(calc=('wave', [])), seeds=[1], workers=1, n_windows=16,
                              CHUNKS=[1, 12], minutes=1e-9).items():
        monkeypatch.setattr(decoding, name, setting)
    decoding.main()
    assert calls == []                  # the time was up
    monkeypatch.setattr(decoding, 'minutes', None)
    decoding.main()
    assert calls == ['bench.py', 'bench.py', 'the page']
    decoding.main()
    assert calls[3:] == ['the page']    # what is done is not done again
    t = runs.load('decoding', 'results')
    assert {(row['cache'], row['rule'], row['past']) for row in t['points']} == {
        *((cache, rule, 'False') for cache in ('exact', 'latest') for rule in ('fixed', 'oracle')),
        ('exact', 'norm_rel', 'False'), ('exact', 'norm_rel', 'True'),
        ('latest', 'norm_rel', 'True')}
    one, whole, exact = t['chunks']
    assert one['evals'] < whole['evals'] and one['steps'] > whole['steps']
    assert len(t['calibration']) == 3


def test_bad_input(monkeypatch):
    monkeypatch.setattr(decoding, 'seeds', [])
    with pytest.raises(ValueError, match='--seeds must name one'):
        decoding.main()
