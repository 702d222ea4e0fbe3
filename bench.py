"""
How good and how fast is each way to decode: exit rules by threshold, fixed budgets, an oracle.

    python bench.py                     the default run's checkpoint, three minutes on two cores
    python bench.py --cache=exact       one cache policy only; --past=False: own signals only
    python bench.py --rules="['accel']" --hits=1 --keep=True        a rule with one part changed
    python bench.py --calibrate=0.005   find thresholds instead: out_dir/exits.json

Writes out_dir/bench.csv, figure_4.png and frontier.png (bench.json too with --json), and prints a
table and a verdict that is computed from it. A row of bench.csv is a point: a cache policy together
with a rule at a threshold, a fixed budget, or an oracle. The file is written after each stage, and
on Ctrl-C with what has been measured by then: `windows` says how many windows the quality of a row
is a mean of, and its times are empty until it has some.

Quality: held-out windows are decoded at every point, with the same noise. The 95% intervals are
bootstrap intervals, over windows, of the difference from the full budget of `exact` in the same
window. Latency: each round decodes `timed_tokens` tokens after a prompt, at all points in turn, so
that whatever slows the machine down slows all of them down.

The defaults are small: 24 windows, two rounds, no `accel_hat`, which hardly ever triggers. Below
`least_tau` a rule is measured with its own signals under `exact` only, as in the paper.

Paper: sec. 4, App. D, Fig. 4.

    tau             the threshold of a rule; the loop steps of a fixed budget; the oracle's epsilon
    steps, evals    loop steps kept, block maps evaluated
    CE, PPL         cross-entropy in nats a token, exp(CE)
    B, T, V         rows, tokens of a window, vocabulary
"""
import csv
import json as json_module
import math
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

import data
from cache import KeysValues, Span
from common import plots
from common.checkpoint import find_run, load_checkpoint, save_thresholds
from common.configurator import configure, pick_device, run
from common.log import windows_at_once
from decode import POLICIES, make_cache, one_token, prefill, teacher_forced
from exits import EXITS, Exit, make_exit
from model import GPT, GPTConfig

# --------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # held-out text; None = the run's own
rules = [name for name in EXITS if name != 'accel_hat']
taus = [1e-5, 1e-4, 1e-3, 1e-2]     # the paper's sweep
more_taus = [3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]    # beyond it, and marked so
least_tau = 0.1             # below it: own signals under exact only
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 30]    # fixed loop steps
epsilons = [0.3, 1.0]       # of the oracle: distance to the last state
n_loop = 30                 # the full budget, and k_max of every rule
n_windows = 24              # held-out windows for quality
prompt_tokens: int | None = None    # before the timed tokens; None = half a block
timed_tokens = 8            # in each round
rounds = 2                  # of latency, each with a window of its own
timed_rows = 1              # decoded together when timing
hits: int | None = None     # small values in a row before a token exits; None = the rule's own
keep: bool | None = None    # keep the step that triggered? None = the rule's own
cache: str | list = ['exact', 'latest']     # policies: exact, ring, latest
past: bool | list = [False, True]   # under exact: do rules wait for the past?
ring = 8                    # slots of the policy ring
same = 0.005                # nats above the full budget that count as equal quality
calibrate: float | None = None      # nats: find the thresholds that cost at most this
checks = True               # measure what a rule's check costs, here and at GPT-2's size
json = False                # write out_dir/bench.json too
seed = 0                    # of x^(0) and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# thresholds that calibration tries, 31.6 to 1e-4, and the windows that it needs in each half
TAU_GRID = [float(f'{10 ** (n / 4):.3g}') for n in range(6, -17, -1)]
LEAST_WINDOWS = 8


# the points ---------------------------------------------------------------------------------------

@dataclass
class Point:
    """One way to decode, and what has been measured of it so far."""
    rule: str                   # an exit rule, 'fixed' or 'oracle'
    tau: float
    loops: list                 # the loop budget of each group
    exit: Exit | None = None
    cache: str = 'exact'        # the cache policy
    ring: int = 8               # slots of the policy ring
    extension: bool = False     # is tau beyond the paper's sweep?
    figures: list = field(default_factory=list)     # of `quality`: a dict for each batch of windows
    times: list = field(default_factory=list)       # ms of each timed token

    @property
    def past(self):
        """Does its rule wait for the past?"""
        return self.exit is not None and self.exit.past


