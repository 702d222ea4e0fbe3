"""
Text of your own: the documents of text files, or of nanoGPT's train.bin and val.bin, each with the
split to which it belongs. (data.py's docstring has the rules.)
"""
import glob
import os
import re
import sys
from pathlib import Path
from shlex import quote

import numpy as np

from common.encoding import kind_of, open_text_encoding
from common.errors import UserError, check, explain
from common.files import read_json, sha256_of
from common.source import SPLITS, Source, refuse_fraction
from common.tokenizer_json import EOT

# words in the name of a file or folder that is held out
HELD_OUT = {'val', 'valid', 'validation', 'dev', 'eval', 'test'}


# text files ---------------------------------------------------------------------------------------

class TextFiles(Source):
    """The documents of the text files at path. val_fraction: the knob of data.py."""

    def __init__(self, path, val_fraction=None):
        self.description = path
        self.files = find_files(path)
        self.splits = splits_by_name(self.files)
        if self.splits is None:
            self.val_fraction = val_fraction or 0.05
        else:
            refuse_fraction(val_fraction, 'the names of the files say which are held out')
            self.val_fraction = None
        # the bytes of the files run together in the hash, so their sizes are hashed as well
        sizes = [os.path.getsize(file) for file in self.files]
        self.identity = sha256_of(*self.files, more=f'{sizes} {self.splits}')

    def documents(self, progress):
        """The documents, [(split, text), ...]. A line says what is held out, and why."""
        texts_of_file = [read_documents(file) for file in self.files]
        if self.splits is not None:
            by_name = [file for file, split in zip(self.files, self.splits) if split == 'val']
            more = f' and {len(by_name) - 3} more files' if len(by_name) > 3 else ''
            print(f"held out: {', '.join(by_name[:3])}{more}, because of the name", file=sys.stderr)
            return [(split, text) for split, texts in zip(self.splits, texts_of_file)
                    for text in texts]
        texts = [text for texts in texts_of_file for text in texts]
        return split_by_chance(texts, self.val_fraction)


def find_files(path):
    """The text files at path (a file, folder or pattern), sorted. A link repeats no file."""
    if path.endswith('.bin') and not os.path.isdir(path):
        raise UserError(f"'{path}' holds tokens: give the folder of train.bin and val.bin")
    if os.path.isfile(path):
        files = [path]
    elif os.path.isdir(path):
        files = files_in(path)
    else:
        folder, pattern = os.path.split(path)
        if os.path.isdir(folder):       # the [1] of a folder that exists is no pattern
            folder = glob.escape(folder)
        files = glob.glob(os.path.join(folder, pattern), recursive=True)
    by_real_path = {}
    for file in sorted(files):
        if os.path.isfile(file):
            by_real_path.setdefault(os.path.realpath(file), file)
    check(by_real_path, f"no text at '{path}': give --path a UTF-8 text file, a folder of .txt "
          'files, or a glob pattern')
    return list(by_real_path.values())


def files_in(folder):
    """The .txt files in a folder and its subfolders, but no hidden ones and no linked folders."""
    files = []
    n_left_out = 0
    for file in Path(folder).rglob('*'):
        if file.is_dir() and not file.is_symlink():
            continue                    # rglob visits the files in it, too
        is_hidden = any(part.startswith('.') for part in file.relative_to(folder).parts)
        if file.suffix == '.txt' and not is_hidden:
            files.append(str(file))
        else:
            n_left_out += 1
    if n_left_out:
        print(f'left out in {folder}: files and linked folders, {n_left_out} in all; only .txt '
              'files that are not hidden are read', file=sys.stderr)
    return files


def splits_by_name(files):
    """
    'train' or 'val' for each file, from its path; None if no path contains a word of HELD_OUT. The
    name of a folder that holds all of the files does not count.
    """
    root = os.path.commonpath(files)
    splits = ['val' if is_held_out(os.path.relpath(file, root)) else 'train' for file in files]
    if 'train' not in splits:
        raise UserError('all files are held out because of their names '
                        f"({', '.join(sorted(HELD_OUT))}), and none is left to train on: rename "
                        'some')
    return splits if 'val' in splits else None


