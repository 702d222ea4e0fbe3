"""
Text -> tokens on disk.

    python data.py                                  pydocs: the English text that every Python carries; no download, seconds
    python data.py NAME --path=book.txt             your own UTF-8 text: a file, a folder of .txt files, or a glob pattern
    python data.py NAME --path=nanoGPT/data/owt     tokens already: a folder with nanoGPT's train.bin and val.bin (or .bin.xz)
    python data.py fineweb --tokens=300M            FineWeb through `datasets`, streamed; broken off, the same command goes on

writes data/NAME/{train.bin, val.bin, meta.json}: tokens as uint16, little-endian, an end-of-text token after each document.
Every n-th document is held out whole, so that no document is in both; a lone document gives its last part.
Paper: App. B (FineWeb, 300M tokens). Tokenizers: any tiktoken encoding that fits uint16, or `bytes`, which needs no download.
"""
import ast
import glob
import hashlib
import json
import logging
import lzma
import os
import platform
import re
import shutil
import sysconfig
import time
from contextlib import contextmanager
from itertools import islice

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

from configurator import configure, run

# ---------------------------------------------------------------------------------------------------------------------
name = 'pydocs'                     # pydocs, fineweb, or any name for text of your own
path = ''                           # own text: a file, a folder or a glob pattern; fineweb: another data set of its schema
tokenizer: str | None = None        # gpt2, bytes, ...; None = gpt2 for fineweb, bytes otherwise
tokens: str | int = '300M'          # fineweb: how many tokens to take (300M is the paper's budget)
config = 'sample-10BT'              # fineweb: sample-10BT, sample-100BT, sample-350BT, default, or a crawl such as CC-MAIN-2024-10
revision: str | None = None         # fineweb: a commit of the data set; None = the newest
val_fraction: float | None = None   # documents held out; None = 0.0005 of fineweb, 0.05 otherwise
# ---------------------------------------------------------------------------------------------------------------------

EOT = '<|endoftext|>'


def get_encoding(name):
    """A tiktoken.Encoding: `bytes` is built here, 256 bytes and end-of-text. ValueError if it cannot be had or is too large."""
    if name == 'bytes':
        return tiktoken.Encoding('bytes', pat_str=r'[\s\S]{1,16}', mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={EOT: 256})
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"unknown tokenizer '{name}': choose bytes or one of {', '.join(tiktoken.list_encoding_names())}")
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:      # requests' errors, and tiktoken's own for a file that is cut short
        raise ValueError(f"the '{name}' encoding is not on this machine and could not be fetched ({type(error).__name__}): go "
                         'online once, or point TIKTOKEN_CACHE_DIR at a folder that has it, or make the data with '
                         '--tokenizer=bytes, which needs nothing') from error
    if encoding.n_vocab > 2 ** 16:
        raise ValueError(f"'{name}' has {encoding.n_vocab} tokens, more than uint16 holds (65536): use gpt2 or bytes")
    return encoding


def pydocs_documents():
    """The language reference that pydoc carries, then the docstrings of each standard-library module, repeats left out."""
    from pydoc_data.topics import topics
    yield from (text for _, text in sorted(topics.items()))
    root, seen = sysconfig.get_path('stdlib'), set()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {'test', 'tests', 'idle_test', 'site-packages', 'dist-packages', 'pydoc_data'})
        for file in sorted(f for f in files if f.endswith('.py')):
            try:
                with open(os.path.join(folder, file), encoding='utf-8') as f:
                    tree = ast.parse(f.read())
            except (OSError, SyntaxError, ValueError):      # a few files are wrong on purpose
                continue
            docs = [ast.get_docstring(node) for node in ast.walk(tree)
                    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
            docs = [d for d in dict.fromkeys(docs) if d and d not in seen]
            seen.update(docs)
            if docs:
                yield '\n\n'.join(docs)


def file_documents(path):
    """One document a file. ValueError for what is missing, empty or not UTF-8."""
    files = sorted(glob.glob(os.path.join(path, '**', '*.txt') if os.path.isdir(path) else path, recursive=True))
    files = [f for f in files if os.path.isfile(f)] or ([path] if os.path.isfile(path) else [])
    if not files:
        raise ValueError(f"no text at '{path}': give --path a UTF-8 text file, a folder of .txt files, or a glob pattern")
    for file in files:
        try:
            with open(file, encoding='utf-8') as f:
                text = f.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"'{file}' is not UTF-8 text (byte {error.start}): convert it, e.g. with iconv -t UTF-8") from None
        if not text.strip():
            raise ValueError(f"'{file}' is empty: give a file with text in it")
        yield text


