"""
The folder of a run, a script's out_dir: which one is meant, is it free, who may write into it, how
a new run starts over. checkpoint.py reads and writes the ckpt.pt in it.
"""
import glob
import os
from contextlib import nullcontext
from shlex import quote

from filelock import FileLock, Timeout

from common import distributed
from common.errors import UserError
from common.files import ROOT, check_writable

# what --resume continues from: the last checkpoint, or the one before
RESUMED = 'ckpt.pt', 'ckpt.old.pt'
# what a run and the programs that look at it write into its folder. A new run refuses to start in a
# folder with one of them; --overwrite removes them, since they contradict the new weights
FILES_OF_RUN = ('ckpt.pt', 'ckpt*.pt', 'log.csv', 'loss.png', 'eval.csv', 'depth.png',
                'tokenizer.json', 'exits.json', 'bench.csv', 'bench.json', 'figure_4.png',
                'ledger.png', 'blocks.csv', 'figures/figure_[1235]*.*', 'figures/convergence.*',
                'figures/two_scales.*', 'figures/wave.*')


# a run to read ------------------------------------------------------------------------------------

def find_run(out_dir, quiet=False):
    """
    The knob out_dir -> the folder to read ckpt.pt from, and the folder to write results to.

    Without an out_dir (None) the folder is out/ if that holds a ckpt.pt, and pretrained/text
    otherwise; a line says which, unless quiet. pretrained/ is found from any working directory.
    Results are written beside ckpt.pt. A folder NAME that is read-only, as those of pretrained/
    are, has its results in out/NAME.
    """
    if out_dir is None:
        out_dir = 'out' if os.path.exists('out/ckpt.pt') else 'pretrained/text'
        if not quiet:
            print(f'model: {out_dir}/ckpt.pt')
    out_dir = from_anywhere(out_dir)
    results = out_dir
    if is_read_only(out_dir):
        results = os.path.join('out', os.path.basename(os.path.realpath(out_dir)))
    return out_dir, results


def find_checkpoint(path):
    """The knob init_from -> the file: the ckpt.pt of a folder. pretrained/ is found as above."""
    path = from_anywhere(path)
    return os.path.join(path, 'ckpt.pt') if os.path.isdir(path) else path


def from_anywhere(path):
    """The path, or that in this project if it begins with pretrained/ and is not here."""
    if not os.path.exists(path) and path.split('/')[0] == 'pretrained':
        return os.path.join(ROOT, path)
    return path


def is_read_only(folder):
    """Is it a folder of pretrained/, or one in which this user may not write?"""
    pretrained = os.path.realpath(os.path.join(ROOT, 'pretrained'))
    return (os.path.realpath(folder).startswith(pretrained + os.sep)
            or os.path.isdir(folder) and not os.access(folder, os.W_OK))


# a run to write -----------------------------------------------------------------------------------

def files_of_run(out_dir):
    """The files in out_dir that FILES_OF_RUN names, in its order."""
    files = []
    for pattern in FILES_OF_RUN:
        files += sorted(glob.glob(os.path.join(glob.escape(out_dir), pattern)))
    return list(dict.fromkeys(files))       # each once


def check_free(out_dir, overwrite, init_from=''):
    """ValueError if out_dir holds a run and overwrite is off, or if it is the run of init_from."""
    if init_from and os.path.realpath(os.path.dirname(init_from)) == os.path.realpath(out_dir):
        raise UserError(f'init_from = {init_from} would be overwritten: take another --out_dir')
    files = files_of_run(out_dir)
    if files and not overwrite:
        first = os.path.relpath(files[0], out_dir)
        resumes = ''
        # a converted model has no log.csv and cannot be continued
        if first in RESUMED and os.path.exists(os.path.join(out_dir, 'log.csv')):
            folder = '' if out_dir == 'out' else f' --out_dir={quote(out_dir)}'
            resumes = f'python train.py --resume{folder} continues it, '
        raise UserError(f'{out_dir} holds a run ({first}): --overwrite starts over, {resumes}or '
                        'give another --out_dir')


def only_writer(out_dir):
    """`with only_writer(out_dir):` ValueError if another program writes into out_dir now."""
    if distributed.RANK > 0:
        return nullcontext()
    check_writable(out_dir)
    try:
        # the end of the block frees it, or the system if we are killed
        return FileLock(f'{out_dir}/.lock', timeout=0).acquire()
    except Timeout:
        raise UserError(f'another program writes into {out_dir}: wait for its end, or give '
                        'another --out_dir') from None


def start_over(out_dir, overwrite):
    """
    Remove what an earlier run has left, if overwrite allows it. ValueError if not: such a run may
    have begun since check_free was called.
    """
    if distributed.RANK == 0:
        check_free(out_dir, overwrite)
        for path in files_of_run(out_dir):
            os.remove(path)
