"""
Text -> tokens on disk.

    python data.py                         pydocs: English text that every Python carries; seconds
    python data.py NAME --path=TEXT        your own UTF-8 text: a file, a folder of .txt files, or a
                                           glob pattern
    python data.py NAME --path=FOLDER      tokens already: nanoGPT's train.bin, val.bin (or .bin.xz)
    python data.py fineweb --tokens=300M   FineWeb through `datasets`, streamed; if it breaks off,
                                           the same command goes on where it was

writes data/NAME:

    train.bin, val.bin    tokens as uint16, little-endian; an end-of-text token ends each document
    meta.json             tokenizer, vocab_size, dtype, source; for each split its documents,
                          tokens, bytes of text, and sha256

Every n-th document is held out whole, so no document is in both files; a single document is cut,
and its last part is held out. Tokenizers: see encoding.py; `bytes` needs no download.
Paper: App. B (FineWeb, 300M tokens).
"""
import ast
import difflib
import glob
import hashlib
import json
import logging
import lzma
import math
import os
import platform
import re
import shutil
import sysconfig
import time
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from tqdm import tqdm

import tasks
from common.configurator import configure, run
from encoding import get_encoding

# --------------------------------------------------------------------------------------------------
name = 'pydocs'                     # pydocs, fineweb, or any name for text of your own
path = ''                           # own text: a file, folder or pattern; fineweb: another data set
tokenizer: str | None = None        # gpt2, bytes, ...; None = gpt2 for fineweb, bytes otherwise
tokens: str | int = '300M'          # fineweb: how many tokens to take (300M is the paper's budget)
config = 'sample-10BT'              # fineweb: sample-100BT, sample-350BT, default, CC-MAIN-2024-10
revision: str | None = None         # fineweb: a commit of the data set; None = the newest
val_fraction: float | None = None   # documents held out; None = 0.0005 of fineweb, 0.05 otherwise
# --------------------------------------------------------------------------------------------------

SPLITS = ('train', 'val')


def pydocs_documents():
    """pydoc's language reference, then each standard-library module's docstrings, no text twice."""
    from pydoc_data.topics import topics
    for _, text in sorted(topics.items()):
        yield text

    skipped = {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', 'pydoc_data'}
    used = set()
    for folder, subfolders, files in os.walk(sysconfig.get_path('stdlib')):
        subfolders[:] = sorted(set(subfolders) - skipped)       # where os.walk goes next
        for file in sorted(file for file in files if file.endswith('.py')):
            new = [doc for doc in docstrings(os.path.join(folder, file)) if doc not in used]
            used.update(new)
            if new:
                yield '\n\n'.join(new)


def docstrings(path):
    """The docstrings in a Python file, each once; none if the file cannot be parsed."""
    try:
        with open(path, encoding='utf-8') as f:
            tree = ast.parse(f.read())
    except (OSError, SyntaxError, ValueError):      # a few files are wrong on purpose
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [doc for doc in dict.fromkeys(docs) if doc]


def file_documents(path):
    """Each text file at path as one document. ValueError if one is missing, empty or not UTF-8."""
    pattern = f'{path}/**/*.txt' if os.path.isdir(path) else path
    files = [file for file in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(file)]
    if not files and os.path.isfile(path):      # a file with a * or [ in its name
        files = [path]
    if not files:
        raise ValueError(f"no text at '{path}': give --path a UTF-8 text file, a folder of "
                         '.txt files, or a glob pattern')
    for file in files:
        try:
            with open(file, encoding='utf-8') as f:
                text = f.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"'{file}' is not UTF-8 text (byte {error.start}): "
                             'convert it, e.g. with iconv -t UTF-8') from None
        if not text.strip():
            raise ValueError(f"'{file}' is empty: give a file with text in it")
        yield text


