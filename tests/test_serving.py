"""Rows at different loop steps in one batch: each gets what it gets alone."""
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, TAUS, finished, refused

from decode import choose, make_cache, one_token, window
from exits import Exit, make_exit
from serving.batching import Batch, serve
from serving.requests import Request, answer


def rule_of(name):
    """'accel', or 'accel, past', with a threshold at which its tokens exit at many steps."""
    name, _, past = (name or '').partition(', ')
    return make_exit(name, TAUS[name] * (9 if past else 3), past=bool(past)) if name else None


def random_requests(n, seed):
    draw = random.Random(seed)
    return [Request([draw.randrange(50) for _ in range(draw.randint(1, 8))],
                    draw.randint(1, 9), temperature=draw.choice([0.0, 0.0, 0.8]),
                    top_k=draw.choice([None, 5]), seed=draw.randrange(100),
                    stop=draw.choice([None, 7]), name=i) for i in range(n)]


@torch.no_grad()
def alone(model, request, rule=None, cache='latest', n_loop=None):
    """The tokens of one request, all of it read by decode.one_token, with their loop steps."""
    counts, tokens, made, start = model.loop_counts(n_loop, rule), list(request.prompt), [], None
    while len(made) < request.max_new_tokens and not (made and made[-1][0] == request.stop):
        before, start = start, window(len(tokens), model.config.block_size)
        if start != before:
            kept, position = make_cache(model, counts, cache), 0
        for position in range(position, len(tokens) - start):
            token = torch.tensor([[tokens[start + position]]])
            logits, used, _ = one_token(model, token, position, counts, rule, 0, kept)
        key, position = (request.seed, len(tokens)), position + 1
        tokens.append(choose(logits, request.temperature, request.top_k, [key]).item())
        made.append((tokens[-1], used[0].tolist()))
    return made


def arriving(requests, seed):
    """The requests, with pauses in which there is none."""
    draw = random.Random(seed)
    for request in requests:
        while draw.random() < 0.5:
            yield None
        yield request


def answers_of(model, requests, **how):
    """{name: [(token, steps)]} of what serve yields; an error in place of a token's pair."""
    found = {}
    for request, token, used in serve(model, requests, **how):
        pair = token if used is None else (token, used.tolist())
        found.setdefault(request.name, []).append(pair)
    return found


@pytest.mark.parametrize('cache', ['latest', 'exact'])
@pytest.mark.parametrize('name', [None, 'kl', 'accel', 'accel, past'])
def test_each_row_gets_what_it_gets_alone(tiny, monkeypatch, name, cache):
    """Whatever shares its batch, whenever it arrives, past the end of its window too."""
    plain, steps = Batch.loop_step, []

    def spy(self, g, rows, numbers, at, span):
        steps.append(set(self.k[numbers]))
        plain(self, g, rows, numbers, at, span)
    monkeypatch.setattr(Batch, 'loop_step', spy)
    model = tiny(adapter_init='random', pos='rotary', block_size=10)
    rule, requests = rule_of(name), random_requests(5, seed=1)
    assert max(len(request.prompt) + request.max_new_tokens for request in requests) > 12
    found = answers_of(model, arriving(requests, 2), rows=4, n_loop=12, exit=rule, cache=cache)
    for request in requests:
        assert found[request.name] == alone(model, request, rule, cache, 12), request
    # the rows of one tick were at different loop steps, and the rule and waiting changed something
    assert max(map(len, steps)) > 1
    assert rule is None or len({str(used) for made in found.values() for _, used in made}) > 5
    if rule and rule.past and cache == 'exact':
        own = replace(rule, past=False)
        assert answers_of(model, requests, rows=4, n_loop=12, exit=own, cache=cache) != found


@pytest.mark.parametrize('changes, how', [
    (dict(norm_inside=False, bias=True), {}), (dict(injection='none'), {}),
    (dict(injection='add', x0='zero'), {}), (dict(groups=[]), {}), (dict(groups=[[0], [4]]), {}),
    ({}, dict(exit=Exit(make_exit('kl').signal, 3e-4, hits=2, reads='through_coda'))),
    ({}, dict(exit=make_exit('norm_rel', 10.0, hits=2))), ({}, dict(exit=None, n_loop=[2, 5])),
    ({}, dict(exit=None, n_loop=1)), ({}, dict(cache='ring', n_loop=10)), ({}, dict(rows=1)),
    ({}, dict(rows=40))], ids=str)
def test_other_models_rules_and_numbers_of_rows(tiny, changes, how):
    model = tiny(**changes)
    for group in model.groups:
        torch.nn.init.normal_(group.norm.weight, 2.0)
    rule = make_exit('norm_rel', 0.08) if model.groups else None
    how = dict(rows=3, exit=rule, n_loop=5 if rule else None) | how
    requests = random_requests(6, seed=3)
    found = answers_of(model, requests, **how)
    for request in requests:
        assert found[request.name] == alone(model, request, how['exit'], n_loop=how['n_loop'],
                                            cache=how.get('cache', 'latest'))


@pytest.mark.parametrize('changes, words', [
    (dict(prompt=[]), 'empty'), (dict(prompt=[1] * 17), '17 tokens'),
    (dict(prompt=[50]), '0 to 49'), (dict(prompt='ab'), 'must be list'),
    (dict(prompt=[True]), 'whole numbers'), (dict(temperature=10 ** 400), 'temperature'),
    (dict(seed=2 ** 63), 'seed')])
