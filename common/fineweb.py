"""
FineWeb, or another data set of Hugging Face's hub with a column `text`, as a stream.

300M tokens take hours, so `write` saves its progress after every SAVE_EVERY documents, in
part/progress.json beside the tokens. After an interruption it continues from there.

    made_of       what the tokens are made of, see data.make: progress of anything else is not used
    documents     how many were written
    train, val    the documents, tokens and bytes of text in each
    stream        the state of the stream, behind the last of these documents
"""
import os

from common.configurator import explain
from common.files import read_json, write_json

SAVE_EVERY = 1024


def open_stream(path='', config='sample-10BT', revision=None):
    """
    A stream of {'text': ...} and its source in words.

    path: another data set, or a folder of FineWeb's layout. revision: a commit, None = the newest.
    """
    import datasets  # takes a second
    import huggingface_hub
    path = path or 'HuggingFaceFW/fineweb'
    source = f'{path} {config}'
    with explain(f'cannot stream {source}', 'no network? If there is one, check --path, --config '
                 'and --revision'):
        if not os.path.isdir(path):     # fix the commit, so that a later call reads the same texts
            revision = revision or huggingface_hub.HfApi().dataset_info(path).sha
            source += f' at {revision}'
        stream = datasets.load_dataset(path, name=config, split='train', revision=revision,
                                       streaming=True)
        return stream.select_columns('text'), source


def texts_in(stream, source):
    """The texts of a stream's rows, without those that are empty."""
    with explain(f'cannot stream {source}', 'run the command again: what is done is kept'):
        for row in stream:
            if row['text'] and row['text'].strip():
                yield row['text']


def saved_progress(part, made_of):
    """The progress that an interrupted call has saved in the folder part, if it can be used."""
    progress = read_json(f'{part}/progress.json')
    if progress.get('made_of') != made_of:
        return None
    for split in 'train', 'val':
        file = f'{part}/{split}.bin'
        if not os.path.exists(file) or os.path.getsize(file) < 2 * progress[split]['tokens']:
            return None
    return progress


def write(bins, stream, made_of, progress=None):
    """
    Add a stream's texts to bins (data.Bins) until they have the tokens of made_of; of each
    1 / val_fraction documents the first is held out. progress: from where to continue.
    """
    if progress:
        stream.load_state_dict(progress['stream'])
    every = round(1 / made_of['val_fraction'])
    for text in texts_in(stream, made_of['source']):
        bins.add('train' if bins.total('documents') % every else 'val', text)
        if bins.total('tokens') >= made_of['tokens']:
            return
        n_documents = bins.total('documents')
        if n_documents % SAVE_EVERY == 0:
            bins.sync()
            write_json(dict(made_of=made_of, documents=n_documents, stream=stream.state_dict(),
                            **bins.counts), f'{bins.folder}/progress.json')
