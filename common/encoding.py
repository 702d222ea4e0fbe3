"""
Text into tokens and back: bytes, tiktoken's encodings, and the tokenizer.json of public models.

The name of an encoding says what it is, see kind_of. An encoding has

    name, n_vocab               its tokens are the numbers below n_vocab, and fit in uint16
    eot_token                   the token that is written after each document
    ends                        all tokens at which a text is over
    start                       the tokens with which every text begins: often none
    encode(text)                a prompt -> tokens, with those of `start`. By default '<s>' in a
                                text is three characters; with allowed_special='all' it is that
                                token
    encode_ordinary(text)       the tokens of a text alone: without `start`, and '<s>' is three
                                characters
    decode(tokens)              -> text
    decode_single_token_bytes(token)    -> the bytes of its text
"""
import os

import tiktoken

from common.errors import UserError, did_you_mean, explain
from common.tokenizer_json import EOT, STORED, TokenizerJson, check_settings


def kind_of(name):
    """
    What kind of tokenizer has this name:

        'bytes'       bytes
        'file'        the path of a tokenizer.json
        'stored'      tokenizer.json:SHA256, the copy in the folder of a checkpoint or data set
        'task'        the words of a task (tasks.Words), named as calc:p=5 is
        'tiktoken'    any other name, such as gpt2
        None          no name: a model that came without a tokenizer
    """
    if name is None or name == 'bytes':
        return name
    if name.startswith(STORED):
        return 'stored'
    if name.endswith('.json'):
        return 'file'
    return 'task' if ':' in name else 'tiktoken'


def open_text_encoding(name, folder=None):
    """
    The encoding of texts that has this name, see kind_of. ValueError if it is unavailable, or has
    too many tokens for uint16. folder: that of a checkpoint or a data set; a tokenizer.json is
    read from it, whatever path the name has.
    """
    kind = kind_of(name)
    if kind == 'bytes':
        encoding = bytes_encoding()
    elif kind == 'file' or kind == 'stored':
        encoding = read_tokenizer_json(name, folder)
    elif name in tiktoken.list_encoding_names():
        with explain(f"cannot load the tokenizer '{name}'", 'no network? It is downloaded once, to '
                     'TIKTOKEN_CACHE_DIR; bytes needs no file, and a tokenizer.json is a path'):
            encoding = TiktokenEncoding(tiktoken.get_encoding(name))
    else:
        hint = did_you_mean(name, ['bytes', 'gpt2'])
        raise UserError(f"no tokenizer '{name}'{hint} (bytes, gpt2, p50k_base, or the path of a "
                        'tokenizer.json)')
    if encoding.n_vocab > 2 ** 16:
        raise UserError(f"'{name}' has {encoding.n_vocab} tokens, and uint16 has room for 65536: "
                        'use gpt2 or bytes')
    return encoding


def bytes_encoding():
    """Token i is byte i, and 256 is the end of a text."""
    ranks = {bytes([i]): i for i in range(256)}
    return TiktokenEncoding(tiktoken.Encoding(
        'bytes', pat_str=r'[\s\S]{1,16}', mergeable_ranks=ranks, special_tokens={EOT: 256}))


def read_tokenizer_json(name, folder):
    """Read folder/tokenizer.json, or the file `name`."""
    path = os.path.join(folder, 'tokenizer.json') if folder else name
    with (explain(f"cannot read '{path}' as a tokenizer.json",
                  'take the file that came with the weights'),
          open(path, encoding='utf-8') as f):
        encoding = TokenizerJson(f.read())
    if kind_of(name) == 'file':
        check_settings(encoding, os.path.dirname(path))
    elif encoding.name != name:
        raise UserError(f"'{path}' is not the tokenizer that belongs here (its sha256 differs): "
                        'restore it')
    return encoding


def read_prompt(start):
    """The knob `start` -> the text, from a file if it is FILE:PATH."""
    if not start.startswith('FILE:'):
        return start
    path = os.path.expanduser(start.removeprefix('FILE:'))
    with (explain(f"cannot read '{path}'", 'a prompt is text in UTF-8', UnicodeDecodeError),
          open(path, encoding='utf-8-sig') as f):
        return f.read()


def text_of(token, encoding):
    """
    The text of a token; bytes that are not UTF-8 as \\xNN, a token without text as #NUMBER.

    encoding: None for a model that came without a tokenizer.
    """
    if encoding is None or token >= encoding.n_vocab:
        return f'#{token}'
    return encoding.decode_single_token_bytes(token).decode('utf-8', 'backslashreplace')


def texts_of(tokens, encoding):
    """The text of each token."""
    return [text_of(token, encoding) for token in tokens]


class TiktokenEncoding:
    """An encoding of tiktoken. '<|endoftext|>' in a text is read as letters, see encode above."""
    start = ()

    def __init__(self, encoding):
        self.encoding = encoding
        self.name = encoding.name
        self.n_vocab = encoding.n_vocab
        self.eot_token = encoding.eot_token
        self.ends = [encoding.eot_token]

    def encode(self, text, allowed_special=()):
        return self.encoding.encode(text, allowed_special=allowed_special or set(),
                                    disallowed_special=())

    def encode_ordinary(self, text):
        return self.encoding.encode_ordinary(text)

    def decode(self, tokens):
        return self.encoding.decode(tokens)

    def decode_single_token_bytes(self, token):
        return self.encoding.decode_single_token_bytes(token)
