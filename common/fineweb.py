"""
FineWeb, or another data set of Hugging Face's hub with a column `text`: a stream of documents.

300M tokens take hours, so after every SAVE_EVERY documents data.py saves the progress beside the
tokens, in part/progress.json, and an interrupted call continues from there. It holds

    made_of       what the tokens are made of (data.make). Progress of anything else is not used,
                  but a call may ask for another number of tokens
    documents     how many were read
    stream        the state of the stream behind the last of them
    train, val    how many documents, tokens and bytes of text were written
"""
import functools
import os
import sys

from common.errors import explain
from common.files import read_json, write_json

SAVE_EVERY = 1024


class Stream:
    """
    The documents as (split, text) pairs; the first of each `every` documents is held out.

    path: '' = FineWeb; a data set, or a folder with the same layout. config: its part. revision: a
    commit of the data set; None = that of an earlier call for the same path and config, or else the
    newest. ValueError if the stream cannot be opened, or breaks off.

    source: where the documents come from, in words: 'HuggingFaceFW/fineweb sample-10BT at COMMIT'.
    earlier_source: that of the earlier call, '' if there was none.
    """

    def __init__(self, path, every, config='sample-10BT', revision=None, earlier_source=''):
        self.path = path or 'HuggingFaceFW/fineweb'
        self.every = every
        self.config = config
        self.revision = revision
        self.n_read = 0                             # documents
        self.source = f'{self.path} {config}'
        if os.path.isdir(self.path):
            return                                  # it has no commits
        words, _, commit = earlier_source.partition(' at ')
        if not revision and words == self.source:
            self.revision = commit
        if not self.revision:                       # a later call must read the same texts
            with self.explained():
                import huggingface_hub
                self.revision = huggingface_hub.HfApi().dataset_info(self.path).sha
        self.source += f' at {self.revision}'

    def explained(self):
        """For what is done before the first document is read."""
        return explain(f'cannot stream {self.source}', 'no network? If there is one, check --path, '
                       '--config and --revision')

    @functools.cached_property
    def rows(self):
        """The stream of the library, opened when it is first needed."""
        with self.explained():
            import datasets  # takes a second
            rows = datasets.load_dataset(self.path, name=self.config, split='train',
                                         revision=self.revision, streaming=True)
            return rows.select_columns('text')

    def __iter__(self):
        rows = self.rows
        with explain(f'cannot stream {self.source}', 'run the command again: what is done is kept'):
            for row in rows:
                if row['text'] and row['text'].strip():
                    split = 'train' if self.n_read % self.every else 'val'
                    self.n_read += 1
                    yield split, row['text']

    def resume(self, part, made_of):
        """
        Continue behind the progress that an interrupted call has saved in the folder part. Returns
        its counts, and cuts the files to what they count. None if there is no progress, or if it
        is useless, which a line says.
        """
        rows = self.rows        # if it cannot be opened, what is there stays
        progress = read_json(f'{part}/progress.json')
        if not progress:
            return None
        reason = why_useless(progress, part, made_of)
        if reason:
            print(f"{n_tokens_in(progress):,} tokens of {progress['made_of']['source']}, left by "
                  f'an interrupted call, are discarded: they are {reason}', file=sys.stderr)
            return None
        rows.load_state_dict(progress['stream'])
        self.n_read = progress['documents']
        counts = {split: progress[split] for split in ('train', 'val')}
        for split in counts:
            os.truncate(f'{part}/{split}.bin', 2 * counts[split]['tokens'])
        return counts

    def save(self, part, made_of, counts):
        """Save the progress, when all that was counted is on the disk."""
        progress = dict(made_of=made_of, documents=self.n_read, stream=self.rows.state_dict())
        write_json(progress | counts, f'{part}/progress.json')


def why_useless(progress, part, made_of):
    """Why a call for made_of cannot go on from this progress in the folder part; '' if it can."""
    if progress['made_of'] | dict(tokens=made_of['tokens']) != made_of:
        return 'made in another way'
    if n_tokens_in(progress) >= made_of['tokens']:
        return 'not fewer than this call asks for'
    for split in 'train', 'val':
        file = f'{part}/{split}.bin'
        if not os.path.exists(file) or os.path.getsize(file) < 2 * progress[split]['tokens']:
            return 'damaged'
    return ''


def n_tokens_in(progress):
    return progress['train']['tokens'] + progress['val']['tokens']
