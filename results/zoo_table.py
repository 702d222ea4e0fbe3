"""
The tables of other looped models, from results/zoo/*.csv.

Not run by itself: zoo.py puts them into results/README.md.

    task        text, calc
    evals       block maps a token: of ouro one is the whole stack
"""
import math
from itertools import product

import numpy as np

from results.rows import HERE, column, distinct, lines, load, mean_std, pick
from zoo.etd import thinking_block
from zoo.huginn import EXITS as CRITERIA

CSVS = ('machine', 'points', 'losses', 'blocks', 'angles', 'minutes')
SAME = dict(text=0.005, calc=0.002)     # nats above the best fixed budget: equal quality
TASKS = tuple(SAME)
LOOPS = (4, 8)              # of Ouro, in training


def at_loops(rows, loops, task):
    """Cells: the loss by loops, and on calc the share of right answers in percent behind it."""
    for n in loops:
        at = pick(rows, loops=n)
        cell = mean_std(column(at, 'loss'), 3) if at else ''
        if at and task == 'calc':
            cell += f"; {100 * np.mean(column(at, 'accuracy')):.1f}%"
        yield cell


def ouro_table(t):
    """The loss at each loop count after stage I; stage II changes the gate alone."""
    yield lines('Ouro, held-out loss at loops', 1, 2, 4, 8)
    yield '|---|---|---|---|---|'
    for task, n in product(TASKS, LOOPS):
        rows = pick(t['losses'], part='ouro', task=task, variant=f'I at {n}')
        yield lines(f'{task}, trained at {n}', *at_loops(rows, (1, 2, 4, 8), task))


def least(rows, same, fixed):
    """
    For each seed the fewest block maps within `same` nats of the best of the `fixed` rows, and its
    tau. Not of the full budget: a model may grow worse with loops.
    """
    for seed in distinct(rows, 'seed'):
        best = min(column(pick(fixed, seed=seed), 'ce'))
        good = [row for row in pick(rows, seed=seed) if row['ce'] <= best + same]
        if good:
            best = min(good, key=lambda row: row['mean_evals'])
            yield best['mean_evals'], best['tau']


def ways_of(rows):
    """Each rule, by own signals and waiting: (its name, its rows)."""
    for rule, past in dict.fromkeys((row['rule'], row['past']) for row in rows):
        waits = past == 'True' and any(row['cache'] == 'exact' for row in rows)
        yield rule + (', past' if waits else ''), pick(rows, rule=rule, past=past)


def gate_table(t):
    """Block maps at equal quality of the gate and of rules without training, in one model."""
    of_second = pick(t['points'], part='ouro', variant=f'II at {LOOPS[0]}')
    ways = [name for name, _ in ways_of(of_second)]
    cells = {('gate after stage I' + (', past' if ', past' in name else '')): {} for name in ways
             if name.startswith('gate')} | {name: {} for name in ways}
    columns = list(product(TASKS, LOOPS))
    for task, n in columns:
        for stage in ('I', 'II'):
            rows = pick(t['points'], part='ouro', task=task, variant=f'{stage} at {n}')
            fixed = pick(rows, rule='fixed')
            for name, of_way in ways_of(rows):
                if stage == 'I' and not name.startswith('gate'):
                    continue
                name = name.replace('gate', 'gate after stage I') if stage == 'I' else name
                cells[name][task, n] = in_words(of_way, SAME[task], fixed)
    yield lines('passes through the stack', *(f'{task}, {n} loops, within {SAME[task]:g} nats'
                                              for task, n in columns))
    yield '|---' * (1 + len(columns)) + '|'
    for name, row in cells.items():
        yield lines(name, *(row.get(key, '') for key in columns))


def in_words(rows, same, fixed):
    """Mean ± std of the fewest block maps, and the thresholds of the seeds."""
    found, n_seeds = list(least(rows, same, fixed)), len(distinct(rows, 'seed'))
    if len(found) < n_seeds:
        return f'{len(found)} of {n_seeds} seeds get there'
    evals, taus = zip(*found)
    return f"{mean_std(evals)} ({', '.join(f'{tau:g}' for tau in taus)})"