def test_a_bad_request_harms_no_other(tiny, changes, words):
    model, good = tiny(), Request([1, 2], 4, name='good')
    bad = Request(**dict(prompt=[1], name='bad') | changes)
    found = answers_of(model, [bad, good, bad], rows=2)
    assert len(found['bad']) == 2
    assert all(words in str(error) and '\n' not in str(error) for error in found['bad'])
    assert found['good'] == alone(model, good)


@pytest.mark.parametrize('cache', ['latest', 'exact'])
@pytest.mark.parametrize('name', [None, 'kl', 'accel, past'])
def test_a_nan_ends_its_own_request_alone(tiny, name, cache):
    """Of one whose prompt has it, and of one that meets it later; others take over their rows."""
    model, rule = tiny(), rule_of(name)
    # a head of its own, which stays finite
    model.lm_head.weight = torch.nn.Parameter(model.wte.weight.roll(7, 0))
    late = Request([1, 2], 4, name='late')
    poison = alone(model, late, rule, cache, 4)[1][0]
    expected = {request: alone(model, request, rule, cache, 4) for request in random_requests(8, 5)}
    others = [request for request, made in expected.items() if poison not in request.prompt
              and poison not in [token for token, _ in made]]
    assert len(others) > 4
    with torch.no_grad():
        model.wte.weight[poison] = float('nan')
    early = Request([1, poison, 2], 4, name='early')
    found = answers_of(model, [late, early, *others[:4], early, *others[4:]], rows=2, exit=rule,
                       n_loop=4, cache=cache)
    assert [type(made) for made in found['late']] == [tuple, tuple, ValueError]
    assert len(found['early']) == 2 and all('not finite' in str(made) for made in found['early'])
    for request in others:
        assert found[request.name] == expected[request]


@pytest.mark.parametrize('how, words', [
    (dict(rows=0), 'rows'), (dict(step_noise=0.1), 'step_noise'), (dict(cache='no'), 'policy'),
    (dict(n_loop=0), 'n_loop'),
    (dict(exit=Exit(None, reads='gate_logit')), 'needs the method')])
def test_bad_settings(tiny, how, words):
    model = tiny(step_noise=how.pop('step_noise', 0.0))
    with pytest.raises(ValueError, match=words):
        next(serve(model, [Request([1])], **how))


def test_a_file_of_requests(short_run, monkeypatch):
    """Each line is answered as by itself, in the order in which they end; bad ones with a line."""
    lines = ['{"prompt": "The ", "max_new_tokens": 9, "name": "long"}', '',
             '{"prompt": "qu", "max_new_tokens": 2, "temperature": 0.8, "seed": 4}',
             '{"tokens": [84, 104], "max_new_tokens": 3}', 'nonsense', '[1]', '[' * 100000,
             '{"prompt": "a", "max_new_token": 3}', '{"prompt": ""}', '{"prompt": 3}',
             '{"tokens": [999]}', '{"prompt": "a", "tokens": [1]}']
    monkeypatch.chdir(short_run)
    Path('requests.jsonl').write_text('\n'.join(lines))
    done = subprocess.run(
        [sys.executable, '-m', 'serving.batching', '--requests=requests.jsonl', '--rows=2'],
        text=True, capture_output=True, env=dict(os.environ, PYTHONPATH=ROOT))
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    answers = {line['name']: line for line in found}
    assert len(found) == len(answers) == 11         # an empty line asks for nothing
    assert [line['name'] for line in found if 'text' in line].index('long') > 0
    words = {5: 'line 5: Expecting value', 6: 'JSON object', 7: 'recursion', 9: 'empty',
             8: "'max_new_token': did you mean 'max_new_tokens'?", 10: 'must be str',
             11: 'whole numbers', 12: 'either prompt'}
    for name, said in words.items():
        assert said in answers[name]['error'], (name, answers[name])
    assert [len(answers[name]['tokens']) for name in ('long', 3, 4)] == [9, 2, 3]
    alone = finished('--start=The ', '--max_new_tokens=9', '--stop_at_end=False',
                     '--temperature=0', '--exit=norm_rel', '--tau=0.1', script='sample.py')
    assert alone.startswith('model: out/ckpt.pt\nThe ' + answers['long']['text'])


def test_an_answer_ends_at_its_stop(capsys):
    encoding = SimpleNamespace(n_vocab=99, decode_single_token_bytes=lambda token: b'%d.' % token)

    def serve(requests):
        for request in requests:
            for token, steps in ((5, [2, 1]), (100, [3, 1]), (7, [5, 1])):
                yield request, token, np.array(steps)
    answer(serve, [Request([1], 9, stop=7, name='a'), dict(name='b', error='bad')], encoding)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first['name'], first['text'], first['tokens']) == ('a', '5.7.', [5, 100, 7])
    assert first['steps'] == [3.33, 1.0] and second == dict(name='b', error='bad')


@pytest.mark.parametrize('args, words', [
    ('--n_requests=0', 'n_requests'), ('--rows=0', 'rows'), ('--cache=ring', 'latest, exact'),
    ('--past', '--cache=exact'), ('--exit=None --tau=1', 'need an exit rule'),
    ('--requests=none.jsonl', "'none.jsonl'")])
def test_bad_knobs(short_run, monkeypatch, args, words):
    monkeypatch.chdir(short_run)
    assert words in refused(*args.split(), script='serving/batching.py')
