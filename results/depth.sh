#!/usr/bin/env bash
# What depth.md shows, measured again: trainings, % right by depth, exit rules, figures.
#     bash results/depth.sh           some four hours of one core; what is there is not made again
# Checkpoints lie in out-depth/, the CSVs in results/depth/.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
mkdir -p results/depth/right results/depth/rules

# train NAME FLAGS: a run, and its % right by depth and loops on 64 problems of 192 tokens
train() {
    local out=out-depth/$1
    [ -e "$out/log.csv" ] || python train.py config/calc.py "${@:2}" --out_dir="$out"
    [ -e "results/depth/right/$1.csv" ] || {
        python train.py --eval_only --init_from="$out/ckpt.pt" --out_dir="$out" --length=192 \
            --dataset="${DATASET:-calc:reset=0.02}" '--eval_loops=[8,16,32,64,128,256]' \
            --eval_windows=64
        cp "$out/eval.csv" "results/depth/right/$1.csv"
    }
}
for seed in 1 2 3; do
    train looped-$seed --seed=$seed
    train plain10-$seed --seed=$seed --n_layer=10 '--groups=[]'
    train plain18-window16-$seed --seed=$seed --n_layer=18 --window=16 '--groups=[]'
    DATASET=group:reset=0 train s3-$seed --dataset=group --seed=$seed
done
train plain3-1 --seed=1 '--groups=[]'
train plain10-window16-1 --seed=1 --n_layer=10 --window=16 '--groups=[]'
train window2-1 --seed=1 --window=2
train window8-1 --seed=1 --window=8
train window16-1 --seed=1 --window=16
train full-1 --seed=1 --window=None
train fixed-1 --seed=1 --loop_draw=fixed
train none-1 --seed=1 --injection=none
train add-1 --seed=1 --injection=add
train x0e-1 --seed=1 --x0=e
train bptt1-1 --seed=1 --bptt_k=1
train norm-1 --seed=1 --norm_inside=False
train r4-1 --seed=1 --mean_recurrence=4

# rules NAME LENGTH RESET PROBLEMS FLAGS: what rules and fixed loops take on problems of this length
rules() {
    local csv=results/depth/rules/$1.csv
    [ -e "$csv" ] || {
        python bench.py ${FILE:-} --out_dir="${RUN:-out-depth/looped-1}" --length="$2" \
            --dataset="${TASK:-calc}:reset=$3" --n_windows="$4" --n_prompts="$4" \
            '--drafts=[]' '--waves=[]' "${@:5}"
        cp "${RUN:-out-depth/looped-1}/bench.csv" "$csv"
    }
}
RULES="--rules=['norm_rel','accel']"
TAUS='--taus=[0.1,1.0]'
for seed in 1 2 3; do
    export RUN=out-depth/looped-$seed
    rules calc-192-0.2-$seed 192 0.2 8 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[8,12,16,20,24,32]'
    rules calc-192-0.05-$seed 192 0.05 8 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[24,32,40,48,56,64,80]'
    rules calc-192-0.01-$seed 192 0.01 8 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[64,96,128,144,160,192]'
    rules calc-512-0.004-$seed 512 0.004 4 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[160,192,224,256,320,384]'
    rules calc-2048-0.002-$seed 2048 0.002 2 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[384,512,640,768]' --n_loop=1400
    # waiting: a token goes on looping until all earlier ones are still
    for problem in '192 0.2 8' '192 0.05 8' '192 0.01 8' '512 0.004 4' '2048 0.002 2'; do
        set -- $problem
        FILE=results/waiting.py rules waiting-$1-$2-$seed $1 $2 $3 "$RULES" "$TAUS" '--wake=True' \
            '--budgets=[]' $([ $1 = 2048 ] && echo --n_loop=1400)
    done
done
RUN=out-depth/s3-1 TASK=group rules s3-512-0-1 512 0 4 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[384,512]'
# the longest, where fixed loops would take an hour
for seed in 1 2 3; do
    for problem in '8192 0.0005' '65536 0.0001'; do
        set -- $problem
        python sample.py --out_dir=out-depth/looped-$seed --exit=accel --tau=1 --length=$1 \
            --dataset=calc:reset=$2 | tail -n 3 > results/depth/long-$1-$seed.txt
    done
done
# one token after another
RUN=out-depth/looped-3 rules latest-192-0.01-3 192 0.01 8 "$RULES" "$TAUS" --wake=False --cache=latest '--budgets=[1,2,3,4,6,8]'

python -m results.figures
