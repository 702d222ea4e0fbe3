"""
The geometry of the loops: small turning steps inside a group, large moves between the groups.

    python geometry.py                              the checkpoints in out/, or pretrained/text
    python geometry.py --out_dir=out-groups --n_loop=30
    python geometry.py --animate                    and a GIF of a token on its way

Prints a row for each checkpoint and group, and writes the folder out_dir/figures (out/text/figures
for pretrained/text): a PNG for each figure, and its numbers as CSV beside it.

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
from data import texts_of
from exits import make_exit

# --------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # whose held-out text to read; None = the run's own
n_loop = 30                 # loops of each group; the paper's Fig. 5 has 30
n_windows = 24              # held-out windows of block_size tokens
animate = False             # also a GIF of one token on its way: figures/two_scales.gif
device = 'auto'
# --------------------------------------------------------------------------------------------------

# A step longer than this many rounding floors (see rounding_floor) is clear of rounding: its
# direction is off by 2 degrees at most.
CLEAR = 30


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


def last_clear_cos(states, floor):
    """
    Each token's cosine at its last step that is clear of rounding.

    states (K+1, ..., C) -> (...), nan where no step is clear. floor: the rounding floor.
    """
    # the number of steps until the first one that is not clear
    clear = (step_norm(states)[1:] > CLEAR * floor).long().cumprod(0).sum(0)
    last = step_cos(states).gather(0, (clear - 1).clamp(min=0)[None])[0]
    return last.where(clear > 0, torch.nan)


def steps_to_a_tenth(norms):
    """
    Steps until the mean step norm (K,) has fallen to a tenth; inf if it does not fall that far.

    Counted from the second step: the first one leads out of the noise and refines nothing yet.
    """
    small = norms[1:] <= norms[1] / 10
    return small.argmax() if small.any() else np.inf


# how the states are collected ---------------------------------------------------------------------

def models_of(model, iteration, folder, device):
    """
    All models of the run in `folder`, {iteration: model}, sorted: that of ckpt.pt, and those kept.

    ValueError if a kept one has another configuration, so that it comes from another run.
    """
    models = {iteration: model}
    for path in Path(folder).glob('ckpt_*.pt'):
        kept, checkpoint = load_checkpoint(path, device)
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
    with ten times the norm of the others, which would be most of every mean; otherwise 0.
    """
    norms = vector_norm(states[-1], dim=-1)                                     # (B, T)
    return int(norms[:, 0].median() > 10 * norms.median())


def measure(model, idx, n_loop):
    """
    The probes of one checkpoint on the tokens idx (B, T): a dict for each group.

        first       the first token that counts, see first_of
        norm, cos   mean and standard deviation over the tokens, (K,) and (K-1,) each
        dlr         {reading: mean and standard deviation}; empty in the last group
        floor       {'float32', 'bfloat16': the rounding floor}
        settled     mean of last_clear_cos
    """
    trace, measured = trace_of(model, idx, n_loop), []
    for g, (group, entry) in enumerate(zip(model.groups, trace)):
        first = first_of(entry['states'])
        states, found = entry['states'][:, :, first:], dict(dlr={})
        for name, probe in dict(norm=step_norm, cos=step_cos).items():
            values = probe(states).flatten(1)                                   # (K, B * T)
            found[name] = [f(values, dim=1).numpy(force=True) for f in (torch.mean, torch.std)]
        found['floor'] = {dtype: rounding_floor(group, entry['states'], entry['e'],
                                                getattr(torch, dtype), first)
                          for dtype in ('float32', 'bfloat16')}
        found['settled'] = last_clear_cos(states, found['floor']['float32']).nanmean().item()
        for reading, k in READINGS.items() if g + 1 < len(trace) else ():
            ratio = dlr(states, trace[g + 1]['states'][k][:, first:])
            found['dlr'][reading] = ratio.mean().item(), ratio.std().item()
        measured.append(found | dict(first=first))
    return measured


def logits_of(model, g, x):
    """What the states x (T, C) of group g predict, (T, V): in the last group through the coda."""
    is_last = model.groups[g] is model.groups[-1]
    return (model.through_coda if is_last else model.readout)(x[None])[0]


# figures: each writes a PNG, and its numbers as CSV -----------------------------------------------
#
#     measured    {iteration: what measure returns}
#     states      of one window in the last checkpoint, (G, K+1, T, C)
#     words       the text of its tokens

