"""A stream of documents: FineWeb, or another data set of the hub that has a column `text`."""
import os

from common.errors import UserError, explain

SAVE_EVERY = 1024       # documents; 300M tokens take hours, see common/writer.py


def pick_revision(path, config, revision, earlier):
    """
    The commit of the data set at path that is to be read; None for a folder, which has none.

    revision: the knob. earlier: the recipe of an earlier call (data.make), {} if there was none.
    """
    origin = f'{path} {config}'
    if os.path.isdir(path):
        if revision:
            raise UserError(f'{path} is a folder, which has no commits: leave out --revision')
        return None
    # the one that the user has named
    if revision:
        return revision
    # a call that is repeated or continued reads the same texts
    if earlier.get('source') == origin and earlier.get('revision'):
        return earlier['revision']
    # the newest
    with opening(origin):
        import huggingface_hub
        return huggingface_hub.HfApi().dataset_info(path).sha


def opening(origin):
    """`with opening(origin):` turns an error before the first document into one line."""
    return explain(f'cannot stream {origin}', 'no network? If there is one, check --path, --config '
                   'and --revision, and that the packages of requirements.txt are installed')


class Stream:
    """
    The documents of a data set, or of a folder with the same layout, as (split, text) pairs. The
    first of each `every` documents is held out. ValueError if the stream cannot be opened, or
    breaks off.

    origin      the path and the config, which names a part of the data set
    revision    the commit; None of a folder, which has none
    n_read      how many documents were read
    """
    sha256 = None           # only text files have one (data.Source)

    def __init__(self, path, config, revision, every):
        self.path = path
        self.config = config
        self.origin = f'{path} {config}'
        self.revision = revision
        self.every = every
        self.n_read = 0

    def open(self):
        """Open the stream of the library, at its first document. Returns the documents."""
        with opening(self.origin):
            import datasets  # takes a second
            rows = datasets.load_dataset(self.path, name=self.config, split='train',
                                         revision=self.revision, streaming=True)
            self.rows = rows.select_columns('text')
        return self.documents()

    def documents(self):
        """The (split, text) pairs, from where the stream is."""
        with explain(f'cannot stream {self.origin}', 'run the command again: what is done is kept'):
            for row in self.rows:
                if row['text'] and row['text'].strip():
                    split = 'train' if self.n_read % self.every else 'val'
                    self.n_read += 1
                    yield split, row['text']

    def state(self):
        """Where the stream is: how many documents were read, and the state of the library."""
        return dict(documents=self.n_read, stream=self.rows.state_dict())

    def skip(self, state):
        """Go on behind the documents that an earlier stream had read in this state."""
        self.rows.load_state_dict(state['stream'])
        self.n_read = state['documents']
