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
import inspect
import json
import os
import re
import sys
from contextlib import nullcontext
from importlib import import_module
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

VALUES = (int, float, bool, str, list, tuple, NoneType)     # the types that a knob may have
MEMORY_KNOBS = ('batch_size', 'block_size', 'rows', 'n_windows', 'n_loop', 'n_embd', 'n_layer')
OUT_OF_MEMORY = (
    # no memory of this size: torch on a CPU, on CUDA, its libraries, and on Apple's GPUs
    "can't allocate memory", 'not enough memory', 'out of memory', 'ALLOC_FAILED',
    'Invalid buffer size',
    # a size beyond 64 bits: torch, numpy, Python
    'Storage size calculation overflowed', 'multiplication overflow', 'Overflow when unpacking',
    'array is too big', 'Maximum allowed', 'too large to convert', 'too big to convert',
)
given = set()       # the knobs that the command line or a config file has set


# running a script ---------------------------------------------------------------------------------

def run(main):
    """
    Call main(); errors that a user can cause end the program with one line, not with a traceback.

    The exit status is 2 for bad input (a ValueError or OSError: a knob, a file) and for too little
    memory, and 130 for Ctrl-C. TRACEBACK=1 in the environment shows the traceback of an error.
    """
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print('\nstopped', file=sys.stderr)
        raise SystemExit(130)
    except BrokenPipeError:             # `... | head` has read enough: drop what is not printed yet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    except Exception as error:
        if os.environ.get('TRACEBACK'):
            raise
        if is_out_of_memory(error):
            script = inspect.unwrap(main).__globals__       # main may be decorated
            knobs = [knob for knob in MEMORY_KNOBS if knob in script]
            advice = f'lower {" or ".join(knobs)}' if knobs else 'give it less to work on'
            # one GPU may be fuller than the next, so each process reports its own error
            stop(f'not enough memory: {advice}', every_process=True)
        if isinstance(error, (ValueError, OSError)):
            stop(error)
        raise


def stop(message, every_process=False):
    """
    End the program with one line that says what was wrong and what to do, exit status 2.

    Bad input is the same in all processes that torchrun starts on a machine, so only one of them
    prints the line, unless every_process is set.
    """
    if every_process or os.environ.get('LOCAL_RANK', '0') == '0':
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def is_out_of_memory(error):
    """Whether Python, numpy or torch raised this error because they could not get the memory."""
    message = str(error)
    return isinstance(error, MemoryError) or any(phrase in message for phrase in OUT_OF_MEMORY)


# the command line ---------------------------------------------------------------------------------

def configure(script, positional=None, argv=None):
    """
    Set the knobs among a script's globals from the command line; returns {knob: value} of all.

    script: its globals(). If it is imported and not run, its knobs keep their defaults.
    positional: the knob that is set by the first bare argument that is not a .py file.
    argv: the arguments, sys.argv[1:] by default. Wrong ones end the program (`stop`).
    """
    knobs = {name: value for name, value in script.items() if is_knob(name, value)}
    annotations = {name: type(value) for name, value in knobs.items()}
    annotations |= script.get('__annotations__', {})
    given.clear()
    if script['__name__'] == '__main__':
        args = list(sys.argv[1:] if argv is None else argv)
        run(lambda: read_arguments(args, knobs, annotations, script, positional))
        script.update(knobs)
    return knobs


def is_knob(name, value):
    """Knobs are the lower-case globals that hold a plain value."""
    return not name.startswith('_') and name == name.lower() and isinstance(value, VALUES)


def read_arguments(args, knobs, annotations, script, positional):
    """Apply the arguments to knobs, one after the other. ValueError for a wrong one."""
    while args:
        arg = args.pop(0)
        if positional and not arg.startswith('-') and not arg.endswith('.py'):
            arg, positional = f'--{positional}={arg}', None
        if arg in ('--help', '-h'):
            show_help(script, knobs, annotations)
            raise SystemExit(0)
        elif arg.startswith('--'):
            read_flag(arg, args, knobs, annotations)
        else:
            read_file(arg, knobs, annotations)
    check_choices(annotations, knobs)


