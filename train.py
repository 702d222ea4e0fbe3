"""
Train a recurrent-depth GPT.

    python train.py                         the small default: torchdocs, a laptop, some minutes
    python train.py config/groups.py        the paper's model on FineWeb, one GPU
    python train.py --resume                continue the run in out_dir, with its knobs
    python train.py --eval_only --out_dir=out-calc --length=192 '--eval_loops=[64,256]'
                                            no training: the table of losses by loops, and on a task
                                            by depth, at another length
    python train.py --model_class=zoo.ouro:Gated
                                            another class of model, see zoo/; the flags behind it
                                            may be fields of its Config
    torchrun --standalone --nproc_per_node=2 train.py config/groups.py

writes ckpt.pt, the one before as ckpt.old.pt, ckpt_ITER.pt at keep_iters, log.csv and loss.png; at
the end eval.csv, and on a task depth.png; the tokenizer.json of the text, if it has one.
Ctrl-C, SIGTERM, SIGHUP or a closed pipe: the step is finished and saved, and the status is 128 +
the signal's number. A second signal of the same kind stops at once.

Paper: App. B (the recipe: nanoGPT's, with loop draws). Geiping: 3.3 (truncated gradients), App. C.3
(what to watch). Losses are nats per token.

    it            the iteration
    micro         the step of gradient accumulation
    examples      a data set or a task, from which batches and held-out windows come
    run           what a checkpoint holds, see common/checkpoint.py
    RANK, WORLD   this process's number; how many there are
"""
import math
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import MISSING, fields
from shlex import quote
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import data
from common import configurator, distributed, evaluation, training_log
from common.checkpoint import Run, class_of, file_of, load_checkpoint, save_run, say_own_files
from common.configurator import PathName
from common.distributed import say
from common.errors import explain, run
from common.files import check_writable
from common.optim import freeze_all_but, make_optimizers
from common.resume import check_same_data, restore, where_to_start
from common.run_folder import find_checkpoint, find_run, only_writer, start_over
from loops import TrainingNoise, derived_seed, sample_n_loop
from model import MOST_LOOPS, compile_layers, flops_per_token

# The knobs. common/configurator.py reads what is between the two dashed lines, for other scripts.
# -------------------------------------------------------------------------------------------------
dataset = 'torchdocs'          # a folder of data/ (data.py), or a task and its knobs (tasks.py)
out_dir: PathName = 'out'       # checkpoints, log and figure
resume = False              # continue out_dir/ckpt.pt with its knobs; start if there is none
overwrite = False           # start over in an out_dir that holds a run
init_from: PathName = ''    # a checkpoint, or its folder, whose model and weights to start from
eval_only = False           # no training: the table of out_dir/ckpt.pt, or of init_from
length: int | None = None   # with eval_only: tokens of a window; None = block_size
# model: small enough for two CPU cores and some minutes
model_class: str | None = None  # MODULE:CLASS; None = model:GPT, or the class of the checkpoint
block_size = 48             # tokens of context; attention learns faster with few positions
n_layer = 6
n_head = 2
n_embd = 96
dropout = 0.0
bias = False                # in linear layers
vocab_size: int | None = None   # None = the data set's, a large one rounded up to a multiple of 64
groups = [[1], [2, 3], [4]]     # looped layers, from 0; [] = a plain GPT
mean_recurrence: float = 4.0    # r: training loops r + 1 times on average, evaluation r times
loop_draw: Literal['lognormal', 'uniform', 'fixed'] = 'lognormal'   # lognormal: Geiping
bptt_k = 3                  # loop steps of each group with gradients; 8 takes a third longer
loss_at: Literal['last', 'all'] = 'last'    # all: mean loss after each of the last group's bptt_k
injection = 'concat'        # how e enters each step, a name in loops.INJECTIONS: add, none, ...
adapter_init = 'sum'        # of concat: sum (it starts as x + e) or random
x0 = 'noise'                # a group's first state: noise, zero, or e
norm_inside = True          # the norm of the core in every step; False = once, after the last
step_noise = 0.0            # noise in every step, in units of x^(0)'s
damping = 0.0               # share of the old state that a loop step keeps
pos = 'learned'             # positions: learned, rotary, none
rope_base = 10000.0         # of rotary positions; 100 for short problems
window: int | None = None   # attention reads the last `window` tokens; None = all
# training
train_only: str | None = None   # layers whose weights may change, such as 12-29; None = all
batch_size = 16             # sequences of a step, split among all processes
gradient_accumulation_steps = 1
max_iters = 1500
optimizer: Literal['muon', 'adamw'] = 'muon'    # muon: for the matrices of blocks and adapters
learning_rate = 5e-3
min_lr: float | None = None     # None = learning_rate / 10
warmup_iters = 100
lr_decay_iters: int | None = None   # None = max_iters, as it was when the run began
weight_decay = 0.1          # on matrices only
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0             # norm; 0.0 = off
seed = 1337                 # batches, loop draws and noise all derive from it
# evaluation, log, checkpoints
eval_interval = 500         # iterations
eval_windows = 200          # held-out windows each time; all at the end, or as given by eval_only
eval_loops = [1, 2, 4, 8]   # loop counts to evaluate at
log_interval = 50
save_interval = 200         # iterations between two ckpt.pt
keep_iters = [0, 100, 300, 700]     # iterations whose weights to keep, for geometry.py
# machine
device = 'auto'             # cuda, mps or cpu; auto = the best there is
dtype = 'auto'              # of products: float32, bfloat16; on cuda auto and Muon take bfloat16
compile: bool | None = None     # torch.compile the blocks and steps; None = on cuda only
# -------------------------------------------------------------------------------------------------
DEFAULTS = configurator.knobs_of(globals())     # the knobs above


