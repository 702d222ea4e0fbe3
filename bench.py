"""
How good and how fast is each way to decode: fixed loops, exit rules, drafts, waves?
And how do other models compare, with loops or without?

    python bench.py                         the default run, in a minute or two
    python bench.py config/bench_full.py    every rule, threshold and cache policy, in many minutes
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"      the paper's sweep
    python bench.py "--beside=['out-plain']"            another run on the same data as well
    python bench.py --calibrate=0.005       find thresholds instead, for sample.py --exit

A *method* is a way to decode. A *point* is a method of one model and what was measured of it, a row
of bench.csv. The *full budget*, n_loop fixed loops under the policy `exact`, is what every point of
a model is compared with. main() calls these sections one after another; each can be left out:

    quality         loss and accuracy on held-out windows; of drafts and waves it is that of the
                    texts that they write
    time            of the text after a prompt, and whether it is the text of the full budget. On a
                    task: of reading a problem
    calibration     instead of these two: the largest threshold of each rule that keeps a promise
    report          bench.csv, the table at the end, figure_4.png and ledger.png

The columns of bench.csv, besides those that say what the method is:

    ce, ppl, accuracy           nats per token, exp(ce), share of labels that are right
    ce_minus_full               ce above that of the full budget (diff_low, diff_high)
    mean_evals, evals_GROUP     block maps (loop steps) computed for a token in a group
    most_evals, last_step       of a window: the most for one of its tokens; the last loop step that
                                one of them keeps
    deepest                     of a problem: the depth of its deepest label
    identical                   share of texts that are those of the full budget
    passes, blocks              for a new token: passes of the model, layers computed in the groups
    ms_per_token                median over the prompts, whose reading is not timed (ms_low,
                                ms_high); on a task that of reading problems

In brackets: the ends of a 95% interval, bootstrapped over the windows or prompts. An empty cell:
not measured. On Ctrl-C bench.csv has what was measured until then.

Paper: sec. 4, App. D, Fig. 4.

    B, N    windows of a batch, all windows
    T, V    tokens of a window, vocabulary
"""
import math
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, groupby
from shlex import quote

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
from common.thresholds import save_thresholds, threshold_key, thresholds_of
from decode import teacher_forced, use_one_thread
from decode.compiled import compile_passes
from decode.defaults import choose_counts
from decode.wave import can_wave
from exits import Exit, make_exit
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

# columns of bench.csv, and how the table shows them. To add one, write it here, and add its value
# for each window or prompt to what measure_quality or continue_prompt measures
OF_WINDOWS = dict(ce='.4f', ppl='.3f', ce_minus_full='+.4f', diff_low='+.4f', diff_high='+.4f',
                  accuracy='.3f', mean_evals='.2f', most_evals='.1f', last_step='.1f')
OF_PROMPTS = dict(identical='.3f', passes='.2f', blocks='.2f', ms_per_token='.2f', ms_low='.2f',
                  ms_high='.2f')
IN_TABLE = 'ce_minus_full', 'accuracy', 'mean_evals', 'identical', 'blocks', 'ms_per_token'


# methods and points -------------------------------------------------------------------------------

class Kind(StrEnum):
    """What a method is, and the word for it in bench.csv."""
    PLAIN = 'no loops'          # the model has no groups
    FIXED = 'fixed loops'
    RULE = 'exit rules'
    DRAFTS = 'drafts'
    WAVE = 'waves'


@dataclass(frozen=True)
class Method:
    """
    A way to decode. To add a kind, name it above, make its methods in methods_of, and describe it
    in family and label.
    """
    kind: Kind
    n_loop: int = 1                 # the budget; of drafts, the loops of their check
    exit: Exit | None = None        # the rule of exit rules and waves
    cache: str = 'exact'
    draft: tuple | None = None      # loops of the drafts, tokens drafted at once
    wave: tuple | None = None       # tokens of the wave, loop steps of a pass

    def at(self, tau):
        """The same with another threshold."""
        return replace(self, exit=make_exit(self.exit.name, tau, wake=self.exit.wake))

    def arguments(self):
        """Those of GPT.stream."""
        arguments = dict(n_loop=self.n_loop, exit=self.exit, cache=self.cache, ring=ring)
        if self.draft:
            arguments |= dict(zip(('draft_loops', 'draft_tokens'), self.draft))
        if self.wave:
            arguments |= dict(zip(('wave', 'wave_steps'), self.wave))
        return arguments


