"""
What stands in pretrained/: four small models, and thresholds for their exit rules. Pages of three
of the models are in assets/.

    python -m pretrained.make               the pages, for the models that are there
    python -m pretrained.make --weights     trains the models anew before that: an hour of a core

The thresholds stand in pretrained/NAME/exits.json, each with the command that found it. They belong
to the weights that ship, so new weights remove them.
"""
import json
import os
import subprocess
import sys

from common.checkpoint import read_checkpoint, save_checkpoint
from common.configurator import configure
from common.errors import run
from common.files import ROOT

# --------------------------------------------------------------------------------------------------
weights = False     # train the models, too
# --------------------------------------------------------------------------------------------------

# {name: the arguments of train.py, and of the page}
MODELS = dict(text=[], calc=['config/calc.py'], maze=['config/maze.py'],
              sudoku=['config/sudoku.py'])
PAGES = dict(
    # the last answer is 191 words deep, and not what the model guesses at first
    calc=['--path=assets/explore_calc.html', '--length=192', '--dataset=calc:reset=0.01',
          '--seed=1'],
    maze=['--path=assets/maze.html'],
    # at 0.1 the candidates of solved boards rest
    sudoku=['--path=assets/sudoku.html', '--tau=0.1'])
KEPT = 'model', 'model_args', 'model_class', 'config', 'iter_num', 'tokenizer', 'data'


def train(name):
    """Train a model, and keep its weights in float16: this changes no answer that was tried."""
    folder = f'out-make-{name}'
    subprocess.run([sys.executable, 'train.py', *MODELS[name], f'--out_dir={folder}'], cwd=ROOT,
                   check=True)
    checkpoint = read_checkpoint(f'{ROOT}/{folder}')
    small = {key: checkpoint[key] for key in KEPT}
    if name == 'maze':      # all mazes come to rest, and more of them are solved
        small['model_args'] = checkpoint['model_args'] | dict(damping=0.3)
    small['config'] = checkpoint['config'] | dict(out_dir=f'pretrained/{name}')
    small['model'] = {key: weight.half() for key, weight in checkpoint['model'].items()}
    save_checkpoint(small, f'{ROOT}/pretrained/{name}/ckpt.pt')


def commands(name):
    """How the thresholds of a model were found, [] if it has none."""
    path = f'{ROOT}/pretrained/{name}/exits.json'
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf-8') as f:
        return sorted({row['how'] for row in json.load(f)['exits']})


def main():
    for name in MODELS:
        path = f'{ROOT}/pretrained/{name}/ckpt.pt'
        if weights:
            found = commands(name)
            train(name)
            print(f'{name} has new weights, and no thresholds. Measure them anew; the earlier ones '
                  'were found so:', *found, sep='\n    ')
        if name in PAGES:
            subprocess.run([sys.executable, '-m', 'page', f'--out_dir=pretrained/{name}',
                            *PAGES[name]], cwd=ROOT, check=True)
        print(f'{path}: {os.path.getsize(path) / 1e6:.2f} MB')


if __name__ == '__main__':
    configure(globals())
    run(main)