def make_points(model):
    """The points that the knobs ask for, each once: budgets, rules and oracles of each policy."""
    points = []
    for policy in as_list(cache):
        points += [Point('fixed', n, model.loop_counts(n), None, policy, ring)
                   for n in sorted({*budgets, n_loop})]
        for kind in kinds_of(policy):
            own_under_exact = policy == 'exact' and not kind[2]
            points += [make_point(model, kind, tau) for tau in dict.fromkeys(taus + more_taus)
                       if tau >= least_tau or own_under_exact]
        points += [Point('oracle', epsilon, model.loop_counts(n_loop), None, policy, ring)
                   for epsilon in dict.fromkeys(epsilons)]
    return points


def kinds_of(policy):
    """(policy, rule, past) for each rule, with its own signals and waiting as `past` asks for."""
    # only `exact` keeps what a lone token needs in order to wait: elsewhere just a prompt waits
    waits = dict.fromkeys(as_list(past)) if policy == 'exact' else [True]
    return [(policy, name, wait) for name in dict.fromkeys(rules) for wait in waits]


def make_point(model, kind, tau):
    """A rule at a threshold; kind: see kinds_of."""
    policy, name, wait = kind
    return Point(name, tau, model.loop_counts(n_loop), make_exit(name, tau, hits, keep, wait),
                 policy, ring, extension=tau not in taus)


def as_list(value):
    return value if isinstance(value, list) else [value]


# the oracle ---------------------------------------------------------------------------------------

@contextmanager
def oracle(model, eps):
    """
    A context in which a token exits at the first step whose state is within eps of its last one.

    Each group loops twice: to the end, to know the last states, and then until each token is near
    its own. No exit rule can do that, since a rule sees one step at a time, and a later group
    depends on where the earlier ones stopped. So the forward of each group is replaced meanwhile.
    """
    for group in model.groups:
        group.forward = oracle_forward(group.forward, eps)
    try:
        yield
    finally:
        for group in model.groups:
            del group.forward           # the method of its class is visible again


def oracle_forward(plain, eps):
    """The plain forward of a RecurrentGroup -> one with the oracle as its exit rule."""
    def forward(e, n_loop, exit=None, read=None, noise_seed=0, span=None, caches=None, x0=None,
                trace=None):
        # the second pass overwrites what this one leaves in the cache
        last, _, _ = plain(e, n_loop, None, None, noise_seed, span, caches, x0)     # (B, T, C)

        def distance(x, x1, memo, read):
            memo = last if memo is None else memo       # then of the rows that still loop
            return vector_norm(x1 - memo, dim=-1), memo

        rule = Exit(distance, eps, name='oracle')
        return plain(e, n_loop, rule, read, noise_seed, span, caches, x0, trace)
    return forward


# quality ------------------------------------------------------------------------------------------

@torch.no_grad()
def log_probabilities(model, point, idx, seed=0):
    """
    Decode given tokens idx (B, T) at a point -> log-probabilities of the next ones (B, T, V), and
    steps and evals (B, T, groups).
    """
    with oracle(model, point.tau) if point.rule == 'oracle' else nullcontext():
        logits, steps, evals = teacher_forced(model, idx, point.loops, point.exit, point.cache,
                                              point.ring, seed)
    return logits.float().log_softmax(-1), steps, evals


@torch.no_grad()
def quality(model, points, idx, targets, n_loop, seed=0):
    """
    Measure every point on windows idx, targets (N, T), one batch of B windows after another.

    Appends a dict to each point's figures for every batch. The full budget is n_loop fixed loops
    under `exact`:

        ce, ce_full     (B,) CE of the point and of the full budget
        accuracy        (B,) share of tokens whose most likely next token is right
        agreement       (B,) share of tokens whose most likely next token is the full budget's
        kl              (B,) KL(full budget || point), nats a token
        steps, evals    (B, groups)
    """
    full_budget = Point('fixed', n_loop, model.loop_counts(n_loop))
    batch = windows_at_once(model.config, len(idx))
    for x, y in zip(idx.split(batch), targets.split(batch)):
        full, _, _ = log_probabilities(model, full_budget, x, seed)         # (B, T, V)
        ce_full = cross_entropy(full, y)
        for point in points:
            log_p, steps, evals = log_probabilities(model, point, x, seed)
            point.figures.append(dict(
                ce=cross_entropy(log_p, y),
                ce_full=ce_full,
                accuracy=accuracy(log_p, y),
                agreement=window_means(log_p.argmax(-1) == full.argmax(-1)),
                kl=window_means((full.exp() * (full - log_p)).sum(-1)),
                steps=window_means(steps),
                evals=window_means(evals)))


