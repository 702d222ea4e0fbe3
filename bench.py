"""
What an exit rule buys: latency and quality against tau, beside fixed budgets and an oracle.

    python bench.py                     the default run's checkpoint, about a minute on two cores
    python bench.py --protocol=both     with a cache, and as the paper's figures suggest: the whole
                                        context again for each token
    python bench.py --rules="['accel']" --hits=1 --keep=True        an ablation of a rule;
                                        and --per=sequence, --cache=latest, --dtype=bfloat16

Writes out_dir/bench.csv, figure_4.png and frontier.png (and bench.json with --json), and prints a
verdict that is computed. bench.csv has a row for each point: a rule at a tau, a fixed budget, an
oracle's epsilon. It is written after each stage, and on Ctrl-C with all that is measured by then;
`windows` says how many windows the quality of a row rests on, and times are empty until there are
some.

Quality: teacher-forced over held-out windows, the same windows and noise for all points; intervals
are 95% bootstrap over windows, of the difference from the full budget in the same window. Latency:
`timed_tokens` tokens behind a prompt of half a window, all points in turn, round by round.

Paper: sec. 4, App. D, Fig. 4.

    tau             the threshold of a rule; of a fixed budget its loops, of the oracle its epsilon
    steps, evals    loop steps kept, block maps evaluated
    CE, PPL         cross-entropy in nats a token, exp(CE)
    B, T, V         rows, tokens of a window, vocabulary
"""
import csv
import json as json_module
import math
import os
import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

import data
import memory
import plots
from cache import KeysValues, Span
from checkpoint import load_checkpoint
from configurator import configure, pick_device, run
from decode import POLICIES, make_cache, one_token, prefill
from exits import EXITS, Exit, make_exit
from model import GPT, GPTConfig

# --------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None  # held-out text; None = the run's own
rules = list(EXITS)
taus = [1e-5, 1e-4, 1e-3, 1e-2]     # the paper's sweep
more_taus = [3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]  # a marked extension
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 30]    # fixed loops
epsilons = [1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 1.0]    # of the oracle: distance to the last iterate
n_loop = 30                 # the full budget, k_max of every rule
n_windows = 64              # held-out windows for quality
prompt_tokens: int | None = None    # of each timed window; None = half a block
timed_tokens = 8            # decoded behind each prompt
rounds = 4                  # each takes its own window
batch_size = 1              # rows decoded together
hits: int | None = None     # small values in a row that let a token go; None = the rule's own
past = False                # rules wait for the past: see exits.wait_for_past
keep: bool | None = None    # is the step that triggered kept? None = the rule's own
per = 'token'               # token, or sequence: all tokens of a row stop together
cache = 'exact'             # exact, ring, latest: how the timed decoding keeps keys and values
ring = 8
protocol = 'cached'         # cached, paper (the context anew for each token), both
checks = True               # measure what a check of a rule costs, here and at C = 768, V = 50304
json = False                # the same as JSON, in out_dir/bench.json
seed = 0                    # of x^(0) and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

SAME = 0.005                # nats: what counts as equal quality


# the points ---------------------------------------------------------------------------------------

@dataclass
class Point:
    """One way to choose the loops of each token, and what has been measured of it so far."""
    rule: str                   # an exit rule, 'fixed' or 'oracle'
    tau: float                  # its threshold, loops or epsilon
    loops: list                 # loop budget of each group
    exit: Exit | None = None
    extension: bool = False     # beyond the paper's sweep
    figures: list = field(default_factory=list)     # of `quality`: a dict for each batch of windows
    # for each protocol: ms of each timed token, and the tokens of each round
    times: dict = field(default_factory=lambda: dict(cached=[], paper=[]))
    tokens: dict = field(default_factory=lambda: dict(cached=[], paper=[]))


