"""
The zoo: other systems' numbers, out of the weights in tests/golden, by way of files in their public
layout, and what is refused.
"""
import glob
import json
import math
import os
import shutil
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, SYSTEMS, TAUS
from safetensors.torch import save_file
from test_decode import token_by_token
from test_encoding import make_tokenizer_json
from test_train import make_book

import geometry
from common.checkpoint import load_checkpoint
from decode import stream
from exits import make_exit
from serving.batching import serve
from serving.requests import Request
from zoo import huginn, ouro

GOLDEN = os.path.join(ROOT, 'tests', 'golden')
OF_ITS_SCALE = 1e-5         # how near a number must be


def near(got, name, golden):
    """Is every entry as in the golden file, to a part of its largest one?"""
    wanted = torch.from_numpy(golden[name])
    assert got.shape == wanted.shape, name
    error = (got - wanted).abs().max() / wanted.abs().max()
    assert error < OF_ITS_SCALE, (name, error)


def public_folder(folder, golden, dtype=torch.float32, shards=1):
    """A golden file's weights in the public layout: config.json, shards and their index."""
    os.makedirs(folder, exist_ok=True)
    with open(folder / 'config.json', 'w') as f:
        f.write(str(golden['config_json']))
    names = [name for name in golden.files if name.startswith('w/')]
    index = {}
    for i in range(shards):
        file = f'model-{i}.safetensors'
        part = {name[2:]: torch.from_numpy(golden[name]).to(dtype) for name in names[i::shards]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    if shards > 1:
        with open(folder / 'model.safetensors.index.json', 'w') as f:
            json.dump(dict(weight_map=index), f)
    return folder


def read(system, folder, *args):
    """python -m zoo.SYSTEM --path=FOLDER, into FOLDER/out."""
    return conftest.run(f'--path={folder}', f'--out_dir={folder}/out', *args,
                        script=f'zoo/{system}.py')


@pytest.fixture(scope='module', params=sorted(glob.glob('huginn*.npz', root_dir=GOLDEN)))
def a_huginn(request, tmp_path_factory):
    """Golden numbers of Huginn's own code, and the model that our loader makes of its weights."""
    golden = np.load(os.path.join(GOLDEN, request.param))
    folder = public_folder(tmp_path_factory.mktemp('huginn'), golden, shards=3)
    done = read('huginn', folder)
    assert done.returncode == 0, done.stderr
    model, _ = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))
    return SimpleNamespace(golden=golden, model=model, folder=folder,
                           idx=torch.from_numpy(golden['input_ids']).long())


@pytest.fixture(scope='module', params=sorted(glob.glob('ouro*.npz', root_dir=GOLDEN)))
def an_ouro(request, tmp_path_factory):
    golden = np.load(os.path.join(GOLDEN, request.param))
    folder = public_folder(tmp_path_factory.mktemp('ouro'), golden)
    done = read('ouro', folder)
    assert done.returncode == 0, done.stderr
    model, _ = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))
    return SimpleNamespace(golden=golden, model=model, folder=folder,
                           idx=torch.from_numpy(golden['input_ids']).long())


# Huginn -------------------------------------------------------------------------------------------

def states_of(huginn, n_loop):
    """Its states (K+1, B, T, C) from the golden first one, and what enters the loop."""
    golden, model = huginn.golden, huginn.model
    group, trace = model.groups[0], []
    starts = torch.from_numpy(golden['s0'])
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(group, 'init_state', lambda *_: starts)
        logits, _ = model(huginn.idx, n_loop=n_loop, trace=trace)
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


@pytest.mark.parametrize('kind', ['bptt', 'full'])
def test_huginn_gradients(a_huginn, kind):
    """Through the last loops alone, and through all of them."""
    golden, model, group = a_huginn.golden, a_huginn.model, a_huginn.model.groups[0]
    targets, starts = torch.from_numpy(golden['labels']).long(), torch.from_numpy(golden['s0'])
    pieces, parameters = huginn.pieces_of(model.config), dict(model.named_parameters())
    names = [name for name in golden.files if name.startswith(f'{kind}/grad/')]
    assert names

    def gradients(n_loop, bptt_k):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, 'init_state', lambda *_: starts)
            patch.setattr(group, 'bptt_k', bptt_k)
            _, loss = model(a_huginn.idx, targets, n_loop=n_loop)
        model.zero_grad()
        loss.backward()
        # ln_f stands in two places with us, and its gradient is the sum of both
        return loss.detach(), {
            name: sum(parameters[ours].grad for ours in
                      pieces[name.removeprefix(f'{kind}/grad/')].names).view(golden[name].shape)
            for name in names}

    # the file does not say how many loops it took, and how many of them with gradients
    n_loop = next(n for n in range(1, 65)
                  if abs(gradients(n, 1)[0].item() - golden[f'{kind}/loss']) < 1e-5)
    tried = range(1, n_loop) if kind == 'bptt' else [n_loop]
    off = [max(np.abs(gradient.numpy() - golden[name]).max() for name, gradient
               in gradients(n_loop, k)[1].items()) for k in tried]
    loss, found = gradients(n_loop, tried[int(np.argmin(off))])
    near(loss, f'{kind}/loss', golden)
    for name, gradient in found.items():
        near(gradient, name, golden)


