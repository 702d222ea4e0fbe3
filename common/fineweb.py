"""
FineWeb, or another data set of Hugging Face's hub with a column `text`: a stream of documents.

300M tokens take hours, so after every SAVE_EVERY documents part/progress.json is written beside the
tokens, and an interrupted call continues from there. It holds

    made_of       what the tokens are made of (data.make); progress of anything else is not used
    documents     how many were read
    stream        the state of the stream behind the last of them
    train, val    how many documents, tokens and bytes of text were written
"""
import os

from common.configurator import explain
from common.files import read_json, write_json

SAVE_EVERY = 1024


class Stream:
    """
    The documents as (split, text) pairs; the first of each `every` documents is held out.

    path: '' = FineWeb; a data set, or a folder with the same layout. revision: a commit, None = the
    newest. ValueError if the stream cannot be opened, or breaks off.
    """

    def __init__(self, path, every, config='sample-10BT', revision=None):
        import datasets  # takes a second
        import huggingface_hub
        path = path or 'HuggingFaceFW/fineweb'
        self.every = every
        self.n_read = 0
        self.source = f'{path} {config}'        # for meta.json
        with explain(f'cannot stream {self.source}', 'no network? If there is one, check --path, '
                     '--config and --revision'):
            if not os.path.isdir(path):         # a later call must read the same texts
                revision = revision or huggingface_hub.HfApi().dataset_info(path).sha
                self.source += f' at {revision}'
            rows = datasets.load_dataset(path, name=config, split='train', revision=revision,
                                         streaming=True)
            self.rows = rows.select_columns('text')

    def __iter__(self):
        with explain(f'cannot stream {self.source}', 'run the command again: what is done is kept'):
            for row in self.rows:
                if row['text'] and row['text'].strip():
                    split = 'train' if self.n_read % self.every else 'val'
                    self.n_read += 1
                    yield split, row['text']

    def resume(self, part, made_of):
        """
        Continue behind what an interrupted call has saved in the folder part -> its counts of what
        it wrote, or None if it made something else. What it wrote after that is removed.
        """
        progress = read_json(f'{part}/progress.json')
        if progress.get('made_of') != made_of:
            return None
        counts = {split: progress[split] for split in ('train', 'val')}
        sizes = {f'{part}/{split}.bin': 2 * counts[split]['tokens'] for split in counts}
        if any(not os.path.exists(file) or os.path.getsize(file) < sizes[file] for file in sizes):
            return None
        for file, size in sizes.items():
            os.truncate(file, size)
        self.rows.load_state_dict(progress['stream'])
        self.n_read = progress['documents']
        return counts

    def save(self, part, made_of, bins, counts):
        """Save the progress after every SAVE_EVERY documents. bins: the open files."""
        if self.n_read % SAVE_EVERY == 0:
            for file in bins.values():
                file.flush()
                os.fsync(file.fileno())
            write_json(dict(made_of=made_of, documents=self.n_read, stream=self.rows.state_dict(),
                            **counts), f'{part}/progress.json')