class FineWeb:
    """
    FineWeb's texts, streamed from the hub. ValueError if the stream cannot be opened or breaks off.

    path: another data set of its schema, on the hub or in a local folder (sample/10BT/*.parquet).
    state_dict, load_state_dict: where the stream stands, as in datasets.IterableDataset.
    """

    def __init__(self, path='', config='sample-10BT', revision=None):
        import datasets  # takes a second
        import huggingface_hub
        for library in ('datasets', 'huggingface_hub', 'fsspec', 'httpx'):      # their retries
            logging.getLogger(library).setLevel(logging.CRITICAL)

        self.source = path or 'HuggingFaceFW/fineweb'
        with explain_failure(self.source):
            # fix the commit now, so that a later call reads the same texts
            if not os.path.isdir(self.source) and not revision:
                revision = huggingface_hub.HfApi().dataset_info(self.source).sha
            rows = datasets.load_dataset(self.source, name=config, split='train',
                                         revision=revision, streaming=True)
            self.rows = rows.select_columns('text')
        self.revision = revision
        self.state_dict, self.load_state_dict = self.rows.state_dict, self.rows.load_state_dict

    def __iter__(self):
        with explain_failure(self.source):
            for row in self.rows:
                yield row['text']


@contextmanager
def explain_failure(source):
    """Raise any error of a stream as a ValueError that says what to check."""
    try:
        yield
    except Exception as error:      # of the hub, of HTTP, of parquet: each library has its own
        raise ValueError(
            f'cannot stream {source} ({type(error).__name__}: {str(error)[:200]}): check --path, '
            '--config, --revision and the network, then run the command again: what is done is kept'
        ) from error


def write_dataset(folder, documents, encoding, val_fraction, source, max_tokens=None):
    """
    Tokenize documents into folder/{train.bin, val.bin, meta.json}; returns what is in meta.json.

    Documents 0, n, 2n, ... are held out, n = 1 / val_fraction. It stops after the document that
    reaches max_tokens. Files that were there stay until all is written. Documents with a state_dict
    are a stream: where one breaks off, the next call goes on after its last whole batch.
    ValueError if a split stays empty, OSError if the disk is full.
    """
    os.makedirs(folder, exist_ok=True)
    made_of = dict(source=source, tokenizer=encoding.name, val_fraction=val_fraction)
    is_stream = hasattr(documents, 'state_dict')
    counts = resume(folder, documents, made_of) if is_stream else None
    if counts is None:
        counts = {split: dict(documents=0, tokens=0, bytes=0) for split in SPLITS}

    keep_parts = is_stream      # for the next call, if this one does not come to its end
    try:
        write_parts(folder, documents, encoding, made_of, counts, max_tokens)
        if not all(counts[split]['tokens'] for split in SPLITS):
            raise ValueError(f'{source} holds {total(counts, "documents")} document(s), '
                             'too little to train on and to hold out')
        meta = finish(folder, counts, encoding, source)
        keep_parts = False
    except OSError as error:
        raise OSError(f'cannot write {folder} ({error.strerror or error}): '
                      'make room, then run the command again') from error
    finally:
        if not keep_parts:
            remove_parts(folder)
    return meta


def resume(folder, documents, made_of):
    """Go back to where an earlier call broke off -> its counts; None if there was no such call."""
    try:
        with open(f'{folder}/progress.json') as f:
            progress = json.load(f)
        if progress['made_of'] != made_of:      # another source, tokenizer or val_fraction
            return None
        counts = progress['count']
        for split in SPLITS:        # drop what was written after the last whole batch
            os.truncate(f'{folder}/{split}.bin.tmp', 2 * counts[split]['tokens'])
        documents.load_state_dict(progress['stream'])
        return counts
    except (OSError, ValueError, KeyError):
        return None


