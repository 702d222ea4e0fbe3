"""
What an exit rule buys: latency and quality against tau, beside fixed budgets and an oracle.

    python bench.py                                 the default run's checkpoint, under three minutes on two cores
    python bench.py --protocol=both                 with a cache, and as the paper's figures suggest: the context anew for each token
    python bench.py --rules="['accel']" --hits=1 --keep=True          ablations of a rule; --per=sequence, --cache=latest, --dtype=bfloat16

writes out_dir/bench.csv, figure_4.png and frontier.png (and bench.json with --json), and prints a verdict that is computed.
Quality: teacher-forced over held-out windows, the same windows and noise for all; intervals are 95% bootstrap over windows, paired with the
full budget. Latency: the second half of each window token by token, all points in turn, round by round.
Paper: sec. 4, App. D, Fig. 4. Symbols: tau the threshold, evals block maps evaluated, CE cross-entropy in nats a token, PPL exp(CE).
"""
import csv
import json as json_module
import math
import os
import time
from checkpoint import load_checkpoint
from dataclasses import replace

import matplotlib
import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn import functional as F

import data
from configurator import configure, run
from decode import make_cache, one_token, prefill
from exits import EXITS, Exit, make_exit
from loops import KeysValues, Span
from model import GPT, GPTConfig, pick_device

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

# ---------------------------------------------------------------------------------------------------------------------
out_dir = 'out'
dataset: str | None = None  # held-out text; None = the run's own
rules = list(EXITS)
taus = [1e-5, 1e-4, 1e-3, 1e-2]     # the paper's sweep
more_taus = [3e-2, 0.1, 0.3, 1.0, 3.0, 10.0]  # a marked extension
budgets = [1, 2, 3, 4, 6, 8, 12, 16, 30]    # fixed loops
epsilons = [1e-3, 1e-2, 0.1, 0.3, 0.5, 0.7, 1.0]    # of the oracle: distance to the last iterate
n_loop = 30                 # the full budget, k_max of every rule
n_windows = 64              # held-out windows for quality
prompt_tokens: int | None = None    # of each timed window; None = half a block
timed_tokens = 8            # decoded behind each prompt
rounds = 4                  # each takes its own window
batch_size = 1              # rows decoded together
hits: int | None = None     # small values in a row that let a token go; None = the rule's own
keep: bool | None = None    # is the step that triggered kept? None = the rule's own
per = 'token'               # token, or sequence: all tokens of a row stop together
cache = 'exact'             # exact, ring, latest: how the timed decoding keeps keys and values
ring = 8
protocol = 'cached'         # cached, paper (the context anew for each token), both
checks = True               # measure what a check of each rule costs, here and at C = 768, V = 50304
json = False                # the same as JSON, in out_dir/bench.json
seed = 0                    # of x^(0) and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# ---------------------------------------------------------------------------------------------------------------------

SAME = 0.005                # nats: what counts as equal quality in the verdict


# the points: dict(rule, tau, extension, loops, exit) ------------------------------------------------------------------

def sequence_exit(rule):
    """The rule with one signal for all tokens of a row: their largest."""
    def signal(*args):
        value, memo = rule.signal(*args)
        return (None if value is None else value.amax(dim=-1, keepdim=True).expand_as(value)), memo
    return replace(rule, signal=signal)


def points(n_groups):
    """Every (rule, tau), fixed budget and oracle epsilon once."""
    rows = [dict(rule='fixed', tau=n, extension=False, loops=[n] * n_groups, exit=None) for n in sorted({*budgets, n_loop})]
    for name in rules:
        for tau in taus + more_taus:
            rule = make_exit(name, tau, hits, keep)
            rows.append(dict(rule=name, tau=tau, extension=tau not in taus, loops=[n_loop] * n_groups, exit=sequence_exit(rule) if per == 'sequence' else rule))
    return rows + [dict(rule='oracle', tau=eps, extension=False, loops=[n_loop] * n_groups, exit=None) for eps in epsilons]