def lr_at(it):
    """Linear warm-up, then a cosine down to min_lr at lr_decay_iters."""
    lowest = learning_rate / 10 if min_lr is None else min_lr
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    end = lr_decay_iters or max_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, end - warmup_iters))
    return lowest + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - lowest)


# draws: each derives from (seed, purpose, it, micro), and is the same in all processes except
# dropout

def get_batch(examples, it, micro, dev):
    """This process's rows of the batch: tokens (B / WORLD, T) and the label of each."""
    rng = np.random.default_rng(derived_seed(seed, 'batch', it, micro))
    share = batch_size // distributed.WORLD
    mine = slice(distributed.RANK * share, (distributed.RANK + 1) * share)
    x, y = examples.batch(rng, batch_size, block_size, mine)
    later = dev.startswith('cuda')      # MPS would read memory that has been freed by then
    return x.to(dev, non_blocking=later), y.to(dev, non_blocking=later)


def draw_loops(it, micro):
    """How often each group loops in this micro step."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'loops', it, micro))
    return [sample_n_loop(mean_recurrence, generator, draw=loop_draw) for _ in groups]


def noise_of(it, micro, dev):
    """Where x^(0) comes from in this micro step: what the model takes as its noise_seed."""
    generator = torch.Generator(dev).manual_seed(derived_seed(seed, 'noise', it, micro))
    return TrainingNoise(generator, distributed.RANK, distributed.WORLD)


def seed_dropout(it, micro):
    """Seed torch's own generator, from which dropout draws."""
    torch.manual_seed(derived_seed(seed, 'dropout', it, micro, distributed.RANK))


# the start of a run ------------------------------------------------------------------------------

def fields_of_model(knobs):
    """The fields of the model's Config that are no knobs above, see configurator.read_arguments."""
    if not knobs['model_class']:
        return {}
    config = class_of(knobs['model_class'], from_anywhere=True).Config
    return {field.name: (field.default, field.type) for field in fields(config)
            if field.name not in knobs and field.default is not MISSING}


