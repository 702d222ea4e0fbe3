"""A run of train.py: its draws, its recipe, its start, and how it stops and goes on."""
import glob
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import time
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    differences,
    finished,
    log_of,
    make_book,
    read_csv,
    refused,
    run,
    same,
    saved,
)
from torch._dynamo.testing import CompileCounter

import data
import loops
import tasks
import train
from common import distributed, plots, training_log
from common.checkpoint import load_checkpoint
from common.run_folder import only_writer
from loops import TrainingNoise
from model import GPT, flops_per_token

FINE_TUNE = ['--init_from=out/ckpt.pt', '--dataset=book', '--out_dir=out-no']


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test in a folder with the data. The figure is drawn once, in `whole`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, 'losses', lambda *args: None)
    make_book()


# processes ---------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def processes():
    """Where processes of their own come from: copies of one that has imported what they need."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['test_train', 'torch.nn.parallel', 'matplotlib.figure'])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


def in_a_process(args, printed, environment):
    """
    train.py as a shell starts it, in one of `processes`. printed: a file for what it prints; None =
    a pipe whose reader has gone.
    """
    os.environ.update(environment)
    if printed is None:
        reader, printed = os.pipe()
        os.close(reader)
    sys.stdout = open(printed, 'w')
    sys.argv = ['train.py', *args]
    plots.losses = lambda *args: None
    runpy.run_path(os.path.join(ROOT, 'train.py'), run_name='__main__')


def test_learning_rate():
    middle = (train.warmup_iters + train.max_iters) // 2
    highest, lowest = train.learning_rate, train.learning_rate / 10     # unless min_lr is set
    for it, rate in {0: highest / train.warmup_iters, train.warmup_iters: highest,
                     train.max_iters: lowest, 10 ** 9: lowest}.items():
        assert math.isclose(train.lr_at(it), rate)
    assert math.isclose(train.lr_at(middle), (highest + lowest) / 2, rel_tol=1e-2)


def test_every_micro_step_draws_its_noise_dropout_and_loops(tiny):
    model, keys = tiny().train(), [(it, micro) for it in range(5) for micro in range(5)]

    def numbers(it, micro):
        noise = train.noise_of(it, micro, 'cpu')
        train.seed_dropout(it, micro)
        of_groups = [group.init_state(torch.zeros(1, 1, 1), noise).item() for group in model.groups]
        return *of_groups, torch.rand(1).item()

    draws = [numbers(*key) for key in keys]
    assert len({number for draw in draws for number in draw}) == 3 * len(keys)
    assert draws == [numbers(*key) for key in keys]
    for its, micros in (range(20), [0]), ([0], range(20)):
        loops = {tuple(train.draw_loops(it, micro)) for it in its for micro in micros}
        assert len(loops) > 10 and {len(draw) for draw in loops} == {len(train.groups)}


def test_the_loss_after_each_loop_step(tiny, idx):
    """Value and gradient: as if the last group had stopped one step or two earlier."""
    def noise():
        return TrainingNoise(torch.Generator().manual_seed(0))

    def gradient(model):
        return torch.cat([p.grad.flatten() for p in model.parameters()])
    model = tiny(bptt_k=3).train()
    _, loss = train.LossAtEachStep(model)(idx, idx, n_loop=[4, 5], noise_seed=noise())
    loss.backward()
    found, losses, gradients = gradient(model), [], []
    for n, bptt_k in (3, 1), (4, 2), (5, 3):
        model.zero_grad()
        model.groups[1].bptt_k = bptt_k
        losses.append(model(idx, idx, n_loop=[4, n], noise_seed=noise())[1])
        losses[-1].backward()
        gradients.append(gradient(model))
    assert math.isclose(loss.item(), sum(losses).item() / 3, rel_tol=1e-6)
    torch.testing.assert_close(found, sum(gradients) / 3, rtol=1e-4, atol=1e-6)
    # each loss more takes the coda, one block, and the head: forward and twice as much backward
    block = 12 * 16 ** 2 + 2 * 16 * 16          # its matrices, and attention over 16 tokens
    one, three = (flops_per_token(model, [4, 5], True, n_losses) for n_losses in (1, 3))
    assert three - one == 2 * 3 * 2 * (block + 50 * 16)


# whole runs --------------------------------------------------------------------------------------

def test_a_run_from_end_to_end(whole):
    printed = (whole / 'printed.txt').read_text()
    n_windows = (len(data.open_data('book').val) - 1) // 16
    assert 'held-out loss over 7 windows' in printed
    assert f'held-out loss over {n_windows} windows' in printed
    assert printed.endswith('next: python sample.py\n')
    assert sorted(set(os.listdir(whole)) - {'.lock'}) == [
        'ckpt.old.pt', 'ckpt.pt', 'ckpt_000000.pt', 'ckpt_000003.pt', 'eval.csv', 'log.csv',
        'loss.png', 'printed.txt']
    last = saved(whole)
    assert (last['iter_num'], last['tokenizer'], last['config']['batch_size']) == (12, 'bytes', 4)
    assert load_checkpoint(str(whole / 'ckpt.old.pt'))[1]['iter_num'] == 10

    # each iteration of the log: `iter 8: loss 2.912, loops 5/8, 98 ms, 7.8k tok/s, 41 s left`
    rows = log_of(whole)
    iterations = [row for row in rows if row['loss']]
    assert [row['iter'] for row in iterations] == ['0', '4', '5', '8', '10', '11']
    for row in iterations:
        loss = f"iter {row['iter']}: loss {float(row['loss']):.3f}, loops {row['loops']}, "
        assert printed.count(loss) == 1

    evaluations = [row for row in rows if row['val_loss_1']]
    assert [row['iter'] for row in evaluations] == ['5', '10', '12']
    assert all(row['val_loss_3'] and row['token_corr'] for row in evaluations)


def test_nothing_but_the_seed_matters(whole):
    """Evaluation, logs, kept weights and --resume without a checkpoint disturb nothing."""
    watched_less = ['--eval_interval=100', '--log_interval=100', '--keep_iters=[]',
                    '--eval_loops=[2]']
    printed = finished(*TINY, *watched_less, '--resume', '--out_dir=out-less')
    assert 'no checkpoint in out-less yet: starting a new run' in printed
    finished(*TINY, '--seed=7', '--out_dir=out-seed')
    model, less, seed = (saved(folder)['model'] for folder in (whole, 'out-less', 'out-seed'))
    assert same(model, less) and not same(model, seed)


def test_accumulated_gradients_train(monkeypatch):
    """In a run, too, every micro step reads a batch of its own, and the loss is their mean."""
    spy = mock.Mock(wraps=data.windows)
    monkeypatch.setattr(data, 'windows', spy)
    finished(*TINY, '--gradient_accumulation_steps=2', '--grad_clip=0.0', '--dtype=bfloat16',
             '--dropout=0.1', '--max_iters=4')
    n_tokens = len(data.open_data('book').train)        # of training, no evaluation
    batches = [tuple(starts) for (tokens, starts, _), _ in spy.call_args_list
               if len(tokens) == n_tokens]
    assert len(batches) == len(set(batches)) == 2 * 4
    # before any training all 257 tokens are equally likely
    assert math.isclose(float(log_of('out')[0]['loss']), math.log(257), abs_tol=0.5)


def test_fine_tuning_starts_from_weights():
    finished(*TINY, '--x0=zero', '--norm_inside=False', '--mean_recurrence=2', '--max_iters=2')
    printed = finished(*FINE_TUNE, '--out_dir=out-fine', '--max_iters=1', '--eval_windows=7',
                       '--learning_rate=1e-9', '--min_lr=0', '--weight_decay=0.0', '--bptt_k=2')
    assert 'groups [[1], [2]]' in printed
    old, new = saved('out'), saved('out-fine')
    for name, weight in old['model'].items():
        torch.testing.assert_close(new['model'][name], weight, rtol=0, atol=1e-7)
    # what the model computes is the checkpoint's
    assert new['model_args'] == old['model_args'] | dict(bptt_k=2)


@pytest.mark.parametrize('flags, words', [
    ([*FINE_TUNE, '--out_dir=out'], 'would be overwritten'),
    ([*FINE_TUNE, '--x0=e'], 'x0 = e (it was noise)'),
    ([*FINE_TUNE, '--dataset=group'], 'words of group are not of the same number of tokens'),
    ([*FINE_TUNE, '--model_class=zoo.ouro:Ouro'], 'size mismatch for h.0.mlp'),
    (['--resume', '--learning_rate=1e-2'], 'learning_rate = 0.01 (it was 0.005)'),
    (['--resume', '--max_iters=5'], 'has 12 iterations already')])
def test_what_does_not_fit_an_earlier_run_is_refused(whole, flags, words):
    """Nothing of it changes, and none is begun."""
    shutil.copytree(whole, 'out')
    assert words in refused(*flags)
    assert not os.path.exists('out-no')
    for name in ('ckpt.pt', 'log.csv'):
        assert Path('out', name).read_bytes() == (whole / name).read_bytes()


def test_a_large_vocabulary_is_rounded_up_for_speed(whole):
    finished(*TINY, '--dataset=calc:p=600', '--max_iters=1', '--eval_loops=[1]')
    sizes = [saved(folder)['model_args']['vocab_size'] for folder in ('out', whole)]
    assert sizes == [1856, 257]         # of 1,798 and 257 words


@pytest.mark.parametrize('flags, core_lengths', [
    (['--dtype=bfloat16'], 2), ([f'{ROOT}/config/calc.py', '--dataset=calc'], 1)])
def test_all_graphs_are_compiled_in_the_first_iteration(monkeypatch, flags, core_lengths):
    """
    For each length of core three: without gradient, the first step with it, the others. And one
    for all plain blocks. Neither draws nor evaluation, that of depth included, need any more.
    """
    counter, graphs = CompileCounter(), []
    torch._dynamo.reset()
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter))
    monkeypatch.setattr(distributed, 'can_compile', lambda dev: True)
    monkeypatch.setattr(training_log, 'is_spike', lambda *args: graphs.append(counter.frame_count))
    monkeypatch.setattr(plots, 'depth', lambda *args: None)
    finished(*flags[:1], '--dataset=book', '--n_head=2', '--n_embd=16', '--block_size=16',
             '--batch_size=2', '--max_iters=12', '--eval_interval=5', '--eval_windows=8',
             '--eval_loops=[1,3]', '--keep_iters=[]', '--warmup_iters=2', '--device=cpu',
             '--compile=True', *flags[1:])
    assert [*graphs, counter.frame_count] == [3 * core_lengths + 1] * 13


# a run that stops and goes on --------------------------------------------------------------------

def test_killed_and_resumed(processes):
    """A run whose reader has gone, then SIGKILL: it ends as a run that was never stopped."""
    args = [*TINY, '--dropout=0.1', '--max_iters=20', '--log_interval=1']
    finished(*args, '--out_dir=whole')
    # `train.py | head`: the step is finished and saved
    process = processes.Process(target=in_a_process, args=(args, None, {}))
    process.start()
    process.join()
    assert process.exitcode == 128 + signal.SIGPIPE
    assert saved('out')['iter_num'] == 1
    # killed soon after an iteration
    n = random.randrange(1, 20)
    process = processes.Process(target=in_a_process, args=([*args, '--resume'], 'printed', {}))
    process.start()
    while process.is_alive():
        if os.path.exists('printed') and f'iter {n}: loss' in Path('printed').read_text():
            break
        time.sleep(0.01)
    time.sleep(random.uniform(0, 0.1))
    process.kill()
    process.join()
    assert f'iter {n}: loss' in Path('printed').read_text()
    assert all(load_checkpoint(path) for path in glob.glob('out/*.pt'))
    finished(*args, '--resume')
    assert differences('whole', 'out') == []


# in training; and of the passes of evaluations at iterations 5, 10 and 12, each at 1 and 3 loops,
# the first and one after the last iteration
@pytest.mark.parametrize('number, training, n, iteration', [
    (signal.SIGINT, True, 9, 9), (signal.SIGTERM, False, 1, 5), (signal.SIGHUP, False, 5, 12)])
def test_a_signal_saves_and_nothing_is_lost(whole, monkeypatch, number, training, n, iteration):
    """It comes in the n-th pass, of those in training or of those of held-out losses."""
    passes, hidden = [], GPT.hidden
    # the tests themselves may have been started by nohup, under which a hang-up stays ignored
    first = signal.signal(number, signal.default_int_handler if number == signal.SIGINT
                          else signal.SIG_DFL)
    before = {number: signal.getsignal(number)}

    def spy(model, idx, plan):
        if not plan.keep_states and model.training == training:     # not of health
            passes.append(plan.counts[0])
            if len(passes) == n:
                signal.raise_signal(number)
                assert signal.getsignal(number) == before[number]       # the next one ends it
        return hidden(model, idx, plan)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, 'hidden', spy)
        done = run(*TINY)
    signal.signal(number, first)
    printed = done.stdout
    assert done.returncode == 128 + number
    assert len(passes) == n             # the step is finished, and an evaluation is not
    assert training or passes == [1, 3, 1, 3, 1][:n]
    assert printed.splitlines()[-1] == (f'stopped after iteration {iteration - 1} and saved; '
                                        'resume with python train.py --resume')
    assert saved('out')['iter_num'] == iteration
    assert log_of('out')[-1]['iter'] == str(iteration - 1)

    finished('--resume')
    assert differences(whole, 'out') == []


def test_resume_takes_the_knobs_of_its_run():
    """Longer, by hand: as the longer run never stopped, at min_lr where the shorter one ended."""
    args = [*TINY, '--warmup_iters=2', '--eval_interval=100']
    finished(*args, '--max_iters=5')
    same_as_before = '--gradient_accumulation_steps=1'
    printed = finished('--resume', '--max_iters=8', '--log_interval=3', same_as_before)
    assert 'from iteration 5' in printed
    finished(*args, '--max_iters=8', '--lr_decay_iters=5', '--out_dir=out-long')
    resumed, long = saved('out'), saved('out-long')
    for key in ('model', 'optimizer', 'trend', 'iter_num', 'val_loss'):
        assert same(resumed[key], long[key]), key
    rows = log_of('out')
    assert (rows[-2]['lr'], rows[-1]['iter']) == ('5.000e-04', '8')
    assert [row['iter'] for row in rows if row['val_loss_1']] == ['5', '8']     # both ends


def test_resume_refuses_other_data_and_weights_alone(whole):
    shutil.copytree(whole, 'out')
    with open('book.txt', 'a') as f:
        f.write('another end')
    data.make('book', 'book.txt', overwrite=True)
    assert 'not the data set that the run in out had' in refused('--resume')
    os.replace('out/ckpt_000003.pt', 'out/ckpt.pt')
    os.remove('out/ckpt.old.pt')
    assert 'holds weights and nothing to resume' in refused('--resume')


def test_a_signal_that_is_ignored_stays_so(whole, monkeypatch):
    """As under nohup, and in the background of a script."""
    is_spike = training_log.is_spike

    def spy(loss, trend):
        for number in signal.SIGHUP, signal.SIGINT:
            signal.raise_signal(number)
        return is_spike(loss, trend)
    monkeypatch.setattr(training_log, 'is_spike', spy)
    handlers = {number: signal.signal(number, signal.SIG_IGN)
                for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        finished(*TINY)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert differences(whole, 'out') == []


def test_a_signal_before_the_first_iteration():
    def started(*args):
        distributed.stop_signals.append(signal.SIGTERM)
        return start(*args)
    start = train.where_to_start
    with mock.patch.dict(vars(train), where_to_start=started):
        with pytest.raises(distributed.Stopped):
            train.main(*TINY)
    assert saved('out')['iter_num'] == 1


def test_signals_that_a_system_lacks(monkeypatch):
    """On Windows; and handlers are as they were, behind the block."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.delattr(signal, 'SIGHUP')
    with distributed.listen():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_clock_that_stands_still(monkeypatch):
    """It may be as coarse as 16 ms, and somebody may set the time of day back."""
    monkeypatch.setattr(time, 'perf_counter', lambda: 5.0)
    monkeypatch.setattr(time, 'time', lambda: -time.perf_counter())
    assert 'done in 0 s' in finished(*TINY, '--max_iters=2', '--log_interval=1')


