"""
Errors that a user can cause: one line that says what is wrong and what to do, and no traceback.

Such an error is raised with `raise UserError(...)` or `check`, and `explain` makes one of another
library's error. `run` prints it and ends the program: every script ends with `run(main)`.

A plain ValueError from a file of this project is printed in the same way. The model's files raise
those, and so do the two files that this one imports.
"""
import difflib
import os
import re
import sys
import traceback
from contextlib import contextmanager

from common import distributed
from common.files import ROOT

# what torch, numpy and Python say if memory is short, or if a size is beyond 64 bits
OUT_OF_MEMORY = ("can't allocate memory|not enough memory|out of memory|ALLOC_FAILED|"
                 'Invalid buffer size|calculation overflowed|multiplication overflow|'
                 'Overflow when unpacking|array is too big|Maximum allowed dimension exceeded|'
                 'int too (large|big) to convert')


class UserError(ValueError):
    """An error that a user has caused. Its message says what is wrong and what to do."""


# to raise an error --------------------------------------------------------------------------------

def check(good, message):
    """Go on if `good` is true, and raise a UserError with this message if it is not."""
    if not good:
        raise UserError(message)


@contextmanager
def explain(what, advice, errors=Exception):
    """
    `with explain(what, advice):` an error of a library in this block becomes a UserError that says
    what failed, why, and what to do. errors: the classes of errors that it explains.
    """
    try:
        yield
    except MemoryError:
        raise
    except errors as error:
        kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
        raise UserError(f'{what} ({kind}{str(error)[:200]}): {advice}') from error


def did_you_mean(name, known):
    """": did you mean 'x'?" with the most similar of the known names; '' if none is similar."""
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f": did you mean '{nearest[0]}'?" if nearest else ''


# to end with an error -----------------------------------------------------------------------------

def run(main):
    """
    Call main(); errors that a user can cause end the program with one line, not with a traceback.

    The exit status is 2 for bad input (a ValueError or OSError: a knob, a file) and for too little
    memory, 130 for Ctrl-C, and 128 + the signal's number for a training run that a signal has
    stopped. TRACEBACK=1 in the environment shows the traceback of an error.
    """
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='replace')        # an old console lacks some letters
    try:
        main()
        print(end='', flush=True)
    except KeyboardInterrupt:
        print('\nstopped', file=sys.stderr)
        raise SystemExit(130)
    except distributed.Stopped as stop:
        raise SystemExit(128 + stop.number)
    except BrokenPipeError:             # `... | head` has read enough: drop what is not printed yet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    except Exception as error:
        line = line_of(error)
        if line is None or os.environ.get('TRACEBACK'):
            raise
        # bad input is the same in all processes that torchrun starts on a machine, so only one of
        # them prints the line; but each has a memory of its own
        if is_out_of_memory(error) or distributed.LOCAL_RANK == 0:
            print(f'error: {line}', file=sys.stderr)
        raise SystemExit(2)


def line_of(error):
    """The line for a user whose input or memory causes this error; None if it is a bug of ours."""
    if is_out_of_memory(error):
        return 'not enough memory: lower a size, such as batch_size, n_loop or n_embd'
    if not isinstance(error, (ValueError, OSError)):
        return None
    line = ' '.join(str(error).split())
    if isinstance(error, ValueError) and not is_ours(error):
        line += ' (TRACEBACK=1 shows where)'
    return line


def is_ours(error):
    """Is it a UserError, or was it raised in a file of this project, and not in a library?"""
    if isinstance(error, UserError):
        return True
    path = os.path.abspath(traceback.extract_tb(error.__traceback__)[-1].filename)
    return path.startswith(ROOT + os.sep) and 'site-packages' not in path       # .venv is there


def is_out_of_memory(error):
    """Does Python or a library say that memory is short, or that a size is beyond 64 bits?"""
    if isinstance(error, UserError):        # our own words are no sign
        return False
    return isinstance(error, MemoryError) or bool(re.search(OUT_OF_MEMORY, str(error)))