@pytest.mark.parametrize('name', huginn.EXITS)
def test_criteria_are_those_of_the_published_code(a_huginn, name):
    """Values and exits of whole rows, and of each token for itself."""
    golden, model, rule = a_huginn.golden, a_huginn.model, make_exit(f'zoo.huginn:{name}')
    values = golden[f'prefill/{name}/values']
    states, _, _ = states_of(a_huginn, len(values))
    mine, memo = [], None
    for x0, x1 in zip(states, states[1:]):
        value, memo = rule.signal(x0, x1, memo, model.through_coda)
        assert (value == value[:, :1]).all()            # one for the whole row
        mine.append(value[:, 0].detach())
    mine, threshold = torch.stack(mine), float(golden[f'prefill/{name}/threshold'])
    if name == 'argmax-stability':                      # theirs counts, and leaves from five on
        threshold = 1 / threshold
        np.testing.assert_allclose(1 / mine.numpy() - 1, values, atol=1e-4)
    else:
        near(mine, f'prefill/{name}/values', golden)
    assert math.isclose(threshold, rule.tau, rel_tol=1e-6)
    assert below(mine, rule.tau) == golden[f'prefill/{name}/exit'].tolist()


@pytest.mark.parametrize('signal, name', [
    (huginn.latent_diff, 'latent-diff'), (huginn.cosine, 'cosine'), (huginn.kl, 'kl'),
    (huginn.minp_kl, 'minp-kl'), (huginn.entropy_diff, 'entropy-diff')])
def test_criteria_of_single_tokens(a_huginn, signal, name):
    golden, model = a_huginn.golden, a_huginn.model
    states, _, _ = states_of(a_huginn, len(golden[f'tok/{name}/values']))
    mine, memo = [], None
    for x0, x1 in zip(states[:, :1], states[1:, :1]):
        value, memo = signal(x0, x1, memo, model.through_coda)
        mine.append(value.detach())
    near(torch.stack(mine), f'tok/{name}/values', golden)
    # of a token whose value is the threshold but for rounding, nothing is said
    tau = float(golden[f'tok/{name}/threshold'])
    sure = (abs(golden[f'tok/{name}/values'][:, 0] - tau) > 1e-3 * tau).all(axis=0)
    found = np.array(below(torch.stack(mine)[:, 0], tau))
    assert (found == golden[f'tok/{name}/exit'])[sure].all() and sure.sum() > 9


def below(values, tau):
    """The first step, from 1, at which each token's value (K, B) is below tau; 0 if none is."""
    return [next((k for k, v in enumerate(row, 1) if v < tau), 0) for row in values.T]


def test_probes_beside_other_code_in_float64(a_huginn):
    golden = a_huginn.golden
    states, _, _ = states_of(a_huginn, len(golden['paper/step_norm']))
    norm = golden['paper/step_norm']
    clear = torch.from_numpy(norm[1:] > 1e-2)
    for name, mine in dict(step_norm=geometry.step_norm(states)[1:],
                           cos=geometry.step_cos(states), accel=geometry.accel(states)).items():
        wanted = torch.from_numpy(golden[f'paper/{name}'][1:])
        torch.testing.assert_close(mine[clear].double(), wanted[clear], rtol=1e-4, atol=1e-4)
    assert clear.float().mean() > 0.5


# the caches of the published code, and ours: `full` with an exit leaves tokens out that have no key
# of a step, which none of ours does
POLICIES = {'full': dict(cache='exact'), 'latest-m4': dict(cache='exact'),
            'latest-m4-compress-s16': dict(cache='ring', ring=4),
            'latest-m4-compress-s4': dict(cache='ring', ring=1)}


@pytest.mark.parametrize('name, policy', [
    ('fixed8', 'full'), *((name, policy) for name in ('fixed8', *huginn.EXITS)
                          for policy in POLICIES if policy != 'full')])