def cross_entropy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> mean over each window's labels (B,), float64."""
    nats = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), reduction='none')     # 0: no label
    labels = (targets >= 0).float().mean(dim=1)
    return (nats.view(targets.shape).mean(dim=1) / labels).double().cpu().numpy()


def accuracy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> share of each window's labels that are right (B,)."""
    right = (log_p.argmax(-1) == targets).sum(dim=1)
    return (right / (targets >= 0).sum(dim=1)).double().cpu().numpy()


def window_means(values):
    """Values of tokens (B, T, ...) -> their mean in each window (B, ...), a float64 array."""
    return values.cpu().double().mean(dim=1).numpy()


def figures_of(point):
    """What `quality` has measured of a point, all windows together: {name: (windows, ...)}."""
    names = point.figures[0]
    return {name: np.concatenate([batch[name] for batch in point.figures]) for name in names}


def excess(point, seed=0):
    """CE above the full budget's, nats a token: the mean and the ends of its 95% interval."""
    figures = figures_of(point)
    difference = figures['ce'] - figures['ce_full']
    return [float(value) for value in (difference.mean(), *interval(difference, seed=seed))]


def interval(values, statistic=np.mean, draws=2000, seed=0):
    """95% bootstrap interval of a statistic over the first axis of an array."""
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(values[picks], axis=1), [2.5, 97.5])


# latency ------------------------------------------------------------------------------------------

