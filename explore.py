"""
A page to watch a model think: one HTML file, which opens from disk and asks nothing of anybody.

    python explore.py --start='def read(self):'     a prompt -> out/explore.html
    python explore.py --out_dir=out-calc --seed=3   a problem, where the model has learnt a task

One pass at fixed loops is recorded: of every group, token and loop step the signal of each exit
rule, the five likeliest next tokens, the loss of the right one, the distance to the last state, and
two principal coordinates (without x^(0), from which all else is far). The page, whose template is
explore.html, computes exits from the signals, as exits.py does, while the reader turns the
threshold. It shows the states of a pass in which nobody leaves: what a token sees of others that
left is not computed again.

Paper: sec. 3 (Fig. 1: paths), 4 (exit rules). Geiping: Fig. 5 (distance to the last state).

    T, K, V     tokens, loop steps, vocab_size
"""
import html
import json
import math
import os
import re
import shlex
import sys

import numpy as np
import torch
from torch.linalg import vector_norm

import tasks
from common.checkpoint import load_checkpoint
from common.configurator import configure, pick_device, run
from encoding import EOT, get_encoding
from exits import EXITS, LEARNED, make_exit
from geometry import pca
from serving.requests import read_prompt

# -------------------------------------------------------------------------------------------------
out_dir = 'out'
start = 'The method returns a list of'      # the prompt, or FILE:prompt.txt
n_loop = 32
seed = 0                    # of the problem, on a task
noise_seed = 0
path: str | None = None     # of the page; None = out_dir/explore.html
device = 'auto'
# -------------------------------------------------------------------------------------------------

MOST_BYTES = 2_000_000
LIKELIEST = 5
BYTES_A_CELL = 170          # of a group, token and loop step, about


@torch.no_grad()
def record(model, idx, right):
    """
    One pass over idx (T,) -> for each group a dict of lists, by loop step and then by token.

    right (T,): the token that should come out at each, -1 where none is known.
    """
    trace = []
    model(idx[None], n_loop=n_loop, noise_seed=noise_seed, trace=trace)
    found = []
    for entry, group in zip(trace, model.groups):
        states, last = entry['states'], group is model.groups[-1]               # (K+1, 1, T, C)
        signals = {name: signals_of(name, model, states)
                   for name in (EXITS if model.gate is None else EXITS | LEARNED)}
        top, nats = [], []
        for x in states[1:]:
            logits = (model.through_coda if last else model.readout)(x)[0]      # (T, V)
            log_p = logits.float().log_softmax(-1)
            p, tokens = log_p.exp().topk(min(LIKELIEST, log_p.shape[-1]))
            top.append([[[token, round(share, 4)] for token, share in zip(*of_token)]
                        for of_token in zip(tokens.tolist(), p.tolist())])
            of_right = -log_p.gather(1, right.clamp(min=0)[:, None])[:, 0]
            nats.append([round(value, 5) if known >= 0 else None
                         for value, known in zip(of_right.tolist(), right.tolist())])
        states = states[:, 0]                                                   # (K+1, T, C)
        distance = vector_norm(states - states[-1], dim=-1)                     # (K+1, T)
        found.append(dict(signals=signals, top=top, nats=nats, distance=short(distance, 4),
                          path=short(pca(states[1:], 2), 4)))
    return found


def signals_of(name, model, states):
    """The signal of a rule at each loop step, a list of lists (K, T), None where undefined."""
    rule, memo, values = make_exit(name), None, []
    for x0, x1 in zip(states, states[1:]):
        value, memo = rule.signal(x0, x1, memo, model.reader(rule))
        values.append(None if value is None else short(value[0], 9))
    return values


def short(tensor, digits):
    """A tensor as lists of numbers with so many digits; nine give each float32 back."""
    def shorten(value):
        return [*map(shorten, value)] if isinstance(value, list) else float(f'{value:.{digits}g}')
    return shorten(tensor.tolist())


def problem(model, task):
    """A problem of the task -> tokens, right answers (-1 where nothing is asked), depth."""
    x, y, depth = tasks.make(task, np.random.default_rng(seed), 1, model.config.block_size)
    return torch.from_numpy(x[0]), torch.from_numpy(y[0]).clamp(min=-1), depth[0].tolist()


