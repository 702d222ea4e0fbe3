#!/usr/bin/env bash
# What only a GPU can show: the CPU's results on it, training speed, latency, and the paper's run.
#     while bash results/gpu.sh FOLDER; [ $? = 75 ]; do :; done
# FOLDER has nanoGPT's train.bin and val.bin, GPT-2 tokens of Wikipedia. A call ends with status 75
# after nine minutes; the next one continues. A step leaves STEP.done or STEP.failed, and is skipped
# from then on: remove the file to repeat it. Results, in files of less than 16 MB, are in OUT;
# checkpoints, 1.5 GB each, in WORK and PAPER. The paper's run: 40 minutes at 316 TFLOP/s.
set -uf
FOLDER=$(realpath "${1:-.}") && cd "$(dirname "$0")/.." || exit
OUT=${OUT:-out-gpu/results} WORK=${WORK:-out-gpu/speed} PAPER=${PAPER:-out-results/paper-1337}
DEVICE=${DEVICE:-cuda} DATASET=${DATASET:-wiki} LIMIT=${LIMIT:-480}    # seconds; then a step ends
STAGES=${STAGES:-1000 10000 30000 60000} COMPILE=${COMPILE:-False True}
TRAIN=${TRAIN:-} BENCH=${BENCH:-} GEOMETRY=${GEOMETRY:---n_windows=8}  # further flags
mkdir -p "$OUT" "$WORK" "$PAPER" && echo "results: $OUT; checkpoints: $WORK, $PAPER" || exit
step() {    # step NAME FOLDER COMMAND ...: run it once; copy what it wrote in FOLDER, if small
    local name=$1 folder=$2 log=$OUT/$1.log left=$((LIMIT - SECONDS)) status mark=$OUT/$1; shift 2
    [[ $name == train* ]] && mark=$folder/$name     # it stays with its checkpoint
    [ -e "$mark.done" ] && return; [ -e "$mark.failed" ] && return 1
    [ $left -gt $((LIMIT / 4)) ] || { echo 'time is up: run the same command again'; exit 75; }
    echo "$name" && touch "$mark.begun" && timeout -k 50 $left "$@" &>> "$log"; status=$?
    tail -n 4 "$log"; mkdir -p "$OUT/$name"
    find "$folder" -maxdepth 2 -newer "$mark.begun" -regex '.*\.\(csv\|png\)' -size -16M \
        -exec cp -t "$OUT/$name" {} +
    # 124 and 137: the time is up; a step that had all of it would never end, but a training does
    [[ $status =~ 124|137 && ($name == train* || $left -lt $((LIMIT - 20))) ]] && exit 75
    [ $status = 0 ] && touch "$mark.done" && return
    touch "$mark.failed"; echo "$name failed with status $status: see $log"; return 1
}
run() { step "$1" "$2" python "${@:3}" --out_dir="$2" --device="$DEVICE"; }
latency() { run "$1-compile-$2" "$WORK" bench.py config/bench_full.py --n_loop=12 --cache=latest \
    --drafts=[] --n_windows=8 --compile=$2 "${@:3}" $BENCH; }
MEASURED='import csv, runpy, statistics, sys, time, torch
sys.argv.pop(0)
run = runpy.run_path(sys.argv[0], run_name="__main__")
device, rows = torch.device(run["device"]), csv.DictReader(open(run["out_dir"] + "/log.csv"))
rows = [(float(row["tokens_per_s"]), float(row["tflops"])) for row in rows if row["tflops"]][2:]
rate, tflops = map(statistics.median, zip(*rows))   # without the first rows, which compile
n, memory = (8192, torch.cuda.max_memory_allocated()) if device.type == "cuda" else (256, 0)
x = torch.randn(n, n, device=device, dtype=torch.bfloat16)
marks = []
for _ in range(3):
    for _ in range(20): y = x @ x
    y[0, 0].item()      # waits for the device
    marks.append(time.perf_counter())
peak = 40 * n ** 3 / (marks[2] - marks[1]) / 1e12
print(f"{rate:.0f} tokens/s, {memory / 2 ** 30:.2f} GiB, {tflops:.4g} TFLOP/s, {tflops / peak:.3f} "
      f"of the {peak:.4g} of a product of two bfloat16 matrices of {n} rows")'

step device "$OUT" env CARD="$DEVICE" python -m pytest tests/test_device.py -k 'decoding or zoo_f'
[ -e "data/$DATASET/meta.json" ] ||
    step data "$OUT" python data.py "$DATASET" --path="$FOLDER" --tokenizer=gpt2
train="train.py config/groups.py --dataset=$DATASET --resume"
run train-speed "$WORK" -c "$MEASURED" $train --max_iters=200 --log_interval=10 --eval_loops=[12] \
    --keep_iters=[] $TRAIN && for c in $COMPILE; do
    latency fixed $c --budgets=[1,4] --rules=[] --waves=[]
    latency rules $c --budgets=[] --taus=[1e-9] --waves=[]      # no token exits
    latency waves $c --budgets=[] --taus=[0.1] --rules='["norm_rel"]'
done
for n in $STAGES; do
    run train-$n "$PAPER" $train --max_iters=$n --lr_decay_iters=${STAGES##* } $TRAIN || break
    run bench-$n "$PAPER" bench.py config/bench_full.py --cache=exact \
        --taus=[1e-5,1e-4,1e-3,1e-2,0.1,1.0] --n_prompts=4 --drafts=[] --waves=[] $BENCH
    run latest-$n "$PAPER" bench.py config/bench_full.py --cache=latest --taus=[0.1,1.0] \
        --n_prompts=4 $BENCH
    run geometry-$n "$PAPER" geometry.py $GEOMETRY
done
! find "$OUT" "$WORK" "$PAPER" -name '*.failed' | grep . && echo 'all steps are done'