def now(device):
    """Seconds, read once the device has finished its work."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def decode_window(model, point, idx, start, seed=0):
    """Decode idx (B, T) from position `start` on, token by token -> the seconds of each."""
    # an oracle chooses its loop steps beforehand, and only running them is timed
    T, schedule = idx.shape[1], None
    if point.rule == 'oracle':
        _, _, evals = log_probabilities(model, point, idx, seed)            # the most of any row:
        schedule = evals.amax(dim=0).tolist()                               # (T, groups)
    kept = make_cache(model, point.loops, point.cache, point.ring, T)
    prefill(model, list(idx[:, :start]), point.loops, point.exit, seed, kept,
            converge=point.cache == 'latest')
    seconds = []
    for t in range(start, T):
        loops = schedule[t] if schedule else point.loops
        begin = now(idx.device)
        logits, _, _ = one_token(model, idx[:, t:t + 1], t, loops, point.exit, seed, kept)
        logits.argmax(-1)
        seconds.append(now(idx.device) - begin)
    return seconds


def time_round(model, points, prompts, start, seed=0):
    """Decode prompts (B, T) from `start` on at every point in turn, and add to its times."""
    for point in points:
        point.times += [1e3 * s for s in decode_window(model, point, prompts, start, seed)]


def warm_up(model, points, prompts, start, seed=0):
    """Decode two tokens with each kind of point, so that no round pays for first calls."""
    begin = time.perf_counter()
    for point in {(p.cache, p.rule, p.past): p for p in points}.values():
        decode_window(model, point, prompts[:, :start + 2], start, seed)
    print(f'warm-up {time.perf_counter() - begin:.1f} s')


@torch.no_grad()
def check_costs(model, repeats=15, n=8):
    """
    What each rule's check adds to a loop step of the first group, for a single token.

    n: loop steps of a pass. Yields (rule, microseconds added, microseconds of a plain step).
    """
    group = model.groups[0]
    e = torch.randn(1, 1, model.config.n_embd, device=model.lm_head.weight.device)
    # kl is measured separately: its head evicts from the processor's caches what the others use
    for names in ([name for name in EXITS if name != 'kl'], ['kl']):
        times = {name: [] for name in (None, *names)}
        for _ in range(repeats + 1):
            for name in times:
                rule = make_exit(name, 0.0) if name else None
                read = model.reader(rule) if rule else None
                caches = [KeysValues(n, 1) for _ in group.core]
                begin = now(e.device)
                group(e, n, rule, read, 0, Span(0, 1, e.device), caches)
                times[name].append((now(e.device) - begin) / n)
        step = np.median(times[None][1:])       # the first pass warms up
        for name in names:
            added = np.median(np.subtract(times[name], times[None])[1:])
            yield name, 1e6 * added, 1e6 * step


# calibration: thresholds that keep a promise ------------------------------------------------------

def find_thresholds(model, make_point, kinds, idx, targets, nats, n_loop, seed=0):
    """
    For each kind the largest tau that costs at most `nats` above the full budget, a row each.

    The paper leaves tau to be tuned by hand. Here half of the windows idx, targets (N, T) choose
    it: the first of TAU_GRID for which the upper end of the 95% interval is at most `nats`. The
    other half then tells what it costs. make_point(kind, tau) -> Point.

    A row: cache, rule, past and tau, None if none will do; otherwise upper (that upper end), and
    of the other half cost, cost_low, cost_high, evals and kept (is the mean within `nats`?).
    ValueError if nats are not positive or the windows too few.
    """
    if not nats > 0:
        raise ValueError(f'--calibrate must be more than 0 nats, not {nats}: try 0.005')
    if len(idx) < 2 * LEAST_WINDOWS:
        raise ValueError(f'{len(idx)} windows are too few to halve: --n_windows='
                         f'{2 * LEAST_WINDOWS} at least')
    # choose on the even windows
    chosen = {}
    for tau in TAU_GRID:
        points = {kind: make_point(kind, tau) for kind in kinds if kind not in chosen}
        quality(model, list(points.values()), idx[::2], targets[::2], n_loop, seed)
        chosen |= {kind: point for kind, point in points.items() if excess(point)[2] <= nats}
        if len(chosen) == len(kinds):
            break
    # measure on the odd ones
    measured = {kind: make_point(kind, point.tau) for kind, point in chosen.items()}
    quality(model, list(measured.values()), idx[1::2], targets[1::2], n_loop, seed)
    rows = []
    for kind in kinds:
        row = dict(zip(('cache', 'rule', 'past'), kind), tau=None)
        if kind in chosen:
            cost, low, high = excess(measured[kind])
            row |= dict(tau=chosen[kind].tau, upper=excess(chosen[kind])[2], cost=cost,
                        cost_low=low, cost_high=high,
                        evals=figures_of(measured[kind])['evals'].mean(), kept=cost <= nats)
        rows.append(row)
    return rows


def print_thresholds(rows, nats):
    print(f'\nthe largest tau within {nats:g} nats of the full budget on half of the windows, and '
          'what it costs on the others:')
    for row in rows:
        name = f"  {row['cache']:6s} {row['rule']:10s} {'past' if row['past'] else 'own':5s}"
        if row['tau'] is None:
            print(f'{name} none from {TAU_GRID[0]:g} to {TAU_GRID[-1]:g}')
        else:
            print(f"{name} {row['tau']:8g}  {row['cost']:+.4f} [{row['cost_low']:+.4f}, "
                  f"{row['cost_high']:+.4f}]  {row['evals']:5.2f} block maps"
                  + ('' if row['kept'] else '  the promise is not kept'))


# tables and the verdict ---------------------------------------------------------------------------

def make_row(point, groups):
    """What is known of a point so far: its row of bench.csv."""
    figures, (above, low, high) = figures_of(point), excess(point, seed)
    ce = figures['ce'].mean()
    row = dict(cache=point.cache, rule=point.rule, past=point.past, tau=point.tau,
               extension=point.extension, windows=len(figures['ce']), ce=ce, ppl=math.exp(ce),
               ce_minus_full=above, diff_low=low, diff_high=high,
               accuracy=figures['accuracy'].mean(), agreement=figures['agreement'].mean(),
               kl_to_full=figures['kl'].mean(), mean_steps=figures['steps'].mean(),
               mean_evals=figures['evals'].mean())
    for g, layers in enumerate(groups):
        name = '-'.join(map(str, layers))
        row[f'steps_{name}'] = figures['steps'][:, g].mean()
        row[f'evals_{name}'] = figures['evals'][:, g].mean()
    p10, median, p90 = np.percentile(point.times, [10, 50, 90]) if point.times else ('', '', '')
    return row | dict(ms_per_token=median, ms_p10=p10, ms_p90=p90)


def save(points, groups, folder):
    """Write folder/bench.csv with what is known so far, whole or not at all -> its rows."""
    rows = [make_row(point, groups) for point in points if point.figures]
    if rows:
        path = os.path.join(folder, 'bench.csv')
        os.makedirs(folder, exist_ok=True)
        with open(path + '.tmp', 'w', newline='') as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        os.replace(path + '.tmp', path)
    return rows


def print_table(rows):
    print(f"\n{'cache':6s} {'rule':10s}      {'tau':>7s} {'CE':>8s} {'minus full [95%]':>28s} "
          f"{'right':>6s} {'agree':>6s} {'evals':>6s} {'ms/token':>9s} {'p10':>6s} {'p90':>6s}")
    for row in rows:
        star = '*' if row['extension'] else ' '
        waits = dict(fixed='', oracle='').get(row['rule'], 'past' if row['past'] else 'own')
        print(f"{row['cache']:6s} {row['rule']:10s} {waits:4s} {row['tau']:7g}{star}"
              f"{row['ce']:8.4f} {row['ce_minus_full']:+9.4f} "
              f"[{row['diff_low']:+.4f}, {row['diff_high']:+.4f}] "
              f"{row['accuracy']:6.3f} {row['agreement']:6.3f} {row['mean_evals']:6.2f} "
              f"{row['ms_per_token']:9.2f} {row['ms_p10']:6.2f} {row['ms_p90']:6.2f}")
    print("* beyond the paper's sweep")


def print_checks(model, device):
    """Measure and print what a check costs, in this model and at GPT-2's size -> rows of both."""
    print('\nwhat a check costs:')
    gpt2_size = GPT(GPTConfig(n_layer=2, groups=[[0]], block_size=64)).to(device).eval()
    costs = []
    for measured, repeats in ((model, 15), (gpt2_size, 7)):
        label = f'C = {measured.config.n_embd}, V = {measured.config.vocab_size}'
        for name, us, step in check_costs(measured, repeats):
            costs.append((label, name, us, step))
            print(f'  {label}: {name:9s} {us:7.0f} us a step, {100 * us / step:6.1f}% of '
                  f'{step:.0f} us')
    return costs


