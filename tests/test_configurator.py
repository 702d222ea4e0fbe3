"""A command line -> knobs."""
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from common.configurator import Count, build, configure

SCRIPT = '''"""A script with knobs."""
from typing import Literal
from common.configurator import configure
from common.errors import run
# ---
rate = 1e-3                 # how fast
count = 3                   # how many
name = 'x'                  # of what
layers = [[1]]
on = False
top: int | None = None      # None = all
loops: int | list | None = None
maybe: bool | None = None
what: str | int = 'all'
tau: str | float = 'auto'
pos: Literal['learned', 'rotary'] = 'learned'       # positions
rule: Literal['accel', 'kl'] | None = None
groups: list | Literal['all'] = [[1], [2]]
word: str | None = None
# ---
LIMIT = 5
def main():
    print('printed')
if __name__ == '__main__':
    config = configure(globals())
    run(main)
'''
DEFAULTS = dict(rate=1e-3, count=3, name='x', layers=[[1]], on=False, top=None, loops=None,
                maybe=None, what='all', tau='auto', pos='learned', rule=None, groups=[[1], [2]],
                word=None)
FILES = dict(
    bom='\ufeffcount = 7\n',
    a='import math\nrate = count * 2\nlayers = [[0], [i for i in (1, 2)]]\n_private = 1\n',
    # a knob that this script does not have, and names that cannot be knobs
    other='learning_rate = 1e-3\ncount = 4\nLIMIT = 6\n',
    parts='from functools import partial\nSTEP = 2\ndef twice(x):\n    return STEP * x\n'
          'count = twice(count)\n',
    appends='layers.append([2])\n', everything="groups = 'all'\n",
    as_before='count = 3\n',      # its default
    heads='heads = 2\n',
    bad_key='ratee = 1', bad_type="count = 'three'", raises='rate = 1 / 0',
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
        names['settings'] = configure(names, **options)
        return names
    return call


@pytest.mark.parametrize('args, changes', [
    ([], {}),
    (['--rate=2', '--count', '7', '--name=a=b'], dict(rate=2.0, count=7, name='a=b')),
    (['--rate', '-1e-2', '--name', '12', '--on'], dict(rate=-0.01, name='12', on=True)),
    (['--maybe', '--rate=inf', '--word=it'], dict(maybe=True, rate=float('inf'), word='it')),
    (['--on', '--on=False', '--top', '4', '--top=None', '--loops=[4, 8]'], dict(loops=[4, 8])),
    (['--what=1e9', '--name="q"', '--rule=kl'], dict(what='1e9', name='"q"', rule='kl')),
    (['--tau=2', '--what=12', '--pos=rotary', '--rule=kl', '--rule=None', '--groups=all'],
     dict(tau=2.0, what=12, pos='rotary', groups='all')),
    (['--groups=[]', '--layers=1,2'], dict(groups=[], layers=[1, 2])),
    # a config file reads the knobs as they are so far
    (['--count=5', 'a.py'], dict(rate=10.0, count=5, layers=[[0], [1, 2]])),
    (['a.py', '--count=5'], dict(rate=6.0, count=5, layers=[[0], [1, 2]])),
    (['--count=5', 'other.py'], dict(count=5)), (['other.py'], dict(count=4)),
    (['bom.py'], dict(count=7)), (['parts.py'], dict(count=6)),
    (['appends.py'], dict(layers=[[1], [2]])), (['everything.py'], dict(groups='all'))])
def test_files_apply_in_the_order_given_and_flags_win(script, args, changes):
    names = script(*args)
    assert names['settings'].knobs() == DEFAULTS | changes
    assert {key: names[key] for key in DEFAULTS} == DEFAULTS | changes
    assert type(names['rate']) is float and names['LIMIT'] == 5


@pytest.mark.parametrize('args', [
    ['--cuont=3'], ['--LIMIT=3'], ['--count=2.5'], ['--count=True'], ['--count', '--on'],
    ['--count'], ['--pos=rotray'], ['--word='], ['--layers=1'], ['--groups=every'], ['nowhere.py'],
    ['count=3'], ['bad_type.py'], ['part.py'], ['raises.py'], ['--rate=fast']])
def test_bad_input_is_one_line_and_status_2(script, args, capsys):
    with pytest.raises(SystemExit, match='^2$'):
        script(*args)
    out, error = capsys.readouterr()
    assert not out and error.count('\n') == 1 and error.startswith('error: '), error


def test_an_unknown_name_in_a_file_is_an_error_for_train_alone(script, capsys):
    assert script('bad_key.py')['settings'].knobs() == DEFAULTS
    settings = script('bad_key.py', keep_unknown=True)['settings']
    with pytest.raises(ValueError, match="did you mean 'rate'?"):
        settings.add(dict(heads=int))
    script('parts.py', keep_unknown=True)['settings'].add({})


@pytest.mark.parametrize('args', [['--heads=2', '--deep'], ['--deep', '--heads', '2', 'a.py'],
                                  ['heads.py', '--deep']])
def test_names_that_are_known_later(script, args):
    """Fields of a class of one's own, in any order."""
    names = script(*args, keep_unknown=True)
    settings = names['settings']
    settings.add(dict(heads=Count, deep=bool, other=int))
    assert (names['heads'], names['deep']) == (2, True) and 'other' not in names
    assert settings.knobs()['heads'] == 2 and 'heads' in settings.given
    with pytest.raises(ValueError, match='at least 1'):
        script('--heads=0', keep_unknown=True)['settings'].add(dict(heads=Count))


def test_attributes_of_a_notebook_are_like_flags(script):
    """With values of numpy, which become plain ones."""
    names = script(keep_unknown=True)
    settings = names['settings']
    names.update(rate=np.float64(0.5), layers=[np.int64(2), (np.arange(2),)], count=4, heads=2)
    names['groups'].append([3])
    settings.set_from_module()
    assert (type(names['rate']), names['layers']) == (float, [2, ([0, 1],)])
    assert type(names['layers'][0]) is int
    assert settings.flags.keys() == settings.given.keys()
    assert settings.given.keys() == {'rate', 'layers', 'count', 'groups', 'heads'}
    assert settings.unknown == dict(heads=2)        # maybe a field of the model's class
    names['count'] = 2.5
    with pytest.raises(ValueError, match='count'):
        settings.set_from_module()


def test_a_file_of_ones_own_is_a_module(script, capsys):
    """It knows where it is, and may import what stands beside it; a knob that it sets is named."""
    os.mkdir('own')
    Path('own/beside_it.py').write_text('VALUE = 5\n')
    Path('own/mine.py').write_text('from pathlib import Path\nimport beside_it\n'
                                   'count = beside_it.VALUE\nclass Mine:\n    pass\n'
                                   'name = Path(__file__).name\n')
    names = script('own/mine.py', '--name=~/x')
    assert (names['count'], names['name']) == (5, '~/x')        # which is no path
    assert sys.modules.pop('own.mine').Mine.__module__ == 'own.mine'
    assert 'sets count, name' in capsys.readouterr().err


def test_a_bare_argument_and_an_imported_script(script):
    assert script('calc', '--count=4', positional='name')['name'] == 'calc'
    for args, given, flags in (
            (['--name=a', '--count=4'], {'name', 'count'}, {'name', 'count'}),
            (['other.py', '--rate=1'], {'count', 'rate'}, {'rate'}),
            (['as_before.py'], {'count'}, set()), (['appends.py'], {'layers'}, set())):
        settings = script(*args)['settings']
        assert (settings.given.keys(), settings.flags.keys()) == (given, flags)
    assert configure(dict(__name__=__name__, rate=0.5)).knobs() == dict(rate=0.5)


def test_help_has_every_knob_with_its_comment(script, capsys):
    with pytest.raises(SystemExit, match='0'):
        script('a.py', '--help')
    printed = capsys.readouterr().out
    assert printed.startswith('A script with knobs.')
    knobs = [line.split(maxsplit=1) for line in printed.splitlines() if line[:4] == '  --']
    assert len(knobs) == len(DEFAULTS)
    for knob in (['--rate=6.0', 'how fast'], ['--top=None', 'None = all'],
                 ["--pos='learned'", 'positions [learned, rotary]']):
        assert knob in knobs


# a choice with arguments --------------------------------------------------------------------------

@dataclass
class Shape:
    """A field without a default, and fields of several types."""
    sides: int
    scale: float = 1.0
    sizes: list | None = None
    name: str = 'shape'


class Plain:
    def __init__(self, width: int = 8, steps: int | None = None):
        self.width, self.steps = width, steps


TABLE = dict(shape=Shape, plain=Plain, nothing=object)


def test_a_choice_is_built_from_its_name_and_arguments():
    shape = build('shape:scale=2,sizes=[3,4],sides=5,name=a:b=c', TABLE, 'thing')
    assert asdict(shape) == dict(sides=5, scale=2.0, sizes=[3, 4], name='a:b=c')
    assert type(shape.scale) is float
    assert vars(build('plain', TABLE, 'thing')) == dict(width=8, steps=None)
    assert vars(build('plain:steps=3,width=4', TABLE, 'thing')) == dict(width=4, steps=3)
    assert type(build('nothing', TABLE, 'thing')) is object


@pytest.mark.parametrize('call, hint', [
    ('shpe', "'shape'"), ('', 'thing'), ('shape:sides=x', 'sides'),
    ('shape:sides=5,scal=2', "'scale'"), ('shape:sides', 'sides'), ('shape:sides=5,,', 'sides'),
    ('plain:width=2.5', 'width'), ('nothing:width=3', 'width')])
def test_a_bad_choice_is_an_error_in_words(call, hint):
    with pytest.raises(ValueError, match=hint):
        build(call, TABLE, 'thing')
