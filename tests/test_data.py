import ast
import inspect
import json
import os
import random
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
from conftest import ROOT, finished, refused, small_disk
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

import data
from common import make_data, own_text, tokenizer_json, torchdocs, writer
from common.encoding import EOT, kind_of
from common.examples import Examples

datasets = pytest.importorskip('datasets')
huggingface_hub = pytest.importorskip('huggingface_hub')

WHOLE = ['meta.json', 'train.bin', 'val.bin']       # the files of a data set, and no others


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def text_of(name, split):
    """The documents of a split, decoded from its bin file."""
    text = data.open_data(name)
    encoding = data.open_encoding(text.tokenizer, f'data/{name}')
    return encoding.decode(getattr(text, split).tolist()).split(EOT)[:-1]


def make_good():
    """A small data set `own`, of one file with 500 bytes -> its meta."""
    Path('good.txt').write_text(''.join(f'line {i:03}\n' for i in range(50)) + 50 * '-')
    return data.make('own', 'good.txt')


# tokenizers --------------------------------------------------------------------------------------

def test_bytes_encoding_is_utf8():
    encoding = data.open_encoding('bytes')
    text = 'naïve — 中文 🙂\n\t' * 20
    ids = list(text.encode())
    assert encoding.encode_ordinary(text) == ids
    assert encoding.decode(ids) == text
    assert encoding.n_vocab == 257
    assert encoding.encode(EOT, allowed_special='all') == [encoding.eot_token] == [256]


def test_encodings_that_are_unavailable():
    results = [ConnectionError('unreachable'),
               SimpleNamespace(name='large', n_vocab=65537, eot_token=0)]
    with mock.patch.object(tiktoken, 'get_encoding', side_effect=results):
        for words in 'unreachable.*no network?.*bytes needs no', 'has 65537 tokens, and uint16 has':
            with pytest.raises(ValueError, match=words):
                data.open_encoding('cl100k_base')
    Tokenizer(models.BPE({'a': 0}, [])).save('endless.json')
    Path('empty.json').write_text('{}')
    for name, words in dict(endless='has no end-of-text token: one of', empty='cannot read',
                            missing='No such file').items():
        with pytest.raises(ValueError, match=words):
            data.open_encoding(f'{name}.json')


def test_a_tokenizer_json_is_read_byte_by_byte():
    """It neither cuts nor pads, and the letters of an added token are letters, not bytes."""
    line = 'the quick brown fox jumps over the lazy dog'
    tokenizer = tokenizer_json.train_bpe([line] * 9, 270).tokenizer
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.add_tokens(['Zoë', 'đem'])
    tokenizer.save('tokenizer.json')
    encoding = data.open_encoding('elsewhere/tokenizer.json', '.')     # beside the checkpoint
    every = ''.join(map(chr, range(256))) + '\u0800日本\U0010ffff'
    text = f'{line}, Zoë\n\tgrößer, \x00 and đem \u05d0' + every
    ids = encoding.encode(text)
    pieces = [encoding.decode_single_token_bytes(token) for token in ids]
    assert b''.join(pieces).decode() == text == encoding.decode(ids)
    assert len(ids) < len(text.encode()) and encoding.n_vocab - 1 in ids    # merges, added tokens
    assert encoding.decode_single_token_bytes(encoding.eot_token) == EOT.encode()
    assert encoding.encode('a\ud800b') == encoding.encode('a?b')    # half a pair is no character


def test_a_tokenizer_json_whose_rare_letters_are_bytes():
    """A tokenizer of the other kind: blanks are letters, and rare letters fall back on bytes."""
    pieces = ['<unk>', *(f'<0x{byte:02X}>' for byte in range(256)), *'abc\u2581', 'ab']
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [('a', 'b')],
                                     byte_fallback=True, unk_token='<unk>'))
    tokenizer.normalizer = normalizers.Replace(' ', '\u2581')
    tokenizer.decoder = decoders.Sequence([decoders.Replace('\u2581', ' '),
                                           decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken('<s>'), AddedToken('</s>'), AddedToken('<|im_end|>')])
    tokenizer.save('tokenizer.json')
    encoding = data.open_encoding('tokenizer.json')
    ids = encoding.encode('ab c\nü')
    pieces = [encoding.decode_single_token_bytes(token) for token in ids]
    assert pieces == [b'ab', b' ', b'c', b'\n', b'\xc3', b'\xbc']
    assert encoding.decode(ids) == 'ab c\nü'
    assert encoding.decode([encoding.eot_token]) == '</s>'      # not the beginning of a text


def llama_like(**changes):
    """A tokenizer of 270 tokens, in whose file `changes` are made -> the text of the file."""
    tokenizer = tokenizer_json.train_bpe(['the quick brown fox ' * 9], 260).tokenizer
    tokenizer.add_special_tokens(['<s>', '</s>', '<|im_end|>', '[SEP]'])
    settings = json.loads(tokenizer.to_str())
    settings['model'] |= changes.pop('model', {})
    return json.dumps(settings | changes)


@pytest.mark.parametrize('name', ['gpt2', 'bytes', 'json', 'not special'])
def test_text_is_text(name):
    """The name of a special token in a text is letters, in a prompt too, unless asked for."""
    text = llama_like()
    if name == 'not special':       # files differ in what they call so
        text = text.replace('"special": true', '"special": false')
    encoding = tokenizer_json.TokenizerJson(text) if 'json' in name or 'special' in name else (
        data.open_encoding(name))
    for text in f'a {EOT} b', '<ul><s>ten</s></ul>', EOT, '<|im_end|>':
        for tokens in encoding.encode(text), encoding.encode_ordinary(text):
            assert encoding.decode(tokens) == text
            assert not {*tokens} & {*encoding.ends}
            assert len(tokens) > text.count(' ') + 1
    text = f'a{EOT}b'
    tokens = encoding.encode(text, allowed_special='all')
    assert tokens.count(encoding.eot_token) == 1 and encoding.decode(tokens) == text


