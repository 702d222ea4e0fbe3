"""
Turn text into tokens on disk, and read them back.

    python data.py                      torchdocs: the documentation in torch's own Python files
    python data.py NAME --path=TEXT     your own UTF-8 text: a file, a folder of .txt files, or a
                                        glob; --bpe=4096 trains a byte-level BPE on it.
                                        --path=torchdocs is the text above
    python data.py fineweb              FineWeb, streamed by `datasets`, in tokens of gpt2

writes data/NAME:

    train.bin, val.bin      tokens as uint16, little-endian. A document is a begin-of-text token (if
                            the tokenizer has one), its text, and an end-of-text token
    meta.json               tokenizer, vocab_size, source, the flags of the call; for each split its
                            documents, tokens, and bytes of text
    tokenizer.json          the tokenizer, if it is a file of this kind or trained with --bpe

A folder of nanoGPT's with train.bin and val.bin can be put there as it is: its tokens are gpt2's.

A text file is one document, or several if <|endoftext|> stands between them. All files together
must fit into memory. A tokenizer is `bytes` (nothing to download), one of tiktoken's such as gpt2,
or the path of a tokenizer.json. What is held out, as val.bin:

    own text     files with the word val, valid, validation, dev, eval or test in their name, or in
                 that of a folder below the path; if no file or every file has one, the first
                 document and every 20th after it; of a single document its last 5%
    torchdocs    the first document and every 48th after it
    FineWeb      the first document and every 2,000th after it

From data/NAME to a batch:

    text, FineWeb   ->  train.bin, val.bin  ->  x, y      data.Text
    a task          ->                          x, y      tasks.Problems

    x   (B, T) int64: input tokens
    y   (B, T) int64: the label of each input token. On text that is the next token; on a task the
        right answer, or tasks.NOT_ASKED

A batch is B random starts in train.bin: x is T tokens from there, and y the same shifted by one.

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
import unicodedata
from pathlib import Path

import numpy as np
import torch

import tasks
from common.encoding import EOT, STORED, open_text_encoding, train_bpe
from common.errors import check, did_you_mean, explain
from common.evaluation import spread
from common.files import ROOT, read_json, sha256_of, write_json

# --------------------------------------------------------------------------------------------------
name = 'torchdocs'          # torchdocs, fineweb, or any name for text of your own
path: str | None = None     # own text: a file, folder or glob; fineweb: another data set of the hub
tokenizer: str | None = None    # None = bytes, and gpt2 for fineweb
bpe: int | None = None      # train a byte-level BPE of this many tokens; not on fineweb
tokens = 3e8                # fineweb: how many tokens to take (the paper's budget)
subset = 'sample-10BT'      # fineweb: sample-100BT, sample-350BT, default, CC-MAIN-2024-10
overwrite = False           # replace a data set
# --------------------------------------------------------------------------------------------------

SPLITS = 'train', 'val'
HELD_OUT = {'val', 'valid', 'validation', 'dev', 'eval', 'test'}
OURS = {'train.bin', 'val.bin', 'meta.json', 'tokenizer.json'}
RECORDS = {'.jsonl': 'json', '.json': 'json', '.csv': 'csv', '.parquet': 'parquet'}


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


def own_text(path):
    """The documents of the text files at path. A line says what is held out."""
    if os.path.isdir(path):
        found = glob.glob(f'{glob.escape(path)}/**/*.txt', recursive=True)
    elif os.path.isfile(path):      # whose name may look like a pattern
        found = [path]
    else:
        found = glob.glob(path, recursive=True)
    files = sorted({os.path.realpath(file) for file in found if os.path.isfile(file)})  # each once
    check(files, f"no text at '{path}': give a UTF-8 text file, a folder of .txt files, or a glob")
    root = os.path.commonpath(files)        # the name of a folder with all files does not count
    documents = []
    held_out = []
    for file in files:
        words = re.findall('[a-z]+', os.path.relpath(file, root).lower())
        split = 'train' if HELD_OUT.isdisjoint(words) else 'val'
        if split == 'val':
            held_out.append(file)
        documents += [(split, text) for text in read_text(file).split(EOT) if text.strip()]
    if 0 < len(held_out) < len(files):
        print(f'held out, by their names: {len(held_out)} of {len(files)} files, such as '
              f'{held_out[0]}', file=sys.stderr)
        return documents

    # the names do not say what is held out
    texts = [text for _, text in documents]
    if len(texts) < 2:
        print('held out: the last 5% of the text', file=sys.stderr)
        text = ''.join(texts)
        middle = int(0.95 * len(text))
        return [('train', text[:middle]), ('val', text[middle:])]
    print(f'held out: the first of {len(texts)} documents and every 20th after it', file=sys.stderr)
    return [('train' if number % 20 else 'val', text) for number, text in enumerate(texts)]


def read_text(file):
    """The text of a file. ValueError if it is no text."""
    kind = RECORDS.get(os.path.splitext(file)[1].lower())
    check(not kind, f"'{file}' holds records, not text: write their texts into a .txt file, with "
          f"{EOT} between them; datasets.load_dataset('{kind}', data_files='{file}') reads them")
    with explain(f"cannot read '{file}'", 'give UTF-8 text', UnicodeDecodeError):
        return Path(file).read_text(encoding='utf-8-sig')


# documents -> data/NAME ---------------------------------------------------------------------------

def make(name, path=None, tokenizer=None, bpe=None, tokens=tokens, subset=subset,
         overwrite=False):
    """
    Write data/NAME -> its meta. The arguments are the knobs above. If the same call has made it
    already, it stays.
    """
    folder = f'data/{name}'
    call = dict(path=path, tokenizer=tokenizer, bpe=bpe, tokens=tokens, subset=subset)
    check(re.fullmatch(r'\w[\w.-]*', name), f"'{name}' cannot be the name of a folder in data/")
    check(name not in tasks.TASKS, f"'{name}' is the name of a task: choose another one")
    check(name != 'torchdocs' or not path,
          f'text of your own needs a name of its own: python data.py NAME --path={path}')
    check(bpe is None or bpe > 256, f'bpe must be at least 257, the bytes and {EOT}, not {bpe}')
    check(not bpe or name != 'fineweb', '--bpe holds all text in memory: fineweb is too large')
    check(not bpe or not tokenizer, 'give --bpe or --tokenizer, not both')
    if os.path.exists(folder) and not overwrite:
        meta = read_meta(folder)
        check(meta.get('call') == call, f'{folder} was made in another way: --overwrite replaces '
              'it, or choose another name')
        print(f'{folder} is there already, and the text was not read again: --overwrite makes it '
              'anew', file=sys.stderr)
        return meta
    if os.path.exists(folder):
        others = sorted({*os.listdir(folder)} - OURS)
        check(not others, f'{folder} holds {others[:1]}, which would be lost: choose another name')

    # documents and encoding
    if name == 'fineweb':
        source = path or 'HuggingFaceFW/fineweb'
        documents = fineweb(source, subset)
    elif name == 'torchdocs' or path == 'torchdocs':
        source = 'torchdocs'
        documents = torchdocs()
    else:
        check(path, f'give the text: python data.py {name} --path=TEXT')
        source = path
        documents = own_text(path)
    if bpe is not None:
        documents = list(documents)         # read twice: to train the BPE, and to encode
        encoding = train_bpe([text for split, text in documents if split == 'train'], bpe)
    else:
        encoding = open_text_encoding(tokenizer or ('gpt2' if name == 'fineweb' else 'bytes'))
    check(encoding.n_vocab <= 2 ** 16, f'{encoding.n_vocab} tokens, and uint16 has room for 65536: '
          'use another tokenizer')

    # into a private folder, which gets its name when all is there; a kill leaves it behind
    os.makedirs('data', exist_ok=True)
    with tempfile.TemporaryDirectory(dir='data', prefix=f'{name}.') as private:
        new = f'{private}/new'
        os.mkdir(new)
        counts = write(documents, encoding, new, tokens if name == 'fineweb' else math.inf)
        if encoding.name.startswith(STORED):
            encoding.save(new)
        meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, source=source, call=call)
        meta |= counts
        write_json(meta, f'{new}/meta.json')
        if overwrite and os.path.exists(folder):
            os.rename(folder, f'{private}/old')
        os.rename(new, folder)
    return meta


def read_meta(folder):
    """What meta.json holds. nanoGPT's folders have none, and their tokens are gpt2's."""
    if os.path.exists(f'{folder}/meta.json'):
        return read_json(f'{folder}/meta.json')
    check(not os.path.exists(f'{folder}/meta.pkl'), f'the tokens in {folder} are letters, numbered '
          f'by meta.pkl: make a data set of their text, --path={folder}/input.txt')
    return dict(tokenizer='gpt2', vocab_size=50257)


def write(documents, encoding, folder, most_tokens):
    """Documents -> train.bin and val.bin; returns what meta.json says of the splits."""
    from tqdm import tqdm
    counts = {split: dict(documents=0, tokens=0, bytes=0) for split in SPLITS}
    n_tokens = 0
    bar = tqdm(total=None if most_tokens == math.inf else most_tokens, unit=' tokens',
               unit_scale=True, leave=False, disable=None)
    with open(f'{folder}/train.bin', 'wb') as train, open(f'{folder}/val.bin', 'wb') as val, bar:
        bins = dict(train=train, val=val)
        for number, (split, text) in enumerate(documents):
            if number < 10:
                check_comes_back(text[:100_000], encoding)
            ids = encoding.encode(text) + [encoding.eot_token]
            bins[split].write(np.array(ids, dtype='<u2').tobytes())
            counts[split]['documents'] += 1
            counts[split]['tokens'] += len(ids)
            counts[split]['bytes'] += len(text.encode())
            n_tokens += len(ids)
            bar.update(len(ids))
            if n_tokens >= most_tokens:
                break
    for split in SPLITS:
        check(counts[split]['bytes'], f'too little text: the {split} split is empty')
    return counts


def check_comes_back(text, encoding):
    """ValueError if a text is not what its tokens say: a tokenizer may lack some of its letters."""
    decoded = encoding.decode(encoding.encode(text))
    # a begin-of-text token is no text; some tokenizers join an accent and its letter
    decoded = unicodedata.normalize('NFC', decoded)
    check(decoded.endswith(unicodedata.normalize('NFC', text)), f'the tokenizer {encoding.name} '
          f'cannot write the text: {text[:40]!r}... comes back as {decoded[:40]!r}...')


# data/NAME -> batches -----------------------------------------------------------------------------

def open_encoding(name, folder=None):
    """The encoding of this name: the words of a task, or that of open_text_encoding."""
    check(name, 'this model came without a tokenizer.json, so it cannot read or write text')
    if tasks.is_task(name):
        return tasks.Problems(name).encoding
    return open_text_encoding(name, folder)


def open_data(name, model_tokenizer=None, vocab_size=math.inf):
    """
    The data set or task `name` -> a Text or a tasks.Problems. torchdocs is made if it is missing.

    model_tokenizer, vocab_size: those of the model that is to read it; ValueError if they do not
    fit.
    """
    check(name, 'this model came without a data set: name one with --dataset')
    if name == 'torchdocs' and not os.path.exists('data/torchdocs'):
        make(name)
    examples = tasks.Problems(name) if tasks.is_task(name) else Text(name)
    check(model_tokenizer in (None, examples.tokenizer), f'the model reads tokens of '
          f"{model_tokenizer}, but data set '{name}' has those of {examples.tokenizer}: choose "
          'another --dataset')
    check(examples.vocab_size <= vocab_size, f"the model has {vocab_size} tokens, but data set "
          f"'{name}' has {examples.vocab_size}, of {examples.tokenizer}: choose another --dataset")
    return examples


def held_out_windows(checkpoint, n, dataset=None, dev='cpu'):
    """
    n held-out windows for a checkpoint's model, evenly spread over its data set, or over another.

    Returns the data set, as open_data does, idx and targets (n, T), and on a task the depth (n, T)
    of each label, otherwise None.
    """
    args = checkpoint['model_args']
    examples = open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                         args['vocab_size'])
    T = args['block_size']
    numbers = spread(examples, n, T)
    idx, targets = examples.held_out(numbers, T)
    depth = examples.depths(T)[numbers] if examples.is_task else None
    return examples, idx.to(dev), targets.to(dev), depth


class Text:
    """
    The tokens of data/NAME, with its splits as uint16 memmaps. A Text and a task (tasks.Problems)
    have the methods below and

        name                        of the data set, or of the task without its knobs
        description                 what is trained on, in words
        sha256                      of what is trained on: --resume refuses another one
        tokenizer, vocab_size       the name of its encoding; how many tokens there are
        tokenizer_json              the TokenizerJson of that name; None if it is no such file
        is_task                     a task: only some tokens have labels, and the measure is the
                                    accuracy. Otherwise every token has one, and it is the loss
        depths(T)                   only a task has it: the depth of each label of its held-out
                                    windows, (n_held_out(T), T)
    """
    is_task = False
    tokenizer_json = None

    def __init__(self, name):
        folder = f'data/{name}'
        check(os.path.exists(f'{folder}/train.bin'), no_data_set(name))
        meta = read_meta(folder)
        self.name = name
        self.folder = folder
        self.train = np.memmap(f'{folder}/train.bin', dtype='<u2', mode='r')
        self.val = np.memmap(f'{folder}/val.bin', dtype='<u2', mode='r')
        self.tokenizer = meta['tokenizer']
        self.vocab_size = meta['vocab_size']
        if self.tokenizer.startswith(STORED):
            self.tokenizer_json = open_text_encoding(self.tokenizer, folder)
        self.description = f'{name}: {len(self.train):,} tokens ({self.tokenizer})'

    @functools.cached_property
    def sha256(self):
        return sha256_of(f'{self.folder}/train.bin')

    def check_fits(self, T, rows=1):
        """ValueError unless each split has a window of T tokens and the token after it."""
        shortest = min(len(self.train), len(self.val))
        check(shortest > T, f'{self.name} has a split of {shortest} tokens, and no window of {T} '
              'with a next token: lower --block_size')

    def batch(self, rng, rows, T, mine=slice(None)):
        """
        Draw `rows` windows of the training text, the same in all processes -> those in the slice
        `mine`: x, y (B, T) int64.
        """
        return windows(self.train, rng.integers(len(self.train) - T, size=rows)[mine], T)

    def n_held_out(self, T):
        """How many held-out windows there are, without overlap."""
        return (len(self.val) - 1) // T

    def held_out(self, numbers, T):
        """Held-out windows by number -> x, y (N, T)."""
        return windows(self.val, T * np.asarray(numbers), T)


def no_data_set(name):
    """The error message for a name that is neither a task nor a folder of data/."""
    prepared = [file.parent.name for file in Path('data').glob('*/train.bin')]
    hint = did_you_mean(name, [*tasks.TASKS, 'torchdocs', *prepared])
    flag = '' if name == 'fineweb' else ' --path=TEXT'
    return (f"no data set or task '{name}'{hint} (text is prepared with python data.py {name}{flag}"
            '; a task in a file of your own needs that file behind the script)')


def windows(ids, starts, T):
    """x, y (B, T) int64: the T tokens from each of the starts, and the same shifted by one."""
    rows = np.lib.stride_tricks.sliding_window_view(ids, T + 1)[starts]             # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def main():
    meta = make(name, path, tokenizer, bpe, tokens, subset, overwrite)
    for split in SPLITS:
        print(f"data/{name}/{split}.bin: {meta[split]['documents']:,} documents, "
              f"{meta[split]['bytes'] / 1e6:.1f} MB of text, {meta[split]['tokens']:,} tokens "
              f"({meta['tokenizer']})")
    if name == 'fineweb':       # the paper's model; the default one is for a laptop
        print('next: python train.py config/groups.py')
    else:
        print(f'next: python train.py --dataset={name} --out_dir=out-{name}')


if __name__ == '__main__':
    from common.configurator import configure
    from common.errors import run
    configure(globals(), positional='name')
    run(main)
