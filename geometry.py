"""
The geometry of the loops: small turning updates inside a group, large moves between groups; over training, group by group.

    python geometry.py                              the default run's checkpoints, 20 s on two cores
    python geometry.py --out_dir=out-groups --n_loop=30

prints a summary and writes out_dir/figures: a PNG for each figure, and its numbers as CSV beside it.
Paper: sec. 3 (step norms, angles, PCA; Fig. 1, 3, 5), Eq. 1, Eq. 2 (drift-to-loop ratio; Fig. 2), Eq. 5, 6; Geiping Fig. 5 (convergence by
token), Fig. 6 (six PCA directions). Symbols: states (K+1, ..., C) float32 are x^(0) ... x^(K) of one group, delta^(k) = x^(k+1) - x^(k),
g a group. Norms are Euclidean, over C.
"""
import copy
import csv
import glob
import os
import re

import matplotlib
import numpy as np
import torch
from torch.linalg import vector_norm

from checkpoint import load_checkpoint
import data
from configurator import configure, run
from exits import EPS
from model import pick_device

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None  # held-out text; None = the run's own
n_loop = 30                 # loops of each group: the 30 of the paper's Fig. 5
n_windows = 24              # held-out windows of block_size tokens
noise_draws = 4             # of x^(0), for path independence
most_loops = 256            # how far beyond training the loss is followed
tokens_shown = 3            # of the first window, in figures 1 and 6
device = 'auto'
# ---------------------------------------------------------------------------------------------------------------------

CLEAR = 30      # a step's direction is the model's own while its norm is so many rounding floors: rounding then turns it by 2 degrees
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9')    # Okabe and Ito: told apart by all eyes


# the probes: pure functions -------------------------------------------------------------------------------------------

def deltas(states):
    """states (K+1, ..., C) -> updates (K, ..., C), Eq. 1."""
    return states.float().diff(dim=0)


def step_norm(states):
    """||delta^(k)||, Eq. 1: (K+1, ..., C) -> (K, ...)."""
    return vector_norm(deltas(states), dim=-1)


def step_cos(states):
    """cos of the angle between delta^(k) and delta^(k-1): (K+1, ..., C) -> (K-1, ...)."""
    d = deltas(states)
    return (d[1:] * d[:-1]).sum(-1) / (vector_norm(d[1:], dim=-1) * vector_norm(d[:-1], dim=-1)).clamp(min=1e-30)


def accel(states):
    """||delta^(k) - delta^(k-1)||, Eq. 5: (K+1, ..., C) -> (K-1, ...)."""
    return vector_norm(deltas(states).diff(dim=0), dim=-1)


def accel_hat(states):
    """Eq. 6, in [0, 1]: (K+1, ..., C) -> (K-1, ...)."""
    norms = step_norm(states)
    return accel(states) / (norms[1:] + norms[:-1] + EPS)


def contraction(states):
    """||delta^(k)|| / ||delta^(k-1)||: (K+1, ..., C) -> (K-1, ...). Below 1 the steps shrink."""
    norms = step_norm(states)
    return norms[1:] / norms[:-1].clamp(min=1e-30)


def dlr(states_g, x0_next):
    """Drift-to-loop ratio, Eq. 2: ||x_(g+1)^(0) - x_g^(K)|| over the mean ||delta_g||. (K+1, ..., C), (..., C) -> (...)."""
    return vector_norm(x0_next.float() - states_g[-1].float(), dim=-1) / step_norm(states_g).mean(dim=0).clamp(min=1e-30)


def pca(states, dims):
    """states (..., C) -> (..., dims): principal coordinates over all states together; each axis's largest entry is positive."""
    flat = states.float().reshape(-1, states.shape[-1])
    flat = flat - flat.mean(dim=0)
    axes = torch.linalg.svd(flat, full_matrices=False)[2][:dims]                    # (dims, C)
    axes = axes * axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)).sign()
    axes = torch.nn.functional.pad(axes, (0, 0, 0, dims - len(axes)))               # fewer directions than asked for: zeros
    return (flat @ axes.T).view(*states.shape[:-1], dims)


def pca_2d(states):
    """states (..., C) -> (..., 2), as the paper's Fig. 1 and Geiping's."""
    return pca(states, 2)


