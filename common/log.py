"""
What one sees of a training run: log, held-out losses, health of the states, spikes, speed.

Not run by itself: train.py calls it. Geiping App. C.3 (the two collapses, the correlation of
tokens). Symbols as in loops.py.

    asked     the signals that have asked this process to stop
    trend     [count, mean, variance] of the loss, running over about 50 iterations
"""
import csv
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from common.distributed import RANK, WORLD, add_up, any_asked, say
from memory import block_weights, windows_at_once

# bf16, dense, by the makers' data sheets
PEAK_TFLOPS = {'H200': 989, 'H100': 989, 'A100': 312, 'L40S': 362, 'RTX 4090': 165}


# the log -----------------------------------------------------------------------------------------

def read_log(path, before=math.inf):
    """log.csv's whole rows of iterations below `before`, each a dict."""
    with open(path, newline='') as f:
        rows = [row for row in csv.DictReader(f) if None not in row.values()]
    return [row for row in rows if int(row['iter']) < before]


class Log:
    """log.csv and the lines on the screen. results/README.md explains the columns."""

    def __init__(self, path, loops, ema, start, max_iters, compiled=False, peak_tflops=None,
                 accuracy=False):
        """loops: the evaluated counts. Rows from iteration start on, of a killed run, go."""
        self.path, self.max_iters, self.peak_tflops = path, max_iters, peak_tflops
        self.compiled, self.counted, self.early_graphs = compiled, 0, 0
        self.restart()
        kinds = [f'{kind}_{what}' for kind in (['val', 'ema'] if ema else ['val'])
                 for what in (['loss', 'acc'] if accuracy else ['loss'])]
        self.columns = ['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s',
                        'tflops', 'spikes', *(f'{kind}_{n}' for kind in kinds for n in loops),
                        'token_corr', 'state_use']
        if RANK == 0:
            rows = read_log(path, start) if start and os.path.exists(path) else []
            with open(path + '.tmp', 'w', newline='') as f:
                writer = csv.DictWriter(f, self.columns)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(path + '.tmp', path)

    def restart(self):
        """Count the iterations, seconds, tokens and FLOPs (of all processes) from here on."""
        self.iterations, self.seconds, self.tokens, self.flops = 0, 0.0, 0, 0

    def count(self, seconds, tokens, flops):
        """Another iteration."""
        self.counted += 1
        if self.counted <= 100:
            self.early_graphs = graphs(self.compiled)
        self.iterations += 1
        self.seconds += seconds
        self.tokens += tokens
        self.flops += flops

    def step(self, run, it, loss, lr, norm, n_loop, held_out):
        """A line and a row: this iteration, and the speed since the row before."""
        dt_ms = 1e3 * self.seconds / self.iterations
        rate = self.tokens / self.seconds
        tflops = self.flops / self.seconds / 1e12 / WORLD           # of one device
        loops = '/'.join(map(str, n_loop))
        mfu = f'{100 * tflops / self.peak_tflops:.0f}% MFU, ' if self.peak_tflops else ''
        seconds_left = dt_ms / 1e3 * (self.max_iters - it - 1)
        say(f'iter {it}: loss {loss:.3f}, loops {loops or "none"}, {dt_ms:.0f} ms, '
            f'{rate / 1e3:.1f}k tok/s, {mfu}{seconds_left:.0f} s left')
        if run.spikes:
            highest, at = max(run.spikes)
            say(f'warning: iter {it}: loss spikes since iteration {it + 1 - self.iterations}: '
                f'{len(run.spikes)}, the highest {highest:.2f} at iteration {at} (running mean '
                f'{run.trend[1]:.2f}); if they go on, lower the learning rate')
        self.add(held_out | dict(
            iter=it, loss=f'{loss:.5f}', lr=f'{lr:.3e}', grad_norm=f'{norm:.4f}', loops=loops,
            dt_ms=f'{dt_ms:.1f}', tokens_per_s=f'{rate:.0f}', tflops=f'{tflops:.4f}',
            spikes=len(run.spikes)))
        run.spikes.clear()
        self.restart()

    def say_done(self, run, out_dir, seconds, dev):
        """What the run took, and what to do next."""
        if self.compiled:
            late = graphs(True) - self.early_graphs
            say(f'{graphs(True)} graphs compiled, {late} of them after the first 100 iterations')
        shares = ', '.join(f'{what} {100 * s / seconds:.1f}%' for what, s in run.spent.items())
        say(f'done in {seconds:.0f} s ({shares}), {peak_memory(dev):.2f} GB at most: '
            f'{out_dir}/ckpt.pt, log.csv, loss.png')
        exit = ' --exit accel' if run.model.groups else ''
        say(f'next: python sample.py{exit}{flag(out_dir)}')

    def add(self, row):
        if RANK == 0:
            with open(self.path, 'a', newline='') as f:
                csv.DictWriter(f, self.columns).writerow(row)


