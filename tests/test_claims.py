"""The claims' machinery on runs made small, and the shipped figures: their direction, and that README.md says them."""
import contextlib
import io
import os
import time

import numpy as np
import pytest
from conftest import ROOT, run
from test_train import TINY

import claims
import claims_table as table
import data

SHIPPED = table.tables_of('small')


# the shipped figures, looked at without the table's own words ------------------------------------------------------------

def test_readme_says_what_the_files_say():
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
        text = f.read()
    assert text.split(table.BEGIN)[1].split(table.END)[0].strip() == table.markdown()


def test_three_seeds_of_everything():
    for name in ('steps', 'dlr', 'losses', 'spectrum'):
        for variant in ('main', 'fixed', 'uniform', *claims.CHOICES):
            assert table.of(table.pick(SHIPPED[name], variant=variant), 'seed') == [1337, 1, 2], (name, variant)
    assert {(row['seed'], row['rules']) for row in SHIPPED['bench']} == {(seed, rules) for seed in (1337, 1, 2) for rules in claims.RULES}


def test_c1_step_norms_fall():
    rows = table.last(table.pick(SHIPPED['steps'], variant='main'))
    for seed in (1337, 1, 2):
        for group in ('1', '2-3', '4'):
            norms = [row['norm'] for row in table.pick(rows, seed=seed, group=group)]
            assert len(norms) == 30 and max(norms[8:]) < norms[0] / 100


def test_c4_drift_is_larger_than_the_steps():
    assert all(row['ratio'] > 5 for row in table.last(table.pick(SHIPPED['dlr'], variant='main')) if row['reading'] in ('first', 'settled', 'noise'))


def test_c7_small_taus_cost_nothing():
    rows = [row for row in SHIPPED['bench'] if row['rules'] == 'accel' and row['rule'] in ('accel', 'kl') and row['tau'] <= 1e-4]
    assert len(rows) == 12 and all(abs(row['ce_minus_full']) < 1e-3 for row in rows)


def test_c11_loops_help_and_stay():
    for seed in (1337, 1, 2):
        losses = {row['loops']: row['loss'] for row in table.pick(SHIPPED['loops'], seed=seed)}
        assert losses[1] > losses[2] + 0.05 > losses[4] and all(abs(losses[n] - losses[8]) < 1e-3 for n in (16, 64, 256))


def test_c12_the_noise_is_forgotten():
    assert all(row['spread'] < 1e-4 for row in table.pick(SHIPPED['noise'], variant='main'))


# the machinery --------------------------------------------------------------------------------------------------------

def test_curves_by_hand():
    rows = [dict(k=k, norm=10.0 * 0.5 ** k, cos=0.6 if k else '', floor=0.01) for k in (3, 0, 1, 2, 4, 5, 6)]
    assert table.tenth(rows) == 4 and table.settled(rows) == pytest.approx(0.6) and np.isnan(table.tenth(rows[1:3]))
    rows[-1]['cos'] = -1.0          # 0.16, below thirty floors: not looked at
    assert table.settled(rows) == pytest.approx(0.6)
    assert table.told([1, 2, 3]) == '2.00 ± 1.00' and table.told([1.25], 1) == '1.2'


def test_the_fastest_of_equal_quality():
    point = lambda tau, gap, ms: dict(seed=1.0, rules='accel', rule='kl', tau=tau, ce_minus_full=gap, ms_per_token=ms)
    t = dict(bench=[point(1e-3, 0.0, 9.0), point(1e-2, 0.004, 5.0), point(0.1, 0.02, 1.0)])
    assert table.fastest(t, 'kl', 1.0)['ms_per_token'] == 5.0 and table.fastest(t, 'kl', 1.0, (1e-3,))['ms_per_token'] == 9.0


