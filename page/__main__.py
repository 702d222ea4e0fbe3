"""
A page in which a model reads, thinks and writes: one HTML file with the model in it, no network.

    python -m page --start='def read(self):'     a text -> explore.html
    python -m page --out_dir=out-calc --seed=3   a problem, for a model that has learned a task
    python -m page --out_dir=out-calc --length=192 --dataset=calc:reset=0.01    a deep one
    python -m page --out_dir=pretrained/maze     a maze, solved before your eyes

The page runs the model, so all that it shows follows the reader's text, loops, exit rule (one of
exits.py) and threshold. It decodes token by token: a wave is shown by `python decode.py`.

Paper: sec. 3 (Fig. 1: paths), 4 (exit rules).
"""
import math
import os

import numpy as np
import torch

import tasks
from common import plots
from common.checkpoint import load_checkpoint, open_run
from common.configurator import PathName, configure, given, run
from common.encoding import kind_of, read_prompt, texts_of
from common.files import new_file
from data import open_encoding
from exits import EXITS, TAUS, make_exit
from loops import waking_budget
from page import SYMBOLS, fill, for_page, halved

# -------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
start: str | None = None    # the text, FILE:text.txt (its last 1,000 letters), or a problem
dataset: str | None = None  # problems of the model's task with other knobs, such as calc:reset=0.01
length: int | None = None   # tokens of the first problem, or of a text's context; None = as trained
n_loop: int | None = None   # loops at first; None = 12, on a task twice the tokens and 100
seed: int | None = None     # of the problem, on a task; None = 0, of a maze one that was chosen
noise_seed = 0
path: PathName | None = None    # where to write the page; None = out_dir/explore.html
# -------------------------------------------------------------------------------------------------

TEXT = 'The method returns a list of'
LOOPS, MOST_LOOPS = 12, 30      # of a text
MOST_LETTERS = 1000
MOST_WORDS = 512                # of a problem
DEEP = 192                      # words of a deep problem, if the model reads more than in training
ROOMS, MOST_ROOMS = 256, 900    # of the first maze, and of the largest
TAU_MAZE = 0.14                 # of norm_rel
# of the first maze, if no seed is given: it has long corridors, and most moved goals are repaired
# in it (results/maze.md)
SEED_MAZE = 4

TITLE = 'Watch a transformer think in loops'
ABOUT_TEXT = (
    'This small language model predicts the next letter (a token; to be exact, a byte). Some of '
    'its layers loop: they run again and again over each token until its state is still. Type, or '
    'let the model write on, and see when each token stops looping and what the model would say '
    'next.')
ABOUT_TASK = (
    'Some layers of this model loop: they run again and again over each word (a token) until its '
    'state is still. Below each token stands what the model answers there.')
ABOUT_CALC = (
    '"{example}" means: set, add and multiply, and below each word (a token) stands the model\'s '
    'answer so far. Every result is taken modulo {p}: only the remainder of a division by {p} is '
    'kept, so that {large} becomes {small}. {layers}: the answer travels from token '
    'to token, about one per loop, and the tokens for which there is no news sleep.')
TITLE_MAZE = 'A maze, solved before your eyes'
ABOUT_MAZE = (
    'In every room of this maze a small transformer guesses which door leads to the goal. In each '
    'loop a room hears from the rooms beside it. It sleeps when nothing around it changes, and '
    'wakes when news arrives.')


def main():
    # the model, and what it reads
    if length is not None and not 1 <= length <= MOST_WORDS:
        raise ValueError(f'length must lie between 1 and {MOST_WORDS}, not {length}')
    model, checkpoint, folder, results = open_run(
        out_dir, needs_groups='there is no loop to watch: choose another --out_dir', length=length)
    file = os.path.join(folder, 'ckpt.pt')
    longest = None              # a model for so many tokens has the noise for the longest problem
    if type(model).__name__ == 'Maze':
        refuse('start')
        model, _ = load_checkpoint(file, length=length or ROOMS)
        record = of_maze(model, checkpoint)
        longest = MOST_ROOMS
    elif kind_of(checkpoint['tokenizer']) == 'task':     # not a task in bytes
        if start:
            refuse('seed')
        record = of_task(model, checkpoint)
        if model.config.pos == 'rotary':
            model, _ = load_checkpoint(file, length=MOST_WORDS)
    else:
        refuse('seed', 'dataset')
        record = of_text(checkpoint)
    if n_loop is not None:
        record['loops'] = n_loop
    if not 1 <= record['loops'] <= record['most_loops']:
        raise ValueError(f"n_loop must lie between 1 and {record['most_loops']}, not {n_loop}")

    # the page
    encoding = open_encoding(checkpoint['tokenizer'], folder)
    words = texts_of(range(encoding.n_vocab), encoding)
    half = keeps_answers(model, record)
    if longest:
        model, _ = load_checkpoint(file, length=longest)
    record['model'] = for_page(model, half, noise_seed)
    record['words'] = [word.translate(SYMBOLS) for word in words]
    record['names'] = [plots.title(group) for group in model.config.groups]
    record['rules'] = {name: dict(hits=rule.hits, keep=rule.keep, tau=TAUS[name])
                       for name, rule in EXITS.items() if name in TAUS}
    n_parameters = sum(p.numel() for p in model.parameters())
    name = f'{n_parameters:,} parameters'
    if not longest:
        name = f'{os.path.relpath(folder)} with {name}'
    where = path or os.path.join(results, 'explore.html')
    with new_file(where, encoding='utf-8') as f:
        f.write(fill(record, record['title'], record['about'], name, type(model).__name__))
    dtype = 'float16' if half else 'float32'
    print(f'{where}: {os.path.getsize(where) / 1e6:.2f} MB in {dtype}; open it in a browser')


