"""
A prompt decoded with every cache policy and some exit rules, and by drafts.

    python -m decode
    python -m decode --start='def ' --n_loop=12
"""
import time

import torch

from cache import POLICIES
from common.configurator import configure, run
from decode import stream, use_one_thread
from exits import make_exit

start = 'The method returns '
max_new_tokens = 24
n_loop = 8                  # loop steps of the fixed budget, and the budget of the rules
tau = 0.1                   # threshold of norm_rel; accel uses ten times this
ring = 4                    # slots of the ring policy


def main():
    from common.checkpoint import open_run
    model, *_ = open_run('pretrained/text')
    use_one_thread(model)
    prompt = torch.tensor([[*start.encode()]])
    rules = [None, make_exit('norm_rel', tau), make_exit('accel', 10 * tau)]
    ways = [(f'{policy or "no cache"}, {f"{rule.name} {rule.tau:g}" if rule else "fixed"}',
             dict(cache=policy, exit=rule)) for policy in (*POLICIES, None) for rule in rules]
    if n_loop > 2:
        ways.append(('exact, drafts of 2 loops', dict(cache='exact', draft_loops=2)))
    reference = None
    print(f'{"":28s}   equal tokens   loop steps   ms a token')
    for name, how in ways:
        begin = time.perf_counter()
        tokens, steps = zip(*stream(model, prompt, max_new_tokens, temperature=0, n_loop=n_loop,
                                    ring=ring, **how))
        ms = 1e3 * (time.perf_counter() - begin) / len(tokens)
        reference = reference or tokens
        same = sum(bool(a == b) for a, b in zip(tokens, reference))
        print(f'{name:28s} {same:12d} of {len(tokens)} '
              f'{torch.cat(steps).float().mean():11.2f} {ms:12.1f}')
    print('\nequal tokens: as in the first line. With `latest` the prompt may loop beyond the '
          'budget, until it has converged.\nThe steps of drafts are not counted.')


if __name__ == '__main__':
    configure(globals())
    run(main)
