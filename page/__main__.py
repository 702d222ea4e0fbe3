"""
A page in which a model reads, thinks and writes: one HTML file with the model in it, no network.

    python -m page --start='def read(self):'     a text -> explore.html
    python -m page --out_dir=out-calc --seed=3   a problem, for a model that has learnt a task

The page runs the model, so all that it shows follows the reader's text, loops, exit rule (one of
exits.py) and threshold. It decodes token by token: a wave is shown by `python -m decode.wave`.

Paper: sec. 3 (Fig. 1: paths), 4 (exit rules). Geiping: Fig. 5 (distance to the last state).
"""
import os

import numpy as np

import tasks
from common import plots
from common.checkpoint import open_run
from common.configurator import PathName, configure, given, run
from common.files import new_file
from data import get_encoding, read_prompt, texts_of
from exits import EXITS
from page import MOST_LOOPS, SYMBOLS, fill, for_page

# -------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
start = 'The method returns a list of'      # the text, or FILE:text.txt: its last 1,000 letters
n_loop = 12                 # loops at first
seed = 0                    # of the problem, on a task
noise_seed = 0
path: PathName | None = None    # where to write the page; None = out_dir/explore.html
# -------------------------------------------------------------------------------------------------


def main():
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
        knows = problems.name == 'calc'
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
        f.write(fill(record, f'{os.path.relpath(folder)}: watch it think'))
    kind = 'float16' if record['model']['half'] else 'float32'
    print(f'{where}: {os.path.getsize(where) / 1e6:.2f} MB in {kind}; open it in a browser')


if __name__ == '__main__':
    configure(globals())
    run(main)
