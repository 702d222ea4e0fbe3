"""What sample.py prints, and what it refuses."""
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import finished, refused

import sample as script
import tasks
from common import thresholds
from decode import compiled, defaults
from exits import EXITS, make_exit


@pytest.fixture(autouse=True)
def here(short_run, monkeypatch):
    monkeypatch.chdir(short_run)


def sample(*args):
    """sample.py -> what it printed."""
    return finished('--max_new_tokens=6', *args, script='sample.py')


# text ---------------------------------------------------------------------------------------------

def test_text_speed_and_steps():
    printed = sample('--start=FILE:prompt.txt', '--exit=accel', '--tau=0.1')
    assert printed.startswith('model: out/ckpt.pt\nThe quick brown')
    number = r'[\d.]+'
    assert re.search(rf'\n--- {number} tokens/s, at most 30 loops, accel with tau = 0.1 '
                     rf'\(--tau\)\nmean loop steps {number} in group \[1\], {number} in group '
                     r'\[2, 3\]\nprompt: accel, up to 30 loops\n$', printed)


def test_the_seed_makes_the_text():
    def text(*args):
        return sample('--start=FILE:prompt.txt', *args).split('---')[0]
    assert text('--seed=1') == text('--seed=1') != text('--seed=2')
    assert text('--temperature=0', '--seed=1') == text('--temperature=0', '--seed=2')
    coin = '--exit=random', '--tau=0.4', '--temperature=0'
    assert text(*coin, '--seed=1') == text(*coin, '--seed=1')


def test_each_token_on_the_colour_of_its_steps():
    """Here after a prompt that is longer than the context."""
    printed = sample('--start=' + 'x' * 40, '--show_steps', '--n_loop=[1,5]', '--num_samples=2')
    assert printed.count('1.00 in group [1], 5.00 in group [2, 3]\n') == 2
    assert printed.count('\x1b[48;5;25m') > 6       # from three steps on
    assert 'colours start at these mean loop steps:' in printed
    assert 'the prompt has 40 tokens: its last 16 (block_size) are used' in printed


# where no threshold was found, the line says how to find one
CALIBRATE = '(the default; python bench.py --calibrate=0.005 '
FOR_ACCEL = CALIBRATE + """'--rules=["accel"]' finds one)"""
FOR_A_WAVE = CALIBRATE + """'--rules=["norm_rel"]' '--waves=[[2, 1]]' finds one)"""


@pytest.mark.parametrize('args, label, prompt', [
    ('', 'drafts of 1 loop, checked by 4 loops', '4 loops'),
    ('--n_loop=3 --cache=exact', 'drafts of 1 loop, checked by 3 loops', '3 loops'),
    ('--n_loop=[5,6] --draft_loops=2', 'drafts of 2 loops, checked by 5-6 loops', '5-6 loops'),
    ('--wave=3 --tau=0.2', 'a wave of 3, 1 loop per pass, norm_rel with tau = 0.2 (--tau)',
     'norm_rel, waking, up to 33 loops'),
    ('--wave=2', f'a wave of 2, 1 loop per pass, norm_rel with tau = 0.003 {FOR_A_WAVE}',
     'norm_rel, waking, up to 33 loops'),
    ('--wave=2 --exit=kl --tau=0 --n_loop=8',
     'a wave of 2, 1 loop per pass, kl with tau = 0 (--tau)', 'kl, up to 8 loops'),
    ('--exit=accel', f'at most 30 loops, accel with tau = 0.01 {FOR_ACCEL}',
     'accel, up to 30 loops'),
    ('--exit=kl --wake --tau=1', 'at most 30 loops, kl with tau = 1 (--tau), waking',
     'kl, waking, up to 30 loops'),
    ('--cache=latest', '4 loops', 'norm_rel, waking, up to 7 loops'),
    ('--cache=latest --n_loop=4', '4 loops', '4 loops'),
    *((args, '4 loops', '4 loops') for args in (
        '--draft_loops=0', '--warm_start', '--cache=ring --ring=2', '--cache=None')),
    ('--n_loop=1', '1 loop', '1 loop')])
def test_how_a_text_is_decoded(args, label, prompt):
    """By drafts, unless the knobs ask for something that drafts do not have."""
    printed = sample('--start=four', *args.split())
    assert f' tokens/s, {label}\n' in printed and printed.endswith(f'\nprompt: {prompt}\n')


