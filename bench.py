"""
How good and how fast is each way to decode: fixed loops, exit rules, drafts, waves?
And how do other models compare, with loops or without?

    python bench.py                         the default run, in a minute or two
    python bench.py config/bench_full.py    every rule, threshold and cache policy, in many minutes
    python bench.py "--taus=[1e-5,1e-4,1e-3,1e-2]"      the paper's sweep
    python bench.py "--beside=['out-plain']"            another run on the same data as well
    python bench.py --calibrate=0.005       find thresholds instead, for sample.py --exit

A *method* is a way to decode. A *point* is a method of one model and what was measured of it, a row
of bench.csv. It is compared with its *reference*, the *full budget* of the same model: n_loop fixed
loops under the policy `exact`. Methods that differ only in their threshold, or in their number of
fixed loops, are a *family*, of which the table at the end shows the fastest that is faithful.

Of each point is measured

    quality     loss and accuracy on windows of held-out text, or on problems of a task. Drafts and
                waves have none of their own: they are made to write the texts of a loop budget
    time        milliseconds for a new token after a prompt, the beginning of a window, and whether
                the text is that of the full budget; on a task milliseconds for a token of a problem
                that is read

or with --calibrate, in place of both, the largest threshold of each rule that keeps a promise.

Start at main(). Here stands what the knobs ask for. The rest is in

    common/points.py        methods, points, and the columns of bench.csv
    decode/measure.py       measures points
    common/calibration.py   chooses thresholds
    common/comparison.py    the table at the end, figure_4.png and ledger.png

On Ctrl-C bench.csv has what was measured until then.

Under `latest` quality and time are measured in two ways. For ce and accuracy the tokens of a window
are read one after another, each with the method's loops. For identical and ms_per_token the prompt
is read at once and loops until it has converged, as GPT.stream does it.

Paper: sec. 4, App. D, Fig. 4.

    N, T    windows, tokens of a window
"""
import os
from itertools import groupby

import torch

import data
from cache import POLICIES, check_policy
from common import calibration, comparison, configurator
from common.checkpoint import open_run
from common.configurator import PathName, given
from common.distributed import pick_device
from common.files import check_writable, write_csv, write_json
from common.points import Kind, Method, Point, row_of
from decode import use_one_thread
from decode.compiled import compile_passes
from decode.defaults import budget_and_wake
from decode.measure import (
    Conditions,
    Half,
    HeldOut,
    family_of,
    measure_quality,
    measure_time,
    seconds_of_quality,
    seconds_of_time,
    with_tau,
)
from decode.passes import reads_whole
from decode.wave import can_wave
from exits import make_exit

# --------------------------------------------------------------------------------------------------
out_dir: PathName | None = None     # None = out, or pretrained/text if you have trained no model
beside: list = []           # folders of other runs, to measure in the same turns
dataset: str | None = None  # held-out text or a task with other knobs; None = the run's own
length: int | None = None   # tokens of a window; None = block_size. Others: rotary positions only
damping: float | None = None    # share of the old state that a loop step keeps; None = the run's
rules = ['norm_rel', 'kl', 'accel']     # names in exits.EXITS, or MODULE:NAME
taus = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]   # thresholds, the same for all rules
budgets = [1, 2, 4, 8]      # fixed loop steps
drafts = [[2, 8, 4]]        # loops of a draft, loops of its check, tokens of a draft
waves = [[8, 1]]            # tokens of a wave, and loop steps of a pass
n_loop: int | None = None   # the full budget; None = 30, or 2 T + 100 where rules wake on a task
cache: str | list = 'exact'     # policies of cache.POLICIES, for fixed loops and rules
wake: bool | list | None = None     # may a token that has exited wake? None = on a task
ring = 8                    # slots of the policy `ring`
n_windows = 24              # held-out windows for quality
n_prompts = 8               # windows whose beginnings are continued; 0 = measure no times
prompt_tokens: int | None = None    # length of a prompt; None = half a window
new_tokens = 24             # length of a text
temperature = 0.0           # of the draws of the texts; 0 = greedy
fidelity = 0.95             # share of texts that must equal those of the full budget
compile = False             # compile the passes after a prompt: on a CPU half a minute a point
calibrate: float | None = None  # look for thresholds that cost at most so many nats
seed = 0                    # of x^(0), the texts and the bootstrap
device = 'auto'
dtype = 'float32'           # of matrix products
# --------------------------------------------------------------------------------------------------

