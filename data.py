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

Every n-th document is held out as a whole, and a BPE is trained on the others. A single document is
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
from itertools import islice
from shlex import quote

import numpy as np
import torch
from tqdm import tqdm

import tasks
from common.configurator import configure, did_you_mean, explain, run
from common.encoding import EOT, TokenizerJson, open_encoding, train_bpe  # noqa: F401
from common.files import write_json
from common.log import spread
from tasks import TASKS, check

# --------------------------------------------------------------------------------------------------
name = 'torchdocs'                  # torchdocs, fineweb, or any name for text of your own
path = ''                           # own text: a file, folder or pattern; fineweb: another data set
tokenizer: str | None = None        # gpt2, bytes, ...; None = gpt2 for fineweb, bytes otherwise
bpe: int | None = None              # train a byte-level BPE of this many tokens on own text
tokens: str | int = '300M'          # fineweb: how many tokens to take (300M is the paper's budget)
config = 'sample-10BT'              # fineweb: sample-100BT, sample-350BT, default, CC-MAIN-2024-10
revision: str | None = None         # fineweb: a commit of the data set; None = the newest
val_fraction: float | None = None   # held out; None = 0.0005 of fineweb, 1/48 of torchdocs, or 0.05
# --------------------------------------------------------------------------------------------------

SPLITS = ('train', 'val')
# the sha256 of torchdocs' train.bin with torch 2.13.0
TORCHDOCS = '649d3f8679f5bc01652a8b13a57e06a6a07282007bbc1ca23fab5a27cc71db50'


def get_encoding(name, folder=None):
    """The encoding of a checkpoint or a data set: the words of a task, or open_encoding's."""
    check(name, 'this model came without a tokenizer.json, so it cannot read or write text: '
          'convert it again from a folder that has one')
    return tasks.Problems(name) if tasks.is_task(name) else open_encoding(name, folder)


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


def file_documents(path, val_fraction):
    """
    Each text file at path, a file, folder or pattern, as one document.

    A single file gives two, its last part before its first, since document 0 is held out.
    """
    pattern = f'{glob.escape(path)}/**/*.txt' if os.path.isdir(path) else path
    found = [path] if os.path.isfile(path) else sorted(glob.glob(pattern, recursive=True))
    texts = []
    for file in filter(os.path.isfile, found):
        with (explain(f"cannot read '{file}'", 'give UTF-8 text'),
              open(file, encoding='utf-8-sig') as f):
            texts.append(f.read())
            check(texts[-1].strip(), 'it is empty')
    check(texts, f"no text at '{path}': give --path a UTF-8 text file, a folder of .txt files or "
          "of nanoGPT's train.bin and val.bin, or a glob pattern")
    if len(texts) > 1:
        return texts
    cut = int(len(texts[0]) * (1 - val_fraction))
    return [texts[0][cut:], texts[0][:cut]]


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


def stream_documents(stream, source):
    """The text of each row of a stream."""
    with explain(f'cannot stream {source}', 'run the command again: what is done is kept'):
        for row in stream:
            yield row['text']


# writing a data set -------------------------------------------------------------------------------

