"""A stream of documents: FineWeb, or another data set of the hub that has a column `text`."""
import os
import re
from pathlib import Path

from common.errors import UserError, explain
from common.files import sha256_of
from common.source import Source, one_in


class Stream(Source):
    """
    The documents of a data set on the hub, or of a folder with the same layout. The first of each
    1 / val_fraction documents is held out. An error while they are read ends the program with one
    line.

    path, config, revision, val_fraction    knobs of data.py
    earlier             the recipe of an earlier call (data.make), {} if there was none
    most_tokens         how many tokens are to be taken
    """
    default_fraction = 0.0005
    default_tokenizer = 'gpt2'

    def __init__(self, path, config, revision, val_fraction, most_tokens, earlier):
        self.path = path or 'HuggingFaceFW/fineweb'
        self.config = config
        self.place = f'{self.path} {config}'
        self.every = one_in(val_fraction or self.default_fraction)
        self.val_fraction = 1 / self.every
        self.most_tokens = most_tokens
        self.revision = self.pick_revision(revision, earlier)
        if os.path.isdir(self.path):
            self.sha256 = fingerprint(self.path)
        self.n_read = 0         # documents

    def pick_revision(self, revision, earlier):
        """The commit that is to be read; None for a folder, which has none. revision: the knob."""
        if os.path.isdir(self.path):
            if revision:
                raise UserError(f'{self.path} is a folder, which has no commits: leave out '
                                '--revision')
            return None
        # a call that is repeated or continued reads the same texts
        if not revision and earlier.get('place') == self.place and earlier.get('revision'):
            return earlier['revision']
        if revision and re.fullmatch('[0-9a-f]{40}', revision):
            return revision
        # the newest commit, or that of a branch
        with self.opening():
            import huggingface_hub
            return huggingface_hub.HfApi().dataset_info(self.path, revision=revision).sha

    def opening(self):
        """`with self.opening():` turns an error before the first document into one line."""
        return explain(f'cannot stream {self.place}', 'no network? If there is one, check --path, '
                       '--config and --revision, and that the packages of requirements.txt are '
                       'installed')

    def documents(self, progress):
        with self.opening():
            import datasets  # takes a second
            rows = datasets.load_dataset(self.path, name=self.config, split='train',
                                         revision=self.revision, streaming=True)
            self.rows = rows.select_columns('text')
        if progress:
            self.rows.load_state_dict(progress['stream'])
            self.n_read = progress['documents']
        return self.pairs()

    def pairs(self):
        """The (split, text) pairs, from where the stream is."""
        with explain(f'cannot stream {self.place}', 'run the command again: it continues where it '
                     'was last saved'):
            for row in self.rows:
                if row['text'] and row['text'].strip():
                    split = 'train' if self.n_read % self.every else 'val'
                    self.n_read += 1
                    yield split, row['text']

    def state(self):
        return dict(documents=self.n_read, stream=self.rows.state_dict())


def fingerprint(folder):
    """What changes if a file in this folder does: their names, sizes and times, as one string."""
    files = sorted(path for path in Path(folder).rglob('*') if path.is_file())
    sizes_and_times = []
    for path in files:
        stat = path.stat()
        sizes_and_times.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return sha256_of(more=str(sizes_and_times))
