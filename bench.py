"""
How good and how fast is each way to decode: fixed budgets, exit rules, drafts, waves, an oracle.
And is it better than other models, with loops or without?

    python bench.py                     the default run's checkpoint, five minutes on two cores
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"                  the paper's sweep
    python bench.py --rules="['accel']" --hits=1 --keep=True        a rule with changed parts
    python bench.py "--beside=['out-plain']"        the same points of other runs on the same data
    python bench.py --calibrate=0.005   find thresholds instead: out_dir/exits.json

A row of bench.csv is a point: fixed loops, a rule at a threshold, an oracle, drafts or a wave, with
its cache policy. `main` makes the points, 224 by default, the full budget first: n_loop fixed loops
under `exact`. `measure` runs them: first the quality of all, then the first prompt in all ways, the
second ... `report` prints tables and draws figure_4.png and ledger.png. On Ctrl-C bench.csv has
what was measured by then.

    of all but drafts and waves, on held-out windows (of a task: problems)
        ce, ppl, accuracy   nats a token, exp(ce), share of right labels
        ce_minus_full       ce above that of the full budget; diff_low, diff_high: its interval
        mean_evals          block maps evaluated (loop steps), of a token and group
    of all but oracles, on held-out prompts (of a task: ms_per_token alone, of reading a problem,
    without drafts and waves)
        identical           share of texts that are those of the full budget of the same run
        passes, blocks      passes of the model, and layers evaluated in the groups, a new token
        ms_per_token        median over the prompts, which are read untimed

95% intervals are bootstrapped over windows or prompts. The noise is always the same. tau is a
rule's threshold, an oracle's epsilon, or the loops of a fixed budget (of drafts: of their check).

Paper: sec. 4, App. D, Fig. 4. B, T, V: rows, tokens of a window, vocabulary.
"""
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from common import plots
from common.checkpoint import of_threshold, open_run, save_thresholds
from common.configurator import PathName
from common.files import write_csv
from common.report import windows_at_once
from decode import stream, teacher_forced, use_one_thread
from decode.compiled import compile_passes
from decode.wave import can_wave
from exits import EXITS, Exit, make_exit
from loops import Plan, as_noise

# --------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
beside: list = []           # folders of other runs, to measure in the same turns
dataset: str | None = None  # held-out text; None = the run's own
rules = [name for name in EXITS if name != 'accel_hat']
taus = [3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]     # of all rules
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 30]    # fixed loop steps
epsilons = [0.3, 1.0]       # of the oracle: distance to the last state
drafts = [[1, 6, 4], [2, 8, 4]]     # loops of the drafts, and of the check; tokens ahead
waves = [[8, 1], [8, 2]]    # tokens of a wave, and loop steps of a pass
n_loop = 30                 # the full budget, and k_max of every rule
hits: int | None = None     # small values in a row before a token exits; None = the rule's own
keep: bool | None = None    # keep the step that triggered? None = the rule's own
cache: str | list = ['exact', 'latest']     # policies in cache.POLICIES
past: bool | list = [False, True]   # under exact: do rules wait for the past?
ring = 8                    # slots of the ring policy
n_windows = 24              # held-out windows for quality
n_prompts = 8               # windows whose beginnings are continued; 0 = none
prompt_tokens: int | None = None    # of a prompt; None = half a block
new_tokens = 24             # of a text
temperature = 0.0           # of the texts
fidelity = 0.95             # required share of texts that are those of the full budget
compile = False             # torch.compile passes after a prompt: half a minute and more a point
calibrate: float | None = None  # find thresholds instead: nats that one may cost (waves: fidelity)
seed = 0                    # of x^(0), the texts and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# columns of bench.csv, of windows and of texts, and how tables show them. To add one, write it here
# and measure it under this name in quality or continue_prompt: its mean is the column
OF_WINDOWS = dict(ce='.4f', ppl='.3f', ce_minus_full='+.4f', diff_low='+.4f', diff_high='+.4f',
                  accuracy='.3f', mean_evals='.2f')
OF_TEXTS = dict(identical='.3f', passes='.2f', blocks='.2f', ms_per_token='.2f', ms_low='.2f',
                ms_high='.2f')


