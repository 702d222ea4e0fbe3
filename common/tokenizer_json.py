"""
An encoding (see encoding.py) from the tokenizer.json of a public model, or from a BPE trained here.
"""
import hashlib
import json
import os
import re
import sys
from itertools import takewhile

from common.errors import UserError, check
from common.files import new_file, read_json

EOT = '<|endoftext|>'
STORED = 'tokenizer.json:'      # and the start of its sha256: the name of a TokenizerJson
# the names of the end-of-text token in public tokenizers
ENDS = (EOT, '<|end_text|>', '</s>', '<eos>', '<|im_end|>')
# Byte-level tokenizers write each byte as a letter: a printable byte as the letter of that number
# (Latin-1), the others, in order, as the letters from number 256 on.
NOT_PRINTABLE = [*range(33), *range(127, 161), 173]
BYTES = {chr(byte): bytes([byte]) for byte in range(256) if byte not in NOT_PRINTABLE}
BYTES |= {chr(256 + i): bytes([byte]) for i, byte in enumerate(NOT_PRINTABLE)}
# The library of tokenizer.json takes 150 bytes of memory for each character of a text. So a long
# text is encoded in pieces of at least 65,536 characters. It is cut behind a line break that has no
# whitespace on either side: there most tokenizers have no token that crosses the cut (see can_cut).
PIECE = 2 ** 16
LINE_BEGINS = re.compile(r'(?<=\S\n)(?=\S)')


