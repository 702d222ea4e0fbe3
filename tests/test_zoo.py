"""Other models' own numbers (tests/golden) from our classes; Ouro's gate; the blocks of ETD."""
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, finished, make_book, refused, same
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import geometry
from common.checkpoint import load_checkpoint
from common.evaluation import Score
from decode import teacher_forced
from decode.wave import can_wave
from exits import make_exit
from loops import Plan
from model import GPT
from zoo import etd, huginn, llama, ouro, surgery

# each class, and how a small model of it differs from `tiny`; test_decode.py decodes with them
CLASSES = {
    'model:GPT': (GPT, {}), 'zoo.ouro:Gated': (ouro.Gated, {}),
    'zoo.surgery:Looped': (surgery.Looped, dict(injection='none', x0='e')),
    'zoo.huginn:Huginn': (huginn.Huginn, dict(adapter_init='random', norm_inside=False,
                                              pos='rotary', mlp_width=24)),
    'zoo.ouro:Ouro': (ouro.Ouro, dict(injection='none', pos='rotary', mlp_width=24)),
}
OURO = CLASSES['zoo.ouro:Ouro'][1]
OWN = ['--batch_size=4', '--device=cpu', '--dataset=book', '--eval_loops=[1,2]', '--eval_windows=2']


def make_tokenizer_json(path, size=270):
    """A small byte-level BPE, as public models have it: bytes, a few merges, an end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=['<|endoftext|>'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if size > 256 else [])
    tokenizer.train_from_iterator(['the quick brown fox jumps over the lazy dog'] * 9, trainer)
    tokenizer.save(str(path))


def near(got, name, golden):
    """Is every entry as in the golden file, to 1e-5 of its largest one?"""
    wanted = torch.from_numpy(golden[name])
    assert got.shape == wanted.shape, name
    error = (got - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-5, (name, error)


def public_folder(folder, golden, dtype=torch.float32, shards=1):
    """A golden file's weights in the public layout: config.json and shards."""
    folder.mkdir(exist_ok=True)
    (folder / 'config.json').write_text(str(golden['config_json']))
    names = [name for name in golden.files if name.startswith('w/')]
    for i in range(shards):
        save_file({name[2:]: torch.from_numpy(golden[name]).to(dtype) for name in names[i::shards]},
                  folder / f'model-{i}.safetensors')
    return folder


def read(system, folder, *args, end=finished):
    """python -m zoo.SYSTEM --path=FOLDER, into FOLDER/out."""
    return end(f'--path={folder}', f'--out_dir={folder}/out', *args, script=f'zoo/{system}.py')


def public_model(system, folder, **how):
    """Golden numbers of a system's own code, and the model that ours makes of its weights."""
    golden = np.load(os.path.join(ROOT, 'tests', 'golden', f'{system}.npz'))
    read(system, public_folder(folder, golden, **how))
    model, checkpoint = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))
    assert checkpoint['model_class'] == f'zoo.{system}:{system.capitalize()}'
    return SimpleNamespace(golden=golden, model=model, folder=folder,
                           idx=torch.from_numpy(golden['input_ids']).long())


@pytest.fixture(scope='module')
def a_huginn(tmp_path_factory):
    return public_model('huginn', tmp_path_factory.mktemp('huginn'), shards=3)


@pytest.fixture(scope='module')
def an_ouro(tmp_path_factory):
    return public_model('ouro', tmp_path_factory.mktemp('ouro'))


# Huginn -------------------------------------------------------------------------------------------

def states_of(system, n_loop):
    """Huginn's states (K+1, B, T, C) from the golden first one, what enters the loop, logits."""
    group, trace = system.model.groups[0], []
    starts = torch.from_numpy(system.golden['s0'])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(group, 'init_state', lambda *_: starts)
        logits, _ = system.model(system.idx, n_loop=n_loop, trace=trace)
    return trace[0]['states'], trace[0]['e'], logits


