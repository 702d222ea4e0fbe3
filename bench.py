"""
How good and how fast is each way to decode: fixed loops, exit rules, drafts, waves?

    python bench.py                     the default run, in two minutes
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"          the paper's sweep
    python bench.py --calibrate=0.005   on text: thresholds that cost at most so many nats per token
    python bench.py --out_dir=pretrained/calc --calibrate   on problems: what each threshold costs

A way to decode is a *method*, and a row of bench.csv. Each is compared with the first one, the
*full budget*: n_loop fixed loops with the cache `exact`.

    quality     loss and accuracy on held-out windows, or on problems of a task. It is not measured
                for drafts and waves, which are built to write the text of a loop budget
    time        of a text: ms for each new token after a prompt, and whether the text is that of
                the full budget. On a task: ms for each token of a problem that is read

figure_4.png shows the rules by their thresholds, ledger.png all methods, quality against time.

Paper: sec. 4, App. D, Fig. 4.

    N, T    windows, tokens of a window
"""
import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import data
import decode
import tasks
from common.checkpoint import open_run
from common.configurator import configure
from common.distributed import pick_device
from common.errors import check, run
from common.evaluation import windows_at_once
from common.files import write_csv, write_json
from common.terminal import print_rows
from exits import Exit, make_exit, stored_exits
from loops import Plan, as_noise

# --------------------------------------------------------------------------------------------------
# a knob that takes a list of values takes one value, too, such as --drafts=[2,8,4]
out_dir: str | None = None  # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # held-out text or a task with other knobs; None = the run's own
length: int | None = None   # tokens of a window; None = block_size
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
rules: str | list = ['norm_rel', 'kl', 'accel']     # names in exits.EXITS, or MODULE:NAME
taus: float | list | None = None    # thresholds; None = 0.03 ... 30, and to calibrate 0.001 ... 30
budgets: int | list = [1, 2, 4, 8]  # fixed loop steps
drafts = [[2, 8, 4]]        # lists: loops of a draft, loops of its check, tokens of a draft
waves = [[8, 1]]            # lists: tokens of a wave, loop steps of a pass
n_loop: int | None = None   # the full budget; None = 30, or r if loop_draw is fixed; on a task with
                            # rules that wake 2 T + 100
cache: str | int | list = 'exact'   # of fixed loops and rules: exact, latest, a number of slots
wake: bool | list | None = None     # may a token that has exited wake? None = on a task
n_windows: int | None = None    # held-out windows for quality, None = 24; with --calibrate on a
                                # task new problems, None = 32
n_prompts = 8               # windows that are timed: texts to continue, or problems to read; 0 =
                            # none, and without times no drafts and waves
prompt_tokens: int | None = None    # length of a prompt; None = half a window
new_tokens = 24             # length of a text. The first token also reads the prompt: not timed
compile = False             # compile the passes after a prompt, see decode.compile_passes
calibrate: bool | float = False     # look at thresholds instead; on text True = 0.005 nats
seed = 0                    # of x^(0)
device = 'auto'
# --------------------------------------------------------------------------------------------------

TAUS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]

# the columns of bench.csv that are measured; those before them are Method.columns
MEASURED = (
    'deepest',          # the depth of a problem's deepest label, on average
    'ce',               # the loss, in nats per label
    'ce_minus_full',    # the same above that of the full budget
    'diff_low',         # and the ends of its 95% interval over windows
    'diff_high',
    'accuracy',         # the share of labels that are right, 0 to 1
    'mean_evals',       # loop steps (block maps) computed for a token
    'identical',        # the share of texts that are those of the full budget, 0 to 1
    'blocks',           # layers computed in the groups, for a new token
    'ms_per_token',     # the median over prompts
)
# columns of the table in the terminal, and how they are printed
SHOWN = dict(name='', ce_minus_full='+.4f', accuracy='.4f', mean_evals='.2f', identical='.3f',
             blocks='.2f', ms_per_token='.2f')


