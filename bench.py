"""
How good and how fast is each way to decode: fixed loops, exit rules, drafts, waves?

    python bench.py                     the default run, in two minutes
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"          the paper's sweep
    python bench.py --calibrate         what each threshold costs, on text or on problems
    python bench.py --calibrate --store     the same, and exits.json gets the largest threshold of
                                        each rule that costs at most 0.005 nats per token; sample.py
                                        reads it. On problems you choose: --rules=accel --store=1

A way to decode is a *method*, and a row of bench.csv. Each is compared with the first one, the
*full budget*: n_loop fixed loops with the cache `exact`. n_loop is 30, or mean_recurrence if
loop_draw is fixed, and on a task Task.budget, less if no token may wake. Drafts are checked with
it, or with `check` loops, sample.py's --n_loop. A decoder that needs a rule, such as a wave, is
tried with its own and each of `rules`; the others run fixed loops.

    quality     loss and accuracy on held-out windows, or on problems of a task; not of decoders
    time        of a text, one at a time, written greedily: ms for each new token after a prompt,
                also for windows that are read again. On a task: ms for each token of a problem.
                Small models use one CPU thread, unless OMP_NUM_THREADS is set. See figure_4.png

Paper: sec. 4, App. D, Fig. 4.
"""
import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import data
import decode
from common.checkpoint import open_run, stored_exits
from common.configurator import Count, Natural, build, configure
from common.device import pick_device, use_one_thread
from common.errors import check, run
from common.evaluation import spread, windows_at_once
from common.files import sha256_of, write_csv, write_json
from common.terminal import print_rows
from exits import Exit, choose, make_exit
from loops import Plan, as_noise

# --------------------------------------------------------------------------------------------------
# a knob that takes a list of values takes one value, too, such as --rules=accel
out_dir: str | None = None  # None = out, or pretrained/text if you have trained no model
dataset: str | None = None  # held-out text or a task with other knobs; None = the run's own
length: int | None = None   # tokens of a window; None = block_size
rules: str | list = ['norm_rel', 'kl', 'accel']     # norm is tried at taus, and norm:1 at 1 alone
taus: float | list | None = None    # thresholds; None = 0.03 ... 30, with calibrate 0.001 ... 30
budgets: int | list = [1, 2, 4, 8]  # fixed loop steps
decoder: str | list = ['drafts:loops=2,check=8', 'wave:width=8']    # of a text; check: see above
n_loop: int | None = None   # the full budget; None = that of the model or the task
cache: str | int | list = 'exact'   # of fixed loops and rules: exact, latest, a number of slots
wake: bool | list | None = None     # may a token that has exited wake? None = on a task
n_windows: Count = 24       # held-out windows for quality; with --calibrate on a task new problems
n_prompts: Natural = 8      # how many of them are timed, at most; 0 = no decoders, no figure
prompt_tokens: Count | None = None  # of a text: a window at most; None = half of one
new_tokens = 24             # length of a text. The first token also reads the prompt: not timed
compile = False             # compile passes that write a text and have no rule, see compiled.py
calibrate = False           # print what thresholds cost, and measure nothing else
most_nats = 0.005           # what a threshold that is stored may cost on text, per token
store: float | bool = False     # with calibrate: write exits.json; on a task --store=1 stores 1
seed = 0                    # of x^(0), and of rules that toss coins
device = 'auto'
# --------------------------------------------------------------------------------------------------

TAUS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]

