# The trainings that claims.sh, text.sh and README.sh share; they read this file.
# Checkpoints lie in out-results/NAME-SEED, and what has been trained is not trained again.
SEEDS='1 2 1337'
CHEAP='--n_layer=3 --groups=[[1]] --mean_recurrence=1 --loop_draw=fixed --x0=e --bptt_k=2'

# train NAME-SEED FLAGS: one run; a run that was stopped is continued
train() {
    [ -e "out-results/$1/eval.csv" ] ||
        python train.py "${@:2}" --seed="${1##*-}" --out_dir="out-results/$1" --resume
}

# trained NAME-SEED: the same, by name
trained() {
    case ${1%-*} in
        recipe) train "$1" config/recipe.py ;;
        random) train "$1" config/recipe.py --adapter_init=random ;;
        default) train "$1" ;;
        loop3) train "$1" --n_layer=3 '--groups=[[1]]' ;;
        plain3) train "$1" --n_layer=3 '--groups=[]' ;;
        # all gradients of two loops, and no noise: the least that a loop can cost
        cheap) train "$1" $CHEAP ;;
        # a loss after each loop that has gradients
        loop3_all) train "$1" --n_layer=3 '--groups=[[1]]' --loss_at=all ;;
        # three and nine times as long
        loop3_long) train "$1" --n_layer=3 '--groups=[[1]]' --max_iters=4500 ;;
        plain3_long) train "$1" --n_layer=3 '--groups=[]' --max_iters=4500 ;;
        plain6_long) train "$1" '--groups=[]' --max_iters=4500 ;;
        cheap_long) train "$1" $CHEAP --max_iters=4500 ;;
        loop3_longest) train "$1" --n_layer=3 '--groups=[[1]]' --max_iters=13500 ;;
        plain3_longest) train "$1" --n_layer=3 '--groups=[]' --max_iters=13500 ;;
        # half and twice the learning rate
        loop3_slow) train "$1" --n_layer=3 '--groups=[[1]]' --learning_rate=2.5e-3 ;;
        plain3_slow) train "$1" --n_layer=3 '--groups=[]' --learning_rate=2.5e-3 ;;
        loop3_fast) train "$1" --n_layer=3 '--groups=[[1]]' --learning_rate=1e-2 ;;
        plain3_fast) train "$1" --n_layer=3 '--groups=[]' --learning_rate=1e-2 ;;
        one_loop) train "$1" --mean_recurrence=0.5 --loop_draw=fixed ;;
        one_loop_zero) train "$1" --mean_recurrence=0.5 --loop_draw=fixed --x0=zero ;;
        plain6) train "$1" '--groups=[]' ;;
        calc) train "$1" config/calc.py --n_layer=5 '--groups=[[1],[2,3]]' --window=None \
            --block_size=24 --batch_size=64 --max_iters=700 ;;
        hop) train "$1" config/calc.py config/hop.py --n_layer=5 '--groups=[[1],[2,3]]' \
            --max_iters=1000 ;;
        medium) train "$1" config/medium.py ;;
        medium_plain) train "$1" config/medium.py '--groups=[]' --max_iters=2900 ;;
    esac
}

# measure CSV NAME-SEED FLAGS: bench.py on a run, unless the CSV is there
measure() {
    [ -e "$1" ] || {
        python bench.py --out_dir="out-results/$2" "${@:3}"
        cp "out-results/$2/bench.csv" "$1"
    }
}
