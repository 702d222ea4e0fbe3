#!/usr/bin/env bash
# What gpu.md shows: the CPU's results on a GPU, the speed of training, exit rules in time, geometry.
#     bash results/gpu.sh FOLDER          twenty minutes of an H100; what is there is not made again
# FOLDER has nanoGPT's train.bin and val.bin: GPT-2 tokens of Wikipedia. ITERATIONS=60000 before the
# command is the paper's whole run. Checkpoints lie in out-gpu/, the logs and CSVs in results/gpu/.
set -euo pipefail
FOLDER=$(realpath "${1:-.}")
cd "$(dirname "$0")/.."
mkdir -p out-gpu results/gpu
RUN=out-gpu/paper-${ITERATIONS:=1500}

# step NAME COMMAND: run it, unless its log is there
step() {
    local log=results/gpu/$1.log
    [ -e "$log" ] || {
        "${@:2}" |& tee out-gpu/log
        mv out-gpu/log "$log"
    }
}
# bench NAME FLAGS
bench() {
    step "$1" python bench.py --out_dir="$RUN" --n_loop=12 --cache=exact --wake=False \
        --n_windows=4 --n_prompts=2 --new_tokens=20 "${@:2}"
    cp "$RUN/bench.csv" "results/gpu/$1.csv"
}
[ -e data/wiki ] || python data.py wiki --path="$FOLDER" --tokenizer=gpt2
step device env CARD=cuda python -m pytest tests/test_device.py -k 'decoding or zoo_f'
step training python -m results.speed config/groups.py --dataset=wiki --max_iters="$ITERATIONS" \
    --warmup_iters=$((ITERATIONS < 60000 ? 200 : 2000)) --eval_interval=500 --eval_windows=64 \
    '--keep_iters=[0,300,1000]' --save_interval=5000 --out_dir="$RUN" --resume
cp "$RUN/log.csv" "$RUN/eval.csv" results/gpu/
step geometry python geometry.py --out_dir="$RUN" --n_windows=8
bench bench '--budgets=[1,2,4,8]' "--rules=['norm','norm_rel','kl','accel']" '--taus=[0.03,0.3,3.0]' \
    '--drafts=[[2,12,4]]' '--waves=[[8,1]]'
bench compiled --compile=True '--budgets=[4]' "--rules=['accel']" '--taus=[0.3]' \
    '--drafts=[[2,12,4]]' '--waves=[[8,1]]'
