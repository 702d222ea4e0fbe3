"""Rows at different loop steps in one batch: each gets what it gets alone."""
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TAUS, finished, refused

from cache import make_cache
from decode import choose, one_token, window
from exits import Exit, make_exit
from loops import Plan
from serving import batching
from serving.batching import Batch, Request, serve


def random_requests(n, seed):
    draw = random.Random(seed)
    return [Request([draw.randrange(50) for _ in range(draw.randint(1, 8))],
                    draw.randint(1, 9), temperature=draw.choice([0.0, 0.0, 0.8]),
                    top_k=draw.choice([None, 5]), seed=draw.randrange(100),
                    stop=draw.choice([None, 7]), name=i) for i in range(n)]


@torch.no_grad()
def alone(model, request, rule=None, n_loop=None):
    """The tokens of one request, all of it read by decode.one_token, with their loop steps."""
    counts, tokens, made, start = model.loop_counts(n_loop, rule), list(request.prompt), [], None
    while len(made) < request.max_new_tokens and not (made and made[-1][0] == request.stop):
        before, start = start, window(len(tokens), model.config.block_size)
        if start != before:
            kept, position = make_cache(model, counts, 'latest'), 0
        for position in range(position, len(tokens) - start):
            token = torch.tensor([[tokens[start + position]]])
            logits, used, _ = one_token(model, token, position, Plan(counts, rule, cache=kept))
        key, position = (request.seed, len(tokens)), position + 1
        tokens.append(choose(logits, request.temperature, request.top_k, [key]).item())
        made.append((tokens[-1], used[0].tolist()))
    return [list(column) for column in zip(*made)]


@pytest.mark.parametrize('name', [None, 'kl', 'accel'])
def test_each_row_gets_what_it_gets_alone(tiny, monkeypatch, name):
    """Whatever shares its batch, past the end of its window too."""
    plain, seen = Batch.loop_step, []

    def spy(self, layer, rows, numbers, at, plan):
        seen.append(set(self.k[numbers]))
        plain(self, layer, rows, numbers, at, plan)
    monkeypatch.setattr(Batch, 'loop_step', spy)
    model = tiny(adapter_init='random', pos='rotary', block_size=10)
    rule = make_exit(name, 3 * TAUS[name]) if name else None
    requests = random_requests(5, seed=1)
    assert max(len(request.prompt) + request.max_new_tokens for request in requests) > 12
    served = serve(model, requests, rows=4, n_loop=12, exit=rule)
    found = {request.name: answer for request, *answer in served}
    for request in requests:
        assert found[request.name] == alone(model, request, rule, 12), request
    if rule:    # rows of one tick were at different loop steps, and the rule changed something
        assert max(map(len, seen)) > 1
        assert len({str(used) for _, steps in found.values() for used in steps}) > 5


@pytest.mark.parametrize('changes, how', [
    (dict(norm_inside=False, bias=True), {}), (dict(injection='none'), {}),
    (dict(injection='add', x0='zero'), {}), (dict(groups=[]), {}), (dict(groups=[[0], [4]]), {}),
    ({}, dict(exit=Exit(make_exit('kl').signal, 3e-4, hits=2, reads='through_coda'))),
    ({}, dict(exit=make_exit('norm_rel', 10.0, hits=2))), ({}, dict(exit=None, n_loop=[2, 5])),
    ({}, dict(exit=None, n_loop=1)), ({}, dict(rows=1)), ({}, dict(rows=40))], ids=str)
def test_other_models_rules_and_numbers_of_rows(tiny, changes, how):
    model = tiny(**changes)
    for group in model.groups:
        torch.nn.init.normal_(group.norm.weight, 2.0)
    rule = make_exit('norm_rel', 0.08) if model.groups else None
    how = dict(rows=3, exit=rule, n_loop=5 if rule else None) | how
    requests = random_requests(6, seed=3)
    found = {request.name: answer for request, *answer in serve(model, requests, **how)}
    for request in requests:
        assert found[request.name] == alone(model, request, how['exit'], how['n_loop'])


@pytest.mark.parametrize('how, words', [
    (dict(step_noise=0.1), 'step_noise'), (dict(n_loop=0), 'n_loop'), (dict(nan=True), 'a NaN'),
    (dict(exit=Exit(None, reads='gate_logit')), 'needs the method')])
def test_bad_settings(tiny, how, words):
    model = tiny(step_noise=how.pop('step_noise', 0.0))
    if how.pop('nan', False):
        torch.nn.init.constant_(model.wte.weight, float('nan'))
    with pytest.raises(ValueError, match=words):
        next(serve(model, [Request([1])], **how))