class Oracle:
    """While entered: each group knows its last iterate (by looping to the end first) and lets a token go within eps of it."""

    def __init__(self, model, eps):
        self.model, self.eps = model, eps

    def __enter__(self):
        for group in self.model.groups:
            def forward(e, n, exit=None, readout=None, noise_seed=0, span=None, caches=None, x0=None, trace=None, whole=group.forward):
                last = whole(e, n, None, None, noise_seed, span)[0]

                def signal(x, x1, memo, readout):       # memo: the last iterates of the rows still looping
                    memo = last if memo is None else memo
                    return vector_norm(x1 - memo, dim=-1), memo
                return whole(e, n, Exit('oracle', self.eps, signal, 1, True), readout, noise_seed, span, caches, x0, trace)
            group.forward = forward

    def __exit__(self, *_):
        for group in self.model.groups:
            del group.forward


# quality --------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def teacher_forced(model, point, x):
    """x (B, T) -> log-probabilities (B, T, V), steps_used and evals (B, T, groups)."""
    trace = []
    if point['rule'] == 'oracle':
        with Oracle(model, point['tau']):
            logits, _ = model(x, n_loop=point['loops'], noise_seed=seed, trace=trace)
    else:
        logits, _ = model(x, n_loop=point['loops'], exit=point['exit'], noise_seed=seed, trace=trace)
    return logits.float().log_softmax(-1), *(torch.stack([t[name] for t in trace], dim=-1) for name in ('steps_used', 'evals'))