def test_huginn_writes_the_same(a_huginn, name, policy):
    golden, key = a_huginn.golden, f'gen/{name}/{policy}/'
    rule = None if name == 'fixed8' else make_exit(f'zoo.huginn:{name}')
    ids, steps = greedy(a_huginn, golden[key + 'ids'], 32 if rule else 8, rule, **POLICIES[policy])
    assert ids == golden[key + 'ids'][0].tolist()
    assert rule is None or steps == golden[key + 'steps'].tolist()


@pytest.mark.parametrize('name, n_loop, rule', [
    ('minimal', 8, None), ('adaptive', 32, 'zoo.huginn:latent-diff')])
def test_huginn_warm_starts(a_huginn, name, n_loop, rule):
    """The text is the same; of the steps of `adaptive` one differs, for it hands on a state before
    its norm, and `minimal` and we one behind it."""
    golden = a_huginn.golden
    ids, _ = greedy(a_huginn, golden[f'warm/{name}/ids'], n_loop, rule and make_exit(rule),
                    cache='exact', warm_start=True)
    assert ids == golden[f'warm/{name}/ids'][0].tolist()


def greedy(system, wanted, n_loop, rule, **how):
    """The first row of the golden tokens, continued to the length wanted: all ids, the steps."""
    row = system.idx[0]
    system.model.groups[0].x0 = 'zero' if system.model.groups[0].x0 != 'e' else 'e'
    tokens = list(stream(system.model, [row], wanted.shape[1] - len(row), temperature=0,
                         n_loop=n_loop, exit=rule, **how))
    return (row.tolist() + [token.item() for token, _ in tokens],
            [used.item() for _, used in tokens])


# Ouro ---------------------------------------------------------------------------------------------

def test_ouro_at_every_loop(an_ouro):
    golden, model, idx = an_ouro.golden, an_ouro.model, an_ouro.idx
    steps, trace = len(golden['hidden_per_step']), []
    with torch.no_grad():
        model(idx, n_loop=steps, trace=trace)
        states = trace[0]['states'][1:]
        logits = [model(idx, n_loop=n)[0] for n in range(1, steps + 1)]
        gates = model.gate(states).squeeze(-1)
    near(states, 'hidden_per_step', golden)
    near(torch.stack(logits), 'logits_per_step', golden)
    near(gates, 'gate_logit_per_step', golden)
    near(ouro.exit_log_p(gates.flatten(1)).exp().view_as(gates), 'exit_pdf', golden)
    # the published code runs all loops and selects afterwards: the rule's signal on those states
    for name in golden.files:
        if not name.startswith('exit_step/'):
            continue
        rule, memo, left = make_exit('gate', 1 - float(name.split('/')[1])), None, []
        for x in states:
            value, memo = rule.signal(None, x, memo, model.gate)
            left.append(value < rule.tau)
        left[-1] = torch.ones_like(left[-1])
        first = torch.stack(left).int().argmax(dim=0)                           # (B, T), from 0
        assert torch.equal(first + 1, torch.from_numpy(golden[name]))
        chosen = torch.stack(logits).gather(0, first[None, ..., None].expand(1, *logits[0].shape))
        near(chosen[0], name.replace('exit_step', 'logits_exit'), golden)


def test_ouro_writes_the_same(an_ouro):
    wanted = an_ouro.golden['greedy']
    ids, _ = greedy(an_ouro, wanted, len(an_ouro.golden['hidden_per_step']), None, cache='exact')
    assert ids == wanted[0].tolist()


def test_the_gate_saves_loops(an_ouro):
    """A token alone leaves where the published code would select, and no later step is run."""
    golden, model = an_ouro.golden, an_ouro.model
    k_max, trace = len(golden['hidden_per_step']), []
    with torch.no_grad():
        logits, _ = model(an_ouro.idx[:, :1], n_loop=k_max, exit=make_exit('gate', 0.1),
                          trace=trace)
    wanted = torch.from_numpy(golden['exit_step/0.9'][:, :1])
    assert torch.equal(trace[0]['evals'], wanted) and torch.equal(trace[0]['steps_used'], wanted)
    chosen = torch.from_numpy(golden['logits_exit/0.9'][:, :1])
    torch.testing.assert_close(logits, chosen, rtol=1e-4, atol=1e-4)


# every system through the cache, with its own and our rules ---------------------------------------

@pytest.mark.parametrize('system, name', [
    (system, name) for system in ('huginn', 'ouro') for name in [None, *TAUS, 'norm, past', 'gate']
    if (system, name) != ('huginn', 'gate')])