# the columns of bench.csv that are measured; those before them are Method.columns
MEASURED = (
    'deepest',          # the depth of a problem's deepest label, on average
    # of n_windows windows, read
    'ce',               # the loss, in nats per label
    'ce_minus_full',    # the same above that of the full budget
    'diff_low',         # and the ends of its 95% interval over windows
    'diff_high',
    'accuracy',         # the share of labels that are right, 0 to 1
    'solved',           # of problems: the share in which all are
    'rested',           # of rules: in which all tokens came to rest before the budget ended
    'both',             # solved, and rested
    'mean_evals',       # loop steps computed for a token, the mean over groups
    # of n_prompts texts, written, or of problems, read
    'identical',        # the share of texts that are those of the full budget, 0 to 1
    'blocks',           # layers computed in the groups, and in windows read again, per new token
    'ms_per_token',     # the median over prompts
)
SHOWN = dict(name='', ce_minus_full='+.4f', accuracy='.4f', solved='.3f', mean_evals='.2f',
             identical='.3f', blocks='.2f', ms_per_token='.2f')
COSTS = dict(tau='g', solved='d', at_most='+.4f', cost='.4g', steps='.2f')


# methods ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Method:
    """A way to decode."""
    n_loop: int                     # the loop budget; 0 = a model without groups
    cache: str | int = 'exact'
    rule: Exit | None = None        # None = fixed loops
    decoder: str = 'one_by_one'     # its name and arguments. The others can only write texts

    def columns(self):
        """
        The columns of bench.csv that say what it is. kind: 'fixed loops', 'exit rules', or the name
        of the decoder. n_loop: the loop steps of fixed loops, or the budget.
        """
        rule = self.rule
        kind = 'exit rules' if rule else 'fixed loops'
        words = f'{rule.name} {rule.tau:g}' if rule else f'loops {self.n_loop}'
        if self.decoder == 'one_by_one':
            words += f', {self.cache}' + (', wake' if rule and rule.wake else '')
            words += ', not compiled' if rule and compile else ''
        else:
            kind = self.decoder.partition(':')[0]
            words = f'{self.decoder}, {words}'
        return dict(name=words, kind=kind, cache=self.cache, n_loop=self.n_loop,
                    rule=rule.name if rule else None, tau=rule.tau if rule else None,
                    wake=rule.wake if rule else None, decoder=self.decoder)

    def plan(self, model):
        return Plan(model.loop_counts(self.n_loop), self.rule, as_noise(seed))


@dataclass
class DraftsWithBudget(decode.Drafts):
    check: int | None = None            # the loop budget; None = n_loop


def decoder_of(call):
    return build(call, decode.DECODERS | dict(drafts=DraftsWithBudget), 'decoder')


def methods_of(model, task=None):
    """What the knobs ask for, the full budget first. task: a tasks.Task; None = a text."""
    if not model.groups:
        return [Method(0)]
    budget = n_loop
    if budget is None and task:
        any_wakes = 'exact' in values_of(cache) and (wake is None or True in values_of(wake))
        budget = task.budget(model.config.block_size, any_wakes)
    budget = model.loop_counts(budget, has_rule=True)[0]

    methods = [Method(budget)]
    for policy in values_of(cache):
        if not calibrate:
            methods += [Method(n, policy) for n in (*values_of(budgets), budget)]
        can_wake = task is not None and policy == 'exact'
        for wakes in values_of(wake) or [can_wake]:
            check(can_wake or not wakes, 'tokens wake only in problems that are read in one pass, '
                  'with --cache=exact: leave out --wake')
            methods += [Method(budget, policy, rule) for rule in rules_of(wakes)]
    if n_prompts and not (task or calibrate):       # decoders write texts
        for call in values_of(decoder):
            writer = decoder_of(call)
            checks = isinstance(writer, DraftsWithBudget) and writer.check is not None
            most = writer.check if checks else budget
            own_rule, policy, _ = choose(decoder=writer)
            others = rules_of(False) if own_rule else []
            methods += [Method(most, policy, rule, call) for rule in (own_rule, *others)]
    return list(dict.fromkeys(methods))         # each once


def rules_of(wakes):
    """An Exit for each rule that the knobs ask for, and each of its thresholds."""
    defaults = TAUS if calibrate else TAUS[3:]
    thresholds = defaults if taus is None else values_of(taus)
    return [make_exit(name, tau, wakes)
            for name, own_tau in map(name_and_tau, values_of(rules))
            for tau in (thresholds if own_tau is None else [own_tau])]


