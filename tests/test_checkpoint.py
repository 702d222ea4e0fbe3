"""Checkpoints: what is in them, which are refused, and that a good one is always there."""
import os
import pickle
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, check_bits

from common.checkpoint import (
    checkpoint_of,
    load_checkpoint,
    open_run,
    read_checkpoint,
    save_checkpoint,
)
from common.files import new_file, read_json, sha256_of, write_json
from model import GPT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Code:
    def __reduce__(self):
        return os.mkdir, ('code-was-run',)


def stored(model, folder):
    """The model, saved as folder/ckpt.pt."""
    save_checkpoint(checkpoint_of(model, dict(dataset='book'), 'bytes', ''), f'{folder}/ckpt.pt')


def test_a_model_is_read_as_it_was_saved(tiny, idx):
    model = tiny()
    stored(model, 'out')
    loaded, checkpoint = load_checkpoint('out')
    assert not loaded.training and torch.equal(loaded(idx)[0], model(idx)[0])
    assert (checkpoint['folder'], checkpoint['tokenizer']) == ('out', 'bytes')
    check_bits(read_checkpoint('out/ckpt.pt')['model'], dict(model.state_dict()))


def test_what_is_no_checkpoint_is_refused_and_its_code_is_not_run(tiny):
    stored(tiny(), 'out')
    whole = Path('out/ckpt.pt').read_bytes()
    for content in whole[:5000], b'', pickle.dumps(Code(), 2):
        Path('bad.pt').write_bytes(content)
        with pytest.raises(ValueError, match='bad.pt'):
            read_checkpoint('bad.pt')
    for content in [1, 2], dict(model={}), dict(config=Code()), dict(rate=np.float64(1)):
        torch.save(content, 'bad.pt')
        with pytest.raises(ValueError, match='bad.pt'):
            read_checkpoint('bad.pt')
    assert not os.path.exists('code-was-run')


def test_a_model_that_has_changed_since_is_refused(tiny):
    checkpoint = checkpoint_of(tiny(), {}, 'bytes', '')
    weights = dict(checkpoint['model'], strange=torch.zeros(1))
    del weights['ln_f.weight']
    args = checkpoint['model_args']
    for change in (dict(model=weights), dict(model_args=args | dict(injection='mine')),
                   dict(model_args=args | dict(n_embd=32)), dict(model_args=args | dict(new=1)),
                   dict(model_class='model:None'), dict(model_class='os:path')):
        torch.save(checkpoint | change, 'changed.pt')
        with pytest.raises(ValueError):
            load_checkpoint('changed.pt')


def test_a_longer_context(tiny, idx):
    """Rotary positions are computed, so 16 tokens of training do not bound a model."""
    for pos in 'rotary', 'learned':
        stored(tiny(pos=pos, n_embd=32), pos)
    model, checkpoint, *_ = open_run('rotary', length=48)
    assert checkpoint['model_args']['block_size'] == model.config.block_size == 48
    long = idx.reshape(1, 48)
    logits, _ = model(long, n_loop=3)
    # 16 tokens alone are what they were
    trained, _ = GPT.load('rotary')(long[:, :16], n_loop=3)
    torch.testing.assert_close(logits[:, :16], trained, rtol=0, atol=1e-5)
    assert GPT.load('rotary', damping=0.5).config.damping == 0.5
    with pytest.raises(ValueError):
        open_run('learned', length=48)


def test_the_pretrained_models_are_found_from_any_folder(tiny):
    """
    With their thresholds. Without --out_dir it is out/ if that holds a checkpoint. Results never go
    to pretrained/.
    """
    for out_dir, name in ((None, 'text'), ('pretrained/calc/', 'calc'),
                          ('pretrained/maze', 'maze'), ('pretrained/sudoku', 'sudoku')):
        model, _, folder, results = open_run(out_dir)
        assert os.path.samefile(folder, f'{ROOT}/pretrained/{name}')
        assert results == f'out/pretrained-{name}' and model.exit_rows
    stored(tiny(), 'out')
    assert open_run()[2:] == ('out', 'out')


# files --------------------------------------------------------------------------------------------

def test_a_file_is_whole_or_as_it_was(monkeypatch):
    """Also if the block is stopped, or if the disk is full at the very end."""
    write_json(1, 'new/file.json')
    with pytest.raises(KeyboardInterrupt), new_file('new/file.json') as f:
        f.write('half')
        raise KeyboardInterrupt
    with (monkeypatch.context() as patch, pytest.raises(OSError, match='No space left'),
          new_file('new/file.json') as f):
        patch.setattr(os, 'fsync', mock.Mock(side_effect=OSError(28, 'No space left on device')))
    assert os.listdir('new') == ['file.json'] and read_json('new/file.json') == 1


def test_thresholds_belong_to_their_weights(tiny):
    """Not to later ones, nor to others in the same folder."""
    stored(tiny(), 'out')
    rows = [dict(rule='norm', cache='exact', tau=1.0)]
    write_json(dict(weights=sha256_of('out/ckpt.pt'), exits=rows), 'out/exits.json')
    assert open_run('out')[0].exit_rows[0] == rows[0]
    assert not open_run('out', damping=0.5)[0].exit_rows
    os.rename('out/ckpt.pt', 'out/ckpt_best.pt')
    stored(tiny(seed=1), 'out')
    assert not open_run('out')[0].exit_rows
    assert open_run('out/ckpt_best.pt')[0].exit_rows


def test_a_full_disk_leaves_the_last_good_checkpoint(tiny, monkeypatch):
    """torch's error is a RuntimeError then, the system's an OSError."""
    stored(tiny(), 'out')
    for error in RuntimeError('PytorchStreamWriter failed'), OSError(28, 'No space left on device'):
        with monkeypatch.context() as patch, pytest.raises(OSError, match='out/ckpt.pt'):
            patch.setattr(torch, 'save', mock.Mock(side_effect=error))
            stored(tiny(seed=1), 'out')
    assert os.listdir('out') == ['ckpt.pt']
    check_bits(read_checkpoint('out')['model'], dict(tiny().state_dict()))
