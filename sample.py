"""
Text out of a checkpoint, or answers where it has learnt a task, with any exit rule.

    python sample.py --exit accel                           text, then tokens/s and mean loop steps
    python sample.py --exit=norm --tau=1e-1 --show_steps    each token coloured by its loop steps
    python sample.py --start=FILE:prompt.txt --temperature=0 --cache=exact --draft_loops=2
    python sample.py --out_dir=out-calc --num_samples=5     problems, the right answers, the model's
    python sample.py --requests=FILE                        a JSON line each, see serving.py

It needs the checkpoint alone, not the data. Paper: sec. 4 (exit rules), Algorithm 1 (accel).
"""
import codecs
import os
import re
import time
from functools import partial

import numpy as np
import torch

import tasks
from calibrate import read_tau
from common.checkpoint import load_checkpoint
from common.configurator import configure, pick_device, run
from decode import compile_one_token, stream
from encoding import EOT, get_encoding
from exits import make_exit
from quality import Point, log_probabilities
from serving.batching import serve
from serving.requests import answer, read, read_prompt

# -------------------------------------------------------------------------------------------------
out_dir = 'out'
start = '\n'                # the prompt, or FILE:prompt.txt; empty = end-of-text, a new document
num_samples = 1
max_new_tokens = 300
temperature: float = 0.8    # 0 = greedy
top_k: int | None = None    # sample among the k likeliest tokens; None = all
exit: str | None = None     # norm, norm_rel, kl, accel, accel_hat, accel_rel; None = fixed loops
tau: float | str | None = None  # None = the rule's usual, auto = as bench.py --calibrate found
past = False                # a token goes only when all before it stand still; of a prompt, exact
n_loop: int | list | None = None    # one or one a group; None = mean_recurrence, 30 with a rule
cache: str | None = 'latest'    # latest, ring, exact, see cache.py; None = no cache, as exact
ring = 8                    # slots of cache='ring'
prefill_chunk: int | None = None    # prompt tokens at a time; None = all
warm_start = False          # a token's loops start from the last state of the token before it
draft_loops: int | None = None  # draft with so few loops, verify with all; needs --temperature=0
stop_at_end = True          # end-of-text ends a sample
requests: str | None = None     # a file of JSON lines to answer, see serving.py
slots = 32                  # of them at a time
seed = 1337                 # of the tokens drawn
noise_seed = 0              # of x^(0)
compile = False             # the step of one token; pays in small models on a CPU, see decode.py
show_steps = False          # colour each token by its loop steps
device = 'auto'
dtype = 'float32'           # bfloat16 makes steps below 2e-3 of the state's norm rounding
# -------------------------------------------------------------------------------------------------

# an ANSI-256 colour from so many steps on, dark blue for few, orange for many
COLOURS = {0: 17, 2: 19, 3: 25, 4: 31, 5: 36, 6: 71, 8: 107, 12: 143, 18: 179, 25: 208}


def paint(text, steps):
    """text on the colour of so many loop steps; line ends stay plain."""
    colour = [colour for bound, colour in COLOURS.items() if bound <= steps][-1]
    parts = [part for part in re.split('(\n)', text) if part]
    return ''.join(part if part == '\n' else f'\x1b[48;5;{colour}m\x1b[97m{part}\x1b[0m'
                   for part in parts)


def print_legend():
    legend = ''.join(paint(f' {bound} ', bound) for bound in COLOURS)
    print(f'loop steps, mean over the groups, from: {legend}')


def print_sample(tokens, encoding, text, with_steps):
    """The prompt's text, then each token as it comes -> the mean steps of each, (groups,) each."""
    utf8, steps = codecs.getincrementaldecoder('utf-8')('replace'), []
    for token, used in tokens:
        if not steps:
            print(text, end='')
        steps.append(used.float().mean(dim=0))
        piece = ''
        if token.item() < encoding.n_vocab:         # a padded vocabulary has tokens without text
            piece = utf8.decode(encoding.decode_single_token_bytes(token.item()))
        if with_steps:
            piece = paint(piece, steps[-1].mean().item())
        print(piece, end='', flush=True)
    print(utf8.decode(b'', final=True))
    return steps


@torch.no_grad()
def print_problems(model, task, rule):
    """Problems of the task that the model has learnt, the right answers and the model's."""
    x, y, _ = tasks.make(task, np.random.default_rng(seed), num_samples, model.config.block_size)
    idx = torch.from_numpy(x).to(model.lm_head.weight.device)
    point = Point('', 0, model.loop_counts(n_loop, rule), rule, cache or 'exact', ring)
    log_p, steps, _ = log_probabilities(model, point, idx, noise_seed)
    steps = steps.float().mean(dim=-1).nan_to_num().cpu().numpy()       # no groups, no steps
    coloured = paint if show_steps else lambda text, steps: text
    tasks.print_answers(task, x, y, log_p.argmax(-1).cpu().numpy(), steps, coloured)
    print(f'mean loop steps {steps.mean():.2f}')


def main():
    # the model, the rule, the prompt
    dev, autocast = pick_device(device, dtype)
    if (past or tau == 'auto') and not exit:
        raise ValueError('--past and --tau=auto are about exit rules: give one, --exit=norm_rel')
    if requests and (draft_loops or warm_start or prefill_chunk):
        raise ValueError('--requests takes no --draft_loops, --warm_start or --prefill_chunk')
    if num_samples < 1:
        raise ValueError(f'num_samples must be at least 1, not {num_samples}')
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    threshold = tau if tau != 'auto' else read_tau(out_dir, checkpoint, cache, exit, past)
    rule = make_exit(exit, threshold, past=past) if exit else None
    block_size, groups = model.config.block_size, model.config.groups
    if rule and not groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups, so there is nothing to '
                         'exit from: leave --exit out')
    task, encoding = checkpoint['config']['dataset'], get_encoding(checkpoint['tokenizer'], out_dir)
    end = encoding.eot_token if stop_at_end else None
    if requests:
        usual = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed,
                     stop=end)
        with autocast:
            return answer(partial(serve, model, slots=slots, n_loop=n_loop, exit=rule, cache=cache,
                                  noise_seed=noise_seed), read(requests, encoding, usual), encoding)
    if task.partition(':')[0] in tasks.TASKS:
        with autocast:
            print_problems(model, task, rule)
        return print_legend() if show_steps and groups else None
    if compile:
        compile_one_token(model)
    text = read_prompt(start)
    prompt = encoding.encode(text, allowed_special={EOT}) or [encoding.eot_token]
    if len(prompt) > block_size:
        print(f'the prompt has {len(prompt)} tokens: its last {block_size} (block_size) are used')

    # token by token
    torch.manual_seed(seed)
    for sample in range(num_samples):
        tokens = stream(
            model, [torch.tensor(prompt, device=dev)], max_new_tokens, temperature=temperature,
            top_k=top_k, n_loop=n_loop, exit=rule, cache=cache, noise_seed=noise_seed, ring=ring,
            warm_start=warm_start, draft_loops=draft_loops, stop=end, prefill_chunk=prefill_chunk)
        begin = time.perf_counter()
        with autocast:
            steps = print_sample(tokens, encoding, text, show_steps and bool(groups))
        rate = len(steps) / (time.perf_counter() - begin)
        means = ', '.join(f'{mean:.2f} in group {group}' for mean, group
                          in zip(torch.stack(steps).mean(dim=0).tolist(), groups))
        print(f'--- {rate:.1f} tokens/s' + (f'; mean loop steps {means}' if groups else ''))
    if show_steps and groups:
        print_legend()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
