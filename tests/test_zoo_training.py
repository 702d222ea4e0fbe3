"""The zoo: the training of Ouro's gate, and the choice of a block to loop (ETD)."""
import contextlib
import itertools
import math
import os

import conftest
import numpy as np
import pytest
import torch
from conftest import SYSTEMS
from test_train import TINY, make_book, trained

from common.checkpoint import load_checkpoint
from zoo import etd, ouro


def test_stage_1_by_hand(tiny, idx):
    """Three tokens a row, three steps: sum_t p_t L_t - beta H(p)."""
    model = tiny(**SYSTEMS['ouro'])
    targets = idx.roll(-1, 1)
    targets[:, 3:] = -100
    model.train()
    loss = ouro.stage_1(model, idx, targets, [3, 3])
    model.eval()
    trace = []
    with torch.no_grad():
        model(idx, n_loop=3, trace=trace)
        sums = []
        for g, entry in enumerate(trace):
            for b in range(3):
                for t in range(3):
                    goes_on, total = 1.0, 0.0
                    for k in (1, 2, 3):
                        x = entry['states'][k]
                        go = torch.sigmoid(model.gate(x[b, t])).item()
                        p = goes_on * (go if k < 3 else 1.0)
                        goes_on *= 1 - go
                        read = model.through_coda if g == 1 else model.readout
                        nats = -read(x).log_softmax(-1)[b, t, targets[b, t]].item()
                        total += p * nats + ouro.BETA * p * math.log(p)
                    sums.append(total)
    assert math.isclose(loss.item(), np.mean(sums), rel_tol=1e-4)


def test_stage_2_by_hand(tiny, idx):
    """Cross-entropy of 1 - lambda_t to sigmoid(50 (max(0, L_(t-1) - L_t) - .005)), t from 2."""
    model, targets = tiny(**SYSTEMS['ouro']), idx.roll(-1, 1)
    with torch.no_grad():
        loss = ouro.stage_2(model, idx, targets, [3, 3])
        trace, sums = [], []
        model(idx, n_loop=3, trace=trace)
        for g, entry in enumerate(trace):
            read = model.through_coda if g == 1 else model.readout
            log_p = torch.stack([read(x).log_softmax(-1) for x in entry['states']])
            for b, i, k in itertools.product(range(3), range(16), (2, 3)):
                nats = [-log_p[n, b, i, targets[b, i]].item() for n in (k - 1, k)]
                w = 1 / (1 + math.exp(-50 * (max(0.0, nats[0] - nats[1]) - 0.005)))
                goes = torch.sigmoid(model.gate(entry['states'][k][b, i])).item()
                sums.append(-w * math.log(1 - goes) - (1 - w) * math.log(goes))
    assert len({round(value, 3) for value in sums}) > 20
    assert math.isclose(loss.item(), np.mean(sums), rel_tol=1e-4)


def test_stage_2_trains_the_gate_alone_and_to_go_on_where_it_pays(tiny, idx):
    model = tiny(**SYSTEMS['ouro']).train()
    loss = ouro.stage_2(model, idx, idx.roll(-1, 1), [4, 4])
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        'gate.weight', 'gate.bias'}
    # with an improvement of 0 at every step the target is sigmoid(50 * -0.005)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.gate.weight.zero_()
        wanted = 1 / (1 + math.exp(50 * 0.005))
        model.gate.bias.fill_(-math.log(wanted / (1 - wanted)))     # 1 - lambda is just that
        loss = ouro.stage_2(model, idx, idx.roll(-1, 1), [4, 4])
    entropy = -wanted * math.log(wanted) - (1 - wanted) * math.log(1 - wanted)
    assert math.isclose(loss.item(), entropy, rel_tol=1e-5)


@pytest.fixture(scope='module')
def book(tmp_path_factory):
    """A folder with a text, a plain model in out-plain, and one with two groups in out."""
    folder = tmp_path_factory.mktemp('zoo')
    with contextlib.chdir(folder):
        make_book()
        trained(*TINY, '--n_layer=4', '--groups=[]', '--max_iters=4', '--out_dir=out-plain')
        trained(*TINY, '--n_layer=4', '--groups=[[1],[2]]', '--max_iters=2', '--out_dir=out')
    return folder


