"""
Config files and --key overrides onto a script's globals; one clear line for bad input.

Not run by itself. A script writes its knobs as plain globals, each with its reason in a comment
beside it, and ends with

    if __name__ == '__main__':
        config = configure(globals())
        run(main)

A command line is config files (plain Python, which may read the knobs) and flags. They are applied
in the order given:

    python train.py config/groups.py --batch_size=32 --dropout 0.1 --compile

A knob takes values of its default's type or, where it has one, of its annotation:
`n_loop: int | list | None = None`.
`--help` prints every knob with its comment.
"""
import ast
import difflib
import json
import os
import sys
import tokenize
from contextlib import nullcontext
from importlib import import_module
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import get_args

VALUES = (int, float, bool, str, list, tuple, NoneType)     # what a knob may hold
MEMORY_KNOBS = ('batch_size', 'block_size', 'n_loop', 'n_windows', 'n_embd')
given = set()       # the knobs that the command line or a config file has set


def stop(message, every_process=False):
    """
    End the program with one line that says what was wrong and what to do, exit status 2.

    Bad input is the same in all processes that torchrun starts on a machine, so only one of them
    prints the line, unless every_process is set.
    """
    if every_process or os.environ.get('LOCAL_RANK', '0') == '0':
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def run(main):
    """
    Call main(). What a user may run into ends the program with one line instead of a traceback.

    Exit status 2 for bad input (a ValueError or OSError: a knob, a file) and for too little memory,
    130 for Ctrl-C. With TRACEBACK=1 in the environment an error still shows its traceback.
    """
    try:
        main()
    except KeyboardInterrupt:
        flush_stdout()
        print('\nstopped', file=sys.stderr)
        raise SystemExit(130)
    except BrokenPipeError:             # `... | head` has read enough
        flush_stdout()
    except (ValueError, OSError) as error:
        if os.environ.get('TRACEBACK'):
            raise
        stop(error, getattr(error, 'every_process', False))
    except (MemoryError, RuntimeError) as error:
        if os.environ.get('TRACEBACK') or not is_out_of_memory(error):
            raise
        knobs = [knob for knob in MEMORY_KNOBS if knob in main.__globals__]
        advice = 'lower ' + ' or '.join(knobs) if knobs else 'give it less to work on'
        # one card may be fuller than the next, so each process speaks for itself
        stop(f'more memory was asked for than there is: {advice}', every_process=True)


def flush_stdout():
    """Send off what was printed so far; drop it if nobody reads it any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_out_of_memory(error):
    """Whether Python, numpy or torch raised this error because it could not get memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError':
        return True
    # torch's allocators for the CPU and for Apple's cards raise a bare RuntimeError
    phrases = ("can't allocate memory", 'not enough memory', 'out of memory')
    return isinstance(error, RuntimeError) and any(words in str(error) for words in phrases)


def configure(script, positional=None, argv=None):
    """
    Set the knobs among script's globals from the command line.

    Returns {knob: value}, which is all that shaped the run. An imported script keeps its defaults.
    positional: the knob that is set by the first bare argument that is not a .py file.
    argv: the arguments, sys.argv[1:] unless given. Wrong ones end the program (`stop`).
    """
    knobs = {name: value for name, value in script.items() if is_knob(name, value)}
    annotations = script.get('__annotations__', {})
    types = {key: types_of(annotations.get(key, type(value))) for key, value in knobs.items()}
    given.clear()
    if script['__name__'] != '__main__':
        return knobs

    args = list(sys.argv[1:] if argv is None else argv)
    while args:
        arg = args.pop(0)
        if arg in ('--help', '-h'):
            run(lambda: show_help(script, knobs))       # `--help | head` may read only a part
            raise SystemExit(0)
        elif arg.startswith('--'):
            read_flag(arg, args, knobs, types)
        elif positional and not arg.endswith('.py'):
            knobs[positional] = arg
            positional = None
        else:
            read_file(arg, knobs, types)
    script.update(knobs)
    return knobs


def is_knob(name, value):
    """Knobs are the lower-case globals that hold a plain value."""
    return not name.startswith('_') and name == name.lower() and isinstance(value, VALUES)


def types_of(annotation):
    """`int | None` -> (int, NoneType);  `int` -> (int,)"""
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def read_flag(arg, args, knobs, types):
    """
    Set the knob that a flag names: `--key=value`, `--key value` or, for a bool, `--key` alone.

    args: the arguments after it; the value of `--key value` is removed from them.
    """
    key, equals, text = arg[2:].partition('=')
    script_name = os.path.basename(sys.argv[0])
    check_known(key, knobs, f'on the command line (see python {script_name} --help)')
    if not equals:
        if bool in types[key] and (not args or args[0] not in ('True', 'False')):
            text = 'True'
        elif not args or args[0].startswith('--'):
            stop(f'--{key} needs a value: --{key}=VALUE')
        else:
            text = args.pop(0)
    knobs[key] = convert(key, parse(text, types[key]), types[key], from_text=True)
    given.add(key)


