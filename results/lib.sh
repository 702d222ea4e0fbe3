# What the scripts of this folder share: each reads this file. A run is a folder of $OUT, and what
# has ended well is not done again. Variables before a script:
#     OUT=FOLDER      where the runs lie; out-results/ if it is not given
#     DEVICE=cuda     cpu if it is not given, on a machine with a GPU, too
#     LIST=1          print what is missing in place of doing it, one command per line. Measurements
#                     are in the list once their training has ended
# Many cores can do the list side by side:
#     LIST=1 bash results/text.sh | xargs -d '\n' -P 16 -I{} bash -c {}
set -f                              # [] in a flag is no pattern of file names
shopt -s nullglob                   # a pattern of `collect` without a file is nothing
OUT=${OUT:-out-results}
DEVICE=${DEVICE:-cpu}
mkdir -p "$OUT"
export OMP_NUM_THREADS=1

# the commit of the programs, `+` behind it if a file of them has been changed since
commit=$(git describe --always --dirty=+ --exclude='*' 2> /dev/null || true)

# once NAME COMMAND: run the command and keep what it prints in $OUT/NAME.log, and the commit in
# $OUT/NAME.done, from where collect.py takes it
once() {
    [ -e "$OUT/$1.done" ] && return
    if [ -n "${LIST:-}" ]; then
        printf '%q ' "${@:2}"
        echo "> $OUT/$1.log 2>&1 && echo $commit > $OUT/$1.done"
    else
        "${@:2}" 2>&1 | tee "$OUT/$1.log"
        echo "$commit" > "$OUT/$1.done"
    fi
}

# train RUN FLAGS: a run that was stopped is continued
train() {
    once "$1" python train.py "${@:2}" --device=$DEVICE --out_dir="$OUT/$1" --resume
}

# measure TABLE RUN FLAGS: bench.py, in a folder of its own, so that a run can have several tables
measure() {
    [ -e "$OUT/$2.done" ] || return 0
    mkdir -p "$OUT/$1-$2"
    cp -u "$OUT/$2/ckpt.pt" "$OUT/$1-$2"
    once "$1-$2" python bench.py "${@:3}" --device=$DEVICE --out_dir="$OUT/$1-$2"
}

# collect TABLE FILE...: results/TABLE.csv from the files of runs that are there
collect() {
    [ -n "${LIST:-}" ] || python -m results.collect "results/$1.csv" "${@:2}"
}
