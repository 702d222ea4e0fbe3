"""
Train a recurrent-depth GPT.

    python train.py                                 the small default: pydocs, a laptop CPU, about four minutes
    python train.py config/groups.py                the paper's model on FineWeb, one GPU
    python train.py config/groups.py --dataset=pydocs --max_iters=1000

writes out_dir/ckpt.pt, ckpt_ITER.pt at keep_iters, log.csv (losses, speed; held-out losses by loops) and loss.png.
Paper: App. B (recipe: nanoGPT's, with loop draws); Geiping 3.3 (training objective). Losses are nats a token.
"""
import csv
import math
import os
import time
from dataclasses import asdict

import numpy as np
import torch

import data
from configurator import configure, run
from loops import derived_seed, sample_n_loop
from model import GPT, GPTConfig, pick_device

# ---------------------------------------------------------------------------------------------------------------------
# data and files
dataset = 'pydocs'          # a folder of data/, see data.py
out_dir = 'out'             # checkpoints, log and figure
# model: small enough for two CPU cores and five minutes
block_size = 48             # tokens of context: short, since attention learns to use few positions sooner than many
n_layer = 6
n_head = 2
n_embd = 96
dropout = 0.0
bias = False                # in linear layers
vocab_size: int | None = None       # None = the data set's, a large one rounded up to a multiple of 64
groups = [[1], [2, 3], [4]]         # looped layers, from 0; [] = a plain GPT
mean_recurrence: float = 4.0        # r of the loop draw for each group and pass; its mean is r + 1
bptt_k = 3                  # loop steps of each group that gradients go through: a quarter less time than 8
injection = 'concat'        # how e enters each step: concat, add, none
adapter_init = 'sum'        # concat starts as x + e; or random
step_noise = 0.0            # noise in every step, in units of x^(0)'s
# training
batch_size = 16
gradient_accumulation_steps = 1
max_iters = 1900
learning_rate = 3e-3        # more makes less use of the loops
min_lr = 3e-4
warmup_iters = 200
lr_decay_iters: int | None = None   # None = max_iters
weight_decay = 0.1          # on matrices only
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0             # norm; 0.0 = off
seed = 1337                 # batches, loop draws and noise all derive from it
# evaluation, log, checkpoints
eval_interval = 700         # iterations; a checkpoint goes with each
eval_windows = 200          # held-out windows each time; the last time it is all of them
eval_loops = [1, 2, 4, 8]   # loop counts to evaluate at
log_interval = 50
keep_iters = [0, 100, 300, 700, 1400]    # keep the weights of these, for the geometry over training; the last always
# machine
device = 'auto'             # cuda, mps or cpu; auto = the best there is
dtype = 'auto'              # of matrix products: float32, bfloat16; auto = bfloat16 on cuda. The state is float32 always
compile: bool | None = None     # torch.compile the blocks and steps; None = on cuda, where it pays
# ---------------------------------------------------------------------------------------------------------------------


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


@torch.no_grad()
def evaluate(model, tokens, n_windows, loops, device, autocast, batch=64):
    """Held-out loss at each loop count: {n_loop: nats a token} over n_windows windows, evenly spread, without overlap."""
    model.eval()
    T = model.config.block_size
    starts = T * np.linspace(0, (len(tokens) - 1) // T - 1, n_windows).round().astype(int)
    losses = {}
    for n_loop in loops:
        total = 0.0
        for i in range(0, n_windows, batch):
            x, y = data.windows(tokens, starts[i:i + batch], T)
            with autocast:
                total += model(x.to(device), y.to(device), n_loop=n_loop)[1].item() * len(x)
        losses[n_loop] = total / n_windows
    model.train()
    return losses


def plot_losses(log, eval_log, path):
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(6.4, 4))
    ax.plot(*zip(*log), color='0.7', lw=0.8, label='training, drawn loops')
    for n, style in zip(eval_log[0][1], ('-', '--', '-.', ':') * 9):
        ax.plot([it for it, _ in eval_log], [losses[n] for _, losses in eval_log], style, lw=1.6, label=f'held-out, {n} loop' + 's' * (n > 1))
    ax.set(xlabel='iteration', ylabel='loss (nats a token)', title='Loss by loops')
    ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(path, dpi=120)


def check_knobs():
    for knob in ('batch_size', 'gradient_accumulation_steps', 'max_iters', 'eval_interval', 'eval_windows', 'log_interval'):
        if globals()[knob] < 1:
            raise ValueError(f'{knob} must be at least 1, not {globals()[knob]}')
    if not eval_loops or not all(isinstance(n, int) and n >= 1 for n in eval_loops):
        raise ValueError(f'eval_loops must be a list of loop counts, each at least 1, not {eval_loops}')


