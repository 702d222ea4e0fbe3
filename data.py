"""
Turn text into tokens on disk, and read them back.

    python data.py                      torchdocs: the documentation in torch's own Python files
    python data.py NAME --path=TEXT     your own UTF-8 text: a file, or a folder of .txt files;
                                        --bpe=4096 trains a byte-level BPE on it
    python data.py fineweb              FineWeb, streamed by `datasets`, in tokens of gpt2

writes data/NAME:

    train.bin, val.bin      tokens as uint16, little-endian. A document is a begin-of-text token (if
                            the tokenizer has one), its text, and an end-of-text token
    meta.json               tokenizer, vocab_size, the flags of the call, and complete, which is
                            false if a stream of FineWeb broke or was stopped
    tokenizer.json          the tokenizer, if it is a file of this kind or trained with --bpe

A folder of nanoGPT's with train.bin and val.bin can be put there as it is: its tokens are gpt2's.

A text file is one document, or several if <|endoftext|> stands between them. A tokenizer is
`bytes`, one of tiktoken's such as gpt2, or the path of a tokenizer.json. What is held out:

    own text     the last 5% of the text (files in order of name), cut between documents, or inside
                 one that has more than a tenth; or the text of --val_path, whose documents are
                 then left out of --path
    torchdocs    the first document and every 48th after it
    FineWeb      the first document and every 2,000th after it

    x, y    (B, T) int64, tokens and their labels: on text the next token, on a task see tasks.py

Paper: App. B (FineWeb, 300M tokens).
"""
import functools
import glob
import lzma
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import tasks
from common.configurator import Count, Positive, configure
from common.encoding import EOT, STORED, open_encoding, train_bpe
from common.errors import OWN_FILE, check, did_you_mean, explain, run
from common.files import ROOT, read_json, sha256_of, write_json

# --------------------------------------------------------------------------------------------------
name = 'torchdocs'          # torchdocs, fineweb, or any name for text of your own
path: str | None = None     # own text: a file or folder; fineweb: another data set of the hub
val_path: str | None = None     # own text to hold out; None = the last 5% of path
tokenizer: str | None = None    # None = bytes, and gpt2 for fineweb
bpe: Count | None = None    # own text: train a byte-level BPE of this many tokens on it
tokens: Positive | None = None  # fineweb: how many to take; None = 3e8, the paper's budget
subset: str | None = None   # fineweb: such as sample-100BT, CC-MAIN-2024-10; None = sample-10BT
overwrite = False           # replace a data set
# --------------------------------------------------------------------------------------------------

# where documents come from: (split, text) pairs ---------------------------------------------------

def torchdocs():
    """The documentation in the Python files of torch 2.13, which comes with this code."""
    with lzma.open(f'{ROOT}/assets/torchdocs.txt.xz', 'rt', encoding='utf-8') as f:
        for number, text in enumerate(f.read().split(EOT)):
            yield 'train' if number % 48 else 'val', text


def fineweb(path, subset):
    """FineWeb, or another data set of the hub that has a column `text`."""
    with explain(f'cannot stream {path} {subset}', 'check the network, --path and --subset'):
        import datasets  # takes a second
        rows = datasets.load_dataset(path, subset, split='train', streaming=True)
        texts = (row['text'] for row in rows.select_columns('text') if row['text'])
        for number, text in enumerate(texts):
            yield 'train' if number % 2000 else 'val', text


def own_text(path, val_path=None):
    """The documents of own text. val_path: what is held out, None = the last 5%."""
    texts = documents_of(path)
    if val_path is None:
        return hold_out(texts)
    held_out = documents_of(val_path)
    known = set(held_out)               # its file, or a copy of it, may stand in `path`
    train = [text for text in texts if text not in known]
    return [('train', text) for text in train] + [('val', text) for text in held_out]


def hold_out(texts):
    """
    Hold out the last 5% of the texts, from the border between documents nearest to it, or within
    the document there if that has more than a tenth of all.
    """
    check(texts, 'there is no text: give a file, or a folder of .txt files')
    lengths = np.array([len(text) for text in texts])
    ends = lengths.cumsum()
    cut = int(0.95 * ends[-1])
    there = np.searchsorted(ends, cut, side='right')        # the document in which the cut is
    if 10 * lengths[there] <= ends[-1]:
        cut = ends[np.abs(ends - cut).argmin()]
    documents = []
    for text, start in zip(texts, ends - lengths):
        place = max(0, cut - start)
        documents += [('train', text[:place]), ('val', text[place:])]
    return [(split, text) for split, text in documents if text]


def documents_of(path):
    """The documents of a text file, or of the .txt files in a folder in order of name."""
    files = [path]
    if os.path.isdir(path):
        files = glob.glob(f'{glob.escape(path)}/**/*.txt', recursive=True)
    documents = []
    for file in sorted({os.path.realpath(file) for file in files}):     # each once
        with explain(f"cannot read '{file}'", 'give UTF-8 text', UnicodeDecodeError):
            documents += Path(file).read_text(encoding='utf-8-sig').split(EOT)
    return [text for text in documents if text.strip()]


