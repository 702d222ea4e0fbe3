"""
The geometry of a run's checkpoints, as rows for results/SCALE/*.csv.

Not run by itself: run.py and depth.py call geometry_rows. It adds to geometry.py what the claims
need beyond its figures: the leading eigenvalue of a loop step, tokens that turn back, jumps over
paths.

Paper: sec. 3, Eq. 1 and 2. Geiping: sec. 6 (path independence, loss far beyond training).

    e, x        the stream that enters a group; its state                       (B, T, C)
    states      x^(0) ... x^(K) of one group                                    (K+1, B, T, C)
    trace       what each group leaves of one pass: dict(e, states, ...)
    measured    what geometry.measure gives of each group: curves over k, ratios, rounding floor
"""
import torch
from torch.linalg import vector_norm

import data
import geometry
from configurator import pick_device

# as geometry.py has them unless a knob says otherwise
N_LOOP = 30                 # loops of each group
N_WINDOWS = 24              # held-out windows of block_size tokens
NOISE_DRAWS = 4             # of x^(0), for path independence
LOOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)      # loop counts at which the loss is followed


@torch.no_grad()
def spectrum(group, e, x):
    """
    The leading eigenvalue of one loop step, of its Jacobian by the last token of each window.

    e, x, the last state: (N, T, C) -> (N,) complex. Attention is causal, so the Jacobian by all
    tokens is block-triangular, and these are eigenvalues of the whole step.
    """
    leading = []
    for i in range(len(x)):
        # C copies of the window, of which each gives one row of the Jacobian
        C = x.shape[-1]
        before = x[i, :-1].expand(C, -1, -1)                                    # (C, T-1, C)
        token = x[i, -1].expand(C, 1, C).clone().requires_grad_()               # (C, 1, C)
        with torch.enable_grad():
            y = group.step(torch.cat((before, token), dim=1), e[i].expand(C, -1, -1))[:, -1]
            jacobian = torch.autograd.grad(y.diagonal().sum(), token)[0][:, 0]  # (C, C)
        values = torch.linalg.eigvals(jacobian.cpu())
        leading.append(values[values.abs().argmax()])
    return torch.stack(leading)


def last_cos(states, floor):
    """
    Each token's cosine of consecutive steps at its last step that is clear of rounding.

    states (K+1, B, T, C) -> (B * T,). floor: rounding of one step, in units of the state.
    """
    norms = geometry.step_norm(states)[1:].flatten(1)                           # (K-1, B * T)
    cos = geometry.step_cos(states).flatten(1)
    clear = (norms > geometry.CLEAR * floor).long().cumprod(0).sum(0)           # steps in a row
    last = clear.clamp(min=1) - 1
    return cos.gather(0, last[None])[0]


def step_rows(name, measured):
    """Norm and cosine of one group's steps, mean and standard deviation over tokens."""
    for k, (norm, norm_std) in enumerate(zip(measured['norm'], measured['norm_std'])):
        cos, cos_std = '', ''
        if k:       # the first step has none before it
            cos, cos_std = measured['cos'][k - 1], measured['cos_std'][k - 1]
        yield dict(group=name, k=k, norm=norm, norm_std=norm_std, cos=cos, cos_std=cos_std,
                   floor=measured['floor_float32'])


def dlr_rows(names, measured, trace):
    """Drift-to-loop ratios of each hand-off, and the jump over the path in the loop."""
    for g in range(len(names) - 1):
        ratios = {name: measured[g]['dlr_' + name] for name in ('noise', 'first', 'settled')}
        # the jump ends at the first iterate of the next group; the path in the loop leaves out
        # the first step, which comes from noise
        states, following = trace[g]['states'], trace[g + 1]['states']
        jump = vector_norm(following[1] - states[-1], dim=-1)                   # (B, T)
        arc = geometry.step_norm(states)[1:].sum(0)                             # (B, T)
        ratios['jump over arc'] = (jump / arc).mean().item()
        for reading, ratio in ratios.items():
            yield {'from': names[g], 'to': names[g + 1], 'reading': reading, 'ratio': ratio}


def noise_rows(names, model, idx):
    """How far the last states of one group lie apart when x^(0) is drawn anew."""
    ends = []
    for noise_seed in range(NOISE_DRAWS):
        trace = geometry.trace_of(model, idx[:4], N_LOOP, noise_seed)
        ends.append([group['states'][-1] for group in trace])
    for name, draws in zip(names, zip(*ends)):
        yield dict(group=name, spread=geometry.path_spread(torch.stack(draws)).mean().item())


@torch.no_grad()
def loop_rows(model, idx, targets):
    """Held-out loss by loops, nats a token."""
    return [dict(loops=n, loss=model(idx, targets, n_loop=n)[1].item()) for n in LOOPS]


def spectrum_row(name, group, traced, floor, n=16):
    """Eigenvalues of one group's step in n windows, and how many tokens turn back in all."""
    values = spectrum(group, traced['e'][:n], traced['states'][-1][:n])
    turned = last_cos(traced['states'], floor) < 0
    return dict(group=name, radius=values.abs().mean().item(),
                cos=(values.real / values.abs()).mean().item(),
                complex=(values.imag.abs() > 1e-3 * values.abs()).float().mean().item(),
                turning_back=turned.float().mean().item())


def geometry_rows(out_dir, follow_loss):
    """
    A run's checkpoints -> {name of a CSV: rows}. Each row has the iteration of its checkpoint.

    follow_loss: measure the loss at LOOPS too.
    """
    # the run, and the first held-out windows of its text
    device, _ = pick_device('auto', 'float32')
    models, last = geometry.load_run(out_dir, device)
    text, T = data.open_data(last['config']['dataset']), last['model_args']['block_size']
    idx, targets = (tensor.to(device) for tensor in text.held_out(range(N_WINDOWS), T))

    rows = dict(steps=[], dlr=[], noise=[], loops=[], spectrum=[])
    for iteration, model in models.items():
        names = ['-'.join(map(str, layers)) for layers in model.config.groups]
        measured = geometry.measure(model, idx, N_LOOP)
        trace = geometry.trace_of(model, idx, N_LOOP)
        new = dict(dlr=dlr_rows(names, measured, trace))
        new['steps'] = [row for g, name in enumerate(names) for row in step_rows(name, measured[g])]

        # what is measured at the last checkpoint alone
        if iteration == max(models):
            new['noise'] = noise_rows(names, model, idx)
            new['loops'] = loop_rows(model, idx, targets) if follow_loss else []
            new['spectrum'] = [
                spectrum_row(name, model.groups[g], trace[g], measured[g]['floor_float32'])
                for g, name in enumerate(names)]
        for name, some in new.items():
            rows[name] += [dict(iteration=iteration, **row) for row in some]
    return rows