def main():
    t_start = time.time()
    check_knobs()
    dev, autocast = pick_device(device, dtype)
    train_tokens, val_tokens, meta = data.load(dataset)
    for split, tokens in dict(train=train_tokens, val=val_tokens).items():
        if len(tokens) <= block_size:
            raise ValueError(f'block_size = {block_size} is longer than the {split} text of {dataset} ({len(tokens)} tokens): '
                             'make --block_size smaller, or take more text')
    vocab = vocab_size or (meta['vocab_size'] if meta['vocab_size'] < 1024 else 64 * math.ceil(meta['vocab_size'] / 64))
    if vocab < meta['vocab_size']:
        raise ValueError(f"vocab_size = {vocab} is less than the {meta['vocab_size']} tokens of {dataset}: leave it at None")
    args = dict(block_size=block_size, vocab_size=vocab, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=dropout, bias=bias,
                groups=groups, mean_recurrence=mean_recurrence, bptt_k=bptt_k, injection=injection, adapter_init=adapter_init,
                step_noise=step_noise)
    torch.manual_seed(derived_seed(seed, 'init'))
    torch.backends.cuda.matmul.allow_tf32 = True        # while training; the exit rules' small taus come later
    model = GPT(GPTConfig(**args)).to(dev)
    optimizer = make_optimizer(model)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {n_layer} layers, groups {model.config.groups}, "
          f"{dataset}: {len(train_tokens):,} tokens ({meta['tokenizer']}), {dev}")
    if compile or (compile is None and dev.startswith('cuda')):
        for layer in model.h:       # a step at a time: the number of loops stays plain Python, so no draw recompiles
            name = 'step' if layer in model.groups else 'forward'
            setattr(layer, name, torch.compile(getattr(layer, name)))
    os.makedirs(out_dir, exist_ok=True)
    n_windows = (len(val_tokens) - 1) // block_size
    loops = eval_loops if model.groups else [1]
    log, eval_log = [], []
    log_file = open(os.path.join(out_dir, 'log.csv'), 'w', newline='')
    log_csv = csv.writer(log_file)
    log_csv.writerow(['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s', *(f'val_loss_{n}' for n in loops)])

    def save(file, it):
        path = os.path.join(out_dir, file)
        torch.save(dict(model=model.state_dict(), model_args=asdict(model.config), config=config, iter_num=it,
                        tokenizer=meta['tokenizer'], val_loss=eval_log[-1][1] if eval_log else {}), path + '.tmp')
        os.replace(path + '.tmp', path)

    def report(it, count):
        losses = evaluate(model, val_tokens, count, loops, dev, autocast)
        eval_log.append((it, losses))
        log_csv.writerow([it, *[''] * 6, *(f'{loss:.5f}' for loss in losses.values())])
        print(f'iter {it}: held-out loss over {count:,} windows: ' + ', '.join(f'{loss:.4f} at {n} loop' + 's' * (n > 1) for n, loss in losses.items()))

    t_log = t_loop = time.time()
    for it in range(max_iters):
        if it % eval_interval == 0 and it:
            t = time.time()
            report(it, min(eval_windows, n_windows))
            save('ckpt.pt', it)
            t_log += time.time() - t        # of training alone
        if it in keep_iters:
            save(f'ckpt_{it:06d}.pt', it)
        for group in optimizer.param_groups:
            group['lr'] = lr_at(it)
        for micro in range(gradient_accumulation_steps):
            # every draw derives from (seed, purpose, iteration, micro step): DESIGN of the randomness, see README
            starts = np.random.default_rng(derived_seed(seed, 'batch', it, micro)).integers(len(train_tokens) - block_size, size=batch_size)
            x, y = (t.to(dev, non_blocking=True) for t in data.windows(train_tokens, starts, block_size))
            generator = torch.Generator().manual_seed(derived_seed(seed, 'loops', it, micro))
            n_loop = [sample_n_loop(mean_recurrence, generator) for _ in groups]
            torch.manual_seed(derived_seed(seed, 'noise', it, micro))
            with autocast:
                loss = model(x, y, n_loop=n_loop)[1]
            (loss / gradient_accumulation_steps).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if it % log_interval == 0 or it == max_iters - 1:
            log.append((it, loss.item()))       # waits for the device
            dt = (time.time() - t_log) / (log_interval if it and it % log_interval == 0 else it % log_interval or 1)
            rate = batch_size * block_size * gradient_accumulation_steps / dt
            left = (time.time() - t_loop) / (it + 1) * (max_iters - it - 1)
            draws = '/'.join(map(str, n_loop))
            print(f'iter {it}: loss {loss.item():.3f}, loops {draws or "none"}, {dt * 1e3:.0f} ms, {rate / 1e3:.1f}k tok/s, {left:.0f} s left')
            log_csv.writerow([it, f'{loss.item():.5f}', f'{lr_at(it):.3e}', f'{grad_norm.item():.4f}', draws, f'{dt * 1e3:.1f}', f'{rate:.0f}', *[''] * len(loops)])
            t_log = time.time()
    report(max_iters, n_windows)
    save('ckpt.pt', max_iters)
    log_file.close()
    plot_losses(log, eval_log, os.path.join(out_dir, 'loss.png'))
    print(f'done in {time.time() - t_start:.0f} s: {out_dir}/ckpt.pt, log.csv, loss.png')
    print('next: python sample.py' + ' --exit accel' * bool(groups) + (f' --out_dir={out_dir}' if out_dir != 'out' else ''))


if __name__ == '__main__':
    config = configure(globals())
    run(main)