def test_huginn_layer_by_layer(a_huginn):
    golden, model = a_huginn.golden, a_huginn.model
    steps = len(golden['states']) - 1
    states, e, logits = states_of(a_huginn, steps)
    near(e, 'prelude', golden)
    near(states, 'states', golden)
    near(model.groups[0].norm(states[-1]).detach(), 'latent_final', golden)
    near(torch.stack([model.through_coda(x) for x in states]).detach(), 'logits_per_step', golden)
    near(logits, f'logits_{steps}', golden)
    # the step norms, cosines and accelerations of geometry.py beside other code in float64
    states, _, _ = states_of(a_huginn, len(golden['paper/step_norm']))
    clear = torch.from_numpy(golden['paper/step_norm'][1:] > 1e-2)
    for name, mine in dict(step_norm=geometry.step_norm(states)[1:],
                           cos=geometry.step_cos(states), accel=geometry.accel(states)).items():
        wanted = torch.from_numpy(golden[f'paper/{name}'][1:])
        torch.testing.assert_close(mine[clear].double(), wanted[clear], rtol=1e-3, atol=5e-4)


# the gradients of the golden file; ln_f stands in two places with us, and its gradient is the sum
OUR_NAMES = {
    'wte.weight': ['wte.weight'], 'adapter.weight': ['h.2.adapter.weight'],
    'prelude.0.attn.Wqkv.weight': ['h.0.attn.c_attn.weight'],
    'core_block.0.attn.qk_bias': ['h.2.core.0.attn.qk_bias'],
    'core_block.3.norm_4.weight': ['h.2.core.3.n4.weight'],
    'ln_f.weight': ['ln_f.weight', 'h.2.norm.weight']}


@pytest.mark.parametrize('kind, bptt_k', [('bptt', 2), ('full', 5)])
def test_huginn_gradients(a_huginn, monkeypatch, kind, bptt_k):
    """Of five loops, through the last two alone and through all of them."""
    golden, model, group = a_huginn.golden, a_huginn.model, a_huginn.model.groups[0]
    monkeypatch.setattr(group, 'init_state', lambda *_: torch.from_numpy(golden['s0']))
    monkeypatch.setattr(group, 'bptt_k', bptt_k)
    _, loss = model(a_huginn.idx, torch.from_numpy(golden['labels']).long(), n_loop=5)
    near(loss.detach(), f'{kind}/loss', golden)
    model.zero_grad()
    loss.backward()
    parameters = dict(model.named_parameters())
    for theirs, ours in OUR_NAMES.items():
        name = f'{kind}/grad/transformer.{theirs}'
        near(sum(parameters[our].grad for our in ours).view(golden[name].shape), name, golden)


@pytest.mark.parametrize('name', huginn.EXITS)
def test_criteria_are_those_of_the_published_code(a_huginn, name):
    """Values and exits of whole rows, and of each token alone."""
    golden, model, rule = a_huginn.golden, a_huginn.model, make_exit(f'zoo.huginn:{name}')
    theirs, threshold = golden[f'prefill/{name}/values'], golden[f'prefill/{name}/threshold'].item()
    states, _, _ = states_of(a_huginn, len(theirs))

    def values_of(signal, states):
        values, memo = [], None
        for x0, x1 in zip(states, states[1:]):
            value, memo = signal(x0, x1, memo, model.through_coda)
            values.append(value.detach())
        return torch.stack(values)                                              # (K, B, T)

    rows = values_of(rule.signal, states)
    assert (rows == rows[..., :1]).all()                # one value for the whole row
    exits = [next((k for k, value in enumerate(row, 1) if value < rule.tau), 0)     # 0: never
             for row in rows[..., 0].T]
    assert exits == golden[f'prefill/{name}/exit'].tolist()
    if name == 'argmax-stability':                      # theirs counts, and exits from five on
        assert math.isclose(1 / threshold, rule.tau, rel_tol=1e-6)
        np.testing.assert_allclose(1 / rows[..., 0].numpy() - 1, theirs, atol=1e-4)
        return
    assert math.isclose(threshold, rule.tau, rel_tol=1e-6)
    near(rows[..., 0], f'prefill/{name}/values', golden)
    tokens = values_of(getattr(huginn, name.replace('-', '_')), states[:, :1])
    near(tokens, f'tok/{name}/values', golden)


