"""
The cache by hand: where new tokens stand, and what lies in which slot.

Keys are numbers that say whose they are, 100 * row + 10 * position + k, so that 123 is what row 1
has at position 2 in loop step 3. Values are their negatives.
"""
import math

import pytest
import torch

from cache import KeysValues, Rotary, Span
from decode import put_last
from model import GPTConfig


def take_step(kv, span, k, B=1, rows=None, active=None):
    """Write step k of the tokens in span -> the keys (b, end) that they meet, and the mask."""
    row = torch.arange(B)[:, None] if rows is None else rows[:, None]
    pos = span.pos[rows] if rows is not None and span.ragged else span.pos
    keys = (100 * row + 10 * pos + k).float()[:, None, :, None]                 # (b, 1, T, 1)
    keys, values, mask = kv.update(keys, -keys, span, k, rows, active)
    assert torch.equal(values, -keys)
    return keys[:, 0, :, 0].tolist(), mask


def slots_of(kv, pos, row=0):
    """The keys of one token, slot by slot."""
    assert torch.equal(kv.values, -kv.keys)
    return kv.keys[:, row, 0, pos, 0].tolist()


# -------------------------------------------------------------------------------------------------
# places

def test_no_mask_where_none_is_needed():
    whole = Span(0, 5)
    assert (whole.pos.tolist(), whole.end, whole.mask) == ([0, 1, 2, 3, 4], 5, None)
    one = Span(7)
    assert (one.pos.tolist(), one.end, one.mask, one.ragged) == ([7], 8, None, False)


def test_new_tokens_see_what_was_there_and_each_other_in_order():
    span = Span(2, 3)
    assert (span.pos.tolist(), span.end) == ([2, 3, 4], 5)
    assert span.mask.int().tolist() == [[[[1, 1, 1, 0, 0],
                                          [1, 1, 1, 1, 0],
                                          [1, 1, 1, 1, 1]]]]


def test_rows_that_end_at_different_places_are_ragged():
    span = Span([1, 3])
    assert span.ragged and (span.pos.tolist(), span.end) == ([[1], [3]], 4)
    assert span.mask.int().tolist() == [[[[1, 1, 0, 0]]], [[[1, 1, 1, 1]]]]
    equal = Span([3, 3])
    assert (equal.ragged, equal.pos.tolist(), equal.end, equal.mask) == (False, [3], 4, None)


# -------------------------------------------------------------------------------------------------
# slots

def test_ring_slots_by_hand():
    kv = KeysValues(slots=3, T_max=4)
    for k in range(1, 6):
        take_step(kv, Span(0), k)
    kv.fill(None, 5, Span(0))
    assert slots_of(kv, 0) == [4, 5, 3]                 # steps 4 and 5 have written over 1 and 2
    for k in (1, 2):
        take_step(kv, Span(1), k)
    kv.fill(None, 2, Span(1))
    assert slots_of(kv, 1) == [11, 12, 12]              # it stopped after step 2
    for k in (1, 2, 3):
        take_step(kv, Span(2), k)
    kv.fill(None, 3, Span(2))
    assert slots_of(kv, 2) == [21, 22, 23]              # it has been in every slot


def test_one_slot_holds_the_latest_step():
    kv = KeysValues(slots=1, T_max=2)
    for k in (1, 2):
        take_step(kv, Span(0), k)
    kv.fill(None, 2, Span(0))
    assert take_step(kv, Span(1), 1)[0] == [[2, 11]]


def test_the_picture_of_the_docstring():
    """A token at step k meets every earlier one at step min(k, the last step that one took)."""
    kv = KeysValues(slots=3, T_max=3)
    for k in (1, 2, 3):
        take_step(kv, Span(0), k)
    for k in (1, 2):
        take_step(kv, Span(1), k)
    kv.fill(None, 2, Span(1))                           # token 1 stops after step 2
    assert slots_of(kv, 1) == [11, 12, 12]
    met = [take_step(kv, Span(2), k)[0] for k in (1, 2, 3)]
    assert met == [[[1, 11, 21]], [[2, 12, 22]], [[3, 12, 23]]]


def test_tokens_side_by_side_keep_what_they_left():
    """The same picture when all three loop side by side. Token 0 stops after step 3."""
    kv, span = KeysValues(slots=4, T_max=3), Span(0, 3)
    met = [take_step(kv, span, k)[0] for k in (1, 2)]
    met += [take_step(kv, span, 3, active=torch.tensor([[True, False, True]]))[0]]
    met += [take_step(kv, span, 4, active=torch.tensor([[False, False, True]]))[0]]
    assert met == [[[1, 11, 21]], [[2, 12, 22]], [[3, 12, 23]], [[3, 12, 24]]]
    assert slots_of(kv, 0) == [1, 2, 3, 3]
    assert slots_of(kv, 1) == [11, 12, 12, 12]
    assert slots_of(kv, 2) == [21, 22, 23, 24]


@pytest.mark.parametrize('slots, last, left', [
    (1, 1, [11]), (2, 1, [11, 11]), (2, 2, [11, 12]), (3, 2, [11, 12, 12])])
def test_a_stopped_token_stays_in_a_short_ring(slots, last, left):
    """Token 1 stops after step `last`. Later steps leave its slots alone."""
    kv, span = KeysValues(slots, T_max=2), Span(0, 2)
    for k in range(1, 7):
        take_step(kv, span, k, active=torch.tensor([[True, k <= last]]))
    assert slots_of(kv, 1) == left
    assert slots_of(kv, 0) == {1: [6], 2: [5, 6], 3: [4, 5, 6]}[slots]


