"""What a user has caused is one line, and what is a bug of ours a traceback."""
import io
import json
import sys

import numpy as np
import pytest
import torch

from common import distributed, errors

SIZE = 2 ** 62


@pytest.mark.parametrize('main', [
    lambda: bytearray(SIZE), lambda: torch.empty(10 ** 17), lambda: torch.empty(SIZE, SIZE),
    lambda: torch.empty(10 ** 20), lambda: np.zeros((SIZE, SIZE)), lambda: np.zeros(10 ** 20),
    lambda: fail(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.'))])
def test_out_of_memory_is_one_line_that_names_knobs_to_lower(main, capsys):
    """The errors of Python, torch and numpy themselves, and one that only a GPU raises."""
    with pytest.raises(SystemExit, match='2'):
        errors.run(main)
    error = capsys.readouterr().err
    assert error.startswith('error: not enough memory: lower a size') and error.count('\n') == 1


def fail(error):
    raise error


def test_errors_that_are_raised(monkeypatch):
    """Those that are bugs, and with TRACEBACK=1 all."""
    for error, traceback in (RuntimeError('shapes do not fit'), ''), (ValueError('bad'), '1'):
        monkeypatch.setenv('TRACEBACK', traceback)
        with pytest.raises(type(error), match=str(error)):
            errors.run(lambda: fail(error))


@pytest.mark.parametrize('fails', [
    lambda: json.loads('x'), lambda: np.reshape(np.zeros(3), (2, 2))])
def test_a_value_error_of_a_library_says_how_to_see_where(capsys, fails):
    with pytest.raises(SystemExit, match='2'):
        errors.run(fails)
    assert capsys.readouterr().err.endswith(' (TRACEBACK=1 shows where)\n')


@pytest.mark.parametrize('error', [
    ValueError('the board is too big'), errors.UserError('the array is too big')])
def test_an_error_of_our_own_is_not_taken_for_one_of_memory(capsys, error):
    with pytest.raises(SystemExit, match='2'):
        errors.run(lambda: fail(error))
    assert capsys.readouterr().err == f'error: {error}\n'


def test_only_the_first_process_reports_bad_input(monkeypatch, capsys):
    """But each process has its own memory."""
    monkeypatch.setattr(distributed, 'LOCAL_RANK', 1)
    for error, lines in (ValueError('bad'), 0), (MemoryError(), 1):
        with pytest.raises(SystemExit, match='2'):
            errors.run(lambda: fail(error))
        assert capsys.readouterr().err.count('\n') == lines


@pytest.mark.parametrize('error, status, line', [
    (KeyboardInterrupt(), 130, '\nstopped\n'),
    (ValueError('two\nlines'), 2, 'error: two lines\n')])
def test_how_a_script_ends(capsys, error, status, line):
    def main():
        print('printed before')
        raise error
    with pytest.raises(SystemExit, match=str(status)):
        errors.run(main)
    assert capsys.readouterr() == ('printed before\n', line)


def test_a_console_that_lacks_letters(monkeypatch):
    """U+FFFD is no letter of cp1252."""
    console = io.TextIOWrapper(io.BytesIO(), encoding='cp1252')
    monkeypatch.setattr(sys, 'stdout', console)
    errors.run(lambda: print('\ufffd'))
    assert console.buffer.getvalue() == b'?\n'