def test_html_in_own_text_is_no_end():
    Path('own.json').write_text(llama_like())
    Path('page.txt').write_text('<li><s>ten</s> five</li>\n' * 40)
    meta = data.make('own', 'page.txt', tokenizer='own.json')
    assert [meta[split]['documents'] for split in data.SPLITS] == [1, 1]
    ids = data.open_data('own').train.tolist()
    assert sum(ids.count(end) for end in data.open_encoding('own.json').ends) == 1


def test_a_tokenizer_that_reads_letters_as_an_end_is_refused():
    words = Tokenizer(models.WordLevel({'</s>': 0, 'a': 1, '?': 2}, unk_token='?'))
    words.add_special_tokens(['</s>'])
    words.save('words.json')
    with pytest.raises(ValueError, match="it reads the letters '</s>' in a text as the end"):
        data.open_encoding('words.json')


def test_what_a_tokenizer_json_asks_for():
    """Tokens around a text are put there, or it is refused; no merge is left out by chance."""
    plain = tokenizer_json.TokenizerJson(llama_like())
    text = 'the quick brown fox ' * 9
    dropping = tokenizer_json.TokenizerJson(llama_like(model=dict(dropout=0.5)))
    assert dropping.encode(text) == dropping.encode(text) == plain.encode(text)
    vocab = plain.tokenizer.get_vocab()

    def with_template(template):
        ids = {word: vocab[word] for word in template.split() if word[0] != '$'}
        processor = processors.TemplateProcessing(single=template, special_tokens=[*ids.items()])
        plain.tokenizer.post_processor = processor
        return tokenizer_json.TokenizerJson(plain.tokenizer.to_str())
    begins = with_template('<s> $A')
    ids = plain.encode_ordinary(text)
    assert begins.encode(text) == [vocab['<s>'], *ids] and begins.encode_ordinary(text) == ids
    assert begins.encode('') == [vocab['<s>']] and begins.eot_token == vocab[EOT]
    both = [vocab['<s>'], *plain.encode_ordinary('a'), vocab['</s>']]       # of a chat template
    assert begins.encode('<s>a</s>', allowed_special='all') == both
    assert begins.encode('a</s>', allowed_special='all') == both
    # in data
    begins.save('.')
    Path('own.txt').write_text(EOT.join(['a fox', 'the quick', 'brown']))
    data.make('own', 'own.txt', tokenizer='tokenizer.json')
    ids = data.open_data('own').train.tolist()
    assert ids.count(vocab['<s>']) == ids.count(vocab[EOT]) == 2 and ids[0] == vocab['<s>']
    # an end is put behind each document, and behind no prompt
    ends = with_template('$A </s>')
    assert ends.encode(text) == plain.encode(text) and ends.eot_token == vocab['</s>']
    other = with_template('<s> $A [SEP]')       # whatever its name
    assert other.ends[:1] == [other.eot_token] == [vocab['[SEP]']] and vocab[EOT] in other.ends
    with pytest.raises(ValueError, match='it adds 2 tokens after each text'):
        with_template('$A </s> </s>')


@pytest.mark.parametrize('settings, missing', [
    (dict(add_bos_token=True, bos_token='<s>'), 'add_bos_token'),
    (dict(add_eos_token=True, eos_token='</s>'), 'add_eos_token'),
    (dict(add_eos_token=True, eos_token=dict(content=EOT)), ''),        # it ends each text anyway
    (dict(add_bos_token=False, add_eos_token=False, eos_token='</s>'), '')])
def test_tokens_that_tokenizer_config_asks_for(settings, missing):
    """Refused where tokenizer.json does not add them."""
    Path('tokenizer.json').write_text(llama_like())
    Path('tokenizer_config.json').write_text(json.dumps(settings))
    if missing:
        with pytest.raises(ValueError, match=f'says {missing}, but tokenizer.json does not add'):
            data.open_encoding('tokenizer.json')
    else:
        assert data.open_encoding('tokenizer.json').eot_token == 0


@pytest.mark.parametrize('name, origin', [
    ('bytes', 'bytes'), ('gpt2', 'tiktoken'), ('tokenizer.json:0123456789abcdef', 'stored'),
    ('texts/tokenizer.json', 'file'), ('C:\\texts\\bpe.json', 'file'), ('calc:p=5', 'task'),
    ('parity:', 'task'), (None, None)])
def test_the_name_of_a_tokenizer_says_what_it_is(name, origin):
    assert kind_of(name) == origin


def test_a_long_text_is_encoded_in_pieces(monkeypatch):
    """Cut between two lines, where it has the same tokens as in one piece."""
    words = ["don't", '  ', '\n\n', ' \n', '.', '...', '\u00a0', '\u2003', '12', 'größer',
             '日本', '_', 'e\u0301', '🙂', "'s", '\t', '\x1c', '<|end', '\r', '²', '\u200b']
    text = ''.join(random.Random(1).choices(words + ['the', ' ', '\n'] * 6, k=5000))
    bpe = tokenizer_json.train_bpe([text], 400)
    whole = bpe.encode(text)
    monkeypatch.setattr(tokenizer_json, 'PIECE', 8)
    pieces = [*tokenizer_json.pieces_of(text)]
    assert len(pieces) > 100 and ''.join(pieces) == text
    assert bpe.can_cut and bpe.encode(text) == whole and bpe.decode(whole) == text
    # one that begins each text with a blank is not cut
    bpe.tokenizer.normalizer = normalizers.Prepend('_')
    prepends = tokenizer_json.TokenizerJson(bpe.tokenizer.to_str())
    assert not prepends.can_cut and prepends.decode(prepends.encode(text)) == '_' + text


def test_a_bpe_is_trained_on_the_training_documents_alone(capsys):
    os.mkdir('texts')
    for split, text in dict(test='held-out words', train='größer than the fox').items():
        Path(f'texts/{split}.txt').write_text(f'{text} ' * 50 + EOT + f'{text} ' * 50)
    meta = data.make('own', 'texts', bpe=300)
    assert 'training a BPE of 300 tokens' in capsys.readouterr().err
    encoding = data.open_encoding(meta['tokenizer'], 'data/own')
    assert meta['tokenizer'] == data.open_encoding('data/own/tokenizer.json').name == encoding.name
    assert meta['vocab_size'] == encoding.n_vocab <= 300
    assert text_of('own', 'val') == ['held-out words ' * 50] * 2
    assert text_of('own', 'train') == ['größer than the fox ' * 50] * 2
    pieces = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]
    assert b' fox' in pieces and b' words' not in pieces and b'end' not in pieces