# files that cannot be written ---------------------------------------------------------------------

def move_log_away(monkeypatch, first, last=None):
    """From iteration `first` on log.csv is a directory, until iteration `last`."""
    is_spike = training_log.is_spike

    def spy(loss, trend):
        if trend[0] == first:
            os.rename('out/log.csv', 'kept.csv')
            os.mkdir('out/log.csv')
        if trend[0] == last:
            os.rmdir('out/log.csv')
            os.rename('kept.csv', 'out/log.csv')
        return is_spike(loss, trend)
    monkeypatch.setattr(training_log, 'is_spike', spy)


def test_rows_that_cannot_be_written_now_are_written_later(whole, monkeypatch):
    move_log_away(monkeypatch, 3, 10)
    assert finished(*TINY).count('warning: cannot write a row of out/log.csv') == 3
    assert differences(whole, 'out') == []


def test_no_log_and_no_figure_is_worth_a_run(whole, monkeypatch):
    """The last word is another warning, and all weights are there."""
    move_log_away(monkeypatch, 3)
    monkeypatch.setattr(plots, 'losses', mock.Mock(side_effect=ImportError('no matplotlib')))
    printed = finished(*TINY)
    assert 'warning: no out/loss.png' in printed
    assert same(saved('out')['model'], saved(whole)['model'])