def name_and_tau(rule):
    """'norm:1' -> 'norm', 1.0; 'norm' -> 'norm', None, and 'zoo.huginn:kl' the same way."""
    name, _, tau = rule.rpartition(':')
    try:
        return name or rule, float(tau)
    except ValueError:
        return rule, None


def values_of(knob):
    """A knob that is one value, a list of values or None -> a list."""
    if knob is None:
        return []
    return knob if isinstance(knob, list) else [knob]


# quality ------------------------------------------------------------------------------------------

def quality(model, method, idx, targets):
    """
    Read windows idx (N, T) with labels targets (N, T), see tasks.NOT_ASKED -> nats, right answers,
    labels, loop steps per token, and whether all tokens came to rest, of each window, (5, N).
    """
    parts = []
    plan = method.plan(model)
    at_once = windows_at_once(model.config)
    for x, y in zip(idx.split(at_once), targets.split(at_once)):
        torch.manual_seed(seed)         # for a rule that tosses coins
        logits, kept, evals = decode.read(model, x, plan, method.cache)
        nats = cross_entropy(logits.mT.float(), y, reduction='none')                # (B, T)
        of_tokens = nats, logits.argmax(-1) == y, y >= 0
        # double on the CPU: MPS has no float64
        sums = [part.cpu().double().sum(1) for part in of_tokens]
        steps = evals.cpu().double().mean((1, 2)).nan_to_num()      # a plain model has none
        rested = torch.zeros(len(x))
        if plan.rule:               # a rule that throws its last step away keeps one less
            last = max(plan.counts) if plan.rule.keep else max(plan.counts) - 1
            rested = kept.cpu().amax((1, 2)) < last
        parts.append(torch.stack((*sums, steps, rested)))
    return torch.cat(parts, dim=1).numpy()


def excess(windows, full):
    """
    Nats per label above the full budget, and the ends of the 95% interval over windows, from what
    `quality` returns for a method and for the full budget.
    """
    nats, _, labels, *_ = windows
    difference = nats - full[0]
    cost = difference.sum() / labels.sum()
    reach = math.nan                    # one window has no interval
    if len(labels) > 1:                 # 1.96 standard errors of a ratio of sums
        deviation = (difference - cost * labels).std(ddof=1)
        reach = 1.96 * deviation / math.sqrt(len(labels)) / labels.mean()
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
    decoder = decoder_of(method.decoder)
    stream = decode.stream(model, prompt, n_new, plan, decoder, method.cache, temperature=0)
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

def measure(model, methods, idx, targets, prompts, path, is_task, deepest=None):
    """
    Rows of bench.csv. The file at `path` has what is known after each method and each prompt.

    idx, targets (N, T): windows. prompts (n, 1, any): their beginnings. deepest: the depth of a
    problem's deepest label, on average.
    """
    if len(prompts) and not is_task:    # what cannot be done fails in the first seconds
        for method in methods:
            time_to_write(model, method, prompts[0], n_new=2)

    rows = [method.columns() | dict.fromkeys(MEASURED) for method in methods]
    full = None
    for method, row in zip(methods, rows):
        row['deepest'] = deepest
        if method.decoder != 'one_by_one':
            continue
        windows = quality(model, method, idx, targets)
        full = windows if full is None else full
        cost, low, high = excess(windows, full)
        nats, right, labels, steps, rested = windows
        solved = right == labels
        row |= dict(ce=nats.sum() / labels.sum(), ce_minus_full=cost, diff_low=low, diff_high=high,
                    accuracy=right.sum() / labels.sum(), mean_evals=steps.mean())
        if is_task:
            row['solved'] = solved.mean()
            if method.rule:
                row |= dict(rested=rested.mean(), both=(solved * rested).mean())
        write_csv(rows, path)
        print(f"{row['name']}: {cost:+.4f} nats above the first one, {100 * row['accuracy']:.2f}% "
              f"right, {row['mean_evals']:.2f} loop steps", flush=True)

    use_one_thread(model)               # for the times; quality may use all cores
    if compile:
        from compiled import compile_passes
        print('compiling: on a CPU up to a minute for each kind of pass', flush=True)
        widths = [decoder_of(method.decoder).widths(method.plan(model)) for method in methods]
        compile_passes(model, set().union(*widths))
        for method in methods:          # the first calls compile
            for n_new in 2, new_tokens:         # 2: the pass of one token with which drafts end
                time_to_write(model, method, prompts[0], n_new)
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


