"""
What all figures share, the two GIFs, and the figures of bench.py and train.py. Nothing else imports
matplotlib.

Not run by itself. A function takes numbers, and writes a PNG or a GIF and the same numbers as CSV
beside it, unless they are in log.csv or bench.csv.

    path        of the picture; the CSV has the same name
    rows        dicts, one for each row of a CSV
"""
import io
import os
from contextlib import suppress
from itertools import cycle

import numpy as np

from common.files import new_file, write_csv

# matplotlib refuses to load if MPLBACKEND, which notebooks set, names a backend that is not
# installed; figures that become files need none
backend = os.environ.pop('MPLBACKEND', None)
import matplotlib  # noqa: E402
from matplotlib import colormaps  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402
from PIL import Image  # noqa: E402

if backend is not None:
    os.environ['MPLBACKEND'] = backend
    with suppress(ValueError):
        matplotlib.rcParams['backend'] = backend        # the notebook's own figures

# Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')
MARKERS = 'o^sDvXP<>'


def colour_of(g):
    return COLOURS[g % len(COLOURS)]


def shade(i, n):
    """Colour of checkpoint i of n, from light to dark, so that a print in grey keeps the order."""
    return colormaps['viridis_r'](0.1 + 0.9 * i / max(1, n - 1))


def title(group):
    """[4] -> 'layer 4', [5, 6] -> 'layers 5-6'."""
    return ('layers ' if len(group) > 1 else 'layer ') + '-'.join(map(str, group))


def panels(columns, width, height, rows=1, **sharing):
    """
    A grid of panels, each width x height inches -> (figure, axes (rows, columns)). sharing: of the
    axes, see matplotlib's subplots.
    """
    figure = Figure(figsize=(columns * width, rows * height))
    return figure, figure.subplots(rows, columns, squeeze=False, **sharing)


def save(figure, path, header=None, table=None):
    """Write the figure to `path` and, given a header, its numbers to the CSV beside it."""
    with new_file(path, 'wb') as f:
        figure.savefig(f, format='png', dpi=110, bbox_inches='tight')
    if header is not None:
        save_numbers([dict(zip(header, row)) for row in table], path, header)


def save_numbers(rows, path, columns=None):
    """rows -> the CSV beside the picture; columns: see write_csv."""
    write_csv(rows, os.path.splitext(path)[0] + '.csv', columns)


def movie(size, draw, frames, rows, path):
    """
    A GIF of 8 seconds that repeats, and its numbers: draw(figure, frame) for each frame.

    size: in inches of 100 pixels. The last frame is held.
    """
    save_numbers(rows, path)
    figure = Figure(figsize=size, layout='constrained')
    images = []
    for frame in frames:
        figure.clear()
        draw(figure, frame)
        png = io.BytesIO()
        figure.savefig(png, format='png', dpi=100)
        images.append(Image.open(png).convert('RGB'))
    images += images[-1:] * 5
    with new_file(path, 'wb') as f:
        images[0].save(f, format='GIF', save_all=True, append_images=images[1:], loop=0,
                       duration=8000 / len(images))


# geometry.py: the path of a token -----------------------------------------------------------------

def draw_path(ax, so_far, whole, groups):
    """A token's path so far, and a circle at its end in each group; both: (K, 2) for each group."""
    points = np.concatenate(whole)
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    square(ax, middle, 1.5 * np.abs(points - middle).max())
    for g, (group, points) in enumerate(zip(groups, whole)):
        end = points[-1]
        ax.plot(*end, 'o', ms=16, mfc='none', mec=colour_of(g))
        above = end[1] > middle[1]
        ax.annotate(title(group), end, (0, 12 if above else -22), textcoords='offset points',
                    ha='center', size=11, color=colour_of(g))
    for g, points in enumerate(so_far):
        if g:                           # the hand-off
            ax.annotate('', points[0], so_far[g - 1][-1], arrowprops=dict(
                arrowstyle='-|>', color='0.2', lw=1.8, shrinkA=0, shrinkB=0))
        ax.plot(*points.T, color=colour_of(g), lw=2)
        ax.plot(*points[-1], 'o', ms=7, color=colour_of(g))