def test_a_tokenizer_is_what_is_in_its_file():
    """Not where it lies: another of the same path is refused, a copy elsewhere is the same."""
    os.mkdir('texts')
    for i in range(6):
        Path(f'texts/{i}.txt').write_text('the quick brown fox ' * 50)
    meta = data.make('own', 'texts', bpe=300)
    shutil.copytree('data/own', 'moved')
    moved = data.make('again', 'texts', tokenizer='moved/tokenizer.json')
    assert moved['tokenizer'] == meta['tokenizer'] and Path('data/again/tokenizer.json').exists()
    assert data.open_data('again', meta['tokenizer']).tokenizer == meta['tokenizer']
    data.make('other', 'texts', bpe=260)
    shutil.copy('data/other/tokenizer.json', 'data/own/tokenizer.json')
    with pytest.raises(ValueError, match='is not the tokenizer that belongs here'):
        data.open_data('own')
    with pytest.raises(ValueError, match='reads tokens of tokenizer.json:.* but data set'):
        data.open_data('other', meta['tokenizer'])


# text on this machine ----------------------------------------------------------------------------

def test_torchdocs_is_made_on_first_use(capsys, monkeypatch):
    """Of one folder of torch here; a text that differs from torch 2.13.0's is told."""
    of_optim = partial(torchdocs.torch_documents, f'{os.path.dirname(torch.__file__)}/optim')
    monkeypatch.setattr(torchdocs, 'torch_documents', of_optim)
    text = data.open_data('torchdocs')
    made, warning = capsys.readouterr().err.splitlines()
    assert made.startswith('making data/torchdocs') and 'losses differ from the README' in warning
    assert (text.tokenizer, text.vocab_size) == ('bytes', 257)
    # one token a byte, and one to end each document
    val = text.meta['val']
    assert val['tokens'] == val['bytes'] + val['documents'] == len(text.val)
    documents = [*of_optim()]
    assert text_of('torchdocs', 'val') == documents[::48]
    assert text_of('torchdocs', 'train') == [text for i, text in enumerate(documents) if i % 48]
    # torch 2.13.0's: no warning
    capsys.readouterr()
    monkeypatch.setattr(data, 'TORCHDOCS', text.sha256)
    data.open_data('torchdocs')
    assert not capsys.readouterr().err
    # nor where it was asked for in another way
    monkeypatch.setattr(data, 'TORCHDOCS', 'another')
    for knobs in dict(bpe=300), dict(tokenizer='gpt2'), dict(val_fraction=0.1):
        data.make('torchdocs', **knobs, overwrite=True)
        data.open_data('torchdocs')
        assert 'warning' not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists(f'{ROOT}/data/torchdocs'), reason='train.py makes it')
