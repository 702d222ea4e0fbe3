"""
How good and how fast is each way to decode: fixed budgets, exit rules, drafts, waves, an oracle.

    python bench.py                     the default run's checkpoint, three minutes on two cores
    python bench.py --cache=exact       one cache policy; --past=False: no waiting for the past
    python bench.py --rules="['accel']" --hits=1 --keep=True        a rule with changed parts
    python bench.py --calibrate=0.005   find thresholds instead: out_dir/exits.json

Writes out_dir/bench.csv, figure_4.png and frontier.png, and prints tables. A row of bench.csv is a
point: a cache policy together with a rule at a threshold, a fixed budget, an oracle, drafts, or a
wave. The file is written after each stage, and on Ctrl-C with what has been measured by then; the
rest is left empty. `windows` and `prompts` say how many of them a row averages over.

Quality: held-out windows are decoded at every point except drafts and waves, with the same noise.
The 95% intervals are bootstrapped over windows; they are of the loss minus that of the full budget
under `exact` in the same window. Latency: each round decodes `timed_tokens` tokens after a prompt,
at all points in turn, so that whatever slows the machine down slows all of them down. On a GPU,
events around the work time it. First calls of all kinds come before, untimed.

Fidelity, on text: held-out prompts are continued. How many of the texts are those of the full
budget, and what does a token cost? Here too all points take turns.

Paper: sec. 4, App. D, Fig. 4.

    tau             a rule's threshold, the loop steps of a fixed budget (with drafts, those of the
                    budget that checks them), or the oracle's epsilon
    evals           block maps evaluated
    ce, ppl         cross-entropy in nats a token, exp(ce)
    B, T, V         rows, tokens of a window, vocabulary
"""
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

from cache import POLICIES, make_cache
from common import plots
from common.checkpoint import open_run
from common.evaluation import windows_at_once
from common.files import write_csv
from common.thresholds import of_threshold, save_thresholds
from compiled import compile_passes
from decode import one_token, prefill, stream, teacher_forced, use_one_thread
from exits import EXITS, Exit, make_exit
from loops import Plan, as_noise
from waves import can_wave

# --------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # held-out text; None = the run's own
rules = [name for name in EXITS if name != 'accel_hat']
taus = [1e-5, 1e-4, 1e-3, 1e-2]     # the paper's sweep
more_taus = [3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]    # beyond it
least_tau = 0.1             # below it: only exact, without waiting for the past
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 30]    # fixed loop steps
epsilons = [0.3, 1.0]       # of the oracle: distance to the last state
n_loop = 30                 # the full budget, and k_max of every rule
n_windows = 24              # held-out windows for quality
prompt_tokens: int | None = None    # before the timed and the new tokens; None = half a block
timed_tokens = 8            # in each round
rounds = 2                  # of latency, each with a window of its own
timed_rows = 1              # decoded together when timing
hits: int | None = None     # small values in a row before a token exits; None = the rule's own
keep: bool | None = None    # keep the step that triggered? None = the rule's own
cache: str | list = ['exact', 'latest']     # policies: exact, ring, latest
past: bool | list = [False, True]   # under exact: do rules wait for the past?
ring = 8                    # slots of the ring policy
same = 0.005                # nats above the full budget that count as equal quality
n_prompts = 8               # held-out prompts to continue; 0 = none
new_tokens = 24             # of each
temperature = 0.0           # of the continuations
drafts = [[1, 6, 4], [2, 8, 4]]     # loops of the drafts, and of the check; tokens ahead
waves = [[8, 1], [8, 2]]    # tokens of a wave, and loop steps of a pass
fidelity = 0.95             # required share of texts that equal the full budget's
compile = False             # torch.compile what is timed: half a minute and more for each point
calibrate: float | None = None      # nats: find the thresholds that cost at most this
seed = 0                    # of x^(0) and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# thresholds that calibration tries, 31.6 to 1e-4, and the windows that it needs in each half
TAU_GRID = [float(f'{10 ** (n / 4):.3g}') for n in range(6, -17, -1)]
LEAST_WINDOWS = 8
# columns of bench.csv, of windows and of texts, and how tables show them
OF_WINDOWS = dict(ce='.4f', ppl='.3f', ce_minus_full='+.4f', diff_low='+.4f', diff_high='+.4f',
                  accuracy='.3f', mean_evals='.2f', ms_per_token='.2f')
