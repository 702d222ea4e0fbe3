"""
The geometry of the loops: small turning steps inside a group, large moves between the groups.

    python geometry.py                              the checkpoints in out/, or pretrained/text
    python geometry.py --out_dir=out-groups --n_loop=30
    python geometry.py --animate                    and a GIF of a token on its way

Prints a row for each checkpoint and group, then a sentence for each group of the last checkpoint.
Writes the folder out_dir/figures (out/text/figures for pretrained/text): a PNG for each figure, and
its numbers as CSV beside it.

Paper: sec. 3 (step norms, angles, PCA; Fig. 1, 3, 5), Eq. 1, Eq. 2 (drift-to-loop ratio; Fig. 2),
Eq. 5. Geiping: Fig. 5 (convergence by token).

    states      (K+1, ..., C) float32: x^(0) ... x^(K) of one group
    delta^(k)   x^(k+1) - x^(k)
    g           a group
    e           what enters a group
    ||.||       the Euclidean norm over C
"""
import copy
from pathlib import Path

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn.functional import pad

from common import plots
from common.checkpoint import load_checkpoint, open_run
from common.configurator import PathName
from common.encoding import texts_of
from common.files import check_writable
from exits import make_exit, stored_tau

# --------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # whose held-out text to read, or problems (calc:reset=0.01); None = the
                            # run's own
length: int | None = None   # tokens in a window; None = block_size. Others need rotary positions
n_loop = 30                 # loops of each group; the paper's Fig. 5 has 30
n_windows = 24              # held-out windows
animate = False             # also a GIF of one token on its way: figures/two_scales.gif
device = 'auto'
# --------------------------------------------------------------------------------------------------

FIGURES = ('figure_1.png', 'figure_2.png', 'figure_3a.png', 'figure_5.png', 'convergence.png',
           'two_scales.gif')

# what is measured: the probes ---------------------------------------------------------------------

def step_norm(states):
    """||delta^(k)||, Eq. 1: (K+1, ..., C) -> (K, ...)."""
    return vector_norm(states.float().diff(dim=0), dim=-1)


def step_cos(states):
    """Cosine of the angle between delta^(k) and delta^(k-1): (K+1, ..., C) -> (K-1, ...)."""
    d = states.float().diff(dim=0)                                              # (K, ..., C)
    norms = vector_norm(d, dim=-1)
    return (d[1:] * d[:-1]).sum(-1) / (norms[1:] * norms[:-1]).clamp(min=1e-30)


def accel(states):
    """||delta^(k) - delta^(k-1)||, Eq. 5: (K+1, ..., C) -> (K-1, ...)."""
    return vector_norm(states.float().diff(n=2, dim=0), dim=-1)


# Where the drift of Eq. 2 ends in the next group: at x^(0), its first iterate, or its last.
READINGS = dict(noise=0, first=1, settled=-1)


def dlr(states_g, x0_next):
    """
    Drift-to-loop ratio, Eq. 2: ||x_(g+1)^(0) - x_g^(K)|| over the mean ||delta_g^(k)||.

    states_g (K+1, ..., C), x0_next (..., C) or another state of the next group -> (...).
    """
    drift = vector_norm(x0_next.float() - states_g[-1].float(), dim=-1)
    return drift / step_norm(states_g).mean(dim=0).clamp(min=1e-30)


def pca_2d(states):
    """
    Coordinates on the first two principal axes of all states together: (..., C) -> (..., 2).

    Fig. 1. The sign of an axis is fixed: its largest entry is positive.
    """
    flat = states.float().reshape(-1, states.shape[-1])
    flat = pad(flat - flat.mean(dim=0), (0, max(0, 2 - flat.shape[1])))         # C may be 1
    axes = torch.linalg.svd(flat, full_matrices=False)[2][:2]                   # (2, C)
    largest = axes.abs().argmax(dim=1, keepdim=True)
    axes = axes * axes.gather(1, largest).sign()
    return (flat @ axes.T).view(*states.shape[:-1], 2)


def paths(states):
    """
    The path of each token on two principal axes of its own: (G, K+1, T, C) -> (G, K, T, 2), and the
    lengths (G, K, T) of its steps in all C dimensions, first the jump from the group before (or 0).

    Without x^(0), which is noise. On these axes jumps keep most of their length, loop steps less.
    """
    path = torch.stack([pca_2d(of_token) for of_token in states[:, 1:].unbind(2)], dim=2)
    flat = states[:, 1:].flatten(end_dim=1)                                     # (G * K, T, C)
    lengths = vector_norm(flat.diff(dim=0, prepend=flat[:1]), dim=-1).view(path.shape[:-1])
    return path, lengths