def greedy(system, wanted, n_loop, rule, **how):
    """The first row of the golden tokens, continued to the length wanted: all ids, the steps."""
    row = system.idx[0]
    system.model.groups[0].x0 = 'zero' if system.model.groups[0].x0 != 'e' else 'e'
    tokens = list(system.model.stream(row[None], wanted.shape[1] - len(row), temperature=0,
                                      n_loop=n_loop, exit=rule, **how))
    return (row.tolist() + [token.item() for token, _ in tokens],
            [used.item() for _, used in tokens])


# the caches of the published code, and ours; its `full` with an exit leaves out tokens that have no
# key of a step, which none of ours does
EXACT, RING, LATEST = dict(cache='exact'), dict(cache='ring', ring=4), dict(cache='ring', ring=1)


@pytest.mark.parametrize('name, rule, how', [
    ('gen/fixed8/full', None, EXACT), ('gen/fixed8/latest-m4-compress-s16', None, RING),
    ('gen/kl/latest-m4-compress-s4', 'kl', LATEST),
    *((f'gen/{rule}/latest-m4', rule, EXACT) for rule in huginn.EXITS),
    ('warm/minimal', None, dict(cache='exact', warm_start=True)),
    ('warm/adaptive', 'latent-diff', dict(cache='exact', warm_start=True))])
def test_huginn_writes_the_same(a_huginn, name, rule, how):
    golden, exit = a_huginn.golden, rule and make_exit(f'zoo.huginn:{rule}')
    ids, steps = greedy(a_huginn, golden[f'{name}/ids'], 32 if rule else 8, exit, **how)
    assert ids == golden[f'{name}/ids'][0].tolist()
    # `adaptive` starts from a state before its norm, and we from one behind it
    assert rule is None or 'warm' in name or steps == golden[f'{name}/steps'].tolist()


# Ouro ---------------------------------------------------------------------------------------------

def test_ouro_at_every_loop(an_ouro):
    golden, model, idx = an_ouro.golden, an_ouro.model, an_ouro.idx
    steps, trace = len(golden['hidden_per_step']), []
    with torch.no_grad():
        model(idx, n_loop=steps, trace=trace)
        states = trace[0]['states'][1:]
        logits = [model(idx, n_loop=n)[0] for n in range(1, steps + 1)]
        gates = model.gate_logit(states)
    near(states, 'hidden_per_step', golden)
    near(torch.stack(logits), 'logits_per_step', golden)
    near(gates, 'gate_logit_per_step', golden)
    near(ouro.exit_log_p(gates.flatten(1)).exp().view_as(gates), 'exit_pdf', golden)
    # the published code runs all loops and selects afterwards: the rule's signal on those states
    for q in ('0.3', '0.6', '0.9'):
        rule, memo, below_tau = make_exit('zoo.ouro:gate', 1 - float(q)), None, []
        for x in states:
            value, memo = rule.signal(None, x, memo, model.gate_logit)
            below_tau.append(value < rule.tau)
        below_tau[-1] = torch.ones_like(below_tau[-1])
        first = torch.stack(below_tau).int().argmax(dim=0)                      # (B, T), from 0
        assert torch.equal(first + 1, torch.from_numpy(golden[f'exit_step/{q}']))


def test_ouro_writes_the_same_and_its_gate_saves_loops(an_ouro):
    golden, model, k_max = an_ouro.golden, an_ouro.model, len(an_ouro.golden['hidden_per_step'])
    ids, _ = greedy(an_ouro, golden['greedy'], k_max, None, cache='exact')
    assert ids == golden['greedy'][0].tolist()
    # a token alone exits where the published code would select, and no later step is run
    logits, used, evals = teacher_forced(model, an_ouro.idx[:, :1],
                                         Plan([k_max], make_exit('zoo.ouro:gate', 0.1)))
    wanted = torch.from_numpy(golden['exit_step/0.9'][:, :1])
    assert torch.equal(evals[..., 0], wanted) and torch.equal(used[..., 0], wanted)
    near(logits, 'logits_exit/0.9', {'logits_exit/0.9': golden['logits_exit/0.9'][:, :1]})


# checkpoints, of all classes ----------------------------------------------------------------------