OF_TEXTS = dict(identical='.3f', text_loss='.3f', passes='.2f', blocks='.2f', ms_text='.2f')
TIMES = ('ms_per_token', 'ms_text')     # medians
# a rule's colour and marker; rules of other files take matplotlib's next colour
STYLES = dict(norm=('#0072B2', 'o'), norm_rel=('#56B4E9', 'o'), kl=('#E69F00', 's'),
              accel=('#009E73', '^'), accel_hat=('#CC79A7', 'v'), accel_rel=('#009E73', 'v'))


# the points ---------------------------------------------------------------------------------------

@dataclass(eq=False)
class Point:
    """One way to decode, and what has been measured of it so far."""
    rule: str                   # an exit rule, 'fixed' or 'oracle'
    tau: float
    loops: list                 # the loop budget of each group
    exit: Exit | None
    cache: str                  # the cache policy
    ring: int                   # slots of the ring policy
    warm_start: bool = False
    draft_loops: int | None = None
    draft_tokens: int | None = None
    wave: int | None = None         # tokens at once
    wave_steps: int | None = None
    measured: dict = field(default_factory=lambda: defaultdict(list))   # see `add`

    @property
    def past(self):
        """Does its rule wait for the past?"""
        return self.exit is not None and self.exit.past

    @property
    def how(self):
        """The cache policy, or drafts or a wave, in words."""
        if self.draft_loops:
            return f'drafts {self.draft_tokens} x {self.draft_loops}'
        if self.wave:
            return f'wave {self.wave} x {self.wave_steps}'
        return (self.cache + (', past' if self.past and self.cache == 'exact' else '')
                + (', warm start' if self.warm_start else ''))

    @property
    def kind(self):
        """The kind of decoding, in words."""
        if self.wave or self.draft_loops:
            return 'waves' if self.wave else 'drafts'
        kinds = dict(fixed='fixed budgets', oracle='oracles')
        return f"{kinds.get(self.rule, 'rules')}, {self.how}"

    @property
    def name(self):
        tau = '-'.join(map(str, self.tau)) if isinstance(self.tau, list) else f'{self.tau:g}'
        return f'{self.rule} {tau}, {self.how}'

    def add(self, **values):
        """Append measurements of further windows, tokens or prompts: {name: a value of each}."""
        for name, new in values.items():
            self.measured[name].extend(new)


def make_point(model, tau, rule, cache='exact', past=False, n_loop=30, ring=8, hits=None,
               keep=None, **more):
    """A way to decode. past, hits, keep: see make_exit. n_loop: the budget of rules and oracles."""
    exit = None if rule in ('fixed', 'oracle') else make_exit(rule, tau, hits, keep, past)
    loops = model.loop_counts(tau if rule == 'fixed' else n_loop)
    return Point(rule, tau, loops, exit, cache, ring, **more)


def make_points(model, make):
    """The points that the knobs ask for, each once."""
    points, all_taus = [], sorted({*taus, *more_taus})
    for policy in as_list(cache):
        points += [make(n, 'fixed', policy) for n in sorted({*budgets, n_loop})]
        points += [make(tau, name, policy, wait) for name, _, wait in kinds_of(policy)
                   for tau in all_taus if tau >= least_tau or policy == 'exact' and not wait]
        # the loop steps of an oracle differ for every token, which would be a graph for each
        points += [make(epsilon, 'oracle', policy)
                   for epsilon in dict.fromkeys([] if compile else epsilons)]
    points += [make(n, 'fixed', draft_loops=loops, draft_tokens=ahead)
               for loops, n, ahead in drafts]
    waved = [make(tau, name, 'latest', wave=width, wave_steps=steps)
             for width, steps in waves for name in rules for tau in all_taus if 1e-3 <= tau <= 3]
    return points + [point for point in waved if can_wave(model, point.exit)]