# methods ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Method:
    """A way to decode."""
    kind: str                       # 'no loops', 'fixed loops', 'exit rules', 'drafts' or 'waves'
    n_loop: int                     # the loop budget
    cache: str | int = 'exact'
    rule: Exit | None = None        # of exit rules and waves
    draft_loops: int | None = None
    draft_tokens: int | None = None
    wave: int | None = None         # its tokens
    wave_steps: int | None = None   # loop steps of a pass of the wave

    def columns(self):
        """The columns of bench.csv that say what it is."""
        rule = self.rule
        return dict(name=self.name(), kind=self.kind, cache=self.cache, n_loop=self.n_loop,
                    rule=rule.name if rule else None, tau=rule.tau if rule else None,
                    wake=rule.wake if rule else None,
                    draft_loops=self.draft_loops, draft_tokens=self.draft_tokens,
                    wave=self.wave, wave_steps=self.wave_steps)

    def name(self):
        """What it is, in words."""
        if self.kind == 'drafts':
            return (f'{self.draft_tokens} drafted by {self.draft_loops} loops, checked by '
                    f'{self.n_loop}')
        if self.kind == 'waves':
            return f'wave of {self.wave} x {self.wave_steps}, {self.rule.name} {self.rule.tau:g}'
        if self.kind == 'exit rules':
            awake = ', wake' if self.rule.wake else ''
            return f'{self.rule.name} {self.rule.tau:g}, {self.cache}{awake}'
        return f'loops {self.n_loop}, {self.cache}'

    def plan(self, model):
        return Plan(model.loop_counts(self.n_loop), self.rule, as_noise(seed))

    def decoder(self):
        if self.kind == 'drafts':
            return decode.Drafts(self.draft_loops, self.draft_tokens)
        if self.kind == 'waves':
            return decode.Wave(self.wave, self.wave_steps)
        return decode.one_by_one


def methods_of(model, task=None):
    """What the knobs ask for, the full budget first. task: a tasks.Task; None = a text."""
    is_task = task is not None
    if not model.groups:
        return [Method('no loops', 1)]
    wakes = values_of('wake') or [is_task]
    budget = n_loop
    if budget is None and is_task and True in wakes:
        budget = task.budget(model.config.block_size)
    if budget is None:
        budget = model.loop_counts(has_rule=True)[0]
    thresholds = values_of('taus') or (TAUS if calibrate is not False else TAUS[3:])

    methods = [Method('fixed loops', budget)]
    for policy in values_of('cache'):
        methods += [Method('fixed loops', n, policy) for n in (*values_of('budgets'), budget)]
        can_wake = is_task and policy == 'exact'
        check(can_wake or wake is None or False in wakes, 'tokens wake only in problems that are '
              'read in one pass, with --cache=exact: leave out --wake')
        for may_wake in wakes:
            methods += [Method('exit rules', budget, policy,
                               make_exit(name, tau, wake=may_wake and can_wake))
                        for name in values_of('rules') for tau in thresholds]
    if n_prompts and not is_task:       # these two write texts
        methods += [Method('drafts', n, draft_loops=loops, draft_tokens=tokens)
                    for loops, n, tokens in values_of('drafts')]
        methods += [Method('waves', budget, 'latest', make_exit(name, tau), wave=wave,
                           wave_steps=steps)
                    for wave, steps in values_of('waves') for name in values_of('rules')
                    for tau in thresholds]
    for method in methods:
        method.plan(model)              # ValueError for a budget that no model takes
    return list(dict.fromkeys(methods))         # each once


def values_of(knob):
    """A knob that is one value, a list of values or None -> a list. ValueError for None in it."""
    value = globals()[knob]
    if value is None:
        return []
    is_list = isinstance(value, list)
    if knob in ('drafts', 'waves') and value:       # here one value is a list, too
        is_list = isinstance(value[0], list)
    values = value if is_list else [value]
    for part in values:
        check(part is not None and not (isinstance(part, list) and None in part),
              f'{knob} holds None: leave it out')
    return values


# quality ------------------------------------------------------------------------------------------

def predict(model, method, idx, targets):
    """
    Windows (N, T) -> for each token its loss in nats, and whether the model is right, both (N, T)
    and 0 without a label; and the loop steps computed for it (N, T, groups).
    """
    parts = []
    at_once = windows_at_once(model.config)
    for x, y in zip(idx.split(at_once), targets.split(at_once)):
        torch.manual_seed(seed)         # for a rule that tosses coins
        logits, _, evals = decode.read(model, x, method.plan(model), method.cache)
        nats = cross_entropy(logits.mT.float(), y, reduction='none')                # (B, T)
        right = logits.argmax(-1) == y
        # double on the CPU: MPS has no float64
        parts.append((nats.cpu().double(), right.cpu(), evals.cpu().double()))
    return [torch.cat(part) for part in zip(*parts)]


