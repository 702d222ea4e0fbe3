"""Rows at different loop steps in one batch: each gets what it gets alone."""
import contextlib
import csv
import json
import os
import random
from dataclasses import replace
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import SYSTEMS, TAUS
from test_train import TINY, make_book, trained

from decode import stream
from exits import make_exit
from serving import throughput
from serving.batching import Batch, fullest, in_step, serve
from serving.requests import Request, answer

RULES = [None, 'kl', 'accel', 'norm, past', 'accel, past']


def rule_of(name):
    name, _, past = (name or '').partition(', ')
    return make_exit(name, TAUS[name] * (2 if past else 1), past=bool(past)) if name else None


def random_requests(n, seed, vocab_size=50, most=12):
    draw = random.Random(seed)
    return [Request([draw.randrange(vocab_size) for _ in range(draw.randint(1, most))],
                    draw.randint(1, 12), temperature=draw.choice([0.0, 0.0, 0.8]),
                    top_k=draw.choice([None, 5]), seed=draw.randrange(100),
                    stop=draw.choice([None, 7]), name=i) for i in range(n)]


def alone(model, request, rule, cache, n_loop=None):
    """The tokens of one request by decode.stream, and its loop steps."""
    torch.manual_seed(request.seed)
    made = stream(model, [torch.tensor(request.prompt)], request.max_new_tokens,
                  request.temperature, request.top_k, n_loop=n_loop, exit=rule, cache=cache,
                  stop=request.stop, prefill_chunk=1)
    return [(token.item(), used[0].tolist()) for token, used in made]


def arriving(requests, seed):
    """The requests, with pauses in which there is none."""
    draw = random.Random(seed)
    for request in requests:
        while draw.random() < 0.5:
            yield None
        yield request


def answers_of(model, requests, **how):
    """{name: [(token, steps)]} of what serve yields."""
    found = {}
    for request, token, used in serve(model, requests, **how):
        assert not isinstance(token, ValueError), token
        found.setdefault(request.name, []).append((token, used.tolist()))
    return found


@pytest.mark.parametrize('cache', ['latest', 'exact'])
@pytest.mark.parametrize('name', RULES)
def test_each_row_gets_what_it_gets_alone(tiny, name, cache):
    """Whatever shares its batch, in any order of arrival, past the end of its window too."""
    model, rule = tiny(adapter_init='random', pos='rotary'), rule_of(name)
    requests = random_requests(10, seed=1)
    found = answers_of(model, arriving(requests, 2), slots=4, n_loop=12, exit=rule, cache=cache)
    for request in requests:
        assert found[request.name] == alone(model, request, rule, cache, 12), request
    steps = {step for made in found.values() for _, used in made for step in used}
    assert rule is None or len(steps) > 1
    if rule and rule.past and cache == 'exact':     # waiting is seen
        own = answers_of(model, requests, slots=4, n_loop=12, exit=replace(rule, past=False),
                         cache=cache)
        assert own != found


@pytest.mark.parametrize('changes, how', [
    (SYSTEMS['huginn'], {}), (SYSTEMS['ouro'], {}), (dict(groups=[]), {}),
    (dict(injection='add'), {}), ({}, dict(slots=1)), ({}, dict(slots=40)),
    ({}, dict(next_stage=in_step))],
    ids=['huginn', 'ouro', 'plain', 'addition', 'one slot', 'room for all', 'in step'])
def test_other_models_and_numbers_of_rows(tiny, changes, how):
    model = tiny(**changes)
    rule = make_exit('norm_rel', 0.08) if model.groups else None
    requests = random_requests(9, seed=3)
    how = dict(slots=3, exit=rule, n_loop=5 if rule else None) | how
    found = answers_of(model, requests, **how)
    for request in requests:
        assert found[request.name] == alone(model, request, rule, 'latest', how['n_loop'])


def test_budgets_by_group(tiny):
    model, request = tiny(), Request([1, 2, 3], 5, name=0)
    found = answers_of(model, [request], slots=2, n_loop=[2, 5])
    assert found[0] == alone(model, request, None, 'latest', [2, 5])
    assert all(used == [2, 5] for _, used in found[0])


def test_rows_stand_at_different_steps_of_one_tick(tiny):
    model, ticks = tiny(), []
    requests = random_requests(12, seed=4)
    answers_of(model, requests, slots=6, n_loop=9, exit=make_exit('norm_rel', 0.08), ticks=ticks)
    assert {stage for stage, _, _, _ in ticks} == {1, 2, 3, 4, 5}
    assert any(len(set(k)) > 1 for stage, _, k, _ in ticks if stage % 2 == 0)


@pytest.mark.parametrize('waiting, first, by_step', [
    ({1: 1, 2: 9}, 1, 1), ({2: 5, 3: 7}, 2, 2), ({2: 4, 3: 7}, 3, 2),
    ({2: 3, 4: 3}, 4, 2), ({3: 1}, 3, 3)])
def test_which_stage_goes_next(waiting, first, by_step):
    assert fullest(waiting) == first and in_step(waiting) == by_step


