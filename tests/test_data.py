"""From a text to tokens on disk, and back to batches."""
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import files_in, make_fineweb
from tokenizers import Tokenizer, decoders, models, normalizers, processors

import data
from common.encoding import EOT, TokenizerJson, train_bpe

TORCHDOCS = '649d3f8679f5bc01652a8b13a57e06a6a07282007bbc1ca23fab5a27cc71db50'
ADDRESS = 'the quick brown fox jumps over the lazy dog'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def documents_of(name, split):
    """The documents of a split, decoded from its bin file."""
    text = data.open_data(name)
    encoding = data.open_encoding(text.tokenizer, f'data/{name}')
    return encoding.decode(getattr(text, split).tolist()).split(EOT)[:-1]


def make_good():
    """A small data set `own`, of one file with 500 bytes -> its meta."""
    Path('good.txt').write_text(''.join(f'line {i:03}\n' for i in range(50)) + 50 * '-')
    return data.make('own', 'good.txt')


# encodings ----------------------------------------------------------------------------------------

def llama_like(template=None):
    """A byte-level BPE with the special tokens of a Llama -> its tokenizer of the library."""
    tokenizer = train_bpe([ADDRESS] * 9, 270).tokenizer
    tokenizer.add_special_tokens(['<s>', '</s>', '<|im_end|>'])
    if template:
        ends = [(end, tokenizer.token_to_id(end)) for end in ('<s>', '</s>')]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    return tokenizer


def sentencepiece_like():
    """A tokenizer of the other kind: blanks are letters, and rare letters fall back on bytes."""
    in_bytes = [f'<0x{byte:02X}>' for byte in range(256)]
    pieces = ['<unk>', '<s>', '</s>', *in_bytes, *'abc\u2581', 'ab']
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [('a', 'b')],
                                     byte_fallback=True, unk_token='<unk>'))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend('\u2581'),
                                                 normalizers.Replace(' ', '\u2581')])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace('\u2581', ' '), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(' ', 1, 0)])
    tokenizer.add_special_tokens(['<s>', '</s>'])
    return tokenizer


@pytest.mark.parametrize('tokenizer', [None, llama_like, sentencepiece_like])
def test_text_is_text(tokenizer):
    """It comes back from its tokens, and the name of a special token is letters."""
    encoding = TokenizerJson(tokenizer().to_str()) if tokenizer else data.open_encoding('bytes')
    everything = ''.join(map(chr, range(256))) + '\u0800日本\U0010ffff'
    for text in f'a {EOT} b', '<ul><s>ten</s></ul>', EOT, f'{ADDRESS}, größer\n', everything:
        tokens = encoding.encode(text)
        assert encoding.decode(tokens) == text
        assert not {*tokens} & {*encoding.ends} and max(tokens) < encoding.n_vocab
    assert encoding.decode([encoding.eot_token]) in (EOT, '</s>')


def test_a_tokenizer_json_encodes_a_whole_text():
    """A token in front of each text is part of it; an end is not, since a document gets one."""
    plain = TokenizerJson(llama_like().to_str()).encode(ADDRESS)
    for template in '<s> $A', '<s> $A </s>', '$A </s>':
        tokenizer = llama_like(template)
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=64)
        begin = [tokenizer.token_to_id('<s>')] if '<s>' in template else []
        encoding = TokenizerJson(tokenizer.to_str())
        assert encoding.encode(ADDRESS) == begin + plain and encoding.encode('') == begin


def test_a_bpe_is_trained_on_the_training_documents_alone():
    """A file that is held out is not trained on, and a name says nothing."""
    os.mkdir('texts')
    words = dict(a='held-out words ' * 50, b='größer than the fox ' * 50, validation='the end')
    for name, text in words.items():
        Path(f'texts/{name}.txt').write_text(text)
    meta = data.make('own', 'texts', 'texts/a.txt', bpe=300)
    encoding = data.open_encoding(meta['tokenizer'], 'data/own')
    assert meta['vocab_size'] == encoding.n_vocab <= 300
    assert documents_of('own', 'train') == [words['b'], words['validation']]
    assert documents_of('own', 'val') == [words['a']]
    pieces = [encoding.decode([token]) for token in range(encoding.n_vocab)]
    assert ' fox' in pieces and ' words' not in pieces