@torch.no_grad()
def rounding_floor(group, states, e, dtype, first=0):
    """
    The error that rounding adds to one step: mean ||f_dtype(x) - f_float64(x)|| at the last states.

    Step norms below this floor, and the cosines of such steps, consist of rounding. dtype: of the
    matrix products. states (K+1, B, T, C), e (B, T, C); the first four rows of B are enough. first:
    the first token that counts.
    """
    x, e = states[-1, :4].cpu(), e[:4].cpu()        # on the CPU: not every device has float64
    group = copy.deepcopy(group).cpu()
    exact = copy.deepcopy(group).double()
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        rounded = group.step(x, e)
    difference = rounded.double() - exact.step(x.double(), e.double())
    return vector_norm(difference, dim=-1)[:, first:].mean().item()


# A step is clear of rounding if it is longer than this many rounding floors: its direction is then
# off by 2 degrees at most
CLEAR = 30


def last_clear_cos(states, floor):
    """
    Each token's cosine at its last step that is clear of rounding, before the first that is not.

    states (K+1, ..., C) -> (...), nan where no step is clear. floor: the rounding floor.
    """
    is_clear = step_norm(states)[1:] > CLEAR * floor    # of the steps that have a cosine
    n_clear = is_clear.long().cumprod(0).sum(0)         # cumprod is 1 until the first that is not
    last = step_cos(states).gather(0, (n_clear - 1).clamp(min=0)[None])[0]
    return last.where(n_clear > 0, torch.nan)


def steps_to_a_tenth(norms):
    """
    Steps until the mean step norm (K,) has fallen to a tenth; inf if it does not fall that far.

    Counted from the second step: the first one leads out of the noise and refines nothing yet.
    """
    small = norms[1:] <= norms[1] / 10
    return small.argmax() if small.any() else np.inf


# how the states are collected ---------------------------------------------------------------------

def models_of(model, iteration, folder, device, length=None):
    """
    All models of the run in `folder`, {iteration: model}, sorted: that of ckpt.pt, and those kept.

    ValueError if a kept one has another configuration, so that it comes from another run.
    """
    models = {iteration: model}
    for path in Path(folder).glob('ckpt_*.pt'):
        kept, checkpoint = load_checkpoint(path, device, length=length)
        if kept.config != model.config:
            raise ValueError(f'{path} and ckpt.pt are of different runs: remove one of them')
        models.setdefault(checkpoint['iter_num'], kept)
    return dict(sorted(models.items()))


@torch.no_grad()
def trace_of(model, idx, n_loop):
    """One pass over idx (B, T) that keeps every state: a dict for each group, see model.GPT."""
    trace = []
    model(idx, n_loop=n_loop, trace=trace)
    if not all(entry['states'].isfinite().all() for entry in trace):
        raise ValueError('the states are not finite: the model holds a NaN or an infinity')
    return trace


def first_of(states):
    """
    The first token that probes count, states (K+1, B, T, C): 1 if token 0 is a sink of attention,
    whose long state would make up most of every mean; otherwise 0.
    """
    # in between: a model without a sink has about 1 here, and one with a sink more than 100
    norms = vector_norm(states[-1], dim=-1)                                     # (B, T)
    return int(norms[:, 0].median() > 10 * norms.median())


def mean_and_std(values):
    """Over all tokens: (K, B, T) -> two NumPy arrays (K,)."""
    values = values.flatten(1)
    return values.mean(dim=1).numpy(force=True), values.std(dim=1).numpy(force=True)


