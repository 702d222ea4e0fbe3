"""
Train a recurrent-depth GPT.

    python train.py                         the small default: pydocs, a laptop, some minutes
    python train.py config/groups.py        the paper's model on FineWeb, one GPU
    python train.py --resume                go on where out_dir stopped, with the knobs it had
    torchrun --standalone --nproc_per_node=2 train.py config/groups.py

writes ckpt.pt, the one before as ckpt.old.pt, ckpt_ITER.pt at keep_iters, log.csv and loss.png.
Ctrl-C or SIGTERM: the step is finished and saved. A second one stops at once.

Paper: App. B (the recipe: nanoGPT's, with loop draws). Geiping: 3.3 (the objective), 4.4 (averaged
weights), App. C.3 (what to watch). Losses are nats a token.

    it            the iteration
    micro         the step of gradient accumulation
    RANK, WORLD   this process's number, and how many torchrun has started
"""
import math
import os
import time
from dataclasses import fields
from functools import partial

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import data
from checks import check_text, check_training
from common import configurator
from common import log as watch
from common.checkpoint import Run, earlier_run, save_run
from common.configurator import configure, imported, plain
from common.distributed import (
    RANK,
    WORLD,
    add_up,
    check_same,
    join,
    leave,
    one_before_the_others,
    say,
)
from common.optim import make_optimizers, move_average
from loops import derived_seed, sample_n_loop
from memory import require, training_bytes
from model import GPT, GPTConfig

# -------------------------------------------------------------------------------------------------
dataset = 'pydocs'          # a folder of data/ (data.py), or a task and its knobs (tasks.py)
out_dir = 'out'             # checkpoints, log and figure
resume = False              # go on from out_dir/ckpt.pt with its knobs, or begin if it is not there
init_from = ''              # a checkpoint whose model and weights to start from, for fine-tuning
# model: small enough for two CPU cores and some minutes
block_size = 48             # tokens of context; attention learns to use few positions sooner
n_layer = 6
n_head = 2
n_embd = 96
dropout = 0.0
bias = False                # in linear layers
vocab_size: int | None = None   # None = the data set's, a large one rounded up to a multiple of 64
groups = [[1], [2, 3], [4]]     # looped layers, from 0; [] = a plain GPT
mean_recurrence: float = 4.0    # r of the loop draw for each group and pass; its mean is r + 1
loop_draw = 'lognormal'     # lognormal (Geiping), uniform or fixed, all of the same mean
bptt_k = 3                  # loop steps of each group with gradients: a quarter less time than 8
injection = 'concat'        # how e enters each step: concat, add, none
adapter_init = 'sum'        # concat starts as x + e; or random
x0 = 'noise'                # a group's first state: noise, zero, or e
norm_inside = True          # the norm of the core in every step; False = once, after the last
step_noise = 0.0            # noise in every step, in units of x^(0)'s
pos = 'learned'             # positions: learned, rotary
rope_base = 10000.0         # of rotary positions; 100 for short problems
# model: what other looped models have, see zoo/
loop_norm = True            # a group's own norm
sandwich = 'sum'            # n2(x + f(x)), or branch, x + n2(f(x))
mlp = 'plain'               # or gated
mlp_width: int | None = None    # None = 4 * n_embd
qk_bias = False             # on queries and keys
norm_eps = 1e-6
scale_embedding = True      # times sqrt(C)
last_norm = True            # before the head
tied = True                 # the head is the embedding
gate = False                # a learned exit gate
# training
objective = ''              # another loss, FILE:NAME, see zoo/ouro.py; '' = the cross-entropy
batch_size = 16             # sequences of a step, shared by all processes
gradient_accumulation_steps = 1
max_iters = 1500
optimizer = 'muon'          # for the matrices of blocks and adapters; or adamw for all
learning_rate = 5e-3
min_lr = 5e-4
warmup_iters = 100
lr_decay_iters: int | None = None   # None = the first max_iters
weight_decay = 0.1          # on matrices only
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0             # norm; 0.0 = off
ema = 0.0                   # decay of averaged weights, evaluated too and in out_dir/ema; 0.0 = off
seed = 1337                 # batches, loop draws and noise all derive from it
# evaluation, log, checkpoints
eval_interval = 500         # iterations
eval_windows = 200          # held-out windows each time; the last time it is all of them
eval_loops = [1, 2, 4, 8]   # loop counts to evaluate at
log_interval = 50
save_interval = 200         # iterations between two ckpt.pt
keep_iters = [0, 100, 300, 700]     # keep their weights, for the geometry; the last always
# machine
device = 'auto'             # cuda, mps or cpu; auto = the best there is
dtype = 'auto'              # of matrix products: float32, bfloat16; auto = bfloat16 on cuda
compile: bool | None = None     # torch.compile the blocks and steps; None = on cuda, where it pays
checkpoint_steps = False    # compute a step again for its gradients: less memory, more time
peak_tflops: float | None = None    # of one device, for MFU; None = known for a few cards
# -------------------------------------------------------------------------------------------------