class FineWeb:
    """
    FineWeb's texts, streamed from the hub; path: another data set of its schema, on the hub or a local folder with sample/10BT/*.parquet.

    state_dict and load_state_dict are those of datasets.IterableDataset: where the stream stands. ValueError if it breaks.
    """

    def __init__(self, path='', config='sample-10BT', revision=None):
        import datasets     # takes a second
        import huggingface_hub
        for name in ('datasets', 'huggingface_hub', 'fsspec', 'httpx'):
            logging.getLogger(name).setLevel(logging.CRITICAL)      # their retries; what matters is said below
        self.source = path or 'HuggingFaceFW/fineweb'
        with self.told():
            if not os.path.isdir(self.source):      # of one commit, also when it is taken up later
                revision = revision or huggingface_hub.HfApi().dataset_info(self.source).sha
            self.revision = revision
            rows = datasets.load_dataset(self.source, name=config, split='train', revision=revision, streaming=True)
            self.rows = rows.select_columns('text')
        self.state_dict, self.load_state_dict = self.rows.state_dict, self.rows.load_state_dict

    def __iter__(self):
        with self.told():
            for row in self.rows:
                yield row['text']

    @contextmanager
    def told(self):
        try:
            yield
        except Exception as error:      # of the hub, of HTTP, of parquet: each library has its own
            raise ValueError(f"cannot stream {self.source} ({type(error).__name__}: {str(error)[:200]}): check --path, --config, --revision and the network, "
                             'then run the command again: what is done is kept') from error


def count_tokens(text):
    """'300M' -> 300_000_000. K, M and B are understood."""
    text = str(text).strip().upper()
    unit = dict(K=10 ** 3, M=10 ** 6, B=10 ** 9).get(text[-1:], 1)
    try:
        number = int(float(text.rstrip('KMB')) * unit)
    except ValueError:
        number = 0
    if number <= 0:
        raise ValueError(f"tokens = '{text}' is no number of tokens: say 300M, 2B or 100000")
    return number


def write_dataset(folder, documents, encoding, val_fraction, source, max_tokens=None):
    """
    Tokenise documents into folder/{train.bin, val.bin, meta.json}; documents 0, n, 2n, ... are held out, n = 1 / val_fraction.

    What stood there before stays until all is written. Stops at max_tokens if given. Documents with a state_dict (a stream) that break
    off are taken up where the last whole batch ended when called again. Returns meta. ValueError if nothing is left to train on or to
    hold out, OSError if the disk is full.
    """
    os.makedirs(folder, exist_ok=True)
    paths = {split: os.path.join(folder, split + '.bin') for split in ('train', 'val')}
    made_of = dict(source=source, tokenizer=encoding.name, val_fraction=val_fraction)
    streamed, progress = hasattr(documents, 'state_dict'), os.path.join(folder, 'progress.json')
    count, n = go_on(progress, paths, made_of, documents) if streamed else (None, 0)
    count = count or {split: dict(documents=0, tokens=0, bytes=0) for split in paths}
    total = sum(count[split]['tokens'] for split in paths)
    keep = streamed         # what is done, if this call does not come to its end
    bar, stream = tqdm(total=max_tokens, initial=total, unit=' tokens', unit_scale=True, desc=folder, leave=False, mininterval=1, disable=None), iter(documents)
    try:
        with open(paths['train'] + '.tmp', 'ab' if n else 'wb') as train, open(paths['val'] + '.tmp', 'ab' if n else 'wb') as val:
            while (not max_tokens or total < max_tokens) and (batch := list(islice(stream, 1024))):
                for text, ids in zip(batch, encoding.encode_ordinary_batch(batch, num_threads=os.cpu_count() or 1)):
                    if max_tokens and total >= max_tokens:      # enough: the rest of the batch and of the stream is left
                        break
                    split, file = ('train', train) if n % round(1 / val_fraction) else ('val', val)
                    file.write(np.array(ids + [encoding.eot_token], dtype='<u2').tobytes())
                    for key, more in dict(documents=1, tokens=len(ids) + 1, bytes=len(text.encode('utf-8', 'replace'))).items():
                        count[split][key] += more
                    n, total = n + 1, total + len(ids) + 1
                    bar.update(len(ids) + 1)
                if streamed and not (max_tokens and total >= max_tokens):       # the whole batch was used
                    for file in (train, val):
                        file.flush()
                        os.fsync(file.fileno())
                    write_json(dict(made_of=made_of, documents=n, count=count, stream=documents.state_dict()), progress)
        for split in paths:
            if not count[split]['tokens']:
                raise ValueError(f'{source} holds {n} document(s), too little to train on and to hold out')
        meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, dtype='uint16', source=source,
                    **{split: count[split] | dict(sha256=sha256(path + '.tmp')) for split, path in paths.items()})
        for path in paths.values():
            os.replace(path + '.tmp', path)
        write_json(meta, os.path.join(folder, 'meta.json'))
        keep = False
    except OSError as error:
        raise OSError(f'cannot write {folder} ({error.strerror or error}): make room, then run the command again') from error
    finally:
        bar.close()
        for path in () if keep else (progress, *(path + '.tmp' for path in paths.values())):
            if os.path.exists(path):
                os.remove(path)
    return meta


