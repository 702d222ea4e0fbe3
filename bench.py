"""
How good and how fast is each way to decode: fixed loops, exit rules, drafts, waves?
And how do other models compare, with loops or without?

    python bench.py                         the default run, in a minute or two
    python bench.py config/bench_full.py    every rule, threshold and cache policy, in many minutes
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"      the paper's sweep
    python bench.py "--beside=['out-plain']"            another run on the same data as well
    python bench.py --calibrate=0.005       find thresholds instead, for sample.py --exit

A *method* is a way to decode. A *point* is a method of one model and what was measured of it, a row
of bench.csv. Its *reference* is the point with which it is compared: the *full budget* of the same
model, n_loop fixed loops under the policy `exact`. Read main() first, and then any of these
sections without the others; they share methods, points, and `excess` and `identical`, which compare
a point with its reference:

    quality         loss and accuracy on held-out windows; of drafts and waves it is that of the
                    texts that they write
    time            of the text after a prompt, and whether it is the text of the full budget. On a
                    task: of reading a problem
    calibration     instead of these two: the largest threshold of each rule that keeps a promise
    report          bench.csv, the table at the end, figure_4.png and ledger.png

The columns of bench.csv, besides those that say what the method is (a share lies between 0 and 1):

    ce, ppl, accuracy           nats per token, exp(ce), share of labels that are right
    ce_minus_full               ce above that of the full budget (diff_low, diff_high)
    mean_evals, evals_GROUP     block maps (loop steps) computed for a token in a group
    most_evals, last_step       of a window: the most for one of its tokens; the last loop step that
                                one of them keeps
    deepest                     of a problem: the depth of its deepest label
    identical                   share of texts that are those of the full budget
    passes, blocks              for a new token: passes of the model, layers computed in the groups
    ms_per_token                milliseconds, the median over the prompts, whose reading is not
                                timed (ms_low, ms_high); on a task that of reading problems

In brackets: the ends of a 95% interval, bootstrapped over the windows or prompts. An empty cell:
not measured. On Ctrl-C bench.csv has what was measured until then.

Paper: sec. 4, App. D, Fig. 4.

    B, N    windows of a batch, all windows
    T, V    tokens of a window, vocabulary
"""
import math
import os
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import data
from cache import POLICIES, make_cache
from common import configurator, plots
from common.checkpoint import open_run
from common.configurator import PathName
from common.distributed import pick_device
from common.files import check_writable, write_csv
from common.report import windows_at_once
from common.thresholds import command_for, save_thresholds, threshold_key, thresholds_of
from decode import teacher_forced, use_one_thread
from decode.compiled import compile_passes
from decode.defaults import choose_counts
from decode.wave import can_wave
from exits import make_exit
from loops import Plan, as_noise

# --------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
beside: list = []           # folders of other runs, to measure in the same turns
dataset: str | None = None  # held-out text or a task with other knobs; None = the run's own
length: int | None = None   # tokens of a window; None = block_size. Others: rotary positions only
rules = ['norm_rel', 'kl', 'accel']     # names in exits.EXITS, or MODULE:NAME
taus = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]   # thresholds, of all rules
budgets = [1, 2, 4, 8]      # fixed loop steps
drafts = [[2, 8, 4]]        # loops of the drafts, and of their check; tokens drafted at once
waves = [[8, 1]]            # tokens of a wave, and loop steps of a pass
n_loop: int | None = None   # the full budget; None = 30, or 2 T + 100 where rules wake on a task
cache: str | list = 'exact'     # policies in cache.POLICIES, of fixed loops and rules
wake: bool | list | None = None     # asleep until news arrives, or out for good? None = on a task
ring = 8                    # slots of the policy `ring`
n_windows = 24              # held-out windows for quality
n_prompts = 8               # windows whose beginnings are continued; 0 = no times
prompt_tokens: int | None = None    # of a prompt; None = half a window
new_tokens = 24             # of a text
temperature = 0.0           # of the texts
fidelity = 0.95             # share of texts that must be those of the full budget
compile = False             # torch.compile passes after a prompt: half a minute and more a point
calibrate: float | None = None  # find thresholds that cost at most this (nats; of waves: fidelity)
seed = 0                    # of x^(0), the texts and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# columns of bench.csv, and how the table prints them. To add one, write it here, and add its value
# to what is measured on a window (OfWindow) or on a prompt (OfPrompt)
OF_WINDOWS = dict(ce='.4f', ppl='.3f', ce_minus_full='+.4f', diff_low='+.4f', diff_high='+.4f',
                  accuracy='.3f', mean_evals='.2f', most_evals='.1f', last_step='.1f')
