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

sample.py asks for all of this. GPT.stream and GPT.generate ask for the cache; they make drafts only
if they are told to, a wave has the rule that is given, and a prompt under latest always converges.
The numbers of loops in the first three columns are those of GPT.loop_counts.

    T    tokens of a problem
"""
from cache import POLICIES

WAVE_RULE, WAVE_TAU = 'norm_rel', 3e-3      # of a wave without a rule of its own


def choose_cache(cache, decoder):
    """The policy that `cache` stands for, None = no cache. decoder: see passes.py."""
    if cache == 'auto':
        return decoder.cache or 'exact'
    return cache


def waking_budget(T):
    """Loop steps for a problem of T tokens: news may have to pass through all of them."""
    return 2 * T + 100


def choose_counts(model, n_loop, exit, T=None):
    """The loop budget of each group. exit: a rule, or None. T: tokens of a problem, None = text."""
    if n_loop is None and T is not None and exit and exit.wake:
        n_loop = waking_budget(T)
    return model.loop_counts(n_loop, exit)


def choose_wake(wake, cache, counts, ring, is_task):
    """
    May tokens that have exited wake? counts: the budget if they may. ValueError if `wake` asks for
    it and the cache cannot do it.
    """
    keeps_steps = cache not in POLICIES or all(POLICIES[cache].keeps_every_step(n, ring)
                                               for n in counts)
    if wake and not keeps_steps:
        raise ValueError(f"--wake needs a cache that keeps every loop step, and '{cache}' does not "
                         'keep them: leave out --cache and --wave, or --wake')
    return keeps_steps and (is_task if wake is None else wake)


def choose_draft_loops(draft_loops, counts, possible):
    """The loops of drafts, None = no drafts. possible: may there be drafts without being asked?"""
    budget = min(counts, default=1)
    if draft_loops is None and possible and budget > 1:
        return max(1, round(budget / 4))
    return draft_loops or None


def choose_converge(cache, n_loop=None):
    """Does a prompt loop until it has converged?"""
    return n_loop is None and cache in POLICIES and POLICIES[cache].converge
