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
model, n_loop fixed loops under the policy `exact`.

Start at main(). The four sections are independent:

    quality         loss and accuracy on held-out windows; of drafts and waves it is that of the
                    texts that they write
    time            of the text after a prompt, and whether it is the text of the full budget. On a
                    task: of reading a problem
    calibration     instead of these two: the largest threshold of each rule that keeps a promise
                    (common/calibration.py)
    report          bench.csv, the table at the end, figure_4.png and ledger.png; bench.json has the
                    settings of bench.csv

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
                                timed (ms_low, ms_high); on a task that of reading problems.
                                Where prompt_tokens + new_tokens are more than block_size, the
                                window moves on, and reading it again is timed

Under `latest` two columns are not of the same decoding. For ce and accuracy the tokens of a window
are read one after another, each with the method's loops; for identical and ms_per_token the prompt
is read at once and loops until it has converged, as GPT.stream does it.

In brackets: the ends of a 95% interval, bootstrapped over the windows or prompts. An empty cell:
not measured. On Ctrl-C bench.csv has what was measured until then.

Paper: sec. 4, App. D, Fig. 4.

    B, N    windows of a batch, all windows
    T, V    tokens of a window, vocabulary
"""
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
from common import calibration, configurator, plots
from common.checkpoint import open_run
from common.configurator import PathName, given
from common.distributed import pick_device
from common.evaluation import windows_at_once
from common.files import check_writable, write_csv, write_json
from common.tables import print_rows
from common.thresholds import threshold_key
from decode import teacher_forced, use_one_thread
from decode.compiled import compile_passes
from decode.defaults import choose_counts
from decode.passes import reads_whole
from decode.wave import can_wave
from exits import make_exit
from loops import Plan, as_noise

# --------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
beside: list = []           # folders of other runs, to measure in the same turns
dataset: str | None = None  # held-out text or a task with other knobs; None = the run's own
length: int | None = None   # tokens of a window; None = block_size. Others: rotary positions only
rules = ['norm_rel', 'kl', 'accel']     # names in exits.EXITS, or MODULE:NAME
taus = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]   # thresholds, the same for all rules
budgets = [1, 2, 4, 8]      # fixed loop steps
drafts = [[2, 8, 4]]        # loops of a draft, loops of its check, and tokens drafted at once
waves = [[8, 1]]            # tokens of a wave, and loop steps of a pass
n_loop: int | None = None   # the full budget; None = 30, or 2 T + 100 where rules wake on a task
cache: str | list = 'exact'     # policies of cache.POLICIES, for fixed loops and rules
wake: bool | list | None = None     # may a token that has exited wake? None = on a task
ring = 8                    # slots of the policy `ring`
n_windows = 24              # held-out windows for quality
n_prompts = 8               # windows whose beginnings are continued; 0 = measure no times
prompt_tokens: int | None = None    # length of a prompt; None = half a window
new_tokens = 24             # length of a text
temperature = 0.0           # of the draws of the texts; 0 = greedy
fidelity = 0.95             # share of texts that must equal those of the full budget
compile = False             # torch.compile the passes after a prompt: half a minute for each point
calibrate: float | None = None  # look for thresholds that cost at most so many nats
seed = 0                    # of x^(0), the texts and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# columns of bench.csv, and how the table prints them. To add one, write it here, and add its value
# to what is measured on a window (WindowResult) or on a prompt (PromptResult)
OF_WINDOWS = dict(ce='.4f', ppl='.3f', ce_minus_full='+.4f', diff_low='+.4f', diff_high='+.4f',
                  accuracy='.3f', mean_evals='.2f', most_evals='.1f', last_step='.1f')
OF_PROMPTS = dict(identical='.3f', passes='.2f', blocks='.2f', ms_per_token='.2f', ms_low='.2f',
                  ms_high='.2f')
LEAST_TO_CALIBRATE = 16     # windows: each half needs some for an interval
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


def wakes(policy, budget, is_task):
    """
    The values of `wake` to measure under a policy. To wake, a rule needs a policy that keeps every
    loop step. Under another one it does not wake; ValueError if it was to do nothing else.
    """
    if POLICIES[policy].keeps_every_step(budget, ring):
        return [is_task] if wake is None else as_list(wake)
    if wake is not None and as_list(wake) == [True]:
        raise ValueError(f"--wake needs a cache that keeps every loop step, and '{policy}' does "
                         'not: give --wake=False, or --cache=exact')
    return [False] if wake is None or False in as_list(wake) else []


def full_budget(model, is_task, T):
    """Fixed loops, as many as a rule may use; as one that wakes may use, if any rule here does."""
    if not model.groups:            # nothing loops: a pass is all there is
        return Method(Kind.PLAIN, str(Kind.PLAIN), str(Kind.PLAIN), dict(n_loop=1, cache='exact'))
    return fixed(full_budget_loops(model, is_task, T))


def full_budget_loops(model, is_task, T):
    """Its number of loop steps, the same in each group."""
    if is_task:
        budget, *_ = choose_counts(model, n_loop, True, T)      # True: as for a rule
        if any(True in wakes(policy, budget, is_task) for policy in as_list(cache)):
            return budget
    budget, *_ = choose_counts(model, n_loop, True)
    return budget


def families_of_rules(budget, is_task):
    """For each rule and policy a function tau -> Method, with and without waking (see wakes)."""
    return [partial(with_rule, name=name, waking=waking, policy=policy, budget=budget)
            for policy in as_list(cache) for waking in wakes(policy, budget, is_task)
            for name in rules]


def families_of_waves(model, budget):
    """For each wave, and each rule that can decide for a wave, a function tau -> Method."""
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

class WindowResult(NamedTuple):
    """What is measured of a point on one window."""
    nats: float                 # the sum over its labels
    right: float                # how many of its labels are right
    labels: float               # how many there are
    evals: np.ndarray           # (groups,) block maps computed for a token, on average
    most_evals: int | None      # the most for one of its tokens; None = nothing loops
    last_step: int | None       # the last loop step that one of them keeps


class PromptResult(NamedTuple):
    """What is measured of a point on the text after one prompt; on a task, on one problem."""
    ms: float                           # milliseconds per token
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
    windows: list = field(default_factory=list)     # a WindowResult for each
    prompts: list = field(default_factory=list)     # a PromptResult for each

    def __post_init__(self):
        self.reference = self.reference or self


def column(measured, name):
    """One field of a list of WindowResult or PromptResult -> an array."""
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
    """Measure points on windows (N, T), a batch at a time: a WindowResult for each window."""
    at_once = windows_at_once(points[0].model.config, len(idx))
    for x, y in zip(idx.split(at_once), targets.split(at_once)):
        for point in points:
            point.windows += quality_of(point, x, y)


def quality_of(point, idx, targets):
    """A batch of windows (B, T) -> a list of WindowResult."""
    logits, steps, evals = decode_given(point, idx)
    nats = cross_entropy(logits.float().transpose(1, 2), targets, reduction='none')     # (B, T)
    right = logits.argmax(-1) == targets
    sums = [each.cpu().double().sum(dim=1).tolist() for each in (nats, right, targets >= 0)]
    means = evals.cpu().double().mean(dim=1).numpy()                            # (B, groups)
    most = last = [None] * len(idx)
    if point.model.groups:
        most = evals.amax(dim=(1, 2)).tolist()
        last = steps.amax(dim=(1, 2)).tolist()
    return list(map(WindowResult, *sums, means, most, last))


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
    """Measure what prompt `number`, (1, n), costs at every point in turn."""
    for point in points:
        if is_task:
            point.prompts.append(read_problem(point, prompt))
        else:
            point.prompts.append(continue_prompt(point, prompt, number))


def continue_prompt(point, prompt, number=0, new=None):
    """
    Continue a prompt (1, n) -> a PromptResult: `new` tokens, and what they cost, on average of all
    but the first of them. What is computed for tokens that are thrown away counts.

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
    return PromptResult(ms / (new - 1), len(passes) / (new - 1), blocks / (new - 1),
                    torch.cat(tokens, dim=1))


