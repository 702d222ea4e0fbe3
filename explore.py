"""
A page to watch a model think: one self-contained HTML file without network access.

    python explore.py --start='def read(self):'     a prompt -> explore.html
    python explore.py --out_dir=out-calc --seed=3   a problem, for a model that has learnt a task

One pass at fixed loops is recorded. For each group, token and loop step the page has the signal of
each exit rule, the five likeliest next tokens, the loss of the right one, the distance to the last
state, and a point on the token's path. The page (its template is explore.html) computes the exits
from the signals, as exits.py does, while the reader moves the threshold. The states are those of a
pass in which no token exits, so the page does not show how an exit changes later tokens. Below
that, a wave (waves.py) continues the prompt, pass by pass.

Paper: sec. 3 (Fig. 1: paths), 4 (exit rules). Geiping: Fig. 5 (distance to the last state).

    T, K, V     tokens, loop steps, vocab_size
"""
import html
import json
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

from common import plots
from common.files import new_file
from data import EOT, get_encoding
from exits import EXITS, make_exit
from geometry import logits_of, paths, texts_of

# -------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
start = 'The method returns a list of'      # the prompt, or FILE:prompt.txt
n_loop = 32
wave = 8                    # tokens of the wave that continues the prompt; 0 = no wave
wave_steps = 1              # loop steps of a pass
wave_tau = 0.01             # threshold of its rule, norm_rel
new_tokens = 20             # of the wave
seed = 0                    # of the problem, on a task
noise_seed = 0
path: str | None = None     # where to write the page; None = out_dir/explore.html
device = 'auto'
# -------------------------------------------------------------------------------------------------

LIKELIEST = 5
MOST_CELLS = 12_000         # groups x tokens x loop steps; a page then has about 2 MB


@torch.no_grad()
def record(model, idx, right, n_loop, noise_seed=0):
    """
    One pass over idx (T,) -> for each group a dict of lists, by loop step and then by token.

    right (T,): the token that should come next at each position, -1 where it is unknown.
    """
    trace = []
    model(idx[None], n_loop=n_loop, noise_seed=noise_seed, trace=trace)
    groups, (path, _) = [], paths(torch.stack([entry['states'][:, 0] for entry in trace]))
    for g, entry in enumerate(trace):
        states = entry['states']                                                # (K+1, 1, T, C)
        rules = EXITS | model.rules
        signals = {name: signals_of(rule, model, states) for name, rule in rules.items()}

        states = states[:, 0]                                                   # (K+1, T, C)
        top, nats = zip(*(predictions(logits_of(model, g, x), right) for x in states[1:]))
        distance = vector_norm(states - states[-1], dim=-1)                     # (K+1, T)
        groups.append(dict(signals=signals, top=top, nats=nats, distance=short(distance, 4),
                           path=short(path[g], 6)))
    return groups


def predictions(logits, right):
    """
    The likeliest tokens at each position, [[token, probability], ...], and the loss of the right
    one in nats, 0 where that is unknown; logits (T, V), right (T,).
    """
    p, tokens = logits.float().softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    p = p.cpu().double().round(decimals=4).tolist()                             # (T, LIKELIEST)
    top = [list(zip(*of_token)) for of_token in zip(tokens.tolist(), p)]
    nats = F.cross_entropy(logits.float(), right, ignore_index=-1, reduction='none')
    return top, short(nats, 5)


def signals_of(rule, model, states):
    """A rule's signal at each loop step: a list of K lists (T,), None where it is undefined."""
    read, memo, values = model.reader(rule), None, []
    for x0, x1 in zip(states, states[1:]):
        value, memo = rule.signal(x0, x1, memo, read)
        values.append(None if value is None else short(value[0], 9))
    return values


def short(tensor, digits):
    """A tensor as lists of numbers of `digits` digits; nine are enough for any float32."""
    shorten = np.vectorize(lambda value: float(f'{value:.{digits}g}'))
    return shorten(tensor.numpy(force=True)).tolist()