@dataclass(eq=False)
class Point:
    """A method of one model, and what has been measured of it."""
    run: str                        # the folder of the model
    model: torch.nn.Module
    method: Method
    deepest: float | None = None    # the deepest label, the mean over the problems of a task
    # lists with a value for each window or prompt
    measured: dict = field(default_factory=lambda: defaultdict(list))


def family(method):
    """A method in words, but for its loops or threshold: the table shows the best of a family."""
    match method.kind:
        case Kind.FIXED:
            return f'fixed loops, {method.cache}'
        case Kind.RULE:
            return f'{method.exit.name}, {method.cache}' + (', wake' if method.exit.wake else '')
        case Kind.WAVE:
            width, steps = method.wave
            return f'wave {width} x {steps}, {method.exit.name}'
    return str(method.kind)


def label(method):
    """A method in words."""
    match method.kind:
        case Kind.FIXED:
            return f'fixed {method.n_loop}, {method.cache}'
        case Kind.RULE | Kind.WAVE:
            return f'{family(method)}, tau {method.exit.tau:g}'
        case Kind.DRAFTS:
            loops, tokens = method.draft
            return f'drafts {tokens} x {loops}, check {method.n_loop}'
    return str(method.kind)


def as_list(knob):
    return knob if isinstance(knob, list) else [knob]


def wakes(is_task):
    """The values of `wake` to measure."""
    return [is_task] if wake is None else as_list(wake)


def budget_of(model, is_task, T):
    """The full budget: that of a rule, which wakes if any of the rules to measure does."""
    rule = make_exit('accel', wake=True in wakes(is_task))
    return choose_counts(model, n_loop, rule, T if is_task else None)[0]


def methods_of_rules(budget, is_task):
    """
    Each rule under each cache policy, out for good and asleep until news arrives, with the rule's
    own threshold. To wake, a rule needs a policy that keeps every loop step; ValueError if there is
    another one and the rule is to do nothing else.
    """
    methods = []
    for waking in wakes(is_task):
        for policy in as_list(cache):
            if not waking or POLICIES[policy].keeps_every_step(budget, ring):
                methods += [Method(Kind.RULE, budget, make_exit(rule, wake=waking), policy)
                            for rule in rules]
            elif wakes(is_task) == [True]:
                raise ValueError(f"--wake needs a cache that keeps every loop step, and '{policy}' "
                                 'does not: leave out --wake, or give --cache=exact')
    return methods


def methods_of_waves(model, budget):
    """Each wave with each rule that can decide for a wave, and the rule's own threshold."""
    can_decide = [rule for rule in map(make_exit, rules) if can_wave(model, rule)]
    return [Method(Kind.WAVE, budget, rule, 'latest', wave=(width, steps))
            for width, steps in waves for rule in can_decide]


def methods_of(model, is_task, T):
    """
    The methods that the knobs ask for, each once. The first is the full budget. T: tokens of a
    window.

    ValueError for a knob that is out of range, an unknown rule or an unknown policy.
    """
    if not model.groups:            # nothing loops: a pass is all there is
        return [Method(Kind.PLAIN)]
    budget = budget_of(model, is_task, T)
    for policy in as_list(cache):
        make_cache(model, model.loop_counts(budget), policy, ring)
    methods = [Method(Kind.FIXED, budget)]
    methods += [Method(Kind.FIXED, n, cache=policy) for policy in as_list(cache)
                for n in (*budgets, budget)]
    methods += [method.at(tau) for method in methods_of_rules(budget, is_task) for tau in taus]
    if n_prompts and not is_task:   # these two write texts
        methods += [Method(Kind.DRAFTS, n, draft=(loops, tokens)) for loops, n, tokens in drafts]
        methods += [method.at(tau) for method in methods_of_waves(model, budget) for tau in taus]
    for method in methods:
        model.loop_counts(method.n_loop)
    return list(dict.fromkeys(methods))


# quality ------------------------------------------------------------------------------------------

def decode_given(point, idx):
    """
    Decode given idx (B, T) -> logits (B, T, V), loop steps kept and block maps (B, T, groups):
    under `exact` all tokens in one pass, elsewhere one by one.
    """
    method = point.method
    torch.manual_seed(seed)         # for rules that toss a coin
    plan = Plan(point.model.loop_counts(method.n_loop), method.exit, as_noise(seed))
    return teacher_forced(point.model, idx, plan, method.cache, ring)