def figure_2(measured, groups, folder):
    """Fig. 2: drift-to-loop ratio at each hand-off, read three ways; bars: 1 sigma over tokens."""
    figure, [axes] = plots.panels(len(groups) - 1, 4, 3.4)
    table = []
    for g, (pair, ax) in enumerate(zip(zip(groups, groups[1:]), axes)):
        for reading, marker, colour in zip(READINGS, ('o-', 's--', '^:'), plots.COLOURS):
            mean, std = zip(*(by_group[g]['dlr'][reading] for by_group in measured.values()))
            ax.errorbar(range(len(measured)), mean, std, fmt=marker, color=colour, capsize=2,
                        label=f'to the {reading} state')
            table += [[*pair, reading, *row] for row in zip(measured, mean, std)]
        ax.axhline(1, color='0.5', lw=0.8)
        ax.set(xlabel='iteration', yscale='log', title=' to '.join(map(plots.title, pair)))
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
    file, label, least = (('figure_3a', 'step norm (Eq. 1)', 1) if is_norm else
                          ('figure_5', 'cosine of consecutive steps', CLEAR))
    figure, [axes] = plots.panels(len(groups), 4, 3.4, sharey=True)
    table = []
    for g, ax in enumerate(axes):
        for i, (it, by_group) in enumerate(measured.items()):
            (mean, std), (norm, _) = by_group[g][name], by_group[g]['norm']
            k = np.arange(len(norm))[-len(mean):]               # the first cosine is that of k = 1
            floor = by_group[g]['floor']
            clear = norm[k] > least * floor['float32']
            table += [[groups[g], it, *row] for row in zip(k, mean, std, clear.astype(int))]

            # the band keeps to the values that are possible: norms above 0, cosines from -1 to 1
            possible = (mean / 10, np.inf) if is_norm else (-1, 1)
            low, high = np.clip([mean - std, mean + std], *possible)
            colour = plots.shade(i, len(measured))
            ax.plot(k, mean, color='0.8', lw=1)
            ax.plot(k, np.where(clear, mean, np.nan), color=colour, lw=1.5, label=f'iteration {it}')
            ax.fill_between(k, low, high, where=clear, color=colour, alpha=0.12, lw=0)
        for dtype, line in dict(float32=':', bfloat16='--').items() if is_norm else ():
            ax.axhline(floor[dtype], color='0.4', ls=line, lw=0.8,
                       label=f'{dtype} floor, last checkpoint')
        ax.set(title=plots.title(groups[g]), xlabel='loop step k')
    axes[0].set(ylabel=label, yscale='log' if is_norm else 'linear')        # of all panels
    axes[-1].legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
    header = ['group', 'iteration', 'k', 'mean', 'std', 'clear_of_rounding']
    plots.save(figure, f'{folder}/{file}.png', header, table)


def figure_1(states, used, words, groups, folder):
    """
    Fig. 1: two tokens, one that settles early and one that settles late; the path of each through
    the groups, and its loop steps in each group magnified. used: {rule: loop steps (G, T)}.
    """
    total = sum(used.values()).sum(axis=0)
    figure, rows = plots.panels(1 + len(groups), 3, 3.6, rows=2)
    figure.set_layout_engine('constrained')
    table = []
    for (ax, *zooms), t, settles in zip(rows, (total.argmin(), total.argmax()), ('early', 'late')):
        whole, length = (each[:, :, 0].numpy(force=True) for each in paths(states[:, :, [t]]))
        plots.draw_path(ax, whole, whole, groups)
        ax.set_title(f'token {t}, "{words[t]}", settles {settles}', parse_math=False)
        ax.set_xlabel('jumps: ' + (', '.join(f'{x:.1f}' for x in length[1:, 0]) or 'none'))
        for g, (group, zoom, points) in enumerate(zip(groups, zooms, whole)):
            exits = {rule: steps[g, t] for rule, steps in used.items()}
            note = '\nsteps 2, 3, ...: ' + ', '.join(f'{x:.2g}' for x in length[g, 1:4])
            for (rule, k), sign, marker, size in zip(exits.items(), '□◇', 'sD', (17, 11)):
                note += f'\n{sign} {rule} exits after step {k}'
                zoom.plot(*points[k - 1], marker, ms=size, mfc='none', mec='black', zorder=4)
            dots = plots.draw_zoom(zoom, ax, points, points, g, note)
            zoom.set_title(f'inside {plots.title(group)}')
            table += [[g, t, k, *row, *exits.values()]
                      for k, row in enumerate(zip(*points.T, length[g]), start=1)]
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
    for group, x, ax in zip(groups, states, axes):
        distance = vector_norm(x[:-1] - x[-1], dim=-1).T.numpy(force=True)      # (T, K)
        image = ax.imshow(np.log10(distance + 1e-7), aspect='auto', interpolation='nearest')
        bar = figure.colorbar(image, ax=ax)
        ax.set(title=plots.title(group), xlabel='loop step k', xlim=(-0.5, len(x) - 1.5))
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
    first, last = (logits_of(model, g, states[g, k]).softmax(-1) for g, k in ((0, 1), (-1, -1)))
    p, best = last.max(dim=-1, keepdim=True)
    t = int((p - first.gather(1, best)).argmax())
    path, lengths = (each[:, :, 0].numpy(force=True) for each in paths(states[:, :, [t]]))
    path = [points[:max(2, k)] for points, k in zip(path, used[:, t])]          # (k, 2) a group

    # the five likeliest next tokens at each of its loop steps
    table = []
    for g, points in enumerate(path):
        for k, point in enumerate(points, start=1):
            p, tokens = logits_of(model, g, states[g, k])[t].softmax(-1).sort(descending=True)
            table.append([g, t, k, *point, lengths[g, k - 1],
                          *texts_of(tokens[:5].tolist(), encoding), *p[:5].tolist()])
    text = ''.join(words[:t + 1])
    plots.two_scales(table, path, model.config.groups, text, f'{folder}/two_scales.gif')