def make_points(n_groups):
    """Every fixed budget, (rule, tau) and oracle epsilon, each once."""
    full = [n_loop] * n_groups
    points = [Point('fixed', n, [n] * n_groups) for n in sorted({*budgets, n_loop})]
    for name in dict.fromkeys(rules):
        for tau in dict.fromkeys(taus + more_taus):
            rule = make_exit(name, tau, hits, keep, past)
            if per == 'sequence':
                rule = sequence_exit(rule)
            points.append(Point(name, tau, full, rule, extension=tau not in taus))
    points += [Point('oracle', epsilon, full) for epsilon in dict.fromkeys(epsilons)]
    return points


def sequence_exit(rule):
    """The rule with one signal for all tokens of a row: their largest."""
    def signal(*args):
        value, memo = rule.signal(*args)
        if value is not None:
            value = value.amax(dim=-1, keepdim=True).expand_as(value)       # (B, T)
        return value, memo
    return replace(rule, signal=signal)


class Oracle:
    """
    While entered, each group lets a token go at the first step that is within eps of its last one.

    To know its last iterate a group has to loop to the end before it starts. No exit rule can do
    that: a rule sees one step at a time, and what a later group receives depends on where the
    earlier ones stopped. So the group's forward itself is replaced, and put back at the end.
    """

    def __init__(self, model, eps):
        self.model, self.eps = model, eps

    def __enter__(self):
        for group in self.model.groups:
            group.forward = oracle_forward(group.forward, self.eps)

    def __exit__(self, *_):
        for group in self.model.groups:
            del group.forward           # the class's own shows again


def oracle_forward(whole, eps):
    """A RecurrentGroup's forward `whole` -> one with the oracle as its exit rule."""
    def forward(e, n, exit=None, readout=None, noise_seed=0, span=None, caches=None, x0=None,
                trace=None):
        last, _, _ = whole(e, n, None, None, noise_seed, span)              # (B, T, C)

        def signal(x, x1, memo, readout):
            memo = last if memo is None else memo       # later: of the rows that still loop
            return vector_norm(x1 - memo, dim=-1), memo

        rule = Exit('oracle', eps, signal, 1, True)
        return whole(e, n, rule, readout, noise_seed, span, caches, x0, trace)
    return forward


# quality ------------------------------------------------------------------------------------------

@torch.no_grad()
def teacher_forced(model, point, idx):
    """idx (B, T) -> log-probabilities (B, T, V), steps_used and evals (B, T, groups)."""
    trace = []
    if point.rule == 'oracle':
        with Oracle(model, point.tau):
            logits, _ = model(idx, n_loop=point.loops, noise_seed=seed, trace=trace)
    else:
        logits, _ = model(idx, n_loop=point.loops, exit=point.exit, noise_seed=seed, trace=trace)
    steps_used = torch.stack([entry['steps_used'] for entry in trace], dim=-1)
    evals = torch.stack([entry['evals'] for entry in trace], dim=-1)
    return logits.float().log_softmax(-1), steps_used, evals


def window_means(values):
    """Values of tokens (B, T, ...) -> their mean in each window (B, ...), a float64 array."""
    return values.cpu().double().mean(dim=1).numpy()


def cross_entropy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> nats an asked token in each window (B,), float64."""
    nats = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), reduction='none')     # 0 if not asked
    asked = (targets >= 0).float().mean(dim=1)
    return (nats.view(targets.shape).mean(dim=1) / asked).double().cpu().numpy()


def accuracy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> share of the asked tokens that are right (B,), float64."""
    right = (log_p.argmax(-1) == targets).sum(dim=1)
    return (right / (targets >= 0).sum(dim=1)).double().cpu().numpy()


