"""
Rows of the CSVs in results/, and lines of the tables that are made of them.

Not run by itself: the files that compute a block of results/README.md call it. A row is a dict with
numbers as floats; a mean is over seeds, ± is their standard deviation.
"""
import csv
import os

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
TEXT = ('group', 'from', 'to', 'budget', 'block')   # columns whose digits are names of layers


def number(text):
    """A cell of a CSV as a float if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def load(scale, folder=HERE, names=(), variant='main'):
    """The CSVs of a scale: {name: rows}; and the scale and the variant under those names."""
    t = dict(scale=scale, variant=variant)
    for name in names:
        with open(os.path.join(folder, scale, name + '.csv'), newline='') as f:
            rows = list(csv.DictReader(f))
        t[name] = [{key: text if key in TEXT else number(text) for key, text in row.items()}
                   for row in rows]
    return t


def pick(rows, **conditions):
    """The rows whose columns have these values."""
    return [row for row in rows if all(row[key] == value for key, value in conditions.items())]


def column(rows, key):
    return [row[key] for row in rows]


def distinct(rows, key):
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(column(rows, key)))


def at_checkpoint(rows, which=max):
    """The rows of each run's last (max) or first (min) checkpoint."""
    found = {}
    for row in rows:
        run = row['variant'], row['seed']
        found[run] = which(found.get(run, row['iteration']), row['iteration'])
    return [row for row in rows if row['iteration'] == found[row['variant'], row['seed']]]


def mean_std(values, digits=2):
    """'mean ± standard deviation', or the mean alone if there is one value."""
    values = np.array(values, dtype=float)
    text = f'{values.mean():.{digits}f}'
    if len(values) > 1:
        text += f' ± {values.std(ddof=1):.{digits}f}'
    return text


def lines(*cells):
    """A line of a Markdown table."""
    return '| ' + ' | '.join(map(str, cells)) + ' |'
