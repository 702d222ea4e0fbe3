"""
Train a recurrent-depth GPT.

    python train.py                         the small default: torchdocs, a laptop, some minutes
    python train.py config/groups.py        the paper's model on FineWeb, one GPU
    python train.py --resume                continue the run in out_dir, with its knobs; flags win
    python train.py --eval_only --out_dir=out-calc --block_size=192 '--eval_loops=[64,256]'
                                            no training: the losses by loops, here at another
                                            length (not with learned positions), by depth in
                                            eval_WEIGHTS-ITER[-WINDOWS]_DATASET_T.csv
    python train.py mine.py --model_class=mine:Mine     another class of model, in mine.py
    torchrun --standalone --nproc_per_node=2 train.py config/groups.py

writes ckpt.pt, ckpt_ITER.pt at keep_iters, ckpt_best.pt (ckpt_best_ITER.pt of an earlier kind of
evaluation), log.csv and loss.png; eval.csv at the end. Ctrl-C finishes the step or evaluation and
saves; a second one stops at once. In a notebook, once (the knobs of a checkpoint stay): import
train; train.max_iters = 12; train.main().

log.csv has rows of iterations (loops of the last micro step; grad_norm before clipping; mean times)
and of evaluations by N loops, before the step: val_loss_N, and on tasks val_acc_N.

Paper: App. B (the recipe: nanoGPT's, with loop draws). Geiping: 3.3 (truncated gradients). Losses
are nats per label, on a text per token.
"""
import csv
import math
import os
import re
import shlex
import time
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields
from typing import Literal, get_type_hints

import numpy as np
import torch
from filelock import FileLock, Timeout

import data
from common import distributed, errors, evaluation
from common.checkpoint import (
    check_free,
    checkpoint_of,
    class_of,
    folder_of_results,
    read_checkpoint,
    save_checkpoint,
    start_over,
)
from common.configurator import Count, Natural, NotNegative, Positive, configure
from common.distributed import say
from common.errors import check, explain
from common.files import read_csv, write_csv
from common.optim import make_optimizers
from loops import INJECTIONS, TrainingNoise, derived_seed
from model import MOST_LOOPS, GPTConfig, compile_layers

# -------------------------------------------------------------------------------------------------
dataset = 'torchdocs'       # a folder of data/ (data.py), or a task and its knobs (tasks.py)
out_dir = 'out'             # a folder: checkpoints, log and figure
resume = False              # continue out_dir/ckpt.pt with its knobs; start if there is none
overwrite = False           # start over in an out_dir that holds a run
init_from: str | None = None    # a checkpoint, or its folder, whose model and weights to start from
eval_only = False           # no training: the table of out_dir/ckpt.pt, or of init_from, beside it
# model: small enough for two CPU cores and some minutes
model_class = 'model:GPT'   # MODULE:CLASS; what its Config adds is a knob, too
block_size: Count = 48      # tokens of context; attention learns faster with few positions
n_layer = 6
n_head = 2
n_embd = 96
groups: list | Literal['all'] = [[1], [2, 3], [4]]  # looped layers, from 0; [] = a plain GPT
mean_recurrence: float = 4.0    # r: training loops r + 1 times on average
loop_draw: Literal['lognormal', 'fixed'] = 'lognormal'  # lognormal: Geiping; fixed: always r times
bptt_k = 3                  # last loop steps of a group that have gradients; 8 takes a third longer
injection = 'concat'        # how e enters each step, a name in loops.INJECTIONS: add, none, ...
x0 = 'noise'                # a group's first state: noise, zero, or e
norm_inside = True          # the norm of the core in every step; False = once, after the last
pos = 'learned'             # positions: learned, rotary, none
rope_base: Positive = 10000.0         # of rotary positions; 100 for short problems
window: int | None = None   # attention reads the last `window` tokens; None = all
# training
batch_size: Count = 16             # sequences of a micro step, of all processes together
gradient_accumulation_steps: Count = 1
max_iters: Natural = 1500
optimizer: Literal['muon', 'adamw'] = 'muon'    # muon: for the matrices of blocks and adapters
learning_rate: Positive = 5e-3
min_lr: NotNegative | None = None     # None = learning_rate / 10
warmup_iters: Natural = 100
lr_decay_iters: Count | None = None   # None = max_iters, as it was when the run began
weight_decay: NotNegative = 0.1          # on matrices only
grad_clip: NotNegative = 1.0             # norm; 0.0 = off
seed = 1337                 # of weights, batches, loop draws and noise
# evaluation, log, checkpoints
eval_interval: Count = 500         # between two evaluations, each but the first with a ckpt.pt
eval_windows: Count | None = 200  # held-out windows each time; None = all, as in the last table
eval_loops: list | None = None  # loop counts to evaluate at; None = 1, 2, 4, 8, or a fixed r
log_interval: Count = 50
keep_iters = [0, 100, 300, 700]     # iterations whose weights to keep, for geometry.py
# machine
device = 'auto'             # cuda, mps or cpu; auto = the best there is
dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of products; auto = bfloat16 on cuda
compile: bool | None = None     # torch.compile the blocks and steps; None = on cuda only
# -------------------------------------------------------------------------------------------------
settings = configure(globals(), keep_unknown=True)


