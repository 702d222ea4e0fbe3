"""
The geometry of the loops: small turning steps inside a group, large moves between the groups.

    python geometry.py                              the default run's checkpoints, 20 s on two cores
    python geometry.py --out_dir=out-groups --n_loop=30

Prints a summary over training, group by group, and writes the folder out_dir/figures: a PNG for
each figure, and its numbers as CSV beside it.

Paper: sec. 3 (step norms, angles, PCA; Fig. 1, 3, 5), Eq. 1, Eq. 2 (drift-to-loop ratio; Fig. 2),
Eq. 5, 6. Geiping: Fig. 5 (convergence by token), Fig. 6 (six PCA directions), sec. 6 (motions).

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

import data
import memory
from common import plots
from common.checkpoint import FREE_KNOBS, load_checkpoint
from common.configurator import configure, pick_device, run
from exits import EPS

# --------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None  # held-out text; None = the run's own
n_loop = 30                 # loops of each group: the 30 of the paper's Fig. 5
n_windows = 24              # held-out windows of block_size tokens
noise_draws = 4             # of x^(0), for path independence
most_loops = 256            # how far beyond training the loss is followed
tokens_shown = 3            # of the first window, in figures 1 and 6
device = 'auto'
# --------------------------------------------------------------------------------------------------

# A step's direction is the model's own while the step is longer than this many rounding floors:
# rounding then turns it by 2 degrees at most.
CLEAR = 30


# probes: pure functions ---------------------------------------------------------------------------

def deltas(states):
    """Updates delta^(k), Eq. 1: (K+1, ..., C) -> (K, ..., C)."""
    return states.float().diff(dim=0)


def step_norm(states):
    """||delta^(k)||, Eq. 1: (K+1, ..., C) -> (K, ...)."""
    return vector_norm(deltas(states), dim=-1)


def step_cos(states):
    """Cosine of the angle between delta^(k) and delta^(k-1): (K+1, ..., C) -> (K-1, ...)."""
    d = deltas(states)
    norms = vector_norm(d, dim=-1)
    return (d[1:] * d[:-1]).sum(-1) / (norms[1:] * norms[:-1]).clamp(min=1e-30)


def accel(states):
    """||delta^(k) - delta^(k-1)||, Eq. 5: (K+1, ..., C) -> (K-1, ...)."""
    return vector_norm(deltas(states).diff(dim=0), dim=-1)


def accel_hat(states):
    """Acceleration over the sum of the two step norms, Eq. 6, in [0, 1]; shapes as `accel`."""
    norms = step_norm(states)
    return accel(states) / (norms[1:] + norms[:-1] + EPS)


def contraction(states):
    """||delta^(k)|| / ||delta^(k-1)||, below 1 where steps shrink: (K+1, ..., C) -> (K-1, ...)."""
    norms = step_norm(states)
    return norms[1:] / norms[:-1].clamp(min=1e-30)


def dlr(states_g, x0_next):
    """
    Drift-to-loop ratio, Eq. 2: ||x_(g+1)^(0) - x_g^(K)|| over the mean ||delta_g^(k)||.

    states_g (K+1, ..., C), x0_next (..., C) -> (...).
    """
    drift = vector_norm(x0_next.float() - states_g[-1].float(), dim=-1)
    return drift / step_norm(states_g).mean(dim=0).clamp(min=1e-30)


def pca(states, dims):
    """
    Coordinates on the first principal axes of all states together: (..., C) -> (..., dims).

    Each axis points to where its largest entry is positive, so that the sign is fixed. Where there
    are fewer directions than `dims` the rest is zero.
    """
    flat = states.float().reshape(-1, states.shape[-1])
    flat = flat - flat.mean(dim=0)
    axes = torch.linalg.svd(flat, full_matrices=False)[2][:dims]                # (dims, C)
    largest = axes.abs().argmax(dim=1, keepdim=True)
    axes = axes * axes.gather(1, largest).sign()
    axes = torch.nn.functional.pad(axes, (0, 0, 0, dims - len(axes)))
    return (flat @ axes.T).view(*states.shape[:-1], dims)


def pca_2d(states):
    """(..., C) -> (..., 2), as in the paper's Fig. 1."""
    return pca(states, 2)