def measure(model, idx, n_loop):
    """
    The probes of one checkpoint on the tokens idx (B, T): a dict for each group.

        first       the first token that counts, see first_of
        norm, cos   mean and standard deviation over the tokens, (K,) and (K-1,) each
        dlr         {reading: mean and standard deviation}; empty in the last group
        floor       {'float32', 'bfloat16': the rounding floor}
        settled     mean of last_clear_cos
    """
    trace = trace_of(model, idx, n_loop)
    measured = []
    for g, (group, entry) in enumerate(zip(model.groups, trace)):
        first = first_of(entry['states'])
        states = entry['states'][:, :, first:]                                  # (K+1, B, T, C)
        floor = {}
        for dtype in 'float32', 'bfloat16':
            floor[dtype] = rounding_floor(group, entry['states'], entry['e'],
                                          getattr(torch, dtype), first)
        ratios = {}
        if g + 1 < len(trace):
            for reading, k in READINGS.items():
                ratio = dlr(states, trace[g + 1]['states'][k][:, first:])       # (B, T)
                ratios[reading] = ratio.mean().item(), ratio.std().item()
        measured.append(dict(
            first=first, norm=mean_and_std(step_norm(states)), cos=mean_and_std(step_cos(states)),
            dlr=ratios, floor=floor,
            settled=last_clear_cos(states, floor['float32']).nanmean().item()))
    return measured


def logits_of(model, g, x):
    """What the states x (T, C) of group g predict, (T, V): in the last group through the coda."""
    is_last = model.groups[g] is model.groups[-1]
    read = model.through_coda if is_last else model.readout
    return read(x[None])[0]


# figures: each writes a PNG, and its numbers as CSV -----------------------------------------------
#
#     measured    {iteration: what measure returns}
#     states      of one window in the last checkpoint, (G, K+1, T, C)
#     words       the text of its tokens

def figure_2(measured, groups, folder):
    """Fig. 2: drift-to-loop ratio at each hand-off, read three ways; bars: 1 sigma over tokens."""
    figure, [axes] = plots.panels(len(groups) - 1, 4, 3.4)
    table = []
    for g, ax in enumerate(axes):
        group, after = groups[g], groups[g + 1]
        for reading, marker, colour in zip(READINGS, ('o-', 's--', '^:'), plots.COLOURS):
            ratios = [by_group[g]['dlr'][reading] for by_group in measured.values()]
            mean, std = zip(*ratios)
            ax.errorbar(range(len(measured)), mean, std, fmt=marker, color=colour, capsize=2,
                        label=f'to the {reading} state')
            table += [[group, after, reading, *row] for row in zip(measured, mean, std)]
        ax.axhline(1, color='0.5', lw=0.8)
        ax.set(xlabel='iteration', yscale='log',
               title=f'{plots.title(group)} to {plots.title(after)}')
        ax.set_xticks(range(len(measured)), list(measured))
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel('drift-to-loop ratio (Eq. 2)')
    header = ['from', 'to', 'reading', 'iteration', 'mean', 'std']
    plots.save(figure, f'{folder}/figure_2.png', header, table)


def figure_3a_or_5(name, measured, groups, folder):
    """
    Fig. 3a (name = 'norm') or 5 ('cos'): the probe against the loop step k; a panel per group, a
    curve per checkpoint, a band of one sigma. Grey and without a band where it is not clear of
    rounding: a norm below the floor, a cosine of a step below CLEAR floors.
    """
    is_norm = name == 'norm'
    file = 'figure_3a' if is_norm else 'figure_5'
    label = 'step norm (Eq. 1)' if is_norm else 'cosine of consecutive steps'
    least = 1 if is_norm else CLEAR         # floors
    figure, [axes] = plots.panels(len(groups), 4, 3.4, sharey=True)
    table = []
    for g, ax in enumerate(axes):
        for i, (it, by_group) in enumerate(measured.items()):
            probes = by_group[g]
            floor = probes['floor']
            mean, std = probes[name]
            norm, _ = probes['norm']
            k = np.arange(len(norm))[-len(mean):]               # the first cosine is that of k = 1
            clear = norm[k] > least * floor['float32']
            table += [[groups[g], it, *row] for row in zip(k, mean, std, clear.astype(int))]

            # the band keeps to the values that are possible: norms above 0, cosines from -1 to 1
            possible = (mean / 10, np.inf) if is_norm else (-1, 1)
            low, high = np.clip([mean - std, mean + std], *possible)
            colour = plots.shade(i, len(measured))
            ax.plot(k, mean, color='0.8', lw=1)
            ax.plot(k, np.where(clear, mean, np.nan), color=colour, lw=1.5, label=f'iteration {it}')
            ax.fill_between(k, low, high, where=clear, color=colour, alpha=0.12, lw=0)
        if is_norm:
            for dtype, line in dict(float32=':', bfloat16='--').items():
                ax.axhline(floor[dtype], color='0.4', ls=line, lw=0.8,
                           label=f'{dtype} floor, last checkpoint')
        ax.set(title=plots.title(groups[g]), xlabel='loop step k')
    axes[0].set(ylabel=label, yscale='log' if is_norm else 'linear')        # of all panels
    axes[-1].legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
    header = ['group', 'iteration', 'k', 'mean', 'std', 'clear_of_rounding']
    plots.save(figure, f'{folder}/{file}.png', header, table)


