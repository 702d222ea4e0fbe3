"""A run of train.py: its draws, its start, and how it stops and goes on."""
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    check_bits,
    differences,
    finished,
    log_of,
    make_book,
    read_csv,
    refused,
    run,
    same,
)
from filelock import FileLock
from torch._dynamo.testing import CompileCounter

import data
import loops
import tasks
import train
from common import distributed, evaluation, plots
from common.checkpoint import load_checkpoint, read_checkpoint
from common.configurator import configure
from common.optim import make_optimizers
from loops import derived_seed
from model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test in a folder with the data. The figure is drawn once, in `whole`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, 'losses', lambda *args: None)
    make_book()


def started(*args, **environment):
    """train.py as a shell starts it, in a process of its own."""
    return subprocess.Popen([sys.executable, f'{ROOT}/train.py', *args], text=True,
                            env=os.environ | environment, stdout=subprocess.PIPE)


# its parts ----------------------------------------------------------------------------------------

def test_learning_rate():
    quarter = (3 * train.warmup_iters + train.max_iters) // 4       # cos(pi / 4) = 0.707
    highest, lowest = train.learning_rate, train.learning_rate / 10     # unless min_lr is set
    for it, rate in {0: highest / train.warmup_iters, train.warmup_iters: highest,
                     train.max_iters: lowest, 10 ** 9: lowest}.items():
        assert math.isclose(train.lr_at(it), rate)
    assert math.isclose(train.lr_at(quarter), lowest + 0.854 * (highest - lowest), rel_tol=1e-2)


def test_every_micro_step_draws_its_noise_and_loops(tiny):
    model = tiny().train()
    one_run = train.Run(model, data.open_data('book'), [1], 'cpu', None)

    def draw(it, micro):
        x, _, n_loop, noise = train.get_batch(one_run, it, micro)
        first = [group.init_state(torch.zeros(1, 1, 1), noise).item() for group in model.groups]
        return tuple(x.flatten().tolist()), tuple(n_loop), *first

    for keys in [(it, 0) for it in range(20)], [(0, micro) for micro in range(20)]:
        draws = [draw(*key) for key in keys]
        batches, counts, *noise = map(set, zip(*draws))
        assert len(batches) == len(keys) and len(set.union(*noise)) == 2 * len(keys)
        assert len(counts) > 10 and {len(loops) for loops in counts} == {2}
        assert draws == [draw(*key) for key in keys]


