"""Bad input is one line and status 2, and a bug is a traceback."""
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from common import errors


def fail(error):
    raise error


@pytest.mark.parametrize('main', [
    lambda: fail(ValueError('two\nlines')), lambda: errors.check(False, 'bad'),
    lambda: json.loads('x'), lambda: np.reshape(np.zeros(3), (2, 2)), lambda: open('/no/file')])
def test_bad_input_is_one_line(capsys, main):
    with pytest.raises(SystemExit, match='^2$'):
        errors.run(lambda: (print('printed before'), main()))
    out, error = capsys.readouterr()
    assert out == 'printed before\n'
    assert error.startswith('error: ') and error.count('\n') == 1


def test_errors_that_are_raised(monkeypatch):
    """Those that are bugs, and with TRACEBACK=1 all."""
    for error, traceback in (RuntimeError('shapes do not fit'), ''), (ValueError('bad'), '1'):
        monkeypatch.setenv('TRACEBACK', traceback)
        with pytest.raises(type(error), match=str(error)):
            errors.run(lambda: fail(error))


def test_a_mistake_in_a_file_of_ones_own_keeps_its_traceback(tmp_path):
    """Also in a library that it calls, but not an error in words."""
    path = tmp_path / 'mine.py'
    path.write_text("import json\ndef unpack():\n    a, b = [1]\ndef words():\n"
                    "    raise ValueError('bad')\ndef library():\n    json.loads('x')\n")
    spec = importlib.util.spec_from_file_location('mine', path)
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    for main in mine.unpack, mine.library:
        with pytest.raises(ValueError):
            errors.run(main)
    with pytest.raises(SystemExit, match='^2$'):
        errors.run(mine.words)


@pytest.mark.parametrize('command, out, error', [
    ("PYTHONIOENCODING=ascii {} 'print(chr(233))'", '?', ''),       # Windows, `> file`
    ('{} 1 >&-', '', 'the output is closed'),
    ("(trap '' PIPE; {} 'while 1: print(1)'; echo $? >&2) | true", '', '141'),
    ("{} 'raise KeyboardInterrupt'; echo $?", '130', '')])
def test_the_output(command, out, error):
    program = ("import sys; from common.errors import run; "
               "run(lambda: exec(sys.argv[1]))")
    done = subprocess.run(command.format(f'{sys.executable} -c "{program}"'), shell=True,
                          cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == out and error in done.stderr and done.stderr.count('\n') < 2


def test_an_error_of_a_library_is_explained():
    with pytest.raises(ValueError, match=r"cannot read it \(KeyError: 'a'\): give another"):
        with errors.explain('cannot read it', 'give another'):
            {}['a']
    with pytest.raises(KeyError), errors.explain('', '', ValueError):
        {}['a']
