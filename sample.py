"""
Text from a checkpoint, or answers where the model has learned a task, with any exit rule.

    python sample.py                                        text by waves: several tokens at once
    python sample.py --exit accel                           one at a time, by the paper's rule
    python sample.py --exit=norm --tau=1e-1 --show_steps    each token coloured by its loop steps
    python sample.py --start='def ' --temperature=0 --cache=exact --draft_loops=2
    python sample.py --out_dir=out-calc --num_samples=5     problems, the right answers, the model's

It needs only a checkpoint, not the data, and uses a pretrained one if you have trained none.
Paper: sec. 4 (exit rules), Algorithm 1 (accel).
"""
import codecs
import re
import time

import numpy as np
import torch

import tasks
from common.checkpoint import open_run
from common.configurator import configure, given, run
from common.distributed import pick_device
from common.thresholds import of_threshold, read_tau
from data import EOT, get_encoding
from decode import compile_passes, stream, teacher_forced, use_one_thread
from exits import make_exit
from loops import Plan
from waves import can_wave

# -------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
start = '\n'                # the prompt, or FILE:prompt.txt; empty = end-of-text, a new document
num_samples = 1             # side by side, but for waves and drafts
max_new_tokens = 300
temperature: float = 0.8    # 0 = greedy
top_k: int | None = None    # sample among the k likeliest tokens; None = all
exit: str | None = None     # a rule in exits.EXITS: norm, kl, accel ...; None = fixed loops
tau: float | str | None = None  # None = the rule's default, auto = from bench.py --calibrate
past = False                # wait until earlier tokens have converged (in prompts, or cache=exact)
n_loop: int | list | None = None    # for all groups or each; None = mean_recurrence, 30 with a rule
cache: str | None = 'latest'    # latest, ring, exact, see cache.py; None = like exact, uncached
ring = 8                    # slots of cache='ring'
warm_start = False          # a token's loops start from the last state of the token before it
draft_loops: int | None = None  # draft with this many loops, verify with all (cache=exact)
wave: int | None = None     # wave width (waves.py); 0 = no wave; None = 8, 0 if other knobs need it
wave_steps: int | None = None   # loop steps of a wave's pass; None = a sixth of mean_recurrence
stop_at_end = True          # end-of-text ends a sample
seed = 1337                 # of the tokens drawn
noise_seed = 0              # of x^(0)
compile = False             # torch.compile: pays for small models, from 1,000s of tokens on
show_steps = False          # colour each token by its loop steps
device = 'auto'
dtype = 'float32'           # bfloat16 rounds away updates below 2e-3 of the state's norm
# -------------------------------------------------------------------------------------------------

# knobs that shape text and do not apply to the answers to problems
TEXT_KNOBS = ('start', 'max_new_tokens', 'temperature', 'top_k', 'warm_start', 'draft_loops',
              'wave', 'wave_steps', 'stop_at_end', 'compile')
# what a wave uses if it is given no rule, and no threshold has been calibrated for it
WAVE, WAVE_RULE, WAVE_TAU = 8, 'norm_rel', 3e-3

# {loop steps: ANSI-256 colour from this count on}, from dark blue to orange
COLOURS = {0: 17, 2: 19, 3: 25, 4: 31, 5: 36, 6: 71, 8: 107, 12: 143, 18: 179, 25: 208}


def paint(text, steps):
    """The text on the colour of its loop steps; line ends stay plain."""
    colour = [colour for bound, colour in COLOURS.items() if bound <= steps][-1]
    parts = [part for part in re.split('(\n)', text) if part]
    return ''.join(part if part == '\n' else f'\x1b[48;5;{colour}m\x1b[97m{part}\x1b[0m'
                   for part in parts)


def print_legend():
    legend = ''.join(paint(f' {bound} ', bound) for bound in COLOURS)
    print(f'colours start at these mean loop steps: {legend}')


def print_sample(row, stop, encoding, text, with_steps):
    """
    Print the prompt and each token as it comes, up to `stop` -> their loop steps, a list of
    (groups,). row: (a token's number, its loop steps (groups,)), one after another.
    """
    utf8, steps = codecs.getincrementaldecoder('utf-8')('replace'), []
    for token, used in row:
        if not steps:
            print(text, end='')
        steps.append(used.float())
        piece = ''
        if token < encoding.n_vocab:                # a padded vocabulary has tokens without text
            piece = utf8.decode(encoding.decode_single_token_bytes(token))
        if with_steps:
            piece = paint(piece, used.float().mean().item())
        print(piece, end='', flush=True)
        if token == stop:
            break
    print(utf8.decode(b'', final=True))
    return steps


def read_prompt(start):
    """The knob `start` -> the text, from a file if it is FILE:PATH."""
    if not start.startswith('FILE:'):
        return start
    with open(start.removeprefix('FILE:'), encoding='utf-8-sig') as f:
        return f.read()


def wave_of(model):
    """
    The knobs -> the width of the wave, 0 = no wave, and the loop steps of its passes.

    A wave is the default, because it is the fastest for one text (README.md). Fixed loops are
    faster for several, and mostly if passes are compiled; and a knob may ask for what waves do not
    support, or set the exit rule or the loop budget.
    """
    width, steps = wave, wave_steps
    if width is None:
        single = (exit or past or n_loop or draft_loops is not None or warm_start or compile
                  or cache != 'latest' or num_samples > 1)
        width = 0 if single or not can_wave(model) else WAVE
    if steps is None:
        steps = max(1, round(model.config.mean_recurrence / 6))
    return width, steps


