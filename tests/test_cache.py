"""
The cache by hand: where new tokens stand, and what lies in which slot.

Keys are numbers that say whose they are, 100 * row + 10 * position + k, so that 123 is what row 1
has at position 2 in loop step 3. Values are their negatives.
"""
import pytest
import torch

from cache import KeysValues, Span


def take_step(kv, span, k, B=1, rows=None, active=None):
    """Write step k of the tokens in span -> the keys (b, end) that they read, and the mask."""
    row = torch.arange(B)[:, None] if rows is None else rows[:, None]
    pos = span.pos[rows] if rows is not None and span.ragged else span.pos
    keys = (100 * row + 10 * pos + k).float()[:, None, :, None]                 # (b, 1, T, 1)
    keys, values, mask = kv.at(span=span, k=k, rows=rows, active=active)(keys, -keys)
    assert torch.equal(values, -keys)
    return keys[:, 0, :, 0].tolist(), mask


def slots_of(kv, pos, row=0):
    """The keys of one token, slot by slot."""
    assert torch.equal(kv.values, -kv.keys)
    return kv.keys[:, row, 0, pos, 0].tolist()


# places ------------------------------------------------------------------------------------------

def test_no_mask_where_none_is_needed():
    whole = Span(0, 5)
    assert (whole.pos.tolist(), whole.end, whole.mask) == ([0, 1, 2, 3, 4], 5, None)
    one = Span(7)
    assert (one.pos.tolist(), one.end, one.mask, one.ragged) == ([7], 8, None, False)
    equal = Span([3, 3])
    assert (equal.ragged, equal.pos.tolist(), equal.end, equal.mask) == (False, [3], 4, None)


def test_new_tokens_see_what_was_there_and_each_other_in_order():
    span = Span(1, 3)
    assert (span.pos.tolist(), span.end) == ([1, 2, 3], 4)
    assert span.mask.int().tolist() == [[[[1, 1, 0, 0],
                                          [1, 1, 1, 0],
                                          [1, 1, 1, 1]]]]


# slots -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('slots, left, read', [
    (4, ([1, 2, 3, 3], [11, 12, 12, 12]), [[1, 11], [2, 12], [3, 12], [3, 12]]),    # exact
    (2, ([3, 2], [11, 12]), [[3, 11], [2, 12], [3, 11], [2, 12]]),                  # ring
    (1, ([3], [12]), [[3, 12]] * 4)])                                               # latest
def test_the_picture_of_the_docstring(slots, left, read):
    """Tokens 0 and 1 exit after steps 3 and 2; what does token 2 read at each of its steps?"""
    kv = KeysValues(slots, T_max=3)
    for pos, steps in enumerate((3, 2)):
        for k in range(1, steps + 1):
            take_step(kv, Span(pos), k)
        kv.fill(None, steps, Span(pos))
        assert slots_of(kv, pos) == left[pos]
    assert [take_step(kv, Span(2), k)[0] for k in (1, 2, 3, 4)] == [
        [[*earlier, 20 + k]] for k, earlier in enumerate(read, start=1)]
    assert kv.keys.shape == (slots, 1, 1, 3, 1)


def test_tokens_side_by_side_keep_what_they_left():
    """The same picture when all three loop side by side."""
    kv, span = KeysValues(slots=4, T_max=3), Span(0, 3)
    read = [take_step(kv, span, k)[0] for k in (1, 2)]
    read += [take_step(kv, span, 3, active=torch.tensor([[True, False, True]]))[0]]
    read += [take_step(kv, span, 4, active=torch.tensor([[False, False, True]]))[0]]
    assert read == [[[1, 11, 21]], [[2, 12, 22]], [[3, 12, 23]], [[3, 12, 24]]]
    assert [slots_of(kv, pos) for pos in range(3)] == [
        [1, 2, 3, 3], [11, 12, 12, 12], [21, 22, 23, 24]]


@pytest.mark.parametrize('slots, last, left', [
    (1, 1, [11]), (2, 1, [11, 11]), (2, 2, [11, 12]), (3, 2, [11, 12, 12])])
def test_a_token_that_has_exited_stays_in_a_short_ring(slots, last, left):
    """Token 1 exits after step `last`. Later steps leave its slots alone."""
    kv, span = KeysValues(slots, T_max=2), Span(0, 2)
    for k in range(1, 7):
        take_step(kv, span, k, active=torch.tensor([[True, k <= last]]))
    assert slots_of(kv, 1) == left
    assert slots_of(kv, 0) == {1: [6], 2: [5, 6], 3: [4, 5, 6]}[slots]


# rows --------------------------------------------------------------------------------------------

def test_ragged_rows_write_at_places_of_their_own():
    """Row 0 has one token before the new one, row 1 has three; what pads row 0 is not seen."""
    kv, new = KeysValues(slots=3, T_max=5), Span([1, 3])
    assert new.ragged and (new.pos.tolist(), new.end) == ([[1], [3]], 4)
    take_step(kv, Span(0, 3), 1, B=2)
    read, mask = take_step(kv, new, 1, B=2)
    assert read == [[1, 11, 21, 0], [101, 111, 121, 131]]
    assert mask.int().tolist() == [[[[1, 1, 0, 0]]], [[[1, 1, 1, 1]]]]
    # row 1 exits after step 1, row 0 after step 2
    kv.fill(torch.tensor([1]), 1, new)
    _, mask = take_step(kv, new, 2, rows=torch.tensor([0]))
    assert mask.int().tolist() == [[[[1, 1, 0, 0]]]]
    kv.fill(torch.tensor([0]), 2, new)
    assert slots_of(kv, 1, row=0) == [11, 12, 12]
    assert slots_of(kv, 3, row=1) == [131, 131, 131]
    # neither has written at the other's place
    assert slots_of(kv, 3, row=0) == [0, 0, 0]
    assert slots_of(kv, 1, row=1) == [111, 0, 0]
    # and both at once
    kv.fill(None, 1, new)
    assert (slots_of(kv, 1, row=0), slots_of(kv, 3, row=1)) == ([11, 11, 11], [131, 131, 131])