OF_PROMPTS = dict(identical='.3f', passes='.2f', blocks='.2f', ms_per_token='.2f', ms_low='.2f',
                  ms_high='.2f')
IN_TABLE = 'ce_minus_full', 'accuracy', 'mean_evals', 'identical', 'blocks', 'ms_per_token'


# methods ------------------------------------------------------------------------------------------

class Kind(StrEnum):
    """What a method is, and the word for it in bench.csv."""
    PLAIN = 'no loops'          # the model has no groups
    FIXED = 'fixed loops'
    RULE = 'exit rules'
    DRAFTS = 'drafts'
    WAVE = 'waves'


@dataclass(frozen=True)
class Method:
    """A way to decode. To add a kind, name it above, and make its methods below."""
    kind: Kind
    family: str             # in words, but for loops and threshold: the table has the best of each
    label: str              # in words
    decoding: dict          # the arguments of GPT.stream


def fixed(n, policy='exact'):
    return Method(Kind.FIXED, f'fixed loops, {policy}', f'fixed {n}, {policy}',
                  dict(n_loop=n, cache=policy, ring=ring))


def with_rule(tau, name, waking, policy, budget):
    rule = make_exit(name, tau, wake=waking)
    family = f'{rule.name}, {policy}' + (', wake' if waking else '')
    return Method(Kind.RULE, family, f'{family}, tau {rule.tau:g}',
                  dict(n_loop=budget, exit=rule, cache=policy, ring=ring))


def drafted(loops, n, tokens):
    """Drafts of some tokens with few loops, that n loops check."""
    return Method(Kind.DRAFTS, str(Kind.DRAFTS), f'drafts {tokens} x {loops}, check {n}',
                  dict(n_loop=n, cache='exact', draft_loops=loops, draft_tokens=tokens))


def waved(tau, name, width, steps, budget):
    rule = make_exit(name, tau)
    family = f'wave {width} x {steps}, {rule.name}'
    return Method(Kind.WAVE, family, f'{family}, tau {rule.tau:g}',
                  dict(n_loop=budget, exit=rule, cache='latest', wave=width, wave_steps=steps))


def as_list(knob):
    return knob if isinstance(knob, list) else [knob]


def wakes(is_task):
    """The values of `wake` to measure."""
    return [is_task] if wake is None else as_list(wake)


def full_budget(model, is_task, T):
    """Fixed loops, as many as a rule may use; as one that wakes may use, if any rule here does."""
    if not model.groups:            # nothing loops: a pass is all there is
        return Method(Kind.PLAIN, str(Kind.PLAIN), str(Kind.PLAIN), dict(n_loop=1, cache='exact'))
    T_awake = T if is_task and True in wakes(is_task) else None
    return fixed(choose_counts(model, n_loop, True, T_awake)[0])


def families_of_rules(budget, is_task):
    """
    Each rule under each cache policy, out for good and asleep until news arrives: functions that
    make a Method of a tau. To wake, a rule needs a policy that keeps every loop step; ValueError if
    there is another one and the rule is to do nothing else.
    """
    families = []
    for waking in wakes(is_task):
        for policy in as_list(cache):
            if not waking or POLICIES[policy].keeps_every_step(budget, ring):
                families += [partial(with_rule, name=name, waking=waking, policy=policy,
                                     budget=budget) for name in rules]
            elif wakes(is_task) == [True]:
                raise ValueError(f"--wake needs a cache that keeps every loop step, and '{policy}' "
                                 'does not: give --wake=False, or --cache=exact')
    return families


def families_of_waves(model, budget):
    """Each wave with each rule that can decide for a wave: the same kind of functions."""
    can_decide = [name for name in rules if can_wave(model, make_exit(name))]
    return [partial(waved, name=name, width=width, steps=steps, budget=budget)
            for width, steps in waves for name in can_decide]


