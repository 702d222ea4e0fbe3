"""
The page in which a model runs: page.html, the template, with page.js, model.js and the weights.

`record_of` is what the two scripts need to know of a model, `fill` puts it into the template.
"""
import html
import json
import re
from base64 import b64encode
from pathlib import Path

import torch

from model import GPT, GPTConfig

MOST_LOOPS = 30             # of the page's slider
MOST_PARAMETERS = 1_000_000
# model.js has the defaults of these fields
FIXED = 'bias', 'injection', 'x0', 'norm_inside', 'step_noise', 'norm_eps'
# what the page shows for characters that cannot be seen
SYMBOLS = {code: 0x2400 + code for code in range(32)} | {10: '↵', 32: '·', 127: '␡'}


def for_page(model, noise_seed=0):
    """A model as model.js and page.js read it. ValueError if they cannot run it."""
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


def fill(record, title):
    """Fill in the template. Escaping `<` keeps the record from ending its script element."""
    here = Path(__file__).parent
    values = dict(TITLE=html.escape(title),
                  RECORD=json.dumps(record, separators=(',', ':')).replace('<', '\\u003c'),
                  MODEL=(here / 'model.js').read_text(encoding='utf-8'),
                  PAGE=(here / 'page.js').read_text(encoding='utf-8'), MOST_LOOPS=f'{MOST_LOOPS}')
    template = (here / 'page.html').read_text(encoding='utf-8')
    return re.sub(r'\{\{(\w+)\}\}', lambda match: values[match[1]], template)
