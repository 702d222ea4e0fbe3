#!/usr/bin/env bash
# What zoo.md shows: Ouro beside the same model with one loop, and loops in a trained plain model.
#     bash results/zoo.sh             an hour of one core; lib.sh says how to use many
# -> results/zoo.csv
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

TEXT='--keep_iters=[]'
CALC='config/calc.py --window=None --block_size=24 --batch_size=64 --keep_iters=[]'

# ouro RUN SEED LOOPS ITERATIONS FLAGS
ouro() {
    train $1-$2 "${@:5}" config/ouro.py --seed=$2 --mean_recurrence=$3 --max_iters=$4 \
        --eval_loops=[1,2,4,8]
}
# etd RUN PLAIN BLOCK FLAGS: trains on with a block of layers that loops; with none, as it is
etd() {
    [ -e "$OUT/$2.done" ] || return 0
    flags="--max_iters=300 --warmup_iters=20 --learning_rate=1e-3 --keep_iters=[] ${@:4}"
    if [ $3 = none ]; then
        train $1 --init_from="$OUT/$2/ckpt.pt" $flags
        return
    fi
    once found-$1 python -m zoo.etd --init_from="$OUT/$2/ckpt.pt" --block=$3 --overwrite \
        --device=$DEVICE --out_dir="$OUT/found-$1"
    [ -e "$OUT/found-$1.done" ] || return 0
    train $1 --init_from="$OUT/found-$1/ckpt.pt" $flags --mean_recurrence=2 \
        --eval_loops=[1,2,3,4]
}

ouro ouro-text-8 1 8 750 $TEXT
ouro ouro-calc-8 1 8 700 $CALC
for seed in 1 2; do
    for loops in 1 4; do
        ouro ouro-text-$loops $seed $loops 750 $TEXT
        ouro ouro-calc-$loops $seed $loops 700 $CALC
    done
    ouro ouro-text-1-long $seed 1 3000 $TEXT        # the work of four loops
    ouro ouro-calc-1-long $seed 1 2800 $CALC
    train plain-text-$seed $TEXT --seed=$seed --groups=[]
    train plain-calc-$seed $CALC --seed=$seed --groups=[] --n_layer=6 --max_iters=700
    for named in chosen:None front:[0,1,2,3] back:[2,3,4,5] none:none; do
        name=${named%:*}
        block=${named#*:}                   # None: the one that ETD chooses
        etd etd-text-$name-$seed plain-text-$seed $block --seed=$seed
        etd etd-calc-$name-$seed plain-calc-$seed $block --seed=$seed --dataset=calc --batch_size=64
    done
done

set +f
collect zoo "$OUT"/{ouro,plain,etd}-{text,calc}-*/eval.csv