def kinds_of(policy):
    """(rule, policy, past) for each rule and each value of the knob `past` that applies."""
    # only `exact` keeps the signals that a single token waits for; elsewhere only prompts wait
    waits = dict.fromkeys(as_list(past)) if policy == 'exact' else [True]
    return [(name, policy, wait) for name in dict.fromkeys(rules) for wait in waits]


def is_continued(point):
    """Are prompts continued at this point? Those that are sure to be slow are left out."""
    if point.wave:
        return True
    if point.rule == 'fixed':
        return point.cache == 'exact' or point.tau < n_loop
    return point.rule != 'oracle' and point.tau >= least_tau and point.how != 'exact, past'


def as_list(value):
    return value if isinstance(value, list) else [value]


def oracle(group, given, eps):
    """
    A forward pre-hook of a group: a token exits at the first step whose state is within eps of its
    last one. It replaces the exit rule of the Plan that RecurrentGroup.forward gets.

    Each group loops twice: to the end, to know the last states, and then until each token is near
    its own. No exit rule can do that, since a rule sees one step at a time, and a later group
    depends on where the earlier ones stopped.
    """
    e, plan, *_ = given
    # the second pass overwrites what this one leaves in the cache
    last = group.forward(e, replace(plan, exit=None))[1]['x']                   # (B, T, C)

    def distance(x, x1, memo, read):
        return vector_norm(x1 - last, dim=-1), None
    return e, replace(plan, exit=Exit(distance, eps, name='oracle'))


# quality ------------------------------------------------------------------------------------------

@torch.no_grad()
def log_probabilities(model, point, idx, seed=0):
    """Decode given idx (B, T) -> log-probabilities (B, T, V), steps and evals (B, T, groups)."""
    hooks = [group.register_forward_pre_hook(partial(oracle, eps=point.tau))
             for group in model.groups if point.rule == 'oracle']
    logits, steps, evals = teacher_forced(model, idx, Plan(point.loops, point.exit, as_noise(seed)),
                                          point.cache, point.ring)
    for hook in hooks:
        hook.remove()
    return logits.float().log_softmax(-1), steps, evals


@torch.no_grad()
def quality(model, points, idx, targets, n_loop, seed=0):
    """
    Measure every point on windows idx, targets (N, T), one batch of B windows after another.

    The full budget is n_loop fixed loops under `exact`. Adds to each point:

        ce, ce_full     (B,) CE of the point and of the full budget
        accuracy        (B,) share of labels that are right
        evals           (B, groups) mean block maps
    """
    full_budget = make_point(model, n_loop, 'fixed')
    batch = windows_at_once(model.config, len(idx))
    for x, y in zip(idx.split(batch), targets.split(batch)):
        full, _, _ = log_probabilities(model, full_budget, x, seed)         # (B, T, V)
        for point in points:
            log_p, _, evals = log_probabilities(model, point, x, seed)
            right = (log_p.argmax(-1) == y).sum(dim=1) / (y >= 0).sum(dim=1)
            point.add(ce=cross_entropy(log_p, y), ce_full=cross_entropy(full, y),
                      accuracy=right.cpu().double().numpy(),
                      evals=evals.cpu().double().mean(dim=1).numpy())


def cross_entropy(log_p, targets):
    """log_p (B, T, V), targets (B, T) -> mean over each window's labels (B,), float64."""
    nats = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), reduction='none')     # 0: no label
    labels = (targets >= 0).float().mean(dim=1)
    return (nats.view(targets.shape).mean(dim=1) / labels).cpu().double().numpy()


def excess(point, seed=0):
    """CE above the full budget's, nats a token: the mean and the ends of its 95% interval."""
    difference = np.subtract(point.measured['ce'], point.measured['ce_full'])
    return [float(value) for value in (difference.mean(), *interval(difference, seed=seed))]