def path_spread(ends):
    """
    Mean distance of end states from their mean, over its norm: 0 where all paths end in one point.

    ends (S, ..., C), from S draws of x^(0) -> (...).
    """
    mean = ends.float().mean(dim=0)
    distance = vector_norm(ends.float() - mean, dim=-1)                         # (S, ...)
    return distance.mean(dim=0) / vector_norm(mean, dim=-1)


def motion(states):
    """
    'fixed point', 'orbit' or 'slider': one token's states (K+1, C), K >= 4, in Geiping's words.

    Geiping sec. 6 names them and the rule is ours. In a fixed point the second half of the steps is
    under 1% of the whole path. Else a slider gets, in that half, further than half of the length of
    its path, and an orbit does not.
    """
    norms, half = step_norm(states), (len(states) - 1) // 2
    if norms[half:].sum() < 0.01 * norms.sum():
        return 'fixed point'
    progress = vector_norm(states[-1].float() - states[half].float())
    return 'slider' if progress > 0.5 * norms[half:].sum() else 'orbit'


@torch.no_grad()
def rounding_floor(group, states, e, dtype):
    """
    The noise that rounding adds to one step: mean ||f_dtype(x) - f_float64(x)|| at the last states.

    A step norm below it, and the cosine of such a step, are made of rounding. dtype: of the matrix
    products. states (K+1, B, T, C), e (B, T, C); the first four rows of B are enough.
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
    Steps until the mean norm (K,) is a tenth of what it was, None if it does not get there.

    From the second step on: the first leads out of the noise, and refines nothing.
    """
    small = np.nonzero(norms[1:] <= norms[1] / 10)[0]
    return int(small[0]) if len(small) else None


def last_clear_cos(states, floor):
    """
    Each token's cosine of consecutive steps where it has settled: at its last step that is clear of
    rounding, nan if none is. states (K+1, ..., C) -> (...); floor: the rounding floor.
    """
    clear = (step_norm(states)[1:] > CLEAR * floor).long().cumprod(0).sum(0)    # steps in a row
    last = step_cos(states).gather(0, (clear - 1).clamp(min=0)[None])[0]
    return last.where(clear > 0, torch.nan)


# one checkpoint -----------------------------------------------------------------------------------

def load_run(out_dir, device):
    """
    All checkpoints of the run in out_dir: ({iteration: model}, by iteration; the last one's dict).

    device: as the knob. ValueError if there is none, if they are of different runs, or if the
    model has no recurrent groups.
    """
    device, _ = pick_device(device, 'float32')
    newest = os.path.join(out_dir, 'ckpt.pt')
    models, last = {}, None
    for path in [newest, *glob.glob(os.path.join(out_dir, 'ckpt_*.pt'))]:
        model, checkpoint = load_checkpoint(path, device)
        last = last or checkpoint
        differing = [f'{knob} = {value}' for knob, value in checkpoint['config'].items()
                     if knob not in FREE_KNOBS and value != last['config'].get(knob)]
        if checkpoint['iter_num'] > last['iter_num']:
            raise ValueError(f'{path} is later than ckpt.pt: resume the run, or remove the file if '
                             'the folder was used twice')
        if differing:
            raise ValueError(f"{path} is of another run than ckpt.pt ({', '.join(differing)}): "
                             'remove it')
        models.setdefault(checkpoint['iter_num'], model)
    if not last['model_args']['groups']:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: there is no loop to '
                         'look at')
    return dict(sorted(models.items())), last


@torch.no_grad()
def trace_of(model, idx, n_loop, noise_seed=0):
    """
    One pass over idx (B, T) that keeps every state: a dict for each group, see model.GPT.

    ValueError if the states do not fit into memory.
    """
    needed = memory.states_bytes(model.config, n_loop, len(idx))
    what = f'keeping the states of {n_loop} loops over {len(idx)} windows'
    memory.require(needed, str(idx.device), what, '--n_loop or --n_windows')
    trace = []
    model(idx, n_loop=n_loop, noise_seed=noise_seed, trace=trace)
    return trace