def methods_of(model, budget, is_task):
    """
    The methods that the knobs ask for, with this budget. Some may be there twice.

    ValueError for a knob that is out of range, an unknown rule or an unknown policy.
    """
    if not model.groups:
        return []
    for policy in as_list(cache):
        make_cache(model, model.loop_counts(budget), policy, ring)
    methods = [fixed(n, policy) for policy in as_list(cache) for n in (*budgets, budget)]
    methods += [family(tau) for family in families_of_rules(budget, is_task) for tau in taus]
    if n_prompts and not is_task:   # these two write texts
        methods += [drafted(*draft) for draft in drafts]
        methods += [family(tau) for family in families_of_waves(model, budget) for tau in taus]
    for method in methods:
        model.loop_counts(method.decoding['n_loop'])
    return methods


# points: what is measured -------------------------------------------------------------------------

class OfWindow(NamedTuple):
    """What is measured of a point on one window."""
    nats: float                 # the sum over its labels
    right: float                # how many of its labels are right
    labels: float               # how many there are
    evals: np.ndarray           # (groups,) block maps computed for a token, on average
    most_evals: int | None      # the most for one of its tokens; None = nothing loops
    last_step: int | None       # the last loop step that one of them keeps


class OfPrompt(NamedTuple):
    """What is measured of a point on the text after one prompt; on a task, on one problem."""
    ms_per_token: float                 # milliseconds
    passes: float | None = None         # of the model, for a new token; None = a problem
    blocks: float | None = None         # layers computed in the groups for a new token
    text: torch.Tensor | None = None    # the new tokens (1, new)


@dataclass(eq=False)
class Point:
    """A method of one model, and what has been measured of it so far."""
    run: str                        # the folder of the model
    model: torch.nn.Module
    method: Method
    reference: 'Point | None' = None    # the full budget of this model; None = this point itself
    deepest: float | None = None    # the deepest label of a problem, on average; None = text
    windows: list = field(default_factory=list)     # an OfWindow for each
    prompts: list = field(default_factory=list)     # an OfPrompt for each

    def __post_init__(self):
        self.reference = self.reference or self


def column(measured, name):
    """One field of a list of OfWindow or OfPrompt -> an array."""
    return np.array([getattr(of_one, name) for of_one in measured])


def points_of(folder, model, is_task, T):
    """The points of a run, each once; the first is the reference of the others."""
    reference = Point(folder, model, full_budget(model, is_task, T))
    methods = [reference.method]
    for method in methods_of(model, reference.method.decoding['n_loop'], is_task):
        if method not in methods:
            methods.append(method)
    return [reference, *(Point(folder, model, method, reference) for method in methods[1:])]


def decode_given(point, idx):
    """
    Decode given idx (B, T) -> logits (B, T, V), loop steps kept and block maps (B, T, groups):
    under `exact` all tokens in one pass, elsewhere one by one.
    """
    decoding = point.method.decoding
    torch.manual_seed(seed)         # for rules that toss a coin
    counts = point.model.loop_counts(decoding['n_loop'])
    plan = Plan(counts, decoding.get('exit'), as_noise(seed))
    return teacher_forced(point.model, idx, plan, decoding['cache'], ring)


# quality ------------------------------------------------------------------------------------------

def measure_quality(points, idx, targets):
    """Measure points on windows (N, T), a batch at a time: an OfWindow for each window."""
    at_once = windows_at_once(points[0].model.config, len(idx))
    for x, y in zip(idx.split(at_once), targets.split(at_once)):
        for point in points:
            point.windows += quality_of(point, x, y)


def quality_of(point, idx, targets):
    """A batch of windows (B, T) -> a list of OfWindow."""
    logits, steps, evals = decode_given(point, idx)
    nats = cross_entropy(logits.float().transpose(1, 2), targets, reduction='none')     # (B, T)
    right = logits.argmax(-1) == targets
    sums = [each.cpu().double().sum(dim=1).tolist() for each in (nats, right, targets >= 0)]
    means = evals.cpu().double().mean(dim=1).numpy()                            # (B, groups)
    most = last = [None] * len(idx)
    if point.model.groups:
        most = evals.amax(dim=(1, 2)).tolist()
        last = steps.amax(dim=(1, 2)).tolist()
    return list(map(OfWindow, *sums, means, most, last))


