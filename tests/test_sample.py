"""What sample.py prints, and what it refuses."""
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import finished, refused
from test_data import llama_like, sentencepiece_like

from common.encoding import TokenizerJson
from sample import print_row


@pytest.fixture(autouse=True)
def here(run_folder, monkeypatch):
    """Without its data: decoding needs none."""
    monkeypatch.chdir(run_folder)
    shutil.rmtree('data', ignore_errors=True)
    Path('prompt.txt').write_text('The quick brown')


def sample(*args):
    """sample.py -> what it printed."""
    return finished('--max_new_tokens=6', *args, script='sample.py')


# text ---------------------------------------------------------------------------------------------

def test_the_seed_makes_the_text():
    def text(*args):
        return sample('--start=FILE:prompt.txt', *args).split('---')[0]
    assert text('--seed=1') == text('--seed=1') != text('--seed=2')
    assert text('--temperature=0', '--seed=1') == text('--temperature=0', '--seed=2')
    coin = '--exit=random', '--tau=0.4', '--temperature=0'
    assert text(*coin, '--seed=1') == text(*coin, '--seed=1')
    assert sample('--start=None', '--max_new_tokens=1').count('\n---') == 1     # no prompt


def test_each_token_on_the_colour_of_its_steps():
    """Here after a prompt that is longer than the context."""
    printed = sample('--start=' + 'x' * 40, '--show_steps', '--n_loop=[1,5]', '--num_samples=2')
    assert printed.count('1.00 in group [1], 5.00 in group [2]\n') == 2
    assert '\x1b[48;5;25m' in printed          # of 3 loop steps, the mean
    assert 'the prompt has 40 tokens: its last 16 (block_size) are used' in printed


@pytest.mark.parametrize('args, label', [
    ('', 'drafts of 4 tokens, loops 1, checked by 4 loops, cache exact'),
    ('--n_loop=[5,6] --decoder=drafts:loops=3',
     'drafts of 4 tokens, loops 3, checked by 5-6 loops, cache exact'),
    ('--n_loop=1', '1 loop, cache exact'), ('--cache=2 --n_loop=3', '3 loops, cache 2'),
    ('--decoder=wave:width=3',
     'a wave of 3; its front waits for a token at most 30 loops, norm_rel with tau = 0.003 '
     "(the decoder's own), cache latest"),
    ('--exit=accel',
     'at most 30 loops, accel with tau = 0.01 (not measured for this model), cache exact'),
    ('--exit=norm --tau=0.5 --decoder=drafts:loops=2 --n_loop=9',
     'drafts of 4 tokens, loops 2, checked by at most 9 loops, norm with tau = 0.5, cache exact')])
def test_how_it_was_written(args, label):
    assert f'\n--- {label}\n' in sample(*args.split())


def test_many_samples():
    """Side by side, each has the text of its own seed."""
    args = '--start=The ', '--decoder=one_by_one'
    together = sample(*args, '--num_samples=3', '--seed=5')
    assert together.count('\n---') == 3 and together.count('tokens/s') == 1
    for seed in 5, 6, 7:
        alone = sample(*args, f'--seed={seed}')
        assert alone[alone.index('The '):].split('---')[0] in together
    drafted = sample(*args[:1], '--num_samples=2', '--decoder=drafts:loops=1')
    assert drafted.count('tokens/s') == len({*re.findall('The .*', drafted)}) == 2


@pytest.mark.parametrize('tokenizer', [llama_like, sentencepiece_like])
def test_a_text_is_printed_as_it_comes(tokenizer, capsys):
    """Letters of several tokens, and blanks, are those of the whole text."""
    encoding = TokenizerJson(tokenizer().to_str())
    text = 'ab \U0001f642 c größer\n 日本 ab'
    tokens = encoding.encode(text)
    for start in range(1, len(tokens)):
        prompt = encoding.decode(tokens[:start])
        if encoding.encode(prompt) == tokens[:start]:       # it does not end within a letter
            stream = ((torch.tensor([[token]]), torch.ones(1, 1, 2)) for token in tokens[start:])
            assert print_row(stream, 0, encoding, prompt, False).shape[1] == 2
            assert capsys.readouterr().out == f'{text}\n'
    # the text stops within a letter
    part = encoding.encode('a日')[len(encoding.encode('a')):-1]
    print_row([(torch.tensor([part]), torch.ones(1, 2, 2))], 0, encoding, 'a', False)
    assert re.fullmatch('a\ufffd+\n', capsys.readouterr().out)


