"""
How good and how fast is each way to decode: fixed budgets, exit rules, drafts, waves, an oracle.

    python bench.py                     the default run's checkpoint, three minutes on two cores
    python bench.py --cache=exact       one cache policy; --past=False: no waiting for the past
    python bench.py --rules="['accel']" --hits=1 --keep=True        a rule with changed parts
    python bench.py --calibrate=0.005   find thresholds instead: out_dir/exits.json

Writes out_dir/bench.csv, figure_4.png and frontier.png, and prints tables and verdicts
that are computed from bench.csv. Its rows are points: a cache policy together with a rule at a
threshold, a fixed budget, an oracle, drafts, or a wave. The file is written after each stage, and
on Ctrl-C with what has been measured by then. Its columns `windows` and `prompts` say how many
windows and prompts a row averages over; what has not been measured is left empty.

Quality: held-out windows are decoded at every point except drafts and waves, with the same noise.
The 95% intervals are bootstrapped over windows; they are of the loss minus that of the full budget
under `exact` in the same window. Latency: each round decodes `timed_tokens` tokens after a prompt,
at all points in turn, so that whatever slows the machine down slows all of them down.

Fidelity, on text: held-out prompts are continued at every point but oracles. How many of the texts
are those of the full budget, and what does a token cost? Here too all points take turns.

The defaults are small: 24 windows, two rounds, no `accel_hat`, which hardly ever triggers. Below
`least_tau` a rule is measured only under `exact` and without waiting for the past, as in the paper.

Paper: sec. 4, App. D, Fig. 4.

    tau             a rule's threshold, the loop steps of a fixed budget (with drafts, those of the
                    budget that checks them), or the oracle's epsilon
    steps, evals    loop steps kept, block maps evaluated
    CE, PPL         cross-entropy in nats a token, exp(CE)
    B, T, V         rows, tokens of a window, vocabulary
"""
import csv
import math
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

import data
from common import plots
from common.checkpoint import open_run, save_thresholds
from common.configurator import configure, pick_device, run
from common.log import windows_at_once
from decode import make_cache, one_token, prefill, teacher_forced
from exits import EXITS, Exit, make_exit
from wave import can_wave

# --------------------------------------------------------------------------------------------------
out_dir: str | None = None   # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # held-out text; None = the run's own
rules = [name for name in EXITS if name != 'accel_hat']
taus = [1e-5, 1e-4, 1e-3, 1e-2]     # the paper's sweep
more_taus = [3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]    # beyond it, marked * in the table
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
drafts = [[1, 6], [2, 8]]   # loops of the drafts, and of the check
waves = [[8, 1], [8, 2]]    # tokens of a wave, and loop steps of a pass
fidelity = 0.95             # required share of texts that equal the full budget's
calibrate: float | None = None      # nats: find the thresholds that cost at most this
seed = 0                    # of x^(0) and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# thresholds that calibration tries, 31.6 to 1e-4, and the windows that it needs in each half
TAU_GRID = [float(f'{10 ** (n / 4):.3g}') for n in range(6, -17, -1)]
LEAST_WINDOWS = 8
# columns of bench.csv
OF_WINDOWS = ('ce', 'ppl', 'ce_minus_full', 'diff_low', 'diff_high', 'accuracy', 'agreement',
              'mean_steps', 'mean_evals')
OF_TEXT = ('identical', 'prefix', 'text_loss', 'passes', 'token_passes', 'block_maps')


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
    draft_loops: int | None = None
    wave: int = 0               # tokens at once
    wave_steps: int = 1
    measured: dict = field(default_factory=dict)    # {name: array}: see `quality`; ms of a token

    @property
    def kind(self):
        """What kind of decoding it is, in a word."""
        if self.wave or self.draft_loops:
            return 'waves' if self.wave else 'drafts'
        kinds = dict(fixed='fixed budgets', oracle='oracles')
        return f"{kinds.get(self.rule, 'rules')}, {self.cache}"

    @property
    def past(self):
        """Does its rule wait for the past?"""
        return self.exit is not None and self.exit.past

    def add(self, **values):
        """Append measurements on further windows or tokens: {name: (n, ...)}."""
        for name, new in values.items():
            before = self.measured.get(name)
            self.measured[name] = new if before is None else np.concatenate((before, new))


