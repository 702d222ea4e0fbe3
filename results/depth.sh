#!/usr/bin/env bash
# What depth.md shows, measured again: trainings, % right by depth, exit rules, figures.
#     bash results/depth.sh           some four hours of one core; what is there is not made again
# Checkpoints lie in out-depth/, the CSVs in results/depth/.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
mkdir -p results/depth/right results/depth/rules

# train NAME FLAGS: a run
train() {
    [ -e "out-depth/$1/log.csv" ] ||
        python train.py config/calc.py "${@:2}" --out_dir="out-depth/$1"
}
# right NAME LENGTH DATASET CSV: its % right by depth and loops on 64 problems
right() {
    local csv=results/depth/right/$4.csv
    [ -e "$csv" ] || {
        python train.py --eval_only --init_from="out-depth/$1/ckpt.pt" --out_dir="out-depth/$1" \
            --length="$2" --dataset="$3" '--eval_loops=[8,16,32,64,128,256]' --eval_windows=64
        cp "out-depth/$1/eval.csv" "$csv"
    }
}
calc() {
    train "$@"
    right "$1" 192 calc:reset=0.02 "$1"
}
for seed in 1 2 3; do
    calc looped-$seed --seed=$seed
    calc plain10-$seed --seed=$seed --n_layer=10 '--groups=[]'
    calc plain18-window16-$seed --seed=$seed --n_layer=18 --window=16 '--groups=[]'
    for window in 2 8 16; do
        calc window$window-$seed --seed=$seed --window=$window
    done
    train s3-$seed --dataset=group --seed=$seed
    right s3-$seed 192 group:reset=0 s3-$seed
done
calc plain3-1 --seed=1 '--groups=[]'
# on deep problems, as many tokens per iteration
DEEP='--dataset=calc:reset=0.02 --block_size=192 --batch_size=8'
calc plain10-deep-1 --seed=1 --n_layer=10 '--groups=[]' $DEEP
calc plain18-window16-deep-1 --seed=1 --n_layer=18 --window=16 '--groups=[]' $DEEP
calc plain10-window16-1 --seed=1 --n_layer=10 --window=16 '--groups=[]'
calc full-1 --seed=1 --window=None
calc fixed-1 --seed=1 --loop_draw=fixed
calc none-1 --seed=1 --injection=none
calc add-1 --seed=1 --injection=add
calc x0e-1 --seed=1 --x0=e
calc bptt1-1 --seed=1 --bptt_k=1
calc norm-1 --seed=1 --norm_inside=False
calc r4-1 --seed=1 --mean_recurrence=4
calc all-1 --seed=1 --loss_at=all
# a task that looks far back
for seed in 1 2 3; do
    for window in None 16; do
        train hop-window$window-$seed config/hop.py --window=$window --seed=$seed
        for length in 40 80 160; do
            right hop-window$window-$seed $length hop hop-window$window-$length-$seed
        done
    done
done

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
for seed in 1 2 3; do
    RUN=out-depth/s3-$seed TASK=group rules s3-512-0-$seed 512 0 4 "$RULES" "$TAUS" '--wake=[False,True]' '--budgets=[384,512]'
done
# the longest, where fixed loops would take an hour
for seed in 1 2 3; do
    for problem in '2048 0.002' '8192 0.0005' '65536 0.0001'; do
        set -- $problem
        python sample.py --out_dir=out-depth/looped-$seed --exit=accel --tau=1 --length=$1 \
            --dataset=calc:reset=$2 | tail -n 3 > results/depth/long-$1-$seed.txt
    done
done
# with damping
for seed in 1 2 3; do
    for problem in '8192 0.0005' '65536 0.0001'; do
        set -- $problem
        python sample.py --out_dir=out-depth/looped-$seed --exit=accel --tau=0.3 --damping=0.3 \
            --length=$1 --dataset=calc:reset=$2 | tail -n 3 > results/depth/damped-$1-$seed.txt
    done
done
for tau in 0.1 0.7; do
    python sample.py --out_dir=out-depth/looped-2 --exit=accel --tau=$tau --damping=0.3 \
        --length=8192 --dataset=calc:reset=0.0005 | tail -n 3 > results/depth/damped-8192-2-tau$tau.txt
