"""
What only a GPU would show, on a pretended one (pretend.py): every script runs there once and finds
what it finds on the CPU, and the host waits for the device as rarely as COUNTS says.

    python -m pytest -q -s tests/test_device.py         prints the counts
    CARD=cuda python -m pytest tests/test_device.py -k 'decoding or zoo_f'      on a real one
"""
import math
import os
import re
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pretend
import pytest
import torch
from conftest import ROOT, TINY, finished, log_of, saved
from pretend import NAME

import decode
from common import plots, training_log
from common.checkpoint import load_checkpoint
from decode import compiled
from exits import make_exit
from loops import Plan
from zoo import huginn, ouro

TEXT = os.path.join(ROOT, 'pretrained', 'text', 'ckpt.pt')
if os.environ.get('CARD'):
    NAME, pretend.device = os.environ['CARD'], nullcontext
# how often the host waits; uploads that it waits for; others. At 8 loops in 3 groups, of one row
COUNTS = {
    'a token, fixed loops': (1, 0, 0),
    'a token, one row has ended': (1, 0, 0),
    'a token, norm': (25, 0, 3),
    'a token, kl': (25, 0, 3),
    'a token, accel': (22, 0, 3),
    'a token, norm and past': (25, 0, 3),
    'four drafts and their check': (1, 0, 0),
    'a pass of a wave': (1, 0, 0),
    'a pass of a wave, norm_rel': (2, 0, 0),
    'a step of training': (1, 0, 2),
}


def test_it_raises_where_cuda_or_mps_does():
    with pretend.device() as counts:
        x, cpu, two = torch.ones(3, device=NAME), torch.ones(3), torch.tensor(2.0)
        assert (x + two).tolist() == [3, 3, 3]
        for bad, words in (
                (lambda: x + cpu, 'same device'), (lambda: cpu[x.long()], 'same device'),
                (lambda: two.add_(x[0]), 'same device'), (lambda: x @ cpu, 'same device'),
                (lambda: x.numpy(), 'to numpy'), (lambda: x.double(), 'float64'),
                (lambda: x.uniform_(generator=torch.Generator()), 'generator'),
                (lambda: cpu.uniform_(generator=torch.Generator(NAME)), 'generator')):
            with pytest.raises((RuntimeError, TypeError), match=words):
                bad()
        counts.clear()
        assert x.sum().item() and x[x > 0].cpu() is not None
        _ = x[cpu > 0], cpu.to(NAME), torch.tensor([1], device=NAME)
        cpu.to(NAME, non_blocking=True)
    assert {what: n for (what, _), n in counts.items()} == dict(wait=4, upload=3, later=1)


# decoding -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('rows, how', [
    ((2, 46), dict(cache='exact', exit=make_exit('accel', 0.3, wake=True), stop=10, top_k=5)),
    ((2, 12), dict(cache='ring', ring=3, exit=make_exit('kl', 0.01))),
    ((2, 7), dict(cache='latest', warm_start=True)),
    ((2, 46), dict(cache=None, exit=make_exit('norm', 0.3))),
    ((1, 7), dict(draft_loops=3)), ((1, 7), dict(wave=4, exit=make_exit('accel_rel', 0.1)))],
    ids=lambda x: '-'.join(x) if isinstance(x, dict) else f'{x[0]} rows')
def test_decoding_finds_what_it_finds_on_the_cpu(monkeypatch, rows, how):
    """Of so many rows and tokens; the window of 48 moves behind 46."""
    def found(device):
        model, seen = load_checkpoint(TEXT, device)[0], []

        def spy(logits, *rest):
            seen.append([logits.cpu(), choose(logits, *rest).cpu()])
            return choose(logits, *rest)
        monkeypatch.setattr(decode.rows, 'choose', spy)
        texts = b'return ' * 7, b'self.weight ' * 4
        prompts = torch.tensor([[*text[-rows[1]:]] for text in texts[:rows[0]]], device=device)
        _, steps = zip(*model.stream(prompts, 5, 0.8, n_loop=4, seed=1, **how))
        return *map(torch.cat, zip(*seen)), torch.cat(steps).cpu()
    choose = decode.rows.choose
    with pretend.device():
        logits, tokens, steps = found(NAME)
    cpu_logits, cpu_tokens, cpu_steps = found('cpu')
    torch.testing.assert_close(logits, cpu_logits, rtol=0, atol=1e-4)
    assert torch.equal(tokens, cpu_tokens) and torch.equal(steps, cpu_steps)