def make_point(model, tau, rule, cache='exact', past=False, n_loop=30, ring=8, hits=None,
               keep=None, **more):
    """A way to decode. past, hits, keep: see make_exit. n_loop: the budget of rules and oracles."""
    exit = None if rule in ('fixed', 'oracle') else make_exit(rule, tau, hits, keep, past)
    loops = model.loop_counts(tau if rule == 'fixed' else n_loop)
    return Point(rule, tau, loops, exit, cache, ring, **more)


def make_points(make):
    """The points that the knobs ask for, each once: budgets, rules and oracles of each policy."""
    points = []
    for policy in as_list(cache):
        points += [make(n, 'fixed', policy) for n in sorted({*budgets, n_loop})]
        for name, _, wait in kinds_of(policy):
            own_under_exact = policy == 'exact' and not wait
            points += [make(tau, name, policy, wait) for tau in dict.fromkeys(taus + more_taus)
                       if tau >= least_tau or own_under_exact]
        points += [make(epsilon, 'oracle', policy) for epsilon in dict.fromkeys(epsilons)]
    return points


def points_for_text(model, make, points):
    """The points with which prompts are continued: drafts, waves, and those that take few steps."""
    chosen = [p for p in points if p.rule != 'oracle' and not (p.past and p.cache == 'exact')
              and (p.tau >= least_tau or p.rule == 'fixed')
              and (p.cache == 'exact' or p.rule != 'fixed' or p.tau < n_loop)]
    chosen += [make(n, 'fixed', 'exact', draft_loops=loops) for loops, n in drafts]
    wave_taus = [tau for tau in dict.fromkeys(taus + more_taus) if 1e-3 <= tau <= 3]
    waved = [make(tau, name, 'latest', wave=width, wave_steps=steps)
             for width, steps in waves for name in rules for tau in wave_taus]
    return chosen + [point for point in waved if can_wave(model, point.exit)]


def kinds_of(policy):
    """(rule, policy, past) for each rule and each value of the knob `past` that applies."""
    # only `exact` keeps the signals that a single token waits for; elsewhere only prompts wait
    waits = dict.fromkeys(as_list(past)) if policy == 'exact' else [True]
    return [(name, policy, wait) for name in dict.fromkeys(rules) for wait in waits]


def as_list(value):
    return value if isinstance(value, list) else [value]


# the oracle ---------------------------------------------------------------------------------------

@contextmanager
def oracle(model, eps):
    """
    A context in which a token exits at the first step whose state is within eps of its last one.

    Each group loops twice: to the end, to know the last states, and then until each token is near
    its own. No exit rule can do that, since a rule sees one step at a time, and a later group
    depends on where the earlier ones stopped. So each group's forward is replaced in this context.
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
            memo = last if memo is None else memo       # later k: of the rows that still loop
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

    The full budget is n_loop fixed loops under `exact`. Adds to each point:

        ce, ce_full     (B,) CE of the point and of the full budget
        accuracy        (B,) share of tokens whose most likely next token is right
        agreement       (B,) share of tokens whose most likely next token is the full budget's
        steps, evals    (B, groups)
    """
    full_budget = make_point(model, n_loop, 'fixed')
    batch = windows_at_once(model.config, len(idx))
    for x, y in zip(idx.split(batch), targets.split(batch)):
        full, _, _ = log_probabilities(model, full_budget, x, seed)         # (B, T, V)
        for point in points:
            log_p, steps, evals = log_probabilities(model, point, x, seed)
            point.add(ce=cross_entropy(log_p, y),
                      ce_full=cross_entropy(full, y),
                      accuracy=accuracy(log_p, y),
                      agreement=window_means(log_p.argmax(-1) == full.argmax(-1)),
                      steps=window_means(steps),
                      evals=window_means(evals))


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


