"""A stream of documents: FineWeb, or another data set of the hub that has a column `text`."""
import os

from common.errors import explain

SAVE_EVERY = 1024       # documents; 300M tokens take hours, see common/writer.py


class Stream:
    """
    The documents as (split, text) pairs; the first of each `every` documents is held out.

    path: '' = FineWeb; a data set, or a folder with the same layout. config: its part. revision: a
    commit of the data set; None = that of an earlier call for the same path and config, or else the
    newest. earlier: what the earlier call's tokens are made of (data.make), {} if there was none.
    ValueError if the stream cannot be opened, or breaks off.

    source      the path and the config
    revision    the commit; None of a folder, which has none
    n_read      how many documents were read
    """

    def __init__(self, path, every, config='sample-10BT', revision=None, earlier=None):
        self.path = path or 'HuggingFaceFW/fineweb'
        self.every = every
        self.config = config
        self.revision = revision
        self.n_read = 0
        self.source = f'{self.path} {config}'
        if os.path.isdir(self.path):
            if revision:
                raise ValueError(f'{self.path} is a folder, which has no commits: leave out '
                                 '--revision')
            return
        if not revision and earlier and earlier['source'] == self.source:
            self.revision = earlier['revision']
        if not self.revision:                       # a later call must read the same texts
            with self.explained():
                import huggingface_hub
                self.revision = huggingface_hub.HfApi().dataset_info(self.path).sha

    def explained(self):
        """For what is done before the first document is read."""
        return explain(f'cannot stream {self.source}', 'no network? If there is one, check --path, '
                       '--config and --revision')

    def open(self):
        """Open the stream of the library, at its first document."""
        with self.explained():
            import datasets  # takes a second
            rows = datasets.load_dataset(self.path, name=self.config, split='train',
                                         revision=self.revision, streaming=True)
            self.rows = rows.select_columns('text')

    def __iter__(self):
        with explain(f'cannot stream {self.source}', 'run the command again: what is done is kept'):
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
