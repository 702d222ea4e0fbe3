"""
Text out of a checkpoint, with any exit rule.

    python sample.py --exit accel                           text as it comes, then tokens/s and the mean loop steps
    python sample.py --exit=norm --tau=1e-1 --show_steps    each token coloured by the loop steps it took
    python sample.py --start=FILE:prompt.txt --temperature=0 --n_loop=8 --draft_loops=2

It needs the checkpoint alone, not the data. Paper: sec. 4 (exit rules), Algorithm 1 (accel); Geiping 5 (cache, drafts).
"""
import codecs
import os
import re
import time

import torch

from checkpoint import load_checkpoint
from configurator import configure, run
from data import EOT, get_encoding
from decode import stream
from exits import make_exit
from model import pick_device

# ---------------------------------------------------------------------------------------------------------------------
out_dir = 'out'
start = '\n'                # the prompt, or FILE:prompt.txt; empty = end-of-text, a new document
num_samples = 1
max_new_tokens = 300
temperature: float = 0.8    # 0 = greedy
top_k: int | None = None    # sample among the k likeliest tokens; None = all
exit: str | None = None     # norm, norm_rel, kl, accel, accel_hat, accel_rel; None = fixed loops
tau: float = 1e-2           # the rule's threshold
n_loop: int | list | None = None    # loops, one number or one for each group; None = mean_recurrence, or at most 30 with an exit rule
cache: str | None = 'exact' # keys and values: exact, ring or latest (both change the result); None = recompute the context
ring = 8                    # slots of cache='ring'
warm_start = False          # a token's loops start from the last state of the token before it
draft_loops: int | None = None      # self-speculation: draft with so few loops, verify with all; needs --temperature=0
stop_at_end = True          # end-of-text ends a sample
seed = 1337                 # of the tokens drawn
noise_seed = 0              # of x^(0)
compile = False             # the step of one token, once for all loop counts: pays in small models on a CPU, see README
show_steps = False          # colour each token by its loop steps
device = 'auto'
dtype = 'float32'           # of matrix products; in bfloat16 the states never settle below a tau of 2e-2 or so
# ---------------------------------------------------------------------------------------------------------------------

SCALE = {0: 17, 2: 19, 3: 25, 4: 31, 5: 36, 6: 71, 8: 107, 12: 143, 18: 179, 25: 208}    # from so many steps: ANSI-256 colour


def paint(text, steps):
    """text on a background that tells the mean loop steps of its token: dark blue for few, orange for many."""
    colour = [c for bound, c in SCALE.items() if bound <= steps][-1]
    return ''.join(part if part == '\n' else f'\x1b[48;5;{colour}m\x1b[97m{part}\x1b[0m' for part in re.split('(\n)', text) if part)


def main():
    dev, autocast = pick_device(device, dtype)
    rule = make_exit(exit, tau) if exit else None
    if num_samples < 1:
        raise ValueError(f'num_samples must be at least 1, not {num_samples}')
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    for group in model.groups if compile else ():
        group.compile_lone()
    if rule and not model.groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups, so there is nothing to exit from: leave --exit out')
    encoding = get_encoding(checkpoint['tokenizer'])
    text = start
    if start.startswith('FILE:'):
        try:
            with open(start[5:], encoding='utf-8') as f:
                text = f.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the prompt file '{start[5:]}' as UTF-8 text ({error}): give --start=FILE:PATH") from error
    prompt = encoding.encode(text, allowed_special={EOT}) or [encoding.eot_token]
    if len(prompt) > model.config.block_size:
        print(f'the prompt has {len(prompt)} tokens: its last {model.config.block_size} (block_size) are used')
    how = dict(temperature=temperature, top_k=top_k, n_loop=n_loop, exit=rule, cache=cache, noise_seed=noise_seed, ring=ring,
               warm_start=warm_start, draft_loops=draft_loops, stop=encoding.eot_token if stop_at_end else None)
    most = max(model.loop_counts(n_loop, rule), default=0)
    torch.manual_seed(seed)
    for sample in range(num_samples):
        utf8, steps = codecs.getincrementaldecoder('utf-8')('replace'), []
        t = time.perf_counter()
        with autocast:
            for token, used in stream(model, [torch.tensor(prompt, device=dev)], max_new_tokens, **how):
                if not steps:
                    print(text, end='')
                steps.append(used.float().mean(dim=0))
                known = token.item() < encoding.n_vocab     # a padded vocabulary has tokens without a text
                piece = utf8.decode(encoding.decode_single_token_bytes(token.item())) if known else ''
                print(paint(piece, steps[-1].mean().item()) if show_steps and model.groups else piece, end='', flush=True)
        dt = time.perf_counter() - t
        print(utf8.decode(b'', final=True))
        means = ', '.join(f'{mean:.2f} in group {group}' for mean, group in zip(torch.stack(steps).mean(dim=0).tolist(), model.config.groups))
        print(f'--- {len(steps) / dt:.1f} tokens/s' + (f'; mean loop steps {means} of at most {most}' if means else ''))
    if show_steps and most:
        print('loop steps, mean over the groups, from: ' + ''.join(paint(f' {bound} ', bound) for bound in SCALE))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