def excess(point, seed=0):
    """CE above the full budget's, nats a token: the mean and the ends of its 95% interval."""
    difference = point.measured['ce'] - point.measured['ce_full']
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
    """Decode given tokens idx (B, T) one by one from position `start` on -> ms of each."""
    # an oracle chooses its loop steps beforehand, and only running them is timed
    T, schedule = idx.shape[1], None
    if point.rule == 'oracle':
        _, _, evals = log_probabilities(model, point, idx, seed)
        schedule = evals.amax(dim=0).tolist()       # the most of any row, (T, groups)
    kept = make_cache(model, point.loops, point.cache, point.ring, T)
    prefill(model, list(idx[:, :start]), point.loops, point.exit, seed, kept,
            converge=point.cache == 'latest')
    ms = []
    for t in range(start, T):
        loops = schedule[t] if schedule else point.loops
        begin = now(idx.device)
        logits, _, _ = one_token(model, idx[:, t:t + 1], t, loops, point.exit, seed, kept)
        logits.argmax(-1)
        ms.append(1e3 * (now(idx.device) - begin))
    return ms


def warm_up(model, points, prompts, start, seed=0):
    """Decode two tokens with each kind of point, so that no round pays for first calls."""
    begin = time.perf_counter()
    for point in {(p.cache, p.rule, p.past): p for p in points}.values():
        decode_window(model, point, prompts[:, :start + 2], start, seed)
    print(f'warm-up {time.perf_counter() - begin:.1f} s')


# whole continuations: every way to decode, drafts and waves too -----------------------------------

def continue_prompt(model, point, prompt, new_tokens, temperature=0.0, seed=0):
    """
    Continue a prompt (n,) -> the new tokens (new,), and what each of them but the first took:
    ms_text (ms), passes of the model, token_passes (tokens that went through it), and block_maps
    (mean over groups).
    """
    evals = []
    hooks = [group.register_forward_hook(lambda *call: evals.append(call[-1][2]))
             for group in model.groups]
    try:
        tokens = model.stream(
            [prompt], new_tokens, point.cache, point.wave, point.wave_steps, n_loop=point.loops,
            exit=point.exit, ring=point.ring, draft_loops=point.draft_loops,
            temperature=temperature, seed=seed)
        made = [next(tokens)[0]]        # this also reads the prompt
        evals.clear()
        begin = now(prompt.device)
        made += [token for token, _ in tokens]
        ms = 1e3 * (now(prompt.device) - begin)
    finally:
        for hook in hooks:
            hook.remove()
    totals = dict(passes=len(evals), token_passes=sum(map(torch.numel, evals)),
                  block_maps=sum(int(one.sum()) for one in evals))
    per_token = {name: total / len(model.groups) / (new_tokens - 1)
                 for name, total in totals.items()}
    return torch.cat(made)[:, 0], dict(ms_text=ms / (new_tokens - 1)) | per_token


@torch.no_grad()
def loss_of(model, prompt, new, n_loop, seed=0):
    """The full budget's loss on new tokens (n,) after a prompt, of which the last block is read."""
    idx = torch.cat((prompt, new))[-model.config.block_size - 1:]
    logits, _ = model(idx[None, :-1], n_loop=n_loop, noise_seed=seed)
    n = min(len(new), len(idx) - 1)
    return F.cross_entropy(logits[0, -n:].float(), idx[-n:]).item()


def continuations(model, points, prompt, new_tokens, n_loop, temperature=0.0, seed=0):
    """
    Continue a prompt (n,) at every point. Adds to each point what continue_prompt measures, and

        identical       is the text that of n_loop fixed loops under `exact`?
        prefix          the share of the text before the first difference
        text_loss       the full budget's loss on the text
    """
    how = new_tokens, temperature, seed
    full, _ = continue_prompt(model, make_point(model, n_loop, 'fixed'), prompt, *how)
    for point in points:
        new, costs = continue_prompt(model, point, prompt, *how)
        prefix = (new == full).cumprod(0).float().mean().item()
        found = dict(identical=float(prefix == 1), prefix=prefix,
                     text_loss=loss_of(model, prompt, new, n_loop)) | costs
        point.add(**{name: np.array([value]) for name, value in found.items()})


