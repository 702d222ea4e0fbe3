"""
A command line -> a script's knobs: config files and --key=value override its globals. And `build`:
a text such as calc:p=7 -> an object of a class in a table, by the same conversion of values.

A script writes its knobs as plain globals, most with a comment beside them, calls
configure(globals()) behind them, and ends with run(main), which is in errors.py.

Config files (Python files that bind knobs, and may read them) apply in their order; flags win:

    python train.py config/groups.py --batch_size=32 --seed 1 --compile

A knob takes values of its default's type or of its annotation: `n_loop: int | list | None = None`,
`pos: Literal['learned', 'rotary'] = 'learned'`, `batch_size: Count = 16`. A config file is run as a
module, which may define a class and add to the project's tables (INJECTIONS, EXITS, TASKS). A name
in it that is no knob is an error for train.py alone, so that the others take train.py's files, too.
"""
import ast
import inspect
import math
import os
import re
import symtable
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Literal, get_args, get_origin

from common.errors import OWN_FILE, check, did_you_mean, explain, run

# types of knobs with a range: what the range is called, and its test
Count = Annotated[int, 'at least 1', lambda value: value >= 1]
Natural = Annotated[int, 'at least 0', lambda value: value >= 0]
Positive = Annotated[float, 'positive and finite', lambda value: 0 < value < math.inf]
Share = Annotated[float, 'from 0 to 1', lambda value: 0 <= value <= 1]
NotNegative = Annotated[float, 'at least 0 and finite', lambda value: 0 <= value < math.inf]

FLAG = 'the command line'
PATHS = 'path', 'dir', 'from', 'tokenizer'      # how the names of knobs for paths end


def knobs_of(script):
    """The knobs among a script's globals: {name: value} of lower-case names and plain values."""
    plain_types = int, float, bool, str, list, tuple, NoneType
    return {name: value for name, value in script.items()
            if isinstance(value, plain_types) and name == name.lower() and name[0] != '_'}


def configure(script, positional=None, keep_unknown=False):
    """
    Set the knobs among a script's globals() from the command line, if it is run and not imported,
    and return its Settings.

    positional: the knob that is set by the first bare argument that is not a .py file.
    keep_unknown: unknown names wait for Settings.add. Otherwise an unknown flag is an error.
    """
    settings = Settings(script, keep_unknown)
    if script['__name__'] == '__main__':
        # since a script calls configure outside of its own run(main)
        run(partial(settings.read, sys.argv[1:], positional))
    return settings