def test_the_figure_is_drawn_at_each_evaluation(monkeypatch):
    drawn = mock.Mock()
    monkeypatch.setattr(plots, 'losses', drawn)
    finished(*TINY)
    rows = [[row['iter'] for row in call.args[0] if row['val_loss_1']] for call in
            drawn.call_args_list]
    assert rows == [['5'], ['5', '10'], ['5', '10', '12']]


def test_an_error_of_the_disk_saves_first(monkeypatch):
    batch = data.Text.batch

    def fails(text, *args):
        fails.calls += 1
        if fails.calls == 4:
            raise OSError(5, 'Input/output error')
        return batch(text, *args)
    fails.calls = 0
    monkeypatch.setattr(data.Text, 'batch', fails)
    assert 'Input/output error' in refused(*TINY)
    assert saved('out')['iter_num'] == 3


def test_a_folder_that_cannot_be():
    os.symlink('nowhere/at/all', 'out')
    reason = "it is a link to 'nowhere/at/all', which does not exist"
    assert f"cannot write into 'out' ({reason}): make it a folder" in refused(*TINY)


def test_files_are_utf_8(monkeypatch):
    """No file is read or written in the encoding of the machine."""
    careless = []

    def spy(path, mode='r', buffering=-1, encoding=None, *rest, **more):
        of_project = sys._getframe(1).f_code.co_filename.startswith(ROOT + os.sep)
        if of_project and 'b' not in mode and encoding is None:
            careless.append(path)
        return opened(path, mode, buffering, encoding, *rest, **more)
    opened = open
    monkeypatch.setattr('builtins.open', spy)
    monkeypatch.setattr('io.open', spy)
    finished(*TINY, '--max_iters=1')
    assert not careless


