"""
Text into tokens and back: bytes, tiktoken's encodings, the tokenizer.json of public models, and the
words of a task.

The name of an encoding is `bytes`, one of tiktoken's such as gpt2, the path of a tokenizer.json,
`tokenizer.json:SHA256`, the copy in the folder of a checkpoint or data set, or a task with the
knobs on which its words depend, calc:p=5, which only tasks.Problems opens. An encoding has

    name, n_vocab       its tokens are the numbers below n_vocab
    eot_token           the token that is written after each document (not of a task)
    ends                all tokens that end a text
    encode(text)        -> tokens; in front of them the begin-of-text token, if the tokenizer has
                        one. '<s>' in the text is three letters, never a token that begins or ends
    decode(tokens)      -> text, with '\ufffd' for a part of a letter
"""
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import tiktoken

from common.errors import OWN_FILE, check, explain
from common.files import new_file

EOT = '<|endoftext|>'
STORED = 'tokenizer.json:'      # and the start of its sha256: the name of a TokenizerJson
# the names of the end-of-text token in public tokenizers
ENDS = EOT, '<|end_text|>', '</s>', '<eos>', '<|im_end|>'


def open_encoding(name, folder=None):
    """
    The encoding of texts of this name. ValueError if it is unavailable. folder: of a checkpoint or
    a data set, whose tokenizer.json is read.
    """
    check(name, 'this model came without a tokenizer.json, so it cannot read or write text')
    if name == 'bytes':
        ranks = {bytes([i]): i for i in range(256)}         # token i is byte i
        # pieces of any length give the same tokens, and those of 16 letters are fast
        return of_tiktoken(tiktoken.Encoding('bytes', pat_str=r'[\s\S]{1,16}',
                                             mergeable_ranks=ranks, special_tokens={EOT: 256}))
    if name.startswith(STORED) or name.endswith('.json'):
        path = os.path.join(folder, 'tokenizer.json') if folder else name
        with explain(f"cannot read '{path}'", 'take the tokenizer.json beside the weights'):
            encoding = TokenizerJson(Path(path).read_text(encoding='utf-8'))
        check(encoding.name == name or not name.startswith(STORED),
              f"'{path}' is not the tokenizer that belongs here (its sha256 differs): restore it")
        return encoding
    check(':' not in name, f"the task {name.rstrip(':')} is not known: {OWN_FILE}")
    with explain(f"cannot load the tokenizer '{name}'", 'bytes needs no network'):
        return of_tiktoken(tiktoken.get_encoding(name))


def of_tiktoken(encoding):
    """An encoding of tiktoken, with the names of this file."""
    return SimpleNamespace(name=encoding.name, n_vocab=encoding.n_vocab,
                           eot_token=encoding.eot_token, ends=[encoding.eot_token],
                           encode=encoding.encode_ordinary, decode=encoding.decode)


class TokenizerJson:
    """The encoding of a tokenizer.json, from the text of that file."""

    def __init__(self, text):
        from tokenizers import Tokenizer  # here, since most runs need none
        self.text = text
        self.name = STORED + hashlib.sha256(text.encode()).hexdigest()[:16]
        self.tokenizer = Tokenizer.from_str(text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # '</s>' in a text is four letters
        known = [end for end in ENDS if self.tokenizer.token_to_id(end) is not None]
        check(known, f"it has no end-of-text token: one of {', '.join(ENDS)}")
        self.tokenizer.add_special_tokens(known)
        self.tokenizer.encode_special_tokens = True
        self.n_vocab = 1 + max(self.tokenizer.get_vocab().values())
        self.ends = [self.tokenizer.token_to_id(end) for end in known]
        self.eot_token = self.ends[0]

    def save(self, folder):
        """Write folder/tokenizer.json."""
        with new_file(os.path.join(folder, 'tokenizer.json')) as f:
            f.write(self.text)

    def encode(self, text):
        tokens = self.tokenizer.encode(text).ids
        if tokens and tokens[-1] in self.ends:      # some files add one to each text
            tokens.pop()
        return tokens

    def decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


class Words:
    """The words of a task: each is a token. A problem has no end."""
    ends = ()

    def __init__(self, name, vocabulary):
        self.name = name
        self.vocabulary = vocabulary
        self.n_vocab = len(vocabulary)
        self.tokens = {word: token for token, word in enumerate(vocabulary)}

    def encode(self, text):
        """Words separated by blanks -> tokens. ValueError for an unknown word."""
        words = text.split()
        for word in words:
            check(word in self.tokens, f"'{word}' is not a word of {self.name.rstrip(':')}: choose "
                  f"from {' '.join(self.vocabulary)}")
        return [self.tokens[word] for word in words]

    def decode(self, tokens):
        return ' '.join(self.texts(tokens))

    def texts(self, tokens):
        """The word of each token; none for NOT_ASKED, #NUMBER for one that a model has beside."""
        words = dict(enumerate(self.vocabulary))
        return ['' if token < 0 else words.get(token, f'#{token}') for token in tokens]


def train_bpe(texts, vocab_size):
    """A byte-level BPE of at most vocab_size tokens, trained on texts -> its TokenizerJson."""
    from tokenizers import ByteLevelBPETokenizer
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size, special_tokens=[EOT], show_progress=False)
    return TokenizerJson(tokenizer.to_str(pretty=True))
