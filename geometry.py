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
import glob
import os

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn.functional import pad

from common import plots
from common.checkpoint import FREE_KNOBS, find_run, load_checkpoint
from exits import make_exit

# --------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # whose held-out text to read; None = the run's own
n_loop = 30                 # loops of each group; the paper's Fig. 5 has 30
n_windows = 24              # held-out windows of block_size tokens
animate = False             # also a GIF of one token on its way: figures/two_scales.gif
device = 'auto'
# --------------------------------------------------------------------------------------------------

# A step longer than this many rounding floors (see rounding_floor) is clear of rounding: its
# direction is off by 2 degrees at most.
CLEAR = 30


# probes: pure functions ---------------------------------------------------------------------------

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


# Eq. 2 measures the way from the end of a group to the next group's x^(0), here called noise. Read
# in two more ways, it ends at the next group's first iterate, or at its last: {reading: k}.
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


def path_spread(ends):
    """
    Mean distance of the end states from their mean, divided by the norm of that mean.

    ends (S, ..., C): from S draws of x^(0) -> (...), 0 where all paths end in the same point.
    """
    mean = ends.float().mean(dim=0)
    distance = vector_norm(ends.float() - mean, dim=-1)                         # (S, ...)
    return distance.mean(dim=0) / vector_norm(mean, dim=-1)


@torch.no_grad()
def rounding_floor(group, states, e, dtype):
    """
    The error that rounding adds to one step: mean ||f_dtype(x) - f_float64(x)|| at the last states.

    Step norms below this floor, and the cosines of such steps, consist of rounding. dtype: of the
    matrix products. states (K+1, B, T, C), e (B, T, C); the first four rows of B are enough.
    """
    x, e = states[-1, :4].cpu(), e[:4].cpu()        # on the CPU: not every device has float64
    group = copy.deepcopy(group).cpu()
    exact = copy.deepcopy(group).double()
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        rounded = group.step(x, e)
    difference = rounded.double() - exact.step(x.double(), e.double())
    return vector_norm(difference, dim=-1).mean().item()


def steps_to_a_tenth(norms):
    """
    Steps until the mean step norm (K,) has fallen to a tenth; None if it does not fall that far.

    Counted from the second step: the first one leads out of the noise and refines nothing yet.
    """
    small = np.nonzero(norms[1:] <= norms[1] / 10)[0]
    return int(small[0]) if len(small) else None


def last_clear_cos(states, floor):
    """
    Each token's cosine at its last step that is clear of rounding.

    states (K+1, ..., C) -> (...), nan where no step is clear. floor: the rounding floor.
    """
    # the number of steps until the first one that is not clear
    clear = (step_norm(states)[1:] > CLEAR * floor).long().cumprod(0).sum(0)
    last = step_cos(states).gather(0, (clear - 1).clamp(min=0)[None])[0]
    return last.where(clear > 0, torch.nan)


# checkpoints --------------------------------------------------------------------------------------

def load_run(out_dir, device):
    """
    All checkpoints of the run in out_dir: ({iteration: model}, sorted; the last one's dict).

    ValueError if there is none, if they belong to different runs, or if the model has no recurrent
    groups.
    """
    models, last = {}, None
    for path in [f'{out_dir}/ckpt.pt', *glob.glob(f'{glob.escape(out_dir)}/ckpt_*.pt')]:
        model, checkpoint = load_checkpoint(path, device)
        last = last or checkpoint
        # a resumed run knows its class as a knob
        knobs, of_last = (one['config'] | dict(model=one['model_class']) for one in (
            checkpoint, last))
        differing = [f'{knob} = {value}' for knob, value in knobs.items()
                     if knob not in FREE_KNOBS and value != of_last.get(knob)]
        if checkpoint['iter_num'] > last['iter_num']:
            differing.append(f"later than iteration {last['iter_num']}")
        if differing:
            raise ValueError(f"{path} and ckpt.pt are of different runs ({', '.join(differing)}): "
                             'resume the run, or remove the file')
        models.setdefault(checkpoint['iter_num'], model)
    if not model.groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups, so there is no loop to '
                         'look at: choose another --out_dir')
    return dict(sorted(models.items())), last