class Settings:
    """
    Who has set the knobs of a script. Their values are its globals.

        last_set    {name: its value as a text} of all knobs, as they were last set here. A text
                    shows what is changed in place, and tells 1 from True
        annotations {name: the types of its values} of the same knobs
        given       {name: by whom}, FLAG or the path of a config file
        flags       {name: value} of what flags have set, whatever a file behind them sets
        unknown     {name: value} of given names that no knob has; the value of a flag is its text
        own_files   the paths of config files that are more than settings
    """

    def __init__(self, script, keep_unknown=False):
        self.script = script
        self.keep_unknown = keep_unknown
        self.last_set = {}
        self.set_knobs(knobs_of(script))
        self.annotations = {key: type(value) for key, value in self.knobs().items()}
        # from Python 3.14 on a module's globals do not hold its annotations
        self.annotations |= (script.get('__annotations__')
                             or inspect.get_annotations(sys.modules[script['__name__']]))
        self.given = {}
        self.flags = {}
        self.unknown = {}
        self.own_files = []

    def knobs(self):
        """{name: value} of all knobs as they are now."""
        return {key: self.script[key] for key in self.last_set}

    def read(self, args, positional=None):
        """Read arguments, one after the other. ValueError for a bad one."""
        sys.path.append(os.getcwd())        # for MODULE:NAME beside the user's own files
        args = list(args)
        while args:
            arg = args.pop(0)
            if arg in ('--help', '-h'):
                self.show_help()
                raise SystemExit(0)
            if arg.startswith('--'):
                self.read_flag(arg, args)
            elif arg.endswith('.py'):
                self.read_file(arg)
            else:
                check(positional, f"'{arg}' is neither a --key=value flag nor a config file (.py)")
                self.read_flag(f'--{positional}={arg}', args)
                positional = None
        for name, value in self.flags.items():      # again, over files behind them
            self.set_by(name, value, FLAG)

    def read_flag(self, arg, following):
        """Set a knob from --key=value, --key value (taken from the next arguments), or --key."""
        key, equals, text = arg[2:].partition('=')
        check(key in self.last_set or self.keep_unknown,
              f'unknown flag --{key}{did_you_mean(key, self.last_set)} (--help lists all)')
        if not equals:
            is_last = not following or following[0].startswith('--')
            # an unknown one may be a bool
            kinds = kinds_of(self.annotations.get(key, bool if is_last else str))
            check(bool in kinds or not is_last, f'--{key} needs a value')
            text = 'True' if bool in kinds else following.pop(0)
        check(text, f'--{key} is empty: leave it out (is a variable of your shell unset?)')
        if text.startswith('~') and key.endswith(PATHS):
            text = os.path.expanduser(text)
        self.set_by(key, text, FLAG)

    def set_by(self, key, value, by):
        """Set a knob, or keep the value of an unknown one."""
        if key in self.last_set:
            self.set_knobs({key: convert(key, value, self.annotations[key])})
        else:
            self.unknown[key] = value
        self.given[key] = by
        if by == FLAG:
            self.flags[key] = self.knobs().get(key, value)

    def read_file(self, path):
        """Run a config file as a module that has the knobs, and set those that it changes."""
        names, symbols = self.run_as_module(path)
        assigned = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
        # a knob that is set to its default is given, too, and one that is changed in place
        set_here = [key for key, text in self.last_set.items()
                    if key in assigned or repr(names.get(key)) != text]
        unknown = knobs_of(names).keys() - self.last_set if self.keep_unknown else ()
        for key in (*set_here, *unknown):
            self.set_by(key, names.get(key), path)
        # with a def, a class or an import it is more than settings
        has_code = any(symbol.is_namespace() or symbol.is_imported() for symbol in symbols)
        if has_code:
            self.own_files.append(path)
        if set_here and has_code:
            print(f"{path} sets {', '.join(set_here)}: if you do not mean the knob, write a "
                  'constant of your own in capitals', file=sys.stderr)

    def run_as_module(self, path):
        """Run a file as a module with the knobs -> its names {name: value}, and its symbols."""
        folder, file = os.path.split(os.path.abspath(path))
        sys.path.append(folder)             # for a module beside it
        relative = os.path.relpath(path)    # sub/mine.py is sub.mine, as in --model_class
        name = os.path.splitext(file if relative.startswith('..') else relative)[0]
        module = ModuleType(name.replace(os.sep, '.'))
        module.__file__ = os.path.join(folder, file)
        sys.modules.setdefault(module.__name__, module)
        names = vars(module)
        names |= self.knobs()
        with explain(f"config file '{path}' failed", 'TRACEBACK=1 in the environment shows where'):
            source = Path(path).read_text(encoding='utf-8-sig')
            exec(compile(source, path, 'exec'), names)
            return names, symtable.symtable(source, path, 'exec').get_symbols()

    def add(self, annotations):
        """
        Make knobs of those of these names {name: annotation} that the user has given: fields of the
        model's class, which is known by now. ValueError for a name that is still unknown.
        """
        unknown, self.unknown = self.unknown, {}
        for key, value in unknown.items():
            hint = did_you_mean(key, [*self.last_set, *annotations])
            check(key in annotations, f'{self.given[key]}: unknown knob {key}{hint} (a field of '
                  'another class needs --model_class; constants of your own are in capitals)')
            self.annotations[key] = annotations[key]
            self.set_knobs({key: convert(key, value, annotations[key])})

    def set_knobs(self, values):
        """Set knobs {name: value}; by whom is not noted."""
        self.script.update(values)
        self.last_set.update({key: repr(value) for key, value in values.items()})

    def set_from_run(self, values, but):
        """Set knobs that an earlier run had, {name: value}, if they are known and not in `but`."""
        known = self.knobs().keys() | self.unknown.keys()
        for name in (values.keys() & known) - but:
            self.set_knobs({name: values[name]})
            self.unknown.pop(name, None)
            self.given.pop(name, None)      # the user has not given it

    def set_from_module(self):
        """Knobs that a notebook has set as attributes of the module count as flags."""
        for key, value in (knobs_of(self.script) | self.knobs()).items():
            if repr(value) != self.last_set.get(key):
                self.set_by(key, value, FLAG)

    def show_help(self):
        """Print the script's docstring, then every knob with its value and its comment."""
        source = Path(self.script['__file__']).read_text(encoding='utf-8')
        knob_and_comment = r'^(\w+)(?:: [^=\n]+)? = [^#\n]*# *(.*)'
        comments = dict(reversed(re.findall(knob_and_comment, source, re.MULTILINE)))
        print((self.script.get('__doc__') or '').strip())
        print('\nknobs (a config file or --key=value changes them):')
        for key, value in self.knobs().items():
            choices = [kind for kind in kinds_of(self.annotations[key]) if isinstance(kind, str)]
            listed = f' [{", ".join(choices)}]' if choices else ''
            print(f'  --{key}={value!r}'.ljust(32) + ' ' + comments.get(key, '') + listed)
        sys.stdout.flush()