done
# does a larger tau let the tokens rest that never do in seed 2?
for tau in 1 2 3 5; do
    python sample.py --out_dir=out-depth/looped-2 --exit=accel --tau=$tau --length=8192 \
        --dataset=calc:reset=0.0005 | tail -n 4 > results/depth/long-8192-2-tau$tau.txt
done
# where long problems go wrong
for flags in '--tau=1' '--tau=0.3 --damping=0.3'; do
    python -m results.first_errors $flags
    for seed in 1 2 3; do
        python -m results.first_errors --out_dir=out-depth/looped-$seed $flags
    done
done > results/depth/first_errors.txt
python -m results.first_errors >> results/depth/first_errors.txt
python -m results.first_errors --tau=0.3 >> results/depth/first_errors.txt
python -m results.first_errors --rule=norm_rel --tau=0.3 >> results/depth/first_errors.txt
python -m results.first_errors --out_dir=out-depth/looped-1 --tau=0.1 --damping=0.3 '--seeds=[1]' \
    >> results/depth/first_errors.txt
for flags in '--tau=0.03 --damping=0.3' '--rule=norm_rel --tau=0.1' '--rule=norm_rel --tau=0.03'; do
    python -m results.first_errors $flags
    for seed in 1 2 3; do
        python -m results.first_errors --out_dir=out-depth/looped-$seed $flags
    done
done >> results/depth/first_errors.txt
for flags in '--tau=3' '--rule=norm_rel --tau=0.3'; do
    for seed in 1 2 3; do
        python -m results.first_errors --out_dir=out-depth/looped-$seed $flags
    done
done >> results/depth/first_errors.txt
# a coin, at the work of sleeping and of waiting
for seed in 1 2 3; do
    export RUN=out-depth/looped-$seed
    rules random-192-0.01-$seed 192 0.01 8 "--rules=['random']" '--taus=[0.0154,0.0714]' --wake=False '--budgets=[]' --n_loop=484
done
# seconds of long problems, twice in turn
for turn in 1 2; do
    export RUN=out-depth/looped-1
    rules timed-asleep-$turn 2048 0.002 2 "--rules=['accel']" '--taus=[1.0]' --wake=True '--budgets=[]' --n_loop=1400
    FILE=results/waiting.py rules timed-waiting-$turn 2048 0.002 2 "--rules=['accel']" '--taus=[1.0]' --wake=True '--budgets=[]' --n_loop=1400
done
# exits for good, with smaller and smaller thresholds
for seed in 1 2 3; do
    export RUN=out-depth/looped-$seed
    rules small-192-0.01-$seed 192 0.01 8 "--rules=['accel']" '--taus=[0.01,0.0001,0.00001,0.000001]' --wake=False '--budgets=[]' --n_loop=484
done
# a window of 16 tokens: news wakes all 15 that read a token, or the next 4
for seed in 1 2 3; do
    export RUN=out-depth/window16-$seed
    rules readers15-512-0.004-$seed 512 0.004 4 "$RULES" "$TAUS" '--wake=True' '--budgets=[]'
    FILE=results/few_readers.py rules readers4-512-0.004-$seed 512 0.004 4 "$RULES" "$TAUS" '--wake=True' '--budgets=[]'
done
# one token after another
RUN=out-depth/looped-3 rules latest-192-0.01-3 192 0.01 8 "$RULES" "$TAUS" --wake=False --cache=latest '--budgets=[1,2,3,4,6,8]'

# a task of one's own: README's Switch
train switch results/switch.py --dataset=switch
switch() {
    python sample.py results/switch.py --out_dir=out-depth/switch --exit accel "$@" | tail -n 3
}
[ -e results/depth/switch.txt ] || {
    rm -f out-depth/switch/exits.json
    echo '# no calibrated threshold yet'
    switch --length=192 --dataset=switch:reset=0.01
    python bench.py results/switch.py --calibrate=0.005 --out_dir=out-depth/switch >&2
    echo '# after python bench.py --calibrate=0.005'
    switch --length=192 --dataset=switch:reset=0.01
    switch --length=2048 --dataset=switch:reset=0.001
    switch --length=8192 --dataset=switch:reset=0.0005
    echo '# with --tau=3'
    switch --length=8192 --dataset=switch:reset=0.0005 --tau=3
} > out-depth/switch.txt
[ -e results/depth/switch.txt ] || mv out-depth/switch.txt results/depth/switch.txt

python -m results.figures
