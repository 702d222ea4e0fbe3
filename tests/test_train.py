import contextlib
import csv
import io
import math
import os
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import train
from model import load_checkpoint

ROOT = os.path.dirname(os.path.abspath(train.__file__))
TINY = ['--dataset=book', '--n_layer=4', '--n_embd=16', '--n_head=2', '--groups=[[1],[2]]', '--block_size=16', '--batch_size=4', '--max_iters=12',
        '--eval_interval=5', '--eval_windows=7', '--eval_loops=[1,3]', '--log_interval=4', '--keep_iters=[0,3]', '--device=cpu']


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    data.make('book', 'book.txt')


def run(*args, script='train.py'):
    """The script as __main__, in this process: stdout, stderr and returncode as subprocess.run has them (test_cli.py runs the real thing)."""
    out, error, code, before = io.StringIO(), io.StringIO(), 0, sys.argv
    sys.argv = [script, *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            runpy.run_path(os.path.join(ROOT, script), run_name='__main__')
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = before
    return SimpleNamespace(stdout=out.getvalue(), stderr=error.getvalue(), returncode=code)


def weights(path):
    return load_checkpoint(path)[0].state_dict()


def test_learning_rate():
    assert math.isclose(train.lr_at(0), train.learning_rate / train.warmup_iters)
    assert math.isclose(train.lr_at(train.warmup_iters), train.learning_rate)
    assert math.isclose(train.lr_at((train.warmup_iters + train.max_iters) // 2), (train.learning_rate + train.min_lr) / 2, rel_tol=1e-2)
    assert math.isclose(train.lr_at(train.max_iters), train.min_lr) and train.lr_at(10 ** 9) == train.min_lr


def test_decay_on_matrices_only(tiny):
    matrices, vectors = train.make_optimizer(tiny(bias=True)).param_groups
    assert all(p.dim() == 2 for p in matrices['params']) and all(p.dim() == 1 for p in vectors['params'])
    assert (matrices['weight_decay'], vectors['weight_decay']) == (train.weight_decay, 0.0)


def test_evaluate_is_the_mean_over_counted_windows(tiny):
    model, tokens = tiny(), np.random.default_rng(0).integers(50, size=165).astype('<u2')      # ten windows of 16, four tokens over
    losses = train.evaluate(model, tokens, 10, [1, 4], 'cpu', torch.no_grad(), batch=3)
    model.eval()
    for n_loop, loss in losses.items():
        x, y = data.windows(tokens, range(0, 160, 16), 16)
        assert math.isclose(loss, model(x, y, n_loop=n_loop)[1].item(), rel_tol=1e-5)


def test_a_run_from_end_to_end():
    done = run(*TINY)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == 'next: python sample.py --exit accel'
    assert 'held-out loss over 7 windows' in done.stdout and f'{(len(data.load("book")[1]) - 1) // 16} windows' in done.stdout
    assert sorted(os.listdir('out')) == ['ckpt.pt', 'ckpt_000000.pt', 'ckpt_000003.pt', 'log.csv', 'loss.png']
    rows = list(csv.DictReader(open('out/log.csv')))
    told = [line for line in lines if ' ms, ' in line]
    trained = [row for row in rows if row['loss']]
    assert [row['iter'] for row in trained] == ['0', '4', '8', '11'] and len(told) == 4
    for line, row in zip(told, trained):        # `iter 8: loss 2.912, loops 5/8, 98 ms, 7.8k tok/s, 41 s left`
        assert line.startswith(f"iter {row['iter']}: loss {float(row['loss']):.3f}, loops {row['loops']}, ") and line.endswith(' s left')
    held = [row for row in rows if row['val_loss_3']]
    assert [row['iter'] for row in held] == ['5', '10', '12'] and all(float(row['val_loss_1']) > 0 for row in held)
    checkpoint = load_checkpoint('out/ckpt.pt')[1]
    assert (checkpoint['iter_num'], checkpoint['tokenizer'], checkpoint['config']['batch_size']) == (12, 'bytes', 4)
    assert set(checkpoint['config']) >= {'dataset', 'groups', 'seed', 'learning_rate', 'device'}


def test_nothing_but_the_seed_matters():
    """Two runs agree; evaluation, logging and kept weights disturb nothing; the seed and the data order do."""
    for name, more in dict(a=[], b=['--eval_interval=100', '--log_interval=100', '--keep_iters=[]', '--eval_loops=[2]'], c=['--seed=7']).items():
        assert run(*TINY, f'--out_dir=out-{name}', *more).returncode == 0
    a, b, c = (weights(f'out-{name}/ckpt.pt') for name in 'abc')
    assert all(torch.equal(a[k], b[k]) for k in a) and not torch.equal(a['wte.weight'], c['wte.weight'])


def test_accumulated_gradients_train():
    done = run(*TINY, '--gradient_accumulation_steps=2', '--grad_clip=0.0', '--dtype=bfloat16', '--dropout=0.1', '--max_iters=4')
    assert done.returncode == 0, done.stderr


def test_loss_falls():
    assert run(*TINY, '--max_iters=150', '--learning_rate=5e-3', '--warmup_iters=10', '--eval_interval=1000').returncode == 0
    losses = [float(row['loss']) for row in csv.DictReader(open('out/log.csv')) if row['loss']]
    assert losses[0] > 5 and losses[-1] < 2.5


@pytest.mark.parametrize('args, words', [
    (['--groups=[[1],[1,2]]'], 'groups overlap'), (['--groups=[[9]]'], 'out of range'), (['--groups=[[1,3]]'], 'must follow one another'),
    (['--groups=[[]]'], 'at least one in it'), (['--n_head=3'], 'not divisible by n_head = 3'), (['--block_size=100000'], 'longer than the'),
    (['--dataset=nothing'], 'python data.py nothing --path=TEXT'), (['--device=tpu'], "device 'tpu' is not available"), (['--dtype=int8'], "unknown dtype 'int8'"),
    (['--vocab_size=100'], 'less than the 257 tokens'), (['--learning_rte=1'], "did you mean 'learning_rate'"), (['--injection=mul'], "unknown injection 'mul'"),
    (['--eval_loops=[0]'], 'eval_loops'), (['--max_iters=0'], 'max_iters'), (['--batch_size=-1'], 'batch_size'), (['--log_interval=0'], 'log_interval')])
def test_bad_input_is_one_line_and_loses_nothing(args, words):
    os.mkdir('out')
    open('out/ckpt.pt', 'w').write('what was there before')
    done = run(*TINY, *args)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and words in done.stderr, done.stderr
    assert open('out/ckpt.pt').read() == 'what was there before'
