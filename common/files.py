"""Files that are whole or not there at all; text is UTF-8 on every machine."""
import csv
import hashlib
import json
import os
from contextlib import contextmanager

from common.errors import explain

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))      # the project's folder


@contextmanager
def new_file(path, mode='w', newline=None):
    """
    `with new_file(path) as f:` what is written becomes `path` once it is complete. Until then, and
    if that fails, the earlier file is unchanged.
    """
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    unfinished = f'{path}.tmp'
    encoding = None if 'b' in mode else 'utf-8'
    try:
        with open(unfinished, mode, encoding=encoding, newline=newline) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())        # on the disk before it gets its name
        os.replace(unfinished, path)
    except BaseException:
        if os.path.isfile(unfinished):
            os.remove(unfinished)
        raise


def sha256_of(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def write_json(value, path):
    with new_file(path) as f:
        json.dump(value, f, indent=1)


def read_json(path):
    """What a JSON file holds. ValueError if it is damaged."""
    with open(path, encoding='utf-8') as f:
        with explain(f"'{path}' is damaged", 'restore it, or remove it', ValueError):
            return json.load(f)


def write_csv(rows, path, columns=None):
    """Rows, dicts with the same columns, as CSV. columns: their names, if there may be no row."""
    with new_file(path, newline='') as f:
        writer = csv.DictWriter(f, columns or rows[0])
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path):
    """The rows of a CSV, dicts of text; Excel writes a mark in front, which is dropped."""
    with open(path, newline='', encoding='utf-8-sig') as f:
        return list(csv.DictReader(f))
