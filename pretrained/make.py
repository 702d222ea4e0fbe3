"""
The four models of pretrained/, and the pages of three of them in assets/.

    python -m pretrained.make               the pages, from the weights that are there
    python -m pretrained.make --weights     trains all four anew first: an hour of a core

The thresholds in pretrained/NAME/exits.json hold for the weights whose sha256 stands there.
"""
import subprocess
import sys

from common.checkpoint import read_checkpoint, save_checkpoint
from common.configurator import configure
from common.errors import run
from common.files import ROOT

# --------------------------------------------------------------------------------------------------
weights = False     # train the models, too
# --------------------------------------------------------------------------------------------------

# the arguments of train.py, and of `python -m page`
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
        small['model_args']['damping'] = 0.3
    small['config']['out_dir'] = f'pretrained/{name}'
    small['model'] = {key: weight.half() for key, weight in small['model'].items()}
    save_checkpoint(small, f'{ROOT}/pretrained/{name}/ckpt.pt')


def main():
    for name in MODELS:
        if weights:
            train(name)
            print(f'{name} has new weights, and no thresholds: measure them anew, by the commands '
                  f'in pretrained/{name}/exits.json, and enter the sha256 of its ckpt.pt')
        if name in PAGES:
            subprocess.run([sys.executable, '-m', 'page', f'--out_dir=pretrained/{name}',
                            *PAGES[name]], cwd=ROOT, check=True)


if __name__ == '__main__':
    configure(globals())
    run(main)
