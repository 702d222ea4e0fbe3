"""
What a decoding does where its caller leaves something open. Nothing else in the code decides it.

                    text                                a problem of a task (sample.py)
    exit=None       no rule: all loops of the budget    the same
    n_loop=None     mean_recurrence; with a rule 30     the same; with a rule that wakes 2 T + 100
    wake=None       no                                  yes, if the cache keeps every loop step
    cache='auto'    exact; for a wave latest            exact, the whole problem in one pass
    cache=None      the context is computed anew for every token, which gives what exact gives
    a prompt        by the rule and budget of the new tokens. Under latest it converges first (see
                    passes.plan_of_prompt), but a budget that is given to sample.py holds for it

Why exact: it gives what the model gives without a cache. A model whose loops do not converge, such
as one of zoo/etd.py before it is trained, needs that, and so does a rule that wakes. `latest` takes
the memory of one loop step in place of all.

    T    tokens of a problem
"""

def choose_cache(cache, decoder):
    """The policy that `cache` stands for, None = no cache. decoder: see passes.py."""
    if cache == 'auto':
        return decoder.cache or 'exact'
    return cache
