"""
Is rest a sign of a right answer? Problems asleep by an exit rule, at several thresholds.

    python -m results.resting --out_dir=pretrained/calc --dataset=calc:reset=0.01 --length=192
    python -m results.resting --out_dir=pretrained/sudoku --length=729 --n_problems=20

A problem has come to rest if all its tokens fall asleep before the loop budget ends; its answer is
right if no label is wrong. A row says how many problems are right, rest, and do both.
"""
import numpy as np
import torch

import tasks
from common.checkpoint import open_run
from common.configurator import configure
from common.errors import run
from common.files import write_csv
from common.terminal import print_rows
from exits import make_exit

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/calc'
dataset: str | None = None      # the task with other knobs; None = that of the training
length: int | None = None       # tokens of a problem; None = the model's block_size
n_problems = 64
rule = 'norm'
taus = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
path: str | None = None         # of the CSV; None = resting.csv in the folder of the run's results
# -------------------------------------------------------------------------------------------------


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    model, checkpoint, _, folder = open_run(out_dir, 'cpu', length=length, damping=damping)
    problems = tasks.problems_of(checkpoint, dataset)
    T = length or model.config.block_size
    x, y, _ = problems.make(np.random.default_rng(5), n_problems, T)
    budget = problems.task.budget(T)
    rows = []
    for tau in taus:
        right, rests = np.zeros((2, n_problems), dtype=bool)
        evals = 0.0
        for i, problem in enumerate(torch.from_numpy(x)):
            trace = []
            logits, _ = model(problem[None], n_loop=budget, exit=make_exit(rule, tau, wake=True),
                              trace=trace)
            right[i] = (logits[0].argmax(-1).numpy() == y[i])[y[i] != tasks.NOT_ASKED].all()
            # the last step has at least one token awake, so a shorter run ended with all asleep
            rests[i] = len(trace[0]['awake']) < budget
            evals += trace[0]['evals'].double().mean().item() / n_problems
        rows.append(dict(problem=dataset or checkpoint['config']['dataset'], tokens=T,
                         damping=model.config.damping, rule=rule, tau=tau,
                         problems=n_problems, right=right.sum(), rested=rests.sum(),
                         rested_right=(rests & right).sum(), loop_steps=round(evals, 2)))
        write_csv(rows, path or f'{folder}/resting.csv')
    print_rows(out_dir, rows, {name: '' for name in rows[-1]})


if __name__ == '__main__':
    configure(globals())
    run(main)