def criteria_table(t):
    """Geiping's criteria beside ours, on the default run and on calc, decoding with `latest`."""
    yield lines('block maps a group and token, `latest`', *(f'{task}, within {SAME[task]:g} nats'
                                                           for task in TASKS), 'at his threshold')
    yield '|---' * (2 + len(TASKS)) + '|'
    rows = pick(t['points'], part='criteria')
    for name, of_way in ways_of(rows):
        own = ''
        short = name.removeprefix('zoo.huginn:')
        if short != name:
            usual = CRITERIA[short][4]
            own = '; '.join(at_tau(pick(of_way, task=task), usual, task) for task in TASKS)
        yield lines(name, *(in_words(pick(of_way, task=task), SAME[task],
                                     pick(rows, rule='fixed', task=task)) for task in TASKS), own)


def at_tau(rows, tau, task):
    """Block maps and nats above the full budget at the threshold nearest to tau."""
    nearest = min(column(rows, 'tau'), key=lambda other: abs(math.log(other / tau)))
    at = pick(rows, tau=nearest)
    return (f"{task} {np.mean(column(at, 'mean_evals')):.1f} maps, "
            f"{np.mean(column(at, 'ce_minus_full')):+.4f}")


def etd_table(t):
    """Plain and damped loops of the block that the knees give, then after mid-training."""
    loops = (1, 2, 3, 4)
    yield lines('ETD, held-out loss at loops', *loops)
    yield '|---|---|---|---|---|'
    for task in TASKS:
        for kind, words in dict(loss='not trained', damped='not trained, damped').items():
            rows = chosen_rows(t, task)
            yield lines(f'{task}, the knees\' block, {words}',
                        *(mean_std(column(rows, f'{kind}_{n}'), 3) for n in loops))
        for name in ('knees', 'front', 'back', 'none'):
            rows = pick(t['losses'], part='etd', task=task, variant=f'{name} trained')
            words = 'no block' if name == 'none' else f"the {name}' block" if name == 'knees' \
                else f'as many layers at the {name}'
            yield lines(f'{task}, {words}, mid-trained', *at_loops(rows, loops, task))


def chosen_rows(t, task):
    """The rows of blocks.csv of the chosen block, a seed each."""
    found = []
    for seed in distinct(t['angles'], 'seed'):
        block = block_of(t, task, seed)
        found += pick(t['blocks'], part='etd', task=task, variant='knees', seed=seed,
                      block=f'{block[0]}-{block[-1]}')
    return found


def block_of(t, task, seed):
    curve = column(pick(t['angles'], part='etd', task=task, variant='knees', seed=seed),
                   'angle_over_pi')
    return thinking_block(np.array(curve))


def markdown(folder=HERE):
    """What stands between the markers of the zoo."""
    t = load('zoo', folder, CSVS)
    machine, = t['machine']
    spent = ', '.join(f"{part} {sum(column(pick(t['minutes'], part=part), 'minutes')):.0f}"
                      for part in distinct(t['minutes'], 'part'))
    chosen = '; '.join(
        f'{task} ' + ', '.join(f'{b[0]}-{b[-1]}' for b in
                               (block_of(t, task, seed) for seed in distinct(t['angles'], 'seed')))
        for task in TASKS)
    blocks = [
        [f"{machine['cores']:g} cores of an {machine['machine']}, torch {machine['torch']}, "
         f"{machine['date']}; {len(distinct(t['points'], 'seed'))} seeds; minutes by part: "
         f'{spent}. Equal quality: so many nats above the best fixed budget of the same model and '
         'seed; in brackets the thresholds of the seeds.'],
        ['**Ouro**:'], ouro_table(t),
        ['**Its gate** beside rules that need no training, `exact`:'], gate_table(t),
        ["**Geiping's criteria**:"], criteria_table(t),
        [f'**ETD**, six layers; the blocks of the knees: {chosen}.'], etd_table(t)]
    return '\n\n'.join('\n'.join(block) for block in blocks)
