"""
The paper's claims, re-measured: runs the project's own commands, gathers CSVs, computes the README's table from them.

    python claims.py                                small: the default model, three seeds, an hour or so on two CPU cores; call it again to go on
    python claims.py --scale=paper --dataset=fineweb --minutes=9     config/groups.py on one GPU, in pieces that resume from each other
    python claims.py --only_table                   results/*/*.csv -> the tables of README.md, nothing run

writes out-claims/SCALE/NAME (the runs), results/SCALE/*.csv and, at the end of the small scale, figures 1 to 5 in assets/.
Paper: sec. 3, 4, Fig. 1 to 5 (C1 to C10); Geiping 3.3, 5, 6 (C11 to C13). A mean is over seeds, +- their standard deviation.
"""
import csv
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.linalg import vector_norm

import claims_table
import data
import geometry
from configurator import configure, run

# ---------------------------------------------------------------------------------------------------------------------
scale = 'small'             # small, or paper
dataset: str | None = None  # None = pydocs for small, fineweb for paper
seeds = [1337, 1, 2]        # of the small scale; the paper's has the first alone
minutes: float | None = None        # stop in order after so many, to be called again; None = at the end
workers = 2                 # trainings of the small scale at a time, with a thread each
more: list = []             # flags for every training, to make it smaller
only_table = False
# ---------------------------------------------------------------------------------------------------------------------

HERE = os.path.dirname(os.path.abspath(__file__))
SHORT = ['--max_iters=400', '--warmup_iters=100', '--eval_loops=[4]', '--keep_iters=[]']
CHOICES = {'as it is': [], 'adapter random': ['--adapter_init=random'], 'addition': ['--injection=add'], 'x0 zero': ['--x0=zero'], 'x0 e': ['--x0=e'],
           'norm after the loop': ['--norm_inside=False'], 'bptt_k 1': ['--bptt_k=1'], 'bptt_k 8': ['--bptt_k=8'], 'step noise 0.1': ['--step_noise=0.1']}
RULES = {'accel': [], 'accel, step kept': ['--rules=["accel"]', '--keep=True'], 'accel, one hit': ['--rules=["accel"]', '--hits=1'],
         'accel, one hit, step kept': ['--rules=["accel"]', '--hits=1', '--keep=True'], 'norm, two hits': ['--rules=["norm"]', '--hits=2']}
PLAIN = ['--budgets=[30]', '--epsilons=[]', '--rounds=1']       # of the ablations block maps count, not time

FIGURES = ('loss.png', 'figure_4.png', 'frontier.png', *(f'figures/{name}.png' for name in ('figure_1', 'figure_2', 'figure_3a', 'figure_5', 'convergence')))


def trainings():
    """{(variant, seed): flags of train.py}: what C1 to C12 look at first, then the open choices (Q3), then other draws (C13)."""
    if scale == 'paper':
        return {('main', seeds[0]): [os.path.join(HERE, 'config', 'groups.py'), f"--dataset={dataset or 'fineweb'}", '--keep_iters=[0,30,100,300,1000,3000,10000,30000]']}
    runs = {('main', s): ['--keep_iters=[0,30,100,300,700,1400]'] for s in seeds}
    runs |= {(name, s): [*flags, *SHORT] for s in seeds for name, flags in CHOICES.items()}
    runs |= {(draw, s): [f'--loop_draw={draw}', '--keep_iters=[]'] for s in seeds for draw in ('fixed', 'uniform')}
    return {key: [*flags, '--device=cpu', f"--dataset={dataset or 'pydocs'}", f'--seed={key[1]}'] for key, flags in runs.items()}


def folder_of(variant, seed):
    return os.path.join('out-claims', scale, f"{variant.replace(' ', '_')}-{seed}")


def command(*args, until=None, log=None):
    """One of the project's commands, asked to stop in order (SIGTERM) when the time is up -> whether it came to its end."""
    with open(log or os.devnull, 'a') as out:
        process = subprocess.Popen([sys.executable, '-u', os.path.join(HERE, args[0]), *args[1:]], stdout=out, stderr=subprocess.STDOUT,
                                   env=os.environ | (dict(OMP_NUM_THREADS='1') if scale == 'small' and args[0] == 'train.py' else {}))
        stopped = False
        while process.poll() is None:
            if not stopped and until and time.time() > until:
                process.send_signal(signal.SIGTERM)
                stopped = True
            time.sleep(0.2)
    if process.returncode and not stopped:
        raise ValueError(f"`python {' '.join(args)}` failed: see {log}")
    return not stopped


