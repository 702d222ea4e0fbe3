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

datasets = pytest.importorskip('datasets')
huggingface_hub = pytest.importorskip('huggingface_hub')


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def text_of(name, split):
    """The documents of a split, decoded from its bin file."""
    train, val, meta = data.load(name)
    encoding = data.get_encoding(meta['tokenizer'])
    return encoding.decode(dict(train=train, val=val)[split].tolist()).split(data.EOT)[:-1]


def test_bytes_encoding_is_utf8():
    encoding = data.get_encoding('bytes')
    text = 'naïve — 中文 🙂\n\t' * 20
    assert encoding.encode_ordinary(text) == list(text.encode()) and encoding.decode(list(text.encode())) == text
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256) and encoding.encode(data.EOT, allowed_special='all') == [256]


def test_pydocs_is_made_on_first_use():
    train, val, meta = data.load('pydocs')
    assert train.dtype == val.dtype == np.dtype('uint16') and len(train) > 1e6 and 0.02 < len(val) / len(train) < 0.1
    assert (meta['tokenizer'], meta['vocab_size']) == ('bytes', 257) and meta['train']['tokens'] == len(train)
    assert meta['val']['tokens'] == meta['val']['bytes'] + meta['val']['documents'] == len(val)
    train_docs, val_docs = (text_of('pydocs', split) for split in ('train', 'val'))
    assert len(val_docs) == meta['val']['documents'] and not set(train_docs) & set(val_docs)
    whole = '\n'.join(train_docs + val_docs)
    assert 'attribute' in whole and 'deque' in whole     # the language reference, and docstrings


def test_one_file_gives_its_last_part():
    text = ''.join(f'line {i}\n' for i in range(2000))
    open('book.txt', 'w').write(text)
    meta = data.make('book', 'book.txt', val_fraction=0.1)
    (train,), (val,) = text_of('book', 'train'), text_of('book', 'val')
    assert train + val == text and abs(len(val) / len(text) - 0.1) < 0.01 and meta['source'] == 'book.txt'


@pytest.mark.parametrize('path', ['folder', 'folder/**/*.txt'])
def test_a_folder_is_split_by_document(path, tmp_path):
    (tmp_path / 'folder' / 'deep').mkdir(parents=True)
    texts = [f'document number {i}' for i in range(10)]
    for i, text in enumerate(texts):
        (tmp_path / 'folder' / ('deep' if i % 2 else '') / f'{i}.txt').write_text(text)
    data.make('own', path, val_fraction=0.2)
    train, val = text_of('own', 'train'), text_of('own', 'val')
    assert sorted(train + val) == texts and len(val) == 2


def parquet(folder, texts, name):
    folder.mkdir(parents=True, exist_ok=True)
    rows = dict(text=texts, id=[f'<urn:uuid:{i}>' for i in range(len(texts))], dump=['CC-MAIN-2024-10'] * len(texts), url=['https://example.org'] * len(texts),
                date=['2024-03-01T00:00:00Z'] * len(texts), file_path=['s3://x'] * len(texts), language=['en'] * len(texts),
                language_score=[0.9] * len(texts), token_count=[3] * len(texts))
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / f'{name}.parquet'))


