"""A stream of documents: FineWeb, or another data set of the hub that has a column `text`."""
import os
import re
from pathlib import Path

from common.errors import UserError, check, explain
from common.files import sha256_of
from common.source import SPLITS, Source, one_in


class Stream(Source):
    """
    The documents of a data set on the hub, or of a folder with the same layout. The first of each
    `every` documents is held out. An error while they are read ends the program with one line.

    path, config, revision, val_fraction    knobs of data.py
    most_tokens         how many tokens are to be taken
    earlier_recipe      that of an earlier call (make_data), {} if there was none
    """
    default_every = 2000
    default_tokenizer = 'gpt2'

    def __init__(self, path, config, revision, val_fraction, most_tokens, earlier_recipe):
        self.path = path or 'HuggingFaceFW/fineweb'
        self.config = config
        self.every = one_in(val_fraction) if val_fraction else self.default_every
        self.val_fraction = 1 / self.every
        self.most_tokens = most_tokens
        self.name = f'{self.path} {config}'
        if os.path.isdir(self.path):
            if revision:
                raise UserError(f'{self.path} is a folder, which has no commits: leave out '
                                '--revision')
            self.description = self.name
            self.identity = f'{fingerprint(self.path)} {config}'
        else:
            self.identity = self.name
            self.revision = self.pick_revision(revision, earlier_recipe)
            self.description = f'{self.name} at {self.revision}'
        self.rows = None        # the stream of the library, once it is open

    def pick_revision(self, revision, earlier_recipe):
        """The commit that is to be read. revision: the knob."""
        if revision:
            check(re.fullmatch('[0-9a-f]{40}', revision), f"revision '{revision}' is no commit of "
                  '40 digits: leave it out for the newest')
            return revision
        # a call that is repeated or continued reads the same texts
        if earlier_recipe.get('identity') == self.name:
            return earlier_recipe['revision']
        with self.opening():
            import huggingface_hub
            return huggingface_hub.HfApi().dataset_info(self.path).sha

    def opening(self):
        """`with self.opening():` turns an error before the first document into one line."""
        return explain(f'cannot stream {self.name}', 'no network? If there is one, check --path, '
                       '--config and --revision, and that the packages of requirements.txt are '
                       'installed')

    def documents(self, progress):
        # no generator: an error in opening it comes before the Writer clears the folder
        with self.opening():
            import datasets  # takes a second
            rows = datasets.load_dataset(self.path, name=self.config, split='train',
                                         revision=self.revision, streaming=True)
            self.rows = rows.select_columns('text')
        n_read = 0
        if progress:
            self.rows.load_state_dict(progress['stream'])
            n_read = sum(progress[split]['documents'] for split in SPLITS)
        return self.documents_after(n_read)

    def documents_after(self, n_read):
        """The (split, text) pairs from where the stream is, after n_read documents."""
        with explain(f'cannot stream {self.name}', 'run the command again: it continues where it '
                     'was last saved. If that fails, remove data/fineweb.part to begin anew'):
            for row in self.rows:
                if row['text'] and row['text'].strip():
                    split = 'train' if n_read % self.every else 'val'
                    n_read += 1
                    yield split, row['text']

    def state(self):
        return self.rows.state_dict()


def fingerprint(folder):
    """
    A sha256 of the names, sizes and times of all files in a folder. A copy of the folder has other
    times, so it counts as other text.
    """
    files = sorted(path for path in Path(folder).rglob('*') if path.is_file())
    sizes_and_times = []
    for path in files:
        stat = path.stat()
        sizes_and_times.append((str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return sha256_of(more=str(sizes_and_times))
