"""
The geometry of the loops: small turning steps inside a group, large moves between the groups.

    python geometry.py                              the checkpoints in out/, or pretrained/text
    python geometry.py --out_dir=out-groups --n_loop=30

Prints a row for each checkpoint and group, and writes the folder out_dir/figures: a PNG for each
figure, and its numbers as CSV beside it.

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

import data
from common import plots
from common.checkpoint import FREE_KNOBS, find_run, load_checkpoint
from common.configurator import configure, pick_device, run

# --------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # whose held-out text to read; None = the run's own
n_loop = 30                 # loops of each group; the paper's Fig. 5 has 30
n_windows = 24              # held-out windows of block_size tokens
device = 'auto'
# --------------------------------------------------------------------------------------------------

# A step longer than this many rounding floors (see rounding_floor) is clear of rounding: its
# direction is off by 2 degrees at most.
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
    for path in [os.path.join(out_dir, 'ckpt.pt'), *glob.glob(os.path.join(out_dir, 'ckpt_*.pt'))]:
        model, checkpoint = load_checkpoint(path, device)
        last = last or checkpoint
        differing = [f'{knob} = {value}' for knob, value in checkpoint['config'].items()
                     if knob not in FREE_KNOBS and value != last['config'].get(knob)]
        if checkpoint['iter_num'] > last['iter_num']:
            raise ValueError(f'{path} is later than ckpt.pt: resume the run, or remove the file if '
                             'it is of another run')
        if differing:
            raise ValueError(f"{path} and ckpt.pt are of different runs ({', '.join(differing)}): "
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

        norm (K,), cos (K-1,)                   means over the tokens
        dlr_noise, dlr_first, dlr_settled       means of Eq. 2 with the next group's x^(0), x^(1) or
                                                x^(K), if there is a next group
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
            for reading, k in dict(noise=0, first=1, settled=-1).items():
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
    texts = []
    for token in tokens:
        text = f'#{token}'
        if encoding is not None and token < encoding.n_vocab:
            text = encoding.decode_single_token_bytes(token).decode('utf-8', 'backslashreplace')
        texts.append(text)
    return texts


def draw_window(folder, groups, trace, words, depth):
    """
    The figures of one window, from the trace of a pass over it.

    words: the text of each of its T tokens. depth (T,): of a task's labels, or None.
    """
    T = len(words)
    tokens = np.linspace(T // 3, T - 1, 3).astype(int)          # three for figure 1
    states = [entry['states'][:, 0] for entry in trace]                         # (K+1, T, C) each
    points = pca_2d(torch.stack([x[1:] for x in states]))       # from x^(1) on: x^(0) is noise
    plots.figure_1(points.cpu().numpy(), tokens, groups, f'{folder}/figure_1.png')
    distances = [vector_norm(x[:-1] - x[-1], dim=-1).T for x in states]         # (T, K) each
    distances = [distance.cpu().numpy() for distance in distances]
    plots.convergence(distances, words, groups, depth, f'{folder}/convergence.png')


# the run ------------------------------------------------------------------------------------------

def held_out_windows(last, T):
    """
    n_windows windows of T tokens, spread over the held-out text: idx (n_windows, T), and on a task
    the depth (T,) of the labels in the first window, otherwise None.
    """
    name = dataset or last['config']['dataset']
    text = data.open_data(name, last['tokenizer'], last['model_args']['vocab_size'])
    windows = data.spread(text, n_windows, T)
    depth = text.with_depth(T)[2][windows[0]] if hasattr(text, 'with_depth') else None
    return text.held_out(windows, T)[0], depth


def row_of(curves):
    """The probes of one group of a checkpoint as a row of text."""
    steps, settled = steps_to_a_tenth(curves['norm']), np.nanmean(curves['settled'])
    tenth = f"over {len(curves['norm'])}" if steps is None else str(steps)
    floors = f"{curves['floor_float32']:.0e}/{curves['floor_bfloat16']:.0e}"
    row = f'{tenth:>16}   {settled:14.2f}   {floors}   '
    for reading in ('dlr_noise', 'dlr_first', 'dlr_settled'):
        if reading in curves:
            row += f"{curves[reading]:5.1f} +- {curves[reading + '_std']:<4.1f}  "
    return row.rstrip()


def main():
    # the run, and the text to look at
    if n_loop < 2 or n_windows < 1:
        raise ValueError(f'n_loop must be at least 2 and n_windows at least 1, not {n_loop} and '
                         f'{n_windows}')
    dev, _ = pick_device(device, 'float32')
    source, results = find_run(out_dir)
    models, last = load_run(source, dev)
    model = models[max(models)]
    groups = model.config.groups
    idx, depth = held_out_windows(last, model.config.block_size)
    idx = idx.to(dev)
    print(f"{source}: checkpoints of iterations {', '.join(map(str, models))}; groups {groups}; "
          f'{n_windows} held-out windows of {idx.shape[1]} tokens, {n_loop} loops')

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
        plots.figure_2(measured, groups, f'{folder}/figure_2.png')
    plots.curves(measured, groups, 'norm', 'step norm (Eq. 1)', 1, f'{folder}/figure_3a.png')
    plots.curves(measured, groups, 'cos', 'cosine of consecutive steps', CLEAR,
                 f'{folder}/figure_5.png')
    encoding = last['tokenizer'] and data.get_encoding(last['tokenizer'], source)
    words = [repr(text)[1:-1] for text in texts_of(idx[0].tolist(), encoding)]  # a line break as \n
    draw_window(folder, groups, trace_of(model, idx[:1], n_loop), words, depth)
    print(f'\nfigures, and their numbers as CSV: {folder}')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
