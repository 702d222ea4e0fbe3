import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import configurator
from common.configurator import adopt, configure, pick_device, plain

SCRIPT = '''"""A script with knobs."""
from common.configurator import configure
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
DEFAULTS = dict(
    rate=1e-3, count=3, name='x', layers=[[1]], on=False, top=None, loops=None, maybe=None)

FAILING_SCRIPT = '''
from common.configurator import configure, run
batch_size = 8
n_embd = 64
error = ''
class OutOfMemoryError(RuntimeError):
    pass
def main():
    print('printed before')
    raise eval(error)
if __name__ == '__main__':
    configure(globals())
    run(main)
'''


@pytest.fixture
def script(tmp_path):
    """script(*args) runs SCRIPT in script.folder; script(*args, file='failing.py') the other."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    (tmp_path / 'failing.py').write_text(FAILING_SCRIPT)
    (tmp_path / 'a.py').write_text(
        'import math\nrate = count * 2\nlayers = [[0], [1, 2]]\n_private = 1\n')

    def call(*args, file='script.py', **options):
        env = dict(PYTHONPATH=str(Path(__file__).parent.parent))
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
        command = [sys.executable, file, *args]
        return subprocess.run(command, cwd=tmp_path, text=True, env=env, **options)
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
    # a config file reads the knobs as they are so far
    (['--count=5', 'a.py'], dict(rate=10.0, count=5, layers=[[0], [1, 2]])),
    (['a.py', '--rate=1', '--count=5'], dict(rate=1.0, count=5, layers=[[0], [1, 2]])),
])
def test_in_the_order_given(script, args, changes):
    done = script(*args)
    assert done.returncode == 0
    knobs = eval(done.stdout, dict(inf=float('inf')))
    assert knobs == DEFAULTS | changes
    assert type(knobs['rate']) is float


@pytest.mark.parametrize('args, words', [
    (['--cuont=3'], "unknown knob 'cuont' .* did you mean 'count'"),
    (['--LIMIT=3'], "unknown knob 'LIMIT'"),
    (['--count=2.5'], 'count must be int, not 2.5'),
    (['--count=None'], 'count must be int, not None'),
    (['--rate=fast'], "rate must be float, not 'fast'"),
    (['--layers=3'], 'layers must be list, not 3'),
    (['--on=7'], 'on must be bool, not 7'),
    (['--top=2.5'], 'top must be int or None, not 2.5'),
    (['--count'], 'count needs a value'),
    (['--count', '--on'], 'count needs a value'),
    (['nowhere.py'], "cannot read config file 'nowhere.py'"),
    (['count=3'], 'neither a --key=value flag nor a config file'),
    (['bad_key.py'], "unknown knob 'ratee' in config file 'bad_key.py': did you mean 'rate'"),
    (['bad_type.py'], "count must be int, not 'three'"),
    (['broken.py'], "config file 'broken.py' failed: SyntaxError"),
    (['raises.py'], "config file 'raises.py' failed: ZeroDivisionError"),
])
def test_bad_input_is_one_line_and_status_2(script, args, words):
    files = dict(bad_key='ratee = 1', bad_type="count = 'three'", broken='rate = = 1',
                 raises='rate = 1 / 0')
    for name, text in files.items():
        (script.folder / f'{name}.py').write_text(text)
    done = script(*args)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.count('\n') == 1
    assert re.search('error: .*' + words, done.stderr), done.stderr


def test_help_has_every_knob_with_its_comment(script):
    done = script('a.py', '--help')
    assert done.returncode == 0 and done.stdout.startswith('A script with knobs.')
    knobs = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:4] == '  --']
    assert [knob[0] for knob in knobs[:3]] == ['--rate=6.0', '--count=3', '--name=x']
    assert knobs[0][1] == 'how fast'
    assert len(knobs) == len(DEFAULTS)


def test_imported_it_reads_no_command_line():
    knobs = dict(__name__='script', rate=0.5)
    assert configure(knobs) == dict(rate=0.5)


@pytest.mark.parametrize('error', [
    'MemoryError()',
    'OutOfMemoryError()',
    'RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 4 bytes")',
    'RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes")',
])
def test_out_of_memory_is_one_line_that_names_the_knobs_to_lower(script, error):
    done = script('--error', error, file='failing.py')
    assert done.returncode == 2 and done.stdout == 'printed before\n'
    line = 'error: more memory was asked for than there is: lower batch_size or n_embd\n'
    assert done.stderr == line


def test_memory_that_no_machine_has(capsys):
    """The errors of Python and torch themselves; a script without such knobs has none to lower."""
    for allocate in (lambda: bytearray(2 ** 62), lambda: torch.empty(10 ** 17)):
        with pytest.raises(SystemExit, match='2'):
            configurator.run(allocate)
        error = capsys.readouterr().err
        assert error.startswith('error: more memory was asked for than there is')
        assert error.count('\n') == 1 and 'lower' not in error
    assert configurator.is_out_of_memory(torch.OutOfMemoryError())


def fail(error):
    """A main() that raises this error."""
    def main():
        raise error
    return main


def test_other_errors_are_raised(monkeypatch):
    with pytest.raises(RuntimeError, match='shapes do not fit'):
        configurator.run(fail(RuntimeError('shapes do not fit')))
    monkeypatch.setenv('TRACEBACK', '1')
    for error in (ValueError(), MemoryError()):
        with pytest.raises(type(error)):
            configurator.run(fail(error))


@pytest.mark.parametrize('error, lines', [(ValueError('bad'), 0), (MemoryError(), 1)])
def test_the_second_process_repeats_no_bad_input(monkeypatch, capsys, error, lines):
    """... but its memory is its own."""
    monkeypatch.setenv('LOCAL_RANK', '1')
    with pytest.raises(SystemExit, match='2'):
        configurator.run(fail(error))
    assert capsys.readouterr().err.count('\n') == lines


def test_ctrl_c(script):
    """What was printed comes out before the last line, though nobody had flushed it."""
    done = script('--error=KeyboardInterrupt()', file='failing.py', stderr=subprocess.STDOUT)
    assert done.returncode == 130
    assert done.stdout == 'printed before\n\nstopped\n'


@pytest.mark.parametrize('error, status, line', [
    ('KeyboardInterrupt()', 130, '\nstopped\n'), ('BrokenPipeError()', 0, '')])
def test_a_reader_that_has_gone(script, error, status, line):
    """`... | head` has read enough: no traceback, neither at once nor when Python ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = script('--error', error, file='failing.py', stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (status, line)


@pytest.fixture
def configured(tmp_path):
    """configured(*args): the globals of a script that was run with these arguments."""
    (tmp_path / 'b.py').write_text("name = 'x'\n")

    def call(*args):
        script = dict(__name__='__main__', rate=1e-3, count=3, layers=[1], name='x')
        args = [str(tmp_path / arg) if arg == 'b.py' else arg for arg in args]
        script['config'] = configure(script, argv=args)
        return script
    return call


def test_adopt_takes_the_knobs_that_were_not_given(configured):
    script = configured('--count=5', 'b.py')
    config = script['config']
    adopt(script, dict(rate=0.5, count=7, name='y', unknown=1), (), 'the run')
    # count was given by a flag, name by a config file, though with its default
    assert config == dict(rate=0.5, count=5, layers=[1], name='x')
    assert script['config'] is config
    assert {key: script[key] for key in config} == config
    assert 'unknown' not in script


def test_adopt_refuses_another_value_of_a_fixed_knob(configured):
    script = configured('--count=5', '--rate=1', '--layers=(1, 2)')
    earlier = dict(count=7, rate=2.0, layers=[1, 2])
    # a tuple is the list that a checkpoint holds for it, and rate is not fixed
    message = r'the run in out had other knobs: count = 5 \(it was 7\); leave them out'
    with pytest.raises(ValueError, match=message):
        adopt(script, earlier, {'count', 'layers', 'name'}, 'the run in out')
    adopt(script, earlier, {'layers'}, 'the run in out')


def test_plain():
    assert plain((1, (2.5, None), ['a', True])) == [1, [2.5, None], ['a', True]]


def test_pick_device():
    assert pick_device('cpu', 'float32')[0] == 'cpu'
    assert pick_device()[0] in ('cpu', 'cuda', 'mps')
    bad = [
        (('tpu',), "device 'tpu' is not available here: choose one of auto, .*cpu"),
        (('cuda:99',), 'not available'),
        (('cpu', 'float16'), 'unknown dtype'),
    ]
    if not torch.cuda.is_available():
        bad.append((('cuda',), 'not available'))
    for args, words in bad:
        with pytest.raises(ValueError, match=words):
            pick_device(*args)


def test_pick_device_gives_the_dtype_of_matrix_products():
    x = torch.ones(2, 2)
    for dtype, wanted in (('auto', torch.float32), ('bfloat16', torch.bfloat16)):
        with pick_device('cpu', dtype)[1]:
            assert (x @ x).dtype == wanted