# faults -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('changes, words', [
    (dict(prompt=[]), 'empty'), (dict(prompt=[1] * 17), '17 tokens'),
    (dict(prompt=[50]), '0 to 49'),
    (dict(prompt=['a']), 'whole numbers'), (dict(prompt=[True]), 'whole numbers'),
    (dict(max_new_tokens=0), 'max_new_tokens'), (dict(temperature=-1), 'temperature'),
    (dict(temperature=float('nan')), 'temperature'), (dict(temperature=1e-46), 'temperature'),
    (dict(temperature=10 ** 400), 'temperature'), (dict(top_k=0), 'top_k'),
    (dict(seed='a'), 'seed')])
def test_a_bad_request_harms_no_other(tiny, changes, words):
    model, good = tiny(), Request([1, 2], 4, name='good')
    bad = Request(**dict(prompt=[1], max_new_tokens=3, name='bad') | changes)
    found, said = [], []
    for request, token, _ in serve(model, [bad, good, bad], slots=2):
        (said if request.name == 'bad' else found).append(token)
    assert len(said) == 2 and all(words in str(error) and '\n' not in str(error) for error in said)
    assert found == [token for token, _ in alone(model, good, None, 'latest')]


@pytest.mark.parametrize('rule', [None, 'norm', 'kl', 'accel'])
def test_a_nan_ends_its_own_request_alone(tiny, rule):
    """A token whose embedding is NaN; its row serves others afterwards."""
    model = tiny()
    with torch.no_grad():
        model.wte.weight = torch.nn.Parameter(model.wte.weight.clone())   # the head stays as it is
        model.wte.weight[9] = float('nan')
    rule = rule_of(rule)
    good = [request for request in random_requests(30, 5, vocab_size=9)
            if not request.temperature][:6]
    for request in good:
        request.max_new_tokens = 3
    bad = Request([1, 9, 2], 4, name='bad')
    failed, found = [], {}
    for request, token, used in serve(model, [bad, *good[:3], bad, *good[3:]], slots=2, exit=rule,
                                      n_loop=4):
        if request is bad:
            failed.append(token)
        elif isinstance(token, ValueError):     # it has written token 9 itself
            assert 9 in [t for t, _ in found[request.name]]
        else:
            found.setdefault(request.name, []).append((token, used.tolist()))
    assert len(failed) == 2 and all('NaN' in str(error) for error in failed)
    for request in good:
        if 9 not in [token for token, _ in found[request.name]]:
            assert found[request.name] == alone(model, request, rule, 'latest', 4)


@pytest.mark.parametrize('rule', [None, 'norm', 'kl', 'accel'])
def test_a_nan_that_a_row_comes_upon_later(tiny, rule):
    """It ends there; those beside it, and those after it in its place, get all of theirs."""
    model, rule = tiny(tied=False), rule_of(rule)
    first = Request([1, 2], 4, name='first')
    token = alone(model, first, rule, 'latest', 4)[1][0]
    others = [request for request in random_requests(20, 5) if not request.temperature
              and token not in request.prompt
              and token not in [t for t, _ in alone(model, request, rule, 'latest', 4)]]
    with torch.no_grad():
        model.wte.weight[token] = float('nan')
    found = {}
    for request, made, used in serve(model, [first, *others], slots=2, exit=rule, n_loop=4):
        found.setdefault(request.name, []).append(made if used is None else (made, used.tolist()))
    assert len(others) > 3
    assert [type(made) for made in found['first']] == [tuple, tuple, ValueError]
    for request in others:
        assert found[request.name] == alone(model, request, rule, 'latest', 4)


def test_a_consumer_that_stops_reading(tiny):
    made = serve(tiny(), random_requests(5, 6), slots=2)
    next(made)
    made.close()
    with pytest.raises(StopIteration):
        next(made)


def test_memory_stays_flat(tiny):
    """A thousand requests leave no more tensors than ten."""
    import gc
    model = tiny(n_layer=2, groups=[[0]], n_embd=8)

    def tensors(n):
        requests = (Request([i % 50], 1, name=i) for i in range(n))
        made = serve(model, requests, slots=4, n_loop=1)
        for _ in range(n - 1):
            next(made)
        gc.collect()
        return sum(torch.is_tensor(thing) for thing in gc.get_objects())
    few = tensors(10)
    assert tensors(1000) <= few + 20


@pytest.mark.parametrize('how', [
    dict(slots=0), dict(cache='ring'), dict(exit=make_exit('zoo.huginn:kl')), dict(step_noise=0.1)])
def test_bad_settings(tiny, how):
    noise = dict(step_noise=how.pop('step_noise', 0.0))
    with pytest.raises(ValueError, match='batching takes'):
        next(serve(tiny(**noise), [Request([1])], **how))


def test_a_batch_holds_no_more_than_its_rows(tiny):
    batch = Batch(tiny(), 2, [3, 3], None, 'latest', 0)
    batch.admit(Request([1]))
    batch.admit(Request([2]))
    with pytest.raises(ValueError):
        batch.admit(Request([3]))