LEAST_TO_CALIBRATE = 16     # windows: each half needs some for an interval


# methods ------------------------------------------------------------------------------------------

def points_of(folder, model, T=None):
    """
    The points of a run. The first is the full budget, the reference of the others. T, here and
    below: tokens of a problem, None = a text.
    """
    full = full_budget(model, T)
    reference = Point(folder, model, full)
    methods = methods_of(model, full.n_loop, T)
    others = [Point(folder, model, method, reference) for method in methods if method != full]
    return [reference, *others]


def full_budget(model, T=None):
    """Fixed loops, as many as a rule may use under any of the policies."""
    if not model.groups:            # nothing loops: a pass is all there is
        return Method(Kind.PLAIN, n_loop=1, policy='exact')
    budgets = []
    for policy in as_list(cache):
        for may_wake in as_list(wake):
            counts, _ = budget_and_wake(model, policy, ring, T, may_wake, n_loop)
            budgets += counts
    return Method(Kind.FIXED, max(budgets), 'exact')


def methods_of(model, budget, T=None):
    """
    The methods that the knobs ask for, with this budget.

    ValueError for a knob that is out of range, an unknown rule or an unknown policy.
    """
    if not model.groups:
        return []
    for policy in as_list(cache):
        check_policy(policy, ring)
    methods = [Method(Kind.FIXED, n, policy)
               for policy in as_list(cache) for n in (*budgets, budget)]
    of_rules = rules_to_measure(model, budget, T)
    methods += [with_tau(method, tau) for method in of_rules for tau in taus]
    if n_prompts and T is None:         # these two write texts
        methods += [Method(Kind.DRAFTS, n, 'exact', draft_loops=loops, draft_tokens=tokens)
                    for loops, n, tokens in drafts]
        of_waves = waves_to_measure(model, budget)
        methods += [with_tau(method, tau) for method in of_waves for tau in taus]
    for method in methods:
        model.loop_counts(method.n_loop)
    return list(dict.fromkeys(methods))         # each once


def rules_to_measure(model, budget, T=None):
    """
    A method for each rule and policy, with this budget and the rule's own threshold. With
    '--wake=[False,True]' it is two, one that wakes, where the policy lets tokens wake.
    ValueError if all rules have to wake, and a policy does not let them.
    """
    methods = []
    for policy in as_list(cache):
        for may_wake in as_list(wake):
            _, wakes = budget_and_wake(model, policy, ring, T, may_wake, n_loop)
            if as_list(wake) == [True] and not wakes:
                raise ValueError('--wake needs a cache that keeps every loop step, and '
                                 f"'{policy}' does not: give --wake=False, or --cache=exact")
            methods += [Method(Kind.RULE, budget, policy, make_exit(name, wake=wakes))
                        for name in rules]
    return list(dict.fromkeys(methods))         # each once


def waves_to_measure(model, budget):
    """A method for each wave and each rule that can commit its tokens, with its own threshold."""
    can_decide = [rule for rule in map(make_exit, rules) if can_wave(model, rule)]
    return [Method(Kind.WAVE, budget, 'latest', rule, wave=width, wave_steps=steps)
            for width, steps in waves for rule in can_decide]


def as_list(knob):
    return knob if isinstance(knob, list) else [knob]


# windows and prompts ------------------------------------------------------------------------------

