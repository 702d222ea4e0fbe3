"""
Where a run of train.py starts: from new weights, from the last checkpoint in its own folder
(--resume), or from the weights of another run (--init_from).

A run that continues has the knobs of the earlier one. A flag that gives another value is refused,
unless it may change (FREE_KNOBS, FREE_FIELDS). With --resume the values of config files do not
count: the files are there for the parts that they add, and flags may have overridden their values.
"""
import os
from shlex import quote
from typing import NamedTuple

from common.checkpoint import NotWhole, load_checkpoint, say_own_files
from common.distributed import say
from common.errors import UserError
from common.run_folder import RESUMED, check_free, find_checkpoint, find_run, is_read_only

# knobs that may change within a run: they shape neither the weights nor the columns of the log
FREE_KNOBS = {'out_dir', 'resume', 'overwrite', 'max_iters', 'eval_interval', 'eval_windows',
              'log_interval', 'save_interval', 'keep_iters', 'device', 'compile'}
# what may differ from the model whose weights a run starts from; a class of its own must fit them
FREE_FIELDS = {'model_class', 'dropout', 'mean_recurrence', 'bptt_k', 'adapter_init', 'step_noise',
               'damping'}


class Start(NamedTuple):
    """Where a run starts from."""
    knobs: dict         # of train.py; those that are not given are the earlier run's
    checkpoint: dict    # the earlier one, {} if there is none
    resumed_from: str   # its path if that very run is continued, '' otherwise


def where_to_start(knobs, given, flags):
    """
    Where a run starts, as its knobs resume, init_from and out_dir say -> Start.

    knobs: {name: value} of train.py; given: the names of those that the user has set; flags: {name:
    value} of those that flags have set. ValueError if one of these differs from the earlier run's
    and may not, or if a run in out_dir would be lost.
    """
    if knobs['resume']:
        knobs = knobs | flags       # a file behind a flag does not override it
    out_dir = knobs['out_dir']
    init_from = find_checkpoint(knobs['init_from'])
    is_file = os.path.exists(init_from)
    if init_from == 'resume' and not is_file:       # nanoGPT's words, and its gpt2-xl
        raise UserError('--init_from=resume is not a file: continue the run in --out_dir with '
                        '--resume')
    if init_from.startswith('gpt2') and not os.path.exists(knobs['init_from']):
        raise UserError(f'--init_from={init_from} is not a file: a GPT-2 has no groups that loop; '
                        '--init_from takes a ckpt.pt, and zoo/ other models')
    folder, _ = find_run(out_dir)       # pretrained/ is found from anywhere
    if is_read_only(folder):
        raise UserError(f'{out_dir} is read-only: choose another --out_dir, and --init_from to '
                        'continue from its weights')

    if knobs['resume']:
        checkpoint, path = last_checkpoint(out_dir, knobs['model_class'])
        if path:
            return continue_run(knobs, given, flags, checkpoint, path)
    check_free(out_dir, knobs['overwrite'], init_from)
    if knobs['resume']:
        say(f'no checkpoint in {out_dir} yet: starting a new run')
    if init_from:
        return start_from_weights(knobs, given, init_from)
    return Start(knobs, {}, '')


def continue_run(knobs, given, flags, checkpoint, path):
    """The Start of a run that is continued: all its knobs come along."""
    earlier = knobs_in(checkpoint) | dict(out_dir=knobs['out_dir'])
    of_files = (given & earlier.keys()) - flags.keys() - {'resume', 'overwrite'}
    # None and '' leave a choice open, and the earlier run has made it
    unused = [f'{name} = {knobs[name]} (it is {earlier[name]})' for name in sorted(of_files)
              if knobs[name] not in (None, '', earlier[name])]
    if unused:
        say("a run that continues keeps its knobs, so these of a config file are not used: "
            f"{', '.join(unused)}; give those that may change as flags")
    knobs = with_earlier_knobs(knobs, flags, earlier, FREE_KNOBS, path)
    if checkpoint['iter_num'] > knobs['max_iters']:
        raise UserError(f"the run in {knobs['out_dir']} has {checkpoint['iter_num']} iterations "
                        'already: --max_iters may not be smaller')
    return Start(knobs, checkpoint, path)


def start_from_weights(knobs, given, init_from):
    """The Start of a new run from the weights of another: the fields of its model come along."""
    _, checkpoint = load_checkpoint(init_from, named_class=knobs['model_class'])
    earlier = checkpoint['model_args'] | dict(model_class=checkpoint['model_class'])
    free = FREE_FIELDS
    if earlier['pos'] == 'rotary':              # no weight depends on the length of a window
        free = free | {'block_size'}
    return Start(with_earlier_knobs(knobs, given, earlier, free, init_from), checkpoint, '')


def last_checkpoint(out_dir, named_class=None):
    """
    What --resume continues from, a dict and its path: ckpt.pt, or ckpt.old.pt if ckpt.pt is damaged
    or missing; {} and '' if there is neither. named_class: see load_checkpoint.
    """
    paths = [f'{out_dir}/{name}' for name in RESUMED if os.path.exists(f'{out_dir}/{name}')]
    for path in paths:
        try:
            _, checkpoint = load_checkpoint(path, named_class=named_class)
        except NotWhole as error:
            if path == paths[-1]:
                raise
            say(f'warning: {error}; resuming {paths[-1]}')
            continue
        if 'optimizer' not in checkpoint:
            raise UserError(f"'{path}' holds weights and nothing to resume: start from it with "
                            f'--init_from={quote(path)} and another --out_dir')
        say_own_files(checkpoint)
        return checkpoint, path
    return {}, ''


def knobs_in(checkpoint):
    """All knobs of a checkpoint's run, with the model's fields that are newer than the file."""
    model_class = dict(model_class=checkpoint['model_class'])
    return checkpoint['model_args'] | checkpoint['config'] | model_class


def with_earlier_knobs(knobs, given, earlier, free, path):
    """
    The knobs, with their earlier values but for those that are given. path: the checkpoint that has
    the earlier values. ValueError if a knob that is given has another value than earlier and is not
    free to change.
    """
    inherited = {}
    changed = []
    for name in sorted(knobs.keys() & earlier.keys()):
        if name not in given:
            inherited[name] = earlier[name]
        elif name not in free and knobs[name] != earlier[name]:
            changed.append(f'{name} = {knobs[name]} (it was {earlier[name]})')
    if changed:
        raise UserError(f'{path} had other knobs: {", ".join(changed)}; leave them out, or train '
                        'in another --out_dir')
    return knobs | inherited


def restore(checkpoint, run):
    """
    Give a run the rest of what its checkpoint holds: optimizers, iterations, losses. It has the
    weights already.
    """
    for name, optimizer in run.optimizers.items():
        optimizer.load_state_dict(optimizer.state_dict() | dict(state=checkpoint[name]))
    run.done = checkpoint['iter_num']
    run.saved = run.done
    run.val_loss = checkpoint['val_loss']
    run.trend = checkpoint['trend']
    run.spikes = checkpoint['spikes']


def check_same_data(examples, checkpoint, dataset, out_dir):
    """ValueError unless the run that continues had this very data set or task, the knob dataset."""
    if checkpoint['data'] == examples.sha256:
        return
    advice = 'restore that text'
    if examples.is_task:
        advice = ('tasks.py has changed since then; start from the weights in another --out_dir '
                  f'with --init_from={out_dir}/ckpt.pt')
    raise UserError(f'{dataset} is not the data set that the run in {out_dir} had (its sha256 '
                    f'differs): {advice}')