def flag(out_dir):
    """The flag that a command needs to find this run."""
    return '' if out_dir == 'out' else f' --out_dir={out_dir}'


# held-out losses ---------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, text, n_windows, loops, dev, autocast, asked=(), batch=None):
    """
    Held-out loss and accuracy at each loop count, over n_windows windows, evenly spread.

    Returns ({n_loop: nats a token}, {n_loop: share of the asked tokens that are right}), or None
    where a process was asked to stop meanwhile. batch: windows at once, as many as
    memory.windows_at_once says by default.
    """
    model.eval()
    T = model.config.block_size
    numbers = np.linspace(0, text.n_held_out(T) - 1, n_windows).round().astype(int)[RANK::WORLD]
    batch = batch or windows_at_once(model.config)
    # in all processes the same number of batches, since after each they agree on going on
    n_batches = math.ceil(math.ceil(n_windows / WORLD) / batch)
    work = [(n_loop, i * batch) for n_loop in loops for i in range(n_batches)]
    sums = {n_loop: torch.zeros(3, device=dev) for n_loop in loops}     # loss, right, asked tokens
    for n_loop, i in slowly(work, 'held-out loss'):
        if len(numbers[i:i + batch]):
            x, y = (tokens.to(dev) for tokens in text.held_out(numbers[i:i + batch], T))
            with autocast:
                logits, loss = model(x, y, n_loop=n_loop)
            right, known = logits.argmax(-1) == y, y >= 0
            sums[n_loop] += torch.stack((loss * len(x), right.sum(), known.sum()))
        if any_asked(asked, dev):
            model.train()
            return None
    model.train()
    sums = {n_loop: add_up(values).tolist() for n_loop, values in sums.items()}
    return ({n_loop: loss / n_windows for n_loop, (loss, _, _) in sums.items()},
            {n_loop: right / known for n_loop, (_, right, known) in sums.items()})


@torch.no_grad()
def by_depth(model, text, loops, dev, autocast):
    """Of a task: the held-out labels that are right at each depth and loop count, a row each."""
    model.eval()
    x, y, depth = (torch.from_numpy(values) for values in text.with_depth(model.config.block_size))
    rows = []
    for n_loop in loops:
        guesses = []
        for part in x.split(windows_at_once(model.config)):
            with autocast:
                guesses.append(model(part.to(dev), n_loop=n_loop)[0].argmax(-1).cpu())
        right = torch.cat(guesses) == y
        for d in depth[y >= 0].unique().tolist():
            at = (y >= 0) & (depth == d)
            rows.append(dict(loops=n_loop, depth=d, labels=at.sum().item(),
                             accuracy=right[at].double().mean().item()))
    model.train()
    return rows