# problems -----------------------------------------------------------------------------------------

@pytest.fixture
def solve(sums_run, monkeypatch):
    """solve(*args): sample.py for the model that has learned a task -> what it printed."""
    monkeypatch.chdir(sums_run)
    return lambda *args: finished('--device=cpu', *args, script='sample.py')


def test_a_problem_is_read_as_a_whole(solve):
    """By default tokens wake; one after another, with latest, each takes fewer steps."""
    means, lines = [], []
    for args in ('', '--wake=False', '--cache=latest'):
        printed = solve('--exit=norm_rel', '--tau=0.1', *args.split(), '--num_samples=20')
        means.append(float(re.search(r'a token was computed ([\d.]+) times', printed)[1]))
        lines.append(printed.splitlines()[-1])
    assert means[0] > max(means[1:])
    # the budget is twice the 12 tokens and 100, or without waking 30
    rule = 'loops, norm_rel with tau = 0.1'
    assert lines == [f'read: all tokens together, at most 124 {rule}, waking',
                     f'read: all tokens together, at most 30 {rule}',
                     f'read: one token after another (cache latest), at most 30 {rule}']


def test_the_answers_in_a_sentence(solve):
    """In one piece, which scripts read."""
    dataset = '--dataset=calc:p=2,reset=0.01'
    guesses = ''.join(solve('--n_loop=1', f'--seed={seed}', dataset) for seed in range(6))
    assert 'depth 11, not found in 1 loops; a token was computed 1.0 times\n' in guesses
    assert 'depth 11, found in 1 loops;' in guesses
    many = solve('--exit=norm_rel', '--tau=0.01', '--seed=2', dataset)
    loops = re.search(r'\ndeepest answer: depth 11, found in (\d+) loops; a token', many)
    assert int(loops[1]) > 3 and 'the whole budget' not in many
    short = solve('--exit=norm', '--tau=0', '--n_loop=7')
    assert '\nsome tokens took the whole budget: a larger --n_loop may ' in short
    # one after another the loops add up along the tokens
    assert 'depth 10, found; a token' in solve('--cache=latest', '--n_loop=4', '--seed=2')


def test_a_problem_of_ones_own(solve):
    printed = solve('--start==1 +1  *1', '--exit=norm', '--tau=0.1')
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('problem'))
    assert [line.split() for line in lines[first:first + 3]] == [
        ['problem', '=1', '+1', '*1'], ['right', '=1', '=0', '=0'],
        ['model', '=1', '=0', '=0']]
    assert '--- 3 of 3 answers right' in printed and 'deepest' not in printed
    assert '\na token was computed ' in printed and 'at most 106 loops' in printed
    assert 'give --length=21' in refused('--start==1' + 20 * ' +1', '--device=cpu',
                                         script='sample.py')


# what is refused ----------------------------------------------------------------------------------

@pytest.mark.parametrize('args', [
    '--exit=norm --tau=nan', '--exit=norm --wake', '--wake', '--tau=0', '--dataset=calc',
    '--exit=accel --compile', '--decoder=drafts:loops=1,check=3', '--seed=-1', '--device=tpu',
    '--start=FILE:nowhere.txt', '--num_samples=0', '--out_dir={sums_run}/out --cache=0',
    '--out_dir={sums_run}/out --exit=norm --wake --cache=latest',
    '--out_dir={sums_run}/out --start=hello', '--out_dir={sums_run}/out --start=None',
    '--out_dir={sums_run}/out --decoder=wave',
    '--out_dir={sums_run}/out --compile'])
def test_bad_input(sums_run, args, capsys):
    refused(*args.format(sums_run=sums_run).split(), script='sample.py')