# what the weights of another run must fit, to start from them: the model, less what may change
SHAPE = {knob.name for knob in fields(GPTConfig)} - {
    'dropout', 'mean_recurrence', 'bptt_k', 'adapter_init', 'step_noise', 'gate'}


def lr_at(it):
    """Linear warm-up, then a cosine down to min_lr at lr_decay_iters."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    end = lr_decay_iters or max_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, end - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# every draw derives from (seed, purpose, it, micro), the same in each process; but for dropout

def get_batch(text, it, micro, dev):
    """This process's rows of the batch: tokens (B / WORLD, T) and what should come out at each."""
    rng = np.random.default_rng(derived_seed(seed, 'batch', it, micro))
    share = batch_size // WORLD
    x, y = text.batch(rng, batch_size, block_size, slice(RANK * share, (RANK + 1) * share))
    return x.to(dev, non_blocking=True), y.to(dev, non_blocking=True)


def draw_loops(it, micro):
    """How often each group loops."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'loops', it, micro))
    return [sample_n_loop(mean_recurrence, generator, draw=loop_draw) for _ in groups]


def seed_noise(model, it, micro, dev):
    """The generators of x^(0) and dropout."""
    generator = torch.Generator(dev).manual_seed(derived_seed(seed, 'noise', it, micro))
    for group in model.groups:
        group.generator = generator
    torch.manual_seed(derived_seed(seed, 'dropout', it, micro, RANK))


def save(run, it, file, whole=True):
    """out_dir/file. whole: with all that it takes to go on; otherwise the weights."""
    if RANK == 0:
        with watch.timed(run.spent, 'checkpoints'):
            save_run(run, it, os.path.join(out_dir, file), whole)


# the start of a run ------------------------------------------------------------------------------

def objective_asked_for():
    """The knob `objective` -> a function of model, x, y, n_loop -> the loss, a mean over tokens."""
    if not objective:
        return lambda model, x, y, n_loop: model(x, y, n_loop=n_loop)[1]
    if WORLD > 1 or not groups or not gate:
        raise ValueError('--objective trains an exit gate: it needs groups, --gate and one process')
    return imported(objective, 'objective', 'zoo.ouro:stage_1')


def set_up(saved, weights, text, dev):
    """The run: fresh, as a checkpoint holds it, or with the weights of another."""
    vocab = vocab_size or text.vocab_size
    if not vocab_size and vocab >= 1024:
        vocab = 64 * math.ceil(vocab / 64)
    knobs = {knob.name: globals()[knob.name] for knob in fields(GPTConfig)}
    shape = GPTConfig(**knobs | dict(vocab_size=vocab))
    copies = 4 + (ema > 0) + (WORLD > 1)    # of the weights: gradients, two moments, ema, buckets
    require(training_bytes(shape, batch_size // WORLD, checkpoint_steps, copies), dev,
            f'a step of {batch_size} x {block_size} tokens at width {n_embd}',
            'batch_size, block_size or n_embd, or set --checkpoint_steps')
    torch.manual_seed(derived_seed(seed, 'init'))
    torch.backends.cuda.matmul.allow_tf32 = True    # exit rules, with small taus, run elsewhere
    model = GPT(shape).to(dev)
    if saved or weights:
        own, other = model.state_dict(), (saved or weights)['model']    # a gate may be new, or go
        model.load_state_dict({name: other.get(name, own[name]) for name in own})
    optimizers = make_optimizers(model, optimizer, learning_rate, weight_decay, (beta1, beta2))
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()} if ema else {}
    if saved:
        for name, one in optimizers.items():
            one.load_state_dict(one.state_dict() | dict(state=saved[name]))
        averaged = {name: saved['ema'][name].to(dev) for name in averaged}
    for group in model.groups:
        group.rank, group.world, group.checkpoint_steps = RANK, WORLD, checkpoint_steps
    if compiled(dev):
        compile_layers(model)
    # a longer max_iters of a resumed run leaves the decay where it was
    knobs = plain(config | dict(lr_decay_iters=lr_decay_iters or max_iters))
    before = saved or dict(iter_num=0, val_loss={}, trend=[0, 0.0, 0.0], spikes=[])
    return Run(config=knobs, model=model, optimizers=optimizers, averaged=averaged,
               tokenizer=text.tokenizer, data=text.sha256, start=before['iter_num'],
               val_loss=before['val_loss'], trend=before['trend'], spikes=before['spikes'])


def compiled(dev):
    return dev.startswith('cuda') if compile is None else compile


def compile_layers(model, **how):
    """Compile each block and loop step, so that no draw compiles anew. how: torch.compile's."""
    # three graphs for each length of core: no gradient, the first step with it, the others
    torch._dynamo.config.recompile_limit = 8 + 3 * len(model.groups)
    for layer in model.h:
        name = 'step' if layer in model.groups else 'forward'
        setattr(layer, name, torch.compile(getattr(layer, name), **how))


