"""
Bad input: one line that says what is wrong and what to do, status 2, and no traceback.

Bad input is a ValueError or an OSError. `run` prints it; every script ends with `run(main)`. Any
other error is a bug, and keeps its traceback.
"""
import difflib
import os
import sys
import traceback
from contextlib import contextmanager


def check(good, message):
    """Go on if `good` is true, and raise a ValueError with this message if it is not."""
    if not good:
        raise ValueError(message)


@contextmanager
def explain(what, advice, errors=Exception):
    """
    `with explain(what, advice):` an error of a library in this block becomes a ValueError that says
    what failed, why, and what to do. errors: the classes of errors that it explains.
    """
    try:
        yield
    except errors as error:
        reason = f'{type(error).__name__}: {str(error)[:200]}'
        raise ValueError(f'{what} ({reason}): {advice}') from error


def did_you_mean(name, known):
    """": did you mean 'x'?" with the most similar of the known names; '' if none is similar."""
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f": did you mean '{nearest[0]}'?" if nearest else ''


def place_of(error):
    """' (FILE, line N)' of an error that is no `raise` in words, such as `a, b = [1]`; or ''."""
    *_, last = traceback.extract_tb(error.__traceback__)
    is_in_words = isinstance(error, OSError) or last.line.startswith('raise')
    return '' if is_in_words else f' ({last.filename}, line {last.lineno})'


def run(main):
    """
    Call main(). The exit status is 2 for bad input, whose traceback TRACEBACK=1 in the environment
    shows, 130 for Ctrl-C, and 141 if nobody reads the output any more.
    """
    try:
        check(sys.stdout, 'the output is closed: send it to a file, or to /dev/null')
        if hasattr(sys.stdout, 'reconfigure'):
            sys.stdout.reconfigure(errors='replace')    # ? for a letter that cannot be printed
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130)
    except BrokenPipeError:             # `... | head` has read enough: drop what is not printed yet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)
    except (ValueError, OSError) as error:
        if os.environ.get('TRACEBACK'):
            raise
        line = ' '.join(str(error).split()) + place_of(error)
        print(f'error: {line}', file=sys.stderr)
        raise SystemExit(2)