def quality(model, method, idx, targets):
    """Nats, right answers, labels, and loop steps per token of each window, (4, N)."""
    nats, right, evals = predict(model, method, idx, targets)
    labels = (targets >= 0).sum(1).cpu()
    steps = evals.mean((1, 2)).nan_to_num()         # a model without groups has none
    return torch.stack((nats.sum(1), right.sum(1), labels, steps)).numpy()


def quality_columns(windows, full):
    """Columns of bench.csv, from what `quality` returns for a method and for the full budget."""
    nats, right, labels, steps = windows
    cost, low, high = excess(windows, full)
    return dict(ce=nats.sum() / labels.sum(), ce_minus_full=cost, diff_low=low, diff_high=high,
                accuracy=right.sum() / labels.sum(), mean_evals=steps.mean())


def excess(windows, full):
    """Nats per label above the full budget, and the ends of its 95% interval over windows."""
    nats, _, labels, _ = windows
    difference = nats - full[0]
    cost = difference.sum() / labels.sum()
    reach = math.nan                    # one window has no interval
    if len(labels) > 1:                 # 1.96 standard errors of a ratio of sums
        spread = (difference - cost * labels).std(ddof=1)
        reach = 1.96 * spread / math.sqrt(len(labels)) / labels.mean()
    return cost, cost - reach, cost + reach


# time ---------------------------------------------------------------------------------------------

