"""
Train a recurrent-depth GPT.

    python train.py                                 the small default: pydocs, a laptop CPU, about four minutes
    python train.py config/groups.py                the paper's model on FineWeb, one GPU
    python train.py --resume                        go on where out_dir stopped, with the knobs that it had
    torchrun --standalone --nproc_per_node=2 train.py config/groups.py

writes out_dir/ckpt.pt, the one before as ckpt.old.pt, ckpt_ITER.pt at keep_iters, log.csv (losses, speed, health; held-out losses by
loops) and loss.png. Ctrl-C or SIGTERM: the step is finished and saved; again: at once.
Paper: App. B (recipe: nanoGPT's, with loop draws); Geiping 3.3 (objective), 4.4 (averaged weights), App. C.3 (what to watch).
Losses are nats a token. Symbols: it the iteration, micro the step of gradient accumulation, rank and world of torchrun's processes.
"""
import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import data
from checkpoint import last_checkpoint, load_checkpoint, open_log, save_checkpoint
from configurator import configure, given, run
from loops import LOOP_DRAWS, derived_seed, sample_n_loop
from model import GPT, GPTConfig, pick_device, training_flops
from watch import health, is_spike, plot_losses, warnings_of

# ---------------------------------------------------------------------------------------------------------------------
# data and files
dataset = 'pydocs'          # a folder of data/, see data.py
out_dir = 'out'             # checkpoints, log and figure
resume = False              # go on from out_dir/ckpt.pt; knobs not given are those of its run
init_from = ''              # a checkpoint whose model and weights to start from, for fine-tuning
# model: small enough for two CPU cores and four minutes
block_size = 48             # tokens of context: short, since attention learns to use few positions sooner than many
n_layer = 6
n_head = 2
n_embd = 96
dropout = 0.0
bias = False                # in linear layers
vocab_size: int | None = None       # None = the data set's, a large one rounded up to a multiple of 64
groups = [[1], [2, 3], [4]]         # looped layers, from 0; [] = a plain GPT
mean_recurrence: float = 4.0        # r of the loop draw for each group and pass; its mean is r + 1
loop_draw = 'lognormal'     # lognormal (Geiping), uniform or fixed, all of the same mean
bptt_k = 3                  # loop steps of each group that gradients go through: a quarter less time than 8
injection = 'concat'        # how e enters each step: concat, add, none
adapter_init = 'sum'        # concat starts as x + e; or random
x0 = 'noise'                # a group's first state: noise, zero, or e
norm_inside = True          # the norm at the end of the core in every step; False = once, after the last
step_noise = 0.0            # noise in every step, in units of x^(0)'s
# training
batch_size = 16             # sequences of a step, shared by all processes
gradient_accumulation_steps = 1
max_iters = 1900
learning_rate = 3e-3        # more makes less use of the loops
min_lr = 3e-4
warmup_iters = 200
lr_decay_iters: int | None = None   # None = the first max_iters
weight_decay = 0.1          # on matrices only
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0             # norm; 0.0 = off
ema = 0.0                   # weights averaged with this decay, evaluated beside the raw ones and saved in out_dir/ema; 0.0 = off
seed = 1337                 # batches, loop draws and noise all derive from it
# evaluation, log, checkpoints
eval_interval = 700         # iterations
eval_windows = 200          # held-out windows each time; the last time it is all of them
eval_loops = [1, 2, 4, 8]   # loop counts to evaluate at
log_interval = 50
save_interval = 200         # iterations between two ckpt.pt
keep_iters = [0, 100, 300, 700, 1400]    # keep the weights of these, for the geometry over training; the last always
# machine
device = 'auto'             # cuda, mps or cpu; auto = the best there is
dtype = 'auto'              # of matrix products: float32, bfloat16; auto = bfloat16 on cuda. The state is float32 always
compile: bool | None = None     # torch.compile the blocks and steps; None = on cuda, where it pays
checkpoint_steps = False    # keep one state a loop step and compute the step again for its gradients: less memory, more time
peak_tflops: float | None = None    # of one device, for MFU; None = known for a few cards
# ---------------------------------------------------------------------------------------------------------------------

FREE = {'out_dir', 'resume', 'max_iters', 'eval_interval', 'eval_windows', 'log_interval', 'save_interval', 'keep_iters', 'device', 'compile',
        'checkpoint_steps', 'peak_tflops'}      # knobs that shape neither the weights nor the columns of the log
