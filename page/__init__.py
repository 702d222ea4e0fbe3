"""
The page in which a model runs: a template, with the model and its scripts.

    model.js      the model, exit rules and tokens that sleep; for both pages
    page.html     the page for texts and problems
    pictures.js   what it draws
    page.js       its text and controls, and when the model reads
    maze.html     the page for mazes (zoo/maze.py)
    maze.js       the maze, its controls and its picture

`for_page` is what the scripts need to know of a model, `fill` puts it into the template.
"""
import html
import json
import re
from base64 import b64encode
from pathlib import Path

import torch

from model import GPTConfig

# of each class of model that a page can run: the template and the scripts
PAGES = {'GPT': ('page.html', 'model.js', 'pictures.js', 'page.js'),
         'Maze': ('maze.html', 'model.js', 'maze.js')}
MOST_PARAMETERS = 1_000_000
# model.js has the defaults of these fields
FIXED = 'injection', 'x0', 'norm_inside', 'norm_eps'
# what the page shows for characters that cannot be seen
SYMBOLS = {code: 0x2400 + code for code in range(32)} | {10: '↵', 32: '·', 127: '␡'}


def for_page(model, half=False, noise_seed=0):
    """
    A model as model.js reads it. half: round the weights to float16. ValueError if the page cannot
    run it.
    """
    config = model.config
    n_parameters = sum(p.numel() for p in model.parameters())
    other = [f'{name} = {getattr(config, name)}' for name in FIXED
             if getattr(config, name) != getattr(GPTConfig, name)]
    if type(model).__name__ not in PAGES or other:
        raise ValueError('the page runs the model of model.py with its defaults, without '
                         f'{", ".join(other) or type(model).__name__}: choose another --out_dir')
    if n_parameters > MOST_PARAMETERS:
        raise ValueError(f'the page has room for {MOST_PARAMETERS:,} parameters, and the model has '
                         f'{n_parameters:,}: see geometry.py for large models')
    weights = {name.removesuffix('.weight'): weight for name, weight in model.state_dict().items()}
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ValueError('the model holds a NaN or an infinity: choose another --out_dir')
    del weights['lm_head']                                      # it is wte
    for name in [name for name in weights if name.endswith('.adapter')]:
        weights[name + '.x'], weights[name + '.e'] = weights.pop(name).chunk(2, dim=1)

    def base64(tensor, dtype):
        return b64encode(tensor.numpy().astype(dtype).tobytes()).decode()
    like = torch.zeros(1, config.block_size, config.n_embd)
    return dict(
        C=config.n_embd, D=config.n_embd // config.n_head, block_size=config.block_size,
        window=config.window, rope_base=config.rope_base if config.pos == 'rotary' else 0,
        damping=config.damping,
        # of each layer: the blocks that loop in it
        layers=[[f'h.{i}.core.{j}' for j in range(len(getattr(layer, 'core', ())))]
                for i, layer in enumerate(model.h)],
        half=half, shapes={name: list(weight.shape) for name, weight in weights.items()},
        weights={name: base64(weight, '<f2' if half else '<f4')
                 for name, weight in weights.items()},
        x0={i: base64(layer.init_state(like, noise_seed), '<f4')
            for i, layer in enumerate(model.h) if layer in model.groups})


def halved(model):
    """A copy of the model with its weights rounded to float16."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict({name: weight.half().float()
                          for name, weight in model.state_dict().items()})
    return copy


def fill(record, title, about, model, page='GPT'):
    """
    Fill in the template: the record of all that the scripts read, and three lines of text, the last
    of which names the model. page: a name in PAGES.
    """
    folder = Path(__file__).parent
    template, *scripts = PAGES[page]
    values = dict(
        TITLE=html.escape(title), ABOUT=html.escape(about), MODEL=html.escape(model),
        # escaping `<` keeps the record from ending its script element
        RECORD=json.dumps(record, separators=(',', ':')).replace('<', '\\u003c'),
        SCRIPTS=''.join(f'<script>\n{(folder / name).read_text(encoding="utf-8")}</script>\n'
                        for name in scripts))
    template = (folder / template).read_text(encoding='utf-8')
    return re.sub(r'\{\{(\w+)\}\}', lambda match: values[match[1]], template)
