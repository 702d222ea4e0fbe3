"""
What a run of train.py goes on from: the run in its folder, or the weights of another.

Not run by itself. The run's knobs come along, and those that a run cannot change are refused.
"""
import os
from shlex import quote

from common.checkpoint import NotWhole, check_free, find_run, load_checkpoint
from common.distributed import say

# knobs that may change within a run: they shape neither the weights nor the columns of the log
FREE_KNOBS = {'out_dir', 'resume', 'overwrite', 'max_iters', 'eval_interval', 'eval_windows',
              'log_interval', 'save_interval', 'keep_iters', 'device', 'compile'}
# what may differ from the model whose weights a run starts from; a class of its own must fit them
FREE_FIELDS = {'model_class', 'dropout', 'mean_recurrence', 'bptt_k', 'adapter_init', 'step_noise'}


def last_checkpoint(out_dir, trusted=None):
    """What --resume continues from, its dict and path: ckpt.pt, or ckpt.old.pt if damaged."""
    paths = [path for path in (f'{out_dir}/ckpt.pt', f'{out_dir}/ckpt.old.pt')
             if os.path.exists(path)]
    for path in paths:
        try:
            _, checkpoint = load_checkpoint(path, trusted=trusted)
        except NotWhole as error:
            if path == paths[-1]:
                raise
            say(f'warning: {error}; resuming {paths[-1]}')
            continue
        if 'optimizer' not in checkpoint:
            raise ValueError(f"'{path}' holds weights and nothing to resume: start from it with "
                             f'--init_from={quote(path)} and another --out_dir')
        return checkpoint, path
    say(f'no checkpoint in {out_dir} yet: starting a new run')
    return {}, ''


def earlier_run(knobs, given):
    """
    What a run goes on from, as its knobs resume, init_from and out_dir say.

    knobs: {name: value} of train.py; given: the names of those that the user has set. Returns the
    earlier checkpoint, {} if there is none; its path if that very run is continued, '' otherwise;
    and the knobs, where those not given are the earlier run's.
    """
    out_dir = knobs['out_dir']
    init_from = knobs['init_from']
    if init_from == 'resume':           # nanoGPT's words
        raise ValueError('--init_from=resume is not a file: continue the run in --out_dir with '
                         '--resume')
    if init_from.startswith('gpt2'):
        raise ValueError(f'--init_from={init_from} is not a file: a GPT-2 has no groups that loop; '
                         '--init_from takes a ckpt.pt, and zoo/ other models')
    if find_run(out_dir)[1] != out_dir:
        raise ValueError(f'{out_dir} is read-only: choose another --out_dir, and --init_from to '
                         'continue from its weights')

    before = {}
    resumed = ''
    if knobs['resume']:
        before, resumed = last_checkpoint(out_dir, knobs['model_class'])
    if resumed:
        earlier = before['model_args'] | before['config']
        free = FREE_KNOBS
    else:
        check_free(out_dir, knobs['overwrite'], init_from)
        if not init_from:
            return {}, '', knobs
        _, before = load_checkpoint(init_from, trusted=knobs['model_class'])
        earlier = before['model_args']
        free = FREE_FIELDS
        if earlier['pos'] == 'rotary':          # no weight depends on the length of a window
            free = free | {'block_size'}
    earlier = earlier | dict(model_class=before['model_class'], out_dir=out_dir)

    taken = {}
    changed = []
    for name in sorted(knobs.keys() & earlier.keys()):
        if name not in given:
            taken[name] = earlier[name]
        elif name not in free and knobs[name] != earlier[name]:
            changed.append(f'{name} = {knobs[name]} (it was {earlier[name]})')
    if changed:
        raise ValueError(f'{resumed or init_from} had other knobs: {", ".join(changed)}; leave '
                         'them out, or train in another --out_dir')
    knobs = knobs | taken
    if resumed and before['iter_num'] > knobs['max_iters']:
        raise ValueError(f"the run in {out_dir} has {before['iter_num']} iterations already: "
                         '--max_iters may not be smaller')
    return before, resumed, knobs