# calibration: thresholds that keep a promise ------------------------------------------------------

def find_thresholds(model, make, kinds, idx, targets, nats, n_loop, seed=0):
    """
    A row for each kind, with the largest tau that costs at most `nats` above the full budget.

    The paper leaves tau to be tuned by hand. Here half of the windows idx, targets (N, T) choose
    it: the first of TAU_GRID for which the upper end of the 95% interval is at most `nats`. The
    other half then measures the cost. make(tau, *kind) -> Point, see make_point.

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
    for tau in TAU_GRID:
        points = {kind: make(tau, *kind) for kind in kinds if kind not in chosen}
        quality(model, list(points.values()), idx[::2], targets[::2], n_loop, seed)
        chosen |= {kind: point for kind, point in points.items() if excess(point)[2] <= nats}
        if len(chosen) == len(kinds):
            break
    # measure on the odd ones
    measured = {kind: make(point.tau, *kind) for kind, point in chosen.items()}
    quality(model, list(measured.values()), idx[1::2], targets[1::2], n_loop, seed)
    rows = []
    for kind in kinds:
        row = dict(zip(('rule', 'cache', 'past'), kind), tau=None)
        if kind in chosen:
            cost, low, high = excess(measured[kind])
            row |= dict(tau=chosen[kind].tau, upper=excess(chosen[kind])[2], cost=cost,
                        cost_low=low, cost_high=high,
                        evals=measured[kind].measured['evals'].mean(), kept=cost <= nats)
        rows.append(row)
    return rows


def wave_thresholds(model, make, prompts):
    """
    A row for each of the waves, as in find_thresholds, with the largest tau of norm_rel for which a
    share `fidelity` of the texts on half of the prompts (N, n) equals the full budget's. identical:
    the share on the other half.
    """
    full, _ = model.generate(prompts, new_tokens, temperature=0, n_loop=n_loop)

    def missed(point, rows, most=math.inf):
        """How many of these texts differ; counting stops above `most`."""
        n = 0
        for b in rows:
            new, _ = continue_prompt(model, point, prompts[b], new_tokens)
            n += not torch.equal(new, full[b, prompts.shape[1]:])
            if n > most:
                break
        return n

    rows, half = [], len(prompts) // 2
    for width, steps in waves:
        row = dict(rule='norm_rel', cache='latest', past=True, wave=[width, steps], tau=None)
        for tau in [tau for tau in TAU_GRID if tau <= 1]:
            point = make(tau, 'norm_rel', 'latest', wave=width, wave_steps=steps)
            if missed(point, range(half), most=(1 - fidelity) * half) <= (1 - fidelity) * half:
                share = 1 - missed(point, range(half, len(prompts))) / (len(prompts) - half)
                row |= dict(tau=tau, identical=share)
                break
        rows.append(row)
        print(f'  wave {width} x {steps}, norm_rel: ' + (
            'no tau is small enough' if row['tau'] is None else
            f"{row['tau']:g}, {100 * row['identical']:.1f}% of the other texts are the full "
            "budget's"))
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
                  + ('' if row['kept'] else '  above the limit here'))


# tables and the verdict ---------------------------------------------------------------------------

def make_row(point, groups):
    """What is known of a point so far: its row of bench.csv."""
    known, by_group = point.measured, [f"evals_{'-'.join(map(str, layers))}" for layers in groups]
    row = dict(cache=point.cache, rule=point.rule, past=point.past, tau=point.tau,
               extension=point.exit is not None and point.tau not in taus, kind=point.kind,
               draft_loops=point.draft_loops or '', wave=point.wave or '',
               wave_steps=point.wave_steps if point.wave else '')
    row |= dict.fromkeys(['windows', *OF_WINDOWS, *by_group, 'ms_per_token', 'prompts', *OF_TEXT,
                          'ms_text'], '')
    if 'ce' in known:
        above, low, high = excess(point, seed)
        ce = known['ce'].mean()
        row |= dict(windows=len(known['ce']), ce=ce, ppl=math.exp(ce), ce_minus_full=above,
                    diff_low=low, diff_high=high, accuracy=known['accuracy'].mean(),
                    agreement=known['agreement'].mean(), mean_steps=known['steps'].mean(),
                    mean_evals=known['evals'].mean())
        row |= zip(by_group, known['evals'].mean(axis=0))
    if 'ms' in known:
        row |= dict(ms_per_token=np.median(known['ms']))
    if 'identical' in known:
        row |= {name: known[name].mean() for name in OF_TEXT}
        row |= dict(prompts=len(known['identical']), ms_text=np.median(known['ms_text']))
    return row


def save(points, groups, folder):
    """Write folder/bench.csv with what is known so far, whole or not at all -> its rows."""
    rows = [make_row(point, groups) for point in points if point.measured]
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
          f"{'right':>6s} {'agree':>6s} {'evals':>6s} {'ms/token':>9s}")
    for row in rows:
        star = '*' if row['extension'] else ' '
        waits = dict(fixed='', oracle='').get(row['rule'], 'past' if row['past'] else 'own')
        print(f"{row['cache']:6s} {row['rule']:10s} {waits:4s} {row['tau']:7g}{star}"
              f"{row['ce']:8.4f} {row['ce_minus_full']:+9.4f} "
              f"[{row['diff_low']:+.4f}, {row['diff_high']:+.4f}] "
              f"{row['accuracy']:6.3f} {row['agreement']:6.3f} {row['mean_evals']:6.2f} "
              f"{row['ms_per_token']:9.2f}")
    print("* beyond the paper's sweep")


def print_texts(rows):
    """What continuations cost: of each kind the points that no other of that kind beats."""
    print(f"\n{'continuations':34s} {'identical':>9s} {'prefix':>6s} {'loss':>6s} {'passes':>6s} "
          f"{'tokens':>6s} {'maps':>6s} {'ms/token':>8s}")
    for mine in plots.by_kind(rows).values():
        best = -1.0
        for row in sorted(mine, key=lambda row: (row['ms_text'], -row['identical'])):
            if row['identical'] > best:
                best = row['identical']
                print(f"{name_of(row):34s} {row['identical']:9.3f} {row['prefix']:6.3f} "
                      f"{row['text_loss']:6.3f} {row['passes']:6.2f} {row['token_passes']:6.2f} "
                      f"{row['block_maps']:6.2f} {row['ms_text']:8.2f}")
    print('identical: share of the texts that are those of the full budget; prefix: share of a '
          'text before the first\ndifference; loss: that of the full budget on the text; passes, '
          'tokens and block maps for each new token')


def verdict(rows, times, same, seed=0):
    """
    Sentences: at equal quality (CE within `same` of the full budget), what is fastest?

    times: for each row the ms of the timed tokens, which are the same for all.
    """
    good = [(row, ms) for row, ms in zip(rows, times)
            if row['rule'] != 'oracle' and row['ce_minus_full'] <= same]
    if not good:
        return [f'No point comes within {same:g} nats of the full budget.']

    def details(row):
        return (f"{row['ms_per_token']:.2f} ms a token, {row['mean_evals']:.2f} block maps a "
                f"group, CE {row['ce_minus_full']:+.4f} [{row['diff_low']:+.4f}, "
                f"{row['diff_high']:+.4f}]")
    # for each policy the fastest fixed budget and the fastest rule, with and without waiting
    fastest, says = compare(good, 'ms_per_token', ('kind', 'past'), details, seed)
    if fastest['rule'] == 'fixed':
        says.append('No rule is worth its cost here: a fixed number of loops is as good and '
                    'faster.')
    return [f'Within {same:g} nats of the full budget the fastest is {says[0]}', *says[1:]]


def text_verdict(rows, times, fidelity, seed=0):
    """Sentences: what is the fastest way to a share `fidelity` of the full budget's texts?"""
    good = [(row, ms) for row, ms in zip(rows, times) if row['identical'] >= fidelity]
    if not good:
        return [f'No point has {100 * fidelity:g}% of the texts of the full budget.']

    def details(row):
        return f"{row['ms_text']:.2f} ms a token, {100 * row['identical']:.1f}% of the texts"
    _, says = compare(good, 'ms_text', ('kind',), details, seed)
    return [f'With at least {100 * fidelity:g}% of the texts of the full budget the fastest is '
            f'{says[0]}', *says[1:]]


