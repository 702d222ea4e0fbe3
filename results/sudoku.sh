#!/usr/bin/env bash
# What sudoku.md shows: three trainings, their solved boards by loops and starts, ways to stop.
#     bash results/sudoku.sh          two and a half hours of one core; lib.sh says how to use many
#     LISTS=FOLDER bash results/sudoku.sh     also the public lists that lie in this folder
# -> results/sudoku.csv, results/sudoku_ways.csv, assets/sudoku.gif
set -euo pipefail
cd "$(dirname "$0")/.."
. results/lib.sh

# boards TABLE RUN FLAGS: solved boards of a run
boards() {
    [ -e "$OUT/$2.done" ] || return 0
    mkdir -p "$OUT/$1-$2"
    once "$1-$2" python -m results.sudoku --out_dir="$OUT/$2" --path="$OUT/$1-$2/sudoku.csv" \
        "${@:3}"
}

for seed in 1337 1 2; do
    run=sudoku-$seed
    train $run config/sudoku.py --seed=$seed
    boards nine $run "--kinds=['minimal','singles']" '--n_boards=[500,500]' --starts=32
    boards sixteen $run "--kinds=['16']" '--n_boards=[64]'
    if [ -n "${LISTS:-}" ]; then
        boards seventeen $run --file="$LISTS/puzzles2_17_clue" --most=1000 --starts=32
        boards norvig $run --file="$LISTS/top95.txt" --starts=32
    fi
done
boards small sudoku-1337 "--kinds=['4','6','12']" '--n_boards=[100,100,32]' --starts=1
DEEP="--starts=1 --loops=[512,1024]"
boards deep sudoku-1337 "--kinds=['16']" '--n_boards=[64]' $DEEP
if [ -n "${LISTS:-}" ]; then
    boards deep17 sudoku-1337 --file="$LISTS/puzzles2_17_clue" --most=1000 $DEEP
    HARDEST="$LISTS/puzzles5_forum_hardest_1905_11+"
    boards hardest sudoku-1337 --file="$HARDEST" --most=100
    boards rest17 sudoku-1337 --file="$LISTS/puzzles2_17_clue" --most=1000 "--ways=['rest']"
    boards rest95 sudoku-1337 --file="$LISTS/top95.txt" "--ways=['rest']"
    boards resthardest sudoku-1337 --file="$HARDEST" --most=1000 "--ways=['rest']"
fi
boards ways sudoku-1337 "--kinds=['minimal']" '--n_boards=[30]' \
    "--ways=['fixed','valid','rest','sleep']"
boards rest sudoku-1337 "--kinds=['minimal','singles']" '--n_boards=[1000,1000]' "--ways=['rest']"

set +f
collect sudoku "$OUT"/{nine,sixteen,small,deep,deep17,seventeen,norvig,hardest}-sudoku-*/sudoku.csv
collect sudoku_ways "$OUT"/{ways,rest,rest17,rest95,resthardest}-sudoku-*/sudoku.csv
[ -n "${LIST:-}" ] || python -m results.gif sudoku
