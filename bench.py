"""
How good and how fast is each way to decode: fixed budgets, exit rules, drafts, waves, an oracle.
And is it better than other models, with loops or without?

    python bench.py                     the default run's checkpoint, five minutes on two cores
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"                  the paper's sweep
    python bench.py --rules="['accel']" --hits=1 --keep=True        a rule with changed parts
    python bench.py "--beside=['out-plain']"        the same points of other runs on the same data
    python bench.py --calibrate=0.005   find thresholds instead: out_dir/exits.json

Writes out_dir/bench.csv, figure_4.png and ledger.png, and prints tables. A row of bench.csv is a
point: a rule at a threshold, a fixed budget, an oracle, drafts or a wave, with its cache policy. On
Ctrl-C it is written with what has been measured by then; the rest is left empty.

    measured                of                          on
    ce, accuracy, evals     all but drafts and waves    held-out windows, or problems
    latency, fidelity       all but oracles             held-out prompts that are continued in turn

Fidelity is the share of texts that are those of the full budget: n_loop fixed loops under `exact`.
In a task latency is the time to read a problem, and drafts and waves are not measured. The noise is
always the same. 95% intervals are bootstrapped over windows or prompts.

Paper: sec. 4, App. D, Fig. 4.

    tau         a rule's threshold, the loop steps of a fixed budget (with drafts, those of the
                budget that checks them), or the oracle's epsilon
    evals       block maps evaluated
    ce, ppl     cross-entropy in nats a token, exp(ce)
    B, T, V     rows, tokens of a window, vocabulary
"""
import os
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from common import plots
from common.checkpoint import open_run
from common.configurator import PathName
from common.evaluation import windows_at_once
from common.files import write_csv
from common.thresholds import of_threshold, save_thresholds
from compiled import compile_passes
from decode import stream, teacher_forced, use_one_thread
from exits import EXITS, Exit, make_exit
from loops import Plan, as_noise
from waves import can_wave

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
compile = False             # torch.compile what is timed: half a minute and more for each point
calibrate: float | None = None  # find thresholds instead: nats that one may cost (waves: fidelity)
seed = 0                    # of x^(0), the texts and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

# columns of bench.csv, of windows and of texts, and how tables show them
OF_WINDOWS = dict(ce='.4f', ppl='.3f', ce_minus_full='+.4f', diff_low='+.4f', diff_high='+.4f',
                  accuracy='.3f', mean_evals='.2f')
OF_TEXTS = dict(identical='.3f', passes='.2f', blocks='.2f', ms_per_token='.2f', ms_low='.2f',
                ms_high='.2f')


# the points ---------------------------------------------------------------------------------------

@dataclass(eq=False)
class Point:
    """One way to decode, and what has been measured of it so far."""
    run: str            # the folder of its model
    model: torch.nn.Module
    rule: str           # an exit rule, 'fixed' or 'oracle'
    tau: float
    kind: str           # the kind of decoding, in words
    name: str
    way: dict           # arguments of decode.stream: n_loop, exit, cache, ring, drafts or a wave
    # {what is measured: a value for each window or prompt}
    measured: dict = field(default_factory=lambda: defaultdict(list))


def make_point(model, rule, tau, cache='exact', past=False, **more):
    """
    A way to decode. past: see make_exit. more: stream's arguments for drafts or a wave, and `run`,
    the folder of the model.
    """
    run = more.pop('run', '')
    exit = None if rule in ('fixed', 'oracle') else make_exit(rule, tau, hits, keep, past)
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
    policies, full = as_list(cache), ('fixed', n_loop, 'exact')
    if not model.groups:        # nothing loops: a pass is all there is
        return [make_point(model, 'fixed', 1, run=run)]
    asked = [full, *(('fixed', n, policy) for policy in policies for n in (*budgets, n_loop)),
             *((rule, tau, *how) for rule, *how in rule_ways() for tau in taus),
             *(('oracle', epsilon, policy) for policy in policies for epsilon in epsilons)]
    points = [make_point(model, *one, run=run) for one in dict.fromkeys(asked)]
    points += [make_point(model, 'fixed', n, run=run, draft_loops=loops, draft_tokens=ahead)
               for loops, n, ahead in drafts]
    waved = [make_point(model, rule, tau, 'latest', run=run, wave=width, wave_steps=steps)
             for width, steps in waves for rule in rules for tau in taus]
    return points + [point for point in waved if can_wave(model, point.way['exit'])]


def rule_ways():
    """(rule, cache policy, past) of all rules, each once."""
    # `past` is a choice under `exact` alone; elsewhere rules wait in the prompt, and never after it
    ways = dict.fromkeys((policy, wait or policy != 'exact')
                         for policy in as_list(cache) for wait in as_list(past))
    return [(rule, *how) for how in ways for rule in dict.fromkeys(rules)]


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
    """Decode given idx (B, T) -> logits (B, T, V) and block maps (B, T, groups)."""
    way = point.way
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


