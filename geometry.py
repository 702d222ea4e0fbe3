"""
The geometry of the loops: small turning steps inside a group, large moves between the groups.

    python geometry.py                              the default run's checkpoints, 20 s on two cores
    python geometry.py --out_dir=out-groups --n_loop=30

Prints a summary over training, group by group, and writes the folder out_dir/figures: a PNG for
each figure, and its numbers as CSV beside it.

Paper: sec. 3 (step norms, angles, PCA; Fig. 1, 3, 5), Eq. 1, Eq. 2 (drift-to-loop ratio; Fig. 2),
Eq. 5, 6. Geiping: Fig. 5 (convergence by token), sec. 6 (motions).

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
from common import plots
from common.checkpoint import FREE_KNOBS, load_checkpoint
from common.configurator import configure, pick_device, run
from exits import EPS

# --------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None  # whose held-out text to read; None = the run's own
n_loop = 30                 # loops of each group; the paper's Fig. 5 has 30
n_windows = 24              # held-out windows of block_size tokens
noise_draws = 4             # draws of x^(0), for path independence
most_loops = 256            # measure the loss at 1, 2, 4 ... loops up to this many
tokens_shown = 3            # tokens of the first window in figure 1
device = 'auto'
# --------------------------------------------------------------------------------------------------

# A step that is longer than this many rounding floors is clear of rounding: rounding turns its
# direction by 2 degrees at most.
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


def pca_2d(states):
    """
    Coordinates on the first two principal axes of all states together: (..., C) -> (..., 2).

    Fig. 1. The sign of an axis is fixed: its largest entry is positive.
    """
    flat = states.float().reshape(-1, states.shape[-1])
    flat = flat - flat.mean(dim=0)
    axes = torch.linalg.svd(flat, full_matrices=False)[2][:2]                   # (2, C)
    largest = axes.abs().argmax(dim=1, keepdim=True)
    axes = axes * axes.gather(1, largest).sign()
    return (flat @ axes.T).view(*states.shape[:-1], 2)


def path_spread(ends):
    """
    Mean distance of the end states from their mean, divided by the norm of that mean.

    ends (S, ..., C): from S draws of x^(0) -> (...), 0 where all paths end in the same point.
    """
    mean = ends.float().mean(dim=0)
    distance = vector_norm(ends.float() - mean, dim=-1)                         # (S, ...)
    return distance.mean(dim=0) / vector_norm(mean, dim=-1)


def motion(states):
    """
    How one token moves, states (K+1, C), K >= 4: 'fixed point', 'orbit' or 'slider'.

    Geiping sec. 6 names these motions; the criteria are ours. Fixed point: the second half of the
    steps is less than 1% of the whole path. Slider: the distance covered in the second half is more
    than half the length of the path there. Orbit: anything else.
    """
    norms, half = step_norm(states), (len(states) - 1) // 2
    if norms[half:].sum() < 0.01 * norms.sum():
        return 'fixed point'
    progress = vector_norm(states[-1].float() - states[half].float())
    return 'slider' if progress > 0.5 * norms[half:].sum() else 'orbit'


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
    The cosine at which each token settles: at its last step that is clear of rounding.

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
    for path in [os.path.join(out_dir, 'ckpt.pt'), *glob.glob(os.path.join(out_dir, 'ckpt_*.pt'))]:
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
    if not model.groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups, so there is no loop to '
                         'look at: choose another --out_dir')
    return dict(sorted(models.items())), last


@torch.no_grad()
def trace_of(model, idx, n_loop, noise_seed=0):
    """One pass over idx (B, T) that keeps every state: a dict for each group, see model.GPT."""
    trace = []
    model(idx, n_loop=n_loop, noise_seed=noise_seed, trace=trace)
    return trace


def measure(model, idx, n_loop):
    """
    The probes of one checkpoint on idx (B, T): a dict for each group.

        norm (K,), cos, accel_hat, contraction (K-1,)   means over the tokens
        dlr_noise, dlr_first, dlr_settled               means, if another group follows: Eq. 2 to
                                                        its x^(0), to its x^(1), to its x^(K)
        floor_float32, floor_bfloat16                   rounding floors
        settled (B, T)                                  cosine of each token, see last_clear_cos

    Beside each mean stands its standard deviation over the tokens, NAME_std.
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
            curves['floor_' + dtype] = rounding_floor(group, states, e, getattr(torch, dtype))
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
        ends.append([entry['states'][-1].clone() for entry in trace])   # frees the other states
    return [path_spread(torch.stack(group)).mean().item() for group in zip(*ends)]


