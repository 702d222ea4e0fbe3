"""A stream of documents: FineWeb, or another data set of the hub that has a column `text`."""
import os

from common.errors import UserError, explain
from common.source import Source


def pick_revision(path, config, revision, earlier):
    """
    The commit of the data set at path that is to be read; None for a folder, which has none.

    revision: the knob. earlier: the recipe of an earlier call (data.make), {} if there was none.
    """
    source = f'{path} {config}'
    if os.path.isdir(path):
        if revision:
            raise UserError(f'{path} is a folder, which has no commits: leave out --revision')
        return None
    # the one that the user has named
    if revision:
        return revision
    # a call that is repeated or continued reads the same texts
    if earlier.get('source') == source and earlier.get('revision'):
        return earlier['revision']
    # the newest
    with opening(source):
        import huggingface_hub
        return huggingface_hub.HfApi().dataset_info(path).sha


def opening(source):
    """`with opening(source):` turns an error before the first document into one line."""
    return explain(f'cannot stream {source}', 'no network? If there is one, check --path, --config '
                   'and --revision, and that the packages of requirements.txt are installed')


class Stream(Source):
    """
    The documents of a data set of the hub, or of a folder with the same layout. The first of each
    `every` documents is held out. An error while they are read ends the program with one line.

    path, config        the data set, and the name of a part of it
    revision            its commit; None for a folder, which has none
    most_tokens         how many tokens are to be taken
    """
    default_tokenizer = 'gpt2'

    def __init__(self, path, config, revision, every, most_tokens):
        self.path = path
        self.config = config
        self.description = f'{path} {config}'
        self.revision = revision
        self.every = every
        self.most_tokens = most_tokens
        self.n_read = 0         # documents

    def open(self, progress):
        with opening(self.description):
            import datasets  # takes a second
            rows = datasets.load_dataset(self.path, name=self.config, split='train',
                                         revision=self.revision, streaming=True)
            self.rows = rows.select_columns('text')
        if progress:
            self.rows.load_state_dict(progress['stream'])
            self.n_read = progress['documents']
        return self.documents()

    def documents(self):
        """The (split, text) pairs, from where the stream is."""
        with explain(f'cannot stream {self.description}',
                     'run the command again: what is done is kept'):
            for row in self.rows:
                if row['text'] and row['text'].strip():
                    split = 'train' if self.n_read % self.every else 'val'
                    self.n_read += 1
                    yield split, row['text']

    def state(self):
        return dict(documents=self.n_read, stream=self.rows.state_dict())