# the points ---------------------------------------------------------------------------------------

@dataclass(eq=False)
class Point:
    """
    One way to decode, and what has been measured of it so far. A new kind of point: a knob, and a
    line in make_points, make_point (its name) and measure (what is measured of it).
    """
    run: str            # the folder of its model
    model: torch.nn.Module
    rule: str           # an exit rule, 'fixed' or 'oracle'
    tau: float
    kind: str           # what tables group by: 'drafts', 'waves', 'no loops', 'rules, exact' ...
    name: str
    way: dict           # arguments of decode.stream: n_loop, exit, cache, ring, drafts or a wave
    measured: dict = field(default_factory=lambda: defaultdict(list))   # a value a window or prompt


def make_point(model, rule, tau, cache='exact', past=False, run='', **more):
    """A way to decode. past: see make_exit. more: stream's arguments for drafts or a wave."""
    exit = None if rule in ('fixed', 'oracle') else make_exit(rule, tau, hits, keep, wake=past)
    loops = model.loop_counts(tau if rule == 'fixed' else n_loop)
    how = cache + (', past' if past and cache == 'exact' else '')
    kind = f"{dict(fixed='fixed budgets', oracle='oracles').get(rule, 'rules')}, {how}"
    if 'wave' in more:
        kind, how = 'waves', f"wave {more['wave']} x {more['wave_steps']}"
    if 'draft_loops' in more:
        kind, how = 'drafts', f"drafts {more['draft_tokens']} x {more['draft_loops']}"
    if not model.groups:
        kind = how = 'no loops'
    return Point(run, model, rule, tau, kind, f'{rule} {tau:g}, {how}',
                 dict(n_loop=loops, exit=exit, cache=cache, ring=ring, **more))


def make_points(model, run=''):
    """The points that the knobs ask for, each once. The first is the full budget."""
    if not model.groups:        # nothing loops: a pass is all there is
        return [make_point(model, 'fixed', 1, run=run)]
    # (rule, tau, cache policy) and, of rules, past
    policies = as_list(cache)
    fixed = [('fixed', n, policy) for policy in policies for n in (*budgets, n_loop)]
    ruled = [(rule, tau, *how) for rule, *how in rule_ways() for tau in taus]
    oracles = [('oracle', epsilon, policy) for policy in policies for epsilon in epsilons]
    asked = dict.fromkeys([('fixed', n_loop, 'exact'), *fixed, *ruled, *oracles])
    return [*(make_point(model, *one, run=run) for one in asked),
            *(make_point(model, 'fixed', n, run=run, draft_loops=loops, draft_tokens=ahead)
              for loops, n, ahead in drafts),
            *(make_point(model, rule, tau, 'latest', run=run, wave=width, wave_steps=steps)
              for width, steps in waves for rule in rules if can_wave(model, make_exit(rule))
              for tau in taus)]


def rule_ways():
    """(rule, cache policy, past) of all rules, each once."""
    # `past` is a choice under `exact` alone; elsewhere rules wait in the prompt, and never after it
    return list(dict.fromkeys((rule, policy, wait or policy != 'exact') for policy in as_list(cache)
                              for wait in as_list(past) for rule in rules))


def as_list(value):
    return value if isinstance(value, list) else [value]


def oracle(epsilon):
    """
    Two rules, for two passes over the same tokens. By the first no token exits, and it notes the
    last states of each group. By the second, which knows them, a token exits at the first step
    whose state is within epsilon of its last one.
    """
    last = []           # (B, T, C) of each group; under some policies again for each token

    def note(x0, x1, memo, read):
        if memo is None:            # the first step of a group
            last.append(x1)
        last[-1] = x1
        return None, x1

    def distance(x0, x1, memo, read):
        memo = last.pop(0) if memo is None else memo
        return (x1 - memo).norm(dim=-1), memo
    return Exit(note), Exit(distance, epsilon, name='oracle')


# quality ------------------------------------------------------------------------------------------