def make(name, path='', tokenizer=None, tokens='300M', val_fraction=None, config='sample-10BT',
         revision=None, bpe=None):
    """Write data/NAME, as the knobs of these names say -> its meta."""
    # what the knobs ask for
    check(re.fullmatch(r'\w[\w.-]*', name) and name not in TASKS,
          f"'{name}' cannot be the name of a data set: use letters, digits, _ . and -, and not the "
          'name of a task, whose problems are made during training')
    check(not path or name != 'torchdocs',
          f'text of your own needs a name of its own: python data.py NAME --path={quote(path)}')
    if val_fraction is None:
        val_fraction = dict(fineweb=0.0005, torchdocs=1 / 48).get(name, 0.05)
    check(0 < val_fraction <= 0.5, f'val_fraction must lie in (0, 0.5], not {val_fraction}')
    are_tokens = all(os.path.exists(f'{path}/{split}.bin') for split in SPLITS)
    check(not are_tokens or not os.path.exists(f'{path}/meta.pkl'),
          f'the tokens in {path} are numbers of characters, by a table in meta.pkl that is not '
          f'read: take their text, --path={quote(path)}/input.txt')
    check(bpe is None or not (tokenizer or are_tokens or name == 'fineweb'),
          '--bpe trains a tokenizer on text of your own: leave out --tokenizer, and give --path a '
          'file or a folder of .txt files')
    encoding = get_encoding(tokenizer or ('gpt2' if name == 'fineweb' or are_tokens else 'bytes'))

    # the documents, of which every n-th is held out, and where they come from
    documents, stream, source, max_tokens = [], None, path, math.inf
    if name == 'fineweb':
        max_tokens = count_tokens(tokens)
        stream, source = open_fineweb(path, config, revision)
        documents = stream_documents(stream, source)
    elif name == 'torchdocs':
        print("making data/torchdocs from torch's documentation, half a minute", file=sys.stderr)
        documents, source = list(torch_documents()), f'documentation in torch {torch.__version__}'
    elif not are_tokens:
        check(path, f"no data set '{name}': give its text, python data.py {name} --path=TEXT")
        documents = file_documents(path, val_fraction)
    val_every = round(1 / val_fraction)
    if bpe is not None:
        encoding = train_bpe((text for i, text in enumerate(documents) if i % val_every), bpe)

    # their tokens, which replace those of before when all are written
    part, made_of = f'data/{name}/part', [source, encoding.name, val_every]
    try:
        with explain(f'cannot write data/{name}', 'make room, then run the command again', OSError):
            n_done = resume(part, made_of, stream)
            for split in SPLITS if are_tokens else ():
                shutil.copyfile(f'{path}/{split}.bin', f'{part}/{split}.bin')
            for done in tokenize(documents, encoding, part, val_every, max_tokens, n_done):
                if stream is not None:
                    progress = dict(made_of=made_of, done=done, stream=stream.state_dict())
                    write_json(progress, f'{part}/progress.json')
            return finish(f'data/{name}', encoding, source)
    finally:
        if stream is None:      # a later call starts anew
            shutil.rmtree(part, ignore_errors=True)


def count_tokens(text):
    """'300M' -> 300_000_000; also K and B."""
    match = re.fullmatch(r'(\d{1,12}\.?\d*)([KMB]?)', str(text).upper())
    check(match and float(match[1]),
          f"tokens = '{text}' is not a number of tokens: say 300M, 2B or 100000")
    return int(float(match[1]) * dict(K=1e3, M=1e6, B=1e9).get(match[2], 1))