@pytest.mark.parametrize('name', CLASSES)
def test_a_checkpoint_names_its_class(tmp_path, tiny, idx, name):
    kind, shape = CLASSES[name]
    own = dict(mlp_width=64, norm_eps=1e-3) if 'mlp_width' in shape else {}
    model, path = tiny(kind=kind, **shape | own), str(tmp_path / 'ckpt.pt')
    if own:
        norms = [m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)]
        assert len(norms) > 20 and all(norm.eps == 1e-3 for norm in norms)
    torch.save(dict(model=model.state_dict(), model_args=vars(model.config), model_class=name,
                    config={}, iter_num=3, tokenizer='bytes'), path)
    loaded, _ = load_checkpoint(path)
    assert type(loaded) is kind
    assert torch.equal(loaded(idx, n_loop=2)[0], model(idx, n_loop=2)[0])


def test_the_class_of_a_checkpoint(tmp_path, monkeypatch):
    """Code outside of model.py and zoo/ is imported only if --model_class or its file is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    make_book()
    (tmp_path / 'foreign.py').write_text('from model import GPT\nclass Mine(GPT):\n    pass\n')
    printed = finished(*TINY, '--max_iters=1', '--model_class=foreign:Mine')
    assert printed.endswith('next: python sample.py foreign.py --out_dir=out\n')
    monkeypatch.delitem(sys.modules, 'foreign')
    start = ['--init_from=out/ckpt.pt', '--out_dir=out-2', *TINY]
    assert 'only if you name it: write foreign.py behind the script' in refused(*start)
    assert 'foreign' not in sys.modules
    finished(*start, '--model_class=foreign:Mine', '--max_iters=1')
    finished('foreign.py', '--max_new_tokens=2', script='sample.py')


# public folders -----------------------------------------------------------------------------------

def test_weights_in_bfloat16_stay_so_on_disk(tmp_path):
    """They take half the room; loaded they are float32."""
    model = public_model('ouro', tmp_path, dtype=torch.bfloat16).model
    on_disk = torch.load(tmp_path / 'out' / 'ckpt.pt', weights_only=True)['model'].values()
    assert {p.dtype for p in on_disk} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def put_tensor(name, tensor, folder):
    """Put a tensor (None: take it away) into the folder's only shard."""
    tensors = load_file(folder / 'model-0.safetensors') | {name: tensor}
    save_file({name: t for name, t in tensors.items() if t is not None},
              folder / 'model-0.safetensors')


def put_field(folder, **fields):
    config = json.loads((folder / 'config.json').read_text()) | fields
    (folder / 'config.json').write_text(json.dumps(config))


INDEX = 'model.safetensors.index.json'


def put_index(folder, name='model-0.safetensors'):
    (folder / INDEX).write_text(json.dumps(dict(weight_map={'lm_head.weight': name})))


def put_stray(name, folder):
    """Other weights beside those of the folder."""
    save_file({'lm_head.weight': torch.zeros(61, 32)}, folder / name)


def put_pointer(name, folder):
    """What a clone without git-lfs has in place of a large file."""
    (folder / name).write_text('version https://git-lfs.github.com/spec/v1\n'
                               f'oid sha256:{"0" * 64}\nsize 123\n')