def test_a_budget_is_a_budget():
    """Under latest a prompt converges first, but not with more loops than --n_loop allows."""
    means = []
    for args in ['--n_loop=1'], ['--n_loop=1', '--cache=latest'], ['--cache=latest']:
        printed = sample('--start=The quick', '--max_new_tokens=1', '--temperature=0', *args)
        means.append(float(re.search(r'mean loop steps ([\d.]+)', printed)[1]))
    assert means[0] == means[1] == 1 and means[2] > 4


def test_the_default_writes_the_text_of_the_budget():
    text = [sample('--start=The ', '--max_new_tokens=30', *args.split()).split('---')[0]
            for args in ('', '--draft_loops=0', '--n_loop=1')]
    assert text[0] == text[1] != text[2]


def test_samples_side_by_side_are_those_of_their_seeds():
    """Each up to its own end, though waves and drafts write them one after another."""
    args = '--start=The ', '--exit=norm', '--max_new_tokens=9', '--temperature=2'
    together = sample(*args, '--num_samples=3', '--seed=5')
    for seed in 5, 6, 7:
        alone = sample(*args, f'--seed={seed}').removeprefix('model: out/ckpt.pt\n')
        assert alone.split('---')[0] in together
    drafted = sample(*args[:1], '--num_samples=2', '--draft_loops=1')
    assert drafted.count('tokens/s') == 2


def test_the_speed_of_samples_side_by_side_is_that_of_all():
    """A sample may end early, and the time is that of the longest: so its own line has no rate."""
    printed = sample('--start=The ', '--exit=norm', '--num_samples=3')
    lengths = re.findall(r'--- (\d+) tokens, at most', printed)
    assert lengths == ['6'] * 3 and printed.count('tokens/s') == 1
    assert re.search(r'\nall 3 samples side by side: [\d.]+ tokens/s\n$', printed)


def test_special_tokens_are_text_unless_asked_for():
    """Twice the 13 letters of this name are more than the context of 16 tokens."""
    start = '--start=<|endoftext|><|endoftext|>'
    assert 'the prompt has 26 tokens' in sample(start)
    assert 'the prompt has' not in sample(start, '--special_tokens')


def test_compiling_is_counted_apart(monkeypatch):
    """The rate is that of the text alone."""
    clock = [0.0]

    def tick():
        clock[0] += 0.001
        return clock[0]

    def compile_passes(model, width):
        clock[0] += 85
    monkeypatch.setattr(time, 'perf_counter', tick)
    monkeypatch.setattr(compiled, 'compile_passes', compile_passes)
    rate = re.search(r'--- (\d+)\.\d tokens/s, plus 85 s compiling, drafts', sample('--compile'))
    assert float(rate[1]) > 1000


def test_a_threshold_that_broke_its_promise(monkeypatch):
    """Then the line below the text says so."""
    key = thresholds.threshold_key(make_exit('norm'), 'exact', 8)
    rows = [key | dict(tau=0.5, kept=False)]
    monkeypatch.setattr(thresholds, 'thresholds_of', lambda folder, found: rows)
    assert ('norm with tau = 0.5 (out/exits.json, which breaks its promise on other windows)'
            in sample('--exit=norm'))


def test_a_calibration_that_found_nothing_is_no_missing_one(tiny, monkeypatch):
    """The row in the results counts; that of the pretrained folder is older and looser."""
    key = thresholds.threshold_key(make_exit('norm'), 'exact', 8)
    rows = {'new': [key | dict(tau=None)], 'old': [key | dict(tau=9.0)], 'other': []}
    checkpoint = dict(damping_of_run=0.0)
    monkeypatch.setattr(thresholds, 'thresholds_of', lambda folder, checkpoint: rows[folder])

    def source(*folders):
        decoding = defaults.choose(tiny(), make_exit('norm'))
        rule, words = script.with_threshold(decoding, False, checkpoint, folders)
        return rule.tau, words
    assert source('other', 'old') == (9, 'old/exits.json')
    assert source('new', 'old') == (
        0.01, 'the default; in new/exits.json no threshold keeps the promise')


def advice(printed):
    """The arguments of the bench.py command in a printed line."""
    command = re.search(r'default; python bench.py (.*) finds one', printed)[1]
    return shlex.split(command)


