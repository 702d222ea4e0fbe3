"""
The commands of README.md and of the pages in results/, run as a user runs them: in order, in one
folder, each made small by flags behind it. And the files of config/ that they do not name.
"""
import ast
import contextlib
import csv
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from unittest import mock

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, make_fineweb
from matplotlib.figure import Figure
from test_llama import write_gguf

from common import plots
from model import CausalSelfAttention

SMALL = {
    'train.py': [
        '--dataset=book', '--n_layer=8', '--n_embd=16', '--n_head=2', '--block_size=16',
        '--batch_size=2', '--max_iters=4', '--warmup_iters=1', '--mean_recurrence=3',
        '--eval_interval=2', '--eval_windows=4', '--eval_loops=[1,2]', '--keep_iters=[0]'],
    'data.py': ['--tokenizer=bytes', '--val_fraction=0.1'],
    'sample.py': ['--max_new_tokens=6'],
    'geometry.py': ['--n_loop=5', '--n_windows=2'],
    'bench.py': [
        '--taus=[1e-2]', '--budgets=[1]', '--n_loop=4', '--n_windows=16',
        '--n_prompts=1', '--new_tokens=4', '--waves=[[2,1]]'],
    'tasks.py': ['--rows=20'],
    'page/__main__.py': ['--n_loop=3', '--start=The'],
    'model.py': [], 'loops.py': [], 'exits.py': [], 'cache.py': [],
    'decode/__main__.py': ['--max_new_tokens=2', '--n_loop=3'],
    'decode/wave.py': ['--max_new_tokens=3'],
    'zoo/etd.py': ['--n_windows=2', '--loops=[1,2]'],
    'zoo/llama.py': ['--path=tiny.gguf'],
}

# words of the commands that are run elsewhere, and where
ELSEWHERE = {
    'pip install': '.ci/run runs them, in a checkout without packages',
    'pytest': 'these are the tests',
    'torchrun': 'test_train.py starts two processes; several machines are not to be had',
    '--path=FOLDER': 'test_zoo.py reads such folders',
    'zoo.huginn:kl': 'test_zoo.py',
    'out-zoo': 'half an hour; test_llama.py has smaller cuts',
    'bash results/zoo.sh': 'the same',
    'results/switch.py': 'test_make_it_yours has this task',
}


def pages():
    return ['README.md', *sorted(glob.glob('results/*.md', root_dir=ROOT))]


