"""Bad input: status 2, one line that begins with `error:`, and no file is touched."""
import os
from pathlib import Path

import pytest
from conftest import TINY, finished, make_book, run

import data

# scripts and flags, in a folder with a run of `book` in out/
REFUSED = [
    # a command line
    ('train.py', ['--batch_sise=4']),
    ('train.py', ['--device=tpu']),
    # numbers out of their range
    ('train.py', ['--overwrite', '--out_dir=out', '--eval_interval=0']),
    ('train.py', ['--learning_rate=inf']),
    ('train.py', ['--grad_clip=-1']),
    ('train.py', ['--eval_loops=[]']),
    ('train.py', ['--eval_loops=[[2],2.5]']),
    # the shape of a model
    ('train.py', ['--groups=[[9]]']),
    ('train.py', ['--eval_loops=[0]']),
    ('train.py', ['--model_class=zoo.ouro:Oro']),
    ('train.py', ['--model_class=zoo.ouro:Ouro', '--groups=all', '--mlp_witdh=8']),
    ('model.py', ['--groups=[[1],[1]]']),
    # data
    ('train.py', ['--dataset=boook']),
    ('train.py', ['--dataset=calc:p=1']),
    ('train.py', ['--block_size=100000']),
    # the folder of a run, and checkpoints
    ('train.py', ['--out_dir=out']),
    ('train.py', ['--resume', '--out_dir=out', '--max_iters=1']),
    ('train.py', ['--resume', '--out_dir=out', '--dataset=other']),
    ('train.py', ['--resume', '--out_dir=out', '--optimizer=adamw']),
    ('train.py', ['--resume', '--out_dir=out', '--n_embd=32']),
    ('train.py', ['--resume', '--out_dir=weights']),
    ('train.py', ['--init_from=damaged']),
    ('train.py', ['--init_from=out', '--n_embd=32']),
    ('train.py', ['--init_from=out', '--dataset=calc']),
    ('train.py', ['--eval_only', '--out_dir=out', '--block_size=32']),
    ('train.py', ['--eval_only', '--out_dir=out', '--n_layer=99']),
    ('sample.py', ['--out_dir=nowhere']),
    ('sample.py', ['--out_dir=out', '--length=32']),
    ('sample.py', ['--out_dir=out', '--exit=zoo.ouro:gate']),
]


@pytest.fixture(scope='module', autouse=True)
def folder(tmp_path_factory):
    before = os.getcwd()
    folder = tmp_path_factory.mktemp('refused')
    os.chdir(folder)
    make_book()
    Path('other.txt').write_text('another text ' * 500)
    data.make('other', 'other.txt')
    finished(*TINY, '--max_iters=2')
    for name, source in dict(damaged='out/ckpt.pt', weights='out/ckpt_best.pt').items():
        os.makedirs(name)
        content = Path(source).read_bytes()
        Path(name, 'ckpt.pt').write_bytes(content[:2000] if name == 'damaged' else content)
    yield
    os.chdir(before)


def snapshot():
    """All files below this folder, and when they were last changed."""
    return {path: path.stat().st_mtime_ns for path in Path('.').rglob('*') if path.is_file()}


@pytest.mark.parametrize('script, flags', REFUSED, ids=lambda value: ' '.join(value)
                         if isinstance(value, list) else value)
def test_bad_input(script, flags):
    others = []
    if script == 'train.py' and not {'--resume', '--eval_only'} & set(flags):
        others = [*TINY, '--out_dir=new']
    if any(flag.startswith('--init_from=') for flag in flags):
        others = ['--dataset=book', '--out_dir=new', '--max_iters=1']
    before = snapshot()
    done = run(*others, *flags, script=script)
    assert done.returncode == 2, done
    *_, line = done.stderr.splitlines()
    assert done.stderr.count('error: ') == 1 and line.startswith('error: ')
    assert 'Traceback' not in done.stderr
    assert snapshot() == before
