#!/usr/bin/env bash
# What zoo.md shows of Ouro and of loops in a plain model, measured again with today's programs.
#     bash results/zoo.sh             two hours of one core; lib.sh says how to use many
# -> results/zoo_again.csv; the numbers of zoo.md, which an earlier program measured, are in zoo.csv
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

TASK='config/calc.py --n_layer=5 --window=None --block_size=24 --batch_size=64 --max_iters=700'
for seed in 1 2 3; do
    for loops in 4 8; do
        flags="config/ouro.py --seed=$seed --mean_recurrence=$loops --eval_loops=[1,2,4,8]"
        train ouro-text-$loops-$seed $flags
        train ouro-calc-$loops-$seed $TASK $flags
    done
    # a plain model, its thinking block, and as many steps more with loops and without. What goes
    # on takes its shape from the checkpoint: a config file would say other layers to loop
    for task in text calc; do
        plain=plain-$task-$seed
        shape=
        more=
        if [ $task = calc ]; then
            shape=$TASK
            more='--dataset=calc --batch_size=64'
        fi
        more="$more --seed=$seed --eval_loops=[1,2,3,4] --max_iters=500"
        train $plain $shape --seed=$seed --eval_loops=[1] --groups=[]
        [ -e "$OUT/$plain.done" ] || continue
        once etd-$plain python -m zoo.etd --init_from="$OUT/$plain/ckpt.pt" --overwrite \
            --out_dir="$OUT/etd-$plain"
        train more-$task-$seed $more --init_from="$OUT/$plain/ckpt.pt"
        [ -e "$OUT/etd-$plain.done" ] || continue
        train etd-$task-$seed $more --init_from="$OUT/etd-$plain/ckpt.pt" --mean_recurrence=2
    done
done

set +f
collect zoo_again "$OUT"/{ouro,plain,more,etd}-{text,calc}-*/eval.csv