@torch.no_grad()
def trace_of(model, idx, n_loop, noise_seed=0):
    """One pass over idx (B, T) that keeps every state: a dict for each group, see model.GPT."""
    trace = []
    model(idx, n_loop=n_loop, noise=noise_seed, trace=trace)
    if not all(entry['states'].isfinite().all() for entry in trace):
        raise ValueError('the states are not finite: the model holds a NaN or an infinity')
    return trace


def logits_of(model, g, x):
    """What the states x (T, C) of group g predict, (T, V): in the last group through the coda."""
    last = g in (-1, len(model.groups) - 1)
    return (model.through_coda if last else model.readout)(x[None])[0]


def measure(model, idx, n_loop):
    """
    The probes of one checkpoint on idx (B, T): a dict for each group.

        norm (K,), cos (K-1,)                   means over the tokens
        dlr_noise, dlr_first, dlr_settled       means of Eq. 2, if there is a next group
        floor_float32, floor_bfloat16           rounding floors
        settled (B, T)                          cosine of each token, see last_clear_cos

    Each mean comes with its standard deviation over the tokens, NAME_std.
    """
    trace = trace_of(model, idx, n_loop)
    measured = []
    for g, group in enumerate(model.groups):
        states, e, curves = trace[g]['states'], trace[g]['e'], {}
        for name, probe in dict(norm=step_norm, cos=step_cos).items():
            values = probe(states).flatten(1)                                   # (K, B * T)
            curves[name] = values.mean(dim=1).cpu().numpy()
            curves[name + '_std'] = values.std(dim=1).cpu().numpy()
        for dtype in ('float32', 'bfloat16'):
            curves['floor_' + dtype] = rounding_floor(group, states, e, getattr(torch, dtype))
        curves['settled'] = last_clear_cos(states, curves['floor_float32']).cpu().numpy()
        if g + 1 < len(trace):
            x_next = trace[g + 1]['states']
            for reading, k in READINGS.items():
                ratio = dlr(states, x_next[k])
                curves['dlr_' + reading] = ratio.mean().item()
                curves[f'dlr_{reading}_std'] = ratio.std().item()
        measured.append(curves)
    return measured


# figures ------------------------------------------------------------------------------------------

def texts_of(tokens, encoding):
    """
    The text of each token in a list; bytes that are not UTF-8 as \\xNN, tokens without text as
    #NUMBER. encoding: of data.get_encoding, or None for a model that came without a tokenizer.
    """
    n_vocab = encoding.n_vocab if encoding else 0
    return [encoding.decode_single_token_bytes(token).decode('utf-8', 'backslashreplace')
            if token < n_vocab else f'#{token}' for token in tokens]


def figure_1(path, lengths, used, words, groups, file):
    """
    Fig. 1: two tokens, one that settles early and one that settles late; the path of each through
    the groups, and its loop steps in each group magnified.

    path (G, K, T, 2), lengths (G, K, T): see paths. used: {rule: loop steps of each token (G, T)}.
    """
    total = sum(used.values()).sum(axis=0)
    figure, rows = plots.panels(1 + len(groups), 3, 3.6, rows=2)
    figure.set_layout_engine('constrained')
    table = []
    for (ax, *zooms), t, settles in zip(rows, (total.argmin(), total.argmax()), ('early', 'late')):
        whole = list(path[:, :, t])
        plots.path(ax, whole, whole, groups)
        ax.set_title(f'token {t}, "{words[t]}", settles {settles}', parse_math=False)
        ax.set_xlabel('jumps: ' + (', '.join(f'{x:.1f}' for x in lengths[1:, 0, t]) or 'none'))
        for g, zoom in enumerate(zooms):
            exits = {rule: steps[g, t] for rule, steps in used.items()}
            note = '\nsteps 2, 3, ...: ' + ', '.join(f'{x:.2g}' for x in lengths[g, 1:4, t])
            for sign, (rule, k) in zip('□◇', exits.items()):
                note += f'\n{sign} {rule} exits after step {k}'
            image = plots.zoom(zoom, ax, whole[g], whole[g], g, note, exits.values())
            zoom.set_title(f'inside {plots.title(groups[g])}')
            table += [[g, t, k, *row, *exits.values()]
                      for k, row in enumerate(zip(*whole[g].T, lengths[g, :, t]), start=1)]
    figure.colorbar(image, ax=rows, shrink=0.5, label='loop step', ticks=[1, 2, 5, 10, 20, 50],
                    format='{x:.0f}')
    plots.save(figure, file, ['group', 'token', 'k', 'pc1', 'pc2', 'length', *used], table)


