"""
Turn text into tokens on disk, and read them back.

    python data.py                         torchdocs: the documentation in torch's own Python files
    python data.py NAME --path=TEXT        your own UTF-8 text: a file, a folder of .txt files, or a
                                           glob; --bpe=4096 trains a byte-level BPE on it
    python data.py fineweb --tokens=300M   FineWeb, streamed by `datasets`; after an interruption
                                           the same command continues where it stopped

writes data/NAME:

    train.bin, val.bin    tokens as uint16, little-endian; an end-of-text token ends each document
    meta.json             tokenizer, vocab_size, dtype, source; the recipe, which has every choice
                          on which the tokens depend; for each split its documents, tokens, bytes of
                          text, and sha256
    tokenizer.json        with --bpe: the tokenizer, which train.py copies beside ckpt.pt

A text file is one document, or several if <|endoftext|> stands between them; it must fit into
memory. nanoGPT's train.bin and val.bin in a folder are read as text, too.

A tokenizer is `bytes` (nothing to download), one of tiktoken's, such as gpt2, or the path of a
tokenizer.json. --bpe trains one on the documents that are not held out. The default is gpt2 for
fineweb, that of the source for nanoGPT's tokens, and otherwise bytes.

What is held out, as val.bin:

    text files      a file whose name, or the name of a folder in which it lies, contains the word
                    val, valid, validation, dev, eval or test. The name of a folder in which all of
                    them lie does not count. If there is no such file, 5% of the documents, drawn by
                    chance, always the same ones; of a single document its last 5%
    nanoGPT's       its own val.bin
    torchdocs       the first document and every 48th after it
    FineWeb         the first document and every 2,000th after it

--val_fraction is another share than 5%, 1/48 or 1/2,000; of torchdocs and FineWeb it must be 1/n.

From there to a model:

    text, FineWeb   ->  train.bin, val.bin  ->  x, y      data.Text
    a task          ->                          x, y      tasks.Problems

    x, y    (B, T) int64: input tokens, and the next token after each of them

A batch is B random starts in train.bin: x is T tokens from there, and y the same shifted by one.
The batches of a task are made, not read: tasks.py.

Paper: App. B (FineWeb, 300M tokens).
"""
import json
import math
import os
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from filelock import FileLock, Timeout

import tasks
from common import configurator
from common.configurator import PathName, configure, run
from common.encoding import kind_of, open_text_encoding, stored_name
from common.errors import UserError, check, did_you_mean, explain
from common.examples import Examples
from common.files import read_json, sha256_of, write_json
from common.fineweb import Stream, pick_revision
from common.own_text import StoredTokens, TextFiles, has_tokens
from common.source import SPLITS
from common.tokenizer_json import TokenizerJson, train_bpe
from common.torchdocs import TorchDocs
from common.writer import (
    Writer,
    differences,
    n_tokens_in,
    recipe_in,
    source_of,
    usable_progress,
)

# --------------------------------------------------------------------------------------------------
name = 'torchdocs'                  # torchdocs, fineweb, or any name for text of your own
path: PathName = ''                 # own text: a file, folder or pattern; fineweb: another data set
tokenizer: PathName | None = None   # gpt2, bytes, ...; None = the default above
bpe: int | None = None              # train a byte-level BPE of this many tokens on own text
tokens: str | int = '300M'          # fineweb: how many tokens to take (300M is the paper's budget)
config = 'sample-10BT'              # fineweb: sample-100BT, sample-350BT, default, CC-MAIN-2024-10
revision: str | None = None         # fineweb: a commit of the data set; None = the newest
val_fraction: float | None = None   # share of documents to hold out; None = the default above
overwrite = False                   # replace a data set of this name
# --------------------------------------------------------------------------------------------------

VAL_FRACTION = dict(torchdocs=1 / 48, fineweb=0.0005)       # and 0.05 of own text
# the sha256 of torchdocs' train.bin with torch 2.13.0
TORCHDOCS = '649d3f8679f5bc01652a8b13a57e06a6a07282007bbc1ca23fab5a27cc71db50'


# writing a data set -------------------------------------------------------------------------------