def decode_given(point, idx):
    """
    Decode given idx (B, T) -> logits (B, T, V) and block maps (B, T, groups): under `exact` all
    tokens in one pass, elsewhere one by one.
    """
    way = point.way
    # an oracle takes two passes, of which the second counts
    for exit in oracle(point.tau) if point.rule == 'oracle' else [way['exit']]:
        plan = Plan(way['n_loop'], exit, as_noise(seed))
        logits, _, evals = teacher_forced(point.model, idx, plan, way['cache'], way['ring'])
    return logits, evals


def quality(points, idx, targets):
    """
    Measure every point on windows idx, targets (N, T), one batch of B windows after another. Adds
    of each window ce, the share of labels that are right (accuracy), and evals of the groups.
    """
    batch = windows_at_once(points[0].model.config, len(idx))
    for x, y in zip(idx.split(batch), targets.split(batch)):
        labels = (y >= 0).sum(dim=1)                                            # (B,)
        for point in points:
            logits, evals = decode_given(point, x)
            nats = cross_entropy(logits.float().transpose(1, 2), y, reduction='none')
            right = logits.argmax(-1) == y                                      # (B, T)
            for name, value in dict(ce=nats.sum(dim=1) / labels, accuracy=right.sum(dim=1) / labels,
                                    evals=evals.cpu().double().mean(dim=1)).items():
                point.measured[name].extend(value.cpu().double().numpy())


def excess(point, full):
    """
    CE above that of the full budget, which may be some windows ahead, in nats a token: the mean and
    the ends of its 95% interval.
    """
    ce = point.measured['ce']
    difference = np.subtract(ce, full.measured['ce'][:len(ce)])
    return difference.mean(), *interval(difference)


def interval(values, statistic=np.mean, draws=2000):
    """95% bootstrap interval of a statistic over the first axis of an array."""
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(values[picks], axis=1), [2.5, 97.5])


# latency and texts --------------------------------------------------------------------------------

def continue_prompt(point, prompt, new, number=0):
    """
    Continue a prompt (1, n) -> the new tokens (1, new), and of all but the first of them, on
    average: ms_per_token, passes of the model, and blocks, the layers evaluated in the groups, also
    for tokens that are thrown away.

    number: of the prompt; it draws its tokens with seed + number.
    """
    passes, layers = [], torch.tensor([len(group) for group in point.model.config.groups])
    tokens = stream(point.model, prompt, new, temperature, seed=seed + number, noise_seed=seed,
                    passes=passes, **point.way)
    made = [next(tokens)[0]]        # this also reads the prompt
    passes.clear()
    begin = time.perf_counter()
    made += [token for token, _ in tokens]      # the host waits for the device at each token
    ms, n = 1e3 * (time.perf_counter() - begin), new - 1
    # of each pass the block maps (1, T, groups), times the layers of a group
    blocks = sum((evals.cpu() * layers).sum().item() for evals in passes)
    return torch.cat(made, dim=1), dict(ms_per_token=ms / n, passes=len(passes) / n,
                                        blocks=blocks / n)


def read_problem(point, problem, new=0, number=0):
    """The same of a problem (1, T), which is only read: no text, and ms_per_token."""
    begin = time.perf_counter()
    decode_given(point, problem)[0].argmax(-1).tolist()     # the host waits for the answers
    return None, dict(ms_per_token=1e3 * (time.perf_counter() - begin) / problem.shape[1])


def time_in_turn(points, prompt, number, decode):
    """
    Decode prompt `number`, (1, n), at every point, by continue_prompt or read_problem. Adds to each
    what that costs and whether its text is identical to that of its run's first, the full budget.
    """
    full = {}           # the text of each run's full budget
    for point in points:
        text, costs = decode(point, prompt, new_tokens, number)
        if text is not None:
            costs['identical'] = torch.equal(text, full.setdefault(point.run, text))
        for name, value in costs.items():
            point.measured[name].append(value)


# calibration: thresholds that keep a promise ------------------------------------------------------