def figure_4(rows, path):
    """Fig. 4: time, perplexity, loss of each rule against tau; a row for each cache and wake."""
    from common import plots  # here, since matplotlib takes a second to import
    labels = dict(ms_per_token='ms per token', ppl='perplexity', ce='loss (nats per label)')
    rules = list(dict.fromkeys(row['rule'] for row in rows))
    kinds = list(dict.fromkeys((row['cache'], row['wake']) for row in rows))
    figure, grid = plots.panels(3, 4, 3, rows=len(kinds), sharex=True, sharey='col')
    for axes, (policy, wakes) in zip(grid, kinds):
        for i, rule in enumerate(rules):
            by_tau = sorted(rows, key=lambda row: row['tau'])
            line = [row | dict(ppl=math.exp(row['ce'])) for row in by_tau
                    if (row['rule'], row['cache'], row['wake']) == (rule, policy, wakes)]
            for ax, (column, label) in zip(axes, labels.items()):
                ax.plot([row['tau'] for row in line], [row[column] for row in line], 'o-', ms=4,
                        color=plots.colour_of(i), label=rule)
                ax.set(xscale='log', xlabel='tau', ylabel=label,
                       title=f'{policy}, wake' if wakes else policy)
    grid[0][0].legend(fontsize=8)
    figure.tight_layout()
    plots.save(figure, path)


# thresholds ---------------------------------------------------------------------------------------

def thresholds_of(model, methods, idx, targets, is_task):
    """
    Print what each threshold costs on windows (N, T) -> {(rule, cache): a row of exits.json with
    the threshold to store, or None}.

    On text that is the largest which costs at most most_nats, by the upper end of the interval on
    every second window. The others, which have no part in the choice, say what it costs.

    On problems it is the threshold `store`, and the cost is the number of wrong answers. No choice
    would be safe on all problems: in mazes smaller thresholds do worse.
    """
    families = {}
    for method in methods:
        if method.rule:
            key = method.rule.name, method.cache, method.rule.wake
            families.setdefault(key, []).append(method)

    N, T = idx.shape
    full = None if is_task else quality(model, methods[0], idx, targets)
    rows = {}
    for (name, policy, wakes), family in families.items():
        lines = []
        for method in sorted(family, key=lambda method: -method.rule.tau):
            windows = quality(model, method, idx, targets)
            _, right, labels, steps, _ = windows
            line = dict(tau=method.rule.tau, steps=steps.mean())
            if is_task:
                line |= dict(solved=sum(right == labels), cost=sum(labels - right))
            else:
                _, _, line['at_most'] = excess(windows[:, ::2], full[:, ::2])
                line['cost'], _, _ = excess(windows[:, 1::2], full[:, 1::2])
            lines.append(line)

        if is_task:
            title = f'solved problems of {N}, wrong answers (cost)'
            good = [line for line in lines if store is not False and line['tau'] == store]
            how = f'--store={store:g} on {N} problems'
        else:
            title = f'nats per token at most, on {(N + 1) // 2} windows; cost on {N // 2} others'
            good = [line for line in lines if line['at_most'] <= most_nats]
            how = f'--most_nats={most_nats:g}, chosen on {(N + 1) // 2} windows, cost on {N // 2},'
        words = f'{name}, {policy}' + (', wake' if wakes else '')
        print_rows(f'{words}: {title}; loop steps of a token', lines, COSTS)
        if good:
            largest = good[0]
            how = f'bench.py --calibrate {how} of {T} tokens, at most {family[0].n_loop} loops'
            print(f"tau = {largest['tau']:g}: {how}")
            rows[name, policy] = dict(rule=name, cache=policy, tau=largest['tau'],
                                      cost=largest['cost'], wake=wakes, how=how)
        elif not is_task:
            rows[name, policy] = None
            print(f'no threshold costs at most {most_nats:g} nats; --store removes the run\'s own')
    return rows


