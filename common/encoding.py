"""
Text into tokens and back: bytes, tiktoken's encodings, and the tokenizer.json of public models.

All have the methods of tiktoken.Encoding that we use, and ids that fit in uint16.
"""
import hashlib
import os
import re

import tiktoken

from common.configurator import explain
from common.files import new_file

EOT = '<|endoftext|>'
# the names of the end-of-text token in public tokenizers
ENDS = (EOT, '<|end_text|>', '</s>', '<eos>', '<|im_end|>')
# byte-level tokenizers write each byte as a letter: a printable byte as itself (Latin-1), and the
# others, in order, as the letters from number 256 on
OTHERS = [*range(33), *range(127, 161), 173]
BYTES = {chr(256 + OTHERS.index(byte) if byte in OTHERS else byte): bytes([byte])
         for byte in range(256)}
# where the tokenizer of GPT-2 and those like it, such as a BPE of our own, always split a text into
# words: before a blank or newline that follows something else and precedes a letter
WORDS = re.compile(r'[ \n](?<=\S.)(?=\w)', re.DOTALL)
ANYWHERE, NOWHERE = re.compile(r'[\s\S]'), re.compile('(?!)')
PIECE = 2048            # letters of a document that are encoded together, at least


def open_encoding(name, folder=None):
    """
    The encoding of this name. ValueError if it is unavailable, or has too many tokens for uint16.

    name: bytes, a tiktoken encoding, the path of a tokenizer.json, or what TokenizerJson calls one,
    whose file is in `folder`, that of a checkpoint or a data set.
    """
    if name == 'bytes':         # token i is byte i, and 256 is the end of a text
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]{1,16}', mergeable_ranks=ranks,
                                 special_tokens={EOT: 256})

    if '.json' in name:
        path = os.path.join(folder, 'tokenizer.json') if folder else name
        with (explain(f"cannot read '{path}' as a tokenizer.json",
                      'take the file that came with the weights'),
              open(path, encoding='utf-8') as f):
            encoding = TokenizerJson(f.read())
        if folder and ':' in name and encoding.name != name:
            raise ValueError(f"'{path}' is not the tokenizer that belongs here (its sha256 "
                             'differs): restore it')
    else:
        with explain(f"cannot load the tokenizer '{name}'", 'take bytes, which needs no file, or '
                     f"one of {', '.join(tiktoken.list_encoding_names())}, downloaded once to "
                     'TIKTOKEN_CACHE_DIR, or the path of a tokenizer.json'):
            encoding = tiktoken.get_encoding(name)
    if encoding.n_vocab > 2 ** 16:
        raise ValueError(f"'{name}' has {encoding.n_vocab} tokens, and uint16 has room for 65536: "
                         'use gpt2 or bytes')
    return encoding


def text_of(token, encoding):
    """
    The text of a token; bytes that are not UTF-8 as \\xNN, a token without text as #NUMBER.

    encoding: None for a model that came without a tokenizer.
    """
    if encoding is None or token >= encoding.n_vocab:
        return f'#{token}'
    return encoding.decode_single_token_bytes(token).decode('utf-8', 'backslashreplace')


def train_bpe(texts, vocab_size):
    """A byte-level BPE of at most vocab_size tokens, trained on texts."""
    from tokenizers import ByteLevelBPETokenizer
    if not 257 <= vocab_size <= 2 ** 16:
        raise ValueError(f'bpe must be a number of tokens from 257 to 65536, not {vocab_size}')
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, special_tokens=[EOT], show_progress=False)
    return TokenizerJson(tokenizer.to_str(pretty=True))


def documents_in(text):
    """The documents of a text: an EOT ends one, and one of blanks is left out."""
    return [document for document in text.split(EOT) if document.strip()]


def in_pieces(document, cut=WORDS):
    """A document in pieces of at least PIECE letters, cut where `cut` matches."""
    start = 0
    while found := cut.search(document, start + PIECE):
        yield document[start:found.start()]
        start = found.start()
    yield document[start:]


def where_to_cut(encoding):
    """A pattern for in_pieces, with which the pieces of a document have the tokens of the whole."""
    if encoding.name == 'bytes':
        return ANYWHERE
    if isinstance(encoding, TokenizerJson):
        split, normalizer = encoding.tokenizer.pre_tokenizer, encoding.tokenizer.normalizer
        added = encoding.tokenizer.get_added_tokens_decoder().values()
        if (normalizer or not re.match(r'ByteLevel\(.*use_regex=True', str(split))
                or any(token.rstrip or re.search(r'\s', token.content) for token in added)):
            return NOWHERE      # it may have tokens of several words
    return WORDS


class TokenizerJson:
    """
    The text of a tokenizer.json, with the methods of tiktoken.Encoding that we use. Its name is
    'tokenizer.json:' and the start of its sha256: wherever the file lies, it is the same tokenizer.
    """

    def __init__(self, text):
        from tokenizers import Tokenizer
        self.text, self.tokenizer = text, Tokenizer.from_str(text)
        self.tokenizer.no_truncation()      # a file may ask for these, and text would be lost
        self.tokenizer.no_padding()
        self.name = 'tokenizer.json:' + hashlib.sha256(text.encode()).hexdigest()[:16]
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.n_vocab, self.ends = 1 + max(vocab.values()), [vocab[x] for x in ENDS if x in vocab]
        if not self.ends:
            raise ValueError(f"it has no end-of-text token: one of {', '.join(ENDS)}")
        self.eot_token = self.ends[0]
        self.byte_level = 'ByteLevel' in str(self.tokenizer.decoder)
        self.added = {token: added.content.encode()
                      for token, added in self.tokenizer.get_added_tokens_decoder().items()}

    def save(self, folder):
        """Write folder/tokenizer.json."""
        with new_file(os.path.join(folder, 'tokenizer.json'), encoding='utf-8') as f:
            f.write(self.text)

    def encode(self, text, allowed_special=()):
        return self.encode_ordinary_batch([text])[0]

    def encode_ordinary_batch(self, texts, num_threads=1):
        # half of a pair of surrogates is no character: it becomes a ?, as in tiktoken a \ufffd
        texts = [text.encode('utf-8', 'replace').decode() for text in texts]
        return [row.ids for row in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids):
        if self.byte_level:     # the library takes letters of added tokens for bytes
            return b''.join(map(self.decode_single_token_bytes, ids)).decode(errors='replace')
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token):
        if token in self.added:
            return self.added[token]
        text = self.tokenizer.id_to_token(token) or ''      # a file may leave out some numbers
        if self.byte_level:
            return b''.join(BYTES.get(letter, letter.encode()) for letter in text)
        if re.fullmatch('<0x[0-9A-F]{2}>', text):           # SentencePiece's way to write a byte
            return bytes.fromhex(text[3:5])
        return text.replace('\u2581', ' ').encode()         # SentencePiece's space
