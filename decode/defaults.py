"""
What a decoding does where its caller leaves something open. `choose` decides it, for sample.py and
for GPT.stream and GPT.generate.

                        text                   text, a rule    a task             a task, a rule
    cache='auto'        exact                  exact           exact              exact
    n_loop=None         mean_recurrence        at most 30      mean_recurrence    at most 2 T + 100
    tau=None                                   exits.json                         exits.json
    wake=None                                  no                                 yes
    draft_loops=None    a quarter of n_loop    no drafts       no drafts          no drafts

    exit=None     there is no rule; but a wave has norm_rel
    tau=None      sample.py looks for a threshold in exits.json, which bench.py --calibrate writes;
                  where there is none it is the rule's own, and 0.003 for a wave without a rule
    a wave        its cache is latest

How a prompt or a problem is read depends on the cache:

                  a prompt                                  a problem
    exact, None   in one pass                               in one pass, if the rule allows
    ring          in one pass                               one token after another
    latest        in one pass, until it has converged;      one token after another
                  within n_loop if that is given

On a task no token wakes, and the budget is 30, under `latest` or a `ring` that is smaller than the
budget. A rule that has to wake (wake=True) is refused there, on a task and for a text.

Without a cache (None) the context is read anew for every token, which gives what exact gives. A
rule that reads all tokens of a pass at once reads a problem token by token.

GPT.stream and GPT.generate get a rule, with its own tau and wake, in place of a name. They differ
from the tables in three points: there are drafts only where draft_loops is given; a wave without a
rule has none; under `latest` a prompt converges whether n_loop is given or not.

bench.py takes one budget for all its methods: the largest that `choose` would take for one of them.

The numbers of loops in the first three columns are those of GPT.loop_counts.

    T    tokens of the problem
"""
from dataclasses import replace
from typing import NamedTuple

from cache import POLICIES
from exits import Exit, make_exit
from loops import Plan, as_noise

WAVE_RULE, WAVE_TAU = 'norm_rel', 3e-3      # of a wave without a rule of its own


class Decoding(NamedTuple):
    """The arguments of a decoding, with nothing left open; for some of them see make_decoder."""
    rule: Exit | None           # who exits and wakes, and when; None = fixed loops
    counts: list                # the loop budget of each group
    policy: str | None          # of the cache; None = no cache
    ring: int                   # slots of the policy `ring`
    converge: bool              # does a prompt loop until it has converged?
    warm_start: bool
    draft_loops: int | None     # None = no drafts
    wave: int                   # 0 = no wave
    wave_steps: int | list

    def plan(self, noise_seed=0, passes=None):
        """A loops.Plan of its passes, still without a cache. passes: a list, see there."""
        return Plan(self.counts, self.rule, as_noise(noise_seed), passes=passes)


def choose_rule(name, tau=None, hits=None, wave=0):
    """The rule of this name; of a wave without one WAVE_RULE; otherwise None."""
    if name:
        return make_exit(name, tau, hits)
    if wave:
        return make_exit(WAVE_RULE, WAVE_TAU if tau is None else tau, hits)
    return None


def choose(model, rule=None, T=None, wake=None, n_loop=None, cache='auto', ring=8,
           warm_start=False, draft_loops=None, wave=0, wave_steps=1, may_draft=False,
           always_converge=False):
    """
    The arguments, None or 'auto' where they are left open -> a Decoding.

    rule: see choose_rule. T: tokens of a problem, None = a text. may_draft: may there be drafts
    that were not asked for? always_converge: does a prompt under `latest` converge even if n_loop
    is given? ValueError for an unknown policy, and for a rule that must wake (wake or rule.wake is
    True) with a cache that does not keep every loop step.
    """
    is_task = T is not None
    has_rule = rule is not None
    policy = choose_cache(cache, wave)

    if has_rule:
        if rule.wake:
            wake = True
        counts, wakes = budget_and_wake(model, policy, ring, T, wake, n_loop)
        if wake and not wakes:
            raise ValueError('waking needs a cache that keeps every loop step, and '
                             f"'{policy}' does not keep them: choose cache='exact' without a "
                             'wave, or a rule that does not wake')
        rule = replace(rule, wake=wakes)
    else:
        counts = model.loop_counts(n_loop)

    # drafts are the fastest decoder that writes the very text of the loop budget
    budget = min(counts, default=1)
    drafts_fit = not has_rule and not is_task and not warm_start and policy == 'exact'
    if draft_loops is None and may_draft and drafts_fit and budget > 1:
        draft_loops = max(1, round(budget / 4))
    if draft_loops == 0:            # asked for: no drafts
        draft_loops = None

    converge = policy is not None and POLICIES[policy].converge
    if n_loop is not None and not always_converge:
        converge = False
    return Decoding(rule, counts, policy, ring, converge, warm_start, draft_loops, wave,
                    wave_steps)


def choose_cache(cache, wave=0):
    """The policy that `cache` stands for, None = no cache. ValueError for an unknown policy."""
    if cache == 'auto':
        return 'latest' if wave else 'exact'
    if cache is not None and cache not in POLICIES:
        raise ValueError(f"unknown cache policy '{cache}': choose one of {', '.join(POLICIES)}, "
                         'auto, or None to recompute the context; name a file of your own '
                         'behind the script')
    return cache


def budget_and_wake(model, policy, ring, T=None, wake=None, n_loop=None):
    """
    The loop budget of each group with a rule, and whether tokens that have exited wake.

    Tokens wake only if the policy keeps the keys of every loop step of the budget. T: tokens of a
    problem, None = a text. wake: None = on a task. n_loop: None = 30, or on a task waking_budget if
    tokens wake with it.
    """
    if wake is None:
        wake = T is not None
    if wake:
        longer = waking_budget(T) if n_loop is None and T is not None else n_loop
        counts = model.loop_counts(longer, has_rule=True)
        if keeps_every_step(policy, counts, ring):
            return counts, True
    return model.loop_counts(n_loop, has_rule=True), False


def waking_budget(T):
    """Loop steps for a problem of T tokens: news may have to pass through all of them."""
    return 2 * T + 100


def keeps_every_step(policy, counts, ring):
    """Are the keys and values of each loop step kept, or no cache used? Waking needs that."""
    return policy is None or all(POLICIES[policy].keeps_every_step(n, ring) for n in counts)