def report_depth(run, text, loops, dev, autocast, out_dir):
    """by_depth as a table on the screen (depths across, loops down), depth.csv and depth.png."""
    if RANK:
        return
    from common import plots  # here, since matplotlib takes a second to import
    rows = by_depth(run.model, text, loops, dev, autocast)
    plots.depth(rows, os.path.join(out_dir, 'depth.png'))
    depths = sorted({row['depth'] for row in rows})
    say('accuracy by depth of the label (across) and loops (down):')
    say('      ' + ''.join(f'{d:6d}' for d in depths))
    for n_loop in loops:
        share = {row['depth']: row['accuracy'] for row in rows if row['loops'] == n_loop}
        say(f'{n_loop:5d} ' + ''.join(f'{share[d]:6.3f}' for d in depths))


@contextmanager
def using(model, weights):
    """The model with other weights (name: tensor) within the block; none: with its own."""
    if not weights:
        yield
        return
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(weights, strict=False)    # the tied head is no parameter of its own
    yield
    model.load_state_dict(own, strict=False)


def report(run, it, n_windows, text, loops, dev, autocast, asked, compiled, warm):
    """
    Held-out losses and health at iteration it, on the screen and as columns of the log.

    run: train.Run. warm: the iteration from which health is warned about. None as evaluate.
    """
    row = {}
    # the shapes differ from training's, so this runs without the compiler
    with torch.compiler.set_stance('force_eager') if compiled else nullcontext():
        for kind, weights in dict(val={}, ema=run.averaged).items():
            if kind == 'ema' and not weights:
                continue
            with using(run.model, weights):
                found = evaluate(run.model, text, n_windows, loops, dev, autocast, asked)
            if found is None:
                return None
            losses, accuracies = found
            row |= {f'{kind}_loss_{n}': f'{loss:.5f}' for n, loss in losses.items()}
            if kind == 'val':
                run.val_loss.update(losses)
            which = ', averaged weights' if weights else ''
            say(f'iter {it}: held-out loss over {n_windows:,} windows{which}: ' + ', '.join(
                f"{loss:.4f} at {n} loop{'s' if n > 1 else ''}" for n, loss in losses.items()))
            if text.asked:
                row |= {f'{kind}_acc_{n}': f'{share:.5f}' for n, share in accuracies.items()}
                say(f'iter {it}: accuracy: ' + ', '.join(
                    f"{100 * share:.2f}% at {n}" for n, share in accuracies.items()))
        T = run.model.config.block_size
        count = min(8, text.n_held_out(T), windows_at_once(run.model.config))
        idx, _ = text.held_out(range(count), T)
        values = health(run.model, idx.to(dev), autocast)
    if it >= warm:
        for line in warnings_of(values, run.model.config.groups):
            say(f'warning: iter {it}: {line}')
    for name, of_groups in zip(('token_corr', 'state_use'), zip(*values)):
        row[name] = '/'.join(f'{value:.3f}' for value in of_groups)
    return row


# health ------------------------------------------------------------------------------------------

@torch.no_grad()
def health(model, idx, autocast):
    """
    Geiping's two collapses (App. C.3) on tokens idx (B, T): each group's (token_corr, state_use).

    token_corr: mean cosine between the last states of different tokens of a window; 1 = all tokens
    have become one. state_use: ||f(x) - f(noise)|| / ||f(x)||, x the last state; 0 = the core
    ignores its state, and looping is for nothing.
    """
    model.eval()
    trace, values = [], []
    with autocast:
        model(idx, n_loop=max(1, round(model.config.mean_recurrence)), trace=trace)
        for group, entry in zip(model.groups, trace):
            e, x = entry['e'], entry['states'][-1]                              # (B, T, C)
            T = x.shape[1]
            # the cosines of all pairs: the squared sum of unit vectors, less each with itself
            unit = torch.nn.functional.normalize(x, dim=-1)
            pairs = unit.sum(1).square().sum(-1) - T
            token_corr = pairs.mean() / (T * (T - 1))
            settled = group.step(x, e)
            fresh = group.step(group.noise(e, 0, 0, slice(T)), e)
            state_use = (settled - fresh).norm() / settled.norm()
            values.append((token_corr.item(), state_use.item()))
    model.train()
    return values


