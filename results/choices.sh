#!/usr/bin/env bash
# What choices.md says of noise in every loop step: *recipe* with one open choice changed, for 400
# iterations. Figure 5 has the cosines of successive steps.
#     bash results/choices.sh         half an hour of one core; what is there is not made again
# Checkpoints lie in out-results/; the CSVs are results/choices/NAME-1337.csv.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
. results/train.sh

# changed NAME FLAGS
changed() {
    [ -e results/choices/$1-1337.csv ] || {
        train $1-1337 config/recipe.py --max_iters=400 '--eval_loops=[4]' '--keep_iters=[]' "${@:2}"
        python geometry.py --out_dir=out-results/$1-1337
        cp out-results/$1-1337/figures/figure_5.csv results/choices/$1-1337.csv
    }
}
changed as_it_is
changed step_noise --step_noise=0.1
changed addition --injection=add
changed x0_zero --x0=zero
changed x0_e --x0=e
changed norm_after --norm_inside=False
changed bptt_1 --bptt_k=1