# the run ------------------------------------------------------------------------------------------

def print_table(measured, groups):
    """A row for each checkpoint and group."""
    print('\niteration  group   steps to a tenth   settled cosine   floor f32/bf16'
          '    DLR noise     DLR first     DLR settled')
    for it, by_group in measured.items():
        for group, found in zip(groups, by_group):
            steps, floor = steps_to_a_tenth(found['norm'][0]), found['floor']
            ratios = '  '.join(f'{mean:5.1f} +- {std:<4.1f}' for mean, std in found['dlr'].values())
            print(f"{it:9d}  {'-'.join(map(str, group)):6s}  {steps:16}   {found['settled']:14.2f}"
                  f"   {floor['float32']:.0e}/{floor['bfloat16']:.0e}   {ratios}")


@torch.no_grad()
def main():
    import data
    from common.distributed import pick_device

    # the run, and the text to look at
    if n_loop < 2 or n_windows < 1:
        raise ValueError('n_loop must be at least 2, and n_windows at least 1')
    dev, _ = pick_device(device, 'float32')
    model, last, source, results = open_run(
        out_dir, dev, 'there is no loop to look at: choose another --out_dir')
    groups, folder = model.config.groups, f'{results}/figures'
    if animate and len(groups) < 2:
        raise ValueError(f'--animate shows jumps between groups, and the model in {source} has '
                         'only one: choose another --out_dir')
    models = models_of(model, last['iter_num'], source, dev)
    _, idx, _, depth = data.held_out(last, n_windows, dataset, dev)             # (n_windows, T)
    print(f"{source}: checkpoints of iterations {', '.join(map(str, models))}; groups {groups}; "
          f'{n_windows} held-out windows of {idx.shape[1]} tokens, {n_loop} loops')

    # all checkpoints
    measured = {it: measure(checkpoint, idx, n_loop) for it, checkpoint in models.items()}
    print_table(measured, groups)
    if any(found['first'] for found in measured[max(measured)]):
        print('the first token of a window, a sink of attention with ten times the norm of others, '
              'is left out')
    if len(groups) > 1:
        figure_2(measured, groups, folder)
    for name in ('norm', 'cos'):
        figure_3a_or_5(name, measured, groups, folder)

    # the first window in the last one
    model, idx, used = models[max(models)], idx[:1], {}
    states = torch.stack([entry['states'][:, 0] for entry in trace_of(model, idx, n_loop)])
    for rule in ('accel', 'norm_rel'):
        model(idx, n_loop=n_loop, exit=make_exit(rule), trace=(trace := []))
        used[rule] = torch.cat([entry['steps_used'] for entry in trace]).numpy(force=True)  # (G, T)
    encoding = last['tokenizer'] and data.get_encoding(last['tokenizer'], source)
    texts = texts_of(idx[0].tolist(), encoding)
    words = [repr(text)[1:-1] for text in texts]        # a line break as \n
    figure_1(states, used, words, groups, folder)
    convergence(states, None if depth is None else depth[0], words, groups, folder)
    if animate:
        two_scales(model, states, used['norm_rel'], words, encoding, folder)
    print(f'\nfigures, and their numbers as CSV: {folder}')


if __name__ == '__main__':
    from common.configurator import configure, run
    config = configure(globals())
    run(main)