def find_thresholds(model, idx, targets, prompts):
    """
    Yield a row of exits.json for each of rule_ways and, given prompts (N, 1, n), for each wave.

    The paper leaves tau to be tuned by hand. Here the even windows and prompts choose it, half 0,
    and the odd ones report what it costs. A rule is good enough if the interval of its excess ends
    at `calibrate` or below, a wave if a share `fidelity` of its texts is that of the full budget.
    """
    full = [make_point(model, 'fixed', n_loop) for half in range(2)]
    for half in range(2):
        quality([full[half]], idx[half::2], targets[half::2])

    def by_loss(point, half):
        quality([point], idx[half::2], targets[half::2])
        mean, low, high = excess(point, full[half])
        return high <= calibrate, dict(cost=mean, cost_low=low, cost_high=high,
                                       evals=np.mean(point.measured['evals']))

    def by_texts(point, half):
        same = np.mean([torch.equal(continue_prompt(point, prompt, new_tokens)[0], text)
                        for prompt, text in zip(prompts[half::2], texts[half::2])])
        return same >= fidelity, dict(identical=same)

    for way in rule_ways():
        yield largest_tau(by_loss, model, *way)
    use_one_thread(model)
    texts = [continue_prompt(full[0], prompt, new_tokens)[0] for prompt in prompts]
    for width, steps in waves if texts and can_wave(model) else []:
        yield largest_tau(by_texts, model, 'norm_rel', 'latest', wave=width, wave_steps=steps)


def largest_tau(judge, model, rule, *how, **wave):
    """
    The largest of `taus` that is good enough on half 0, None if none is, and its costs on half 1.
    judge(point, half) -> (is it good enough there?, a dict of its costs).
    """
    way = make_point(model, rule, 0.0, *how, **wave).way
    row = of_threshold(way['exit'], way['cache'], ring, way['n_loop'], list(wave.values()) or None)
    for tau in sorted(taus, reverse=True):
        if judge(make_point(model, rule, tau, *how, **wave), 0)[0]:
            _, costs = judge(make_point(model, rule, tau, *how, **wave), 1)
            return row | dict(tau=tau) | costs
    return row | dict(tau=None)


# tables -------------------------------------------------------------------------------------------

def make_row(point, points):
    """What is known of a point so far: its row of bench.csv, with None for the rest."""
    known, way = point.measured, point.way
    full = next(one for one in points if one.run == point.run)
    groups = [f"evals_{'-'.join(map(str, layers))}" for layers in point.model.config.groups]
    row = dict(run=point.run, name=point.name, kind=point.kind, rule=point.rule, tau=point.tau,
               past=bool(way['exit'] and way['exit'].wake))
    row |= {name: way.get(name) for name in ('cache', 'draft_loops', 'draft_tokens', 'wave',
                                             'wave_steps')}
    row |= dict.fromkeys(['windows', *OF_WINDOWS, *groups, 'prompts', *OF_TEXTS])
    row |= {name: np.mean(known[name]) for name in row if name in known}
    if 'ce' in known:
        above, low, high = excess(point, full)
        evals = np.mean(known['evals'], axis=0)                                     # (groups,)
        row |= dict(windows=len(known['ce']), ppl=np.exp(row['ce']), ce_minus_full=above,
                    diff_low=low, diff_high=high, mean_evals=evals.mean() if groups else None,
                    **dict(zip(groups, evals)))
    if 'ms_per_token' in known:
        ms = np.array(known['ms_per_token'])
        low, high = interval(ms, np.median)
        row |= dict(prompts=len(ms), ms_per_token=np.median(ms), ms_low=low, ms_high=high)
    return row


def save(points, folder):
    """Write folder/bench.csv with what is known so far."""
    if found := [make_row(point, points) for point in points if point.measured]:
        columns = dict.fromkeys(name for row in found for name in row)      # runs have other groups
        write_csv(found, os.path.join(folder, 'bench.csv'), list(columns))


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


# the run ------------------------------------------------------------------------------------------

def check_knobs():
    """ValueError for a knob that makes no sense."""
    least = dict(calibrate=1e-6, n_windows=1 if calibrate is None else 16, n_prompts=0,
                 prompt_tokens=1, new_tokens=2)
    for knob, smallest in least.items():
        value = globals()[knob]
        if value is not None and value < smallest:
            raise ValueError(f'{knob} must be at least {smallest:g}, not {value}')
    if not all(isinstance(some, list) and len(some) == n and min(some) >= 1
               for n, knob in ((3, drafts), (2, waves)) for some in knob):
        raise ValueError('drafts must be lists of three numbers from 1 on, and waves of two, not '
                         f'{drafts} and {waves}')