def test_a_run_is_a_plain_loop():
    """Weights after eight iterations: those of a dozen lines, bit for bit."""
    finished(*TINY, '--max_iters=8', '--gradient_accumulation_steps=2')
    torch.manual_seed(derived_seed(1337, 'init'))
    model = GPT(GPTConfig(block_size=16, vocab_size=257, n_layer=4, n_head=2, n_embd=16,
                          groups=[[1], [2]], mean_recurrence=4.0, bptt_k=3)).train()
    optimizers = make_optimizers(model, 'muon', 5e-3, 0.1)
    one_run = train.Run(model, data.open_data('book'), [1], 'cpu', None)
    with mock.patch.dict(vars(train), batch_size=4, block_size=16, max_iters=8):
        for it in range(8):
            for micro in range(2):
                x, y, n_loop, noise = train.get_batch(one_run, it, micro)
                _, loss = model(x, y, n_loop, noise_seed=noise)
                (loss / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for one in optimizers.values():
                one.param_groups[0]['lr'] = one.param_groups[-1]['lr'] = train.lr_at(it)
                one.step()
                one.zero_grad()
    check_bits(read_checkpoint('out')['model'], dict(model.state_dict()))
    assert math.isclose(float(log_of('out')[1]['loss']), math.log(257), abs_tol=0.5)


# whole runs ---------------------------------------------------------------------------------------

def test_a_run_from_end_to_end(whole):
    printed = (whole / 'printed.txt').read_text()
    n_windows = (len(data.open_data('book').val) - 1) // 16
    assert f'iter 12: {n_windows} of {n_windows} held-out windows of 16 tokens' in printed
    assert {*os.listdir(whole)} - {'.lock', 'printed.txt'} == {
        'ckpt.pt', 'ckpt_000000.pt', 'ckpt_000003.pt', 'ckpt_best.pt', 'eval.csv', 'log.csv',
        'loss.png'}
    last = read_checkpoint(whole)
    assert (last['iter_num'], last['tokenizer'], last['config']['batch_size']) == (12, 'bytes', 4)
    assert load_checkpoint(whole / 'ckpt_000003.pt')[1]['iter_num'] == 3

    rows = log_of(whole)
    iterations = [row for row in rows if row['loss']]
    assert [row['iter'] for row in iterations] == ['0', '4', '8', '11']
    for row in iterations:
        loss = f"iter {row['iter']}: loss {float(row['loss']):.3f}, loops {row['loops']}, "
        assert printed.count(loss) == 1
    evaluations = [row for row in rows if row['val_loss_1']]
    assert [row['iter'] for row in evaluations] == ['0', '5', '10', '12']
    assert all(row['val_loss_3'] for row in evaluations)

    model, x, y = load_checkpoint(whole / 'ckpt.pt')[0], *data.open_data('book').held_out(
        range(n_windows), 16)
    for row in read_csv(whole / 'eval.csv'):
        loss = model(x, y, n_loop=int(row['loops']))[1].item()
        assert math.isclose(float(row['loss']), loss, rel_tol=1e-4)


def test_the_best_weights_are_kept_and_named():
    """A rate that is too high at the end: the loss rises again."""
    printed = finished(*TINY, '--max_iters=30', '--learning_rate=1.0', '--warmup_iters=60')
    best = load_checkpoint('out/ckpt_best.pt')[1]['iter_num']
    losses = {int(row['iter']): min(float(row['val_loss_1']), float(row['val_loss_3']))
              for row in log_of('out') if row['val_loss_1']}
    assert best == min(losses, key=losses.get) < 30
    assert 'ckpt_best.pt has' in printed and printed.strip().endswith(f'iteration {best}')
    for done, flags, expected in (31, [], best), (32, ['--eval_windows=6'], 32):    # other windows
        finished('--resume', f'--max_iters={done}', *flags)
        assert read_checkpoint('out/ckpt_best.pt')['iter_num'] == expected
    assert os.path.exists(f'out/ckpt_best_{best:06d}.pt')       # of the windows before


def test_nothing_but_the_seed_matters(whole):
    """Evaluation, logs, kept weights and --resume without a checkpoint disturb nothing."""
    watched_less = ['--eval_interval=100', '--log_interval=100', '--keep_iters=[]',
                    '--eval_loops=[2]']
    finished(*TINY, *watched_less, '--resume', '--out_dir=out-less')
    finished(*TINY, '--seed=7', '--out_dir=out-seed')
    model, less, seed = (read_checkpoint(folder)['model']
                         for folder in (whole, 'out-less', 'out-seed'))
    check_bits(model, less)
    assert not same(model, seed)


def test_fine_tuning_starts_from_weights():
    finished(*TINY, '--x0=zero', '--norm_inside=False', '--mean_recurrence=2', '--max_iters=2')
    finished('--init_from=out', '--dataset=book', '--out_dir=out-fine', '--max_iters=1',
             '--eval_windows=7', '--learning_rate=1e-9', '--min_lr=0', '--weight_decay=0.0',
             '--bptt_k=2')
    old, new = read_checkpoint('out'), read_checkpoint('out-fine')
    for name, weight in old['model'].items():
        torch.testing.assert_close(new['model'][name], weight, rtol=0, atol=1e-7)
    assert new['model_args'] == old['model_args'] | dict(bptt_k=2)


GATED = """
import dataclasses, model, torch
@dataclasses.dataclass
class GatedConfig(model.GPTConfig):
    gates: int = 1
    pos: str = 'rotary'
class Gated(model.GPT):
    Config = GatedConfig
    def build(self, config):
        super().build(config)
        self.gate = torch.nn.Linear(config.n_embd, config.gates)
"""


def test_what_a_class_adds_to_the_config_is_a_knob():
    """As a flag before or behind its class, in a file, and of a run that goes on."""
    Path('gated.py').write_text(GATED)
    Path('two.py').write_text("gates = 2\npos = 'learned'\n")
    for pos, *args in ['rotary', '--gates=2'], ['learned', 'gated.py', 'two.py', '--overwrite']:
        finished(*TINY, '--max_iters=1', *args, '--model_class=gated:Gated')
        assert read_checkpoint('out')['model']['gate.weight'].shape == (2, 16)
        assert read_checkpoint('out')['model_args']['pos'] == pos
    finished('gated.py', '--resume', '--max_iters=2')
    args = read_checkpoint('out')['model_args']
    assert (args['gates'], args['pos']) == (2, 'learned')
    for args in ['--gates=3'], ['--gate=2'], ['--gates=two']:
        refused('gated.py', '--eval_only', *args)


def test_a_fixed_count_is_that_of_training_and_of_evaluation():
    """All layers as one group, however many there are."""
    finished(f'{ROOT}/config/kxl.py', *TINY[:4], '--block_size=16', '--n_layer=3',
             '--max_iters=2', '--eval_windows=4', '--out_dir=out', '--mean_recurrence=5')
    model, checkpoint = load_checkpoint('out/ckpt.pt')
    assert checkpoint['model_args']['groups'] == [[0, 1, 2]]
    assert {row['loops'] for row in read_csv('out/eval.csv')} == {'5'}
    assert {row['loops'] for row in log_of('out') if row['loss']} == {'5'}
    assert model.loop_counts() == model.loop_counts(has_rule=True) == model.draw_loops() == [5]


@pytest.mark.parametrize('flags, core_lengths', [
    (['--dtype=bfloat16'], 2), ([f'{ROOT}/config/calc.py', '--dataset=calc'], 1)])
def test_all_graphs_are_compiled_in_the_first_iteration(monkeypatch, flags, core_lengths):
    """
    For each length of core three: without gradient, the first step with it, the others. And one
    for all plain blocks. Neither draws nor evaluation, that of depth included, need any more.
    """
    counter, graphs, cos = CompileCounter(), [], math.cos

    def spy(angle):                     # for the learning rate, in each iteration
        graphs.append(counter.frame_count)
        return cos(angle)
    torch._dynamo.reset()
    monkeypatch.setattr(math, 'cos', spy)
    monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend=counter))
    finished(*flags[:1], '--dataset=book', '--n_head=2', '--n_embd=16', '--block_size=16',
             '--batch_size=2', '--max_iters=12', '--eval_interval=5', '--eval_windows=8',
             '--eval_loops=[1,3]', '--keep_iters=[]', '--warmup_iters=0', '--device=cpu',
             '--compile=True', *flags[1:])
    assert len(graphs) > 11, 'lr_at no longer calls math.cos'
    assert {*graphs, counter.frame_count} == {3 * core_lengths + 1}