def test_torchdocs_is_the_text_of_the_readme(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert data.open_data('torchdocs').sha256 == data.TORCHDOCS
    assert not capsys.readouterr().err


def test_the_strings_of_torchdocs(tmp_path):
    long = 'A sentence. ' * 7                                   # 84 characters
    source = [
        f'"""{long}\n\n        indented\n      less\n    """',    # a docstring, dedented
        f'def f():\n    "{long}"',                              # the same text but for the lines
        'def g():\n    "short docstring"',
        f'x = f"""{long * 3}\n{{1}}{long * 3}\n"""',            # parts of an f-string
        f'y = "{long * 3}"',                                    # long, but a single line
        f'z = """{long * 3}\n  end"""',                         # long, with several lines
    ]
    first = f'{long.strip()}\n\n  indented\nless'
    not_read = {name: [f'"""{name} {long}"""'] for name in ('testing/c.py', 'version.py')}
    for name, lines in ({'b.py': source[1:], 'a/a.py': source} | not_read).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('\n'.join(lines))
    expected = '\n\n'.join([first, long.strip(), f'{(long * 3).strip()}\nend'])
    assert list(torchdocs.torch_documents(str(tmp_path))) == [expected]     # b.py has nothing new


def test_a_folder_is_split_by_document(capsys):
    """By whole files, in an order that is drawn once; a file is read once, whatever links to it."""
    os.makedirs('run[1]/deep')      # a folder's name is no pattern
    texts = [f'document number {i}' for i in range(10)]
    for i, text in enumerate(texts):    # a byte order mark is no text
        Path('run[1]', 'deep' if i % 2 else '', f'{i}.txt').write_text(text, encoding='utf-8-sig')
    read = [*texts[::2], *texts[1::2]]      # in the order of their paths
    data.make('own', 'run*/**/*.txt', val_fraction=0.2)
    val = text_of('own', 'val')
    assert len(val) == 2 and texts[0] not in val            # the first is often a LICENSE.txt
    assert text_of('own', 'train') == [text for text in read if text not in val]
    data.make('files', 'run[1]/*.txt')
    assert {*text_of('files', 'train'), *text_of('files', 'val')} == {*texts[::2]}
    # only text files that lie there are read, each once
    for link, to in dict(again='.', deep_too='deep', up='..').items():
        os.symlink(to, f'run[1]/{link}')
    os.symlink('0.txt', 'run[1]/zero.txt')
    Path('elsewhere.txt').write_text('not in the folder')
    for other in 'notes.md', 'LOUD.TXT', '.hidden.txt':
        Path('run[1]', other).write_text('other')
    data.make('folder', 'run[1]', val_fraction=0.2)
    for split in data.SPLITS:
        assert text_of('folder', split) == text_of('own', split)
    assert ('left out in run[1]: files and linked folders, 6 in all; only .txt files that are not'
            in capsys.readouterr().err)


@pytest.mark.parametrize('held_out', [
    'valid', 'A-valid', 'wiki.test', 'TinyStoriesV2-GPT4-valid', 'b_VAL', 'valid-00000-of-00001',
    'val1', 'Dev set', 'deep/Validation/b', 'deep/my eval/b'])
def test_files_that_are_named_as_held_out(capsys, held_out):
    """A word of the name counts, or of a folder's name, and a line says so."""
    train = ['a', 'A-train', 'valor', 'attest', 'deep/contest/b']
    for file in [*train, held_out]:
        path = Path(f'texts/{file}.txt')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(EOT.join(f'this is {file}, {i}' for i in range(3)))
    meta = data.make('own', 'texts')
    assert data.make('own', 'texts') == meta
    assert text_of('own', 'val') == [f'this is {held_out}, {i}' for i in range(3)]
    assert {text.split(',')[0] for text in text_of('own', 'train')} == {
        f'this is {file}' for file in train}
    line = f'held out: texts/{held_out}.txt, because of the name'
    assert capsys.readouterr().err.count(line) == 1     # the second call makes nothing


def test_a_file_is_renamed_so_that_it_is_held_out():
    os.mkdir('texts')
    for file in 'a', 'b', 'val':
        Path(f'texts/{file}.txt').write_text(f'this is {file}')
    data.make('own', 'texts')
    for old, new in ('b', 'test'), ('val', 'z'), ('test', 'y'):     # the order stays
        os.rename(f'texts/{old}.txt', f'texts/{new}.txt')
        with pytest.raises(ValueError, match='data/own was made with other text'):
            data.make('own', 'texts')
        data.make('own', 'texts', overwrite=True)


def test_a_file_that_is_cut_in_two_is_other_text():
    """The contents are the same, one after the other, and the documents are not."""
    os.mkdir('texts')
    Path('texts/a.txt').write_text('one two three four')
    data.make('own', 'texts')
    Path('texts/a.txt').write_text('one two ')
    Path('texts/b.txt').write_text('three four')
    with pytest.raises(ValueError, match='data/own was made with other text'):
        data.make('own', 'texts')


def test_a_text_without_a_second_half_leaves_nothing_behind():
    Path('a.txt').write_text('a')
    with pytest.raises(ValueError, match='a.txt is too small for a training and a held-out split'):
        data.make('own', 'a.txt')
    assert not os.path.exists('data/own.part')


def test_tokens_that_are_cut_or_read_in_another_way_are_other_text():
    os.mkdir('nano')
    ids = np.array([464, 3139, 50256, 464, 50256, 3139, 50256], dtype='<u2')
    for cut in 3, 5:
        ids[:cut].tofile('nano/train.bin')
        ids[cut:].tofile('nano/val.bin')
        if cut == 3:
            data.make('nano', 'nano', tokenizer='bytes')
    with pytest.raises(ValueError, match='data/nano was made with other text, or another split of'):
        data.make('nano', 'nano', tokenizer='bytes')
    data.make('nano', 'nano', tokenizer='bytes', overwrite=True)
    Path('nano/meta.json').write_text('{"tokenizer": "p50k_base"}')
    gpt2 = data.open_encoding('gpt2')       # of which there is a copy here
    with (mock.patch.object(own_text, 'open_text_encoding', return_value=gpt2),
          pytest.raises(ValueError, match='data/nano was made with other text')):
        data.make('nano', 'nano', tokenizer='bytes')


def test_a_damaged_data_set_is_made_again():
    meta = make_good()
    Path('data/own/meta.json').write_text('{"tok')
    with pytest.raises(ValueError, match='data/own is damaged: make it again with --overwrite'):
        make_good()
    assert data.make('own', 'good.txt', overwrite=True) == meta
    os.remove('data/own/train.bin')
    with pytest.raises(ValueError, match='train.bin is damaged or missing: make it again'):
        make_good()


def test_a_share_that_would_have_no_effect_is_refused():
    os.mkdir('texts')
    for file in 'a', 'val':
        Path(f'texts/{file}.txt').write_text(f'this is {file}')
    with pytest.raises(ValueError, match='val_fraction has no effect here: the names of the files'):
        data.make('own', 'texts', val_fraction=0.2)
    data.make('own', 'texts')
    with pytest.raises(ValueError, match='data/own/val.bin is held out. Leave it out'):
        data.make('again', 'data/own', val_fraction=0.2)


def test_what_is_held_out_otherwise(capsys):
    os.mkdir('two')
    for file in 'train', 'zebra':
        Path(f'two/{file}.txt').write_text(f'this is {file}')
    data.make('two', 'two')
    assert text_of('two', 'train') + text_of('two', 'val') == ['this is train', 'this is zebra']
    assert "held out: 1 of 2 documents, drawn at random, as no name" in capsys.readouterr().err
    make_good()
    assert 'held out: the last 5% of the text, since it is one document' in capsys.readouterr().err
    for file in 'valid', 'test':
        Path(f'two/{file}.txt').write_text(f'this is {file}')
        os.remove(f"two/{'train' if file == 'valid' else 'zebra'}.txt")
    with pytest.raises(ValueError, match='all files are held out because of their names .*rename'):
        data.make('none', 'two')
    # a folder in which all files lie
    os.makedirs('corpus/test')
    for file in 'a', 'b':
        Path(f'corpus/test/{file}.txt').write_text(f'this is {file}')
    assert data.make('corpus', 'corpus')['train']['documents'] == 1


def test_an_end_of_text_in_a_text_ends_a_document():
    documents = [f'{i}: the quick brown fox\n' * 3 for i in range(8)]
    Path('own.txt').write_text(EOT.join(['', *documents, ' \n']))
    meta = data.make('own', 'own.txt')
    found = [text_of('own', split) for split in data.SPLITS]
    assert sorted(sum(found, [])) == documents and len(found[1]) == 1
    assert [meta[split]['documents'] for split in data.SPLITS] == [7, 1]
    assert meta['train']['bytes'] == sum(map(len, found[0]))


@pytest.mark.parametrize('tokens', ['gpt2', 'bytes'])
def test_tokens_of_nanogpt(tokens):
    """A folder with train.bin and val.bin is read as text."""
    os.mkdir('nano')
    gpt2 = tiktoken.get_encoding('gpt2')
    texts = dict(train=['the first\n\nstory', 'größer'], val=['the last, without an end'])
    for split, documents in texts.items():
        ids = gpt2.encode(EOT.join(documents), allowed_special='all')
        np.array(ids, dtype='<u2').tofile(f'nano/{split}.bin')
    meta = data.make('nano', 'nano', tokenizer=tokens)
    for split, documents in texts.items():
        assert text_of('nano', split) == documents
        assert meta[split]['documents'] == len(documents)
        assert meta[split]['bytes'] == sum(len(text.encode()) for text in documents)
    ids = data.open_data('nano').train
    assert tokens == 'bytes' or ids[:-1].tobytes() == Path('nano/train.bin').read_bytes()
    # a folder of our own is read in its own tokens
    again = data.make('again', 'data/nano', tokenizer=tokens)
    assert [again[split] for split in data.SPLITS] == [meta[split] for split in data.SPLITS]

    # bad ones are refused, and the good ones stay
    for content, reason in (b'\xff\xff', 'oken'), (b'123', 'multiple'):
        Path('nano/val.bin').write_bytes(content)
        with pytest.raises(ValueError, match=f'nano/val.bin.*{reason}.*give uint16 tokens of gpt2'):
            data.make('nano', 'nano', tokenizer=tokens, overwrite=True)
    # nanoGPT's character data numbers letters by a table in meta.pkl
    Path('nano/meta.pkl').touch()
    with pytest.raises(ValueError, match='--path=nano/input.txt'):
        data.make('nano', 'nano', overwrite=True)
    assert data.open_data('nano').meta == meta


def test_tokens_that_are_there_are_not_replaced():
    """nanoGPT's data/openwebtext has no meta.json."""
    os.makedirs('data/openwebtext')
    for split in data.SPLITS:
        np.array([464, 3139, 50256], dtype='<u2').tofile(f'data/openwebtext/{split}.bin')
    Path('own.txt').write_text('a text of my own')
    for path, words in ('data/openwebtext', 'from its own tokens: choose'), ('own.txt', '--overwr'):
        with pytest.raises(ValueError, match=f'data/openwebtext .*{words}'):
            data.make('openwebtext', path)
    os.rename('data/openwebtext/val.bin', 'val.bin')
    with pytest.raises(ValueError, match='has tokens, and no meta.json'):
        data.make('openwebtext', 'own.txt')
    os.rename('val.bin', 'data/openwebtext/val.bin')
    # under another name they are read, and stay what they are
    data.make('owt', 'data/openwebtext')
    assert data.open_data('owt').tokenizer == 'gpt2'
    for split in data.SPLITS:
        assert getattr(data.open_data('owt'), split).tolist() == [464, 3139, 50256]


def test_tokens_of_a_tokenizer_json_are_read_in_it():
    """Without the tokens that begin or end a text."""
    encoding = tokenizer_json.TokenizerJson(llama_like())
    vocab = encoding.tokenizer.get_vocab()
    encoding.tokenizer.post_processor = processors.TemplateProcessing(
        single='<s> $A </s>', special_tokens=[(end, vocab[end]) for end in ('<s>', '</s>')])
    encoding = tokenizer_json.TokenizerJson(encoding.tokenizer.to_str())
    encoding.save('.')
    Path('own.txt').write_text(EOT.join(['a fox', 'the quick', 'brown']))
    made = data.make('own', 'own.txt', tokenizer='tokenizer.json')
    again = data.make('again', 'data/own')
    assert again['tokenizer'] == encoding.name and again['train'] == made['train']
    # other ends
    ids = [vocab['<s>'], *encoding.encode_ordinary('a fox'), vocab['<|im_end|>'], vocab['</s>']]
    for split in data.SPLITS:
        np.array(ids, dtype='<u2').tofile(f'data/own/{split}.bin')
    data.make('ends', 'data/own', tokenizer='bytes')
    assert text_of('ends', 'val') == ['a fox']


# FineWeb -----------------------------------------------------------------------------------------

def make_fineweb(folder, *parts):
    """A folder of FineWeb's layout, with a file for each of these lists of texts."""
    files = Path(folder, 'sample', '10BT')
    files.mkdir(parents=True)
    for i, texts in enumerate(parts):
        columns = dict(text=texts, language=['en'] * len(texts), token_count=[3] * len(texts))
        datasets.Dataset.from_dict(columns).to_parquet(str(files / f'{i:03}_00000.parquet'))
    Path(folder, 'README.md').write_text(
        '---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n'
        '    path: sample/10BT/*\n---\n')


@pytest.fixture
def web(monkeypatch):
    """
    A folder `web` of FineWeb's layout, in two files. web.rows: its rows; web.texts: those with
    text. web.breaks(after, error): from now on streams raise the error after so many rows;
    web.breaks(): no longer. web.read: the rows that they have given since.
    """
    rows = [None if i % 7 == 3 else ' \n' if i % 50 == 0 else f'Web page {i}. ' * (1 + i % 5)
            for i in range(2500)]
    web = SimpleNamespace(rows=rows, texts=[row for row in rows if row and row.strip()], read=[])
    make_fineweb('web', rows[:1500], rows[1500:])
    iterate = datasets.IterableDataset.__iter__

    def rows_of(stream):
        for i, row in enumerate(iterate(stream)):
            if i == web.after:
                raise web.error
            web.read.append(row['text'])
            yield row

    def breaks(after=None, error=None):
        web.after, web.error = after, error
        web.read.clear()
    monkeypatch.setattr(datasets.IterableDataset, '__iter__', rows_of)
    web.breaks = breaks
    breaks()
    return web


def make_web(**changes):
    """data/fineweb from the folder web; every tenth text is held out."""
    knobs = dict(path='web', tokenizer='bytes', val_fraction=0.1)
    return data.make('fineweb', **knobs | changes)


def check_web(web):
    """data/fineweb has every text once, in order, every tenth of them held out."""
    assert text_of('fineweb', 'val') == web.texts[::10]
    assert text_of('fineweb', 'train') == [text for i, text in enumerate(web.texts) if i % 10]
    assert sorted(os.listdir('data/fineweb')) == WHOLE


def test_fineweb_schema(web, capsys):
    # it stops after the document that reaches so many tokens, in the middle of a batch
    assert [*map(make_data.parse_tokens, ('300M', '1.5b', 70))] == [300_000_000, 1_500_000_000, 70]
    assert make_data.parse_tokens('8.2M') == 8_200_000
    meta = make_web(tokens='1K')
    lengths = np.cumsum([len(text) + 1 for text in web.texts])
    assert meta['train']['tokens'] + meta['val']['tokens'] == lengths[lengths >= 1000][0]
    with pytest.raises(ValueError, match='--tokens=5 is too small for a training .*: give more'):
        make_web(tokens=5, overwrite=True)
    assert not os.path.exists('data/fineweb.part')
    for changes, words in (
            (dict(tokens='2K'), 'tokens 1000, and this is 2000'),
            (dict(tokens='1K', val_fraction=0.2), 'val_fraction 0.1, and this is 0.2')):
        with pytest.raises(ValueError, match=f'data/fineweb was made with {words}: --overwr'):
            make_web(**changes)
    web.breaks()
    assert make_web(tokens='1K') == meta and not web.read       # it is there
    # and all of it
    assert 'ends after' not in capsys.readouterr().err
    meta = make_web(overwrite=True)
    check_web(web)
    said = f'web sample-10BT ends after {lengths[-1]:,} tokens, fewer than the 300,000,000 of --'
    assert said in capsys.readouterr().err
    assert meta['source'] == 'web sample-10BT'
    with pytest.raises(ValueError, match='cannot stream .*CC-MAIN-2013-20.*check --path, --config'):
        make_web(config='CC-MAIN-2013-20', overwrite=True)


def test_a_stream_continues_where_it_broke_off(web):
    """No document twice, none lost, the same val split; the old files stay until all is written."""
    before = make_web(val_fraction=0.5)
    for after, error in [(10, ConnectionError('reset')), (1300, RuntimeError('peer closed')),
                         (1250, TimeoutError()), (5, KeyboardInterrupt())]:
        web.breaks(after, error)
        with pytest.raises((ValueError, KeyboardInterrupt), match='it was last saved|^$'):
            make_web(overwrite=True)
        assert data.open_data('fineweb').meta == before
    web.breaks()
    progress = Path('data/fineweb.part/progress.json').read_text()
    meta = make_web(overwrite=True)
    done = web.texts[2047]          # 1,024 documents before the second error, and before the third
    assert web.read == web.rows[web.rows.index(done) + 1:]
    check_web(web)
    # progress that cannot be used is no progress, and a damaged file of it discards nothing
    part = Path('data/fineweb.part')
    part.mkdir()
    (part / 'progress.json').write_text(progress)
    assert make_web(overwrite=True)['train'] == meta['train']
    part.mkdir()
    (part / 'train.bin').write_bytes(b'hours')
    (part / 'progress.json').write_text(progress[:9])
    with pytest.raises(ValueError, match='progress.json. is damaged'):
        make_web(overwrite=True)
    assert (part / 'train.bin').read_bytes() == b'hours'


def test_two_makers_of_the_same_data(web, monkeypatch, capsys):
    """One makes it, the other says once that it waits, and then reads."""
    def twice(make):
        with ThreadPoolExecutor() as threads:
            one, two = threads.submit(make), threads.submit(make)
            return one.result(), two.result()
    one, two = twice(make_web)
    check_web(web)
    assert one == two == data.open_data('fineweb').meta
    said = capsys.readouterr().err
    assert said.count('waiting for another program, which is writing data/fineweb and holds '
                      'data/fineweb.lock') == 1

    def slowly():
        made.append(1)
        for i in range(4):
            time.sleep(0.05)
            yield f'document {i}'
    made = []
    monkeypatch.setattr(torchdocs, 'torch_documents', slowly)
    one, two = twice(lambda: data.open_data('torchdocs'))
    assert made == [1] and one.meta == two.meta


def test_tokens_that_another_wrote_are_noticed(web):
    """Where locks do nothing: the files have more bytes than were written."""
    def after_a_batch(progress, path):
        with open('data/fineweb.part/train.bin', 'ab') as f:
            f.write(bytes(100))
    with mock.patch.object(writer, 'write_json', after_a_batch):
        with pytest.raises(ValueError, match='train.bin has .* bytes, and this program wrote'):
            make_web()


def test_without_a_network(tmp_path, monkeypatch):
    """It is the network that is missing, whatever is asked for first."""
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'none'))
    message = refused('fineweb', script='data.py')
    assert 'cannot stream HuggingFaceFW/fineweb' in message and 'no network?' in message
    assert 'tokenizer' not in message


