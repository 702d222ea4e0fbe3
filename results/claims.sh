#!/usr/bin/env bash
# What claims.md shows. First the exit rules of the text and those of the authors' code (authors.py)
# on two models of pretrained/: a minute. Then on nine trainings, with geometry and the loss by
# loops: an hour and a quarter of one core
#     bash results/claims.sh          lib.sh says how to use many cores
# -> results/claims.csv (bench.py); jumps.csv, steps.csv and settled.csv (geometry.py); loops.csv
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

# rules RUN PROMPTS: quality by threshold, without times if there are 0 prompts
rules() {
    measure claims $1 --wake=[False] --budgets=[1,2,3,4,5,6,8,10,12,16,20] --n_loop=30 \
        "--rules=['norm','kl','accel',$(authors norm_diff kl_diff accel_once \
        norm_diff_mean kl_diff_mean accel_once_mean)]" \
        --taus=[1e-5,1e-4,1e-3,0.01,0.03,0.1,0.3,1.0,3.0,10.0,30.0] --decoder=[] \
        --n_windows=48 --n_prompts=$2
}
# authors NAME...: rules of authors.py, for a list
authors() {
    printf "'results.authors:%s'," "$@"
}
# claim RUN FLAGS: a training that keeps its first weights, too, and its measurements
claim() {
    train $1 "${@:2}" --seed=${1##*-} --keep_iters=[0] --eval_loops=[1,2,4,8]
    rules $1 $([ ${1##*-} = 1 ] && echo 8 || echo 0)        # times for the first seed alone
    [ -e "$OUT/$1.done" ] || return 0
    once geometry-$1 python geometry.py --device=$DEVICE --out_dir="$OUT/$1"
    once loops-$1 python train.py --eval_only --device=$DEVICE --out_dir="$OUT/$1" \
        --eval_windows=64 --eval_loops=[1,2,4,5,9,13,30,64,256]
}

# copies of the two models
COPY='--max_iters=0 --keep_iters=[] --eval_loops=[1]'
train text --init_from=pretrained/text/ckpt.pt $COPY
train calc config/calc.py --init_from=pretrained/calc/ckpt.pt $COPY
for run in text calc; do
    rules $run 0
done
for seed in 1 2 3; do
    claim recipe-$seed config/recipe.py
    claim default-$seed
    claim calc-$seed config/calc.py --n_layer=5 --groups=[[1],[2,3]] --window=None \
        --block_size=24 --batch_size=64 --max_iters=700
done

set +f
collect claims "$OUT"/claims-*/bench.csv
collect jumps "$OUT"/*/figures/figure_2.csv
collect steps "$OUT"/*/figures/figure_3a.csv
collect settled "$OUT"/*/figures/settled.csv
collect loops "$OUT"/{recipe,default,calc}-[0-9]/eval_*.csv
[ -n "${LIST:-}" ] || python -m results.claims