# a run that stops and goes on ---------------------------------------------------------------------

def test_killed_and_resumed():
    """SIGKILL behind an iteration, and --resume: it ends as a run that was never stopped."""
    args = [*TINY, '--max_iters=20', '--log_interval=1']
    finished(*args, '--out_dir=whole')
    process = started(*args)
    while not process.stdout.readline().startswith('iter 7: loss'):
        assert process.poll() is None
    process.kill()
    assert process.wait() == -signal.SIGKILL
    finished(*args, '--resume')
    assert differences('whole', 'out') == []


def test_a_signal_saves_and_nothing_is_lost(whole):
    """Ctrl-C: a line says that the step is done to its end."""
    forward = GPT.forward

    def spy(model, *args, **how):
        if model.training and not signals:
            signals.append(signal.raise_signal(signal.SIGINT))
        return forward(model, *args, **how)
    signals = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with mock.patch.object(GPT, 'forward', spy):
        ended = run(*TINY)
    assert signal.signal(signal.SIGINT, before) == signal.default_int_handler
    assert ended.returncode == 130 and 'stopping' in ended.stderr
    assert read_checkpoint('out')['iter_num'] == 1 and not os.path.exists('out/ckpt_best.pt')
    finished('--resume')
    assert differences(whole, 'out') == []


