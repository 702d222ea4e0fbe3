import subprocess
import sys
from pathlib import Path

import pytest

from configurator import configure

SCRIPT = '''"""A script with knobs."""
from configurator import configure
# ---
rate = 1e-3                 # how fast
count = 3                   # how many
name = 'x'                  # of what
layers = [[1]]
on = False
top: int | None = None      # None = all
loops: int | list | None = None
maybe: bool | None = None
# ---
LIMIT = 5
if __name__ == '__main__':
    config = configure(globals())
    assert all(globals()[k] == v for k, v in config.items()) and LIMIT == 5
    print(config)
'''
DEFAULTS = dict(rate=1e-3, count=3, name='x', layers=[[1]], on=False, top=None, loops=None, maybe=None)


@pytest.fixture
def script(tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'a.py').write_text('import math\nrate = count * 2\nlayers = [[0], [1, 2]]\n_private = 1\n')

    def call(*args):
        return subprocess.run([sys.executable, 'script.py', *args], cwd=tmp_path, capture_output=True, text=True,
                              env=dict(PYTHONPATH=str(Path(__file__).parent.parent)))
    call.folder = tmp_path
    return call


@pytest.mark.parametrize('args, changes', [
    ([], {}),
    (['--rate=2', '--count', '7'], dict(rate=2.0, count=7)),
    (['--rate', '-1e-2', '--name=a=b'], dict(rate=-0.01, name='a=b')),
    (['--name', '12', '--layers=[[2], [3, 4]]'], dict(name='12', layers=[[2], [3, 4]])),
    (['--name=', '--on'], dict(name='', on=True)),
    (['--maybe', '--rate=inf'], dict(maybe=True, rate=float('inf'))),
    (['--on', 'True', '--top', '4', '--top=None'], dict(on=True)),
    (['--on', '--on=False', '--loops=[4, 8]'], dict(loops=[4, 8])),
    (['--loops=4', '--layers=[]'], dict(loops=4, layers=[])),
    (['a.py'], dict(rate=6.0, layers=[[0], [1, 2]])),
    (['--count=5', 'a.py'], dict(rate=10.0, count=5, layers=[[0], [1, 2]])),         # a config file reads the knobs so far
    (['a.py', '--rate=1', '--count=5'], dict(rate=1.0, count=5, layers=[[0], [1, 2]])),
])
def test_in_the_order_given(script, args, changes):
    done = script(*args)
    knobs = eval(done.stdout, dict(inf=float('inf')))
    assert done.returncode == 0 and knobs == DEFAULTS | changes and type(knobs['rate']) is float


@pytest.mark.parametrize('args, words', [
    (['--cuont=3'], "unknown knob 'cuont' .* did you mean 'count'"),
    (['--LIMIT=3'], "unknown knob 'LIMIT'"),
    (['--count=2.5'], 'count = 2.5 is no int'),
    (['--count=None'], 'count = None is no int'),
    (['--rate=fast'], "rate = 'fast' is no float"),
    (['--layers=3'], 'layers = 3 is no list'),
    (['--on=7'], 'on = 7 is no bool'),
    (['--top=2.5'], 'top = 2.5 is no int or None'),
    (['--count'], 'count needs a value'),
    (['--count', '--on'], 'count needs a value'),
    (['nowhere.py'], "cannot read config file 'nowhere.py'"),
    (['count=3'], 'neither a --key=value flag nor a config file'),
    (['bad_key.py'], "unknown knob 'ratee' in config file 'bad_key.py': did you mean 'rate'"),
    (['bad_type.py'], "count = 'three' is no int"),
    (['broken.py'], "config file 'broken.py' failed: SyntaxError"),
    (['raises.py'], "config file 'raises.py' failed: ZeroDivisionError"),
])
def test_bad_input_is_one_line_and_status_2(script, args, words):
    for name, text in dict(bad_key='ratee = 1', bad_type="count = 'three'", broken='rate = = 1', raises='rate = 1 / 0').items():
        (script.folder / f'{name}.py').write_text(text)
    done = script(*args)
    assert done.returncode == 2 and not done.stdout and done.stderr.count('\n') == 1
    import re
    assert re.search('error: .*' + words, done.stderr), done.stderr


def test_help_has_every_knob_with_its_comment(script):
    done = script('a.py', '--help')
    assert done.returncode == 0 and done.stdout.startswith('A script with knobs.')
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith('  --')]
    assert [line[0] for line in lines[:3]] == ['--rate=6.0', '--count=3', '--name=x']
    assert lines[0][1] == 'how fast' and len(lines) == len(DEFAULTS)


def test_imported_it_reads_no_command_line():
    knobs = dict(__name__='script', rate=0.5)
    assert configure(knobs) == dict(rate=0.5)