def measure(model, idx, n_loop):
    """
    What the figures over training need of a checkpoint, on idx (B, T): a dict for each group.

        norm (K,), cos, accel_hat, contraction (K-1,)   means over the tokens
        floor_float32, floor_bfloat16                   rounding floors
        settled (B, T)                                  cosine of each token, see last_clear_cos
        dlr_noise, dlr_first, dlr_settled               means, where another group follows: to its
                                                        x^(0), to its x^(1), to its x^(K)

    The means have a standard deviation over the tokens beside them, NAME_std.
    """
    probes = dict(norm=step_norm, cos=step_cos, accel_hat=accel_hat, contraction=contraction)
    trace = trace_of(model, idx, n_loop)
    measured = []
    for g, group in enumerate(model.groups):
        states, e, curves = trace[g]['states'], trace[g]['e'], {}
        for name, probe in probes.items():
            values = probe(states).flatten(1)                                   # (K, B * T)
            curves[name] = values.mean(dim=1).cpu().numpy()
            curves[name + '_std'] = values.std(dim=1).cpu().numpy()
        for dtype in ('float32', 'bfloat16'):
            floor = rounding_floor(group, states, e, getattr(torch, dtype))
            curves['floor_' + dtype] = floor
        curves['settled'] = last_clear_cos(states, curves['floor_float32']).cpu().numpy()
        if g + 1 < len(trace):
            x_next = trace[g + 1]['states']
            for reading, k in dict(noise=0, first=1, settled=-1).items():
                ratio = dlr(states, x_next[k])
                curves['dlr_' + reading] = ratio.mean().item()
                curves[f'dlr_{reading}_std'] = ratio.std().item()
        measured.append(curves)
    return measured


def spread_over_noise(model, idx, n_loop, draws):
    """For each group the mean path_spread of the last states over draws of x^(0), idx (B, T)."""
    ends = []
    for noise_seed in range(draws):
        trace = trace_of(model, idx, n_loop, noise_seed)
        ends.append([entry['states'][-1].clone() for entry in trace])   # all other states may go
    return [path_spread(torch.stack(group)).mean().item() for group in zip(*ends)]


@torch.no_grad()
def losses_by_loops(model, idx, targets, most):
    """{loops: loss in nats a token} at 1, 2, 4 ... loops, no more than `most`."""
    losses, n = {}, 1
    while n <= most:
        losses[n] = model(idx, targets, n_loop=n)[1].item()
        n *= 2
    return losses


# figures ------------------------------------------------------------------------------------------

def text_of(tokens, tokenizer):
    """Tokens (T,) as short texts for a figure, a line break as \\n; without text, as numbers."""
    if tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    encoding = data.get_encoding(tokenizer, out_dir)
    words = []
    for token in tokens.tolist():
        text = '?'
        if token < encoding.n_vocab:
            text = encoding.decode_single_token_bytes(token).decode('utf-8', 'replace')
            # matplotlib would set what stands between two dollars as mathematics
            text = repr(text)[1:-1].replace('$', r'\\$')
        words.append(text)
    return words


def png(name):
    return os.path.join(out_dir, 'figures', name + '.png')


def draw_training(measured, spread, groups, mean_recurrence):
    """The figures with a curve or a point for each checkpoint."""
    if len(groups) > 1:
        plots.figure_2(measured, groups, png('figure_2'))
    plots.figure_3a(measured, groups, png('figure_3a'))
    trained_steps = round(2 * mean_recurrence + 2)
    plots.figure_3b(measured, groups, CLEAR, trained_steps, png('figure_3b'))
    plots.figure_5(measured, groups, CLEAR, n_loop, png('figure_5'))
    plots.contraction(measured, groups, CLEAR, png('contraction'))
    plots.accel_hat(measured, groups, CLEAR, png('accel_hat'))
    heading = f'{noise_draws} noise draws, {n_loop} loops'
    plots.path_independence(spread, groups, heading, png('path_independence'))