def test_token_by_token_is_the_whole_sequence(tiny, idx, system, name):
    model, trace = tiny(**SYSTEMS[system]), []
    name, _, past = (name or '').partition(', ')
    tau = dict(TAUS, gate=0.2).get(name)
    rule = make_exit(name, tau, past=bool(past)) if name else None
    whole = model(idx, n_loop=9, exit=rule, trace=trace)[0]
    logits, steps = token_by_token(model, idx, [9, 9], rule, 4)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert torch.equal(steps, torch.stack([entry['steps_used'] for entry in trace], dim=2))


def test_a_model_in_bfloat16_is_served(tmp_path, a_huginn):
    folder = public_folder(tmp_path, a_huginn.golden, torch.bfloat16)
    assert read('huginn', folder).returncode == 0
    model, _ = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))
    rows = [row[:5].tolist() for row in a_huginn.idx]
    made = {}
    for request, token, _ in serve(model, [Request(row, 4, name=i) for i, row in enumerate(rows)],
                                   slots=2, n_loop=4, exit=make_exit('zoo.huginn:latent-diff')):
        made.setdefault(request.name, []).append(token)
    for i, row in enumerate(rows):
        alone = stream(model, [torch.tensor(row)], 4, temperature=0, n_loop=4, cache='latest',
                       exit=make_exit('zoo.huginn:latent-diff'), prefill_chunk=1)
        assert made[i] == [token.item() for token, _ in alone]


def test_weights_that_are_kept_in_bfloat16(tmp_path, an_ouro):
    """They take half the room, the states stay float32, and the logits are near."""
    golden = an_ouro.golden
    folder = public_folder(tmp_path, golden, torch.bfloat16)
    assert read('ouro', folder).returncode == 0
    model, _ = load_checkpoint(str(folder / 'out' / 'ckpt.pt'))
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert all((dtype == torch.bfloat16) == (dtypes[name].itemsize == 2) for name, dtype
               in dtypes.items())
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        name for name, p in model.named_parameters() if p.dim() < 2 or len(p) == 1}
    trace = []
    with torch.no_grad():
        logits, _ = model(an_ouro.idx, n_loop=4, trace=trace)
    assert trace[0]['states'].dtype == torch.float32
    wanted = torch.from_numpy(golden['logits_per_step'][3])
    assert (logits.float() - wanted).abs().max() < 0.1 * wanted.abs().max()


# what is looked at without reading, and what is refused -------------------------------------------

def test_dry_run(tmp_path, a_huginn):
    folder = public_folder(tmp_path, a_huginn.golden, shards=2)
    done = read('huginn', folder, '--dry_run')
    names = [name for name in a_huginn.golden.files if name.startswith('w/')]
    numbers = sum(a_huginn.golden[name].size for name in names)
    assert f'{len(names)} tensors in 2 file(s), {numbers:,} numbers, {4 * numbers:,} bytes' \
        in done.stdout
    C = a_huginn.model.config.n_embd
    assert f'transformer.adapter.weight  ({C}, {2 * C})  F32  {8 * C * C:,} bytes' in done.stdout
    assert not (folder / 'out').exists()


def change(folder, name, tensor):
    """Put a tensor (None: take it away) into the folder's only shard."""
    from safetensors.torch import load_file
    shard = folder / 'model-0.safetensors'
    tensors = load_file(shard) | {name: tensor}
    save_file({name: t for name, t in tensors.items() if t is not None}, shard)


def without_config(folder):
    os.remove(folder / 'config.json')


def of_another_kind(folder):
    (folder / 'config.json').write_text('{"architectures": ["LlamaForCausalLM"]}')


def without_a_field(folder):
    config = json.loads((folder / 'config.json').read_text())
    del config['vocab_size']
    (folder / 'config.json').write_text(json.dumps(config))


def with_field(**fields):
    def spoil(folder):
        config = json.loads((folder / 'config.json').read_text())
        (folder / 'config.json').write_text(json.dumps(config | fields))
    return spoil


def without_a_shard(folder):
    index = dict(weight_map={'a': 'model-0.safetensors', 'b': 'model-1.safetensors'})
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


def cut_short(folder):
    shard = folder / 'model-0.safetensors'
    shard.write_bytes(shard.read_bytes()[:-100])


def a_pickle(folder):
    os.remove(folder / 'model-0.safetensors')
    torch.save({}, folder / 'pytorch_model.bin')


def nothing(folder):
    os.remove(folder / 'model-0.safetensors')


