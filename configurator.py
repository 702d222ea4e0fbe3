"""
Config files and --key overrides onto a script's globals; one clear line for bad input.

Not run by itself. A script writes its knobs as plain globals, each with its reason in a comment beside it, then

    config = configure(globals())

and is run as `python train.py config/groups.py --batch_size=32 --dropout 0.1 --compile`: config files (plain Python, which
may read the knobs) and flags, in the order given. A knob takes values of its default's type, or of its annotation
(`n_loop: int | list | None = None`). `--help` prints every knob with its comment.
"""
import ast
import difflib
import json
import os
import sys
import tokenize
from contextlib import nullcontext
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import get_args

VALUES = (int, float, bool, str, list, tuple, NoneType)
given = set()       # knobs that the command line or a config file has set


def stop(message):
    """End the program with one line that says what was wrong and what to do, exit status 2."""
    if os.environ.get('LOCAL_RANK', '0') == '0':    # of torchrun's processes one a machine speaks
        print('error: ' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


def run(main):
    """main(), with a ValueError or OSError (bad input: a knob, a file) told in one line."""
    try:
        main()
    except KeyboardInterrupt:
        print('\nstopped', file=sys.stderr)
        raise SystemExit(130)
    except BrokenPipeError:             # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        if os.environ.get('TRACEBACK'):
            raise
        stop(error)


def configure(script, positional=None, argv=None):
    """
    Read the command line onto the knobs among script's globals and return {knob: value}, which is all that shaped the run.

    positional: the knob that a bare argument which is no .py file sets. Imported as a module, a script keeps its defaults.
    """
    knobs = {k: v for k, v in script.items() if k[0] != '_' and k == k.lower() and isinstance(v, VALUES)}
    kinds = {k: script.get('__annotations__', {}).get(k, type(v)) for k, v in knobs.items()}
    given.clear()
    args = list(sys.argv[1:] if argv is None else argv) if script['__name__'] == '__main__' else []
    while args:
        arg = args.pop(0)
        if arg in ('--help', '-h'):
            run(lambda: show_help(script, knobs))       # `--help | head` has seen enough
            raise SystemExit(0)
        elif arg.startswith('--'):
            key, equals, text = arg[2:].partition('=')
            known(key, knobs, f'on the command line (see python {os.path.basename(sys.argv[0])} --help)')
            if not equals:
                is_bool = bool in (get_args(kinds[key]) or (kinds[key],)) and (not args or args[0] not in ('True', 'False'))
                if not is_bool and (not args or args[0].startswith('--')):
                    stop(f'--{key} needs a value: --{key}=VALUE')
                text = 'True' if is_bool else args.pop(0)
            knobs[key] = convert(key, text, kinds[key])
            given.add(key)
        elif positional and not arg.endswith('.py'):
            knobs[positional], positional = arg, None
        else:
            read_file(arg, knobs, kinds)
    script.update(knobs)
    return knobs


def adopt(script, values, fixed, whence):
    """
    Set the knobs of a script that were not given to those of an earlier run, `values`.

    ValueError if one of the names in `fixed` was given another value; whence: the run, in words.
    """
    changed = []
    for key in script['config'].keys() & values.keys():
        if key not in given:
            script[key] = script['config'][key] = values[key]
        elif key in fixed and plain(script[key]) != values[key]:
            changed.append(f'{key} = {script[key]} (it was {values[key]})')
    if changed:
        raise ValueError(f'{whence} had other knobs: {", ".join(sorted(changed))}; leave them out, '
                         'or train anew in another --out_dir')


def plain(value):
    """A knob's value as a file holds it: numbers, strings, lists."""
    return json.loads(json.dumps(value))


def pick_device(device='auto', dtype='auto'):
    """
    The knobs device and dtype -> (device name, autocast context of matrix products).

    auto is the best that this machine has. ValueError for a device or dtype that it lacks.
    """
    import torch        # here, so that --help need not wait for it
    found = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if device == 'auto':
        device = next(name for name, there in found.items() if there)
    kind = device.split(':')[0]
    try:
        there = found.get(kind) and torch.empty(0, device=device) is not None
    except RuntimeError:        # a card of that number is not there
        there = False
    if not there:
        names = ', '.join(name for name, there in found.items() if there)
        raise ValueError(f"device '{device}' is not available here: choose one of auto, {names}")
    if dtype == 'auto':
        dtype = 'bfloat16' if kind == 'cuda' else 'float32'
    if dtype not in ('float32', 'bfloat16'):
        raise ValueError(f"unknown dtype '{dtype}': choose auto, float32 or bfloat16")
    half = dtype == 'bfloat16'
    return device, torch.autocast(kind, torch.bfloat16) if half else nullcontext()


def known(key, knobs, where):
    if key not in knobs:
        near = difflib.get_close_matches(key, knobs, n=1, cutoff=0)
        stop(f"unknown knob '{key}' {where}: did you mean '{near[0]}'?" if near else f"unknown knob '{key}' {where}")


def convert(key, value, kind, parse=True):
    """The text of a flag, or (parse=False) the value from a config file, as the kind of value that the knob takes."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if parse and kinds != (str,):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = float(value) if float in kinds and value.lower() in ('inf', 'nan') else value       # else it stays a string
    if kinds == (NoneType,) or type(value) in kinds or (type(value) is tuple and list in kinds):
        return value
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds and parse:
        return str(value)
    names = ' or '.join('None' if k is NoneType else k.__name__ for k in kinds)
    stop(f'{key} = {value!r} is no {names}')


def read_file(path, knobs, kinds):
    if not path.endswith('.py'):
        stop(f"'{path}' is neither a --key=value flag nor a config file ending in .py")
    try:
        with open(path, encoding='utf-8') as f:
            tree = ast.parse(f.read(), path)
        assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names = dict(knobs)
        exec(compile(tree, path, 'exec'), names)
    except OSError as error:
        stop(f"cannot read config file '{path}': {error.strerror}")
    except Exception as error:
        stop(f"config file '{path}' failed: {type(error).__name__}: {error}")
    for key, value in names.items():
        if not key.startswith('_') and not isinstance(value, (ModuleType, FunctionType, type)):
            known(key, knobs, f"in config file '{path}'")
            knobs[key] = convert(key, value, kinds[key], parse=False)
            given.update({key} & assigned)


def show_help(script, knobs):
    """The script's docstring, then every knob with its value so far and the comment beside it in the source."""
    told = [(script.get('__doc__') or '').strip() + '\n\nknobs (a config file or --key=value changes them):']
    with open(script['__file__'], 'rb') as f:
        tokens = list(tokenize.tokenize(f.readline))
    comments = {t.start[0]: t.string.lstrip('# ') for t in tokens if t.type == tokenize.COMMENT}
    lines = {t.string: t.start[0] for t in reversed(tokens) if t.type == tokenize.NAME and t.start[1] == 0}
    for key, value in knobs.items():
        value = str(value).encode('unicode_escape').decode()
        told.append(f'  --{key}={value}'.ljust(32) + ' ' + comments.get(lines.get(key), ''))
    print('\n'.join(told), flush=True)
