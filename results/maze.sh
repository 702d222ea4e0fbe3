#!/usr/bin/env bash
# What maze.md shows, measured again: three seeds, plain models, no input in the loop steps.
#     bash results/maze.sh            some five hours of one core; what is there is not made again
# Checkpoints lie in out-maze/, the CSVs in results/maze/.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

# train NAME FLAGS: a run. What was measured of an earlier one of this name goes
train() {
    [ -e "out-maze/$1/eval.csv" ] || {
        rm -f "results/maze/$1.csv"
        python train.py config/maze.py "${@:2}" --out_dir="out-maze/$1"
    }
}
# measure NAME FLAGS
measure() {
    [ -e "results/maze/$1.csv" ] || python -m results.maze --out_dir="out-maze/$1" "${@:2}"
}
# average NAME TO: the mean of the weights of its last quarter
average() {
    [ -e "out-maze/$2/ckpt.pt" ] ||
        python -m results.average --out_dir="out-maze/$1" --to="out-maze/$2"
}
# maze NAME FLAGS: train and measure
maze() {
    train "$@"
    measure "$1"
}
# variant NAME FLAGS: train, and measure some fixed counts and one rule asleep
variant() {
    train "$@"
    measure "$1" "${few[@]}"
}
# damped NAME: with damping, one rule asleep
damped() {
    [ -e "results/maze/damped-$1.csv" ] || python -m results.maze results/smoothed.py \
        --out_dir="out-maze/$1" '--n_loop=[128]' "--asked=['asleep']" \
        "--rules=[['norm_rel',0.14]]" --damping=0.3 --path="results/maze/damped-$1.csv"
}
few=(results/smoothed.py '--n_loop=[64,128,256]' "--asked=['asleep']" "--rules=[['norm_rel',0.2]]")
long='--max_iters=4800 --keep_iters=[3600,3840,4080,4320,4560]'
smoothed=--model_class=results.smoothed:SmoothedMaze
[ -e results/maze/shipped.csv ] || python -m results.maze '--n_loop=[64,128,256]' \
    "--asked=['alone','asleep']" "--rules=[['norm_rel',0.14],['accel',0.7]]"
[ -e results/maze/thirty.csv ] || python -m results.maze '--sides=[30]' '--n_mazes=[20]' \
    '--n_loop=[256]' "--asked=['asleep']" "--rules=[['norm_rel',0.14]]" \
    --path=results/maze/thirty.csv
[ -e results/maze/edits.csv ] || python -m results.maze_goals
python -m results.maze_gif
for seed in 1 2 3; do
    maze looped-$seed --seed=$seed
    damped looped-$seed
done
# without damping, at the threshold of the damped runs
[ -e results/maze/threshold-looped-3.csv ] || python -m results.maze --out_dir=out-maze/looped-3 \
    '--sides=[16,30]' '--n_mazes=[24,3]' '--n_loop=[256]' "--asked=['asleep']" \
    "--rules=[['norm_rel',0.14]]" --path=results/maze/threshold-looped-3.csv
# twice as long, and the mean of the last weights
for seed in 1 2 3; do
    maze long-$seed --seed=$seed $long
    average long-$seed average-$seed
    measure average-$seed
done
# other sizes and label smoothing, of which less is measured. The runs of maze.md were trained on a GPU
# with --compile=False --dtype=float32, but for the long ones
for seed in 1 2 3; do
    variant wide-$seed --seed=$seed --n_embd=96
    variant two-layers-$seed --seed=$seed --n_layer=4 '--groups=[[1,2]]'
    variant smoothed-$seed --seed=$seed $smoothed
    variant smoothed-long-$seed --seed=$seed $smoothed $long
    average smoothed-long-$seed smoothed-average-$seed
    measure smoothed-average-$seed "${few[@]}"
    for name in wide two-layers smoothed smoothed-long; do
        damped $name-$seed
    done
done
maze plain8-1 --seed=1 --n_layer=8 '--groups=[]'
maze plain16-1 --seed=1 --n_layer=16 '--groups=[]'
maze no-input-1 --seed=1 --injection=none