def seconds_of_quality(points, idx, targets, is_task):
    """Measure a part of the windows, and forget it -> the seconds that all of them will take."""
    part = (slice(None), slice(8))          # 8 tokens of each window
    if is_task:
        part = (slice(4), slice(None))      # 4 problems
    begin = time.perf_counter()
    measure_quality([replace(point, windows=[]) for point in points], idx[part], targets[part])
    return (time.perf_counter() - begin) * idx.numel() / idx[part].numel()


# time ---------------------------------------------------------------------------------------------

def measure_time(points, prompt, number, is_task):
    """Measure what prompt `number`, (1, n), costs at every point in turn: an OfPrompt for each."""
    for point in points:
        if is_task:
            point.prompts.append(read_problem(point, prompt))
        else:
            point.prompts.append(continue_prompt(point, prompt, number))


def continue_prompt(point, prompt, number=0, new=None):
    """
    Continue a prompt (1, n) -> an OfPrompt: `new` tokens, and what they cost, on average of all but
    the first of them. What is computed for tokens that are thrown away counts.

    number: of the prompt; its tokens are drawn with seed + number. new: None = new_tokens.
    """
    new = new or new_tokens
    layers = torch.tensor([len(group) for group in point.model.config.groups])
    passes = []
    torch.manual_seed(seed)         # for rules that toss a coin
    stream = point.model.stream(prompt, new, temperature, seed=seed + number, noise_seed=seed,
                                passes=passes, **point.method.decoding)
    tokens = [next(stream)[0]]      # this also reads the prompt
    passes.clear()
    begin = time.perf_counter()
    tokens += [token for token, _ in stream]        # the host waits for the device at each token
    ms = 1e3 * (time.perf_counter() - begin)
    # of each pass the block maps (1, T, groups), times the layers of a group
    blocks = sum((evals.cpu() * layers).sum().item() for evals in passes)
    return OfPrompt(ms / (new - 1), len(passes) / (new - 1), blocks / (new - 1),
                    torch.cat(tokens, dim=1))


def read_problem(point, problem):
    """Read a problem (1, T) -> what that costs, an OfPrompt."""
    begin = time.perf_counter()
    decode_given(point, problem)[0].argmax(-1).cpu()        # waits for the device
    return OfPrompt(1e3 * (time.perf_counter() - begin) / problem.shape[1])


def seconds_of_time(points, prompt, is_task):
    """Begin to decode a prompt at each point -> the seconds that it will take."""
    seconds = 0.0
    for point in points:
        begin = time.perf_counter()
        if is_task:
            read_problem(point, prompt)
        else:
            begun = continue_prompt(point, prompt, new=3)
            seconds += (new_tokens - 3) * begun.ms_per_token / 1e3
        seconds += time.perf_counter() - begin
    return seconds


def compile_all(points, prompt, is_task):
    """Compile the passes of all models. The first calls do the work, so they are made here."""
    width = max([1, *(width for width, _ in waves), *(1 + ahead for *_, ahead in drafts)])
    for model in {point.model for point in points}:
        compile_passes(model, width)
    seconds_of_time(points, prompt, is_task)


# comparison with the reference --------------------------------------------------------------------

def per_label(point, name):
    """A sum over windows, such as nats, divided by the number of their labels."""
    return column(point.windows, name).sum() / column(point.windows, 'labels').sum()


def excess(point):
    """
    Nats per label above those of the reference, which may be some windows ahead: the mean, and the
    ends of its 95% interval.
    """
    labels = column(point.windows, 'labels')
    of_reference = column(point.reference.windows, 'nats')[:len(labels)]
    difference = column(point.windows, 'nats') - of_reference
    low, high = interval(np.stack((difference, labels), axis=1), ratio_of_sums)
    return difference.sum() / labels.sum(), low, high


def identical(point):
    """
    The share of texts that are those of the reference, which may be a prompt ahead; None on a task.
    """
    if any(of_prompt.text is None for of_prompt in point.prompts):
        return None
    pairs = zip(point.prompts, point.reference.prompts)
    return float(np.mean([torch.equal(own.text, other.text) for own, other in pairs]))


def ratio_of_sums(windows):
    """(draws, N, 2) -> (draws,): the sum of the first column over that of the second."""
    sums = windows.sum(axis=1)
    return sums[:, 0] / sums[:, 1]