def test_an_error_of_the_system_costs_no_step(whole):
    """As if the output could not be written; before the first step there is no run to protect."""
    for line, done in ('parameters', 0), ('iter 4: loss', 5):
        def fails(words, line=line):
            if line in words:
                raise OSError('no space')
        with mock.patch.object(distributed, 'say', fails):
            refused(*TINY)
        assert not done or read_checkpoint('out')['iter_num'] == done
    finished('--resume')
    assert differences(whole, 'out') == []


def test_a_log_that_cannot_be_read_is_set_aside(whole):
    """As if Excel had saved it, with a mark in front, with semicolons, or with a date."""
    log = (whole / 'log.csv').read_text()
    finished(*TINY, '--max_iters=5')
    Path('out/log.csv').write_text('\ufeff' + log + '1')      # a kill has cut the row of 10
    finished('--resume', '--max_iters=8')
    assert [row['iter'] for row in log_of('out')] == ['0', '0', '4', '5', '7', '8']
    for done, spoilt in (8, log.replace(',', ';')), (10, log.replace('5.', 'May ')):
        Path('out/log.csv').write_text(spoilt)
        assert f'log_before_{done}.csv' in finished('--resume', f'--max_iters={done + 2}')
        assert Path(f'out/log_before_{done}.csv').read_text() == spoilt


def test_resume_takes_the_knobs_of_its_run_but_flags_win():
    """Longer, by hand: as the longer run never stopped, at min_lr where the shorter one ended."""
    args = [*TINY, '--warmup_iters=2', '--eval_interval=100']
    finished(*args, '--max_iters=5')
    Path('file.py').write_text("batch_size = 2\nmax_iters = 9\nout_dir = 'out'\n")
    finished('file.py', '--resume', '--max_iters=8', '--log_interval=3')
    finished(*args, '--max_iters=8', '--lr_decay_iters=5', '--out_dir=out-long')
    resumed, long = read_checkpoint('out'), read_checkpoint('out-long')
    for key in ('model', 'optimizers', 'iter_num'):
        assert same(resumed[key], long[key]), key
    assert resumed['config']['batch_size'] == 4
    finished('--resume', '--max_iters=9', '--learning_rate=1e-3', '--min_lr=1e-3')
    assert [row['iter'] for row in log_of('out') if not row['loss']] == ['0', '5', '8', '9']
    assert log_of('out')[-2]['lr'] == '1.000e-03'


def test_no_number_ends_the_run():
    """A learning rate that blows the weights up in the first step: the second is not made."""
    assert 'not finite at iteration 1:' in refused(
        *TINY, '--learning_rate=1e29', '--min_lr=1e29', '--warmup_iters=0', '--grad_clip=0.0',
        '--eval_interval=1', '--eval_windows=1')
    last = read_checkpoint('out')
    assert last['iter_num'] == 1
    assert all(weight.isfinite().all() for weight in last['model'].values())


