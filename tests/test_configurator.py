import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, run

import common
import train
from common import configurator, distributed
from common.configurator import configure
from common.distributed import pick_device

SCRIPT = '''"""A script with knobs."""
from typing import Literal
from common.configurator import PathName, configure, run
# ---
rate = 1e-3                 # how fast
count = 3                   # how many
name = 'x'                  # of what
layers = [[1]]
on = False
n_embd = 64
top: int | None = None      # None = all
loops: int | list | None = None
maybe: bool | None = None
what: str | int = 'all'
tau: str | float = 'auto'
pos: Literal['learned', 'rotary'] = 'learned'       # positions
rule: Literal['accel', 'kl'] | None = None
mode: Literal['cpu'] | list = []
word: str | None = None
folder: PathName = 'out'
# ---
LIMIT = 5
def main():
    print('printed')
if __name__ == '__main__':
    config = configure(globals())
    run(main)
'''
DEFAULTS = dict(rate=1e-3, count=3, name='x', layers=[[1]], on=False, n_embd=64, top=None,
                loops=None, maybe=None, what='all', tau='auto', pos='learned', rule=None, mode=[],
                word=None, folder='out')
FILES = dict(
    bom='\ufeffcount = 7\n',
    a='import math\nrate = count * 2\nlayers = [[0], [i for i in (1, 2)]]\n_private = 1\n',
    # train.py's knobs, which this script does not have, may be set and read
    for_train='learning_rate = 1e-3\nbatch_size = 2 * batch_size\nbetas = None\ndel betas\n'
              'count = 4\nLIMIT = 6\n',
    # what is imported or defined is no knob, and a function sees what the file has bound
    parts='from functools import partial\nimport math\nstep = 2\ndef twice(x):\n'
          '    return step * x\ncount = twice(count)\ndel step\n',
    appends='layers.append([2])\nkeep_iters.append(500)\n',
    same="name = 'x'\n", quotes='"""\nHow to begin:\nfrom the weights of calc.\n"""\ncount = 4\n',
    bad_key='ratee = 1', near_train='learning_rte = 1',
    bad_type="count = 'three'", raises='rate = 1 / 0', no_path='folder = 5',
    part='def count():\n    pass')


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(*args): the globals of SCRIPT after configure has read these arguments."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'script.py').write_text(SCRIPT)
    for name, text in FILES.items():
        (tmp_path / f'{name}.py').write_text(text)

    def call(*args, **options):
        monkeypatch.setattr(sys, 'argv', ['script.py', *args])
        names = dict(__name__='script', __file__='script.py')
        exec(SCRIPT, names)
        names['__name__'] = '__main__'
        names['config'] = configure(names, **options)
        return names
    return call


@pytest.mark.parametrize('args, changes', [
    ([], {}),
    (['--rate=2', '--count', '7', '--name=a=b'], dict(rate=2.0, count=7, name='a=b')),
    (['--rate', '-1e-2', '--name', '12', '--on'], dict(rate=-0.01, name='12', on=True)),
    (['--maybe', '--rate=inf', '--name='], dict(maybe=True, rate=float('inf'), name='')),
    (['--on', '--on=False', '--top', '4', '--top=None', '--loops=[4, 8]'], dict(loops=[4, 8])),
    (['--what=1e9', '--name="q"', '--rule=kl'], dict(what='1e9', name='"q"', rule='kl')),
    (['--tau=2', '--what=12', '--pos=rotary', '--rule=kl', '--rule=None', '--mode=[1]'],
     dict(tau=2.0, what=12, pos='rotary', mode=[1])),
    # a config file reads the knobs as they are so far
    (['--count=5', 'a.py'], dict(rate=10.0, count=5, layers=[[0], [1, 2]])),
    (['for_train.py'], dict(count=4)), (['bom.py'], dict(count=7)),
    (['parts.py'], dict(count=6)), (['appends.py'], dict(layers=[[1], [2]])),
    # bare values are a list; inner tuples are lists too
    (['--layers=1,2'], dict(layers=[1, 2])), (['--layers=[(1,)]'], dict(layers=[[1]]))])
def test_arguments_apply_in_the_order_given(script, args, changes):
    names = script(*args)
    assert names['config'] == DEFAULTS | changes
    assert {key: names[key] for key in DEFAULTS} == names['config']
    assert type(names['rate']) is float and names['LIMIT'] == 5


@pytest.mark.parametrize('args, line', [
    (['--cuont=3'], "unknown flag --cuont: did you mean 'count'? (--help lists all)"),
    (['--LIMIT=3'], 'unknown flag --LIMIT (--help lists all)'),
    (['--count=2.5'], 'count must be int, not 2.5'),
    (['no_path.py'], 'folder must be a path, not 5'),
    (['--top=2.5'], 'top must be int or None, not 2.5'),
    (['--count', '--on'], '--count needs a value: --count=VALUE'),
    (['--pos=rotray'], "pos must be one of learned, rotary, not 'rotray': did you mean 'rotary'?"),
    (['--rule='], 'rule must be one of accel, kl or None'),
    (['--word='], 'word is empty: give a value, or leave it out'),
    (['--layers=1'], 'layers must be a list such as [[1]], not 1'),
    (['--mode=gpu'], "mode must be one of cpu or a list such as [1, 2], not 'gpu': did you mean "
     "'cpu'?"),
    (['nowhere.py'], "config file 'nowhere.py' failed: FileNotFoundError"),
    (['count=3'], "'count=3' is neither a --key=value flag nor a config file ending in .py"),
    (['bad_key.py'], "unknown knob 'ratee' in config file 'bad_key.py': did you mean 'rate'?"),
    (['near_train.py'], "unknown knob 'learning_rte' in config file 'near_train.py': "
     "did you mean 'learning_rate'?"),
    (['bad_type.py'], "count must be int, not 'three'"),
    (['part.py'], "'part.py' binds count, which is a setting here: choose another name"),
    (['raises.py'], "config file 'raises.py' failed: ZeroDivisionError: division by zero")])
