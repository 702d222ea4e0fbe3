"""
A command line -> a script's knobs: config files and --key=value override its globals.

A script writes its knobs as plain globals, each with its reason in a comment beside it, and ends
with

    if __name__ == '__main__':
        configure(globals())
        run(main)                       # see errors.py

train.py calls configure right behind its knobs, so that they are set when the rest is defined.

Config files (Python files that bind knobs, and may read them) and flags apply in the order given:

    python train.py config/groups.py --batch_size=32 --seed 1 --compile

A knob takes values of its default's type or of its annotation: `n_loop: int | list | None = None`,
`pos: Literal['learned', 'rotary'] = 'learned'`. An unknown name in a config file is an error for
train.py; other scripts leave it out, so that a config file for train.py works with every script. A
file that imports something may add to the project's tables (INJECTIONS, EXITS, TASKS). `--help`
prints every knob with its comment.
"""
import ast
import inspect
import os
import re
import symtable
import sys
from copy import deepcopy
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

from common.errors import check, did_you_mean, run
from common.files import ROOT

# what read_arguments has found in the last command line: train.py lets flags win over --resume,
# and checkpoint.class_of trusts own_files
given = set()       # the names of the knobs that its flags and config files have set
flags = set()       # of those that its flags have set
own_files = []      # its config files


def knobs_of(script):
    """The knobs among a script's globals: {name: value} of lower-case names and plain values."""
    plain_types = int, float, bool, str, list, tuple, NoneType
    return {name: value for name, value in script.items()
            if isinstance(value, plain_types) and name == name.lower() and name[0] != '_'}


def configure(script, positional=None, strict=False):
    """
    Set the knobs among a script's globals from the command line; returns {knob: value} of all.

    script: its globals(). If it is imported and not run, its knobs keep their defaults.
    positional: the knob that is set by the first bare argument that is not a .py file. strict: is
    an unknown name in a config file an error?
    """
    knobs = knobs_of(script)
    if script['__name__'] == '__main__':
        register(script)

        def read():
            knobs.update(read_arguments(script, sys.argv[1:], positional, strict))
        run(read)               # since a script calls configure outside of its own run(main)
        script.update(knobs)
    return knobs


def register(script):
    """
    Make the script that runs importable under its own name. Otherwise `import tasks` in a file of
    one's own would run tasks.py a second time, and a task would be added to a table that the
    running script does not read. Its classes get the name, too: a checkpoint names its model's.
    """
    path = os.path.relpath(os.path.abspath(script['__file__']), ROOT)       # zoo/maze.py
    name = os.path.splitext(path)[0].replace(os.sep, '.')
    sys.modules.setdefault(name, sys.modules['__main__'])
    for value in script.values():
        if isinstance(value, type) and value.__module__ == '__main__':
            value.__module__ = name


def read_arguments(script, args, positional=None, strict=False):
    """
    Read arguments, one after the other -> {knob: value} of all knobs. ValueError for a bad one.
    script, positional, strict: see configure.
    """
    knobs = deepcopy(knobs_of(script))
    annotations = {key: type(value) for key, value in knobs.items()}
    # from Python 3.14 on a module's globals do not hold its annotations
    annotations |= script.get('__annotations__') or inspect.get_annotations(sys.modules['__main__'])
    given.clear()
    flags.clear()
    own_files.clear()
    if os.getcwd() not in sys.path:         # for MODULE:NAME beside the user's own files
        sys.path.append(os.getcwd())
    args = list(args)
    while args:
        arg = args.pop(0)
        if arg in ('--help', '-h'):
            show_help(script, knobs, annotations)
            raise SystemExit(0)
        if arg.endswith('.py') and not arg.startswith('--'):
            read_file(arg, knobs, annotations, strict)
        elif arg.startswith('--'):
            read_flag(arg, args, knobs, annotations)
        else:
            check(positional, f"'{arg}' is neither a --key=value flag nor a config file (.py)")
            read_flag(f'--{positional}={arg}', args, knobs, annotations)
            positional = None
    return knobs


def read_flag(arg, following, knobs, annotations):
    """Set a knob from --key=value, --key value (taken from the following arguments), or --key."""
    key, equals, text = arg[2:].partition('=')
    check(key in knobs, f'unknown flag --{key}{did_you_mean(key, knobs)} (--help lists all)')
    if not equals and bool in kinds_of(annotations[key]):
        text = 'True'
    elif not equals:
        check(following and not following[0].startswith('--'), f'--{key} needs a value')
        text = following.pop(0)
    check(text, f'--{key} is empty: leave it out (is a variable of your shell unset?)')
    knobs[key] = parse(key, text, annotations[key])
    given.add(key)
    flags.add(key)