def compare(good, column, way, details, seed):
    """
    The fastest row, and sentences: what it is, and how much longer the fastest row of each other
    way to decode takes. good: (row, its times) pairs; way: the columns that tell the ways apart.
    """
    best = {}
    for row, ms in good:
        key = tuple(row[name] for name in way)
        if key not in best or row[column] < best[key][0][column]:
            best[key] = row, ms
    fastest, least_ms = min(best.values(), key=lambda found: found[0][column])
    says = [f'{name_of(fastest)}: {details(fastest)}.']
    for row, ms in best.values():
        if row is not fastest:
            pairs = np.array([ms, least_ms]).T                                  # (times, 2)
            low, high = interval(pairs, ratio_of_medians, seed=seed)
            says.append(f'{ratio_of_medians(pairs, 0):.2f} [{low:.2f}, {high:.2f}] times as long: '
                        f'{name_of(row)}: {details(row)}.')
    return fastest, says


def name_of(row):
    """A point in words."""
    if row['kind'] == 'drafts':
        return f"drafts of {row['draft_loops']}, checked by {row['tau']:g}"
    if row['rule'] == 'fixed':
        return f"{row['tau']:g} fixed loops, {row['cache']}"
    name = f"{row['rule']} {row['tau']:g}, {row['cache']}"
    if row['kind'] == 'waves':
        name = f"wave {row['wave']} x {row['wave_steps']}, {row['rule']} {row['tau']:g}"
    return name + (', waiting for the past' if row['past'] and row['cache'] == 'exact' else '')


