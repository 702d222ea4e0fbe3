"""
The programs as they are called: three files of the root by themselves, those of config/, the links
of the pages. And which file may import which.
"""
import ast
import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, finished
from matplotlib.figure import Figure

ALONE = {           # a file at the root, and what it must have printed, as a regular expression
    'decode.py': r'pass 24 ',
    'tasks.py': 'the oracle disagrees with 0',
    'sample.py --max_new_tokens=6': 'tokens/s',
}
# a training of seconds; no data set for a task
SHORT = ['--n_embd=16', '--n_head=2', '--batch_size=2', '--max_iters=2', '--warmup_iters=1',
         '--eval_windows=2', '--mean_recurrence=2', '--eval_loops=[1,2]']
ON_BOOK = ['--dataset=book', '--block_size=16']
FLAGS = dict(calc=[], maze=['--n_head=4'], sudoku=['--n_head=4', '--block_size=64'])    # of tasks


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(Figure, 'savefig', lambda *args, **how: None)


@pytest.mark.parametrize('command', ALONE)
def test_each_file_shows_its_concept(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    script, *args = command.split()
    assert re.search(ALONE[command], finished(*args, script=script))


def configs():
    return sorted(path.stem for path in Path(ROOT, 'config').glob('*.py'))


@pytest.mark.parametrize('name', [name for name in configs() if 'ouro' not in name])
def test_each_config_trains(folder, monkeypatch, name):
    """Of a task on its task, and of a text on a small one. test_zoo.py trains Ouro's two stages."""
    monkeypatch.chdir(folder)
    path = f'{ROOT}/config/{name}.py'
    args = [path, *SHORT, f'--out_dir=out-{name}', *FLAGS.get(name, ON_BOOK)]
    if name == 'kxl':
        args.remove('--eval_loops=[1,2]')
    assert f'python sample.py --out_dir=out-{name}' in finished(*args)


# the pages ----------------------------------------------------------------------------------------

def pages():
    return ['README.md', 'exercises.md', *sorted(glob.glob('results/*.md', root_dir=ROOT))]


def test_links_of_the_pages():
    """Files that the pages name are there, and so are the headings that they point to."""
    for page in pages():
        folder = os.path.dirname(os.path.join(ROOT, page))
        text = Path(ROOT, page).read_text(encoding='utf-8')
        for file, heading in re.findall(r'\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)', text):
            target = os.path.join(folder, file) if file else os.path.join(ROOT, page)
            assert os.path.exists(target), (page, file)
            if heading:
                headings = re.findall(r'^#+ (.*)', Path(target).read_text(encoding='utf-8'), re.M)
                known = [re.sub(r'[^\w\- ]', '', words.lower()).replace(' ', '-')
                         for words in headings]
                assert heading in known, (page, file, heading)


# imports, and a fork of the core ------------------------------------------------------------------

def imports(file):
    """The modules that a file of the project imports, lazy imports included; `from` with names."""
    tree = ast.parse(Path(ROOT, file).read_text(encoding='utf-8'))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f'{node.module}.{alias.name}' for alias in node.names))


def test_imports_point_one_way():
    """The core imports torch and numpy, common/ nothing above it, only plots.py matplotlib."""
    root = glob.glob('*.py', root_dir=ROOT)
    files = [file for folder in ('common', 'config', 'page', 'zoo')
             for file in glob.glob(f'{folder}/**/*.py', root_dir=ROOT, recursive=True)]
    found = {file: {name.split('.')[0] for name in imports(file)} for file in root + files}
    assert [file for file, names in found.items() if 'matplotlib' in names] == ['common/plots.py']
    above = {file.removesuffix('.py') for file in root} | {'config', 'page', 'zoo'}
    assert above > {'model', 'loops', 'train', 'data'} and 'common/checkpoint.py' in found
    assert not {file: names & above for file, names in found.items()
                if file.startswith('common/') and names & above}
    assert not {file for file in root if found[file] & {'zoo', 'results', 'page'}}
    core = {'model', 'loops', 'exits', 'cache', 'decode'}
    others = {'torch', 'numpy', 'common'} | sys.stdlib_module_names
    assert not [name for name in core if found[f'{name}.py'] - core - others]


CORE_ALONE = """
import torch
from exits import make_exit
from model import GPT, GPTConfig
model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=3, n_head=1, n_embd=8, groups=[[1]]))
idx, trace = torch.arange(8)[None], []
model(idx, idx)[1].backward()
model.eval()(idx, exit=make_exit('accel', 1.0), trace=trace)
assert 1 < trace[0]['steps_used'].float().mean() < 30
"""


def test_four_files_stand_alone(tmp_path):
    """In an empty folder the core trains and exits."""
    for file in ('model.py', 'loops.py', 'exits.py', 'cache.py'):
        shutil.copy(os.path.join(ROOT, file), tmp_path)
    subprocess.run([sys.executable, '-c', CORE_ALONE], cwd=tmp_path, check=True)
