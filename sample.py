"""
Text from a checkpoint, or answers where the model has learned a task, with any exit rule.

    python sample.py                                        text, drafted with few loops
    python sample.py --exit accel                           one token at a time, the paper's rule
    python sample.py --exit=norm --tau=1e-1 --show_steps    each token coloured by its loop steps
    python sample.py --start='def ' --temperature=0 --wave=8    several tokens at once
    python sample.py --out_dir=out-calc --num_samples=5     problems, the right answers, the model's

It needs only a checkpoint, not the data, and uses a pretrained one if you have trained none.
Paper: sec. 4 (exit rules), Algorithm 1 (accel).
"""
import codecs
import time
from dataclasses import replace

import numpy as np
import torch

import tasks
from cache import POLICIES
from common.checkpoint import calibrated, open_run, threshold_key
from common.colours import paint, print_legend
from common.configurator import PathName, configure, given, run
from common.distributed import pick_device
from data import get_encoding, open_data, read_prompt
from decode import teacher_forced, use_one_thread
from decode.compiled import compile_passes
from exits import make_exit
from loops import Plan, as_noise

# -------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
start = '\n'                # the prompt, or FILE:prompt.txt; empty = end-of-text, a new document
num_samples = 1             # side by side, but for waves and drafts
max_new_tokens = 300
temperature: float = 0.8    # 0 = greedy
top_k: int | None = None    # sample among the k likeliest tokens; None = all
exit: str | None = None     # a rule in exits.EXITS, such as accel; None = fixed loops
tau: float | None = None    # threshold; None = what bench.py --calibrate found, or a default
hits: int | None = None     # small values in a row before a token exits; None = the rule's own
past = False                # wait until earlier tokens have converged (cache=exact)
n_loop: int | list | None = None    # for all groups or each; None = mean_recurrence, 30 with a rule
cache: str | None = 'auto'  # a policy in cache.POLICIES; None = uncached; auto = the fastest
ring = 8                    # slots of cache='ring'
warm_start = False          # a token's loops start from the last state of the token before it
draft_loops: int | None = None  # loops of drafts; 0 = no drafts; None = a quarter of the budget
wave = 0                    # tokens of a wave (waves.py); 0 = no wave
wave_steps = 1              # loop steps of each of its passes
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
WAVE_TAU = 3e-3             # of a wave without a rule of its own, which then uses norm_rel
CONVERGE = ' (prompts: until they have converged)'


def print_sample(row, stop, encoding, text, with_steps):
    """
    Print the prompt and each token as it comes, up to one in `stop` -> their loop steps, a list of
    (groups,). row: (a token's number, its loop steps (groups,)), one after another.
    """
    utf8, steps = codecs.getincrementaldecoder('utf-8')('replace'), []
    for token, used in row:
        if not steps:
            print(text, end='')
        steps.append(used.float())
        has_text = token < encoding.n_vocab         # some tokens of a padded vocabulary have none
        piece = utf8.decode(encoding.decode_single_token_bytes(token)) if has_text else ''
        if with_steps:
            piece = paint(piece, steps[-1].mean().item())
        print(piece, end='', flush=True)
        if token in stop:
            break
    print(utf8.decode(b'', final=True))
    return steps


def way_of(model, is_task=False):
    """
    The knobs -> how decode.stream makes the next tokens, as its keywords.

    Where nothing else is asked for, one text is written by drafts: the fastest way that writes the
    very text of the loop budget (results/writing.md).
    """
    drafts, policy, budget = draft_loops, cache, min(model.loop_counts(n_loop), default=1)
    if drafts is None:
        asked = exit or wave or past or warm_start or num_samples > 1 or is_task
        possible = cache in ('auto', 'exact') and budget > 1
        drafts = max(1, round(budget / 4)) if possible and not asked else 0
    if policy == 'auto':
        policy = 'exact' if drafts or past else 'latest'
    return dict(cache=policy, ring=ring, warm_start=warm_start, draft_loops=drafts or None,
                wave=wave, wave_steps=wave_steps)


def rule_of(model, checkpoint, folders, way):
    """
    The knobs -> the exit rule, None = fixed loops, and where its threshold comes from: --tau, or
    exits.json in one of the folders (bench.py --calibrate), or the rule's default.
    """
    if not (exit or wave):
        return None, ''
    rule = make_exit(exit or 'norm_rel', tau, hits, wake=past)
    if tau is not None:
        return rule, '--tau'
    key = threshold_key(rule, way['cache'], ring, [wave, wave_steps] if wave else None)
    for folder in folders:
        threshold = calibrated(folder, checkpoint, key)
        if threshold:
            source = f'{folder}/exits.json'
            if not threshold.kept:
                source += ', which breaks its promise on other windows'
            return replace(rule, tau=threshold.tau), source
    return rule if exit else replace(rule, tau=WAVE_TAU), 'the default'


