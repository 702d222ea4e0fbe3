"""results/hop_and_group.py against its oracles and by hand; its problems never change."""
import numpy as np
import pytest
from conftest import digest

import tasks
from results.hop_and_group import Hop
from tasks import NOT_ASKED


def made(text, rows=200, T=24):
    problems = tasks.Problems(text)
    return problems, *problems.make(np.random.default_rng(0), rows, T)


@pytest.mark.parametrize('text', [
    'hop:letters=2,hops=0', 'hop:letters=26,hops=7', 'hop:letters=3,hops=30', 'group:name=S5',
    'group:reset=0'])
def test_labels_are_the_oracles(text):
    problems, x, y, depth = made(text)
    problems.check_fits(24)
    assert problems.wrong_rows(x, y) == []
    # all tokens have a label, except hop's p; only labels have a depth
    first = int(text[:3] == 'hop')
    assert ((y != NOT_ASKED) == (np.arange(24) >= first)).all()
    assert (depth[y == NOT_ASKED] == 0).all()


# as in test_tasks.py: 50 problems of seed 0, those held out, sha256, the tokenizer's name
@pytest.mark.parametrize('text, T, drawn, held_out, sha256, tokenizer', [
    ('hop', 40, '4b8a1e946c7f', '9807c1ab4f86', '2e63756254f6', 'hop:letters=4,hops=4'),
    ('group', 24, '2220a3966240', '85c357830761', '090d54813219', 'group:name=S3'),
    ('group:name=S5', 24, '967eb3477bd8', 'ed491e832c57', '07c1a9b79fe4', 'group:name=S5')])
def test_problems_never_change(text, T, drawn, held_out, sha256, tokenizer):
    problems, *arrays = made(text, 50, T)
    assert digest(arrays) == drawn
    assert digest(problems.all_held_out(T)) == held_out
    assert (problems.sha256[:12], problems.tokenizer) == (sha256, tokenizer)


def test_hop_by_hand():
    """b a c b a: from the last a back to the a before it, one on to c; c has none before it."""
    words = list('bacba')
    assert Hop().oracle(['0', *words]) == [None, 'b', 'a', 'c', 'b', 'a']
    assert Hop().oracle(['1', *words]) == [None, '-', '-', '-', 'a', 'c']
    assert Hop().oracle(['2', *words]) == [None, '-', '-', '-', '-', '-']
    _, x, y, depth = made('hop', rows=300)
    # the depth is p where the whole chain exists, and at most p where it breaks
    p, whole = np.tile(x[:, :1] - 5, (1, 23)), y[:, 1:] != 4
    assert (depth[:, 1:] <= p).all() and (depth[:, 1:][whole] == p[whole]).all()


def test_a_product_by_hand():
    problems = tasks.Problems('group')
    x, y = problems.solve('=021 102 =120')
    assert problems.encoding.decode(y[0]) == '021 201 120'


@pytest.mark.parametrize('text, T', [
    ('hop:letters=1', 24), ('hop:letters=27', 24), ('hop:hops=-1', 24), ('hop', 1),
    ('group:name=S4', 24), ('group:reset=-1', 24)])
def test_bad_input(text, T):
    with pytest.raises(ValueError):
        tasks.Problems(text).check_fits(T)


@pytest.mark.parametrize('task, text', [('group', '021 =120'), ('hop', 'a b'), ('hop', '1 a 2')])
def test_what_is_typed_is_checked(task, text):
    with pytest.raises(ValueError):
        tasks.Problems(task).solve(text)