def test_a_tokenizer_is_what_is_in_its_file():
    """Not where it lies: a copy elsewhere is the same, another one of the same path is refused."""
    Path('own.txt').write_text(EOT.join([ADDRESS * 50] * 6))
    meta = data.make('own', 'own.txt', bpe=300)
    shutil.copytree('data/own', 'moved')
    data.make('again', 'own.txt', tokenizer='moved/tokenizer.json')
    data.open_data('again', meta['tokenizer'], meta['vocab_size'])
    data.make('other', 'own.txt', bpe=260)
    with pytest.raises(ValueError):
        data.open_data('other', meta['tokenizer'], meta['vocab_size'])
    shutil.copy('data/other/tokenizer.json', 'data/own/tokenizer.json')
    with pytest.raises(ValueError):
        data.open_data('own')


@pytest.mark.parametrize('name, word', [
    ('gpt9', 'network'), ('missing.json', 'missing'), ('endless.json', 'end-of-text'),
    ('empty.json', 'empty'), ('mine:p=3', 'task'), (None, 'tokenizer')])
def test_encodings_that_are_unavailable(name, word):
    Tokenizer(models.BPE({'a': 0}, [])).save('endless.json')
    Path('empty.json').write_text('{}')
    with pytest.raises(ValueError, match=word):
        data.open_encoding(name)


# text on this machine -----------------------------------------------------------------------------

def test_torchdocs_is_made_on_first_use():
    text = data.open_data('torchdocs')
    assert (text.tokenizer, text.vocab_size, text.sha256) == ('bytes', 257, TORCHDOCS)
    assert [(getattr(text, split) == 256).sum() for split in ('train', 'val')] == [1481, 32]


def test_files_are_read_in_order_of_name():
    """Those of a folder, or one, in which an end-of-text ends a document."""
    os.makedirs('run[1]/deep')      # a folder's name is no pattern
    for name in 'b', 'deep/c', 'a':     # a byte order mark is no text, and line ends are \n
        path = Path(f'run[1]/{name}.txt')
        path.write_text(f'text {name}\n', encoding='utf-8-sig', newline='\r\n')
    read = ['text a\n', 'text b\n', 'text deep/c\n']
    Path('one.txt').write_text(EOT.join(['', *read, ' \n']))
    for path in 'run[1]', 'one.txt':
        assert data.documents_of(path) == read


@pytest.mark.parametrize('lengths, train, val', [
    ([100], [95], [5]),                                     # a document alone
    ([134_400, 77], [127_753], [6_647, 77]),                # a book and a note
    ([10] * 10, [10] * 9, [10]),                            # each has a tenth: whole documents
    ([60] + [4] * 10, [60] + [4] * 9, [4]),                 # the long one is elsewhere
    ([9] * 10 + [4, 6], [9] * 10 + [4], [6])])              # 94% are nearer than 90% and 100%
def test_the_last_twentieth_is_held_out(lengths, train, val):
    """At the border between documents nearest to it, or within one that has more than a tenth."""
    found = data.hold_out([chr(65 + i % 26) * n for i, n in enumerate(lengths)])
    assert [split for split, _ in found] == ['train'] * len(train) + ['val'] * len(val)
    assert [len(text) for _, text in found] == train + val


