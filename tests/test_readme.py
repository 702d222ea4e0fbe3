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
import torch
from conftest import ROOT, run

import exits

README = Path(ROOT, 'README.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```(\w*)\n(.*?)```', README, re.S)
# a training of seconds, on 8 x 8 rooms or a board of 4 x 4
SHORT = ['--n_embd=16', '--n_head=4', '--block_size=64', '--batch_size=2', '--max_iters=3',
         '--warmup_iters=1', '--eval_windows=4', '--eval_loops=[1,2]', '--keep_iters=[]']
# every command line of the page, without its comment, and the block that follows its own
COMMANDS = [(line.split(' # ')[0].strip(), after)
            for (language, block), (_, after) in zip(BLOCKS, [*BLOCKS[1:], ('', '')])
            for line in block.splitlines() if language == 'bash' and line]


def program(word):
    """The page's block of Python in which this word stands."""
    return next(text for language, text in BLOCKS if language == 'python' and word in text)


def printed_by(folder, line):
    """What a command line prints, run in the folder in little time; `| tail` is done here."""
    line, _, tail = line.partition(' | tail -n ')
    python, script, *args = shlex.split(line)
    assert python == 'python', line
    if script == 'train.py':
        args += SHORT
        if 'config/' not in line:
            args += ['--dataset=book']
    elif script == 'data.py':
        args += ['--overwrite']
    elif '--out_dir=out-book' in args:
        args += ['--max_new_tokens=6']
    with contextlib.chdir(folder):
        if 'mine.py' in args:       # what it enters in the tables must not stay in this process
            done = subprocess.run([sys.executable, os.path.join(ROOT, script), *args],
                                  capture_output=True, text=True, env=os.environ | dict(
                                      PYTHONPATH=ROOT, OMP_NUM_THREADS='1'))
        else:
            done = run(*args, script=script)
    assert done.returncode == 0, (line, done.stderr)
    lines = done.stdout.splitlines(keepends=True)
    return ''.join(lines[-int(tail):] if tail else lines)


def test_the_set_up_lines():
    """The two that .ci/run executes."""
    start = 'python3 -m venv .venv && . .venv/bin/activate && pip install -q -r requirements.txt'
    assert {line for line, _ in COMMANDS if 'pip install' in line} == {
        start, f'{start} && python train.py', f'{start} && python -m pytest -q tests'}


def test_pip_and_uv_install_the_same():
    with open(os.path.join(ROOT, 'pyproject.toml'), 'rb') as f:
        for_uv = tomllib.load(f)['project']['dependencies']
    assert for_uv == Path(ROOT, 'requirements.txt').read_text().split()


def test_every_command(folder):
    """All but the set-up and FineWeb's, which needs a network and a card, in order."""
    (folder / 'mine.py').write_text(program('EXITS['))
    lines = [(line, after) for line, after in COMMANDS
             if not re.search('pip install|git clone|fineweb', line)]
    assert len(lines) > 10
    compared = 0
    for line, after in lines:
        printed = printed_by(folder, line)
        if 'answers right' in after and 'sample.py' in line:    # the block behind it is its output
            assert after.strip() == printed.strip(), line
            compared += 1
    assert compared == 2


def test_the_loop_is_that_of_exits():
    loop = textwrap.indent(program('streak').strip(), '    ')
    assert loop in inspect.getsource(exits.loop)


def test_python(monkeypatch, capsys):
    """The program below *Make it yours*; it solves its problem."""
    monkeypatch.chdir(ROOT)
    with torch.enable_grad():           # what the program changes is put back
        exec(program('GPT.load'), {})
    assert capsys.readouterr().out.splitlines()[-1] == '=2 =2 =0'


@pytest.mark.parametrize('name, status', [('fork:Mine', 1), ('fork:Min', 4)])
def test_the_tests_of_the_core_run_on_a_fork(tmp_path, name, status):
    """A fork that cannot be built fails; its file is in a folder that is not on sys.path (-P)."""
    (tmp_path / 'fork.py').write_text('from model import GPT\n\n\nclass Mine(GPT):\n    h = 0\n')
    done = subprocess.run([sys.executable, '-P', '-m', 'pytest', f'--model_class={name}', '-x',
                           f'{ROOT}/tests/test_cache.py'], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == status, done.stderr
    assert done.stderr.count('\n') <= 2