def draw_last(trace, motions, words, losses, groups, mean_recurrence, depth):
    """The figures of the last checkpoint: the tokens of its first window, its loss by loops."""
    states = [entry['states'][:, 0] for entry in trace]                         # (K+1, T, C) each
    T = len(words)
    tokens = np.linspace(T // 3, T - 1, tokens_shown).astype(int)
    # from x^(1) on: x^(0) is noise
    points = pca_2d(torch.stack([x[1:] for x in states]))                       # (G, K, T, 2)
    plots.figure_1(points.cpu().numpy(), tokens, groups, png('figure_1'))
    points = [pca(x[1:], 6).cpu().numpy() for x in states]                      # (K, T, 6) each
    plots.figure_6(points, motions, tokens, words, groups, png('figure_6'))
    distances = [vector_norm(x[:-1] - x[-1], dim=-1).T for x in states]         # (T, K) each
    distances = [distance.cpu().numpy() for distance in distances]
    plots.convergence(distances, words, groups, depth, png('convergence'))
    plots.stability(losses, mean_recurrence + 1, png('stability'))


# summary ------------------------------------------------------------------------------------------

def summary(measured, groups, spread, losses, motions):
    """Print a table over training, what the last checkpoint does, and the paper's findings."""
    names = ['-'.join(map(str, group)) for group in groups]
    print('\niteration  group   steps to a tenth   settled cosine   floor f32/bf16'
          '    DLR noise     DLR first     DLR settled')
    for it, by_group in measured.items():
        for name, curves in zip(names, by_group):
            print(f'{it:9d}  {name:6s}  {summary_of(curves)}')

    last_spread = list(spread.values())[-1]
    spreads = [f'group {name} {value:.1e}' for name, value in zip(names, last_spread)]
    print(f'\nend states of {noise_draws} noise draws, spread over norm, last checkpoint: '
          + ', '.join(spreads))
    print('held-out loss by loops: '
          + ', '.join(f'{n}: {loss:.4f}' for n, loss in losses.items()))
    kinds = []
    for name, of_tokens in zip(names, motions):
        counts = [f'{of_tokens.count(kind)} {kind}' for kind in sorted(set(of_tokens))]
        kinds.append(f'group {name}: ' + ', '.join(counts))
    print(f'motions of the first window, {n_loop} loops: ' + '; '.join(kinds))

    checkpoints = list(measured.values())
    print('\n' + '\n'.join(findings(checkpoints[0], checkpoints[-1])))


def summary_of(curves):
    """A group of a checkpoint in the summary's table."""
    steps = steps_to_a_tenth(curves['norm'])
    steps = f'over {n_loop}' if steps is None else steps
    cosine = np.nanmean(curves['settled'])
    floors = f"{curves['floor_float32']:.0e}/{curves['floor_bfloat16']:.0e}"
    ratios = []
    for reading in ('noise', 'first', 'settled'):
        if f'dlr_{reading}' in curves:
            ratio, std = curves[f'dlr_{reading}'], curves[f'dlr_{reading}_std']
            ratios.append(f'{ratio:5.1f} +- {std:<4.1f}')
    return f"{steps:>16}   {cosine:14.2f}   {floors}   {'  '.join(ratios)}"


def findings(before, after):
    """The paper's sec. 3 in three sentences; before, after: `measure` of two checkpoints."""
    # (i) and (ii) are of the later checkpoint alone
    old_steps, old_cosines = settling(before)
    steps, cosines = settling(after)
    fast = all(s is not None and s <= 10 for s in steps)
    settled = all(0.5 <= c <= 0.65 for c in cosines)

    # (iii) what training has changed, in each group and at each boundary
    n = len(after)
    old_steps, new_steps = ([n_loop if s is None else s for s in x] for x in (old_steps, steps))
    faster = sum(new < old for old, new in zip(old_steps, new_steps))
    turned = sum(new < old - 0.05 for old, new in zip(old_cosines, cosines))
    ratios = large = grown = 0
    for old, new in zip(before, after):
        for reading in ('dlr_first', 'dlr_settled'):
            if reading in new:
                std = max(old[reading + '_std'], new[reading + '_std'])
                ratios += 1
                large += new[reading] > 1
                grown += new[reading] > old[reading] + std
    stronger = faster == turned == n and 0 < ratios == large

    return [
        f'(i) step norms fall within 5 to 10 steps: {shown(fast)}; tenfold after '
        f"{', '.join(map(str, steps))} steps.",
        f'(ii) the cosine settles near 0.5 to 0.65: {shown(settled)}; '
        f"{', '.join(f'{c:.2f}' for c in cosines)}.",
        f'(iii) both strengthen over training, across-block moves stay larger: {shown(stronger)}; '
        f'norms fall faster than at first in {faster} of {n} groups, the cosine has fallen by 0.05 '
        f'or more in {turned}; DLR is above 1 in {large} of {ratios} readings (to the noise left '
        'out: it is large whatever was learnt), and has grown by more than a standard deviation in '
        f'{grown}.']


def settling(by_group):
    """For each group of a checkpoint: steps to a tenth, settled cosine."""
    steps = [steps_to_a_tenth(curves['norm']) for curves in by_group]
    cosines = [np.nanmean(curves['settled']) for curves in by_group]
    return steps, cosines


def shown(yes):
    return 'shown' if yes else 'NOT shown'


# the run ------------------------------------------------------------------------------------------

def check_knobs():
    least = dict(n_loop=(n_loop, 4), n_windows=(n_windows, 1), noise_draws=(noise_draws, 2),
                 most_loops=(most_loops, 1), tokens_shown=(tokens_shown, 1))
    for knob, (value, least) in least.items():
        if value < least:
            raise ValueError(f'{knob} must be at least {least}, not {value}')


def held_out_windows(last):
    """
    n_windows windows spread over the held-out text: idx, targets (n_windows, T), and of a task the
    depth (T,) of the first one's labels, else None.
    """
    name, T = dataset or last['config']['dataset'], last['model_args']['block_size']
    text = data.open_data(name, last['tokenizer'], last['model_args']['vocab_size'])
    there = text.n_held_out(T)
    if there < n_windows:
        raise ValueError(f'the held-out text has {there} windows of {T} tokens: --n_windows may '
                         'be no more')
    windows = np.linspace(0, there - 1, n_windows).round().astype(int)
    depth = text.with_depth(T)[2][windows[0]] if hasattr(text, 'with_depth') else None
    return *text.held_out(windows, T), depth


def main():
    # the run, and the text to look at
    check_knobs()
    models, last = load_run(out_dir, device)
    model, groups = models[max(models)], last['model_args']['groups']
    dev = model.lm_head.weight.device
    idx, targets, depth = held_out_windows(last)
    idx, targets = idx.to(dev), targets.to(dev)
    print(f"{out_dir}: checkpoints of iterations {', '.join(map(str, models))}; groups {groups}; "
          f'{n_windows} held-out windows of {idx.shape[1]} tokens, {n_loop} loops')

    # over training: curves of each checkpoint, and what its last states keep of the noise
    measured, spread = {}, {}
    for it, checkpoint in models.items():
        measured[it] = measure(checkpoint, idx, n_loop)
        spread[it] = spread_over_noise(checkpoint, idx[:4], n_loop, noise_draws)

    # the last checkpoint: the paths of the first window's tokens, and the loss at many loops
    trace = trace_of(model, idx[:1], n_loop)
    words = text_of(idx[0], last['tokenizer'])
    motions = []
    for entry in trace:
        states = entry['states'][1:, 0]                                         # (K, T, C)
        motions.append([motion(states[:, t]) for t in range(len(words))])
    losses = losses_by_loops(model, idx, targets, most_loops)

    # figures and summary
    draw_training(measured, spread, groups, model.config.mean_recurrence)
    draw_last(trace, motions, words, losses, groups, model.config.mean_recurrence, depth)
    summary(measured, groups, spread, losses, motions)
    folder = os.path.join(out_dir, 'figures')
    figures = [file for file in sorted(os.listdir(folder)) if file.endswith('.png')]
    print(f"\n{folder}: {', '.join(file.removesuffix('.png') for file in figures)}")


if __name__ == '__main__':
    config = configure(globals())
    run(main)