def ratio_of_medians(pairs, axis):
    """Pairs (..., 2) -> median of the first over median of the second, along axis."""
    return np.median(pairs[..., 0], axis) / np.median(pairs[..., 1], axis)


# the run ------------------------------------------------------------------------------------------

def check_knobs(block_size):
    """The position of the first timed token. ValueError for a knob that makes no sense."""
    if not taus or not rules:
        raise ValueError('taus and rules must not be empty: --taus=[1e-3,1e-2] '
                         '--rules="[\'accel\']"')
    for knob, value in dict(n_windows=n_windows, rounds=rounds, timed_rows=timed_rows).items():
        if value < 1:
            raise ValueError(f'{knob} must be at least 1, not {value}')
    if n_prompts < 0 or new_tokens < 2:
        raise ValueError('n_prompts must be at least 0 and new_tokens at least 2, not '
                         f'{n_prompts} and {new_tokens}')
    for knob, pairs in dict(drafts=drafts, waves=waves).items():
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and min(pair) >= 1
                   for pair in pairs):
            raise ValueError(f'{knob} must be a list of pairs of numbers from 1 on, not {pairs}')
    start = block_size // 2 if prompt_tokens is None else prompt_tokens
    fits = start >= 1 and timed_tokens >= 1 and start + timed_tokens <= block_size
    if calibrate is None and not fits:
        raise ValueError(f'{start} prompt and {timed_tokens} timed tokens do not fit block_size = '
                         f'{block_size}: make --prompt_tokens or --timed_tokens smaller')
    return start