def warnings_of(values, groups):
    """What health returned, in words where it is bad."""
    for group, (token_corr, state_use) in zip(groups, values):
        if token_corr > 0.95:
            yield (f'in group {group} the states of all tokens are nearly the same (token_corr '
                   f'{token_corr:.2f}): lower the learning rate or start anew')
        if state_use < 0.02:
            yield (f'the core of group {group} ignores its state (state_use {state_use:.3f}): more '
                   'loops will change nothing; lower the learning rate or start anew')


def is_spike(loss, trend):
    """Is this loss far above those before it? Updates trend."""
    count, mean, variance = trend
    spike = count >= 50 and loss > mean + max(6 * math.sqrt(variance), 0.2)
    share, off = max(1 / (count + 1), 0.02), loss - mean
    trend[:] = [count + 1, mean + share * off, (1 - share) * (variance + share * off ** 2)]
    return spike


def check_finite(loss, norm, n_loop, it, lr, out_dir):
    """ValueError if the loss or the gradient's norm is no number."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    good = f'{out_dir}/ckpt.pt'
    loops = '/'.join(map(str, n_loop)) or 'none'
    raise ValueError(f'no number at iteration {it}: loss {loss}, gradient norm {norm}, loops '
                     f'{loops}, learning rate {lr:.2e}. The weights were not touched and {good} '
                     'is good: train on from it with a lower learning rate '
                     f'(--init_from={good} --out_dir=...)')


# speed and memory --------------------------------------------------------------------------------

def training_flops(config, n_loop):
    """
    FLOPs a token of a training pass, with n_loop[g] loops of group g: the forward pass of every
    step, and the backward pass, which costs twice as much, of the last min(bptt_k, n_loop[g]).

    As MFU is usually counted: two for each weight of a matrix product, and attention to the whole
    window.
    """
    C, looped = config.n_embd, sum(map(len, config.groups))
    block = 2 * block_weights(config) + 4 * config.block_size * C
    # half of the adapter: its products with e, once a pass, and with x, in every step
    half = 2 * C ** 2 if config.injection == 'concat' else 0
    flops = 3 * ((config.n_layer - looped) * block + 2 * C * config.vocab_size)
    for layers, n in zip(config.groups, n_loop):
        passes = n + 2 * min(config.bptt_k, n)
        flops += 3 * half + (len(layers) * block + half) * passes
    return flops


def peak_tflops_of(dev):
    """The device's bf16 TFLOP/s, None if they are not known."""
    card = torch.cuda.get_device_name(dev) if dev.startswith('cuda') else ''
    return next((tflops for name, tflops in PEAK_TFLOPS.items() if name in card), None)


def peak_memory(dev):
    """The most memory that this process has held, in GB: the device's on CUDA, else its own."""
    if dev.startswith('cuda'):
        return torch.cuda.max_memory_allocated(dev) / 1e9
    try:
        import resource
    except ImportError:     # Windows
        return math.nan
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def graphs(compiled):
    """How many graphs torch.compile has made so far."""
    return torch._dynamo.utils.counters['stats']['unique_graphs'] if compiled else 0


@contextmanager
def timed(spent, what):
    """Add the seconds that the block takes to spent[what]."""
    begin = time.time()
    yield
    spent[what] += time.time() - begin


# progress, and being asked to stop ---------------------------------------------------------------

def slowly(items, what, every=10):
    """The items of a list one by one, with a line on how far they are every ten seconds."""
    last = time.time()
    for done, item in enumerate(items):
        if time.time() - last > every:
            say(f'{what}: {done} of {len(items)} batches')
            last = time.time()
        yield item


def listen():
    """
    From now on SIGINT and SIGTERM are noted in a list, which is returned with the old handlers.

    The second one of a kind does what it did before: it ends the program.
    """
    asked = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number, frame):
        asked.append(number)
        signal.signal(number, handlers[number])
    for number in handlers:
        signal.signal(number, note)
    return asked, handlers


def stop_listening(handlers):
    for number, handler in handlers.items():
        signal.signal(number, handler)
