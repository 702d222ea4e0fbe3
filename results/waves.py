"""
Decoding several tokens at once against every other way: fidelity and time, three seeds each of the
default run and of the paper's recipe.

    python -m results.waves                 two hours on two cores; rerun to continue
    python -m results.waves --only_table    results/waves/*.csv -> results/waves.md, nothing is run

Run it in the project's folder. It trains into out-waves and continues held-out prompts by every
way with bench.py, one thread each: at temperature 0, and for the first seed also at 0.8 and with
four rules over wide ranges of tau. Writes results/waves/*.csv and the tables of results/waves.md.

    identical       the share of continuations that are those of 30 fixed loops with `exact`
    point           a way to decode: a row of bench.csv
"""
import os
from functools import partial
from itertools import product

from common.configurator import configure, run
from results import runs
from results.runs import distinct, head, join, line, pick
from sample import WAVE_TAU

# ------------------------------------------------------------------------------------------------
seeds = [1337, 1, 2]
prompts = 64                # held-out prompts to continue
fidelity = 0.95             # the required share of identical continuations
workers = 2                 # runs at a time, with a thread each
more: list = []             # flags for every training and benchmark, to make them smaller
only_table = False
# ------------------------------------------------------------------------------------------------

# name: flags of the training, and of its benchmark; the wave that sample.py takes
RUNS = dict(
    default=([], ['--budgets=[2,3,4,5,6,8]', '--drafts=[[1,6],[2,6]]'], [8, 1]),
    recipe=(['config/recipe.py'], ['--budgets=[4,6,8,10,12]', '--drafts=[[3,8],[3,12]]'], [8, 2]))
# of all benchmarks: 12 + 36 tokens fill the context window
COMMON = ['--cache=latest', '--epsilons=[]', '--rounds=1', '--prompt_tokens=12', '--new_tokens=36',
          '--least_tau=3e-3']
METHODS = [*COMMON, "--rules=['norm_rel']", '--taus=[1e-3,3e-3,1e-2,3e-2]', '--more_taus=[]']
RULES = [*COMMON, "--rules=['norm_rel','kl','accel','accel_rel']", '--taus=[1e-2,3e-2]',
         '--more_taus=[0.1,0.3,1]', '--budgets=[]', '--drafts=[]']
COLUMNS = ('kind', 'cache', 'rule', 'tau', 'draft_loops', 'wave', 'wave_steps', 'prompts',
           'identical', 'prefix', 'text_loss', 'passes', 'token_passes', 'block_maps', 'ms_text')


def folder_of(name, seed):
    return os.path.join('out-waves', f'{name}-{seed}')


def benches(name, seed):
    """The benchmarks of a run: (name, flags)."""
    _, points, usual = RUNS[name]
    flags = [f'--waves={[usual]}', f'--n_windows={prompts}']
    half, quarter = (f'--n_prompts={prompts // n}' for n in (2, 4))
    yield 'methods', [*METHODS, *points, *flags, f'--n_prompts={prompts}']
    if seed == seeds[0]:
        yield 'rules', [*RULES, *flags, half]
        yield 'warm', [*METHODS, *points, *flags, quarter, '--temperature=0.8']


def measure(name, seed):
    """Train a run and measure it, except for what was done before -> True."""
    folder = folder_of(name, seed)
    runs.train(folder, [*RUNS[name][0], '--device=cpu', f'--seed={seed}', *more])
    for what, flags in benches(name, seed):
        runs.bench(folder, what, [*flags, *more])
    return True


def gather():
    """All runs -> results/waves/points.csv."""
    points = [dict(run=name, seed=seed, bench=what) | {key: row[key] for key in COLUMNS}
              for name, seed in product(RUNS, seeds) for what, _ in benches(name, seed)
              for row in runs.read_csv(os.path.join(folder_of(name, seed), what + '.csv'))
              if row['prompts']]
    runs.save('waves', dict(points=points))


# the tables -------------------------------------------------------------------------------------

