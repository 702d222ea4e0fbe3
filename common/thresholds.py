"""
Calibrated thresholds, out_dir/exits.json: written by bench.py --calibrate, read by sample.py.

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


def calibrated(out_dir, checkpoint, wanted):
    """
    The threshold in out_dir/exits.json for what of_threshold returns. None if there is none, or if
    the file is of other weights. ValueError if it cannot be read.
    """
    path = os.path.join(out_dir, 'exits.json')
    if not os.path.exists(path):
        return None
    with explain(f"cannot read '{path}'", 'make it again: python bench.py --calibrate=0.005'):
        with open(path) as f:
            found = json.load(f)
        taus = [row['tau'] for row in found['exits'] if wanted.items() <= row.items()]
        fits = found['weights'] == hash_of_weights(checkpoint)
    return taus[0] if fits and taus else None
