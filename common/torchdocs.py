"""The documentation in torch's own Python files: text for a first run, without a download."""
import ast
import glob
import inspect
import os
import re
import sys
from pathlib import Path

import torch

from common.source import Source, one_in


class TorchDocs(Source):
    """The documents of torch_documents. The first of each `every` is held out."""
    default_every = 48

    def __init__(self, val_fraction=None):
        self.description = self.identity = f'documentation in torch {torch.__version__}'
        self.every = one_in(val_fraction) if val_fraction else self.default_every
        self.val_fraction = 1 / self.every

    def documents(self, progress):
        print("making data/torchdocs from torch's documentation, half a minute", file=sys.stderr)
        for number, text in enumerate(torch_documents()):
            yield 'train' if number % self.every else 'val', text


def torch_documents(folder=os.path.dirname(torch.__file__)):
    """The documentation in torch's own Python files. A file is a document; no text comes twice."""
    used = set()
    for path in sorted(glob.glob('**/*.py', root_dir=folder, recursive=True)):
        name = Path(path).as_posix()        # with / on Windows too
        if name.startswith('testing/') or name == 'version.py':     # version.py names the build
            continue
        with open(f'{folder}/{path}', encoding='utf-8') as f:
            texts = [text for text in dict.fromkeys(long_strings_in(ast.parse(f.read())))
                     if text not in used]
        used.update(texts)
        if texts:
            yield '\n\n'.join(texts)


def long_strings_in(tree):
    """
    The long strings in a parsed Python file, in the order of the file, without their indentation.
    A docstring is long from 80 characters on. Any other string must have several lines and at least
    200 characters. Parts of f-strings do not count.
    """
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    in_f_strings = set()
    long_strings = []
    for node in ast.walk(tree):     # a parent comes before its children
        if isinstance(node, documented):
            docstrings.add(ast.get_docstring(node, clean=False))
        elif isinstance(node, ast.JoinedStr):       # an f-string
            in_f_strings.update(ast.walk(node))
        elif isinstance(node, ast.Constant) and isinstance(text := node.value, str):
            if text in docstrings:
                is_long = len(text) >= 80
            else:
                is_long = len(text) >= 200 and '\n' in text
            if is_long and node not in in_f_strings:
                text = re.sub(' +$', '', inspect.cleandoc(text), flags=re.MULTILINE).strip('\n')
                long_strings.append((node.lineno, node.col_offset, text))
    return [text for _, _, text in sorted(long_strings)]