def draw_zoom(ax, outer, points, whole, g, note):
    """
    The loop steps of group g as far as they have come, points (k, 2) of whole (K, 2): magnified so
    that step 1 may lie outside, beside a panel `outer` of the same size that shows the whole path.
    note: text for below. -> the points that were drawn.
    """
    square(ax, whole[-1], 1.2 * np.abs(whole[1:] - whole[-1]).max())
    ax.set_xlabel(f'{outer.viewLim.width / ax.viewLim.width:.0f} times larger{note}')
    ax.plot(*points.T, color=colour_of(g), lw=1.6)
    ax.spines[:].set(color=colour_of(g), lw=2)
    return ax.scatter(*points.T, s=60, c=range(1, len(points) + 1), norm='log', vmin=1, zorder=3,
                      vmax=len(whole), cmap='viridis_r', edgecolors='0.2', lw=0.6)


def square(ax, middle, half):
    """Axes of equal scale without ticks, `half` to each side of the point in the middle."""
    x, y = map(float, middle)
    half = max(float(half), 1e-9)
    ax.set(xlim=(x - half, x + half), ylim=(y - half, y + half), xticks=[], yticks=[],
           aspect='equal')


def two_scales(rows, whole, groups, text, path):
    """
    A GIF of a token on its way, step by step: its path, the loop steps of the group it is in
    magnified, and the likeliest next tokens.

    rows: for each loop step its group, token, k, pc1, pc2, length, and of the likeliest tokens
    text_1, text_2, ... and p_1, p_2, ... whole: for each group the token's points (K, 2). text:
    what it reads.
    """
    n = sum(column.startswith('text_') for column in rows[0])       # likeliest tokens
    jumps = [row['length'] for row in rows if row['k'] == 1]        # the first step in each group

    def draw(figure, row):
        g = row['group']
        k = row['k']
        names = [row[f'text_{i + 1}'] for i in range(n)]
        p = [row[f'p_{i + 1}'] for i in range(n)]
        colour = colour_of(g)
        so_far = whole[g][:k]
        top, bottom = figure.subfigures(2, 1, height_ratios=(3.6, 1.4))
        top.suptitle(f'The model reads "{text[-40:]}" and expects {names[0]!r}', parse_math=False)

        # the path, and the loop steps of the group magnified; what moves now has the bold title
        ax, inset = top.subplots(1, 2)
        draw_path(ax, [*whole[:g], so_far], whole, groups)
        note = f", length {row['length']:.2g}" if k > 1 else ' may lie outside'
        draw_zoom(inset, ax, so_far, whole[g], g, f'; loop step {k}{note}')
        ax.indicate_inset(inset_ax=inset, edgecolor=colour, alpha=1)
        jumping = g > 0 and k == 1
        ax.set_title('between groups of layers: large jumps',
                     weight='bold' if jumping else 'normal')
        ax.set_xlabel(f'length of the jump: {jumps[g]:.1f}' if g else ' ')
        inset.set_title(f'inside {title(groups[g])}: small loop steps',
                        weight='bold' if k > 1 else 'normal')

        # the likeliest next tokens
        bottom.supxlabel('The token is the one of its window whose prediction gains most by loops.',
                         fontsize=8, color='0.4')
        bars = bottom.subplots()
        bars.bar_label(bars.barh(range(n), p, color=colour), [f'{share:.0%}' for share in p])
        bars.set_yticks(range(n), map(repr, names), parse_math=False)
        bars.set(xlim=(0, 1.1), xticks=[], title='the likeliest next tokens at this step')
        bars.invert_yaxis()
        bars.spines[['top', 'right', 'bottom']].set_visible(False)

    # a jump is shown three times as long as a loop step
    frames = [row for row in rows for _ in range(3 if row['k'] == 1 else 1)]
    movie((8, 5), draw, frames, rows, path)


# decode/wave.py -----------------------------------------------------------------------------------

