"""
What stands in pretrained/: three small models, and thresholds for their exit rules. Pages of the
models are in assets/.

    python -m pretrained.make               exits.json and the pages, for the models that are there
    python -m pretrained.make --weights     trains the models anew before that: an hour of a core

Thresholds stand in THRESHOLDS alone, each with the evidence for it; exits.stored_exits says what
their fields mean. They belong to the weights that ship: with others, measure them again.
"""
import os
import subprocess
import sys

from common.checkpoint import read_checkpoint, save_checkpoint
from common.configurator import configure
from common.errors import run
from common.files import ROOT, write_json

# --------------------------------------------------------------------------------------------------
weights = False     # train the models, too
# --------------------------------------------------------------------------------------------------

# {name: the arguments of train.py, and of the page}
MODELS = dict(text=[], calc=['config/calc.py'], maze=['config/maze.py'])
PAGES = dict(
    text=['--path=assets/explore_text.html'],
    # a deep problem, the first that sample.py prints
    calc=['--path=assets/explore_calc.html', '--length=192', '--dataset=calc:reset=0.01',
          '--seed=1337'],
    maze=['--path=assets/maze.html'])
KEPT = 'model', 'model_args', 'model_class', 'config', 'iter_num', 'tokenizer', 'data'

CALIBRATED = ('bench.py --calibrate --n_windows=128: the largest of 0.003, 0.01 ... 30 and 12 that '
              'costs at most 0.005 nats')
LONG = ('no error of the rule in 16 problems of 65,536 tokens, with this model and three others '
        '(results/depth.md)')
MAZES = '288 mazes of 16 x 16, {} of them with wrong rooms; python -m results.maze, seeds 83 to 85'


def row(rule, tau, cost, how, cache='exact', wake=True):
    return dict(rule=rule, cache=cache, tau=tau, cost=cost, wake=wake, how=how)


THRESHOLDS = dict(
    text=[
    ],
    calc=[
        row('accel', 1.0, 0.0, LONG),
        row('norm_rel', 0.03, 0.0, LONG),
    ],
    # smaller thresholds are not safer here: at 0.1 norm_rel had as many wrong rooms or more
    maze=[
        row('norm_rel', 0.14, 0.0006, MAZES.format(3) + '; at 0.2 it was 7'),
        row('accel', 0.7, 0.0020, MAZES.format(3)),
    ])


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


def main():
    for name in MODELS:
        path = f'{ROOT}/pretrained/{name}/ckpt.pt'
        if weights:
            train(name)
        write_json(dict(exits=THRESHOLDS[name]), f'{ROOT}/pretrained/{name}/exits.json')
        subprocess.run([sys.executable, '-m', 'page', f'--out_dir=pretrained/{name}',
                        *PAGES[name]], cwd=ROOT, check=True)
        print(f'{path}: {os.path.getsize(path) / 1e6:.2f} MB')
    if weights:
        print('the thresholds are those of earlier weights: measure them again')


if __name__ == '__main__':
    configure(globals())
    run(main)