def make(name, path='', tokenizer=None, val_fraction=None, bpe=None, overwrite=False,
         tokens='300M', config='sample-10BT', revision=None):
    """
    Write data/NAME -> its meta. The arguments are the knobs.

    If the data set that is there has the same recipe, nothing is written and its meta is returned.
    If it has another one, overwrite must be given (ValueError).

    New tokens are written to data/NAME/part, and moved when they are complete. FineWeb's documents
    are read until they have as many tokens as asked for, and an interrupted call is continued. Any
    other text is read as a whole.
    """
    check_knobs(name, path, tokenizer, bpe)
    folder = f'data/{name}'
    part = f'{folder}/part'
    val_fraction = fraction_of(name, val_fraction)
    source = open_source(name, path, val_fraction, tokens, config, revision, overwrite)
    if tokenizer is None and bpe is None:
        tokenizer = source.default_tokenizer
    # every choice on which the tokens depend
    recipe = dict(source=source.description, revision=source.revision, sha256=source.sha256,
                  tokens=source.most_tokens, val_fraction=val_fraction,
                  tokenizer=stored_name(tokenizer), bpe=bpe)

    with only_maker(folder):
        move_complete(folder)
        old_meta = same_meta(folder, recipe, overwrite)
        if old_meta:
            return old_meta
        progress = usable_progress(part, recipe)
        documents = source.open(progress)       # if that fails, what is in the folder stays
        if bpe is None:
            encoding = open_text_encoding(tokenizer)
        else:
            documents = list(documents)
            encoding = train_bpe((text for split, text in documents if split == 'train'), bpe)

        with Writer(part, encoding, progress, source.most_tokens) as writer:
            for split, text in documents:
                writer.add(split, text)
                if writer.is_full:
                    break
                writer.save_at_times(recipe, source)
        if source.most_tokens is not None and not writer.is_full:
            print(f'{source.description} ends after {writer.n_tokens:,} tokens, fewer than the '
                  f'{source.most_tokens:,} of --tokens', file=sys.stderr)
        complete(part, encoding, recipe, writer.counts)
        move_complete(folder)
        return read_json(f'{folder}/meta.json')


def open_source(name, path, val_fraction, tokens, config, revision, overwrite):
    """The Source of the data set `name`. The arguments are the knobs."""
    if name == 'torchdocs':
        return TorchDocs(one_in(val_fraction))
    if name == 'fineweb':
        every = one_in(val_fraction)
        most_tokens = count_tokens(tokens)
        path = path or 'HuggingFaceFW/fineweb'
        earlier = earlier_recipe(f'data/{name}', overwrite)
        revision = pick_revision(path, config, revision, earlier)
        return Stream(path, config, revision, every, most_tokens)
    if has_tokens(path):
        return StoredTokens(path)
    return TextFiles(path, val_fraction)


def same_meta(folder, recipe, overwrite):
    """
    The meta of the data set in folder if it has this recipe, or {} if a new one is to be written.
    ValueError if something else is there and must not be overwritten.
    """
    if overwrite:
        return {}
    old_meta = read_json(f'{folder}/meta.json')
    if old_meta:
        others = differences(recipe_in(old_meta), recipe)
        check(not others, f"{folder} is there, made with {', '.join(others)}: --overwrite replaces "
              'it, or choose another name')
        return old_meta
    for split in SPLITS:
        if os.path.exists(f'{folder}/{split}.bin'):
            raise UserError(f'{folder} has tokens, and no meta.json that says which: --overwrite '
                            'replaces them, or choose another name')
    return {}


def earlier_recipe(folder, overwrite):
    """
    The recipe of the data set in this folder. If there is none, that of an interrupted call; {}
    without either.
    """
    earlier = {} if overwrite else read_json(f'{folder}/meta.json')
    return recipe_in(earlier or read_json(f'{folder}/part/progress.json'))