SHAPE = {'block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'bias', 'groups', 'injection', 'x0', 'norm_inside'}      # what weights must fit
PEAK_TFLOPS = {'H200': 989, 'H100': 989, 'A100': 312, 'L40S': 362, 'RTX 4090': 165}    # bf16, dense, by the makers' data sheets


def lr_at(it):
    """Linear warm-up, then a cosine down to min_lr at lr_decay_iters."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, (lr_decay_iters or max_iters) - warmup_iters))
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def make_optimizer(model):
    """AdamW, decay on matrices (embeddings too) and not on norms and biases."""
    params = list(model.parameters())
    return torch.optim.AdamW([dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
                              dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)],
                             lr=learning_rate, betas=(beta1, beta2), fused=next(model.parameters()).is_cuda)


# what is looked at on the way -----------------------------------------------------------------------------------------

@torch.no_grad()
def evaluate(model, tokens, n_windows, loops, device, autocast, batch=64, rank=0, world=1):
    """Held-out loss at each loop count: {n_loop: nats a token} over n_windows windows, evenly spread, without overlap."""
    model.eval()
    T = model.config.block_size
    starts = T * np.linspace(0, (len(tokens) - 1) // T - 1, n_windows).round().astype(int)[rank::world]
    losses = {}
    for n_loop in loops:
        total = torch.zeros((), device=device)
        for i in range(0, len(starts), batch):
            x, y = data.windows(tokens, starts[i:i + batch], T)
            with autocast:
                total += model(x.to(device), y.to(device), n_loop=n_loop)[1] * len(x)
        if world > 1:
            dist.all_reduce(total)
        losses[n_loop] = total.item() / n_windows
    model.train()
    return losses


@contextmanager
def using(model, weights):
    """The model with other weights (name: tensor; none: its own) for as long as the block lasts."""
    if not weights:
        yield
        return
    raw = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(weights, strict=False)        # the head is tied, and no parameter of its own
    yield
    model.load_state_dict(raw, strict=False)


def compiled(dev):
    return dev.startswith('cuda') if compile is None else compile


def peak(dev):
    """The device's bf16 TFLOP/s, None if unknown."""
    card = torch.cuda.get_device_name(dev) if dev.startswith('cuda') else ''
    return peak_tflops or next((tflops for name, tflops in PEAK_TFLOPS.items() if name in card), None)


def peak_memory(dev):
    """Most memory this process has held, GB: the device's on CUDA, else its own."""
    if dev.startswith('cuda'):
        return torch.cuda.max_memory_allocated(dev) / 1e9
    try:
        import resource
    except ImportError:     # Windows
        return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e9


# a run that stops and goes on ------------------------------------------------------------------------------------------

def check_knobs(world):
    for knob in ('batch_size', 'gradient_accumulation_steps', 'max_iters', 'eval_interval', 'eval_windows', 'log_interval', 'save_interval'):
        if globals()[knob] < 1:
            raise ValueError(f'{knob} must be at least 1, not {globals()[knob]}')
    for knob in ('learning_rate', 'min_lr', 'warmup_iters', 'weight_decay', 'grad_clip', 'dropout', 'step_noise'):
        if not 0 <= globals()[knob] < 1e30:
            raise ValueError(f'{knob} must be a number from 0 on, not {globals()[knob]}')
    if not eval_loops or not all(isinstance(n, int) and n >= 1 for n in eval_loops):
        raise ValueError(f'eval_loops must be a list of loop counts, each at least 1, not {eval_loops}')
    if loop_draw not in LOOP_DRAWS:
        raise ValueError(f"unknown loop_draw '{loop_draw}': choose one of {', '.join(LOOP_DRAWS)}")
    if not 0 <= ema < 1:
        raise ValueError(f'ema must lie in [0, 1), not {ema}')
    if batch_size % world:
        raise ValueError(f'batch_size = {batch_size} sequences cannot be shared by {world} processes: take a multiple of {world}')


def join_processes(world):
    """-> device, autocast. Under torchrun each process takes a card of its own (nccl), or shares the CPU (gloo)."""
    name = device
    if world > 1 and device in ('auto', 'cuda') and torch.cuda.is_available():
        name = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(name)
    dev, autocast = pick_device(name, dtype)
    if world > 1:
        dist.init_process_group('nccl' if dev.startswith('cuda') else 'gloo')
    return dev, autocast


def take_up(saved, fixed, whence):
    """Set the knobs that were not given to a checkpoint's values. ValueError for one of `fixed` that was given another value."""
    changed = []
    for key in config.keys() & saved.keys() - {'out_dir', 'resume'}:
        if key not in given:
            globals()[key] = saved[key]
        elif key in fixed and plain(globals()[key]) != saved[key]:
            changed.append(f'{key} = {globals()[key]} (it was {saved[key]})')
    if changed:
        raise ValueError(f'{whence} had other knobs: {", ".join(sorted(changed))}; leave them out, or train anew in another --out_dir')


def plain(value):
    """Knobs as a file holds them: numbers, strings, lists."""
    return json.loads(json.dumps(value))


def check_same(mine, world):
    """ValueError if the processes are not of one run: on several machines data/ and out_dir must be the same."""
    if world > 1:
        dist.all_gather_object(all_of_them := [None] * world, mine)
        if any(one != mine for one in all_of_them):
            raise ValueError('the machines differ in their knobs, data or checkpoint: data/ and, to resume, out_dir must be the same on each')


def load_data(world):
    first = os.environ.get('LOCAL_RANK', '0') == '0'
    if not first:           # the first process of a machine makes what is not there
        dist.barrier()
    train_tokens, val_tokens, meta = data.load(dataset)
    if world > 1 and first:
        dist.barrier()
    for split, tokens in dict(train=train_tokens, val=val_tokens).items():
        if len(tokens) <= block_size:
            raise ValueError(f'block_size = {block_size} is longer than the {split} text of {dataset} ({len(tokens)} tokens): '
                             'make --block_size smaller, or take more text')
    vocab = vocab_size or (meta['vocab_size'] if meta['vocab_size'] < 1024 else 64 * math.ceil(meta['vocab_size'] / 64))
    if vocab < meta['vocab_size']:
        raise ValueError(f"vocab_size = {vocab} is less than the {meta['vocab_size']} tokens of {dataset}: leave it at None")
    return train_tokens, val_tokens, meta, vocab


def set_up(meta, vocab, dev, saved, first, rank, world):
    """-> model, optimizer and averaged weights (name: tensor; none without ema): fresh, or those of a checkpoint's dict."""
    args = dict(block_size=block_size, vocab_size=vocab, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=dropout, bias=bias,
                groups=groups, mean_recurrence=mean_recurrence, bptt_k=bptt_k, injection=injection, adapter_init=adapter_init, x0=x0,
                norm_inside=norm_inside, step_noise=step_noise)
    torch.manual_seed(derived_seed(seed, 'init'))
    torch.backends.cuda.matmul.allow_tf32 = True        # while training; the exit rules' small taus come later
    model = GPT(GPTConfig(**args)).to(dev)
    if saved or first:
        model.load_state_dict((saved or first)['model'])
    optimizer = make_optimizer(model)
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()} if ema else {}
    if saved:
        optimizer.load_state_dict(optimizer.state_dict() | dict(state=saved['optimizer']))
        averaged = {name: saved['ema'][name].to(dev) for name in averaged}
    for group in model.groups:
        group.rank, group.world, group.checkpoint_steps = rank, world, checkpoint_steps
    if compiled(dev):
        compile_layers(model)
    return model, optimizer, averaged