def measure_quality(points, idx, targets):
    """
    Measure points on windows idx, targets (N, T). Of each window: nats, the sum over its labels;
    right, how many of these are right; labels, how many there are; evals (groups,), the block maps
    computed for a token; most_evals and last_step, see above.
    """
    at_once = windows_at_once(points[0].model.config, len(idx))
    for x, y in zip(idx.split(at_once), targets.split(at_once)):
        for point in points:
            logits, steps, evals = decode_given(point, x)
            nats = cross_entropy(logits.float().transpose(1, 2), y, reduction='none')   # (B, T)
            measured = dict(nats=nats, labels=y >= 0, right=logits.argmax(-1) == y)
            for name, values in measured.items():
                point.measured[name].extend(values.cpu().double().sum(dim=1).numpy())
            point.measured['evals'].extend(evals.cpu().double().mean(dim=1).numpy())
            if point.model.groups:
                point.measured['most_evals'].extend(evals.amax(dim=(1, 2)).tolist())
                point.measured['last_step'].extend(steps.amax(dim=(1, 2)).tolist())


def per_label(point, name):
    """A sum over windows, such as nats, divided by the number of their labels."""
    return np.sum(point.measured[name]) / np.sum(point.measured['labels'])


def excess(point, full):
    """
    Nats per label above those of the full budget, which may be some windows ahead: the mean, and
    the ends of its 95% interval.
    """
    labels = point.measured['labels']
    difference = np.subtract(point.measured['nats'], full.measured['nats'][:len(labels)])
    low, high = interval(np.stack((difference, labels), axis=1), ratio_of_sums)
    return difference.sum() / np.sum(labels), low, high


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


# time ---------------------------------------------------------------------------------------------

def continue_prompt(point, prompt, number=0, new=None):
    """
    Continue a prompt (1, n) -> the new tokens (1, new), and what they cost, on average of all but
    the first of them: ms_per_token, passes of the model, and blocks, the layers computed in the
    groups, also for tokens that are thrown away.

    number: of the prompt; its tokens are drawn with seed + number. new: None = new_tokens.
    """
    new = new or new_tokens
    layers = torch.tensor([len(group) for group in point.model.config.groups])
    passes = []
    torch.manual_seed(seed)         # for rules that toss a coin
    stream = point.model.stream(prompt, new, temperature, seed=seed + number, noise_seed=seed,
                                passes=passes, **point.method.arguments())
    tokens = [next(stream)[0]]      # this also reads the prompt
    passes.clear()
    begin = time.perf_counter()
    tokens += [token for token, _ in stream]        # the host waits for the device at each token
    ms = 1e3 * (time.perf_counter() - begin)
    # of each pass the block maps (1, T, groups), times the layers of a group
    blocks = sum((evals.cpu() * layers).sum().item() for evals in passes)
    return torch.cat(tokens, dim=1), dict(
        ms_per_token=ms / (new - 1), passes=len(passes) / (new - 1), blocks=blocks / (new - 1))


def read_problem(point, problem):
    """Read a problem (1, T) -> its answers (1, T), and what that costs: ms_per_token."""
    begin = time.perf_counter()
    answers = decode_given(point, problem)[0].argmax(-1).cpu()      # waits for the device
    return answers, dict(ms_per_token=1e3 * (time.perf_counter() - begin) / problem.shape[1])


def time_in_turn(points, prompt, number, is_task):
    """
    Measure what prompt `number`, (1, n), costs at every point, and whether its text is identical to
    that of the first point of its run, the full budget.
    """
    text_of_full = {}       # of each run
    for point in points:
        if is_task:
            _, measured = read_problem(point, prompt)
        else:
            text, measured = continue_prompt(point, prompt, number)
            measured['identical'] = torch.equal(text, text_of_full.setdefault(point.run, text))
        for name, value in measured.items():
            point.measured[name].append(value)


# calibration: thresholds that keep a promise ------------------------------------------------------
#
# The paper leaves tau to be tuned by hand. Here the even windows choose it, and the odd ones score
# it: a threshold that was cheap by chance where it was chosen is not so there.

def calibrate_rules(model, full, methods, idx, targets):
    """
    Yield the row of exits.json of each method: the largest of taus that keeps the promise on the
    even windows, and its costs on the odd ones. The promise: it costs at most `calibrate` nats per
    label above the method `full`, and so does the end of its interval.
    """
    even = idx[0::2], targets[0::2]
    odd = idx[1::2], targets[1::2]
    full_even = quality_of(model, full, even)
    full_odd = quality_of(model, full, odd)
    for method in methods:
        row = threshold_key(method.exit, method.cache, ring) | dict(tau=None, nats=calibrate)
        for tau in sorted(taus, reverse=True):
            _, _, high = excess(quality_of(model, method.at(tau), even), full_even)
            if high <= calibrate:
                point = quality_of(model, method.at(tau), odd)
                cost, low, high = excess(point, full_odd)
                row |= dict(tau=tau, cost=cost, cost_low=low, cost_high=high,
                            evals=np.mean(point.measured['evals']), kept=bool(cost <= calibrate))
                break
        yield row


