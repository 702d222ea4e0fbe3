"""
Turn a command line into a script's knobs: config files and --key=value override its globals.

A script writes its knobs as plain globals, each with its reason in a comment beside it, and ends
with

    if __name__ == '__main__':
        config = configure(globals())
        run(main)                       # see errors.py

A command line consists of config files (plain Python, which may read the knobs) and flags. They are
applied in the order given:

    python train.py config/groups.py --batch_size=32 --dropout 0.1 --compile

A knob takes values of its default's type or, if it has one, of its annotation:
`n_loop: int | list | None = None`, `pos: Literal['learned', 'rotary'] = 'learned'`.

A config file is run, and the names that it binds are knobs: of the script, or of train.py. Those of
train.py that the script does not have are ignored, so a config file for train.py works with every
script. The file may read all of these knobs, as they are so far. If it imports something it may
also add to the project's tables (INJECTIONS, EXITS, POLICIES, TASKS). `--help` prints every knob
with its comment.
"""
import ast
import builtins
import json
import os
import re
import sys
from contextlib import suppress
from copy import deepcopy
from types import ModuleType, NoneType
from typing import Literal, get_args

from common.errors import UserError, did_you_mean, run
from common.files import ROOT

RENAMED = {'past': 'wake'}      # {a knob's former name: its name}

# what read_arguments has found in the last command line that it read, for other files to look up
given = set()       # the names of the knobs that its flags and config files have set
flags = {}          # those that its flags have set, with the values of the flags
own_files = []      # its config files with imports: they may have added parts to the tables


class PathName(str):
    """The annotation of a knob that is a path: ~ is expanded, and an empty one is refused."""


# the command line ---------------------------------------------------------------------------------

def knobs_of(script):
    """The knobs among a script's globals: {name: value} of lower-case names and plain values."""
    plain_types = int, float, bool, str, list, tuple, NoneType
    return {name: value for name, value in script.items()
            if isinstance(value, plain_types) and name == name.lower() and name[0] != '_'}


def annotations_of(script):
    """The annotations of a script's globals. From Python 3.14 on a function there returns them."""
    if '__annotations__' in script:
        return script['__annotations__']
    if '__annotate__' in script:
        return script['__annotate__'](1)        # annotationlib.Format.VALUE
    return {}


def configure(script, positional=None):
    """
    Set the knobs among a script's globals from the command line; returns {knob: value} of all.

    script: its globals(). If it is imported and not run, its knobs keep their defaults.
    positional: the knob that is set by the first bare argument that is not a .py file.
    """
    knobs = knobs_of(script)
    if script['__name__'] == '__main__':
        register(script)
        run(lambda: knobs.update(read_arguments(script, sys.argv[1:], positional)))
        script.update(knobs)
    return knobs


def register(script):
    """
    Make the script that runs importable under its own name, for config files that import it.

    In `python tasks.py mine.py` the file mine.py adds a task to tasks.TASKS. Python knows the
    running script as __main__ alone, so `import tasks` in mine.py would run tasks.py a second time,
    and the task would be added to a table that the running script does not read. The script's
    classes get its name as well, since a checkpoint names the class of its model.
    """
    path = os.path.relpath(os.path.abspath(script['__file__']), ROOT)       # decode/wave.py
    name = os.path.splitext(path)[0].replace(os.sep, '.')
    sys.modules.setdefault(name, sys.modules['__main__'])
    for value in script.values():
        if isinstance(value, type) and value.__module__ == '__main__':
            value.__module__ = name


