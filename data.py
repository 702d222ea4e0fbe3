"""
Turn text into tokens on disk, and read them back.

    python data.py                         torchdocs: the documentation in torch's own Python files
    python data.py NAME --path=TEXT        your own UTF-8 text: a file, a folder of .txt files, or a
                                           glob; --bpe=4096 trains a byte-level BPE on it
    python data.py NAME --path=FOLDER      nanoGPT's token files: train.bin and val.bin
    python data.py fineweb --tokens=300M   FineWeb, streamed by `datasets`; after an interruption
                                           the same command continues where it stopped

writes data/NAME:

    train.bin, val.bin    tokens as uint16, little-endian; an end-of-text token ends each document
    meta.json             tokenizer, vocab_size, dtype, source; for each split its documents,
                          tokens, bytes of text, and sha256
    tokenizer.json        with --bpe: the tokenizer, which train.py copies beside ckpt.pt

A text file, which must fit into memory, is a document, or several, which <|endoftext|> ends.
Documents are held out as a whole, and a BPE is trained on the others. Of own text those are held
out whose file or folder is named val, valid, validation or test; if there are none, some of those
not named train, drawn by chance and always the same. Elsewhere every n-th is. A single document is
cut in two, and its last part is held out. A tokenizer is `bytes` (nothing to download), one of
tiktoken's, such as gpt2, or the path of a tokenizer.json.

Paper: App. B (FineWeb, 300M tokens).

    x, y    (B, T) int64: input tokens, and the next token after each of them
"""
import ast
import glob
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from shlex import quote

import filelock
import numpy as np
import torch
from tqdm import tqdm

import tasks
from common.configurator import PathName, configure, did_you_mean, explain, run
from common.encoding import (
    EOT,
    documents_in,
    in_pieces,
    open_encoding,
    text_of,
    train_bpe,
    where_to_cut,
)
from common.files import write_json
from common.report import spread
from tasks import TASKS, check

# --------------------------------------------------------------------------------------------------
name = 'torchdocs'                  # torchdocs, fineweb, or any name for text of your own
path: PathName = ''                 # own text: a file, folder or pattern; fineweb: another data set
tokenizer: PathName | None = None   # gpt2, bytes, ...; None = gpt2 for fineweb, bytes otherwise
bpe: int | None = None              # train a byte-level BPE of this many tokens on own text
tokens: str | int = '300M'          # fineweb: how many tokens to take (300M is the paper's budget)
config = 'sample-10BT'              # fineweb: sample-100BT, sample-350BT, default, CC-MAIN-2024-10
revision: str | None = None         # fineweb: a commit of the data set; None = the newest
val_fraction: float | None = None   # held out; None = 0.0005 of fineweb, 1/48 of torchdocs, or 0.05
overwrite = False                   # replace a data set of this name
# --------------------------------------------------------------------------------------------------

SPLITS = ('train', 'val')
HELD_OUT = {'val', 'valid', 'validation', 'test'}       # the names of files that are held out
# the tokenizer and the part that is held out, by where the text comes from
DEFAULTS = dict(torchdocs=('bytes', 1 / 48), fineweb=('gpt2', 0.0005), tokens=('gpt2', 0.05),
                text=('bytes', 0.05))
BATCH = 1024            # texts that are read, and pieces that are encoded, at a time
# the sha256 of torchdocs' train.bin with torch 2.13.0
TORCHDOCS = '649d3f8679f5bc01652a8b13a57e06a6a07282007bbc1ca23fab5a27cc71db50'


def get_encoding(name, folder=None):
    """The encoding of a checkpoint or a data set: the words of a task, or open_encoding's."""
    check(name, 'this model came without a tokenizer.json, so it cannot read or write text: '
          'convert it again from a folder that has one')
    return tasks.Problems(name) if tasks.is_task(name) else open_encoding(name, folder)