def interval(values, statistic, draws=2000):
    """
    The ends of the 95% bootstrap interval of a statistic of values (N, ...); None, None for a
    single value. statistic: (draws, N, ...) -> (draws,).
    """
    if len(values) < 2:
        return None, None
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(values[picks]), [2.5, 97.5])


# calibration: thresholds that keep a promise ------------------------------------------------------
#
# The paper leaves tau to be tuned by hand. Here it is the largest of taus that keeps a promise:
#
#     a rule      costs at most `calibrate` nats per label more than the full budget
#     a wave      writes the texts of the full budget, a share `fidelity` of them at least
#
# The even windows choose it, and the odd ones score it: a threshold that was cheap by chance where
# it was chosen is not so there.

def calibrate_all(full, idx, targets, prompts, is_task, checkpoint, folder):
    """
    Find the threshold of each family, print it, and add it to folder/exits.json at once, in place
    of an earlier one -> {family in words: its row}. full: the point of the full budget; windows (N,
    T), and prompts (N, 1, n), their beginnings.
    """
    # the earlier thresholds
    try:
        stored = thresholds_of(folder, checkpoint)
    except ValueError as error:
        print(f'warning: {error}. It is replaced')
        stored = []

    # for each family the largest tau that keeps the promise on one half, and its costs on the other
    even, odd = ((Point('', full.model, full.method), idx[i::2], targets[i::2], prompts[i::2])
                 for i in (0, 1))
    budget = full.method.decoding['n_loop']
    families = families_of_rules(budget, is_task)
    if not is_task:
        families += families_of_waves(full.model, budget)
    rows = {}
    for family in families:
        method = family(taus[0])            # its key is the same at every tau
        decoding = method.decoding
        wave = [decoding[name] for name in ('wave', 'wave_steps') if name in decoding] or None
        row = threshold_key(decoding['exit'], decoding['cache'], ring, wave) | dict(tau=None)
        row |= dict(texts=fidelity) if wave else dict(nats=calibrate)
        outcome = 'none of taus keeps the promise'
        for tau in sorted(taus, reverse=True):
            _, _, surely_kept = judge(family(tau), *even)
            if surely_kept:
                costs, kept, _ = judge(family(tau), *odd)
                row |= dict(tau=tau) | costs | dict(kept=kept)
                outcome = f'tau = {tau:g}'
                break
        print(f'{method.family}: {outcome}', flush=True)
        rows[method.family] = row
        save_thresholds(folder, checkpoint, [*stored, *rows.values()])
    return rows


def judge(method, reference, idx, targets, prompts):
    """
    A rule by its loss on windows, a wave by its texts -> its costs, as exits.json has them; does it
    keep its promise; and does it also at the upper end of the cost's 95% interval?

    reference: the point of the full budget, measured here when it is first needed.
    """
    point = Point('', reference.model, method, reference)
    if method.kind is Kind.WAVE:
        use_one_thread(point.model)
        for each in reference, point:
            if not each.prompts:
                each.prompts = [continue_prompt(each, prompt) for prompt in prompts]
        share = identical(point)
        return dict(identical=share), share >= fidelity, share >= fidelity
    measure_quality([each for each in (reference, point) if not each.windows], idx, targets)
    cost, low, high = excess(point)
    costs = dict(cost=cost, cost_low=low, cost_high=high,
                 evals=column(point.windows, 'evals').mean())
    return costs, bool(cost <= calibrate), bool(high <= calibrate)


def report_thresholds(rows, folder, source, is_task):
    """The table of calibrated thresholds, {family: row}, and how to use one of them."""
    rows = [dict(name=words) | row for words, row in rows.items()]
    print_rows('the largest tau that keeps the promise on half of the windows, and what it costs '
               'on the others:', rows, dict(name='', tau='g', cost='+.4f', cost_low='+.4f',
                                            cost_high='+.4f', evals='.2f', identical='.3f',
                                            kept=''))
    if any(row.get('kept') is False for row in rows):
        print('\nkept = False: on the other windows it breaks the promise. It is in the file, and '
              'sample.py says so.\nMore windows (--n_windows) choose better.')
    without = [row['name'] for row in rows if row['tau'] is None]
    if without:
        print(f'\nno threshold was found for {"; ".join(without)}: none of taus keeps the promise')
    kept = [row for row in rows if row.get('kept')]
    print(f'\n{folder}/exits.json')
    if kept:
        row = min(kept, key=lambda row: row.get('evals', math.inf))     # waves come last
        print(f"{row['name']}: {sample_command(row, source, is_task)}")