def test_overwrite_removes_what_contradicts_the_new_weights_and_nothing_else():
    of_a_run = ['ckpt_best_000003.pt', 'ckpt_000300.pt', 'eval.csv', 'eval_ckpt-9_book_16.csv',
                'exits.json', 'bench.csv']
    foreign = ['notes.txt', 'explore.html', 'evaluation.csv']
    os.makedirs('out')
    for name in of_a_run + foreign:
        Path('out', name).write_text('work')
    assert '--overwrite' in refused(*TINY, '--resume')      # a run that died before its ckpt.pt
    with mock.patch.object(evaluation, 'save_scores', side_effect=KeyboardInterrupt):
        run(*TINY, '--overwrite', '--max_iters=1', '--keep_iters=[]')
    kept = [name for name in of_a_run + foreign
            if os.path.exists(f'out/{name}') and Path('out', name).read_bytes() == b'work']
    assert kept == foreign
    assert read_checkpoint('out')['iter_num'] == 1      # saved before the last table


def test_one_program_at_a_time_writes_into_a_folder():
    os.mkdir('out')
    with FileLock('out/.lock'):
        assert 'another training runs in out' in refused(*TINY)


def test_two_processes_are_one():
    """Gradients of a global batch, to 1e-6, and losses; one process goes on where two stopped."""
    args = [*TINY, '--grad_clip=0.0', '--gradient_accumulation_steps=2', '--max_iters=1',
            '--log_interval=1', '--learning_rate=1e-4', '--min_lr=1e-4']
    with socket.create_server(('localhost', 0)) as server:          # a free port
        port = str(server.getsockname()[1])
    both = [started(*args, '--out_dir=out-two', RANK=rank, LOCAL_RANK=rank, WORLD_SIZE='2',
                    MASTER_ADDR='localhost', MASTER_PORT=port) for rank in ('0', '1')]
    printed = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert printed[0].count('iter 0: loss') == 1 and printed[1] == ''
    finished(*args, '--out_dir=out-one')
    one, two = read_checkpoint('out-one'), read_checkpoint('out-two')

    for number, state in one['optimizers']['adamw'].items():        # after one step, not clipped
        a, b = state['exp_avg'] / 0.1, two['optimizers']['adamw'][number]['exp_avg'] / 0.1
        assert (a - b).abs().max() < 1e-6 < a.abs().max()
    iterations = []
    for out_dir in ('out-one', 'out-two'):
        finished('--resume', f'--out_dir={out_dir}', '--max_iters=4')
        iterations.append(log_of(out_dir))
    for a, b in zip(*iterations, strict=True):
        assert (a['iter'], a['loops']) == (b['iter'], b['loops'])
        for column in ('loss', 'val_loss_1', 'val_loss_3'):
            assert math.isclose(float(a[column] or 0), float(b[column] or 0), abs_tol=1e-4)


# a part of one's own, in a file -------------------------------------------------------------------

MINE = """
from loops import INJECTIONS, Injection
from tasks import TASKS, Calc

LIMIT = 5                       # a constant is no knob
class Scale(Injection):
    def join(self, x, from_e):
        return x * from_e.sigmoid()
INJECTIONS['own'] = Scale
class Mine(Calc):
    def batch(self, rng, rows, T):
        return self(rng, 2 * rows, T // 4)[:2]
TASKS['mine'] = Mine
"""


@pytest.mark.parametrize('flags', [['--injection=own'], ['--dataset=mine']])
def test_a_run_needs_the_file_of_its_part(flags):
    """Without that file it cannot go on."""
    Path('mine.py').write_text(MINE)
    with mock.patch.dict(loops.INJECTIONS), mock.patch.dict(tasks.TASKS):
        finished('mine.py', *TINY, *flags, '--max_iters=2', '--log_interval=1',
                 '--gradient_accumulation_steps=2')
    for row in read_csv('out/log.csv'):
        if row['dt_ms']:            # speed counts the tokens that a batch has
            tokens = float(row['tokens_per_s']) * float(row['dt_ms']) / 1000
            assert tokens == pytest.approx(2 * (8 * 4 if 'mine' in flags[0] else 4 * 16), rel=0.02)
    for script in 'train.py', 'sample.py':
        assert 'file' in refused('--out_dir=out', *(['--resume'] * (script == 'train.py')),
                                 script=script)
    with mock.patch.dict(loops.INJECTIONS), mock.patch.dict(tasks.TASKS):
        finished('mine.py', '--resume', '--max_iters=3')
        assert read_checkpoint('out')['iter_num'] == 3