def import_tokens(folder, path, encoding):
    """path/{train.bin, val.bin} of uint16 tokens, as nanoGPT has them (or .bin.xz) -> folder, with meta.json. ValueError if they are not."""
    os.makedirs(folder, exist_ok=True)
    meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, dtype='uint16', source=path)
    lengths = np.array([0 if i == encoding.eot_token else len(encoding.decode_single_token_bytes(i)) for i in range(encoding.n_vocab)])      # bytes
    targets = {split: os.path.join(folder, split + '.bin') for split in ('train', 'val')}
    try:
        for split, target in targets.items():
            file = os.path.join(path, split + '.bin')
            with open(file, 'rb') if os.path.exists(file) else lzma.open(file + '.xz') as f, open(target + '.tmp', 'wb') as g:
                shutil.copyfileobj(f, g, 2 ** 20)
            counts = np.bincount(np.memmap(target + '.tmp', dtype='<u2', mode='r'), minlength=encoding.n_vocab)
            if len(counts) > encoding.n_vocab:
                raise ValueError(f'token {len(counts) - 1} is in it, and {encoding.name} has {encoding.n_vocab}: say with --tokenizer what made it')
            meta[split] = dict(documents=int(counts[encoding.eot_token]), tokens=int(counts.sum()), bytes=int(counts @ lengths), sha256=sha256(target + '.tmp'))
        for target in targets.values():
            os.replace(target + '.tmp', target)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ValueError(f'{file} cannot be taken as uint16 tokens: {error}') from error
    finally:
        for tmp in glob.glob(os.path.join(folder, '*.bin.tmp')):
            os.remove(tmp)
    write_json(meta, os.path.join(folder, 'meta.json'))
    return meta


def go_on(progress, paths, made_of, documents):
    """What an earlier call left: set the stream to where it stood -> token counts, documents; (None, 0) if that was something else."""
    try:
        with open(progress) as f:
            found = json.load(f)
        if found['made_of'] != made_of:
            return None, 0
        for split, path in paths.items():
            os.truncate(path + '.tmp', 2 * found['count'][split]['tokens'])     # written after the last whole batch
        documents.load_state_dict(found['stream'])
        return found['count'], found['documents']
    except (OSError, ValueError, KeyError):
        return None, 0


def check_room(folder, tokens):
    """ValueError if the disk has no room for so many tokens, less those of an earlier call."""
    there = sum(os.path.getsize(path) for path in glob.glob(os.path.join(folder, '*.bin.tmp')))
    os.makedirs(folder, exist_ok=True)
    size, free = 2 * tokens - there, shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(f'{folder} needs {size / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free: make room, or take fewer --tokens')


