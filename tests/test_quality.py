"""Quality at a point: whole windows against token by token, the oracle, paired intervals."""
import numpy as np
import torch
from conftest import TAUS

import quality
from exits import make_exit


def points_of(cache, **how):
    rules = [make_exit(name, TAUS[name], past=past) for name in ('norm', 'kl', 'accel')
             for past in (False, True)]
    return [quality.Point('fixed', 3, [3, 3], cache=cache, **how),
            *(quality.Point(rule.name, rule.tau, [9, 9], rule, cache, **how) for rule in rules)]


def assert_same_quality(a, b):
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-4)
    assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])


def test_the_oracle_of_latest_looks_at_the_end_of_what_it_decodes(tiny, idx):
    """At epsilon 0 that is the full budget, and for the first token what whole windows give."""
    model = tiny(adapter_init='random')
    full, never, sometimes = (quality.token_by_token(model, point, idx) for point in (
        quality.Point('fixed', 9, [9, 9], cache='latest'),
        *(quality.Point('oracle', eps, [9, 9], cache='latest') for eps in (0, 0.5))))
    assert_same_quality(never, full)
    whole = quality.whole_windows(model, quality.Point('oracle', 0.5, [9, 9]), idx)
    assert_same_quality([part[:, :1] for part in sometimes], [part[:, :1] for part in whole])
    assert len(sometimes[1].unique()) > 2


def test_of_exact_whole_windows_are_what_decoding_gives(tiny, idx):
    model = tiny(adapter_init='random')
    for point in points_of('exact'):
        assert_same_quality(quality.token_by_token(model, point, idx),
                            quality.whole_windows(model, point, idx))


def test_other_policies_are_decoded(tiny, idx):
    """A ring as long as the budget is exact; latest is a ring of one, and is not."""
    model = tiny(adapter_init='random')
    whole = [quality.whole_windows(model, point, idx) for point in points_of('exact')]
    for a, ring in zip(whole, points_of('ring', ring=9)):
        assert_same_quality(a, quality.log_probabilities(model, ring, idx))
    for a, ring, latest in zip(whole, points_of('ring', ring=1), points_of('latest')):
        got = quality.log_probabilities(model, latest, idx)
        assert_same_quality(got, quality.log_probabilities(model, ring, idx))
        assert (got[0] - a[0]).abs().max() > 1e-3


def test_the_oracle_goes_at_the_first_step_within_epsilon(tiny, idx):
    model, full, trace, after = tiny(groups=[[1]]), [], [], []
    one_token = idx[:, :1]              # nobody else's exit changes its path
    model(one_token, n_loop=9, trace=full)
    with quality.Oracle(model, 0.5):
        model(one_token, n_loop=9, trace=trace)
    states = full[0]['states'][:, :, 0]                         # (K+1, B, C)
    near = (states - states[-1]).norm(dim=-1)[1:] < 0.5         # (K, B)
    expected = [int(row.nonzero()[0]) + 1 for row in near.T]
    assert trace[-1]['steps_used'][:, 0].tolist() == expected
    model(one_token, n_loop=9, trace=after)
    assert (after[0]['steps_used'] == 9).all()                  # and it is gone afterwards


def test_the_interval_is_paired():
    """Half a thousandth of a nat, window by window, is told from nothing."""
    rng = np.random.default_rng(0)
    difference = 5e-4 + 1e-4 * rng.standard_normal(64)
    low, high = quality.interval(difference)
    assert 4e-4 < low < difference.mean() < high < 6e-4
