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
    # the last answer is 191 words deep, and not what the model guesses at first
    calc=['--path=assets/explore_calc.html', '--length=192', '--dataset=calc:reset=0.01',
          '--seed=1'],
    maze=['--path=assets/maze.html'])
KEPT = 'model', 'model_args', 'model_class', 'config', 'iter_num', 'tokenizer', 'data'

# python bench.py --out_dir=pretrained/text --calibrate=0.005 --n_windows=128
#     "--rules=['norm','norm_rel','kl','accel','accel_rel']" "--cache=['exact','latest']"
#     "--taus=[0.003,0.01,0.03,0.1,0.3,1,3,10,12,30]"
CALIBRATED = 'bench.py --calibrate=0.005 on 128 windows of 48 tokens, at most 30 loops'
LONG = ('no error of the rule in 16 problems of 65,536 tokens, with this model and three others '
        '(results/depth.md)')
# python -m results.maze '--sides=[16]' '--n_mazes=[48]' "--asked=['asleep']" --seed=83, 84, 85
MAZES = '288 mazes of 16 x 16, {} of them with wrong rooms'


def row(rule, tau, cost, how, cache='exact', wake=True):
    return dict(rule=rule, cache=cache, tau=tau, cost=cost, wake=wake, how=how)


THRESHOLDS = dict(
    text=[
        row('norm', 1.0, 0.0001, CALIBRATED, 'exact', wake=False),
        row('norm_rel', 0.1, 0.0001, CALIBRATED, 'exact', wake=False),
        row('kl', 0.01, 0.0012, CALIBRATED, 'exact', wake=False),
        row('accel', 12.0, 0.0027, CALIBRATED, 'exact', wake=False),
        row('accel_rel', 1.0, 0.0006, CALIBRATED, 'exact', wake=False),
        row('norm', 1.0, 0.0009, CALIBRATED, 'latest', wake=False),
        row('norm_rel', 0.1, 0.0008, CALIBRATED, 'latest', wake=False),
        row('kl', 0.01, 0.0016, CALIBRATED, 'latest', wake=False),
        row('accel', 12.0, 0.0017, CALIBRATED, 'latest', wake=False),
        row('accel_rel', 1.0, 0.0007, CALIBRATED, 'latest', wake=False),
    ],
    calc=[
        row('accel', 1.0, 0.0, LONG),
        row('norm_rel', 0.03, 0.0, LONG),
    ],
    # smaller is not safer here: in the last 192 of these mazes norm_rel had 3 wrong rooms at 0.14,
    # and 57 at 0.1
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