def now():
    """Seconds, once the GPU, if there is one, has done all that it was asked for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def time_to_write(model, method, prompt, n_new):
    """
    Continue a prompt (1, n) by n_new tokens -> ms per token, layers computed in the groups for a
    token, and the text (1, n_new).
    """
    torch.manual_seed(seed)
    passes = []                         # of each pass the loop steps computed, (1, T, groups)
    plan = replace(method.plan(model), passes=passes)
    stream = decode.stream(model, prompt, n_new, plan, method.decoder(), method.cache,
                           temperature=0)
    tokens = [next(stream)[0]]          # this also reads the prompt
    passes.clear()
    begin = now()
    tokens += [token for token, _ in stream]
    ms = 1e3 * (now() - begin) / (n_new - 1)
    layers = torch.tensor([len(group) for group in model.config.groups])
    blocks = sum((evals.cpu() * layers).sum().item() for evals in passes) / (n_new - 1)
    return ms, blocks, torch.cat(tokens, dim=1)


def time_to_read(model, method, problem):
    """Read a problem (1, T) -> ms per token."""
    torch.manual_seed(seed)
    begin = now()
    decode.read(model, problem, method.plan(model), method.cache)
    return 1e3 * (now() - begin) / problem.shape[1]


# the measurements ---------------------------------------------------------------------------------

def measure(model, methods, idx, targets, prompts, deepest, path):
    """
    Rows of bench.csv. The file at `path` has what is known after each method and each prompt.

    idx, targets (N, T): windows. prompts (n, 1, any): their beginnings. deepest: the depth of a
    problem's deepest label, on average; None on a text.
    """
    is_task = deepest is not None
    if len(prompts) and not is_task:    # what cannot be done fails in the first seconds
        for method in methods:
            time_to_write(model, method, prompts[0], n_new=2)

    rows = [method.columns() | dict.fromkeys(MEASURED) for method in methods]
    full = None
    for method, row in zip(methods, rows):
        row['deepest'] = deepest
        if method.kind in ('drafts', 'waves'):
            continue
        windows = quality(model, method, idx, targets)
        full = windows if full is None else full
        row |= quality_columns(windows, full)
        write_csv(rows, path)
        print(f"{row['name']}: {row['ce_minus_full']:+.4f} nats, {100 * row['accuracy']:.2f}% "
              f"right, {row['mean_evals']:.2f} loop steps", flush=True)

    decode.use_one_thread(model)        # for the times; quality may use all cores
    if compile and len(prompts):
        compile_all(model, methods, prompts, is_task)
    timings = [[] for _ in methods]     # of each method what each prompt has given
    for p, prompt in enumerate(prompts):        # all methods in turn, on a machine that may be busy
        print(f'time: prompt {p + 1} of {len(prompts)}', flush=True)
        for method, row, timed in zip(methods, rows, timings):
            if is_task:
                timed.append(time_to_read(model, method, prompt))
                row['ms_per_token'] = np.median(timed)
                continue
            timed.append(time_to_write(model, method, prompt, new_tokens))
            ms, blocks, texts = zip(*timed)
            of_full = [text for _, _, text in timings[0]]
            row['ms_per_token'] = np.median(ms)
            row['blocks'] = np.mean(blocks)
            row['identical'] = np.mean(list(map(torch.equal, texts, of_full)))
        write_csv(rows, path)
    return rows


def compile_all(model, methods, prompts, is_task):
    """Compile the passes of all methods. Their first calls do the work, so they are made here."""
    widths = {1}                        # tokens of a pass
    for method in methods:
        if method.kind == 'drafts':
            widths.add(1 + method.draft_tokens)     # the drafts, and the token before them
        if method.kind == 'waves':
            widths.add(method.wave)
    decode.compile_passes(model, widths)
    for method in methods:
        if is_task:
            time_to_read(model, method, prompts[0])
        else:
            time_to_write(model, method, prompts[0], new_tokens)


# thresholds ---------------------------------------------------------------------------------------

def families_of(methods):
    """The exit rules: {(name, cache, wake): methods, from the smallest threshold on}."""
    families = {}
    for method in methods:
        if method.kind == 'exit rules':
            key = method.rule.name, method.cache, method.rule.wake
            families.setdefault(key, []).append(method)
    check(families, 'there is no threshold to find: no exit rule is given, or nothing loops')
    return {key: sorted(family, key=lambda method: method.rule.tau)
            for key, family in families.items()}


def thresholds_of_text(model, methods, idx, targets, most, results):
    """
    Store the largest threshold of each rule and cache that costs at most `most` nats per token in
    results/exits.json, in place of an earlier row. It is chosen by the upper end of the interval on
    every second window. The other windows, which had no part in the choice, say what it costs.
    """
    stored = {(row['rule'], row['cache']): row for row in stored_exits(results)}
    full = quality(model, methods[0], idx, targets)
    for (name, policy, wakes), family in families_of(methods).items():
        stored.pop((name, policy), None)
        words = f'no threshold costs at most {most:g} nats'
        for method in reversed(family):
            windows = quality(model, method, idx, targets)
            _, _, high = excess(windows[:, ::2], full[:, ::2])
            if high <= most:
                cost, _, _ = excess(windows[:, 1::2], full[:, 1::2])
                tau = method.rule.tau
                steps = windows[3, 1::2].mean()
                words = f'tau {tau:g} costs {cost:+.4f} nats, {steps:.2f} loop steps'
                how = (f'bench.py --calibrate={most:g} on {len(idx)} windows of {idx.shape[1]} '
                       f'tokens, at most {method.n_loop} loops')
                stored[name, policy] = dict(rule=name, cache=policy, tau=tau, cost=cost,
                                            wake=wakes, how=how)
                break
        print(f'{name}, {policy}: {words}', flush=True)
        write_json(dict(exits=list(stored.values())), f'{results}/exits.json')
    print(f'{results}/exits.json has the thresholds: python sample.py --exit ...')


def thresholds_of_problems(model, methods, idx, targets):
    """
    Print what each threshold costs on problems (N, T). A problem is lost if an answer is wrong that
    the smallest threshold has right. Nothing is stored, since no choice is safe on all problems: in
    mazes smaller thresholds do worse.
    """
    for (name, policy, wakes), family in families_of(methods).items():
        rows = []
        of_smallest = None
        for method in family:
            _, right, evals = predict(model, method, idx, targets)
            if of_smallest is None:
                of_smallest = right                                                 # (N, T)
            lost = (of_smallest & ~right).any(dim=1).sum()
            wrong = (targets >= 0).sum() - right.sum()
            rows.append(dict(tau=method.rule.tau, lost=lost, wrong=wrong, steps=evals.mean()))
        print_rows(f'{name}, {policy}{", wake" if wakes else ""}: problems lost of {len(idx)}, '
                   'wrong answers, loop steps of a token', rows[::-1],
                   dict(tau='g', lost='d', wrong='d', steps='.2f'))
    print('\ngive --tau to sample.py, or write a row of exits.json by hand')


# figures ------------------------------------------------------------------------------------------

def figure_4(rows, path):
    """Fig. 4: time, perplexity and loss of each rule against tau; a line of panels for a cache."""
    from common import plots  # here, since matplotlib takes a second to import
    labels = dict(ms_per_token='ms per token', ppl='perplexity', ce='loss (nats per token)')
    rules = list(dict.fromkeys(row['rule'] for row in rows))
    kinds = list(dict.fromkeys((row['cache'], row['wake']) for row in rows))
    figure, grid = plots.panels(3, 4, 3, rows=len(kinds), sharex=True, sharey='col')
    for axes, (policy, wakes) in zip(grid, kinds):
        for i, rule in enumerate(rules):
            line = [row | dict(ppl=math.exp(row['ce'])) for row in rows
                    if (row['rule'], row['cache'], row['wake']) == (rule, policy, wakes)]
            for ax, column in zip(axes, labels):
                ax.plot([row['tau'] for row in line], [row[column] for row in line], 'o-', ms=4,
                        color=plots.colour_of(i), label=rule)
        for ax, label in zip(axes, labels.values()):
            ax.set(xscale='log', xlabel='tau', ylabel=label,
                   title=f'{policy}, wake' if wakes else policy)
    grid[0][0].legend(fontsize=8)
    figure.tight_layout()
    plots.save(figure, path)


def ledger(rows, is_task, path):
    """Quality against time, a colour for each kind of decoding."""
    from common import plots
    column = 'accuracy' if is_task else 'ce'
    # Drafts write the text of the loops that check them. A wave is drawn only if it wrote the text
    # of the full budget.
    of_loops = {row['n_loop']: row[column] for row in rows
                if row['kind'] == 'fixed loops' and row['cache'] == 'exact'}
    dots = {}               # label: [(time, quality), ...]
    for row in rows:
        height = row[column]
        if row['kind'] == 'drafts' or row['kind'] == 'waves' and row['identical'] == 1:
            height = of_loops.get(row['n_loop'])
        label = row['kind']
        if label in ('fixed loops', 'exit rules'):
            label += f", {row['cache']}" + (', wake' if row['wake'] else '')
        if height is not None:
            dots.setdefault(label, []).append((row['ms_per_token'], height))
    figure, [[ax]] = plots.panels(1, 8, 4.5)
    for i, (label, line) in enumerate(dots.items()):
        ax.plot(*zip(*line), 'o', color=plots.colour_of(i), alpha=0.8, label=label)
    ax.set(xscale='log', xlabel='ms per token',
           ylabel='share of right answers' if is_task else 'held-out loss (nats per token)')
    if not is_task:         # one loop may be far above the others
        least = min(row['ce'] for row in rows if row['ce'] is not None)
        ax.set_ylim(top=min(ax.get_ylim()[1], 1.2 * least))
    ax.legend()
    plots.save(figure, path)


# the run ------------------------------------------------------------------------------------------

def main():
    dev, _ = pick_device(device, 'float32')
    check(new_tokens > 1, 'new_tokens must be at least 2, since the first one is not timed')
    model, checkpoint, folder, results = open_run(out_dir, dev, length=length, damping=damping)
    is_task = tasks.is_task(dataset or checkpoint['config']['dataset'])
    T = model.config.block_size
    task = tasks.problems_of(checkpoint, dataset).task if is_task else None
    methods = methods_of(model, task)
    print(f"{folder}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {model.config.groups}, "
          f'{dev}: {len(methods)} methods')

    if calibrate is not False and is_task:
        check(calibrate is True, 'on problems no loss says which threshold is safe: give '
              '--calibrate without a value, and read the table')
        # other problems than those of training and evaluation
        rng = np.random.default_rng([*b'thresholds'])
        x, y, _ = tasks.problems_of(checkpoint, dataset).make(rng, n_windows or 32, T)
        thresholds_of_problems(model, methods, torch.from_numpy(x).to(dev),
                               torch.from_numpy(y).to(dev))
        return
    _, idx, targets, depth = data.held_out_windows(checkpoint, n_windows or 24, dataset, dev)
    if calibrate is not False:
        check(damping is None, 'exits.json is for the damping of the run: leave out --damping')
        check(len(idx) >= 4, 'half of the windows choose a threshold and half say what it costs: '
              'give at least 4 --n_windows')
        most = 0.005 if calibrate is True else calibrate
        thresholds_of_text(model, methods, idx, targets, most, results)
        return

    prompts = idx[:n_prompts, None, :T if is_task else prompt_tokens or T // 2]     # (n, 1, any)
    deepest = depth.max(axis=1).mean() if is_task else None
    rows = measure(model, methods, idx, targets, prompts, deepest, f'{results}/bench.csv')
    title = f'{results}/bench.csv:'
    if len(prompts):
        title = f'{results}/bench.csv, the fastest method first:'
        of_rules = [row for row in rows if row['kind'] == 'exit rules']
        if of_rules:
            figure_4(of_rules, f'{results}/figure_4.png')
        ledger(rows, is_task, f'{results}/ledger.png')
        rows.sort(key=lambda row: row['ms_per_token'])
    print_rows(title, rows, SHOWN)


if __name__ == '__main__':
    configure(globals())
    run(main)
