"""
Turn a command line into a script's knobs: config files and --key=value override its globals.

A script writes its knobs as plain globals, each with its reason in a comment beside it, and ends
with

    if __name__ == '__main__':
        config = configure(globals())
        run(main)

A command line consists of config files (plain Python, which may read the knobs) and flags. They are
applied in the order given:

    python train.py config/groups.py --batch_size=32 --dropout 0.1 --compile

A knob takes values of its default's type or, if it has one, of its annotation:
`n_loop: int | list | None = None`, `pos: Literal['learned', 'rotary'] = 'learned'`.
A config file that is written for train.py also works with every other script, which ignores the
knobs that only train.py has. `--help` prints every knob with its comment.
"""
import ast
import difflib
import json
import os
import re
import sys
from contextlib import contextmanager, suppress
from types import NoneType
from typing import get_args

# what torch, numpy and Python say if memory is short, or if a size is beyond 64 bits
OUT_OF_MEMORY = ("can't allocate|not enough memory|out of memory|ALLOC_FAILED|Invalid buffer size|"
                 'overflowed|multiplication overflow|Overflow when|is too big|Maximum allowed|'
                 'too (large|big) to convert')
given = set()       # the knobs that the command line or a config file has set


class PathName(str):
    """The annotation of a knob that is a path: ~ is expanded, and an empty one is refused."""


# errors -------------------------------------------------------------------------------------------

def run(main):
    """
    Call main(); errors that a user can cause end the program with one line, not with a traceback.

    The exit status is 2 for bad input (a ValueError or OSError: a knob, a file) and for too little
    memory, and 130 for Ctrl-C. TRACEBACK=1 in the environment shows the traceback of an error.
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
    except BrokenPipeError:             # `... | head` has read enough: drop what is not printed yet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    except Exception as error:
        no_memory = isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, str(error))
        is_known = no_memory or isinstance(error, (ValueError, OSError))
        if os.environ.get('TRACEBACK') or not is_known:
            raise
        if no_memory:
            error = 'not enough memory: lower a size, such as batch_size, n_loop or n_embd'
        # bad input is the same in all processes that torchrun starts on a machine, so only one of
        # them prints the line; but each has a memory of its own
        if no_memory or os.environ.get('LOCAL_RANK', '0') == '0':
            print('error: ' + ' '.join(str(error).split()), file=sys.stderr)
        raise SystemExit(2)


@contextmanager
def explain(what, advice, errors=Exception):
    """Raise an error of another library as a ValueError: what failed, why, and what to do."""
    try:
        yield
    except errors as error:
        kind = '' if isinstance(error, ValueError) else f'{type(error).__name__}: '
        raise ValueError(f'{what} ({kind}{str(error)[:200]}): {advice}') from error


def did_you_mean(name, known):
    """": did you mean 'x'?" with the most similar of the known names; '' if none is similar."""
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f": did you mean '{nearest[0]}'?" if nearest else ''


# the command line ---------------------------------------------------------------------------------

def configure(script, positional=None, more=None):
    """
    Set the knobs among a script's globals from the command line; returns {knob: value} of all.

    script: its globals(), of which the lower-case ones that hold a plain value are knobs. If it is
        imported and not run, they keep their defaults.
    positional: the knob that is set by the first bare argument that is not a .py file.
    more: a function of the knobs so far -> {knob: (default, annotation)}, further ones.
    """
    plain_types = int, float, bool, str, list, tuple, NoneType
    knobs = {name: value for name, value in script.items()
             if isinstance(value, plain_types) and name == name.lower() and name[0] != '_'}
    annotations = {name: type(value) for name, value in knobs.items()}
    annotations |= script.get('__annotations__', {})
    given.clear()
    if script['__name__'] == '__main__':
        if os.getcwd() not in sys.path:         # for MODULE:NAME beside the user's own files
            sys.path.append(os.getcwd())
        run(lambda: read_arguments(sys.argv[1:], knobs, annotations, script, positional, more))
        script.update(knobs)
    return knobs


def read_arguments(args, knobs, annotations, script, positional, more):
    """Apply the arguments to knobs, one after the other."""
    while args:
        for key, (default, annotation) in more(knobs).items() if more else ():
            knobs.setdefault(key, default)
            annotations.setdefault(key, annotation)
        arg = args.pop(0)
        if positional and not arg.startswith('-') and not arg.endswith('.py'):
            arg, positional = f'--{positional}={arg}', None
        if arg in ('--help', '-h'):
            show_help(script, knobs, annotations)
            raise SystemExit(0)
        if not arg.startswith('--'):
            read_file(arg, knobs, annotations)
            continue

        # a flag: --key=value, --key value, or --key of a bool
        key, equals, text = arg[2:].partition('=')
        if key not in knobs:
            raise ValueError(f'unknown flag --{key}{did_you_mean(key, knobs)} (--help lists all)')
        if not equals and bool in allowed(annotations[key])[0]:
            text = 'True'
        elif not equals:
            if not args or args[0].startswith('--'):
                raise ValueError(f'--{key} needs a value: --{key}=VALUE')
            text = args.pop(0)
        knobs[key] = parse(key, text, annotations[key])
        given.add(key)


def read_file(path, knobs, annotations):
    """Run a config file, which sees the knobs as they are so far, and set those that it changes."""
    if not path.endswith('.py'):
        raise ValueError(f"'{path}' is neither a --key=value flag nor a config file ending in .py")
    of_train = knobs_of_train()
    names = of_train | knobs
    try:
        with open(path, encoding='utf-8-sig') as f:
            tree = ast.parse(f.read(), path)
        exec(compile(tree, path, 'exec'), names)
    except Exception as error:
        raise ValueError(f"config file '{path}' failed: {type(error).__name__}: {error}") from error

    # what it stores is given, even where the value is the one that the knob had
    stored = {node.id for node in ast.walk(tree)
              if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    given.update(stored)
    for key in stored & names.keys():
        if key in knobs:
            knobs[key] = convert(key, names[key], annotations[key])
        elif key not in of_train and key[0] != '_':
            hint = did_you_mean(key, [*knobs, *of_train])
            raise ValueError(f"unknown knob '{key}' in config file '{path}'{hint}")


def knobs_of_train():
    """{knob: default} of train.py, which is read and not run: a knob is a line NAME = LITERAL."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'train.py')
    with open(path, encoding='utf-8') as f:
        lines = ast.parse(f.read()).body
    knobs = {}
    for line in lines:
        match line:
            case ast.Assign([ast.Name(knob)]) | ast.AnnAssign(ast.Name(knob)):
                with suppress(ValueError):      # no literal
                    knobs[knob] = ast.literal_eval(line.value)
    return knobs