def draw_path(ax, so_far, whole, groups):
    """A token's path so far, and a circle at its end in each group; both: (K, 2) for each group."""
    points = np.concatenate(whole)
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    square(ax, middle, 1.5 * np.abs(points - middle).max())
    for g, (group, points) in enumerate(zip(groups, whole)):
        end = points[-1]
        ax.plot(*end, 'o', ms=16, mfc='none', mec=plots.colour_of(g))
        above = end[1] > middle[1]
        ax.annotate(plots.title(group), end, (0, 12 if above else -22), textcoords='offset points',
                    ha='center', size=11, color=plots.colour_of(g))
    for g, points in enumerate(so_far):
        if g:                           # the hand-off
            ax.annotate('', points[0], so_far[g - 1][-1], arrowprops=dict(
                arrowstyle='-|>', color='0.2', lw=1.8, shrinkA=0, shrinkB=0))
        ax.plot(*points.T, color=plots.colour_of(g), lw=2)
        ax.plot(*points[-1], 'o', ms=7, color=plots.colour_of(g))


def draw_zoom(ax, outer, points, whole, g, note):
    """
    The loop steps of group g as far as they have come, points (k, 2) of whole (K, 2): magnified so
    that step 1 may lie outside, beside a panel `outer` of the same size that shows the whole path.
    note: text for below. -> the points that were drawn.
    """
    square(ax, whole[-1], 1.2 * np.abs(whole[1:] - whole[-1]).max())
    ax.set_xlabel(f'{outer.viewLim.width / ax.viewLim.width:.0f} times larger{note}')
    ax.plot(*points.T, color=plots.colour_of(g), lw=1.6)
    ax.spines[:].set(color=plots.colour_of(g), lw=2)
    return ax.scatter(*points.T, s=60, c=range(1, len(points) + 1), norm='log', vmin=1, zorder=3,
                      vmax=len(whole), cmap='viridis_r', edgecolors='0.2', lw=0.6)


def square(ax, middle, half):
    """Axes of equal scale without ticks, `half` to each side of the point in the middle."""
    x, y = map(float, middle)
    half = max(float(half), 1e-9)
    ax.set(xlim=(x - half, x + half), ylim=(y - half, y + half), xticks=[], yticks=[],
           aspect='equal')


# where a rule exits: the sign in the text, the marker in the figure, and its size
MARKS = {'accel': ('□', 's', 17), 'norm_rel': ('◇', 'D', 11)}


def figure_1(states, used, words, groups, folder):
    """
    Fig. 1: two tokens, one that settles early and one that settles late; the path of each through
    the groups, and its loop steps in each group magnified. used: {rule: loop steps (G, T)}.
    """
    figure, rows = plots.panels(1 + len(groups), 3, 3.6, rows=2)
    figure.set_layout_engine('constrained')
    total = sum(used.values()).sum(axis=0)                                      # (T,)
    chosen = dict(early=total.argmin(), late=total.argmax())
    table = []
    for row, (settles, t) in zip(rows, chosen.items()):
        points, lengths = (each[:, :, 0].numpy(force=True) for each in paths(states[:, :, [t]]))
        overview, zooms = row[0], row[1:]
        draw_path(overview, points, points, groups)
        overview.set_title(f'token {t}, "{words[t]}", settles {settles}', parse_math=False)
        jumps = ', '.join(f'{length:.1f}' for length in lengths[1:, 0])
        overview.set_xlabel(f"jumps: {jumps or 'none'}")
        for g, zoom in enumerate(zooms):
            note = '\nsteps 2, 3, ...: ' + ', '.join(f'{length:.2g}' for length in lengths[g, 1:4])
            for rule, steps in used.items():
                sign, marker, size = MARKS[rule]
                exit_step = steps[g, t]
                note += f'\n{sign} {rule} exits after step {exit_step}'
                zoom.plot(*points[g][exit_step - 1], marker, ms=size, mfc='none', mec='black',
                          zorder=4)
            dots = draw_zoom(zoom, overview, points[g], points[g], g, note)
            zoom.set_title(f'inside {plots.title(groups[g])}')
            exits = [steps[g, t] for steps in used.values()]
            for k, (pc1, pc2) in enumerate(points[g], start=1):
                table.append([g, t, k, pc1, pc2, lengths[g, k - 1], *exits])
    figure.colorbar(dots, ax=rows, shrink=0.5, label='loop step', ticks=[1, 2, 5, 10, 20, 50],
                    format='{x:.0f}')
    header = ['group', 'token', 'k', 'pc1', 'pc2', 'length', *used]
    plots.save(figure, f'{folder}/figure_1.png', header, table)