def check_knobs():
    """ValueError for a knob that is out of range."""
    least = dict(block_size=1, batch_size=1, gradient_accumulation_steps=1, max_iters=1,
                 eval_interval=1, eval_windows=1, log_interval=1, save_interval=1,
                 lr_decay_iters=1, learning_rate=0, min_lr=0, warmup_iters=0, weight_decay=0,
                 grad_clip=0)
    for knob, bound in least.items():
        value = globals()[knob]
        if value is not None and not bound <= value < 1e30:
            raise ValueError(f'{knob} must be at least {bound} and finite, not {value}')
    if min_lr is not None and min_lr > learning_rate:
        raise ValueError(f'min_lr = {min_lr:g} is above learning_rate = {learning_rate:g}: leave '
                         'it out, or give a smaller one')
    are_counts = all(isinstance(n, int) and 1 <= n <= MOST_LOOPS for n in eval_loops)
    if not eval_loops or not are_counts or len(set(eval_loops)) < len(eval_loops):
        raise ValueError('eval_loops must be a list of different loop counts from 1 to '
                         f'{MOST_LOOPS:,}, not {eval_loops}')
    if not eval_only and batch_size % distributed.WORLD:
        raise ValueError(f'batch_size = {batch_size} sequences cannot be shared by '
                         f'{distributed.WORLD} processes: take a multiple of {distributed.WORLD}')


def open_examples(checkpoint, vocab):
    """
    The data set or task, for a model of `vocab` tokens. checkpoint: the one whose tokenizer it
    needs, {} if there is none.
    """
    return distributed.make_once(lambda: data.open_data(
        dataset, checkpoint.get('tokenizer'), vocab, checkpoint.get('folder')))


def make_model(knobs, checkpoint, examples):
    """A new model on the CPU, with the weights of the checkpoint if it is not {}."""
    cls = class_of(knobs['model_class'] or 'model:GPT', from_anywhere=True)
    # each field of its Config has the value of the knob with that name; one that is no knob has the
    # checkpoint's value, or else its default
    values = checkpoint.get('model_args', {}) | knobs
    if knobs['vocab_size'] is None:
        values['vocab_size'] = examples.vocab_size
        if examples.vocab_size >= 1024:     # matrices whose sides are multiples of 64 are faster
            values['vocab_size'] = 64 * math.ceil(examples.vocab_size / 64)
    config = cls.Config(**{field.name: values[field.name] for field in fields(cls.Config)
                           if field.name in values})
    if knobs['loss_at'] == 'all' and not config.groups:
        raise ValueError('--loss_at=all needs a model with groups: leave it out')
    torch.manual_seed(derived_seed(knobs['seed'], 'init'))
    model = cls(config)
    if checkpoint:
        load_weights(model, checkpoint['model'])
    if knobs['train_only']:
        freeze_all_but(model, knobs['train_only'])
    return model


def load_weights(model, weights):
    """Those that fit by name; the others are named. ValueError if a shape does not fit."""
    name = type(model).__name__
    with explain(f'the weights do not fit the model class {name}',
                 'take another --model_class or --init_from', RuntimeError):
        missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing:                         # such as a gate
        say(f"not in the checkpoint, so from scratch: {', '.join(missing)}")
    if unexpected:
        say(f"in the checkpoint and not in {name}, so left out: {', '.join(unexpected)}")


def make_run(start, examples, dev):
    """A new run, or the one that goes on. start: see common/resume.py."""
    model = make_model(start.knobs, start.checkpoint, examples).to(dev)
    # bfloat16 on cuda whatever the dtype of the model's products is: Muon needs no more
    muon_dtype = torch.float32
    if distributed.pick_dtype(dtype, dev) == 'bfloat16' or dev.startswith('cuda'):
        muon_dtype = torch.bfloat16
    optimizers = make_optimizers(model, optimizer, learning_rate, weight_decay, (beta1, beta2),
                                 muon_dtype)
    # a longer max_iters of a resumed run leaves the decay where it was
    knobs = start.knobs | dict(lr_decay_iters=lr_decay_iters or max_iters)
    own_files = dict.fromkeys([*start.checkpoint.get('own_files', []), *configurator.own_files])
    module = type(model).__module__
    if module != 'model' and not module.startswith('zoo.'):
        own_files[file_of(module)] = None       # other programs import this class if they name it
    run = Run(knobs, model, optimizers, examples.tokenizer, examples.sha256,
              own_files=list(own_files))
    if start.resumed_from:
        restore(start.checkpoint, run)
    return run


