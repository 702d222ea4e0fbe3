"""Files that are whole or not there at all; text is UTF-8 on every machine."""
import csv
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))      # the project's folder


@contextmanager
def new_file(path, mode='w', keep_old=False, newline=None, encoding='utf-8'):
    """
    `with new_file(path) as f:` writes a file that becomes `path` once it is complete.

    If the block fails, the disk is full or the process is killed, the earlier file is unchanged.
    keep_old: the earlier file becomes NAME.old.EXT. That takes two renames, and a kill between them
    leaves NAME.old.EXT alone. mode, newline, encoding: see open().
    """
    stem, ending = os.path.splitext(path)
    old = f'{stem}.old{ending}'
    is_link = os.path.islink(path)
    path = os.path.realpath(path)       # a link stays one
    unfinished = f'{path}.tmp'
    if os.path.isdir(path):
        raise IsADirectoryError(f"'{path}' is a directory: name a file")
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    if 'b' in mode:
        encoding = None
    try:
        with open(unfinished, mode, encoding=encoding, newline=newline) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())        # on the disk before it gets its name
        if os.path.exists(path):
            shutil.copymode(path, unfinished)
            if keep_old and is_link:    # `old` stands beside the link, maybe on another disk
                with suppress(FileNotFoundError):
                    os.remove(old)
                shutil.copyfile(path, old)
            elif keep_old:
                os.replace(path, old)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.remove(unfinished)
        raise


def check_writable(folder, files=()):
    """
    Make the folder, before any work is done. ValueError if no file can be written into it, or if
    there are folders with the names of these files.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror
        if os.path.islink(folder) and not os.path.exists(folder):
            reason = f"it is a link to '{os.readlink(folder)}', which does not exist"
        raise ValueError(f"cannot write into '{folder}' ({reason}): make it a folder into which "
                         'you may write, or take another one') from None
    for name in files:
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            raise ValueError(f"'{path}' is a folder, and a file must go there: move it away")


def sha256_of(*paths, more=''):
    """The sha256 of files, one after the other, with the text `more` behind them."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, 'rb') as f:
            while block := f.read(2 ** 20):
                digest.update(block)
    digest.update(more.encode())
    return digest.hexdigest()


def write_json(value, path):
    with new_file(path) as f:
        json.dump(value, f, indent=1)


def read_json(path):
    """The dict in a JSON file, {} if there is no such file. ValueError if it is damaged."""
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged ({error}): restore it, or remove it and start "
                         'again') from error
    if not isinstance(value, dict):
        raise ValueError(f"'{path}' is damaged (it holds no dict): restore it, or remove it and "
                         'start again')
    return value


def write_csv(rows, path, columns=None):
    """
    Write rows, dicts that each have all columns, as CSV. columns: their order; by default that of
    the first row.
    """
    with new_file(path, newline='') as f:
        writer = csv.DictWriter(f, columns or rows[0])
        writer.writeheader()
        writer.writerows(rows)