@pytest.mark.parametrize('spoil, words', [
    (lambda folder: os.remove(folder / 'config.json'), 'read config.json (FileNotFoundError: '),
    (partial(put_field, hidden_act='gelu'), "hidden_act = 'gelu'"),
    (lambda folder: (folder / 'model-0.safetensors').write_bytes(b'cut short'),
     'model-0.safetensors (SafetensorError: Error while deserializing header'),
    (partial(put_tensor, 'lm_head.weight', None), "lacks 'lm_head.weight'"),
    (partial(put_tensor, 'more', torch.zeros(2)), 'Unexpected key(s) in state_dict: "more"'),
    (partial(put_tensor, 'model.norm.weight', torch.tensor([1, math.nan]).repeat(16)),
     'model.norm.weight has a NaN'),
    (lambda folder: make_tokenizer_json(folder / 'tokenizer.json'), 'more than the 61 tokens'),
    # what turns queries and keys otherwise, or reads fewer of them, in the words of several years
    (partial(put_field, rope_parameters=dict(rope_theta=5e5, rope_type='yarn', factor=4.0)),
     "rope_type = 'yarn'"),
    (partial(put_field, rope_parameters=dict(full_attention=dict(rope_type='default'))),
     'full_attention = {'),
    (partial(put_field, rope_scaling=dict(type='linear', factor=2.0)), "type = 'linear'"),
    (partial(put_field, partial_rotary_factor=0.5), 'partial_rotary_factor = 0.5'),
    (partial(put_field, use_sliding_window=True, sliding_window=8), 'use_sliding_window = True'),
    (partial(put_field, layer_types=['full_attention', 'chunked_attention']),
     "layer_types = 'chunked_attention'"),
    # files that are not whole, or more than one set of weights
    (partial(put_pointer, 'model-0.safetensors'), 'git lfs pull'),
    (partial(put_pointer, 'tokenizer.json'), 'git lfs pull'),
    (partial(put_stray, 'model-1.safetensors'), 'model-1.safetensors has lm_head.weight again'),
    (lambda folder: (put_index(folder), put_stray('model.safetensors', folder)),
     'model.safetensors has lm_head.weight again'),
    (partial(put_index, name='model-7.safetensors'), 'model-7.safetensors (FileNotFoundError: '),
    (lambda folder: (folder / INDEX).write_text('{}'), "lacks 'weight_map'")])
def test_bad_folders(tmp_path, an_ouro, spoil, words):
    folder = public_folder(tmp_path, an_ouro.golden)
    spoil(folder)
    for args in ([], ['--dry_run']):
        assert words in read('ouro', folder, *args, end=refused)
    assert not (folder / 'out').exists()


@pytest.mark.parametrize('change', [
    # model.safetensors, or what the index names, and nothing else
    lambda folder: (os.rename(folder / 'model-0.safetensors', folder / 'model.safetensors'),
                    put_stray('model_old.safetensors', folder)),
    lambda folder: (put_index(folder), put_stray('model-1.safetensors', folder)),
    # tables that the model computes itself
    partial(put_tensor, 'model.layers.0.self_attn.rotary_emb.inv_freq', torch.ones(4)),
    # the same rotary positions in other words, those of transformers 5 first
    partial(put_field, rope_theta=7.0, rope_parameters=dict(rope_theta=1e4, rope_type='default')),
    partial(put_field, rope_scaling=dict(type='default'), layer_types=['full_attention'] * 3,
            use_sliding_window=False, sliding_window=8)])
def test_the_same_model(tmp_path, an_ouro, change):
    folder = public_folder(tmp_path, an_ouro.golden)
    change(folder)
    read('ouro', folder)
    model, _ = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))
    assert model.config == an_ouro.model.config
    assert same(model.state_dict(), an_ouro.model.state_dict())


def test_a_huginn_with_more_tensors(tmp_path, a_huginn):
    """A table that the model computes itself, and the embedding by its second name."""
    folder = public_folder(tmp_path, a_huginn.golden)
    put_tensor('freqs_cis', torch.ones(4), folder)
    put_tensor('lm_head.weight', a_huginn.model.wte.weight.detach(), folder)
    read('huginn', folder)
    weights = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))[0].state_dict()
    assert same(weights, a_huginn.model.state_dict())


def test_the_command_for_pytorch_model_bin(tmp_path, monkeypatch, an_ouro):
    """The error shows how to make *.safetensors of it, which also works with tied weights."""
    folder = public_folder(tmp_path, an_ouro.golden)
    tensors = load_file(folder / 'model-0.safetensors')
    tensors['x.rotary_emb.inv_freq'] = tensors['lm_head.weight']        # two names of one
    torch.save(tensors, folder / 'pytorch_model.bin')
    os.remove(folder / 'model-0.safetensors')
    command = re.search(r'python -c ".*"', read('ouro', folder, end=refused))[0]
    monkeypatch.chdir(folder)
    exec(shlex.split(command)[2], {})
    read('ouro', folder)


