#!/usr/bin/env bash
# What claims.md shows: nine trainings, and each model untrained. geometry.py measures steps, angles
# and jumps, bench.py the exit rules of the text and those of the authors' code (authors.py).
#     bash results/claims.sh          three hours of one core; lib.sh says how to use many
# -> results/claims.csv (bench.py), results/loops.csv (the loss by loops), and of geometry.py
#    results/jumps.csv (figure 2), steps.csv (3a) and angles.csv (5); claims.py prints the verdicts
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

# claim RUN FLAGS: a training, the same without a step of training, and their measurements
claim() {
    local untrained=untrained_$1
    train $1 "${@:2}" --seed=${1##*-} --keep_iters=[0] --eval_loops=[1,2,4,8]
    train $untrained "${@:2}" --seed=${1##*-} --max_iters=0 --keep_iters=[] --eval_loops=[1,2,4,8]
    for run in $1 $untrained; do
        measure claims $run --wake=[False] --budgets=[1,2,3,4,5,6,8,10,12,16,20] --n_loop=30 \
            "--rules=['norm','kl','accel',$(authors norm_twice norm_diff kl_diff accel_once)]" \
            --taus=[1e-5,1e-3,0.01,0.1,0.3,1.0,3.0,10.0] --drafts=[] --waves=[] \
            --n_windows=48 --n_prompts=8
    done
    # the same as a mean over tokens, without times
    measure means $1 --wake=[False] --budgets=[] --n_loop=30 \
        "--rules=[$(authors norm_diff_mean kl_diff_mean accel_once_mean)]" \
        --taus=[1e-5,1e-3,0.01,0.1,0.3,1.0,3.0,10.0] --drafts=[] --waves=[] \
        --n_windows=48 --n_prompts=0
    [ -e "$OUT/$1.done" ] || return 0
    once geometry-$1 python geometry.py --device=$DEVICE --out_dir="$OUT/$1"
    once loops-$1 python train.py --eval_only --device=$DEVICE --out_dir="$OUT/$1" \
        --eval_windows=64 --eval_loops=[1,2,4,5,9,13,30,64,256]
}

# authors NAME...: rules of authors.py, for a list
authors() {
    printf "'results.authors:%s'," "$@"
}

for seed in 1 2 3; do
    claim recipe-$seed config/recipe.py
    claim default-$seed
    claim calc-$seed config/calc.py --n_layer=5 --groups=[[1],[2,3]] --window=None \
        --block_size=24 --batch_size=64 --max_iters=700
done

set +f
collect claims "$OUT"/claims-*/bench.csv "$OUT"/means-*/bench.csv
collect loops "$OUT"/{recipe,default,calc}-[0-9]/eval*.csv
collect jumps "$OUT"/{recipe,default,calc}-[0-9]/figures/figure_2.csv
collect steps "$OUT"/{recipe,default,calc}-[0-9]/figures/figure_3a.csv
collect angles "$OUT"/{recipe,default,calc}-[0-9]/figures/figure_5.csv
[ -n "${LIST:-}" ] || python -m results.claims
