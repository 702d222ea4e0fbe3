#!/usr/bin/env bash
# What gpu.md shows: the CPU's results on a GPU, which optimizer learns, a training, plain layers
# beside it, decoding, recorded passes.
#     bash results/gpu.sh FOLDER      half an hour of an H100
# FOLDER has nanoGPT's train.bin and val.bin: GPT-2 tokens of Wikipedia. ITERATIONS=60000 before the
# command is the paper's whole run. -> results/gpu_losses.csv and results/gpu.csv
set -euo pipefail
FOLDER=$(realpath "${1:-.}")
cd "$(dirname "$0")/.."
DEVICE=cuda
. results/lib.sh
RUN=paper-${ITERATIONS:=2504}
[ -e data/wiki ] || ln -s "$FOLDER" data/wiki

# short RUN ITERATIONS FLAGS: a short training at a constant rate
short() {
    train $1 config/groups.py --dataset=wiki --warmup_iters=100 --lr_decay_iters=1000000 \
        --max_iters=$2 --eval_interval=10000 --eval_loops=[1,4,12] --keep_iters=[] "${@:3}"
}
# paper RUN ITERATIONS FLAGS: a longer one
paper() {
    train $1 config/groups.py --dataset=wiki --max_iters=$2 --eval_interval=500 --eval_windows=64 \
        --warmup_iters=$(($2 < 60000 ? 200 : 2000)) "${@:3}"
}
PLAIN='--groups=[] --seed=1338 --keep_iters=[]'

once device env CARD=cuda python -m pytest -q tests/test_device.py
short adamw-2e-4 400 --optimizer=adamw --learning_rate=2e-4
short adamw-6e-5 400 --optimizer=adamw --learning_rate=6e-5
short muon-1e-3 400
short adamw-6e-4-1500 1500 --optimizer=adamw --learning_rate=6e-4
short plain 400 --optimizer=adamw --learning_rate=6e-4 --groups=[]
short eager 120 --optimizer=adamw --learning_rate=6e-4 --compile=False
short compiled 120 --optimizer=adamw --learning_rate=6e-4
paper $RUN $ITERATIONS --keep_iters=[0]
once geometry python geometry.py --out_dir="$OUT/$RUN" --n_windows=8
paper looped-1338 2504 --seed=1338 --keep_iters=[]
paper plain-1338 2504 $PLAIN
paper equal-1338 7992 $PLAIN                # as many FLOPs as looped-1338
measure bench $RUN --n_loop=12 --n_windows=4 --n_prompts=2 --new_tokens=20 --budgets=[1,2,4,8] \
    "--rules=['norm_rel','kl','accel']" --taus=[0.03,0.1,0.3,1.0] \
    '--decoder=["drafts:loops=2,check=12","wave:width=8"]'
for compile in False True; do
    flags="--n_windows=2 --n_prompts=2 --new_tokens=100 --compile=$compile"
    measure recorded-$compile looped-1338 $flags --n_loop=12 --budgets=[1,2,4,8] \
        "--rules=['norm_rel','accel']" --taus=[0.1,1.0] \
        '--decoder=["drafts:loops=2,check=12","wave:width=8"]'
    measure recorded-$compile equal-1338 $flags
done

set +f
collect gpu_losses "$OUT"/*/eval.csv
collect gpu "$OUT"/{bench,recorded}-*/bench.csv