def test_tokens_of_nanogpt_are_read_in_place():
    """They are gpt2's; its letters are refused."""
    os.makedirs('data/openwebtext')
    for split in ('train', 'val'):
        np.array([464, 3139, 50256], dtype='<u2').tofile(f'data/openwebtext/{split}.bin')
    text = data.open_data('openwebtext', 'gpt2', 50304)
    assert text.train.tolist() == [464, 3139, 50256]
    with pytest.raises(ValueError):
        data.make('openwebtext', 'own.txt')
    Path('data/openwebtext/meta.pkl').touch()
    with pytest.raises(ValueError, match='meta.pkl'):
        data.open_data('openwebtext')


# FineWeb ------------------------------------------------------------------------------------------

@pytest.fixture
def web():
    """A folder `web` of FineWeb's layout, in two files -> those of its texts that are not empty."""
    rows = [None if i % 7 == 3 else f'Web page {i}. ' * (1 + i % 5) for i in range(2500)]
    rows[0] *= 60
    make_fineweb('web', rows[:1500], rows[1500:])
    return [row for row in rows if row]


def test_fineweb(web):
    meta = data.make('fineweb', 'web', tokenizer='bytes')
    assert documents_of('fineweb', 'val') == [web[0], web[2000]]
    assert documents_of('fineweb', 'train') == web[1:2000] + web[2001:]
    assert meta['complete']
    data.make('fineweb', 'web', tokenizer='bytes', tokens=1000, overwrite=True)
    lengths = np.cumsum([len(text) + 1 for text in web])
    assert sum(data.tokens_in('data/fineweb').values()) == lengths[lengths >= 1000][0]