def check_knobs(name, path, tokenizer, bpe):
    """ValueError if these knobs of make do not go together."""
    if not re.fullmatch(r'\w[\w.-]*', name) or name in tasks.TASKS:
        raise UserError(f"'{name}' cannot be the name of a data set: use letters, digits, _ . and "
                        '-, and not the name of a task')
    if name == 'torchdocs' and path:
        raise UserError('text of your own needs a name of its own: python data.py NAME '
                        f'--path={quote(path)}')
    if name not in ('torchdocs', 'fineweb') and not path:
        raise UserError(f"no data set '{name}': give its text, python data.py {name} --path=TEXT")
    if path and os.path.realpath(path) == os.path.realpath(f'data/{name}'):
        raise UserError(f'data/{name} cannot be made of what is in data/{name} itself: choose '
                        'another name')
    if bpe is not None and name == 'fineweb':
        raise UserError('--bpe trains a tokenizer on text of your own: give --tokenizer here')
    if bpe is not None and tokenizer:
        raise UserError('--bpe trains a tokenizer of its own: leave out --tokenizer')


def fraction_of(name, val_fraction):
    """The knob val_fraction, or the default of the data set `name` if it is None."""
    if val_fraction is None:
        val_fraction = VAL_FRACTION.get(name, 0.05)
    check(0 < val_fraction <= 0.5, f'val_fraction must lie in (0, 0.5], not {val_fraction}')
    return val_fraction


def one_in(val_fraction):
    """n, if val_fraction is 1 / n, as one of each n documents is held out. Otherwise ValueError."""
    n = round(1 / val_fraction)
    check(abs(n * val_fraction - 1) < 0.02, f'one of each n documents is held out, so val_fraction '
          f'must be 1/n, not {val_fraction}: say {1 / n:.5g} for n = {n}')
    return n


def count_tokens(text):
    """'300M' -> 300_000_000; also K and B."""
    match = re.fullmatch(r'(\d{1,12}\.?\d*)([KMB]?)', str(text).upper())
    n = 0
    if match:
        number, unit = match.groups()
        # 8.2 * 1e6 is 8,199,999.999...
        n = int(float(number) * {'': 1, 'K': 1e3, 'M': 1e6, 'B': 1e9}[unit] + 1e-3)
    check(n >= 1, f"tokens = '{text}' is not a number of tokens: say 300M, 2B or 100000")
    return n


@contextmanager
def only_maker(folder):
    """
    `with only_maker('data/NAME'):` writes data/NAME. One program at a time: a second one waits. A
    full disk or unreadable file ends the program with one line.
    """
    with explain(f'cannot make {folder}', 'if the disk is full, make room; then run the command '
                 'again', OSError):
        lock = FileLock(f'{folder}.lock')
        try:
            lock.acquire(blocking=False)
        except Timeout:
            print(f'waiting for another program, which is writing {folder} and holds '
                  f'{folder}.lock', file=sys.stderr)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def complete(part, encoding, recipe, counts):
    """Write tokenizer.json and meta.json beside the tokens in the folder part: all are there."""
    meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, dtype='uint16',
                source=source_of(recipe), recipe=recipe)
    for split in SPLITS:
        file = f'{part}/{split}.bin'
        n = counts[split]['tokens']
        if n == 0:
            raise UserError(why_a_split_is_empty(recipe, counts))
        check(os.path.getsize(file) == 2 * n, f'{file} has other tokens than the {n:,} that this '
              'program wrote: start again, while no other program writes there')
        meta[split] = counts[split] | dict(sha256=sha256_of(file))
    if isinstance(encoding, TokenizerJson):
        encoding.save(part)
    write_json(meta, f'{part}/meta.json')


def move_complete(folder):
    """
    Move a data set that is complete from folder/part to folder, in the place of an earlier one. If
    that is interrupted, the next call goes on with it; until then meta.json is missing.
    """
    part = f'{folder}/part'
    if not os.path.exists(f'{part}/meta.json'):
        return
    if os.path.exists(f'{part}/train.bin'):         # nothing has been moved yet
        for file in 'meta.json', 'tokenizer.json':
            with suppress(FileNotFoundError):
                os.remove(f'{folder}/{file}')
    for file in 'train.bin', 'val.bin', 'tokenizer.json', 'meta.json':     # meta.json comes last
        with suppress(FileNotFoundError):
            os.replace(f'{part}/{file}', f'{folder}/{file}')
    shutil.rmtree(part)