@torch.no_grad()
def quality(model, points, idx, targets):
    """
    Teacher-forced passes over windows idx, targets (N, T), a batch of B windows after another.

    Adds to each point's figures, for each batch and of each window in it:

        ce, ce_full     (B,) CE of the point and of the full budget
        accuracy        (B,) share of tokens whose likeliest next token is the right one
        agreement       (B,) share of tokens whose likeliest next token is the full budget's
        kl              (B,) KL(full budget || point), nats a token
        steps, evals    (B, groups)
    """
    full_budget = Point('fixed', n_loop, [n_loop] * len(model.groups))
    batch = memory.windows_at_once(model.config, len(idx))
    for x, y in zip(idx.split(batch), targets.split(batch)):
        full, _, _ = teacher_forced(model, full_budget, x)                  # (B, T, V)
        ce_full = cross_entropy(full, y)
        for point in points:
            log_p, steps, evals = teacher_forced(model, point, x)
            point.figures.append(dict(
                ce=cross_entropy(log_p, y),
                ce_full=ce_full,
                accuracy=accuracy(log_p, y),
                agreement=window_means(log_p.argmax(-1) == full.argmax(-1)),
                kl=window_means((full.exp() * (full - log_p)).sum(-1)),
                steps=window_means(steps),
                evals=window_means(evals)))


def interval(values, statistic=np.mean, draws=2000):
    """95% bootstrap interval of a statistic over the first axis."""
    values = np.asarray(values)
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(values[picks], axis=1), [2.5, 97.5])


# latency ------------------------------------------------------------------------------------------

def timer(device):
    """A function that returns the seconds since it was last called, on CUDA by its events."""
    on_cuda = device.startswith('cuda')

    def now():
        if not on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    last = now()

    def lap():
        nonlocal last
        before, last = last, now()
        if not on_cuda:
            return last - before
        last.synchronize()
        return before.elapsed_time(last) / 1e3
    return lap


@torch.no_grad()
def oracle_schedule(model, point, idx):
    """The loops that the oracle takes in each group at each position of idx (B, T): (T, groups)."""
    trace = []
    with Oracle(model, point.tau):
        model(idx, n_loop=point.loops, noise_seed=seed, trace=trace)
    return torch.stack([entry['evals'].amax(dim=0) for entry in trace], dim=1).tolist()


@torch.no_grad()
def decode_window(model, point, idx, start, how, device):
    """
    Decode positions start ... of idx (B, T) one by one, with a cache or (how = 'paper') without.

    Returns the seconds of each position and the likeliest next tokens (B, T - start).
    """
    # looking ahead is no part of the oracle's time: the loops that it takes are only run again
    schedule = oracle_schedule(model, point, idx) if point.rule == 'oracle' else None
    if how == 'cached':
        B, T = idx.shape
        kept = make_cache(model, point.loops, cache, ring, T, rows=B)
        prefill(model, list(idx[:, :start]), point.loops, point.exit, seed, kept)
    lap, seconds, tokens = timer(device), [], []
    for t in range(start, idx.shape[1]):
        loops = schedule[t] if schedule else point.loops
        lap()
        if how == 'cached':
            new = idx[:, t:t + 1]
            logits, _, _ = one_token(model, new, t, loops, point.exit, seed, kept)
        else:
            logits, _, _ = prefill(model, list(idx[:, :t + 1]), loops, point.exit, seed, None)
        tokens.append(logits.argmax(-1))
        seconds.append(lap())
    return seconds, torch.stack(tokens, dim=1)


def warm_up(model, points, prompts, start, how, device):
    """Decode two tokens at every point, so that no round pays for what happens only once."""
    began = time.perf_counter()
    for point in points:
        decode_window(model, point, prompts[:, :start + 2], start, how, device)
    print(f'warm-up {time.perf_counter() - began:.1f} s')


def time_round(model, points, prompts, start, protocols, device):
    """Time every point on prompts (B, T), in turn: what slows the machine down slows all alike."""
    for point in points:
        for how in protocols:
            seconds, tokens = decode_window(model, point, prompts, start, how, device)
            point.times[how] += [1e3 * s for s in seconds]
            point.tokens[how].append(tokens)