def as_before(record):
    """A meta.json or progress.json as an earlier version wrote it."""
    return {'made_of' if key == 'recipe' else key: value for key, value in record.items()}


def test_a_stream_from_the_hub_is_of_one_commit(web, monkeypatch):
    """That of the interrupted call, whatever is the newest."""
    first, second = 'a' * 40, 'b' * 40
    commits, calls, real = iter([first]), [], datasets.load_dataset
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info',
                        lambda self, name: SimpleNamespace(sha=next(commits)))
    monkeypatch.setattr(datasets, 'load_dataset', lambda source, **how: (
        calls.append((source, how['revision'])), real('web', **how))[1])
    for after, tokens in (1300, '300M'), (10, '200M'):
        web.breaks(after, ConnectionError('reset'))
        with pytest.raises(ValueError):
            make_web(path='', tokens=tokens)
    part = shutil.copytree('data/fineweb.part', 'part')
    web.breaks()
    meta = make_web(path='')
    check_web(web)
    assert 0 < len(web.read) < len(web.rows) - 1024
    assert calls == 3 * [('HuggingFaceFW/fineweb', first)]
    assert meta['source'] == f'HuggingFaceFW/fineweb sample-10BT at {first}'
    assert make_web(path='') == meta and len(calls) == 3        # it is there: no network
    # another commit, fewer tokens than are there, a file that is too short, or progress of an
    # earlier version: nothing is lost unless it is asked for
    shutil.rmtree('data/fineweb')
    for changes, reason in ((dict(revision=second), 'it had revision a*, and this is b*'),
                            (dict(val_fraction=0.2), 'it had val_fraction 0.1, and this is 0.2'),
                            (dict(tokens='1K'), 'this call asks for 1,000, no more than these'),
                            (dict(), 'data/fineweb.part/val.bin is damaged'),
                            (dict(revision=first), 'it had a recipe of another version of .*')):
        path = Path(shutil.copytree(part, 'data/fineweb.part'), 'progress.json')
        if changes == {}:
            os.truncate('data/fineweb.part/val.bin', 0)
        elif changes == dict(revision=first):
            path.write_text(json.dumps(as_before(json.loads(path.read_text()))))
        web.breaks()
        with pytest.raises(ValueError, match=f'left 44,854 tokens in data.*, and {reason}: repeat'):
            make_web(path='', **changes)
        assert path.exists() and not web.read
        make_web(path='', overwrite=True, **changes)
        assert web.read[:9] == web.rows[:9]
        shutil.rmtree('data/fineweb')