def write_parts(folder, documents, encoding, made_of, counts, max_tokens):
    """Append the documents' tokens to the part files and add them to counts."""
    limit = max_tokens or math.inf
    val_every = round(1 / made_of['val_fraction'])
    stream = iter(documents)
    mode = 'ab' if total(counts, 'documents') else 'wb'
    bar = tqdm(total=max_tokens, initial=total(counts, 'tokens'), unit=' tokens', unit_scale=True,
               desc=folder, leave=False, mininterval=1, disable=None)
    with (bar, open(f'{folder}/train.bin.tmp', mode) as train_file,
          open(f'{folder}/val.bin.tmp', mode) as val_file):
        while total(counts, 'tokens') < limit:
            # tokenize a batch of documents, on all cores
            texts = list(islice(stream, 1024))
            if not texts:
                break
            rows = encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)

            # each document goes whole to one of the files
            for text, ids in zip(texts, rows):
                if total(counts, 'tokens') >= limit:        # the rest is not needed
                    break
                is_val = total(counts, 'documents') % val_every == 0
                split, file = ('val', val_file) if is_val else ('train', train_file)
                ids.append(encoding.eot_token)
                file.write(np.array(ids, dtype='<u2').tobytes())
                counts[split]['documents'] += 1
                counts[split]['tokens'] += len(ids)
                counts[split]['bytes'] += len(text.encode('utf-8', 'replace'))
                bar.update(len(ids))

            # the stream stands after the batch: a later call can go on here if all of it was used
            if hasattr(documents, 'state_dict') and total(counts, 'tokens') < limit:
                for file in (train_file, val_file):
                    file.flush()
                    os.fsync(file.fileno())
                progress = dict(made_of=made_of, documents=total(counts, 'documents'),
                                count=counts, stream=documents.state_dict())
                write_json(progress, f'{folder}/progress.json')


def finish(folder, counts, encoding, source):
    """Turn the part files into train.bin and val.bin, with a meta.json; returns what is in it."""
    meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, dtype='uint16', source=source)
    for split in SPLITS:
        meta[split] = counts[split] | dict(sha256=sha256(f'{folder}/{split}.bin.tmp'))
    for split in SPLITS:
        os.replace(f'{folder}/{split}.bin.tmp', f'{folder}/{split}.bin')
    write_json(meta, f'{folder}/meta.json')
    return meta


def remove_parts(folder):
    for file in ('train.bin.tmp', 'val.bin.tmp', 'progress.json'):
        if os.path.exists(f'{folder}/{file}'):
            os.remove(f'{folder}/{file}')


def total(counts, what):
    return sum(counts[split][what] for split in SPLITS)


def import_tokens(folder, path, encoding):
    """
    Copy nanoGPT's path/{train.bin, val.bin} (or .bin.xz) to folder; returns the new meta.json.

    ValueError if they are not uint16 tokens of this encoding.
    """
    os.makedirs(folder, exist_ok=True)
    vocab_size, eot = encoding.n_vocab, encoding.eot_token
    text_bytes = np.array([0 if token == eot else len(encoding.decode_single_token_bytes(token))
                           for token in range(vocab_size)])
    counts = {}
    try:
        for split in SPLITS:
            source, part = f'{path}/{split}.bin', f'{folder}/{split}.bin.tmp'
            reader = open(source, 'rb') if os.path.exists(source) else lzma.open(source + '.xz')
            with reader, open(part, 'wb') as writer:
                shutil.copyfileobj(reader, writer, 2 ** 20)
            ids = np.memmap(part, dtype='<u2', mode='r')
            occurrences = np.bincount(ids, minlength=vocab_size)        # of each token
            if len(occurrences) > vocab_size:
                raise ValueError(f'token {len(occurrences) - 1} is in it, and {encoding.name} has '
                                 f'{vocab_size}: name the right one with --tokenizer')
            counts[split] = dict(documents=int(occurrences[eot]), tokens=len(ids),
                                 bytes=int(occurrences @ text_bytes))
        return finish(folder, counts, encoding, path)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ValueError(f'{source} cannot be taken as uint16 tokens: {error}') from error
    finally:
        remove_parts(folder)