def read_problem(point, problem):
    """Read a problem (1, T) -> what that costs, a PromptResult."""
    begin = time.perf_counter()
    decode_given(point, problem)[0].argmax(-1).cpu()        # waits for the device
    return PromptResult(1e3 * (time.perf_counter() - begin) / problem.shape[1])


def seconds_of_time(points, prompt, is_task):
    """Begin to decode a prompt at each point -> the seconds that it will take."""
    seconds = 0.0
    for point in points:
        begin = time.perf_counter()
        if is_task:
            read_problem(point, prompt)
        else:
            begun = continue_prompt(point, prompt, new=3)
            seconds += (new_tokens - 3) * begun.ms / 1e3
        seconds += time.perf_counter() - begin
    return seconds


def models_to_compile(points, is_task):
    """
    The models with passes after the first one. ValueError if there are none: a problem may be read
    in one pass, which stays as it is.
    """
    models = set()
    for point in points:
        decoding = point.method.decoding
        if not is_task or not reads_whole(decoding.get('exit'), decoding['cache']):
            models.add(point.model)
    if not models:
        raise ValueError('--compile is for passes after a prompt, and these problems are read in '
                         'one pass: leave it out, or give --cache=latest')
    return models


def compile_all(points, prompt, is_task):
    """Compile the passes of the models. The first calls do the work, so they are made here."""
    width = max([1, *(width for width, _ in waves), *(1 + ahead for *_, ahead in drafts)])
    for model in models_to_compile(points, is_task):
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