def path_spread(ends):
    """End states from S noise draws (S, ..., C) -> (...): mean distance from their mean, over its norm. 0: path independent."""
    mean = ends.float().mean(dim=0)
    return vector_norm(ends.float() - mean, dim=-1).mean(dim=0) / vector_norm(mean, dim=-1)


def motion(states):
    """
    'fixed point', 'orbit' or 'slider' for one token's states (K+1, C), K >= 4 (Geiping sec. 6, by a rule of our own).

    A fixed point: the last half of the steps is under 1% of the whole path. Otherwise, of that last half: a slider gets
    further than half of its path's length, an orbit does not.
    """
    norms, half = step_norm(states), (len(states) - 1) // 2
    if norms[half:].sum() < 0.01 * norms.sum():
        return 'fixed point'
    return 'slider' if vector_norm(states[-1].float() - states[half].float()) > 0.5 * norms[half:].sum() else 'orbit'


@torch.no_grad()
def rounding_floor(group, states, e, dtype):
    """
    Rounding noise of one step at the last state: mean ||f_dtype(x) - f_float64(x)||, with matrix products in dtype.

    A step norm below it is made of rounding, and so is its cosine.
    """
    x, e = states[-1, :4].cpu(), e[:4].cpu()        # on the CPU: not every device has float64
    group = copy.deepcopy(group).cpu()
    exact = copy.deepcopy(group).double()
    with torch.autocast('cpu', torch.bfloat16, enabled=dtype == torch.bfloat16):
        rounded = group.step(x, e)
    return vector_norm(rounded.double() - exact.step(x.double(), e.double()), dim=-1).mean().item()


# one checkpoint -------------------------------------------------------------------------------------------------------

@torch.no_grad()
def trace_of(model, idx, noise_seed=0):
    """One forward pass over idx (B, T) at n_loop loops -> for each group dict(e, states (K+1, B, T, C), ...)."""
    trace = []
    model(idx, n_loop=n_loop, noise_seed=noise_seed, trace=trace)
    return trace


def measure(model, idx):
    """What the figures over training need of one checkpoint: per group curves over k, mean and standard deviation over tokens."""
    trace, groups = trace_of(model, idx), []
    for g, t in enumerate(trace):
        states, curves = t['states'], {}
        for name, probe in dict(norm=step_norm, cos=step_cos, accel_hat=accel_hat, contraction=contraction).items():
            values = probe(states).flatten(1)
            curves[name] = values.mean(dim=1).cpu().numpy()
            curves[name + '_std'] = values.std(dim=1).cpu().numpy()
        for dtype in ('float32', 'bfloat16'):
            curves['floor_' + dtype] = rounding_floor(model.groups[g], states, t['e'], getattr(torch, dtype))
        if g + 1 < len(trace):
            following = trace[g + 1]['states']
            for reading, x0_next in dict(noise=following[0], first=following[1], settled=following[-1]).items():
                ratio = dlr(states, x0_next)
                curves['dlr_' + reading], curves['dlr_' + reading + '_std'] = ratio.mean().item(), ratio.std().item()
        groups.append(curves)
    return groups


def load_run():
    """The run's checkpoints in order of iteration: {iteration: model}, and the last one's dict. ValueError if they do not fit."""
    dev, _ = pick_device(device, 'float32')
    models, last = {}, None
    for path in [os.path.join(out_dir, 'ckpt.pt'), *glob.glob(os.path.join(out_dir, 'ckpt_*.pt'))]:
        model, checkpoint = load_checkpoint(path, dev)
        last = last or checkpoint
        free = {'max_iters', 'lr_decay_iters', 'out_dir', 'resume', 'device', 'dtype', 'compile', 'checkpoint_steps', 'peak_tflops'}     # what may differ within a run
        odd = [f'{k} = {v}' for k, v in checkpoint['config'].items() if k not in free and not re.match('eval_|log_|keep_|save_', k) and v != last['config'].get(k)]
        if odd or checkpoint['iter_num'] > last['iter_num']:
            raise ValueError(f"{path} is of another run than ckpt.pt ({', '.join(odd) or 'a later iteration'}): remove it")
        models.setdefault(checkpoint['iter_num'], model)
    if not last['model_args']['groups']:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: there is no loop to look at')
    return dict(sorted(models.items())), last


# figures: each writes NAME.png and NAME.csv ---------------------------------------------------------------------------

