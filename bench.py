"""
What an exit rule buys: latency and quality against tau, beside fixed budgets and an oracle.

    python bench.py                     the default run's checkpoint, three minutes on two cores
    python bench.py --cache=exact       one cache policy alone; --past=False: by own signals alone
    python bench.py --protocol=both     with a cache, and as the paper's figures suggest: the whole
                                        context again for each token
    python bench.py --rules="['accel']" --hits=1 --keep=True        an ablation of a rule;
                                        and --per=sequence, --dtype=bfloat16
    python bench.py --calibrate=0.005   finds thresholds instead, see calibrate.py

Writes out_dir/bench.csv, figure_4.png and frontier.png (and bench.json with --json), and prints a
verdict that is computed. bench.csv has a row for each point: a cache policy, and a rule at a tau
that waits for the past or does not, a fixed budget, or an oracle's epsilon. It is written after
each stage, and on Ctrl-C with all that is measured by then; `windows` says how many windows the
quality of a row rests on, and times are empty until there are some.

Quality: of decoding held-out windows (quality.py), the same windows and noise for all points;
intervals are 95% bootstrap over windows, of the difference from the full budget of `exact` in the
same window. Latency (latency.py): `timed_tokens` tokens behind a prompt of half a window, all
points in turn, round by round. The defaults are thin: 24 windows, two rounds, no `accel_hat`, and
below `least_tau` own signals with `exact` alone.

Paper: sec. 4, App. D, Fig. 4.

    tau             the threshold of a rule; of a fixed budget its loops, of the oracle its epsilon
    steps, evals    loop steps kept, block maps evaluated
    CE, PPL         cross-entropy in nats a token, exp(CE)
    B, T            rows, tokens of a window
"""
import csv
import json as json_module
import math
import os
from dataclasses import replace
from functools import partial

import numpy as np
import torch

import calibrate as calibration
import data
import memory
from common import plots
from common.checkpoint import load_checkpoint
from common.configurator import configure, pick_device, run
from decode import POLICIES, make_cache
from exits import EXITS, make_exit
from latency import check_costs, time_round, warm_up
from model import GPT, GPTConfig
from quality import Point, figures_of, interval, quality

# --------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None  # held-out text; None = the run's own
rules = [name for name in EXITS if name != 'accel_hat']    # it hardly ever lets a token go
taus = [1e-5, 1e-4, 1e-3, 1e-2]     # the paper's sweep
more_taus = [3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]  # a marked extension
least_tau = 0.1             # smaller ones are for own signals with exact alone, as in the paper
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 30]    # fixed loops
epsilons = [0.3, 1.0]       # of the oracle: distance to the last iterate
n_loop = 30                 # the full budget, k_max of every rule
n_windows = 24              # held-out windows for quality
prompt_tokens: int | None = None    # of each timed window; None = half a block
timed_tokens = 8            # decoded behind each prompt
rounds = 2                  # each takes its own window
batch_size = 1              # rows decoded together
hits: int | None = None     # small values in a row that let a token go; None = the rule's own
keep: bool | None = None    # is the step that triggered kept? None = the rule's own
per = 'token'               # token, or sequence: all tokens of a row stop together
cache: str | list = ['exact', 'latest']     # policies: exact, ring, latest
past: bool | list = [False, True]   # exact: do rules wait for the past? see exits.wait_for_past
ring = 8                    # slots of the policy ring
protocol = 'cached'         # cached, paper (exact, the context anew for each token), both
same = 0.005                # nats above the full budget that count as equal quality
calibrate: float | None = None      # nats: find the thresholds that keep within so many
checks = True               # measure what a check of a rule costs, here and at C = 768, V = 50304
json = False                # the same as JSON, in out_dir/bench.json
seed = 0                    # of x^(0) and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------


# the points ---------------------------------------------------------------------------------------

def make_points(n_groups):
    """Under each policy every fixed budget, rule at a tau and oracle's epsilon, each once."""
    points = []
    for policy in as_list(cache):
        points += [Point('fixed', n, [n] * n_groups, None, policy, ring)
                   for n in sorted({*budgets, n_loop})]
        for kind in kinds_of(policy):
            points += [make_point(n_groups, kind, tau) for tau in dict.fromkeys(taus + more_taus)
                       if tau >= least_tau or kind[0] == 'exact' and not kind[2]]
        points += [Point('oracle', epsilon, [n_loop] * n_groups, None, policy, ring)
                   for epsilon in dict.fromkeys(epsilons)]
    return points


