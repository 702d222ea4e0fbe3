import json
import lzma
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
from encoding import EOT

datasets = pytest.importorskip('datasets')
huggingface_hub = pytest.importorskip('huggingface_hub')

WHOLE = ['meta.json', 'train.bin', 'val.bin']       # the files of a data set, and no others


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def text_of(name, split):
    """The documents of a split, decoded from its bin file."""
    train, val, meta = data.load(name)
    tokens = train if split == 'train' else val
    encoding = data.get_encoding(meta['tokenizer'])
    return encoding.decode(tokens.tolist()).split(EOT)[:-1]


def good_text():
    with open('good.txt', 'w') as f:
        f.write('good text ' * 50)


def test_pydocs_is_made_on_first_use():
    train, val, meta = data.load('pydocs')
    assert train.dtype == val.dtype == np.dtype('uint16')
    assert len(train) > 1e6 and 0.02 < len(val) / len(train) < 0.1
    assert (meta['tokenizer'], meta['vocab_size']) == ('bytes', 257)
    assert meta['train']['tokens'] == len(train)
    # one token a byte, and one to end each document
    assert meta['val']['tokens'] == meta['val']['bytes'] + meta['val']['documents'] == len(val)

    train_docs, val_docs = text_of('pydocs', 'train'), text_of('pydocs', 'val')
    assert len(val_docs) == meta['val']['documents']
    assert not set(train_docs) & set(val_docs)
    whole = '\n'.join(train_docs + val_docs)
    assert 'attribute' in whole         # the language reference
    assert 'deque' in whole             # docstrings


def test_one_file_gives_its_last_part():
    text = ''.join(f'line {i}\n' for i in range(2000))
    with open('book.txt', 'w') as f:
        f.write(text)
    meta = data.make('book', 'book.txt', val_fraction=0.1)
    (train,), (val,) = text_of('book', 'train'), text_of('book', 'val')
    assert train + val == text
    assert abs(len(val) / len(text) - 0.1) < 0.01
    assert meta['source'] == 'book.txt'


@pytest.mark.parametrize('path', ['folder', 'folder/**/*.txt'])
def test_a_folder_is_split_by_document(path, tmp_path):
    (tmp_path / 'folder' / 'deep').mkdir(parents=True)
    texts = [f'document number {i}' for i in range(10)]
    for i, text in enumerate(texts):
        folder = tmp_path / 'folder' / ('deep' if i % 2 else '')
        (folder / f'{i}.txt').write_text(text)
    data.make('own', path, val_fraction=0.2)
    train, val = text_of('own', 'train'), text_of('own', 'val')
    assert sorted(train + val) == texts
    assert len(val) == 2


def write_tokens(path, ids):
    np.array(ids, dtype='<u2').tofile(path)


def test_tokens_of_nanogpt(tmp_path):
    """A folder with train.bin and val.bin, packed or not, is taken as it is."""
    nano = tmp_path / 'nano'
    nano.mkdir()
    train, val = [*b'one', 256, *b'two', 256], [*b'three', 256]
    packed = lzma.compress(np.array(train, dtype='<u2').tobytes())
    (nano / 'train.bin.xz').write_bytes(packed)
    write_tokens(nano / 'val.bin', val)
    meta = data.make('nano', 'nano', tokenizer='bytes')
    assert data.load('nano')[0].tolist() == train
    assert text_of('nano', 'val') == ['three']
    assert (meta['train']['documents'], meta['train']['bytes'], meta['val']['tokens']) == (2, 6, 6)

    # bad ones are refused, and the good ones stay
    def refused(message):
        with pytest.raises(ValueError, match=message):
            data.make('nano', 'nano', tokenizer='bytes')

    write_tokens(nano / 'val.bin', [300])
    refused('val.bin cannot be taken as uint16 tokens: token 300 is in it, and bytes has 257: '
            'name the right one with --tokenizer')
    for content in (b'123', b''):
        (nano / 'val.bin').write_bytes(content)
        refused('val.bin cannot be taken as uint16 tokens')
    (nano / 'train.bin.xz').write_bytes(packed[:-9])
    refused('train.bin cannot be taken as uint16 tokens')
    assert data.load('nano')[2] == meta
    assert sorted(os.listdir('data/nano')) == WHOLE


def parquet(folder, texts, name):
    """Write a file of FineWeb's schema."""
    folder.mkdir(parents=True, exist_ok=True)
    n = len(texts)
    rows = dict(
        text=texts, id=[f'<urn:uuid:{i}>' for i in range(n)], dump=['CC-MAIN-2024-10'] * n,
        url=['https://example.org'] * n, date=['2024-03-01T00:00:00Z'] * n,
        file_path=['s3://x'] * n, language=['en'] * n, language_score=[0.9] * n,
        token_count=[3] * n)
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / f'{name}.parquet'))