def lr_at(it):
    """Linear warm-up, then a cosine down to min_lr at lr_decay_iters."""
    lowest = learning_rate / 10 if min_lr is None else min_lr
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    end = lr_decay_iters or max_iters
    ratio = min(1.0, (it - warmup_iters) / max(1, end - warmup_iters))
    return lowest + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - lowest)


def get_batch(run, it, micro):
    """
    What a micro step trains on: this process's rows of the batch, tokens and labels (B, T), of a
    task maybe several shorter rows for one (Task.batch); how often each group loops; its noise. The
    draws derive from (seed, purpose, it, micro), and are the same in all processes.
    """
    rng = np.random.default_rng(derived_seed(seed, 'batch', it, micro))
    share = batch_size // distributed.WORLD
    mine = slice(distributed.RANK * share, (distributed.RANK + 1) * share)
    x, y = run.examples.batch(rng, batch_size, block_size, mine)
    generator = torch.Generator().manual_seed(derived_seed(seed, 'loops', it, micro))
    n_loop = run.model.draw_loops(generator)
    generator = torch.Generator(run.dev).manual_seed(derived_seed(seed, 'noise', it, micro))
    noise = TrainingNoise(generator, distributed.RANK, distributed.WORLD)
    return x.to(run.dev), y.to(run.dev), n_loop, noise


def make_model(cls, checkpoint, examples, strict):
    """A new model on the CPU, with the weights of the checkpoint unless it is {}; strict: all."""
    vocab_size = examples.vocab_size
    if vocab_size >= 1024:              # matrices whose sides are multiples of 64 are faster
        vocab_size = 64 * math.ceil(vocab_size / 64)
    # a field of its Config is the knob of that name, or what the checkpoint has, or its default
    values = dict(vocab_size=vocab_size) | checkpoint.get('model_args', {}) | settings.knobs()
    args = {field.name: values[field.name] for field in fields(cls.Config) if field.name in values}
    torch.manual_seed(derived_seed(seed, 'init'))
    model = cls(cls.Config(**args))
    if eval_only:           # block_size may differ, unless positions are learned
        others = [name for name, value in checkpoint['model_args'].items()
                  if name != 'block_size' and getattr(model.config, name, value) != value]
        check(not others, f"--eval_only takes the trained model: leave out {', '.join(others)}")
    if checkpoint:
        with explain('the weights do not fit', 'leave out what you changed', RuntimeError):
            missing, unexpected = model.load_state_dict(checkpoint['model'], strict=strict)
        if missing or unexpected:       # such as a gate
            say(f'from scratch: {missing}; left out: {unexpected}')
    return model


def forward_backward(run, it):
    """
    The gradient of iteration `it` -> this process's loss, a tensor, the loop counts of the last
    micro step, and the number of tokens of all processes.
    """
    loss = torch.zeros((), device=run.dev)
    n_tokens = 0
    for micro in range(gradient_accumulation_steps):
        x, y, n_loop, noise = get_batch(run, it, micro)
        n_tokens += distributed.WORLD * x.numel()
        with run.autocast:
            _, part = run.model(x, y, n_loop=n_loop, noise_seed=noise)    # it takes a noise, too
        part = part / gradient_accumulation_steps
        part.backward()
        loss += part.detach()
    distributed.average([p.grad for p in run.model.parameters() if p.grad is not None])
    return loss, n_loop, n_tokens


