"""
Bad input, said before anything is done: the checks of knobs that shape a model and its training.

Not run by itself: model.GPTConfig and train.py call it. A ValueError says what is wrong and what to
do; the script that runs ends with it as one line.
"""
from numbers import Integral

from common.distributed import WORLD
from common.optim import OPTIMIZERS
from loops import INJECTIONS, LOOP_DRAWS


def check_shape(config):
    """ValueError where the values of a GPTConfig do not fit together."""
    for name in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd',
                 'mean_recurrence', 'bptt_k', 'rope_base', 'norm_eps'):
        if not getattr(config, name) > 0:
            raise ValueError(f'{name} must be positive, not {getattr(config, name)}')
    if config.n_embd % config.n_head:
        raise ValueError(f'n_embd = {config.n_embd} is not divisible by n_head = {config.n_head}')
    if config.pos == 'rotary' and config.n_embd // config.n_head % 2:
        raise ValueError(f'rotary positions turn pairs: n_embd / n_head must be even, not '
                         f'{config.n_embd // config.n_head}')
    if config.mlp_width is not None and config.mlp_width < 1:
        raise ValueError(f'mlp_width must be positive, not {config.mlp_width}')
    choices = dict(injection=INJECTIONS, adapter_init=('sum', 'random'),
                   x0=('noise', 'zero', 'e'), pos=('learned', 'rotary'),
                   sandwich=('sum', 'branch'), mlp=('plain', 'gated'))
    for name, known in choices.items():
        if getattr(config, name) not in known:
            raise ValueError(f"unknown {name} '{getattr(config, name)}': "
                             f"choose one of {', '.join(known)}")
    check_groups(config.groups, config.n_layer)


def check_groups(groups, n_layer):
    """ValueError unless groups are disjoint runs of layers 0 ... n_layer - 1."""
    taken = set()
    for group in groups:
        whole = isinstance(group, (list, tuple)) and all(isinstance(i, Integral) for i in group)
        if not whole or not group:
            raise ValueError('a group is a list of layer numbers with at least one in it, '
                             f'not {group!r}: groups = {groups}')
        if list(group) != list(range(group[0], group[0] + len(group))):
            raise ValueError(f'the layers of a group must follow one another, {list(group)} do '
                             f'not: groups = {groups}')
        if group[0] < 0 or group[-1] >= n_layer:
            raise ValueError(f'group {list(group)} is out of range: n_layer = {n_layer}, '
                             f'layers 0 to {n_layer - 1}')
        if taken & set(group):
            raise ValueError(f'groups overlap: layer {min(taken & set(group))} is in two of '
                             f'{groups}')
        taken |= set(group)


def check_training(knobs):
    """ValueError for a knob of train.py, {name: value}, that is out of range or unknown."""
    for knob in ('batch_size', 'gradient_accumulation_steps', 'max_iters', 'eval_interval',
                 'eval_windows', 'log_interval', 'save_interval'):
        if knobs[knob] < 1:
            raise ValueError(f'{knob} must be at least 1, not {knobs[knob]}')
    for knob in ('learning_rate', 'min_lr', 'warmup_iters', 'weight_decay', 'grad_clip', 'dropout',
                 'step_noise'):
        if not 0 <= knobs[knob] < 1e30:
            raise ValueError(f'{knob} must be a number from 0 on, not {knobs[knob]}')
    if knobs['min_lr'] > knobs['learning_rate']:
        raise ValueError(f"min_lr = {knobs['min_lr']:g} is above learning_rate = "
                         f"{knobs['learning_rate']:g}: give a smaller --min_lr too")
    loops = knobs['eval_loops']
    if not loops or not all(isinstance(n, int) and n >= 1 for n in loops):
        raise ValueError('eval_loops must be a list of loop counts, each at least 1, '
                         f'not {loops}')
    for knob, known in dict(loop_draw=LOOP_DRAWS, optimizer=OPTIMIZERS).items():
        if knobs[knob] not in known:
            raise ValueError(f"unknown {knob} '{knobs[knob]}': "
                             f"choose one of {', '.join(known)}")
    if not 0 <= knobs['ema'] < 1:
        raise ValueError(f'ema must lie in [0, 1), not {knobs["ema"]}')
    if knobs['batch_size'] % WORLD:
        raise ValueError(f'batch_size = {knobs["batch_size"]} sequences cannot be shared by '
                         f'{WORLD} processes: take a multiple of {WORLD}')


def check_text(text, knobs, saved=None, weights=None):
    """ValueError if a data set or task does not fit the knobs, the run saved, or its weights."""
    name, vocab_size = knobs['dataset'], knobs['vocab_size']
    text.check(knobs['block_size'])
    if vocab_size and vocab_size < text.vocab_size:
        raise ValueError(f'vocab_size = {vocab_size} is less than the {text.vocab_size} tokens '
                         f'of {name}: leave it at None')
    if saved and saved['data'] != text.sha256:
        raise ValueError(f"{name} is not the text that the run in {knobs['out_dir']} had (its "
                         'sha256 is another): make it again as it was')
    if weights and weights['tokenizer'] not in (None, text.tokenizer):
        raise ValueError(f"{knobs['init_from']} reads {weights['tokenizer']} and {name} is "
                         f'{text.tokenizer}: take the same task, or text that was made with '
                         'that --tokenizer of data.py')
