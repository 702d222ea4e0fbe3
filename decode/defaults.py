"""
What a decoding does where its caller leaves something open. Nothing else in the code decides it.

    knob              text                                  problems of a task
    exit=None         no rule: all loops of the budget;     no rule
                      a wave commits by norm_rel
    n_loop=None       mean_recurrence; with a rule at       the same; with a rule that wakes at
                      most 30                               most 2 T + 100
    wake=None         an exit is for good                   it can be undone, if the cache keeps
                                                            every loop step
    cache='auto'      exact; of a wave latest               exact: all tokens in one pass
    cache=None        no cache: the context is read anew for every token, which gives what exact
                      gives
    draft_loops=None  a quarter of the budget, for one      no drafts
                      text without a rule
    a prompt          it is read as the new tokens are; under latest it loops until it has
                      converged, but within n_loop if that is given

sample.py asks for all of this, GPT.stream and GPT.generate for the cache, and they leave out drafts
and let every prompt under latest converge.

`exact` gives what the model gives without a cache. A model whose loops do not converge needs that,
such as one of zoo/etd.py before its training. So does a rule that wakes. `latest` keeps one loop
step in place of all, and so takes less memory.

    T    tokens of a problem
"""
from cache import POLICIES

WAVE_RULE, WAVE_TAU = 'norm_rel', 3e-3      # of a wave without a rule of its own


def choose_cache(cache, decoder):
    """The policy that `cache` stands for, None = no cache. decoder: see passes.py."""
    if cache == 'auto':
        return decoder.cache or 'exact'
    return cache


def choose_counts(model, n_loop, exit, T=None):
    """The loop budget of each group. exit: a rule, or None. T: tokens of a problem, None = text."""
    if n_loop is None and T is not None and exit and exit.wake:
        n_loop = 2 * T + 100
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