# the run ------------------------------------------------------------------------------------------

@dataclass
class Run:
    """A run as it is now."""
    model: torch.nn.Module      # a GPT
    examples: object            # data.Text or tasks.Problems
    counts: list                # loop counts at which it is evaluated
    dev: str
    autocast: object            # a context in which matrix products have the knob dtype
    optimizers: dict | None = None  # by the name of their state in a checkpoint
    done: int = 0               # iterations that the weights have seen
    best: tuple = (math.inf, 0)     # the lowest held-out loss, and the iteration of its weights


def main():
    settings.set_from_module()
    # with --resume, if there is a run: otherwise it begins one
    goes_on = resume and not eval_only and os.path.exists(f'{out_dir}/ckpt.pt')
    checkpoint = earlier_checkpoint(goes_on)
    if checkpoint:
        take_earlier_knobs(checkpoint, goes_on)
    # before the data: the file of the class may define their task, as zoo/maze.py does
    cls = class_of(model_class, named='model_class' in settings.given)
    take_fields(cls.Config, is_new=not checkpoint)
    try:
        with distributed.processes(device, dtype) as (dev, autocast):
            vocab_size = checkpoint['model_args']['vocab_size'] if checkpoint else math.inf
            examples = data.open_data(dataset, checkpoint.get('tokenizer'), vocab_size)
            examples.check_fits(block_size)
            model = make_model(cls, checkpoint, examples, strict=goes_on or eval_only).to(dev)
            run = Run(model, examples, counts_of(model), dev, autocast)
            if eval_only:
                return evaluate_only(run, checkpoint)
            was_stopped = train(run, checkpoint, goes_on)
    except (MemoryError, RuntimeError) as error:        # torch raises a RuntimeError
        check('to allocate' not in str(error).lower(), 'out of memory: halve batch_size and double '
              'gradient_accumulation_steps, which trains alike, lower bptt_k, or train a smaller '
              'model')
        raise
    if was_stopped:
        raise SystemExit(130)


def earlier_checkpoint(goes_on):
    """The checkpoint to start from, {} = none. ValueError if a new run finds weights in out_dir."""
    if eval_only:
        return read_checkpoint(init_from or out_dir)
    if goes_on:
        checkpoint = read_checkpoint(out_dir)
        check('optimizers' in checkpoint, f'{out_dir}/ckpt.pt holds weights alone: start from it '
              'with --init_from, in another --out_dir')
        return checkpoint
    check_free(out_dir, overwrite)
    if resume:
        say(f'no run in {out_dir}: a new one, on {dataset}')
    return read_checkpoint(init_from) if init_from else {}


def take_earlier_knobs(checkpoint, goes_on):
    """
    What a run takes from its checkpoint, but never out_dir, resume, overwrite and eval_only:

        --resume        all knobs, but flags win
        --eval_only     all, but flags and config files win; all windows, if no flag says how many
        --init_from     those of its model, but flags and config files win
    """
    earlier = checkpoint['model_args'] | dict(model_class=checkpoint['model_class'])
    if goes_on or eval_only:
        earlier = checkpoint['config'] | earlier
    winners = settings.flags if goes_on else settings.given
    of_this_run = {'out_dir', 'resume', 'overwrite', 'eval_only'}
    settings.set_from_run(earlier, but=winners.keys() | of_this_run)


def take_fields(config, is_new):
    """
    Fields that a class adds to GPTConfig become knobs, if the user has given them; other unknown
    names are refused. If the class gives a field of GPTConfig another default, a new model has that
    one, unless the user has set the knob.
    """
    inherited = GPTConfig.__dataclass_fields__
    hints = get_type_hints(config)
    settings.add({name: hint for name, hint in hints.items() if name not in inherited})
    free = settings.knobs().keys() - settings.given if is_new else ()
    for field in fields(config):
        # a field that is only inherited is the same object
        if field.name in free and inherited.get(field.name) is not field:
            value = field.default
            settings.set_knobs({field.name: field.default_factory() if value is MISSING else value})


