"""Bad input: status 2, one line that begins with `error:`, and no file is touched."""
import os
from pathlib import Path

import pytest
from conftest import TINY, files_in, finished, make_book, refused

import data

# scripts, flags and a word of the message, in a folder with a run of `book` in out/
REFUSED = [
    # a command line
    ('train.py', '--batch_sise=4', 'batch_size'),
    ('train.py', '--device=tpu', 'tpu'),
    # numbers out of their range
    ('train.py', '--overwrite --out_dir=out --eval_interval=0', 'eval_interval'),
    ('train.py', '--grad_clip=-1', 'grad_clip'),
    ('train.py', '--eval_loops=[[2],2.5]', 'whole'),
    # the shape of a model
    ('train.py', '--groups=[[9]]', 'groups'),
    ('train.py', '--eval_loops=[0]', 'eval_loops'),
    ('train.py', '--model_class=zoo.ouro:Oro', 'MODULE:CLASS'),
    ('train.py', '--model_class=zoo.ouro:Ouro --groups=all --mlp_witdh=8', 'mlp_width'),
    # data
    ('train.py', '--dataset=boook', "'book'"),
    ('train.py', '--dataset=calc:p=1', 'at least 2'),
    ('train.py', '--block_size=100000', 'block_size'),
    # the folder of a run, and checkpoints
    ('train.py', '--out_dir=out', '--overwrite'),
    ('train.py', '--resume --out_dir=out --max_iters=1', 'max_iters'),
    ('train.py', '--resume --out_dir=out --dataset=other', '--init_from'),
    ('train.py', '--resume --out_dir=out --optimizer=adamw', 'optimizer'),
    ('train.py', '--resume --out_dir=out --n_embd=32', 'changed'),
    ('train.py', '--resume --out_dir=weights', 'alone'),
    ('train.py', '--init_from=damaged', 'damaged'),
    ('train.py', '--init_from=out --dataset=calc', 'calc'),
    ('train.py', '--eval_only --out_dir=out --block_size=32', 'changed'),
    ('train.py', '--eval_only --out_dir=out --n_layer=99', 'n_layer'),
    ('sample.py', '--out_dir=nowhere', 'nowhere'),
    ('sample.py', '--out_dir=out --exit=zoo.ouro:gate', 'gate_logit'),
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


@pytest.mark.parametrize('script, flags, word', REFUSED)
def test_bad_input(script, flags, word):
    others = []
    if script == 'train.py' and '--resume' not in flags and '--eval_only' not in flags:
        others = [*TINY, '--out_dir=new']
    if '--init_from=' in flags:
        others = ['--dataset=book', '--out_dir=new', '--max_iters=1']
    before = files_in('.')
    line = refused(*others, *flags.split(), script=script)
    assert line.startswith('error: ') and word in line
    assert files_in('.') == before