def read_flag(arg, args, knobs, annotations):
    """
    Set the knob that a flag names: `--key=value`, `--key value` or, for a bool, `--key` alone.

    args: the arguments after it; the value of `--key value` is removed from them.
    """
    key, equals, text = arg[2:].partition('=')
    if key not in knobs:
        raise ValueError(f'unknown flag --{key}{did_you_mean(key, knobs)} (--help lists all)')
    types = types_of(annotations[key])
    if not equals:
        if bool in types and (not args or args[0] not in ('True', 'False')):
            text = 'True'
        elif not args or args[0].startswith('--'):
            raise ValueError(f'--{key} needs a value: --{key}=VALUE')
        else:
            text = args.pop(0)
    knobs[key] = convert(key, parse(text, types), types)
    given.add(key)


def read_file(path, knobs, annotations):
    """Run a config file, which sees the knobs as they are so far, and set those that it changes."""
    if not path.endswith('.py'):
        raise ValueError(f"'{path}' is neither a --key=value flag nor a config file ending in .py")
    of_train = knobs_of_train()
    names = of_train | knobs
    try:
        with open(path, encoding='utf-8') as f:
            tree = ast.parse(f.read(), path)
        exec(compile(tree, path, 'exec'), names)
    except OSError as error:
        raise ValueError(f"cannot read config file '{path}': {error.strerror}") from None
    except Exception as error:
        raise ValueError(f"config file '{path}' failed: {type(error).__name__}: {error}") from error

    for key, value in names.items():
        if key in knobs:
            knobs[key] = convert(key, value, types_of(annotations[key]))
        elif not (key in of_train or key.startswith('_')
                  or isinstance(value, (ModuleType, FunctionType, type))):
            hint = did_you_mean(key, [*knobs, *of_train])
            raise ValueError(f"unknown knob '{key}' in config file '{path}'{hint}")

    # a knob counts as given even if the file sets it to the value that it had
    given.update(node.id for node in ast.walk(tree)
                 if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def knobs_of_train():
    """{knob: default} of train.py, which is read and not imported; {} if there is no train.py."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'train.py')
    if not os.path.exists(path):
        return {}
    with open(path, encoding='utf-8') as f:
        tree = ast.parse(f.read())
    knobs = {}
    for node in tree.body:
        match node:
            case (ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                  | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)):
                try:
                    value = ast.literal_eval(value)
                except ValueError:          # it is computed, so it is not a knob
                    continue
                if is_knob(name, value):
                    knobs[name] = value
    return knobs


def show_help(script, knobs, annotations):
    """Print the script's docstring, then every knob with its value and the comment beside it."""
    with open(script['__file__'], encoding='utf-8') as f:
        source = f.read()
    found = re.findall(r'^ {0,4}(\w+)(?:: [^=\n]+)? = [^#\n]*# *(.*)$', source, re.MULTILINE)
    comments = dict(reversed(found))            # the first of each name
    lines = [(script.get('__doc__') or '').strip(), '',
             'knobs (a config file or --key=value changes them):']
    for key, value in knobs.items():
        shown = str(value).encode('unicode_escape').decode()        # a newline as \n
        lines.append(f'  --{key}={shown}'.ljust(32) + ' ' + comments.get(key, ''))
        if choices := choices_of(annotations[key]):
            lines[-1] += f' [{", ".join(choices)}]'
    print('\n'.join(lines), flush=True)


# values and their types ---------------------------------------------------------------------------

def types_of(annotation):
    """`int | None` -> (int, NoneType);  `int` -> (int,);  `Literal['a', 'b']` -> (str,)"""
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    return tuple(str if get_origin(kind) is Literal else kind for kind in kinds)


def choices_of(annotation):
    """`Literal['a', 'b'] | None` -> ['a', 'b'];  [] for an annotation without a Literal."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for kind in get_args(annotation) for choice in choices_of(kind)]


def check_choices(annotations, values):
    """ValueError if one of values, {name: value}, is not among those that its Literal allows."""
    for name, value in values.items():
        choices = choices_of(annotations[name])
        others = [kind for kind in types_of(annotations[name]) if kind is not str]
        if choices and value not in choices and type(value) not in others:
            known = ', '.join(choices) + ''.join(f' or {name_of(kind)}' for kind in others)
            raise ValueError(f'{name} must be one of {known}, not {value!r}'
                             f'{did_you_mean(value, choices)}')


def did_you_mean(name, known):
    """": did you mean 'x'?" with the most similar of the known names; '' if none is similar."""
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f": did you mean '{nearest[0]}'?" if nearest else ''


def parse(text, types):
    """A flag's text as a Python value, or as it is where the knob takes a string."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        is_number = float in types and text.lower() in ('inf', 'nan')
        return float(text) if is_number else text
    fits = type(value) in types or float in types and type(value) is int
    if str in types and (isinstance(value, str) or not fits):       # --name=12
        return text
    return value


def convert(key, value, types):
    """The value as one of the types that the knob takes. ValueError if it is none of them."""
    is_list = isinstance(value, tuple) and list in types
    if type(value) in types or is_list:
        return value
    if float in types and type(value) is int:
        return float(value)
    wanted = ' or '.join(name_of(kind) for kind in types)
    raise ValueError(f'{key} must be {wanted}, not {value!r}')


def name_of(kind):
    return 'None' if kind is NoneType else kind.__name__


# what scripts share -------------------------------------------------------------------------------

def adopt(script, values, fixed, earlier_run):
    """
    Take over the knobs of an earlier run, except those that were given for this one.

    script: the globals, with config = configure(globals()) among them; config changes with them.
    values: the knobs of the earlier run, {knob: value}, plain.
    fixed: the knobs that must not differ; ValueError if one was given another value.
    earlier_run: the run in words, for that error.
    """
    config = script['config']
    changed = []
    for key in config.keys() & values.keys():
        if key not in given:
            script[key] = config[key] = values[key]
        elif key in fixed and plain(script[key]) != values[key]:
            changed.append(f'{key} = {script[key]} (it was {values[key]})')
    if changed:
        raise ValueError(f'{earlier_run} had other knobs: {", ".join(sorted(changed))}; '
                         'leave them out, or train in another --out_dir')


def plain(value):
    """A knob's value as a file holds it: numbers, strings, None, and lists of these."""
    return json.loads(json.dumps(value))


def imported(name, what, example):
    """
    The object that `MODULE:NAME` names. ValueError if it cannot be imported.

    what: the kind of object, in a word; example: the name of one. Both are for the error.
    """
    module, _, attribute = name.rpartition(':')
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:          # a user's own module may raise anything
        raise ValueError(f"cannot import the {what} '{name}' ({type(error).__name__}: {error}): "
                         f'write MODULE:NAME, such as {example}') from None


def pick_device(device='auto', dtype='auto'):
    """
    The knobs device and dtype -> (device name, context in which matrix products have that dtype).

    auto is the best that this machine has. ValueError for a device or dtype that it lacks.
    """
    import torch  # imported here, so that --help does not wait for it

    # the best first
    backends = dict(cuda=torch.cuda, mps=torch.backends.mps)
    available = [name for name, backend in backends.items() if backend.is_available()] + ['cpu']
    if device == 'auto':
        device = available[0]
    kind = device.split(':')[0]         # cuda:1 -> cuda
    try:
        if kind not in available:
            raise RuntimeError
        torch.empty(0, device=device)   # an error if there is no GPU of this number
    except RuntimeError:
        raise ValueError(f"device '{device}' is not available here: "
                         f'choose one of auto, {", ".join(available)}') from None

    if dtype == 'auto':
        dtype = 'bfloat16' if kind == 'cuda' else 'float32'
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f"unknown dtype '{dtype}': choose auto, float32 or bfloat16")
    if dtype == 'bfloat16':
        return device, torch.autocast(kind, torch.bfloat16)
    return device, nullcontext()
