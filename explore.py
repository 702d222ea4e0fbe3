"""
A page in which a model reads, thinks and writes: one HTML file with the model in it, no network.

    python explore.py --start='def read(self):'     a text -> explore.html
    python explore.py --out_dir=out-calc --seed=3   a problem, for a model that has learnt a task

The page is explore.html, the template, with model.js and the weights in it. It runs the model, so
all that it shows follows the reader's text, loops, exit rule (one of exits.py) and threshold. It
decodes token by token: a wave is shown by waves.py, which prints its passes and draws a GIF.

Paper: sec. 3 (Fig. 1: paths), 4 (exit rules). Geiping: Fig. 5 (distance to the last state).
"""
import html
import json
import os
import re
from base64 import b64encode
from pathlib import Path

import numpy as np
import torch

from common import plots
from common.configurator import PathName, configure, given, run
from common.files import new_file
from data import get_encoding
from exits import EXITS
from geometry import texts_of
from model import GPT, GPTConfig

# -------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
start = 'The method returns a list of'      # the text, or FILE:text.txt: its last 1,000 letters
n_loop = 12                 # loops at first
seed = 0                    # of the problem, on a task
noise_seed = 0
path: PathName | None = None    # where to write the page; None = out_dir/explore.html
# -------------------------------------------------------------------------------------------------

MOST_LOOPS = 30             # of the page's slider
MOST_PARAMETERS = 1_000_000
# model.js has the defaults of these fields
FIXED = 'bias', 'injection', 'x0', 'norm_inside', 'step_noise', 'norm_eps'
# what the page shows for characters that cannot be seen
SYMBOLS = {code: 0x2400 + code for code in range(32)} | {10: '↵', 32: '·', 127: '␡'}


def for_page(model, noise_seed=0):
    """A model as model.js and explore.html read it. ValueError if they cannot run it."""
    config, n = model.config, sum(p.numel() for p in model.parameters())
    other = [f'{name} = {getattr(config, name)}' for name in FIXED
             if getattr(config, name) != getattr(GPTConfig, name)]
    if type(model) is not GPT or other:
        raise ValueError('the page runs the model of model.py with its defaults, without '
                         f'{", ".join(other) or type(model).__name__}: choose another --out_dir')
    if n > MOST_PARAMETERS:
        raise ValueError(f'the page has room for {MOST_PARAMETERS:,} parameters, and the model has '
                         f'{n:,}: see geometry.py for large models')
    weights = {name.removesuffix('.weight'): weight for name, weight in model.state_dict().items()}
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ValueError('the model holds a NaN or an infinity: choose another --out_dir')
    del weights['lm_head']                                      # it is wte
    for name in [name for name in weights if name.endswith('.adapter')]:
        weights[name + '.x'], weights[name + '.e'] = weights.pop(name).chunk(2, dim=1)
    half = all(torch.equal(weight.half().float(), weight) for weight in weights.values())
    like = torch.zeros(1, config.block_size, config.n_embd)
    base64 = lambda tensor, dtype: b64encode(tensor.numpy().astype(dtype).tobytes()).decode()
    return dict(C=config.n_embd, D=config.n_embd // config.n_head, block_size=config.block_size,
                rope_base=config.rope_base if config.pos == 'rotary' else 0,
                layers=[[f'h.{i}.core.{j}' for j in range(len(getattr(layer, 'core', ())))]
                        for i, layer in enumerate(model.h)],
                shapes={name: list(weight.shape) for name, weight in weights.items()},
                # float16 if that loses nothing, as where the checkpoint stores float16
                half=half, weights={name: base64(weight, '<f2' if half else '<f4')
                                    for name, weight in weights.items()},
                noise=[base64(group.init_state(like, noise_seed), '<f4')        # x^(0)
                       for group in model.groups])


def page(record, title):
    """Fill in the template. Escaping `<` keeps the record from ending its script element."""
    here = Path(__file__).parent
    values = dict(TITLE=html.escape(title),
                  RECORD=json.dumps(record, separators=(',', ':')).replace('<', '\\u003c'),
                  MODEL=(here / 'model.js').read_text(encoding='utf-8'), MOST_LOOPS=f'{MOST_LOOPS}')
    template = (here / 'explore.html').read_text(encoding='utf-8')
    return re.sub(r'\{\{(\w+)\}\}', lambda match: values[match[1]], template)


def main():
    import tasks
    from common.checkpoint import open_run
    from sample import read_prompt

    # the model, and what it is to read
    if not 1 <= n_loop <= MOST_LOOPS:
        raise ValueError(f'n_loop must lie between 1 and {MOST_LOOPS}, not {n_loop}')
    model, checkpoint, folder, results = open_run(
        out_dir, if_plain='there is no loop to watch: choose another --out_dir')
    dataset, problem = checkpoint['config']['dataset'], None
    encoding = get_encoding(checkpoint['tokenizer'], folder)
    is_task = tasks.is_task(checkpoint['tokenizer'] or '')      # not a task in bytes
    unused = 'start' if is_task else 'seed'
    if unused in given:
        raise ValueError(f'--{unused} does nothing for a model of {dataset}: leave it out')
    words = [word.translate(SYMBOLS) for word in texts_of(range(encoding.n_vocab), encoding)]
    if is_task:
        problems = tasks.Problems(dataset)
        made = problems.make(np.random.default_rng(seed), 1, model.config.block_size)
        ids, right, depth = (values[0].tolist() for values in made)
        # the page knows calc, and so the answers to what a reader types
        knows = problems.name == 'calc' and problems.knobs['dense']
        problem = dict(ids=ids, right=right, depth=depth, p=problems.knobs['p'] if knows else None)
        text = ' '.join(words[token] for token in ids)
    elif checkpoint['tokenizer'] == 'bytes':
        text = read_prompt(start)[-1000:]
    else:
        raise ValueError('the page reads bytes, and the model reads the tokens of '
                         f"{checkpoint['tokenizer']}: see geometry.py for such models")

    # the page
    rules = {name: dict(hits=rule.hits, keep=rule.keep) for name, rule in EXITS.items()}
    record = dict(model=for_page(model, noise_seed), words=words, start=text, problem=problem,
                  names=[*map(plots.title, model.config.groups)], loops=n_loop, rules=rules)
    where = path or os.path.join(results, 'explore.html')
    with new_file(where, encoding='utf-8') as f:
        f.write(page(record, f'{os.path.relpath(folder)}: watch it think'))
    kind = 'float16' if record['model']['half'] else 'float32'
    print(f'{where}: {os.path.getsize(where) / 1e6:.2f} MB in {kind}; open it in a browser')


if __name__ == '__main__':
    configure(globals())
    run(main)