def test_scripts_run_on_it(tmp_path, monkeypatch, an_ouro):
    monkeypatch.chdir(tmp_path)
    folder = public_folder(tmp_path / 'public', an_ouro.golden)
    make_tokenizer_json(folder / 'tokenizer.json', 40)
    printed, C = read('ouro', folder, '--dry_run'), an_ouro.model.config.n_embd
    assert f'q_proj.weight  ({C}, {C})  torch.float32  {4 * C * C:,} bytes' in printed
    assert not (folder / 'out').exists()
    read('ouro', folder)
    assert 'out holds a run' in read('ouro', folder, end=refused)
    read('ouro', folder, '--overwrite')
    shutil.move(folder / 'out', 'moved')        # the tokenizer is beside the checkpoint
    printed = finished('--out_dir=moved', '--start=ab', '--exit=zoo.ouro:gate', '--n_loop=4',
                       '--max_new_tokens=4', script='sample.py')
    assert printed.startswith('ab')


# the training of Ouro's gate ----------------------------------------------------------------------

def gates_and_nats(model, idx, targets):
    """For each group, after each of three loop steps: lambda and cross-entropy (3, B, T)."""
    trace = []
    model(idx, n_loop=3, trace=trace)
    for entry, read in zip(trace, (model.readout, model.through_coda), strict=True):
        states = entry['states'][1:]
        nats = [-read(x).log_softmax(-1).gather(-1, targets[..., None]) for x in states]
        yield torch.sigmoid(model.gate(states)).squeeze(-1), torch.cat(nats, -1).movedim(-1, 0)


@torch.no_grad()
def test_stage_1_by_hand(tiny, idx):
    """Three labels a row, three steps: sum_t p_t L_t - beta H(p). In evaluation it is plain."""
    model, targets = tiny(kind=ouro.Ouro, **OURO), idx.roll(-1, 1)
    labels = targets.clone()
    labels[:, 3:] = -100
    logits, plain = model(idx, labels, n_loop=3)
    torch.testing.assert_close(plain, torch.nn.functional.cross_entropy(
        logits[:, :3].flatten(0, 1), targets[:, :3].flatten()))
    losses = []
    for gates, nats in gates_and_nats(model, idx, targets):
        first, second = gates[0], (1 - gates[0]) * gates[1]
        p = torch.stack((first, second, 1 - first - second))
        losses.append((p * nats + ouro.BETA * p * p.log()).sum(0)[:, :3].mean())
    in_training, loss = model.train()(idx, labels, n_loop=[3, 3])
    assert math.isclose(loss.item(), np.mean(losses), rel_tol=1e-4)
    torch.testing.assert_close(in_training, logits)


def test_stage_2_by_hand(tiny, idx):
    """Cross-entropy of 1 - lambda_t to sigmoid(50 (max(0, L_(t-1) - L_t) - .005)), t from 2."""
    model, targets = tiny(kind=ouro.OuroGateOnly, **OURO), idx.roll(-1, 1)
    values = []
    with torch.no_grad():
        for gates, nats in gates_and_nats(model, idx, targets):
            for t in (1, 2):            # counted from 0
                better = (nats[t - 1] - nats[t]).clamp(min=0)
                w = 1 / (1 + torch.exp(-50 * (better - 0.005)))
                values.append(-w * (1 - gates[t]).log() - (1 - w) * gates[t].log())
    values = torch.stack(values)
    _, loss = model.train()(idx, targets, n_loop=[3, 3])
    assert len(values.round(decimals=3).unique()) > 20
    assert math.isclose(loss.item(), values.mean(), rel_tol=1e-4)
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        'gate.weight', 'gate.bias'}
    # with one loop there is nothing to choose
    assert model(idx, targets, n_loop=1)[1] == 0


@pytest.fixture(scope='module')
def book(run_folder):
    """Beside the model with two groups in out, a plain one in out-plain."""
    with contextlib.chdir(run_folder):
        finished(*TINY, '--groups=[]', '--max_iters=2', '--keep_iters=[]', '--out_dir=out-plain')


def config(name):
    return os.path.join(ROOT, 'config', f'{name}.py')


@pytest.mark.parametrize('kinds, stage_1, stage_2', [
    (['Gated', 'GateOnly'], ['--model_class=zoo.ouro:Gated', '--init_from=out/ckpt.pt'],
     ['--model_class=zoo.ouro:GateOnly']),
    (['Ouro', 'OuroGateOnly'], [config('ouro'), '--n_layer=2', '--n_embd=16', '--groups=[[0,1]]'],
     [])], ids=['gets a gate', 'ouro'])
