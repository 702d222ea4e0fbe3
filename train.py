"""
Train a recurrent-depth GPT.

    python train.py                         the small default: torchdocs, a laptop, some minutes
    python train.py config/groups.py        the paper's model on FineWeb, one GPU
    python train.py --resume                continue the run in out_dir, with its knobs
    python train.py --model_class=zoo.ouro:Gated
                                            another class of model, see zoo/; the flags behind it
                                            may be fields of its Config
    torchrun --standalone --nproc_per_node=2 train.py config/groups.py

writes ckpt.pt, the one before as ckpt.old.pt, ckpt_ITER.pt at keep_iters, log.csv and loss.png; on
a task also depth.csv and depth.png; the tokenizer.json of the text, if it has one.
Ctrl-C, SIGTERM, SIGHUP or a closed pipe: the step is finished and saved, and the status is 128 +
the signal's number. A second signal of the same kind stops at once.

Paper: App. B (the recipe: nanoGPT's, with loop draws). Geiping: 3.3 (truncated gradients), App. C.3
(what to watch). Losses are nats a token.

    it            the iteration
    micro         the step of gradient accumulation
    RANK, WORLD   this process's number; how many there are
"""
import math
import os
import signal
import time
from dataclasses import MISSING, fields
from shlex import quote
from typing import Literal

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import data
from common import configurator, distributed, report
from common.checkpoint import Run, class_of, earlier_run, only_writer, save_run, start_over
from common.configurator import PathName
from common.distributed import RANK, WORLD, say
from common.optim import make_optimizers
from loops import INJECTIONS, TrainingNoise, derived_seed, sample_n_loop
from model import MOST_LOOPS, compile_layers, flops_per_token

# -------------------------------------------------------------------------------------------------
dataset = 'torchdocs'          # a folder of data/ (data.py), or a task and its knobs (tasks.py)
out_dir: PathName = 'out'       # checkpoints, log and figure
resume = False              # continue out_dir/ckpt.pt with its knobs; start if there is none
overwrite = False           # start over in an out_dir that holds a run
init_from: PathName = ''    # a checkpoint whose model and weights to start from
# model: small enough for two CPU cores and some minutes
model_class = ''            # MODULE:CLASS; '' = model:GPT, or the class of the checkpoint
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
loop_cap: int | None = None     # the most loops of a draw; --resume may change it
bptt_k = 3                  # loop steps of each group with gradients; 8 takes a third longer
injection = 'concat'        # how e enters each step, a name in loops.INJECTIONS: add, none, ...
adapter_init = 'sum'        # of concat: sum (it starts as x + e) or random
x0 = 'noise'                # a group's first state: noise, zero, or e
norm_inside = True          # the norm of the core in every step; False = once, after the last
step_noise = 0.0            # noise in every step, in units of x^(0)'s
pos = 'learned'             # positions: learned, rotary
rope_base = 10000.0         # of rotary positions; 100 for short problems
window: int | None = None   # attention reads the last `window` tokens; None = all
# training
train_only = ''             # layers whose weights may change, such as 12-29; '' = all weights
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
eval_windows = 200          # held-out windows each time; all of them at the end
eval_loops = [1, 2, 4, 8]   # loop counts to evaluate at
log_interval = 50
save_interval = 200         # iterations between two ckpt.pt
keep_iters = [0, 100, 300, 700]     # iterations whose weights to keep, for geometry.py
# machine
device = 'auto'             # cuda, mps or cpu; auto = the best there is
dtype = 'auto'              # of matrix products: float32, bfloat16; auto = bfloat16 on cuda
compile: bool | None = None     # torch.compile the blocks and steps; None = on cuda only
# -------------------------------------------------------------------------------------------------


def lr_at(it):
    """Linear warm-up, then a cosine down to min_lr at lr_decay_iters."""
    lowest = learning_rate / 10 if min_lr is None else min_lr
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    end = lr_decay_iters or max_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, end - warmup_iters))
    return lowest + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - lowest)


