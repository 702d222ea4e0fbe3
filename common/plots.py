"""
What all figures share, and the figures of bench.py and train.py. Nothing else imports matplotlib.

A function takes numbers, and writes a PNG or a GIF and the same numbers as CSV beside it, unless
they are in log.csv or bench.csv.

    path        of the picture; the CSV has the same name
    rows        dicts, one for each row of a CSV
"""
import io
import os
from contextlib import suppress
from itertools import cycle

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
