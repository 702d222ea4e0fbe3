"""
Text from a checkpoint, or answers where the model has learned a task, with any exit rule.

    python sample.py                                        text, drafted with few loops
    python sample.py --exit accel                           one token at a time, the paper's rule
    python sample.py --exit=norm --tau=1e-1 --show_steps    tokens on the colour of their loops
    python sample.py --start='def ' --temperature=0 --decoder=wave:width=8      several at once
    python sample.py --out_dir=pretrained/calc --exit accel     a problem and the model's answers
    python sample.py --out_dir=pretrained/calc --start='=2 +3 *4'       a problem of your own

Paper: sec. 4 (exit rules), Algorithm 1 (accel).
"""
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import decode
import tasks
from common.checkpoint import open_run
from common.configurator import Count, Natural, configure
from common.device import pick_device, use_one_thread
from common.encoding import open_encoding
from common.errors import check, explain, run
from common.terminal import colours_are_shown, paint, print_legend
from data import examples_of
from exits import choose
from loops import Plan, as_noise
from tasks import NOT_ASKED, print_problem

# -------------------------------------------------------------------------------------------------
out_dir: str | None = None  # None = out, or pretrained/text if you have trained no model
start: str | None = '\n'    # the prompt or a problem, or FILE:prompt.txt; None = a new document
num_samples: Count = 1      # side by side, but for waves and drafts
num_starts: Count = 1       # tries of a problem whose answers can be checked, from other noise
max_new_tokens = 300        # of a text
temperature: float = 0.8    # 0 = greedy
top_k: int | None = None    # sample among the k likeliest tokens; None = all
length: int | None = None   # tokens (needs rotary positions); None = as in training
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
dataset: str | None = None  # the model's task with other knobs, such as calc:reset=0.01
exit: str | None = None     # of exits.EXITS, or MODULE:NAME; None = the decoder's, or fixed loops
tau: float | None = None    # its threshold; None = see exits.choose
wake: bool | None = None    # may a token that has exited wake? None = on a task with cache exact
n_loop: int | list | None = None    # None = the task's, else see GPT.loop_counts
cache: str | int = 'auto'   # exact, latest, or a number of slots; auto = exact, or the decoder's
decoder: str | None = None  # one of decode.DECODERS, as wave:width=8; None = drafts or one_by_one
seed: Natural = 1337        # of the tokens drawn, or of the problems
compile = False             # compiled passes: worth it on a GPU, or for thousands of tokens
show_steps: bool | None = None  # colour tokens by loops; None = in pictures on a terminal
device = 'auto'
# -------------------------------------------------------------------------------------------------

SKIP = 0.2      # of starts after the first: a token's chance to skip a step (results/sudoku.md)

def read_prompt(start):
    """The knob `start` -> the text, from a file if it is FILE:PATH."""
    if not start.startswith('FILE:'):
        return start
    path = start.removeprefix('FILE:')
    with explain(f"cannot read '{path}'", 'a prompt is UTF-8 text', UnicodeDecodeError):
        return Path(path).expanduser().read_text(encoding='utf-8-sig')


# how to decode ------------------------------------------------------------------------------------

def plan_of(model, writer=None, task=None, T=None):
    """
    The knobs -> a Plan, the policy of its cache, and the plan in words: 'at most 30 loops, accel
    with tau = 1'. writer: the Decoder of a text. task: of a problem of T tokens, None = a text.
    """
    rule, policy, source = choose(exit, tau, wake=bool(wake), policy=cache, decoder=writer,
                                  rows=model.exit_rows)
    # on a task tokens wake if the cache is exact, unless the user says no
    if wake is None and rule and task is not None and policy == 'exact':
        rule = replace(rule, wake=True)
    budget = n_loop
    if budget is None and task is not None:
        budget = task.budget(T, bool(rule and rule.wake))
    plan = Plan(model.loop_counts(budget, has_rule=rule is not None), rule)

    counts = plan.counts if len(set(plan.counts)) > 1 else plan.counts[:1]
    numbers = '-'.join(map(str, counts)) or 'no'
    words = '1 loop' if numbers == '1' else f'{numbers} loops'
    if rule:
        words = f'at most {words}, {rule.name} with tau = {rule.tau:g}'
        words += f' ({source})' if source else ''
        words += ', waking' if rule.wake else ''
    return plan, policy, words