@pytest.mark.parametrize('error, raised', [
    (ConnectionError('reset'), ValueError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_stream_that_breaks_leaves_what_was_written(web, monkeypatch, error, raised):
    """Where nothing is yet; and what is no window is not kept."""
    import datasets
    iterate = datasets.IterableDataset.__iter__

    def broken_after(n):
        """The tokens in data/fineweb after a stream that breaks there; no other folder is left."""
        def breaks(stream):
            for number, row in enumerate(iterate(stream)):
                if number == n:
                    raise error
                yield row
        with monkeypatch.context() as patch, pytest.raises(raised):
            patch.setattr(datasets.IterableDataset, '__iter__', breaks)
            data.make('fineweb', 'web', tokenizer='bytes', overwrite=True)
        assert os.listdir('data') in ([], ['fineweb'])
        return len(data.open_data('fineweb').train) if os.listdir('data') else 0

    assert broken_after(15) == 0
    n = broken_after(1300)
    train = documents_of('fineweb', 'train')
    assert train == web[1:1 + len(train)] and 1000 < len(train) < 1300
    assert n == broken_after(1400)
    assert data.make('fineweb', 'web', tokenizer='bytes')['complete'] is False      # a second call
    assert 'only a part' in data.open_data('fineweb').description


def test_a_full_disk_leaves_what_was_written(web):
    """Of FineWeb alone, since other text is made anew in seconds."""
    Path('small.txt').write_text(ADDRESS * 20)
    Path('large.txt').write_text(ADDRESS * 900)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_001, limits[1]))      # half a token
    try:
        with pytest.raises(OSError):
            data.make('fineweb', 'web', tokenizer='bytes')
        with pytest.raises(OSError):
            data.make('own', 'small.txt', 'large.txt')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = data.open_data('fineweb')
    assert len(text.train) == 10_000 and 'only a part' in text.description
    assert EOT.join(web[1:]).startswith(data.open_encoding('bytes').decode(text.train.tolist()))
    assert os.listdir('data') == ['fineweb']


# data/NAME is whole, and nobody loses anything ----------------------------------------------------

def test_the_same_call_again_keeps_what_is_there():
    meta = make_good()
    before = files_in('data')
    assert make_good() == meta
    with pytest.raises(ValueError):
        data.make('own', 'good.txt', bpe=300)
    assert files_in('data') == before
    assert data.make('own', 'good.txt', bpe=300, overwrite=True)['tokenizer'] != 'bytes'
    data.make('own', 'good.txt', overwrite=True)
    assert files_in('data') == before       # without a tokenizer.json


def test_two_first_calls_at_once(monkeypatch):
    """Who finds the folder there after its own work takes it."""
    write = data.write

    def with_another_call(*args):
        monkeypatch.setattr(data, 'write', write)
        make_good()
        write(*args)
    monkeypatch.setattr(data, 'write', with_another_call)
    Path('good.txt').write_text(ADDRESS * 99)
    assert data.make('own', 'good.txt') == data.read_meta('data/own')
    assert documents_of('own', 'val') == [25 * '-'] and os.listdir('data') == ['own']


@pytest.mark.parametrize('name, path, knobs', [
    ('own', 'missing.txt', {}), ('own', 'empty.txt', {}), ('own', 'a.txt', {}),
    ('own', 'latin.txt', {}), ('own', None, {}), ('own', 'good.txt', dict(tokenizer='x')),
    ('own', 'good.txt', dict(tokenizer='large.json')),
    ('own', 'good.txt', dict(bpe=300, tokenizer='bytes')),
    ('own', 'good.txt', dict(val_path='copy.txt')), ('own', 'good.txt', dict(tokens=1e6)),
    ('torchdocs', 'good.txt', {}), ('calc', 'good.txt', {}),
    ('fineweb', 'good.txt', dict(bpe=300)), ('torchdocs', None, dict(val_path='good.txt')),
    ('../out', 'good.txt', {}), ('mine', 'data/mine/input.txt', {})], ids=str)
def test_bad_input_and_nothing_lost(name, path, knobs):
    make_good()
    Path('empty.txt').write_text(' \n')
    Path('latin.txt').write_bytes(b'caf\xe9 au lait')
    Path('a.txt').write_text('a')
    shutil.copy('good.txt', 'copy.txt')
    vocabulary = ['</s>', *map(str, range(2 ** 16))]        # one too many for two bytes
    Tokenizer(models.BPE({word: i for i, word in enumerate(vocabulary)}, [])).save('large.json')
    os.mkdir('data/mine')
    Path('data/mine/input.txt').write_text('nanoGPT keeps a text beside its tokens')
    before = files_in('.')
    with pytest.raises((ValueError, OSError)):
        data.make(name, path, **knobs, overwrite=True)
    assert files_in('.') == before and sorted(os.listdir('data')) == ['mine', 'own']


@pytest.mark.parametrize('args', [
    ('new',), (None,), ('own', 'gpt2', 50257), ('own', 'bytes', 256), ('calc', 'bytes', 257)])
def test_data_that_does_not_fit_the_model(args):
    make_good()
    data.open_data('own', 'bytes', 257)
    with pytest.raises(ValueError):
        data.open_data(*args)


# reading ------------------------------------------------------------------------------------------

def test_windows_of_a_text_and_what_fits_it():
    make_good()
    text = data.open_data('own')
    assert (len(text.train), len(text.val)) == (476, 26)
    ids = torch.from_numpy(text.train.astype(np.int64))
    for x, y in zip(*text.batch(np.random.default_rng(0), 9, 475)):     # there is only one window
        assert torch.equal(x, ids[:-1]) and torch.equal(y, ids[1:]) and x.dtype == torch.int64
    starts = text.batch(np.random.default_rng(0), 64, 474)[0][:, 0]
    assert {*starts.tolist()} == {*ids[:2].tolist()}                    # there are two
    mine = text.batch(np.random.default_rng(0), 64, 474, slice(16, 32))[0][:, 0]
    assert torch.equal(mine, starts[16:32])
    x, y = text.held_out([0, 4], 5)
    assert text.n_held_out(5) == 5 and x.shape == (2, 5)
    assert (x[0].tolist(), y[1].tolist()) == (text.val[:5].tolist(), text.val[21:].tolist())
    text.check_fits(25)
    with pytest.raises(ValueError):
        text.check_fits(26)
