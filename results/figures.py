"""
The two figures of depth.md. results/depth.sh calls it:

    python -m results.figures       assets/deeper.png, assets/awake.png

The first is made of the CSVs in results/depth/, the second of the model in pretrained/calc.
"""
import csv
import glob
import os
import re

import numpy as np
import torch

from common import plots
from exits import make_exit
from model import GPT
from tasks import TASKS

FOLDER = 'results/depth'
PLAIN = {'plain10': '10 plain layers', 'plain18-window16': '18 plain layers'}
ASLEEP = 'Algorithm 1, sleeping'
WAITING = 'Algorithm 1,\nwaiting'
FIXED = 'the fewest\nfixed loops\nthat are right'
WORDS_AT = {ASLEEP: (250, 9.5), WAITING: (330, 110), FIXED: (19, 230)}     # beside the lines


def read_csv(path):
    with open(path, newline='', encoding='utf-8') as f:
        return list(csv.DictReader(f))


def deeper(path):
    """Two panels: how deep a few layers get, and what it costs per token."""
    figure, [[left, right]] = plots.panels(2, 5, 3.4)
    draw_right_answers(left)
    draw_costs(right)
    for axis in left.xaxis, right.xaxis, right.yaxis:
        axis.set_major_formatter('{x:g}')
        axis.set_minor_formatter('')
    plots.save(figure, path)


def draw_right_answers(ax):
    """Right answers over depth: one looped model at some loop counts, and plain models."""
    rows = read_csv(f'{FOLDER}/right/looped-1.csv')
    counts = [8, 32, 128, 256]
    for i, n_loop in enumerate(counts):
        of_count = [row for row in rows if int(row['loops']) == n_loop]
        draw_line(ax, of_count, f'{n_loop} loops', plots.shade(i, len(counts)), 'o-')
    for (name, words), style in zip(PLAIN.items(), ('s--', '^:')):
        draw_line(ax, read_csv(f'{FOLDER}/right/{name}-1.csv'), words, 'grey', style)
    ax.set(xlabel='depth of the answer, in operations', ylabel='% right', xscale='log',
           ylim=(0, 104), title='How deep: problems of 192 tokens')
    ax.legend(fontsize=8)


def draw_line(ax, rows, label, colour, style):
    """The share of right answers over depth, each column of depths at its middle."""
    rows = [row for row in rows if float(row['last'] or 0) > 0]
    middles = [(float(row['first']) + float(row['last'])) / 2 for row in rows]
    shares = [100 * float(row['accuracy']) for row in rows]
    ax.plot(middles, shares, style, color=colour, label=label, markersize=4)


def draw_costs(ax):
    """Loop steps per token over the deepest answer. A line is seed 1, dots are the others."""
    for seed in 1, 2, 3:
        for g, points in enumerate(costs(seed).values()):
            if seed == 1:
                ax.plot(*zip(*points), 'o-', color=plots.colour_of(g))
            elif points:
                ax.plot(*zip(*points), 'o', color=plots.colour_of(g), markersize=4)
    for g, (label, place) in enumerate(WORDS_AT.items()):
        ax.text(*place, label, color=plots.colour_of(g), fontsize=9)
    ax.set(xlabel='depth of the deepest answer, in operations', ylabel='loop steps per token',
           xscale='log', yscale='log', ylim=(8, 900), title='What it costs')


def costs(seed):
    """{label: [(the deepest answer, loop steps per token), ...]}, where all answers are right."""
    points = {ASLEEP: [], WAITING: [], FIXED: []}
    for path in sorted(glob.glob(f'{FOLDER}/rules/*-{seed}.csv')):
        name = os.path.basename(path)
        rows = [row for row in read_csv(path) if float(row['accuracy']) > 0.9999]
        for row in rows:
            if row['rule'] == 'accel' and float(row['tau']) == 1 and row['wake'] == 'True':
                point = float(row['deepest']), float(row['mean_evals'])
                if name.startswith('calc'):
                    points[ASLEEP].append(point)
                elif name.startswith('waiting'):
                    points[WAITING].append(point)
        fixed = [row for row in rows if row['kind'] == 'fixed loops']
        # one of them is the full budget; if it stands alone, no fewer loops were tried
        if name.startswith('calc') and len(fixed) > 1:
            fewest = min(fixed, key=lambda row: int(row['n_loop']))
            points[FIXED].append((float(fewest['deepest']), int(fewest['n_loop'])))
    longest = [f'long-2048-{seed}', f'long-8192-{seed}', f'long-65536-{seed}']
    if seed == 2:
        longest.append('long-8192-2-tau1')      # seed 2 trained again
    for name in longest:
        with open(f'{FOLDER}/{name}.txt', encoding='utf-8') as f:       # sample.py's words
            depth, steps = re.search(r'answer (\d+) .* computed (\S+) times', f.read()).groups()
        points[ASLEEP].append((float(depth), float(steps)))
    return {label: sorted(line) for label, line in points.items()}


@torch.no_grad()
def awake(path):
    """Who is awake in one problem: tokens (across) by loop steps (down)."""
    x, _, _ = TASKS['calc'](np.random.default_rng(1), 1, 192, reset=0.02)
    model = GPT.load('pretrained/calc', length=192)
    trace = []
    model(torch.from_numpy(x), n_loop=484, exit=make_exit('accel', 1.0, wake=True), trace=trace)
    diary = trace[0]['awake']                   # for each loop step the tokens that were awake
    picture = np.zeros((len(diary), 192))
    for k, tokens in enumerate(diary):
        picture[k, tokens] = 1
    figure, [[ax]] = plots.panels(1, 7, 4)
    ax.imshow(picture, cmap='magma', aspect='auto', interpolation='nearest',
              extent=(-0.5, 191.5, len(diary) + 0.5, 0.5))
    ax.set(xlabel='token', ylabel='loop step', title='Bright: computed in this step. Dark: asleep')
    plots.save(figure, path)


if __name__ == '__main__':
    deeper('assets/deeper.png')
    awake('assets/awake.png')