# calibration --------------------------------------------------------------------------------------

@dataclass
class Half:
    """Half of the windows (N, T), their beginnings (N, 1, n), and the full budget on them."""
    reference: Point            # it is measured when it is first needed
    idx: torch.Tensor
    targets: torch.Tensor
    prompts: torch.Tensor


def calibrate_all(full, idx, targets, prompts, is_task, checkpoint, folder):
    """
    Find the threshold of each rule and wave -> calibrated families, and their rows in
    folder/exits.json. full: the point of the full budget; windows (N, T), and prompts (N, 1, n).
    """
    even, odd = (Half(Point('', full.model, full.method), idx[i::2], targets[i::2], prompts[i::2])
                 for i in (0, 1))
    budget = full.method.decoding['n_loop']
    methods = families_of_rules(budget, is_task)
    if not is_task:
        methods += families_of_waves(full.model, budget)
    families = [family_of(method) for method in methods]
    return families, calibration.calibrate(families, taus, even, odd, folder, checkpoint)


def family_of(method_of):
    """A function that makes a Method of a tau -> a calibration.Family."""
    method = method_of(taus[0])         # its key is the same at every tau
    decoding = method.decoding
    wave, promise = None, dict(nats=calibrate)
    if method.kind is Kind.WAVE:
        wave = [decoding['wave'], decoding['wave_steps']]
        promise = dict(texts=fidelity)
    key = threshold_key(decoding['exit'], decoding['cache'], ring, wave)
    return calibration.Family(method.family, key, promise,
                              judge=lambda tau, half: judge(method_of(tau), half))


def judge(method, half):
    """What a method costs on half of the windows: a rule by its loss, a wave by its texts."""
    reference = half.reference
    point = Point('', reference.model, method, reference)
    if method.kind is Kind.WAVE:
        use_one_thread(point.model)
        for each in reference, point:
            if not each.prompts:
                each.prompts = [continue_prompt(each, prompt) for prompt in half.prompts]
        share = identical(point)
        keeps = share >= fidelity
        return calibration.Verdict(dict(identical=share), keeps, keeps)
    not_measured = [each for each in (reference, point) if not each.windows]
    measure_quality(not_measured, half.idx, half.targets)
    cost, low, high = excess(point)
    costs = dict(cost=cost, cost_low=low, cost_high=high,
                 evals=column(point.windows, 'evals').mean())
    return calibration.Verdict(costs, mean_keeps=bool(cost <= calibrate),
                               upper_end_keeps=bool(high <= calibrate))


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
        ms = column(point.prompts, 'ms')
        low, high = interval(ms, lambda draws: np.median(draws, axis=1))
        row |= dict(prompts=len(ms), ms_per_token=np.median(ms), ms_low=low, ms_high=high,
                    identical=identical(point))
    return row


def settings_of(checkpoint, dev, idx, prompts):
    """What the numbers of bench.csv depend on, besides the method: a dict for bench.json."""
    names = ('dataset', 'ring', 'new_tokens', 'temperature', 'fidelity', 'compile', 'seed', 'dtype')
    return dict(iteration=checkpoint['iter_num'], device=dev, tokens_of_window=idx.shape[1],
                prompt_tokens=prompts.shape[2], **{name: globals()[name] for name in names})


def save(points, folder, settings):
    """Write folder/bench.csv and its bench.json with what is known so far, if anything is."""
    rows = [row_of(point) for point in points if point.windows or point.prompts]
    if rows:
        columns = dict.fromkeys(name for row in rows for name in row)   # runs have other groups
        write_csv([dict.fromkeys(columns) | row for row in rows],
                  os.path.join(folder, 'bench.csv'), list(columns))
        write_json(settings | dict(threads=torch.get_num_threads()),
                   os.path.join(folder, 'bench.json'))


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
    """
    The dots of ledger.png: quality against time. Drafts have the quality of the loops that check
    them, whose texts they write, and waves that of the full budget, if enough of their texts are
    its own. Other waves, and drafts whose loops are no point, have no dot.
    """
    quality = 'accuracy' if is_task else 'ce'
    of_loops = {(row['run'], row['n_loop']): row[quality] for row in rows
                if row['kind'] is Kind.FIXED and row['cache'] == 'exact'}
    dots = []
    for row in rows:
        height = row[quality]
        is_faithful = row['kind'] is Kind.WAVE and row['identical'] >= fidelity
        if row['kind'] is Kind.DRAFTS or is_faithful:
            height = of_loops.get((row['run'], row['n_loop']))
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
    least = dict(calibrate=1e-6, n_prompts=0, prompt_tokens=1, new_tokens=2,
                 n_windows=1 if calibrate is None else LEAST_TO_CALIBRATE)
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
    for policy in as_list(cache):
        if policy not in POLICIES:
            raise ValueError(f"unknown cache policy '{policy}': choose one of "
                             f'{", ".join(POLICIES)}')
    for draft in drafts:
        if not are_counts(draft, 3):
            raise ValueError('drafts must be lists of three whole numbers from 1 on, such as '
                             f'[[2,8,4]], not {drafts}')
    for wave in waves:
        if not are_counts(wave, 2):
            raise ValueError('waves must be lists of two whole numbers from 1 on, such as [[8,1]], '
                             f'not {waves}')
    if calibrate is not None:
        if not (rules and taus):
            raise ValueError('calibrate looks for thresholds: give --rules and --taus')
        for knob in 'beside', 'compile', 'n_prompts':
            if knob in given:
                raise ValueError('--calibrate measures all windows of one run, not compiled: leave '
                                 f'out --{knob}')
        # a config file may give them for another run without --calibrate
        unused = [f'--{knob}' for knob in ('budgets', 'drafts') if knob in given]
        if unused:
            print(f'{" and ".join(unused)} have no threshold, and are not measured')


