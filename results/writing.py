"""
Every way to write text with the same chances: chosen on some prompts, timed on others.

    python -m results.writing --out_dir=OUT     OUT/writing.csv; results.run does it for each run

Greedy continuations of held-out prompts. A text is right if all of its tokens are those of 30 fixed
loops; the fidelity of a setting is its share of right texts. The even prompts choose: for each
family of settings (fixed loops, ..., waves) and each fidelity, the fastest that has it. The odd
prompts score what was chosen, one prompt after another, with all settings in turn.

    setting     a way to decode with its loops or threshold, the name of a bench.Point
    kind        a setting without its loops or threshold
    blocks      layers evaluated in the groups, a token
    rows        {part: rows}. Parts: choose (fidelity and blocks), trial (time, on some of the
                choosing prompts), score, compiled, batch
"""
import os
import random
import re
import time
from collections import defaultdict
from copy import deepcopy
from functools import lru_cache
from itertools import product

import numpy as np
import torch

import bench
import data
from bench import continue_prompts, make_point
from common import plots
from common.checkpoint import open_run
from common.configurator import configure, run
from common.files import write_csv
from decode import compile_passes, use_one_thread
from exits import make_exit
from results import runs
from results.runs import head, line, spread
from sample import WAVE, WAVE_RULE, WAVE_TAU
from serving.batching import Request, serve

# ------------------------------------------------------------------------------------------------
out_dir: str | None = None
n_prompts = 256             # half of them choose
prompt_tokens = 12
new_tokens = 36
n_trial = 8                 # choosing prompts on which time is compared
n_batch = 64                # scoring prompts that are decoded in batches, too
loops = [*range(1, 17), 20, 24, 30]     # of fixed loops
taus = [10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5]
drafts = [[n, ahead] for n in (1, 2, 3) for ahead in (2, 4, 8)]     # loops, tokens ahead
waves = [[width, steps] for width in (16, 8, 4) for steps in (1, 2, 3)]
batches = [1, 2, 4, 8, 16]  # rows
compiled = True             # also time some of the chosen settings compiled
device = 'cpu'
# ------------------------------------------------------------------------------------------------

GATHERED = 'writing/texts.csv.xz'
FULL = 30
LEVELS = 0.9, 0.95, 0.99    # fidelities
RULES = 'norm_rel', 'norm', 'kl', 'accel', 'accel_rel'
WAVE_OF_ACCEL = 'a wave, committed by accel'
FAMILIES = {'fixed loops': 'fixed [0-9]+, (latest|exact)', 'loops for each group': 'fixed .*-.*',
            'fixed loops, warm start': '.*warm start', 'an exit rule': '.*(latest|exact)',
            'Algorithm 1': 'accel .*, (latest|exact)', 'drafts': '.*drafts.*', 'a wave': '.*wave.*',
            WAVE_OF_ACCEL: 'accel .*wave.*'}
TO_COMPILE = 'fixed loops', 'drafts', 'a wave'
COMPILED, AGAIN, OWN_STEP = ', compiled', ', again', ', each row at its own step'
SAMPLE = ', as sample.py'
NAMES = {AGAIN: 'A/A: the first line again', SAMPLE: 'the wave of sample.py'}
ALL = *FAMILIES, *(family + COMPILED for family in TO_COMPILE)
RIVAL = 'a wave over the fastest other way, not compiled'
# at the highest and the lowest fidelity only these are scored
SCORED_AT_ALL = ('fixed loops', 'loops for each group', 'an exit rule', 'drafts', 'a wave')
SCREEN, MISSES = 16, 5      # a wave that misses so many of the first texts is not tried further


# what the rows say ------------------------------------------------------------------------------

@lru_cache(maxsize=None)
def families_of(setting):
    """The families that a setting belongs to: the first that its name fits, and Algorithm 1's."""
    first = next(name for name, words in FAMILIES.items() if re.fullmatch(words, setting))
    return {first, *(name for name in ('Algorithm 1', WAVE_OF_ACCEL)
                     if re.fullmatch(FAMILIES[name], setting))}


def kind_of(setting):
    return min(families_of(setting)), re.sub(' [^ ,]+,', ',', setting, count=1)


def by_setting(rows, key):
    """{setting: the values of a column}."""
    values = defaultdict(list)
    for row in rows:
        values[row['setting']].append(row[key])
    return values


def fidelities(rows):
    """{setting: its share of right texts on the choosing prompts}, of those that have all."""
    right = by_setting(rows['choose'], 'identical')
    n = max(map(len, right.values()))
    return {setting: np.mean(values) for setting, values in right.items() if len(values) == n}


