#!/usr/bin/env bash
# What extra.md shows: what loops beyond those of training do, and if rest is a sign of a right
# answer.
#     bash results/extra.sh           an hour of two cores; lib.sh says how to use many
# -> results/extra.csv (loops), results/resting.csv (rest)
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

# loops RUN LOOPS FLAGS: right labels and problems at loop counts
loops() {
    [ -e "$OUT/$1.done" ] || return 0
    once eval-$1 python train.py --eval_only --out_dir="$OUT/$1" --eval_windows=100 --eval_loops=$2 \
        "${@:3}"
}
# rests RUN LENGTH PROBLEMS FLAGS: at which thresholds problems come to rest, and are right
rests() {
    measure rests $1 --length=$2 --n_windows=$3 "--rules=['norm']" --taus=[0.01,0.03,0.1,0.3,1,3,10] \
        --wake=True --budgets=[] --decoder=[] --n_prompts=0 "${@:4}"
}

for draw in lognormal fixed; do
    for rate in 2e-3 5e-3 1.2e-2; do
        for seed in 1 2 3; do
            run=boards-$draw-$rate-$seed        # 4 x 4 and 6 x 6 that singles solve
            train $run config/sudoku.py --block_size=216 --max_iters=1000 --mean_recurrence=10 \
                --loop_draw=$draw --learning_rate=$rate --seed=$seed --eval_interval=1000 \
                --eval_loops=[10]
            loops $run [10,20,40,80,160,320,640]
            run=mazes-$draw-$rate-$seed         # 5 x 5 to 7 x 7
            train $run config/maze.py --block_size=49 --batch_size=16 --max_iters=800 \
                --mean_recurrence=8 --loop_draw=$draw --learning_rate=$rate --seed=$seed \
                --eval_interval=800 --eval_loops=[8]
            loops $run [8,16,32,64,128,256,512] --dataset=maze:smallest=5
        done
    done
done

# those of depth.sh and sudoku.sh, if they are there
for seed in 1 2 3; do
    rests looped-$seed 192 64 --dataset=calc:reset=0.01
    rests mazes-lognormal-5e-3-$seed 256 24 --dataset=maze:deep=1.0
    rests boards-lognormal-5e-3-$seed 216 100
done
for seed in 1337 1 2; do
    rests sudoku-$seed 729 50
done

set +f
collect extra "$OUT"/{boards,mazes}-*/eval_*.csv
collect resting "$OUT"/rests-*/bench.csv