def test_both_stages_on_a_checkpoint_of_ours(book, monkeypatch):
    monkeypatch.chdir(book)
    how = ['--dataset=book', '--eval_loops=[1,2]', '--eval_windows=2', '--max_iters=2',
           '--keep_iters=[]', '--device=cpu']
    done = conftest.run('--stage=1', *how, '--init_from=out/ckpt.pt', '--out_dir=out-1',
                        script='zoo/ouro.py')
    assert done.returncode == 0, done.stderr
    done = conftest.run('--stage=2', *how, '--init_from=out-1/ckpt.pt', '--out_dir=out-2',
                        script='zoo/ouro.py')
    assert done.returncode == 0, done.stderr
    (before, _), (after, _) = (load_checkpoint(f'{out}/ckpt.pt') for out in ('out-1', 'out-2'))
    changed = {name for (name, p), q in zip(before.named_parameters(), after.parameters())
               if not torch.equal(p, q)}
    assert changed == {'gate.weight', 'gate.bias'}
    done = conftest.run('--out_dir=out-2', '--exit=gate', '--max_new_tokens=3', script='sample.py')
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('args, script, words', [
    (['--exit=gate'], 'sample.py', 'needs a model with a gate'),
    (['--exit=zoo.huginn:none'], 'sample.py', 'unknown exit rule'),
    (['--exit=zoo.nothing:kl'], 'sample.py', 'write MODULE:NAME'),
    (['--init_from=out/ckpt.pt'], 'zoo/etd.py', 'loops already'),
    (['--init_from=out-plain/ckpt.pt', '--block=[2,9]'], 'zoo/etd.py', 'must follow one another'),
    (['--init_from=out-plain/ckpt.pt', '--loops=[0]'], 'zoo/etd.py', 'loops must be'),
    (['--init_from=out-plain/ckpt.pt', '--out_dir=out-plain'], 'zoo/etd.py', 'written over'),
    (['--stage=3'], 'zoo/ouro.py', 'is no stage'),
    (['--objective=zoo.ouro:stage_9', '--gate', '--out_dir=out-9'], 'train.py',
     'write MODULE:NAME'),
    (['--objective=zoo.ouro:stage_1', '--out_dir=out-9'], 'train.py', 'it needs groups'),
    (['--stage=1', '--init_from=out-plain/ckpt.pt', '--out_dir=out-9'], 'zoo/ouro.py',
     'it needs groups'),
    (['--exit=.huginn:kl'], 'sample.py', 'write MODULE:NAME'),
])
def test_bad_input(book, monkeypatch, args, script, words):
    monkeypatch.chdir(book)
    done = conftest.run(*args, script=script)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert words in done.stderr


@pytest.mark.parametrize('curve, block', [
    ([0.5, 0.3, 0.1, 0.1, 0.1, 0.4], [2, 3, 4]),    # both knees are corners
    ([0.5, 0.1, 0.09, 0.08, 0.07, 0.06], [1, 2, 3, 4, 5]),
    ([0.3, 0.2, 0.1, 0.2, 0.3], [2]),               # straight sides have no knee
    ([0.1, 0.2], [0]),
    ([0.2], [0])])
def test_the_thinking_block(curve, block):
    assert etd.thinking_block(np.array(curve)) == block


def test_angles_by_hand(tiny, idx):
    model = tiny(groups=[])
    found = etd.angles(model, idx)
    x = model.wte(idx) + model.wpe(torch.arange(16))
    x = x * 4.0
    for i, layer in enumerate(model.h):
        x0, x = x[:, -1], layer(x)
        cosine = (x0 * x[:, -1]).sum(-1) / (x0.norm(dim=-1) * x[:, -1].norm(dim=-1))
        assert math.isclose(found[i], (cosine.arccos() / math.pi).mean().item(), rel_tol=1e-4)


def test_a_block_that_loops_once_is_the_plain_model(tiny, idx):
    model = tiny(groups=[])
    looping = etd.looped(model, [1, 2])
    assert torch.equal(looping(idx, n_loop=1)[0], model(idx)[0])
    # twice is the stack with its layers written out twice
    x = (model.wte(idx) + model.wpe(torch.arange(16))) * 4.0
    for i in (0, 1, 2, 1, 2, 3, 4):
        x = model.h[i](x)
    torch.testing.assert_close(looping(idx, n_loop=2)[0], model.readout(x))
    # damped, each of n steps goes an n-th of its way; once is as it is
    with etd.damping(looping, 1):
        torch.testing.assert_close(looping(idx, n_loop=1)[0], model(idx)[0])
    with etd.damping(looping, 2):
        damped = looping(idx, n_loop=2)[0]
    x = model.h[0]((model.wte(idx) + model.wpe(torch.arange(16))) * 4.0)
    for _ in range(2):
        x = x + (model.h[2](model.h[1](x)) - x) / 2
    torch.testing.assert_close(damped, model.readout(model.h[4](model.h[3](x))))


def test_etd_then_mid_training(book, monkeypatch):
    monkeypatch.chdir(book)
    done = conftest.run('--init_from=out-plain/ckpt.pt', '--n_windows=4', script='zoo/etd.py')
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('\n  ') + done.stdout.count('\n* ') >= 10      # every block of four
    assert sorted(os.listdir('out-etd')) == ['angles.csv', 'angles.png', 'blocks.csv', 'ckpt.pt']
    trained('--init_from=out-etd/ckpt.pt', '--dataset=book', '--out_dir=out-etd-trained',
            '--max_iters=2', '--eval_loops=[1,2]', '--eval_windows=2', '--keep_iters=[]')
    model, _ = load_checkpoint('out-etd-trained/ckpt.pt')
    assert len(model.groups) == 1 and model.config.injection == 'none'