def threshold_of(rule, model, checkpoint, results, width, steps):
    """The rule's threshold: the knob, what bench.py --calibrate has found, or a default."""
    of_wave = width and not exit        # what a wave uses by itself
    if tau != 'auto' and not (tau is None and of_wave):
        return tau
    found_for = of_threshold(rule, cache, ring, model.loop_counts(n_loop, rule),
                             [width, steps] if width else None)
    try:
        return read_tau(results, checkpoint, found_for)
    except ValueError:                  # none has been calibrated
        if tau == 'auto':
            raise
        return WAVE_TAU


def rule_of(model, checkpoint, results, width, steps):
    """The knobs -> the exit rule, None = fixed loops."""
    name = exit or (WAVE_RULE if width else None)
    if name is None:
        return None
    rule = make_exit(name, past=past)
    threshold = threshold_of(rule, model, checkpoint, results, width, steps)
    return make_exit(name, threshold, past=past)


def print_problems(model, task, rule):
    """Problems of the task that the model has learned, the right answers and the model's."""
    unused = [knob for knob in TEXT_KNOBS if knob in given]
    if unused:
        raise ValueError(f'this model answers problems of {task}: leave out '
                         + ', '.join(f'--{knob}' for knob in unused))
    problems, T = tasks.Problems(task), model.config.block_size
    x, y, _ = problems.make(np.random.default_rng(seed), num_samples, T)
    idx = torch.from_numpy(x).to(model.lm_head.weight.device)
    plan = Plan(model.loop_counts(n_loop, rule), rule, noise_seed)
    logits, steps, _ = teacher_forced(model, idx, plan, cache, ring)
    steps = steps.float().mean(dim=-1).nan_to_num().cpu().numpy()       # 0 without groups
    coloured = paint if show_steps else lambda text, steps: text
    problems.print_answers(x, y, logits.argmax(-1).cpu().numpy(), steps, coloured)
    print(f'mean loop steps {steps.mean():.2f}')


def print_text(model, encoding, rule, width, pass_steps, dev):
    """num_samples continuations of the prompt. width, pass_steps: see wave_of."""
    text = read_prompt(start)
    prompt = encoding.encode(text, allowed_special={EOT}) or [encoding.eot_token]
    block_size, groups = model.config.block_size, model.config.groups
    use_one_thread(model)
    if compile:
        compile_passes(model, max(width, 5))        # 5: four drafts and a token
    if len(prompt) > block_size:
        print(f'the prompt has {len(prompt)} tokens: its last {block_size} (block_size) are used')
    stop = encoding.eot_token if stop_at_end else None
    by = f' by waves of {width} x {pass_steps}, {rule.name} {rule.tau:g}' if width else ''
    # waves and drafts work on one row; otherwise all samples are written side by side
    rows = 1 if width or draft_loops is not None else num_samples
    for i in range(0, num_samples, rows):
        idx = torch.tensor([prompt] * rows, device=dev)
        tokens = stream(
            model, idx, max_new_tokens, temperature=temperature, top_k=top_k, n_loop=n_loop,
            exit=rule, cache=cache, noise=noise_seed, ring=ring, warm_start=warm_start,
            draft_loops=draft_loops, wave=width, wave_steps=pass_steps, stop=stop, seed=seed + i)
        begin = time.perf_counter()
        if rows > 1:            # one row is printed as it comes
            tokens = list(tokens)
        seconds = time.perf_counter() - begin
        for b in range(rows):
            row = ((token[b].item(), used[b]) for token, used in tokens)
            steps = print_sample(row, stop, encoding, text, show_steps and bool(groups))
            rate = len(steps) / (seconds if rows > 1 else time.perf_counter() - begin)
            means = ', '.join(f'{mean:.2f} in group {group}' for mean, group
                              in zip(torch.stack(steps).mean(dim=0).tolist(), groups))
            print(f'--- {rate:.1f} tokens/s{by}' + (f'; mean loop steps {means}' if groups else ''))


def main():
    # the model and the rule
    dev, autocast = pick_device(device, dtype)
    if (past or tau is not None) and not (exit or wave):
        raise ValueError('--past and --tau need an exit rule: add --exit=norm_rel, or --wave=8')
    if num_samples < 1:
        raise ValueError(f'num_samples must be at least 1, not {num_samples}')
    no_exit = 'there is nothing to exit from: leave --exit and --wave out'
    model, checkpoint, folder, results = open_run(out_dir, dev, no_exit if exit or wave else '')
    task = checkpoint['config']['dataset']
    width, pass_steps = wave_of(model)
    rule = rule_of(model, checkpoint, results, width, pass_steps)
    if 'wave_steps' in given and not width:
        raise ValueError('--wave_steps needs a wave: add --wave=8')
    if compile and cache is None:
        raise ValueError('--compile needs a cache: leave out --cache=None')
    if 'ring' in given and cache != 'ring':
        raise ValueError('--ring needs its cache policy: add --cache=ring')

    # problems or text
    with autocast:
        if tasks.is_task(task):
            print_problems(model, task, rule if exit else None)
        else:
            print_text(model, get_encoding(checkpoint['tokenizer'], folder), rule, width,
                       pass_steps, dev)
    if show_steps and model.groups:
        print_legend()


if __name__ == '__main__':
    configure(globals())
    run(main)