def test_a_folder_whose_text_changes_is_not_continued(web):
    """The tokens of two texts would be mixed."""
    web.breaks(1300, ConnectionError('reset'))
    with pytest.raises(ValueError):
        make_web()
    web.breaks()
    os.utime('web/sample/10BT/000_00000.parquet', (1, 1))
    with pytest.raises(ValueError, match='left [0-9,]+ tokens in .*, and it had other text, or'):
        make_web()
    make_web(overwrite=True)
    check_web(web)
    os.utime('web/sample/10BT/000_00000.parquet', (2, 2))
    with pytest.raises(ValueError, match='data/fineweb was made with other text'):
        make_web()


def test_another_part_of_a_folder_is_other_text(web):
    readme = Path('web/README.md')
    make_parts = readme.read_text().replace('- config_name', '- config_name: other\n  data_files: '
                                            'sample/10BT/*\n- config_name')
    readme.write_text(make_parts)
    make_web(tokens='1K')
    with pytest.raises(ValueError, match='data/fineweb was made with other text'):
        make_web(tokens='1K', config='other')


def test_a_branch_is_refused(web):
    """It may move, and then a call that continues would mix two texts."""
    with pytest.raises(ValueError, match="revision 'main' is no commit of 40 digits: leave it out"):
        make_web(path='', revision='main')


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('n_moved', range(4))
def test_a_data_set_that_is_killed_while_its_files_are_moved(monkeypatch, n_moved, overwrite):
    """The next call moves the rest. The files of two data sets are never read together."""
    before = make_good()
    Path('good.txt').write_text('the quick brown fox ' * 50)
    moves = iter(range(n_moved))
    replace = os.replace

    def killed(source, target):
        if source.startswith('data/own.part/') and not source.endswith('.tmp'):
            try:
                next(moves)
            except StopIteration:
                raise KeyboardInterrupt from None
        replace(source, target)
    monkeypatch.setattr(os, 'replace', killed)
    with pytest.raises(KeyboardInterrupt):
        data.make('own', 'good.txt', bpe=300, overwrite=True)
    monkeypatch.setattr(os, 'replace', replace)
    with pytest.raises(ValueError, match='data/own is not complete: run its python data'):
        data.open_data('own')
    # the same command reads nothing again
    monkeypatch.setattr(own_text.TextFiles, 'documents', None)
    meta = data.make('own', 'good.txt', bpe=300, overwrite=overwrite)
    assert meta != before and data.open_data('own').meta == meta
    assert sorted(os.listdir('data/own')) == sorted([*WHOLE, 'tokenizer.json'])