@torch.no_grad()
def quality(model, all_points, idx, targets):
    """
    Teacher-forced over windows idx, targets (N, T) -> for each point dict(ce, ce_full, agreement, kl (N,); steps, evals (N, groups)).

    agreement: share of the tokens whose likeliest next token is the full budget's; kl: KL(full budget || point), nats a token.
    """
    batch = max(1, 2 ** 27 // (idx.shape[1] * model.config.vocab_size))         # windows at once: logits of at most half a gigabyte
    found = [{} for _ in all_points]
    for x, y in zip(idx.split(batch), targets.split(batch)):
        ce = lambda log_p: F.nll_loss(log_p.flatten(0, 1), y.flatten(), reduction='none').view(y.shape).mean(dim=1).double()
        full, _, _ = teacher_forced(model, dict(rule='fixed', loops=[n_loop] * len(model.groups), exit=None), x)
        for point, so_far in zip(all_points, found):
            log_p, steps, evals = teacher_forced(model, point, x)
            new = dict(ce=ce(log_p), ce_full=ce(full), agreement=(log_p.argmax(-1) == full.argmax(-1)).double().mean(dim=1),
                       kl=(full.exp() * (full - log_p)).sum(-1).double().mean(dim=1), steps=steps.double().mean(dim=1), evals=evals.double().mean(dim=1))
            for key, value in new.items():
                so_far[key] = np.concatenate([so_far[key], value.cpu()]) if key in so_far else value.cpu().numpy()
    return found


def interval(values, statistic=np.mean, draws=2000):
    """95% bootstrap interval of a statistic over the first axis."""
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    return np.percentile(statistic(np.asarray(values)[picks], axis=1), [2.5, 97.5])


# latency --------------------------------------------------------------------------------------------------------------

def timer(dev):
    """() -> seconds since the last call; CUDA events on CUDA."""
    if not dev.startswith('cuda'):
        last = [time.perf_counter()]

        def lap():
            last.append(time.perf_counter())
            return last[-1] - last[-2]
        return lap
    last = [torch.cuda.Event(enable_timing=True)]
    last[0].record()

    def lap():
        last.append(torch.cuda.Event(enable_timing=True))
        last[-1].record()
        last[-1].synchronize()
        return last[-2].elapsed_time(last[-1]) / 1e3
    return lap


@torch.no_grad()
def decode(model, point, idx, start, how, dev):
    """Positions start ... of idx (B, T) one by one -> seconds of each, and the likeliest next tokens (B, T - start)."""
    loops, exit, schedule = point['loops'], point['exit'], None
    if point['rule'] == 'oracle':       # its extra work is not timed: the loops it would take are found first, then run
        trace = []
        with Oracle(model, point['tau']):
            model(idx, n_loop=loops, noise_seed=seed, trace=trace)
        schedule = torch.stack([t['evals'].amax(dim=0) for t in trace]).T.tolist()      # (T, groups)
    slots = make_cache(model, loops, cache, ring, idx.shape[1])
    if how == 'cached':
        prefill(model, list(idx[:, :start]), loops, exit, seed, slots)
    lap, seconds, tokens = timer(dev), [], []
    for t in range(start, idx.shape[1]):
        now = schedule[t] if schedule else loops
        lap()
        if how == 'cached':
            logits, _, _ = one_token(model, idx[:, t:t + 1], t, now, exit, seed, slots)
        else:
            logits, _, _ = prefill(model, list(idx[:, :t + 1]), now, exit, seed, None)
        tokens.append(logits.argmax(-1))
        seconds.append(lap())
    return seconds, torch.stack(tokens, dim=1)


@torch.no_grad()
def check_costs(model, label, repeats=15, n=8):
    """Microseconds that each rule adds to a loop step of the first group for one token, and their share of the step."""
    group, e = model.groups[0], torch.randn(1, 1, model.config.n_embd, device=next(model.parameters()).device)
    lap, rows = timer(e.device.type), []
    for names in ([name for name in EXITS if name != 'kl'], ['kl']):        # apart: its head sweeps the caches for the others
        times = {name: [] for name in (None, *names)}
        for i in range(repeats + 1):
            for name in times:
                caches = [KeysValues(n, 1) for _ in group.core]
                lap()
                group(e, n, name and make_exit(name, 0.0), model.readout, 0, Span(0, 1, e.device), caches)
                times[name].append(lap() / n)
        step = np.median(times[None][1:])
        rows += [(label, name, 1e6 * np.median(np.subtract(times[name], times[None])[1:]), 1e6 * step) for name in names]
    return rows


# what comes out -------------------------------------------------------------------------------------------------------

def write_csv(rows, path):
    with open(path, 'w', newline='') as f:
        writer = csv.DictWriter(f, rows[0])
        writer.writeheader()
        writer.writerows(rows)


STYLES = dict(norm=('#0072B2', 'o'), kl=('#E69F00', 's'), accel=('#009E73', '^'), norm_rel=('#56B4E9', 'o'), accel_hat=('#CC79A7', 'v'), accel_rel=('#009E73', 'v'),
              fixed=('0.3', 'D'), oracle=('#D55E00', '*'))


def figure_4(rows, path):
    """ms a token, PPL and CE against tau for each rule; the shaded part is beyond the paper's sweep."""
    fig, axs = plt.subplots(1, 3, figsize=(12, 3.6))
    for ax, column, label in zip(axs, ('ms_per_token', 'ppl', 'ce'), ('(i) ms a token', '(ii) perplexity', '(iii) cross-entropy (nats a token)')):
        for name in rules:
            mine = sorted((r for r in rows if r['rule'] == name), key=lambda r: r['tau'])
            ax.plot([r['tau'] for r in mine], [r[column] for r in mine], marker=STYLES[name][1], color=STYLES[name][0], ms=4, lw=1, ls='--' if '_' in name else '-',
                    label=name)
        if more_taus:
            ax.axvspan(max(taus) * 1.5, max(more_taus) * 1.5, color='0.95')
        ax.set(xscale='log', xlabel='tau', ylabel=label)
    axs[0].legend(frameon=False, fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def frontier(rows, path):
    """CE, less the full budget's, against block maps and against ms a token, with 95% intervals; the best is below and to the left."""
    fig, axs = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for ax, column, label in zip(axs, ('mean_evals', 'ms_per_token'), ('mean block maps a group', 'ms a token')):
        for name in ['fixed', *rules, 'oracle']:
            mine = sorted((r for r in rows if r['rule'] == name), key=lambda r: r[column])
            y = np.array([[r['ce_minus_full'], r['ce_minus_full'] - r['diff_low'], r['diff_high'] - r['ce_minus_full']] for r in mine]).T
            if len(mine):
                ax.errorbar([r[column] for r in mine], y[0], np.maximum(y[1:], 0), fmt=STYLES[name][1] + '-', color=STYLES[name][0], ms=4, lw=0.8, capsize=2, label=name)
        ax.axhline(SAME, color='0.6', ls=':', lw=0.8)
        ax.set(xlabel=label, xscale='log', yscale='symlog')
        ax.set_yscale('symlog', linthresh=1e-3)
    axs[0].set_ylabel('CE minus that of the full budget (nats)')
    axs[0].legend(frameon=False, fontsize=7)
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)


def verdict(rows, times):
    """Sentences: at equal quality (CE within SAME of the full budget), which rule is fastest, and by what ratio."""
    best = {}
    for row in rows:
        if row['ce_minus_full'] <= SAME and row['ms_per_token'] < best.get(row['rule'], row)['ms_per_token'] + (row['rule'] not in best):
            best[row['rule']] = row
    own = {name: row for name, row in best.items() if name in rules}
    if not own:
        return [f'No rule comes within {SAME} nats of the full budget at the taus given.']
    fastest = min(own.values(), key=lambda r: r['ms_per_token'])
    key = lambda r: (r['rule'], r['tau'])
    out = [f"Within {SAME} nats of the full budget the fastest rule is {fastest['rule']} at tau {fastest['tau']:g}: {fastest['ms_per_token']:.2f} ms a token, "
           f"{fastest['mean_evals']:.2f} block maps a group, CE {fastest['ce_minus_full']:+.4f} [{fastest['diff_low']:+.4f}, {fastest['diff_high']:+.4f}]."]
    for name in ('kl', 'norm', 'accel', 'fixed', 'oracle'):
        if name in best and name != fastest['rule']:
            pairs = np.array([times[key(best[name])], times[key(fastest)]]).T        # the same tokens
            ratio = lambda v, axis: np.median(v[..., 0], axis) / np.median(v[..., 1], axis)
            low, high = interval(pairs, ratio)
            who = f"The fixed budget of {best[name]['tau']}" if name == 'fixed' else f"{name} at {best[name]['tau']:g}"
            out.append(f"{who} takes {ratio(pairs, 0):.2f} [{low:.2f}, {high:.2f}] times as long ({best[name]['ms_per_token']:.2f} ms, {best[name]['mean_evals']:.2f} "
                       f"block maps, CE {best[name]['ce_minus_full']:+.4f}).")
    if 'fixed' in best and best['fixed']['ms_per_token'] <= fastest['ms_per_token']:
        out.append(f"No rule is worth its cost here: looping {best['fixed']['tau']} times for every token is as good and as fast.")
    return out


def check_knobs(block_size):
    if not taus or not rules:
        raise ValueError('taus and rules must not be empty: --taus=[1e-3,1e-2] --rules="[\'accel\']"')
    for name, known in dict(per=('token', 'sequence'), protocol=('cached', 'paper', 'both'), cache=('exact', 'ring', 'latest')).items():
        if globals()[name] not in known:
            raise ValueError(f"unknown {name} '{globals()[name]}': choose one of {', '.join(known)}")
    start = block_size // 2 if prompt_tokens is None else prompt_tokens
    if start < 1 or timed_tokens < 1 or start + timed_tokens > block_size:
        raise ValueError(f'{start} prompt and {timed_tokens} timed tokens do not fit block_size = {block_size}: make --prompt_tokens or --timed_tokens smaller')
    for knob in ('n_windows', 'rounds', 'batch_size', 'n_loop'):
        if globals()[knob] < 1:
            raise ValueError(f'{knob} must be at least 1, not {globals()[knob]}')
    return start


def main():
    dev, autocast = pick_device(device, dtype)
    model, checkpoint = load_checkpoint(os.path.join(out_dir, 'ckpt.pt'), dev)
    T, groups = model.config.block_size, model.config.groups
    start = check_knobs(T)
    if not groups:
        raise ValueError(f'the model in {out_dir} has no recurrent groups: there is nothing to exit from')
    tokens = data.load(dataset or checkpoint['config']['dataset'])[1]
    most = (len(tokens) - 1) // T
    if max(n_windows, rounds * batch_size) > most:
        raise ValueError(f'the held-out text has {most} windows of {T} tokens: --n_windows and rounds * batch_size may be no more')
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs float32 as it is
    print(f"{out_dir}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {groups}, {dev}{' ' + torch.cuda.get_device_name() if dev.startswith('cuda') else ''}, {dtype}, "
          f'{torch.get_num_threads()} threads, seed {seed}; {n_windows} windows, prompt {start} + {timed_tokens} tokens, batch {batch_size}, {rounds} rounds')
    idx, targets = (t.to(dev) for t in data.windows(tokens, T * np.linspace(0, most - 1, n_windows).round().astype(int), T))
    all_points, rows, times, guesses = points(len(groups)), [], {}, {}
    protocols = ['cached', 'paper'] if protocol == 'both' else [protocol]
    with autocast:
        found = quality(model, all_points, idx, targets)
        t = time.perf_counter()
        for p in all_points:            # warm-up, apart
            decode(model, p, idx[:batch_size, :start + 2], start, protocols[0], dev)
        print(f'warm-up {time.perf_counter() - t:.1f} s')
        for r in range(rounds):
            prompts = idx[[(r * batch_size + b) % n_windows for b in range(batch_size)], :start + timed_tokens]
            for p in all_points:        # in turn: a machine's drift hits all alike
                for how in protocols:
                    seconds, tokens_said = decode(model, p, prompts, start, how, dev)
                    times.setdefault((p['rule'], p['tau'], how), []).extend(1e3 * s for s in seconds)
                    guesses.setdefault((p['rule'], p['tau'], how), []).append(tokens_said)
        costs = []
        if checks:
            costs += check_costs(model, f'C = {model.config.n_embd}, V = {model.config.vocab_size}')
            costs += check_costs(GPT(GPTConfig(n_layer=2, groups=[[0]], block_size=64)).to(dev).eval(), 'C = 768, V = 50304', repeats=7)
    for p, q in zip(all_points, found):
        diff, ce = q['ce'] - q['ce_full'], q['ce'].mean()
        row = dict(rule=p['rule'], tau=p['tau'], extension=p['extension'], ce=ce, ppl=math.exp(ce), ce_minus_full=diff.mean())
        row['diff_low'], row['diff_high'] = interval(diff)
        row.update(agreement=q['agreement'].mean(), kl_to_full=q['kl'].mean(), mean_steps=q['steps'].mean(), mean_evals=q['evals'].mean())
        for g, layers in enumerate(groups):
            name = '-'.join(map(str, layers))
            row[f'steps_{name}'], row[f'evals_{name}'] = q['steps'][:, g].mean(), q['evals'][:, g].mean()
        for how in protocols:
            end = '' if how == protocols[0] else '_' + how
            low, mid, high = np.percentile(times[p['rule'], p['tau'], how], [10, 50, 90])
            row.update({f'ms_per_token{end}': mid, f'ms_p10{end}': low, f'ms_p90{end}': high})
        rows.append(row)
    write_csv(rows, os.path.join(out_dir, 'bench.csv'))
    figure_4(rows, os.path.join(out_dir, 'figure_4.png'))
    frontier(rows, os.path.join(out_dir, 'frontier.png'))
    print(f"\n{'rule':10s} {'tau':>7s} {'CE':>8s} {'minus full [95%]':>28s} {'agree':>6s} {'evals':>6s} {'ms/token':>9s} {'p10':>6s} {'p90':>6s}" + ('  paper ms' if protocol == 'both' else ''))
    for r in rows:
        print(f"{r['rule']:10s} {r['tau']:7g}{'*' if r['extension'] else ' '}{r['ce']:8.4f} {r['ce_minus_full']:+9.4f} [{r['diff_low']:+.4f}, {r['diff_high']:+.4f}] {r['agreement']:6.3f} "
              f"{r['mean_evals']:6.2f} {r['ms_per_token']:9.2f} {r['ms_p10']:6.2f} {r['ms_p90']:6.2f}" + (f"{r['ms_per_token_paper']:10.2f}" if protocol == 'both' else ''))
    print('* beyond the paper\'s sweep' + '\n\nwhat a check costs:' * checks)
    for label, name, us, step in costs:
        print(f'  {label}: {name:9s} {us:7.0f} us a step, {100 * us / step:6.1f}% of {step:.0f} us')
    if protocol == 'both':
        same = all(torch.equal(a, b) for key in guesses if key[2] == 'cached' and key[0] != 'oracle' for a, b in zip(guesses[key], guesses[(*key[:2], 'paper')]))
        print(f"\nboth protocols say the same tokens: {'yes' if same else 'NO'}; recomputing takes {np.median([r['ms_per_token_paper'] / r['ms_per_token'] for r in rows]):.1f} times as long (median over the points)")
    says = verdict(rows, {key[:2]: v for key, v in times.items() if key[2] == protocols[0]})
    print('\n' + '\n'.join(says))
    if json:
        with open(os.path.join(out_dir, 'bench.json'), 'w') as f:
            json_module.dump(dict(config=config, points=rows, checks=costs, verdict=says), f, indent=1, default=float)


if __name__ == '__main__':
    config = configure(globals())
    run(main)
