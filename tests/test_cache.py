"""
The cache by hand: where new tokens stand, and what lies in which slot.

Keys are numbers that say whose they are, 10 * position + k, so that 23 is what the token at
position 2 has in loop step 3. Values are their negatives.
"""
import pytest
import torch

from cache import KeysValues, Span, make_cache, slots_of


def take_step(kv, span, k, awake=None):
    """Write step k of the tokens in span -> the keys that they read."""
    key = (10 * span.pos + k).float().view(1, -1, 1, 1, 1)
    read, mask = kv.update(torch.cat((key, -key), dim=2), span, k, awake)
    assert mask is span.mask
    keys, values = read.unbind(2)                                               # (B, end, H, D)
    assert torch.equal(values, -keys)
    return keys.flatten().tolist()


def keys_of(kv, pos):
    """The keys of one token, slot by slot."""
    keys, values = kv.kv[:, 0, pos, :, 0, 0].unbind(1)
    assert torch.equal(values, -keys)
    return keys.tolist()


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
        kv.fill(Span(pos), steps)
        assert keys_of(kv, pos) == left[pos]
    assert [take_step(kv, Span(2), k) for k in (1, 2, 3, 4)] == [
        [*earlier, 20 + k] for k, earlier in enumerate(read, start=1)]
    assert kv.kv.shape == (slots, 1, 3, 2, 1, 1)


def test_tokens_side_by_side_keep_what_they_left():
    """The same picture when all three loop side by side."""
    kv, span = KeysValues(slots=4, T_max=3), Span(0, 3)
    read = [take_step(kv, span, k) for k in (1, 2)]
    read += [take_step(kv, span, 3, awake=torch.tensor([[True, False, True]]))]
    read += [take_step(kv, span, 4, awake=torch.tensor([[False, False, True]]))]
    assert read == [[1, 11, 21], [2, 12, 22], [3, 12, 23], [3, 12, 24]]
    assert [keys_of(kv, pos) for pos in range(3)] == [
        [1, 2, 3, 3], [11, 12, 12, 12], [21, 22, 23, 24]]


@pytest.mark.parametrize('slots, last, left', [
    (1, 1, [11]), (2, 1, [11, 11]), (2, 2, [11, 12]), (3, 2, [11, 12, 12])])
def test_a_token_that_has_exited_stays_in_a_short_ring(slots, last, left):
    """Token 1 exits after step `last`. Later steps leave its slots alone."""
    kv, span = KeysValues(slots, T_max=2), Span(0, 2)
    for k in range(1, 7):
        take_step(kv, span, k, awake=torch.tensor([[True, k <= last]]))
    assert keys_of(kv, 1) == left
    assert keys_of(kv, 0) == {1: [6], 2: [5, 6], 3: [4, 5, 6]}[slots]


def test_at_any_place_a_pass_reads_the_whole_cache():
    """By index tensors and through a mask, as compiled passes do, and finds the same."""
    plain, compiled = KeysValues(2, T_max=6), KeysValues(2, T_max=6)
    for start, T in ((0, 2), (2, 3), (5, 1)):
        for k in (1, 2, 3):
            here, anywhere = Span(start, T), Span(start, T, all_of=6)
            read = take_step(plain, here, k)
            everything = take_step(compiled, anywhere, k)
            assert everything[:start + T] == read and len(everything) == 6
            assert anywhere.pos.tolist() == here.pos.tolist()
            assert anywhere.mask.tolist() == [[j <= i for j in range(6)]
                                              for i in range(start, start + T)]
    assert torch.equal(plain.kv, compiled.kv)


def test_slots(tiny):
    assert [slots_of(cache, 9) for cache in ('exact', 'latest', 1, 4, 20)] == [9, 1, 1, 4, 9]
    model = tiny()
    for cache, slots in (('exact', [1, 9, 3, 3, 1]), (4, [1, 4, 3, 3, 1]), ('latest', 5 * [1])):
        layers = make_cache(model, [9, 3], cache)
        blocks = [block for layer in model.h for block in getattr(layer, 'core', [layer])]
        assert [layers[block].slots for block in blocks] == slots
        assert {kv.T_max for kv in layers.values()} == {16}
