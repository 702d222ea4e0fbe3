#!/usr/bin/env bash
# What depth.md shows: trainings on arithmetic, right answers by depth, exit rules, long problems.
#     bash results/depth.sh           four and a half hours of one core; lib.sh says how to use many
# -> results/depth.csv (right answers), rules.csv (exit rules) and long.csv (long problems)
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

TASKS=results/hop_and_group.py           # for train.py, which then knows these two

# right RUN LENGTH DATASET: right answers by depth and loops on 64 problems
right() {
    [ -e "$OUT/$1.done" ] || return 0
    once right-$2-$3-$1 python train.py $TASKS --eval_only --out_dir="$OUT/$1" --block_size=$2 \
        --dataset=$3 --eval_loops=[8,16,32,64,128,256] --eval_windows=64
}
calc() {
    train $1 config/calc.py "${@:2}"
    right $1 192 calc:reset=0.02
}
# rules TABLE RUN TASK LENGTH PROBLEMS FLAGS: what exit rules and fixed loops take
rules() {
    measure $1 $2 "${@:6}" --dataset=$3 --length=$4 --n_windows=$5 --n_prompts=$5 \
        --decoder=[]
}
# long NAME FLAGS: long problems, token by token, and whose the errors are
long() {
    once long-$1 python -m results.first_errors "${@:2}" --path="$OUT/long-$1.csv"
}

for seed in 1 2 3; do
    calc looped-$seed --seed=$seed
    calc plain10-$seed --seed=$seed --n_layer=10 --groups=[]
    calc plain18-window16-$seed --seed=$seed --n_layer=18 --window=16 --groups=[]
    for window in 2 16; do
        calc window$window-$seed --seed=$seed --window=$window
    done
    train s3-$seed config/calc.py $TASKS --dataset=group --seed=$seed
    right s3-$seed 192 group:reset=0
    for window in None 16; do               # a task that looks far back
        train hop-window$window-$seed config/calc.py $TASKS --dataset=hop --window=$window \
            --block_size=40 --batch_size=64 --max_iters=1500 --seed=$seed
        right hop-window$window-$seed 160 hop
    done
done
# one thing changed
calc full-1 --seed=1 --window=None
calc fixed-1 --seed=1 --loop_draw=fixed --mean_recurrence=9
calc none-1 --seed=1 --injection=none
calc add-1 --seed=1 --injection=add
calc x0e-1 --seed=1 --x0=e
calc bptt1-1 --seed=1 --bptt_k=1
calc r4-1 --seed=1 --mean_recurrence=4

BOTH="--rules=['norm_rel','accel'] --taus=[0.1,1.0]"
for seed in 1 2 3; do
    run=looped-$seed
    while read length reset problems budgets budget; do
        rules calc-$length-$reset $run calc:reset=$reset $length $problems $BOTH \
            --wake=[False,True] --budgets=$budgets $budget
        # a token goes on looping until all earlier ones are still
        rules waiting-$length-$reset $run calc:reset=$reset $length $problems \
            results/waiting.py $BOTH --wake=[True] --budgets=[] $budget
    done <<'END'
192 0.2 8 [8,12,16,20,24,32]
192 0.05 8 [24,32,40,48,56,64,80]
192 0.01 8 [64,96,128,144,160,192]
512 0.004 4 [160,192,224,256,320,384]
2048 0.002 2 [384,512,640,768] --n_loop=1400
END
    # a coin, and smaller and smaller thresholds, where exits are for good
    rules random-192-0.01 $run calc:reset=0.01 192 8 "--rules=['random']" --taus=[0.0714] \
        --wake=[False] --budgets=[] --n_loop=484
    rules small-192-0.01 $run calc:reset=0.01 192 8 "--rules=['accel']" --taus=[1e-5,1e-6] \
        --wake=[False] --budgets=[] --n_loop=484
    # one token after another, which reads the last states of earlier ones
    rules one-192-0.01 $run calc:reset=0.01 192 8 "--rules=['accel']" --taus=[1.0] \
        --cache=latest --budgets=[2,3,4] --n_loop=160
done

# times: a long problem read at once, asleep or by fixed loops, and token after token
LONG='calc:reset=0.002 2048 2 --rules=["accel"] --taus=[1.0]'
rules timed-2048-0.002 looped-1 $LONG --budgets=[] --n_loop=1400
rules one-2048-0.002 looped-1 $LONG --cache=latest --budgets=[3,4] --n_loop=30

for run in pretrained/calc "$OUT"/looped-{1,2,3}; do
    name=$(basename $run)
    while read tag flags; do
        long $tag-$name --out_dir=$run $flags
    done <<'END'
accel1 --tau=1
accel3 --tau=3
damped0.3 --tau=0.3 --damping=0.3
damped0.03 --tau=0.03 --damping=0.3
norm0.3 --rule=norm_rel --tau=0.3
norm0.1 --rule=norm_rel --tau=0.1
norm0.03 --rule=norm_rel --tau=0.03
2048 --tau=1 --length=2048 --dataset=calc:reset=0.002 --seeds=[1337]
8192 --tau=1 --length=8192 --dataset=calc:reset=0.0005 --seeds=[1337]
norm1 --rule=norm --tau=1
END
    [ $name = calc ] && while read flags; do
        long other-${flags//[^a-z0-9]/}-calc --out_dir=$run $flags --length=8192 \
            --dataset=calc:reset=0.0005 --seeds=[$(seq -s, 11 50)]
    done <<'END'
--rule=accel --tau=1
--rule=norm --tau=1
--rule=norm --tau=0.3
END
    # which rule with sleep
    for flags in accel:1 accel:3 norm:1 norm:3 norm_rel:0.1 norm_rel:0.3; do
        long asleep-$flags-$name --out_dir=$run --rule=${flags%:*} --tau=${flags#*:} \
            --length=8192 --dataset=calc:reset=0.0005
    done
done

set +f
collect depth "$OUT"/*/eval_ckpt-*_{calc-reset,group,hop}*.csv
collect rules "$OUT"/{calc,waiting,timed,random,small,one}-*/bench.csv
collect long "$OUT"/long-*.csv
[ -n "${LIST:-}" ] || python -m results.figures
