"""
Every command of results/*.sh, at a tiny size: the scripts run as they are, and what they would ask
of Python is done here. Of commands that differ in numbers alone the first stands for all. A list of
commands would be a second copy of the scripts, and would miss what bash makes of loops and quotes.
"""
import contextlib
import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import finished
from matplotlib.figure import Figure

import tasks
from model import CausalSelfAttention

# `python` for the scripts: it hands its arguments over, and waits
STAND_IN = '#!/bin/bash\nprintf "%q " "$@" > requests\nread -r < answers'
SHAPE = ['--n_embd=16', '--n_head=4', '--block_size=64', '--bptt_k=1']
FLAGS = {        # flags behind those of a command
    'train.py': ['--batch_size=1', '--max_iters=2', '--eval_interval=2', '--eval_windows=1',
                 '--warmup_iters=1', '--eval_loops=[1]', '--device=cpu', '--compile=False'],
    'bench.py': ['--taus=0.3', '--budgets=1', '--n_windows=1', '--n_prompts=1', '--new_tokens=2',
                 '--n_loop=9', '--device=cpu', '--compile=False'],
    'geometry.py': ['--n_loop=4', '--n_windows=1'], 'zoo/etd.py': ['--n_windows=1'],
    'results/first_errors.py': ['--length=64', '--seeds=[1]', '--n_loop=4', '--tau=99'],
    'results/maze.py': ['--sides=[9]', '--n_mazes=[1]', '--n_loop=[2]'],
    'results/sudoku.py': ['--loops=[2]', '--starts=1']}


@pytest.fixture
def here(folder, monkeypatch):
    """In a user's folder with more texts, and a stand-in for Python."""
    monkeypatch.chdir(folder)
    for name in 'wiki', 'torchdocs':
        os.symlink('book', f'data/{name}')
    Path('python').write_text(STAND_IN)
    os.chmod('python', 0o755)
    for name in 'requests', 'answers':
        os.mkfifo(name)
    monkeypatch.setenv('PATH', f'{folder}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setattr(tasks.Problems, 'n_problems', 4)
    monkeypatch.setattr(Figure, 'savefig', lambda *args, **how: None)
    monkeypatch.setattr(CausalSelfAttention, 'readers', CausalSelfAttention.readers)  # waiting.py


@pytest.fixture
def commands_of(here):
    """commands_of(script): the arguments of each command; the script waits until one is done."""
    scripts = []

    def commands(script):
        scripts.append(subprocess.Popen(
            ['bash', '-c', f'bash {script}; echo end $? > requests'], start_new_session=True))
        while (words := shlex.split(Path('requests').read_text()))[0] != 'end':
            yield words
            Path('answers').write_text('done\n')
        assert words[1] == '0'
    yield commands
    for script in scripts:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def test_every_command(commands_of):
    done = {}       # {a command without numbers and folders: its out_dir}
    for path in sorted(set(glob.glob('results/*.sh')) - {'results/lib.sh'}):
        for words in commands_of(path):
            line = ' '.join(words)
            out_dir = re.search(r'--out_dir=(out-\S+)|$', line)[1]
            kind = re.sub(r'--(out_dir|path)=\S+|[\d.]+(e-\d)?', '', line)
            if kind in done:
                if out_dir and done[kind]:
                    shutil.copytree(done[kind], out_dir, dirs_exist_ok=True)
                continue
            done[kind] = out_dir
            script, *args = words
            if script == '-m':
                script = args.pop(0).replace('.', '/') + '.py'
            if script in ('pytest.py', 'results/gif.py'):           # pictures of fifteen seconds
                continue
            if script == 'train.py' and not re.search('--(init_from|eval_only)', line):
                args += SHAPE
            print(path, line)           # which pytest shows if it fails
            finished(*(tiny(arg) for arg in args), *FLAGS.get(script, []), script=script)
    assert len(done) > 100


def tiny(arg):
    """An argument with smaller numbers. The tables that the other commands read stay."""
    arg = re.sub(r'--length=\d+', '--length=64', arg)
    arg = re.sub(r'^results/(\w+\.csv)', r'tables/\1', arg)
    return re.sub(r'\d+', '1', arg) if arg.startswith('--n_boards') else arg