def sample_command(row, source, is_task):
    """The command that uses a threshold. row: it has the fields of a threshold_key."""
    rule = next(name for name in rules if make_exit(name).name == row['rule'])
    flags = [f'--out_dir={source}', f'--exit={rule}']
    if row['wave']:
        width, steps = row['wave']
        flags += [f'--wave={width}', f'--wave_steps={steps}']
    return command_for('sample.py', row, is_task, *flags)


# report -------------------------------------------------------------------------------------------

def row_of(point):
    """The row of bench.csv of a point: what is known of it so far, and None for the rest."""
    method = point.method
    groups = [f"evals_{'-'.join(map(str, layers))}" for layers in point.model.config.groups]
    row = dict(run=point.run, name=method.label, family=method.family, kind=method.kind)
    row |= dict.fromkeys(['cache', 'n_loop', 'rule', 'tau', 'wake', 'draft_loops', 'draft_tokens',
                          'wave', 'wave_steps', 'windows', 'deepest', *OF_WINDOWS, *groups,
                          'prompts', *OF_PROMPTS])
    row |= {name: value for name, value in method.decoding.items() if name in row}
    rule = method.decoding.get('exit')
    if rule:
        row |= dict(rule=rule.name, tau=rule.tau, wake=rule.wake)
    # the means of fields that have a column, then what is computed of several
    for measured in point.windows, point.prompts:
        for name in measured[0]._fields if measured else ():
            if name in row and getattr(measured[0], name) is not None:
                row[name] = column(measured, name).mean()
    if point.windows:
        ce = per_label(point, 'nats')
        above, low, high = excess(point)
        evals = column(point.windows, 'evals').mean(axis=0)                         # (groups,)
        row |= dict(windows=len(point.windows), ce=ce, ppl=np.exp(ce), ce_minus_full=above,
                    diff_low=low, diff_high=high, accuracy=per_label(point, 'right'),
                    mean_evals=evals.mean() if groups else None, **dict(zip(groups, evals)),
                    deepest=point.deepest)
    if point.prompts:
        ms = column(point.prompts, 'ms_per_token')
        low, high = interval(ms, lambda draws: np.median(draws, axis=1))
        row |= dict(prompts=len(ms), ms_per_token=np.median(ms), ms_low=low, ms_high=high,
                    identical=identical(point))
    return row


def save(points, folder):
    """Write folder/bench.csv with what is known so far, if anything is."""
    rows = [row_of(point) for point in points if point.windows or point.prompts]
    if rows:
        columns = dict.fromkeys(name for row in rows for name in row)   # runs have other groups
        write_csv([dict.fromkeys(columns) | row for row in rows],
                  os.path.join(folder, 'bench.csv'), list(columns))