def read_file(path, knobs, annotations, strict):
    """Run a config file in a copy of the knobs, and set those that it changes."""
    names = dict(knobs)
    try:
        source = Path(path).read_text(encoding='utf-8-sig')
        exec(compile(source, path, 'exec'), names)
        symbols = symtable.symtable(source, path, 'exec').get_symbols()
    except Exception as error:
        raise ValueError(f"config file '{path}' failed: {type(error).__name__}: {error}") from error
    own_files.append(os.path.relpath(path))         # ./mine.py is mine.py
    assigned = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
    for key, value in names.items():        # one that is set to its default is given, too
        if key in knobs and (key in assigned or value is not knobs[key]):
            knobs[key] = convert(key, value, annotations[key])
            given.add(key)
    unknown = [key for key in knobs_of(names) if key not in knobs]
    if strict and unknown:
        hint = did_you_mean(unknown[0], knobs)
        raise ValueError(f"unknown knob '{unknown[0]}' in '{path}'{hint}")


def show_help(script, knobs, annotations):
    """Print the script's docstring, then every knob with its value and the comment beside it."""
    source = Path(script['__file__']).read_text(encoding='utf-8')
    knob_and_comment = r'^ {0,4}(\w+)(?:: [^=\n]+)? = [^#\n]*# *(.*)'
    comments = dict(re.findall(knob_and_comment, source, re.MULTILINE))
    print((script.get('__doc__') or '').strip())
    print('\nknobs (a config file or --key=value changes them):')
    for key, value in knobs.items():
        choices = [kind for kind in kinds_of(annotations[key]) if isinstance(kind, str)]
        listed = f' [{", ".join(choices)}]' if choices else ''
        print(f'  --{key}={value!r}'.ljust(32) + ' ' + comments.get(key, '') + listed)
    sys.stdout.flush()


# a choice with arguments --------------------------------------------------------------------------

def build(call, table, what):
    """
    'calc:p=7,reset=0.1' -> table['calc'](p=7, reset=0.1); plain 'calc' -> table['calc']().

    table: {name: class}; an argument's text is converted by its annotation, or else by the type of
    its default. what: what the table holds, such as 'task', for the message. ValueError for an
    unknown name or argument, for a bad value, and for an argument that is missing.
    """
    name, _, text = call.partition(':')
    check(name in table, f"unknown {what} '{name}'{did_you_mean(name, table)} "
          f"(there are {', '.join(table)})")
    arguments = inspect.signature(table[name], eval_str=True).parameters
    values = {}
    for part in re.split(r',(?=\w+=)', text) if text else []:       # a list may have commas
        key, _, value = part.partition('=')
        check(key in arguments, f"the {what} {name} has no '{key}'{did_you_mean(key, arguments)} "
              f"(it takes {', '.join(arguments) or 'no arguments'})")
        annotation, default = arguments[key].annotation, arguments[key].default
        if annotation is inspect.Parameter.empty:
            annotation = type(default)
        values[key] = parse(f'{key} of the {what} {name}', value, annotation)
    for key, argument in arguments.items():
        check(key in values or argument.default is not inspect.Parameter.empty,
              f'the {what} {name} needs {key}: write {name}:{key}=...')
    return table[name](**values)


# values and their types ---------------------------------------------------------------------------

def kinds_of(annotation):
    """`Literal['a'] | int | None` -> ['a', int, NoneType]."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    parts = get_args(annotation)
    return [kind for part in parts for kind in kinds_of(part)] if parts else [annotation]


def parse(key, text, annotation):
    """The value of a flag's text: a Python literal if the knob takes its type, or the text."""
    if text.startswith('~'):
        text = os.path.expanduser(text)
    kinds = kinds_of(annotation)
    try:
        value = float(text) if text == 'inf' else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    if str in kinds and (isinstance(value, str) or type(value) not in kinds):   # --name=12
        value = text
    return convert(key, value, annotation)


def convert(key, value, annotation):
    """A value as the knob `key` takes it: an int for a float, a tuple for a list. Or ValueError."""
    kinds = kinds_of(annotation)
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if isinstance(value, tuple) and list in kinds:
        return list(value)
    choices = [kind for kind in kinds if isinstance(kind, str)]
    types = [kind for kind in kinds if not isinstance(kind, str)]
    if type(value) in types or value in choices:
        return value
    wanted = choices + ['None' if kind is NoneType else kind.__name__ for kind in types]
    raise ValueError(f"{key} must be {' or '.join(wanted)}, not {value!r}"
                     f'{did_you_mean(value, choices)}')