# the files and the benchmark ----------------------------------------------------------------------

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('batching')
    with contextlib.chdir(folder):
        make_book()
        trained(*TINY, '--n_layer=5', '--groups=[[1],[2,3]]', '--max_iters=2')
    return folder


def test_a_file_of_requests(folder, monkeypatch):
    """Each line is answered as by itself, in the order in which they end; bad ones with a line."""
    monkeypatch.chdir(folder)
    lines = ['{"prompt": "The ", "max_new_tokens": 9, "name": "long"}',
             '{"prompt": "qu", "max_new_tokens": 2, "temperature": 0.8, "seed": 4}',
             '{"tokens": [84, 104], "max_new_tokens": 3}', '', 'nonsense', '[1]',
             '{"prompt": "a", "max": 3}', '{"prompt": ""}', '{"prompt": 3}', '{"tokens": [999]}',
             '{"prompt": "a", "temperature": -1}', '[' * 100000]
    with open('requests.jsonl', 'w') as f:
        f.write('\n'.join(lines))
    how = ['--exit=norm_rel', '--tau=0.1', '--temperature=0']
    done = conftest.run('--requests=requests.jsonl', *how, '--slots=2', script='sample.py')
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    answers = {line['name']: line for line in found}
    assert len(found) == len(answers) == 11         # an empty line asks for nothing
    assert [line['name'] for line in found if 'text' in line].index('long') > 0
    words = {5: 'no JSON', 6: 'a JSON object may have', 7: 'a JSON object may have', 8: 'empty',
             9: 'must be text', 10: 'whole numbers', 11: 'temperature', 12: 'no JSON'}
    for name, said in words.items():
        assert said in answers[name]['error'], (name, answers[name])
    alone = conftest.run('--start=The ', '--max_new_tokens=9', '--stop_at_end=False', *how,
                         script='sample.py')
    assert alone.stdout.startswith('The ' + answers['long']['text'])
    assert [len(answers[name]['tokens']) for name in ('long', 2, 3)] == [9, 2, 3]


def test_a_request_that_ends_at_its_stop(capsys):
    """Answered when the stop token comes, and with what came before it."""
    request = Request([1], 9, stop=7, name='a')
    encoding = SimpleNamespace(n_vocab=99, decode_single_token_bytes=lambda token: b'%d.' % token)

    def serve(requests):
        for one in requests:
            for token in (5, 6, 7):
                yield one, token, np.array([2.0])
    answer(serve, [request, dict(name='b', error='bad')], encoding)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first['name'], first['text'], first['steps']) == ('a', '5.6.7.', [2.0])
    assert second == dict(name='b', error='bad')


def test_the_benchmark(folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = conftest.run('--n_requests=8', '--slots=[1,2]', '--compared=2', '--rounds=1',
                        '--prompt_tokens=[1,4]', '--new_tokens=[1,4]', '--n_loop=3',
                        script='batching.py')
    assert done.returncode == 0, done.stderr
    with open('out/batching.csv') as f:
        rows = {row['way']: row for row in csv.DictReader(f)}
    assert list(rows) == ['depth-wise', 'in step', 'lockstep', 'one by one', 'ideal']
    assert all(float(row['rate']) > 0 for row in rows.values())
    assert {'schedule.png', 'throughput.png', 'batching.json'} <= set(os.listdir('out'))


@pytest.mark.parametrize('args, words', [
    (['--slots=[]'], 'slots'), (['--slots=[1.5]'], 'slots'), (['--rounds=0'], 'rounds'),
    (['--prompt_tokens=[0,3]'], 'fewest'),
    (['--new_tokens=[3]'], 'fewest'), (['--prompt_tokens=[1,99]'], 'block_size'),
    (['--cache=ring'], 'batching takes'), (['--exit=no'], 'unknown exit rule')])
def test_bad_knobs_of_the_benchmark(folder, monkeypatch, args, words):
    monkeypatch.chdir(folder)
    done = conftest.run('--new_tokens=[1,2]', '--prompt_tokens=[1,2]', *args, script='batching.py')
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and words in done.stderr


def test_the_ideal_by_hand():
    """Five rows of loop steps in batches of two, each full one a second; one of the coda."""
    ticks = [(2, [0, 1], None, 9.0), (2, [0], None, 9.0), (2, [0, 1], None, 9.0),
             (3, [0], None, 9.0)]
    assert throughput.ideal_seconds(ticks, {2: 1.0, 3: 4.0}, 2) == 2.5 + 2.0
    full = throughput.full_ticks([*ticks, (2, [0, 1], None, 3.0), (3, [1, 0], None, 4.0)], 2)
    assert full == {2: 7.0, 3: 4.0}
    assert throughput.full_ticks([(2, [0], None, 1.0)], 8) == {2: 1.0}      # none was full


def test_latencies_by_hand():
    requests = [Request([1, 2], 3, name='a'), Request([1], 1, name='b')]
    made = dict(a=[(1.0, None), (1.5, None), (2.0, None)], b=[(3.0, None)])
    found = throughput.figures_of(made, requests)
    assert found['rate'] == pytest.approx((2 + 2 + 1 + 0) / 3)
    assert found['first'] == 2000 and found['gap'] == 500