@pytest.fixture
def web(tmp_path):
    """A folder of FineWeb's layout and schema, in two files -> its texts."""
    texts = [f'Web page {i}. ' * (1 + i % 5) for i in range(2500)]
    folders = {'sample-10BT': 'sample/10BT', 'CC-MAIN-2024-10': 'data/CC-MAIN-2024-10'}
    sample, crawl = (tmp_path / 'web' / folder for folder in folders.values())
    parquet(sample, texts[:1500], '000_00000')
    parquet(sample, texts[1500:], '001_00000')
    parquet(crawl, texts[:100], '000_00000')

    lines = ['---', 'configs:']
    for config, folder in folders.items():
        lines += [f'- config_name: {config}', '  data_files:',
                  '  - split: train', f'    path: {folder}/*']
    (tmp_path / 'web' / 'README.md').write_text('\n'.join([*lines, '---', '']))
    return texts


def make_web(**changes):
    """data/fineweb from the folder web; every tenth text is held out."""
    return data.make('fineweb', 'web', **dict(tokenizer='bytes', val_fraction=0.1) | changes)


def check_web(web):
    """data/fineweb has every text once, in order, every tenth of them held out."""
    assert text_of('fineweb', 'val') == web[::10]
    assert text_of('fineweb', 'train') == [text for i, text in enumerate(web) if i % 10]
    assert sorted(os.listdir('data/fineweb')) == WHOLE


def test_fineweb_schema(web):
    meta = make_web()
    check_web(web)
    assert meta['source'] == 'web sample-10BT'
    make_web(config='CC-MAIN-2024-10')
    check_web(web[:100])
    with pytest.raises(ValueError, match='cannot stream .*CC-MAIN-2013-20.*check --path, --config'):
        make_web(config='CC-MAIN-2013-20')
    with pytest.raises(ValueError, match='cannot stream .*check .* the network'):
        data.make('fineweb', 'nowhere', tokenizer='bytes')


def test_fineweb_as_a_user_runs_it(web):
    """It stops after the document that reaches --tokens, and ends in order with the stream open."""
    flags = '--path=web --tokens=1K --tokenizer=bytes --val_fraction=0.1'.split()
    command = [sys.executable, data.__file__, 'fineweb', *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'next: python train.py --dataset=fineweb' in done.stdout
    meta = data.load('fineweb')[2]
    most = len(web[4]) + 1              # tokens in a longest document
    assert 1000 <= meta['train']['tokens'] + meta['val']['tokens'] < 1000 + most


class Breaking:
    """The real stream's rows, with an error after so many, as when a connection is lost."""

    def __init__(self, rows, after, error):
        self.rows, self.after, self.error = rows, after, error
        self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict

    def select_columns(self, name):
        return Breaking(self.rows.select_columns(name), self.after, self.error)

    def __iter__(self):
        for i, row in enumerate(self.rows):
            if i == self.after:
                raise self.error
            yield row


@pytest.fixture
def breaking(monkeypatch):
    """
    breaking(after, error): from now on streams break off after so many rows; breaking(): no longer.

    breaking.calls: the arguments of each call of load_dataset.
    """
    real = datasets.load_dataset

    def call(after=None, error=None):
        def load_dataset(*args, **kwargs):
            call.calls.append(kwargs)
            rows = real(*args, **kwargs)
            return rows if error is None else Breaking(rows, after, error)
        monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    call.calls = []
    return call


@pytest.fixture
def texts_read(monkeypatch):
    """A list of the texts that came out of a stream so far."""
    texts = []
    iterate = data.FineWeb.__iter__

    def recorded(self):
        for text in iterate(self):
            texts.append(text)
            yield text

    monkeypatch.setattr(data.FineWeb, '__iter__', recorded)
    return texts


@pytest.mark.parametrize('breaks', [
    [(1100, ConnectionError('reset'))],
    [(10, ConnectionError('reset')), (1200, RuntimeError('peer closed')),
     (1030, TimeoutError()), (5, KeyboardInterrupt())],
])
def test_a_stream_goes_on_where_it_broke_off(breaks, web, breaking):
    """No document twice, none lost, the same val split; the old files stay until all is written."""
    make_web(config='CC-MAIN-2024-10')
    before = data.load('fineweb')[2]
    for after, error in breaks:
        breaking(after, error)
        with pytest.raises((ValueError, KeyboardInterrupt)):
            make_web()
        assert data.load('fineweb')[2] == before
    breaking()
    meta = make_web()
    check_web(web)
    assert meta['train']['documents'] == 2250


def test_another_revision_is_another_text(web, breaking, texts_read):
    """It is read from the beginning, not from where a stream of the newest broke off."""
    breaking(1100, ConnectionError('reset'))
    with pytest.raises(ValueError):
        make_web()
    breaking()
    texts_read.clear()
    make_web(revision='0123abc')
    check_web(web)
    assert texts_read == web
    assert [call['name'] for call in breaking.calls] == ['sample-10BT'] * 2
    assert [call['revision'] for call in breaking.calls] == [None, '0123abc']


def test_what_is_done_is_not_read_again(web, breaking, texts_read):
    breaking(2100, ConnectionError())
    with pytest.raises(ValueError, match='what is done is kept'):
        make_web()
    breaking()
    texts_read.clear()
    make_web()
    assert texts_read == web[2048:]     # two batches of 1024 were done


def test_a_call_for_too_few_tokens_loses_nothing(web):
    """It stops in the midst of a batch: what follows in the stream is still to be read."""
    with pytest.raises(ValueError, match='too little to train on'):
        make_web(tokens=5)
    make_web()
    check_web(web)


def test_a_stream_from_the_hub_is_of_one_commit(web, monkeypatch):
    asked = []
    real = datasets.load_dataset

    def load_dataset(source, **kwargs):
        asked.append((source, kwargs['revision']))
        return real('web', **kwargs)

    newest = SimpleNamespace(sha='0123abc')
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', lambda self, name: newest)
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    meta = data.make('fineweb', tokenizer='bytes', tokens='2K', val_fraction=0.1)
    assert meta['source'] == 'HuggingFaceFW/fineweb sample-10BT at 0123abc'
    assert asked == [('HuggingFaceFW/fineweb', '0123abc')]


def test_no_room_on_the_disk(web, monkeypatch):
    """Refused before a byte is read; and if the disk fills up midway, what is done is kept."""
    message = 'needs 0.60 GB and its disk has 0.00 GB free: make room, or take fewer --tokens'
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=message):
        patch.setattr(data.shutil, 'disk_usage', lambda folder: SimpleNamespace(free=10 ** 6))
        data.make('fineweb', 'nowhere', tokenizer='bytes')

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, hard))       # bytes that a file may have
    try:
        message = 'cannot write data/fineweb .*: make room, then run the command again'
        with pytest.raises(OSError, match=message):
            make_web()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with open('data/fineweb/progress.json') as f:
        assert json.load(f)['documents'] == 1024
    make_web()
    check_web(web)


