"""Text to tokens and back: bytes, a tiktoken encoding, a tokenizer.json."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import data
import encoding as encodings
from encoding import EOT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_bytes_encoding_is_utf8():
    encoding = data.get_encoding('bytes')
    text = 'naïve — 中文 🙂\n\t' * 20
    ids = list(text.encode())
    assert encoding.encode_ordinary(text) == ids
    assert encoding.decode(ids) == text
    assert encoding.n_vocab == 257
    assert encoding.encode(EOT, allowed_special='all') == [encoding.eot_token] == [256]


def gpt2_is_here():
    try:
        data.get_encoding('gpt2')
    except ValueError:
        return False
    return True


@pytest.mark.skipif(not gpt2_is_here(), reason='the gpt2 encoding is not on this machine: '
                    'set TIKTOKEN_CACHE_DIR to a folder that has it')
def test_gpt2_encoding():
    with open('book.txt', 'w') as f:
        f.write('Hello world, this is a test. ' * 200)
    meta = data.make('book', 'book.txt', tokenizer='gpt2')
    train = data.load('book')[0]
    assert train[:5].tolist() == [15496, 995, 11, 428, 318]
    assert train[-1] == 50256
    assert meta['vocab_size'] == 50257


def test_gpt2_encoding_that_cannot_be_had(tmp_path):
    code = "import data; data.get_encoding('gpt2')"
    env = dict(TIKTOKEN_CACHE_DIR=str(tmp_path / 'empty'), https_proxy='http://127.0.0.1:9',
               PYTHONPATH=os.path.dirname(data.__file__))
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    for words in ('ValueError', 'TIKTOKEN_CACHE_DIR', '--tokenizer=bytes, which needs nothing'):
        assert words in last


def test_too_many_tokens_for_uint16(monkeypatch):
    large = SimpleNamespace(n_vocab=65537)
    monkeypatch.setattr(encodings.tiktoken, 'get_encoding', lambda name: large)
    with pytest.raises(ValueError, match='more than uint16 holds'):
        data.get_encoding('cl100k_base')


def make_tokenizer_json(path, size=270):
    """A small byte-level BPE, as public models have it: bytes, a few merges, an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if size > 256 else [])
    tokenizer.train_from_iterator(['the quick brown fox jumps over the lazy dog'] * 9, trainer)
    tokenizer.save(str(path))


def test_a_tokenizer_json_is_read_byte_by_byte(tmp_path):
    make_tokenizer_json(tmp_path / 'tokenizer.json')
    encoding = encodings.get_encoding(str(tmp_path / 'tokenizer.json'))
    text = 'the quick  fox\n\tgrößer, 日本語, \x00 and \u05d0'
    ids = encoding.encode(text)
    pieces = [encoding.decode_single_token_bytes(token) for token in ids]
    assert b''.join(pieces).decode() == text == encoding.decode(ids)
    assert len(ids) < len(text.encode())                # merges are used
    assert encoding.encode_ordinary_batch([text, 'the']) == [ids, encoding.encode('the')]
    assert encoding.decode_single_token_bytes(encoding.eot_token) == EOT.encode()


def test_bytes_that_no_piece_has(tmp_path):
    """A tokenizer of the other kind: blanks are letters, and rare letters fall back on bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    pieces = ['<unk>', *(f'<0x{byte:02X}>' for byte in range(256)), *'abc\u2581', 'ab']
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [('a', 'b')],
                                     byte_fallback=True, unk_token='<unk>'))
    tokenizer.normalizer = normalizers.Replace(' ', '\u2581')
    tokenizer.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '),
                                           decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken('<s>'), AddedToken('</s>'), AddedToken('<|im_end|>')])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    encoding = encodings.get_encoding(str(tmp_path / 'tokenizer.json'))
    ids = encoding.encode('ab c\nü')
    pieces = [encoding.decode_single_token_bytes(token) for token in ids]
    assert pieces == [b'ab', b' ', b'c', b'\n', b'\xc3', b'\xbc']
    assert encoding.decode(ids) == 'ab c\nü'
    # of several ends the first, and what begins a text is none
    assert encoding.decode([encoding.eot_token]) == '</s>'


def test_a_tokenizer_json_without_an_end(tmp_path):
    from tokenizers import Tokenizer, models
    Tokenizer(models.BPE({'a': 0}, [])).save(str(tmp_path / 'tokenizer.json'))
    with pytest.raises(ValueError, match='has no end-of-text token: one of'):
        encodings.get_encoding(str(tmp_path / 'tokenizer.json'))


def test_text_with_a_tokenizer_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tokenizer_json('tokenizer.json')
    (tmp_path / 'book.txt').write_text('the quick brown fox jumps over the lazy dog\n' * 20)
    meta = data.make('book', 'book.txt', tokenizer='tokenizer.json')
    train, val, _ = data.load('book')
    encoding = encodings.get_encoding(meta['tokenizer'])
    assert 'the quick brown fox' in encoding.decode(train.tolist())
    assert meta['vocab_size'] == encoding.n_vocab and train[-1] == encoding.eot_token


@pytest.mark.parametrize('text, words', [(None, 'is no tokenizer.json'), ('{}', 'is no tokenizer')])
def test_a_bad_tokenizer_json(tmp_path, text, words):
    if text:
        (tmp_path / 'tokenizer.json').write_text(text)
    with pytest.raises(ValueError, match=words):
        encodings.get_encoding(str(tmp_path / 'tokenizer.json'))
