"""The former names, until zoo/ no longer uses them."""
import os
from contextlib import nullcontext

from common import checkpoint


def check_free(out_dir, overwrite, init_from=''):
    checkpoint.check_free(out_dir, overwrite)


def only_writer(out_dir):
    os.makedirs(out_dir, exist_ok=True)
    return nullcontext()


def start_over(out_dir, overwrite):
    checkpoint.start_over(out_dir)


def find_checkpoint(path):
    return os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path