def texts_of(tokens, encoding):
    """The text of each token, see common.encoding.text_of."""
    return [text_of(token, encoding) for token in tokens]


def read_prompt(start):
    """The knob `start` -> the text, from a file if it is FILE:PATH."""
    if not start.startswith('FILE:'):
        return start
    path = os.path.expanduser(start.removeprefix('FILE:'))
    with (explain(f"cannot read '{path}'", 'a prompt is text in UTF-8', UnicodeDecodeError),
          open(path, encoding='utf-8-sig') as f):
        return f.read()


# where text comes from ----------------------------------------------------------------------------

def torch_documents(folder=os.path.dirname(torch.__file__)):
    """The documentation in torch's own Python files, each file a document, and each text once."""
    used = set()
    for path in sorted(glob.glob('**/*.py', root_dir=folder, recursive=True)):
        if path.startswith('testing/') or path == 'version.py':     # version.py names the build
            continue
        with open(f'{folder}/{path}', encoding='utf-8') as f:
            new = [text for text in dict.fromkeys(strings(ast.parse(f.read()))) if text not in used]
        used.update(new)
        if new:
            yield '\n\n'.join(new)


def strings(tree):
    """
    The long strings in a parsed Python file, by position, without their indentation: docstrings of
    80 characters, and other strings of several lines and 200 characters, except parts of f-strings.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings, parts, found = set(), set(), []
    for node in ast.walk(tree):     # a parent comes before its children
        if isinstance(node, documented):
            docstrings.add(ast.get_docstring(node, clean=False))
        elif isinstance(node, ast.JoinedStr):       # an f-string
            parts.update(ast.walk(node))
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str):
            is_long = text in docstrings or len(text) >= 200 and '\n' in text
            if len(text) >= 80 and is_long and node not in parts:
                text = re.sub(' +$', '', inspect.cleandoc(text), flags=re.MULTILINE).strip('\n')
                found.append((node.lineno, node.col_offset, text))
    return [text for _, _, text in sorted(found)]


def find_files(path):
    """The text files at path (a file, folder or pattern) by their order, each under one name."""
    found = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    if os.path.isdir(path):     # links to folders are not followed
        every = [file for file in Path(path).rglob('*') if file.is_symlink() or not file.is_dir()]
        found = [str(file) for file in every
                 if file.suffix == '.txt' and '/.' not in f'/{file.relative_to(path)}']
        if len(found) < len(every):
            print(f'{len(every) - len(found)} files and linked folders in {path} are left out: '
                  'only .txt files are read', file=sys.stderr)
    files = {os.path.realpath(file): file
             for file in sorted(found, reverse=True) if os.path.isfile(file)}
    check(files, f"no text at '{path}': give --path a UTF-8 text file, a folder of .txt files or "
          "of nanoGPT's train.bin and val.bin, or a glob pattern")
    return sorted(files.values())


def own_text(files, val_fraction):
    """Text files -> their documents, and the numbers of those that are held out."""
    documents, numbers, root = [], dict(val=[], train=[], other=[]), os.path.commonpath(files)
    for file in files:
        with (explain(f"cannot read '{file}'", 'give UTF-8 text that fits into memory'),
              open(file, encoding='utf-8-sig') as f):
            found = documents_in(f.read())
            check(found, 'it is empty')
        # what the names of the file and its folders say about its documents
        names = {Path(part).stem for part in Path(os.path.relpath(file, root)).parts}
        kind = 'val' if names & HELD_OUT else 'train' if 'train' in names else 'other'
        numbers[kind] += range(len(documents), len(documents) + len(found))
        documents += found

    if len(documents) == 1:         # it is cut in two
        middle = int(len(documents[0]) * (1 - val_fraction))
        return [documents[0][:middle], documents[0][middle:]], {1}
    if numbers['val']:
        print(f"{len(numbers['val'])} documents are held out because of their files' names",
              file=sys.stderr)
        return documents, {*numbers['val']}
    # a draw that hardly ever takes the first
    drawn = np.random.default_rng(3).permutation(numbers['other'] or numbers['train'])
    return documents, {*drawn[:max(1, round(len(drawn) * val_fraction))]}


def open_fineweb(path, config, commit=None):
    """A stream of {'text': ...}, FineWeb's or that of another data set at path; its source."""
    import datasets  # takes a second
    import huggingface_hub
    path = path or 'HuggingFaceFW/fineweb'
    source = f'{path} {config}'
    with explain(f'cannot stream {source}', 'check --path, --config, --revision and the network'):
        if not os.path.isdir(path):     # fix the commit, so that a later call reads the same texts
            commit = commit or huggingface_hub.HfApi().dataset_info(path).sha
            source += f' at {commit}'
        stream = datasets.load_dataset(path, name=config, split='train', revision=commit,
                                       streaming=True)
        return stream.select_columns('text'), source


