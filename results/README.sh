#!/usr/bin/env bash
# The tables and the picture of README.md, measured with today's programs.
#     bash results/README.sh          a day of one core; what is there is not made again
# Checkpoints lie in out-results/. The CSVs are results/text/longer.csv and, in results/ledger/,
# bench-SEED.csv, compiled-SEED.csv (with torch.compile) and NAME-SEED.csv (the loss by loops).
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
. results/train.sh

# the loss against the work of training
for seed in $SEEDS; do
    for name in plain3 plain6 loop3 cheap plain3_long loop3_long plain3_longest loop3_longest \
        plain3_slow loop3_slow plain3_fast loop3_fast; do
        trained $name-$seed
    done
done
for name in plain6_long cheap_long; do
    trained $name-1337
done
python -m results.longer

trained loop3_all-1337
[ -e results/ledger/loop3_all-1337.csv ] ||
    cp out-results/loop3_all-1337/eval.csv results/ledger/loop3_all-1337.csv

for seed in $SEEDS; do
    for name in default recipe loop3 plain6 plain3 one_loop one_loop_zero; do
        trained $name-$seed
        [ -e results/ledger/$name-$seed.csv ] ||
            cp out-results/$name-$seed/eval.csv results/ledger/$name-$seed.csv
    done
    # texts of 37 bytes, the first of which is not timed
    flags=("--beside=['out-results/recipe-$seed','out-results/loop3-$seed','out-results/plain6-$seed','out-results/plain3-$seed']"
        --n_loop=12 --cache=latest "--rules=['norm_rel','accel']" '--drafts=[[1,4,4],[3,12,4]]'
        '--waves=[[8,1],[8,2]]' --prompt_tokens=12 --new_tokens=37)
    measure results/ledger/bench-$seed.csv default-$seed "${flags[@]}" --n_windows=128 \
        --n_prompts=128 '--budgets=[1,2,3,4,5,6,7,8]' \
        '--taus=[3e-3,0.01,0.03,0.1,0.3,1.0,3.0,10.0,13.0,20.0,30.0]'
    measure results/ledger/compiled-$seed.csv default-$seed "${flags[@]}" --n_windows=16 \
        --n_prompts=64 '--budgets=[3,4,6,8]' '--taus=[0.03,0.1,0.3,1.0,10.0]' --compile=True
done

# a shorter look at one seed, in ten minutes
for name in default loop3 plain6 plain3; do
    trained $name-1337
done
measure results/ledger/short-1337.csv default-1337 \
    "--beside=['out-results/loop3-1337','out-results/plain6-1337','out-results/plain3-1337']" \
    --n_loop=12 --cache=latest "--rules=['norm_rel','accel']" '--drafts=[[1,4,4]]' '--waves=[[8,1]]' \
    --prompt_tokens=12 --new_tokens=37 --n_windows=48 --n_prompts=48 '--budgets=[3,4,5,6]' \
    '--taus=[3e-3,0.03,0.3,10.0]'