def test_tokens_of_nanogpt(tmp_path):
    """A folder with train.bin and val.bin, packed or not, is taken as it is."""
    (tmp_path / 'nano').mkdir()
    train, val = [*b'one', 256, *b'two', 256], [*b'three', 256]
    (tmp_path / 'nano/train.bin.xz').write_bytes(lzma.compress(np.array(train, dtype='<u2').tobytes()))
    np.array(val, dtype='<u2').tofile(tmp_path / 'nano/val.bin')
    meta = data.make('nano', 'nano', tokenizer='bytes')
    assert data.load('nano')[0].tolist() == train and text_of('nano', 'val') == ['three']
    assert (meta['train']['documents'], meta['train']['bytes'], meta['val']['tokens']) == (2, 6, 6)
    np.array([300], dtype='<u2').tofile(tmp_path / 'nano/val.bin')
    with pytest.raises(ValueError, match='val.bin cannot be taken .*: token 300 is in it, and bytes has 257: say with --tokenizer'):
        data.make('nano', 'nano', tokenizer='bytes')
    for harm in (b'123', b''):
        (tmp_path / 'nano/val.bin').write_bytes(harm)
        with pytest.raises(ValueError, match='val.bin cannot be taken as uint16 tokens'):
            data.make('nano', 'nano', tokenizer='bytes')
    (tmp_path / 'nano/train.bin.xz').write_bytes((tmp_path / 'nano/train.bin.xz').read_bytes()[:-9])
    with pytest.raises(ValueError, match='train.bin cannot be taken as uint16 tokens'):
        data.make('nano', 'nano', tokenizer='bytes')
    assert data.load('nano')[2] == meta and sorted(os.listdir('data/nano')) == ['meta.json', 'train.bin', 'val.bin']


@pytest.fixture
def web(tmp_path):
    """A folder of FineWeb's layout and schema, in two files -> its texts."""
    texts = [f'Web page {i}. ' * (1 + i % 5) for i in range(2500)]
    parquet(tmp_path / 'web' / 'sample' / '10BT', texts[:1500], '000_00000')
    parquet(tmp_path / 'web' / 'sample' / '10BT', texts[1500:], '001_00000')
    parquet(tmp_path / 'web' / 'data' / 'CC-MAIN-2024-10', texts[:100], '000_00000')
    (tmp_path / 'web' / 'README.md').write_text('---\nconfigs:\n' + ''.join(
        f'- config_name: {name}\n  data_files:\n  - split: train\n    path: {path}/*\n' for name, path in (('sample-10BT', 'sample/10BT'), ('CC-MAIN-2024-10', 'data/CC-MAIN-2024-10'))) + '---\n')
    return texts


def test_fineweb_schema(web):
    meta = data.make('fineweb', 'web', tokenizer='bytes', val_fraction=0.1)
    train, val = text_of('fineweb', 'train'), text_of('fineweb', 'val')
    assert val == web[::10] and train == [text for i, text in enumerate(web) if i % 10] and meta['source'] == 'web sample-10BT'
    data.make('fineweb', 'web', tokenizer='bytes', val_fraction=0.1, config='CC-MAIN-2024-10')
    assert text_of('fineweb', 'val') == web[:100:10] and sorted(os.listdir('data/fineweb')) == ['meta.json', 'train.bin', 'val.bin']
    with pytest.raises(ValueError, match='cannot stream .*CC-MAIN-2013-20.*check --path, --config'):
        data.make('fineweb', 'web', tokenizer='bytes', config='CC-MAIN-2013-20')
    with pytest.raises(ValueError, match='cannot stream .*check .* the network'):
        data.make('fineweb', 'nowhere', tokenizer='bytes')


def test_fineweb_as_a_user_runs_it(web, tmp_path):
    """Enough is enough, at the end of a document; the stream left midway ends the program in order."""
    done = subprocess.run([sys.executable, data.__file__, 'fineweb', '--path=web', '--tokens=1K', '--tokenizer=bytes', '--val_fraction=0.1'], capture_output=True, text=True)
    assert done.returncode == 0 and 'next: python train.py --dataset=fineweb' in done.stdout, done.stderr
    meta = data.load('fineweb')[2]
    assert 1000 <= meta['train']['tokens'] + meta['val']['tokens'] < 1000 + len(web[4]) + 1


class Breaking:
    """A stream of rows that fails after so many, as a lost connection does; where it stands is the real stream's."""

    def __init__(self, rows, after, error):
        self.rows, self.after, self.error = rows, after, error
        self.state_dict, self.load_state_dict, self.revision = rows.state_dict, rows.load_state_dict, None

    def select_columns(self, name):
        return Breaking(self.rows.select_columns(name), self.after, self.error)

    def __iter__(self):
        for i, row in enumerate(self.rows):
            if i == self.after:
                raise self.error
            yield row