def verdict(rows, times, same, seed=0):
    """
    Sentences: at equal quality (CE within `same` of the full budget), what is fastest?

    times: {name_of(row): ms of each timed token}, of the same tokens for all.
    """
    # the fastest fixed budget of each policy, and the fastest rules, with own signals and waiting
    best = {}
    for row in rows:
        if row['rule'] != 'oracle' and row['ce_minus_full'] <= same:
            way = row['cache'], row['rule'] == 'fixed', row['past']
            if way not in best or row['ms_per_token'] < best[way]['ms_per_token']:
                best[way] = row
    if not best:
        return [f'No point comes within {same:g} nats of the full budget.']

    fastest = min(best.values(), key=lambda row: row['ms_per_token'])
    says = [f'Within {same:g} nats of the full budget the fastest is {in_words(fastest)}.']
    for row in best.values():
        if row is not fastest:
            pairs = np.array([times[name_of(row)], times[name_of(fastest)]]).T      # (tokens, 2)
            low, high = interval(pairs, ratio_of_medians, seed=seed)
            says.append(f'{ratio_of_medians(pairs, 0):.2f} [{low:.2f}, {high:.2f}] times as long: '
                        f'{in_words(row)}.')
    if fastest['rule'] == 'fixed':
        says.append('No rule is worth its cost here: as many loops for every token are as good '
                    'and faster.')
    return says


def name_of(row):
    """What tells a row from all others."""
    return row['cache'], row['rule'], row['past'], row['tau']


def in_words(row):
    if row['rule'] == 'fixed':
        name = f"a fixed budget of {row['tau']:g} under {row['cache']}"
    else:
        waits = ', waiting for the past' if row['past'] and row['cache'] == 'exact' else ''
        name = f"{row['rule']} at tau {row['tau']:g} under {row['cache']}{waits}"
    return (f"{name}: {row['ms_per_token']:.2f} ms a token, {row['mean_evals']:.2f} block maps a "
            f"group, CE {row['ce_minus_full']:+.4f} [{row['diff_low']:+.4f}, "
            f"{row['diff_high']:+.4f}]")


def ratio_of_medians(pairs, axis):
    """Pairs (..., 2) -> median of the first over median of the second, along axis."""
    return np.median(pairs[..., 0], axis) / np.median(pairs[..., 1], axis)


# the run ------------------------------------------------------------------------------------------