def record_by_running_again(run):
    """What compiled.record does on CUDA: the outputs are empty, and each replay fills them."""
    def tensors(x, results):
        return [x, *(value for result in results for value in result.values() if value is not None)]

    outputs = run()
    for tensor in tensors(*outputs):
        tensor.zero_()

    def replay():
        for mine, new in zip(tensors(*outputs), tensors(*run())):
            mine.copy_(new)
    return outputs, replay


@pytest.mark.parametrize('how, settings', [
    (dict(cache='latest', n_loop=2), 1),
    (dict(cache='latest', n_loop=3, warm_start=True), 1),
    (dict(cache='exact', n_loop=2, draft_loops=1), 2),
    (dict(n_loop=6, wave=4, wave_steps=2, exit=make_exit('norm_rel', 0.3)), 1)],
    ids=['fixed', 'warm', 'drafts', 'wave'])
def test_decoding_by_recorded_passes(tiny, monkeypatch, how, settings):
    """A text of 36 tokens has four windows, and each setting is recorded once in each of them."""
    recorded = []

    def record(run):
        recorded.append(run)
        return record_on_card(run)
    record_on_card = compiled.record if os.environ.get('CARD') else record_by_running_again
    monkeypatch.setattr(compiled, 'record', record)
    with pretend.device():
        models = [tiny(n_layer=2, groups=[[1]]).to(NAME) for _ in range(2)]
        compiled.compile_passes(models[1], 5)
        prompts = torch.arange(3, device=NAME)[None]
        texts = [list(zip(*model.stream(prompts, 36, temperature=0.7, seed=1, **how)))
                 for model in models]
        for there, again in zip(*(map(torch.cat, text) for text in texts)):
            assert torch.equal(there.cpu(), again.cpu())
    assert len(recorded) == 4 * settings


@pytest.mark.parametrize('kind, rule', [
    (huginn.Huginn, 'zoo.huginn:kl'), (ouro.Gated, 'zoo.ouro:gate')], ids=['huginn', 'ouro'])
def test_a_model_of_the_zoo_finds_what_it_finds_on_the_cpu(tiny, idx, kind, rule):
    def found(device):
        plan = Plan([5, 3], make_exit(rule, 0.5))
        return decode.teacher_forced(tiny(kind=kind, pos='rotary').to(device), idx.to(device), plan)
    with pretend.device():
        there = [part.cpu() for part in found(NAME)]
    for a, b in zip(there, found('cpu')):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


# scripts ------------------------------------------------------------------------------------------

NUMBER = re.compile(r'[-+]?\d+\.?\d*(?:e[-+]\d+)?')
BENCH = ['--n_loop=3', '--taus=[0.3]', '--budgets=[2]', '--rules=["accel"]',
         '--cache=exact', '--wake=False', '--drafts=[[1,3,4]]', '--waves=[[3,2]]',
         '--new_tokens=4', '--n_windows=2']


@pytest.mark.parametrize('script, flags', [
    ('bench.py', [*BENCH, '--n_prompts=1']),
    ('geometry.py', ['--n_loop=3', '--n_windows=2']),
    ('sample.py', ['--max_new_tokens=4', '--temperature=0', '--exit=norm', '--show_steps']),
    ('sample.py', [f'--out_dir={ROOT}/pretrained/calc', '--exit=norm']),
    ('zoo/etd.py', ['--init_from=out-plain/ckpt.pt', '--n_windows=4', '--loops=[2]',
                    '--overwrite'])], ids=lambda x: x if isinstance(x, str) else '')
def test_a_script_finds_what_it_finds_on_the_cpu(here, monkeypatch, script, flags):
    monkeypatch.setattr(plots.Figure, 'savefig', lambda *how, **more: None)
    if script == 'zoo/etd.py':
        finished(*TINY, '--n_layer=2', '--groups=[]', '--max_iters=1', '--out_dir=out-plain')

    def found(device):
        """The words that it prints and writes, and the numbers."""
        clock = count()
        monkeypatch.setattr(time, 'perf_counter', lambda: next(clock) / 1000)
        text = finished(*flags, f'--device={device}', script=script)
        for path in sorted(Path().glob('out*/**/*.*')):
            text += path.read_text() if path.suffix in ('.csv', '.json', '.html') else ''
        text = re.sub(f'auto|{NAME}( pretended)?', 'cpu', text)
        return NUMBER.sub('', text).split(), np.array(NUMBER.findall(text), dtype=float)
    with pretend.device():
        words, numbers = found('auto')
    cpu_words, cpu_numbers = found('cpu')
    assert words == cpu_words and len(numbers) > 20
    np.testing.assert_allclose(numbers, cpu_numbers, rtol=1e-3, atol=1e-3)