# the run -----------------------------------------------------------------------------------------

def main(*args):
    """
    Train. args: those of the command line; in a notebook, train.main('--max_iters=300') is
    `python train.py --max_iters=300`.
    """
    distributed.stop_signals.clear()                # those of an earlier call
    # the knobs as they stand above, since an earlier call has changed the globals; and what else
    # read_arguments needs of a script
    script = DEFAULTS | dict(__annotations__=configurator.annotations_of(globals()),
                             __doc__=__doc__, __file__=__file__)
    knobs = configurator.read_arguments(script, args, more_knobs=fields_of_model)
    if knobs['eval_only']:
        return evaluate_only(knobs)
    if knobs['length'] is not None:
        raise ValueError('--length is for --eval_only: training takes --block_size')
    # a run that goes on has knobs of its own
    start = where_to_start(knobs, configurator.given, configurator.flags)
    globals().update(start.knobs)       # from here on the knobs above have the values of this run
    check_knobs()

    # machine, data and model
    dev, autocast = distributed.start_processes(device, dtype)
    examples = open_examples(start.checkpoint, vocab_size or math.inf)
    examples.check_fits(block_size, batch_size)
    if start.resumed_from:
        check_same_data(examples, start.checkpoint, dataset, out_dir)
    distributed.check_same((start.checkpoint.get('iter_num'), examples.sha256, start.knobs))
    run = make_run(start, examples, dev)
    resumed_from = start.resumed_from               # the path of its checkpoint, or ''
    del start                                       # frees some GB if the model is large

    # its files: from the first save on, --resume continues this run and no other
    last = f'{out_dir}/ckpt.pt'
    with only_writer(out_dir), distributed.listen(), allow_tf32():
        if not resumed_from:
            start_over(out_dir, overwrite)
            save_run(run, last)         # so a run that is killed in its first steps can be resumed
        elif resumed_from != last and distributed.RANK == 0:
            os.replace(resumed_from, last)              # it was ckpt.old.pt
        # sample.py needs the tokenizer beside ckpt.pt
        if distributed.RANK == 0 and examples.tokenizer_json:
            examples.tokenizer_json.save(out_dir)
        try:
            train(run, examples, dev, autocast)
        except distributed.Stopped:
            save_run(run, last)
            command = 'python' if distributed.WORLD == 1 else 'torchrun ...'
            say(f'stopped after iteration {run.done - 1} and saved; resume with '
                f"{' '.join([command, 'train.py', *flags_of(run, '--resume')])}")
            raise
        except OSError:
            # a disk that fails, or a network drive that is away: what was learned is saved
            save_run(run, last)
            raise
        finally:
            distributed.end_processes()


