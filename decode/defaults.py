"""
What a decoding does where its caller leaves something open. Nothing else in the code decides it.

                        text                   text, a rule    a task             a task, a rule
    cache='auto'        exact                  exact           exact, one pass    exact, one pass
    n_loop=None         mean_recurrence        at most 30      mean_recurrence    at most 2 T + 100
    wake=None                                  no                                 yes
    draft_loops=None    a quarter of n_loop    no drafts       no drafts          no drafts

    exit=None     there is no rule; but a wave has norm_rel
    cache=None    the context is read anew for every token, which gives what exact gives
    a wave        its cache is latest
    latest        a task is read one token after another, and no token wakes. The prompt of a text
                  loops until it has converged, but within n_loop if that is given
    ETD           a model of zoo/etd.py is decoded like any other. Before it is trained its loops do
                  not converge, so `latest` gives something else than the model: auto is exact

`choose` answers all of this at once, for sample.py. GPT.stream and GPT.generate ask for the cache
alone; they make drafts only if they are told to, a wave has the rule that is given, and a prompt
under latest always converges. The numbers of loops in the first three columns are those of
GPT.loop_counts.

    T    tokens of a problem
"""
from dataclasses import replace
from typing import NamedTuple

from cache import POLICIES
from exits import Exit, make_exit

WAVE_RULE, WAVE_TAU = 'norm_rel', 3e-3      # of a wave without a rule of its own


class Decoding(NamedTuple):
    """The arguments of a decoding, with nothing left open."""
    exit: Exit | None           # the rule
    counts: list                # the loop budget of each group
    cache: str | None           # the policy; None = no cache
    draft_loops: int | None     # None = no drafts
    converge: bool              # does a prompt loop until it has converged?


def choose(model, exit=None, tau=None, hits=None, wake=None, n_loop=None, cache='auto', ring=8,
           draft_loops=None, wave=0, may_draft=True, T=None):
    """
    The arguments, None or 'auto' where they are left open -> a Decoding.

    exit: the name of a rule. T: tokens of a problem, None = text. may_draft: may a text be drafted
    without being asked? ValueError if `wake` is True, and the cache does not keep every loop step.
    """
    rule = make_exit(exit, tau, hits) if exit else None
    if wave and not exit:
        rule = make_exit(WAVE_RULE, WAVE_TAU if tau is None else tau, hits)
    policy = choose_cache(cache, 'latest' if wave else None)

    # may a token that has exited wake?
    is_task = T is not None
    wakes = rule is not None and (is_task if wake is None else wake)
    counts = choose_counts(model, n_loop, rule, T if wakes else None)
    if wakes and not keeps_every_step(policy, counts, ring):
        if wake:
            raise ValueError(f"--wake needs a cache that keeps every loop step, and '{policy}' "
                             'does not keep them: leave out --cache and --wave, or --wake')
        wakes = False
        counts = choose_counts(model, n_loop, rule)
    if wakes:
        rule = replace(rule, wake=True)

    # drafts are the fastest decoder that writes the very text of the loop budget
    budget = min(counts, default=1)
    is_plain = rule is None and policy == 'exact' and not is_task
    if draft_loops is None and may_draft and is_plain and budget > 1:
        draft_loops = max(1, round(budget / 4))
    return Decoding(rule, counts, policy, draft_loops or None, choose_converge(policy, n_loop))


def choose_cache(cache, only=None):
    """The policy that `cache` stands for. only: the one that a decoder needs, None = any."""
    if cache == 'auto':
        return only or 'exact'
    return cache


def waking_budget(T):
    """Loop steps for a problem of T tokens: news may have to pass through all of them."""
    return 2 * T + 100


def choose_counts(model, n_loop, exit, T=None):
    """
    The loop budget of each group. exit: a rule, or None. T: tokens of a problem, if tokens may wake
    in it.
    """
    if n_loop is None and T is not None:
        n_loop = waking_budget(T)
    return model.loop_counts(n_loop, exit)


def keeps_every_step(cache, counts, ring):
    """Are the keys and values of each loop step kept, or no cache used? Waking needs that."""
    return cache not in POLICIES or all(POLICIES[cache].keeps_every_step(n, ring) for n in counts)


def choose_converge(cache, n_loop=None):
    """Does a prompt loop until it has converged?"""
    return n_loop is None and cache in POLICIES and POLICIES[cache].converge