def test_the_command_that_is_advised_finds_a_threshold(run_folder, monkeypatch):
    """With the slots of a ring, a file of one's own, and no --hits, which bench.py lacks."""
    monkeypatch.chdir(run_folder)
    Path('rank.py').write_text('from exits import EXITS, Exit, norm\n'
                               "EXITS['rank'] = Exit(norm, tau=0.1)\n")
    monkeypatch.setitem(EXITS, 'rank', None)        # at the end of the test it goes
    flags = ['rank.py', '--exit=rank', '--cache=ring', '--ring=4', '--n_loop=4', '--wake']
    command = advice(sample(*flags))
    assert command == ['rank.py', '--calibrate=0.005', '--rules=["rank"]', '--n_loop=4',
                       '--cache=ring', '--wake=True', '--ring=4']
    finished(*command, '--calibrate=9', '--taus=[7.0]', '--n_windows=16', '--device=cpu',
             script='bench.py')
    assert 'rank with tau = 7 (out/exits.json)' in sample(*flags)
    Path('out/exits.json').unlink()
    words = "(the default: bench.py calibrates rules without --hits)"
    assert words in sample('--exit=accel', '--hits=3')


def test_the_advice_for_a_task_whose_cache_cannot_wake(solve):
    command = advice(solve('--exit=accel', '--cache=latest'))
    assert command == ['--calibrate=0.005', '--rules=["accel"]', '--cache=latest', '--wake=False']
    line = refused(*command[:-1], '--wake', '--n_windows=16', '--device=cpu', script='bench.py')
    assert 'give --wake=False, or --cache=exact' in line


# problems -----------------------------------------------------------------------------------------

@pytest.fixture
def solve(wave, monkeypatch):
    """solve(*args): sample.py for the model that has learned a task -> what it printed."""
    monkeypatch.chdir(wave)
    return lambda *args: finished('--device=cpu', *args, script='sample.py')


def test_a_problem_is_read_as_a_whole(solve):
    """By default tokens wake; one after another, with latest, each takes fewer steps."""
    means, lines = [], []
    for args in ('', '--cache=None', '--wake=False', '--cache=latest'):
        printed = solve('--exit=norm_rel', '--tau=0.1', *args.split(), '--num_samples=20')
        means.append(float(re.search(r'a token was computed ([\d.]+) times', printed)[1]))
        lines.append(printed.splitlines()[-1])
    assert means[0] == means[1] > means[2] and means[0] > means[3]
    # the budget is twice the 12 tokens and 100, or without waking 30
    rule = 'loops, norm_rel with tau = 0.1 (--tau)'
    assert lines == [f'read: all tokens together, at most 124 {rule}, waking'] * 2 + [
        f'read: all tokens together, at most 30 {rule}',
        f'read: one token after another (latest), at most 30 {rule}']


def test_the_answers_in_a_sentence(solve):
    few = solve('--n_loop=1', '--seed=3', '--dataset=calc:p=2,reset=0.01')
    many = solve('--exit=norm_rel', '--tau=0.01', '--seed=2', '--dataset=calc:p=2,reset=0.01')
    assert re.search(r'\ndeepest answer: depth 11, not found in 1 loop; a token was computed '
                     r'1\.0 times \(more loops may find it: a larger --n_loop, or --exit=accel\)\n',
                     few)
    loops = re.search(r'\ndeepest answer: depth 11, found in (\d+) loops; a token', many)
    assert int(loops[1]) > 3 and 'the budget' not in many
    short = solve('--exit=norm', '--tau=0', '--n_loop=7')
    assert '\nsome tokens took the whole budget of 7 loops: a larger --n_loop may ' in short
    # a token whose rule triggers in the last step has not run out of loops
    assert 'was reached' not in solve('--exit=norm', '--tau=inf', '--n_loop=1')
    # one after another the loops add up along the tokens
    assert 'depth 10, found; a token' in solve('--cache=latest', '--n_loop=4', '--seed=2')


def test_a_rule_for_all_tokens_of_a_pass_reads_them_one_by_one(solve):
    by_row = solve('--exit=zoo.huginn:latent-diff', '--n_loop=4', '--seed=2')
    assert '\nread: one token after another (exact), at most 4 loops' in by_row
    assert re.search(r'\ndeepest answer: depth \d+, (not )?found; a token', by_row)


