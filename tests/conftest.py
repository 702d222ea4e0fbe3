"""What the tests share: a small model, its tokens, thresholds, and ways to run a script."""
import contextlib
import hashlib
import io
import os
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ['HF_HUB_OFFLINE'] = '1'      # no test reaches for the network
torch.set_num_threads(1)                # these shapes are so small that a second thread only waits

import data  # noqa: E402
import decode  # noqa: E402
import exits  # noqa: E402
import model  # noqa: E402
import tasks  # noqa: E402
from cache import make_cache  # noqa: E402
from common.checkpoint import class_of, read_checkpoint  # noqa: E402
from common.files import read_csv  # noqa: E402
from loops import Plan  # noqa: E402

# The rules that come with exits.py, and for each a threshold at which the tokens of the tiny model
# stop at different steps. Tests go through these names and not through EXITS, so that a rule that
# you add there needs no row here.
TAUS = dict(norm=0.3, norm_rel=0.08, kl=3e-4, accel=0.3, accel_hat=0.65, accel_rel=0.08)

# a run of seconds, with two groups
TINY = [
    '--dataset=book', '--n_layer=4', '--n_embd=16', '--n_head=2', '--groups=[[1],[2]]',
    '--block_size=16', '--batch_size=4', '--max_iters=12', '--eval_interval=5', '--eval_windows=7',
    '--eval_loops=[1,3]', '--log_interval=4', '--keep_iters=[0,3]', '--device=cpu']


# are tensors, or dicts of them, equal bit for bit? It says which are not
check_bits = partial(torch.testing.assert_close, rtol=0, atol=0)


def pytest_addoption(parser):
    parser.addoption('--model_class', help='MODULE:CLASS of a fork, in place of model.GPT: '
                     'python -m pytest tests/test_wake.py --model_class=mine:Mine')


def pytest_configure(config):
    """Before a test file imports GPT. The class may stand in a file of the current folder."""
    name = config.getoption('--model_class')
    if name:
        sys.path.append(os.getcwd())
        try:
            model.GPT = class_of(name, named=True)
        except ValueError as error:
            raise pytest.UsageError(f'--model_class: {error}') from error
        model.GPTConfig = model.GPT.Config


def make_book():
    """The data set `book`, 17,000 tokens, in the current folder."""
    Path('book.txt').write_text(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    data.make('book', 'book.txt')


def make_fineweb(folder, *parts):
    """A folder of FineWeb's layout, with a file for each of these lists of texts."""
    datasets = pytest.importorskip('datasets')
    files = Path(folder, 'sample', '10BT')
    files.mkdir(parents=True)
    for i, texts in enumerate(parts):
        columns = dict(text=texts, language=['en'] * len(texts), token_count=[3] * len(texts))
        datasets.Dataset.from_dict(columns).to_parquet(str(files / f'{i:03}_00000.parquet'))
    Path(folder, 'README.md').write_text(
        '---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n'
        '    path: sample/10BT/*\n---\n')


def run(*args, script='train.py'):
    """
    A script as __main__ in this process -> stdout, stderr and returncode, as subprocess.run has
    them. It saves the start of a process; test_cli.py runs the real thing.
    """
    out, error, code = io.StringIO(), io.StringIO(), 0
    before = set(sys.modules)
    try:
        with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(error),
              mock.patch.object(sys, 'argv', [script, *args])):
            runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        # scripts and config files, which are modules without a __spec__; the next ones are others
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], '__spec__', name) is None:
                del sys.modules[name]
    return SimpleNamespace(stdout=out.getvalue(), stderr=error.getvalue(), returncode=code)


def finished(*args, script='train.py'):
    """A script that must come to its end -> what it printed."""
    done = run(*args, script=script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*args, script='train.py'):
    """A script that must end in one line with status 2 -> the line."""
    done = run(*args, script=script)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done
    return done.stderr


def files_in(folder):
    """{path: bytes} of all files below a folder."""
    return {str(path): path.read_bytes() for path in Path(folder).rglob('*') if path.is_file()}


def log_of(out_dir):
    """The rows of a run's log, without times."""
    rows = read_csv(os.path.join(out_dir, 'log.csv'))
    times = 'dt_ms', 'tokens_per_s'
    return [{key: row[key] for key in row if key not in times} for row in rows]


def digest(arrays):
    """The start of the sha256 of some arrays."""
    return hashlib.sha256(b''.join(a.astype('<i8').tobytes() for a in arrays)).hexdigest()[:12]


def same(a, b):
    """Are two values of a checkpoint equal, tensors bit for bit?"""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def differences(a, b):
    """What differs between the runs in two folders, except knobs and times."""
    one, other = (read_checkpoint(folder) | dict(config=None, path=None, folder=None,
                                               log=log_of(folder))
                  for folder in (a, b))
    return [key for key in one if not same(one[key], other[key])]