def why_a_split_is_empty(recipe, counts):
    """Either the text is too small, or --tokens asks for too few."""
    most_tokens = recipe['tokens']
    if most_tokens is not None and n_tokens_in(counts) >= most_tokens:
        return (f'--tokens={most_tokens} is too small for a training and a held-out split: give '
                'more, such as 1M')
    return f"{recipe['source']} is too small for a training and a held-out split"


# reading a data set -------------------------------------------------------------------------------

def open_encoding(name, folder=None):
    """The encoding of a checkpoint or a data set: the words of a task, or of texts."""
    origin = kind_of(name)
    check(origin, 'this model came without a tokenizer.json, so it cannot read or write text: '
          'convert it again from a folder that has one')
    if origin != 'task':
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
    """data/NAME, with its splits as uint16 memmaps."""
    is_task = False             # every token has a label, and the measure is the loss
    tokenizer_json = None       # its TokenizerJson, if it has one

    def __init__(self, name):
        self.name = name
        folder = f'data/{name}'
        flag = '--tokens=300M' if name == 'fineweb' else '--path=TEXT'
        check(os.path.exists(f'{folder}/meta.json'),
              f"no data set or task '{name}'{did_you_mean(name, tasks.TASKS)} "
              f'(text is prepared with python data.py {name} {flag})')
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
        val_fraction = recipe_in(self.meta).get('val_fraction')
        is_default = self.tokenizer == 'bytes' and val_fraction == VAL_FRACTION['torchdocs']
        if is_default and self.sha256 != TORCHDOCS:
            print('warning: data/torchdocs is not the text of torch 2.13.0 (this is torch '
                  f'{torch.__version__}), so losses differ from the README', file=sys.stderr)

    def check_fits(self, T, rows=1):
        """ValueError if there are fewer training windows of T tokens than rows, or none to test."""
        for split, ids, n in ('train', self.train, rows), ('val', self.val, 1):
            check(len(ids) - T >= n, f'the {split} text of {self.name} ({len(ids)} tokens) has '
                  f'fewer than {n} windows of {T}: lower --block_size or --batch_size')

    def batch(self, rng, rows, T, mine=slice(None)):
        """Random windows of the training text, the slice `mine` of them: x, y (B, T)."""
        return windows(self.train, rng.integers(len(self.train) - T, size=rows)[mine], T)

    def n_held_out(self, T):
        """How many held-out windows there are, without overlap."""
        return (len(self.val) - 1) // T

    def held_out(self, numbers, T):
        """Held-out windows by number -> x, y (N, T)."""
        return windows(self.val, T * np.asarray(numbers), T)


def read_bin(path, wanted):
    """The tokens in a bin file, uint16. ValueError unless they are those of meta.json (wanted)."""
    name = os.path.basename(path)
    check(os.path.getsize(path) == 2 * wanted['tokens'],
          f"{name} does not have {wanted['tokens']:,} tokens")
    check(sha256_of(path) == wanted['sha256'], f'{name} does not have the sha256 in meta.json')
    return np.memmap(path, dtype='<u2', mode='r')


def windows(ids, starts, T):
    """Inputs (B, T) and targets (B, T), the next tokens, int64: one row from each of the starts."""
    rows = np.lib.stride_tricks.sliding_window_view(ids, T + 1)[starts]             # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def main():
    if name != 'fineweb':
        for knob in 'tokens', 'config', 'revision':
            if knob in configurator.given:
                raise UserError(f'--{knob} is for fineweb alone: leave it out')
    meta = make(name, path, tokenizer, val_fraction, bpe, overwrite, tokens, config, revision)
    for split in SPLITS:
        counts = meta[split]
        print(f"data/{name}/{split}.bin: {counts['documents']:,} documents, "
              f"{counts['bytes'] / 1e6:.1f} MB of text, {counts['tokens']:,} tokens "
              f"({meta['tokenizer']})")
    if name == 'fineweb':       # the paper's model; the default one is for a laptop
        print('next: python train.py config/groups.py')
    else:
        print(f'next: python train.py --dataset={name} --out_dir=out-{name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