# -------------------------------------------------------------------------------------------------
# rows

def test_a_row_that_has_stopped_is_left_alone():
    kv, span = KeysValues(slots=3, T_max=2), Span(0, 2)
    take_step(kv, span, 1, B=3)
    kv.fill(torch.tensor([1]), 1, span)                 # row 1 stops after step 1, the others go on
    others = torch.tensor([0, 2])
    active = torch.tensor([[True, True], [False, True]])            # of rows 0 and 2
    assert take_step(kv, span, 2, rows=others, active=active)[0] == [[2, 12], [201, 212]]
    assert slots_of(kv, 0, row=1) == [101, 101, 101]
    assert slots_of(kv, 1, row=1) == [111, 111, 111]
    assert slots_of(kv, 1, row=2) == [211, 212, 0]


def test_ragged_rows_write_at_places_of_their_own():
    """Row 0 has one token before the new one, row 1 has three; what pads row 0 is not seen."""
    kv, new = KeysValues(slots=3, T_max=5), Span([1, 3])
    take_step(kv, Span(0, 3), 1, B=2)
    met, mask = take_step(kv, new, 1, B=2)
    assert met == [[1, 11, 21, 0], [101, 111, 121, 131]]
    assert torch.equal(mask, new.mask)
    # row 1 stops after step 1, row 0 after step 2
    kv.fill(torch.tensor([1]), 1, new)
    _, mask = take_step(kv, new, 2, rows=torch.tensor([0]))
    assert mask.int().tolist() == [[[[1, 1, 0, 0]]]]
    kv.fill(torch.tensor([0]), 2, new)
    assert slots_of(kv, 1, row=0) == [11, 12, 12]
    assert slots_of(kv, 3, row=1) == [131, 131, 131]
    # neither has written at the other's place
    assert slots_of(kv, 3, row=0) == [0, 0, 0]
    assert slots_of(kv, 1, row=1) == [111, 0, 0]


def test_ragged_rows_that_stop_together():
    kv, new = KeysValues(slots=2, T_max=4), Span([1, 3])
    take_step(kv, new, 1, B=2)
    kv.fill(None, 1, new)
    assert slots_of(kv, 1, row=0) == [11, 11]
    assert slots_of(kv, 3, row=1) == [131, 131]


def test_rows_that_leave_the_batch_are_forgotten():
    kv = KeysValues(slots=2, T_max=2)
    take_step(kv, Span(0), 1, B=3)
    kv.keep_rows([0, 2])
    assert kv.keys.shape == kv.values.shape == (2, 2, 1, 2, 1)
    assert [slots_of(kv, 0, row) for row in (0, 1)] == [[1, 0], [201, 0]]


# -------------------------------------------------------------------------------------------------
# hooks

def test_at_is_update_with_its_place():
    kv, keys = KeysValues(slots=2, T_max=2), torch.ones(1, 1, 1, 1)
    hook = kv.at(span=Span(1), k=2)
    all_keys, all_values, mask = hook(keys, 3 * keys)
    assert (all_keys.flatten().tolist(), all_values.flatten().tolist()) == ([0, 1], [0, 3])
    assert mask is None and kv.keys[1, 0, 0, 1, 0] == 1


def test_a_compiled_step_writes_through_its_views():
    kv, token = KeysValues(slots=2, T_max=3), Span(1)
    for k in (1, 2):
        take_step(kv, Span(0), k)
    new = torch.tensor([[[[12.0]]]])
    keys, values, mask = put_last(new, -new, kv.views(token, 2))
    assert keys.flatten().tolist() == [2, 12] and mask is None
    assert slots_of(kv, 1) == [0, 12]


# rotary positions --------------------------------------------------------------------------------

def test_rotary_by_hand():
    """Two pairs of one head at positions 0 to 2: speeds 1 and base^(-1/2)."""
    rotary = Rotary(GPTConfig(n_embd=4, n_head=1, n_layer=1, groups=[], block_size=3,
                              pos='rotary', rope_base=16.0))
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 1, 3, 4)
    for place, turned in enumerate(rotary(x, None)[0, 0]):
        a, b = float(place), place / 4
        expected = [math.cos(a), math.sin(a), -2 * math.sin(b), 2 * math.cos(b)]
        torch.testing.assert_close(turned, torch.tensor(expected))


def test_scores_depend_on_differences_of_positions_alone():
    config = GPTConfig(n_embd=16, n_head=2, n_layer=1, groups=[], block_size=64, pos='rotary')
    rotary, generator = Rotary(config), torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, 2, 5, 8, generator=generator) for _ in range(2))

    def scores(start):
        pos = torch.arange(start, start + 5)
        return rotary(q, pos) @ rotary(k, pos).transpose(-1, -2)
    torch.testing.assert_close(scores(0), scores(40), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores(0), q @ k.transpose(-1, -2), atol=1e-2)
    # rows at positions of their own
    pos = torch.tensor([[3], [0], [9]])
    new = rotary(q[:, :, :1], pos)
    for row in range(3):
        torch.testing.assert_close(new[row:row + 1], rotary(q[row:row + 1, :, :1], pos[row]))