# documents -> data/NAME ---------------------------------------------------------------------------

# which flags each kind of data takes
OF_OWN = 'path', 'val_path', 'tokenizer', 'bpe'
OF = dict(torchdocs=('tokenizer',), fineweb=('path', 'tokenizer', 'tokens', 'subset'))


def make(name, path=None, val_path=None, tokenizer=None, bpe=None, tokens=None, subset=None,
         overwrite=False):
    """Write data/NAME -> its meta, or keep it if the same call made it. Arguments: the knobs."""
    folder = f'data/{name}'
    check(re.fullmatch(r'\w[\w.-]*', name) and name not in tasks.TASKS,
          f"'{name}' is a task, or cannot be the name of a folder: choose another name")
    is_web = name == 'fineweb'
    is_own = name not in OF
    call = dict(path=path, val_path=val_path, tokenizer=tokenizer, bpe=bpe, tokens=tokens,
                subset=subset)
    others = [flag for flag in call.keys() - OF.get(name, OF_OWN) if call[flag] is not None]
    check(not others, f"{name} takes no {', '.join(others)}; it takes "
          f"{', '.join(OF.get(name, OF_OWN))}. Text of your own has a name of its own")
    check(path or not is_own, f'there is no text: python data.py {name} --path=TEXT')
    if os.path.exists(folder):
        if not overwrite:
            return found(folder, call)
        others = {*os.listdir(folder)} - {'train.bin', 'val.bin', 'meta.json', 'tokenizer.json'}
        check(not others, f"{folder} would lose {', '.join(others)}: choose another name")

    # documents and encoding
    if is_web:
        documents = fineweb(path or 'HuggingFaceFW/fineweb', subset or 'sample-10BT')
    elif is_own:
        documents = own_text(path, val_path)
    else:
        documents = torchdocs()
    if bpe:
        check(not tokenizer, '--bpe trains a tokenizer: leave out --tokenizer')
        check(bpe > 256, f'a BPE has 256 bytes and an end of text, and bpe = {bpe}')
        encoding = train_bpe([text for split, text in documents if split == 'train'], bpe)
    else:
        encoding = open_encoding(tokenizer or ('gpt2' if is_web else 'bytes'))
    check(encoding.n_vocab <= 2 ** 16, f'{encoding.n_vocab} tokens, and uint16 has room for 65536: '
          'use another tokenizer')

    # into a private folder, which gets its name when all is there; a kill leaves it behind
    os.makedirs('data', exist_ok=True)
    with tempfile.TemporaryDirectory(dir='data', prefix=f'{name}.') as private:
        new = f'{private}/new'
        os.mkdir(new)
        if encoding.name.startswith(STORED):
            encoding.save(new)
        meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, call=call, complete=False)
        write_json(meta, f'{new}/meta.json')    # first: a full disk would have no room for it later
        try:
            write(documents, encoding, new, (tokens or 3e8) if is_web else math.inf)
            write_json(meta | dict(complete=True), f'{new}/meta.json')
        except BaseException:   # a part stays where nothing is yet, with a window of groups.py
            if is_web and not os.path.exists(folder) and min(tokens_in(new).values()) > 512:
                os.rename(new, folder)
                print(f'{folder} keeps what was written: {in_words(folder)}', file=sys.stderr)
            raise
        if overwrite and os.path.exists(folder):
            os.rename(folder, f'{private}/old')
        try:
            os.rename(new, folder)
        except OSError:
            return found(folder, call)      # another process was faster
    return read_meta(folder)


def found(folder, call):
    """The meta of a folder that is there already. ValueError if it was made by another call."""
    meta = read_meta(folder)
    check(meta.get('call') == call, f'{folder} was made with other flags: --overwrite replaces it, '
          'or choose another name')
    print(f'{folder} is there already; changed text needs --overwrite', file=sys.stderr)
    return meta


def write(documents, encoding, folder, most_tokens):
    """Documents -> train.bin and val.bin."""
    n_tokens = 0
    with open(f'{folder}/train.bin', 'wb') as train, open(f'{folder}/val.bin', 'wb') as val:
        bins = dict(train=train, val=val)
        for number, (split, text) in enumerate(documents):
            ids = encoding.encode(text) + [encoding.eot_token]
            bins[split].write(np.array(ids, dtype='<u2').tobytes())
            n_tokens += len(ids)
            if n_tokens >= most_tokens:
                break
            if number % 1000 == 999 and sys.stderr.isatty():
                print(f'{n_tokens / 1e6:.1f}M tokens', end='\r', file=sys.stderr)
    n = tokens_in(folder)
    check(n['train'] and n['val'], 'too little text: the training or the held-out part is empty')


# a folder of data/ --------------------------------------------------------------------------------