def fidelity_of(setting, shares):
    """A share of right texts; drafts write the text of the budget that checks them."""
    return shares.get(re.sub('drafts .*', 'exact', setting), 0)


def chosen(rows):
    """{(level, family): the fastest setting in the trial that has this fidelity}."""
    shares, ms = fidelities(rows), by_setting(rows['trial'], 'ms')
    best = {}
    for level, setting in product(LEVELS, sorted(ms, key=lambda setting: np.median(ms[setting]))):
        eager = setting.removesuffix(COMPILED)
        if fidelity_of(eager, shares) >= level:
            for family in families_of(eager):
                best.setdefault((level, family + setting[len(eager):]), setting)
    return best


# tables -----------------------------------------------------------------------------------------

class Scored:
    """What the rows of one run say of the settings that were chosen, on the prompts that score."""

    def __init__(self, rows):
        self.rows, self.best = rows, chosen(rows)
        self.of = {part: defaultdict(list) for part in ('score', 'compiled')}
        for part, of in self.of.items():
            for row in sorted(rows[part], key=lambda row: row['prompt']):
                of[row['setting']].append(row)

    def get(self, setting, key, part=''):
        """A column in the order of the prompts, (prompts,)."""
        part = part or ('compiled' if setting.endswith(COMPILED) else 'score')
        return np.array([row[key] for row in self.of[part][setting]], dtype=float)

    def setting(self, level, family):
        """What was scored of a family, None if nothing was."""
        if level != 0.95 and family not in SCORED_AT_ALL:
            return None
        name = self.best.get((level, family))
        if family in (AGAIN, SAMPLE):
            name = next((one for one in self.of['score'] if one.endswith(family)), None)
        return name if any(name in of for of in self.of.values()) else None

    def over_fixed(self, level, family):
        """
        Time over that of the fastest fixed loops with this fidelity, and the ends of the interval
        over prompts; None if nothing of the family was scored.
        """
        setting, fixed = (self.setting(level, name) for name in (family, 'fixed loops'))
        if not setting or not fixed:
            return None
        part = 'compiled' if setting.endswith(COMPILED) else 'score'
        pairs = np.stack([self.get(one, 'ms', part) for one in (setting, fixed)], axis=1)
        return runs.ratio(pairs), *bench.interval(pairs, runs.ratio)

    def over_rival(self, level):
        """Time of a wave over that of the fastest other family that is not compiled."""
        others = [self.over_fixed(level, family) for family in FAMILIES if 'wave' not in family]
        wave = self.over_fixed(level, 'a wave')
        return wave and [wave[0] / min(over[0] for over in others if over)]


def all_scored():
    """{model: {seed: Scored}} of the rows that have been gathered."""
    found = {}
    for name, of in runs.load(GATHERED).items():
        for seed, rows in of.items():
            parts = defaultdict(list)
            for row in rows:
                parts[row['part']].append(row)
            found.setdefault(name, {})[seed] = Scored(parts)
    return found


def times_table(models):
    """A line for each family: its time over that of fixed loops, by model and fidelity."""
    columns = list(product(models, LEVELS))
    yield from head('', *(f'{name}, {100 * level:g}%' for name, level in columns))
    for family in (*ALL, SAMPLE, RIVAL, AGAIN):
        cells = []
        for name, level in columns:
            found = [one.over_rival(level) if family == RIVAL else one.over_fixed(level, family)
                     for one in models[name].values()]
            values = [over[0] for over in found if over]
            missing = f', {len(values)} of {len(found)} seeds' * (len(values) < len(found))
            cells.append(spread(values) + missing if values else '–')
        yield line(NAMES.get(family, family), *cells)


def settings_table(models, level):
    """A line for each run and family: what was chosen, and what it costs on the other prompts."""
    yield from head('model, seed', 'family', 'setting', '% right', 'ms a token', 'over fixed loops',
                    'passes', 'blocks')
    for name, of in models.items():
        for (seed, one), family in product(of.items(), (*ALL, SAMPLE)):
            if over := one.over_fixed(level, family):
                setting = one.setting(level, family)
                right, ms, passes, blocks = (one.get(setting, key).mean() for key in (
                    'identical', 'ms', 'passes', 'blocks'))
                yield line(f'{name}, {seed}', NAMES.get(family, family),
                           setting.removesuffix(SAMPLE), f'{100 * right:.1f}', f'{ms:.2f}',
                           '{:.2f} ({:.2f} to {:.2f})'.format(*over), f'{passes:.2f}',
                           f'{blocks:.1f}')