@torch.no_grad()
def losses_by_loops(model, idx, targets, most):
    """{loops: loss in nats a token} at 1, 2, 4 ... loops, no more than `most`."""
    counts = [2 ** i for i in range(most.bit_length())]
    return {n: model(idx, targets, n_loop=n)[1].item() for n in counts}


# figures ------------------------------------------------------------------------------------------

def text_of(tokens, tokenizer, folder='.'):
    """
    The text of each of the tokens (T,), '?' or a number where there is none.

    folder: of the checkpoint, where a tokenizer.json may be.
    """
    if tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    encoding = data.get_encoding(tokenizer, folder)
    words = []
    for token in tokens.tolist():
        text = '?'
        if token < encoding.n_vocab:
            text = encoding.decode_single_token_bytes(token).decode('utf-8', 'replace')
            text = repr(text)[1:-1]         # a line break as \n
        words.append(text)
    return words


def draw_training(folder, groups, measured, spread):
    """The figures with a curve or a point for each checkpoint."""
    if len(groups) > 1:
        plots.figure_2(measured, groups, f'{folder}/figure_2.png')
    plots.curves(measured, groups, 'norm', 'step norm (Eq. 1)', 1, f'{folder}/figure_3a.png')
    plots.curves(measured, groups, 'cos', 'cosine of consecutive steps', CLEAR,
                 f'{folder}/figure_5.png')
    plots.curves(measured, groups, 'contraction', 'step norm over the one before', CLEAR,
                 f'{folder}/contraction.png')
    plots.curves(measured, groups, 'accel_hat', 'normalised acceleration (Eq. 6)', CLEAR,
                 f'{folder}/accel_hat.png')
    plots.path_independence(spread, groups, f'{folder}/path_independence.png')


def draw_window(folder, groups, trace, tokens, words, depth):
    """
    The figures of one window, from the trace of a pass over it.

    tokens: the ones to follow. words: the text of all T of them. depth (T,): of a task's labels.
    """
    states = [entry['states'][:, 0] for entry in trace]                         # (K+1, T, C) each
    points = pca_2d(torch.stack([x[1:] for x in states]))       # from x^(1) on: x^(0) is noise
    plots.figure_1(points.cpu().numpy(), tokens, groups, f'{folder}/figure_1.png')
    distances = [vector_norm(x[:-1] - x[-1], dim=-1).T for x in states]         # (T, K) each
    distances = [distance.cpu().numpy() for distance in distances]
    plots.convergence(distances, words, groups, depth, f'{folder}/convergence.png')


# summary ------------------------------------------------------------------------------------------

def summary(groups, measured, spread, losses, motions):
    """Print a table over training, what the last checkpoint does, and the paper's findings."""
    names = ['-'.join(map(str, group)) for group in groups]
    print('\niteration  group   steps to a tenth   settled cosine   floor f32/bf16'
          '    DLR noise     DLR first     DLR settled')
    for it, by_group in measured.items():
        for name, curves in zip(names, by_group):
            print(f'{it:9d}  {name:6s}  {summary_of(curves)}')

    last_spread = list(spread.values())[-1]
    spreads = [f'group {name} {value:.1e}' for name, value in zip(names, last_spread)]
    print('\nend states from different noise, spread over norm: ' + ', '.join(spreads))
    print('held-out loss by loops: ' + ', '.join(f'{n}: {loss:.4f}' for n, loss in losses.items()))
    kinds = []
    for name, of_group in zip(names, motions):
        counts = [f'{of_group.count(kind)} {kind}' for kind in sorted(set(of_group))]
        kinds.append(f'group {name}: ' + ', '.join(counts))
    print('motions of the first window: ' + '; '.join(kinds))

    checkpoints = list(measured.values())
    print('\n' + '\n'.join(findings(checkpoints[0], checkpoints[-1])))


def summary_of(curves):
    """One group of a checkpoint as a row of the summary's table."""
    floors = f"{curves['floor_float32']:.0e}/{curves['floor_bfloat16']:.0e}"
    row = f"{tenfold(curves):>16}   {np.nanmean(curves['settled']):14.2f}   {floors}   "
    for reading in ('dlr_noise', 'dlr_first', 'dlr_settled'):
        if reading in curves:
            row += f"{curves[reading]:5.1f} +- {curves[reading + '_std']:<4.1f}  "
    return row.rstrip()


def tenfold(curves):
    """steps_to_a_tenth of a group as text."""
    steps = steps_to_a_tenth(curves['norm'])
    return f"over {len(curves['norm'])}" if steps is None else str(steps)