def test_a_full_disk(web):
    """What is done is kept."""
    message = 'cannot make data/fineweb .*: is the disk full, or a file not readable. Then run'
    with small_disk(90_000), pytest.raises(ValueError, match=message):
        make_web()
    web.breaks()
    make_web()
    assert 0 < len(web.read) < len(web.rows) - 1024
    check_web(web)


def test_requirements_name_what_is_imported():
    """All but gguf, which a message asks for, and Pillow, which comes with matplotlib."""
    with open(f'{ROOT}/requirements.txt') as f:
        required = {re.match('[\\w-]+', line)[0].replace('-', '_') for line in f}
    imported = set()
    for file in Path(ROOT).rglob('*.py'):
        if not {part[0] for part in file.relative_to(ROOT).parts} & {'.'}:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    imported.update(alias.name.split('.')[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.split('.')[0])
    ours = {path.stem for folder in ('', 'tests') for path in Path(ROOT, folder).iterdir()}
    assert imported - ours - set(sys.stdlib_module_names) - {'gguf', 'PIL'} <= required


# reading ------------------------------------------------------------------------------------------

def test_windows_of_a_text_and_what_fits_it():
    """Of one file the last part is held out."""
    meta = make_good()
    (train,), (val,) = text_of('own', 'train'), text_of('own', 'val')
    assert train + val == Path('good.txt').read_text()
    assert (len(train), len(val), meta['source']) == (475, 25, 'good.txt')
    # with their ends 476 and 26 tokens
    text = data.open_data('own', model_tokenizer='bytes', vocab_size=257)
    ids = torch.from_numpy(text.train.astype(np.int64))
    for x, y in zip(*text.batch(np.random.default_rng(0), 9, 475)):     # there is only one window
        assert torch.equal(x, ids[:-1]) and torch.equal(y, ids[1:]) and x.dtype == torch.int64
    x, y = text.held_out([0, 4], 5)
    assert text.n_held_out(5) == 5 and x.shape == (2, 5)
    assert (x[0].tolist(), y[1].tolist()) == (text.val[:5].tolist(), text.val[21:].tolist())
    # windows for a checkpoint's model, evenly spread over the held-out part
    checkpoint = dict(config=dict(dataset='own'), tokenizer='bytes', folder='',
                      model_args=dict(block_size=5, vocab_size=257))
    _, *x_and_y, depth = data.held_out_windows(checkpoint, 3)
    assert depth is None and all(map(torch.equal, x_and_y, text.held_out([0, 2, 4], 5)))
    with pytest.raises(ValueError, match='only 5 held-out windows of 5 tokens, not 6: lower'):
        data.held_out_windows(checkpoint, 6)

    text.check_fits(25)
    with pytest.raises(ValueError, match='val text of own has 26 tokens, and no window of 26 with'):
        text.check_fits(26)
    for reads, vocab_size, words in (
            ('gpt2', 257, "reads tokens of gpt2, but data set 'own' has those of bytes"),
            ('bytes', 256, "has 256 tokens, but data set 'own' has 257, of bytes")):
        with pytest.raises(ValueError, match=words):
            data.open_data('own', reads, vocab_size)


@pytest.mark.parametrize('name, knobs', [
    ('own', dict(path='good.txt')), ('own', dict(path='good.txt', bpe=300)), ('torchdocs', {})])
def test_a_data_set_of_an_earlier_version(monkeypatch, name, knobs):
    """It is read as ever. Made again, it counts as made in another way."""
    make_good()
    monkeypatch.setattr(torchdocs, 'torch_documents', lambda: ['one', 'two', 'three'])
    meta = data.make(name, **knobs, overwrite=True)
    earlier = as_before(meta)
    Path(f'data/{name}/meta.json').write_text(json.dumps(earlier))
    assert data.open_data(name).meta == earlier
    with pytest.raises(ValueError, match='was made with a recipe of another version'):
        data.make(name, **knobs)
    assert data.make(name, **knobs, overwrite=True) == meta


def test_text_under_a_name_in_use():
    before = make_good()
    assert make_good() == before        # the same again
    for path in './good.txt', os.path.abspath('good.txt'), 'data/../good.txt':
        assert data.make('own', path) == before
    Path('good.txt').write_text('another text')
    with pytest.raises(ValueError, match='data/own was made with other text, or .*: --over'):
        data.make('own', 'good.txt')
    os.symlink('data', 'link')
    for path in 'data/own', 'link/own/':
        with pytest.raises(ValueError, match='data/own cannot be made from its own tok'):
            data.make('own', path, overwrite=True)
    assert data.open_data('own').meta == before
    assert data.make('own', 'good.txt', overwrite=True)['train']['bytes'] == 11


@pytest.mark.parametrize('path, knobs, words', [
    ('missing.txt', {}, 'no text at'), ('empty.txt', {}, "'empty.txt' has no text: leave it out"),
    ('latin.txt', {}, "cannot read 'latin.txt' .* position 3.*UTF-8"),
    ('good.txt', dict(bpe=256), 'from 257 to 65536, not 256'),
    ('good.txt', dict(bpe=300, tokenizer='gpt2'), 'leave out --tokenizer')])
def test_bad_text_and_nothing_lost(path, knobs, words):
    before = make_good()
    Path('empty.txt').write_text(' \n')
    Path('latin.txt').write_bytes(b'caf\xe9 au lait')
    with pytest.raises(ValueError, match=words):
        data.make('own', path, **knobs, overwrite=True)
    assert data.open_data('own').meta == before and sorted(os.listdir('data/own')) == WHOLE


@pytest.mark.parametrize('function, args, words', [
    (data.make, ('new',), 'python data.py new --path=TEXT'),
    (data.open_data, ('new',), "no data set or task 'new' .*python data.py new --path=TEXT"),
    (data.open_data, ('clac',), 'mean .calc'), (data.open_data, ('',), 'name one with --dataset'),
    (data.open_encoding, ('gpt9',), "no tokenizer 'gpt9': did you mean 'gpt2'?"),
    (data.open_encoding, (None,), 'came without a tokenizer.json'),
    (data.make, ('torchdocs', 'my book.txt'), "data.py NAME --path='my book.txt'"),
    (data.make, ('../out',), 'cannot be the name'),
    (data.make, ('own', 'data/own/train.bin'), 'holds tokens: give the folder'),
    (data.make, ('own', 'data/own.part/a.txt'), 'cannot be made from its own tokens'),
    (partial(data.make, bpe=300), ('fineweb',), '--bpe needs text that fits into memory'),
    (partial(data.make, val_fraction=0.4), ('torchdocs',), '1/n, not 0.4: say 0.5 for n = 2'),
    (partial(data.make, val_fraction=0.15), ('fineweb', 'web'), '1/n, not 0.15: say 0.14286'),
    (partial(data.make, val_fraction=0.9), ('own', 'good.txt'), 'val_fraction'),
    *((make_data.parse_tokens, (text,), 'not a number')
      for text in ('many', '-3M', '1e999', '0.5', '0.0009K'))])
def test_bad_names_and_numbers(function, args, words):
    with pytest.raises(ValueError, match='(?s)' + words):
        function(*args)


def test_the_name_of_a_task_is_refused():
    assert "'calc' is the name of a task" in refused('calc', '--path=good.txt', script='data.py')


def test_flags_of_fineweb_alone():
    for flag in '--tokens=1M', '--revision=abc', '--config=default':
        line = refused('own', '--path=good.txt', flag, script='data.py')
        assert f"{flag.partition('=')[0]} is for fineweb alone: leave it out" in line


def test_the_next_command(web, capsys, monkeypatch):
    make_good()
    assert finished('own', '--path=good.txt', script='data.py').endswith(
        'next: python train.py --dataset=own --out_dir=out-own\n')
    assert finished('fineweb', '--path=web', '--tokenizer=bytes', script='data.py').endswith(
        'next: python train.py config/groups.py\n')


def test_a_data_set_and_a_task_have_what_examples_lists():
    names = re.findall(r'^ {4}(\w+)', inspect.cleandoc(Examples.__doc__), re.M)
    make_good()
    for examples in data.open_data('own'), data.open_data('calc'):
        missing = {name for name in names if not hasattr(examples, name)}
        assert missing == (set() if examples.is_task else {'depths'})


@pytest.mark.parametrize('file, old, new, reason', [
    ('train.bin', b'l', b'm', 'does not have the sha256'), ('meta.json', b'{', b'[', ''),
    ('meta.json', b'"tokens": 26', b'"tokens": 27', 'val.bin does not have 27 tokens')])
def test_damaged_data_is_refused(file, old, new, reason):
    make_good()
    path = Path('data/own', file)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=f'data/own is damaged .*{reason}.* make it again'):
        data.open_data('own')