def wave(passes, start, text_of, steps, path):
    """
    A GIF of a wave, pass by pass: what each token predicts, coloured by its loop steps since its
    input last changed. Framed: committed. Underlined: it predicted something else before.

    passes: see decode.wave.Wave, trace. start: the prompt. text_of[token]. steps: loop steps of a
    pass.
    """
    first = passes[0]['position']
    start += text_of[passes[0]['inputs'][0]]        # known before the first pass
    rows = []
    said = {}                                       # position: the last prediction
    for n, of_pass in enumerate(passes, start=1):
        for i, (token, age) in enumerate(zip(of_pass['tokens'], of_pass['age'])):
            at = of_pass['position'] - first + i
            rows.append({'pass': n, 'position': at, 'text': text_of[token],
                         'loop_steps': age * steps, 'committed': int(i < of_pass['leave']),
                         'revised': int(said.get(at, token) != token)})
            said[at] = token
    end = max(row['position'] for row in rows)
    most = max(row['loop_steps'] for row in rows)

    def draw(figure, n):
        """The first n passes."""
        ax = figure.subplots()
        shown = [row for row in rows if row['pass'] <= n]
        cells = ax.scatter(
            [row['position'] for row in shown], [row['pass'] for row in shown], s=180, marker='s',
            c=[row['loop_steps'] for row in shown], norm='log', vmin=1, vmax=most, lw=2,
            cmap='viridis_r', edgecolors=[COLOURS[1] if row['committed'] else 'none'
                                          for row in shown])
        for row in shown:
            label = row['text'].replace(' ', '·') + ('\u0332' if row['revised'] else '')
            light = row['loop_steps'] <= most ** 0.5    # the lighter half of a logarithmic scale
            ax.annotate(label, (row['position'], row['pass']), parse_math=False, ha='center',
                        va='center', color='black' if light else 'white')
        figure.colorbar(cells, label='loop steps', shrink=0.5, ticks=[1, 2, 4, 8, 16, 32],
                        format='{x:.0f}').minorticks_off()
        ax.set(xlim=(-1, end + 1), ylim=(len(passes) + 1, 0), xlabel='position in the text',
               ylabel='pass through the model')
        text = ''.join(row['text'] for row in shown if row['committed'])
        ax.set_title(f'framed: committed. "{start}{text}"', parse_math=False)
        ax.spines[:].set_visible(False)

    movie((8, 7), draw, range(1, len(passes) + 1), rows, path)


# bench.py: the numbers are in bench.csv -----------------------------------------------------------

def grouped(rows, column):
    """{value: the rows that have it in this column}, all in their order."""
    values = dict.fromkeys(row[column] for row in rows)
    return {value: [row for row in rows if row[column] == value] for value in values}


def figure_4(rows, path):
    """
    Fig. 4: costs and quality of each rule against tau. A line of panels for each run, cache policy
    and `wake`. rows: those of exit rules in bench.csv.
    """
    columns = dict(ms_per_token='ms per token', ppl='perplexity', ce='cross-entropy (nats)')
    names = distinct_names(row['run'] for row in rows)
    rows_of = {}            # panel title: its rows
    for row in rows:
        words = [names[row['run']]] if len(names) > 1 else []
        words.append(row['cache'])
        if row['wake']:
            words.append('wake')
        rows_of.setdefault(', '.join(words), []).append(row)
    rules = list(grouped(rows, 'rule'))
    line_of = {}            # rule: one of its lines, for the legend
    figure, grid = panels(3, 4, 3, rows=len(rows_of), sharex=True, sharey='col')
    for axes, (words, of_panels) in zip(grid, rows_of.items()):
        for ax, (column, label) in zip(axes, columns.items()):
            for rule, points in grouped(of_panels, 'rule').items():
                i = rules.index(rule)
                line_of[rule], = ax.plot(
                    [row['tau'] for row in points], [row[column] for row in points], lw=1, ms=4,
                    marker=MARKERS[i % len(MARKERS)], color=colour_of(i))
            ax.set(xscale='log', xlabel='tau', ylabel=label)
            ax.set_title(words, fontsize=9, parse_math=False)
    plain_legend(grid[0][0], list(line_of.values()), list(line_of))
    figure.tight_layout()
    save(figure, path)


