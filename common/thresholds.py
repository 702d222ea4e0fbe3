"""
Calibrated thresholds, out_dir/exits.json: written by bench.py --calibrate, read by --tau=auto.

A threshold belongs to the weights, the rule and the way of decoding for which it was found.
"""
import hashlib
import json
import os

from common.configurator import explain
from common.files import write_json


def hash_of_weights(checkpoint):
    """sha256 of a checkpoint's weights: its thresholds belong to them alone."""
    digest = hashlib.sha256()
    for name, weight in sorted(checkpoint['model'].items()):
        digest.update(name.encode() + weight.float().numpy(force=True).tobytes())
    return digest.hexdigest()


def save_thresholds(out_dir, checkpoint, rows, **about):
    """Write out_dir/exits.json. rows: dicts of cache, rule, past, tau and costs."""
    write_json(dict(weights=hash_of_weights(checkpoint)) | about | dict(exits=rows),
               os.path.join(out_dir, 'exits.json'))


def of_threshold(exit, cache, ring, n_loop, wave=None):
    """All that a threshold was found for, as plain values. n_loop: counts; wave: [width, steps]."""
    cache = cache or 'exact'            # without a cache the result is that of exact
    return dict(rule=exit.name, hits=exit.hits, keep=exit.keep, cache=cache,
                past=exit.past or cache != 'exact',             # prompts wait
                ring=ring if cache == 'ring' else None, n_loop=n_loop, wave=wave)


def read_tau(out_dir, checkpoint, wanted):
    """The threshold in exits.json that was found for what of_threshold returns."""
    path = os.path.join(out_dir, 'exits.json')
    how = 'python bench.py --calibrate=0.005 (and the same --out_dir, if you gave one)'
    with explain(f"--tau=auto cannot read '{path}'", f'make it with {how}'), open(path) as f:
        found = json.load(f)
        weights = found['weights']
        taus = [row['tau'] for row in found['exits'] if wanted.items() <= row.items()]
    if weights != hash_of_weights(checkpoint):
        raise ValueError(f"the thresholds in '{path}' were found for other weights: find new "
                         f'ones with {how}')
    if not taus or taus[0] is None:     # null: no threshold was good enough
        wanted = ', '.join(f'{name} = {value}' for name, value in wanted.items())
        raise ValueError(f"'{path}' has no threshold for {wanted}: give --tau=NUMBER, or see what "
                         f'{how} finds')
    return taus[0]