# numbers that go wrong ---------------------------------------------------------------------------

@pytest.mark.parametrize('clip', ['1.0', '0.0'])
def test_no_number_stops_before_the_weights_are_touched(clip):
    """A learning rate that blows the weights up in the first step: the second is not made."""
    line = refused(*TINY, '--learning_rate=1e29', '--min_lr=1e29', '--warmup_iters=0',
                   f'--grad_clip={clip}', '--save_interval=1', '--eval_interval=100')
    assert 'not finite at iteration 1: loss' in line and 'continue from' in line
    assert 'learning rate 1.00e+29' in line
    last = saved('out')
    assert last['iter_num'] == 1
    assert all(weight.isfinite().all() for weight in last['model'].values())
    assert all(state['exp_avg'].isfinite().all() for state in last['optimizer'].values())


@pytest.mark.parametrize('flag, words', [
    ('--block_size=100000', 'no window of 100000 with a next token'),
    ('--block_size=0', 'block_size must be at least 1'),
    ('--init_from=resume', 'continue the run in --out_dir with --resume'),
    ('--init_from=gpt2-xl', 'no groups that loop'),
    ('--dtype=int8', "unknown dtype 'int8'"), ('--model_class=os:path', 'subclass of model.GPT'),
    ('--vocab_size=100', "has 100 tokens, but data set 'book' has 257, of"),
    ('--n_embd=100000000', 'not enough memory: lower a size'),
    ('--grad_clip=-1.0', 'grad_clip'), ('--learning_rate=1e39', 'learning_rate'),
    ('--min_lr=1e-2', 'min_lr = 0.01 is above learning_rate = 0.005'),
    ('--eval_loops=[0]', 'eval_loops'), ('--eval_loops=[2,2]', 'different loop counts')])