def read_arguments(script, args, positional=None, more_knobs=lambda knobs: {}):
    """
    Read arguments, one after the other -> {knob: value} of all knobs. ValueError for a bad one.

    script, positional: see configure. more_knobs: a function that is called after each argument. It
    takes the knobs as they are then, and returns those that they bring with them, as the fields of
    a --model_class: {knob: (default, annotation)}.
    """
    knobs = knobs_of(script)
    annotations = {key: type(value) for key, value in knobs.items()}
    annotations |= annotations_of(script)
    given.clear()
    flags.clear()
    own_files.clear()
    if os.getcwd() not in sys.path:         # for MODULE:NAME beside the user's own files
        sys.path.append(os.getcwd())
    args = list(args)
    while args:
        arg = args.pop(0)
        if positional and not arg.startswith('-') and not arg.endswith('.py'):
            arg = f'--{positional}={arg}'
            positional = None
        if arg in ('--help', '-h'):
            show_help(script, knobs, annotations)
            raise SystemExit(0)
        if arg.startswith('--'):
            read_flag(arg, args, knobs, annotations)
        else:
            read_file(arg, knobs, annotations)
        for key, (default, annotation) in more_knobs(knobs).items():
            knobs.setdefault(key, default)
            annotations.setdefault(key, annotation)
    return knobs


def read_flag(arg, following, knobs, annotations):
    """Set a knob from --key=value, --key value (taken from the following arguments), or --key."""
    key, equals, text = arg[2:].partition('=')
    if key not in knobs:
        hint = hint_for_unknown(key, sorted(knobs))
        raise UserError(f'unknown flag --{key}{hint} (--help lists all)')
    if not equals and bool in types_of(annotations[key]):
        text = 'True'
    elif not equals:
        if not following or following[0].startswith('--'):
            raise UserError(f'--{key} needs a value: --{key}=VALUE')
        text = following.pop(0)
    knobs[key] = parse(key, text, annotations[key], example=knobs[key])
    given.add(key)
    flags[key] = knobs[key]


def hint_for_unknown(key, knobs):
    """The end of the error for an unknown knob: its name of today, or a similar one, or ''."""
    if RENAMED.get(key) in knobs:
        return f': it is called {RENAMED[key]} now'
    return did_you_mean(key, knobs)


def knobs_of_training():
    """
    train.py's knobs with their defaults: its text between the two lines of dashes, run like a
    config file. An import of train.py would load all that it imports, this file too.
    """
    with open(os.path.join(ROOT, 'train.py'), encoding='utf-8') as f:
        section = re.split('^# -+$', f.read(), flags=re.MULTILINE)[1]
    names = dict(Literal=Literal, PathName=PathName)        # of annotations
    exec(section, names)
    return knobs_of(names)


def read_file(path, knobs, annotations):
    """Run a config file, and set the knobs that it binds."""
    if not path.endswith('.py'):
        hint = '; a file for a setting is given as --key=FILE' if os.path.exists(path) else ''
        raise UserError(f"'{path}' is neither a --key=value flag nor a config file ending in .py"
                        f'{hint}')
    known = knobs_of_training() | knobs
    try:
        with open(path, encoding='utf-8-sig') as f:
            tree = ast.parse(f.read(), path)
        bound = run_file(compile(tree, path, 'exec'), known)
    except Exception as error:
        raise UserError(f"config file '{path}' failed: {type(error).__name__}: {error}") from error
    if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree)):
        own_files.append(path)
    for key, value in bound.items():
        is_own = key != key.lower() or key[0] == '_'        # LIMIT, _half: for the file itself
        is_part = callable(value) or isinstance(value, ModuleType)
        if key in knobs and is_part:
            raise UserError(f"'{path}' binds {key}, which is a setting here: choose another name")
        if key in knobs:
            knobs[key] = convert(key, value, annotations[key], example=knobs[key])
            given.add(key)
        elif key not in known and not is_own and not is_part:
            raise UserError(f"unknown knob '{key}' in config file '{path}'"
                            f'{hint_for_unknown(key, sorted(known))}')


def run_file(code, known):
    """
    Run a config file's code -> {name: value} of what it sets: the names that it binds, and the
    lists among the known knobs that it appends to.

    A file may read a knob without that counting as setting it. So the knobs are put among the
    builtins, where Python looks for a name that the file has not bound, and `names` holds only what
    the file binds.
    """
    readable = deepcopy(known)
    names = dict(__builtins__=vars(builtins) | readable)
    exec(code, names)
    # the functions of the file go on using `names`, in which torch.compile looks for __builtins__
    bound = {key: value for key, value in names.items() if key != '__builtins__'}
    appended_to = {key: value for key, value in readable.items() if value != known[key]}
    return appended_to | bound