def two_scales(model, states, path, lengths, used, words, encoding, folder):
    """
    A GIF of one token on its way through the groups until it exits: its path, the loop steps of the
    group it is in magnified, and the likeliest next tokens at each step.

    The token is the one whose final prediction gains most. states (G, K+1, T, C); path, lengths:
    see paths; used (G, T): loop steps.
    """
    groups = model.config.groups
    first, last = (logits_of(model, g, states[g, k]).softmax(-1) for g, k in ((0, 1), (-1, -1)))
    p, best = last.max(dim=-1, keepdim=True)
    t = int((p - first.gather(1, best)).argmax())
    whole = [path[g, :max(2, k), t] for g, k in enumerate(used[:, t])]
    frames, table = [], []
    for g, points in enumerate(whole):
        for k, point in enumerate(points, start=1):
            p, tokens = logits_of(model, g, states[g, k])[t].softmax(-1).sort(descending=True)
            p, names = p[:5].tolist(), texts_of(tokens[:5].tolist(), encoding)
            frames += [(g, k, names, p)] * (3 if k == 1 else 1)
            table.append([g, t, k, *point, lengths[g, k - 1, t], *names, *p])

    def draw(figure, g, k, names, p):
        """Loop step k of group g, where these tokens are the likeliest."""
        colour, weights = plots.colour_of(g), ('normal', 'bold')
        top, bottom = figure.subfigures(2, 1, height_ratios=(3.6, 1.4))
        top.suptitle(f'The model reads "{"".join(words[:t + 1])[-40:]}" and expects {names[0]!r}',
                     parse_math=False)
        ax, zoom = top.subplots(1, 2)
        plots.path(ax, whole[:g] + [whole[g][:k]], whole, groups)
        plots.zoom(zoom, ax, whole[g][:k], whole[g], g, f'; loop step {k}' + (
            f', length {lengths[g, k - 1, t]:.2g}' if k > 1 else ' may lie outside'))
        ax.indicate_inset(inset_ax=zoom, edgecolor=colour, alpha=1)
        ax.set_title('between groups of layers: large jumps', weight=weights[g > 0 and k == 1])
        ax.set_xlabel(f'length of the jump: {lengths[g, 0, t]:.1f}' if g else ' ')
        zoom.set_title(f'inside {plots.title(groups[g])}: small loop steps', weight=weights[k > 1])
        bars = bottom.subplots()
        bars.bar_label(bars.barh(range(len(p)), p, color=colour), map('{:.0%}'.format, p))
        bars.set_yticks(range(len(p)), map(repr, names), parse_math=False)
        bars.set(xlim=(0, 1.1), xticks=[], title='the likeliest next tokens at this step')
        bars.invert_yaxis()
        bars.spines[['top', 'right', 'bottom']].set_visible(False)

    header = ['group', 'token', 'k', 'pc1', 'pc2', 'length']
    header += [f'{what}_{i + 1}' for what in ('text', 'p') for i in range(len(p))]
    plots.movie((8, 5), draw, frames + frames[-1:] * 5, f'{folder}/two_scales.gif', header,
                table)


