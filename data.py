"""
Turn text into tokens on disk, and read them back.

    python data.py                         torchdocs: the documentation in torch's own Python files
    python data.py NAME --path=TEXT        your own UTF-8 text: a file, a folder of .txt files, or a
                                           glob; --bpe=4096 trains a byte-level BPE on it
    python data.py fineweb --tokens=300M   FineWeb, streamed by `datasets`; after an interruption
                                           the same command continues where it stopped

writes data/NAME (and data/NAME.lock, an empty file that keeps a second program out):

    train.bin, val.bin    tokens as uint16, little-endian. A document is its start tokens (if the
                          tokenizer has any), its text, and an end-of-text token
    meta.json             tokenizer, vocab_size, dtype, source; the recipe, which has every choice
                          on which the tokens depend; for each split its documents, tokens, bytes of
                          text, and sha256
    tokenizer.json        the tokenizer, if it is a file of this kind or trained with --bpe;
                          train.py copies it beside ckpt.pt

A text file is one document, or several if <|endoftext|> stands between them. All files together
must fit into memory. --path may also be a folder with train.bin and val.bin (nanoGPT's, or one of
data/): its tokens are turned back into text, which is encoded anew. Line ends become \\n.

A tokenizer is `bytes` (nothing to download), one of tiktoken's, such as gpt2, or the path of a
tokenizer.json. --bpe trains one on the documents that are not held out. By default FineWeb is
encoded with gpt2, a folder with train.bin keeps its tokenizer, and other text becomes bytes.

What is held out, as val.bin:

    text files      files that have the word val, valid, validation, dev, eval or test in their name
                    or in the name of a folder in which they lie: my-val.txt, test/a.txt, but not
                    contest.txt or tests.txt. The name of a folder that holds all of the files does
                    not count, nor does that of a single file. If no name holds a file out, 5% of
                    the documents are drawn with a fixed seed. If there is only one document, its
                    last 5% are held out
    nanoGPT's       its own val.bin
    torchdocs       the first document and every 48th after it
    FineWeb         the first document and every 2,000th after it

--val_fraction changes these shares. It is refused where names or a val.bin say what is held out,
and for torchdocs and FineWeb it must be 1/n.

From data/NAME to a batch:

    text, FineWeb   ->  train.bin, val.bin  ->  x, y      data.Text
    a task          ->                          x, y      tasks.Problems

    x   (B, T) int64: input tokens
    y   (B, T) int64: the label of each input token. On text that is the next token; on a task the
        right answer, or tasks.NOT_ASKED

A batch is B random starts in train.bin: x is T tokens from there, and y the same shifted by one.
The batches of a task are made, not read: tasks.py.

Paper: App. B (FineWeb, 300M tokens).
"""
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch

import tasks
from common import configurator
from common.configurator import PathName, configure, run
from common.encoding import kind_of, open_text_encoding
from common.errors import UserError, check, did_you_mean, explain
from common.examples import Examples
from common.files import sha256_of
from common.make_data import make
from common.source import SPLITS
from common.torchdocs import TorchDocs

# --------------------------------------------------------------------------------------------------
name = 'torchdocs'                  # torchdocs, fineweb, or any name for text of your own
path: PathName = ''                 # own text: a file, folder or pattern; fineweb: another data set
tokenizer: PathName | None = None   # gpt2, bytes, ...; None = the default above
bpe: int | None = None              # train a byte-level BPE of this many tokens; not on fineweb
tokens: str | int = '300M'          # fineweb: how many tokens to take (300M is the paper's budget)
config = 'sample-10BT'              # fineweb: sample-100BT, sample-350BT, default, CC-MAIN-2024-10
revision: str | None = None         # fineweb: a commit of the data set; None = the newest
val_fraction: float | None = None   # share of documents to hold out; None = the default above
overwrite = False                   # replace a data set, or unfinished tokens of another recipe
# --------------------------------------------------------------------------------------------------

# the sha256 of torchdocs' train.bin with this version of torch
TORCH_VERSION = '2.13.0'
TORCHDOCS = '649d3f8679f5bc01652a8b13a57e06a6a07282007bbc1ca23fab5a27cc71db50'


def open_encoding(name, folder=None):
    """The encoding of this name: tasks.Words for a task, otherwise that of open_text_encoding."""
    kind = kind_of(name)
    check(kind, 'this model came without a tokenizer.json, so it cannot read or write text: '
          'convert it again from a folder that has one')
    if kind != 'task':
        return open_text_encoding(name, folder)
    task = name.partition(':')[0]
    check(task in tasks.TASKS, f"the task '{task}' is not known: if it is in a file of yours, name "
          'that file behind the script, as in training')
    return tasks.Words(name)


def open_data(name, model_tokenizer=None, vocab_size=math.inf, folder=None):
    """
    The data set or task `name` -> a Text or a tasks.Problems. torchdocs is made if it is missing.

    model_tokenizer, vocab_size: those of the model that is to read it; ValueError if they do not
    fit. A task is spelled in the model's text tokens if it has such a tokenizer, read from
    folder/tokenizer.json.
    """
    check(name, 'this model came without a data set: name one with --dataset')
    if name == 'torchdocs' and not os.path.exists(f'data/{name}/meta.json'):
        make(name)
    if tasks.is_task(name):
        examples = tasks.open_problems(name, model_tokenizer, folder)
    else:
        examples = Text(name)
    check(model_tokenizer in (None, examples.tokenizer), f'the model reads tokens of '
          f"{model_tokenizer}, but data set '{name}' has those of {examples.tokenizer}: choose "
          'another --dataset')
    check(examples.vocab_size <= vocab_size, f"the model has {vocab_size} tokens, but data set "
          f"'{name}' has {examples.vocab_size}, of {examples.tokenizer}: choose another --dataset, "
          'or in training another --vocab_size')
    return examples