@pytest.mark.parametrize('spoil, words', [
    (without_config, "config.json' (FileNotFoundError)"),
    (of_another_kind, 'is of LlamaForCausalLM'),
    (without_a_field, 'has no number for vocab_size'),
    (with_field(num_hidden_layers=3.0), 'has no number for num_hidden_layers'),
    (with_field(num_attention_heads=0), 'has no number for num_attention_heads'),
    (with_field(rms_norm_eps='1e-6'), 'has no number for rms_norm_eps'),
    (with_field(model_type=5), 'cannot read'),
    (with_field(num_key_value_heads=2), 'has num_key_value_heads = 2'),
    (lambda folder: (folder / 'model.safetensors.index.json').write_text('[]'), 'is no index'),
    (without_a_shard, "there is no '"),
    (cut_short, 'is no whole safetensors file'),
    (a_pickle, 'may hold code and is not read'),
    (nothing, "*.safetensors'"),
    (lambda folder: change(folder, 'lm_head.weight', None), 'missing: lm_head.weight'),
    (lambda folder: change(folder, 'lm_head.weight', torch.zeros(3, 32)),
     'shape: lm_head.weight is (3, 32)'),
    (lambda folder: change(folder, 'model.norm.weight', torch.zeros(32, dtype=torch.long)),
     'dtype: model.norm.weight is I64'),
    (lambda folder: change(folder, 'more.weight', torch.zeros(2)), 'left over: more.weight (2,)'),
    (lambda folder: (folder / 'tokenizer.json').write_text('{}'), 'is no tokenizer.json'),
    (lambda folder: make_tokenizer_json(folder / 'tokenizer.json'), 'has 270 tokens'),
])
def test_bad_folders(tmp_path, an_ouro, spoil, words):
    folder = public_folder(tmp_path, an_ouro.golden)
    spoil(folder)
    for args in ([], ['--dry_run']):
        done = read('ouro', folder, *args)
        assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
        assert words in done.stderr
    assert not (folder / 'out').exists()


def test_the_other_kind_of_folder_is_refused(a_huginn, an_ouro):
    assert read('ouro', a_huginn.folder).returncode == 2
    assert read('huginn', an_ouro.folder).returncode == 2


# the other scripts on a public model --------------------------------------------------------------

def test_scripts_run_on_it(tmp_path, monkeypatch, an_ouro, a_huginn):
    monkeypatch.chdir(tmp_path)
    folder = public_folder(tmp_path / 'public', an_ouro.golden)
    make_tokenizer_json(folder / 'tokenizer.json', 40)
    assert read('ouro', folder, '--block_size=16').returncode == 0
    shutil.move(folder / 'out', 'moved')        # the tokenizer is found beside the checkpoint
    done = conftest.run('--out_dir=moved', '--start=ab', '--exit=gate', '--n_loop=4',
                        '--max_new_tokens=4', script='sample.py')
    assert done.returncode == 0 and done.stdout.startswith('ab'), done.stderr
    # without a tokenizer all but text works, on tokens of any kind
    make_book()
    small = ['--out_dir=' + str(a_huginn.folder / 'out'), '--n_windows=2', '--n_loop=5']
    done = conftest.run('--dataset=book', '--most_loops=2', *small, script='geometry.py')
    assert done.returncode == 2 and 'tokens' in done.stderr         # of 257 it knows fewer
    with open('data/book/val.bin', 'r+b') as f:
        V = a_huginn.model.config.vocab_size
        ids = np.frombuffer(f.read(), dtype='<u2') % V
        f.seek(0)
        f.write(ids.astype('<u2').tobytes())
    remake_meta('book', V)
    done = conftest.run('--dataset=book', '--most_loops=2', *small, script='geometry.py')
    assert done.returncode == 0, done.stderr
    done = conftest.run('--dataset=book', '--rules=["kl","zoo.huginn:kl"]', '--taus=[1e-2]',
                        '--more_taus=[]', '--budgets=[1]', '--epsilons=[]', '--rounds=1',
                        '--timed_tokens=2', '--checks=False', *small, script='bench.py')
    assert done.returncode == 0, done.stderr
    done = conftest.run('--out_dir=' + str(a_huginn.folder / 'out'), script='sample.py')
    assert done.returncode == 2 and 'came without a tokenizer.json' in done.stderr


def remake_meta(name, vocab_size):
    """data/NAME/meta.json for other tokens."""
    import data
    path = f'data/{name}/meta.json'
    with open(path) as f:
        meta = json.load(f)
    meta |= dict(vocab_size=vocab_size)
    meta['val']['sha256'] = data.sha256(f'data/{name}/val.bin')
    with open(path, 'w') as f:
        json.dump(meta, f)
