"""results/hop_and_group.py against its oracles; its problems never change."""
import numpy as np
import pytest
from conftest import digest

import tasks
from results.hop_and_group import Hop


# as in test_tasks.py: 50 problems of seed 0, those held out, sha256, the tokenizer's name
@pytest.mark.parametrize('text, T, drawn, held_out, sha256, tokenizer', [
    ('hop', 40, '4b8a1e946c7f', '9807c1ab4f86', '2e63756254f6', 'hop:letters=4,hops=4'),
    ('group', 24, '2220a3966240', '85c357830761', '090d54813219', 'group:name=S3'),
    ('group:name=S5', 24, '967eb3477bd8', 'ed491e832c57', '07c1a9b79fe4', 'group:name=S5')])
def test_problems_never_change(text, T, drawn, held_out, sha256, tokenizer):
    problems = tasks.Problems(text)
    assert digest(problems.make(np.random.default_rng(0), 50, T)) == drawn
    assert digest(problems.all_held_out(T)) == held_out
    assert (problems.sha256[:12], problems.tokenizer) == (sha256, tokenizer)


@pytest.mark.parametrize('text', [
    'hop', 'hop:letters=2,hops=0', 'hop:letters=26,hops=7', 'hop:letters=3,hops=30',
    'group:name=S5', 'group:reset=0'])
def test_labels_are_the_oracles(text):
    problems = tasks.Problems(text)
    x, y, depth = problems.make(np.random.default_rng(0), 200, 24)
    assert problems.wrong_rows(x, y) == []
    if text == 'hop':       # the depth is p where the whole chain exists, and at most p elsewhere
        p, whole = np.tile(x[:, :1] - 5, (1, 23)), y[:, 1:] != 4
        assert (depth[:, 1:] <= p).all() and (depth[:, 1:][whole] == p[whole]).all()


def test_the_oracles_by_hand():
    """b a c b a: from the last a back to the a before it, one on to c; c has none before it."""
    assert Hop().oracle(list('1bacba')) == [None, '-', '-', '-', 'a', 'c']
    assert Hop().oracle(list('2bacba')) == [None, '-', '-', '-', '-', '-']
    problems = tasks.Problems('group')
    _, y = problems.solve('=021 102 =120')
    assert problems.encoding.decode(y[0]) == '021 201 120'
    with pytest.raises(ValueError):
        problems.solve('=021 201 a')
