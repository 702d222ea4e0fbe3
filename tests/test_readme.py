"""
README.md is held to the code: each command line runs, what the page says that it prints is what it
prints, the printed loop is exits.loop, and the components of one's own work as they stand there.
"""
import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, make_book, run

import exits

README = Path(ROOT, 'README.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```(\w*)\n(.*?)```', README, re.S)
# a training of seconds
SHORT = ['--n_embd=16', '--n_head=2', '--block_size=16', '--batch_size=2', '--max_iters=3',
         '--warmup_iters=1', '--eval_windows=4', '--eval_loops=[1,2]', '--keep_iters=[]']


def commands():
    """Every command line of the page, without its comment, and the block that follows its own."""
    for (language, block), (_, after) in zip(BLOCKS, [*BLOCKS[1:], ('', '')]):
        if language == 'bash':
            for line in block.splitlines():
                line = line.split(' # ')[0].strip()
                if line:
                    yield line, after


def is_set_up(line):
    return 'pip install' in line or line.startswith('git clone')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A user's folder: what the clone has, a text, and mine.py as the page prints it."""
    folder = tmp_path_factory.mktemp('user')
    for name in 'pretrained', 'config', 'zoo':
        os.symlink(os.path.join(ROOT, name), folder / name)
    mine = [text for language, text in BLOCKS if language == 'python' and 'EXITS[' in text]
    (folder / 'mine.py').write_text(mine[0])
    with contextlib.chdir(folder):
        make_book()         # book.txt, and data/book
    return folder


def small(words):
    """A command's words, made short by flags."""
    script, *args = words
    if script == 'train.py':
        args += SHORT
        if 'config/calc.py' in args or 'config/maze.py' in args:
            args += ['--n_layer=3']
        elif 'config/sudoku.py' in args:
            args += ['--n_layer=2', '--n_head=4', '--block_size=64']
        elif '--groups=[[1,2]]' not in args:
            args += ['--n_layer=6']
        if not any(word in ''.join(args) for word in ('calc', 'maze', 'sudoku', 'dataset')):
            args += ['--dataset=book']
    elif script == 'data.py':
        args += ['--overwrite']
    elif script == 'bench.py':
        args += ['--n_windows=4']
    elif script == 'sample.py' and 'out' in ''.join(args) and 'pretrained' not in ''.join(args):
        args += ['--length=16'] if 'switch' in ''.join(args) else ['--max_new_tokens=6']
    return [script, *args]


def printed_by(folder, line):
    """What a command line prints, run in the folder; `| tail` is done here."""
    line, _, tail = line.partition(' | tail -n ')
    python, *words = shlex.split(line)
    assert python == 'python', line
    words = small(words)
    with contextlib.chdir(folder):
        if 'mine.py' in words:      # what it enters in the tables must not stay in this process
            done = subprocess.run([sys.executable, os.path.join(ROOT, words[0]), *words[1:]],
                                  capture_output=True, text=True, env=os.environ | dict(
                                      PYTHONPATH=ROOT, OMP_NUM_THREADS='1'))
        else:
            done = run(*words[1:], script=words[0])
    assert done.returncode == 0, (line, done.stderr)
    lines = done.stdout.splitlines(keepends=True)
    return ''.join(lines[-int(tail):] if tail else lines)


def test_the_set_up_lines():
    """The two that .ci/run executes."""
    start = 'python3 -m venv .venv && . .venv/bin/activate && pip install -q -r requirements.txt'
    lines = [line for line, _ in commands() if 'pip install' in line]
    assert {start, f'{start} && python train.py', f'{start} && python -m pytest -q tests'} == {
        *lines}


def test_pip_and_uv_install_the_same():
    with open(os.path.join(ROOT, 'pyproject.toml'), 'rb') as f:
        for_uv = tomllib.load(f)['project']['dependencies']
    assert for_uv == Path(ROOT, 'requirements.txt').read_text().split()


def test_every_command(folder):
    """All but the set-up and FineWeb's, which needs a network and a card, in order."""
    lines = [(line, after) for line, after in commands()
             if not is_set_up(line) and 'fineweb' not in line]
    assert len(lines) > 10
    compared = 0
    for line, after in lines:
        printed = printed_by(folder, line)
        if 'answers right' in after and 'sample.py' in line:    # the block behind it is its output
            assert after.strip() == printed.strip(), line
            compared += 1
    assert compared == 2


def test_the_loop_is_that_of_exits():
    loop, = [text for language, text in BLOCKS if language == 'python' and 'streak' in text]
    assert textwrap.indent(loop.strip(), '    ') in inspect.getsource(exits.loop)


def test_python(monkeypatch, capsys):
    """The program below *Make it yours*; it solves its problem."""
    program = [text for language, text in BLOCKS if language == 'python' and 'GPT.load' in text][0]
    monkeypatch.chdir(ROOT)
    exec(program, {})
    assert capsys.readouterr().out.splitlines()[-1] == '=2 =2 =0'