# every draw derives from (seed, purpose, it, micro), the same in each process, except dropout

def get_batch(text, it, micro, dev):
    """This process's rows of the batch: tokens (B / WORLD, T) and the label of each."""
    rng = np.random.default_rng(derived_seed(seed, 'batch', it, micro))
    share = batch_size // WORLD
    x, y = text.batch(rng, batch_size, block_size, slice(RANK * share, (RANK + 1) * share))
    later = dev.startswith('cuda')      # MPS would read memory that has been freed by then
    return x.to(dev, non_blocking=later), y.to(dev, non_blocking=later)


def draw_loops(it, micro):
    """How often each group loops."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'loops', it, micro))
    return [min(sample_n_loop(mean_recurrence, generator, draw=loop_draw), loop_cap or MOST_LOOPS)
            for _ in groups]


def draw_noise(it, micro, dev):
    """The noise of x^(0); seeds torch for dropout too."""
    torch.manual_seed(derived_seed(seed, 'dropout', it, micro, RANK))
    generator = torch.Generator(dev).manual_seed(derived_seed(seed, 'noise', it, micro))
    return TrainingNoise(generator, RANK, WORLD)


# the start of a run ------------------------------------------------------------------------------

def fields_of_model(knobs):
    """The fields of the model's Config that are no knobs above, see configurator.configure."""
    if not knobs['model_class']:
        return {}
    kind = class_of(knobs['model_class'], trusted=True)
    return {field.name: (field.default, field.type) for field in fields(kind.Config)
            if field.name not in knobs and field.default is not MISSING}


def check_knobs():
    """ValueError for a knob that is out of range."""
    least = dict(batch_size=1, gradient_accumulation_steps=1, max_iters=1, eval_interval=1,
                 eval_windows=1, log_interval=1, save_interval=1, learning_rate=0, min_lr=0,
                 warmup_iters=0, weight_decay=0, grad_clip=0, lr_decay_iters=1, loop_cap=1)
    for knob, bound in least.items():
        if knobs[knob] is not None and not bound <= knobs[knob] < 1e30:
            raise ValueError(f'{knob} must be at least {bound} and finite, not {knobs[knob]}')
    if min_lr is not None and min_lr > learning_rate:
        raise ValueError(f'min_lr = {min_lr:g} is above learning_rate = {learning_rate:g}: leave '
                         'it out, or give a smaller one')
    if (not eval_loops or len(set(eval_loops)) < len(eval_loops)
            or not all(isinstance(n, int) and 1 <= n <= MOST_LOOPS for n in eval_loops)):
        raise ValueError('eval_loops must be a list of different loop counts from 1 to '
                         f'{MOST_LOOPS:,}, not {eval_loops}')
    if batch_size % WORLD:
        raise ValueError(f'batch_size = {batch_size} sequences cannot be shared by {WORLD} '
                         f'processes: take a multiple of {WORLD}')


def freeze(gpt):
    """Leave all weights as they are but those of the layers train_only; a group counts whole."""
    first, _, last = train_only.partition('-')
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < n_layer):
        raise ValueError(f'train_only must be FIRST-LAST, two layers from 0 to {n_layer - 1}, not '
                         f"'{train_only}'")
    if groups and not INJECTIONS[injection].reads_e and int(last) < groups[-1][0]:
        raise ValueError(f'train_only = {train_only}: no gradient passes a group that loops more '
                         'than bptt_k times and does not read its input; add layers behind it')
    gpt.requires_grad_(False)
    number = 0
    for layer in gpt.h:
        start, number = number, number + len(getattr(layer, 'core', [layer]))
        layer.requires_grad_(start <= int(last) and int(first) < number)