def streamed(stream, source):
    """The documents of each row of a stream; a row without text has none."""
    with explain(f'cannot stream {source}', 'run the command again: what is done is kept'):
        for row in stream:
            yield documents_in(row['text']) if isinstance(row['text'], str) else []


# writing a data set -------------------------------------------------------------------------------

def make(name, path='', tokenizer=None, tokens='300M', val_fraction=None, config='sample-10BT',
         revision=None, bpe=None, overwrite=False):
    """
    Write data/NAME, as the knobs of these names say -> its meta. What is there is kept (ValueError)
    unless overwrite; a stream that is to have more tokens than are there continues.
    """
    # the tokenizer: tokens that data.py has made are of the one in their meta.json
    kind = kind_of(name, path, tokenizer, bpe)
    default, fraction = DEFAULTS[kind]
    val_fraction = fraction if val_fraction is None else val_fraction
    check(0 < val_fraction <= 0.5, f'val_fraction must lie in (0, 0.5], not {val_fraction}')
    ours = read_json(f'{path}/meta.json').get('tokenizer') if kind == 'tokens' else None
    encoding = get_encoding(tokenizer or ours or default, None if tokenizer else path)
    check(ours in (None, encoding.name), f'these are tokens of {ours}: leave out --tokenizer')

    # the text, where it comes from, and the numbers of the documents that are held out
    texts, files, stream, source, asked = [], [], None, path, 0
    held_out = range(0, sys.maxsize, round(1 / val_fraction))
    if kind == 'fineweb':
        asked = count_tokens(tokens)
        stream, source = open_fineweb(path, config, revision)
        texts = streamed(stream, source)
    elif kind == 'torchdocs':
        source = f'documentation in torch {torch.__version__}'
        texts = map(documents_in, torch_documents())
    elif kind == 'tokens':
        files = [f'{path}/{split}.bin' for split in SPLITS]
    else:
        files = find_files(path)
        documents, held_out = own_text(files, val_fraction)
        texts = [documents]
    made_of = [source, encoding.name, bpe, val_fraction, sha256(*files) if files else '']
    progress = dict(made_of=made_of, asked=asked)

    folder, part = f'data/{name}', f'data/{name}/part'
    with (explain(f'cannot write {folder}', 'make room, then run the command again', OSError),
          filelock.FileLock(f'{folder}.lock')):     # others wait
        # what is there
        there = {} if overwrite else read_json(f'{folder}/meta.json')
        before = there.get('progress', {})
        if before | progress == before:         # of the same, as many tokens
            return there
        check(not there or before.get('made_of') == made_of and before['asked'] < asked,
              f"{folder} is there, made of {there.get('source')}, and this is other text or less: "
              '--overwrite replaces it, or choose another name')
        if there and not os.path.exists(f'{part}/meta.json'):       # more of the same stream
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(folder, part)

        # the tokens, which replace those of before when all are written
        if kind == 'torchdocs':
            print(f"making {folder} from torch's documentation, half a minute", file=sys.stderr)
        if bpe is not None:
            print(f'training a BPE of {bpe} tokens: a line of megabytes without a blank takes long',
                  file=sys.stderr)
            texts = list(texts)
            encoding = train_bpe((piece for number, document in enumerate(chain(*texts))
                                  if number not in held_out for piece in in_pieces(document)), bpe)
        try:
            done = resume(part, made_of, stream)
            if kind == 'tokens':
                for split, file in zip(SPLITS, files):
                    shutil.copyfile(file, f'{part}/{split}.bin')
                    done[split] = os.path.getsize(file)
            for _ in tokenize(texts, encoding, part, held_out, asked, done):
                if stream:
                    progress |= dict(done=dict(done), stream=stream.state_dict())
                    write_json(dict(progress=progress), f'{part}/meta.json')
            return finish(folder, encoding, source, done, progress)
        finally:
            if stream is None:      # a later call starts anew
                shutil.rmtree(part, ignore_errors=True)


