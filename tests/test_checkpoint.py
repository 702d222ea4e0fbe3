"""Checkpoints: what is in them, which are refused, and that a good one is always there."""
import os
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import test_train
import torch
from conftest import ROOT, TINY, differences, finished, refused, saved, small_disk

import tasks
from common import checkpoint, resume, thresholds
from common.checkpoint import load_checkpoint, open_run, save_checkpoint
from common.files import new_file, read_json, write_json
from common.run_folder import check_free, find_run
from exits import make_exit
from model import GPT

here = test_train.here      # each test in a folder with the data


class Code:
    def __reduce__(self):
        return os.mkdir, ('code-was-run',)


def test_load_checkpoint(tiny, idx):
    model = tiny()
    parts = dict(model=model.state_dict(), model_args=vars(model.config))
    good = parts | dict(model_class='model:GPT', config={}, iter_num=3, tokenizer='bytes')
    torch.save(good, 'good.pt')
    loaded, dictionary = load_checkpoint('good.pt')
    assert not loaded.training and torch.equal(loaded(idx)[0], model(idx)[0])
    assert dictionary.keys() == good.keys() | {'folder', 'damping_of_run'}
    assert dictionary['folder'] == '.'

    # what is no checkpoint, or not a whole one
    start = Path('good.pt').read_bytes()[:5000]
    for content in (start, b'no checkpoint', b'', pickle.dumps(Code()), [1, 2], parts,
                    parts | dict(model={}), good | dict(config=Code()), good | dict(config=None),
                    good | dict(own_files=3), ' '.join(good)):
        if isinstance(content, bytes):
            Path('bad.pt').write_bytes(content)
        else:
            torch.save(content, 'bad.pt')
        with pytest.raises(ValueError, match='not a whole checkpoint'):
            load_checkpoint('bad.pt')
    assert not os.path.exists('code-was-run')
    # weights of a class that has changed since: which do not match
    others = dict(parts['model'], strange=torch.zeros(1))
    del others['ln_f.weight']
    torch.save(good | dict(model=others), 'changed.pt')
    with pytest.raises(ValueError, match='(?s)Missing.*"ln_f.weight".*Unexpected.*"strange"'):
        load_checkpoint('changed.pt')
    # a part of one's own: the file is whole, and one has to say where the part is
    torch.save(good | dict(model_args=parts['model_args'] | dict(injection='mine')), 'mine.pt')
    with pytest.raises(ValueError, match="does not fit this program .*not 'mine'.*sample.py mine"):
        load_checkpoint('mine.pt')


def test_only_what_a_file_can_cause_is_blamed_on_it(tiny, monkeypatch):
    """An installation may be broken, too, or a folder that it needs not be there."""
    model = tiny()
    torch.save(dict(model=model.state_dict(), model_args=vars(model.config), config={}, iter_num=3,
                    model_class='model:GPT', tokenizer='bytes'), 'good.pt')
    errors = [FileNotFoundError(2, 'No such file or directory', '/proc/inductor'),
              ImportError('libtorch.so'), RuntimeError("can't allocate memory")]
    for error in errors:
        with monkeypatch.context() as patch, pytest.raises(type(error)) as found:
            patch.setattr(torch, 'load', mock.Mock(side_effect=error))
            load_checkpoint('good.pt')
        assert found.value is error
    with monkeypatch.context() as patch, pytest.raises(OSError, match='/proc/inductor'):
        patch.setattr(GPT, 'build', mock.Mock(side_effect=errors[0]))
        load_checkpoint('good.pt')


@pytest.mark.parametrize('folder, words', [
    ('out', 'train one first with python train.py$'),
    ('out-calc', r'train one first with python train.py config/calc.py \(see its first lines\)$'),
    ('out-mine', 'with python train.py --out_dir=out-mine$'),
    ('out-old', "rename 'out-old/ckpt.old.pt', or python train.py --resume --out_dir=out-old")])
def test_a_missing_checkpoint_says_how_to_get_one(folder, words):
    os.mkdir('out-old')
    Path('out-old/ckpt.old.pt').touch()
    with pytest.raises(ValueError, match=f"no checkpoint at '{folder}/ckpt.pt': .*{words}"):
        load_checkpoint(f'{folder}/ckpt.pt')