def train(run, checkpoint, goes_on):
    """Train to the end, or until a signal -> was it a signal?"""
    check(batch_size % distributed.WORLD == 0, f'batch_size = {batch_size} must be a multiple of '
          f'the number of processes, {distributed.WORLD}')
    run.optimizers = make_optimizers(run.model, optimizer, learning_rate, weight_decay)
    is_first = distributed.RANK == 0
    lock = FileLock(f'{out_dir}/.lock', timeout=0) if is_first else nullcontext()
    with explain(f'another training runs in {out_dir}', 'give another --out_dir', Timeout), lock:
        if goes_on:
            restore(run, checkpoint)
        elif is_first and overwrite:
            start_over(out_dir)
        checkpoint.clear()              # frees some GB if the model is large
        if is_first and run.examples.tokenizer_json:    # sample.py needs it there
            run.examples.tokenizer_json.save(out_dir)
        try:
            with distributed.noting_signals() as stop_signals:
                was_stopped = iterate(run, stop_signals)
        except OSError:         # nobody reads the output any more, say: save what was learned
            if run.done:
                save(run, 'ckpt.pt')
            raise
        if was_stopped:
            say(f'stopped at iteration {run.done} and saved; to go on: python train.py --resume '
                f'{next_arguments()}')
            return True
        # all weights are saved, so Ctrl-C may stop the last table
        evaluation.save_scores(scores_of(run), out_dir)
        say(f'{out_dir}: ckpt.pt, log.csv, loss.png, eval.csv; next: python sample.py '
            f'{next_arguments()}')
        loss, it = run.best
        if it < run.done:
            say(f'{out_dir}/ckpt_best.pt has the lowest held-out loss of all eval_loops, '
                f'{loss:.4f} at iteration {it}')
    return False


def next_arguments():
    """What the next command has to name: the user's own files, also of the class and injection."""
    files = list(settings.own_files)
    for module in model_class.partition(':')[0], INJECTIONS[injection].__module__:
        file = f"{module.replace('.', '/')}.py"
        if file not in files and not file.startswith(('model.', 'loops.', 'zoo/', '__main__.')):
            files.append(file)
    return shlex.join([*files, f'--out_dir={out_dir}'])


def restore(run, checkpoint):
    """Continue the run of a checkpoint; the model has its weights already."""
    check(checkpoint['data'] == run.examples.sha256, f'{dataset} is not what this run was trained '
          'on: restore it, leave out --dataset, or start from the weights with --init_from')
    check(checkpoint['optimizers'].keys() == run.optimizers.keys(), 'the state of one optimizer '
          'is of no use to another: leave out --optimizer')
    for name, opt in run.optimizers.items():
        # the state alone, since weight_decay may be another
        opt.load_state_dict(opt.state_dict() | dict(state=checkpoint['optimizers'][name]))
    run.done = checkpoint['iter_num']
    check(run.done <= max_iters, f'the run has {run.done} iterations already: give more with '
          '--max_iters')
    say(f'continues at iteration {run.done} with the knobs of the run, but for flags: the learning '
        f'rate is {lr_at(run.done):.1e} now, and {lr_at(max_iters):.1e} at iteration {max_iters}')
    path = f'{out_dir}/ckpt_best.pt'
    if distributed.RANK == 0 and os.path.exists(path):
        best = read_checkpoint(path)
        loss, of_what = best.get('best', (math.inf, None))
        if of_what == evaluation_of(run):
            run.best = loss, best['iter_num']
        else:
            kept = f"{out_dir}/ckpt_best_{best['iter_num']:06d}.pt"
            os.replace(path, kept)
            say(f'{kept}: the best weights of another evaluation')


def evaluation_of(run):
    """What the losses of an evaluation depend on besides the weights."""
    n_windows = min(eval_windows or math.inf, run.examples.n_held_out(block_size))
    return [run.examples.sha256, block_size, run.counts, n_windows]


def save(run, name):
    """Write a checkpoint: ckpt.pt can be resumed, others hold weights alone."""
    if distributed.RANK > 0:
        return
    knobs = settings.knobs()
    # so that a --resume with more --max_iters keeps this decay
    knobs['lr_decay_iters'] = lr_decay_iters or max_iters
    checkpoint = checkpoint_of(run.model, knobs, run.examples.tokenizer, run.examples.sha256,
                               run.done)
    if name == 'ckpt_best.pt':
        checkpoint['best'] = run.best[0], evaluation_of(run)
    elif name == 'ckpt.pt':
        checkpoint['optimizers'] = {key: opt.state_dict()['state']
                                    for key, opt in run.optimizers.items()}
    save_checkpoint(checkpoint, os.path.join(out_dir, name))