def kind_of(name, path, tokenizer, bpe):
    """Where the text of these knobs comes from, a name in DEFAULTS. ValueError if nowhere."""
    check(re.fullmatch(r'\w[\w.-]*', name) and name not in TASKS, f"'{name}' cannot be the name of "
          'a data set: use letters, digits, _ . and -, and not the name of a task')
    check(not path or name != 'torchdocs',
          f'text of your own needs a name of its own: python data.py NAME --path={quote(path)}')
    check(path or name in DEFAULTS,
          f"no data set '{name}': give its text, python data.py {name} --path=TEXT")
    kind = name if name in ('torchdocs', 'fineweb') else 'text'
    if kind == 'text' and all(os.path.exists(f'{path}/{split}.bin') for split in SPLITS):
        kind = 'tokens'
        check(not os.path.exists(f'{path}/meta.pkl'),
              f'the tokens in {path} are characters, whose table meta.pkl is not read: take their '
              f'text, --path={quote(path)}/input.txt')
    check(bpe is None or not tokenizer and kind in ('text', 'torchdocs'),
          '--bpe trains a tokenizer on text of your own: give its --path, and no --tokenizer')
    return kind


def count_tokens(text):
    """'300M' -> 300_000_000; also K and B."""
    match = re.fullmatch(r'(\d{1,12}\.?\d*)([KMB]?)', str(text).upper())
    check(match and float(match[1]),
          f"tokens = '{text}' is not a number of tokens: say 300M, 2B or 100000")
    return int(float(match[1]) * dict(K=1e3, M=1e6, B=1e9).get(match[2], 1))