def refuse(*knobs):
    """ValueError if one of these knobs, which have no effect here, was given."""
    for knob in knobs:
        if knob in given:
            raise ValueError(f'--{knob} does nothing here: leave it out')


def of_text(checkpoint):
    """
    What page.js has to know of a text: a title, what stands above and in the text box, the most
    tokens in it, rule and loops at first. ValueError if the model does not read bytes.
    """
    if checkpoint['tokenizer'] != 'bytes':
        raise ValueError('the page reads bytes, and the model reads the tokens of '
                         f"{checkpoint['tokenizer']}: see geometry.py for such models")
    text = read_prompt(TEXT if start is None else start)
    return dict(title=f'{TITLE}: a small language model', about=ABOUT_TEXT, task=None,
                start=text[-MOST_LETTERS:], most=MOST_LETTERS, rule='norm_rel', loops=LOOPS,
                most_loops=MOST_LOOPS)


def of_task(model, checkpoint):
    """
    The same for a problem, and the problem with its labels; deep: words of a deep one. The page
    knows calc, modulo p, and so the answers to what a reader types.
    """
    problems = tasks.problems_of(checkpoint, dataset)
    if start:
        x, y = problems.solve(start)
        depth = np.full_like(y, -1)
    else:
        x, y, depth = problems.make(np.random.default_rng(seed or 0), 1, model.config.block_size)
    p = problems.knobs['p'] if problems.name == 'calc' else None

    # full attention errs beyond the length of training, and may then never come to rest
    trained = checkpoint['config']['block_size']
    longer = model.config.window is not None and model.config.pos == 'rotary'
    budget = waking_budget(MOST_WORDS if longer else trained)
    return dict(title=f'{TITLE}: running sums modulo {p}' if p else f'{TITLE}: {problems.name}',
                about=about_calc(p, model) if p else ABOUT_TASK,
                start=problems.encoding.decode(x[0]),
                task=dict(p=p, ids=x[0].tolist(), right=y[0].tolist(), depth=depth[0].tolist()),
                most=MOST_WORDS, rule='accel', loops=budget, most_loops=budget,
                deep=DEEP if longer else trained)


def of_maze(model, checkpoint):
    """
    What maze.js has to know: title, what stands above, a first maze, the rule's threshold; side: of
    the largest mazes in training.
    """
    problems = tasks.problems_of(checkpoint, dataset or 'maze:deep=1')
    rng = np.random.default_rng(SEED_MAZE if seed is None else seed)
    x, _, _ = problems.make(rng, 1, model.config.block_size)
    budget = waking_budget(model.config.block_size)
    side = math.isqrt(checkpoint['config']['block_size'])
    return dict(title=TITLE_MAZE, about=ABOUT_MAZE, rule='norm_rel',
                tau=TAU_MAZE, task=dict(ids=x[0].tolist()), side=side, loops=budget,
                most_loops=budget)


def about_calc(p, model):
    """The words of calc and modulo p, in two sentences, and what is to be seen."""
    example = '=3 +4 *2' if p == 5 else '=1 +1 *1'
    n_looped = sum(map(len, model.config.groups))
    layers = 'One layer loops' if n_looped == 1 else f'{n_looped} layers loop'
    return ABOUT_CALC.format(example=example, p=p, large=p + 2, small=2 % p, layers=layers)


@torch.no_grad()
def keeps_answers(model, record):
    """Does rounding the weights to float16 change nothing, or no answer to the first problem?"""
    rounded = halved(model)
    if all(map(torch.equal, model.parameters(), rounded.parameters())):
        return True
    if record['task'] is None:
        return False
    x = torch.tensor([record['task']['ids']])
    rule = make_exit('accel', TAUS['accel'], wake=True)
    answers = [one(x, n_loop=record['loops'], exit=rule)[0].argmax(-1) for one in (model, rounded)]
    return torch.equal(*answers)


if __name__ == '__main__':
    configure(globals())
    run(main)
