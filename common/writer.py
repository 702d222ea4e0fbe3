"""
The tokens of a data set while they are written: train.bin and val.bin in the folder data/NAME/part.
For a stream progress.json is beside them, with which an interrupted call is continued. It holds

    made_of       the recipe of the tokens: every choice on which they depend (data.make). Progress
                  with another recipe is not used, but a call may ask for another number of tokens
    documents     how many were read
    stream        the state of the stream behind the last of them
    train, val    how many documents, tokens and bytes of text were written
"""
import os
import shutil
import sys

import numpy as np
from tqdm import tqdm

from common.files import read_json, write_json
from common.own_text import SPLITS


class Writer:
    """
    `with Writer(part, encoding) as writer:` writes train.bin and val.bin into the folder part: the
    tokens of documents.

    counts: {split: dict(documents, tokens, bytes of text)}, what is in them. progress: what
    usable_progress returns, which is continued; {} starts anew. most_tokens: for the progress bar.
    """

    def __init__(self, part, encoding, progress=None, most_tokens=None):
        self.part = part
        self.encoding = encoding
        if progress:
            self.counts = {split: progress[split] for split in SPLITS}
            for split in SPLITS:        # what was written after the progress was saved
                os.truncate(f'{part}/{split}.bin', 2 * self.counts[split]['tokens'])
        else:
            shutil.rmtree(part, ignore_errors=True)
            os.makedirs(part)
            self.counts = {split: dict(documents=0, tokens=0, bytes=0) for split in SPLITS}
        self.bins = {split: open(f'{part}/{split}.bin', 'ab') for split in SPLITS}
        self.bar = tqdm(total=most_tokens, initial=self.n_tokens, unit=' tokens', unit_scale=True,
                        desc=part, leave=False, disable=None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()
        for file in self.bins.values():
            file.close()

    @property
    def n_tokens(self):
        """How many tokens both files have."""
        return n_tokens_in(self.counts)

    def add(self, split, text):
        """Write a document."""
        encoding = self.encoding
        ids = [*encoding.start, *encoding.encode_ordinary(text), encoding.eot_token]
        self.bins[split].write(np.array(ids, dtype='<u2').tobytes())
        counts = self.counts[split]
        counts['documents'] += 1
        counts['tokens'] += len(ids)
        counts['bytes'] += len(text.encode(errors='replace'))
        self.bar.update(len(ids))

    def save(self, recipe, state):
        """Save the progress, once all that it counts is on the disk. state: that of the stream."""
        for file in self.bins.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(dict(made_of=recipe) | state | self.counts, f'{self.part}/progress.json')


# what an interrupted call has written -------------------------------------------------------------

def usable_progress(part, recipe):
    """
    The progress in the folder part, for a call with this recipe. {} if there is none, or if that
    call cannot go on from it; then a line says why.
    """
    progress = read_json(f'{part}/progress.json')
    if not progress:
        return {}
    reason = why_useless(progress, part, recipe)
    if reason:
        print(f'{n_tokens_in(progress):,} tokens of {in_words(recipe_in(progress))}, left by an '
              f'interrupted call, are discarded: they are {reason}', file=sys.stderr)
        return {}
    return progress


def why_useless(progress, part, recipe):
    """Why a call with this recipe cannot go on from this progress in part; '' if it can."""
    most_tokens = recipe['tokens']
    if not same_recipe(recipe_in(progress) | dict(tokens=most_tokens), recipe):
        return 'made in another way or by an earlier version'
    if n_tokens_in(progress) >= most_tokens:
        return 'not fewer than this call asks for'
    for split in SPLITS:
        file = f'{part}/{split}.bin'
        if not os.path.exists(file) or os.path.getsize(file) < 2 * progress[split]['tokens']:
            return 'damaged'
    return ''


def n_tokens_in(counts):
    """How many tokens both splits have."""
    return sum(counts[split]['tokens'] for split in SPLITS)


# the recipe of tokens -----------------------------------------------------------------------------

def recipe_in(record):
    """The recipe in a meta.json or progress.json; {} if it has none."""
    return record.get('made_of', {})


def same_recipe(a, b):
    """Would both recipes give the same tokens? A path may have two spellings."""
    return with_full_path(a) == with_full_path(b)


def with_full_path(recipe):
    return recipe | dict(source=os.path.abspath(recipe.get('source', '')))


def in_words(recipe):
    """Where the text comes from: 'HuggingFaceFW/fineweb sample-10BT at COMMIT'."""
    revision = recipe.get('revision')
    return f"{recipe['source']} at {revision}" if revision else recipe['source']