def resume(part, made_of, stream):
    """
    Make the folder part ready -> {documents, train, val: bytes, skipped: texts}, what is in it. If
    an interrupted call made the same, its whole batches are kept, and the stream goes to their end.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):    # no progress that can be used
        progress = read_json(f'{part}/meta.json')['progress']
        if progress['made_of'] == made_of:
            for split in SPLITS:
                size, file = progress['done'][split], f'{part}/{split}.bin'
                check(os.path.getsize(file) >= size, 'it is cut short')
                os.truncate(file, size)
            stream.load_state_dict(progress['stream'])
            return progress['done']
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    return dict(documents=0, train=0, val=0, skipped=0)


def tokenize(texts, encoding, part, held_out, max_tokens, done):
    """
    Append the tokens of texts to part/{train.bin, val.bin}, until there are max_tokens, 0 = all.

    texts: for each text the list of its documents. held_out: numbers of documents.
    done: counts documents, the bytes of each split, and texts without a document. It yields when
    BATCH texts are on the disk.
    """
    texts, cut = iter(texts), where_to_cut(encoding)
    with (open(f'{part}/train.bin', 'ab') as train, open(f'{part}/val.bin', 'ab') as val,
          tqdm(total=max_tokens or None, initial=(done['train'] + done['val']) // 2,
               unit=' tokens', unit_scale=True, desc=part, leave=False, disable=None) as bar):
        while batch := list(islice(texts, BATCH)):
            pieces = (piece for document in chain(*batch)
                      for piece in chain(in_pieces(document, cut), [EOT]))
            while some := list(islice(pieces, BATCH)):
                rows = encoding.encode_ordinary_batch(some, num_threads=os.cpu_count() or 1)
                for piece, ids in zip(some, rows):
                    split, f = ('val', val) if done['documents'] in held_out else ('train', train)
                    ids = [encoding.eot_token] if piece == EOT else ids
                    f.write(np.array(ids, dtype='<u2').tobytes())
                    done[split] += 2 * len(ids)
                    bar.update(len(ids))
                    done['documents'] += piece == EOT
                    if piece == EOT and 0 < 2 * max_tokens <= done['train'] + done['val']:
                        return
            done['skipped'] += batch.count([])
            for f in train, val:
                f.flush()
                os.fsync(f.fileno())
            yield


def finish(folder, encoding, source, done, progress):
    """
    Check and count the tokens in folder/part and move them to folder -> what meta.json holds.

    done: the bytes that were written of each split. progress: what a call needs to continue.
    """
    n_vocab, eot = encoding.n_vocab, encoding.eot_token
    text_bytes = np.array([0 if token == eot else len(encoding.decode_single_token_bytes(token))
                           for token in range(n_vocab)])
    meta = dict(tokenizer=encoding.name, vocab_size=n_vocab, dtype='uint16', source=source,
                progress=progress)
    for split in SPLITS:
        file = f'{folder}/part/{split}.bin'
        size = os.path.getsize(file)
        if size != done[split]:
            shutil.rmtree(f'{folder}/part')
            raise ValueError(f'{file} has {size:,} bytes, but this process wrote {done[split]:,}: '
                             'start again, with no other program that writes there')
        check(size, f'{source} is too small for a training and a held-out split')
        with explain(f"{source}'s {split}.bin cannot be read as uint16 tokens of {encoding.name}",
                     'check the file and --tokenizer'):
            check(size % 2 == 0, 'its number of bytes is odd')
            ids = np.memmap(file, '<u2', mode='r')
            check(bytes(ids[:3]) != b'\x93NUMPY', 'it is a .npy file')
            check(size < 8 or ids[1::2].any(), 'every second number is 0, as in 32 or 64 bits')
            # how often each token occurs, some millions at a time
            parts = np.array_split(ids, 1 + len(ids) // 2 ** 22)
            occurs = sum(np.bincount(part, minlength=2 ** 16) for part in parts)
            check(not occurs[n_vocab:].any(), f'it has the token {occurs.nonzero()[0][-1]}')
        meta[split] = dict(documents=int(occurs[eot]), tokens=size // 2,
                           bytes=int(occurs[:n_vocab] @ text_bytes), sha256=sha256(file))
    if done['skipped']:
        print(f"{done['skipped']:,} rows of {source} without text were left out", file=sys.stderr)
    for split in SPLITS:
        os.replace(f'{folder}/part/{split}.bin', f'{folder}/{split}.bin')
    if '.json' in encoding.name:
        encoding.save(folder)
    write_json(meta, f'{folder}/meta.json')
    shutil.rmtree(f'{folder}/part')
    return meta


def read_json(path):
    """The dict in a JSON file, {} if there is none."""
    with suppress(OSError, ValueError, TypeError), open(path, encoding='utf-8') as f:
        return dict(json.load(f))
    return {}


def sha256(*paths):
    """The sha256 of files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, 'rb') as f:
            hashlib.file_digest(f, lambda: digest)
    return digest.hexdigest()


# reading a data set -------------------------------------------------------------------------------

