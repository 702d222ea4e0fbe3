"""
The figures of the pages, from the CSVs of this folder.

    python -m results.figures       assets/deeper.png, extra.png
"""
from collections import Counter

from common import plots
from common.files import read_csv

ASLEEP = 'Algorithm 1, sleeping'
FIXED = 'the fewest\nfixed loops\nthat are right'
WORDS_AT = {ASLEEP: (250, 9.5), FIXED: (19, 200)}      # beside the lines

# depth.md -----------------------------------------------------------------------------------------

def deeper(path):
    """Two panels: how deep a few layers get, and what it costs per token."""
    figure, [[left, right]] = plots.panels(2, 5, 3.4)

    # right answers over depth: one looped model at some loop counts, and plain models
    rows = [row for row in read_csv('results/depth.csv') if row['data'] == 'calc-reset-0.02_192']
    counts = ['8', '32', '128', '256']
    for i, n_loop in enumerate(counts):
        of_count = [row for row in rows if (row['run'], row['loops']) == ('looped-1', n_loop)]
        draw_line(left, of_count, f'{n_loop} loops', plots.shade(i, len(counts)), 'o-')
    for name, layers, style in (('plain10-1', 10, 's--'), ('plain18-window16-1', 18, '^:')):
        of_run = [row for row in rows if row['run'] == name]
        draw_line(left, of_run, f'{layers} layers without loops', 'grey', style)
    left.set(xlabel='depth of the answer, in operations', ylabel='% right', xscale='log',
             ylim=(0, 104), title='How deep: problems of 192 tokens')
    left.legend(fontsize=8)

    # loop steps per token over the deepest answer; a line is seed 1, dots are the others
    for seed in 1, 2, 3:
        style, size = ('o-', 6) if seed == 1 else ('o', 4)
        for g, points in enumerate(costs(seed).values()):
            if points:
                right.plot(*zip(*points), style, color=plots.colour_of(g), markersize=size)
    for g, (label, place) in enumerate(WORDS_AT.items()):
        right.text(*place, label, color=plots.colour_of(g), fontsize=9)
    right.text(19, 620, 'small dots: other seeds', color='grey', fontsize=8)
    right.set(xlabel='depth of the deepest answer, in operations', ylabel='loop steps per token',
              xscale='log', yscale='log', ylim=(8, 900), title='What it costs')

    for axis in left.xaxis, right.xaxis, right.yaxis:
        axis.set_major_formatter('{x:g}')
        axis.set_minor_formatter('')
    plots.save(figure, path)


def draw_line(ax, rows, label, colour, style):
    """The share of right answers over depth, each column of depths at its middle."""
    rows = [row for row in rows if float(row['last'] or 0) > 0]
    middles = [(float(row['first']) + float(row['last'])) / 2 for row in rows]
    shares = [100 * float(row['accuracy']) for row in rows]
    ax.plot(middles, shares, style, color=colour, label=label, markersize=4)


def costs(seed):
    """{label: [(the deepest answer, loop steps per token), ...]}, where all answers are right."""
    points = {ASLEEP: [], FIXED: []}
    fewest = {}
    for row in read_csv('results/rules.csv'):
        kind, _, run = row['run'].partition('-')
        is_whole = float(row['accuracy']) >= 0.9999
        if kind != 'calc' or not run.endswith(f'looped-{seed}') or not is_whole:
            continue
        deepest = float(row['deepest'])
        if (row['rule'], row['tau'], row['wake']) == ('accel', '1', 'True'):
            points[ASLEEP].append((deepest, float(row['mean_evals'])))
        if row['kind'] == 'fixed loops':
            fewest.setdefault(deepest, []).append(int(row['n_loop']))
    # one of them is the full budget; if it stands alone, no fewer loops were enough
    points[FIXED] = [(deepest, min(counts)) for deepest, counts in fewest.items()
                     if len(counts) > 1]
    for row in read_csv('results/long.csv'):
        settings = row['rule'], row['tau'], row['damping'], row['seed'], row['wrong']
        if settings == ('accel', '1', '0', '1337', '0') and row['run'] == f'looped-{seed}':
            points[ASLEEP].append((float(row['deepest']), float(row['mean_evals'])))
    return {label: sorted(line) for label, line in points.items()}


# extra.md -----------------------------------------------------------------------------------------

def extra(path):
    """Two panels: right answers of each training with more loops than it had."""
    labels, right = Counter(), Counter()        # of a run at a loop count
    for row in read_csv('results/extra.csv'):
        place = row['run'], int(row['loops'])
        labels[place] += int(row['labels'])
        right[place] += int(row['labels']) * float(row['accuracy'])
    figure, [axes] = plots.panels(2, 5, 3.2)
    for ax, kind, title in zip(axes, ('boards', 'mazes'), ('Boards of 6 x 6', 'Mazes of 7 x 7')):
        for run in dict.fromkeys(run for run, _ in labels if run.startswith(kind)):
            counts = sorted(n for name, n in labels if name == run)
            shares = [100 * right[run, n] / labels[run, n] for n in counts]
            ax.plot([n / counts[0] for n in counts], shares, '.-', lw=0.8,
                    color=plots.colour_of('fixed' in run))
        ax.set(title=title, xlabel='loops, over those of training', ylabel='% right')
        ax.set_xscale('log', base=2)
        ax.xaxis.set_major_formatter('{x:g}')
    axes[0].text(1.7, 98.5, 'blue: random numbers in training, orange: fixed', fontsize=8)
    plots.save(figure, path)


if __name__ == '__main__':
    deeper('assets/deeper.png')
    extra('assets/extra.png')
