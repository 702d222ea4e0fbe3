#!/usr/bin/env bash
# What claims.md shows, measured with today's programs: geometry.py (C1 to C5), bench.py (C6 to C10
# and C14) and train.py (C11). C12 has no program today. `calc` has ten seeds.
#     bash results/claims.sh          a day of one core; what is there is not made again
# For *medium* make its data first:   python data.py wiki --path=FOLDER --bpe=4096
# Checkpoints lie in out-results/. The CSVs are results/claims/NAME-SEED.csv (bench.py), and
# results/claims/NAME-SEED/ (geometry.py; and eval.csv, the loss by loops). The first row of a
# checkpoint folder's figures is that of iteration 0, before training.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
. results/train.sh

runs=()
for seed in $SEEDS; do
    runs+=(recipe-$seed random-$seed default-$seed hop-$seed)
done
for seed in 1 2 3 4 5 6 7 8 9 1337; do
    runs+=(calc-$seed)
done
[ -e data/wiki/meta.json ] && runs+=(medium-1337 medium_plain-1337)
for run in "${runs[@]}"; do
    trained $run
    folder=results/claims/$run
    mkdir -p $folder
    [ -e $folder/eval.csv ] || {
        python train.py --eval_only --init_from=out-results/$run/ckpt.pt --out_dir=out-results/$run \
            '--eval_loops=[1,2,4,5,7,9,13,30,256]' --eval_windows=512
        cp out-results/$run/eval.csv $folder
    }
    [[ $run == medium_plain* ]] && continue     # it has no loops
    [ -e $folder/figure_2.csv ] || {
        python geometry.py --out_dir=out-results/$run
        cp out-results/$run/figures/*.csv $folder
    }
    # the paper's thresholds, and those that matter here
    measure results/claims/$run.csv $run --wake=False "--rules=['norm','norm_rel','kl','accel']" \
        '--taus=[1e-5,1e-4,1e-3,0.01,0.03,0.1,0.2,0.3,0.5,1.0,2.0,3.0,5.0,10.0,13.0,20.0,30.0]' \
        '--budgets=[1,2,3,4,5,6,7,8]' '--drafts=[]' '--waves=[]' --n_windows=48 --n_prompts=16
done