def kinds_of(policy):
    """(policy, rule, past) of every rule; with few slots a lone token has nobody to wait for."""
    waits = dict.fromkeys(as_list(past)) if policy == 'exact' else [True]
    return [(policy, name, wait) for name in dict.fromkeys(rules) for wait in waits]


def make_point(n_groups, kind, tau):
    """A rule at a threshold under a policy; kind: see kinds_of."""
    policy, name, wait = kind
    rule = make_exit(name, tau, hits, keep, wait)
    if per == 'sequence':
        rule = sequence_exit(rule)
    return Point(name, tau, [n_loop] * n_groups, rule, policy, ring, extension=tau not in taus)


def as_list(value):
    return value if isinstance(value, list) else [value]


def sequence_exit(rule):
    """The rule with one signal for all tokens of a row: their largest."""
    def signal(*args):
        value, memo = rule.signal(*args)
        if value is not None:
            value = value.amax(dim=-1, keepdim=True).expand_as(value)       # (B, T)
        return value, memo
    return replace(rule, signal=signal)


# what comes out -----------------------------------------------------------------------------------

def make_row(point, groups, protocols):
    """What is known of a point, as its row of bench.csv."""
    figures = figures_of(point)
    ce, difference = figures['ce'].mean(), figures['ce'] - figures['ce_full']
    low, high = interval(difference, seed=seed)
    row = dict(cache=point.cache, rule=point.rule, past=point.past, tau=point.tau,
               extension=point.extension, windows=len(difference), ce=ce, ppl=math.exp(ce),
               ce_minus_full=difference.mean(), diff_low=low, diff_high=high,
               accuracy=figures['accuracy'].mean(), agreement=figures['agreement'].mean(),
               kl_to_full=figures['kl'].mean(), mean_steps=figures['steps'].mean(),
               mean_evals=figures['evals'].mean())
    for g, layers in enumerate(groups):
        name = '-'.join(map(str, layers))
        row[f'steps_{name}'] = figures['steps'][:, g].mean()
        row[f'evals_{name}'] = figures['evals'][:, g].mean()
    # with both protocols the columns of the second one end in its name
    for ending, how in zip(['', '_paper'], protocols):
        low = middle = high = ''
        if point.times[how]:
            low, middle, high = np.percentile(point.times[how], [10, 50, 90])
        row[f'ms_per_token{ending}'] = middle
        row[f'ms_p10{ending}'], row[f'ms_p90{ending}'] = low, high
    return row