def print_rows(title, rows, formats):
    """Print columns of rows that have a value somewhere. formats: {column: its format}."""
    formats = {name: shape for name, shape in formats.items()
               if any(row.get(name) is not None for row in rows)}
    lines = [list(formats)]
    for row in rows:
        lines.append(['' if row.get(name) is None else format(row[name], shape)
                      for name, shape in formats.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f'\n{title}')
    for first, *others in lines:
        print(first.ljust(widths[0]), *map(str.rjust, others, widths[1:]), sep='  ')


def rows_of_table(rows, is_task):
    """
    Of each run the full budget, and the fastest of each family with at least a share `fidelity` of
    the full budget's texts; of a task, of its right answers. rows: {point: its row}.
    """
    table = []
    for reference in dict.fromkeys(point.reference for point in rows):
        full = rows[reference]
        of_run = [row for point, row in rows.items() if point.reference is reference]
        fastest = {}
        for row in sorted(of_run, key=lambda row: row['ms_per_token']):
            enough = row['identical'] is not None and row['identical'] >= fidelity
            if is_task:
                enough = row['accuracy'] >= fidelity * full['accuracy']
            if enough:
                fastest.setdefault(row['family'], row)
        table += [full, *(row for row in fastest.values() if row is not full)]
    return table


def dots_of(rows, is_task):
    """The dots of ledger.png: quality against time, drafts and waves with that of their texts."""
    quality = 'accuracy' if is_task else 'ce'
    of_budget = {(row['run'], row['n_loop']): row[quality] for row in reversed(rows)
                 if row['kind'] is Kind.FIXED}
    dots = []
    for row in rows:
        height = row[quality]
        if row['kind'] in (Kind.DRAFTS, Kind.WAVE) and row['identical'] >= fidelity:
            # they write the texts of a budget
            height = of_budget.get((row['run'], row['n_loop']))
        words = row['kind']
        if row['kind'] in (Kind.FIXED, Kind.RULE):
            words += f", {row['cache']}" + (', wake' if row['wake'] else '')
        if height is not None:
            dots.append(dict(run=row['run'], kind=words, ms=row['ms_per_token'], height=height,
                             plain=row['kind'] is Kind.PLAIN))
    return dots


def report(points, folder, is_task):
    """The figures of all points, and the table."""
    rows = {point: row_of(point) for point in points}
    timed = {point: row for point, row in rows.items() if point.prompts}
    of_rules = [row for row in rows.values() if row['kind'] is Kind.RULE]
    if of_rules:
        plots.figure_4(of_rules, os.path.join(folder, 'figure_4.png'))
    if timed:
        plots.ledger(dots_of(list(timed.values()), is_task), os.path.join(folder, 'ledger.png'),
                     'share of right answers' if is_task else 'held-out loss (nats per token)',
                     is_task)
    print(f'\n{folder}: bench.csv has all {len(rows)} points; figures')

    formats = dict(run='', name='') if beside else dict(name='')
    formats |= {name: (OF_WINDOWS | OF_PROMPTS)[name] for name in IN_TABLE}
    if not timed:
        print_rows('quality:', rows.values(), formats)
        return
    table = rows_of_table(timed, is_task)
    share = f"{100 * fidelity:g}% of its {'right answers' if is_task else 'texts'}"
    shown = {row['family'] for row in table}
    families = dict.fromkeys(row['family'] for row in timed.values())
    without = [words for words in families if words not in shown]
    if without:
        print(f'at no threshold or loop count {share}: {"; ".join(without)}')
    print_rows(f'the full budget, and the fastest of each kind with {share}:', table, formats)


# the run ------------------------------------------------------------------------------------------

def check_knobs():
    """ValueError for a knob that makes no sense; methods_of finds the others."""
    least = dict(calibrate=1e-6, n_windows=1 if calibrate is None else 16, n_prompts=0,
                 prompt_tokens=1, new_tokens=2)
    for knob, smallest in least.items():
        value = globals()[knob]
        if value is not None and not value >= smallest:         # a NaN is not
            raise ValueError(f'{knob} must be at least {smallest:g}, not {value}')
    if not 0 <= fidelity <= 1:
        raise ValueError(f'fidelity is a share, so it lies between 0 and 1, not at {fidelity}')
    if not 0 <= seed < 2 ** 32:
        raise ValueError(f'seed must lie between 0 and 2^32 - 1, not at {seed}')
    for knob, example in dict(rules=['accel', 'kl'], cache=['exact', 'latest'], wake=[False, True],
                              beside=['out-plain']).items():
        value = globals()[knob]
        fits = all(type(part) is type(example[0]) for part in as_list(value))
        if value is not None and not fits:
            raise ValueError(f'{knob} must be as in --{knob}="{example}", not {value}')
    for draft in drafts:
        if not are_counts(draft, 3):
            raise ValueError('drafts must be lists of three whole numbers from 1 on, such as '
                             f'[[2,8,4]], not {drafts}')
    for wave in waves:
        if not are_counts(wave, 2):
            raise ValueError('waves must be lists of two whole numbers from 1 on, such as [[8,1]], '
                             f'not {waves}')
    if calibrate is not None and not (rules and taus):
        raise ValueError('calibrate looks for thresholds: give --rules and --taus')


def check_results(folder):
    """ValueError, before any work, if the results cannot be written into this folder."""
    check_writable(folder)
    for name in ('bench.csv', 'exits.json', 'figure_4.png', 'ledger.png'):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            raise ValueError(f"'{path}' is a folder, and a file must go there: move it away")


def are_counts(values, n):
    """Is this a list of n whole numbers from 1 on?"""
    return (isinstance(values, list) and len(values) == n
            and all(type(value) is int and value >= 1 for value in values))


def with_labels(idx, targets):
    """The windows (N, T) that have a label. A line says if some have none, a ValueError if all."""
    has_label = (targets >= 0).any(dim=1)                                           # (N,)
    without = len(idx) - int(has_label.sum())
    if without == len(idx):
        raise ValueError(f'none of the {without} windows has a label, so there is nothing to '
                         'measure: choose another --dataset, or more --n_windows')
    if without:
        print(f'{without} of {len(idx)} windows have no label, and are left out')
    return idx[has_label], targets[has_label]


def points_of_others(checkpoint, is_task, T):
    """The points of the runs `beside`. ValueError for a run on other data."""
    points = []
    for folder in beside:
        model, other, folder, _ = open_run(folder, pick_device(device, dtype)[0], length=length)
        if other['data'] != checkpoint['data'] or model.config.block_size < T:
            raise ValueError(f'{folder} was trained on other data, or shorter windows, than the '
                             'first run: only runs on the same data can be compared')
        points += points_of(folder, model, is_task, T)
    return points


def measure(points, idx, targets, prompts, is_task, folder):
    """
    Quality, then time. folder/bench.csv has what is known, even after Ctrl-C. What cannot be done
    fails in the first seconds, in which each point is tried.
    """
    print(f'{len(points)} points on {len(idx)} windows and {len(prompts)} prompts. Trying each for '
          'a moment ...', flush=True)
    # drafts and waves write the texts of a budget, and have no quality of their own
    of_windows = [point for point in points if point.method.kind not in (Kind.DRAFTS, Kind.WAVE)]
    seconds = seconds_of_quality(of_windows, idx, targets, is_task)
    if len(prompts):
        seconds += len(prompts) * seconds_of_time(points, prompts[0], is_task)
    print(f'all of it will take about {seconds:.0f} s' + (', and compiling' if compile else ''))
    try:
        for words, members in groupby(of_windows, lambda point: point.method.family):
            print(f'quality: {words}', flush=True)
            measure_quality(list(members), idx, targets)
            save(points, folder)

        use_one_thread(points[0].model)
        if compile and len(prompts):
            compile_all(points, prompts[0], is_task)
        for number, prompt in enumerate(prompts):
            print(f'time: prompt {number + 1} of {len(prompts)}, at all points in turn', flush=True)
            measure_time(points, prompt, number, is_task)
            save(points, folder)
    finally:
        save(points, folder)


def main():
    # with which settings
    dev, autocast = pick_device(device, dtype)
    check_knobs()
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32

    # of what: a run
    no_rule = '' if calibrate is None else 'there is no threshold to find'
    model, checkpoint, folder, results = open_run(out_dir, dev, no_rule, length=length)
    check_results(results)

    # on what: held-out windows, and their beginnings as prompts; problems are read whole
    text, idx, targets, depth = data.held_out_windows(checkpoint, n_windows, dataset, dev)
    idx, targets = with_labels(idx, targets)                                        # (N, T)
    is_task = text.is_task
    T = idx.shape[1]
    end = T if is_task else prompt_tokens or max(1, T // 2)
    n = n_prompts if calibrate is None else n_windows
    prompts = idx[:n, None, :end]                                          # (n, 1, end)
    card = f' {torch.cuda.get_device_name()}' if dev.startswith('cuda') else ''
    print(f"{folder}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {model.config.groups}, "
          f'{dev}{card}, {dtype}, seed {seed}')

    # what: each point, that is each method of the model, or thresholds
    points = points_of(folder, model, is_task, T)
    with autocast:
        if calibrate is None:
            points += points_of_others(checkpoint, is_task, T)
            for point in points:
                point.deepest = depth.max(axis=1).mean() if is_task else None
            measure(points, idx, targets, prompts, is_task, results)
            report(points, results, is_task)
        else:
            rows = calibrate_all(points[0].reference, idx, targets, prompts, is_task, checkpoint,
                                 results)
            report_thresholds(rows, results, folder, is_task)


if __name__ == '__main__':
    configurator.configure(globals())
    configurator.run(main)