def test_bad_input_is_one_line_and_loses_nothing(flag, words):
    os.mkdir('out')
    Path('out/ckpt.pt').write_text('what was there before')
    assert words in refused(*TINY, flag, '--overwrite')
    assert Path('out/ckpt.pt').read_text() == 'what was there before'
    assert not os.path.exists('out/ckpt.old.pt')


def test_a_run_is_not_overwritten_by_another(whole):
    """Once a new run has begun, even one that fails, nothing of the old one can be resumed."""
    shutil.copytree(whole, 'out')
    assert ('out holds a run (ckpt.pt): --overwrite starts over, python train.py --resume '
            'continues it, or give another --out_dir') in refused(*TINY)
    assert differences(whole, 'out') == []
    bad = refused(*TINY, '--overwrite', '--learning_rate=1e29')
    assert 'not finite at iteration 1' in bad and 'start again' in bad
    # what there is now is the start of the run that failed, and --resume continues it and no other
    assert saved('out')['iter_num'] == 0 and not os.path.exists('out/ckpt.old.pt')
    assert 'not finite at iteration 1' in refused('--resume', '--device=cpu')
    finished(*TINY, '--overwrite')
    assert differences(whole, 'out') == []


# what belongs to the weights of an earlier run, and what does not
OF_A_RUN = ['ckpt_best.pt', 'ckpt-before-finetune.pt', 'ckpt_000300.pt', 'exits.json', 'log.csv',
            'tokenizer.json', 'eval.csv', 'loss.png', 'bench.csv', 'figures/figure_1.png']
FOREIGN = ['notes.txt', 'tokenizer.txt', 'explore.html', 'figures/mine.png', 'depth.md']


def test_whatever_a_new_run_would_remove_protects_the_folder():
    for name in OF_A_RUN:
        os.makedirs('out/figures')
        Path('out', name).write_text('work')
        for flag in '--resume', '--resume=False':
            wanted = f'out holds a run ({name}): --overwrite starts over, or give another --out_dir'
            done = run(*TINY, flag)
            assert (done.returncode, done.stdout) == (2, '') and wanted in done.stderr
        assert Path('out', name).read_text() == 'work'
        shutil.rmtree('out')


def test_overwrite_removes_what_contradicts_the_new_weights_and_nothing_else():
    os.makedirs('out/figures')
    for name in OF_A_RUN + FOREIGN:
        Path('out', name).write_text('work')
    finished(*TINY, '--overwrite', '--max_iters=1', '--keep_iters=[]')
    for name in OF_A_RUN + FOREIGN:
        path = Path('out', name)
        kept = path.exists() and path.read_text() == 'work'
        assert kept == (name in FOREIGN), name