def in_rows(models):
    """
    Time a token of whole texts in batches, over that of fixed loops with one row: {model: {way:
    {rows of the batch: of each seed}}}.
    """
    found = {}
    for name, of in models.items():
        found[name] = defaultdict(lambda: defaultdict(list))
        for one in of.values():
            ms = defaultdict(list)
            for row in one.rows['batch']:
                setting = row['setting'].removesuffix(OWN_STEP)
                way = max(families_of(setting) - {'Algorithm 1', WAVE_OF_ACCEL})
                way += OWN_STEP * (setting != row['setting'])
                ms[way, int(row['batch'])].append(row['ms'])
            for (way, b), values in ms.items():
                found[name][way][b].append(np.mean(values) / np.mean(ms['fixed loops', 1]))
    return found


def batch_table(models):
    """in_rows as a table. Waves and drafts work on one row, so that more rows save no time."""
    yield from head('model', 'rows', *map(str, batches))
    for name, ways in in_rows(models).items():
        for way, by_rows in ways.items():
            yield line(name, way, *(spread(by_rows[b]) if b in by_rows else
                                    '' if 1 not in by_rows else spread(by_rows[1])
                                    for b in batches))


def figures():
    """Time over fixed loops by fidelity, with a dot for each seed, and by rows of a batch."""
    models = all_scored()
    if not models:
        return
    colours = dict(zip((*SCORED_AT_ALL, 'an exit rule' + OWN_STEP), plots.COLOURS))
    figure, axes = plots.panels(2, 3.8, 3, rows=len(models))
    for (left, right), (name, of), ways in zip(axes, models.items(), in_rows(models).values()):
        for family in SCORED_AT_ALL:
            points = [(100 * level, over[0]) for level, one in product(LEVELS, of.values())
                      if (over := one.over_fixed(level, family))]
            means = {x: np.mean([y for at, y in points if at == x]) for x, _ in points}
            left.plot(*zip(*points), '.', color=colours[family], alpha=0.5)
            left.plot(means.keys(), means.values(), color=colours[family])
        left.set(title=f'{name}, one row', xlabel='% of the texts that must be right',
                 xticks=[90, 95, 99], ylabel='time over that of fixed loops', ylim=(0, None))
        for way, by_rows in ways.items():
            times = {b: np.mean(by_rows.get(b, by_rows[min(by_rows)])) for b in batches
                     if b >= min(by_rows)}
            right.plot(times.keys(), times.values(), '.-', color=colours[way], label=way)
        right.set(title=f'{name}, in batches', xlabel='rows of the batch', xscale='log')
        right.set(yscale='log', ylabel='over fixed loops, one row', yticks=[0.1, 0.2, 0.5, 1, 2])
        right.set_xticks(batches, batches)
        right.yaxis.set_major_formatter('{x:g}')
        right.minorticks_off()
    handles, labels = axes[0][1].get_legend_handles_labels()
    by_group = axes[0][0].plot([], [], color=colours['loops for each group'])
    figure.legend(handles + by_group, [*labels, 'loops for each group'], frameon=False, fontsize=8,
                  loc='upper center', bbox_to_anchor=(0.5, 0), ncol=2)
    figure.tight_layout()
    plots.save(figure, os.path.join(runs.ASSETS, 'writing.png'))


def tables():
    """{(page, block): its Markdown}."""
    models = all_scored()
    made = dict(times=times_table(models), batches=batch_table(models)) | {
        f'settings {100 * level:g}': settings_table(models, level) for level in LEVELS}
    return {('writing.md', block): '\n'.join(lines) for block, lines in made.items()}


# choosing ---------------------------------------------------------------------------------------