# the first path: problems -------------------------------------------------------------------------

def answer_problems(model, checkpoint):
    """Problems of the model's task, or the one in `start`: the right answers and the model's."""
    problems = examples_of(checkpoint, dataset)
    block_size = model.config.block_size
    depth = None
    if 'start' in settings.given:
        x, y = problems.solve(read_prompt(start or ''))                               # (1, T)
        check(x.shape[1] <= block_size, f'the problem has {x.shape[1]} tokens, and the model reads '
              f'{block_size}: give --length={x.shape[1]}')
    else:
        x, y, depth = problems.make(np.random.default_rng(seed), num_samples, block_size)
    plan, policy, words = plan_of(model, task=problems.task, T=x.shape[1])

    check(num_starts == 1 or problems.task.valid, f'the task {problems.name} cannot check its '
          'answers: leave out --num_starts')
    torch.manual_seed(seed)             # for a rule that tosses coins, and for SKIP
    guesses, kept, evals = answers_of(model, problems, x, plan, policy)

    has_picture = problems.task.picture is not None
    in_colour = has_picture and colours_are_shown() if show_steps is None else show_steps
    for b in range(len(x)):
        print_problem(problems, x[b], y[b], guesses[b], evals[b], in_colour)
    asked = y != NOT_ASKED
    if asked.any():
        right = (guesses == y)[asked]
        marked = 'a ! beside wrong ones' if has_picture else 'wrong ones as !word!'
        print(f'--- {right.sum()} of {right.size} answers right, {100 * right.mean():.1f}%; '
              f'{marked}')
    if problems.task.valid:
        left = sum(~problems.task.valid(x, guesses))
        print(f'not solved: {left} of {len(x)}; --num_starts=32 may help' if left else 'solved')
    if depth is not None and problems.task.shows_deepest:
        in_one_pass = policy == 'exact' and model.groups        # a plain model keeps no steps
        print(deepest_answer(y, depth, guesses, kept if in_one_pass else None), end='; ')
    print(f'a token was computed {evals.mean():.1f} times')
    if plan.rule and (kept == plan.counts).any():
        print('some tokens took the whole budget: a larger --n_loop may change them')
    order = ('all tokens together' if policy == 'exact'
             else f'one token after another (cache {policy})')
    print(f'read: {order}, {words}')
    if in_colour:
        print_legend()


def answers_of(model, problems, x, plan, policy):
    """
    Problems x (B, T) -> the model's answers (B, T), the loop steps kept (B, T, groups), and those
    computed in all tries, on average over the groups (B, T). Problems that are not solved are tried
    again, num_starts times in all.
    """
    idx = torch.from_numpy(x).to(model.lm_head.weight.device)
    guesses = np.zeros_like(x)
    kept, evals = np.zeros((2, *x.shape, len(model.groups)), dtype=int)
    left = np.arange(len(x))            # the problems that are not solved yet
    for attempt in range(num_starts):
        for group in model.groups:      # a rule would take a skipped step for rest
            group.skip = SKIP if attempt and not plan.rule else 0.0
        logits, *steps = decode.read(model, idx[left], replace(plan, noise=as_noise(attempt)),
                                     policy)
        guesses[left] = logits.argmax(-1).cpu()
        kept[left], computed = torch.stack(steps).cpu().numpy()
        evals[left] += computed
        if num_starts > 1:
            left = left[~problems.task.valid(x[left], guesses[left])]
            if not len(left):
                break
    return guesses, kept, evals.sum(-1) / max(1, len(model.groups))     # a plain model has none


def deepest_answer(y, depth, guesses, kept=None):
    """
    In words: was the deepest label found, and in which loop? All (B, T). kept: loop steps (B, T,
    groups); None if the model has no groups, or has read one token after another: then the loops of
    earlier tokens would count, too.
    """
    asked = y != NOT_ASKED
    deepest = np.unravel_index(np.where(asked, depth, -1).argmax(), y.shape)
    found = 'found' if guesses[deepest] == y[deepest] else 'not found'
    if kept is not None:
        found += f' in {kept[deepest].max()} loops'
    return f'deepest answer: depth {depth[deepest]}, {found}'


# the second path: text ----------------------------------------------------------------------------

