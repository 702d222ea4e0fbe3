"""
Making a data set: the documents of a source -> the tokens in data/NAME. data.py says what is in
such a folder, and what is held out.

If a call is killed, this is on the disk, and this is what the next call does:

    killed while it              on the disk                         the next call
    1  wrote tokens              NAME.part: train.bin, val.bin       starts again
                                 ... of a stream: progress.json      continues after the progress
    2  had still to move them    NAME.part has a meta.json, too      moves all files, meta.json last
    3  moved them                NAME has no meta.json               moves the rest
"""
import os
import re
import shutil
import sys
from contextlib import contextmanager, suppress
from shlex import quote

from filelock import FileLock, Timeout

from common.encoding import open_text_encoding
from common.errors import UserError, check, explain
from common.files import read_json, sha256_of, write_json
from common.fineweb import Stream
from common.own_text import StoredTokens, TextFiles, has_tokens
from common.source import SPLITS
from common.tokenizer_json import TokenizerJson, train_bpe
from common.torchdocs import TorchDocs
from common.writer import Writer, differences, n_tokens_in, progress_to_continue


def make(name, path='', *, tokenizer=None, bpe=None, tokens='300M', config='sample-10BT',
         revision=None, val_fraction=None, overwrite=False):
    """
    Write data/NAME -> its meta. The arguments are the knobs of data.py.

    If data/NAME is there with the same recipe, it is kept and its meta is returned. With another
    recipe it is a ValueError. `overwrite` makes the tokens anew in both cases.

    An interrupted stream is continued, with or without `overwrite`, if the recipe is the same;
    `tokens` may differ if it is more than what was written. Unfinished tokens with another recipe
    are a ValueError, and `overwrite` discards them.
    """
    check_knobs(name, path, tokenizer, bpe, val_fraction)
    folder = f'data/{name}'
    part = f'{folder}.part'
    with explain(f'cannot make {folder}', 'is the disk full, or a file not readable? Then run the '
                 'command again', OSError), only_maker(folder):
        # if a call with --overwrite was killed while it moved its files, this finishes its work
        was_moved = move_finished(folder)
        replaces = overwrite and not was_moved
        old_meta = read_meta(folder, overwrite)
        progress = read_json(f'{part}/progress.json')
        # a stream reads the commit that an earlier call has read: that of the data set if it is
        # kept, otherwise that of what is left of an interrupted call
        kept = progress if replaces or not old_meta else old_meta
        source = open_source(name, path, tokens, config, revision, val_fraction,
                             kept.get('recipe', {}))
        if bpe is None:
            encoding = open_text_encoding(tokenizer or source.default_tokenizer)
            tokenizer_in_words = encoding.name
        else:
            tokenizer_in_words = f'a BPE of {bpe} tokens'       # trained below
        # every choice on which the tokens depend
        recipe = dict(identity=source.identity, revision=source.revision, tokens=source.most_tokens,
                      val_fraction=source.val_fraction, tokenizer=tokenizer_in_words)

        # it is kept, refused, continued or made
        if old_meta.get('recipe') == recipe and not replaces:
            check_whole(folder, old_meta)
            print(f'{folder} is made already', file=sys.stderr)
            return old_meta
        if not overwrite:
            refuse_to_replace(folder, old_meta, recipe)
        progress = progress_to_continue(progress, part, recipe, overwrite)

        documents = source.documents(progress)  # a stream is opened before a file is touched
        if bpe is not None:
            documents = list(documents)         # read twice: to train the BPE, and to encode
            encoding = train_bpe((text for split, text in documents if split == 'train'), bpe)
        with Writer(part, encoding, progress, source.most_tokens) as writer:
            for split, text in documents:
                writer.add(split, text)
                if writer.is_full:
                    break
                writer.save_at_times(recipe, source)
            if source.most_tokens is not None and not writer.is_full:
                print(f'{source.description} ends after {writer.n_tokens:,} tokens, fewer than the '
                      f'{source.most_tokens:,} of --tokens', file=sys.stderr)
        write_meta(part, encoding, source, recipe, writer.counts)
        move_finished(folder)
        return read_json(f'{folder}/meta.json')


def read_meta(folder, overwrite):
    """What meta.json holds, {} if there is none; with overwrite a damaged one counts as none."""
    try:
        return read_json(f'{folder}/meta.json')
    except ValueError as error:
        if not overwrite:
            raise UserError(f'{folder} is damaged: make it again with --overwrite') from error
        return {}


def check_whole(folder, meta):
    """ValueError unless the files of a data set have the sizes that are in its meta."""
    for split in SPLITS:
        file = f'{folder}/{split}.bin'
        if not os.path.exists(file) or os.path.getsize(file) != 2 * meta[split]['tokens']:
            raise UserError(f'{file} is damaged or missing: make it again with --overwrite')


def open_source(name, path, tokens, config, revision, val_fraction, earlier_recipe):
    """The Source of the data set `name`. earlier_recipe: that of an earlier call, or {}."""
    if name == 'torchdocs':
        return TorchDocs(val_fraction)
    if name == 'fineweb':
        return Stream(path, config, revision, val_fraction, parse_tokens(tokens), earlier_recipe)
    if has_tokens(path):
        return StoredTokens(path, val_fraction)
    return TextFiles(path, val_fraction)