def test_what_to_do_if_a_checkpoint_cannot_be_written():
    """Room helps on a full disk only."""
    with pytest.raises(ValueError, match="cannot write '/proc/no/ckpt.pt'") as error:
        save_checkpoint({}, '/proc/no/ckpt.pt')
    assert 'make room' not in str(error.value)


def test_a_longer_context(tiny, idx):
    """Rotary positions are computed, so 16 tokens of training do not bound a model."""
    for pos in 'rotary', 'learned':
        model = tiny(pos=pos, n_embd=32)
        os.makedirs(pos)
        torch.save(dict(model=model.state_dict(), model_args=vars(model.config), config={},
                        model_class='model:GPT', iter_num=3, tokenizer='bytes'), f'{pos}/ckpt.pt')
    run = open_run('rotary', length=48)
    assert run.checkpoint['model_args']['block_size'] == run.model.config.block_size == 48
    long = idx.reshape(1, 48)
    logits, _ = run.model(long, n_loop=3)
    # 16 tokens alone are what they were
    trained, _ = open_run('rotary').model(long[:, :16], n_loop=3)
    torch.testing.assert_close(logits[:, :16], trained, rtol=0, atol=1e-5)
    assert open_run('learned', length=16).model.config.block_size == 16
    for length in 48, 8:
        with pytest.raises(ValueError, match=f'learned positions for 16 tokens.*{length}.*rotary'):
            open_run('learned', length=length)
    with pytest.raises(ValueError, match='length must be at least 1 token, not 0'):
        open_run('rotary', length=0)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(whole):
    """Which may be older than a knob of the model: that has its default then."""
    shutil.copytree(whole, 'out')
    before = torch.load('out/ckpt.old.pt', weights_only=True)
    del before['config']['rope_base'], before['model_args']['rope_base']
    torch.save(before, 'out/ckpt.old.pt')
    content = Path('out/ckpt.pt').read_bytes()
    Path('out/ckpt.pt').write_bytes(content[:len(content) // 2])
    printed = finished('--resume')
    assert 'resuming out/ckpt.old.pt' in printed and 'from iteration 10' in printed
    assert load_checkpoint('out/ckpt.old.pt')[1]['iter_num'] == 10
    assert differences(whole, 'out') == []
    # and if none is whole
    for name in ('ckpt.pt', 'ckpt.old.pt'):
        Path('out', name).write_bytes(b'no checkpoint')
    with pytest.raises(ValueError, match="'out/ckpt.old.pt' is not a whole checkpoint"):
        resume.last_checkpoint('out')


def test_the_pretrained_models_are_found_from_any_folder(capsys, monkeypatch):
    """Without --out_dir it is out/ if that holds a checkpoint; results never go to pretrained/."""
    pretrained = os.path.join(ROOT, 'pretrained')
    assert find_run(None) == find_run('pretrained/text') == (f'{pretrained}/text', 'out/text')
    assert find_run('pretrained/calc/') == (f'{pretrained}/calc/', 'out/calc')
    assert find_run('nowhere') == ('nowhere', 'nowhere')
    os.mkdir('foreign')
    with monkeypatch.context() as patch:        # a folder in which nobody may write
        patch.setattr(os, 'access', lambda path, mode: path != 'foreign')
        assert find_run('foreign') == ('foreign', 'out/foreign')
    assert 'pretrained/text is read-only' in refused('--out_dir=pretrained/text')
    os.mkdir('out')
    Path('out', 'ckpt.pt').touch()
    assert find_run(None) == ('out', 'out')
    assert capsys.readouterr().out.splitlines() == ['model: pretrained/text/ckpt.pt',
                                                    'model: out/ckpt.pt']


def test_the_pretrained_models_have_learned():
    text, calc = (load_checkpoint(os.path.join(ROOT, 'pretrained', name, 'ckpt.pt'))[0]
                  for name in ('text', 'calc'))
    idx = torch.tensor([[*b'    Returns a new tensor with the same data.\n'[:48]]])
    _, loss = text(idx[:, :-1], idx[:, 1:])
    assert loss < 1.5       # nats per byte
    x, y = tasks.Problems('calc', n_problems=64).held_out(range(64), 24)
    logits, _ = calc(x, y, n_loop=24)
    assert (logits.argmax(-1) == y).float().mean() > 0.99


@pytest.fixture
def stored(tiny):
    """A checkpoint to which thresholds belong."""
    return dict(model=tiny().state_dict())


def key_of(name, cache='latest', ring=8, wave=None, **parts):
    return thresholds.threshold_key(make_exit(name, **parts), cache, ring, wave)


def test_thresholds_belong_to_the_weights_and_the_rule(stored):
    thresholds.save_thresholds('out', stored, [
        key_of('kl') | dict(tau=0.9), key_of('accel') | dict(tau=None),
        key_of('kl', 'ring', 4) | dict(tau=0.25, kept=False), key_of('kl') | dict(tau=0.5)])
    assert thresholds.calibrated('out', stored, key_of('kl')) == (0.5, True)        # the last one
    assert thresholds.calibrated('out', stored, key_of('kl', 'ring', 4)) == (0.25, False)
    # calibration has found none, or has not looked
    assert thresholds.calibrated('out', stored, key_of('accel')).tau is None
    for other in (key_of('norm'), key_of('kl', 'exact'), key_of('kl', hits=2),
                  key_of('kl', keep=False), key_of('kl', wake=True), key_of('kl', 'ring', 8),
                  key_of('kl', wave=[8, 1])):
        assert thresholds.calibrated('out', stored, other) is None
    assert thresholds.calibrated('nowhere', stored, key_of('kl')) is None
    stored['model']['lm_head.weight'][0, 0] += 1e-3         # other weights
    assert thresholds.calibrated('out', stored, key_of('kl')) is None


def test_an_earlier_file_of_thresholds_is_refused(stored):
    """Rows had `past` in place of `wake`."""
    row = dict(rule='kl', hits=1, keep=True, cache='exact', past=True, ring=None, wave=None, tau=1)
    write_json(dict(weights=thresholds.hash_of_weights(stored), exits=[row]), 'old/exits.json')
    with pytest.raises(ValueError, match=r"a row has no 'wake'.*make it again"):
        thresholds.calibrated('old', stored, key_of('kl', 'exact'))


@pytest.mark.parametrize('change', [
    dict(tau='10'), dict(tau=[10]), dict(tau=float('nan')), dict(tau=-1), dict(tau=True),
    dict(tau={}), dict(tau=10 ** 400), dict(kept='no'), dict(kept=None)], ids=str)
def test_thresholds_edited_by_hand_are_refused(stored, change):
    rows = [key_of('kl') | dict(tau=1.0), key_of('norm') | dict(tau=1.0) | change]
    write_json(dict(weights=thresholds.hash_of_weights(stored), exits=rows), 'edited/exits.json')
    with pytest.raises(ValueError, match=r"cannot read 'edited/exits.json'.*make it again"):
        thresholds.calibrated('edited', stored, key_of('kl'))


@pytest.mark.parametrize('text', [
    '{"weights"', '', '[]', 'null', '{}', '{"weights": 1, "exits": null}',
    '{"weights": 1, "exits": [1]}', '{"weights": 1, "exits": [{}]}',
    '{"weights": 1, "exits": [{"rule": "kl", "tau": 1}]}', b'\xff'], ids=str)
def test_a_file_that_holds_no_thresholds_is_refused(stored, text):
    Path('other').mkdir(exist_ok=True)
    Path('other/exits.json').write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"cannot read 'other/exits.json'.*make it again"):
        thresholds.calibrated('other', stored, key_of('kl'))


def test_the_thresholds_that_are_shipped():
    """They belong to the weights beside them, and each of them keeps its promise."""
    for name in 'text', 'calc':
        folder = f'{ROOT}/pretrained/{name}'
        rows = thresholds.thresholds_of(folder, load_checkpoint(f'{folder}/ckpt.pt')[1])
        assert rows and all(row['kept'] == (row['cost'] <= row['nats']) for row in rows
                            if row['tau'] is not None and not row['wave'])
        assert {row['rule'] for row in rows} >= {'norm_rel', 'kl', 'accel'}


def test_a_file_is_whole_or_as_it_was(monkeypatch):
    """Also if the block is stopped, or if the disk is full at the very end."""
    write_json(1, 'new/file.json')
    with pytest.raises(KeyboardInterrupt), new_file('new/file.json') as f:
        f.write('half')
        raise KeyboardInterrupt
    with (monkeypatch.context() as patch, pytest.raises(OSError, match='No space left'),
          new_file('new/file.json', keep_old=True) as f):
        patch.setattr(os, 'fsync', mock.Mock(side_effect=OSError(28, 'No space left on device')))
    assert os.listdir('new') == ['file.json'] and Path('new/file.json').read_text() == '1'
    # a link stays one, and the file keeps its mode
    os.chmod('new/file.json', 0o600)
    os.symlink('new/file.json', 'link.json')
    write_json(2, 'link.json')
    assert os.path.islink('link.json') and Path('new/file.json').read_text() == '2'
    assert os.stat('new/file.json').st_mode & 0o777 == 0o600


@pytest.mark.parametrize('text', ['', '{"tokenizer": "by', '[1', '5'])
def test_a_damaged_json_file_is_an_error_and_a_missing_one_is_empty(text):
    assert read_json('meta.json') == {}
    Path('meta.json').write_text(text)
    with pytest.raises(ValueError, match="'meta.json' is damaged"):
        read_json('meta.json')


def test_the_folder_of_a_run_says_how_to_continue_it():
    """With its --out_dir; and a converted model, which has no log.csv, cannot be continued."""
    for folder in 'out', 'my run':
        os.mkdir(folder)
        Path(folder, 'ckpt.pt').touch()
        with pytest.raises(ValueError, match='--overwrite starts over, or give another'):
            check_free(folder, False)
        Path(folder, 'log.csv').touch()
    with pytest.raises(ValueError, match='python train.py --resume continues it'):
        check_free('out', False)
    with pytest.raises(ValueError, match="train.py --resume --out_dir='my run' continues it"):
        check_free('my run', False)


def test_a_checkpoint_may_be_called_gpt2():
    """Only where there is no such file does the name mean nanoGPT's --init_from=gpt2."""
    knobs = dict(out_dir='out', init_from='gpt2.pt', resume=False, overwrite=False,
                 model_class=None)
    with pytest.raises(ValueError, match='a GPT-2 has no groups'):
        resume.where_to_start(knobs, set(), {})
    Path('gpt2.pt').write_text('no checkpoint')
    with pytest.raises(ValueError, match='not a whole checkpoint'):
        resume.where_to_start(knobs, set(), {})


def test_a_link_stays_one_and_the_file_before_is_another():
    os.makedirs('big')
    Path('big/ckpt.pt').write_text('first')
    os.symlink('big/ckpt.pt', 'ckpt.pt')
    for text in 'second', 'third':
        with new_file('ckpt.pt', keep_old=True) as f:
            f.write(text)
    assert os.path.islink('ckpt.pt') and Path('big/ckpt.pt').read_text() == 'third'
    assert not os.path.islink('ckpt.old.pt') and Path('ckpt.old.pt').read_text() == 'second'


def test_a_full_disk_leaves_the_last_good_checkpoint(whole, monkeypatch):
    def no_room_from_iteration_10(dictionary, path, **more):
        with small_disk(20_000) if dictionary['iter_num'] >= 10 else nullcontext():
            save_checkpoint(dictionary, path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, 'save_checkpoint', no_room_from_iteration_10)
        line = refused(*TINY)
    assert "cannot write 'out/ckpt.pt'" in line
    assert 'make room, then continue with --resume' in line
    assert saved('out')['iter_num'] == 5
    assert not os.path.exists('out/ckpt.pt.tmp')

    finished('--resume')
    assert differences(whole, 'out') == []