def time_texts(points, prompt, number):
    """
    Continue prompt `number`, (1, n), at every point, the first of each run being its full budget.
    Adds to each what continue_prompt measures, and identical: is the text that of the full budget?
    """
    full = {}
    for point in points:
        text, costs = continue_prompt(point, prompt, new_tokens, number)
        same = torch.equal(text, full.setdefault(point.run, text))
        for name, value in (costs | dict(identical=same)).items():
            point.measured[name].append(value)


def time_reading(points, problem):
    """Read a problem (1, T) at every point that can. Adds ms_per_token to each."""
    for point in points:
        begin = time.perf_counter()
        decode_given(point, problem)[0].argmax(-1).tolist()     # the host waits for the answers
        point.measured['ms_per_token'].append(
            1e3 * (time.perf_counter() - begin) / problem.shape[1])


# calibration: thresholds that keep a promise ------------------------------------------------------

def largest_tau(make, measured):
    """
    Try the taus from the largest down; the first that is good enough on half 0 of the data is
    chosen, and its costs are measured on half 1. Returns a row of exits.json: what the threshold is
    for, tau (None if none is good enough), and costs. make(tau) -> a Point. measured(point, half)
    -> (is it good enough there, a dict of its costs).
    """
    way = make(0.0).way
    wave = [way['wave'], way['wave_steps']] if 'wave' in way else None
    row = of_threshold(way['exit'], way['cache'], way['ring'], way['n_loop'], wave)
    for tau in sorted(taus, reverse=True):
        if measured(make(tau), 0)[0]:
            return row | dict(tau=tau) | measured(make(tau), 1)[1]
    return row | dict(tau=None)


def find_thresholds(model, idx, targets, prompts):
    """
    A row for each of rule_ways and, given prompts (N, 1, n), for each wave, with norm_rel.

    The paper leaves tau to be tuned by hand. Here one half of the windows idx, targets (N, T)
    chooses it, by the upper end of the interval of its cost, and the other measures what it costs.
    Waves are judged by `fidelity`.
    """
    full = [make_point(model, 'fixed', n_loop) for _ in range(2)]
    for half in range(2):
        quality([full[half]], idx[half::2], targets[half::2])

    def cost(point, half):
        quality([point], idx[half::2], targets[half::2])
        mean, low, high = excess(point, full[half])
        return high <= calibrate, dict(cost=mean, cost_low=low, cost_high=high,
                                       evals=np.mean(point.measured['evals']))
    for rule, policy, wait in rule_ways():
        yield largest_tau(lambda tau: make_point(model, rule, tau, policy, wait), cost)

    # waves, by their texts
    use_one_thread(model)
    texts = [continue_prompt(full[0], prompt, new_tokens)[0] for prompt in prompts]

    def share(point, half):
        same = np.mean([torch.equal(continue_prompt(point, prompt, new_tokens)[0], text)
                        for prompt, text in zip(prompts[half::2], texts[half::2])])
        return same >= fidelity, dict(identical=same)
    for width, steps in waves if texts and can_wave(model) else []:
        yield largest_tau(lambda tau: make_point(model, 'norm_rel', tau, 'latest', wave=width,
                                                 wave_steps=steps), share)


# tables and figures -------------------------------------------------------------------------------

def make_row(point, points):
    """What is known of a point so far: its row of bench.csv, with None for the rest."""
    known, way = point.measured, point.way
    full = next(one for one in points if one.run == point.run)
    groups = [f"evals_{'-'.join(map(str, layers))}" for layers in point.model.config.groups]
    row = dict(run=point.run, name=point.name, kind=point.kind, rule=point.rule, tau=point.tau,
               past=bool(way['exit'] and way['exit'].past))
    row |= {name: way.get(name) for name in ('cache', 'draft_loops', 'draft_tokens', 'wave',
                                             'wave_steps')}
    row |= dict.fromkeys(['windows', *OF_WINDOWS, *groups, 'prompts', *OF_TEXTS])
    if 'ce' in known:
        above, low, high = excess(point, full)
        ce, evals = np.mean(known['ce']), np.mean(known['evals'], axis=0)           # (groups,)
        row |= dict(windows=len(known['ce']), ce=ce, ppl=np.exp(ce), ce_minus_full=above,
                    diff_low=low, diff_high=high, accuracy=np.mean(known['accuracy']),
                    mean_evals=evals.mean() if groups else None, **dict(zip(groups, evals)))
    if 'ms_per_token' in known:
        ms = np.array(known['ms_per_token'])
        low, high = interval(ms, np.median)
        row |= dict(prompts=len(ms), ms_per_token=np.median(ms), ms_low=low, ms_high=high)
    if 'identical' in known:
        row |= {name: np.mean(known[name]) for name in ('identical', 'passes', 'blocks')}
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