@contextmanager
def allow_tf32():
    """
    In this context float32 products on CUDA may be TF32, which is faster. Decoding needs true
    float32, for a small tau.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def flags_of(run, *flags):
    """The words behind a script with which it finds this run: its own files, flags, out_dir."""
    # a file of its own may name another out_dir
    is_default = out_dir == 'out' and not run.own_files
    folder = [] if is_default else [f'--out_dir={quote(out_dir)}']
    return [*map(quote, run.own_files), *flags, *folder]


def train(run, examples, dev, autocast):
    """The iterations that are left, and the evaluation at the end. Stopped if a signal asks."""
    run_began = time.perf_counter()
    first = run.done
    raw = run.model                     # a GPT
    model = as_trained(raw, dev)        # what is called to train it
    since = f', from iteration {first}' if first else ''
    say(f'{sum(p.numel() for p in raw.parameters()) / 1e6:.2f}M parameters, {n_layer} layers, '
        f'groups {raw.config.groups}, {examples.description}, {distributed.WORLD} x {dev}{since}')
    counts = eval_loops if raw.groups else [1]
    all_windows = examples.n_held_out(block_size)
    some_windows = min(eval_windows, all_windows)
    log = training_log.Log(f'{out_dir}/log.csv', counts, first, max_iters, examples.is_task)

    model.train()
    for it in range(first, max_iters):
        # held-out losses, as columns of the log
        evaluated = {}
        if it > 0 and it % eval_interval == 0:
            _, evaluated = evaluation.evaluate_run(run, examples, some_windows, counts, dev,
                                                   autocast)

        # checkpoints, before the step: ckpt_000000.pt has the weights as they are drawn
        if it > first and it % save_interval == 0:
            save_run(run, f'{out_dir}/ckpt.pt')
        if it in keep_iters:
            save_run(run, f'{out_dir}/ckpt_{it:06d}.pt', with_optimizer=False)

        # a step
        step_began = time.perf_counter()
        loss, n_loop, flops = forward_backward(model, raw, examples, it, dev, autocast)
        norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), grad_clip or math.inf)
        loss, norm, n_stop_signals = distributed.mean_and_stops(loss, norm)     # waits for the GPU
        lr = lr_at(it)
        # an error, before any weight has changed, if the loss or the norm is NaN or infinite
        training_log.check_finite(run, loss, norm, n_loop, lr)
        update(run.optimizers, lr)
        run.done = it + 1

        # log
        training_log.note_loss(run, loss, it)
        tokens = gradient_accumulation_steps * batch_size * block_size
        log.note_step(time.perf_counter() - step_began, tokens, flops)
        if it % log_interval == 0 or it == max_iters - 1 or evaluated:
            log.report(run, it, loss, lr, norm, n_loop, evaluated,
                       flops_of_evaluations(raw, counts, it, some_windows, all_windows))
        if evaluated:
            training_log.draw_losses(log, counts, out_dir)
        if n_stop_signals:
            raise distributed.Stopped

    # the end: all held-out windows
    scores, evaluated = evaluation.evaluate_run(run, examples, all_windows, counts, dev, autocast)
    bins = evaluation.depth_bins(examples, block_size)
    save_run(run, f'{out_dir}/ckpt.pt')
    evaluation.print_table(scores, bins)
    log.add_row(dict(iter=max_iters) | evaluated)
    training_log.draw_losses(log, counts, out_dir)
    with training_log.or_warn(f'no {out_dir}/eval.csv'):
        evaluation.save_table(scores, bins, out_dir)
    say(f'done in {time.perf_counter() - run_began:.0f} s: {out_dir}/ckpt.pt, log.csv, loss.png, '
        f"eval.csv\nnext: {' '.join(['python sample.py', *flags_of(run)])}")


def as_trained(raw, dev):
    """The model in the form that is trained: compiled, and shared by the processes, if need be."""
    wanted = dev.startswith('cuda') if compile is None else compile
    if wanted and distributed.can_compile(dev):
        compile_layers(raw)
    model = LossAtEachStep(raw) if loss_at == 'all' else raw
    if distributed.WORLD == 1:
        return model
    # if no step reads e, layers before a group get no gradient where it loops beyond bptt_k
    reads_e = all(group.adapter.reads_e for group in raw.groups)
    return DistributedDataParallel(model, find_unused_parameters=not reads_e,
                                   broadcast_buffers=False)             # they never change


class LossAtEachStep(torch.nn.Module):
    """
    A model for --loss_at=all: its loss is the mean of the losses that it would have if its last
    group had stopped after each of the loop steps that have gradients.
    """

    def __init__(self, raw):
        super().__init__()
        self.raw = raw

    def forward(self, idx, targets, **plan):
        trace = []
        logits, loss = self.raw(idx, targets, **plan, trace=trace)
        states = trace[-1]['states'][1:]                                        # (K, B, T, C)
        losses = [loss]                                                         # of the last step
        for x in states[-self.raw.config.bptt_k:-1]:
            earlier = self.raw.through_coda(x).flatten(0, 1).float()            # (B T, V)
            losses.append(cross_entropy(earlier, targets.flatten()))
        return logits, torch.stack(losses).mean()


def forward_backward(model, raw, examples, it, dev, autocast):
    """
    The gradient of iteration `it`, over all its micro steps. model: see as_trained. Returns this
    process's loss (a tensor, for which nobody has waited yet), the loop counts of the last micro
    step, and the FLOPs of all processes.
    """
    loss = torch.zeros((), device=dev)
    flops = 0
    for micro in range(gradient_accumulation_steps):
        x, y = get_batch(examples, it, micro, dev)
        n_loop = draw_loops(it, micro)              # one count per group
        noise = noise_of(it, micro, dev)
        seed_dropout(it, micro)
        if distributed.WORLD > 1:                   # the gradients are averaged once, at the end
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        with autocast:
            _, batch_loss = model(x, y, n_loop=n_loop, noise_seed=noise)
            part = batch_loss / gradient_accumulation_steps
        part.backward()
        loss += part.detach()
        n_losses = min(bptt_k, n_loop[-1]) if loss_at == 'all' else 1
        flops += batch_size * block_size * flops_per_token(raw, n_loop, True, n_losses)
    return loss, n_loop, flops


def update(optimizers, lr):
    """A step of each optimizer; the gradients are gone then."""
    for adamw_or_muon in optimizers.values():
        for group in adamw_or_muon.param_groups:
            group['lr'] = lr
        adamw_or_muon.step()
        adamw_or_muon.zero_grad(set_to_none=True)


def flops_of_evaluations(model, counts, it, some_windows, all_windows):
    """FLOPs of the evaluations after iteration `it`, at these loop counts; the last is over all."""
    n_before_the_end = (max_iters - 1) // eval_interval - it // eval_interval
    n_windows = n_before_the_end * some_windows + all_windows
    of_token = sum(flops_per_token(model, [n] * len(model.groups)) for n in counts)
    return n_windows * block_size * of_token


# --eval_only -------------------------------------------------------------------------------------

def evaluate_only(knobs):
    """
    The held-out table of a checkpoint, and eval.csv. dataset and eval_loops are those of the run
    unless they are given: --dataset=calc:reset=0.02 has deeper problems of the same task.
    """
    given = configurator.given
    folder = knobs['out_dir']
    path = find_checkpoint(knobs['init_from'])
    if path and 'out_dir' not in given:
        folder = os.path.dirname(path) or '.'
    folder, results = find_run(folder)
    path = path or f'{folder}/ckpt.pt'
    dev, autocast = distributed.start_processes(knobs['device'], knobs['dtype'])
    model, checkpoint = load_checkpoint(path, dev, knobs['model_class'], knobs['length'])
    say_own_files(checkpoint)
    for knob in ('dataset', 'eval_loops'):
        if knob not in given and knob in checkpoint['config']:
            knobs[knob] = checkpoint['config'][knob]
    globals().update(knobs)
    check_knobs()

    check_writable(results)
    examples = open_examples(checkpoint, model.config.vocab_size)
    T = model.config.block_size
    examples.check_fits(T)
    n_windows = examples.n_held_out(T)
    if 'eval_windows' in given:
        n_windows = min(n_windows, eval_windows)
    counts = eval_loops if model.groups else [1]
    say(f'{path}: {n_windows:,} held-out windows of {T} tokens; {examples.description}')
    with distributed.listen():
        scores = evaluation.evaluate(model, examples, n_windows, counts, dev, autocast)
    bins = evaluation.depth_bins(examples, T)
    evaluation.print_table(scores, bins)
    evaluation.save_table(scores, bins, results)
    say(f'{results}/eval.csv')
    distributed.end_processes()


# not `configure`, as in other scripts: main reads the arguments itself, so that a notebook calls it
if __name__ == '__main__':
    configurator.register(globals())
    run(distributed.read_environment)
    run(lambda: main(*sys.argv[1:]))
