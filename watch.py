"""
What is watched while a model trains: the health of its states, spikes of its loss, the curves of its log.

Not run by itself: train.py calls it. Geiping App. C.3 (the two collapses, the correlation of tokens). Symbols as in loops.py.
"""
import math

import torch

from checkpoint import read_log


@torch.no_grad()
def health(model, idx, autocast):
    """
    Geiping's two collapses (App. C.3), for each group on tokens idx (B, T): (token_corr, state_use).

    token_corr: mean cosine between the last states of different tokens of a window; 1 = all tokens have become one.
    state_use: ||f(x) - f(noise)|| / ||f(x)||, x the last state; 0 = the core ignores its state and looping is for nothing.
    """
    model.eval()
    trace, found = [], []
    with autocast:
        model(idx, n_loop=max(1, round(model.config.mean_recurrence)), trace=trace)
        for group, entry in zip(model.groups, trace):
            e, x = entry['e'], entry['states'][-1]
            unit, T = torch.nn.functional.normalize(x, dim=-1), x.shape[1]
            token_corr = (unit.sum(1).square().sum(-1) - T).mean() / (T * (T - 1))      # of all pairs but a token with itself
            settled, fresh = group.step(x, e), group.step(group.noise(e, 0, 0, slice(T)), e)
            found.append((token_corr.item(), ((settled - fresh).norm() / settled.norm()).item()))
    model.train()
    return found


def warnings_of(found):
    """health's figures in words, where they are bad."""
    for g, (token_corr, state_use) in enumerate(found):
        if token_corr > 0.95:
            yield f'in group {g} the states of all tokens are nearly the same (token_corr {token_corr:.2f}): lower the learning rate or start anew'
        if state_use < 0.02:
            yield f'the core of group {g} ignores its state (state_use {state_use:.3f}): more loops will change nothing; lower the learning rate or start anew'


def is_spike(loss, trend):
    """Is this loss far above those before it? trend = [count, mean, variance], running over about 50 iterations, is updated."""
    count, mean, variance = trend
    spike = count >= 50 and loss > mean + max(6 * math.sqrt(variance), 0.2)
    share, off = max(1 / (count + 1), 0.02), loss - mean
    trend[:] = [count + 1, mean + share * off, (1 - share) * (variance + share * off ** 2)]
    return spike


def plot_losses(path, loops):
    """log.csv -> loss.png beside it."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    rows = read_log(path)
    curve = lambda key: zip(*[(int(row['iter']), float(row[key])) for row in rows if row[key]])
    fig, ax = plt.subplots(figsize=(6.4, 4))
    ax.plot(*curve('loss'), color='0.7', lw=0.8, label='training, drawn loops')
    for n, style in zip(loops, ('-', '--', '-.', ':') * 9):
        ax.plot(*curve(f'val_loss_{n}'), style, lw=1.6, label=f'held-out, {n} loop' + 's' * (n > 1))
    ax.set(xlabel='iteration', ylabel='loss (nats a token)', title='Loss by loops')
    ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(path.replace('log.csv', 'loss.png'), dpi=120)
    plt.close(fig)
