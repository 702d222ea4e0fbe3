"""
The held-out loss against the work of training, for layers with and without loops.

    python -m results.longer        results/text/longer.csv and assets/longer.png

README.sh calls it. It reads the runs of train.sh in out-results/; rows of runs that are not there
stay. FLOPs of a run: those of one iteration, the mean over the rows of log.csv, times its
iterations.
"""
import ast
import csv
import glob
import os
import re

import numpy as np

from common import plots
from common.files import write_csv

# the first part of a run's name -> its words and the loops at which it is evaluated
MODELS = {'plain3': ('three plain layers', 1), 'plain6': ('six plain layers', 1),
          'loop3': ('three layers, one loops', 8),
          'cheap': ('the same, always two loops', 2)}
ITERATIONS = {'': 1500, 'long': 4500, 'longest': 13500, 'slow': 1500, 'fast': 1500}
RATES = {'slow': 2.5e-3, 'fast': 1e-2}      # elsewhere it is 5e-3
PATH = 'results/text/longer.csv'


def row_of(folder):
    """The row of a run; None if it is not one of these, or has not ended."""
    name, seed = os.path.basename(folder).rsplit('-', 1)
    model, _, variant = name.partition('_')
    if model not in MODELS or variant not in ITERATIONS or not os.path.exists(f'{folder}/eval.csv'):
        return None
    words, loops = MODELS[model]
    with open(f'{folder}/eval.csv', newline='') as file:
        loss, = (float(row['loss']) for row in csv.DictReader(file) if int(row['loops']) == loops)
    with open(f'{folder}/log.csv', newline='') as file:
        work = [float(row['tflops']) * float(row['dt_ms']) / 1e3
                for row in csv.DictReader(file) if row['tflops'] and row['dt_ms']]
    teraflops = np.mean(work) * ITERATIONS[variant]
    return dict(model=words, seed=int(seed), iterations=ITERATIONS[variant],
                learning_rate=RATES.get(variant, 5e-3), loops=loops,
                teraflops=round(teraflops, 1), loss=round(loss, 4))


def draw(rows, path):
    """A line for each model, the mean over its seeds, at the rate that all have."""
    figure, [[ax]] = plots.panels(1, 6, 3.6)
    for g, (words, _) in enumerate(MODELS.values()):
        points = []
        for n in sorted({*ITERATIONS.values()}):
            of_n = [row for row in rows if row['model'] == words and row['iterations'] == n
                    and row['learning_rate'] == 5e-3]
            if of_n:
                work = np.mean([row['teraflops'] for row in of_n])
                points.append((work, np.mean([row['loss'] for row in of_n])))
        if points:
            ax.plot(*zip(*points), 'o-', color=plots.colour_of(g), label=words)
    ax.set(xlabel='FLOPs of training, $10^{12}$', ylabel='held-out nats per byte', xscale='log',
           title='Text: loss against work')
    ax.set_xticks([3, 5, 10, 20, 50], labels=['3', '5', '10', '20', '50'])
    ax.xaxis.set_minor_formatter('')
    ax.legend(fontsize=8)
    plots.save(figure, path)


def key_of(row):
    return row['model'], row['learning_rate'], row['iterations'], row['seed']


if __name__ == '__main__':
    with open(PATH, newline='') as file:
        rows = [{name: value if name == 'model' else ast.literal_eval(value)
                 for name, value in row.items()} for row in csv.DictReader(file)]
    # a run that is there replaces the row of an earlier one
    folders = sorted(glob.glob('out-results/*-*'))
    found = [row_of(folder) for folder in folders if re.search(r'-\d+$', folder)]
    merged = {key_of(row): row for row in [*rows, *filter(None, found)]}
    rows = [merged[key] for key in sorted(merged)]
    write_csv(rows, PATH)
    draw(rows, 'assets/longer.png')
    print(f'{PATH}: {len(rows)} runs; assets/longer.png')