def set_up(before, resumed, text, dev):
    """A new run, or the one that the checkpoint `before` holds, or one with its weights."""
    # the model
    kind = class_of(model_class or 'model:GPT', trusted=True)
    vocab = vocab_size or text.vocab_size
    if not vocab_size and vocab >= 1024:
        vocab = 64 * math.ceil(vocab / 64)
    # a field of its Config is the knob of that name, or else what the checkpoint has
    values = before.get('model_args', {}) | knobs | dict(vocab_size=vocab)
    shape = kind.Config(**{field.name: values[field.name] for field in fields(kind.Config)
                           if field.name in values})
    torch.manual_seed(derived_seed(seed, 'init'))
    gpt = kind(shape).to(dev)
    if before:
        with configurator.explain(f'the weights do not fit the model class {kind.__name__}',
                                  'take another --model_class or --init_from', RuntimeError):
            new, unused = gpt.load_state_dict(before['model'], strict=False)
        if new:                         # such as a gate
            say(f"not in the checkpoint, so from scratch: {', '.join(new)}")
        if unused:
            say(f"in the checkpoint and not in {kind.__name__}, so left out: {', '.join(unused)}")

    if train_only:
        freeze(gpt)

    # the optimizers, and how far the run has come
    optimizers = make_optimizers(gpt, optimizer, learning_rate, weight_decay, (beta1, beta2))
    # a longer max_iters of a resumed run leaves the decay where it was
    saved = knobs | dict(lr_decay_iters=lr_decay_iters or max_iters)
    run = Run(saved, gpt, optimizers, text.tokenizer, text.sha256)
    if resumed:
        for name, one in optimizers.items():
            one.load_state_dict(one.state_dict() | dict(state=before[name]))
        run.start, run.val_loss = before['iter_num'], before['val_loss']
        run.trend, run.spikes = before['trend'], before['spikes']
    return run


# the run -----------------------------------------------------------------------------------------

def main():
    # the run to continue from, whose knobs are taken over; then machine, text and model
    before, resumed = earlier_run(globals())
    check_knobs()
    dev, autocast = distributed.join(device, dtype)
    torch.backends.cuda.matmul.allow_tf32 = True    # only in training: small taus need true float32
    reads, folder = before.get('tokenizer'), before.get('folder')
    text = distributed.make_once(
        lambda: data.open_data(dataset, reads, vocab_size or math.inf, folder))
    text.check(block_size, batch_size)
    if resumed and before['data'] != text.sha256:
        advice = 'restore that text'
        if text.is_task:
            advice = ('tasks.py has changed since then; start from the weights in another '
                      f'--out_dir with --init_from={out_dir}/ckpt.pt')
        raise ValueError(f'{dataset} is not the data set that the run in {out_dir} had (its sha256 '
                         f'differs): {advice}')
    distributed.check_same((resumed and before['iter_num'], text.sha256, knobs))
    run = set_up(before, resumed, text, dev)
    del before                                      # frees some GB if the model is large
    with only_writer(out_dir):
        if RANK == 0 and resumed.endswith('.old.pt'):       # ckpt.pt is damaged or missing
            os.replace(resumed, resumed.replace('.old.pt', '.pt'))
        if not resumed:
            start_over(out_dir, overwrite)
            save_run(run, 0, f'{out_dir}/ckpt.pt')          # from now on --resume continues it
        stop = train(run, text, dev, autocast)
    distributed.leave()
    if stop:
        raise SystemExit(128 + (distributed.stop_signals or [signal.SIGTERM])[0])