def read_held_out(checkpoint, dev):
    """The HeldOut that the knobs ask for."""
    text, idx, targets, depth = data.held_out_windows(checkpoint, n_windows, dataset, dev)
    kept = have_labels(targets)                                                     # (N,)
    idx, targets = idx[kept], targets[kept]                                         # (N, T)
    N, T = idx.shape
    end = T if text.is_task else prompt_tokens or max(1, T // 2)
    n = n_prompts if calibrate is None else N
    prompts = idx[:n, None, :end]                                                   # (n, 1, end)
    if len(prompts) < n or end > T:
        print(f'{N} windows of {T} tokens give {len(prompts)} prompts of {prompts.shape[2]} tokens')
    deepest = depth[kept.cpu().numpy()].max(axis=1).mean() if text.is_task else None
    return HeldOut(idx, targets, prompts, text.is_task, deepest)


def have_labels(targets):
    """
    Which windows have a label: targets (N, T) -> bool (N,). A line says if some have none.

    ValueError if none is left, or too few for two halves of a calibration.
    """
    has_label = (targets >= 0).any(dim=1)
    left = int(has_label.sum())
    without = len(targets) - left
    if left == 0:
        raise ValueError(f'none of the {without} windows has a label, so there is nothing to '
                         'measure: choose another --dataset, or more --n_windows')
    if calibrate is not None and left < LEAST_TO_CALIBRATE:
        raise ValueError(f'--calibrate needs {LEAST_TO_CALIBRATE} windows with a label, and there '
                         f'are {left}: choose more --n_windows, or another --dataset')
    if without:
        print(f'{without} of {len(targets)} windows have no label, and are left out')
    return has_label


# compiling ----------------------------------------------------------------------------------------

def models_to_compile(points, is_task):
    """
    The models with passes after the first one. ValueError if there are none: a problem may be read
    in one pass, which stays as it is.
    """
    models = {point.model for point in points
              if not is_task or not reads_whole(point.method.rule, point.method.policy)}
    if not models:
        raise ValueError('--compile is for passes after a prompt, and these problems are read in '
                         'one pass: leave it out, or give --cache=latest')
    return models


def compile_all(points, prompt, is_task):
    """Compile the passes of the models. The first calls do the work, so they are made here."""
    widths = [1]                # tokens of a pass
    widths += [width for width, _ in waves]
    widths += [1 + tokens for _, _, tokens in drafts]       # the drafts, and the token before them
    for model in models_to_compile(points, is_task):
        compile_passes(model, max(widths))
    seconds_of_time(points, prompt, is_task, conditions())


# calibration --------------------------------------------------------------------------------------

def calibrate_all(full, held_out, checkpoint, results):
    """
    Find the threshold of each rule and wave -> calibrated families, and their rows in
    results/exits.json. full: the point of the full budget.
    """
    even = Half(held_out.half(0), Point(full.run, full.model, full.method))
    odd = Half(held_out.half(1), Point(full.run, full.model, full.method))
    methods = rules_to_measure(full.model, full.method.n_loop, held_out.problem_tokens)
    if not held_out.is_task:
        methods += waves_to_measure(full.model, full.method.n_loop)
    families = [family_of(method, calibrate, fidelity, conditions()) for method in methods]
    return families, calibration.calibrate(families, taus, even, odd, results, checkpoint)


# knobs: what is refused ---------------------------------------------------------------------------

def check_knobs():
    """ValueError for a knob that makes no sense; methods_of finds the others."""
    check_numbers()
    check_lists()
    if calibrate is not None:
        check_calibration()


def check_numbers():
    least = dict(calibrate=1e-6, n_prompts=0, prompt_tokens=1, new_tokens=2,
                 n_windows=1 if calibrate is None else LEAST_TO_CALIBRATE)
    for knob, smallest in least.items():
        value = globals()[knob]
        if value is not None and not value >= smallest:         # a NaN is not
            raise ValueError(f'{knob} must be at least {smallest:g}, not {value}')
    if not 0 <= fidelity <= 1:
        raise ValueError(f'fidelity is a share, so it lies between 0 and 1, not at {fidelity}')
    if not 0 <= seed < 2 ** 32:
        raise ValueError(f'seed must lie between 0 and 2^32 - 1, not at {seed}')


def check_lists():
    examples = dict(rules=['accel', 'kl'], cache=['exact', 'latest'], wake=[False, True],
                    beside=['out-plain'])
    for knob, example in examples.items():
        value = globals()[knob]
        fits = all(type(part) is type(example[0]) for part in as_list(value))
        if value is not None and not fits:
            raise ValueError(f'{knob} must be as in --{knob}="{example}", not {value}')
    for knob in 'cache', 'wake':
        if globals()[knob] == []:
            raise ValueError(f'{knob} must not be empty: leave out --{knob}')
    for policy in as_list(cache):
        if policy not in POLICIES:
            raise ValueError(f"unknown cache policy '{policy}': choose one of "
                             f'{", ".join(POLICIES)}')
    if not are_counts(budgets):
        raise ValueError('budgets must be whole numbers from 1 on, such as [1,2,4,8], not '
                         f'{budgets}')
    if not all(type(tau) in (int, float) and tau >= 0 for tau in taus):
        raise ValueError(f'taus must be numbers from 0 on, such as [0.1,1,10], not {taus}')
    if not all(are_counts(draft, 3) for draft in drafts):
        raise ValueError('drafts must be lists of three whole numbers from 1 on, such as '
                         f'[[2,8,4]], not {drafts}')
    if not all(are_counts(wave, 2) for wave in waves):
        raise ValueError('waves must be lists of two whole numbers from 1 on, such as [[8,1]], '
                         f'not {waves}')


def check_calibration():
    """The knobs that do not go with --calibrate."""
    if not (rules and taus):
        raise ValueError('calibrate looks for thresholds: give --rules and --taus')
    for knob in 'beside', 'compile', 'n_prompts':
        if knob in given:
            raise ValueError('--calibrate measures all windows of one run, not compiled: leave '
                             f'out --{knob}')
    if damping is not None:
        raise ValueError('--calibrate finds thresholds for the damping of the run: leave out '
                         '--damping')
    # a config file may give them for another run without --calibrate
    unused = [f'--{knob}' for knob in ('budgets', 'drafts') if knob in given]
    if unused:
        print(f'{" and ".join(unused)} have no threshold, and are not measured')


def are_counts(values, n=None):
    """Is this a list of whole numbers from 1 on, n of them if n is given?"""
    return (isinstance(values, list) and n in (None, len(values))
            and all(type(value) is int and value >= 1 for value in values))


def check_results(results):
    """ValueError, before any work, if this folder cannot be written into."""
    check_writable(results, ('bench.csv', 'bench.json', 'exits.json', 'figure_4.png', 'ledger.png'))


# the run ------------------------------------------------------------------------------------------

def points_of_others(checkpoint, held_out):
    """
    The points of the runs `beside`. checkpoint: of the first run. ValueError for a run on other
    data, with another tokenizer, or on shorter windows.
    """
    points = []
    window = held_out.idx.shape[1]
    for folder in beside:
        model, other, folder, _ = open_run(folder, pick_device(device, dtype)[0], length=length,
                                           damping=damping)
        # public models have no data of ours, ''; their tokenizers differ
        if other['data'] != checkpoint['data'] or other['tokenizer'] != checkpoint['tokenizer']:
            raise ValueError(f'{folder} was trained on other data, or with another tokenizer, than '
                             'the first run: only runs on the same tokens can be compared')
        if model.config.block_size < window:
            raise ValueError(f'{folder} reads {model.config.block_size} tokens, and the windows '
                             f'have {window}: give --length={model.config.block_size}')
        points += points_of(folder, model, held_out.problem_tokens)
    return points


def conditions():
    """The knobs with which all points are measured."""
    return Conditions(ring, new_tokens, temperature, seed)


def save(points, deepest, results, settings):
    """Write results/bench.csv and its bench.json with what is known so far, if anything is."""
    rows = [row_of(point, deepest, seed) for point in points if point.windows or point.prompts]
    if rows:
        columns = dict.fromkeys(name for row in rows for name in row)   # runs have other groups
        write_csv([dict.fromkeys(columns) | row for row in rows],
                  os.path.join(results, 'bench.csv'), list(columns))
        write_json(settings | dict(threads=torch.get_num_threads()),
                   os.path.join(results, 'bench.json'))


def settings_of(checkpoint, dev, held_out):
    """What the numbers of bench.csv depend on, besides the method: a dict for bench.json."""
    names = ('dataset', 'ring', 'new_tokens', 'temperature', 'fidelity', 'compile', 'seed', 'dtype')
    return dict(iteration=checkpoint['iter_num'], device=dev,
                tokens_of_window=held_out.idx.shape[1], prompt_tokens=held_out.prompts.shape[2],
                **{name: globals()[name] for name in names})


def measure(points, held_out, results, settings):
    """
    Measure the quality of all points, then the time. After each family and each prompt
    results/bench.csv has what is known, also after Ctrl-C, and bench.json the settings. Before that
    each point is tried on a little, so that what cannot be done fails in the first seconds.
    """
    prompts = held_out.prompts
    is_task = held_out.is_task
    print(f'{len(points)} points, {len(held_out.idx)} windows and {len(prompts)} prompts. First '
          'each point is tried for a moment ...', flush=True)
    # drafts and waves are made to write the texts of a budget: they have no quality of their own
    of_windows = [point for point in points if point.method.kind not in (Kind.DRAFTS, Kind.WAVE)]
    seconds = seconds_of_quality(of_windows, held_out, conditions())
    # texts are timed with the threads that are best for the widest model; batches of windows are
    # read with all of them
    widest = max((point.model for point in points), key=lambda model: model.config.n_embd)
    threads = torch.get_num_threads()
    if len(prompts):
        use_one_thread(widest)
        seconds += len(prompts) * seconds_of_time(points, prompts[0], is_task, conditions())
        torch.set_num_threads(threads)
    compiling = ', and compiling' if compile else ''
    print(f'all of it will take about {seconds:.0f} s{compiling}')
    try:
        for words, members in groupby(of_windows, lambda point: point.method.family):
            print(f'quality: {words}', flush=True)
            measure_quality(list(members), held_out.idx, held_out.targets, conditions())
            save(points, held_out.deepest, results, settings)

        use_one_thread(widest)
        if compile and len(prompts):
            compile_all(points, prompts[0], is_task)
        for number, prompt in enumerate(prompts):
            print(f'time: prompt {number + 1} of {len(prompts)}, at all points in turn', flush=True)
            measure_time(points, prompt, number, is_task, conditions())
            save(points, held_out.deepest, results, settings)
    finally:
        save(points, held_out.deepest, results, settings)


def main():
    # with which settings
    dev, autocast = pick_device(device, dtype)
    check_knobs()
    torch.backends.cuda.matmul.allow_tf32 = False       # a tau below 1e-1 needs true float32

    # of what: a run
    no_rule = '' if calibrate is None else 'there is no threshold to find'
    model, checkpoint, folder, results = open_run(out_dir, dev, no_rule, length=length,
                                                   damping=damping)
    check_results(results)

    # on what
    held_out = read_held_out(checkpoint, dev)
    is_task = held_out.is_task
    card = f' {torch.cuda.get_device_name()}' if dev.startswith('cuda') else ''
    print(f"{folder}/ckpt.pt of iteration {checkpoint['iter_num']}, groups {model.config.groups}, "
          f'{dev}{card}, {dtype}, seed {seed}')

    # what: each point, that is each method of the model, or thresholds
    points = points_of(folder, model, held_out.problem_tokens)
    with autocast:
        if calibrate is None:
            points += points_of_others(checkpoint, held_out)
            if compile and n_prompts:
                models_to_compile(points, is_task)          # or an error, before the work
            measure(points, held_out, results, settings_of(checkpoint, dev, held_out))
            rows = [row_of(point, held_out.deepest, seed) for point in points]
            comparison.report(rows, results, is_task, fidelity)
        else:
            families, rows = calibrate_all(points[0], held_out, checkpoint, results)
            flag_of_rule = {make_exit(name).name: name for name in rules}
            calibration.report(families, rows, results, folder, is_task, flag_of_rule)
            if 'n_loop' in given:
                print(f'the promise holds under this budget: give --n_loop={n_loop} there, too')


if __name__ == '__main__':
    configurator.configure(globals())
    configurator.run(main)
