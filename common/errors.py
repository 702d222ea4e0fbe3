"""
Bad input: one line that says what is wrong and what to do, status 2, and no traceback.

Bad input is a ValueError or an OSError. `run` prints it; a script with knobs ends with `run(main)`.
Any other error is a bug, and keeps its traceback. So does a ValueError in a file of the user's own,
if Python or a library has raised it. TRACEBACK=1 in the environment shows all.
"""
import difflib
import linecache
import os
import sys
import traceback
from contextlib import contextmanager

# advice for a name that no table has
OWN_FILE = 'give the file of a part in zoo/ or of your own behind the script, or import it'


def check(good, message):
    """Go on if `good` is true, and raise a ValueError with this message if it is not."""
    if not good:
        raise ValueError(message)


@contextmanager
def explain(what, advice, errors=Exception):
    """In this block errors of a library become a ValueError: what failed, why, and what to do."""
    try:
        yield
    except errors as error:
        reason = f'{type(error).__name__}: {str(error)[:200]}'
        raise ValueError(f'{what} ({reason}): {advice}') from error


def did_you_mean(name, known):
    """": did you mean 'x'?" with the most similar of the known names; '' if none is similar."""
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f": did you mean '{nearest[0]}'?" if nearest else ''


def is_own_mistake(error):
    """Is the innermost line outside of libraries in a file of the user's own, and no `raise`?"""
    library = os.path.dirname(os.__file__) + os.sep
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = os.path.abspath(frame.f_code.co_filename)
        if os.path.isfile(file) and '-packages' not in file and not file.startswith(library):
            break
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # a config file is a module without __spec__, wherever it stands
    is_ours = file.startswith(project + os.sep) and (
        frame.f_globals.get('__spec__') or frame.f_globals['__name__'] == '__main__')
    return not (is_ours or linecache.getline(file, line).lstrip().startswith('raise'))


def run(main):
    """Call main(). The exit status is 2 for bad input, 130 for Ctrl-C, 141 for a closed pipe."""
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
        if os.environ.get('TRACEBACK') or isinstance(error, ValueError) and is_own_mistake(error):
            raise
        line = ' '.join(str(error).split())
        print(f'error: {line}', file=sys.stderr)
        raise SystemExit(2)