def build(call, table, what):
    """
    'calc:p=7,reset=0.1' -> table['calc'](p=7, reset=0.1); plain 'calc' -> table['calc']().

    table: {name: class}; an argument's text is converted by its annotation. what: what the table
    holds, such as 'task', for the message. ValueError for a wrong name, argument or value.
    """
    name, _, text = call.partition(':')
    check(name in table, f"unknown {what} '{name}'{did_you_mean(name, table)} "
          f"(there are {', '.join(table)}; {OWN_FILE})")
    arguments = inspect.signature(table[name], eval_str=True).parameters
    values = {}
    for part in re.split(r',(?=\w+=)', text) if text else []:       # a list may have commas
        key, _, value = part.partition('=')
        known = ', '.join(arguments) or 'nothing'
        check(key in arguments, f"the {what} {name} has no '{key}'{did_you_mean(key, arguments)} "
              f'(it takes {known}; arguments are the fields of a @dataclass)')
        values[key] = convert(f'{key} of the {what} {name}', value, arguments[key].annotation)
    return table[name](**values)


# values and their types ---------------------------------------------------------------------------

def kinds_of(annotation):
    """`Literal['a'] | int | None` -> ['a', int, NoneType]."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return [annotation.__origin__]
    parts = get_args(annotation)
    return [kind for part in parts for kind in kinds_of(part)] if parts else [annotation]


def plain(value):
    """A value without types of numpy and torch, which a checkpoint could not hold."""
    if hasattr(value, 'tolist'):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(part) for part in value)
    return value


def convert(key, value, annotation):
    """
    A value as the knob `key` takes it, or ValueError: an int for a float, a tuple for a list; in
    place of a text, the value that it writes in Python, unless the knob takes a text.
    """
    kinds = kinds_of(annotation)
    text = value if isinstance(value, str) else None
    value = plain(value)
    try:
        if text:
            value = float(text) if text == 'inf' else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        check(list not in kinds or not text.startswith('['), f'{key}={text} is no list: quote it '
              f'and its words, such as --{key}="[\'a\',\'b\']"')
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    if isinstance(value, tuple) and list in kinds:
        value = list(value)
    if text and str in kinds and (isinstance(value, str) or type(value) not in kinds):
        value = text        # a text stays: 12 for a str, not for an int | str
    choices = [kind for kind in kinds if isinstance(kind, str)]
    types = [kind for kind in kinds if not isinstance(kind, str)]
    wanted = choices + ['None' if kind is NoneType else kind.__name__ for kind in types]
    check(type(value) in types or value in choices, f"{key} must be {' or '.join(wanted)}, not "
          f'{value!r}{did_you_mean(value, choices)}')
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Annotated and value is not None:
            _, words, fits = get_args(part)
            check(fits(value), f'{key} must be {words}, not {value}')
    return value