def save(points, groups, protocols):
    """bench.csv of all that is known so far, whole or not at all -> its rows."""
    rows = [make_row(point, groups, protocols) for point in points if point.figures]
    if rows:
        path = os.path.join(out_dir, 'bench.csv')
        with open(path + '.tmp', 'w', newline='') as f:
            writer = csv.DictWriter(f, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        os.replace(path + '.tmp', path)
    return rows


def print_table(rows, protocols):
    both = len(protocols) == 2
    header = (f"{'cache':6s} {'rule':10s}      {'tau':>7s} {'CE':>8s} {'minus full [95%]':>28s} "
              f"{'right':>6s} {'agree':>6s} {'evals':>6s} {'ms/token':>9s} {'p10':>6s} {'p90':>6s}")
    print('\n' + header + ('  paper ms' if both else ''))
    for row in rows:
        star = '*' if row['extension'] else ' '
        ways = dict(fixed='', oracle='').get(row['rule'], 'past' if row['past'] else 'own')
        line = (f"{row['cache']:6s} {row['rule']:10s} {ways:4s} {row['tau']:7g}{star}"
                f"{row['ce']:8.4f} {row['ce_minus_full']:+9.4f} "
                f"[{row['diff_low']:+.4f}, {row['diff_high']:+.4f}] "
                f"{row['accuracy']:6.3f} {row['agreement']:6.3f} {row['mean_evals']:6.2f} "
                f"{row['ms_per_token']:9.2f} {row['ms_p10']:6.2f} {row['ms_p90']:6.2f}")
        if both and row['ms_per_token_paper']:
            line += f"{row['ms_per_token_paper']:10.2f}"
        print(line)
    print("* beyond the paper's sweep")


def print_bytes(model):
    """What each policy keeps of a token, in all layers, in float32."""
    for policy in as_list(cache):
        kept = make_cache(model, [n_loop] * len(model.groups), policy, ring)
        slots = sum(layer.slots for layers in kept for layer in layers)
        print(f'{policy} keeps {slots * 2 * model.config.n_embd * 4:,} bytes of keys and values a '
              'token')


def print_checks(model, device):
    """Measure and print what a check costs, in this model and at GPT-2's size -> rows of both."""
    print('\nwhat a check costs:')
    gpt2_size = GPTConfig(n_layer=2, groups=[[0]], block_size=64)
    large = GPT(gpt2_size).to(device).eval()
    costs = []
    for measured, repeats in ((model, 15), (large, 7)):
        label = f'C = {measured.config.n_embd}, V = {measured.config.vocab_size}'
        for name, us, step in check_costs(measured, repeats):
            costs.append((label, name, us, step))
            print(f'  {label}: {name:9s} {us:7.0f} us a step, {100 * us / step:6.1f}% of '
                  f'{step:.0f} us')
    return costs


def compare_protocols(points, rows):
    """A sentence: do both protocols choose the same tokens, and what does recomputing cost?"""
    agree = True
    for point in points:
        # an oracle's schedule is of a pass without a cache
        if point.times['paper'] and point.rule != 'oracle':
            pairs = zip(point.tokens['cached'], point.tokens['paper'])
            agree = agree and all(torch.equal(cached, paper) for cached, paper in pairs)
    ratio = np.median([row['ms_per_token_paper'] / row['ms_per_token'] for row in rows
                       if row['ms_per_token_paper']])
    return (f"both protocols choose the same tokens: {'yes' if agree else 'NO'}; recomputing takes "
            f'{ratio:.1f} times as long (median over the points)')


def verdict(rows, times):
    """
    Sentences: at equal quality (CE within `same` of the full budget), what is fastest?

    times: {name_of(row): ms of each timed token}, the same tokens for all.
    """
    # of each policy the fastest fixed budget, and the fastest rules, by own signals and waiting
    best = {}
    for row in rows:
        if row['rule'] != 'oracle' and row['ce_minus_full'] <= same:
            kind = row['cache'], row['rule'] == 'fixed', row['past']
            if kind not in best or row['ms_per_token'] < best[kind]['ms_per_token']:
                best[kind] = row
    if not best:
        return [f'No point comes within {same:g} nats of the full budget.']

    fastest = min(best.values(), key=lambda row: row['ms_per_token'])
    says = [f'Within {same:g} nats of the full budget the fastest is {in_words(fastest)}.']
    for row in best.values():
        if row is not fastest:
            pairs = np.array([times[name_of(r)] for r in (row, fastest)]).T         # (tokens, 2)
            low, high = interval(pairs, ratio_of_medians, seed=seed)
            says.append(f'{ratio_of_medians(pairs, 0):.2f} [{low:.2f}, {high:.2f}] times as long: '
                        f'{in_words(row)}.')
    if fastest['rule'] == 'fixed':
        says.append('No rule is worth its cost here: as many loops for every token are as good '
                    'and faster.')
    return says


def name_of(row):
    """A row's point: no two have the same."""
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
    """Median of the first over that of the second: pairs (..., 2), with axis over the pairs."""
    return np.median(pairs[..., 0], axis) / np.median(pairs[..., 1], axis)


# the run ------------------------------------------------------------------------------------------

def check_knobs(block_size):
    """ValueError for a knob that makes no sense; else the number of prompt tokens."""
    if not taus or not rules:
        raise ValueError('taus and rules must not be empty: --taus=[1e-3,1e-2] '
                         '--rules="[\'accel\']"')
    choices = [('per', per, ('token', 'sequence')),
               ('protocol', protocol, ('cached', 'paper', 'both')),
               *(('cache', policy, POLICIES) for policy in as_list(cache) or [[]]),
               *(('past', wait, (False, True)) for wait in as_list(past) or [[]])]
    for knob, value, known in choices:
        if value not in known:
            raise ValueError(f"unknown {knob} '{value}': choose {', '.join(map(str, known))}")
    if protocol == 'paper' and 'exact' not in as_list(cache):
        raise ValueError('--protocol=paper computes the context anew, which is what exact gives: '
                         '--cache=exact')
    numbers = dict(n_windows=n_windows, rounds=rounds, batch_size=batch_size, n_loop=n_loop,
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
    """n_windows windows spread over the held-out text: idx, targets (n_windows, T)."""
    text = data.open_data(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                          checkpoint['model_args']['vocab_size'])
    there = text.n_held_out(T)
    if max(n_windows, rounds * batch_size) > there:
        raise ValueError(f'the held-out text has {there} windows of {T} tokens: --n_windows and '
                         'rounds * batch_size may be no more')
    return text.held_out(np.linspace(0, there - 1, n_windows).round().astype(int), T)


def check_memory(model, tokens, device):
    """ValueError if the largest budget is too much. tokens: of a timed window."""
    most = max([n_loop, *budgets])
    # quality: without an exit rule a pass keeps all its states
    windows = memory.windows_at_once(model.config, n_windows)
    needed = memory.states_bytes(model.config, most, windows)
    what = f'keeping the states of {most} loops over {windows} windows'
    memory.require(needed, device, what, '--n_loop, --budgets or --n_windows')
    # a cache that is made and not filled is checked too: of latency, and of quality
    for policy in as_list(cache):
        rows = batch_size if policy == 'exact' else max(batch_size, windows)
        make_cache(model, [most] * len(model.groups), policy, ring, tokens, rows)


def find_thresholds(model, checkpoint, idx, targets):
    """--calibrate: out_dir/exits.json, and a table of what its thresholds cost."""
    kinds = [kind for policy in as_list(cache) for kind in kinds_of(policy)]
    rows = calibration.calibrate(model, partial(make_point, len(model.groups)), kinds, idx, targets,
                                 calibrate, n_loop, seed)
    calibration.print_rows(rows, calibrate)
    calibration.write(out_dir, checkpoint, rows, calibrate, n_loop)


def main():
    # the model, the held-out text, and what to measure
    dev, autocast = pick_device(device, dtype)
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    T, groups = model.config.block_size, model.config.groups
    start = check_knobs(T)
    if not groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: there is nothing to '
                         'exit from')
    windows = held_out_windows(checkpoint, T)
    idx, targets = (tokens.to(dev) for tokens in windows)
    points = make_points(len(groups))
    protocols = ['cached', 'paper'] if protocol == 'both' else [protocol]
    check_memory(model, T, dev)
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs float32 as it is
    card = ' ' + torch.cuda.get_device_name() if dev.startswith('cuda') else ''
    print(f"{out_dir}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {groups}, {dev}{card}, "
          f'{dtype}, {torch.get_num_threads()} threads, seed {seed}; {n_windows} windows, prompt '
          f'{start} + {timed_tokens} tokens, batch {batch_size}, {rounds} rounds')
    if calibrate is not None:
        with autocast:
            find_thresholds(model, checkpoint, idx, targets)
        return

    # measure; whatever ends it, bench.csv gets what there is
    try:
        with autocast:
            quality(model, points, idx, targets, n_loop, seed)
            save(points, groups, protocols)
            warm_up(model, points, idx[:batch_size], start, protocols[0], dev, seed)
            for r in range(rounds):
                of_round = [(r * batch_size + b) % n_windows for b in range(batch_size)]
                prompts = idx[of_round, :start + timed_tokens]
                time_round(model, points, prompts, start, protocols, dev, seed)
                save(points, groups, protocols)
    except KeyboardInterrupt:
        print(f'{out_dir}/bench.csv holds what was measured so far')
        raise
    finally:
        rows = save(points, groups, protocols)

    # figures, table, costs, verdict
    plots.figure_4(rows, os.path.join(out_dir, 'figure_4.png'))
    plots.frontier(rows, same, os.path.join(out_dir, 'frontier.png'))
    print_table(rows, protocols)
    print_bytes(model)
    costs = []
    if checks:
        with autocast:
            costs = print_checks(model, dev)
    if protocol == 'both':
        print('\n' + compare_protocols(points, rows))
    timed = [p for p in points if p.times[protocols[0]]]
    says = verdict([row for row in rows if row['ms_per_token']],
                   {(p.cache, p.rule, p.past, p.tau): p.times[protocols[0]] for p in timed})
    print('\n' + '\n'.join(says))
    if json:
        everything = dict(config=config, points=rows, checks=costs, verdict=says)
        with open(os.path.join(out_dir, 'bench.json'), 'w') as f:
            json_module.dump(everything, f, indent=1, default=float)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