def commands():
    """Those of the pages, in order, each once, without their comments."""
    lines = []
    for page in pages():
        with open(os.path.join(ROOT, page), encoding='utf-8') as f:
            blocks = re.findall(r'```bash\n(.*?)```', f.read(), re.S)
        lines += [line.split('#')[0].strip() for block in blocks for line in block.splitlines()]
    lines = [line for line in lines if line and not any(word in line for word in ELSEWHERE)]
    # in a sentence of README.md
    lines += ['python model.py config/groups.py',
              *(f'python {name}.py' for name in ('loops', 'exits', 'cache')),
              'python -m decode', 'python -m decode.wave']
    # the other configs, on top of the paper's, as they are meant to be used
    lines += [f'python train.py config/groups.py config/{name} --out_dir=out-{name[:-3]}'
              for name in sorted(os.listdir(os.path.join(ROOT, 'config')))
              if name not in ' '.join(lines)]
    return [command for line in dict.fromkeys(lines) for command in line.split(' && ')]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A user's folder: texts, FineWeb and nanoGPT's tokens in small, and a first training run."""
    folder = tmp_path_factory.mktemp('user')
    (folder / 'book.txt').write_text('The quick brown fox jumps over the lazy dog. ' * 100)
    (folder / 'prompt.txt').write_text('The quick brown')
    os.symlink(os.path.join(ROOT, 'config'), folder / 'config')

    make_fineweb(folder / 'web', [f'Web page {i}. ' * 5 for i in range(60)])
    tokens = folder / 'nanoGPT' / 'data' / 'openwebtext'
    tokens.mkdir(parents=True)
    for split in ('train', 'val'):
        np.arange(200, dtype='<u2').tofile(tokens / f'{split}.bin')

    run(folder, 'python data.py book --path=book.txt')
    run(folder, 'python train.py')
    return folder


def run(folder, command, project=ROOT):
    """
    A command made small, in the folder -> what it printed. It runs in this process, which saves
    seconds of imports, and without its PNGs, which other tests draw.
    """
    python, *words = shlex.split(command)
    assert python == 'python', command
    if words[0] == '-m':
        module = words[1].replace('.', '/')
        words[:2] = [module + ('/__main__.py' if os.path.isdir(f'{ROOT}/{module}') else '.py')]
    script, *args = words
    args += SMALL[script]
    if 'data.py fineweb' in command:
        args.append('--tokens=2K')
    if re.search('out-calc|pretrained/(calc|maze)', command):   # flags of text are refused there
        args = [arg for arg in args if arg not in ('--max_new_tokens=6', '--start=The')]
    if 'smollm2' in command or 'zoo.llama' in command:
        pytest.importorskip('gguf')
        if not os.path.exists(folder / 'tiny.gguf'):
            write_gguf(folder / 'tiny.gguf')
        args = [arg.replace('[12,13,14,15]', '[1,2]') for arg in args]      # it has four layers
    # the model of this folder in place of the one that comes with the code
    args = [arg.replace('pretrained/text/ckpt.pt', 'out/ckpt.pt') for arg in args]
    if '--eval_only' in command:        # the shape is that of the run
        args = [*words[1:], '--eval_windows=4', '--eval_loops=[1,2]']
    if '--calibrate' in command:        # each rule takes seconds
        args.append("--rules=['accel']")
    if '--calibrate' in command:        # it measures windows alone
        args = [arg for arg in args if not arg.startswith('--n_prompts')]
    if 'config/calc.py' in command or 'tasks' in command and '--dataset=book' in args:  # no data
        args.remove('--dataset=book')
    if 'data.py fineweb' in command:
        args.append('--path=web')
    with (project_in(folder) if project != ROOT else contextlib.chdir(folder),
          mock.patch.object(Figure, 'savefig'), mock.patch.object(plots, 'movie')):
        done = conftest.run(*args, script=os.path.join(project, script))
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def test_the_pages_name_commands():
    scripts = {command.split()[1] for command in commands()}
    assert scripts >= {'train.py', 'sample.py', 'geometry.py', 'bench.py', 'data.py'}


# what a script must have printed when it has done its work, as regular expressions
LAST_WORDS = {
    'train.py': 'next: python sample.py',
    'sample.py': 'tokens/s',
    '--out_dir=out-calc': 'answers right',
    '--out_dir=pretrained/calc': 'answers right',
    '--out_dir=pretrained/maze': 'answers right',
    '--eval_only': 'eval.csv',
    'tasks.py': '20 problems: the oracle disagrees with 0',
    'zoo.etd': 'next: python train.py',
    'page': 'open it in a browser',
    'model.py': r'effective depth 56(.*\n)*.* 2,480.6 MFLOPs per token, forward and backward',
    'loops.py': 'lognormal draws at r = 4: mean [45]',
    'exits.py': r'kept +9 +16 +11 +10 +2 +16(.*\n)*algorithm_1 keeps 10',
    'cache.py': r'exact +8 +reads +1,1(.*\n)*ring.* 3,7 +4,8 +1,5',
    '-m decode': r'exact, fixed +2 of 2 +3.00(.*\n)*exact, drafts of 2 loops +2 of 2',
    # each token but the first is committed by a wave
    'decode.wave': r'\*: certain([^*]*\*){2}[^*]* 3 tokens are those of 30 fixed loops',
}


@pytest.mark.parametrize('command', commands())
def test_command(folder, command):
    printed = run(folder, command)
    words = [LAST_WORDS[word] for word in command.split()[1:3] if word in LAST_WORDS]
    assert not words or re.search(words[-1], printed)


# the pages of results/, and their scripts ---------------------------------------------------------

SCRIPTS = 'README', 'choices', 'claims', 'depth', 'gpu', 'maze', 'text', 'zoo'

# in place of python: notes its arguments, and makes the files that a program would leave
STAND_IN = '''#!/usr/bin/env bash
printf '%q ' "$@" >> "$CALLS" && echo >> "$CALLS"
for word in "$@"; do
    case $word in --out_dir=*)
        mkdir -p "${word#*=}/figures"
        touch "${word#*=}"/{bench,eval,log}.csv "${word#*=}/figures"/figure_{2,5}.csv ;;
    esac
done
'''


@pytest.fixture
def accepts(monkeypatch):
    """A function that fails if a program does not accept a command; the command is not run."""
    # results/waiting.py changes it
    monkeypatch.setattr(CausalSelfAttention, 'readers', CausalSelfAttention.readers)

    def check(words):
        with contextlib.chdir(ROOT):
            done = conftest.run(*words[1:], '--help', script=words[0])
        assert done.returncode == 0, (words, done.stderr)
    return check


@pytest.mark.parametrize('name', SCRIPTS)
def test_scripts_call_the_programs(name, accepts, tmp_path):
    shutil.copytree(os.path.join(ROOT, 'results'), tmp_path / 'results',
                    ignore=shutil.ignore_patterns('*.csv', '*.txt', '*.xz'))
    (tmp_path / 'data' / 'wiki').mkdir(parents=True)
    (tmp_path / 'data' / 'wiki' / 'meta.json').touch()      # then claims.sh has *medium*, too
    (tmp_path / 'python').write_text(STAND_IN)
    (tmp_path / 'python').chmod(0o755)
    settings = os.environ | dict(PATH=f"{tmp_path}:{os.environ['PATH']}",
                                 CALLS=str(tmp_path / 'calls'))
    subprocess.run(['bash', tmp_path / 'results' / f'{name}.sh'], env=settings, check=True)
    calls = [shlex.split(line) for line in (tmp_path / 'calls').read_text().splitlines()]
    of_programs = set()
    for words in calls:
        if words[:2] == ['-m', 'pytest']:
            continue
        if words[0] == '-m':
            words = [words[1].replace('.', '/') + '.py', *words[2:]]
        assert os.path.exists(os.path.join(ROOT, words[0]))
        # once for all seeds and folders
        if not words[0].startswith('results/'):
            of_programs.add(tuple(word for word in words if not word.startswith(
                ('--seed', '--out_dir', '--init_from', '--beside'))))
    assert of_programs
    for words in of_programs:
        accepts(words)


def test_commands_within_a_sentence(accepts):
    """The programs accept the commands that stand between backticks."""
    found = set()
    for page in pages():
        with open(os.path.join(ROOT, page), encoding='utf-8') as f:
            found |= set(re.findall(r'`(?:[A-Z_]+=\d )?python (\w+\.py [^`]*)`', f.read()))
    found = {words for words in found if words.split()[0] in SMALL and 'mine.py' not in words
             and not any(word in words for word in ('smollm2', 'injection=scale'))}
    assert len(found) > 7
    for words in found:
        accepts(shlex.split(words))


def test_links_of_the_pages():
    """Files that the pages name are there, and so are the headings that they point to."""
    for page in [*pages(), 'exercises.md']:
        folder = os.path.dirname(os.path.join(ROOT, page))
        with open(os.path.join(ROOT, page), encoding='utf-8') as f:
            links = re.findall(r'\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)', f.read())
        for file, heading in links:
            target = os.path.join(folder, file) if file else os.path.join(ROOT, page)
            assert os.path.exists(target), (page, file)
            if heading:
                with open(target, encoding='utf-8') as f:
                    headings = re.findall(r'^#+ (.*)', f.read(), re.M)
                known = [re.sub(r'[^\w\- ]', '', words.lower()).replace(' ', '-')
                         for words in headings]
                assert heading in known, (page, file, heading)


def test_verdicts_of_the_claims():
    """claims.md counts what claims/numbers.csv has."""
    with open(os.path.join(ROOT, 'results/claims/numbers.csv'), encoding='utf-8') as f:
        rows = [row for row in csv.DictReader(f) if row['trained'] == 'yes']
    with open(os.path.join(ROOT, 'results/claims.md'), encoding='utf-8') as f:
        said = dict(re.findall(r'^\| (C\w+) \| .*?\*\*true in (\d+|none)', f.read(), re.M))
    assert len(said) >= 9
    for claim, words in said.items():
        holds = [row['holds'] for row in rows if row['claim'] == claim]
        assert len(holds) == 23 and holds.count('yes') == int(words.replace('none', '0')), claim


# brackets -----------------------------------------------------------------------------------------

# a flag that zsh takes for a pattern; as no file matches it, zsh does not run the command
UNQUOTED = re.compile(r"""(?<!['"])--\w+[= ][^\s'"]*[][*?]""")


def shown(file):
    """What a user may paste: a page, or the strings and comments of a program."""
    with open(os.path.join(ROOT, file), encoding='utf-8') as f:
        source = f.read()
    if file.endswith('.md'):
        return [source]
    strings = [node.value for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return strings + re.findall('#.*', source)


@pytest.mark.parametrize('folder', [
    '', 'common', 'config', 'decode', 'page', 'pretrained', 'results', 'zoo'])
def test_brackets_are_quoted(folder):
    files = [os.path.join(folder, name) for name in os.listdir(os.path.join(ROOT, folder))
             if name.endswith(('.md', '.py'))]
    assert files and not {file: found for file in files
                          if (found := UNQUOTED.findall('\n'.join(shown(file))))}


def test_brackets_in_help_are_quoted():
    knobs = conftest.run('--help', script='bench.py').stdout.partition('\nknobs')[2]
    assert '[[' in knobs and "['" in knobs and not UNQUOTED.findall(knobs)


# imports, and a fork of the core ------------------------------------------------------------------

def imports(file):
    """The modules that a file of the project imports, lazy imports included; `from` with names."""
    with open(os.path.join(ROOT, file), encoding='utf-8') as f:
        tree = ast.parse(f.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f'{node.module}.{alias.name}' for alias in node.names))


def test_imports_point_one_way():
    """Only plots.py imports matplotlib, and common/ imports nothing that stands above it."""
    root = glob.glob('*.py', root_dir=ROOT)
    files = [file for folder in ('common', 'config', 'decode', 'page', 'zoo')
             for file in glob.glob(f'{folder}/**/*.py', root_dir=ROOT, recursive=True)]
    found = {file: {name.split('.')[0] for name in imports(file)} for file in root + files}
    assert [file for file, names in found.items() if 'matplotlib' in names] == ['common/plots.py']
    above = {file.removesuffix('.py') for file in root} | {'config', 'decode', 'page', 'zoo'}
    assert above > {'model', 'loops', 'train', 'data'} and 'common/checkpoint.py' in found
    assert not {file: names & above for file, names in found.items()
                if file.startswith('common/') and names & above}
    # no circles; model.py imports the decoders when it is asked to
    tops = {}
    for file in root + [file for file in files if file.startswith(('decode', 'page'))]:
        with open(os.path.join(ROOT, file), encoding='utf-8') as f:
            names = {*re.findall(r'^(?:from|import) ([\w.]+)', f.read(), re.M)}
        module = file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')
        tops[module] = {name for name in names if name.split('.')[0] in above}
    TopologicalSorter(tops).prepare()
    assert not {name for names in tops.values() for name in names if name.startswith('zoo')}
    # the ways of decoding are no part of training
    loaded, new = set(), {'train'}
    while new:
        loaded |= new
        new = set().union(*(tops[name] for name in new)) - loaded
    assert {'model', 'data'} < loaded and not [name for name in loaded if name.startswith('decode')]


@contextlib.contextmanager
def project_in(folder):
    """In this context the project's modules are those in another folder, and that is current."""
    names = [file.removesuffix('.py') for file in glob.glob('*.py', root_dir=ROOT)]
    names += ['common', 'decode', 'page', 'zoo']

    def take_out():
        ours = [name for name in sys.modules if name.split('.')[0] in names]
        return {name: sys.modules.pop(name) for name in ours}
    before, path = take_out(), [str(folder), *(p for p in sys.path if p not in ('', ROOT))]
    try:
        with contextlib.chdir(folder), mock.patch.object(sys, 'path', path):
            yield
    finally:
        take_out()
        sys.modules.update(before)


def test_four_files_stand_alone(tmp_path):
    """In an empty folder the core trains and exits."""
    for file in ('model.py', 'loops.py', 'exits.py', 'cache.py'):
        shutil.copy(os.path.join(ROOT, file), tmp_path)
    with project_in(tmp_path):
        from exits import make_exit
        from model import GPT, GPTConfig
        model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=3, n_head=1, n_embd=8,
                              groups=[[1]]))
        assert sys.modules['model'].__file__ == str(tmp_path / 'model.py')
        idx, trace = torch.arange(8)[None], []
        model(idx, idx)[1].backward()
        model.eval()(idx, exit=make_exit('accel', 1.0), trace=trace)
        assert 1 < trace[0]['steps_used'].float().mean() < 30