def iterate(run, stop_signals):
    """The iterations that are left -> has a signal stopped them?"""
    if compile or compile is None and run.dev.startswith('cuda'):
        compile_layers(run.model)
    size = sum(p.numel() for p in run.model.parameters())
    say(f'{size / 1e6:.2f}M parameters, {n_layer} layers, groups {run.model.config.groups}, '
        f'{run.examples.description}, {distributed.WORLD} x {run.dev}')
    log = Log(run) if distributed.RANK == 0 else None
    steps = []          # since the last row of the log: (seconds, tokens) of each
    run.model.train()
    for it in range(run.done, max_iters + 1):
        # the weights so far: ckpt_000000.pt has them as they are drawn
        if it in keep_iters:
            save(run, f'ckpt_{it:06d}.pt')
        if is_evaluated(it):
            if it > 0 or max_iters == 0:    # untrained weights are no run, unless no others come
                save(run, 'ckpt.pt')    # first, so that a kill does not cost what was learned
            evaluate_and_keep(run, log)
        if it == max_iters:
            break

        began = time.perf_counter()
        loss, n_loop, n_tokens = forward_backward(run, it)
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
        stops = torch.full_like(loss, len(stop_signals))
        # means over the processes: losses differ, the norm does not, and a signal to one stops all
        means = distributed.add_up(torch.stack((loss, norm, stops)) / distributed.WORLD)
        loss, norm, stops = means.tolist()                                  # waits for the GPU
        check(math.isfinite(loss + norm), f'not finite at iteration {it}: loss {loss}, gradient '
              f'norm {norm}. This step was not taken: lower --learning_rate, and '
              'start again, or go on with --resume if there is a ckpt.pt')
        for opt in run.optimizers.values():
            for params in opt.param_groups:
                params['lr'] = lr_at(it)
            opt.step()
            opt.zero_grad()
        run.done = it + 1
        steps.append((time.perf_counter() - began, n_tokens))
        if it % log_interval == 0 or it == max_iters - 1:
            seconds = sum(taken for taken, _ in steps)
            dt = seconds / len(steps)
            speed = sum(n_tokens for _, n_tokens in steps) / seconds
            loops = '/'.join(map(str, n_loop))
            if log:
                log.add(dict(iter=it, loss=f'{loss:.5f}', lr=f'{lr_at(it):.3e}',
                             grad_norm=f'{norm:.4f}', loops=loops, dt_ms=f'{1e3 * dt:.1f}',
                             tokens_per_s=f'{speed:.0f}'))
            say(f'iter {it}: loss {loss:.3f}, loops {loops or "none"}, {1e3 * dt:.0f} ms, '
                f'{speed / 1e3:.1f}k tok/s, {(max_iters - it - 1) * dt:.0f} s of steps left')
            steps.clear()
        if stops:
            save(run, 'ckpt.pt')
            return True
    # a signal after the last step, while it was evaluated
    return distributed.add_up(torch.tensor(len(stop_signals), device=run.dev)).item() > 0


# log and evaluation -------------------------------------------------------------------------------

def is_evaluated(it):
    """Is there an evaluation before iteration `it`?"""
    return it % eval_interval == 0 or it == max_iters


def evaluate_and_keep(run, log):
    """Evaluate the weights so far, keep the best at any of eval_loops, and add a row to the log."""
    scores = scores_of(run, eval_windows)
    lowest = min(score.loss for score in scores.values())
    if run.done and lowest < run.best[0]:       # not as they are drawn
        run.best = (lowest, run.done)
        save(run, 'ckpt_best.pt')
    if log:
        from common import plots  # here, since matplotlib takes a second to import
        losses = {f'val_loss_{n}': f'{score.loss:.5f}' for n, score in scores.items()}
        # of a text the log has no such columns
        shares = {f'val_acc_{n}': f'{score.accuracy:.5f}' for n, score in scores.items()}
        log.add(dict(iter=run.done) | losses | shares)
        plots.losses(log.rows, run.counts, f'{out_dir}/loss.png')