@torch.no_grad()
def check_costs(model, repeats=15, n=8):
    """
    What the check of each rule adds to a loop step of the first group, for one token.

    n: loop steps of a pass. Yields (rule, microseconds, microseconds of a step without).
    """
    group, C = model.groups[0], model.config.n_embd
    e = torch.randn(1, 1, C, device=model.lm_head.weight.device)
    lap = timer(e.device.type)
    # kl apart: its head sweeps what the others have in the processor's caches
    others = [name for name in EXITS if name != 'kl']
    for names in (others, ['kl']):
        times = {name: [] for name in (None, *names)}
        for _ in range(repeats + 1):
            for name in times:
                rule = make_exit(name, 0.0) if name else None
                caches = [KeysValues(n, 1) for _ in group.core]
                lap()
                group(e, n, rule, model.readout, 0, Span(0, 1, e.device), caches)
                times[name].append(lap() / n)
        step = np.median(times[None][1:])       # the first pass warms up
        for name in names:
            added = np.median(np.subtract(times[name], times[None])[1:])
            yield name, 1e6 * added, 1e6 * step


# what comes out -----------------------------------------------------------------------------------

def make_row(point, groups, protocols):
    """What is known of a point, as its row of bench.csv."""
    names = point.figures[0]
    figures = {name: np.concatenate([part[name] for part in point.figures]) for name in names}
    ce, difference = figures['ce'].mean(), figures['ce'] - figures['ce_full']
    low, high = interval(difference)
    row = dict(rule=point.rule, tau=point.tau, extension=point.extension, windows=len(difference),
               ce=ce, ppl=math.exp(ce), ce_minus_full=difference.mean(),
               diff_low=low, diff_high=high, accuracy=figures['accuracy'].mean(),
               agreement=figures['agreement'].mean(),
               kl_to_full=figures['kl'].mean(), mean_steps=figures['steps'].mean(),
               mean_evals=figures['evals'].mean())
    for g, layers in enumerate(groups):
        name = '-'.join(map(str, layers))
        row[f'steps_{name}'] = figures['steps'][:, g].mean()
        row[f'evals_{name}'] = figures['evals'][:, g].mean()
    # with both protocols the columns of the second one end in its name
    for ending, how in zip(['', '_paper'], protocols):
        low = middle = high = ''
        if point.times[how]:
            low, middle, high = np.percentile(point.times[how], [10, 50, 90])
        row[f'ms_per_token{ending}'] = middle
        row[f'ms_p10{ending}'], row[f'ms_p90{ending}'] = low, high
    return row


def save(points, groups, protocols):
    """bench.csv of all that is known so far, whole or not at all -> its rows."""
    rows = [make_row(point, groups, protocols) for point in points if point.figures]
    if rows:
        path = os.path.join(out_dir, 'bench.csv')
        with open(path + '.tmp', 'w', newline='') as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        os.replace(path + '.tmp', path)
    return rows


def print_table(rows, protocols):
    both = len(protocols) == 2
    header = (f"{'rule':10s} {'tau':>7s} {'CE':>8s} {'minus full [95%]':>28s} {'right':>6s} "
              f"{'agree':>6s} {'evals':>6s} {'ms/token':>9s} {'p10':>6s} {'p90':>6s}")
    print('\n' + header + ('  paper ms' if both else ''))
    for row in rows:
        star = '*' if row['extension'] else ' '
        line = (f"{row['rule']:10s} {row['tau']:7g}{star}{row['ce']:8.4f} "
                f"{row['ce_minus_full']:+9.4f} [{row['diff_low']:+.4f}, {row['diff_high']:+.4f}] "
                f"{row['accuracy']:6.3f} {row['agreement']:6.3f} {row['mean_evals']:6.2f} "
                f"{row['ms_per_token']:9.2f} {row['ms_p10']:6.2f} {row['ms_p90']:6.2f}")
        if both:
            line += f"{row['ms_per_token_paper']:10.2f}"
        print(line)
    print("* beyond the paper's sweep")


def print_checks(model, device):
    """Measure and print what a check costs, in this model and at GPT-2's size -> rows of both."""
    print('\nwhat a check costs:')
    gpt2_size = GPTConfig(n_layer=2, groups=[[0]], block_size=64)
    large = GPT(gpt2_size).to(device).eval()
    costs = []
    for measured, repeats in ((model, 15), (large, 7)):
        label = f'C = {measured.config.n_embd}, V = {measured.config.vocab_size}'
        for name, us, step in check_costs(measured, repeats):
            costs.append((label, name, us, step))
            print(f'  {label}: {name:9s} {us:7.0f} us a step, {100 * us / step:6.1f}% of '
                  f'{step:.0f} us')
    return costs


