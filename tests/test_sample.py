"""What sample.py prints, and what it refuses."""
import re

import pytest
from conftest import finished, refused

import sample as script


@pytest.fixture(autouse=True)
def here(short_run, monkeypatch):
    monkeypatch.chdir(short_run)


def sample(*args):
    """sample.py -> what it printed."""
    return finished('--max_new_tokens=6', *args, script='sample.py')


def test_text_speed_and_steps():
    printed = sample('--start=FILE:prompt.txt', '--exit=accel', '--tau=0.1')
    assert printed.startswith('model: out/ckpt.pt\nThe quick brown')
    number = r'[\d.]+'
    assert re.search(rf'\n--- {number} tokens/s, at most 30 loops, accel with tau = 0.1 '
                     rf'\(--tau\)\nmean loop steps {number} in group \[1\], {number} in group '
                     r'\[2, 3\] \(prompts: until they have converged\)\n$', printed)


def test_the_seed_makes_the_text():
    def text(*args):
        return sample('--start=FILE:prompt.txt', *args).split('---')[0]
    assert text('--seed=1') == text('--seed=1') != text('--seed=2')
    assert text('--temperature=0', '--seed=1') == text('--temperature=0', '--seed=2')


def test_each_token_on_the_colour_of_its_steps():
    """Here after a prompt that is longer than the context."""
    printed = sample('--start=' + 'x' * 40, '--show_steps', '--n_loop=[1,5]', '--num_samples=2',
                     '--cache=exact')
    assert printed.count('1.00 in group [1], 5.00 in group [2, 3]\n') == 2
    assert printed.count('\x1b[48;5;25m') > 6       # from three steps on
    assert 'colours start at these mean loop steps:' in printed
    assert 'the prompt has 40 tokens: its last 16 (block_size) are used' in printed


@pytest.mark.parametrize('args, how', [
    ('', 'drafts of 1 loop(s), checked by 4'),
    ('--n_loop=3 --cache=exact', 'drafts of 1 loop(s), checked by 3'),
    ('--n_loop=[5,6] --draft_loops=2', 'drafts of 2 loop(s), checked by 5-6'),
    ('--wave=3 --tau=0.2', 'waves of 3 x 1, norm_rel with tau = 0.2 (--tau)'),
    ('--wave=2', 'waves of 2 x 1, norm_rel with tau = 0.003 (the default)'),
    ('--wave=2 --exit=kl --tau=0', 'waves of 2 x 1, kl with tau = 0 (--tau)'),
    ('--exit=accel', 'at most 30 loops, accel with tau = 0.01 (the default)'),
    *((args, '4 loops') for args in (
        '--draft_loops=0', '--warm_start', '--cache=ring --ring=2', '--cache=None')),
    ('--n_loop=1', '1 loops')])
def test_ways_to_decode(args, how):
    """By drafts, unless the knobs ask for something that drafts do not have."""
    assert f' tokens/s, {how}\n' in sample(*args.split())


def test_the_default_writes_the_text_of_the_budget():
    text = [sample('--start=The ', '--max_new_tokens=30', *args.split()).split('---')[0]
            for args in ('', '--draft_loops=0 --cache=exact', '--n_loop=1')]
    assert text[0] == text[1] != text[2]


def test_samples_side_by_side_are_those_of_their_seeds():
    """Each up to its own end, though waves and drafts write them one after another."""
    how = '--start=The ', '--exit=norm', '--cache=exact', '--max_new_tokens=9', '--temperature=2'
    together = sample(*how, '--num_samples=3', '--seed=5')
    for seed in 5, 6, 7:
        alone = sample(*how, f'--seed={seed}').removeprefix('model: out/ckpt.pt\n')
        assert alone.split('---')[0] in together
    drafted = sample(*how[:1], '--num_samples=2', '--draft_loops=1')
    assert drafted.count('tokens/s') == 2


def test_problems_are_decoded_as_the_cache_says(wave, monkeypatch):
    """With latest the tokens before a new one have converged, and it needs fewer steps."""
    monkeypatch.chdir(wave)
    means = []
    for how in ('--cache=latest', '--past', '--cache=None --past'):
        printed = finished('--exit=norm_rel', '--tau=0.1', *how.split(), '--num_samples=20',
                           '--device=cpu', script='sample.py')
        means.append(float(re.search(r'mean loop steps ([0-9.]+)', printed)[1]))
    assert means[0] < means[1] == means[2]


@pytest.mark.parametrize('args, words', [
    ('--past', 'need an exit rule'), ('--exit=norm --past --cache=latest', 'the exact cache keeps'),
    ('--out_dir=nowhere', 'no checkpoint at'),
    ('--start=FILE:nowhere.txt', "No such file or directory: 'nowhere.txt'"),
    ('--start=FILE:out/ckpt.pt', "cannot read 'out/ckpt.pt'"),
    ('--num_samples=0', 'num_samples'),
    ('--out_dir={wave}/out --start=1 --draft_loops=2', 'leave out --start, --draft_loops'),
    # what others refuse, one for each knob of which no other test sees that it gets there
    ('--device=tpu', 'not available'), ('--top_k=0', 'top_k'),
    ('--cache=ring --ring=0', 'at least 1 slot'),
    ('--draft_loops=1 --cache=latest', "draft_loops needs cache='exact'"), ('--wave=-1', 'not -1'),
    ('--wave=2 --cache=exact', "wave needs cache='latest'"), ('--ring=4', '--cache=ring')])
def test_bad_input(wave, args, words):
    assert words in refused(*args.format(wave=wave).split(), script='sample.py')


def test_a_prompt_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / 'prompt.txt').write_bytes(b'\xef\xbb\xbfThe ')
    assert script.read_prompt(f'FILE:{tmp_path}/prompt.txt') == 'The '