def write_json(value, path):
    with open(path + '.tmp', 'w') as f:
        json.dump(value, f, indent=1)
    os.replace(path + '.tmp', path)


def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def make(name, path='', tokenizer=None, tokens='300M', val_fraction=None, config='sample-10BT', revision=None):
    """Write data/NAME from its source and return meta. ValueError if the source is missing or is no text."""
    if not re.fullmatch(r'\w[\w.-]*', name):
        raise ValueError(f"'{name}' is no name for a folder of data/: use letters, digits, _ . and -")
    if val_fraction is not None and not 0 < val_fraction <= 0.5:
        raise ValueError(f'val_fraction must lie in (0, 0.5], not {val_fraction}')
    made = os.path.isdir(path) and all(glob.glob(os.path.join(path, split + '.bin*')) for split in ('train', 'val'))     # tokens already
    encoding = get_encoding(tokenizer or ('gpt2' if name == 'fineweb' or made else 'bytes'))
    if made:
        return import_tokens(os.path.join('data', name), path, encoding)
    if name == 'fineweb':
        val_fraction, limit = val_fraction or 0.0005, count_tokens(tokens)
        check_room('data/fineweb', limit)
        documents = FineWeb(path, config, revision)
        source = f'{documents.source} {config}' + f' at {documents.revision}' * bool(documents.revision)
    elif path or name == 'pydocs':
        val_fraction, limit = val_fraction or 0.05, None
        documents = list(file_documents(path) if path else pydocs_documents())
        source = path or f'pydoc topics and standard-library docstrings of Python {platform.python_version()}'
        if len(documents) == 1:     # a lone document gives its last part
            cut = int(len(documents[0]) * (1 - val_fraction))
            documents, val_fraction = [documents[0][cut:], documents[0][:cut]], 0.5
    else:
        raise ValueError(f"no data set '{name}': make it with python data.py {name} --path=TEXT (a file or a folder)")
    return write_dataset(os.path.join('data', name), documents, encoding, val_fraction, source, limit)


def load(name):
    """
    data/NAME as (train, val, meta): uint16 memmaps and meta.json. pydocs is made if it is not there.

    ValueError if the data set does not exist (with the command that makes it) or its files disagree with meta.json.
    """
    folder = os.path.join('data', name)
    if not os.path.exists(os.path.join(folder, 'meta.json')):
        if name != 'pydocs':
            more = ' --tokens=300M' if name == 'fineweb' else ' --path=TEXT'
            raise ValueError(f"no data set '{name}' in data/: make it with python data.py {name}{more}")
        make(name)
    try:
        with open(os.path.join(folder, 'meta.json')) as f:
            meta = json.load(f)
        bins = []
        for split in ('train', 'val'):
            path = os.path.join(folder, split + '.bin')
            if os.path.getsize(path) != 2 * meta[split]['tokens'] or sha256(path) != meta[split]['sha256']:
                raise ValueError(f'{path} is not the file that {folder}/meta.json describes (size or sha256)')
            bins.append(np.memmap(path, dtype='<u2', mode='r'))
        return *bins, meta
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data set '{name}' is damaged: {error}. Delete {folder} and make it again with python data.py") from error


def windows(data, starts, block_size):
    """Tokens (B, T) and their successors (B, T), int64, from the given starts."""
    rows = torch.stack([torch.from_numpy(data[s:s + block_size + 1].astype(np.int64)) for s in starts])
    return rows[:, :-1], rows[:, 1:]


def main():
    t = time.time()
    meta = make(name, path, tokenizer, tokens, val_fraction, config, revision)
    print(f"{(meta['train']['bytes'] + meta['val']['bytes']) / 1e6:.1f} MB of text in {time.time() - t:.1f} s")
    for split in ('train', 'val'):
        print(f"data/{name}/{split}.bin: {meta[split]['documents']:,} documents, {meta[split]['tokens']:,} tokens ({meta['tokenizer']}), "
              f"{100 * meta[split]['tokens'] / (meta['train']['tokens'] + meta['val']['tokens']):.2f}%")
    print(f'next: python train.py --dataset={name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