def quality_of(model, method, windows):
    """A point that has been measured on windows, (idx, targets)."""
    point = Point('', model, method)
    measure_quality([point], *windows)
    return point


def calibrate_waves(model, full, methods, prompts):
    """
    The same for waves, by the texts after prompts (N, 1, n). The promise: a share of at least
    `fidelity` of them are those of the method `full`.
    """
    use_one_thread(model)
    texts_of_full = texts_of(model, full, prompts)
    for method in methods:
        row = threshold_key(method.exit, method.cache, ring, list(method.wave))
        row |= dict(tau=None, texts=fidelity)
        for tau in sorted(taus, reverse=True):
            texts = texts_of(model, method.at(tau), prompts[0::2])
            if share_equal(texts, texts_of_full[0::2]) >= fidelity:
                texts = texts_of(model, method.at(tau), prompts[1::2])
                identical = share_equal(texts, texts_of_full[1::2])
                row |= dict(tau=tau, identical=identical, kept=identical >= fidelity)
                break
        yield row


def texts_of(model, method, prompts):
    return [continue_prompt(Point('', model, method), prompt)[0] for prompt in prompts]


def share_equal(texts, others):
    return float(np.mean([torch.equal(text, other) for text, other in zip(texts, others)]))


def store_thresholds(calibrated, folder, checkpoint):
    """
    Go through pairs (method, its row of exits.json) as they are calibrated, and add each row to
    folder/exits.json at once, in place of an earlier one -> the rows.
    """
    try:
        stored = thresholds_of(folder, checkpoint)
    except ValueError as error:
        print(f'warning: {error}. It is replaced')
        stored = []
    rows = []
    for method, row in calibrated:
        threshold = 'none of taus keeps the promise'
        if row['tau'] is not None:
            threshold = f"tau = {row['tau']:g}"
        print(f'{family(method)}: {threshold}', flush=True)
        rows.append(row)
        save_thresholds(folder, checkpoint, stored + rows)
    return rows


# report -------------------------------------------------------------------------------------------

def row_of(point, full):
    """The row of bench.csv of a point: what is known of it so far, and None for the rest."""
    method = point.method
    measured = point.measured
    groups = [f"evals_{'-'.join(map(str, layers))}" for layers in point.model.config.groups]
    row = dict(run=point.run, name=label(method), family=family(method), kind=method.kind)
    row |= dict.fromkeys(['cache', 'n_loop', 'rule', 'tau', 'wake', 'draft_loops', 'draft_tokens',
                          'wave', 'wave_steps', 'windows', 'deepest', *OF_WINDOWS, *groups,
                          'prompts', *OF_PROMPTS])
    row |= {name: value for name, value in method.arguments().items() if name in row}
    if method.exit:
        row |= dict(rule=method.exit.name, tau=method.exit.tau, wake=method.exit.wake)
    row |= {name: np.mean(measured[name]) for name in row if name in measured}
    if 'nats' in measured:
        ce = per_label(point, 'nats')
        above, low, high = excess(point, full)
        evals = np.mean(measured['evals'], axis=0)                                  # (groups,)
        row |= dict(windows=len(measured['nats']), ce=ce, ppl=np.exp(ce), ce_minus_full=above,
                    diff_low=low, diff_high=high, accuracy=per_label(point, 'right'),
                    mean_evals=evals.mean() if groups else None, **dict(zip(groups, evals)),
                    deepest=point.deepest)
    if 'ms_per_token' in measured:
        ms = np.array(measured['ms_per_token'])
        low, high = interval(ms, lambda draws: np.median(draws, axis=1))
        row |= dict(prompts=len(ms), ms_per_token=np.median(ms), ms_low=low, ms_high=high)
    return row


def rows_of(points):
    """The rows of bench.csv. The first point of each run is its full budget."""
    full = {}
    for point in points:
        full.setdefault(point.run, point)
    return [row_of(point, full[point.run]) for point in points]


