#!/usr/bin/env bash
# Extra loops, a setting or a lottery? What sudoku.md shows under that head: small trainings on 4 x 4
# and 6 x 6 at three rates, with random and with fixed loop counts, at 1 to 64 times these loops.
#     bash results/extra.sh           half an hour of one core; lib.sh says how to use many
# -> results/extra.csv
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

for draw in lognormal fixed; do
    for rate in 2e-3 5e-3 1.2e-2; do
        for seed in 1 2 3; do
            run=extra-$draw-$rate-$seed
            train $run config/sudoku.py --block_size=216 --max_iters=1000 --loop_draw=$draw \
                --learning_rate=$rate --seed=$seed --eval_interval=1000 --eval_loops=[20]
            [ -e "$OUT/$run.done" ] || continue
            once eval-$run python train.py --eval_only --out_dir="$OUT/$run" \
                --eval_windows=100 --eval_loops=[20,40,80,160,320,640,1280]
        done
    done
done

set +f
collect extra "$OUT"/extra-*/eval_*.csv