def test_one_program_at_a_time_writes_into_a_folder():
    """The lock of a program that was killed is free."""
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        with only_writer('out'):
            os.write(writer, b'held')
            time.sleep(60)
    assert os.read(reader, 4) == b'held'
    assert 'another program writes into out: wait' in refused(*TINY)
    assert os.listdir('out') == ['.lock']
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    finished(*TINY, '--max_iters=1')


def test_paths():
    """~ is the home folder, and an empty path is one that a shell has made of an unset variable."""
    for knob in 'out_dir', 'init_from':
        assert f'{knob} is empty: give a value' in refused(*TINY, f'--{knob}=')
    with mock.patch.dict(os.environ, HOME=os.getcwd()):
        finished(*TINY, '--max_iters=1', '--out_dir=~/run')
    assert os.path.exists('run/ckpt.pt') and not os.path.exists('~')


def test_loss_at_all_is_a_knob():
    finished(*TINY, '--loss_at=all', '--max_iters=2', '--out_dir=out-all')
    assert 'loss_at = last (it was all)' in refused('--resume', '--out_dir=out-all',
                                                    '--loss_at=last', '--max_iters=3')
    assert 'needs a model with groups' in refused(*TINY, '--groups=[]', '--loss_at=all')


def test_weights_without_a_place_are_named(whole):
    shutil.copytree(whole, 'out')
    checkpoint = saved('out')
    checkpoint['model'] |= {'gate.weight': torch.ones(1, 16), 'gate.bias': torch.ones(1)}
    torch.save(checkpoint | dict(model_class='zoo.ouro:Gated'), 'gated.pt')
    printed = finished(*TINY, '--max_iters=1', '--init_from=gated.pt', '--model_class=model:GPT',
                       '--out_dir=out-plain')
    assert 'in the checkpoint and not in GPT, so left out: gate.weight, gate.bias' in printed


def test_two_processes_are_one(processes):
    """Gradients of a global batch, to 1e-6, and losses; one process goes on where two stopped."""
    args = [*TINY, '--grad_clip=0.0', '--gradient_accumulation_steps=2', '--max_iters=1',
            '--log_interval=1', '--learning_rate=1e-4', '--min_lr=1e-4', '--step_noise=0.1']
    with socket.create_server(('localhost', 0)) as server:          # a free port
        port = str(server.getsockname()[1])
    both = []
    for rank in '0', '1':               # what torchrun puts into the environment
        variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE='2', MASTER_ADDR='localhost',
                         MASTER_PORT=port)
        both.append(processes.Process(
            target=in_a_process, args=([*args, '--out_dir=out-two'], f'printed-{rank}', variables)))
        both[-1].start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert Path('printed-0').read_text().count('iter 0: loss') == 1
    assert Path('printed-1').read_text() == ''
    finished(*args, '--out_dir=out-one')
    one, two = saved('out-one'), saved('out-two')

    def gradients(checkpoint):      # the moments after one step, not clipped
        adamw, muon = checkpoint['optimizer'], checkpoint['muon']
        return torch.cat([adamw[number]['exp_avg'].flatten() / 0.1 for number in sorted(adamw)]
                         + [muon[number]['momentum_buffer'].flatten() / 0.05
                            for number in sorted(muon)])

    a, b = gradients(one), gradients(two)
    assert (a - b).abs().max() < 1e-6 < a.abs().max()
    for n_loop, loss in one['val_loss'].items():
        assert math.isclose(loss, two['val_loss'][n_loop], abs_tol=1e-4)

    iterations = []
    for out_dir in ('out-one', 'out-two'):
        finished('--resume', f'--out_dir={out_dir}', '--max_iters=4')
        iterations.append([row for row in log_of(out_dir) if row['loss']])
    for a, b in zip(*iterations, strict=True):
        assert (a['iter'], a['loops']) == (b['iter'], b['loops'])
        assert math.isclose(float(a['loss']), float(b['loss']), abs_tol=1e-4)


# what a run must survive --------------------------------------------------------------------------

def test_fields_of_a_class_are_flags():
    ouro = [*TINY, '--model_class=zoo.ouro:Ouro']
    finished(*ouro, '--injection=none', '--mlp_width=24', '--max_iters=1')
    assert saved('out')['model_args']['mlp_width'] == 24
    assert "did you mean 'mlp_width'?" in refused(*ouro, '--mlp_widht=24')
    assert "unknown flag --model: did you mean 'model_class'?" in refused('--model=zoo.ouro:Ouro')


def test_a_run_from_before_a_knob_was_renamed_goes_on():
    finished(*TINY, '--model_class=zoo.ouro:Ouro', '--injection=none', '--max_iters=1')
    before = torch.load('out/ckpt.pt', weights_only=True)
    before['config']['model'] = before['config'].pop('model_class')
    torch.save(before, 'out/ckpt.pt')
    assert 'from iteration 1' in finished('--resume', '--max_iters=2')
    after = saved('out')
    assert (after['model_class'], after['config']['model_class']) == 2 * ('zoo.ouro:Ouro',)