def held_out_windows(checkpoint, n, dataset='', dev='cpu'):
    """
    n held-out windows for a checkpoint's model, evenly spread over its data set, or over another.

    Returns the data set, as open_data does, idx and targets (n, T), and on a task the depth (n, T)
    of each label, otherwise None.
    """
    args = checkpoint['model_args']
    examples = open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                         args['vocab_size'], checkpoint['folder'])
    T = args['block_size']
    numbers = examples.spread(n, T)
    idx, targets = examples.held_out(numbers, T)
    depth = examples.depths(T)[numbers] if examples.is_task else None
    return examples, idx.to(dev), targets.to(dev), depth


class Text(Examples):
    """The tokens of data/NAME, with its splits as uint16 memmaps."""
    is_task = False             # every token has a label, and the measure is the loss
    tokenizer_json = None       # the TokenizerJson of its tokenizer, set below if it is one

    def __init__(self, name):
        self.name = name
        folder = f'data/{name}'
        if not os.path.exists(f'{folder}/meta.json'):
            raise UserError(no_data_set(name))
        with explain(f'{folder} is damaged', 'make it again with python data.py ... --overwrite'):
            self.meta = json.loads(Path(folder, 'meta.json').read_text(encoding='utf-8'))
            self.train = read_bin(f'{folder}/train.bin', self.meta['train'])
            self.val = read_bin(f'{folder}/val.bin', self.meta['val'])
            self.tokenizer = self.meta['tokenizer']
            self.vocab_size = self.meta['vocab_size']
        if kind_of(self.tokenizer) == 'stored':
            self.tokenizer_json = open_text_encoding(self.tokenizer, folder)
        self.sha256 = self.meta['train']['sha256']
        self.description = f'{name}: {len(self.train):,} tokens ({self.tokenizer})'
        if name == 'torchdocs':
            self.warn_of_other_torch()

    def warn_of_other_torch(self):
        """Warn if torchdocs, made with the default knobs, is the text of another torch."""
        val_fraction = self.meta.get('recipe', {}).get('val_fraction')
        is_default = self.tokenizer == 'bytes' and val_fraction == 1 / TorchDocs.default_every
        if is_default and self.sha256 != TORCHDOCS:
            advice = ''
            if torch.__version__.startswith(TORCH_VERSION):
                advice = '; python data.py --overwrite makes it anew'
            print(f'warning: data/torchdocs is not the text of torch {TORCH_VERSION} (this is '
                  f'torch {torch.__version__}), so losses differ from the README{advice}',
                  file=sys.stderr)

    def check_fits(self, T, rows=1):
        """ValueError unless each split has a window of T tokens and the token after it."""
        for split, ids in ('train', self.train), ('val', self.val):
            check(len(ids) > T, f'the {split} text of {self.name} has {len(ids)} tokens, and no '
                  f'window of {T} with a next token: lower --block_size (with --eval_only: '
                  '--length)')

    def batch(self, rng, rows, T, mine=slice(None)):
        """Random windows of the training text, the slice `mine` of them: x, y (B, T)."""
        return windows(self.train, rng.integers(len(self.train) - T, size=rows)[mine], T)

    def n_held_out(self, T):
        """How many held-out windows there are, without overlap."""
        return (len(self.val) - 1) // T

    def held_out(self, numbers, T):
        """Held-out windows by number -> x, y (N, T)."""
        return windows(self.val, T * np.asarray(numbers), T)


def no_data_set(name):
    """The error message for a name that is neither a task nor a folder of data/."""
    if os.path.exists(f'data/{name}.part'):
        return f'data/{name} is not complete: run its python data.py command once more'
    prepared = [path.parent.name for path in Path('data').glob('*/meta.json')]
    names = [*tasks.TASKS, 'torchdocs', *prepared]
    flag = '--tokens=300M' if name == 'fineweb' else '--path=TEXT'
    return (f"no data set or task '{name}'{did_you_mean(name, names)} (text is prepared with "
            f'python data.py {name} {flag}; a task in a file of your own needs that file behind '
            'the script)')


def read_bin(path, wanted):
    """The tokens in a bin file, uint16. ValueError unless they are those of meta.json (wanted)."""
    name = os.path.basename(path)
    check(os.path.getsize(path) == 2 * wanted['tokens'],
          f"{name} does not have {wanted['tokens']:,} tokens")
    check(sha256_of(path) == wanted['sha256'], f'{name} does not have the sha256 in meta.json')
    return np.memmap(path, dtype='<u2', mode='r')


def windows(ids, starts, T):
    """x, y (B, T) int64: the T tokens from each of the starts, and the same shifted by one."""
    rows = np.lib.stride_tricks.sliding_window_view(ids, T + 1)[starts]             # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def main():
    if name != 'fineweb':
        for knob in 'tokens', 'config', 'revision':
            if knob in configurator.given:
                raise UserError(f'--{knob} is for fineweb alone: leave it out')
    check(name not in tasks.TASKS, f"'{name}' is the name of a task: choose another one")
    meta = make(name, path, tokenizer=tokenizer, bpe=bpe, tokens=tokens, config=config,
                revision=revision, val_fraction=val_fraction, overwrite=overwrite)
    for split in SPLITS:
        counts = meta[split]
        n = counts['documents']
        print(f"data/{name}/{split}.bin: {n:,} {'document' if n == 1 else 'documents'}, "
              f"{counts['bytes'] / 1e6:.1f} MB of text, {counts['tokens']:,} tokens "
              f"({meta['tokenizer']})")
    if name == 'fineweb':       # the paper's model; the default one is for a laptop
        print('next: python train.py config/groups.py')
    else:
        print(f'next: python train.py --dataset={name} --out_dir=out-{name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