def save(fig, name, header, rows):
    folder = os.path.join(out_dir, 'figures')
    os.makedirs(folder, exist_ok=True)
    fig.savefig(os.path.join(folder, name + '.png'), dpi=110, bbox_inches='tight')
    plt.close(fig)
    with open(os.path.join(folder, name + '.csv'), 'w', newline='') as f:
        csv.writer(f).writerows([header, *rows])


def title(g, groups):
    return 'group ' + '-'.join(map(str, groups[g]))


def shade(i, n):
    """Early checkpoints light, late ones dark: print and colour-blind eyes tell them apart."""
    return plt.get_cmap('viridis_r')(0.1 + 0.9 * i / max(1, n - 1))


def figure_1(trace, groups):
    """Whole trajectories of some tokens in 2D PCA, and a zoom on the last group's end; light to dark by step. From k = 1: x^(0) is noise."""
    states = torch.stack([t['states'][1:, 0] for t in trace])                       # (G, K, T, C)
    points = pca_2d(states).cpu().numpy()
    chosen = np.linspace(states.shape[2] // 3, states.shape[2] - 1, tokens_shown).astype(int)
    fig, (ax, inset) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    for t in chosen:
        for g in range(len(trace)):
            x, y = points[g, :, t].T
            for axes in (ax, inset) if t == chosen[-1] and g == len(trace) - 1 else (ax,):
                axes.plot(x, y, color=COLOURS[g % 6], lw=0.8)
                axes.scatter(x, y, s=14, c=np.arange(len(x)), cmap=matplotlib.colors.LinearSegmentedColormap.from_list('', ['white', COLOURS[g % 6]]),
                             edgecolors=COLOURS[g % 6], linewidths=0.4, label=title(g, groups) if t == chosen[0] else None, zorder=3)
            if g + 1 < len(trace):
                ax.annotate('', points[g + 1, 0, t], points[g, -1, t], arrowprops=dict(arrowstyle='->', ls='--', color='0.4', lw=0.8))
    end = points[-1, 1:, chosen[-1]]
    margin = 0.1 * np.ptp(end, axis=0).max() + 1e-9
    inset.set(xlim=(end[:, 0].min() - margin, end[:, 0].max() + margin), ylim=(end[:, 1].min() - margin, end[:, 1].max() + margin))
    inset.set(xlabel='first principal direction', title=f'zoom: {title(len(trace) - 1, groups)} of one token, from k = 2')
    ax.set(xlabel='first principal direction', ylabel='second', title=f'{len(chosen)} tokens through the groups; dashed: hand-offs')
    ax.legend(frameon=False)
    fig.tight_layout()
    save(fig, 'figure_1', ['group', 'token', 'k', 'pc1', 'pc2'],
         [[g, t, k + 1, *points[g, k, t]] for g in range(len(trace)) for t in chosen for k in range(points.shape[1])])


def figure_2(run, groups):
    """Drift-to-loop ratio at each boundary over checkpoints, in three readings of x_(g+1)^(0); bars: 1 sigma over tokens."""
    fig, axs = plt.subplots(1, len(groups) - 1, figsize=(4 * (len(groups) - 1), 3.4), squeeze=False)
    its, rows = list(run), []
    for g, ax in enumerate(axs[0]):
        for (reading, style), colour in zip(dict(noise='o-', first='s--', settled='^:').items(), COLOURS):
            mean, std = ([run[it][g][f'dlr_{reading}{end}'] for it in its] for end in ('', '_std'))
            ax.errorbar(range(len(its)), mean, std, fmt=style, color=colour, capsize=2, label=f'to the {reading} state')
            rows += [[groups[g], groups[g + 1], reading, it, m, s] for it, m, s in zip(its, mean, std)]
        ax.set_title(f'{title(g, groups)} to {title(g + 1, groups)}')
        ax.axhline(1, color='0.5', lw=0.8)
        ax.set(xticks=range(len(its)), xticklabels=its, xlabel='iteration', ylabel='' if g else 'drift-to-loop ratio (Eq. 2)', yscale='log')
        ax.legend(frameon=False, fontsize=7)
    save(fig, 'figure_2', ['from', 'to', 'reading', 'iteration', 'mean', 'std'], rows)


def curves(run, groups, name, ylabel, figure, first_k, log=False, until=None):
    """A row of panels, one a group: mean of a probe against k with its 1-sigma band, one curve a checkpoint; grey where rounding has a say."""
    fig, axs = plt.subplots(1, len(groups), figsize=(4 * len(groups), 3.4), squeeze=False, sharey=True)
    rows = []
    for g, ax in enumerate(axs[0]):
        for i, (it, measured) in enumerate(run.items()):
            m = measured[g]
            mean, std = m[name][:until], m[name + '_std'][:until]
            k, colour = np.arange(len(mean)) + first_k, shade(i, len(run))
            sound = m['norm'][k] > m['floor_float32'] * (1 if name == 'norm' else CLEAR)
            ax.plot(k, mean, color='0.8', lw=1)
            ax.plot(k, np.where(sound, mean, np.nan), color=colour, lw=1.5, label=f'iteration {it}')
            low = np.maximum(mean - std, mean / 10) if log else mean - std
            ax.fill_between(k, low, np.minimum(mean + std, 1) if name == 'cos' else mean + std, where=sound, color=colour, alpha=0.12, lw=0)
            rows += [[groups[g], it, *point] for point in zip(k, mean, std, sound.astype(int))]
        if name == 'norm':
            for dtype, style in dict(float32=':', bfloat16='--').items():
                ax.axhline(m['floor_' + dtype], color='0.4', ls=style, lw=0.8, label=f'{dtype} floor, last checkpoint')
        ax.set(title=title(g, groups), xlabel='loop step k', ylabel=ylabel if g == 0 else '', yscale='log' if log else 'linear')
    axs[0][-1].legend(frameon=False, fontsize=7)
    save(fig, figure, ['group', 'iteration', 'k', 'mean', 'std', 'clear_of_rounding'], rows)


def figure_paths(spread, groups):
    """Path independence over checkpoints: spread of the end states over noise draws, relative to their norm."""
    fig, ax = plt.subplots(figsize=(5, 3.4))
    for g in range(len(groups)):
        ax.plot(range(len(spread)), [s[g] for s in spread.values()], 'os^Dv'[g % 5] + '-', color=COLOURS[g % 6], label=title(g, groups))
    ax.set(xticks=range(len(spread)), xticklabels=list(spread), xlabel='iteration', ylabel='spread of end states / norm', yscale='log',
           title=f'{noise_draws} noise draws, {n_loop} loops')
    ax.legend(frameon=False)
    save(fig, 'path_independence', ['iteration', 'group', 'spread'], [[it, groups[g], s[g]] for it, s in spread.items() for g in range(len(groups))])


def figure_convergence(trace, groups, words):
    """Heat map, Geiping Fig. 5: token down, loop step across, distance to the last iterate (log10), tokens written beside it."""
    fig, axs = plt.subplots(1, len(groups), figsize=(3.4 * len(groups), 0.16 * len(words) + 1), squeeze=False, sharey=True)
    rows = []
    for g, ax in enumerate(axs[0]):
        states = trace[g]['states'][:, 0]                                           # (K+1, T, C)
        distance = vector_norm(states[:-1] - states[-1], dim=-1).T.cpu().numpy()    # (T, K)
        image = ax.imshow(np.log10(distance + 1e-7), aspect='auto', cmap='viridis', interpolation='nearest')
        ax.set(title=title(g, groups), xlabel='loop step k')
        ax.set_yticks(range(len(words)), words, fontsize=6, family='monospace')
        fig.colorbar(image, ax=ax, label='log10 distance to the last iterate' if g == len(groups) - 1 else None)
        rows += [[groups[g], t, words[t], k, distance[t, k]] for t in range(len(words)) for k in range(distance.shape[1])]
    save(fig, 'convergence', ['group', 'token', 'text', 'k', 'distance'], rows)


def figure_stability(losses, mean_recurrence):
    """Held-out loss from 1 loop to far beyond training."""
    fig, ax = plt.subplots(figsize=(5, 3.4))
    ax.plot(list(losses), list(losses.values()), 'o-', color=COLOURS[0])
    ax.axvline(mean_recurrence + 1, color='0.5', ls='--', lw=0.8, label='mean of the training draw')
    ax.set(xlabel='loops', ylabel='held-out loss (nats a token)', xscale='log', title='Loss by loops')
    ax.set_xticks(list(losses), list(losses))
    ax.minorticks_off()
    ax.legend(frameon=False)
    save(fig, 'stability', ['loops', 'loss'], losses.items())


def figure_6(trace, groups, words):
    """Geiping Fig. 6: chosen tokens in three pairs of the first six PCA directions, each labelled by its motion."""
    chosen = np.linspace(len(words) // 3, len(words) - 1, tokens_shown).astype(int)
    fig, axs = plt.subplots(len(chosen) * len(groups), 3, figsize=(8, 2.2 * len(chosen) * len(groups)), squeeze=False)
    rows = []
    for g in range(len(groups)):
        points = pca(trace[g]['states'][1:, 0], 6).cpu().numpy()                    # (K, T, 6)
        for j, t in enumerate(chosen):
            kind = motion(trace[g]['states'][1:, 0, t])
            for pair, ax in enumerate(axs[g * len(chosen) + j]):
                x, y = points[:, t, 2 * pair], points[:, t, 2 * pair + 1]
                ax.plot(x, y, color='0.7', lw=0.8)
                ax.scatter(x, y, c=np.arange(len(x)), cmap='viridis_r', s=12)
                ax.plot(*points[:, t, 2 * pair:2 * pair + 2].mean(axis=0), '+', color=COLOURS[1])
                ax.set_xlabel(f'direction {2 * pair + 1}', fontsize=7)
                ax.set_ylabel(f'{2 * pair + 2}', fontsize=7)
                ax.tick_params(labelsize=5)
            axs[g * len(chosen) + j][1].set_title(f'{title(g, groups)}, token {words[t]}: {kind}', fontsize=8)
            rows += [[groups[g], t, words[t], kind, k + 1, *points[k, t]] for k in range(len(points))]
    fig.tight_layout()
    save(fig, 'figure_6', ['group', 'token', 'text', 'motion', 'k', *(f'pc{i}' for i in range(1, 7))], rows)


# what it says ---------------------------------------------------------------------------------------------------------

def tenfold(norms):
    """Steps until the mean norm has fallen tenfold, or None."""
    below = np.nonzero(norms <= norms[0] / 10)[0]
    return int(below[0]) if len(below) else None


def settled_cos(m):
    """Mean cosine over the last three steps that are clear of the float32 floor; nan if there are none."""
    sound = m['cos'][m['norm'][1:] > CLEAR * m['floor_float32']]
    return float(sound[-3:].mean()) if len(sound) else float('nan')


def summary(run, groups, spread, losses, kinds):
    print('\niteration  group   steps to a tenth   settled cosine   floor f32/bf16    DLR noise     DLR first     DLR settled')
    for it, measured in run.items():
        for g, m in enumerate(measured):
            ratios = '  '.join(f"{m['dlr_' + r]:5.1f} +- {m['dlr_' + r + '_std']:<4.1f}" for r in ('noise', 'first', 'settled')) if 'dlr_noise' in m else ''
            print(f"{it:9d}  {'-'.join(map(str, groups[g])):6s}  {str(tenfold(m['norm']) or f'over {n_loop}'):>16s}   {settled_cos(m):14.2f}"
                  f"   {m['floor_float32']:.0e}/{m['floor_bfloat16']:.0e}   {ratios}")
    print(f'\nend states of {noise_draws} noise draws, spread over norm, last checkpoint: ' + ', '.join(f'{title(g, groups)} {s:.1e}' for g, s in enumerate(list(spread.values())[-1])))
    print('held-out loss by loops: ' + ', '.join(f'{n}: {loss:.4f}' for n, loss in losses.items()))
    print(f'motions of the first window, {n_loop} loops: ' + '; '.join(f'{title(g, groups)}: ' + ', '.join(f'{n} {k}' for k, n in sorted(kind.items())) for g, kind in enumerate(kinds)))
    first, last = list(run.values())[0], list(run.values())[-1]
    steps = [tenfold(m['norm']) for m in last]
    cosines = [settled_cos(m) for m in last]
    drift = [(a[f'dlr_{r}'], b[f'dlr_{r}'], max(a[f'dlr_{r}_std'], b[f'dlr_{r}_std'])) for a, b in zip(first, last) if 'dlr_noise' in b for r in ('first', 'settled')]
    faster = sum((tenfold(b['norm']) or n_loop) < (tenfold(a['norm']) or n_loop) for a, b in zip(first, last))
    turned = sum(settled_cos(b) < settled_cos(a) - 0.05 for a, b in zip(first, last))
    grown = sum(b > a + std for a, b, std in drift)
    says = lambda yes: 'shown' if yes else 'NOT shown'
    print(f"\n(i) step norms fall within 5 to 10 steps: {says(all(s and s <= 10 for s in steps))}; tenfold after {', '.join(map(str, steps))} steps.")
    print(f"(ii) the cosine settles near 0.5 to 0.65: {says(all(0.5 <= c <= 0.65 for c in cosines))}; {', '.join(f'{c:.2f}' for c in cosines)}.")
    print(f"(iii) both strengthen over training, across-block moves stay larger: {says(faster == turned == len(groups) and drift and all(b > 1 for _, b, _ in drift))}; norms fall "
          f"faster than at first in {faster} of {len(groups)} groups, the cosine has fallen by 0.05 or more in {turned}; DLR is above 1 in {sum(b > 1 for _, b, _ in drift)} of "
          f"{len(drift)} readings (to the noise left out: it is large whatever was learnt), and has grown by more than a standard deviation in {grown}.")


def main():
    for knob, least in dict(n_loop=4, n_windows=1, noise_draws=2, most_loops=1, tokens_shown=1).items():
        if globals()[knob] < least:
            raise ValueError(f'{knob} must be at least {least}, not {globals()[knob]}')
    models, checkpoint = load_run()
    _, tokens, meta = data.load(dataset or checkpoint['config']['dataset'])
    if meta['tokenizer'] != checkpoint['tokenizer']:
        raise ValueError(f"the model reads {checkpoint['tokenizer']} tokens, data set '{dataset}' holds {meta['tokenizer']}: choose another --dataset")
    model, groups = models[max(models)], checkpoint['model_args']['groups']
    T = model.config.block_size
    if (len(tokens) - 1) // T < n_windows:
        raise ValueError(f'the held-out text has {(len(tokens) - 1) // T} windows of {T} tokens: --n_windows may be no more')
    idx, targets = (t.to(next(model.parameters()).device) for t in data.windows(tokens, range(0, T * n_windows, T), T))
    print(f'{out_dir}: checkpoints of iterations {", ".join(map(str, models))}; groups {groups}; {n_windows} held-out windows of {T} tokens, {n_loop} loops')
    run, spread = {}, {}
    for it, m in models.items():
        run[it] = measure(m, idx)
        ends = [[t['states'][-1] for t in trace_of(m, idx[:4], noise_seed=s)] for s in range(noise_draws)]
        spread[it] = [path_spread(torch.stack(draws)).mean().item() for draws in zip(*ends)]
    trace = trace_of(model, idx[:1])
    encoding = data.get_encoding(checkpoint['tokenizer'])
    words = [repr(encoding.decode_single_token_bytes(i).decode('utf-8', 'replace'))[1:-1].replace('$', r'\\$') if i < encoding.n_vocab else '?' for i in idx[0].tolist()]
    losses, n = {}, 1
    with torch.no_grad():
        while n <= most_loops:
            losses[n] = model(idx, targets, n_loop=n)[1].item()
            n *= 2
    kinds = [{k: names.count(k) for k in set(names)} for names in ([motion(t['states'][1:, 0, i]) for i in range(T)] for t in trace)]
    figure_1(trace, groups)
    if len(groups) > 1:
        figure_2(run, groups)
    curves(run, groups, 'norm', 'step norm (Eq. 1)', 'figure_3a', 0, log=True)
    curves(run, groups, 'cos', 'cosine of consecutive steps', 'figure_3b', 1, until=round(2 * model.config.mean_recurrence + 2))
    curves(run, groups, 'cos', f'cosine, fixed {n_loop} loops', 'figure_5', 1)
    curves(run, groups, 'contraction', 'step norm over the one before', 'contraction', 1)
    curves(run, groups, 'accel_hat', 'normalised acceleration (Eq. 6)', 'accel_hat', 1)
    figure_paths(spread, groups)
    figure_convergence(trace, groups, words)
    figure_stability(losses, model.config.mean_recurrence)
    figure_6(trace, groups, words)
    summary(run, groups, spread, losses, kinds)
    print(f'\n{os.path.join(out_dir, "figures")}: ' + ', '.join(sorted(re.sub(r'\.png$', '', f) for f in os.listdir(os.path.join(out_dir, 'figures')) if f.endswith('.png'))))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