def test_an_error_in_the_first_process_does_not_leave_the_others_waiting(monkeypatch):
    barrier = mock.Mock()
    monkeypatch.setattr(distributed, 'WORLD', 2)
    monkeypatch.setattr(distributed.dist, 'barrier', barrier)
    with pytest.raises(ValueError):
        distributed.make_once(lambda: int('no data'))
    barrier.assert_called_once()


# the environment ----------------------------------------------------------------------------------

OF_TORCHRUN = dict(RANK='1', WORLD_SIZE='2', LOCAL_RANK='1', MASTER_ADDR='here', MASTER_PORT='1')


@pytest.mark.parametrize('variables, ranks', [
    ({}, (0, 1, 0)), (dict(RANK=''), (0, 1, 0)), (dict(LOCAL_RANK='3'), (0, 1, 0)),
    (dict(RANK='0', WORLD_SIZE='1'), (0, 1, 0)), (OF_TORCHRUN, (1, 2, 1)),
    (dict(RANK='1'), None), (dict(RANK='x'), None), (dict(WORLD_SIZE='2'), None),
    (dict(RANK='1', WORLD_SIZE='2'), None), (OF_TORCHRUN | dict(RANK='2'), None)])
def test_ranks_left_in_the_environment(monkeypatch, variables, ranks):
    """Only train.py looks, and it says what does not fit."""
    for name in OF_TORCHRUN:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(distributed, name.removesuffix('_SIZE'), 0, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fresh = runpy.run_path(distributed.__file__)
    assert (fresh['RANK'], fresh['WORLD'], fresh['LOCAL_RANK']) == (0, 1, 0)
    if ranks is None:
        name, value = next(iter(variables.items()))
        assert f'the environment has {name}={value}' in refused(*TINY)
        return
    read_environment = fresh['read_environment']
    read_environment()
    names = read_environment.__globals__
    assert (names['RANK'], names['WORLD'], names['LOCAL_RANK']) == ranks


def test_without_a_compiler_training_goes_on(monkeypatch):
    compiled = mock.Mock(side_effect=RuntimeError('No C++\ncompiler'))
    monkeypatch.setattr(torch, 'compile', lambda function: compiled)
    printed = finished(*TINY, '--max_iters=1', '--compile')
    assert 'training goes on without torch.compile, which fails here: No C++ compiler' in printed
    assert saved('out')['iter_num'] == 1


# a part of one's own, in a file -------------------------------------------------------------------

MINE = """
from loops import INJECTIONS, Injection
from tasks import TASKS, Calc

LIMIT = 5                       # a constant is no knob
class Scale(Injection):
    def join(self, x, from_e):
        return x * from_e.sigmoid()
INJECTIONS['own'] = Scale
TASKS['mine'] = Calc()
"""


@pytest.mark.parametrize('flags', [['--injection=own'], ['--dataset=mine']])
def test_a_run_remembers_the_file_of_a_part(flags):
    """And whatever needs it names it: the line of the end, of a stop, and of a start without it."""
    Path('mine.py').write_text(MINE)

    def try_it(check, *args, **how):
        with mock.patch.dict(loops.INJECTIONS), mock.patch.dict(tasks.TASKS):
            return check(*args, **how)
    printed = try_it(finished, 'mine.py', *TINY, *flags, '--max_iters=2')
    assert printed.endswith('next: python sample.py mine.py --out_dir=out\n')
    for script, args in ('sample.py', ['--out_dir=out']), ('train.py', ['--resume']):
        done = try_it(run, *args, script=script)
        assert done.returncode == 2 and done.stderr.count('\n') == 1
        assert 'trained with mine.py' in done.stdout + done.stderr
        assert 'not a whole checkpoint' not in done.stderr
    printed = try_it(finished, 'mine.py', '--resume', '--max_iters=3')
    assert 'from iteration 2' in printed
    assert printed.endswith('next: python sample.py mine.py --out_dir=out\n')
    printed = try_it(finished, 'mine.py', '--out_dir=out', script='sample.py')
    assert 'trained with' not in printed


def test_the_values_of_a_file_do_not_change_a_run_that_continues():
    """Flags have overridden them; and the commands that are printed work as they stand."""
    Path('mine.py').write_text(MINE + "max_iters = 9\nbatch_size = 3\nout_dir = 'elsewhere'\n")
    flags = ['--injection=own', '--batch_size=2', '--max_iters=2', '--out_dir=out']
    with mock.patch.dict(loops.INJECTIONS), mock.patch.dict(tasks.TASKS):
        printed = finished('mine.py', *TINY, *flags)
        assert printed.endswith('next: python sample.py mine.py --out_dir=out\n')
    with mock.patch.dict(loops.INJECTIONS), mock.patch.dict(tasks.TASKS):
        printed = finished('mine.py', '--resume', '--out_dir=out')
        assert 'not used: batch_size = 3 (it is 2), max_iters = 9 (it is 2)' in printed
    with mock.patch.dict(loops.INJECTIONS), mock.patch.dict(tasks.TASKS):
        finished('--batch_size=2', '--max_iters=3', '--resume', '--out_dir=out', 'mine.py')
        checkpoint = saved('out')
    assert checkpoint['iter_num'] == 3 and checkpoint['config']['batch_size'] == 2
    assert not os.path.exists('elsewhere')


def test_init_from_takes_a_folder(whole):
    printed = finished('--eval_only', f'--init_from={whole}', '--eval_windows=2',
                       '--out_dir=out-eval')
    assert f'{whole}/ckpt.pt' in printed
    finished(*TINY, f'--init_from={whole}', '--max_iters=1')
    # and that of pretrained/ from any folder
    finished('--init_from=pretrained/calc', '--dataset=calc', '--max_iters=1', '--eval_windows=2',
             '--out_dir=out-calc')
    line = refused('--init_from=nowhere', '--dataset=calc', '--out_dir=out-new')
    assert '--out_dir=nowhere' in line


def test_a_run_whose_files_are_not_named_says_so():
    """What they changed may not be missed: an attention of one's own, say."""
    Path('mine.py').write_text('import model')
    finished('mine.py', *TINY, '--max_iters=1')
    assert 'the run was trained with mine.py' in finished('--out_dir=out', script='sample.py')


# main() in a notebook -----------------------------------------------------------------------------

def test_main_is_called_and_called_again(whole):
    """Each call starts from the knobs of the file, and a run that goes on from its own."""
    with mock.patch.dict(vars(train)):
        train.main(*TINY, '--max_iters=7')
        assert train.max_iters == 7
        with pytest.raises(ValueError, match='out holds a run'):
            train.main(*TINY)
        train.main('--resume', '--max_iters=12')
        assert (train.batch_size, train.resume) == (4, True)
        train.norm_eps = 1e-3           # as an earlier call with a class of its own left it
        with pytest.raises(ValueError, match='unknown flag --norm_eps'):
            train.main('--norm_eps=1e-4')
        with pytest.raises(ValueError, match="unknown flag --max_itres: did you mean 'max_iters'"):
            train.main('--max_itres=1')
        assert not torch.backends.cuda.matmul.allow_tf32        # in decoding, after a training
    # the same draws; an end at iteration 7 has a row more
    rows = [row for row in log_of('out') if row['iter'] not in ('6', '7')]
    assert [row['loops'] for row in rows] == [row['loops'] for row in log_of(whole)]


# --eval_only --------------------------------------------------------------------------------------

def test_eval_only_is_the_table_at_the_end(whole):
    shutil.copytree(whole, 'out')
    wanted = Path('out/eval.csv').read_text()
    table = re.search(r'\nloops .*?(?=\ndone)', (whole / 'printed.txt').read_text(), re.S)[0]
    for flags in ['--out_dir=out'], ['--init_from=out/ckpt.pt']:
        os.remove('out/eval.csv')
        printed = finished('--eval_only', *flags)
        assert table in printed and Path('out/eval.csv').read_text() == wanted
    printed = finished('--eval_only', '--eval_windows=5', '--eval_loops=[2]')
    assert '5 held-out windows of 16 tokens' in printed
    assert [row['loops'] for row in read_csv('out/eval.csv')] == ['2']
    assert 'learned positions for 16 tokens' in refused('--eval_only', '--length=32')
    assert '--length is for --eval_only' in refused(*TINY, '--overwrite', '--length=32')
    assert differences(whole, 'out') == []


def test_eval_only_does_not_split_a_batch(monkeypatch):
    monkeypatch.setattr(distributed, 'WORLD', 3)
    with mock.patch.dict(vars(train), eval_only=True):
        train.check_knobs()
    with pytest.raises(ValueError, match='cannot be shared by 3 processes'):
        train.check_knobs()


def test_eval_only_at_other_lengths_and_depths(monkeypatch):
    """Of a task, in a folder that nobody writes to."""
    monkeypatch.setattr(plots, 'depth', lambda *args: None)
    finished('--eval_only', f'--out_dir={ROOT}/pretrained/calc', '--length=72',
             '--dataset=calc:reset=0.02', '--eval_loops=[2,80]', '--eval_windows=20')
    rows = read_csv('out/calc/eval.csv')
    assert [row['last'] for row in rows[:4]] == ['0', '1', '2', '4']
    few, many = ([row for row in rows if row['loops'] == n] for n in ('2', '80'))
    assert sum(int(row['labels']) for row in many) == 20 * 72
    assert all(float(row['accuracy']) > 0.95 for row in many)
    assert float(few[-1]['accuracy']) < 0.5 and int(few[-1]['last']) > 40
