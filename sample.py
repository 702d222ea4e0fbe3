"""
Text from a checkpoint, or answers where the model has learned a task, with any exit rule.

    python sample.py                                        text, drafted with few loops
    python sample.py --exit accel                           one token at a time, the paper's rule
    python sample.py --exit=norm --tau=1e-1 --show_steps    each token coloured by its loop steps
    python sample.py --start='def ' --temperature=0 --wave=8    several tokens at once
    python sample.py --out_dir=pretrained/calc --exit accel     a problem and the model's answers
    python sample.py --out_dir=pretrained/calc --start='=2 +3 *4'       a problem of your own

It needs only a checkpoint, not the data, and uses a pretrained one if you have trained none. What
is left open is decided in decode/defaults.py.

Paper: sec. 4 (exit rules), Algorithm 1 (accel).

    T    tokens of a problem
"""
import codecs
import json
import shutil
import time
from dataclasses import replace

import numpy as np
import torch

import decode
import tasks
from common.checkpoint import open_run
from common.colours import paint, print_legend
from common.configurator import PathName, configure, given, run
from common.distributed import pick_device
from common.encoding import read_prompt, text_of
from common.thresholds import calibrated, command_for, threshold_key
from data import open_encoding
from decode import defaults
from decode.passes import plan_of_prompt, reads_whole
from tasks import NOT_ASKED

# -------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
start = '\n'                # the prompt or a problem, or FILE:prompt.txt; empty = a new document
special_tokens = False      # read names such as <|endoftext|> in the prompt as these tokens
num_samples = 1             # side by side, but for waves and drafts
max_new_tokens = 300
temperature: float = 0.8    # 0 = greedy
top_k: int | None = None    # sample among the k likeliest tokens; None = all
length: int | None = None   # tokens of context or of a problem; None = as in training
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
dataset: str | None = None  # the model's task with other knobs, such as calc:reset=0.01
exit: str | None = None     # a rule in exits.EXITS, or MODULE:NAME; None = fixed loops
tau: float | None = None    # threshold; None = what bench.py --calibrate found, or a default
hits: int | None = None     # small values in a row before a token exits; None = the rule's own
wake: bool | None = None    # may a token that has exited wake? None = on a task
n_loop: int | list | None = None    # for all groups or each; None: see decode/defaults.py
cache: str | None = 'auto'  # a policy of cache.POLICIES; None = no cache; auto: see n_loop
ring = 8                    # slots of cache='ring'
warm_start = False          # a token's loops start from the last state of the token before it
draft_loops: int | None = None  # loops of drafts; 0 = no drafts; None = a quarter of the budget
wave = 0                    # tokens of a wave (decode/wave.py); 0 = no wave
wave_steps = 1              # loop steps of each of its passes
stop_at_end = True          # end-of-text ends a sample
seed = 1337                 # of the tokens drawn, or of the problems
noise_seed = 0              # of x^(0)
compile = False             # compiled passes: worth it on a GPU, or for thousands of tokens
show_steps: bool | None = None  # colour each token by its loop steps; None = in a task's pictures
device = 'auto'
dtype = 'float32'           # bfloat16 rounds away updates below 2e-3 of the state's norm
# -------------------------------------------------------------------------------------------------

# knobs of text alone; of tasks alone
OF_TEXT = ('special_tokens', 'max_new_tokens', 'temperature', 'top_k', 'warm_start', 'draft_loops',
           'wave', 'wave_steps', 'stop_at_end', 'compile')
OF_TASK = ('dataset',)
MOST_BLOCKS = 40    # a problem that wraps to more blocks than this shows only its ends


# how to decode ------------------------------------------------------------------------------------

