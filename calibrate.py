"""
Thresholds that keep a promise: for each exit rule the largest tau that costs at most so many nats.

    python bench.py --calibrate=0.005                   finds them, and writes out_dir/exits.json
    python sample.py --exit=norm_rel --tau=auto         uses one

The paper leaves tau to be tuned by hand. Here it goes down a grid until the loss above the full
budget is small enough with 95% confidence: the upper end of a bootstrap over one half of the
held-out windows. What it costs is then measured on the other half.

    kind        (cache policy, rule, does it wait for the past?)
    nats        the promise: CE above the full budget's, nats a token
"""
import json
import os

from quality import figures_of, interval, quality

TAUS = [float(f'{10 ** (n / 4):.3g}') for n in range(6, -17, -1)]       # 31.6 ... 1e-4
LEAST = 8               # windows in a half


def calibrate(model, make_point, kinds, idx, targets, nats, n_loop, seed=0):
    """
    A row for each kind: its tau (None if none of TAUS will do), the loss that it is promised to
    keep below, and what it costs on the other half of the windows idx, targets (N, T).

    make_point(kind, tau) -> a quality.Point. ValueError for fewer than 2 * LEAST windows, or nats
    that are not positive.
    """
    if not nats > 0:
        raise ValueError(f'--calibrate must be more than 0 nats, not {nats}: try 0.005')
    if len(idx) < 2 * LEAST:
        raise ValueError(f'{len(idx)} windows are too few to halve: --n_windows={2 * LEAST} at '
                         'least')
    found = {}
    for tau in TAUS:
        points = {kind: make_point(kind, tau) for kind in kinds if kind not in found}
        quality(model, list(points.values()), idx[::2], targets[::2], n_loop, seed)
        for kind, point in points.items():
            if excess(point)[2] <= nats:
                found[kind] = point
        if len(found) == len(kinds):
            break
    other_half = {kind: make_point(kind, point.tau) for kind, point in found.items()}
    quality(model, list(other_half.values()), idx[1::2], targets[1::2], n_loop, seed)
    rows = []
    for cache, rule, past in kinds:
        row = dict(cache=cache, rule=rule, past=past, tau=None)
        if (cache, rule, past) in found:
            mean, low, high = excess(other_half[cache, rule, past])
            evals = figures_of(other_half[cache, rule, past])['evals'].mean()
            row.update(tau=found[cache, rule, past].tau, upper=excess(found[cache, rule, past])[2],
                       cost=mean, cost_low=low, cost_high=high, evals=evals, kept=mean <= nats)
        rows.append(row)
    return rows


def excess(point):
    """CE above the full budget's, nats a token: mean, and the ends of its 95% interval."""
    figures = figures_of(point)
    difference = figures['ce'] - figures['ce_full']
    return [float(value) for value in (difference.mean(), *interval(difference))]


def print_rows(rows, nats):
    print(f'\nthe largest tau within {nats:g} nats of the full budget on half of the windows, and '
          'what it costs on the others:')
    for row in rows:
        name = f"  {row['cache']:6s} {row['rule']:10s} {'past' if row['past'] else 'own':5s}"
        if row['tau'] is None:
            print(f'{name} none from {TAUS[0]:g} to {TAUS[-1]:g}')
            continue
        print(f"{name} {row['tau']:8g}  {row['cost']:+.4f} [{row['cost_low']:+.4f}, "
              f"{row['cost_high']:+.4f}]  {row['evals']:5.2f} block maps"
              + ('' if row['kept'] else '  the promise is not kept'))


def of_checkpoint(checkpoint):
    """What a file of thresholds must have been made for."""
    return dict(iteration=checkpoint['iter_num'], dataset=checkpoint['config']['dataset'])


def write(out_dir, checkpoint, rows, nats, n_loop):
    """exits.json, whole or not at all."""
    path = os.path.join(out_dir, 'exits.json')
    with open(path + '.tmp', 'w') as f:
        json.dump(of_checkpoint(checkpoint) | dict(nats=nats, n_loop=n_loop, exits=rows), f,
                  indent=1)
    os.replace(path + '.tmp', path)
    print(f'{path}: python sample.py --exit=norm_rel --tau=auto uses it')


def read_tau(out_dir, checkpoint, cache, rule, past):
    """
    The threshold of a rule in out_dir/exits.json; without a cache (None) it is that of `exact`.

    ValueError where there is none, or it was found on another checkpoint.
    """
    path = os.path.join(out_dir, 'exits.json')
    how = f'python bench.py --calibrate=0.005 --out_dir={out_dir}'
    try:
        with open(path) as f:
            found = json.load(f)
        was = {key: found[key] for key in of_checkpoint(checkpoint)}
        taus = {(row['cache'], row['rule'], row['past']): row['tau'] for row in found['exits']}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--tau=auto reads '{path}', and cannot ({type(error).__name__}): make it "
                         f'with {how}') from error
    if was != of_checkpoint(checkpoint):
        raise ValueError(f"'{path}' is of iteration {was['iteration']} on {was['dataset']}, the "
                         f"checkpoint of iteration {checkpoint['iter_num']} on "
                         f"{checkpoint['config']['dataset']}: make it anew with {how}")
    cache = cache or 'exact'
    tau = taus.get((cache, rule, past or cache != 'exact'))     # elsewhere a prompt waits anyway
    if tau is None:
        waiting = ' that waits for the past' if past else ''
        raise ValueError(f"'{path}' has no threshold for the rule '{rule}'{waiting} with the cache "
                         f"'{cache}': give --tau=NUMBER, or see what {how} finds")
    return tau