def test_windows():
    x, y = data.windows(np.arange(100, dtype='<u2'), [0, 10, 93], 6)
    assert x.tolist()[1] == [10, 11, 12, 13, 14, 15]
    assert torch.equal(y, x + 1)
    assert x.dtype == torch.int64


@pytest.mark.parametrize('path, content, words', [
    ('missing.txt', None, 'no text at'),
    ('empty.txt', b' \n', 'is empty'),
    ('latin.txt', b'caf\xe9 au lait', 'not UTF-8 text .byte 3'),
    ('cut.txt', 'é'.encode()[:1], 'not UTF-8'),
])
def test_bad_text_and_nothing_lost(path, content, words):
    good_text()
    before = data.make('own', 'good.txt')
    if content is not None:
        with open(path, 'wb') as f:
            f.write(content)
    with pytest.raises(ValueError, match=words):
        data.make('own', path)
    assert data.load('own')[2] == before


@pytest.mark.parametrize('function, args, words', [
    (data.make, ('new',), 'python data.py new --path=TEXT'),
    (data.load, ('new',), 'python data.py new --path=TEXT'),
    (data.load, ('fineweb',), 'python data.py fineweb --tokens=300M'),
    (data.get_encoding, ('gpt9',), 'unknown tokenizer'),
    (data.make, ('../out', 'good.txt'), 'cannot be the name of a folder'),
    (data.make, ('own', 'good.txt', 'bytes', '300M', 0.9), 'val_fraction'),
    (data.count_tokens, ('many',), 'not a number'),
    (data.count_tokens, ('-3M',), 'not a number'),
])
def test_bad_names_and_numbers(function, args, words):
    good_text()
    with pytest.raises(ValueError, match=words):
        function(*args)


def test_count_tokens():
    assert data.count_tokens('300M') == 300_000_000
    assert data.count_tokens('1.5b') == 1_500_000_000
    assert data.count_tokens(70) == 70


@pytest.mark.parametrize('harm', ['short', 'flipped', 'gone', 'meta', 'no json'])
def test_damaged_data_is_refused(harm, tmp_path):
    good_text()
    data.make('own', 'good.txt')
    train, meta = tmp_path / 'data/own/train.bin', tmp_path / 'data/own/meta.json'
    content = train.read_bytes()
    if harm == 'short':
        train.write_bytes(content[:-2])
    elif harm == 'flipped':
        train.write_bytes(content[:-4] + b'\0\0' + content[-2:])
    elif harm == 'gone':
        train.unlink()
    elif harm == 'meta':
        meta.write_text(json.dumps(json.loads(meta.read_text()) | dict(train={})))
    else:
        meta.write_text('{')
    with pytest.raises(ValueError, match="data set 'own' is damaged: .* make it again"):
        data.load('own')