def finished(folder, key, work):
    """Do work() (-> whether it came to its end) unless that was done before; the minutes that it took add up in folder/KEY.minutes."""
    path = os.path.join(folder, key + '.minutes')
    took, done = open(path).read().split() if os.path.exists(path) else (0, '')
    if done != 'done':
        os.makedirs(folder, exist_ok=True)
        t = time.time()
        done = 'done' if work() else 'begun'
        with open(path, 'w') as f:
            f.write(f'{float(took) + (time.time() - t) / 60:.3f} {done}')
    return done == 'done'


def write_csv(name, rows):
    path = os.path.join('results', scale, name + '.csv')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', newline='') as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f'{v:.6g}' if isinstance(v, (float, np.floating)) else v for k, v in row.items()} for row in rows)


def read_csv(path):
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


@torch.no_grad()
def spectrum(group, e, x):
    """
    Leading eigenvalue of the Jacobian of one loop step at the last state, for the last token of each window: (N,) complex.

    Attention is causal, so the Jacobian of all tokens is block-triangular and these are eigenvalues of the whole step. e, x (N, T, C).
    """
    leading = []
    for i in range(len(x)):
        C = x.shape[-1]
        token = x[i, -1].expand(C, 1, C).clone().requires_grad_()
        with torch.enable_grad():
            y = group.step(torch.cat((x[i, :-1].expand(C, -1, -1), token), dim=1), e[i].expand(C, -1, -1))[:, -1]     # (C, C)
            jacobian = torch.autograd.grad(y.diagonal().sum(), token)[0][:, 0]
        values = torch.linalg.eigvals(jacobian.cpu())
        leading.append(values[values.abs().argmax()])
    return torch.stack(leading)


def last_cos(states, floor):
    """Each token's cosine of consecutive steps at its last step that is clear of rounding: states (K+1, B, T, C) -> (B * T,)."""
    norms, cos = geometry.step_norm(states)[1:].flatten(1), geometry.step_cos(states).flatten(1)        # (K-1, B * T)
    at = (norms > geometry.CLEAR * floor).long().cumprod(0).sum(0).clamp(min=1) - 1
    return cos.gather(0, at[None])[0]