def resume(part, made_of, stream):
    """
    Make the folder part ready -> the number of documents in it. If an interrupted call made the
    same data set, its whole batches are kept, and the stream is set to the end of them.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):    # no progress that can be used
        with open(f'{part}/progress.json') as f:
            progress = json.load(f)
        if progress['made_of'] == made_of:
            for split in SPLITS:
                os.truncate(f'{part}/{split}.bin', progress['done'][split])
            stream.load_state_dict(progress['stream'])
            return progress['done']['documents']
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(part)
    return 0


def tokenize(documents, encoding, part, val_every, max_tokens, n_done):
    """
    Append the tokens of documents to part/{train.bin, val.bin}, until there are max_tokens.

    Documents 0, val_every, 2 val_every, ... are held out; n_done of them were written before. After
    each whole batch it yields {documents: how many are written, split: bytes of its file}.
    """
    documents = iter(documents)
    with (open(f'{part}/train.bin', 'ab') as train, open(f'{part}/val.bin', 'ab') as val,
          tqdm(total=max_tokens, initial=(train.tell() + val.tell()) // 2, unit=' tokens',
               unit_scale=True, desc=part, leave=False, disable=None) as bar):
        while texts := list(islice(documents, 1024)):
            for ids in encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1):
                f = train if n_done % val_every else val
                f.write(np.array([*ids, encoding.eot_token], dtype='<u2').tobytes())
                n_done += 1
                if train.tell() + val.tell() >= 2 * max_tokens:
                    return
            for f in train, val:
                f.flush()
                os.fsync(f.fileno())
            bar.update((train.tell() + val.tell()) // 2 - bar.n)
            yield dict(documents=n_done, train=train.tell(), val=val.tell())


def finish(folder, encoding, source):
    """Check and count the tokens in folder/part and move them to folder -> what meta.json holds."""
    n_vocab, eot = encoding.n_vocab, encoding.eot_token
    text_bytes = np.array([0 if token == eot else len(encoding.decode_single_token_bytes(token))
                           for token in range(n_vocab)])
    meta = dict(tokenizer=encoding.name, vocab_size=n_vocab, dtype='uint16', source=source)
    for split in SPLITS:
        file = f'{folder}/part/{split}.bin'
        check(os.path.getsize(file), f'{source} is too small for a training and a held-out split')
        with explain(f"{source}'s {split}.bin cannot be read as uint16 tokens of {encoding.name}",
                     'check the file and --tokenizer'):
            ids = np.memmap(file, dtype='<u2', mode='r')
            # how often each occurs; in parts, since bincount needs 8 bytes a token
            occurs = sum(np.bincount(ids[start:start + 2 ** 24], minlength=2 ** 16)
                         for start in range(0, len(ids), 2 ** 24))
            check(not occurs[n_vocab:].any(), f'it has the token {occurs.nonzero()[0][-1]}')
        meta[split] = dict(documents=int(occurs[eot]), tokens=len(ids),
                           bytes=int(occurs[:n_vocab] @ text_bytes), sha256=sha256(file))
    for split in SPLITS:
        os.replace(f'{folder}/part/{split}.bin', f'{folder}/{split}.bin')
    if isinstance(encoding, TokenizerJson):
        encoding.save(folder)
    write_json(meta, f'{folder}/meta.json')
    shutil.rmtree(f'{folder}/part')
    return meta


def sha256(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


# reading a data set -------------------------------------------------------------------------------

def open_data(name, reads=None, vocab_size=math.inf):
    """The data set or task `name`, for a model with this tokenizer (reads) and vocabulary."""
    check(name, 'this model came without a data set: name one with --dataset')
    text = tasks.Problems(name) if tasks.is_task(name) else Text(name)
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
                     args['vocab_size'])
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
        with explain(f'{folder} is damaged', 'make it again with python data.py'):
            with open(f'{folder}/meta.json') as f:
                self.meta = json.load(f)
            for split in SPLITS:
                check(sha256(f'{folder}/{split}.bin') == self.meta[split]['sha256'],
                      f'{split}.bin does not have the sha256 in meta.json')
            self.train, self.val = (np.memmap(f'{folder}/{split}.bin', dtype='<u2', mode='r')
                                    for split in SPLITS)
            self.tokenizer, self.vocab_size = self.meta['tokenizer'], self.meta['vocab_size']
            if '.json' in self.tokenizer:       # is it there, and the one that made the tokens?
                self.encoding = get_encoding(self.tokenizer, folder)
                self.tokenizer = self.encoding.name
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
    meta = make(name, path, tokenizer, tokens, val_fraction, config, revision, bpe)
    for split in SPLITS:
        of = meta[split]
        print(f"data/{name}/{split}.bin: {of['documents']:,} documents, {of['bytes'] / 1e6:.1f} MB "
              f"of text, {of['tokens']:,} tokens ({meta['tokenizer']})")
    print(f'next: python train.py --dataset={name} --out_dir=out-{name}')


if __name__ == '__main__':
    configure(globals(), positional='name')
    run(main)