def check_results(folder):
    """ValueError, before any work, if the results cannot be written into this folder."""
    check_writable(folder)
    for name in ('bench.csv', 'bench.json', 'exits.json', 'figure_4.png', 'ledger.png'):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            raise ValueError(f"'{path}' is a folder, and a file must go there: move it away")


def are_counts(values, n):
    """Is this a list of n whole numbers from 1 on?"""
    return (isinstance(values, list) and len(values) == n
            and all(type(value) is int and value >= 1 for value in values))


def have_labels(targets):
    """
    Which windows have a label: targets (N, T) -> bool (N,). A line says if some have none.

    ValueError if none is left, or too few for two halves of a calibration.
    """
    has_label = (targets >= 0).any(dim=1)
    left = int(has_label.sum())
    without = len(targets) - left
    if left == 0:
        raise ValueError(f'none of the {without} windows has a label, so there is nothing to '
                         'measure: choose another --dataset, or more --n_windows')
    if calibrate is not None and left < LEAST_TO_CALIBRATE:
        raise ValueError(f'--calibrate needs {LEAST_TO_CALIBRATE} windows with a label, and there '
                         f'are {left}: choose more --n_windows, or another --dataset')
    if without:
        print(f'{without} of {len(targets)} windows have no label, and are left out')
    return has_label


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


def measure(points, idx, targets, prompts, is_task, folder, settings):
    """
    Quality, then time. folder/bench.csv has what is known, even after Ctrl-C, with the settings
    beside it. What cannot be done fails in the first seconds, in which each point is tried.
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
            save(points, folder, settings)

        # all points have equally many threads: those that are best for the widest model
        models = [point.model for point in points]
        use_one_thread(max(models, key=lambda model: model.config.n_embd))
        if compile and len(prompts):
            compile_all(points, prompts[0], is_task)
        for number, prompt in enumerate(prompts):
            print(f'time: prompt {number + 1} of {len(prompts)}, at all points in turn', flush=True)
            measure_time(points, prompt, number, is_task)
            save(points, folder, settings)
    finally:
        save(points, folder, settings)


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
    kept = have_labels(targets)                                                     # (N,)
    idx, targets = idx[kept], targets[kept]                                         # (N, T)
    is_task = text.is_task
    deepest = depth[kept.cpu().numpy()].max(axis=1).mean() if is_task else None
    T = idx.shape[1]
    end = T if is_task else prompt_tokens or max(1, T // 2)
    n = n_prompts if calibrate is None else len(idx)
    prompts = idx[:n, None, :end]                                          # (n, 1, end)
    if len(prompts) < n or end > T:
        print(f'windows are {len(idx)} of {T} tokens: there are {len(prompts)} prompts of '
              f'{prompts.shape[2]} tokens')
    card = f' {torch.cuda.get_device_name()}' if dev.startswith('cuda') else ''
    print(f"{folder}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {model.config.groups}, "
          f'{dev}{card}, {dtype}, seed {seed}')

    # what: each point, that is each method of the model, or thresholds
    points = points_of(folder, model, is_task, T)
    with autocast:
        if calibrate is None:
            points += points_of_others(checkpoint, is_task, T)
            for point in points:
                point.deepest = deepest
            if compile and n_prompts:
                models_to_compile(points, is_task)          # or an error, before the work
            measure(points, idx, targets, prompts, is_task, results,
                    settings_of(checkpoint, dev, idx, prompts))
            report(points, results, is_task)
        else:
            families, rows = calibrate_all(points[0].reference, idx, targets, prompts, is_task,
                                           checkpoint, results)
            flag_of_rule = {make_exit(name).name: name for name in rules}
            calibration.report(families, rows, results, folder, is_task, flag_of_rule)


if __name__ == '__main__':
    configurator.configure(globals())
    configurator.run(main)
