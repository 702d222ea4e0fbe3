"""
The tokens of a data set while they are written: train.bin and val.bin in the folder data/NAME/part.
For a stream progress.json is beside them, with which an interrupted call is continued. It holds

    recipe        every choice on which the tokens depend (data.make). Progress is used only by a
                  call with the same recipe; its `tokens` alone may differ, and must be larger
                  than what is there
    documents     how many were read
    stream        the state of the stream after the last of them
    train, val    how many documents, tokens and bytes of text were written
"""
import os
import shutil
import sys

import numpy as np
from tqdm import tqdm

from common.files import read_json, write_json
from common.source import SPLITS

SAVE_EVERY = 1024       # documents; 300M tokens take hours


class Writer:
    """
    `with Writer(part, encoding) as writer:` writes the tokens of documents into train.bin and
    val.bin in the folder part.

    counts          {split: dict(documents, tokens, bytes of text)}, what is in them
    progress        what usable_progress returns: the call continues it; {} starts anew
    most_tokens     how many tokens are wanted; None for all
    """

    def __init__(self, part, encoding, progress=None, most_tokens=None):
        self.part = part
        self.encoding = encoding
        self.most_tokens = most_tokens
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
        """The tokens written so far, in both files."""
        return n_tokens_in(self.counts)

    @property
    def is_full(self):
        """Are there as many tokens as wanted?"""
        return self.most_tokens is not None and self.n_tokens >= self.most_tokens

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

    def save_at_times(self, recipe, source):
        """After each SAVE_EVERY documents save the progress, if the source can be continued."""
        n_documents = sum(self.counts[split]['documents'] for split in SPLITS)
        if n_documents % SAVE_EVERY:
            return
        state = source.state()
        if state is None:
            return
        for file in self.bins.values():     # on the disk before the progress that counts them
            file.flush()
            os.fsync(file.fileno())
        write_json(dict(recipe=recipe) | state | self.counts, f'{self.part}/progress.json')


# what an interrupted call has written -------------------------------------------------------------

def usable_progress(part, recipe):
    """
    The progress in the folder part, if a call with this recipe can continue it; otherwise {}, and a
    line says why it cannot.
    """
    progress = read_json(f'{part}/progress.json')
    if not progress:
        return {}
    reason = why_useless(progress, part, recipe)
    if reason:
        print(f'{n_tokens_in(progress):,} tokens that an interrupted call has left are discarded: '
              f'{reason}', file=sys.stderr)
        return {}
    return progress


def why_useless(progress, part, recipe):
    """Why a call with this recipe cannot continue this progress in part; '' if it can."""
    differing = differences(recipe_in(progress) | dict(tokens=recipe['tokens']), recipe)
    if differing:
        return f"that call had {', '.join(differing)}"
    if n_tokens_in(progress) >= recipe['tokens']:
        return 'this call asks for no more than these'
    for split in SPLITS:
        file = f'{part}/{split}.bin'
        if not os.path.exists(file) or os.path.getsize(file) < 2 * progress[split]['tokens']:
            return f'{file} is damaged'
    return ''


def n_tokens_in(counts):
    """The tokens of both splits."""
    return sum(counts[split]['tokens'] for split in SPLITS)


# the recipe of tokens -----------------------------------------------------------------------------

def recipe_in(record):
    """The recipe in a meta.json or progress.json; {} if it has none."""
    return record.get('recipe', {})


def differences(old, new):
    """What makes the tokens of two recipes differ, in words: ['tokenizer gpt2, not bytes']."""
    if old.keys() != new.keys():
        return ['a recipe of another version of this program']
    in_words = []
    for choice, a in old.items():
        b = new[choice]
        if choice == 'place' and os.path.abspath(a) == os.path.abspath(b):
            continue        # two spellings of a path
        if choice == 'sha256' and a != b:
            in_words.append('other text')
        elif a != b:
            in_words.append(f'{choice} {a}, not {b}')
    return in_words
