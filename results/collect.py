"""
Tables of several runs in one CSV, with the name of the run in front of each row.

    python -m results.collect results/text.csv out-results/*/eval.csv

lib.sh calls it. The run is the folder of a file, or the folder above figures/; `commit` is that of
the programs that ran, as lib.sh has noted it. A number has five digits. Of eval.csv the training
stands beside the losses: its iterations, learning rate, width, weights, and work in 10^12 FLOPs.
"""
import re
import sys
from pathlib import Path

from common.checkpoint import load_checkpoint
from common.errors import run
from common.files import read_csv, write_csv
from model import flops_per_token


def training(folder):
    """The columns that describe the training in this folder."""
    model, checkpoint = load_checkpoint(str(folder / 'ckpt.pt'), 'cpu')
    config = checkpoint['config']
    # the loop counts of every fiftieth iteration stand in the log
    drawn = [row['loops'] for row in read_csv(folder / 'log.csv') if row['dt_ms']]
    counts = [[int(n) for n in loops.split('/') if n.isdigit()] for loops in drawn]
    flops = [flops_per_token(model, count, training=True) for count in counts]
    tokens = config['max_iters'] * config['batch_size'] * config['block_size']
    return dict(iterations=config['max_iters'], learning_rate=config['learning_rate'],
                width=model.config.n_embd, weights=sum(p.numel() for p in model.parameters()),
                teraflops=tokens * sum(flops) / max(1, len(flops)) / 1e12)


def short(value):
    """A number with five digits; anything else as it is."""
    try:
        return value if str(value).lstrip('-').isdigit() else f'{float(value):.5g}'
    except (TypeError, ValueError):
        return value


def main():
    table, *files = sys.argv[1:]
    rows = []
    for path in map(Path, files):
        folder = path.parent.parent if path.parent.name == 'figures' else path.parent
        first = dict(run=folder.name)
        notes = [Path(f'{name}.done') for name in (path.with_suffix(''), folder)]
        commit = next((note.read_text().strip() for note in notes if note.exists()), '')
        if path.name == 'eval.csv':
            first |= training(folder)
        elif path.name.startswith('eval_'):         # see train.py
            first['data'] = re.sub(r'eval_.*?-\d+_', '', path.stem)
        for row in read_csv(path):
            row = {name: short(value) for name, value in (first | row).items()}
            rows.append(row | dict(commit=commit))
    columns = list(dict.fromkeys(name for row in rows for name in row if row[name] != ''))
    columns = [name for name in columns if name != 'name']      # the other columns say it
    write_csv([{name: row.get(name, '') for name in columns} for row in rows], table)
    print(f'{table}: {len(rows)} rows of {len(files)} files')


if __name__ == '__main__':
    run(main)
