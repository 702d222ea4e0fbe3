import csv
import math
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, run

import checkpoint
import data
import kills
import train
from checkpoint import load_checkpoint

TINY = ['--dataset=book', '--n_layer=4', '--n_embd=16', '--n_head=2', '--groups=[[1],[2]]', '--block_size=16', '--batch_size=4', '--max_iters=12',
        '--eval_interval=5', '--eval_windows=7', '--eval_loops=[1,3]', '--log_interval=4', '--save_interval=5', '--keep_iters=[0,3]', '--device=cpu']


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open('book.txt', 'w') as f:
        f.write(' '.join(f'{i} and {i * i} are friends;' for i in range(600)))
    data.make('book', 'book.txt')


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
    assert sorted(os.listdir('out')) == ['ckpt.old.pt', 'ckpt.pt', 'ckpt_000000.pt', 'ckpt_000003.pt', 'log.csv', 'loss.png']
    rows = list(csv.DictReader(open('out/log.csv')))
    told = [line for line in lines if ' ms, ' in line]
    trained = [row for row in rows if row['loss']]
    assert [row['iter'] for row in trained] == ['0', '4', '5', '8', '10', '11'] and len(told) == 6
    for line, row in zip(told, trained):        # `iter 8: loss 2.912, loops 5/8, 98 ms, 7.8k tok/s, 41 s left`
        assert line.startswith(f"iter {row['iter']}: loss {float(row['loss']):.3f}, loops {row['loops']}, ") and line.endswith(' s left')
    held = [row for row in rows if row['val_loss_3']]
    assert [row['iter'] for row in held] == ['5', '10', '12'] and all(float(row['val_loss_1']) > 0 for row in held)
    last = load_checkpoint('out/ckpt.pt')[1]
    assert (last['iter_num'], last['tokenizer'], last['config']['batch_size']) == (12, 'bytes', 4)
    assert set(last['config']) >= {'dataset', 'groups', 'seed', 'learning_rate', 'device'}
    assert load_checkpoint('out/ckpt.old.pt')[1]['iter_num'] == 10 and all(0 <= float(value) <= 1 for row in held for value in row['token_corr'].split('/'))
    assert '(checkpoints ' in lines[-2] and ' GB at most' in lines[-2]


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


# a run that stops and goes on -----------------------------------------------------------------------------------------

def test_killed_at_random_and_resumed():
    """SIGKILL three times: weights, optimiser state and log of the run never stopped. `python tests/kills.py --kills=20` does more."""
    assert kills.trial(3, 30, whole=lambda iters, *flags: run(*kills.SMALL, f'--max_iters={iters}', *flags)) == []