def check_knobs(block_size):
    """The position of the first timed token. ValueError for a knob that makes no sense."""
    if not taus or not rules:
        raise ValueError('taus and rules must not be empty: --taus=[1e-3,1e-2] '
                         '--rules="[\'accel\']"')
    for knob, values, known in (('cache', as_list(cache), POLICIES),
                                ('past', as_list(past), (False, True))):
        if not values or any(value not in known for value in values):
            raise ValueError(f'unknown {knob} {values}: choose {", ".join(map(str, known))}')
    lists = dict(taus=taus, more_taus=more_taus, budgets=budgets, epsilons=epsilons)
    for knob, values in lists.items():
        if not all(isinstance(value, (int, float)) for value in values):
            raise ValueError(f'{knob} must be a list of numbers, not {values}')
    numbers = dict(n_windows=n_windows, rounds=rounds, timed_rows=timed_rows,
                   ring=ring)
    for knob, value in numbers.items():
        if value < 1:
            raise ValueError(f'{knob} must be at least 1, not {value}')
    if not same > 0:
        raise ValueError(f'same must be more than 0 nats, not {same}')
    start = block_size // 2 if prompt_tokens is None else prompt_tokens
    fits = start >= 1 and timed_tokens >= 1 and start + timed_tokens <= block_size
    if calibrate is None and not fits:
        raise ValueError(f'{start} prompt and {timed_tokens} timed tokens do not fit block_size = '
                         f'{block_size}: make --prompt_tokens or --timed_tokens smaller')
    return start


def held_out_windows(checkpoint, T):
    """n_windows windows, spread evenly over the held-out text: idx, targets (n_windows, T)."""
    text = data.open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                          checkpoint['model_args']['vocab_size'])
    there = text.n_held_out(T)
    if max(n_windows, rounds * timed_rows) > there:
        raise ValueError(f'the held-out text has {there} windows of {T} tokens: --n_windows and '
                         'rounds * timed_rows may be no more')
    return text.held_out(np.linspace(0, there - 1, n_windows).round().astype(int), T)


def measure(model, points, idx, targets, start, folder):
    """Quality, then latency -> the rows of bench.csv, which is written whatever ends this."""
    groups = model.config.groups
    try:
        quality(model, points, idx, targets, n_loop, seed)
        save(points, groups, folder)
        warm_up(model, points, idx[:timed_rows], start, seed)
        for r in range(rounds):
            numbers = [(r * timed_rows + b) % n_windows for b in range(timed_rows)]
            time_round(model, points, idx[numbers, :start + timed_tokens], start, seed)
            save(points, groups, folder)
    except KeyboardInterrupt:
        print(f'{folder}/bench.csv holds what was measured so far')
        raise
    finally:
        rows = save(points, groups, folder)
    return rows


def calibrate_rules(model, checkpoint, idx, targets, folder):
    """--calibrate: folder/exits.json, and a table of what its thresholds cost."""
    kinds = [kind for policy in as_list(cache) for kind in kinds_of(policy)]
    rows = find_thresholds(model, lambda kind, tau: make_point(model, kind, tau), kinds, idx,
                           targets, calibrate, n_loop, seed)
    print_thresholds(rows, calibrate)
    save_thresholds(folder, checkpoint, rows, nats=calibrate, n_loop=n_loop)
    print(f'{folder}/exits.json: python sample.py --exit=norm_rel --tau=auto uses it')


def main():
    # the model, held-out windows, and the points to measure
    dev, autocast = pick_device(device, dtype)
    source, folder = find_run(out_dir)
    model, checkpoint = load_checkpoint(os.path.join(source, 'ckpt.pt'), dev)
    T, groups = model.config.block_size, model.config.groups
    start = check_knobs(T)
    if not groups:
        raise ValueError(f'the model in {source} has no recurrent groups: there is nothing to '
                         'exit from')
    idx, targets = (tokens.to(dev) for tokens in held_out_windows(checkpoint, T))
    points = make_points(model)
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32
    card = ' ' + torch.cuda.get_device_name() if dev.startswith('cuda') else ''
    print(f"{source}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {groups}, {dev}{card}, "
          f'{dtype}, {torch.get_num_threads()} threads, seed {seed}; {n_windows} windows, prompt '
          f'{start} + {timed_tokens} tokens, batch {timed_rows}, {rounds} rounds')
    if calibrate is not None:
        with autocast:
            calibrate_rules(model, checkpoint, idx, targets, folder)
        return

    # figures, table, what checks cost, verdict
    with autocast:
        rows = measure(model, points, idx, targets, start, folder)
    plots.figure_4(rows, os.path.join(folder, 'figure_4.png'))
    plots.frontier(rows, same, os.path.join(folder, 'frontier.png'))
    print_table(rows)
    costs = []
    if checks:
        with autocast:
            costs = print_checks(model, dev)
    says = verdict(rows, {name_of(row): point.times for row, point in zip(rows, points)}, same,
                   seed)
    print('\n' + '\n'.join(says))
    if json:
        everything = dict(config=config, points=rows, checks=costs, verdict=says)
        with open(os.path.join(folder, 'bench.json'), 'w') as f:
            json_module.dump(everything, f, indent=1, default=float)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