def test_both_stages(book, here, tmp_path, kinds, stage_1, stage_2):
    """On a checkpoint of ours and on Ouro's shape; --resume goes on with the class of its run."""
    first, second = (f'{tmp_path}/{kind}' for kind in kinds)
    finished(*stage_1, *OWN, f'--out_dir={first}', '--max_iters=1')
    finished(config('ouro_gate'), *stage_2, *OWN, f'--init_from={first}/ckpt.pt',
             f'--out_dir={second}', '--max_iters=1')
    finished('--resume', f'--out_dir={second}', '--max_iters=2')
    models, checkpoints = zip(*(load_checkpoint(f'{out}/ckpt.pt') for out in (first, second)))
    assert [one['model_class'] for one in checkpoints] == [f'zoo.ouro:{kind}' for kind in kinds]
    one, other = (model.state_dict() for model in models)
    assert {name for name in one if not torch.equal(one[name], other[name])} == {
        'gate.weight', 'gate.bias'}


@pytest.mark.parametrize('args, script, words', [
    (['--init_from=out/ckpt.pt'], 'zoo/etd.py', 'train a plain one'),
    (['--init_from=out-plain/ckpt.pt', '--n_windows=4', '--block=[2,9]'], 'zoo/etd.py',
     'must be layers from 0 to 3'),
    (['--init_from=out-plain/ckpt.pt', '--n_windows=4', '--loops=[0]'], 'zoo/etd.py',
     'n_loop must be'),
    (['--init_from=out-plain/ckpt.pt', '--candidates=[2]'], 'zoo/etd.py', 'pairs [first, last]'),
    (['--init_from=out-plain/ckpt.pt', '--out_dir=out-plain'], 'zoo/etd.py', 'overwritten'),
    (['--init_from=out-plain/ckpt.pt', '--out_dir=book.txt/new'], 'zoo/etd.py', 'cannot write'),
    (['--model_class=zoo.ouro:Gated', *TINY, '--groups=[]', '--out_dir=new'], 'train.py',
     'needs groups')])
def test_bad_input(book, here, args, script, words):
    assert words in refused(*args, script=script)


def test_layers_that_are_none_are_refused_before_the_work(book, here):
    with mock.patch('data.held_out_windows', side_effect=AssertionError):
        line = refused('--init_from=out-plain', '--block=[2,9]', script='zoo/etd.py')
    assert 'block = [2, 9] must be layers from 0 to 3' in line


# ETD ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('curve, block', [
    ([0.5, 0.3, 0.1, 0.1, 0.1, 0.4], [2, 3, 4]),    # both knees are corners
    ([0.5, 0.1, 0.09, 0.08, 0.07, 0.06], [1, 2, 3, 4, 5]),
    ([0.3, 0.2, 0.1, 0.2, 0.3], [2]),               # straight sides have no knee
    ([0.2], [0])])
def test_the_thinking_block(curve, block):
    assert etd.thinking_block(np.array(curve)) == block