def test_longer_problems_than_in_training(solve):
    printed = solve('--length=30', '--dataset=calc:p=2,reset=0.05', '--exit=accel', '--tau=1')
    assert 'of 30 answers right' in printed and 'at most 160 loops' in printed


def test_a_problem_of_ones_own(solve):
    printed = solve('--start==1 +1  *1', '--exit=norm', '--tau=0.1')
    words = [line.split() for line in printed.splitlines()[1:4]]
    assert words == [['problem', '=1', '+1', '*1'], ['right', '=1', '=0', '=0'],
                     ['model', '=1', '=0', '=0']]
    assert '--- 3 of 3 answers right' in printed and 'deepest' not in printed
    assert '\na token was computed ' in printed and 'at most 106 loops' in printed
    for start, words in {'=1 *0 two +1': "'*0', 'two' are no words of calc:p=2: choose from =0 =1",
                         '+1': "'+1' is not a problem of calc",
                         '=1' + 20 * ' +1': 'give --length=21'}.items():
        assert words in refused(f'--start={start}', '--device=cpu', script='sample.py')


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 30 columns."""
    monkeypatch.setenv('COLUMNS', '30')


def test_a_problem_is_wrapped(capsys, terminal, monkeypatch):
    """Below each token stand the loop steps that it was computed for, the mean over groups."""
    words = tasks.Words('hop')
    x = np.array([7, 0, 1, 0, 2, 0])                    # p = 2, a b a c a
    y = np.array([tasks.NOT_ASKED, 4, 4, 1, 4, 2])
    guesses = np.array([0, 4, 99, 1, 4, 2])     # a padded vocabulary has tokens without a word
    evals = np.array([[4, 4], [3, 4], [10, 10], [2, 2], [1, 2], [0, 1]])
    script.print_problem(words, x, y, guesses, evals)
    assert capsys.readouterr().out == (
        'problem     2     a     b\n'
        'right             -     -\n'
        'model             - !#99!\n'
        'loops       4   3.5    10\n\n'
        'problem     a     c     a\n'
        'right       b     -     c\n'
        'model       b     -     c\n'
        'loops       2   1.5   0.5\n\n')
    # of a problem with more lines only the beginning and the end
    monkeypatch.setattr(script, 'MOST_BLOCKS', 2)
    many = [np.concatenate(5 * [array]) for array in (x, y, guesses, evals)]
    script.print_problem(words, *many)
    blocks = capsys.readouterr().out.split('\n\n')
    assert blocks[1] == '... 24 tokens ...' and len(blocks) == 4


def test_a_plain_model_answers(capsys, terminal):
    """A model without groups has no loop steps; without an oracle nobody knows what is right."""
    x = np.array([0, 1])
    script.print_problem(tasks.Words('calc'), x, x * 0 + tasks.NOT_ASKED, x, np.zeros((2, 0)))
    assert capsys.readouterr().out == 'problem =0 =1\nmodel   =0 =1\n\n'


# what is refused ----------------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    ('--past', '--past: it is called wake now'),
    ('--wake', 'need an exit rule'), ('--tau=0', 'need an exit rule'),
    *((f'--exit=norm --wake {cache}', f"needs a cache that keeps every loop step, and '{name}'")
      for cache, name in (('--cache=latest', 'latest'), ('--cache=ring --ring=2', 'ring'),
                          ('--wave=8', 'latest'))),
    ('--exit=', 'exit is empty'), ('--cache=', 'cache is empty'),
    ('--out_dir=nowhere', 'no checkpoint at'),
    ('--start=FILE:nowhere.txt', "No such file or directory: 'nowhere.txt'"),
    ('--start=FILE:out/ckpt.pt', "cannot read 'out/ckpt.pt'"),
    ('--out_dir={wave}/out --start==1 --num_samples=3', '--start is one problem'),
    ('--num_samples=0', 'num_samples'), ('--seed=-1', 'seed must lie'),
    ('--compile --cache=None', '--compile needs a cache'),
    ('--wave_steps=2', '--wave_steps needs a wave'), ('--ring=4', '--cache=ring'),
    ('--dataset=calc', 'this model writes text: leave out --dataset'),
    ('--length=32', 'learned positions for 16 tokens'),
    ('--out_dir={wave}/out --draft_loops=2 --special_tokens',
     'answers problems of its task: leave out --special_tokens, --draft_loops'),
    ('--out_dir={wave}/out --exit=norm --wake --cache=latest', 'waking needs a cache'),
    ('--out_dir={wave}/out --dataset=hop', 'those of hop'),
    # what others refuse, one for each knob of which no other test sees that it gets there
    ('--device=tpu', 'not available'), ('--top_k=0', 'top_k'),
    ('--cache=ring --ring=0', 'at least 1 slot'),
    ('--draft_loops=1 --cache=latest', "draft_loops needs cache='exact'"),
    ('--wave=-1', 'not -1'), ('--wave=2 --draft_loops=1', 'are two decoders'),
    ('--wave=2 --cache=exact', "wave needs cache='latest'")])
def test_bad_input(wave, args, words):
    assert words in refused(*args.format(wave=wave).split(), script='sample.py')


def test_a_task_of_ones_own_needs_its_file(short_run, tmp_path):
    """The line says what is missing; nothing is wrong with the checkpoint."""
    found = torch.load(short_run / 'out' / 'ckpt.pt', weights_only=True)
    found |= dict(tokenizer='evens:', config=found['config'] | dict(dataset='evens'))
    torch.save(found, tmp_path / 'ckpt.pt')
    line = refused(f'--out_dir={tmp_path}', script='sample.py')
    assert "the task 'evens' is not known: if it is in a file of yours, name that file" in line


def test_a_prompt_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / 'prompt.txt').write_bytes(b'\xef\xbb\xbfThe ')
    assert script.read_prompt(f'FILE:{tmp_path}/prompt.txt') == 'The '


def test_what_is_left_open(tiny):
    """decode/defaults.py decides: a budget, who may wake, drafts, and the cache."""
    model, norm = tiny(), make_exit('norm')

    def chosen(rule, is_task, **knobs):
        decoding = defaults.choose(model, rule, 10 if is_task else None, **knobs)
        return decoding.counts, decoding.rule and decoding.rule.wake
    assert chosen(norm, True) == ([120, 120], True)
    assert chosen(norm, False) == ([30, 30], False)
    assert chosen(norm, True, wake=False) == ([30, 30], False)
    assert chosen(norm, False, wake=True) == ([30, 30], True)
    assert chosen(norm, False, wake=True, n_loop=5) == ([5, 5], True)
    assert chosen(None, True) == ([3, 3], None)
    for cache, ring, n_loop, expected in (
            ('exact', 8, 9, ([9, 9], True)), (None, 8, 9, ([9, 9], True)),
            ('ring', 8, 9, ([9, 9], False)), ('ring', 9, 9, ([9, 9], True)),
            ('latest', 8, None, ([30, 30], False)), ('ring', 120, None, ([120, 120], True))):
        assert chosen(norm, True, cache=cache, ring=ring, n_loop=n_loop) == expected, cache
    with pytest.raises(ValueError, match="'ring' does not keep them"):
        chosen(norm, False, wake=True, cache='ring', ring=29)
    with pytest.raises(ValueError, match="unknown cache policy 'newest'"):
        chosen(norm, True, cache='newest')

    # (the policy, the loops of drafts, does a prompt converge?)
    for knobs, expected in (
            (dict(), ('exact', 1, False)), (dict(n_loop=12), ('exact', 3, False)),
            (dict(n_loop=1), ('exact', None, False)), (dict(draft_loops=0), ('exact', None, False)),
            (dict(T=9), ('exact', None, False)),
            (dict(cache=None), (None, None, False)), (dict(cache='latest'), ('latest', None, True)),
            (dict(cache='latest', n_loop=4), ('latest', None, False)),
            (dict(rule=norm, draft_loops=2), ('exact', 2, False)),
            (dict(cache='latest', n_loop=4, always_converge=True), ('latest', None, True)),
            (dict(may_draft=False), ('exact', None, False)),
            (dict(wave=4), ('latest', None, True))):
        decoding = defaults.choose(model, **dict(may_draft=True) | knobs)
        assert (decoding.policy, decoding.draft_loops, decoding.converge) == expected, knobs
    rule = defaults.choose_rule(None, wave=4)
    assert (rule.name, rule.tau) == ('norm_rel', 3e-3)
    assert defaults.choose_rule('norm_rel', wave=4).tau == 1e-2
    assert defaults.choose_rule(None) is None
