"""
FineWeb, or another data set of Hugging Face's hub with a column `text`: a stream of documents.

300M tokens take hours, so after every SAVE_EVERY documents part/progress.json is written beside the
tokens, and an interrupted call continues from there. It holds

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

    path: '' = FineWeb; a data set, or a folder with the same layout. revision: a commit; None =
    that of old_source, the source of an earlier call, if it is of the same path and config,
    otherwise the newest. ValueError if the stream cannot be opened, or breaks off.
    """

    def __init__(self, path, every, config='sample-10BT', revision=None, old_source=''):
        self.path = path or 'HuggingFaceFW/fineweb'
        self.every = every
        self.config = config
        self.revision = revision
        self.n_read = 0
        self.source = f'{self.path} {config}'       # for meta.json
        if os.path.isdir(self.path):
            return
        if not revision and old_source.startswith(f'{self.source} at '):
            self.revision = old_source.removeprefix(f'{self.source} at ')
        if not self.revision:                       # a later call must read the same texts
            with self.explained():
                import huggingface_hub
                self.revision = huggingface_hub.HfApi().dataset_info(self.path).sha
        self.source += f' at {self.revision}'

    def explained(self):
        return explain(f'cannot stream {self.source}', 'no network? If there is one, check --path, '
                       '--config and --revision')

    @functools.cached_property
    def rows(self):
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
        Continue behind what an interrupted call has saved in the folder part -> its counts of what
        it wrote, or None if it cannot be used, which a line says. What it wrote after that is
        removed.
        """
        rows = self.rows        # if it cannot be opened, what is there stays
        progress = read_json(f'{part}/progress.json')
        if not progress:
            return None
        counts = {split: progress[split] for split in ('train', 'val')}
        sizes = {f'{part}/{split}.bin': 2 * counts[split]['tokens'] for split in counts}
        n_tokens = sum(counts[split]['tokens'] for split in counts)
        is_other = progress['made_of'] | dict(tokens=made_of['tokens']) != made_of
        is_too_long = n_tokens >= made_of['tokens']
        is_damaged = any(not os.path.exists(file) or os.path.getsize(file) < size
                         for file, size in sizes.items())
        reason = ''
        if is_other:
            reason = 'made in another way'
        elif is_too_long:
            reason = 'not fewer than this call asks for'
        elif is_damaged:
            reason = 'damaged'
        if reason:
            print(f"{n_tokens:,} tokens of {progress['made_of']['source']}, left by an interrupted "
                  f'call, are discarded: they are {reason}', file=sys.stderr)
            return None
        for file, size in sizes.items():
            os.truncate(file, size)
        rows.load_state_dict(progress['stream'])
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