def look(variant, seed):
    """Geometry of a run's checkpoints -> rows for steps, dlr, noise, loops, spectrum."""
    geometry.out_dir, rows = folder_of(variant, seed), dict(steps=[], dlr=[], noise=[], loops=[], spectrum=[])
    models, last = geometry.load_run()
    tokens, T = data.load(last['config']['dataset'])[1], last['model_args']['block_size']
    idx, targets = (t.to(next(models[0 if 0 in models else max(models)].parameters()).device) for t in data.windows(tokens, range(0, T * geometry.n_windows, T), T))
    for it, model in models.items():
        who = dict(variant=variant, seed=seed, iteration=it)
        measured, names = geometry.measure(model, idx), ['-'.join(map(str, g)) for g in model.config.groups]
        for name, m in zip(names, measured):
            for k, (norm, std) in enumerate(zip(m['norm'], m['norm_std'])):
                rows['steps'].append(dict(who, group=name, k=k, norm=norm, norm_std=std, cos=m['cos'][k - 1] if k else '', cos_std=m['cos_std'][k - 1] if k else '', floor=m['floor_float32']))
        trace = geometry.trace_of(model, idx)
        for g in range(len(names) - 1):
            ratios = {reading: measured[g]['dlr_' + reading] for reading in ('noise', 'first', 'settled')}
            jump = vector_norm(trace[g + 1]['states'][1] - trace[g]['states'][-1], dim=-1)        # to the first iterate of the next
            arc = geometry.step_norm(trace[g]['states'])[1:].sum(0)                             # the path in the loop, without the first step from noise
            ratios['jump over arc'] = (jump / arc).mean().item()
            rows['dlr'] += [{**who, 'from': names[g], 'to': names[g + 1], 'reading': reading, 'ratio': ratio} for reading, ratio in ratios.items()]
        if it == max(models):
            ends = [[t['states'][-1] for t in geometry.trace_of(model, idx[:4], noise_seed=s)] for s in range(geometry.noise_draws)]
            rows['noise'] += [dict(who, group=name, spread=geometry.path_spread(torch.stack(draws)).mean().item()) for name, draws in zip(names, zip(*ends))]
            if variant == 'main':
                with torch.no_grad():
                    rows['loops'] += [dict(who, loops=n, loss=model(idx, targets, n_loop=n)[1].item()) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
            for name, group, t, m in zip(names, model.groups, trace, measured):
                leading = spectrum(group, t['e'][:16], t['states'][-1][:16])
                rows['spectrum'].append(dict(who, group=name, radius=leading.abs().mean().item(), cos=(leading.real / leading.abs()).mean().item(),
                                             complex=(leading.imag.abs() > 1e-3 * leading.abs()).float().mean().item(),
                                             turning_back=(last_cos(t['states'], m['floor_float32']) < 0).float().mean().item()))
    return rows


def gather(runs):
    """All runs -> results/SCALE/*.csv."""
    tables, losses, minutes_of = dict(steps=[], dlr=[], noise=[], loops=[], spectrum=[]), [], []
    for variant, seed in runs:
        folder = folder_of(variant, seed)
        for name, rows in look(variant, seed).items():
            tables[name] += rows
        for row in read_csv(os.path.join(folder, 'log.csv')):
            losses += [dict(variant=variant, seed=seed, iteration=row['iter'], loops=key[9:], loss=row[key]) for key in row if key.startswith('val_loss_') and row[key]]
        for file in sorted(os.listdir(folder)):
            if file.endswith('.minutes'):
                minutes_of.append(dict(variant=variant, seed=seed, what=file[:-8], minutes=open(os.path.join(folder, file)).read().split()[0]))
    for name, rows in tables.items():
        write_csv(name, rows)
    cpu = [line.split(':')[1].strip() for line in (open('/proc/cpuinfo') if os.path.exists('/proc/cpuinfo') else ()) if line.startswith('model name')]
    write_csv('machine', [dict(machine=torch.cuda.get_device_name() if torch.cuda.is_available() else (cpu or [platform.processor()])[0], cores=os.cpu_count(), torch=torch.__version__,
                               date=time.strftime('%Y-%m-%d'))])
    write_csv('losses', losses)
    write_csv('minutes', minutes_of)
    write_csv('bench', [dict(seed=seed, rules=name, **row) for variant, seed in runs if variant == 'main' for name in RULES
                        for row in read_csv(os.path.join(folder_of(variant, seed), f"bench {name}.csv"))])


def main():
    if scale not in ('small', 'paper'):
        raise ValueError(f"unknown scale '{scale}': choose small or paper")
    if not seeds or workers < 1:
        raise ValueError('--seeds must name one seed at least, and --workers be 1 at least')
    if minutes is not None and not minutes > 0:
        raise ValueError(f'--minutes must be more than 0, not {minutes}')
    if not only_table:
        until = time.time() + 60 * minutes if minutes else None
        runs = trainings()
        data.load(dataset or ('pydocs' if scale == 'small' else 'fineweb'))        # made once, before they all want it

        def train(key):
            if until and time.time() > until:
                return False
            folder = folder_of(*key)
            done = finished(folder, 'train', lambda: command('train.py', *runs[key], *more, '--resume', f'--out_dir={folder}', until=until, log=os.path.join(folder, 'train.txt')))
            print(f"{'trained' if done else 'begun  '} {folder}", flush=True)
            return done

        def bench(folder, name, flags):
            def work():
                command('bench.py', f'--out_dir={folder}', *flags, log=os.path.join(folder, 'bench.txt'))
                shutil.copyfile(os.path.join(folder, 'bench.csv'), os.path.join(folder, f'bench {name}.csv'))
                return True
            return finished(folder, f'bench {name}', work)

        with ThreadPoolExecutor(workers if scale == 'small' else 1) as pool:
            complete = all(list(pool.map(train, runs)))
        late = lambda: until and time.time() > until
        for key in runs:
            if key[0] == 'main':
                for name, flags in reversed(RULES.items()):         # the whole sweep last: its figure stays
                    complete = complete and not late() and bench(folder_of(*key), name, [*flags, '--checks=False', *(PLAIN if flags else ())])
        if not complete:
            print('the time is up: the same command goes on')
            return
        gather(runs)
        first = folder_of('main', seeds[0])
        finished(first, 'geometry', lambda: command('geometry.py', f'--out_dir={first}', log=os.path.join(first, 'geometry.txt')))
        for figure in FIGURES:
            if os.path.exists(os.path.join(first, figure)):
                os.makedirs('assets', exist_ok=True)
                shutil.copyfile(os.path.join(first, figure), os.path.join('assets', 'paper_' * (scale == 'paper') + os.path.basename(figure)))
    claims_table.write()


if __name__ == '__main__':
    config = configure(globals())
    run(main)