def test_a_file_of_requests(short_run, monkeypatch):
    """Each line is answered as by itself, in the order in which they end; bad ones with a line."""
    words = {5: 'Expecting value', 6: 'JSON object', 7: 'recursion', 9: 'empty', 10: 'must be str',
             8: "'max_new_token': did you mean 'max_new_tokens'?", 11: 'with a prompt',
             13: 'temperature', 14: 'Invalid control character'}
    lines = ['{"prompt": "The ", "max_new_tokens": 9, "name": "long"}', '',
             '{"prompt": "qu", "max_new_tokens": 2, "temperature": 0.8, "seed": 4}',
             '{"prompt": "Th", "max_new_tokens": 3}', 'nonsense', '[1]', '[' * 100000,
             '{"prompt": "a", "max_new_token": 3, "name": "typo"}', '{"prompt": ""}',
             '{"prompt": 3}', '{}', '{"prompt": "12345678901234567"}',
             f'{{"prompt": "a", "temperature": 1{"0" * 400}}}',
             '{"prompt": "\x00\xff"}']
    monkeypatch.chdir(short_run)
    Path('requests.jsonl').write_text('\n'.join(lines), encoding='latin-1')
    printed = finished('--requests=requests.jsonl', '--rows=2', script='serving/batching.py')
    found = [json.loads(line) for line in printed.splitlines()]
    answers = {line['name']: line for line in found}
    assert len(found) == len(answers) == 13         # an empty line asks for nothing
    assert [line['name'] for line in found if 'text' in line].index('long') > 0
    for n, said in words.items():
        error = answers['typo' if n == 8 else n]['error']
        assert said in error and error.startswith(f'line {n}: ') and '\n' not in error, error
    assert [len(answers[name]['tokens']) for name in ('long', 3, 4)] == [9, 2, 3]
    alone = finished('--start=The ', '--max_new_tokens=9', '--stop_at_end=False',
                     '--temperature=0', '--exit=norm_rel', '--tau=0.1', script='sample.py')
    assert alone.startswith('model: out/ckpt.pt\nThe ' + answers['long']['text'])


def test_of_a_long_prompt_the_last_block_is_read(tiny, monkeypatch):
    """And the draws count the tokens before it, as stream's do."""
    model, positions = tiny(adapter_init='random'), []

    def spy(logits, temperature, top_k, draws):
        positions.extend(position for _, position in draws)
        return choose(logits, temperature, top_k, draws)
    monkeypatch.setattr(batching, 'choose', spy)
    long, block = (next(serve(model, [Request(prompt, 3)], 2, n_loop=4))[1]
                   for prompt in ([*range(21)], [*range(5, 21)]))
    assert long == block and positions == [21, 22, 23, 16, 17, 18]


def test_words_of_a_task(wave, monkeypatch):
    monkeypatch.chdir(wave)
    Path('requests.jsonl').write_text('{"prompt": "=1 +1 +1", "max_new_tokens": 2}')
    printed = finished('--requests=requests.jsonl', script='serving/batching.py')
    text = json.loads(printed.splitlines()[-1])['text']
    assert len(text.split()) == 2 and text[0] in '=+*'


def test_an_answer(tiny, monkeypatch, tmp_path, capsys):
    """The means of its loop steps, and no text for a token of a padded vocabulary."""
    def served(model, requests, *_):
        return [(request, [5, 100, 7], [[2, 1], [3, 1], [5, 1]]) for request in requests]
    monkeypatch.setattr(batching, 'serve', served)
    (tmp_path / 'file').write_text('{"prompt": "a"}')
    encoding = SimpleNamespace(n_vocab=99, eot_token=0, decode=str, encode=lambda *_, **__: [1])
    batching.answer(tiny(), tmp_path / 'file', encoding)
    made = json.loads(capsys.readouterr().out)
    assert made.pop('seconds') >= 0
    assert made == dict(name=1, text='[5, 7]', tokens=[5, 100, 7], steps=[3.33, 1.0])


@pytest.mark.parametrize('args, words', [
    ('--n_requests=0', 'n_requests'), ('--rows=0', 'rows'), ('--requests=none.jsonl', "'none.js"),
    ('--exit=None --tau=1', 'needs an exit rule'),
    ('--requests=prompt.txt', "'prompt.txt' has no request")])
def test_bad_knobs(short_run, monkeypatch, args, words):
    monkeypatch.chdir(short_run)
    assert words in refused(*args.split(), script='serving/batching.py')