def check_knobs(is_task):
    """ValueError for knobs that do not fit together. is_task: does the model solve problems?"""
    unused = [f'--{knob}' for knob in (OF_TEXT if is_task else OF_TASK) if knob in given]
    if unused:
        does = 'answers problems of its task' if is_task else 'writes text'
        raise ValueError(f'this model {does}: leave out {", ".join(unused)}')
    if is_task and 'start' in given and num_samples > 1:
        raise ValueError('--start is one problem: leave out --num_samples')
    if num_samples < 1:
        raise ValueError(f'num_samples must be at least 1, not {num_samples}')
    if not 0 <= seed < 2 ** 63:
        raise ValueError(f'seed must lie between 0 and 2^63 - 1, not at {seed}')
    if exit is None and not wave and (wake or tau is not None or hits is not None):
        raise ValueError('--wake, --tau and --hits need an exit rule: add --exit=norm_rel, or '
                         '--wave=8')
    if 'wave_steps' in given and not wave:
        raise ValueError('--wave_steps needs a wave: add --wave=8')
    if 'ring' in given and cache != 'ring':
        raise ValueError('--ring needs --cache=ring')
    if compile and cache is None:
        raise ValueError('--compile needs a cache: leave out --cache=None')


def choose_decoding(model, checkpoint, folders, T=None):
    """
    The knobs -> a defaults.Decoding, and its label: the same in words, for the line below a text or
    problem. folders: where exits.json may be. T: tokens of a problem, None = a text.
    """
    # the rule, the loop budget, the cache policy, and who may wake
    rule = defaults.choose_rule(exit, tau, hits, wave)
    decoding = defaults.choose(
        model, rule, T, wake=wake, n_loop=n_loop, cache=cache, ring=ring, warm_start=warm_start,
        draft_loops=draft_loops, wave=wave, wave_steps=wave_steps, may_draft=num_samples == 1)
    # the threshold, which depends on them
    source = None
    if decoding.rule:
        rule, source = with_threshold(decoding, T is not None, checkpoint, folders)
        decoding = decoding._replace(rule=rule)
    return decoding, label_of(decoding, source)


def label_of(decoding, source):
    """A Decoding in words. source: where its threshold comes from, None = there is no rule."""
    budget = loops_in_words(decoding.counts)
    rule = decoding.rule
    if decoding.draft_loops:
        label = f'drafts of {loops_in_words([decoding.draft_loops])}, checked by {budget}'
    elif decoding.wave:
        steps = loops_in_words([decoding.wave_steps])
        label = f'a wave of {decoding.wave}, {steps} per pass'
    else:
        label = f'at most {budget}' if rule else budget
    if rule:
        label += f', {rule.name} with tau = {rule.tau:g} ({source})'
        if rule.wake:
            label += ', waking'
    return label


def with_threshold(decoding, is_task, checkpoint, folders):
    """
    The rule of a Decoding with its threshold, and in words where that comes from: --tau, or the
    first exits.json of the folders that has a row for it (bench.py --calibrate), or a default.
    """
    rule = decoding.rule
    if tau is not None:
        return rule, '--tau'
    of_wave = [decoding.wave, decoding.wave_steps] if decoding.wave else None
    key = threshold_key(rule, decoding.policy, decoding.ring, of_wave)
    for folder in folders:
        threshold = calibrated(folder, checkpoint, key)
        if threshold is None:
            continue
        source = f'{folder}/exits.json'
        if damping not in (None, checkpoint['damping_of_run']):
            raise ValueError(f'the threshold in {source} is for the damping of the run: give --tau '
                             'with --damping, a smaller one for more damping')
        if threshold.tau is None:
            return rule, f'the default; in {source} no threshold keeps the promise'
        if not threshold.kept:
            source += ', which breaks its promise on other windows'
        return replace(rule, tau=threshold.tau), source
    if hits is not None:
        return rule, 'the default: bench.py calibrates rules without --hits'
    return rule, f'the default; {command_to_calibrate(key, is_task)} finds one'


