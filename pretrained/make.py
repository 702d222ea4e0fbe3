"""
Make pretrained/: the default model, that of calc and that of mazes, as small checkpoints of weights
and config.

    python train.py
    python train.py config/calc.py
    python train.py config/maze.py
    python -m pretrained.make
    python bench.py config/bench_full.py --calibrate=0.005 --n_windows=128 --out_dir=pretrained/text

The last writes exits.json, a copy of which stands beside ckpt.pt, and so for calc. For the maze it
was --n_windows=32 --length=256 --dataset=maze:deep=1, since deeper mazes need smaller thresholds.
Weights are stored in float16, which changes no answer of calc and no text that was tried.
"""
import os

from common.checkpoint import load_checkpoint, save_checkpoint
from common.configurator import configure, run

# -------------------------------------------------------------------------------------------------
text = 'out'                # the folder of the default run
calc = 'out-calc'           # the folder of the run on calc
maze = 'out-maze'           # the folder of the run on mazes
# -------------------------------------------------------------------------------------------------

KEPT = ('model', 'model_args', 'model_class', 'config', 'iter_num', 'tokenizer', 'data')


def main():
    for name, folder in dict(text=text, calc=calc, maze=maze).items():
        _, checkpoint = load_checkpoint(os.path.join(folder, 'ckpt.pt'))
        small = {key: checkpoint[key] for key in KEPT}
        if name == 'maze':      # all mazes come to rest, and more of them are solved
            small['model_args'] = checkpoint['model_args'] | dict(damping=0.3)
        small['config'] = checkpoint['config'] | dict(out_dir=f'pretrained/{name}')
        small['model'] = {key: weight.half() for key, weight in checkpoint['model'].items()}
        path = f'pretrained/{name}/ckpt.pt'
        save_checkpoint(small, path)
        print(f'{path}: {os.path.getsize(path) / 1e6:.2f} MB')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
