#!/usr/bin/env bash
# What maze.md shows, measured again: three seeds, plain models, no input in the loop steps.
#     bash results/maze.sh            some five hours of one core; what is there is not made again
# Checkpoints lie in out-maze/, the CSVs in results/maze/.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

# maze NAME FLAGS: a training and its CSV
maze() {
    [ -e "out-maze/$1/eval.csv" ] || {
        rm -f "results/maze/$1.csv"
        python train.py config/maze.py "${@:2}" --out_dir="out-maze/$1"
    }
    [ -e "results/maze/$1.csv" ] || python -m results.maze --out_dir="out-maze/$1"
}
[ -e results/maze/shipped.csv ] || python -m results.maze
[ -e results/maze/edits.csv ] || python -m results.maze_goals
python -m results.maze_gif
for seed in 1 2 3; do
    maze looped-$seed --seed=$seed
done
# twice as long, and the mean of the weights of its last quarter
for seed in 1 2 3; do
    maze long-$seed --seed=$seed --max_iters=4800 '--keep_iters=[3600,3840,4080,4320,4560]'
    [ -e out-maze/average-$seed/ckpt.pt ] ||
        python -m results.average --out_dir=out-maze/long-$seed --to=out-maze/average-$seed
    [ -e results/maze/average-$seed.csv ] ||
        python -m results.maze --out_dir=out-maze/average-$seed
done
# other sizes, and label smoothing
for seed in 1 2 3; do
    maze wide-$seed --seed=$seed --n_embd=96
    maze two-layers-$seed --seed=$seed --n_layer=4 '--groups=[[1,2]]'
    maze smoothed-$seed --seed=$seed --model_class=results.smoothed:SmoothedMaze
done
maze plain8-1 --seed=1 --n_layer=8 '--groups=[]'
maze plain16-1 --seed=1 --n_layer=16 '--groups=[]'
maze no-input-1 --seed=1 --injection=none