def save(points, folder):
    """Write folder/bench.csv with what is known so far, if anything is."""
    rows = rows_of([point for point in points if point.measured])
    if rows:
        columns = dict.fromkeys(name for row in rows for name in row)   # runs have other groups
        write_csv([dict.fromkeys(columns) | row for row in rows],
                  os.path.join(folder, 'bench.csv'), list(columns))


def print_rows(title, rows, formats):
    """Print columns of rows that have a value somewhere. formats: {column: how it is printed}."""
    formats = {name: how for name, how in formats.items()
               if any(row.get(name) is not None for row in rows)}
    lines = [list(formats)]
    for row in rows:
        lines.append(['' if row.get(name) is None else format(row[name], how)
                      for name, how in formats.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f'\n{title}')
    for first, *others in lines:
        print(first.ljust(widths[0]), *map(str.rjust, others, widths[1:]), sep='  ')


def table_of(rows, is_task):
    """
    Rows for the table: of each run the full budget, and the fastest of each family with at least a
    share `fidelity` of the full budget's texts; of a task, of its right answers.
    """
    table = []
    for of_run in plots.grouped(rows, 'run').values():
        full = of_run[0]
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
    dots = []
    for row in rows:
        height = row[quality]
        if row['kind'] in (Kind.DRAFTS, Kind.WAVE) and row['identical'] >= fidelity:
            # they write the texts of a budget
            heights = [other[quality] for other in rows if other['kind'] is Kind.FIXED
                       and (other['run'], other['n_loop']) == (row['run'], row['n_loop'])]
            height = heights[0] if heights else None
        words = row['kind']
        if row['kind'] in (Kind.FIXED, Kind.RULE):
            words += f", {row['cache']}" + (', wake' if row['wake'] else '')
        if height is not None:
            dots.append(dict(run=row['run'], kind=words, ms=row['ms_per_token'], height=height,
                             plain=row['kind'] is Kind.PLAIN))
    return dots


def report(points, folder, is_task):
    """The figures of all points, and the table."""
    rows = rows_of(points)
    timed = [row for row in rows if row['prompts']]
    of_rules = [row for row in rows if row['kind'] is Kind.RULE]
    if of_rules:
        plots.figure_4(of_rules, os.path.join(folder, 'figure_4.png'))
    if timed:
        plots.ledger(dots_of(timed, is_task), os.path.join(folder, 'ledger.png'),
                     'share of right answers' if is_task else 'held-out loss (nats per token)')
    print(f'\n{folder}: bench.csv has all {len(rows)} points; figures')

    formats = dict(run='', name='') if beside else dict(name='')
    formats |= {name: how for name, how in (OF_WINDOWS | OF_PROMPTS).items() if name in IN_TABLE}
    if not timed:
        print_rows('quality:', rows, formats)
        return
    table = table_of(timed, is_task)
    share = f"{100 * fidelity:g}% of its {'right answers' if is_task else 'texts'}"
    shown = {row['family'] for row in table}
    without = dict.fromkeys(row['family'] for row in timed if row['family'] not in shown)
    if without:
        print(f'at no threshold or loop count {share}: {"; ".join(without)}')
    print_rows(f'the full budget, and the fastest of each kind with {share}:', table, formats)


def report_thresholds(methods, rows, folder, source, is_task):
    """The table of calibrated thresholds, and how to use one of them."""
    rows = [dict(name=family(method)) | row for method, row in zip(methods, rows)]
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
    """The command that uses a threshold: with its policy, and the user's files, if it took any."""
    rule = next(name for name in rules if make_exit(name).name == row['rule'])
    flags = [f'--out_dir={source}', f'--exit={rule}', f"--cache={row['cache']}"]
    if row['wake'] != is_task:          # not what sample.py does by itself
        flags.append(f"--wake={row['wake']}")
    if row['ring']:
        flags.append(f"--ring={row['ring']}")
    if row['wave']:
        flags += map('--{}={}'.format, ('wave', 'wave_steps'), row['wave'])
    return ' '.join(map(quote, ['python', 'sample.py', *configurator.own_files, *flags]))


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


def has_quality(points):
    """The points with a quality of their own: drafts and waves write the texts of a budget."""
    return [point for point in points if point.method.kind not in (Kind.DRAFTS, Kind.WAVE)]


def try_quality(points, idx, targets, is_task):
    """Measure a part of the windows, and forget it -> the seconds that all of them will take."""
    part = (slice(None), slice(8))          # 8 tokens of each window
    if is_task:
        part = (slice(4), slice(None))      # 4 problems
    begin = time.perf_counter()
    measure_quality(points, idx[part], targets[part])
    seconds = time.perf_counter() - begin
    for point in points:
        point.measured.clear()
    return seconds * idx.numel() / idx[part].numel()


def try_time(points, prompt, is_task):
    """Begin to decode a prompt at each point -> the seconds that it will take."""
    seconds = 0.0
    for point in points:
        begin = time.perf_counter()
        if is_task:
            read_problem(point, prompt)
        else:
            _, costs = continue_prompt(point, prompt, new=3)
            seconds += (new_tokens - 3) * costs['ms_per_token'] / 1e3
        seconds += time.perf_counter() - begin
    return seconds


def measure(points, idx, targets, prompts, is_task, folder):
    """
    Quality, then time. folder/bench.csv has what is known, even after Ctrl-C. What cannot be done
    fails in the first seconds, in which each point is tried.
    """
    print(f'{len(points)} points on {len(idx)} windows and {len(prompts)} prompts. Trying each for '
          'a moment ...', flush=True)
    of_windows = has_quality(points)
    seconds = try_quality(of_windows, idx, targets, is_task)
    if len(prompts):
        seconds += len(prompts) * try_time(points, prompts[0], is_task)
    print(f'all of it will take about {seconds:.0f} s' + (', and compiling' if compile else ''))
    try:
        for words, members in groupby(of_windows, lambda point: family(point.method)):
            print(f'quality: {words}', flush=True)
            measure_quality(list(members), idx, targets)
            save(points, folder)

        use_one_thread(points[0].model)
        if compile and len(prompts):
            width = max([1, *(width for width, _ in waves), *(1 + ahead for *_, ahead in drafts)])
            for model in {point.model for point in points}:
                compile_passes(model, width)
            try_time(points, prompts[0], is_task)       # the first calls compile
        for number, prompt in enumerate(prompts):
            print(f'time: prompt {number + 1} of {len(prompts)}, at all points in turn', flush=True)
            time_in_turn(points, prompt, number, is_task)
            save(points, folder)
    finally:
        save(points, folder)


def points_of_others(checkpoint, is_task, T):
    """The points of the runs `beside`. ValueError for a run on other data."""
    points = []
    for folder in beside:
        model, other, folder, _ = open_run(folder, pick_device(device, dtype)[0], length=length)
        if other['data'] != checkpoint['data'] or model.config.block_size < T:
            raise ValueError(f'{folder} was trained on other data, or shorter windows, than the '
                             'first run: only runs on the same data can be compared')
        points += [Point(folder, model, method) for method in methods_of(model, is_task, T)]
    return points


def main():
    # the model, held-out windows, and prompts
    dev, autocast = pick_device(device, dtype)
    check_knobs()
    no_rule = '' if calibrate is None else 'there is no threshold to find'
    model, checkpoint, folder, results = open_run(out_dir, dev, no_rule, length=length)
    check_results(results)
    text, idx, targets, depth = data.held_out(checkpoint, n_windows, dataset, dev)
    idx, targets = with_labels(idx, targets)                                        # (N, T)
    is_task, T = text.is_task, idx.shape[1]
    n = n_prompts if calibrate is None else n_windows
    end = T if is_task else prompt_tokens or max(1, T // 2)
    prompts = idx[:n, None, :end]                                                   # (n, 1, end)
    card = f' {torch.cuda.get_device_name()}' if dev.startswith('cuda') else ''
    print(f"{folder}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {model.config.groups}, "
          f'{dev}{card}, {dtype}, seed {seed}')

    # thresholds, or measurements
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32
    methods = methods_of(model, is_task, T)
    with autocast:
        if calibrate is not None:
            full = methods[0]
            of_rules = methods_of_rules(full.n_loop, is_task)
            of_waves = [] if is_task else methods_of_waves(model, full.n_loop)
            rows = store_thresholds(zip(of_rules + of_waves, chain(
                calibrate_rules(model, full, of_rules, idx, targets),
                calibrate_waves(model, full, of_waves, prompts))), results, checkpoint)
            report_thresholds(of_rules + of_waves, rows, results, folder, is_task)
            return
        points = [Point(folder, model, method) for method in methods]
        points += points_of_others(checkpoint, is_task, T)
        for point in points:
            point.deepest = depth.max(axis=1).mean() if is_task else None
        measure(points, idx, targets, prompts, is_task, results)
        report(points, results, is_task)


if __name__ == '__main__':
    configurator.configure(globals())
    configurator.run(main)