class TokenizerJson:
    """
    The encoding of a tokenizer.json, from the text of that file. Its name is 'tokenizer.json:' and
    the start of the text's sha256: wherever the file lies, it is the same tokenizer.

    start       the tokens that the file adds before each text: `<s>` in many models
    ends        the tokens that end a text; the first, eot_token, is put behind each document. It is
                the one that the file adds after each text, if it adds one

    ValueError for a file whose settings this class does not support.
    """

    def __init__(self, text):
        from tokenizers import Tokenizer  # here, since most runs need none
        self.text = text
        self.name = STORED + hashlib.sha256(text.encode()).hexdigest()[:16]
        self.tokenizer = Tokenizer.from_str(as_we_use_it(text))
        self.tokenizer.encode_special_tokens = True     # '<s>' in a text is three letters
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.n_vocab = 1 + max(vocab.values())
        self.byte_level = 'ByteLevel' in str(self.tokenizer.decoder)
        added = self.tokenizer.get_added_tokens_decoder()
        self.added = {token: added[token].content.encode() for token in added}
        # does a text have the same tokens if it is cut between two lines? One example answers for
        # all texts: a heuristic
        self.can_cut = self.ids_of('a\nb') == self.ids_of('a\n') + self.ids_of('b')

        self.start, added_after = tokens_around(self.tokenizer)
        self.ends = end_tokens(added_after, vocab)
        self.eot_token = self.ends[0]
        for token in self.ends:
            end = self.tokenizer.id_to_token(token)
            check(token not in self.encode_ordinary(end),
                  f"it reads the letters '{end}' in a text as the end of the text")

    def save(self, folder):
        """Write folder/tokenizer.json."""
        with new_file(os.path.join(folder, 'tokenizer.json'), encoding='utf-8') as f:
            f.write(self.text)

    def ids_of(self, text):
        """The tokens of a text, in the library's way."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode(self, text, allowed_special=()):
        if not allowed_special:
            return [*self.start, *self.encode_ordinary(text)]
        self.tokenizer.encode_special_tokens = False    # '<s>' in this text is one token
        try:
            tokens = self.ids_of(text)
        finally:
            self.tokenizer.encode_special_tokens = True
        if tokens[:len(self.start)] == self.start:      # a chat prompt often has them already
            return tokens
        return [*self.start, *tokens]

    def encode_ordinary(self, text):
        # a lone surrogate cannot be encoded: it becomes '?' (tiktoken writes \ufffd)
        text = text.encode('utf-8', 'replace').decode()
        pieces = pieces_of(text) if self.can_cut else [text]
        return [token for piece in pieces for token in self.ids_of(piece)]

    def decode(self, tokens):
        if self.byte_level:     # the library would take each letter of an added token for a byte
            return b''.join(map(self.decode_single_token_bytes, tokens)).decode(errors='replace')
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def decode_single_token_bytes(self, token):
        if token in self.added:
            return self.added[token]
        text = self.tokenizer.id_to_token(token) or ''      # a file may leave out some numbers
        if self.byte_level:
            return b''.join(BYTES.get(letter, letter.encode()) for letter in text)
        if re.fullmatch('<0x[0-9A-F]{2}>', text):           # SentencePiece's way to write a byte
            return bytes.fromhex(text[3:5])
        return text.replace('\u2581', ' ').encode()         # SentencePiece's space


def tokens_around(tokenizer):
    """The tokens that a file adds before each text, and those that it adds after it: two lists."""
    example = tokenizer.encode('a')
    is_added = example.special_tokens_mask              # [1, 0, 1] of <s> a </s>
    n_before = len([*takewhile(bool, is_added)])
    n_of_text = is_added.count(0)
    return example.ids[:n_before], example.ids[n_before + n_of_text:]


def end_tokens(added_after, vocab):
    """The tokens that end a text: what the file adds after it, then those of known names."""
    check(len(added_after) <= 1,
          f'it adds {len(added_after)} tokens after each text, and this program can use one')
    known = [vocab[end] for end in ENDS if end in vocab]
    ends = added_after + [token for token in known if token not in added_after]
    check(ends, f"it has no end-of-text token: one of {', '.join(ENDS)}")
    return ends


def as_we_use_it(text):
    """
    The text of a tokenizer.json with settings that encode a whole text, always in one way, and in
    which every token that ends a text is a special one.
    """
    settings = json.loads(text)
    settings['truncation'] = None
    settings['padding'] = None
    if settings['model'].get('dropout'):        # leaves out merges by chance, to train a model
        settings['model']['dropout'] = None
    for token in settings.get('added_tokens', []):
        if token['content'] in ENDS:
            token['special'] = True
    return json.dumps(settings)


def pieces_of(text):
    """A text in pieces of at least PIECE characters (the last may be shorter), see LINE_BEGINS."""
    start = 0
    while cut := LINE_BEGINS.search(text, start + PIECE):
        yield text[start:cut.start()]
        start = cut.start()
    yield text[start:]


def check_settings(encoding, folder):
    """
    ValueError if tokenizer_config.json beside a tokenizer.json asks for a token before or behind
    each text that the tokenizer.json does not add.
    """
    settings = read_json(os.path.join(folder, 'tokenizer_config.json'))
    end = settings.get('eos_token')
    if isinstance(end, dict):
        end = end['content']
    our_end = encoding.tokenizer.id_to_token(encoding.eot_token)        # we add it ourselves
    is_added = dict(add_bos_token=bool(encoding.start), add_eos_token=our_end == end)
    for setting in is_added:
        if settings.get(setting) and not is_added[setting]:
            raise UserError(f'tokenizer_config.json says {setting}, but tokenizer.json does not '
                            'add that token to a text: put it into its post_processor, or set '
                            f'{setting} to false')


def train_bpe(texts, vocab_size):
    """A byte-level BPE of at most vocab_size tokens, trained on texts -> its TokenizerJson."""
    from tokenizers import ByteLevelBPETokenizer
    print(f'training a BPE of {vocab_size} tokens; long stretches without a blank make it slow',
          file=sys.stderr)
    tokenizer = ByteLevelBPETokenizer()
    pieces = (piece for text in texts for piece in pieces_of(text))
    tokenizer.train_from_iterator(pieces, vocab_size, special_tokens=[EOT], show_progress=False)
    return TokenizerJson(tokenizer.to_str(pretty=True))