def prompt_of(encoding, block_size):
    """The prompt's tokens, and the next of each as the right one."""
    tokens = encoding.encode(read_prompt(start), allowed_special={EOT}) or [encoding.eot_token]
    if len(tokens) > block_size:
        raise ValueError(f'the prompt has {len(tokens)} tokens, and the model reads {block_size}: '
                         'cut --start')
    return torch.tensor(tokens), torch.tensor(tokens[1:] + [-1]), None


def texts_of(tokens, encoding):
    """{token: its text}; bytes that are no UTF-8 as \\xNN, tokens without text as numbers."""
    found = {}
    for token in sorted(set(tokens)):
        found[token] = f'#{token}'
        if token < encoding.n_vocab:
            found[token] = encoding.decode_single_token_bytes(token).decode('utf-8',
                                                                            'backslashreplace')
    return found


def page(record, title, said, command):
    """The template with the record in it. Text is data there: no < of it can end a script."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'explore.html'),
              encoding='utf-8') as f:
        template = f.read()
    text = json.dumps(record, separators=(',', ':'), ensure_ascii=True).replace('<', '\\u003c')
    values = dict(TITLE=html.escape(title), SAID=html.escape(said), COMMAND=html.escape(command),
                  RECORD=text)
    return re.sub(r'\{\{(\w+)\}\}', lambda match: values[match[1]], template)


def main():
    # the model, and what it is to read
    dev, _ = pick_device(device, 'float32')
    if not n_loop >= 2:
        raise ValueError(f'n_loop must be at least 2, not {n_loop}')
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    groups = model.config.groups
    if not groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: there is no loop to '
                         'watch')
    encoding, task = get_encoding(checkpoint['tokenizer'], out_dir), checkpoint['config']['dataset']
    is_task = task.partition(':')[0] in tasks.TASKS
    idx, right, depth = (problem(model, task) if is_task
                         else prompt_of(encoding, model.config.block_size))
    most = MOST_BYTES // BYTES_A_CELL
    if len(groups) * len(idx) * n_loop > most:
        raise ValueError(f'{len(groups)} groups x {len(idx)} tokens x {n_loop} loops are more than '
                         f'a page holds ({most:,}): take fewer tokens, or --n_loop='
                         f'{max(2, most // (len(groups) * len(idx)))}')

    # what it does there
    found = record(model, idx.to(dev), right.to(dev))
    shown = [token for of_group in found for row in of_group['top'] for of_token in row
             for token, _ in of_token]
    texts = texts_of([*idx.tolist(), *right[right >= 0].tolist(), *shown], encoding)
    rules = {}
    for name in found[0]['signals']:
        rule = make_exit(name)
        rules[name] = dict(hits=rule.hits, keep=rule.keep, tau=rule.tau)
    everything = dict(tokens=idx.tolist(), right=right.tolist(), depth=depth, texts=texts,
                      rules=rules, groups=found, loops=n_loop,
                      names=['layer ' + '-'.join(map(str, group)) for group in groups])
    said = (f'A model with {len(groups)} looped group{"s" * (len(groups) > 1)} reads {len(idx)} '
            f'tokens and loops {n_loop} times. Each token is coloured by the loop step at which '
            'the rule lets it go; choose one to see what it thinks at each step.')
    text = page(everything, f'{out_dir}: watch it think', said,
                shlex.join(['python', os.path.basename(sys.argv[0]), *sys.argv[1:]]))
    where = path or os.path.join(out_dir, 'explore.html')
    if len(text) > MOST_BYTES:
        raise ValueError(f'the page would have {len(text):,} bytes, and may have {MOST_BYTES:,}: '
                         'take fewer tokens, or a smaller --n_loop')
    with open(where, 'w', encoding='utf-8') as f:
        f.write(text)
    nats = [value for value in found[-1]['nats'][-1] if value is not None]
    loss = f', loss {sum(nats) / len(nats):.3f}' if nats and math.isfinite(sum(nats)) else ''
    print(f'{where}: {len(text.encode()) / 1e6:.2f} MB, {len(idx)} tokens{loss}; open it in a '
          'browser')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
