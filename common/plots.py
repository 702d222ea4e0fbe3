"""
Every figure of the project: numbers in, a PNG out, and the same numbers as CSV beside it.

Not run by itself: the scripts call it, one function for each figure. Nothing else imports
matplotlib, and nothing here needs a model: lists, dicts and NumPy arrays are enough to draw a
figure again.

Paper: Fig. 1 to 5. Geiping: Fig. 5 (`convergence`).

    path        of the PNG; the CSV has the same name
    groups      the layers of each recurrent group, [[4], [5, 6]]
    measured    {iteration: what geometry.measure returns}, a dict of curves for each group
    rows        dicts, one for each row of log.csv or bench.csv
    G, K, T     groups, loop steps, tokens
"""
import csv
import os
import zlib

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

# Okabe and Ito's palette, which colour-blind readers can tell apart
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')

# colour and marker of each rule of bench.py
STYLES = dict(
    norm=('#0072B2', 'o'),
    norm_rel=('#56B4E9', 'o'),
    kl=('#E69F00', 's'),
    accel=('#009E73', '^'),
    accel_hat=('#CC79A7', 'v'),
    accel_rel=('#009E73', 'v'),
)
# rules from other files, such as zoo.ouro:gate, get one of these
OTHER_STYLES = (('#7F3C8D', 'P'), ('#8C6D31', 'X'), ('#882255', 'p'), ('#80BA5A', 'h'))


def style(rule):
    """A rule's (colour, marker), the same in every figure and every process."""
    number = zlib.crc32(rule.encode())      # hash() differs from process to process
    return STYLES.get(rule, OTHER_STYLES[number % len(OTHER_STYLES)])


def colour_of(g):
    return COLOURS[g % len(COLOURS)]


def shade(i, n):
    """Colour of checkpoint i of n, from light to dark, so that a print in grey keeps the order."""
    return colormaps['viridis_r'](0.1 + 0.9 * i / max(1, n - 1))


def title(group):
    return 'group ' + '-'.join(map(str, group))


def panels(columns, width, height, rows=1, **how):
    """A grid of panels, each width x height inches -> (figure, axes (rows, columns))."""
    figure = Figure(figsize=(columns * width, rows * height))
    return figure, figure.subplots(rows, columns, squeeze=False, **how)