def convergence(states, depth, words, groups, folder):
    """
    Geiping Fig. 5: distance to the last state; a heat map a group, tokens down, loop steps across.

    depth: on a task the loop steps (T,) that each label needs, drawn as a white line; or None.
    """
    figure, [axes] = plots.panels(len(groups), 3.4, 0.16 * len(words) + 1, sharey=True)
    table = []
    for group, of_group, ax in zip(groups, states, axes):                       # (K+1, T, C)
        distance = vector_norm(of_group[:-1] - of_group[-1], dim=-1).T.numpy(force=True)  # (T, K)
        image = ax.imshow(np.log10(distance + 1e-7), aspect='auto', interpolation='nearest')
        bar = figure.colorbar(image, ax=ax)
        ax.set(title=plots.title(group), xlabel='loop step k', xlim=(-0.5, distance.shape[1] - 0.5))
        ax.set_yticks(range(len(words)), words, fontsize=8, family='monospace', parse_math=False)
        if depth is not None:
            ax.step([*depth, depth[-1]], np.arange(len(depth) + 1) - 0.5, color='white', lw=1.6,
                    label='depth of the label')
            ax.legend(loc='lower right', fontsize=8, labelcolor='white', facecolor='black')
        table += [[group, t, words[t], k, d] for (t, k), d in np.ndenumerate(distance)]
    bar.set_label('log10 distance to the last iterate')
    header = ['group', 'token', 'text', 'k', 'distance']
    plots.save(figure, f'{folder}/convergence.png', header, table)


def two_scales(model, states, used, words, encoding, folder):
    """
    A GIF of one token on its way through the groups until it exits, after used (G, T) loop steps.

    The token is the one whose final prediction gains most from the first loop step to the last.
    """
    # the token t, and its path
    groups = model.config.groups
    first = logits_of(model, 0, states[0, 1]).softmax(-1)                       # (T, V)
    last = logits_of(model, -1, states[-1, -1]).softmax(-1)
    p, best = last.max(dim=-1, keepdim=True)
    t = int((p - first.gather(1, best)).argmax())
    points, lengths = (each[:, :, 0].numpy(force=True) for each in paths(states[:, :, [t]]))
    path = [points[g][:max(2, k)] for g, k in enumerate(used[:, t])]            # (k, 2) a group

    # the five likeliest next tokens at each of its loop steps
    rows = []
    for g, of_group in enumerate(path):
        for k, (pc1, pc2) in enumerate(of_group, start=1):
            p, tokens = logits_of(model, g, states[g, k])[t].softmax(-1).sort(descending=True)
            texts = texts_of(tokens[:5].tolist(), encoding)
            row = dict(group=g, token=t, k=k, pc1=pc1, pc2=pc2, length=lengths[g, k - 1])
            row |= {f'text_{i}': word for i, word in enumerate(texts, start=1)}
            row |= {f'p_{i}': share for i, share in enumerate(p[:5].tolist(), start=1)}
            rows.append(row)
    text = ''.join(words[:t + 1])
    draw_two_scales(rows, path, groups, text, f'{folder}/two_scales.gif')