def read_file(path, knobs, types):
    """Run a config file, which sees the knobs as they are so far, and set those that it changes."""
    if not path.endswith('.py'):
        stop(f"'{path}' is neither a --key=value flag nor a config file ending in .py")
    names = dict(knobs)
    try:
        with open(path, encoding='utf-8') as f:
            tree = ast.parse(f.read(), path)
        exec(compile(tree, path, 'exec'), names)
    except OSError as error:
        stop(f"cannot read config file '{path}': {error.strerror}")
    except Exception as error:
        stop(f"config file '{path}' failed: {type(error).__name__}: {error}")

    for key, value in names.items():
        is_code = isinstance(value, (ModuleType, FunctionType, type))
        if not key.startswith('_') and not is_code:
            check_known(key, knobs, f"in config file '{path}'")
            knobs[key] = convert(key, value, types[key])

    # a knob counts as given even if the file sets it to the value that it had
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in knobs:
            given.add(node.id)


def check_known(key, knobs, where):
    """End the program, with the knob of the nearest name, if there is no knob of this name."""
    if key not in knobs:
        nearest = difflib.get_close_matches(key, knobs, n=1, cutoff=0)
        hint = f": did you mean '{nearest[0]}'?" if nearest else ''
        stop(f"unknown knob '{key}' {where}{hint}")


def parse(text, types):
    """A flag's text as a Python value; text that is no Python value stays as it is."""
    if types == (str,):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if float in types and text.lower() in ('inf', 'nan'):
            return float(text)
        return text


def convert(key, value, types, from_text=False):
    """The value as one of the types that the knob takes; ends the program if it is none of them."""
    is_list = isinstance(value, tuple) and list in types
    if types == (NoneType,) or type(value) in types or is_list:
        return value
    if float in types and type(value) is int:
        return float(value)
    if str in types and from_text:      # --name 12
        return str(value)
    wanted = ' or '.join('None' if kind is NoneType else kind.__name__ for kind in types)
    stop(f'{key} must be {wanted}, not {value!r}')


def show_help(script, knobs):
    """Print the script's docstring, then every knob with its value and the comment beside it."""
    with open(script['__file__'], 'rb') as f:
        tokens = list(tokenize.tokenize(f.readline))
    comments = {}       # line number -> comment
    rows = {}           # name at the start of a line -> number of the first such line
    for token in tokens:
        row, column = token.start
        if token.type == tokenize.COMMENT:
            comments[row] = token.string.lstrip('# ')
        elif token.type == tokenize.NAME and column == 0:
            rows.setdefault(token.string, row)

    docstring = (script.get('__doc__') or '').strip()
    lines = [docstring, '', 'knobs (a config file or --key=value changes them):']
    for key, value in knobs.items():
        shown = str(value).encode('unicode_escape').decode()        # a newline as \n
        comment = comments.get(rows.get(key), '')
        lines.append(f'  --{key}={shown}'.ljust(32) + ' ' + comment)
    print('\n'.join(lines), flush=True)


def adopt(script, values, fixed, earlier_run):
    """
    Give a script the knobs of an earlier run, `values`, except those given for this one.

    script: the globals, with config = configure(globals()) among them; config is changed with them.
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
                         'leave them out, or train anew in another --out_dir')


def imported(name, what, example):
    """MODULE:NAME -> that. ValueError if it is not to be had; what: what it is, in a word."""
    file, _, attribute = name.rpartition(':')
    try:
        return getattr(import_module(file), attribute)
    except Exception as error:          # whatever is wrong in a file of the user's own
        raise ValueError(f"the {what} '{name}' is not to be had ({type(error).__name__}: {error}): "
                         f'write MODULE:NAME, such as {example}') from None


def plain(value):
    """A knob's value as a file holds it: numbers, strings, None, and lists of these."""
    return json.loads(json.dumps(value))


def pick_device(device='auto', dtype='auto'):
    """
    The knobs device and dtype -> (device name, context in which matrix products have that dtype).

    auto is the best that this machine has. ValueError for a device or dtype that it lacks.
    """
    import torch  # here, so that --help need not wait for it

    # the best first
    available = ['cpu']
    if torch.backends.mps.is_available():
        available.insert(0, 'mps')
    if torch.cuda.is_available():
        available.insert(0, 'cuda')

    if device == 'auto':
        device = available[0]
    kind = device.split(':')[0]         # cuda:1 -> cuda
    usable = kind in available
    if usable:
        try:
            torch.empty(0, device=device)
        except RuntimeError:            # there is no card of that number
            usable = False
    if not usable:
        raise ValueError(f"device '{device}' is not available here: "
                         f'choose one of auto, {", ".join(available)}')

    if dtype == 'auto':
        dtype = 'bfloat16' if kind == 'cuda' else 'float32'
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f"unknown dtype '{dtype}': choose auto, float32 or bfloat16")
    if dtype == 'bfloat16':
        return device, torch.autocast(kind, torch.bfloat16)
    return device, nullcontext()