def show_help(script, knobs, annotations):
    """Print the script's docstring, then every knob with its value and the comment beside it."""
    with open(script['__file__'], encoding='utf-8') as f:
        found = re.findall(r'^ {0,4}(\w+)(?:: [^=\n]+)? = [^#\n]*# *(.*)$', f.read(), re.MULTILINE)
    comments = dict(reversed(found))            # the first of each name
    lines = [(script.get('__doc__') or '').strip(), '',
             'knobs (a config file or --key=value changes them):']
    for key, value in knobs.items():
        shown = str(value).encode('unicode_escape').decode()        # a newline as \n
        shown = f'"{shown}"' if '[' in shown else shown             # for a shell, a pattern
        lines.append(f'  --{key}={shown}'.ljust(32) + ' ' + comments.get(key, ''))
        if choices := allowed(annotations[key])[1]:
            lines[-1] += f' [{", ".join(choices)}]'
    print('\n'.join(lines), flush=True)


# values and their types ---------------------------------------------------------------------------

def allowed(annotation):
    """The types and the strings of an annotation: `Literal['a'] | None` -> [NoneType], ['a']."""
    parts = [one for part in get_args(annotation) or [annotation]
             for one in get_args(part) or [part]]
    choices = [one for one in parts if isinstance(one, str)]
    return [one for one in parts if one not in choices], choices


def parse(key, text, annotation):
    """A flag's text as a value of the knob `key`: a Python literal that fits it, or the text."""
    types, _ = allowed(annotation)
    value = text
    with suppress(Exception):           # no literal
        value = ast.literal_eval(text)
    if float in types and (type(value) is int or text == 'inf'):
        value = float(text)
    text_fits = str in types or PathName in types
    if text_fits and (type(value) is str or type(value) not in types):          # --name=12
        value = text
    return convert(key, value, annotation)


def convert(key, value, annotation):
    """The value as the knob `key` with this annotation takes it."""
    types, choices = allowed(annotation)
    if PathName in types and isinstance(value, str):
        if not value:
            raise ValueError(f'{key} is empty: give a path, or leave it out (is a variable of your '
                             'shell unset?)')
        return os.path.expanduser(value)
    if list in types and isinstance(value, (list, tuple)):
        with suppress(TypeError):       # plain values alone, as a file holds them
            return json.loads(json.dumps(value))
    elif type(value) in types or value in choices:
        return value
    if float in types and type(value) is int:
        return float(value)
    wanted = [f"one of {', '.join(choices)}"] if choices else []
    wanted += ['None' if kind is NoneType else kind.__name__ for kind in types]
    raise ValueError(f"{key} must be {' or '.join(wanted)}, not {value!r}"
                     f'{did_you_mean(value, choices)}')
