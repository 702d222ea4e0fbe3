"""
A prompt decoded with every cache policy and some exit rules, and by drafts.

    python -m decode
    python -m decode --start='def ' --n_loop=12
"""
import time

import torch

from cache import POLICIES
from common.configurator import configure, run
from decode import use_one_thread
from exits import make_exit

start = 'The method returns '
max_new_tokens = 24
n_loop = 8                  # loop steps of the fixed budget, and the budget of the rules
tau = 0.1                   # threshold of norm_rel; accel uses ten times this
ring = 4                    # slots of the ring policy


def decodings():
    """{label: arguments of GPT.generate}; the texts are compared with that of the first."""
    rules = {'fixed': None, f'norm_rel {tau:g}': make_exit('norm_rel', tau),
             f'accel {10 * tau:g}': make_exit('accel', 10 * tau)}
    shown = {f'{policy or "no cache"}, {label}': dict(cache=policy, exit=rule)
             for policy in (*POLICIES, None) for label, rule in rules.items()}
    if n_loop > 2:
        shown['exact, drafts of 2 loops'] = dict(cache='exact', draft_loops=2)
    return shown


def main():
    from common.checkpoint import open_run
    model, *_ = open_run('pretrained/text')
    use_one_thread(model)
    prompt = torch.tensor([[*start.encode()]])
    first_text = None
    print(f'{"":28s}   equal tokens   loop steps   ms per token')
    for label, decoding in decodings().items():
        begin = time.perf_counter()
        text, steps_used = model.generate(prompt, max_new_tokens, temperature=0, n_loop=n_loop,
                                          ring=ring, **decoding)
        ms = 1e3 * (time.perf_counter() - begin) / max_new_tokens
        if first_text is None:
            first_text = text
        same = (text == first_text)[0, prompt.shape[1]:].sum().item()
        print(f'{label:28s} {same:12d} of {max_new_tokens} {steps_used.float().mean():11.2f} '
              f'{ms:12.1f}')
    print('\nequal tokens: as in the first line. With `latest` the prompt may loop beyond the '
          'budget, until it has converged.\nThe steps of drafts are not counted.')


if __name__ == '__main__':
    configure(globals())
    run(main)
