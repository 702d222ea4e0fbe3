#!/usr/bin/env bash
# What text.md shows. When do loops pay: three layers of C = 32 with 256 bytes of context, with
# loops of several kinds and without. Then how the model that ships reads and writes text.
#     bash results/text.sh            a day of one core; lib.sh says how to use many
# -> results/text.csv, a row for each training and loop count, and results/writing.csv
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

# kind NAME: its flags. The number is how often layers loop, in training and afterwards
kind() {
    case $1 in
        plain3) echo --n_layer=3 --groups=[] ;;
        plain6) echo --n_layer=6 --groups=[] ;;
        each[0-9]) fixed ${1#each} [[0],[1],[2]] ;;             # each layer for itself
        block[0-9]) fixed ${1#block} all ;;                     # as in config/kxl.py
        middle[0-9]) fixed ${1#middle} [[1]] ;;
        # Geiping's loop: noise, adapter, norm in the loop, random counts, gradients of three steps
        geiping) echo --n_layer=3 --groups=[[1]] --mean_recurrence=4 --bptt_k=3 ;;
        geiping_e) echo $(kind geiping) --x0=e ;;
        # one part of it at a time
        random4) echo $(kind middle4) --loop_draw=lognormal --bptt_k=30 ;;
        geiping_fixed) echo $(kind geiping_e) --loop_draw=fixed ;;
    esac
}

# fixed LOOPS GROUPS: always as many loops, gradients through all of them, and nothing else
fixed() {
    echo --n_layer=3 --groups=$2 --injection=none --norm_inside=False --loop_draw=fixed \
        --mean_recurrence=$1 --bptt_k=$1 --eval_loops=[1,2,3,4]
}

# text RUN...: KIND-ITERATIONS-SEED, at 1e-2, or KIND-ITERATIONS-SEED-RATE; wide-: C = 96
text() {
    for run in "$@"; do
        IFS=- read -r name iterations seed rate <<< "${run#wide-}"
        width=32
        case $run in wide-*) width=96 ;; esac
        train $run --n_embd=$width --n_head=2 --block_size=256 --batch_size=16 --keep_iters=[] \
            --seed=$seed --max_iters=$iterations --eval_interval=$((iterations / 4)) \
            --learning_rate=${rate:-1e-2} $(kind $name)
    done
}

text plain3-{8000,16000}-{1,2} each2-8000-{1,2} {plain6,middle2,block2,geiping}-8000-1
text plain3-4000-{1,2,3,1-2e-2,1-4e-2}
text {plain3,plain6,each2,block2,middle2,middle4,geiping,geiping_e}-2000-{1,2,3}
# another width, C = 96
text wide-{plain3,plain6,each2}-2000-1 wide-plain3-4000-1 wide-{plain3,each2}-2000-1-2e-2
# what of Geiping's loop costs
text {random4,geiping_fixed}-2000-{1,2,3}
# other learning rates
text {plain3,each2}-2000-1-5e-3 plain3-2000-1-8e-2 {plain3,middle2}-2000-{1,2,3}-4e-2
text {plain3,each2}-2000-{1,2}-2e-2 block2-2000-{1,2,3}-2e-2
text {plain6,middle2,geiping}-2000-1-2e-2 {plain6,each2,block2}-2000-1-4e-2

# how three trainings of the default model read and write texts of 36 bytes
for seed in 1 2 3; do
    train default-$seed --seed=$seed --keep_iters=[0] --eval_loops=[1,2,4,8]    # as claims.sh does
    measure writing default-$seed "--cache=['exact','latest']" --budgets=[1,2,3,4,5,6,8] \
        --n_loop=30 "--rules=['norm_rel','accel']" --taus=[0.03,0.1,1.0,10.0] \
        "--decoder=['drafts:loops=1,check=4','drafts:loops=1,check=5','drafts:loops=2,check=8','wave']" \
        --n_windows=24 --n_prompts=8 \
        --prompt_tokens=12 --new_tokens=36
done

set +f
collect text "$OUT"/*-*000-*/eval.csv
collect writing "$OUT"/writing-*/bench.csv