def ledger(dots, path, ylabel, is_task=False):
    """
    Quality against time: a colour for each run, a marker for each kind of decoding. dots: dicts of
    run, kind, ms, height, and plain: does nothing loop? These are stars. The height is a loss, and
    those more than a fifth above the least are beyond the edge; on a task it is an accuracy.
    """
    figure, [[ax]] = panels(1, 8, 4.5)
    runs = {run: colour_of(i) for i, run in enumerate(grouped(dots, 'run'))}
    markers = {}
    for dot in dots:
        if dot['kind'] not in markers:
            next_marker = MARKERS[len(markers) % len(MARKERS)]
            markers[dot['kind']] = '*' if dot['plain'] else next_marker
        ax.plot(dot['ms'], dot['height'], markers[dot['kind']], ms=12 if dot['plain'] else 5,
                color=runs[dot['run']], alpha=0.8)
    names = distinct_names(runs)
    samples = [ax.plot([], [], 'o', color=colour)[0] for colour in runs.values()]
    samples += [ax.plot([], [], marker, color='0.4')[0] for marker in markers.values()]
    ax.set(xlabel='ms per token', xscale='log', ylabel=ylabel)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter('{x:g}')
    ax.xaxis.set_minor_formatter('')
    if not is_task:
        ax.set_ylim(top=1.2 * min(dot['height'] for dot in dots))
    plain_legend(ax, samples, [*names.values(), *markers], loc='center left',
                 bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    save(figure, path)


def distinct_names(folders):
    """{folder: its last name, or the whole path if another one ends alike}."""
    paths = {folder: os.path.normpath(folder) for folder in folders}
    last = [os.path.basename(path) for path in set(paths.values())]
    return {folder: path if last.count(os.path.basename(path)) > 1 else os.path.basename(path)
            for folder, path in paths.items()}


def plain_legend(ax, lines, labels, **place):
    """A legend whose labels are shown as they are: matplotlib hides _x and takes $x$ for math."""
    legend = ax.legend(lines, ['line'] * len(lines), frameon=False, fontsize=8, **place)
    for text, label in zip(legend.get_texts(), labels):
        text.set(text=label, parse_math=False)


# train.py: the numbers are in log.csv and eval.csv ------------------------------------------------

def losses(rows, loops, path):
    """Training loss and held-out loss by loops against the iteration; on a task accuracy too."""
    task = f'val_acc_{loops[0]}' in rows[0]
    figure, [axes] = panels(2 if task else 1, 6.4, 4)
    axes[0].plot(*filled(rows, 'loss'), color='0.7', lw=0.8, label='training, drawn loops')
    for ax, column in zip(axes, ('val_loss', 'val_acc')):
        for n, line in zip(loops, cycle(('-', '--', '-.', ':'))):
            label = f"held-out, {n} {'loop' if n == 1 else 'loops'}"
            ax.plot(*filled(rows, f'{column}_{n}'), ls=line, lw=1.6, marker='.', label=label)
    axes[0].set(xlabel='iteration', ylabel='loss (nats per token)', title='Loss by loops')
    axes[0].legend(frameon=False)
    if task:
        axes[1].set(xlabel='iteration', ylabel='accuracy', title='Accuracy by loops',
                    ylim=(0, 1.02))
    save(figure, path)


def filled(rows, column):
    """The iterations at which a column of log.csv has a value, and these values."""
    rows = [row for row in rows if row[column]]
    return [int(row['iter']) for row in rows], [float(row[column]) for row in rows]


def depth(rows, path):
    """A heat map of the accuracy by loops and by depth of the label; rows: those of eval.csv."""
    accuracy = {(row['loops'], row['first']): row['accuracy'] for row in rows}
    loops, depths = (sorted(set(numbers)) for numbers in zip(*accuracy))
    share = [[accuracy[n, d] for d in depths] for n in loops]
    last = {row['first']: row['last'] for row in rows}
    labels = [f'{d}-{last[d]}' if last[d] > d else f'{d}' for d in depths]
    figure, [[ax]] = panels(1, 2 + 0.6 * len(depths), 1.2 + 0.4 * len(loops))
    image = ax.imshow(share, vmin=0, vmax=1, cmap='viridis', aspect='auto', origin='lower')
    ax.set(xlabel='depth of the label', ylabel='loops', title='Share of labels that are right')
    ax.set_xticks(range(len(depths)), labels)
    ax.set_yticks(range(len(loops)), loops)
    figure.colorbar(image, ax=ax)
    save(figure, path)
