"""
Measuring: how good and how fast a way to decode is, for bench.py.

The quality of points is measured on windows, their time after prompts, and what a threshold costs,
for --calibrate, on half of the windows or prompts.

    B, N    windows of a batch, all windows
    T, V    tokens of a window, vocabulary
"""
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

import decode
from common.calibration import Family, Verdict
from common.evaluation import windows_at_once
from common.points import Kind, Point, PromptResult, WindowResult, column, excess, identical
from common.thresholds import threshold_key
from exits import make_exit
from loops import Plan, as_noise


class Conditions(NamedTuple):
    """Under which all points are measured: knobs of bench.py."""
    ring: int = 8               # slots of the policy `ring`
    new_tokens: int = 24        # length of a text
    temperature: float = 0.0    # of its draws
    seed: int = 0               # of x^(0) and the texts


class HeldOut(NamedTuple):
    """What all points are measured on."""
    idx: torch.Tensor               # windows (N, T)
    targets: torch.Tensor           # (N, T), below 0 = no label
    prompts: torch.Tensor           # the beginnings of the first n windows, (n, 1, any)
    is_task: bool                   # a window is a problem, and a prompt the whole of it
    deepest: float | None = None    # the depth of the deepest label of a problem, on average

    @property
    def problem_tokens(self):
        """Tokens of a problem, None = a text."""
        return self.idx.shape[1] if self.is_task else None

    def half(self, i):
        """Every second window and prompt, from window i on."""
        return self._replace(idx=self.idx[i::2], targets=self.targets[i::2],
                             prompts=self.prompts[i::2])


# quality ------------------------------------------------------------------------------------------

def measure_quality(points, idx, targets, conditions):
    """Measure points on windows (N, T), a batch at a time: a WindowResult for each window."""
    at_once = windows_at_once(points[0].model.config, len(idx))
    for x, y in zip(idx.split(at_once), targets.split(at_once)):
        for point in points:
            point.windows += quality_of(point, x, y, conditions)


def quality_of(point, idx, targets, conditions):
    """A batch of windows (B, T) -> a list of WindowResult."""
    logits, steps, evals = decode_given(point, idx, conditions)
    nats = cross_entropy(logits.float().transpose(1, 2), targets, reduction='none')     # (B, T)
    right = logits.argmax(-1) == targets
    means = evals.cpu().double().mean(dim=1).numpy()                            # (B, groups)
    most = last = [None] * len(idx)
    if point.model.groups:
        most = evals.amax(dim=(1, 2)).tolist()
        last = steps.amax(dim=(1, 2)).tolist()
    nats, right, labels = sums(nats), sums(right), sums(targets >= 0)
    return [WindowResult(nats=nats[b], right=right[b], labels=labels[b], evals=means[b],
                         most_evals=most[b], last_step=last[b]) for b in range(len(idx))]


def sums(values):
    """(B, T) -> the sum over each window, a list."""
    return values.cpu().double().sum(dim=1).tolist()


def decode_given(point, idx, conditions):
    """
    Decode given idx (B, T) -> logits (B, T, V), loop steps kept and block maps (B, T, groups):
    under `exact` all tokens in one pass, elsewhere one by one.
    """
    method = point.method
    torch.manual_seed(conditions.seed)      # for rules that toss a coin
    plan = Plan(point.model.loop_counts(method.n_loop), method.rule, as_noise(conditions.seed))
    return decode.teacher_forced(point.model, idx, plan, method.policy, conditions.ring)


def seconds_of_quality(points, held_out, conditions):
    """Measure a part of the windows, and forget it -> the seconds that all of them will take."""
    if held_out.is_task:        # 4 problems
        idx, targets = held_out.idx[:4], held_out.targets[:4]
    else:                       # 8 tokens of each window
        idx, targets = held_out.idx[:, :8], held_out.targets[:, :8]
    begin = time.perf_counter()
    measure_quality([replace(point, windows=[]) for point in points], idx, targets, conditions)
    return (time.perf_counter() - begin) * held_out.idx.numel() / idx.numel()


# time ---------------------------------------------------------------------------------------------

def measure_time(points, prompt, number, is_task, conditions):
    """Continue prompt `number`, (1, n), or read a problem (1, T): with each method, one by one."""
    for point in points:
        if is_task:
            point.prompts.append(read_problem(point, prompt, conditions))
        else:
            point.prompts.append(continue_prompt(point, prompt, conditions, number))