def measure(points, idx, targets, prompts, folder, is_task):
    """
    Measure quality, then texts of prompts (N, 1, n), or the time to read these problems. Writes
    bench.csv, even on Ctrl-C.
    """
    of_windows = [point for point in points if point.kind not in ('drafts', 'waves')]
    of_texts = [point for point in (of_windows if is_task else points) if point.rule != 'oracle']
    try:
        print(f'quality of {len(of_windows)} points', flush=True)
        quality(of_windows, idx, targets)
        save(points, folder)
        use_one_thread(points[0].model)
        width = max([1, *(width for width, _ in waves), *(1 + ahead for *_, ahead in drafts)])
        for model in {point.model for point in points} if compile else []:
            compile_passes(model, width)
        decode = read_problem if is_task else continue_prompt
        for point in of_texts if len(prompts) else []:      # first calls, which may compile
            decode(point, prompts[0], 3)
        for i, prompt in enumerate(prompts):
            print(f'{i + 1} of {len(prompts)}, in {len(of_texts)} ways', flush=True)
            time_in_turn(of_texts, prompt, i, decode)
            save(points, folder)
    finally:
        save(points, folder)


def report(points, folder):
    """The tables and figures of all points."""
    found = [make_row(point, points) for point in points]
    named = dict(run='', name='') if beside else dict(name='')
    print_rows('all points:', found, named | OF_WINDOWS | OF_TEXTS)
    if of_rules := [row for row in found if row['kind'].startswith('rules')]:
        plots.figure_4(of_rules, os.path.join(folder, 'figure_4.png'))
    if timed := [row for row in found if row['prompts']]:
        plots.ledger(timed, os.path.join(folder, 'ledger.png'), n_loop, fidelity)
    if good := [row for row in timed if row['identical'] is not None
                and row['identical'] >= fidelity]:
        good.sort(key=lambda row: row['ms_per_token'])
        print_rows(f"the fastest of each kind with {100 * fidelity:g}% of the full budget's texts:",
                   [mine[0] for of_run in plots.grouped(good, 'run').values()
                    for mine in plots.grouped(of_run, 'kind').values()], named | OF_TEXTS)
    print(f'\n{folder}: bench.csv and the figures')


def main():
    import data
    from common.distributed import pick_device

    # the model, held-out windows, and prompts
    dev, autocast = pick_device(device, dtype)
    check_knobs()
    no_rule = '' if calibrate is None else 'there is no threshold to find'
    model, checkpoint, source, folder = open_run(out_dir, dev, no_rule)
    text, idx, targets, _ = data.held_out(checkpoint, n_windows, dataset, dev)  # (n_windows, T)
    n = n_prompts if calibrate is None else 0 if text.is_task else n_windows
    length = None if text.is_task else prompt_tokens or idx.shape[1] // 2
    prompts = idx[:n, None, :length]                                              # (n, 1, tokens)
    card = f' {torch.cuda.get_device_name()}' if dev.startswith('cuda') else ''
    print(f"{source}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {model.config.groups}, "
          f'{dev}{card}, {dtype}, seed {seed}; {n_windows} windows, {n} prompts')

    # thresholds, or measurements
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32
    with autocast:
        if calibrate is None:
            points = make_points(model, source)
            for other in beside:
                model, its, other, _ = open_run(other, dev)
                if its['data'] != checkpoint['data'] or model.config.block_size < idx.shape[1]:
                    raise ValueError(f'{other} was trained on other data, or shorter windows, than '
                                     f'{source}: only runs on the same data can be compared')
                points += make_points(model, other)
            measure(points, idx, targets, prompts, folder, text.is_task)
            report(points, folder)
            return
        found = [*find_thresholds(model, idx, targets, prompts)]
    print_rows('the largest tau that is good enough on half of the windows, and its cost on the '
               'others:', found, dict(rule='', cache='', past='', wave='', tau='g', cost='+.4f',
               cost_low='+.4f', cost_high='+.4f', evals='.2f', identical='.3f'))
    save_thresholds(folder, checkpoint, found, nats=calibrate)
    print(f'{folder}/exits.json: python sample.py --exit=RULE uses it')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