def grouped(rows, column):
    """{value: the rows that have it in this column}, all in their order."""
    values = dict.fromkeys(row[column] for row in rows)
    return {value: [row for row in rows if row[column] == value] for value in values}


def draw_lines(ax, rows, by, x, y, **how):
    """Column y against column x, for each value of the column `by` in its colour and marker."""
    for i, (label, mine) in enumerate(grouped(rows, by).items()):
        ax.plot([row[x] for row in mine], [row[y] for row in mine], marker='o^sDvX'[i % 6], ms=4,
                color=plots.colour_of(i), label=label, **how)


def figure_4(rows, path):
    """Fig. 4: costs and quality of each rule against tau."""
    columns = dict(ms_per_token='ms a token', ppl='perplexity', ce='cross-entropy (nats a token)')
    kinds = grouped(rows, 'kind')
    figure, grid = plots.panels(3, 4, 3, rows=len(kinds), sharex=True, sharey='col')
    for axes, (kind, mine) in zip(grid, kinds.items()):
        for ax, (column, label) in zip(axes, columns.items()):
            draw_lines(ax, mine, 'rule', 'tau', column, lw=1)
            ax.set(xscale='log', xlabel='tau', ylabel=label)
            ax.set_title(kind.removeprefix('rules, '), fontsize=9)
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    plots.save(figure, path)


def ledger(rows, path):
    """
    Quality against time: a colour for each run, a marker for each kind of decoding, and a star
    where nothing loops. Drafts and waves are drawn at the quality of the budget whose texts they
    write, those that write fewer than a share `fidelity` not at all. Losses more than a fifth above
    the least are beyond the edge.
    """
    is_task = all(row['identical'] is None for row in rows)
    y = 'accuracy' if is_task else 'ce'
    figure, [[ax]] = plots.panels(1, 8, 4.5)
    markers = {kind: '*' if kind == 'no loops' else 'o^sDvXP<>'[i % 9]
               for i, kind in enumerate(grouped(rows, 'kind'))}
    for i, (run, mine) in enumerate(grouped(rows, 'run').items()):
        # of a budget under several policies `exact` counts, which comes first
        of_budget = {row['tau']: row[y] for row in reversed(mine)
                     if row['rule'] == 'fixed' and row[y]}
        for kind, some in grouped(mine, 'kind').items():
            some = [row for row in some if row[y] is not None or row['identical'] >= fidelity]
            heights = [row[y] if row[y] is not None else
                       of_budget.get(row['tau'] if kind == 'drafts' else n_loop) for row in some]
            ax.plot([row['ms_per_token'] for row in some], heights, markers[kind], ls='',
                    ms=12 if kind == 'no loops' else 5, color=plots.colour_of(i), alpha=0.8)
        ax.plot([], [], 'o', color=plots.colour_of(i), label=os.path.basename(run))
    for kind, marker in markers.items():
        ax.plot([], [], marker, color='0.4', label=kind)
    ax.set(xlabel='ms a token', xscale='log',
           ylabel='share of right answers' if is_task else 'held-out loss (nats a token)')
    for axis in ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter:
        axis('{x:g}')
    if not is_task:
        ax.set_ylim(top=1.2 * min(row[y] for row in rows if row[y] is not None))
    ax.legend(frameon=False, fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    plots.save(figure, path)


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
        for model in dict.fromkeys(point.model for point in points) if compile else []:
            compile_passes(model, max([1, *(width for width, _ in waves),
                                       *(1 + ahead for _, _, ahead in drafts)]))
        # first calls, which may compile and are not timed
        for point in of_texts if len(prompts) and not is_task else []:
            continue_prompt(point, prompts[0], 3)
        for i, prompt in enumerate(prompts):
            print(f'{i + 1} of {len(prompts)}, in {len(of_texts)} ways', flush=True)
            if is_task:
                time_reading(of_texts, prompt)
            else:
                time_texts(of_texts, prompt, i)
            save(points, folder)
    finally:
        save(points, folder)


def report(points, folder):
    """The tables and figures of all points."""
    found = [make_row(point, points) for point in points]
    named = dict(run='', name='') if beside else dict(name='')
    print_rows('all points:', found, named | OF_WINDOWS | OF_TEXTS)
    if of_rules := [row for row in found if row['kind'].startswith('rules')]:
        figure_4(of_rules, os.path.join(folder, 'figure_4.png'))
    if timed := [row for row in found if row['prompts']]:
        ledger(timed, os.path.join(folder, 'ledger.png'))
    if good := [row for row in timed if row['identical'] is not None
                and row['identical'] >= fidelity]:
        good.sort(key=lambda row: row['ms_per_token'])
        print_rows(f"the fastest of each kind with {100 * fidelity:g}% of the full budget's texts:",
                   [mine[0] for of_run in grouped(good, 'run').values()
                    for mine in grouped(of_run, 'kind').values()], named | OF_TEXTS)
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
    print(f'{folder}/exits.json: python sample.py --exit=norm_rel uses it')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
