"""How much memory things take, by other ways of counting it."""
import os

import pytest
import torch

import memory
from model import GPT, GPTConfig

GIB = 2 ** 30


def test_require(monkeypatch):
    monkeypatch.setattr(memory, 'available', lambda device: 3 * GIB)
    memory.require(3 * GIB, 'cpu', 'a pass', 'n_loop')
    with pytest.raises(ValueError) as error:
        memory.require(5000 * GIB, 'cpu', 'a pass over 9 windows', 'n_windows or n_loop')
    assert str(error.value) == ('a pass over 9 windows would take 5,000.0 GiB of memory, and cpu '
                                'has 3.0 GiB left: lower n_windows or n_loop')
    with pytest.raises(ValueError):
        memory.require(3 * GIB + 1, 'cpu', 'a pass', 'n_loop')


@pytest.mark.skipif(not hasattr(os, 'sysconf'), reason='this system does not say how much it has')
def test_available_is_no_more_than_the_machine_has():
    machine = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    assert 0 < memory.available() <= machine


@pytest.mark.parametrize('block_size, vocab_size, windows', [
    (16, 50, 64),           # no more than 64
    (512, 50304, 5),        # config/groups.py: 98 MiB of logits a window
    (512, 2 ** 16, 4),      # 128 MiB a window: 0.5 GiB exactly
    (1024, 2 ** 18, 1)])    # 1 GiB a window: one all the same
def test_windows_at_once(block_size, vocab_size, windows):
    config = GPTConfig(block_size=block_size, vocab_size=vocab_size)
    assert memory.windows_at_once(config) == windows


def test_states_bytes():
    """Two groups, three steps and x^(0), twice: as a list and stacked."""
    config = GPTConfig(block_size=16, n_layer=4, n_head=2, n_embd=8, groups=[[1], [2]])
    states = [torch.zeros(5, 16, 8) for _ in range(2 * (3 + 1) * 2)]
    assert memory.states_bytes(config, 3, 5) == sum(state.nbytes for state in states)


@pytest.mark.parametrize('batch, checkpoint_steps, changes', [
    (16, False, dict()),
    (16, True, dict()),
    (8, False, dict(groups=[])),
    (8, False, dict(groups=[], vocab_size=9000, n_embd=16)),        # mostly logits
    (1, False, dict(n_embd=256, block_size=8, bptt_k=1))])          # mostly weights
def test_training_bytes_are_about_those_of_a_step(batch, checkpoint_steps, changes):
    """Weights four times (gradients, two moments), what autograd keeps, logits, their gradient."""
    config = GPTConfig(**dict(
        block_size=48, vocab_size=257, n_layer=6, n_head=2, n_embd=96, groups=[[1], [2, 3], [4]],
        mean_recurrence=8, bptt_k=6) | changes)
    model = GPT(config).train()
    for group in model.groups:
        group.checkpoint_steps = checkpoint_steps
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    kept = {}       # by its place in memory, as views of one tensor are kept as one

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), storage        # so that its place stays taken
        return tensor

    idx = torch.randint(config.vocab_size, (batch, config.block_size))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits, loss = model(idx, idx, n_loop=9)
    states = sum(n_bytes for place, (n_bytes, _) in kept.items() if place not in weights)
    assert loss.requires_grad and states > 0
    step = 4 * sum(weights.values()) + states + 2 * logits.nbytes
    ratio = memory.training_bytes(config, batch, checkpoint_steps) / step
    assert 0.5 < ratio < 2