def convergence(states, words, groups, depth, path):
    """
    Geiping Fig. 5: distance to the last state; a heat map a group, tokens down, loop steps across.

    states (G, K+1, T, C). words: the text of each token. depth: on a task the loop steps (T,) that
    each label needs, drawn as a white line.
    """
    figure, [axes] = plots.panels(len(groups), 3.4, 0.16 * len(words) + 1, sharey=True)
    table = []
    for group, x, ax in zip(groups, states, axes):
        distance = vector_norm(x[:-1] - x[-1], dim=-1).T.cpu().numpy()          # (T, K)
        image = ax.imshow(np.log10(distance + 1e-7), aspect='auto', interpolation='nearest')
        ax.set(title=plots.title(group), xlabel='loop step k')
        ax.set_yticks(range(len(words)), words, fontsize=8, family='monospace', parse_math=False)
        if depth is not None:
            ax.step([*depth, depth[-1]], np.arange(len(depth) + 1) - 0.5, color='white', lw=1.6,
                    label='depth of the label')
            ax.legend(loc='lower right', fontsize=8, labelcolor='white', facecolor='black')
        bar = figure.colorbar(image, ax=ax)
        for t, word in enumerate(words):
            table += [[group, t, word, k, d] for k, d in enumerate(distance[t])]
    bar.set_label('log10 distance to the last iterate')
    plots.save(figure, path, ['group', 'token', 'text', 'k', 'distance'], table)


def figure_2(measured, groups, path):
    """Fig. 2: drift-to-loop ratio at each hand-off, read three ways; bars: 1 sigma over tokens."""
    figure, [axes] = plots.panels(len(groups) - 1, 4, 3.4)
    markers = dict(noise='o-', first='s--', settled='^:')   # which state of the next group
    table = []
    for g, ax in enumerate(axes):
        for (reading, marker), colour in zip(markers.items(), plots.COLOURS):
            mean = [curves[g][f'dlr_{reading}'] for curves in measured.values()]
            std = [curves[g][f'dlr_{reading}_std'] for curves in measured.values()]
            ax.errorbar(range(len(measured)), mean, std, fmt=marker, color=colour, capsize=2,
                        label=f'to the {reading} state')
            table += [[groups[g], groups[g + 1], reading, *row] for row in zip(measured, mean, std)]
        ax.axhline(1, color='0.5', lw=0.8)
        ax.set_title(f'{plots.title(groups[g])} to {plots.title(groups[g + 1])}')
        ax.set_xticks(range(len(measured)), list(measured))
        ax.set(xlabel='iteration', yscale='log')
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel('drift-to-loop ratio (Eq. 2)')
    plots.save(figure, path, ['from', 'to', 'reading', 'iteration', 'mean', 'std'], table)


def figure_of(name, measured, groups, path):
    """
    Fig. 3a (name = 'norm') or 5 ('cos'): the probe against the loop step k; a panel per group, a
    curve per checkpoint, a band of one sigma. Grey and without a band where it is not clear of
    rounding: a norm below the floor, a cosine of a step below CLEAR floors.
    """
    is_norm = name == 'norm'
    figure, [axes] = plots.panels(len(groups), 4, 3.4, sharey=True)
    table = []
    for g, ax in enumerate(axes):
        for i, (it, by_group) in enumerate(measured.items()):
            curve = by_group[g]
            mean, std = curve[name], curve[name + '_std']               # (K,), or from k = 1 on
            k = np.arange(len(curve['norm']))[-len(mean):]
            sound = curve['norm'][k] > curve['floor_float32'] * (1 if is_norm else CLEAR)
            table += [[groups[g], it, *row] for row in zip(k, mean, std, sound.astype(int))]

            # the band keeps to the values that are possible: norms above 0, cosines up to 1
            low = np.maximum(mean - std, mean / 10) if is_norm else mean - std
            high = mean + std if is_norm else np.minimum(mean + std, 1)
            colour = plots.shade(i, len(measured))
            ax.plot(k, mean, color='0.8', lw=1)
            ax.plot(k, np.where(sound, mean, np.nan), color=colour, lw=1.5, label=f'iteration {it}')
            ax.fill_between(k, low, high, where=sound, color=colour, alpha=0.12, lw=0)

        # step norms below these floors consist of rounding
        for dtype, line in dict(float32=':', bfloat16='--').items() if is_norm else ():
            ax.axhline(curve[f'floor_{dtype}'], color='0.4', ls=line, lw=0.8,
                       label=f'{dtype} floor, last checkpoint')
        ax.set(title=plots.title(groups[g]), xlabel='loop step k',
               yscale='log' if is_norm else 'linear')
    axes[0].set_ylabel('step norm (Eq. 1)' if is_norm else 'cosine of consecutive steps')
    axes[-1].legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
    header = ['group', 'iteration', 'k', 'mean', 'std', 'clear_of_rounding']
    plots.save(figure, path, header, table)