def is_held_out(path):
    """Does a path contain a word of HELD_OUT?"""
    # words of letters: my-val2.txt has my, val, txt
    return not HELD_OUT.isdisjoint(re.findall(r'[^\W\d_]+', path.lower()))


def split_by_chance(texts, val_fraction):
    """Texts -> [(split, text), ...]: a share of them is held out, or the end of a single one."""
    if len(texts) == 1:
        print(f'held out: the last {100 * val_fraction:g}% of the text, since it is one document',
              file=sys.stderr)
        middle = int(len(texts[0]) * (1 - val_fraction))
        return [('train', texts[0][:middle]), ('val', texts[0][middle:])]

    n = max(1, round(len(texts) * val_fraction))
    print(f'held out: {n} of {len(texts)} documents, drawn at random, as no name says which',
          file=sys.stderr)
    # With seed 3 and 5% the first document, often a licence, is not held out in texts of up to 55
    # documents. Do not change the seed: existing data sets would be split anew.
    drawn = {*np.random.default_rng(3).permutation(len(texts))[:n]}
    return [('val' if number in drawn else 'train', text) for number, text in enumerate(texts)]


def read_documents(file):
    """The documents of a text file."""
    with (explain(f"cannot read '{file}'", 'give UTF-8 text that fits into memory'),
          open(file, encoding='utf-8-sig') as f):
        texts = documents_in(f.read())
    check(texts, f"'{file}' has no text: leave it out")
    return texts


def documents_in(text):
    """The documents in a file's text, separated by EOT. Blank ones are left out."""
    return [document for document in text.split(EOT) if document.strip()]


# nanoGPT's tokens ---------------------------------------------------------------------------------

class StoredTokens(Source):
    """The text of train.bin and val.bin in a folder. By default it keeps its tokenizer."""

    def __init__(self, folder, val_fraction=None):
        if os.path.exists(f'{folder}/meta.pkl'):
            raise UserError(f'the tokens in {folder} are letters, numbered by meta.pkl, which is '
                            f'not read: take their text, --path={quote(folder)}/input.txt')
        refuse_fraction(val_fraction, f'{folder}/val.bin is held out')
        self.folder = self.description = folder
        self.val_fraction = None
        name = tokenizer_of(folder)
        self.encoding = open_text_encoding(name, folder)
        # the user may take another tokenizer for the new data set. A copy that is stored in the
        # folder is named by its path
        self.default_tokenizer = f'{folder}/tokenizer.json' if kind_of(name) == 'stored' else name
        files = [f'{folder}/{split}.bin' for split in SPLITS]
        sizes = [os.path.getsize(file) for file in files]
        self.identity = sha256_of(*files, more=f'{sizes} {name}')

    def documents(self, progress):
        not_text = {*self.encoding.start, *self.encoding.ends}
        for split in SPLITS:
            file = f'{self.folder}/{split}.bin'
            with explain(f"cannot read '{file}'", f'give uint16 tokens of {self.encoding.name}'):
                ids = np.memmap(file, '<u2', 'r')
                # the letters <|endoftext|> in a text end a document, too: documents_in
                places = np.flatnonzero(ids == self.encoding.eot_token)
                for document in np.split(ids, places + 1):
                    tokens = [token for token in document.tolist() if token not in not_text]
                    for text in documents_in(self.encoding.decode(tokens)):
                        yield split, text


def has_tokens(path):
    """Is path a folder with train.bin and val.bin?"""
    return all(os.path.exists(f'{path}/{split}.bin') for split in SPLITS)


def tokenizer_of(folder):
    """The name of the tokenizer of a folder's train.bin: gpt2, unless data.py has written it."""
    return read_json(f'{folder}/meta.json').get('tokenizer', 'gpt2')
