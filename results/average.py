"""
The mean of a run's weights over its last checkpoints, as a run of its own.

    python -m results.average --out_dir=out-maze/long-2 --to=out-maze/average-2

The checkpoints are ckpt.pt and those of train.py's --keep_iters, ckpt_ITER.pt. maze.sh calls it.
"""
import glob
import os

import torch

from common.checkpoint import read_checkpoint
from common.configurator import PathName, configure, run

# -------------------------------------------------------------------------------------------------
out_dir: PathName = 'out-maze'      # the run
to: PathName = 'out-average'        # the folder for the mean
# -------------------------------------------------------------------------------------------------


def main():
    paths = [*sorted(glob.glob(f'{out_dir}/ckpt_*.pt')), f'{out_dir}/ckpt.pt']
    checkpoints = [read_checkpoint(path) for path in paths]
    mean = checkpoints[-1]
    for name in mean['model']:
        weights = [checkpoint['model'][name] for checkpoint in checkpoints]
        mean['model'][name] = torch.stack(weights).mean(dim=0)
    os.makedirs(to, exist_ok=True)
    torch.save(mean, f'{to}/ckpt.pt')
    print(f'{to}/ckpt.pt: the mean of {len(paths)} checkpoints')


if __name__ == '__main__':
    configure(globals())
    run(main)