def store_rows(rows, folder, weights):
    """
    Put rows {(rule, cache): row, or None} into folder/exits.json, in the place of earlier ones for
    the weights in this file. None removes an earlier one.
    """
    stored = {(row['rule'], row['cache']): row for row in stored_exits(folder, weights)} | rows
    write_json(dict(weights=sha256_of(weights), exits=[row for row in stored.values() if row]),
               f'{folder}/exits.json')


# the run ------------------------------------------------------------------------------------------

def main():
    dev, _ = pick_device(device, 'float32')
    check(new_tokens > 1, 'new_tokens must be at least 2, since the first one is not timed')
    check(calibrate or store is False, 'store is for --calibrate')
    check(not store or len(values_of(wake)) < 2, 'store is for one value of --wake')
    model, checkpoint, _, results = open_run(out_dir, dev, length=length)
    examples = data.examples_of(checkpoint, dataset)
    is_task = examples.is_task
    check(not (compile and (is_task or calibrate or not n_prompts)), 'only texts that are timed '
          'are compiled: leave out --compile')
    check(not (is_task and decoder and 'decoder' in settings.given), 'decoders write texts: leave '
          'out --decoder')
    check(is_task or not calibrate or n_windows > 2, 'an interval needs n_windows of 3 or more')
    T = model.config.block_size
    methods = methods_of(model, examples.task if is_task else None)
    check(not calibrate or any(method.rule for method in methods), 'there is no rule to calibrate')
    if store is not False and is_task:
        is_tried = any(method.rule and method.rule.tau == store for method in methods)
        check(len(values_of(rules)) == 1 and store is not True and is_tried, 'on problems name one '
              'rule and a threshold that is tried, such as --rules=accel --store=1')
    check(is_task or isinstance(store, bool), 'on text --most_nats chooses the threshold that '
          '--store writes: leave out its value')
    print(f"{checkpoint['path']} of iteration {checkpoint['iter_num']}, groups "
          f'{model.config.groups}, {dev}: {len(methods)} methods')

    if calibrate and is_task:       # other problems than those of training and evaluation
        x, y, _ = examples.make(np.random.default_rng([*b'thresholds']), n_windows, T)
        idx, targets = torch.from_numpy(x), torch.from_numpy(y)
    else:
        numbers = spread(examples, n_windows, T)
        idx, targets = examples.held_out(numbers, T)
    idx, targets = idx.to(dev), targets.to(dev)
    if calibrate:
        rows = thresholds_of(model, methods, idx, targets, is_task)
        if store is not False:
            store_rows(rows, results, checkpoint['path'])
            print(f'\n{results}/exits.json: new thresholds: {sum(map(bool, rows.values()))}')
        return

    prompts = idx[:n_prompts, None, :T if is_task else prompt_tokens or T // 2]     # (n, 1, any)
    deepest = examples.all_held_out(T)[2][numbers].max(axis=1).mean() if is_task else None
    rows = measure(model, methods, idx, targets, prompts, f'{results}/bench.csv', is_task, deepest)
    if len(prompts):
        of_rules = [row for row in rows if row['kind'] == 'exit rules']
        if of_rules:
            figure_4(of_rules, f'{results}/figure_4.png')
        rows.sort(key=lambda row: row['ms_per_token'])      # the fastest first, here alone
    print_rows(f'{results}/bench.csv:', rows, SHOWN)


if __name__ == '__main__':
    settings = configure(globals())
    run(main)
