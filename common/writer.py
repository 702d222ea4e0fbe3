"""
The tokens of a data set while they are written: train.bin and val.bin in the folder data/NAME.part.
A stream also has progress.json there, from which the next call continues. It holds

    recipe        every choice on which the tokens depend (make_data). A call continues only what
                  has its own recipe; `tokens` may differ if it is more than what is written
    stream        the state of the stream
    train, val    how many documents, tokens and bytes of text were written
"""
import os
import shutil

import numpy as np
from tqdm import tqdm

from common.errors import UserError
from common.files import write_json
from common.source import SPLITS

SAVE_EVERY = 1024       # documents; 300M tokens take hours


class Writer:
    """
    `with Writer(...) as writer:` writes the tokens of documents into train.bin and val.bin in the
    folder part.

    counts          {split: dict(documents, tokens, bytes of text)}, what is in them
    progress        what progress_to_continue returns; {} starts anew
    most_tokens     how many tokens are wanted; None for all
    """

    def __init__(self, part, encoding, progress, most_tokens):
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
        counts['bytes'] += len(text.encode(errors='replace'))   # lone surrogates may occur
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
        write_json(dict(recipe=recipe, stream=state, **self.counts), f'{self.part}/progress.json')


# what an interrupted call has written -------------------------------------------------------------

def progress_to_continue(progress, part, recipe, overwrite):
    """
    The progress in the folder part if a call with this recipe can continue it, otherwise {}.
    ValueError if it cannot, and overwrite is not given: then nothing is discarded.
    """
    if not progress:
        return {}
    reason = why_not_continued(progress, part, recipe)
    if not reason:
        return progress
    if not overwrite:
        raise UserError(f'an interrupted call has left {n_tokens_in(progress):,} tokens in {part}, '
                        f'and {reason}: repeat that call, or begin anew with --overwrite')
    return {}


def why_not_continued(progress, part, recipe):
    """Why a call with this recipe cannot continue this progress in part; '' if it can."""
    # another number of tokens can be continued, if it is more than what is written
    same_number = progress.get('recipe', {}) | dict(tokens=recipe['tokens'])
    differing = differences(same_number, recipe)
    if differing:
        return f"it had {'; '.join(differing)}"
    if n_tokens_in(progress) >= recipe['tokens']:
        return f"this call asks for {recipe['tokens']:,}, no more than these"
    for split in SPLITS:
        file = f'{part}/{split}.bin'
        if not os.path.exists(file) or os.path.getsize(file) < 2 * progress[split]['tokens']:
            return f'{file} is damaged'
    return ''


def n_tokens_in(counts):
    """The tokens of both splits."""
    return sum(counts[split]['tokens'] for split in SPLITS)


def differences(old, new):
    """What makes two recipes differ, in words: ['tokenizer gpt2, and this is bytes']."""
    if old.keys() != new.keys():
        return ['a recipe of another version of this program']
    in_words = []
    for choice in old:
        if old[choice] != new[choice] and choice == 'identity':
            in_words.append('other text, or another split of it')
        elif old[choice] != new[choice]:
            in_words.append(f'{choice} {old[choice]}, and this is {new[choice]}')
    return in_words