def show_help(script, knobs, annotations):
    """Print the script's docstring, then every knob with its value and the comment beside it."""
    with open(script['__file__'], encoding='utf-8') as f:
        lines = f.read().splitlines()
    comments = {}
    for line in lines:                          # NAME = VALUE   # comment, or NAME: TYPE = VALUE
        knob = re.match(r' {0,4}(\w+)(?:: [^=]+)? = [^#]*# *(.*)', line)
        if knob:
            comments.setdefault(knob[1], knob[2])
    print((script.get('__doc__') or '').strip())
    print('\nknobs (a config file or --key=value changes them):')
    for key, value in knobs.items():
        shown = str(value).encode('unicode_escape').decode()        # a newline as \n
        if '[' in shown:
            shown = f'"{shown}"'                                    # for a shell, a pattern
        choices = choices_of(annotations[key])
        listed = f' [{", ".join(choices)}]' if choices else ''
        print(f'  --{key}={shown}'.ljust(32) + ' ' + comments.get(key, '') + listed)
    sys.stdout.flush()


# values and their types ---------------------------------------------------------------------------

def members_of(annotation):
    """`Literal['a'] | int | None` -> ['a', int, NoneType]."""
    members = []
    for part in get_args(annotation) or [annotation]:       # of a union; or strings of a Literal
        members += get_args(part) or [part]
    return members


def types_of(annotation):
    """`Literal['a'] | int | None` -> [int, NoneType]."""
    return [member for member in members_of(annotation) if not isinstance(member, str)]


def choices_of(annotation):
    """`Literal['a'] | int | None` -> ['a']."""
    return [member for member in members_of(annotation) if isinstance(member, str)]


def parse(key, text, annotation, example=None):
    """
    The value of the knob `key` that a flag's text stands for: a Python literal, if its type is one
    of the knob's, or else the text itself. example: see convert.
    """
    types = types_of(annotation)
    value = text
    with suppress(Exception):           # the text may be no literal
        value = ast.literal_eval(text)
    if float in types and (type(value) is int or text == 'inf'):
        value = float(text)
    text_fits = str in types or PathName in types
    if text_fits and (type(value) is str or type(value) not in types):          # --name=12
        value = text
    return convert(key, value, annotation, example)


def convert(key, value, annotation, example=None):
    """
    Convert a value to a type of the knob `key`. ValueError if it fits no part of the annotation:

        None, bool, int, str    that type alone, so no bool for an int
        float                   an int too
        list                    a tuple too; it holds plain values, and inner tuples become lists
        Literal                 one of its strings
        PathName                a string, in which ~ is expanded

    An empty string is refused for a PathName, and for a string where None would say the same.
    example: a value of the knob. The error for a knob that takes a list shows it.
    """
    types = types_of(annotation)
    choices = choices_of(annotation)
    if value == '' and (PathName in types or str in types and NoneType in types):
        raise UserError(f'{key} is empty: give a value, or leave it out (is a variable of your '
                        'shell unset?)')
    if PathName in types and isinstance(value, str):
        return os.path.expanduser(value)
    if list in types and isinstance(value, (list, tuple)):
        with suppress(TypeError):
            return json.loads(json.dumps(value))
    elif type(value) in types or value in choices:
        return value
    if float in types and type(value) is int:
        return float(value)
    raise UserError(misfit(key, value, annotation, example))


def misfit(key, value, annotation, example):
    """The error for a value that a knob does not take: what it takes, and a similar choice."""
    if not example or not isinstance(example, list):
        example = [1, 2]
    words = {NoneType: 'None', list: f'a list such as {example}', PathName: 'a path'}
    choices = choices_of(annotation)
    wanted = [f"one of {', '.join(choices)}"] if choices else []
    wanted += [words.get(kind, kind.__name__) for kind in types_of(annotation)]
    return f"{key} must be {' or '.join(wanted)}, not {value!r}{did_you_mean(value, choices)}"