def save(figure, path, header=None, table=None):
    """Write the figure to `path` and, given a header, its numbers to the CSV beside it."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches='tight')
    if header is not None:
        with open(os.path.splitext(path)[0] + '.csv', 'w', newline='') as f:
            csv.writer(f).writerows([header, *table])


# train.py: the numbers are in log.csv -------------------------------------------------------------

def losses(rows, loops, path):
    """Training loss and held-out loss by loops against the iteration; on a task accuracy too."""
    task = f'val_acc_{loops[0]}' in rows[0]
    figure, [[ax, *others]] = panels(2 if task else 1, 6.4, 4)
    ax.plot(*filled(rows, 'loss'), color='0.7', lw=0.8, label='training, drawn loops')
    held_out_curves(ax, rows, 'val_loss', loops)
    ax.set(xlabel='iteration', ylabel='loss (nats a token)', title='Loss by loops')
    ax.legend(frameon=False)
    for other in others:
        held_out_curves(other, rows, 'val_acc', loops)
        other.set(xlabel='iteration', ylabel='accuracy', title='Accuracy by loops', ylim=(0, 1.02))
    save(figure, path)


def held_out_curves(ax, rows, column, loops):
    for i, n in enumerate(loops):
        label = f'held-out, {n} loop' if n == 1 else f'held-out, {n} loops'
        line = ('-', '--', '-.', ':')[i % 4]
        ax.plot(*filled(rows, f'{column}_{n}'), ls=line, lw=1.6, label=label)


def filled(rows, column):
    """The iterations at which a column of log.csv has a value, and these values."""
    rows = [row for row in rows if row[column]]
    return [int(row['iter']) for row in rows], [float(row[column]) for row in rows]


def depth(rows, path):
    """A heat map of the accuracy by loops and by depth of the label; rows: of log.by_depth."""
    loops, depths = (sorted({row[key] for row in rows}) for key in ('loops', 'depth'))
    share = np.full((len(loops), len(depths)), np.nan)
    for row in rows:
        share[loops.index(row['loops']), depths.index(row['depth'])] = row['accuracy']
    figure, [[ax]] = panels(1, 2 + 0.3 * len(depths), 1.2 + 0.4 * len(loops))
    image = ax.imshow(share, vmin=0, vmax=1, cmap='viridis', aspect='auto', origin='lower')
    ax.set(xlabel='depth of the label', ylabel='loops', title='Share of labels that are right')
    ax.set_xticks(range(len(depths)), depths)
    ax.set_yticks(range(len(loops)), loops)
    figure.colorbar(image, ax=ax)
    save(figure, path, list(rows[0]), [row.values() for row in rows])


# geometry.py: the paths of tokens -----------------------------------------------------------------

def figure_1(points, tokens, groups, path):
    """
    Fig. 1: the paths of some tokens through the groups in 2D, and a zoom on the end of one.

    points (G, K, T, 2): the states from x^(1) on, as x^(0) is noise. tokens: those to draw.
    """
    figure, [[ax, zoom]] = panels(2, 5, 4, width_ratios=(3, 2))
    for t in tokens:
        for g, group in enumerate(groups):
            label = title(group) if t == tokens[0] else None
            trajectory(ax, points[g, :, t], colour_of(g), label)
            if g + 1 < len(groups):     # the hand-off to the next group
                arrow = dict(arrowstyle='->', ls='--', color='0.4', lw=0.8)
                ax.annotate('', points[g + 1, 0, t], points[g, -1, t], arrowprops=arrow)
    ax.set(xlabel='first principal direction', ylabel='second')
    ax.set_title(f'{len(tokens)} tokens through the groups; dashed: hand-offs')
    ax.legend(frameon=False)

    # the last token in the last group, from k = 2 on, and a margin of a tenth around it
    trajectory(zoom, points[-1, :, tokens[-1]], colour_of(len(groups) - 1))
    end = points[-1, 1:, tokens[-1]]                                # (K - 1, 2)
    margin = 0.1 * np.ptp(end, axis=0).max() + 1e-9
    (left, bottom), (right, top) = end.min(axis=0) - margin, end.max(axis=0) + margin
    zoom.set(xlim=(left, right), ylim=(bottom, top), xlabel='first principal direction')
    zoom.set_title(f'zoom: {title(groups[-1])} of one token, from k = 2')

    table = []
    for g in range(len(groups)):
        for t in tokens:
            table += [[g, t, k, *point] for k, point in enumerate(points[g, :, t], start=1)]
    figure.tight_layout()
    save(figure, path, ['group', 'token', 'k', 'pc1', 'pc2'], table)


def trajectory(ax, points, colour, label=None):
    """Draw points (K, 2) as a line with a dot for each step, from white to `colour`."""
    light_to_dark = LinearSegmentedColormap.from_list('', ['white', colour])
    ax.plot(*points.T, color=colour, lw=0.8)
    ax.scatter(*points.T, s=14, c=np.arange(len(points)), cmap=light_to_dark,
               edgecolors=colour, linewidths=0.4, label=label, zorder=3)


def convergence(distances, words, groups, depth, path):
    """
    Geiping Fig. 5: a heat map for each group, tokens down and loop steps across.

    distances: (T, K) for each group, of x^(0) ... x^(K-1) from the last iterate. words: the text of
    each token. depth: on a task the loop steps (T,) that each label needs, drawn as a white line.
    """
    figure, [axes] = panels(len(groups), 3.4, 0.16 * len(words) + 1, sharey=True)
    table = []
    for group, distance, ax in zip(groups, distances, axes):
        log_distance = np.log10(distance + 1e-7)
        image = ax.imshow(log_distance, aspect='auto', cmap='viridis', interpolation='nearest')
        ax.set(title=title(group), xlabel='loop step k')
        ax.set_yticks(range(len(words)), words, fontsize=6, family='monospace', parse_math=False)
        if depth is not None:
            ax.step([*depth, depth[-1]], np.arange(len(depth) + 1) - 0.5, color='white', lw=1.6,
                    label='depth of the label')
            ax.legend(loc='lower right', fontsize=7, labelcolor='white', facecolor='black')
        bar = figure.colorbar(image, ax=ax)
        for t, word in enumerate(words):
            table += [[group, t, word, k, d] for k, d in enumerate(distance[t])]
    bar.set_label('log10 distance to the last iterate')
    save(figure, path, ['group', 'token', 'text', 'k', 'distance'], table)


# geometry.py: loop steps and checkpoints ----------------------------------------------------------

def figure_2(measured, groups, path):
    """Fig. 2: drift-to-loop ratio at each hand-off, read three ways; bars: 1 sigma over tokens."""
    figure, [axes] = panels(len(groups) - 1, 4, 3.4)
    markers = dict(noise='o-', first='s--', settled='^:')   # which state of the next group
    table = []
    for g, ax in enumerate(axes):
        for reading, marker, colour in zip(markers, markers.values(), COLOURS):
            mean = [curves[g][f'dlr_{reading}'] for curves in measured.values()]
            std = [curves[g][f'dlr_{reading}_std'] for curves in measured.values()]
            ax.errorbar(range(len(measured)), mean, std, fmt=marker, color=colour, capsize=2,
                        label=f'to the {reading} state')
            for it, *point in zip(measured, mean, std):
                table.append([groups[g], groups[g + 1], reading, it, *point])
        ax.axhline(1, color='0.5', lw=0.8)
        ax.set_title(f'{title(groups[g])} to {title(groups[g + 1])}')
        ax.set_xticks(range(len(measured)), list(measured))
        ax.set(xlabel='iteration', yscale='log')
        ax.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel('drift-to-loop ratio (Eq. 2)')
    save(figure, path, ['from', 'to', 'reading', 'iteration', 'mean', 'std'], table)


def curves(measured, groups, name, label, clear, path):
    """
    Fig. 3 and 5: a probe against the loop step k; a panel per group, a curve per checkpoint.

    name: 'norm' or 'cos' of geometry.measure. The band is one sigma.
    Where the step norm is below `clear` rounding floors the curve is grey and has no band.
    """
    figure, [axes] = panels(len(groups), 4, 3.4, sharey=True)
    table = []
    for g, ax in enumerate(axes):
        for i, (it, by_group) in enumerate(measured.items()):
            curve = by_group[g]
            mean, std = curve[name], curve[name + '_std']           # (K,), or from k = 1 on
            k = np.arange(len(curve['norm']))[-len(mean):]
            sound = curve['norm'][k] > curve['floor_float32'] * clear
            table += [[groups[g], it, *row] for row in zip(k, mean, std, sound.astype(int))]

            # the band keeps to the values that are possible: norms above 0, cosines up to 1
            low, high = mean - std, mean + std
            if name == 'norm':
                low = np.maximum(low, mean / 10)
            if name == 'cos':
                high = np.minimum(high, 1)
            colour = shade(i, len(measured))
            ax.plot(k, mean, color='0.8', lw=1)
            ax.plot(k, np.where(sound, mean, np.nan), color=colour, lw=1.5, label=f'iteration {it}')
            ax.fill_between(k, low, high, where=sound, color=colour, alpha=0.12, lw=0)

        # Fig. 3a: step norms below these floors consist of rounding
        if name == 'norm':
            last = list(measured.values())[-1][g]
            for dtype, line in dict(float32=':', bfloat16='--').items():
                ax.axhline(last[f'floor_{dtype}'], color='0.4', ls=line, lw=0.8,
                           label=f'{dtype} floor, last checkpoint')
            ax.set_yscale('log')
        ax.set(title=title(groups[g]), xlabel='loop step k')
    axes[0].set_ylabel(label)
    axes[-1].legend(frameon=False, fontsize=7)
    header = ['group', 'iteration', 'k', 'mean', 'std', 'clear_of_rounding']
    save(figure, path, header, table)


def angles(curve, block, path):
    """zoo/etd.py: the angle by which each layer turns the state; shaded, the thinking block."""
    figure, [[ax]] = panels(1, 5.2, 3.4)
    ax.axvspan(block[0] - 0.4, block[-1] + 0.4, color='0.9')
    ax.plot(range(len(curve)), curve, marker='o', color=colour_of(0))
    ax.set(xlabel='layer', ylabel='angle over pi', title='The thinking block, between two knees')
    save(figure, path, ['layer', 'angle_over_pi'], enumerate(curve))


# bench.py: the numbers are in bench.csv -----------------------------------------------------------

def by_way(rows):
    """{way to decode: {rule: its rows by tau}}, without the fixed budgets and oracles."""
    ways = {}
    for row in sorted(rows, key=lambda row: row['tau']):
        if row['rule'] not in ('fixed', 'oracle'):
            cache, past = row['cache'], row['past']
            way = cache if cache != 'exact' else 'exact, past' if past else 'exact, own'
            ways.setdefault(way, {}).setdefault(row['rule'], []).append(row)
    return ways


def figure_4(rows, path):
    """
    Fig. 4: ms a token, perplexity and cross-entropy of each rule against tau.

    A row of panels for each way to decode (by_way). Shaded: thresholds beyond the paper's sweep.
    """
    columns = dict(ms_per_token='ms a token', ppl='perplexity',
                   ce='cross-entropy (nats a token)')
    ways = by_way(rows)
    every = [row for rules in ways.values() for mine in rules.values() for row in mine]
    paper_taus, more_taus = ([row['tau'] for row in every if row['extension'] == more]
                             for more in (False, True))
    figure, grid = panels(3, 4, 3, rows=len(ways), sharex=True, sharey='col')
    for axes, (way, rules) in zip(grid, ways.items()):
        for ax, column in zip(axes, columns):
            for rule, mine in rules.items():
                colour, marker = style(rule)
                line = '--' if '_' in rule else '-'
                ax.plot([row['tau'] for row in mine], [row[column] or np.nan for row in mine],
                        label=rule, color=colour, marker=marker, ls=line, ms=4, lw=1)
            if more_taus and paper_taus:
                ax.axvspan(1.5 * max(paper_taus), 1.5 * max(more_taus), color='0.95')
            ax.set(xscale='log', ylabel=columns[column])
            ax.set_title(way, fontsize=9)
    for ax in grid[-1]:
        ax.set_xlabel('tau')
    grid[0][0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    save(figure, path)


def frontier(rows, path):
    """The share of continuations that equal the full budget's, against ms a token, by kind."""
    figure, [[ax]] = panels(1, 6, 4)
    for i, (kind, mine) in enumerate(by_kind(rows).items()):
        mine = sorted(mine, key=lambda row: row['ms_text'])
        ax.plot([row['ms_text'] for row in mine], [row['identical'] for row in mine], 'o^sDvX'[i],
                label=kind, color=colour_of(i), ms=4, alpha=0.8)
    ax.set(xlabel='ms a token', ylabel="share of texts that are the full budget's", xscale='log')
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter('{x:g}')
    ax.xaxis.set_minor_formatter('')
    ax.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    save(figure, path)


def by_kind(rows):
    """{kind of decoding: its rows}, of the rows that have continued prompts."""
    kinds = {}
    for row in rows:
        if row['identical'] != '':
            kinds.setdefault(row['kind'], []).append(row)
    return kinds