def command_to_calibrate(key, is_task):
    """The command that looks for a threshold with this threshold_key."""
    flags = ['--calibrate=0.005']
    if out_dir:
        flags.append(f'--out_dir={out_dir}')
    flags.append(f'--rules={json.dumps([exit or key["rule"]])}')
    if key['wave']:
        flags.append(f'--waves={json.dumps([key["wave"]])}')
    if key['ring'] and isinstance(n_loop, int):     # a ring keeps every step of a small budget
        flags.append(f'--n_loop={n_loop}')
    return command_for('bench.py', key, is_task, *flags)


def loops_in_words(counts):
    """Loop counts, one for each group, in words: '1 loop', '4 loops', '4-6 loops' or 'no loops'."""
    numbers = '-'.join(map(str, dict.fromkeys(counts))) or 'no'
    return f'{numbers} loop' if numbers == '1' else f'{numbers} loops'


def rule_and_budget(plan):
    """A plan in words: '4 loops', or 'accel, waking, up to 77 loops'."""
    if plan.rule is None:
        return loops_in_words(plan.counts)
    waking = ', waking' if plan.rule.wake else ''
    return f'{plan.rule.name}{waking}, up to {loops_in_words(plan.counts)}'


# the first path: problems -------------------------------------------------------------------------

def answer_problems(model, checkpoint, folders):
    """Problems of the model's task, or the one in `start`: the right answers and the model's."""
    # the problems
    problems = tasks.problems_of(checkpoint, dataset)
    block_size = model.config.block_size
    if 'start' in given:
        x, y = problems.solve(read_prompt(start))                               # (1, T)
        depth = None
        if x.shape[1] > block_size:
            raise ValueError(f'the problem has {x.shape[1]} tokens, and the model reads '
                             f'{block_size}: give --length={x.shape[1]}')
    else:
        x, y, depth = problems.make(np.random.default_rng(seed), num_samples, block_size)

    # the model's answers
    decoding, label = choose_decoding(model, checkpoint, folders, T=x.shape[1])
    idx = torch.from_numpy(x).to(model.lm_head.weight.device)
    torch.manual_seed(seed)             # for a rule that tosses coins
    logits, steps_used, evals = decode.teacher_forced(
        model, idx, decoding.plan(noise_seed), decoding.policy, decoding.ring)
    guesses = logits.argmax(-1).cpu().numpy()                                   # (B, T)
    steps_used = steps_used.cpu().numpy()                                       # (B, T, groups)
    evals = evals.cpu().numpy()                                                 # (B, T, groups)

    # both, then how they were found
    picture = getattr(problems.task, 'picture', None)
    in_colour = show_steps
    if show_steps is None:
        in_colour = picture is not None
    if not model.groups:            # there are no steps to show
        in_colour = False
    for b in range(len(x)):
        if picture:
            steps = evals[b].mean(axis=1) if in_colour else None
            print(picture(x[b], y[b], guesses[b], steps))
        else:
            print_problem(problems.encoding, x[b], y[b], guesses[b], evals[b], in_colour)
    asked = y != NOT_ASKED
    if asked.any():
        right = (guesses == y)[asked]
        marked = 'a ! beside wrong ones' if picture else 'wrong ones as !word!'
        print(f'--- {right.sum()} of {right.size} answers right, {100 * right.mean():.1f}%; '
              f'{marked}')
    side_by_side = reads_whole(decoding.rule, decoding.policy)
    if model.groups:
        # if tokens are read one after another, a token's steps do not say when its answer was
        # found: those of the tokens before it come first
        found_after = steps_used if side_by_side else None
        print(in_a_sentence(y, guesses, depth, found_after, evals, decoding.rule))
    if decoding.rule and (steps_used == decoding.counts).any():
        # a token whose rule triggered in the very last step is among them
        budget = loops_in_words(decoding.counts)
        print(f'some tokens took the whole budget of {budget}: a larger --n_loop may change them')
    order = 'all tokens together'
    if not side_by_side:
        order = f"one token after another ({decoding.policy or 'exact'})"
    print(f'read: {order}, {label}')
    if in_colour:
        print_legend()