def test_angles_by_hand(tiny, idx):
    model = tiny(groups=[])
    found, x = etd.angles(model, idx), model.embed(idx, torch.arange(16))
    for i, layer in enumerate(model.h):
        x0, x = x[:, -1], layer(x)
        cosine = (x0 * x[:, -1]).sum(-1) / (x0.norm(dim=-1) * x[:, -1].norm(dim=-1))
        assert math.isclose(found[i], (cosine.arccos() / math.pi).mean().item(), rel_tol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize('kind', [GPT, llama.Llama])
@pytest.mark.parametrize('injection', ['none', 'bridge'])
def test_a_block_that_loops(tiny, idx, kind, injection):
    """Once it is the plain model, and twice the stack with its layers written out twice."""
    model = tiny(kind=kind, groups=[], pos='rotary' if kind is llama.Llama else 'learned')
    looping = surgery.looped(model, [1, 2], injection)
    assert torch.equal(looping(idx, n_loop=1)[0], model(idx)[0])
    assert not can_wave(looping)            # its input comes in by x^(0) alone, or mostly
    e = model.h[0](model.embed(idx, torch.arange(16)))
    x = e
    for i in (1, 2, 1, 2, 3, 4):
        x = model.h[i](x)
    torch.testing.assert_close(looping(idx, n_loop=2)[0], model.readout(x))
    if injection == 'bridge':           # what W brings in
        looping.groups[0].adapter.w.weight.fill_diagonal_(0.5)
        x = e + 0.5 * e
        for i in (1, 2, 3, 4):
            x = model.h[i](x)
        torch.testing.assert_close(looping(idx, n_loop=1)[0], model.readout(x))


def test_the_block_is_chosen(tiny, idx, monkeypatch, capsys):
    """By the knees, which may say little; of the candidates the one with the least mean loss."""
    nats = iter([{1: 2.0, 2: 2.5}, {1: 2.0, 2: 2.1}, {1: 2.0, 2: 3.0}] * 9)
    for name, value in dict(
            loops=[1, 2], thinking_block=lambda curve: [1, 2, 3],
            evaluate=lambda *_: {n: Score(torch.ones(1), torch.ones(1), torch.tensor([loss]))
                                 for n, loss in next(nats).items()}).items():
        monkeypatch.setattr(etd, name, value)
    assert etd.choose(tiny(groups=[]), None, idx, 'cpu')[0] == [1, 2, 3]
    assert 'the knees say little: their block is 3 of 5 layers' in capsys.readouterr().out
    monkeypatch.setattr(etd, 'candidates', [[0, 0], [1, 2], [3, 4]])
    assert etd.choose(tiny(groups=[]), None, idx, 'cpu')[0] == [1, 2]
    assert 'the knees' not in capsys.readouterr().out
    # a block that is given is taken, and measured beside the candidates
    monkeypatch.setattr(etd, 'block', [2, 3])
    chosen, rows = etd.choose(tiny(groups=[]), None, idx, 'cpu')
    assert chosen == [2, 3] and [row['block'] for row in rows] == ['0-0', '1-2', '3-4', '2-3']
    assert '* 2-3 ' in capsys.readouterr().out


def test_a_group_that_does_more_than_its_layers(book, here, monkeypatch):
    """A model whose group has a norm of its own is refused, and nothing is written."""
    monkeypatch.setattr(surgery, 'CLASSES', {})
    for name, value in dict(init_from='out-plain/ckpt.pt', block=[1, 2], n_windows=4).items():
        monkeypatch.setattr(etd, name, value)
    with pytest.raises(ValueError, match='does more in a group'):
        etd.main()
    assert not os.path.exists('out-plain-etd/ckpt.pt')


def test_the_folder_beside_that_of_a_checkpoint(book, here, monkeypatch):
    """Its name has -etd behind it, also from inside the folder: no hidden folder `.-etd`."""
    assert etd.folder_beside('out-plain/ckpt.pt') == 'out-plain-etd'
    assert etd.folder_beside('a/b/../out-plain/ckpt.pt') == 'a/out-plain-etd'
    shutil.copytree('out-plain', 'inside')
    monkeypatch.chdir('inside')
    os.symlink('../data', 'data')
    printed = finished('--init_from=./ckpt.pt', '--block=[1]', '--n_windows=2', script='zoo/etd.py')
    assert os.path.exists('../inside-etd/ckpt.pt') and not os.path.exists('.-etd')
    assert f'{os.path.realpath("..")}/inside-etd: ckpt.pt' in printed


def test_etd_then_mid_training(book, here):
    printed = finished('--init_from=out-plain/ckpt.pt', '--n_windows=4', script='zoo/etd.py')
    assert printed.count('\n  ') + printed.count('\n* ') >= 10     # every block of four
    assert set(os.listdir('out-plain-etd')) - {'.lock'} == {'blocks.csv', 'ckpt.pt'}
    finished('--init_from=out-plain-etd/ckpt.pt', '--dataset=book', '--out_dir=trained',
             '--max_iters=2', '--eval_loops=[1,2]', '--eval_windows=2')
    model, checkpoint = load_checkpoint('trained/ckpt.pt')
    assert len(model.groups) == 1 and checkpoint['model_class'] == 'zoo.surgery:Looped'