def in_words(model, rule, source, way):
    """How the tokens are made: the line below a text."""
    loops = '-'.join(map(str, dict.fromkeys(model.loop_counts(n_loop, rule)))) or 'no'
    if way['draft_loops']:
        how = f"drafts of {way['draft_loops']} loop(s), checked by {loops}"
    elif wave:
        how = f'waves of {wave} x {wave_steps}'
    else:
        how = f'at most {loops} loops' if rule else f'{loops} loops'
    return how + (f', {rule.name} with tau = {rule.tau:g} ({source})' if rule else '')


def print_problems(model, problems, rule, way, how):
    """Problems of the task that the model has learned, the right answers and the model's."""
    x, y, _ = problems.make(np.random.default_rng(seed), num_samples, model.config.block_size)
    idx = torch.from_numpy(x).to(model.lm_head.weight.device)
    plan = Plan(model.loop_counts(n_loop, rule), rule, as_noise(noise_seed))
    logits, steps, _ = teacher_forced(model, idx, plan, way['cache'], ring)
    steps = steps.float().mean(dim=-1).nan_to_num().cpu().numpy()       # 0 without groups
    coloured = paint if show_steps else lambda text, steps: text
    problems.print_answers(x, y, logits.argmax(-1).cpu().numpy(), steps, coloured)
    print(f'{how}; mean loop steps {steps.mean():.2f}')


def print_text(model, encoding, rule, way, how):
    """num_samples continuations of the prompt. rule, way, how: see rule_of, way_of and in_words."""
    text, groups, dev = read_prompt(start), model.config.groups, model.lm_head.weight.device
    prompt = encoding.encode(text) or [encoding.eot_token]
    if len(prompt) > model.config.block_size:
        print(f'the prompt has {len(prompt)} tokens: its last {model.config.block_size} '
              '(block_size) are used')
    use_one_thread(model)
    if compile:
        compile_passes(model, max(wave, 5))         # 5: four drafts and a token
    stop = encoding.ends if stop_at_end else []
    converges = way['cache'] in POLICIES and POLICIES[way['cache']].converge
    # waves and drafts work on one row; otherwise all samples are decoded side by side
    rows = 1 if wave or way['draft_loops'] else num_samples
    for i in range(0, num_samples, rows):
        begin = time.perf_counter()
        tokens = model.stream(torch.tensor([prompt] * rows, device=dev), max_new_tokens,
                              temperature, top_k, n_loop, rule, noise_seed=noise_seed, stop=stop,
                              seed=seed + i, **way)
        if rows > 1:        # they come together, so they are printed when all are there
            tokens = list(tokens)
        for b in range(rows):
            row = ((token[b].item(), steps[b]) for token, steps in tokens)
            steps = print_sample(row, stop, encoding, text, show_steps and bool(groups))
            rate = len(steps) / (time.perf_counter() - begin)
            print(f'--- {rate:.1f} tokens/s, {how}')
            if groups:
                means = (f'{mean:.2f} in group {group}' for mean, group
                         in zip(torch.stack(steps).mean(dim=0).tolist(), groups))
                print('mean loop steps ' + ', '.join(means) + CONVERGE * converges)


def main():
    # the model and the rule
    dev, autocast = pick_device(device, dtype)
    no_exit = 'there is nothing to exit from: leave --exit and --wave out'
    model, checkpoint, folder, results = open_run(out_dir, dev, no_exit if exit or wave else '')
    task = checkpoint['config']['dataset']
    is_task = tasks.is_task(task)
    way = way_of(model, is_task)
    unused = ', '.join(f'--{knob}' for knob in TEXT_KNOBS if is_task and knob in given)
    for wrong, what in (
            (unused, f'this model answers problems of {task}: leave out {unused}'),
            ((past or (tau, hits) != (None, None)) and not (exit or wave),
             '--past, --tau and --hits need an exit rule: add --exit=norm_rel, or --wave=8'),
            (num_samples < 1, f'num_samples must be at least 1, not {num_samples}'),
            ('wave_steps' in given and not wave, '--wave_steps needs a wave: add --wave=8'),
            (compile and cache is None, '--compile needs a cache: leave out --cache=None'),
            ('ring' in given and cache != 'ring', '--ring needs --cache=ring'),
            (past and way['cache'] == 'latest',
             '--past needs what the exact cache keeps: leave out --cache and --wave')):
        if wrong:
            raise ValueError(what)
    rule, source = rule_of(model, checkpoint, (results, folder), way)
    how = in_words(model, rule, source, way)

    # problems or text
    with autocast:
        if is_task:
            problems = open_data(task, checkpoint['tokenizer'], folder=folder)
            print_problems(model, problems, rule, way, how)
        else:
            print_text(model, get_encoding(checkpoint['tokenizer'], folder), rule, way, how)
    if show_steps and model.groups:
        print_legend()


if __name__ == '__main__':
    configure(globals())
    run(main)