@pytest.mark.parametrize('breaks', [[1100], [10, 1200, 1030, 5]])
def test_fineweb_is_taken_up_where_it_broke_off(breaks, web, monkeypatch):
    """No document twice, none lost, the same val split; what stood there stays until all is written."""
    make = lambda **more: data.make('fineweb', 'web', **dict(tokenizer='bytes', val_fraction=0.1) | more)
    make(config='CC-MAIN-2024-10')
    before, real = data.load('fineweb')[2], datasets.load_dataset
    for after, error in zip(breaks, [ConnectionError('reset'), RuntimeError('peer closed'), TimeoutError(), KeyboardInterrupt()]):
        monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **more: Breaking(real(*args, **more), after, error))
        with pytest.raises((ValueError, KeyboardInterrupt)):
            make()
        assert data.load('fineweb')[2] == before
    asked = []
    monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **more: asked.append(more) or real(*args, **more))
    meta = make(revision='0123abc') if len(breaks) == 1 else make()     # another revision is another text: from the beginning
    assert text_of('fineweb', 'val') == web[::10] and text_of('fineweb', 'train') == [text for i, text in enumerate(web) if i % 10]
    assert meta['train']['documents'] == 2250 and sorted(os.listdir('data/fineweb')) == ['meta.json', 'train.bin', 'val.bin']
    assert asked[0]['name'] == 'sample-10BT' and asked[0]['revision'] == ('0123abc' if len(breaks) == 1 else None)


def test_what_is_taken_up_is_not_read_again(web, monkeypatch):
    real, read = datasets.load_dataset, []
    monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **more: Breaking(real(*args, **more), 2100, ConnectionError()))
    with pytest.raises(ValueError, match='what is done is kept'):
        data.make('fineweb', 'web', tokenizer='bytes')
    monkeypatch.setattr(datasets, 'load_dataset', real)
    iterate = data.FineWeb.__iter__
    monkeypatch.setattr(data.FineWeb, '__iter__', lambda self: (read.append(text) or text for text in iterate(self)))
    data.make('fineweb', 'web', tokenizer='bytes')
    assert read == web[2048:]


def test_a_call_for_too_few_tokens_loses_nothing(web):
    """Enough came in the midst of a batch: what follows in the stream is still to be read."""
    with pytest.raises(ValueError, match='too little to train on'):
        data.make('fineweb', 'web', tokenizer='bytes', tokens=5)
    data.make('fineweb', 'web', tokenizer='bytes')
    assert sorted(text_of('fineweb', 'train') + text_of('fineweb', 'val')) == sorted(web)


def test_a_stream_from_the_hub_is_of_one_commit(web, monkeypatch):
    asked, real = [], datasets.load_dataset
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', lambda self, name: SimpleNamespace(sha='0123abc'))
    monkeypatch.setattr(datasets, 'load_dataset', lambda source, **more: asked.append((source, more['revision'])) or real('web', **more))
    assert data.make('fineweb', tokenizer='bytes', tokens='2K', val_fraction=0.1)['source'] == 'HuggingFaceFW/fineweb sample-10BT at 0123abc'
    assert asked == [('HuggingFaceFW/fineweb', '0123abc')]


def test_no_room_on_the_disk(web, monkeypatch):
    """Told before a byte is read; a disk that fills up midway keeps what is done."""
    with monkeypatch.context() as patch, pytest.raises(ValueError, match='needs 0.60 GB and its disk has 0.00 GB free: make room, or take fewer --tokens'):
        patch.setattr(data.shutil, 'disk_usage', lambda folder: SimpleNamespace(free=10 ** 6))
        data.make('fineweb', 'nowhere', tokenizer='bytes')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, limits[1]))      # bytes a file may have
    try:
        with pytest.raises(OSError, match='cannot write data/fineweb .*: make room, then run the command again'):
            data.make('fineweb', 'web', tokenizer='bytes')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.load(open('data/fineweb/progress.json'))['documents'] == 1024
    data.make('fineweb', 'web', tokenizer='bytes')
    assert sorted(text_of('fineweb', 'train') + text_of('fineweb', 'val')) == sorted(web)