def continue_prompt(point, prompt, conditions, number=0):
    """
    Continue a prompt (1, n) -> a PromptResult: the new tokens, and what they cost, on average of
    all but the first of them. What is computed for tokens that are thrown away counts.

    number: of the prompt; its tokens are drawn with seed + number.
    """
    new = conditions.new_tokens
    seed = conditions.seed
    layers = torch.tensor([len(group) for group in point.model.config.groups])
    passes = []
    torch.manual_seed(seed)         # for rules that toss a coin
    stream = point.model.stream(prompt, new, conditions.temperature, seed=seed + number,
                                noise_seed=seed, ring=conditions.ring, passes=passes,
                                **point.method.arguments())
    tokens = [next(stream)[0]]      # this also reads the prompt
    passes.clear()
    begin = time.perf_counter()
    tokens += [token for token, _ in stream]        # the host waits for the device at each token
    ms = 1e3 * (time.perf_counter() - begin)
    # of each pass the block maps (1, T, groups), times the layers of a group
    blocks = sum((evals.cpu() * layers).sum().item() for evals in passes)
    return PromptResult(ms / (new - 1), len(passes) / (new - 1), blocks / (new - 1),
                        torch.cat(tokens, dim=1))


def read_problem(point, problem, conditions):
    """Read a problem (1, T) -> what that costs, a PromptResult."""
    begin = time.perf_counter()
    logits, _, _ = decode_given(point, problem, conditions)
    logits.argmax(-1).cpu()                                 # waits for the device
    return PromptResult(1e3 * (time.perf_counter() - begin) / problem.shape[1])


def seconds_of_time(points, prompt, is_task, conditions):
    """Begin to decode a prompt at each point -> the seconds that it will take."""
    seconds = 0.0
    for point in points:
        begin = time.perf_counter()
        if is_task:
            read_problem(point, prompt, conditions)
        else:
            begun = continue_prompt(point, prompt, conditions._replace(new_tokens=3))
            seconds += (conditions.new_tokens - 3) * begun.ms / 1e3
        seconds += time.perf_counter() - begin
    return seconds


# a threshold: what it costs -----------------------------------------------------------------------

def with_tau(method, tau):
    """The same method, whose rule has this threshold."""
    rule = make_exit(method.rule.name, tau, wake=method.rule.wake)
    return replace(method, rule=rule)


class Half(NamedTuple):
    """Half of the windows, and the full budget on them, which is measured when it is needed."""
    held_out: HeldOut
    reference: Point

    def point(self, method):
        """A point of another method, of the same model."""
        return Point(self.reference.run, self.reference.model, method, self.reference)


def judge_loss(method, nats, conditions, tau, half):
    """Does the rule with this threshold cost at most so many nats per label on half the windows?"""
    point = half.point(with_tau(method, tau))
    not_measured = [each for each in (half.reference, point) if not each.windows]
    measure_quality(not_measured, half.held_out.idx, half.held_out.targets, conditions)
    cost, low, high = excess(point, conditions.seed)
    evals = column(point.windows, 'evals').mean()
    costs = dict(cost=cost, cost_low=low, cost_high=high, evals=evals)
    return Verdict(costs, mean_keeps=bool(cost <= nats), upper_end_keeps=bool(high <= nats))


def judge_texts(method, fidelity, conditions, tau, half):
    """Does the wave with this threshold leave at least this share of the texts as they are?"""
    point = half.point(with_tau(method, tau))
    decode.use_one_thread(point.model)
    for each in half.reference, point:
        if not each.prompts:
            each.prompts += [continue_prompt(each, prompt, conditions)
                             for prompt in half.held_out.prompts]
    share = identical(point)
    kept = share >= fidelity
    return Verdict(dict(identical=share), mean_keeps=kept, upper_end_keeps=kept)


def family_of(method, nats, fidelity, conditions):
    """
    A method, whatever its threshold -> its Family. nats: what a rule promises to cost at most.
    fidelity: the share of texts that a wave promises to leave as they are.
    """
    if method.kind is Kind.WAVE:
        of_wave = [method.wave, method.wave_steps]
        promise = dict(texts=fidelity)
        judge = partial(judge_texts, method, fidelity, conditions)
    else:
        of_wave = None
        promise = dict(nats=nats)
        judge = partial(judge_loss, method, nats, conditions)
    key = threshold_key(method.rule, method.policy, conditions.ring, of_wave)
    return Family(method.family, key, promise, judge)