def compare_protocols(points, rows):
    """A sentence: do both protocols choose the same tokens, and what does recomputing cost?"""
    same = True
    for point in points:
        if point.rule != 'oracle':      # its schedule is of a pass without a cache
            pairs = zip(point.tokens['cached'], point.tokens['paper'])
            same = same and all(torch.equal(cached, paper) for cached, paper in pairs)
    ratio = np.median([row['ms_per_token_paper'] / row['ms_per_token'] for row in rows])
    return (f"both protocols choose the same tokens: {'yes' if same else 'NO'}; recomputing takes "
            f'{ratio:.1f} times as long (median over the points)')


def verdict(rows, times):
    """
    Sentences: at equal quality (CE within SAME of the full budget), which rule is fastest?

    times: {(rule, tau): ms of each timed token}, the same tokens for all.
    """
    # the fastest point of each rule that is good enough
    best = {}
    for row in rows:
        name = row['rule']
        if row['ce_minus_full'] <= SAME:
            if name not in best or row['ms_per_token'] < best[name]['ms_per_token']:
                best[name] = row
    exits = [row for name, row in best.items() if name not in ('fixed', 'oracle')]
    if not exits:
        return [f'No rule comes within {SAME} nats of the full budget at the taus given.']

    # the fastest rule, and the others' times over its own
    fastest = min(exits, key=lambda row: row['ms_per_token'])
    says = [f"Within {SAME} nats of the full budget the fastest rule is {fastest['rule']} at tau "
            f"{fastest['tau']:g}: {fastest['ms_per_token']:.2f} ms a token, "
            f"{fastest['mean_evals']:.2f} block maps a group, CE {fastest['ce_minus_full']:+.4f} "
            f"[{fastest['diff_low']:+.4f}, {fastest['diff_high']:+.4f}]."]
    for name in ('kl', 'norm', 'accel', 'fixed', 'oracle'):
        if name in best and name != fastest['rule']:
            row = best[name]
            pairs = [times[r['rule'], r['tau']] for r in (row, fastest)]
            pairs = np.array(pairs).T                                       # (tokens, 2)
            low, high = interval(pairs, ratio_of_medians)
            who = 'The fixed budget of' if name == 'fixed' else f'{name} at'
            says.append(f"{who} {row['tau']:g} takes {ratio_of_medians(pairs, 0):.2f} [{low:.2f}, "
                        f"{high:.2f}] times as long ({row['ms_per_token']:.2f} ms, "
                        f"{row['mean_evals']:.2f} block maps, CE {row['ce_minus_full']:+.4f}).")
    if 'fixed' in best and best['fixed']['ms_per_token'] <= fastest['ms_per_token']:
        says.append(f"No rule is worth its cost here: looping {best['fixed']['tau']} times for "
                    'every token is as good and as fast.')
    return says


def ratio_of_medians(pairs, axis):
    """Median of the first over that of the second: pairs (..., 2), with axis over the pairs."""
    return np.median(pairs[..., 0], axis) / np.median(pairs[..., 1], axis)


# the run ------------------------------------------------------------------------------------------

def check_knobs(block_size):
    """ValueError for a knob that makes no sense; else the number of prompt tokens."""
    if not taus or not rules:
        raise ValueError('taus and rules must not be empty: --taus=[1e-3,1e-2] '
                         '--rules="[\'accel\']"')
    choices = dict(per=(per, ('token', 'sequence')), cache=(cache, POLICIES),
                   protocol=(protocol, ('cached', 'paper', 'both')))
    for knob, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"unknown {knob} '{value}': choose one of {', '.join(known)}")
    numbers = dict(n_windows=n_windows, rounds=rounds, batch_size=batch_size, n_loop=n_loop)
    for knob, value in numbers.items():
        if value < 1:
            raise ValueError(f'{knob} must be at least 1, not {value}')
    start = block_size // 2 if prompt_tokens is None else prompt_tokens
    if start < 1 or timed_tokens < 1 or start + timed_tokens > block_size:
        raise ValueError(f'{start} prompt and {timed_tokens} timed tokens do not fit block_size = '
                         f'{block_size}: make --prompt_tokens or --timed_tokens smaller')
    return start