def fastest(rows):
    """The fastest of these points that has the required fidelity; None if there is none."""
    return min((row for row in rows if row['identical'] >= fidelity),
               key=lambda row: row['ms_text'], default=None)


def in_words(row):
    if row['wave'] != '':
        return f"{row['wave']:g} x {row['wave_steps']:g}, {row['rule']} {row['tau']:g}"
    if row['draft_loops'] != '':
        return f"{row['draft_loops']:g} of {row['tau']:g}"
    return f"{row['tau']:g} loops" if row['rule'] == 'fixed' else f"{row['rule']} {row['tau']:g}"


def cell(row, fixed):
    """A point: what it is, its fidelity, ms a token, and its time over that of fixed loops."""
    if row is None:
        return 'none'
    return (f"{in_words(row)}: {100 * row['identical']:.0f}%, {row['ms_text']:.2f} ms "
            f"(**{row['ms_text'] / fixed['ms_text']:.2f}**)")


def methods_table(t, bench):
    """A line for each run: of each kind of decoding the fastest point with this fidelity."""
    yield from head('run', 'fixed loops', 'a rule that stops', 'drafts', 'a wave',
                    f'that of sample.py, τ = {WAVE_TAU:g}')
    points = pick(t['points'], bench=bench)
    for name, seed in product(RUNS, distinct(points, 'seed')):
        rows = pick(points, run=name, seed=seed)
        if not rows:
            continue
        usual, = pick(rows, kind='waves', tau=WAVE_TAU)
        kinds = ('fixed budgets, latest', 'rules, latest', 'drafts', 'waves')
        best = [fastest(pick(rows, kind=kind)) for kind in kinds]
        yield line(f'{name}, seed {seed:g}', *(cell(row, best[0]) for row in [*best, usual]))


def rules_table(t):
    """A line for each rule: the fastest wave it gives at this fidelity, and where it breaks."""
    rows = pick(t['points'], bench='rules', kind='waves')
    columns = list(dict.fromkeys((row['run'], row['seed']) for row in rows))
    yield from head('rule that commits', *(f'{name}, seed {seed:g}' for name, seed in columns))
    for rule in distinct(rows, 'rule'):
        cells = []
        for name, seed in columns:
            mine = pick(rows, rule=rule, run=name, seed=seed)
            best = fastest(mine)
            broken = [row for row in mine if row['identical'] < fidelity]
            first = min(broken, key=lambda row: row['tau'], default=None)
            cells.append(
                ('none' if best is None else
                 f"{best['tau']:g}: {100 * best['identical']:.0f}%, {best['ms_text']:.2f} ms, "
                 f"{best['passes']:.2f} passes") +
                (f"; at {first['tau']:g}: {100 * first['identical']:.0f}%" if first else ''))
        yield line(f'`{rule}`', *cells)


def markdown(folder=runs.HERE):
    t = runs.load('waves', folder)
    n = int(t['points'][0]['prompts'])
    steps = {name: usual[1] for name, (_, _, usual) in RUNS.items()}
    return join([
        [f"{runs.machine_of(t)}; {n} prompts of 12 tokens, 36 new tokens, one thread, all ways in "
         f'turn. Of each kind the fastest point with at least {100 * fidelity:g}% identical '
         'continuations, and in bold its time over that of fixed loops. A wave has 8 tokens and '
         + ', '.join(f'{k} loop step{"s" * (k > 1)} a pass ({name})'
                     for name, k in steps.items()) + '.'],
        methods_table(t, 'methods'),
        [f'**At temperature 0.8**, {n // 4} of these prompts'],
        methods_table(t, 'warm'),
        ['**Which rule commits best?** For each rule the fastest wave with this fidelity, by tau, '
         f'and the smallest tau that misses it; {n // 2} of the prompts.'],
        rules_table(t)])


def main():
    if not only_table:
        works = [partial(measure, name, seed) for name, seed in product(RUNS, seeds)]
        runs.all_done(works, workers)
        gather()
    runs.write('waves', markdown(), page='waves.md')


if __name__ == '__main__':
    config = configure(globals())
    run(main)
