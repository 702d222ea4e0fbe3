#!/usr/bin/env bash
# What maze.md shows: trainings, with damping and without, plain layers, one picture.
#     bash results/maze.sh            an hour of one core; lib.sh says how to use many
# -> results/maze.csv, assets/maze.gif
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

# maze RUN FLAGS: a training
maze() {
    train $1 config/maze.py --seed=${1##*-} "${@:2}"
}
# rooms TABLE RUN FLAGS: right rooms and loop steps per room
rooms() {
    [ $2 = pretrained/maze ] || [ -e "$2.done" ] || return 0
    mkdir -p "$OUT/rooms-$1"
    once rooms-$1 python -m results.maze --out_dir=$2 --path="$OUT/rooms-$1/maze.csv" "${@:3}"
}
DAMPED="--damping=0.3 --rules=[['norm_rel',0.14]] --wake=[True]"
UNDAMPED="--damping=0 --rules=[['norm_rel',0.2]] --wake=[True] --n_loop=[128]"

rooms shipped pretrained/maze
rooms thirty pretrained/maze --sides=[30] --n_mazes=[20] --n_loop=[256] $DAMPED
for seed in 1 2 3; do
    maze maze-$seed
    rooms maze-$seed "$OUT/maze-$seed" $UNDAMPED
    rooms damped-maze-$seed "$OUT/maze-$seed" --n_loop=[128] $DAMPED
done
# without damping, at the threshold of the damped runs
rooms threshold-maze-3 "$OUT/maze-3" --sides=[16,30] --n_mazes=[24,3] --n_loop=[256] \
    $DAMPED --damping=0
maze plain16-maze-1 --n_layer=16 --groups=[]
maze no-input-maze-1 --injection=none
for run in plain16-maze-1 no-input-maze-1; do
    rooms $run "$OUT/$run" $UNDAMPED
done

set +f
collect maze "$OUT"/rooms-*/maze.csv
[ -n "${LIST:-}" ] || python -m results.gif