def read_meta(folder):
    """What meta.json holds. nanoGPT's folders have none, and their tokens are gpt2's."""
    if os.path.exists(f'{folder}/meta.json'):
        return read_json(f'{folder}/meta.json')
    check(not os.path.exists(f'{folder}/meta.pkl'), f'the tokens in {folder} are letters, numbered '
          f'by meta.pkl: make a data set of their text, --path={folder}/input.txt')
    return dict(tokenizer='gpt2', vocab_size=50257)


def tokens_in(folder):
    """How many tokens each split has."""
    return {split: os.path.getsize(f'{folder}/{split}.bin') // 2 for split in ('train', 'val')}


def in_words(folder):
    """'900 tokens to train on and 100 held out (bytes)'."""
    n = tokens_in(folder)
    meta = read_meta(folder)
    part = '' if meta.get('complete', True) else ', only a part of what was asked for'
    return (f"{n['train']:,} tokens to train on and {n['val']:,} held out "
            f"({meta['tokenizer']}){part}")


# data/NAME -> batches -----------------------------------------------------------------------------

def open_data(name, model_tokenizer=None, vocab_size=math.inf):
    """
    The data set or task `name` -> a Text or a tasks.Problems. torchdocs is made if it is missing.
    ValueError if it does not fit model_tokenizer and vocab_size, those of the model that reads it.
    """
    check(name, 'this model came without a data set: name one with --dataset')
    if name == 'torchdocs' and not os.path.exists('data/torchdocs'):
        make(name)
    examples = tasks.Problems(name) if tasks.is_task(name) else Text(name)
    check(model_tokenizer in (None, examples.tokenizer) and examples.vocab_size <= vocab_size,
          f"data set '{name}' has {examples.vocab_size} tokens of {examples.tokenizer}, and the "
          f'model reads {vocab_size} of {model_tokenizer}: choose another --dataset')
    return examples


def examples_of(checkpoint, dataset=None):
    """The data set or task that a checkpoint's model has learned, or another one with its words."""
    return open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                     checkpoint['model_args']['vocab_size'])


class Text:
    """
    The tokens of data/NAME, with its splits as uint16 memmaps. A task (tasks.Problems) has the same
    methods, all_held_out(T) for the depths of labels, and these attributes:

        name                    of the data set, or of the task without its knobs
        description             the data or the task, in words
        sha256                  of what is trained on, which --resume compares; of a task its name
                                and knobs, not its code: start anew once its words have changed
        tokenizer, vocab_size   the name of its encoding; how many tokens there are
        tokenizer_json          the TokenizerJson of that name; None if it is no such file
        is_task                 only some tokens have labels, and accuracy counts, not the loss
    """
    is_task = False
    tokenizer_json = None

    def __init__(self, name):
        folder = f'data/{name}'
        prepared = [file.parent.name for file in Path('data').glob('*/train.bin')]
        check(name in prepared, f"no data set or task '{name}'"
              f"{did_you_mean(name, [*tasks.TASKS, 'torchdocs', *prepared])} (text is prepared "
              f"with python data.py {name}{' --path=TEXT' * (name != 'fineweb')}; {OWN_FILE})")
        meta = read_meta(folder)
        self.name = name
        self.folder = folder
        # a full disk may have halved the last token
        self.train, self.val = (np.memmap(f'{folder}/{split}.bin', dtype='<u2', mode='r', shape=n)
                                for split, n in tokens_in(folder).items())
        self.tokenizer = meta['tokenizer']
        self.vocab_size = meta['vocab_size']
        if self.tokenizer.startswith(STORED):
            self.tokenizer_json = open_encoding(self.tokenizer, folder)
        self.description = f'{name}: {in_words(folder)}'

    @functools.cached_property
    def sha256(self):
        return sha256_of(f'{self.folder}/train.bin')

    def check_fits(self, T):
        """ValueError unless each split has a window of T tokens and the token after it."""
        shortest = min(len(self.train), len(self.val))
        check(shortest > T, f'{self.name} has a split of {shortest} tokens, and no window of {T} '
              'with a next token: lower --block_size')

    def batch(self, rng, rows, T, mine=slice(None)):
        """Draw `rows` windows of the training text -> those in the slice `mine`: x, y (B, T)."""
        return windows(self.train, rng.integers(len(self.train) - T, size=rows)[mine], T)

    def n_held_out(self, T):
        """How many held-out windows there are, without overlap."""
        return (len(self.val) - 1) // T

    def held_out(self, numbers, T):
        """Held-out windows by number -> x, y (N, T)."""
        return windows(self.val, T * np.asarray(numbers), T)


def windows(ids, starts, T):
    """x, y (B, T) int64: the T tokens from each of the starts, and the same shifted by one."""
    rows = np.lib.stride_tricks.sliding_window_view(ids, T + 1)[starts]             # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def main():
    make(name, path, val_path, tokenizer, bpe, tokens, subset, overwrite)
    print(f'data/{name}: {in_words(f"data/{name}")}; next: python train.py --dataset={name} '
          f'--out_dir=out-{name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