def measure(model, points, of_text, idx, targets, start, folder):
    """
    Measure quality, latency and texts -> all points. Writes bench.csv even if interrupted.
    """
    groups, every = model.config.groups, [*points, *[p for p in of_text if p not in points]]
    try:
        print(f'quality of {len(points)} points', flush=True)
        quality(model, points, idx, targets, n_loop, seed)
        save(points, groups, folder)
        warm_up(model, points, idx[:timed_rows], start, seed)
        for r in range(rounds):
            print(f'latency, round {r + 1} of {rounds}', flush=True)
            numbers = [(r * timed_rows + b) % n_windows for b in range(timed_rows)]
            for point in points:
                point.add(ms=decode_window(model, point, idx[numbers, :start + timed_tokens],
                                           start, seed))
            save(points, groups, folder)
        for i, window in enumerate(idx[:n_prompts] if of_text else []):
            print(f'continuation {i + 1} of {n_prompts}, in {len(of_text)} ways', flush=True)
            continuations(model, of_text, window[:start], new_tokens, n_loop, temperature, seed + i)
            save(every, groups, folder)
    except KeyboardInterrupt:
        print(f'{folder}/bench.csv holds what was measured so far')
        raise
    finally:
        save(every, groups, folder)
    return every


def calibrate_rules(model, checkpoint, make, idx, targets, prompts, folder):
    """--calibrate: folder/exits.json, and a table of what its thresholds cost."""
    kinds = [kind for policy in as_list(cache) for kind in kinds_of(policy)]
    rows = find_thresholds(model, make, kinds, idx, targets, calibrate, n_loop, seed)
    print_thresholds(rows, calibrate)
    if prompts is not None:
        rows += wave_thresholds(model, make, prompts)
    save_thresholds(folder, checkpoint, rows, nats=calibrate, n_loop=n_loop)
    print(f'{folder}/exits.json: python sample.py --exit=norm_rel --tau=auto uses it')


def main():
    # the model, held-out windows, and the points to measure
    dev, autocast = pick_device(device, dtype)
    model, checkpoint, source, folder = open_run(out_dir, dev, 'there is nothing to exit from')
    T, groups = model.config.block_size, model.config.groups
    start = check_knobs(T)
    text = data.open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                          model.config.vocab_size)
    windows = text.held_out(data.spread(text, n_windows, T), T)
    idx, targets = (tokens.to(dev) for tokens in windows)       # (n_windows, T)
    make = partial(make_point, model, n_loop=n_loop, ring=ring, hits=hits, keep=keep)
    points = make_points(make)
    of_text = [] if text.is_task or not n_prompts else points_for_text(model, make, points)
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32
    card = ' ' + torch.cuda.get_device_name() if dev.startswith('cuda') else ''
    print(f"{source}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {groups}, {dev}{card}, "
          f'{dtype}, {torch.get_num_threads()} threads, seed {seed}; {n_windows} windows, prompt '
          f'{start} + {timed_tokens} tokens, batch {timed_rows}, {rounds} rounds')
    if calibrate is not None:
        with autocast:
            prompts = idx[:, :start] if of_text and can_wave(model) else None
            calibrate_rules(model, checkpoint, make, idx, targets, prompts, folder)
        return

    # figures, table, verdict
    with autocast:
        points = measure(model, points, of_text, idx, targets, start, folder)
    rows = [make_row(point, groups) for point in points]
    by_window, by_text = ([(row, point.measured[name]) for row, point in zip(rows, points)
                           if name in point.measured] for name in ('ms', 'ms_text'))
    of_windows = [row for row, _ in by_window]
    plots.figure_4(of_windows, os.path.join(folder, 'figure_4.png'))
    print_table(of_windows)
    print('\n' + '\n'.join(verdict(*zip(*by_window), same, seed)))
    if by_text:
        plots.frontier(rows, os.path.join(folder, 'frontier.png'))
        print_texts(rows)
        print('\n' + '\n'.join(text_verdict(*zip(*by_text), fidelity, seed)))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
