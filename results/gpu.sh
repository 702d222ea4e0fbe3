#!/usr/bin/env bash
# What gpu.md shows: the CPU's results on a GPU, which optimizer learns, a training, plain layers
# beside it, exit rules in time, geometry.
#     bash results/gpu.sh FOLDER      half an hour of an H100; what is there is not made again
# FOLDER has nanoGPT's train.bin and val.bin: GPT-2 tokens of Wikipedia. ITERATIONS=60000 before the
# command is the paper's whole run. Checkpoints lie in out-gpu/, the logs and CSVs in results/gpu/.
set -euo pipefail
FOLDER=$(realpath "${1:-.}")
cd "$(dirname "$0")/.."
mkdir -p out-gpu results/gpu
RUN=out-gpu/paper-${ITERATIONS:=2504}
[ -e data/wiki ] || python data.py wiki --path="$FOLDER" --tokenizer=gpt2

# step NAME COMMAND: run it, unless its log is there
step() {
    local log=results/gpu/$1.log
    [ -e "$log" ] || {
        "${@:2}" |& tee out-gpu/log
        mv out-gpu/log "$log"
    }
}
# short NAME ITERATIONS FLAGS: a short training at a constant rate
short() {
    step "$1" python train.py config/groups.py --dataset=wiki --warmup_iters=100 \
        --lr_decay_iters=1000000 --max_iters="$2" --eval_interval=10000 '--eval_loops=[1,4,12]' \
        '--keep_iters=[]' --save_interval=10000 --out_dir="out-gpu/$1" "${@:3}"
    cp "out-gpu/$1/eval.csv" "results/gpu/$1.csv"
}
# second NAME ITERATIONS FLAGS: a training with another seed, as long as it is told
second() {
    step "$1" python train.py config/groups.py --dataset=wiki --seed=1338 --max_iters="$2" \
        --warmup_iters=200 --eval_interval=500 --eval_windows=64 '--keep_iters=[]' \
        --save_interval=100000 --out_dir="out-gpu/$1" "${@:3}"
    cp "out-gpu/$1/log.csv" "results/gpu/$1.csv"
}
# bench NAME RUN FLAGS
bench() {
    step "$1" python bench.py --out_dir="$2" --cache=exact --wake=False "${@:3}"
    cp "$2/bench.csv" "results/gpu/$1.csv"
}
step device env CARD=cuda python -m pytest tests/test_device.py -k 'decoding or zoo_f'
short adamw-2e-4 400 --optimizer=adamw --learning_rate=2e-4
short adamw-6e-5 400 --optimizer=adamw --learning_rate=6e-5
short muon-1e-3 400
short plain 400 --optimizer=adamw --learning_rate=6e-4 '--groups=[]'
short eager 120 --optimizer=adamw --learning_rate=6e-4 --compile=False
short compiled 120 --optimizer=adamw --learning_rate=6e-4
step training python -m results.speed config/groups.py --dataset=wiki --max_iters="$ITERATIONS" \
    --warmup_iters=$((ITERATIONS < 60000 ? 200 : 2000)) --eval_interval=500 --eval_windows=64 \
    '--keep_iters=[0]' --save_interval=5000 --out_dir="$RUN" --resume
cp "$RUN/log.csv" "$RUN/eval.csv" results/gpu/
step geometry python geometry.py --out_dir="$RUN" --n_windows=8
second looped-1338 2504
second plain-1338 2504 '--groups=[]'
second equal-1338 7992 '--groups=[]'        # as many FLOPs as looped-1338
bench bench "$RUN" --n_loop=12 --n_windows=4 --n_prompts=2 --new_tokens=20 '--budgets=[1,2,4,8]' \
    "--rules=['norm_rel','kl','accel']" '--taus=[0.03,0.1,0.3,1.0]' '--drafts=[[2,12,4]]' \
    '--waves=[[8,1]]'
for compile in False True; do
    bench recorded-$compile out-gpu/looped-1338 --n_loop=12 --n_windows=2 --n_prompts=2 \
        --new_tokens=100 --compile=$compile '--budgets=[1,2,4,8]' "--rules=['norm_rel','accel']" \
        '--taus=[0.1,1.0]' '--drafts=[[2,12,4]]' '--waves=[[8,1]]'
    bench plain-recorded-$compile out-gpu/equal-1338 --n_loop=1 --n_windows=2 --n_prompts=2 \
        --new_tokens=100 --compile=$compile '--budgets=[1]' '--rules=[]' '--drafts=[]' '--waves=[]'
done