def test_the_leading_eigenvalue(tiny):
    """Against steps made from the last state: a small push of the last token shrinks as the eigenvalue says."""
    import torch
    model, trace = tiny(), []
    idx = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    model(idx, n_loop=60, trace=trace)
    group, e, x = model.groups[0], trace[0]['e'].double(), trace[0]['states'][-1].double()
    group.double()
    leading = claims.spectrum(group, e, x)
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


class Inline:
    """A pool whose work is done at once, in this thread, as signals need it."""
    map = staticmethod(map)
    __init__ = __exit__ = lambda self, *_: None
    __enter__ = lambda self: self


@pytest.fixture
def small(tmp_path, monkeypatch):
    """claims.py in this process on runs made tiny, and none of the figures."""
    monkeypatch.chdir(tmp_path)
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(900)))
    data.make('book', 'book.txt')
    calls = []

    def command(*args, until=None, log=None):
        calls.append(args[0])
        if args[0] == 'geometry.py' or calls.count('bench.py') > 1:     # has its own tests; one sweep will do for all
            return True
        done = run(*args[1:], script=args[0])
        assert done.returncode == 0, done.stderr
        return True
    settings = dict(command=command, dataset='book', seeds=[1], workers=1, CHOICES={'as it is': []}, config={}, more=[*TINY, '--eval_loops=[1,4,8]'],
                    RULES=dict.fromkeys(claims.RULES, ['--n_windows=4', '--timed_tokens=1', '--rounds=1', '--n_loop=6', '--budgets=[2]', '--device=cpu']), ThreadPoolExecutor=Inline, PLAIN=[])
    monkeypatch.setattr(claims.geometry, 'n_windows', 4)
    for key, setting in settings.items():
        monkeypatch.setattr(claims, key, setting, raising=False)
    monkeypatch.setattr(table, 'write', lambda: calls.append('table'))
    return calls


@pytest.mark.parametrize('scale, trainings', [('small', 4), ('paper', 1)])
def test_all_is_run_once_and_gathered(small, monkeypatch, scale, trainings):
    monkeypatch.setattr(claims, 'scale', scale)
    with contextlib.redirect_stdout(io.StringIO()):
        claims.main()
    assert small == ['train.py'] * trainings + ['bench.py'] * 5 + ['geometry.py', 'table']
    monkeypatch.setattr(table, 'HERE', os.getcwd())
    assert len(table.claims(scale)) == (15 if scale == 'small' else 14) and os.path.exists('assets/' + 'paper_' * (scale == 'paper') + 'figure_4.png')
    assert scale == 'paper' or table.markdown().count('| not run yet |') == 15
    small.clear()
    with contextlib.redirect_stdout(io.StringIO()):
        claims.main()
    assert small == ['table']           # resumable: what is done is not done again


def test_pieces_stop_and_go_on(small, monkeypatch, capsys):
    monkeypatch.setattr(claims, 'minutes', 1e-9)
    claims.main()
    assert small == [] and 'the time is up: the same command goes on' in capsys.readouterr().out


def test_a_training_is_asked_to_stop_in_order(tmp_path, monkeypatch):
    """A piece's end is a SIGTERM: it saves, and the next piece resumes."""
    monkeypatch.chdir(tmp_path)
    with open('book.txt', 'w') as f:
        f.write('many words ' * 900)
    data.make('book', 'book.txt')
    flags = [*TINY, '--max_iters=1000000', '--out_dir=out-piece', '--resume']
    assert not claims.command('train.py', *flags, until=time.time() + 6, log='piece.txt')
    told = open('piece.txt').read()
    assert 'stopped after iteration' in told and os.path.exists('out-piece/ckpt.pt'), told


@pytest.mark.parametrize('key, setting, words', [('scale', 'large', "unknown scale 'large': choose small or paper"), ('seeds', [], '--seeds must name one'), ('workers', 0, '--workers'), ('minutes', -1.0, '--minutes must be')])
def test_bad_input(key, setting, words, monkeypatch):
    monkeypatch.setattr(claims, key, setting)
    with pytest.raises(ValueError, match=words):
        claims.main()