def make(name, path='', tokenizer=None, tokens='300M', val_fraction=None, config='sample-10BT',
         revision=None):
    """Write data/NAME; returns its meta. ValueError if its source is missing or is not text."""
    if not re.fullmatch(r'\w[\w.-]*', name):
        raise ValueError(f"'{name}' cannot be the name of a folder in data/: "
                         'use letters, digits, _ . and -')
    if val_fraction is not None and not 0 < val_fraction <= 0.5:
        raise ValueError(f'val_fraction must lie in (0, 0.5], not {val_fraction}')
    if name in tasks.TASKS:
        raise ValueError(f"'{name}' is a task, and its problems are made as they are needed: it "
                         f'needs no file, so go on with python train.py config/{name}.py')
    folder = f'data/{name}'
    are_tokens = os.path.isdir(path) and all(glob.glob(f'{path}/{split}.bin*') for split in SPLITS)
    usual = 'gpt2' if name == 'fineweb' or are_tokens else 'bytes'
    encoding = get_encoding(tokenizer or usual)
    if are_tokens:
        return import_tokens(folder, path, encoding)

    if name == 'fineweb':
        max_tokens = count_tokens(tokens)
        check_room(folder, max_tokens)
        documents = FineWeb(path, config, revision)
        source = f'{documents.source} {config}'
        if documents.revision:
            source += f' at {documents.revision}'
        val_fraction = val_fraction or 0.0005
        return write_dataset(folder, documents, encoding, val_fraction, source, max_tokens)

    if path:
        documents, source = list(file_documents(path)), path
    elif name == 'pydocs':
        documents, python = list(pydocs_documents()), platform.python_version()
        source = f'pydoc topics and standard-library docstrings of Python {python}'
    else:
        raise ValueError(f"no data set '{name}': make it with python data.py {name} --path=TEXT "
                         '(a file or a folder)')
    val_fraction = val_fraction or 0.05
    if len(documents) == 1:     # cut it in two; document 0, its last part, is held out
        cut = int(len(documents[0]) * (1 - val_fraction))
        documents, val_fraction = [documents[0][cut:], documents[0][:cut]], 0.5
    return write_dataset(folder, documents, encoding, val_fraction, source)


def count_tokens(text):
    """'300M' -> 300_000_000; also K and B. ValueError for what is not a positive number."""
    text = str(text).strip().upper()
    unit = dict(K=10 ** 3, M=10 ** 6, B=10 ** 9).get(text[-1:], 1)
    try:
        number = int(float(text.rstrip('KMB')) * unit)
    except ValueError:
        number = 0
    if number <= 0:
        raise ValueError(f"tokens = '{text}' is not a number of tokens: say 300M, 2B or 100000")
    return number


def check_room(folder, tokens):
    """ValueError if the disk has no room for so many tokens, less those of an earlier call."""
    os.makedirs(folder, exist_ok=True)
    written = sum(os.path.getsize(part) for part in glob.glob(f'{folder}/*.bin.tmp'))
    needed = 2 * tokens - written       # bytes
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f'{folder} needs {needed / 1e9:.2f} GB and its disk has '
                         f'{free / 1e9:.2f} GB free: make room, or take fewer --tokens')


def write_json(value, path):
    with open(path + '.tmp', 'w') as f:
        json.dump(value, f, indent=1)
    os.replace(path + '.tmp', path)     # so path is never half a file