def held_out_windows(checkpoint, T):
    """n_windows windows spread over the held-out text: idx, targets (n_windows, T)."""
    text = data.open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'])
    there = text.n_held_out(T)
    if max(n_windows, rounds * batch_size) > there:
        raise ValueError(f'the held-out text has {there} windows of {T} tokens: --n_windows and '
                         'rounds * batch_size may be no more')
    return text.held_out(np.linspace(0, there - 1, n_windows).round().astype(int), T)


def check_memory(model, tokens, device):
    """ValueError if the largest budget is too much. tokens: of a timed window."""
    most = max([n_loop, *budgets])
    # quality: without an exit rule a pass keeps all its states
    windows = memory.windows_at_once(model.config, n_windows)
    needed = memory.states_bytes(model.config, most, windows)
    what = f'keeping the states of {most} loops over {windows} windows'
    memory.require(needed, device, what, '--n_loop, --budgets or --n_windows')
    # latency: a cache that is made and not filled is checked too
    if protocol != 'paper':
        make_cache(model, [most] * len(model.groups), cache, ring, tokens, rows=batch_size)


def main():
    # the model, the held-out text, and what to measure
    dev, autocast = pick_device(device, dtype)
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    T, groups = model.config.block_size, model.config.groups
    start = check_knobs(T)
    if not groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: there is nothing to '
                         'exit from')
    windows = held_out_windows(checkpoint, T)
    idx, targets = (tokens.to(dev) for tokens in windows)
    points = make_points(len(groups))
    protocols = ['cached', 'paper'] if protocol == 'both' else [protocol]
    check_memory(model, start + timed_tokens, dev)
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs float32 as it is
    card = ' ' + torch.cuda.get_device_name() if dev.startswith('cuda') else ''
    print(f"{out_dir}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {groups}, {dev}{card}, "
          f'{dtype}, {torch.get_num_threads()} threads, seed {seed}; {n_windows} windows, prompt '
          f'{start} + {timed_tokens} tokens, batch {batch_size}, {rounds} rounds')

    # measure; whatever ends it, bench.csv gets what there is
    try:
        with autocast:
            quality(model, points, idx, targets)
            save(points, groups, protocols)
            warm_up(model, points, idx[:batch_size], start, protocols[0], dev)
            for r in range(rounds):
                of_round = [(r * batch_size + b) % n_windows for b in range(batch_size)]
                prompts = idx[of_round, :start + timed_tokens]
                time_round(model, points, prompts, start, protocols, dev)
                save(points, groups, protocols)
    except KeyboardInterrupt:
        print(f'{out_dir}/bench.csv holds what was measured so far')
        raise
    finally:
        rows = save(points, groups, protocols)

    # figures, table, costs, verdict
    plots.figure_4(rows, os.path.join(out_dir, 'figure_4.png'))
    plots.frontier(rows, SAME, os.path.join(out_dir, 'frontier.png'))
    print_table(rows, protocols)
    costs = []
    if checks:
        with autocast:
            costs = print_checks(model, dev)
    if protocol == 'both':
        print('\n' + compare_protocols(points, rows))
    says = verdict(rows, {(p.rule, p.tau): p.times[protocols[0]] for p in points})
    print('\n' + '\n'.join(says))
    if json:
        everything = dict(config=config, points=rows, checks=costs, verdict=says)
        with open(os.path.join(out_dir, 'bench.json'), 'w') as f:
            json_module.dump(everything, f, indent=1, default=float)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
