"""Thresholds that keep a promise, and sample.py with one of them."""
import json
import os

import conftest
import numpy as np
import pytest

import calibrate
import data
import quality
from common.checkpoint import load_checkpoint
from exits import make_exit


@pytest.fixture
def calibrated(wave, monkeypatch):
    """In the folder of the run with a wave, its thresholds found: what was printed."""
    monkeypatch.chdir(wave)
    done = conftest.run('--rules=["norm_rel","kl"]', '--calibrate=0.02', '--n_windows=64',
                        '--n_loop=16', '--device=cpu', script='bench.py')
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_thresholds_are_the_largest_that_keep_the_promise(calibrated):
    assert 'exits.json: python sample.py --exit=norm_rel --tau=auto uses it' in calibrated
    with open('out/exits.json') as f:
        found = json.load(f)
    assert found['iteration'] == 200 and found['dataset'].startswith('calc:p=2')
    model, _ = load_checkpoint('out/ckpt.pt')
    problems = data.open_data(found['dataset'])
    at = np.linspace(0, problems.n_held_out(12) - 1, 64).round().astype(int)
    idx, targets = problems.held_out(at, 12)
    assert len(found['exits']) == 6         # two rules, by own signals, waiting, latest
    with_one = [row for row in found['exits'] if row['tau']]
    assert len(with_one) > 3
    for row in with_one:
        # the same by other code: the loss of each window, and the bounds around the threshold
        above = calibrate.TAUS[calibrate.TAUS.index(row['tau']) - 1]
        for tau, good in (row['tau'], True), (above, False):
            point = quality.Point('', tau, [16], make_exit(row['rule'], tau, past=row['past']),
                                  row['cache'])
            losses = []
            for which in (quality.Point('fixed', 16, [16]), point):
                log_p, _, _ = quality.log_probabilities(model, which, idx[::2])
                losses.append(-log_p.gather(2, targets[::2, :, None])[..., 0].mean(dim=1).numpy())
            upper = quality.interval(losses[1] - losses[0])[1]
            assert (upper <= 0.02) == good
    own, past = [[row['tau'] for row in found['exits'] if row['rule'] == 'norm_rel'
                  and (row['cache'], row['past']) == ('exact', wait)][0] for wait in (False, True)]
    assert (own or 0) < past


def test_auto_reads_what_calibration_wrote(calibrated, monkeypatch):
    for how in [], ['--past'], ['--past', '--cache=exact'], ['--past', '--cache=None']:
        done = conftest.run('--exit=norm_rel', '--tau=auto', *how, script='sample.py')
        assert done.returncode == 0 and 'mean loop steps' in done.stdout
    for args, words in ((['--exit=accel', '--tau=auto'], "has no threshold for the rule 'accel'"),
                        (['--exit=kl', '--tau=auto', '--cache=ring'], "with the cache 'ring'"),
                        (['--tau=auto'], '--tau=auto are about exit rules')):
        done = conftest.run(*args, script='sample.py')
        assert done.returncode == 2 and words in done.stderr and done.stderr.count('\n') == 1
    with open('out/exits.json') as f:
        found = json.load(f)
    for change, words in ((dict(iteration=3), 'is of iteration 3 on calc:p=2'),
                          (dict(dataset='hop'), 'of iteration 200 on hop'),
                          (dict(exits=7), 'make it with python bench.py --calibrate')):
        with open('out/exits.json', 'w') as f:
            json.dump(found | change, f)
        done = conftest.run('--exit=kl', '--tau=auto', script='sample.py')
        assert done.returncode == 2 and words in done.stderr and done.stderr.count('\n') == 1
    os.remove('out/exits.json')
    done = conftest.run('--exit=kl', '--tau=auto', script='sample.py')
    assert done.returncode == 2 and 'make it with python bench.py' in done.stderr