def test_bad_input_is_one_line_and_status_2(script, args, line, capsys):
    with pytest.raises(SystemExit, match='2'):
        script(*args)
    out, error = capsys.readouterr()
    assert not out and error.count('\n') == 1 and error.startswith('error: ' + line), error


def test_a_bare_argument_and_an_imported_script(script):
    assert script('calc', '--count=4', positional='name')['name'] == 'calc'
    assert configurator.given == {'name', 'count'}
    # a config file gives the knobs that it sets, even to the values that they had
    script('same.py')
    assert configurator.given == {'name'}
    assert configure(dict(__name__='script', rate=0.5)) == dict(rate=0.5)


def test_only_a_file_that_imports_may_have_added_a_part(script):
    """A sentence of its docstring that begins like an import is none."""
    script('same.py', 'quotes.py', 'parts.py')
    assert configurator.own_files == ['parts.py']


def test_a_part_in_a_file_of_ones_own_can_be_compiled(tmp_path):
    """torch.compile looks for the builtins among the globals of a function."""
    path = tmp_path / 'mine.py'
    path.write_text('import torch\ndef twice(x):\n    return torch.stack([x for _ in range(2)])\n')
    bound = configurator.run_file(path.read_text(), {})
    assert {*bound} == {'torch', 'twice'}
    compiled = torch.compile(bound['twice'], backend='eager', fullgraph=True)
    assert compiled(torch.ones(1)).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize('script', ['tasks.py', 'exits.py', 'cache.py', 'decode/wave.py'])
def test_a_script_that_runs_is_found_under_its_own_name(tmp_path, script):
    """So that a file of one's own adds to its tables, and no class exists twice."""
    name = script.removesuffix('.py').replace('/', '.')
    (tmp_path / 'mine.py').write_text(
        f'import sys\nfrom importlib import import_module\n'
        f'assert vars(import_module("{name}")) is vars(sys.modules["__main__"])\n')
    with mock.patch.dict(sys.modules):
        sys.modules.pop(name, None)
        done = run(str(tmp_path / 'mine.py'), '--help', script=script)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_knobs_of_training_are_read_from_its_file():
    assert configurator.knobs_of_training() == train.DEFAULTS


def test_annotations_as_python_3_14_has_them():
    """A function makes them, and __annotations__ is no global."""
    annotations = dict(top=int | None)
    script = dict(__name__='script', top=None, __annotate__=lambda format: annotations)
    assert configurator.annotations_of(script) == annotations
    assert configurator.read_arguments(script, ['--top=3']) == dict(top=3)
    assert configurator.annotations_of(dict(script, __annotations__={})) == {}
    assert configurator.annotations_of(dict(__name__='script')) == {}
    # train.py in a notebook
    wanted = vars(train)['__annotations__']
    with mock.patch.dict(vars(train), __annotate__=lambda format: wanted):
        del vars(train)['__annotations__']
        with pytest.raises(ValueError, match='--length is for --eval_only'):
            train.main('--length=64')


def test_help_has_every_knob_with_its_comment(script, capsys):
    with pytest.raises(SystemExit, match='0'):
        script('a.py', '--help')
    printed = capsys.readouterr().out
    assert printed.startswith('A script with knobs.')
    knobs = [line.split(maxsplit=1) for line in printed.splitlines() if line[:4] == '  --']
    assert len(knobs) == len(DEFAULTS)
    for knob in (['--rate=6.0', 'how fast'], ['--top=None', 'None = all'],
                 ['--pos=learned', 'positions [learned, rotary]']):
        assert knob in knobs


def test_a_reader_that_has_gone(script):
    """`... | head` has read enough: no traceback, and the script does not go on."""
    reader, writer = os.pipe()
    os.close(reader)
    processes = [subprocess.Popen([sys.executable, 'script.py', *args], stdout=writer, text=True,
                                  stderr=subprocess.PIPE, env=dict(PYTHONPATH=ROOT))
                 for args in ([], ['--help'])]
    os.close(writer)
    for process in processes:
        assert (process.communicate()[1], process.returncode) == ('', 0)


def test_the_list_of_what_the_programs_share_is_whole():
    listed = re.findall('^    ([a-z_]+) ', common.__doc__, re.M)
    files = Path(ROOT, 'common').glob('[!_]*.py')
    assert sorted(listed) == sorted(path.stem for path in files)


def test_pick_device(monkeypatch, capsys):
    assert pick_device()[0] in ('cpu', 'cuda', 'mps')
    for device in ('tpu', 'meta', 'cuda:99'):
        with pytest.raises(ValueError, match=f"device '{device}' is not available .* auto, .*cpu"):
            pick_device(device)
    with pytest.raises(ValueError, match='unknown dtype'):
        pick_device('cpu', 'float16')
    # the dtype of matrix products
    x = torch.ones(2, 2)
    for dtype, has_bfloat16, wanted in (('auto', True, torch.float32),
                                        ('bfloat16', True, torch.bfloat16),
                                        ('bfloat16', False, torch.float32)):
        monkeypatch.setattr(distributed, 'cpu_has_bfloat16', lambda: has_bfloat16)
        device, context = pick_device('cpu', dtype)
        with context:
            assert device == 'cpu' and (x @ x).dtype == wanted
        assert ('float32 is used' in capsys.readouterr().out) == (not has_bfloat16)