def exit_by_hand(f, x, k_max, rule, read=None):
    """
    What a rule means for one token alone, x (C,), in plain steps. f(x, k) is its step k.
    Returns its state, the loop steps kept, and the block maps evaluated.
    """
    memo, small = None, []
    for k in range(1, k_max + 1):
        x1 = f(x, k)
        value, memo = rule.signal(x, x1, memo, read)
        small.append(bool(value < rule.tau))
        if len(small) >= rule.hits and all(small[-rule.hits:]):
            return (x1, k, k) if rule.keep else (x, k - 1, k)
        x = x1
    return x, k_max, k_max


def loop(f, x, k_max, rule, read=None):
    """
    exits.loop around a block map f(x, k) of all tokens, and a read of all, (B, T, C) each -> the
    state, and the counts as tensors.
    """
    shape = x.shape

    def f_at(x, k, at):
        return f(x.view(shape), k).flatten(0, 1)[at]

    def logits_at(states, at, x):
        x = x.clone()
        x[at] = states
        return read(x.view(shape)).flatten(0, 1)[at]

    x, *counts = exits.loop(f_at, x, k_max, rule, logits_at)
    return x, *map(torch.from_numpy, counts)


def check_awake_alone(model, idx, rule):
    """Are tokens that are awake the same, computed alone and, with a cache that is given, all?"""
    logits, _, evals = decode.read(model, idx, Plan([60], rule))
    cache = make_cache(model, [60], 'latest')
    wanted, _, wanted_evals = decode.read(model, idx, Plan([60], rule, cache=cache))
    assert torch.equal(evals, wanted_evals)
    assert evals.float().std() > 0, 'some should sleep'
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture
def tiny():
    """
    tiny(kind=GPT, **changes): a small model in evaluation, its weights from a fixed seed.
    The weights of its norms are not all 1, so that a norm in the wrong place shows.
    """
    def build(seed=0, kind=None, **changes):
        torch.manual_seed(seed)
        kind = kind or model.GPT
        args = dict(block_size=16, vocab_size=50, n_layer=5, n_head=2, n_embd=16,
                    groups=[[1], [2, 3]], mean_recurrence=3)
        built = kind(kind.Config(**args | changes))
        for p in built.parameters():
            if p.dim() == 1:
                torch.nn.init.normal_(p, 1.0, 0.1)
        return built.eval()
    return build


@pytest.fixture(scope='session')
def sums_run(tmp_path_factory):
    """
    The folder of a run that has learnt sums modulo 2, out/ckpt.pt: what a label needs comes through
    up to eleven tokens before it, and moves on by one or two of them a loop step.
    """
    folder = tmp_path_factory.mktemp('sums')
    with contextlib.chdir(folder), mock.patch.object(tasks.Problems, 'n_problems', 64):
        finished(os.path.join(ROOT, 'config', 'calc.py'), '--dataset=calc:p=2,reset=0.1',
                 '--block_size=12', '--window=None', '--n_embd=32', '--mean_recurrence=4',
                 '--bptt_k=4', '--batch_size=32', '--max_iters=200', '--learning_rate=1e-2',
                 '--warmup_iters=20', '--eval_windows=16', '--eval_interval=500',
                 '--eval_loops=[1,12]', '--keep_iters=[]', '--device=cpu', '--out_dir=out')
    return folder


@pytest.fixture(scope='session')
def whole(tmp_path_factory):
    """The out_dir of a run of TINY that was never stopped, and what it printed. Read only."""
    folder = tmp_path_factory.mktemp('whole')
    with contextlib.chdir(folder):
        make_book()
        printed = finished(*TINY)
        Path('out', 'printed.txt').write_text(printed)
    return folder / 'out'


@pytest.fixture(scope='module')
def run_folder(whole, tmp_path_factory):
    """The folder of that run, with its data and out/ckpt.pt: a copy for the tests of one file."""
    return shutil.copytree(whole.parent, tmp_path_factory.mktemp('copy') / 'run')


@pytest.fixture
def here(run_folder, monkeypatch):
    """In that folder."""
    monkeypatch.chdir(run_folder)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A user's folder: what the clone has, a text, and a data set `book` of it."""
    folder = tmp_path_factory.mktemp('user')
    for name in 'pretrained', 'config', 'zoo', 'results':
        shutil.copytree(os.path.join(ROOT, name), folder / name)
    with contextlib.chdir(folder):
        make_book()
    return folder


@pytest.fixture
def idx():
    """Three rows of 16 tokens."""
    return torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(1))