def test_a_signal_finishes_the_step_and_saves():
    """Ctrl-C; test_claims.py sends a SIGTERM."""
    process = subprocess.Popen([sys.executable, '-u', os.path.join(ROOT, 'train.py'), *TINY, '--max_iters=100000', '--log_interval=1'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith('iter 3:'):
            process.send_signal(signal.SIGINT)
            break
    told, error = process.communicate()
    last = told.splitlines()[-1]
    assert process.returncode == 0 and error == '' and last.endswith('and saved; go on with python train.py --resume'), (told, error)
    it = int(last.split()[3])
    assert load_checkpoint('out/ckpt.pt')[1]['iter_num'] == it + 1
    assert int(list(csv.DictReader(open('out/log.csv')))[-1]['iter']) == it


def test_resume_takes_the_knobs_of_its_run():
    """Longer, by hand, without naming them again: as the longer run never stopped, its learning rate at min_lr from where the first ended."""
    assert run(*TINY, '--ema=0.5').returncode == 0
    done = run('--resume', '--max_iters=20', '--log_interval=3', '--gradient_accumulation_steps=1')     # given, the same as before
    assert done.returncode == 0 and 'from iteration 12' in done.stdout, done.stderr
    assert run(*TINY, '--ema=0.5', '--max_iters=20', '--lr_decay_iters=12', '--out_dir=out-whole').returncode == 0
    a, b = (load_checkpoint(f'{name}/ckpt.pt')[1] for name in ('out', 'out-whole'))
    assert all(kills.same(a[key], b[key]) for key in ('model', 'optimizer', 'ema', 'trend', 'iter_num', 'val_loss'))
    assert all(torch.equal(weights('out/ema/ckpt.pt')[k], b['ema'][k]) for k in b['ema']) and not torch.equal(b['ema']['wpe.weight'], b['model']['wpe.weight'])
    row = list(csv.DictReader(open('out/log.csv')))[-1]
    assert row['iter'] == '20' and float(row['ema_loss_3']) > 0 and row['ema_loss_3'] != row['val_loss_3']


def test_resume_of_nothing_begins():
    assert 'no checkpoint in out yet: from the beginning' in run(*TINY, '--resume').stdout
    assert run(*TINY, '--out_dir=out-a').returncode == 0 and all(torch.equal(v, weights('out-a/ckpt.pt')[k]) for k, v in weights('out/ckpt.pt').items())


@pytest.mark.parametrize('args, words', [
    (['--batch_size=8'], 'batch_size = 8 (it was 4)'), (['--seed=1'], 'seed = 1 (it was 1337)'), (['--groups=[[1,2]]'], 'groups = [[1, 2]] (it was [[1], [2]])'),
    (['--learning_rate=1e-5'], 'learning_rate = 1e-05 (it was 0.003)'), (['--max_iters=5'], 'has 12 iterations already'), (['--dataset=other'], 'dataset = other (it was book)')])
def test_resume_refuses_another_run(args, words):
    assert run(*TINY).returncode == 0
    before = open('out/ckpt.pt', 'rb').read(), open('out/log.csv').read()
    done = run('--resume', *args)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and words in done.stderr, done.stderr
    assert before == (open('out/ckpt.pt', 'rb').read(), open('out/log.csv').read())


def test_resume_refuses_other_data_and_weights_alone():
    assert run(*TINY).returncode == 0
    open('book.txt', 'a').write('another end')
    data.make('book', 'book.txt')
    assert 'not the text that the run in out had' in run('--resume').stderr
    os.replace('out/ckpt_000003.pt', 'out/ckpt.pt'), os.remove('out/ckpt.old.pt')
    assert 'holds weights and nothing to resume' in run('--resume').stderr


def test_a_damaged_checkpoint_gives_way_to_the_one_before():
    assert run(*TINY).returncode == 0
    whole = open('out/ckpt.pt', 'rb').read()
    open('out/ckpt.pt', 'wb').write(whole[:len(whole) // 2])
    done = run('--resume')
    assert done.returncode == 0 and 'going on from out/ckpt.old.pt' in done.stdout and 'from iteration 10' in done.stdout
    assert load_checkpoint('out/ckpt.old.pt')[1]['iter_num'] == 10
    assert run(*TINY, '--out_dir=out-a').returncode == 0 and all(torch.equal(v, weights('out-a/ckpt.pt')[k]) for k, v in weights('out/ckpt.pt').items())


class Code:
    def __reduce__(self):
        return os.mkdir, ('harm',)


@pytest.mark.parametrize('args', [['--resume'], ['--init_from=out/ckpt.pt', '--out_dir=out-new']])
def test_a_checkpoint_with_code_is_refused_and_not_run(args):
    os.mkdir('out')
    torch.save(dict(model=Code(), optimizer={}), 'out/ckpt.pt')
    done = run(*TINY, *args)
    assert done.returncode == 2 and 'not a whole checkpoint' in done.stderr and done.stderr.count('\n') == 1 and not os.path.exists('harm')


def test_checkpoints_hold_plain_values():
    assert run(*TINY, '--groups=((1,),(2,))', '--ema=0.9').returncode == 0

    def plain(value):
        return all(map(plain, value.values())) if type(value) is dict else all(map(plain, value)) if type(value) is list else \
            value is None or type(value) in (torch.Tensor, int, float, bool, str)
    assert plain(torch.load('out/ckpt.pt', weights_only=True)) and plain(torch.load('out/ckpt_000003.pt', weights_only=True))


def test_a_full_disk_leaves_the_last_good_checkpoint(monkeypatch):
    save, limits = checkpoint.save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def no_room(found, path, **more):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if found['iter_num'] >= 10 else limits[0], limits[1]))     # bytes a file may have
        save(found, path, **more)
    monkeypatch.setattr(checkpoint, 'save_checkpoint', no_room)
    done = run(*TINY)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr(checkpoint, 'save_checkpoint', save)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and "cannot write 'out/ckpt.pt'" in done.stderr and 'make room, then go on with --resume' in done.stderr, done.stderr
    assert load_checkpoint('out/ckpt.pt')[1]['iter_num'] == 5 and not os.path.exists('out/ckpt.pt.tmp')
    assert run('--resume').returncode == 0 and run(*TINY, '--out_dir=out-a').returncode == 0
    assert all(torch.equal(v, weights('out-a/ckpt.pt')[k]) for k, v in weights('out/ckpt.pt').items())


def test_fine_tuning_starts_from_weights():
    assert run(*TINY, '--x0=zero', '--norm_inside=False', '--mean_recurrence=2').returncode == 0
    done = run('--init_from=out/ckpt.pt', '--dataset=book', '--out_dir=out-fine', '--max_iters=1', '--eval_windows=7', '--learning_rate=1e-9', '--min_lr=0', '--weight_decay=0.0', '--bptt_k=2')
    assert done.returncode == 0 and 'groups [[1], [2]]' in done.stdout, done.stderr
    (a, old), (b, new) = (load_checkpoint(f'{name}/ckpt.pt') for name in ('out', 'out-fine'))
    assert all(torch.allclose(v, b.state_dict()[k], atol=1e-7) for k, v in a.state_dict().items())
    assert new['model_args'] == old['model_args'] | dict(bptt_k=2)      # what the model computes is the checkpoint's
    for args, words in ((['--out_dir=out'], 'would be written over'), (['--x0=e'], 'x0 = e (it was zero)'), (['--n_layer=5'], 'n_layer = 5 (it was 4)'), (['--init_from=nowhere.pt'], "no checkpoint at 'nowhere.pt'")):
        done = run('--init_from=out/ckpt.pt', '--dataset=book', '--out_dir=out-no', *args)
        assert done.returncode == 2 and words in done.stderr and not os.path.exists('out-no'), done.stderr


# numbers that go wrong ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('clip', ['1.0', '0.0'])
def test_no_number_stops_before_the_weights_are_touched(clip):
    """A learning rate that blows the weights up in the first step: the second is not made."""
    done = run(*TINY, '--learning_rate=1e29', '--min_lr=1e29', '--warmup_iters=0', f'--grad_clip={clip}', '--save_interval=1', '--eval_interval=100')
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert 'no number at iteration 1: loss' in done.stderr and 'learning rate 1.00e+29' in done.stderr
    draw = torch.Generator().manual_seed(train.derived_seed(1337, 'loops', 1, 0))
    assert 'loops {}/{},'.format(*(train.sample_n_loop(4.0, draw) for _ in range(2))) in done.stderr
    last = load_checkpoint('out/ckpt.pt')[1]
    assert last['iter_num'] == 1 and all(v.isfinite().all() for v in last['model'].values())
    assert all(v['exp_avg'].isfinite().all() for v in last['optimizer'].values())


def test_spikes():
    trend, draw = [0, 0.0, 0.0], np.random.default_rng(0)
    assert not any(train.is_spike(5 * 0.99 ** i + draw.normal(0, 0.1), trend) for i in range(400))      # a loss that falls, with noise
    assert train.is_spike(2.0, trend) and not train.is_spike(0.2, trend)


def test_health_tells_the_two_collapses(tiny):
    """States equal for all tokens: every position reads the same. A core that ignores its state: no weight on x, no residual left."""
    idx = torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(0))
    model = tiny()
    assert not list(train.warnings_of(train.health(model, idx, torch.no_grad())))
    with torch.no_grad():
        model.wte.weight.copy_(model.wte.weight[:1].expand(50, -1)), model.wpe.weight.zero_()
        for group in model.groups:
            group.adapter.weight[:, :16] = 0
    found, words = train.health(model, idx, torch.no_grad()), list(train.warnings_of(train.health(model, idx, torch.no_grad())))
    assert all(token_corr > 0.999 and state_use < 1e-5 for token_corr, state_use in found)
    assert len(words) == 4 and 'the states of all tokens are nearly the same' in words[0] and 'the core of group 0 ignores its state' in words[1]


def test_token_corr_is_the_mean_cosine_of_pairs(tiny):
    model, trace = tiny(), []
    idx = torch.arange(6)[None]
    model(idx, n_loop=3, trace=trace)
    for (token_corr, _), entry in zip(train.health(model, idx, torch.no_grad()), trace):
        x = entry['states'][-1][0]
        pairs = [torch.cosine_similarity(x[i], x[j], dim=0) for i in range(6) for j in range(i)]
        assert math.isclose(token_corr, torch.stack(pairs).mean(), abs_tol=1e-5)


# several processes ----------------------------------------------------------------------------------------------------

def test_two_processes_are_one():
    """The same global batch: gradients to 1e-6 (the first moment after one step, not clipped), losses; and one takes up what two left."""
    args = [*TINY, '--grad_clip=0.0', '--gradient_accumulation_steps=2', '--log_interval=1', '--learning_rate=1e-4', '--step_noise=0.1']
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', os.path.join(ROOT, 'train.py')]
    done = subprocess.run([*torchrun, *args, '--max_iters=1', '--lr_decay_iters=12', '--out_dir=out-two'], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count('iter 0: ') == 1, done.stderr
    assert run(*args, '--max_iters=1', '--lr_decay_iters=12', '--out_dir=out-first').returncode == 0 and run(*args, '--out_dir=out-one').returncode == 0
    a, b = (load_checkpoint(f'{name}/ckpt.pt')[1]['optimizer'] for name in ('out-first', 'out-two'))
    gradients = lambda state: torch.cat([state[i]['exp_avg'].flatten() for i in sorted(state)]) / (1 - train.beta1)
    assert (gradients(a) - gradients(b)).abs().max() < 1e-6 < gradients(a).abs().max()
    assert run('--resume', '--out_dir=out-two', '--max_iters=12').returncode == 0
    rows = [[row for row in csv.DictReader(open(f'{name}/log.csv')) if row['loss']] for name in ('out-one', 'out-two')]
    for a, b in zip(*rows, strict=True):
        assert (a['iter'], a['loops']) == (b['iter'], b['loops']) and math.isclose(float(a['loss']), float(b['loss']), abs_tol=1e-4)


@pytest.mark.parametrize('args, words', [
    (['--groups=[[1],[1,2]]'], 'groups overlap'), (['--groups=[[9]]'], 'out of range'), (['--groups=[[1,3]]'], 'must follow one another'),
    (['--groups=[[]]'], 'at least one in it'), (['--n_head=3'], 'not divisible by n_head = 3'), (['--block_size=100000'], 'longer than the'),
    (['--dataset=nothing'], 'python data.py nothing --path=TEXT'), (['--device=tpu'], "device 'tpu' is not available"), (['--dtype=int8'], "unknown dtype 'int8'"),
    (['--vocab_size=100'], 'less than the 257 tokens'), (['--learning_rte=1'], "did you mean 'learning_rate'"), (['--injection=mul'], "unknown injection 'mul'"),
    (['--loop_draw=poisson'], "unknown loop_draw 'poisson'"), (['--ema=1.0'], 'ema must lie in [0, 1)'), (['--x0=one'], "unknown x0 'one'"), (['--save_interval=0'], 'save_interval'), (['--grad_clip=-1.0'], 'grad_clip'), (['--learning_rate=1e39'], 'learning_rate'),
    (['--eval_loops=[0]'], 'eval_loops'), (['--max_iters=0'], 'max_iters'), (['--batch_size=-1'], 'batch_size'), (['--log_interval=0'], 'log_interval')])
def test_bad_input_is_one_line_and_loses_nothing(args, words):
    os.mkdir('out')
    open('out/ckpt.pt', 'w').write('what was there before')
    done = run(*TINY, *args)
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and words in done.stderr, done.stderr
    assert open('out/ckpt.pt').read() == 'what was there before'