def main():
    begin = time.time()
    # what to go on from, the machine, the text, the model
    saved, path, weights = earlier_run(globals(), SHAPE)
    check_training(config)
    loss_of = objective_asked_for()
    dev, autocast = join(device, dtype)
    if RANK == 0 and path.endswith('.old.pt'):      # ckpt.pt is damaged or missing
        os.replace(path, path.replace('.old.pt', '.pt'))
    text = one_before_the_others(lambda: data.open_data(dataset))
    check_text(text, config, saved, weights)
    check_same((saved and saved['iter_num'], text.sha256, config))
    run = set_up(saved, weights, text, dev)
    model, resumed = run.model, bool(saved)
    del saved, weights                              # of a large model some GB
    ddp = model
    if WORLD > 1:
        # without injection nothing before a group has a gradient when it loops beyond bptt_k
        ddp = DistributedDataParallel(model, find_unused_parameters=injection == 'none')
    since = f', from iteration {run.start}' if run.start else ''
    say(f'{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {n_layer} layers, '
        f'groups {model.config.groups}, {text.said}, {WORLD} x {dev}{since}')
    eval_counts = eval_loops if model.groups else [1]
    n_windows = text.n_held_out(block_size)
    os.makedirs(out_dir, exist_ok=True)
    log = watch.Log(os.path.join(out_dir, 'log.csv'), eval_counts, ema, run.start, max_iters,
                    compiled(dev), peak_tflops or watch.peak_tflops_of(dev), text.asked)
    asked, handlers = watch.listen()
    # after the warm-up a state that has collapsed is worth a warning
    report = partial(watch.report, text=text, loops=eval_counts, dev=dev, asked=asked,
                     autocast=autocast, compiled=compiled(dev), warm=warmup_iters)

    for it in range(run.start, max_iters):
        # held-out losses
        held_out = {}
        if it % eval_interval == 0 and it:
            with watch.timed(run.spent, 'evaluation'):
                held_out = report(run, it, min(eval_windows, n_windows))
            if held_out is None:        # asked to stop meanwhile
                stopped(run, it)
                break

        # checkpoints
        if it % save_interval == 0 and (it > run.start or not resumed):
            save(run, it, 'ckpt.pt')
        if it in keep_iters:
            save(run, it, f'ckpt_{it:06d}.pt', whole=False)

        # forward and backward, gradients accumulated
        clock, lr, tokens, flops = time.time(), lr_at(it), 0, 0
        status = torch.zeros(2, device=dev)     # the loss; how many times we were asked to stop
        for micro in range(gradient_accumulation_steps):
            x, y = get_batch(text, it, micro, dev)
            n_loop = draw_loops(it, micro)      # one count a group
            seed_noise(model, it, micro, dev)
            # DDP adds the gradients up at the last micro step; for a plain model this is nothing
            ddp.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
            with autocast:
                loss = loss_of(ddp, x, y, n_loop) / gradient_accumulation_steps
            loss.backward()
            status[0] += loss.detach() / WORLD
            tokens += batch_size * block_size
            flops += batch_size * block_size * watch.training_flops(model.config, n_loop)

        # clip the gradients
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)

        # one more all-reduce, which waits for the device; then the check, before weights change
        status[1] += len(asked)
        loss, stop = add_up(status).tolist()
        norm = norm.item()
        watch.check_finite(loss, norm, n_loop, it, lr, out_dir)

        # step
        for one in run.optimizers.values():
            for group in one.param_groups:
                group['lr'] = lr
            one.step()
            one.zero_grad(set_to_none=True)
        if ema:
            move_average(run.averaged, model, ema, it)

        # log
        if watch.is_spike(loss, run.trend):
            run.spikes.append([loss, it])
        log.count(time.time() - clock, tokens, flops)
        if it % log_interval == 0 or it == max_iters - 1 or held_out:
            log.step(run, it, loss, lr, norm, n_loop, held_out)
        if stop:
            stopped(run, it + 1)
            break
    else:
        # the last evaluation, over all windows, and the last checkpoint
        with watch.timed(run.spent, 'evaluation'):
            held_out = report(run, max_iters, n_windows)
        if held_out is None:
            stopped(run, max_iters)
        else:
            finish(run, log, held_out, eval_counts)
            if text.asked:
                watch.report_depth(run, text, eval_counts, dev, autocast, out_dir)
            log.say_done(run, out_dir, time.time() - begin, dev)
    watch.stop_listening(handlers)
    leave()


def stopped(run, it):
    """Save after `it` iterations, and say how to go on."""
    save(run, it, 'ckpt.pt')
    say(f"stopped after iteration {it - 1} and saved; go on with "
        f"{'python' if WORLD == 1 else 'torchrun ...'} train.py --resume{watch.flag(out_dir)}")


def finish(run, log, held_out, eval_counts):
    """The checkpoints, the last row and the figure of a run that has come to its end."""
    save(run, max_iters, 'ckpt.pt')
    if ema:
        with watch.using(run.model, run.averaged):
            save(run, max_iters, os.path.join('ema', 'ckpt.pt'), whole=False)
    log.add(dict(iter=max_iters) | held_out)
    if RANK == 0:
        from common import plots  # here, since matplotlib takes a second to import
        plots.losses(watch.read_log(log.path), eval_counts, os.path.join(out_dir, 'loss.png'))


if __name__ == '__main__':
    config = configure(globals())
    configurator.run(main)