def test_use_it_from_python(monkeypatch, capsys):
    """README's program runs, and the model solves its two problems."""
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
        block = re.search(r'```python\n(import numpy.*?)```', f.read(), re.S)[1]
    monkeypatch.chdir(ROOT)
    exec(block, {})
    deep, loop_steps, own = capsys.readouterr().out.splitlines()[-3:]
    assert re.search(r'^1\.0 \d+$', deep) and loop_steps.startswith('tensor(1')
    assert own == '=2 =2 =0'


def test_make_it_yours(folder, tmp_path):
    """Parts of one's own in README and exercises, each pasted below the table of its file."""
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        '.*', 'data', 'out*', 'results', 'tests', 'assets'))
    shutil.copytree(folder / 'data' / 'book', tmp_path / 'data' / 'book')
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
        block = re.search(r'```python\n(# loops.py.*?)```', f.read(), re.S)[1]
    with open(os.path.join(ROOT, 'exercises.md'), encoding='utf-8') as f:
        block += '\n' + re.search(r'```python\n(# cache.py.*?)```', f.read(), re.S)[1].rstrip()
    with open(os.path.join(ROOT, 'results', 'switch.py'), encoding='utf-8') as f:
        switch = block[block.index('class Switch'):].split('\n\n')[0]
        assert switch.strip() in f.read()       # which depth.sh measures
    commands = []
    for part in block.split('\n\n'):
        name, command = re.match(r'# (\S+), .*: (python .*)', part).groups()
        assert len(part.splitlines()) <= 15         # a comment, a few lines and the entry
        path, table = tmp_path / name, part.splitlines()[-1].partition('[')[0]
        text = part
        if path.exists():
            text, n = re.subn(rf'(?ms)^{table} = (dict\(.*?\)|\{{.*?\}})\n\n',
                              lambda found: f'{found[0]}\n{part}\n\n', path.read_text())
            assert n == 1, table
        path.write_text(text)
        commands.append(command)
    for i, command in enumerate(commands):
        if 'train.py' in command and '--out_dir' not in command:
            command += f' --out_dir=out-{i}'
        run(tmp_path, command, tmp_path)