def interval(values, statistic=np.mean, draws=2000, seed=0):
    """95% bootstrap interval of a statistic over the first axis of an array."""
    return np.percentile(statistic(values[picks(len(values), draws, seed)], axis=1), [2.5, 97.5])


@lru_cache(maxsize=8)
def picks(n, draws, seed):
    """Which of n rows each draw of a bootstrap takes, (draws, n)."""
    return np.random.default_rng(seed).integers(n, size=(draws, n))


def times_as_long(ms, other_ms, seed=0):
    """Median of ms (n,) over that of other_ms (n,), in pairs, and the ends of its 95% interval."""
    def ratio(pairs, axis):
        return np.median(pairs[..., 0], axis) / np.median(pairs[..., 1], axis)
    pairs = np.array([ms, other_ms]).T                                          # (n, 2)
    return ratio(pairs, 0), *interval(pairs, ratio, seed=seed)


# latency ------------------------------------------------------------------------------------------

def now(device):
    """A moment, for ms_between: the time, or on a GPU an event behind the work given to it."""
    if device.type == 'cpu':
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def ms_between(begin, end):
    if isinstance(end, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


@torch.no_grad()
def decode_window(model, point, idx, start, seed=0):
    """Decode given tokens idx (B, T) one by one from position `start` on -> ms of each."""
    T = idx.shape[1]
    schedule = [point.loops] * T                    # (T, groups)
    if point.rule == 'oracle':
        # it chooses its loop steps beforehand, the most of any row, and running them is timed
        _, _, evals = log_probabilities(model, point, idx, seed)
        schedule = evals.amax(dim=0).tolist()
    plan = Plan(point.loops, point.exit, as_noise(seed),
                cache=make_cache(model, point.loops, point.cache, point.ring, T))
    prefill(model, idx[:, :start], plan, converge=POLICIES[point.cache].converge)
    ms = []
    for t in range(start, T):
        plan = replace(plan, counts=schedule[t])
        begin = now(idx.device)
        logits, _, _ = one_token(model, idx[:, t:t + 1], t, plan)
        logits.argmax(-1)
        ms.append(ms_between(begin, now(idx.device)))
    return ms


# whole continuations: every way to decode, drafts and waves too -----------------------------------

def continue_prompts(model, point, prompts, new_tokens, temperature=0.0, seed=0, numbers=(0,)):
    """
    Continue prompts (B, n) together -> the new tokens (B, new), and of each row's tokens but the
    first, on average: ms_text (a batch's time over B), passes of the model, and blocks (layers
    evaluated in the groups, also for tokens that are thrown away), {name: B values}.

    numbers: of the prompts, which decide the draws.
    """
    passes, layers = [], torch.tensor([len(group) for group in model.config.groups])
    how = {} if point.draft_loops is None else dict(draft_tokens=point.draft_tokens)
    tokens = stream(
        model, prompts, new_tokens, temperature, n_loop=point.loops, exit=point.exit,
        cache=point.cache, ring=point.ring, seed=[seed + n for n in numbers], noise_seed=seed,
        warm_start=point.warm_start, draft_loops=point.draft_loops, wave=point.wave or 0,
        wave_steps=point.wave_steps, passes=passes, **how)
    made = [next(tokens)[0]]        # this also reads the prompts
    passes.clear()
    begin = now(prompts.device)
    made += [token for token, _ in tokens]
    ms = ms_between(begin, now(prompts.device))
    B, steps = len(prompts), new_tokens - 1
    # of each pass the block maps (B, T, groups), times the layers of a group
    blocks = sum((evals.cpu() * layers).sum(dim=(1, 2)) for evals in passes)        # (B,)
    return torch.cat(made, dim=1), dict(
        ms_text=[ms / steps / B] * B, passes=[len(passes) / steps] * B,
        blocks=(blocks / steps).tolist())


@torch.no_grad()
def continuations(model, points, prompt, new_tokens, n_loop, temperature=0.0, seed=0, number=0):
    """
    Continue prompt `number`, (n,), at every point. Adds to each what continue_prompts measures, and

        identical       is the text that of n_loop fixed loops under `exact`?
        text_loss       the full budget's loss on the text
    """
    how = prompt[None], new_tokens, temperature, seed, (number,)
    full, _ = continue_prompts(model, make_point(model, n_loop, 'fixed'), *how)
    for point in points:
        new, costs = continue_prompts(model, point, *how)
        # the full budget's loss on the text, of which the last block is read
        idx = torch.cat((prompt, new[0]))[-model.config.block_size - 1:]
        logits, _ = model(idx[None, :-1], n_loop=n_loop, noise_seed=seed)
        n = min(new_tokens, len(idx) - 1)
        loss = F.cross_entropy(logits[0, -n:].float(), idx[-n:]).item()
        point.add(**costs, identical=[torch.equal(new, full)], text_loss=[loss])


# calibration: thresholds that keep a promise ------------------------------------------------------

def find_thresholds(model, make, kinds, idx, targets, nats, n_loop, seed=0, grid=None):
    """
    A row for each kind, with the largest tau that costs at most `nats` above the full budget.

    The paper leaves tau to be tuned by hand. Here half of the windows idx, targets (N, T) choose
    it: the first of the grid (None = TAU_GRID) for which the upper end of the 95% interval is at
    most `nats`. The other half then measures the cost. make(tau, *kind) -> Point, see make_point.

    A row has cache, rule, past and tau. tau is None if none is small enough; otherwise the row also
    has upper, the upper end named above, and from the other half of the windows cost, cost_low,
    cost_high, evals and kept (cost <= nats?). ValueError if nats or the windows are too few.
    """
    if not nats > 0:
        raise ValueError(f'--calibrate must be more than 0 nats, not {nats}: try 0.005')
    if len(idx) < 2 * LEAST_WINDOWS:
        raise ValueError(f'{len(idx)} windows are too few to halve: --n_windows='
                         f'{2 * LEAST_WINDOWS} at least')
    # choose on the even windows
    chosen = {}
    for tau in grid or TAU_GRID:
        points = {kind: make(tau, *kind) for kind in kinds if kind not in chosen}
        quality(model, list(points.values()), idx[::2], targets[::2], n_loop, seed)
        chosen |= {kind: point for kind, point in points.items() if excess(point)[2] <= nats}
        if len(chosen) == len(kinds):
            break
    # measure on the odd ones
    measured = {kind: make(point.tau, *kind) for kind, point in chosen.items()}
    quality(model, list(measured.values()), idx[1::2], targets[1::2], n_loop, seed)
    for kind in kinds:
        row = dict(zip(('rule', 'cache', 'past'), kind), tau=None)
        if kind in chosen:
            cost, low, high = excess(measured[kind])
            row |= dict(tau=chosen[kind].tau, upper=excess(chosen[kind])[2], cost=cost,
                        cost_low=low, cost_high=high,
                        evals=np.mean(measured[kind].measured['evals']), kept=cost <= nats)
        yield row


def found_for(point):
    """What a threshold is found for, as sample.py looks it up."""
    wave = [point.wave, point.wave_steps] if point.wave else None
    return of_threshold(point.exit, point.cache, point.ring, point.loops, wave)


def wave_thresholds(model, make, prompts):
    """
    A row for each of the waves, as in find_thresholds, with the largest tau of norm_rel for which a
    share `fidelity` of the texts on half of the prompts (N, n) equals the full budget's. identical:
    the share on the other half.
    """
    use_one_thread(model)
    full, _ = model.generate(prompts, new_tokens, temperature=0, n_loop=n_loop, noise_seed=seed)

    def differs(point, i):
        new, _ = continue_prompts(model, point, prompts[i:i + 1], new_tokens, seed=seed)
        return not torch.equal(new[0], full[i, prompts.shape[1]:])

    half = len(prompts) // 2
    others = range(half, len(prompts))
    for width, steps in waves:
        way = partial(make, rule='norm_rel', cache='latest', wave=width, wave_steps=steps)
        row = found_for(way(0.0)) | dict(tau=None)
        for point in [way(tau) for tau in TAU_GRID if tau <= 1]:
            missed = accumulate(differs(point, i) for i in range(half))
            # counting stops above the limit
            if all(n <= (1 - fidelity) * half for n in missed):
                share = 1 - sum(differs(point, i) for i in others) / len(others)
                row |= dict(tau=point.tau, identical=share)
                break
        yield row


# tables and figures -------------------------------------------------------------------------------

def make_row(point, groups):
    """What is known of a point so far: its row of bench.csv, with None for the rest."""
    known, by_group = point.measured, [f"evals_{'-'.join(map(str, layers))}" for layers in groups]
    row = {name: getattr(point, name) for name in (
        'name', 'kind', 'cache', 'rule', 'past', 'tau', 'draft_loops', 'draft_tokens', 'wave',
        'wave_steps')}
    row |= dict.fromkeys(['windows', *OF_WINDOWS, *by_group, 'prompts', *OF_TEXTS])
    if 'ce' in known:
        above, low, high = excess(point, seed)
        ce = np.mean(known['ce'])
        row |= dict(windows=len(known['ce']), ce=ce, ppl=math.exp(ce), ce_minus_full=above,
                    diff_low=low, diff_high=high, accuracy=np.mean(known['accuracy']),
                    mean_evals=np.mean(known['evals']))
        row |= zip(by_group, np.mean(known['evals'], axis=0))
    if 'identical' in known:
        row |= {name: np.mean(known[name]) for name in OF_TEXTS}
        row |= dict(prompts=len(known['identical']))
    return row | {name: np.median(known[name]) for name in TIMES if name in known}


def save(points, groups, folder):
    """Write folder/bench.csv with what is known so far."""
    rows = [make_row(point, groups) for point in points if point.measured]
    if rows:
        write_csv(rows, os.path.join(folder, 'bench.csv'))


def print_rows(title, rows, formats):
    """Print some columns of rows, formats: {column: how its values are printed}."""
    lines = [list(formats)]
    for row in rows:
        lines.append(['' if row.get(name) is None else format(row[name], how)
                      for name, how in formats.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f'\n{title}')
    for first, *others in lines:
        print(first.ljust(widths[0]), *map(str.rjust, others, widths[1:]), sep='  ')


def grouped(rows, column):
    """{value: the rows that have it in this column}, all in their order."""
    values = dict.fromkeys(row[column] for row in rows)
    return {value: [row for row in rows if row[column] == value] for value in values}


def fastest_of_kind(rows, column, seed=0):
    """
    The fastest row of each kind, with how many times as long as the fastest of all it takes:
    `times`, and the ends of the 95% interval.

    rows: of make_row, with their `point`. column: of their times, which are of the same tokens.
    """
    rows = sorted(rows, key=lambda row: row[column])
    best = [mine[0] for mine in grouped(rows, 'kind').values()]
    for row in best:
        ms, least_ms = (one['point'].measured[column] for one in (row, best[0]))
        row |= zip(('times', 'times_low', 'times_high'), times_as_long(ms, least_ms, seed))
    return best


def figure_4(rows, path):
    """Fig. 4: costs and quality of each rule against tau; shaded: beyond the paper's sweep."""
    columns = dict(ms_per_token='ms a token', ppl='perplexity', ce='cross-entropy (nats a token)')
    kinds, beyond = grouped(rows, 'kind'), max(row['tau'] for row in rows)
    paper = max(taus, default=0)
    figure, grid = plots.panels(3, 4, 3, rows=len(kinds), sharex=True, sharey='col')
    for axes, (kind, mine) in zip(grid, kinds.items()):
        for ax, (column, label) in zip(axes, columns.items()):
            for rule, curve in grouped(mine, 'rule').items():
                colour, marker = STYLES.get(rule, (None, 'X'))
                ax.plot([row['tau'] for row in curve], [row[column] for row in curve], label=rule,
                        color=colour, marker=marker, ls='--' if '_' in rule else '-', ms=4, lw=1)
            if min(row['tau'] for row in rows) <= paper < beyond:
                ax.axvspan(1.5 * paper, 1.5 * beyond, color='0.95')
            ax.set(xscale='log', ylabel=label)
            ax.set_title(kind.removeprefix('rules, '), fontsize=9)
    for ax in grid[-1]:
        ax.set_xlabel('tau')
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    plots.save(figure, path)


def frontier(rows, path):
    """The share of continuations that equal the full budget's, against ms a token, by kind."""
    figure, [[ax]] = plots.panels(1, 6, 4)
    for i, (kind, mine) in enumerate(grouped(rows, 'kind').items()):
        ax.plot([row['ms_text'] for row in mine], [row['identical'] for row in mine],
                'o^sDvX'[i % 6], label=kind, color=plots.colour_of(i), ms=4, alpha=0.8)
    ax.set(xlabel='ms a token', ylabel="share of texts that are the full budget's")
    ax.set_xscale('log', subs=(2, 5))
    ax.xaxis.set_major_formatter('{x:g}')
    ax.xaxis.set_minor_formatter('{x:g}')
    ax.tick_params(axis='x', which='both', length=3.5, pad=3.5)
    ax.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    plots.save(figure, path)


# the run ------------------------------------------------------------------------------------------

def check_knobs(block_size):
    """The position of the first timed token. ValueError for a knob that makes no sense."""
    least = dict(n_windows=1, rounds=1, timed_rows=1, timed_tokens=1, n_prompts=0, new_tokens=2)
    for knob, smallest in least.items():
        if globals()[knob] < smallest:
            raise ValueError(f'{knob} must be at least {smallest}, not {globals()[knob]}')
    if not all(isinstance(some, list) and len(some) == n and min(some) >= 1
               for n, knob in ((3, drafts), (2, waves)) for some in knob):
        raise ValueError('drafts must be lists of three numbers from 1 on, and waves of two, not '
                         f'{drafts} and {waves}')
    start = block_size // 2 if prompt_tokens is None else prompt_tokens
    if not 1 <= start <= block_size - (0 if calibrate else timed_tokens):
        raise ValueError(f'{start} prompt and {timed_tokens} timed tokens do not fit block_size = '
                         f'{block_size}: choose other --prompt_tokens and --timed_tokens')
    return start


def measure(model, points, idx, targets, prompts, folder):
    """Measure quality, latency, texts of prompts (n, start). Writes bench.csv, even on Ctrl-C."""
    groups, start = model.config.groups, prompts.shape[1]
    of_windows = [point for point in points if not point.draft_loops and not point.wave]
    of_texts = [point for point in points if is_continued(point)]
    try:
        print(f'quality of {len(of_windows)} points, {torch.get_num_threads()} threads', flush=True)
        quality(model, of_windows, idx, targets, n_loop, seed)
        save(points, groups, folder)
        use_one_thread(model)
        print(f'then decoding, {torch.get_num_threads()} threads', flush=True)
        if compile:
            compile_passes(model, max([1, *(width for width, _ in waves),
                                       *(1 + ahead for _, _, ahead in drafts)]))
        # first calls, for which no round pays
        for point in of_windows:
            decode_window(model, point, idx[:timed_rows, :start + 2], start, seed)
        for point in of_texts if compile else []:
            continue_prompts(model, point, prompts[:1], new_tokens)
        for r in range(rounds):
            print(f'latency, round {r + 1} of {rounds}', flush=True)
            numbers = [(r * timed_rows + b) % n_windows for b in range(timed_rows)]
            for point in of_windows:
                window = idx[numbers, :start + timed_tokens]
                point.add(ms_per_token=decode_window(model, point, window, start, seed))
            save(points, groups, folder)
        for i, prompt in enumerate(prompts):
            print(f'continuation {i + 1} of {len(prompts)}, in {len(of_texts)} ways', flush=True)
            continuations(model, of_texts, prompt, new_tokens, n_loop, temperature, seed, i)
            save(points, groups, folder)
    finally:
        save(points, groups, folder)


def calibrate_rules(model, checkpoint, make, idx, targets, prompts, folder):
    """--calibrate: folder/exits.json, and a table of its thresholds and what they cost."""
    kinds = [kind for policy in as_list(cache) for kind in kinds_of(policy)]
    found = find_thresholds(model, make, kinds, idx, targets, calibrate, n_loop, seed)
    rows = [found_for(make(0.0, *kind)) | row for kind, row in zip(kinds, found)]
    if prompts is not None:
        rows += wave_thresholds(model, make, prompts)
    print_rows('the largest tau that is good enough on half of the windows, and its cost on the '
               'others:', rows, dict(rule='', cache='', past='', wave='', tau='g', cost='+.4f',
               cost_low='+.4f', cost_high='+.4f', kept='', evals='.2f', identical='.3f'))
    save_thresholds(folder, checkpoint, rows, nats=calibrate)
    print(f'{folder}/exits.json: python sample.py --exit=norm_rel --tau=auto uses it')


def report(points, groups, folder):
    """The tables and figures of all points."""
    rows = [make_row(point, groups) | dict(point=point) for point in points]
    windows, texts = ([row for row in rows if row[name] is not None] for name in TIMES)
    times = dict(name='', times='.2f', times_low='.2f', times_high='.2f')

    of_rules = [row for row in windows if row['kind'].startswith('rules')]
    if of_rules:
        figure_4(of_rules, os.path.join(folder, 'figure_4.png'))
    print_rows('all points:', windows, dict(name='') | OF_WINDOWS)
    good = [row for row in windows if row['rule'] != 'oracle' and row['ce_minus_full'] <= same]
    print_rows(f'the fastest of each kind within {same:g} nats of the full budget:',
               fastest_of_kind(good, 'ms_per_token', seed), times | OF_WINDOWS)
    if texts:
        frontier(texts, os.path.join(folder, 'frontier.png'))
        good = [row for row in texts if row['identical'] >= fidelity]
        print_rows(f"the fastest of each kind with {100 * fidelity:g}% of the full budget's texts:",
                   fastest_of_kind(good, 'ms_text', seed), times | OF_TEXTS)
    print('\ntimes: how many times as long as the first line, with the ends of its 95% interval\n'
          f'{folder}: bench.csv and the figures')


def main():
    import data
    from common.configurator import given
    from common.distributed import pick_device

    # the model, held-out windows, and the points to measure
    dev, autocast = pick_device(device, dtype)
    model, checkpoint, source, folder = open_run(out_dir, dev, 'there is nothing to exit from')
    T, groups = model.config.block_size, model.config.groups
    start = check_knobs(T)
    if 'ring' in given and 'ring' not in as_list(cache):
        raise ValueError('--ring needs its cache policy: add --cache=ring')
    text, idx, targets, _ = data.held_out(checkpoint, n_windows, dataset, dev)  # (n_windows, T)
    make = partial(make_point, model, n_loop=n_loop, ring=ring, hits=hits, keep=keep)
    points = make_points(model, make)
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32
    card = ''
    if dev.startswith('cuda'):
        card = f' {torch.cuda.get_device_name()}, timed by CUDA events'
    print(f"{source}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {groups}, {dev}{card}, "
          f'{dtype}, seed {seed}; {n_windows} windows, prompt {start} + {timed_tokens} tokens, '
          f'batch {timed_rows}, {rounds} rounds')
    with autocast:
        if calibrate is not None:
            prompts = idx[:, :start] if n_prompts and not text.is_task and can_wave(model) else None
            calibrate_rules(model, checkpoint, make, idx, targets, prompts, folder)
        else:
            prompts = idx[:0 if text.is_task else n_prompts, :start]
            measure(model, points, idx, targets, prompts, folder)
            report(points, groups, folder)


if __name__ == '__main__':
    from common.configurator import configure, run
    config = configure(globals())
    run(main)