def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def load(name):
    """
    data/NAME as (train, val, meta): two uint16 memmaps and meta.json. pydocs is made if missing.

    ValueError, with the command that helps, if the data set is missing or damaged.
    """
    folder = f'data/{name}'
    if not os.path.exists(f'{folder}/meta.json'):
        if name != 'pydocs':
            flag = '--tokens=300M' if name == 'fineweb' else '--path=TEXT'
            near = difflib.get_close_matches(name, tasks.TASKS, n=1)
            task = f", or did you mean the task '{near[0]}'?" if near else ''
            raise ValueError(f"no data set '{name}' in data/: "
                             f'make it with python data.py {name} {flag}{task}')
        make(name)
    try:
        with open(f'{folder}/meta.json') as f:
            meta = json.load(f)
        ids = {}
        for split in SPLITS:
            path, size = f'{folder}/{split}.bin', 2 * meta[split]['tokens']     # bytes
            if os.path.getsize(path) != size or sha256(path) != meta[split]['sha256']:
                raise ValueError(f'{path} is not the file that {folder}/meta.json describes '
                                 '(size or sha256)')
            ids[split] = np.memmap(path, dtype='<u2', mode='r')
        return ids['train'], ids['val'], meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data set '{name}' is damaged: {error}. Delete {folder} "
                         'and make it again with python data.py') from error


class Text:
    """A data set of text, for training and for looking at a model; tasks.Problems is its like."""
    asked = False               # every token has a label, and the loss is what counts

    def __init__(self, name):
        self.name = name
        self.train, self.val, self.meta = load(name)
        self.tokenizer, self.vocab_size = self.meta['tokenizer'], self.meta['vocab_size']
        self.sha256 = self.meta['train']['sha256']
        self.said = f'{name}: {len(self.train):,} tokens ({self.tokenizer})'

    def check(self, T):
        """ValueError if the text is too short for windows of T tokens."""
        for split, ids in dict(train=self.train, val=self.val).items():
            if len(ids) <= T:
                raise ValueError(f'block_size = {T} is longer than the {split} text of {self.name} '
                                 f'({len(ids)} tokens): make --block_size smaller, or take more '
                                 'text')

    def batch(self, rng, rows, T, mine=slice(None)):
        """Random windows, of which `mine` are wanted: x, y (B, T)."""
        return windows(self.train, rng.integers(len(self.train) - T, size=rows)[mine], T)

    def n_held_out(self, T):
        """How many held-out windows there are, without overlap."""
        return (len(self.val) - 1) // T

    def held_out(self, numbers, T):
        """Held-out windows by number -> x, y (N, T)."""
        return windows(self.val, T * np.asarray(numbers), T)


def open_data(name, reads=None, vocab_size=None):
    """
    The data set or task `name`: a Text, or tasks.Problems.

    reads, vocab_size: tokenizer and vocabulary of the model that will read it; ValueError if it is
    another, or tokens of the text are beyond it.
    """
    if not name:
        raise ValueError('this model came without a data set: name one with --dataset')
    task = name.partition(':')[0]
    text = tasks.Problems(name) if task in tasks.TASKS or ':' in name else Text(name)
    if reads and text.tokenizer != reads:
        raise ValueError(f"the model reads {reads} tokens, data set '{name}' holds "
                         f'{text.tokenizer}: choose another --dataset')
    if vocab_size and text.vocab_size > vocab_size:
        raise ValueError(f"the model knows {vocab_size} tokens, data set '{name}' has "
                         f'{text.vocab_size}: choose another --dataset')
    return text


def windows(data, starts, block_size):
    """Inputs (B, T) and targets (B, T), the next tokens, int64: one row from each of the starts."""
    rows = [torch.from_numpy(data[s:s + block_size + 1].astype(np.int64)) for s in starts]
    rows = torch.stack(rows)            # (B, T + 1)
    return rows[:, :-1], rows[:, 1:]


def main():
    started = time.time()
    meta = make(name, path, tokenizer, tokens, val_fraction, config, revision)
    seconds = time.time() - started
    print(f'{total(meta, "bytes") / 1e6:.1f} MB of text in {seconds:.1f} s')
    for split in SPLITS:
        n_documents, n_tokens = meta[split]['documents'], meta[split]['tokens']
        percent = 100 * n_tokens / total(meta, 'tokens')
        print(f'data/{name}/{split}.bin: {n_documents:,} documents, '
              f"{n_tokens:,} tokens ({meta['tokenizer']}), {percent:.2f}%")
    print(f'next: python train.py --dataset={name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
