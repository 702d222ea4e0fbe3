#!/usr/bin/env bash
# What text.md shows, measured with today's programs, which have no file of their own for it: for
# three seeds the loss and layers of each way to read, and the time of each way to write.
#     bash results/text.sh            a day of one core; what is there is not made again
# Checkpoints lie in out-results/; the CSVs are results/reading/NAME-SEED.csv, and
# results/writing/NAME-SEED.csv.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
. results/train.sh

RULES="--rules=['norm','norm_rel','kl','accel','accel_rel']"
for seed in $SEEDS; do
    for name in recipe random default calc hop; do
        trained $name-$seed
        measure results/reading/$name-$seed.csv $name-$seed "--cache=['exact','latest']" \
            --wake=False '--budgets=[1,2,3,4,5,6,7,8,10,12]' "$RULES" \
            '--taus=[1e-3,3e-3,0.01,0.03,0.1,0.2,0.3,0.5,1.0,2.0,3.0,5.0,10.0,13.0,20.0,30.0]' \
            --n_windows=64 --n_prompts=0
    done
    # drafts and waves as sample.py makes them, and others; 36 tokens, the first of which is not timed
    measure results/writing/default-$seed.csv default-$seed --cache=latest --prompt_tokens=12 \
        --new_tokens=36 --n_prompts=128 --n_windows=2 '--budgets=[3,4,5,6]' \
        "--rules=['norm','norm_rel','accel']" '--taus=[3e-3,0.01,0.03,0.1,1.0,10.0]' \
        '--drafts=[[1,4,4],[1,5,8],[1,6,4]]' '--waves=[[8,1],[16,1]]'
    measure results/writing/recipe-$seed.csv recipe-$seed --cache=latest --prompt_tokens=12 \
        --new_tokens=36 --n_prompts=128 --n_windows=2 '--budgets=[6,7,8,9,10,11]' \
        "--rules=['norm','norm_rel','accel']" '--taus=[1e-3,3e-3,0.01,0.03,0.1,1.0]' \
        '--drafts=[[3,9,4],[3,12,4],[3,10,8]]' '--waves=[[8,2],[8,3],[16,2]]'
done