def compile_layers(model, **how):
    """A step at a time: the number of loops stays plain Python, so no draw recompiles. how: torch.compile's."""
    torch._dynamo.config.recompile_limit = 8 + 3 * len(model.groups)        # three graphs for each length of core, see test_loops.py
    for layer in model.h:
        name = 'step' if layer in model.groups else 'forward'
        setattr(layer, name, torch.compile(getattr(layer, name), **how))


def main():
    t_start, spent = time.time(), dict(checkpoints=0.0, evaluation=0.0)
    rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))      # as torchrun sets them
    say = print if rank == 0 else lambda *line: None
    (saved, path), first = last_checkpoint(out_dir, say) if resume else (None, ''), None
    if saved:
        take_up(saved['config'], saved['config'].keys() - FREE, f'the run in {out_dir}')
        if saved['iter_num'] > max_iters:
            raise ValueError(f"the run in {out_dir} has {saved['iter_num']} iterations already: --max_iters may be no less")
    elif init_from:
        if os.path.realpath(os.path.dirname(init_from)) == os.path.realpath(out_dir):
            raise ValueError(f'init_from = {init_from} would be written over: take another --out_dir')
        first = load_checkpoint(init_from)[1]
        take_up(first['model_args'], SHAPE, init_from)
    check_knobs(world)
    dev, autocast = join_processes(world)
    if rank == 0 and path.endswith('.old.pt'):      # the other is damaged
        os.replace(path, path.replace('.old.pt', '.pt'))
    globals()['lr_decay_iters'] = lr_decay_iters or max_iters       # and stays so when a resumed run gets a longer max_iters
    train_tokens, val_tokens, meta, vocab = load_data(world)
    start = saved['iter_num'] if saved else 0
    check_same((start, meta['train']['sha256'], {key: globals()[key] for key in config}), world)
    if saved and saved['data'] != meta['train']['sha256']:
        raise ValueError(f'{dataset} is not the text that the run in {out_dir} had (its sha256 is another): make it again as it was')
    if first and first['tokenizer'] != meta['tokenizer']:
        raise ValueError(f"{init_from} reads {first['tokenizer']} and {dataset} is {meta['tokenizer']}: make it with python data.py ... --tokenizer={first['tokenizer']}")
    config.update({key: plain(globals()[key]) for key in config})
    model, optimizer, averaged = set_up(meta, vocab, dev, saved, first, rank, world)
    # without injection nothing before a group gets a gradient when it loops longer than bptt_k; otherwise all weights do, always
    ddp = DistributedDataParallel(model, find_unused_parameters=injection == 'none') if world > 1 else model
    trend, high, val_loss = (saved['trend'], saved['spikes'], saved['val_loss']) if saved else ([0, 0.0, 0.0], [], {})
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {n_layer} layers, groups {model.config.groups}, {dataset}: "
        f"{len(train_tokens):,} tokens ({meta['tokenizer']}), {world} x {dev}" + (f', from iteration {start}' if start else ''))
    loops, n_windows, kinds = eval_loops if model.groups else [1], (len(val_tokens) - 1) // block_size, ['val_loss', *['ema_loss'] * bool(ema)]
    columns = ['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s', 'tflops', 'spikes', *(f'{kind}_{n}' for kind in kinds for n in loops), 'token_corr', 'state_use']
    if rank == 0:
        os.makedirs(out_dir, exist_ok=True)
        log = open_log(os.path.join(out_dir, 'log.csv'), columns, start)

    def save(file, it, whole=True):
        """whole: with all it takes to go on; otherwise the weights."""
        if rank:
            return
        t = time.time()
        checkpoint = dict(model=dict(model.state_dict()), model_args=asdict(model.config), config=config, iter_num=it, tokenizer=meta['tokenizer'],
                          data=meta['train']['sha256'], val_loss=val_loss)
        if whole:
            checkpoint |= dict(optimizer=optimizer.state_dict()['state'], trend=trend, spikes=high, ema=averaged)
        save_checkpoint(checkpoint, os.path.join(out_dir, file), keep_old=whole)
        spent['checkpoints'] += time.time() - t

    def report(it, count):
        """Held-out losses and health, told and as columns of the log."""
        t, row = time.time(), {}
        with torch.compiler.set_stance('force_eager') if compiled(dev) else nullcontext():      # its shapes shall compile nothing
            for kind, weights in zip(kinds, ({}, averaged)):
                with using(model, weights):
                    losses = evaluate(model, val_tokens, count, loops, dev, autocast, rank=rank, world=world)
                row |= {f'{kind}_{n}': f'{loss:.5f}' for n, loss in losses.items()}
                val_loss.update(losses if kind == 'val_loss' else {})
                say(f"iter {it}: held-out loss over {count:,} windows{', averaged weights' * (kind == 'ema_loss')}: "
                    + ', '.join(f'{loss:.4f} at {n} loop' + 's' * (n > 1) for n, loss in losses.items()))
            idx = data.windows(val_tokens, range(0, min(8, n_windows) * block_size, block_size), block_size)[0]
            found = health(model, idx.to(dev), autocast)
        for line in warnings_of(found) if it >= warmup_iters else ():
            say(f'warning: iter {it}: {line}')
        spent['evaluation'] += time.time() - t
        return row | dict(zip(('token_corr', 'state_use'), ('/'.join(f'{value:.3f}' for value in values) for values in zip(*found))))

    def train_step(it):
        """One iteration up to the optimiser -> loss, gradient norm, loop counts, FLOPs, whether a process was asked to stop."""
        status, flops = torch.zeros(2, device=dev), 0
        for micro in range(gradient_accumulation_steps):
            # every draw derives from (seed, purpose, iteration, micro step), the same in each process, which takes its rows of it
            starts = np.random.default_rng(derived_seed(seed, 'batch', it, micro)).integers(len(train_tokens) - block_size, size=batch_size)
            x, y = (t.to(dev, non_blocking=True) for t in data.windows(train_tokens, np.split(starts, world)[rank], block_size))
            generator = torch.Generator().manual_seed(derived_seed(seed, 'loops', it, micro))
            n_loop = [sample_n_loop(mean_recurrence, generator, draw=loop_draw) for _ in groups]
            generator = torch.Generator(dev).manual_seed(derived_seed(seed, 'noise', it, micro))
            for group in model.groups:
                group.generator = generator
            torch.manual_seed(derived_seed(seed, 'dropout', it, micro, rank))
            ddp.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
            with autocast:
                loss = ddp(x, y, n_loop=n_loop)[1] / gradient_accumulation_steps
            loss.backward()
            status[0] += loss.detach() / world
            flops += batch_size * block_size * training_flops(model.config, n_loop)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
        status[1] += len(stops)
        if world > 1:
            dist.all_reduce(status)
        loss, stop = status.tolist()        # waits for the device
        return loss, norm.item(), '/'.join(map(str, n_loop)), flops, stop

    stops, handlers = [], {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask_to_stop(number, frame):
        stops.append(number)
        signal.signal(number, handlers[number])     # a second one stops at once
    for number in handlers:
        signal.signal(number, ask_to_stop)
    saved, first, dt, flops, since = bool(saved), None, 0.0, 0, start       # the last three since the last row of the log
    graphs, early = lambda: torch._dynamo.utils.counters['stats']['unique_graphs'] if compiled(dev) else 0, 0
    for it in range(start, max_iters):
        row = report(it, min(eval_windows, n_windows)) if it % eval_interval == 0 and it else {}
        if it % save_interval == 0 and (it > start or not saved):
            save('ckpt.pt', it)
        early = graphs() if it <= start + 100 else early
        if it in keep_iters:
            save(f'ckpt_{it:06d}.pt', it, whole=False)
        t = time.time()
        loss, norm, draws, done, stop = train_step(it)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise ValueError(f'no number at iteration {it}: loss {loss}, gradient norm {norm}, loops {draws or "none"}, learning rate {lr_at(it):.2e}. The weights were not touched and '
                             f'{out_dir}/ckpt.pt is good: train on from it with a lower learning rate (--init_from={out_dir}/ckpt.pt --out_dir=...)')
        for group in optimizer.param_groups:
            group['lr'] = lr_at(it)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if ema:
            with torch.no_grad():       # less at first, when the raw weights are no good yet
                torch._foreach_lerp_([*averaged.values()], [*model.parameters()], 1 - min(ema, (it + 1) / (it + 10)))
        if is_spike(loss, trend):
            high.append([loss, it])
        dt, flops = dt + time.time() - t, flops + done
        if it % log_interval == 0 or it == max_iters - 1 or row:
            n = it + 1 - since
            rate, tflops = n * gradient_accumulation_steps * batch_size * block_size / dt, flops / dt / 1e12 / world     # of all; of one device
            say(f'iter {it}: loss {loss:.3f}, loops {draws or "none"}, {1e3 * dt / n:.0f} ms, {rate / 1e3:.1f}k tok/s, '
                + (f'{100 * tflops / peak(dev):.0f}% MFU, ' if peak(dev) else '') + f'{dt / n * (max_iters - it - 1):.0f} s left')
            if high:
                say(f'warning: iter {it}: loss spikes since iteration {since}: {len(high)}, the highest {max(high)[0]:.2f} at iteration {max(high)[1]} '
                    f'(running mean {trend[1]:.2f}); if they go on, lower the learning rate')
            row |= dict(iter=it, loss=f'{loss:.5f}', lr=f'{lr_at(it):.3e}', grad_norm=f'{norm:.4f}', loops=draws, dt_ms=f'{1e3 * dt / n:.1f}', tokens_per_s=f'{rate:.0f}',
                        tflops=f'{tflops:.4f}', spikes=len(high))
            if rank == 0:
                log(row)
            dt, flops, since = 0.0, 0, it + 1
            high.clear()
        if stop:
            save('ckpt.pt', it + 1)
            say(f"stopped after iteration {it} and saved; go on with {'python' if world == 1 else 'torchrun ...'} train.py --resume" + f' --out_dir={out_dir}' * (out_dir != 'out'))
            break
    else:
        row = report(max_iters, n_windows)
        save('ckpt.pt', max_iters)
        if ema:
            with using(model, averaged):
                save(os.path.join('ema', 'ckpt.pt'), max_iters, whole=False)
        if rank == 0:
            log(dict(iter=max_iters) | row)
            plot_losses(os.path.join(out_dir, 'log.csv'), loops)
        took = time.time() - t_start
        if compiled(dev):
            say(f'{graphs()} graphs compiled, {graphs() - early} of them after the first 100 iterations')
        say(f"done in {took:.0f} s ({', '.join(f'{what} {100 * s / took:.1f}%' for what, s in spent.items())}), {peak_memory(dev):.2f} GB at most: {out_dir}/ckpt.pt, log.csv, loss.png")
        say('next: python sample.py' + ' --exit accel' * bool(groups) + f' --out_dir={out_dir}' * (out_dir != 'out'))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if world > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