def prompt_of(text, encoding, block_size):
    """The tokens of a prompt (T,), and the token that follows each; -1 after the last."""
    tokens = encoding.encode(text, allowed_special={EOT}) or [encoding.eot_token]
    if len(tokens) > block_size:
        raise ValueError(f'the prompt has {len(tokens)} tokens, and the model reads {block_size}: '
                         'shorten --start')
    return torch.tensor(tokens), torch.tensor(tokens[1:] + [-1])


def page(record, title, command):
    """Fill in the template. Escaping `<` keeps the record from ending its script element."""
    template = Path(__file__).with_name('explore.html').read_text(encoding='utf-8')
    text = json.dumps(record, separators=(',', ':')).replace('<', '\\u003c')
    values = dict(TITLE=html.escape(title), COMMAND=html.escape(command), RECORD=text)
    return re.sub(r'\{\{(\w+)\}\}', lambda match: values[match[1]], template)


def main():
    import tasks
    from common.checkpoint import open_run
    from common.configurator import given
    from common.distributed import pick_device
    from decode import stream
    from sample import read_prompt
    from waves import can_wave

    # the model, and what it is to read
    if n_loop < 2:
        raise ValueError(f'n_loop must be at least 2, not {n_loop}')
    dev, _ = pick_device(device, 'float32')
    model, checkpoint, folder, results = open_run(
        out_dir, dev, if_plain='there is no loop to watch: choose another --out_dir')
    groups, T = model.config.groups, model.config.block_size
    dataset, depth = checkpoint['config']['dataset'], None
    encoding = get_encoding(checkpoint['tokenizer'], folder)
    is_task = tasks.is_task(dataset)
    of_text = ('start', 'wave', 'wave_steps', 'wave_tau', 'new_tokens')
    for unused in of_text if is_task else ['seed']:
        if unused in given:
            raise ValueError(f'--{unused} does nothing for a model of {dataset}: leave it out')
    if is_task:
        made = tasks.Problems(dataset).make(np.random.default_rng(seed), 1, T)
        x, y, depth = (values[0] for values in made)
        idx, right = torch.from_numpy(x), torch.from_numpy(y).clamp(min=-1)
        depth = depth.tolist()
    else:
        idx, right = prompt_of(read_prompt(start), encoding, T)
    cells = len(groups) * len(idx)
    if cells * n_loop > MOST_CELLS:
        raise ValueError(f'{len(groups)} groups x {len(idx)} tokens x {n_loop} loops are more than '
                         f'a page holds ({MOST_CELLS:,}): take fewer tokens, or '
                         f'--n_loop={max(2, MOST_CELLS // cells)}')

    # what it thinks
    recorded = record(model, idx.to(dev), right.to(dev), n_loop, noise_seed)
    passes = []
    if wave and not is_task and can_wave(model):
        rule = make_exit('norm_rel', wave_tau)
        list(stream(model, idx[None].to(dev), new_tokens, temperature=0, exit=rule, wave=wave,
                    wave_steps=wave_steps, noise_seed=noise_seed, trace=passes))
    likeliest = [token for group in recorded for step in group['top'] for of_token in step
                 for token, _ in of_token]
    waved = [token for one in passes for token in one['tokens']]
    shown = sorted({*idx.tolist(), *right[right >= 0].tolist(), *likeliest, *waved})
    texts = dict(zip(shown, texts_of(shown, encoding)))
    rules = {name: dict(hits=rule.hits, keep=rule.keep)
             for name, rule in (EXITS | model.rules).items()}
    everything = dict(tokens=idx.tolist(), right=right.tolist(), depth=depth, texts=texts,
                      rules=rules, groups=recorded, loops=n_loop, wave=passes,
                      wave_steps=wave_steps,
                      names=[plots.title(group) for group in groups])

    # the page
    command = shlex.join(['python', os.path.basename(sys.argv[0]), *sys.argv[1:]])
    where = path or os.path.join(results, 'explore.html')
    with new_file(where, encoding='utf-8') as f:
        f.write(page(everything, f'{os.path.relpath(folder)}: watch it think', command))
    print(f'{where}: {os.path.getsize(where) / 1e6:.2f} MB, {len(idx)} tokens; open it in a '
          'browser')


if __name__ == '__main__':
    from common.configurator import configure, run
    config = configure(globals())
    run(main)