def train(run, text, dev, autocast):
    """All iterations of a run -> was it asked to stop before its end?"""
    begin = time.time()
    gpt = ddp = run.model               # with one process, ddp is the model itself
    if dev.startswith('cuda') if compile is None else compile:
        compile_layers(gpt)
    if WORLD > 1:
        # if no step reads e, layers before a group get no gradient where it loops beyond bptt_k
        reads_e = INJECTIONS[injection].reads_e
        ddp = DistributedDataParallel(gpt, find_unused_parameters=not reads_e,
                                      broadcast_buffers=False)  # they never change
    since = f', from iteration {run.start}' if run.start else ''
    say(f'{sum(p.numel() for p in gpt.parameters()) / 1e6:.2f}M parameters, {n_layer} layers, '
        f'groups {gpt.config.groups}, {text.description}, {WORLD} x {dev}{since}')
    eval_counts = eval_loops if gpt.groups else [1]
    all_windows = text.n_held_out(block_size)
    run_log = report.Log(os.path.join(out_dir, 'log.csv'), eval_counts, run.start, max_iters,
                      accuracy=text.is_task)
    if RANK == 0 and text.encoding:     # sample.py needs the tokenizer.json beside the checkpoint
        text.encoding.save(out_dir)
    distributed.listen()

    for it in range(run.start, max_iters + 1):
        # held-out losses; at the end of the run over all windows
        held_out = {}
        if it == max_iters or (it > 0 and it % eval_interval == 0):
            n_windows = all_windows if it == max_iters else min(eval_windows, all_windows)
            held_out = report.report(run, it, n_windows, text, eval_counts, dev, autocast)
        stop = held_out is None         # asked to stop meanwhile
        if stop or it == max_iters:
            break

        # checkpoints
        if it % save_interval == 0 and it > run.start:
            save_run(run, it, f'{out_dir}/ckpt.pt')
        if it in keep_iters:
            save_run(run, it, f'{out_dir}/ckpt_{it:06d}.pt', whole=False)

        # forward and backward, gradients accumulated
        clock, lr, flops = time.time(), lr_at(it), 0
        # the loss; how many times we were asked to stop; the norm of the gradient
        status = torch.zeros(3, device=dev)
        for micro in range(gradient_accumulation_steps):
            x, y = get_batch(text, it, micro, dev)
            n_loop = draw_loops(it, micro)      # one count a group
            noise = draw_noise(it, micro, dev)
            # DDP averages the gradients of all processes at the last micro step
            ddp.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
            with autocast:
                loss = ddp(x, y, n_loop=n_loop, noise_seed=noise)[1] / gradient_accumulation_steps
            loss.backward()
            status[0] += loss.detach() / WORLD
            flops += batch_size * block_size * flops_per_token(gpt, n_loop, training=True)

        # clip; one all-reduce, which waits for the device; the check, before any weight is touched
        norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), grad_clip or math.inf)
        status[1] += len(distributed.stop_signals)
        status[2] = norm / WORLD                # each process has the same
        loss, stop, norm = distributed.add_up(status).tolist()
        report.check_finite(loss, norm, n_loop, it, lr, out_dir)
        for one in run.optimizers.values():
            for group in one.param_groups:
                group['lr'] = lr
            one.step()
            one.zero_grad(set_to_none=True)

        # log
        if report.is_spike(loss, run.trend):
            run.spikes.append([loss, it])
        tokens = gradient_accumulation_steps * batch_size * block_size
        run_log.steps.append((time.time() - clock, tokens, flops))
        if it % log_interval == 0 or it == max_iters - 1 or held_out:
            run_log.step(run, it, loss, lr, norm, n_loop, held_out)
        if stop:
            it += 1
            break

    # `it` iterations are done
    save_run(run, it, f'{out_dir}/ckpt.pt')
    flag = '' if out_dir == 'out' else f' --out_dir={quote(out_dir)}'
    if stop:
        say(f"stopped after iteration {it - 1} and saved; resume with "
            f"{'python' if WORLD == 1 else 'torchrun ...'} train.py --resume{flag}")
    else:
        run_log.add(dict(iter=it) | held_out)
        if RANK == 0:
            from common import plots  # here, since matplotlib takes a second to import
            plots.losses(report.read_log(run_log.path), eval_counts,
                         os.path.join(out_dir, 'loss.png'))
            if text.is_task:
                report.report_depth(gpt, text, eval_counts, dev, autocast, out_dir)
        say(f'done in {time.time() - begin:.0f} s: {out_dir}/ckpt.pt, log.csv, loss.png\n'
            f"next: python sample.py{' --exit accel' if gpt.groups else ''}{flag}")
    return stop


if __name__ == '__main__':
    knobs = configurator.configure(globals(), more=fields_of_model)
    configurator.run(main)