def test_a_run_holds_its_tokenizer():
    """So that a text can be written where the data set is gone."""
    data.make('bpe', 'book.txt', bpe=300)
    finished(*TINY, '--dataset=bpe', '--max_iters=1')
    tokenizer = read_checkpoint('out')['tokenizer']
    assert data.open_encoding(tokenizer, 'out').decode([65]) == 'a'


def test_a_class_of_ones_own_is_imported_only_if_it_is_named():
    """A checkpoint alone cannot make a program run a file."""
    Path('own_class.py').write_text('import model\nclass Mine(model.GPT):\n    pass\n')
    finished(*TINY, '--model_class=own_class:Mine', '--max_iters=1')
    sys.modules.pop('own_class')
    Path('config.py').write_text("model_class = 'model:GPT'\n")       # it names another one
    refused('--resume', '--max_iters=2')
    refused('config.py', '--resume', '--max_iters=2')
    assert 'own_class' not in sys.modules
    finished('own_class.py', '--resume', '--max_iters=2')
    assert read_checkpoint('out')['model_class'] == 'own_class:Mine'
    finished('--eval_only', '--model_class=own_class:Mine')


# main() in a notebook -----------------------------------------------------------------------------

def test_main_in_a_notebook(whole):
    """Knobs are set as attributes; those that were changed are flags for --resume."""
    with mock.patch.dict(vars(train)):
        train.settings = configure(vars(train))
        vars(train).update(read_checkpoint(whole)['config'], max_iters=7, lr_decay_iters=12)
        train.main()
        train.resume, train.max_iters = True, 12
        train.main()
    check_bits(read_checkpoint('out')['model'], read_checkpoint(whole)['model'])


# --eval_only --------------------------------------------------------------------------------------

def test_eval_only_is_the_table_at_the_end(whole):
    """A table of each weights, to which loop counts are added."""
    shutil.copytree(whole, 'out')
    printed = finished('--eval_only', '--eval_loops=[3]')
    assert 'out/eval_ckpt-12_book_16.csv' in printed.splitlines()[-1]
    finished('--eval_only', '--eval_loops=[1]')
    assert Path('out/eval_ckpt-12_book_16.csv').read_text() == (whole / 'eval.csv').read_text()
    finished('--eval_only', '--init_from=out/ckpt_000003.pt', '--eval_windows=5',
             '--eval_loops=[2]')
    row, = read_csv('out/eval_ckpt_000003-3-5_book_16.csv')
    assert (row['loops'], row['labels']) == ('2', str(5 * 16))
    assert Path('out/eval.csv').read_text() == (whole / 'eval.csv').read_text()
    assert differences(whole, 'out') == []
    Path('wide.py').write_text('n_embd = 64')       # a shape, also in a config file
    assert 'n_embd' in refused('wide.py', '--eval_only')


def test_eval_only_at_other_lengths_and_depths():
    """Of a task."""
    shutil.copytree(f'{ROOT}/pretrained/calc', 'out')
    finished('--eval_only', '--out_dir=out', '--block_size=72',
             '--dataset=calc:reset=0.02', '--eval_loops=[2,80]', '--eval_windows=20')
    path, = Path('out').glob('eval_ckpt-*_calc-reset-0.02_72.csv')
    rows = read_csv(path)
    assert [row['last'] for row in rows[:4]] == ['0', '1', '2', '4']
    few, many = ([row for row in rows if row['loops'] == n] for n in ('2', '80'))
    assert sum(int(row['labels']) for row in many) == 20 * 72
    assert all(float(row['accuracy']) > 0.95 for row in many)
    assert float(few[-1]['accuracy']) < 0.5 and int(few[-1]['last']) > 40