class Log:
    """log.csv: `add` appends a row."""

    def __init__(self, run):
        self.path = f'{out_dir}/log.csv'
        self.rows = []
        try:
            if run.done and os.path.exists(self.path):
                self.rows = earlier_rows(self.path, run.done)
        except (csv.Error, KeyError, TypeError, ValueError):        # somebody has edited it
            aside = f'{out_dir}/log_before_{run.done}.csv'
            os.replace(self.path, aside)
            say(f'cannot read {self.path}: it is {aside} now, and a new log begins')
        self.columns = ['iter', 'loss', 'lr', 'grad_norm', 'loops', 'dt_ms', 'tokens_per_s']
        kinds = ['loss', 'acc'] if run.examples.is_task else ['loss']
        self.columns += [f'val_{kind}_{n_loop}' for n_loop in run.counts for kind in kinds]
        earlier = self.rows[0] if self.rows else {}     # its eval_loops may have been others
        self.columns += [name for name in earlier if name not in self.columns]
        self.rows = [dict.fromkeys(self.columns, '') | row for row in self.rows]
        write_csv(self.rows, self.path, self.columns)

    def add(self, row):
        self.rows.append({name: row.get(name, '') for name in self.columns})
        with open(self.path, 'a', newline='', encoding='utf-8') as f:
            csv.DictWriter(f, self.columns).writerow(self.rows[-1])


def earlier_rows(path, done):
    """The whole rows of a log before iteration `done`, and its evaluation unless it comes again."""
    rows = [row for row in read_csv(path) if None not in row.values()]
    for row in rows:
        for name in row.keys() - {'loops'}:
            float(row[name] or 0)       # the figure needs numbers
    evaluated = None if is_evaluated(done) else str(done)
    return [row for row in rows
            if int(row['iter']) < done or row['iter'] == evaluated and not row['loss']]


def scores_of(run, n_windows=None):
    """Evaluate at all loop counts, on n_windows, None = all -> {n_loop: Score}; print them."""
    n_all = run.examples.n_held_out(block_size)
    n_windows = min(n_windows or n_all, n_all)
    say(f'iter {run.done}: {n_windows:,} of {n_all:,} held-out windows of {block_size} tokens')
    run.model.eval()
    with torch.compiler.set_stance('force_eager'):      # shapes are not those of training
        scores = {n_loop: evaluation.evaluate(run.model, run.examples, n_windows, n_loop, run.dev,
                                              run.autocast) for n_loop in run.counts}
    run.model.train()
    for n_loop, score in scores.items():
        line = f'{n_loop:5d} {"loop " if n_loop == 1 else "loops"} loss {score.loss:.4f}'
        if run.examples.is_task:
            line += (f', {100 * score.accuracy:.2f}% of the labels right, {100 * score.solved:.2f}%'
                     ' of the problems')
        say(line)
    return scores


def counts_of(model):
    """The loop counts of an evaluation, from the knob eval_loops. ValueError for a bad one."""
    counts = eval_loops
    if not model.groups:
        counts = [1]
    elif counts is None:
        counts = [max(1, round(mean_recurrence))] if loop_draw == 'fixed' else [1, 2, 4, 8]
    are_whole = {*map(type, counts)} == {int}       # and there is one at least
    check(are_whole and 0 < min(counts) <= max(counts) <= MOST_LOOPS, 'eval_loops must be whole '
          f'numbers from 1 to {MOST_LOOPS:,}, not {counts}')
    return list(dict.fromkeys(counts))


def evaluate_only(run, checkpoint):
    """--eval_only: the table of a checkpoint."""
    run.done = checkpoint['iter_num']
    n_windows = settings.flags.get('eval_windows')
    scores = scores_of(run, n_windows)
    results = folder_of_results(checkpoint['folder'])
    weights = os.path.basename(checkpoint['path']).removesuffix('.pt')
    windows = f'-{n_windows}' if n_windows else ''
    suffix = re.sub('[:=]', '-', f'_{weights}-{run.done}{windows}_{dataset}_{block_size}')
    evaluation.save_scores(scores, results, suffix)
    say(f'{results}/eval{suffix}.csv')


if __name__ == '__main__':
    errors.run(main)