def write_text(model, checkpoint):
    """num_samples continuations of the prompt, and below each how it was written."""
    encoding = open_encoding(checkpoint['tokenizer'], checkpoint['folder'])
    text = read_prompt(start or '')
    prompt = encoding.encode(text) or [encoding.eot_token]
    block_size = model.config.block_size
    if len(prompt) > block_size:
        print(f'the prompt has {len(prompt)} tokens: its last {block_size} (block_size) are used')

    writer = decode.decoder_of(decoder)
    plan, policy, words = plan_of(model, writer)
    if writer is None:
        # drafts write the very text of fixed loops, and with many loops faster
        writer = decode.OneByOne() if plan.rule else decode.Drafts()
        try:
            writer.check_fits(model, plan, policy, num_samples)
        except ValueError:      # no groups, one loop, another cache, or several samples
            writer = decode.OneByOne()
    widths = writer.widths(plan)
    check(not compile or widths, 'there is no pass to compile: leave out --compile')

    n_rows = 1 if writer.one_row else num_samples
    idx = torch.tensor([prompt] * n_rows, device=model.lm_head.weight.device)
    if compile:
        from compiled import compile_passes
        print('compiling: on a CPU up to a minute, in which nothing is written')
        compile_passes(model, widths)
        # compile with two texts that nobody sees; drafts may end with a pass of one token
        for n_new in 2, 32 + max(widths):
            list(decode.stream(model, idx, n_new, plan, writer, policy))
    in_colour = show_steps and model.groups
    for first in range(0, num_samples, n_rows):
        begin = time.perf_counter()
        torch.manual_seed(seed + first)         # for a rule that tosses coins
        parts = decode.stream(model, idx, max_new_tokens, plan, writer, policy,
                              seed=seed + first, temperature=temperature, top_k=top_k)
        if n_rows > 1:      # they are written side by side, so they are printed when all are there
            parts = list(parts)
        n_tokens = 0
        for b in range(n_rows):
            steps = print_row(parts, b, encoding, text, in_colour)              # (n, groups)
            n_tokens += len(steps)
            print(f'--- {writer.in_words(plan)}{words}, cache {policy}')
            if model.groups:
                means = zip(steps.mean(dim=0).tolist(), model.config.groups)
                print('mean loop steps kept: '
                      + ', '.join(f'{mean:.2f} in group {group}' for mean, group in means))
        print(f'{n_tokens / (time.perf_counter() - begin):.1f} tokens/s')
    if in_colour:
        print_legend()


def print_row(parts, b, encoding, text, in_colour):
    """Print the prompt `text` and row b as it comes, up to its end -> loop steps (n, groups)."""
    steps = []
    tokens_so_far = encoding.encode(text)
    printed = encoding.decode(tokens_so_far)
    new_tokens = ((token, used) for tokens, steps_used in parts
                  for token, used in zip(tokens[b].tolist(), steps_used[b].float()))
    for token, used in new_tokens:
        if not steps:           # with the first token, so that an error prints no prompt
            print(text, end='')
        steps.append(used)
        if token < encoding.n_vocab:        # some tokens of a padded vocabulary have no text
            tokens_so_far.append(token)
        # all of it again, since a token alone may lose its leading blank, or be a part of a letter
        decoded = encoding.decode(tokens_so_far)
        if decoded.endswith('\ufffd'):
            continue
        new_text = decoded[len(printed):]
        print(paint(new_text, used.mean().item()) if in_colour else new_text, end='', flush=True)
        printed = decoded
        if token in encoding.ends:
            break
    print(encoding.decode(tokens_so_far)[len(printed):])
    return torch.stack(steps)


def main():
    dev, _ = pick_device(device, 'float32')
    model, checkpoint, folder, _ = open_run(out_dir, dev, length=length, damping=damping)
    use_one_thread(model)
    check(model.groups or not exit, f'the model in {folder} has no groups that loop: leave out '
          '--exit')
    if tasks.is_task(checkpoint['config']['dataset']):
        check(not (decoder or compile), 'this model answers problems: leave out --decoder and '
              '--compile')
        answer_problems(model, checkpoint)
    else:
        check(dataset is None and num_starts == 1, 'this model writes text: leave out --dataset '
              'and --num_starts')
        write_text(model, checkpoint)


if __name__ == '__main__':
    settings = configure(globals())
    run(main)