def test_training_finds_what_it_finds_on_the_cpu(here, monkeypatch):
    """
    There, on a CPU, and there again, or on a CPU alone: with Muon, and AdamW for the weights that
    Muon leaves. A step waits as COUNTS says.
    """
    flags = [*TINY, '--optimizer=muon', '--pos=rotary', '--log_interval=1',
             '--eval_windows=2', '--lr_decay_iters=6', '--compile=False', '--overwrite']
    monkeypatch.setattr(plots, 'losses', lambda *_: None)
    marks = []
    monkeypatch.setattr(training_log, 'is_spike', lambda *_: marks.append(totals(pretend.counts)))
    for n, device in (2, 'auto'), (4, 'cpu'), (6, 'auto'):
        with pretend.device() if device == 'auto' else nullcontext():
            finished(*(flags if n == 2 else ['--resume']), f'--max_iters={n}', f'--device={device}')
    check_counts({'a step of training': marks[1] - marks[0]})
    finished(*flags, '--max_iters=6', '--out_dir=out-cpu')
    # the end of each part has a row of its own, without a step
    steps = [[row for row in log_of(out) if row['loss']] for out in ('out', 'out-cpu')]
    for row, cpu_row in zip(*steps, strict=True):
        for column in 'loss', 'grad_norm', 'val_loss_3', 'state_use':
            a, b = (one[column].split('/')[0] or 0 for one in (row, cpu_row))
            assert math.isclose(float(a), float(b), rel_tol=5e-3), column
    cpu_weights = saved('out-cpu')['model']
    for name, weight in saved('out')['model'].items():
        assert (weight - cpu_weights[name]).norm() < 0.01 * weight.norm(), name


# waits --------------------------------------------------------------------------------------------

def totals(counts):
    """Counts by line -> how often the project waited, uploaded, and uploaded without waiting."""
    return np.array([sum(n for (kind, line), n in counts.items() if kind == what
                         and line != 'elsewhere') for what in ('wait', 'upload', 'later')])


def check_counts(found):
    """{what: totals} of some of COUNTS: print and compare them."""
    found = {name: tuple(np.round(values, 2).tolist()) for name, values in found.items()}
    for name, values in found.items():
        print(f'{name:30s}' + ''.join(f'{n:8g}' for n in values))
    assert found == {name: COUNTS[name] for name in found}


def test_how_often_the_host_waits():
    """A threshold of 0 lets no token exit before it has looped 8 times."""
    rules = {name: make_exit(name, 0.0) for name in ('norm', 'kl', 'accel')}
    ways = {'a token, fixed loops': dict(stop=300),
            'four drafts and their check': dict(draft_loops=7),
            **{f'a token, {name}': dict(exit=rule) for name, rule in rules.items()},
            'a token, norm and past': dict(exit=make_exit('norm', 0.0, wake=True)),
            'a token, one row has ended': dict(rows=2, stop=ord(' ')),
            'a pass of a wave': dict(wave=8),
            'a pass of a wave, norm_rel': dict(wave=8, exit=make_exit('norm_rel', 0.03))}
    found = {}
    with pretend.device() as counts:
        model = load_checkpoint(TEXT, NAME)[0]
        prompts = torch.tensor([[*b'def '], [*b'self']], device=NAME)
        for name, how in ways.items():
            marks, mark = [], lambda *_: marks.append(totals(counts))
            rows = how.pop('rows', 1)
            tokens = model.stream(prompts[:rows], 8, 0, n_loop=8, **how,
                                  trace=SimpleNamespace(append=mark))
            while len(marks) < 2:       # a wave marks its passes itself
                _ = next(tokens), 'wave' in how or mark()
            found[name] = marks[1] - marks[0]
    check_counts(found)