def findings(before, after):
    """The paper's sec. 3 in three sentences; before, after: `measure` of two checkpoints."""
    # (i), (ii): the later checkpoint
    steps = [steps_to_a_tenth(curves['norm']) for curves in after]
    fast = None not in steps and max(steps) <= 10
    cosines = [np.nanmean(curves['settled']) for curves in after]
    in_range = all(0.5 <= cosine <= 0.65 for cosine in cosines)

    # (iii): what training has changed in each group, and the moves to the next one
    faster = turned = 0
    ratios = []
    for old, new in zip(before, after):
        was, now = steps_to_a_tenth(old['norm']), steps_to_a_tenth(new['norm'])
        faster += now is not None and (was is None or now < was)
        turned += np.nanmean(new['settled']) < np.nanmean(old['settled']) - 0.05
        ratios += [new[name] for name in ('dlr_first', 'dlr_settled') if name in new]
    large = sum(ratio > 1 for ratio in ratios)
    stronger = faster == turned == len(after) and 0 < large == len(ratios)

    return [
        f'(i) step norms fall within 5 to 10 steps: {shown(fast)}; they fall to a tenth after '
        f"{', '.join(map(tenfold, after))} steps.",
        f'(ii) the cosine settles near 0.5 to 0.65: {shown(in_range)}; it settles at '
        f"{', '.join(f'{cosine:.2f}' for cosine in cosines)}.",
        '(iii) both effects strengthen over training, and moves between groups stay larger than '
        f'steps: {shown(stronger)}; norms fall faster than at first in {faster} of {len(after)} '
        f'groups, the cosine has fallen by at least 0.05 in {turned}, and the DLR is above 1 in '
        f'{large} of {len(ratios)} readings (without the one to noise, which is large from the '
        'start).']


def shown(yes):
    return 'shown' if yes else 'NOT shown'


# the run ------------------------------------------------------------------------------------------

def check_knobs():
    least = dict(n_loop=4, n_windows=1, noise_draws=2, most_loops=1, tokens_shown=1)
    for knob, lowest in least.items():
        if globals()[knob] < lowest:
            raise ValueError(f'{knob} must be at least {lowest}, not {globals()[knob]}')


def held_out_windows(last, T):
    """
    n_windows windows of T tokens, spread over the held-out text: idx, targets (n_windows, T), and
    on a task the depth (T,) of the labels in the first window, otherwise None.
    """
    name = dataset or last['config']['dataset']
    text = data.open_data(name, last['tokenizer'], last['model_args']['vocab_size'])
    count = text.n_held_out(T)
    if count < n_windows:
        raise ValueError(f'the held-out text has {count} windows of {T} tokens: lower --n_windows')
    windows = np.linspace(0, count - 1, n_windows).round().astype(int)
    depth = text.with_depth(T)[2][windows[0]] if hasattr(text, 'with_depth') else None
    return *text.held_out(windows, T), depth


def main():
    # the run, and the text to look at
    check_knobs()
    dev, _ = pick_device(device, 'float32')
    models, last = load_run(out_dir, dev)
    model = models[max(models)]
    groups = model.config.groups
    idx, targets, depth = held_out_windows(last, model.config.block_size)
    idx, targets = idx.to(dev), targets.to(dev)
    print(f"{out_dir}: checkpoints of iterations {', '.join(map(str, models))}; groups {groups}; "
          f'{n_windows} held-out windows of {idx.shape[1]} tokens, {n_loop} loops')

    # over training: the probes of each checkpoint, and how far its end states depend on the noise
    measured, spread = {}, {}
    for it, checkpoint in models.items():
        measured[it] = measure(checkpoint, idx, n_loop)
        spread[it] = spread_over_noise(checkpoint, idx[:4], n_loop, noise_draws)

    # the last checkpoint: how the tokens of the first window move, and the loss at many loops
    trace = trace_of(model, idx[:1], n_loop)
    words = text_of(idx[0], last['tokenizer'], out_dir)
    T = len(words)
    motions = [[motion(entry['states'][1:, 0, t]) for t in range(T)] for entry in trace]
    losses = losses_by_loops(model, idx, targets, most_loops)

    # figures and summary
    folder = os.path.join(out_dir, 'figures')
    draw_training(folder, groups, measured, spread)
    tokens = np.linspace(T // 3, T - 1, tokens_shown).astype(int)
    draw_window(folder, groups, trace, tokens, words, depth)
    plots.stability(losses, model.config.mean_recurrence + 1, f'{folder}/stability.png')
    summary(groups, measured, spread, losses, motions)
    print(f'\nfigures, and their numbers as CSV: {folder}')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