class Contest:
    """A model, its prompts (N, n), the right texts (N, new), and the rows that are measured."""

    def __init__(self, model, prompts):
        self.model, self.prompts, self.rows = model, prompts, defaultdict(list)
        self.points, self.models = {}, {}
        self.right, _ = continue_prompts(model, make_point(model, FULL, 'fixed'), prompts,
                                         new_tokens, numbers=range(len(prompts)))
        self.choosing, self.scoring = (range(i, len(prompts), 2) for i in (0, 1))

    def write(self, part, setting, numbers):
        """Continue these prompts together and add a row for each -> ms a token, prompt included."""
        model, numbers = self.models.get(setting, self.model), list(numbers)
        begin = time.perf_counter()
        texts, costs = continue_prompts(model, self.points[setting], self.prompts[numbers],
                                        new_tokens, numbers=numbers)
        whole = 1e3 * (time.perf_counter() - begin) / texts.numel()
        ms = [whole] * len(numbers) if part == 'batch' else costs['ms_text']
        self.add(part, setting, numbers, texts, ms, costs['passes'], costs['blocks'])
        return whole

    def add(self, part, setting, numbers, texts, ms, passes, blocks):
        same = texts == self.right[numbers]                                     # (b, new)
        for i, number in enumerate(numbers):
            self.rows[part].append(dict(
                setting=setting, batch=len(numbers), prompt=number, identical=int(same[i].all()),
                tokens=int(same[i].int().cumprod(0).sum()), passes=round(passes[i], 3),
                blocks=round(blocks[i], 2), ms='' if part == 'choose' else round(ms[i], 3)))

    def point(self, tau, rule='fixed', cache='latest', **more):
        """The name of a setting."""
        point = make_point(self.model, tau, rule, cache, cache != 'exact', FULL, **more)
        self.points[point.name] = point
        return point.name

    def share(self, setting):
        """The fidelity of a setting on the choosing prompts, all in a batch."""
        if setting not in self.shares:
            self.write('choose', setting, self.choosing)
            right = [row['identical'] for row in self.rows['choose'] if row['setting'] == setting]
            self.shares[setting] = np.mean(right)
        return self.shares[setting]

    def choose(self):
        """Measure the fidelity of all settings, then the time of those that may be chosen."""
        self.shares = {}
        for cache in ('latest', 'exact'):
            shares = {n: self.share(self.point(n, cache=cache)) for n in loops}
            for level in LEVELS:
                if good := [n for n in loops if shares[n] >= level]:
                    self.by_group(level, good[0], cache)
            self.until_best(self.point(n, cache=cache, warm_start=True) for n in loops)
            for rule in RULES:
                self.until_best(self.point(tau, rule, cache) for tau in taus)
        self.choose_waves()
        tried = self.to_try()
        for i in self.choosing[:n_trial]:
            for setting in random.Random(i).sample(tried, len(tried)):
                self.write('trial', setting, [i])
        for setting in self.to_compile() if compiled else ():
            for i in self.choosing[:n_trial]:
                self.write('trial', setting, [i])

    def until_best(self, settings):
        """Settings that cost more and more, up to the first with the highest fidelity."""
        for setting in settings:
            if self.share(setting) >= LEVELS[-1]:
                break

    def by_group(self, level, n, cache):
        """
        Loops for each group: from n for all on, the group that can spare a loop with the largest
        fidelity left loses one, until none can.
        """
        layers = [len(group) for group in self.model.config.groups]
        counts = [n] * len(layers)
        while counts:
            shares = {}
            for g in range(len(counts)):
                trial = [n - (i == g) for i, n in enumerate(counts)]
                if min(trial):
                    shares[tuple(trial)] = self.share(self.point(trial, cache=cache)), layers[g]
            good = [trial for trial, (share, _) in shares.items() if share >= level]
            counts = max(good, key=shares.get, default=None)

    def choose_waves(self):
        """
        The fidelity of waves, one prompt after another; what has no chance is not tried further: it
        misses too many of the first texts, or takes far longer for them than a wave with the
        highest fidelity did.
        """
        limit = np.inf
        for (width, steps), rule in product(waves, ('norm_rel', 'accel')):
            for tau in taus:
                setting = self.point(tau, rule, wave=width, wave_steps=steps)
                right, took = [], 0
                for i in self.choosing:
                    ms = self.write('choose', setting, [i])
                    right.append(self.rows['choose'][-1]['identical'])
                    took += ms if len(right) <= SCREEN else 0
                    if len(right) <= SCREEN and right.count(0) >= MISSES:
                        break
                    if len(right) == SCREEN and took > 1.1 * limit:
                        break
                if took > 1.1 * limit:
                    break
                if len(right) == len(self.choosing) and np.mean(right) >= LEVELS[-1]:
                    limit = min(limit, took)
                    break

    def to_try(self):
        """For each fidelity the setting of each kind with the fewest blocks, and all drafts."""
        shares, blocks = fidelities(self.rows), by_setting(self.rows['choose'], 'blocks')
        tried = {}
        for level in LEVELS:
            best = {}
            for setting in sorted(shares, key=lambda setting: np.mean(blocks[setting])):
                if shares[setting] >= level:
                    best.setdefault(kind_of(setting), setting)
            tried |= dict.fromkeys(best.values())
            # a larger budget than needed would check the same drafts for more
            n = min(n for n in loops if shares[self.point(n, cache='exact')] >= level)
            tried |= dict.fromkeys(
                self.point(n, cache='exact', draft_loops=few, draft_tokens=ahead)
                for few, ahead in drafts if few < n)
        return list(tried)

    def to_compile(self):
        """Compile the fastest fixed loops, and the fastest drafts and waves with as many tokens."""
        model, shares = deepcopy(self.model), fidelities(self.rows)
        compile_passes(model, max(width for width, _ in waves))
        ms, found = by_setting(self.rows['trial'], 'ms'), {}
        for setting in sorted(ms, key=lambda setting: np.median(ms[setting])):
            family = min(families_of(setting))
            if family in TO_COMPILE and fidelity_of(setting, shares) >= 0.95:
                tokens = re.search(r'(\d+) x|$', setting)[1]
                found.setdefault((family, tokens), setting)
        for setting in found.values():
            name = setting + COMPILED
            self.models[name], self.points[name] = model, self.points[setting]
            self.write('warm-up', name, self.choosing[:1])
            yield name

    # scoring ------------------------------------------------------------------------------------

    def score(self):
        """
        All chosen settings in turn, one prompt after another, in another order for each; then those
        that are compiled, and fixed loops that are not.
        """
        best = chosen(self.rows)
        fixed = best[0.95, 'fixed loops']
        steps = max(1, round(self.model.config.mean_recurrence / 6))
        own = self.point(WAVE_TAU, WAVE_RULE, wave=WAVE, wave_steps=steps)
        extra = {fixed + AGAIN: fixed, own + SAMPLE: own}
        self.points |= {name: self.points[setting] for name, setting in extra.items()}
        names = dict.fromkeys(
            setting for (level, family), setting in best.items()
            if level == 0.95 or family in SCORED_AT_ALL)
        fast = [name for name in names if name.endswith(COMPILED)]
        eager = [name for name in names if name not in fast]
        for part, some in ('score', [*eager, *extra]), ('compiled', [*fast, fixed]):
            for i in self.scoring if part == 'score' or fast else ():
                for setting in random.Random(i).sample(some, len(some)):
                    self.write(part, setting, [i])

    def in_batches(self):
        """
        Whole texts, prompt included, of several rows at once: fixed loops, a rule and Algorithm 1
        in lockstep, rows at their own loop steps (serving/), and waves one row after the other.
        """
        shares, blocks = fidelities(self.rows), by_setting(self.rows['choose'], 'blocks')
        best = chosen(self.rows)
        latest = [min((setting for setting in shares if shares[setting] >= 0.95
                       and family in families_of(setting) and 'latest' in setting),
                      key=lambda setting: np.mean(blocks[setting]), default=None)
                  for family in ('fixed loops', 'an exit rule')]
        alone = [best[0.95, family] for family in ('a wave', 'drafts') if (0.95, family) in best]
        numbers = self.scoring[:n_batch]
        for b in batches:
            for begin in range(0, len(numbers), b):
                some = numbers[begin:begin + b]
                for setting in filter(None, latest):
                    self.write('batch', setting, some)
                for setting in alone if b == 1 else ():
                    self.write('batch', setting, some)
            if b > 1 and latest[1]:
                self.serve(latest[1], b, list(numbers))

    def serve(self, setting, rows, numbers):
        point = self.points[setting]
        requests = [Request(self.prompts[i].tolist(), new_tokens, name=i) for i in numbers]
        begin = time.perf_counter()
        rule = make_exit(point.rule, point.tau, past=False)
        answers = {request.name: tokens for request, tokens, _ in serve(
            self.model, requests, rows, n_loop=point.loops, exit=rule)}
        ms = 1e3 * (time.perf_counter() - begin) / new_tokens / len(numbers)
        texts = torch.tensor([answers[i] for i in numbers])
        n = len(self.rows['batch'])
        self.add('batch', setting + OWN_STEP, numbers, texts,
                 *[[value] * len(numbers) for value in (ms, 0, 0)])
        for row in self.rows['batch'][n:]:
            row['batch'] = rows


def main():
    model, checkpoint, _, folder = open_run(out_dir, device, 'there is nothing to exit from')
    use_one_thread(model)
    _, idx, _, _ = data.held_out(checkpoint, n_prompts, dev=device)
    contest = Contest(model, idx[:, :prompt_tokens])
    for stage in (contest.choose, contest.score, contest.in_batches):
        begin = time.time()
        stage()
        print(f'{stage.__name__}: {time.time() - begin:.0f} s', flush=True)
    contest.rows.pop('warm-up', None)
    write_csv([dict(part=part) | row for part, rows in contest.rows.items() for row in rows],
              os.path.join(folder, 'writing.csv'))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