def refuse_to_replace(folder, old_meta, recipe):
    """ValueError if the folder has tokens: of another recipe, or without a meta.json."""
    if old_meta:
        differing = differences(old_meta.get('recipe', {}), recipe)
        raise UserError(f"{folder} was made with {'; '.join(differing)}: --overwrite replaces it, "
                        'or choose another name')
    for split in SPLITS:
        if os.path.exists(f'{folder}/{split}.bin'):
            raise UserError(f'{folder} has tokens, and no meta.json that says which: --overwrite '
                            'replaces them, or choose another name')


def check_knobs(name, path, tokenizer, bpe, val_fraction):
    """ValueError if these knobs of make do not go together."""
    if not re.fullmatch(r'[^\W_][\w.-]*', name) or name.endswith(('.lock', '.part')):
        raise UserError(f"'{name}' cannot be the name of a data set: begin with a letter or digit, "
                        'then use letters, digits, _ . and -, without .lock or .part at the end')
    if path and (name == 'torchdocs' or name == 'fineweb' and os.path.isfile(path)):
        raise UserError('text of your own needs a name of its own: python data.py NAME '
                        f'--path={quote(path)}')
    if name not in ('torchdocs', 'fineweb') and not path:
        raise UserError(f"no data set '{name}': give its text, python data.py {name} --path=TEXT")
    # its own tokens would be replaced while they are read. A text beside them, such as nanoGPT's
    # input.txt, may be read
    folder, part = os.path.realpath(f'data/{name}'), os.path.realpath(f'data/{name}.part')
    real_path = os.path.realpath(path)
    if path and (real_path in (folder, part) or real_path.startswith(part + os.sep)):
        raise UserError(f'data/{name} cannot be made from its own tokens: choose another name')
    if bpe is not None and name == 'fineweb':
        raise UserError('--bpe needs text that fits into memory: give --tokenizer here')
    if bpe is not None and tokenizer:
        raise UserError('--bpe trains a tokenizer of its own: leave out --tokenizer')
    if bpe is not None and not 257 <= bpe <= 2 ** 16:
        raise UserError(f'bpe must be a number of tokens from 257 to 65536, not {bpe}')
    if val_fraction is not None and not 0 < val_fraction <= 0.5:
        raise UserError(f'val_fraction must lie in (0, 0.5], not {val_fraction}')


def parse_tokens(text):
    """'300M' -> 300_000_000; also K and B."""
    match = re.fullmatch(r'(\d{1,12}\.?\d*)([KMB]?)', str(text).upper())
    n = 0
    if match:
        number, unit = match.groups()
        n = float(number) * {'': 1, 'K': 1e3, 'M': 1e6, 'B': 1e9}[unit]
    check(n >= 1, f"tokens = '{text}' is not a number of tokens: say 300M, 2B or 100000")
    return round(n)


@contextmanager
def only_maker(folder):
    """
    `with only_maker('data/NAME'):` holds data/NAME.lock: one program writes data/NAME at a time,
    and a second one waits.
    """
    lock = FileLock(f'{folder}.lock')
    try:
        lock.acquire(blocking=False)
    except Timeout:
        print(f'waiting for another program, which is writing {folder} and holds {folder}.lock',
              file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_meta(part, encoding, source, recipe, counts):
    """
    Check the tokens in the folder part, and write tokenizer.json and meta.json beside them.
    meta.json comes last: it says that the data set is complete.
    """
    meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, dtype='uint16',
                source=source.description, recipe=recipe)
    for split in SPLITS:
        file = f'{part}/{split}.bin'
        n = counts[split]['tokens']
        if counts[split]['bytes'] == 0:
            shutil.rmtree(part)     # no later call can use it
            if source.most_tokens is not None and n_tokens_in(counts) >= source.most_tokens:
                raise UserError(f'--tokens={source.most_tokens} is too small for a training and a '
                                'held-out split: give more, such as 1M')
            raise UserError(f'{source.description} is too small for a training and a held-out '
                            'split')
        size = os.path.getsize(file)
        check(size == 2 * n, f'{file} has {size:,} bytes, and this program wrote {2 * n:,}: start '
              'again, while no other program writes there')
        meta[split] = counts[split] | dict(sha256=sha256_of(file))
    if isinstance(encoding, TokenizerJson):
        encoding.save(part)
    write_json(meta, f'{part}/meta.json')


def move_finished(folder):
    """
    Move a data set that is complete from folder.part to folder, replacing an earlier one. If that
    is interrupted, the next call moves the rest. Until then there is no meta.json, so that nothing
    is read. Returns whether there was one to move.
    """
    part = f'{folder}.part'
    if not os.path.exists(f'{part}/meta.json'):
        return False
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(f'{part}/train.bin'):         # case 3 has not begun
        for file in f'{folder}/meta.json', f'{folder}/tokenizer.json', f'{part}/progress.json':
            with suppress(FileNotFoundError):
                os.remove(file)
    for file in 'train.bin', 'val.bin', 'tokenizer.json', 'meta.json':     # meta.json comes last
        with suppress(FileNotFoundError):
            os.replace(f'{part}/{file}', f'{folder}/{file}')
    shutil.rmtree(part)
    return True
