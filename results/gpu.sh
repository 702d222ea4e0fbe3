#!/usr/bin/env bash
# What only a GPU can show: the CPU's results on it, training speed, latency, and the paper's run.
#
#   while bash results/gpu.sh FOLDER; [ $? = 75 ]; do :; done
#
# FOLDER has nanoGPT's train.bin and val.bin, GPT-2 tokens of Wikipedia. A call ends with status 75
# after nine minutes; the next one continues. A step that is done has a file STEP.done, and one that
# failed STEP.failed, and both are skipped: remove the file to repeat it. Results, in files of less
# than 16 MB, are in OUT. Checkpoints, 1.5 GB each, are outside, in WORK and PAPER.
# The paper's run takes 7.6e17 FLOP, 40 minutes at 316 TFLOP/s; results.run can measure it too.
set -uf
FOLDER=$(realpath "${1:-.}") && cd "$(dirname "$0")/.." || exit
OUT=${OUT:-out-gpu/results} WORK=${WORK:-out-gpu} PAPER=${PAPER:-out-results/paper-1337}
DEVICE=${DEVICE:-cuda} DATASET=${DATASET:-wiki} LIMIT=${LIMIT:-480}    # seconds; then a step ends
STAGES=${STAGES:-1000 10000 30000 60000} COMPILE=${COMPILE:-False True}
TRAIN=${TRAIN:-} BENCH=${BENCH:-} GEOMETRY=${GEOMETRY:---n_windows=8}      # further flags
mkdir -p "$OUT" "$WORK/speed" "$PAPER" && echo "results: $OUT; checkpoints: $WORK, $PAPER"

step() {    # step NAME FOLDER COMMAND ...: run it once; copy what is new and small in FOLDER
    local name=$1 folder=$2 log=$OUT/$1.log left=$((LIMIT - SECONDS)) status mark=$OUT/$1; shift 2
    [[ $name == train* ]] && mark=$folder/$name     # it goes with its checkpoint
    [ -e "$mark.done" ] && return; [ -e "$mark.failed" ] && return 1
    [ $left -gt $((LIMIT / 4)) ] || { echo 'time is up: run the same command again'; exit 75; }
    echo "$name" && touch "$mark.begun" && sleep 0.1
    timeout -k 50 $left "$@" &>> "$log"; status=$?
    tail -n 4 "$log"
    mkdir -p "$OUT/$name" && find "$folder" -maxdepth 2 -newer "$mark.begun" -size -16M \
        -regex '.*\.\(csv\|png\)' ! -path "$OUT/*" -exec cp -t "$OUT/$name" {} +
    case $status in     # 124 and 137: it ran out of time, of a whole call unless it can resume
        0) touch "$mark.done" ;;
        124|137) [[ $name == train* || $left -lt $((LIMIT - 20)) ]] && exit 75 ;;&
        *) touch "$mark.failed"; echo "$name failed with status $status: see $log"; return 1 ;;
    esac
}
MEASURED='import csv, runpy, statistics, sys, torch
from bench import ms_between, now
sys.argv.pop(0)
done = runpy.run_path(sys.argv[0], run_name="__main__")
dev = torch.device(done["device"])
n, memory = (8192, torch.cuda.max_memory_allocated()) if dev.type == "cuda" else (256, 0)
with open(done["out_dir"] + "/log.csv") as f:       # the first rows, which compile, are left out
    rows = [row for row in csv.DictReader(f) if row["tflops"]][2:]
rate, tflops = (statistics.median(float(row[k]) for row in rows) for k in ("tokens_per_s", "tflops"))
x = torch.randn(n, n, device=dev, dtype=torch.bfloat16)
x @ x, x @ x; begin = now(dev); [x @ x for _ in range(20)]; ms = ms_between(begin, now(dev))
peak = 20 * 2 * n ** 3 / ms / 1e9
print(f"{rate:.0f} tokens/s, {memory / 2 ** 30:.2f} GiB, {tflops:.4g} TFLOP/s, "
      f"{tflops / peak:.3f} of the {peak:.4g} of a product of two bfloat16 matrices of {n} rows")'

step device "$OUT" env CARD="$DEVICE" python -m pytest -q tests/test_device.py -k 'decoding or model_of'
[ -e "data/$DATASET/meta.json" ] || step data "$OUT" python data.py "$DATASET" --path="$FOLDER" --tokenizer=gpt2
train="train.py config/groups.py --dataset=$DATASET --device=$DEVICE --resume"
step train-speed "$WORK/speed" python -c "$MEASURED" $train --out_dir="$WORK/speed" --max_iters=200 \
    --log_interval=10 --eval_loops=[12] --keep_iters=[] $TRAIN && for compile in $COMPILE; do
    latency() { step "latency-$1-compile-$compile" "$WORK/speed" python bench.py --taus=[] --drafts=[] \
        --out_dir="$WORK/speed" --device="$DEVICE" --compile="$compile" --cache=latest --n_loop=12 \
        --least_tau=0 --n_windows=4 --n_prompts=2 --timed_tokens=16 --rounds=3 "${@:2}" $BENCH; }
    latency fixed --budgets=[1,4] --rules=[] --waves=[]
    latency rules --budgets=[] --rules='["norm","kl","accel"]' --more_taus=[1e-9] --waves=[]
    latency waves --budgets=[] --rules='["norm_rel"]' --more_taus=[0.1] --waves=[[8,1],[8,2]]
done
for n in $STAGES; do
    step "train-$n" "$PAPER" python $train --out_dir="$PAPER" --max_iters="$n" \
        --lr_decay_iters="${STAGES##* }" $TRAIN || break
    step "bench-$n" "$PAPER" python bench.py --out_dir="$PAPER" --device="$DEVICE" --more_taus=[0.1,1.0] \
        --rules='["norm","norm_rel","kl","accel"]' --n_prompts=4 $BENCH
    step "geometry-$n" "$PAPER" python geometry.py --out_dir="$PAPER" --device="$DEVICE" $GEOMETRY
done
find "$OUT" "$WORK" "$PAPER" -name '*.failed' | sort | grep . && exit 1 || echo 'all steps are done'