def gpt2_is_here():
    try:
        return bool(data.get_encoding('gpt2'))
    except ValueError:
        return False


@pytest.mark.skipif(not gpt2_is_here(), reason='the gpt2 encoding is not on this machine: set TIKTOKEN_CACHE_DIR to a folder that has it')
def test_gpt2_encoding():
    open('book.txt', 'w').write('Hello world, this is a test. ' * 200)
    meta = data.make('book', 'book.txt', tokenizer='gpt2')
    train, _, _ = data.load('book')
    assert train[:5].tolist() == [15496, 995, 11, 428, 318] and train[-1] == 50256 and meta['vocab_size'] == 50257


def test_gpt2_encoding_that_cannot_be_had(tmp_path):
    code = "import data; data.get_encoding('gpt2')"
    env = dict(TIKTOKEN_CACHE_DIR=str(tmp_path / 'empty'), https_proxy='http://127.0.0.1:9', PYTHONPATH=os.path.dirname(data.__file__))
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert 'ValueError' in last and 'TIKTOKEN_CACHE_DIR' in last and '--tokenizer=bytes, which needs nothing' in last


def test_too_many_tokens_for_uint16(monkeypatch):
    monkeypatch.setattr(data.tiktoken, 'get_encoding', lambda name: type('Encoding', (), dict(n_vocab=65537)))
    with pytest.raises(ValueError, match='more than uint16 holds'):
        data.get_encoding('cl100k_base')


def test_windows():
    x, y = data.windows(np.arange(100, dtype='<u2'), [0, 10, 93], 6)
    assert x.tolist()[1] == [10, 11, 12, 13, 14, 15] and torch.equal(y, x + 1) and x.dtype == torch.int64


@pytest.mark.parametrize('path, content, word', [
    ('missing.txt', None, 'no text at'), ('empty.txt', b' \n', 'is empty'), ('latin.txt', b'caf\xe9 au lait', 'not UTF-8 text .byte 3'),
    ('cut.txt', 'é'.encode()[:1], 'not UTF-8')])
def test_bad_text_and_nothing_lost(path, content, word):
    open('good.txt', 'w').write('good text ' * 50)
    before = data.make('own', 'good.txt')
    if content is not None:
        open(path, 'wb').write(content)
    with pytest.raises(ValueError, match=word):
        data.make('own', path)
    assert data.load('own')[2] == before


def test_bad_names_and_numbers():
    open('good.txt', 'w').write('good text ' * 50)
    for call, word in [(lambda: data.make('new'), 'python data.py new --path=TEXT'), (lambda: data.load('new'), 'python data.py new --path=TEXT'),
                       (lambda: data.load('fineweb'), 'python data.py fineweb --tokens=300M'), (lambda: data.get_encoding('gpt9'), 'unknown tokenizer'),
                       (lambda: data.make('../out', 'good.txt'), 'no name for a folder'), (lambda: data.count_tokens('many'), 'no number'), (lambda: data.count_tokens('-3M'), 'no number'),
                       (lambda: data.make('own', 'good.txt', val_fraction=0.9), 'val_fraction')]:
        with pytest.raises(ValueError, match=word):
            call()
    assert data.count_tokens('300M') == 300_000_000 and data.count_tokens('1.5b') == 1_500_000_000 and data.count_tokens(70) == 70


@pytest.mark.parametrize('harm', ['short', 'flipped', 'gone', 'meta', 'no json'])
def test_damaged_data_is_told(harm, tmp_path):
    open('good.txt', 'w').write('good text ' * 50)
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
        meta.write_text(json.dumps(dict(json.loads(meta.read_text()), train={})))
    else:
        meta.write_text('{')
    with pytest.raises(ValueError, match="data set 'own' is damaged: .* make it again"):
        data.load('own')