def draw_two_scales(rows, whole, groups, text, path):
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
        colour = plots.colour_of(g)
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
        inset.set_title(f'inside {plots.title(groups[g])}: small loop steps',
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
    plots.movie((8, 5), draw, frames, rows, path)


# the run ------------------------------------------------------------------------------------------

LEGEND = """
steps to a tenth   loop steps, counted from the second on, until the mean step is a tenth as long
settled cosine     of the angle between a token's last step that is clear of rounding and the step
                   before it, mean over tokens: 1 = straight on, -1 = back and forth
floor f32/bf16     the length of a step that is rounding alone, in float32 and bfloat16
DLR                drift-to-loop ratio (Eq. 2), mean +- standard deviation over tokens: the jump
                   from a group's last state to the next group's noise, first or last (settled)
                   state, in mean steps"""


def print_table(measured, groups):
    """A row for each checkpoint and group."""
    print('\niteration  group   steps to a tenth   settled cosine   floor f32/bf16'
          '    DLR noise     DLR first     DLR settled')
    for it, by_group in measured.items():
        for group, probes in zip(groups, by_group):
            steps = steps_to_a_tenth(probes['norm'][0])
            floor = probes['floor']
            ratios = [f'{mean:5.1f} +- {std:<4.1f}' for mean, std in probes['dlr'].values()]
            print(f"{it:9d}  {'-'.join(map(str, group)):6s}  {steps:16}   {probes['settled']:14.2f}"
                  f"   {floor['float32']:.0e}/{floor['bfloat16']:.0e}   {'  '.join(ratios)}")
    print(LEGEND)


def in_words(group, probes):
    """The probes of a group as a sentence."""
    steps = steps_to_a_tenth(probes['norm'][0])
    parts = [f'steps fall to a tenth in {steps} loops' if np.isfinite(steps) else
             f"steps do not fall to a tenth in {len(probes['norm'][0])} loops"]
    if np.isnan(probes['settled']):
        parts.append('no step is clear of rounding')
    else:
        parts.append(f"cosine {probes['settled']:.2f}")
    if probes['dlr']:
        mean, _ = probes['dlr']['settled']
        parts.append(f'the jump is {mean:.1f} mean steps')
    return f"group {group}: {'; '.join(parts)}"


@torch.no_grad()
def main():
    import data
    from common.distributed import pick_device

    # the run, and the text to look at
    if n_loop < 2 or n_windows < 1:
        raise ValueError('n_loop must be at least 2, and n_windows at least 1')
    dev, _ = pick_device(device, 'float32')
    model, last, source, results = open_run(
        out_dir, dev, 'there is no loop to look at: choose another --out_dir', length=length)
    groups, folder = model.config.groups, f'{results}/figures'
    if animate and len(groups) < 2:
        raise ValueError(f'--animate shows jumps between groups, and the model in {source} has '
                         'only one: choose another --out_dir')
    check_writable(folder, FIGURES)
    models = models_of(model, last['iter_num'], source, dev, length)
    _, idx, _, depth = data.held_out_windows(last, n_windows, dataset, dev)     # (n_windows, T)
    print(f"{source}: checkpoints of iterations {', '.join(map(str, models))}; groups {groups}; "
          f'{n_windows} held-out windows of {idx.shape[1]} tokens, {n_loop} loops')

    # all checkpoints
    measured = {it: measure(checkpoint, idx, n_loop) for it, checkpoint in models.items()}
    newest = max(measured)
    print_table(measured, groups)
    if any(probes['first'] for probes in measured[newest]):
        print('the first token of a window, a sink of attention with ten times the norm of others, '
              'is left out')
    print(f'\nafter {newest} iterations:')
    for group, probes in zip(groups, measured[newest]):
        print(in_words(group, probes))
    if len(groups) > 1:
        figure_2(measured, groups, folder)
    for name in 'norm', 'cos':
        figure_3a_or_5(name, measured, groups, folder)

    # the first window in the last one
    model, idx = models[newest], idx[:1]
    states = torch.stack([entry['states'][:, 0] for entry in trace_of(model, idx, n_loop)])
    used = {}
    for rule in MARKS:
        trace = []
        exit = make_exit(rule, stored_tau((results, source), rule, 'exact'))
        model(idx, n_loop=n_loop, exit=exit, trace=trace)
        used[rule] = torch.cat([entry['steps_used'] for entry in trace]).numpy(force=True)  # (G, T)
    encoding = None
    if last['tokenizer']:
        encoding = data.open_encoding(last['tokenizer'], source)
    words = [repr(text)[1:-1]                           # a line break as \n
             for text in texts_of(idx[0].tolist(), encoding)]
    figure_1(states, used, words, groups, folder)
    convergence(states, None if depth is None else depth[0], words, groups, folder)
    if animate:
        two_scales(model, states, used['norm_rel'], words, encoding, folder)
    print(f'\nfigures, and their numbers as CSV: {folder}')


if __name__ == '__main__':
    from common.configurator import configure, run
    config = configure(globals())
    run(main)
