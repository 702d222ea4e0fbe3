"""
Long problems: how many answers are wrong, and is the exit rule to blame?

    python -m results.first_errors          pretrained/calc, four problems of 65,536 tokens
    python -m results.first_errors --out_dir=out-calc --length=8192 --dataset=calc:reset=0.0005

A wrong answer makes those behind it wrong, up to the next `=`. So what counts is the first wrong
answer of each chain, which begins at an `=`. It is looked at again in a piece of the problem, whose
first word is replaced by `=` and the right value, read with so many fixed loops that no exit rule
decides anything. If the model errs there, too, the rule is not to blame.

    x, y, guesses    words of a problem, right answers and the model's, (1, T)
"""
import os

import numpy as np
import torch

import data
from common.checkpoint import open_run
from common.configurator import configure
from common.errors import run
from common.files import write_csv
from exits import make_exit

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/calc'
dataset = 'calc:reset=0.0001'
length = 65536
seeds = [1337, 1, 2, 3]     # of the problems; 1337 is sample.py's
rule = 'accel'
tau = 1.0
damping = 0.0
before = 100                # words of a piece before a first error, and as many behind it
n_loop = 512                # fixed loops for a piece
path: str | None = None     # of a CSV, a row for each problem
# -------------------------------------------------------------------------------------------------

def first_errors(x, y, guesses, setters):
    """Where the first error of each chain is (N,). setters: the words that begin a chain."""
    chain = np.isin(x[0], setters).cumsum()
    wrong = np.flatnonzero((guesses != y)[0])
    _, firsts = np.unique(chain[wrong], return_index=True)
    return wrong[firsts]


def is_wrong_alone(model, x, y, place):
    """Does the model err at this place of the problem in a piece read with fixed loops?"""
    start = max(0, place - before)
    piece = x[:, start:place + before].copy()
    piece[0, 0] = y[0, start]           # `=v`, which sets the value
    logits, _ = model(torch.from_numpy(piece), n_loop=n_loop)
    return bool(logits[0, place - start].argmax() != y[0, place])


@torch.no_grad()
def main():
    model, checkpoint, *_ = open_run(out_dir, 'cpu', length=length, damping=damping)
    problems = data.examples_of(checkpoint, dataset)
    setters = [i for i, word in enumerate(problems.encoding.vocabulary) if word[0] == '=']
    rows = []
    for seed in seeds:
        x, y, depth = problems.make(np.random.default_rng(seed), 1, length)
        trace = []
        logits, _ = model(torch.from_numpy(x), n_loop=problems.task.budget(length),
                          exit=make_exit(rule, tau, wake=True), trace=trace)
        guesses = logits.argmax(-1).numpy()
        errors = first_errors(x, y, guesses, setters)
        evals = trace[0]['evals'].float()
        rows.append(dict(
            run=os.path.basename(out_dir), rule=rule, tau=tau, damping=damping, problem=dataset,
            tokens=length, seed=seed, deepest=depth.max(), wrong=(guesses != y).sum(),
            first_errors=len(errors),
            of_the_model=sum(is_wrong_alone(model, x, y, place) for place in errors),
            mean_evals=round(evals.mean().item(), 2), most_evals=int(evals.max()),
            loops=trace[0]['steps_used'].max().item()))
        print(', '.join(f'{name} {value}' for name, value in rows[-1].items()), flush=True)
        if path is not None:
            write_csv(rows, path)


if __name__ == '__main__':
    configure(globals())
    run(main)