def open_data(name, reads=None, vocab_size=math.inf, folder=None):
    """
    The data set or task `name`, for a model with this tokenizer (reads) and vocabulary. A task is
    written in the tokens of a model that reads text; folder: that of its tokenizer.json.
    """
    check(name, 'this model came without a data set: name one with --dataset')
    text = tasks.open_problems(name, reads, folder) if tasks.is_task(name) else Text(name)
    check(reads in (None, text.tokenizer) and text.vocab_size <= vocab_size,
          f"the model reads {vocab_size} tokens of {reads or 'any text'}, but data set '{name}' "
          f'has {text.vocab_size} of {text.tokenizer}: choose another --dataset, or in training '
          'another --vocab_size')
    return text


def held_out(checkpoint, n, dataset='', dev='cpu'):
    """
    n held-out windows for a checkpoint's model, evenly spread over its data set, or over another.

    Returns the data set, as open_data does, idx and targets (n, T), and on a task the depth (n, T)
    of each label, otherwise None.
    """
    args = checkpoint['model_args']
    text = open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                     args['vocab_size'], checkpoint['folder'])
    T = args['block_size']
    numbers = spread(text, n, T)
    idx, targets = text.held_out(numbers, T)
    depth = text.with_depth(T)[2][numbers] if text.is_task else None
    return text, idx.to(dev), targets.to(dev), depth


class Text:
    """
    data/NAME, with its splits as uint16 memmaps. tasks.Problems has the same methods.

    torchdocs is made if it is missing.
    """
    is_task = False             # every token has a label, and the measure is the loss
    encoding = None             # its TokenizerJson, if it has one

    def __init__(self, name):
        self.name, folder = name, f'data/{name}'
        if not os.path.exists(f'{folder}/meta.json'):
            flag = '--tokens=300M' if name == 'fineweb' else '--path=TEXT'
            check(name == 'torchdocs', f"no data set or task '{name}'{did_you_mean(name, TASKS)} "
                  f'(text is prepared with python data.py {name} {flag})')
            make(name)
        with explain(f'{folder} is damaged', 'make it again with python data.py ... --overwrite'):
            self.meta = json.loads(Path(folder, 'meta.json').read_text())
            for split in SPLITS:
                file, wanted = f'{folder}/{split}.bin', self.meta[split]
                check(os.path.getsize(file) == 2 * wanted['tokens'],
                      f"{split}.bin does not have {wanted['tokens']:,} tokens")
                check(sha256(file) == wanted['sha256'],
                      f'{split}.bin does not have the sha256 in meta.json')
            self.train, self.val = (np.memmap(f'{folder}/{split}.bin', dtype='<u2', mode='r')
                                    for split in SPLITS)
            self.tokenizer, self.vocab_size = self.meta['tokenizer'], self.meta['vocab_size']
            if '.json' in self.tokenizer:       # is it there, and the one that made the tokens?
                self.encoding = get_encoding(self.tokenizer, folder)
        self.sha256 = self.meta['train']['sha256']
        self.description = f'{name}: {len(self.train):,} tokens ({self.tokenizer})'
        if name == 'torchdocs' and self.sha256 != TORCHDOCS:
            print(f'warning: {folder} is not the text of torch 2.13.0 (this is torch '
                  f'{torch.__version__}), so losses differ from the README', file=sys.stderr)

    def check(self, T, rows=1):
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


def windows(data, starts, block_size):
    """Inputs (B, T) and targets (B, T), the next tokens, int64: one row from each of the starts."""
    rows = np.lib.stride_tricks.sliding_window_view(data, block_size + 1)[starts]   # (B, T + 1)
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


def main():
    meta = make(name, path, tokenizer, tokens, val_fraction, config, revision, bpe, overwrite)
    for split in SPLITS:
        of = meta[split]
        print(f"data/{name}/{split}.bin: {of['documents']:,} documents, {of['bytes'] / 1e6:.1f} MB "
              f"of text, {of['tokens']:,} tokens ({meta['tokenizer']})")
    print(f'next: python train.py --dataset={name} --out_dir=out-{name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
