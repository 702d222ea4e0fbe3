"""
Text <-> tokens: a tiktoken encoding, bytes, the words of a task, or a tokenizer.json.

Not run by itself: data.py, sample.py and geometry.py call get_encoding, which returns a
tiktoken.Encoding or as much of one as they use.
"""
import os

import tiktoken

import tasks

EOT = '<|endoftext|>'


def get_encoding(name, folder='.'):
    """
    name: bytes, a tiktoken encoding's, a task's, or the path of a tokenizer.json; that is also
    looked for in `folder`, beside the checkpoint. ValueError if it cannot be had or fits no uint16.
    """
    if name is None:
        raise ValueError('this model came without a tokenizer.json, so there is no text for it: '
                         'read it again from a folder that has one; all but text works')
    if name.partition(':')[0] in tasks.TASKS:
        return tasks.Words(name)
    if name == 'bytes':         # token i is byte i, and 256 is end-of-text
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]{1,16}', mergeable_ranks=ranks,
                                 special_tokens={EOT: 256})
    encoding = TokenizerJson(name, folder) if name.endswith('.json') else of_tiktoken(name)
    if encoding.n_vocab > 2 ** 16:
        raise ValueError(f"'{name}' has {encoding.n_vocab} tokens, more than uint16 holds (65536): "
                         'use gpt2 or bytes')
    return encoding


def of_tiktoken(name):
    names = tiktoken.list_encoding_names()
    if name not in names:
        raise ValueError(f"unknown tokenizer '{name}': choose bytes, one of {', '.join(names)}, or "
                         'the path of a tokenizer.json')
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:      # requests' errors, and tiktoken's own for a file cut short
        raise ValueError(
            f"the '{name}' encoding is not on this machine and could not be fetched "
            f'({type(error).__name__}): go online once, or point TIKTOKEN_CACHE_DIR at a folder '
            'that has it, or make the data with --tokenizer=bytes, which needs nothing') from error


class TokenizerJson:
    """A tokenizer.json, as public models carry it, read by the library `tokenizers`."""

    def __init__(self, path, folder='.'):
        from tokenizers import Tokenizer
        here = path if os.path.exists(path) else os.path.join(folder, os.path.basename(path))
        try:
            self.tokenizer = Tokenizer.from_file(here)
        except Exception as error:      # the library has a plain Exception for all that is wrong
            raise ValueError(f"'{here}' is no tokenizer.json that can be read ({error}): take the "
                             'one that came with the weights') from None
        self.name = path
        self.n_vocab = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())
        # the added tokens stand for themselves; of byte-level tokens each letter is a byte
        self.added = self.tokenizer.get_added_tokens_decoder()
        self.byte_level = 'ByteLevel' in str(self.tokenizer.decoder)
        self.byte_fallback = 'ByteFallback' in str(self.tokenizer.decoder)      # <0x0A>
        ends = [i for i, token in self.added.items() if token.content in ENDS]
        self.eot_token = min(ends, default=None)
        if self.eot_token is None:
            raise ValueError(f"'{here}' has no end-of-text token: one of {', '.join(ENDS)}")

    def encode(self, text, allowed_special=()):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts, num_threads=1):
        rows = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [row.ids for row in rows]

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token):
        text = self.tokenizer.id_to_token(token)
        if text is None or token in self.added:
            return (text or '').encode()
        if self.byte_level:
            return b''.join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in text)
        if self.byte_fallback and text[:3] == '<0x':
            return bytes.fromhex(text[3:5])
        return text.replace('\u2581', ' ').encode()         # the blank of other kinds


# what public tokenizers call the end of a text
ENDS = (EOT, '<|end_text|>', '<|im_end|>', '</s>', '<eos>')
# GPT-2's letters of the bytes: printable ones stand for themselves, the rest follow from 256 on
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
REST = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = ({chr(byte): byte for byte in PRINTABLE}
         | {chr(256 + i): byte for i, byte in enumerate(REST)})