def print_problem(encoding, x, y, guesses, evals, in_colour=False):
    """
    A problem x, right answers y and guesses (T,), wrapped to the width of the terminal; below each
    token the loop steps that it was computed for, the mean over groups. evals: (T, groups).
    in_colour: guesses on the colour of their loop steps.
    """
    # lines of words; one without any word is left out
    asked = y != NOT_ASKED
    steps = evals.mean(axis=1) if evals.size else np.zeros(len(x))          # a model may not loop
    shown = asked if asked.any() else np.ones(len(x), dtype=bool)
    right = [text_of(label, encoding) if label != NOT_ASKED else '' for label in y]
    answers = []
    for guess, label, is_shown in zip(guesses, y, shown):
        word = text_of(guess, encoding) if is_shown else ''
        answers.append(word if label in (guess, NOT_ASKED) else f'!{word}!')
    lines = dict(problem=[text_of(token, encoding) for token in x], right=right, model=answers,
                 loops=[f'{n:.1f}'.removesuffix('.0') if evals.size else '' for n in steps])
    lines = {name: words for name, words in lines.items() if any(words)}

    # blocks as wide as the terminal; of many the first and last ones
    width = 1 + max(len(word) for words in lines.values() for word in words)
    name_width = max(map(len, lines))
    per_block = max(1, (shutil.get_terminal_size().columns - name_width) // width)
    blocks = [slice(first, first + per_block) for first in range(0, len(x), per_block)]
    half = MOST_BLOCKS // 2
    left_out = blocks[half:-half] if len(blocks) > MOST_BLOCKS else []
    for block in blocks:
        if block in left_out:
            if block == left_out[0]:
                print(f'... {len(left_out) * per_block:,} tokens ...\n')
            continue
        for name, words in lines.items():
            line = ''
            for word, n in zip(words[block], steps[block]):
                word = word.rjust(width)
                line += paint(word, n) if in_colour and name == 'model' else word
            print(name.ljust(name_width) + line)
        print()


def in_a_sentence(y, guesses, depth, found_after, evals, rule):
    """
    How deep the deepest answer is, whether and when it was found, and what a token took. y, guesses
    (B, T); depth (B, T), None = not known; found_after (B, T, groups), the loop steps after which
    an answer was there, None = not known; evals (B, T, groups).
    """
    computed = f'a token was computed {evals.mean():.1f} times'
    if depth is None:
        return computed
    deepest = np.unravel_index(np.where(y == NOT_ASKED, -1, depth).argmax(), y.shape)
    is_right = guesses[deepest] == y[deepest]
    outcome = 'found' if is_right else 'not found'
    if found_after is not None:
        outcome += f' in {loops_in_words([found_after[deepest].max()])}'
    sentence = f'deepest answer: depth {depth[deepest]}, {outcome}; {computed}'
    if not is_right and rule is None:
        sentence += ' (more loops may find it: a larger --n_loop, or --exit=accel)'
    return sentence


# the second path: text ----------------------------------------------------------------------------

def write_text(model, checkpoint, folders):
    """num_samples continuations of the prompt, and below each how it was written."""
    # the prompt
    encoding = open_encoding(checkpoint['tokenizer'], checkpoint['folder'])
    text = read_prompt(start)
    prompt = encoding.encode(text, allowed_special='all' if special_tokens else ())
    prompt = prompt or [encoding.eot_token]
    block_size, groups = model.config.block_size, model.config.groups
    if len(prompt) > block_size:
        print(f'the prompt has {len(prompt)} tokens: its last {block_size} (block_size) are used')

    # how it is continued
    decoding, label = choose_decoding(model, checkpoint, folders)
    stop = encoding.ends if stop_at_end else []
    # waves and drafts work on one row; otherwise all samples are decoded side by side
    n_rows = 1 if decoding.wave or decoding.draft_loops else num_samples
    prompts = torch.tensor([prompt] * n_rows, device=model.lm_head.weight.device)
    in_colour = bool(show_steps and groups)

    decode.use_one_thread(model)
    if compile:
        from decode.compiled import compile_passes
        begin = time.perf_counter()
        compile_passes(model, max(decoding.wave, 5))     # 5: four drafts and a token
        # the first passes compile; these tokens are thrown away
        list(new_tokens(model, prompts, 8, seed, decoding, stop))
        label = f'plus {time.perf_counter() - begin:.0f} s compiling, {label}'

    # decode.stream makes this plan again when it reads the prompt; here it is for the last line
    of_prompt = plan_of_prompt(decoding.plan(), min(len(prompt), block_size), decoding.converge)
    for first in range(0, num_samples, n_rows):
        begin = time.perf_counter()
        tokens = new_tokens(model, prompts, max_new_tokens, seed + first, decoding, stop)
        if n_rows > 1:      # they are written side by side, so they are printed when all are there
            tokens = list(tokens)
            seconds = time.perf_counter() - begin
        n_tokens = 0
        for b in range(n_rows):
            of_row = ((token[b].item(), steps_used[b]) for token, steps_used in tokens)
            steps = print_sample(of_row, stop, encoding, text, in_colour)
            n_tokens += len(steps)
            if n_rows > 1:
                speed = f'{len(steps)} tokens'      # in the time of all rows, see below
            else:
                speed = f'{len(steps) / (time.perf_counter() - begin):.1f} tokens/s'
            print(f'--- {speed}, {label}')
            if groups:
                print(f'mean loop steps {means_in_words(steps, groups)}')
            print(f'prompt: {rule_and_budget(of_prompt)}')
        if n_rows > 1:
            print(f'all {n_rows} samples side by side: {n_tokens / seconds:.1f} tokens/s')
    if in_colour:
        print_legend()


def new_tokens(model, prompts, n, seed, decoding, stop):
    """n new tokens after prompts (B, T), one after another, and their loop steps."""
    torch.manual_seed(seed)         # for a rule that tosses coins
    sampling = decode.Sampling(temperature, top_k, seed)
    decoder = decode.make_decoder(decoding.warm_start, decoding.draft_loops, wave=decoding.wave,
                                  wave_steps=decoding.wave_steps)
    return decode.stream(model, prompts, n, sampling, decoding.plan(noise_seed), decoder,
                         decoding.policy, decoding.ring, stop, decoding.converge)


def means_in_words(steps, groups):
    """The loop steps of each token, a list of (groups,), in words: '3.25 in group [1], 4.00 ...'"""
    means = torch.stack(steps).mean(dim=0).tolist()
    return ', '.join(f'{mean:.2f} in group {group}' for mean, group in zip(means, groups))


def print_sample(tokens, stop, encoding, text, in_colour):
    """
    Print the prompt `text` and each token as it comes, up to one in `stop` -> their loop steps, a
    list of (groups,). tokens: of one row, (a token's number, its loop steps (groups,)) each.
    """
    utf8 = codecs.getincrementaldecoder('utf-8')('replace')
    steps = []
    for token, steps_used in tokens:
        if not steps:
            print(text, end='')
        steps.append(steps_used.float())
        has_text = token < encoding.n_vocab         # some tokens of a padded vocabulary have none
        piece = utf8.decode(encoding.decode_single_token_bytes(token)) if has_text else ''
        if in_colour:
            piece = paint(piece, steps[-1].mean().item())
        print(piece, end='', flush=True)
        if token in stop:
            break
    print(utf8.decode(b'', final=True))
    return steps


def main():
    dev, autocast = pick_device(device, dtype)
    no_exit = ''
    if exit is not None or wave:
        no_exit = 'there is nothing to exit from: leave --exit and --wave out'
    model, checkpoint, folder, results = open_run(out_dir, dev, no_exit, length=length,
                                                   damping=damping)
    is_task = tasks.is_task(checkpoint['config']['dataset'])
    check_knobs(is_task)
    with autocast:
        if is_task:
            answer_problems(model, checkpoint, (results, folder))
        else:
            write_text(model, checkpoint, (results, folder))


if __name__ == '__main__':
    configure(globals())
    run(main)