# the run ------------------------------------------------------------------------------------------

def row_of(curves):
    """The probes of one group of a checkpoint as a row of text."""
    steps, settled = steps_to_a_tenth(curves['norm']), np.nanmean(curves['settled'])
    tenth = f"over {len(curves['norm'])}" if steps is None else steps
    floors = f"{curves['floor_float32']:.0e}/{curves['floor_bfloat16']:.0e}"
    ratios = [f"{curves[name]:5.1f} +- {curves[name + '_std']:<4.1f}"
              for name in ('dlr_noise', 'dlr_first', 'dlr_settled') if name in curves]
    return f'{tenth:>16}   {settled:14.2f}   {floors}   ' + '  '.join(ratios)


@torch.no_grad()
def main():
    import data
    from common.distributed import pick_device

    # the run, and the text to look at
    if n_loop < 2 or n_windows < 1:
        raise ValueError(f'n_loop must be at least 2 and n_windows at least 1, not {n_loop} and '
                         f'{n_windows}')
    dev, _ = pick_device(device, 'float32')
    source, results = find_run(out_dir)
    models, last = load_run(source, dev)
    model = models[max(models)]
    groups, T = model.config.groups, model.config.block_size
    if animate and len(groups) < 2:
        raise ValueError(f'--animate shows jumps between groups, and the model in {source} has '
                         'only one: choose another --out_dir')
    _, idx, _, depth = data.held_out(last, n_windows, dataset, dev)             # (n_windows, T)
    print(f"{source}: checkpoints of iterations {', '.join(map(str, models))}; groups {groups}; "
          f'{n_windows} held-out windows of {T} tokens, {n_loop} loops')

    # the probes of each checkpoint
    measured = {it: measure(checkpoint, idx, n_loop) for it, checkpoint in models.items()}
    print('\niteration  group   steps to a tenth   settled cosine   floor f32/bf16'
          '    DLR noise     DLR first     DLR settled')
    for it, by_group in measured.items():
        for group, curves in zip(groups, by_group):
            print(f"{it:9d}  {'-'.join(map(str, group)):6s}  {row_of(curves)}")

    # figures: of all checkpoints, and of the first window in the last one
    folder = os.path.join(results, 'figures')
    if len(groups) > 1:
        figure_2(measured, groups, f'{folder}/figure_2.png')
    figure_of('norm', measured, groups, f'{folder}/figure_3a.png')
    figure_of('cos', measured, groups, f'{folder}/figure_5.png')
    states = torch.stack([entry['states'][:, 0] for entry in trace_of(model, idx[:1], n_loop)])
    encoding = last['tokenizer'] and data.get_encoding(last['tokenizer'], source)
    words = [repr(text)[1:-1] for text in texts_of(idx[0].tolist(), encoding)]  # a line break as \n
    used = {}
    for rule in ('accel', 'norm_rel'):
        model(idx[:1], n_loop=n_loop, exit=make_exit(rule), trace=(found := []))
        used[rule] = torch.cat([entry['steps_used'] for entry in found]).numpy(force=True)  # (G, T)
    path, lengths = (each.numpy(force=True) for each in paths(states))
    figure_1(path, lengths, used, words, groups, f'{folder}/figure_1.png')
    if animate:
        two_scales(model, states, path, lengths, used['norm_rel'], words, encoding, folder)
    convergence(states, words, groups, None if depth is None else depth[0],
                f'{folder}/convergence.png')
    print(f'\nfigures, and their numbers as CSV: {folder}')


if __name__ == '__main__':
    from common.configurator import configure, run
    config = configure(globals())
    run(main)
