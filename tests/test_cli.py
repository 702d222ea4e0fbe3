"""The commands of the README, run as a user runs them, in order and in one folder, each made small by flags behind it."""
import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys

import conftest
import numpy as np
import pytest
from conftest import ROOT
from test_data import parquet

SMALL = {
    'train.py': ['--dataset=book', '--n_layer=8', '--n_embd=16', '--n_head=2', '--block_size=16', '--batch_size=2', '--max_iters=4', '--warmup_iters=1',
                 '--mean_recurrence=3', '--eval_interval=2', '--eval_windows=4', '--eval_loops=[1,2]', '--keep_iters=[0]', '--out_dir=out'],
    'data.py': ['--tokenizer=bytes', '--tokens=2K', '--val_fraction=0.1'],
    'sample.py': ['--max_new_tokens=6'],
    'geometry.py': ['--n_loop=5', '--n_windows=2', '--most_loops=2'],
    'bench.py': ['--taus=[1e-2]', '--more_taus=[]', '--budgets=[1]', '--epsilons=[]', '--n_loop=4', '--n_windows=2', '--rounds=1', '--timed_tokens=2', '--checks=False'],
    'claims.py': ['--dataset=book', '--minutes=1e-9'],
    'tests/decode_speed.py': ['--only=products', '--rounds=1', '--new_tokens=2', '--compile=False'],
    'tests/loop_cost.py': ['--rounds=2', '--iters=1', '--batch_size=1', '--block_size=8'],
}


def commands():
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
        blocks = re.findall(r'```bash\n(.*?)```', f.read(), re.S)
    lines = [line.split('#')[0].strip() for block in blocks for line in block.splitlines()]
    elsewhere = ('pip install', 'torchrun', 'tests/kills.py', '--only_table')       # .ci/run; test_train.py; test_claims.py
    return [line for line in lines if line and not any(word in line for word in elsewhere)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('user')
    (folder / 'book.txt').write_text('The quick brown fox jumps over the lazy dog. ' * 100)
    (folder / 'prompt.txt').write_text('The quick brown')
    os.symlink(os.path.join(ROOT, 'config'), folder / 'config')
    parquet(folder / 'web' / 'sample' / '10BT', [f'Web page {i}. ' * 5 for i in range(60)], '000_00000')
    os.makedirs(folder / 'nanoGPT/data/openwebtext')
    for split in ('train', 'val'):
        np.arange(200, dtype='<u2').tofile(folder / f'nanoGPT/data/openwebtext/{split}.bin')
    (folder / 'web' / 'README.md').write_text('---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n')
    return folder


started = set()     # the scripts that have run as a process of their own


def run(folder, command, *more):
    """A command in the folder: as a user's the first time, in this process from then on, which saves the start."""
    script, *args = shlex.split(command)[1:]
    if script in started:
        with contextlib.chdir(folder):
            return conftest.run(*args, *more, script=script)
    started.add(script)
    return subprocess.run([sys.executable, os.path.join(ROOT, script), *args, *more], cwd=folder, capture_output=True, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS='1'))


def test_readme(folder):
    assert len(commands()) >= 10
    run(folder, 'python data.py book --path=book.txt')
    run(folder, 'python train.py', *SMALL['train.py'])
    for command in commands():
        for part in command.split(' && '):
            assert part.startswith('python '), part
            script = part.split()[1]
            more = [flag for flag in SMALL[script] if not ('--out_dir' in flag and '--out_dir' in part)] + (['--path=web'] if 'data.py fineweb' in part else [])
            done = run(folder, part, *more)
            assert done.returncode == 0, (part, done.stderr)
            if script == 'train.py':
                assert 'next: python sample.py' in done.stdout, part
            if script == 'sample.py':
                assert 'tokens/s' in done.stdout, part


def test_sample_prints_text_speed_and_steps(folder):
    run(folder, 'python data.py book --path=book.txt')
    run(folder, 'python train.py --groups=[[1],[2,3]]', *SMALL['train.py'])
    os.rename(folder / 'data', folder / 'data-away')        # it needs only the checkpoint
    plain, again, other = (run(folder, f'python sample.py --start=FILE:prompt.txt --exit accel --tau=0.1 --seed={seed}', *SMALL['sample.py']).stdout
                           for seed in (1, 1, 2))
    assert plain.startswith('The quick brown') and re.search(r'--- [\d.]+ tokens/s; mean loop steps [\d.]+ in group \[1\], [\d.]+ in group \[2, 3\] of at most 30', plain)
    assert plain.split('---')[0] == again.split('---')[0] != other.split('---')[0]
    shown = run(folder, 'python sample.py --start=The --show_steps --n_loop=[1,5] --num_samples=2', *SMALL['sample.py']).stdout
    assert shown.count('1.00 in group [1], 5.00 in group [2, 3]') == 2 and '\x1b[48;5;25m' in shown and 'loop steps, mean over the groups, from:' in shown
    long = run(folder, 'python sample.py --start=' + 'x' * 40, *SMALL['sample.py'])
    assert long.returncode == 0 and 'the prompt has 40 tokens: its last 16 (block_size) are used' in long.stdout
    greedy = {run(folder, f'python sample.py --temperature=0 --seed={seed}', *SMALL['sample.py']).stdout.split('---')[0] for seed in (1, 2)}
    assert len(greedy) == 1
    for more in ('--cache=ring --ring=2', '--cache=latest', '--cache=None', '--warm_start', '--temperature=0 --n_loop=4 --draft_loops=1'):
        assert 'tokens/s' in run(folder, 'python sample.py ' + more, *SMALL['sample.py']).stdout, more
    os.rename(folder / 'data-away', folder / 'data')


@pytest.mark.parametrize('args, words', [
    ('--exit=acel', 'unknown exit rule'), ('--exit=accel --tau=-1', 'tau must be a number >= 0'), ('--exit=accel --tau=nan', 'tau'),
    ('--out_dir=nowhere', 'no checkpoint at'), ('--start=FILE:nowhere.txt', "cannot read the prompt file 'nowhere.txt'"), ('--num_samples=0', 'num_samples'), ('--n_loop=0', 'n_loop must be'),
    ('--max_new_tokens=0', 'max_new_tokens'), ('--cache=newest', 'unknown cache policy'), ('--cache=ring --ring=0', 'at least 1 slot'),
    ('--temperature=0 --draft_loops=30 --n_loop=30', 'draft_loops must'), ('--draft_loops=1', 'greedily'), ('--temperature=-1', 'temperature'), ('--top_k=0', 'top_k'), ('--device=tpu', 'not available')])
def test_sample_bad_input(folder, args, words, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, 'argv', ['sample.py', *args.split()])
    with pytest.raises(SystemExit, match='2'):
        runpy.run_path(os.path.join(ROOT, 'sample.py'), run_name='__main__')
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and words in error
