"""
Calibrated thresholds: bench.py --calibrate writes them, sample.py and bench.py read them.

The file folder/exits.json holds the sha256 of the weights that it belongs to, and rows.
A row belongs to a rule and to how it decodes, whatever the loop budget: these fields are in KEY.
They are

    rule, hits, keep    the rule, the small values in a row that it wants, and whether the step that
                        triggers it is kept, see exits.Exit
    cache, ring         the policy; slots of the policy `ring`, null for others
    wake                may a token that has exited wake?
    wave                [its tokens, loop steps of a pass]; null = no wave

The others are

    tau         the threshold; null if none that was tried keeps its promise (without a row, none
                was tried)
    nats        the promise: the most that it may cost, in nats per token ...
    texts       ... or, for a wave, the least share of texts that must not change
    cost        what it costs, in nats per token, on windows that had no part in choosing it ...
    cost_low, cost_high     ... and the ends of its 95% interval
    evals       loop steps that were computed for a token there, on average
    identical   of a wave, in place of these four: the share of texts that did not change
    kept        whether the promise is kept on these windows too
"""
import hashlib
import json
import os
from shlex import quote
from typing import NamedTuple

from common import configurator
from common.errors import UserError, explain
from common.files import write_json

KEY = 'rule', 'hits', 'keep', 'cache', 'wake', 'ring', 'wave'


class Threshold(NamedTuple):
    tau: float | None       # None: none that was tried keeps its promise
    kept: bool


def threshold_key(rule, policy, ring, wave=None):
    """The fields that say what a threshold is for. wave: [width, loop steps]."""
    policy = policy or 'exact'          # without a cache the result is that of exact
    return dict(rule=rule.name, hits=rule.hits, keep=rule.keep, cache=policy, wake=rule.wake,
                ring=ring if policy == 'ring' else None, wave=wave)


def command_for(script, key, is_task, *flags):
    """
    The command with which sample.py or bench.py decodes as a threshold_key says. flags: those that
    this script alone has. What both do by themselves is left out.
    """
    words = ['python', script, *configurator.own_files, *flags]
    if key['cache'] != 'exact' and not key['wave']:     # the cache of a wave is latest
        words.append(f"--cache={key['cache']}")
    if key['wake'] != is_task:
        words.append(f"--wake={key['wake']}")
    if key['ring']:
        words.append(f"--ring={key['ring']}")
    return ' '.join(map(quote, words))


def calibrated(folder, checkpoint, key):
    """The Threshold in folder/exits.json for this threshold_key; None if there is no such row."""
    for row in thresholds_of(folder, checkpoint):
        if key.items() <= row.items():
            return Threshold(row['tau'], row.get('kept', True))
    return None


def thresholds_of(folder, checkpoint):
    """
    The rows of folder/exits.json, [] if there is no such file, or if it belongs to other weights.
    ValueError if it cannot be read.
    """
    path = os.path.join(folder, 'exits.json')
    if not os.path.exists(path):
        return []
    with explain(f"cannot read '{path}'", 'make it again: python bench.py --calibrate=0.005'):
        with open(path, encoding='utf-8') as f:
            file = json.load(f)
        rows = [checked_threshold(row) for row in file['exits']]
        return rows if file['weights'] == hash_of_weights(checkpoint) else []


def checked_threshold(row):
    """A row of exits.json, its tau a float. ValueError if it lacks a field or makes no sense."""
    for name in (*KEY, 'tau'):
        if name not in row:
            raise UserError(f"a row has no '{name}'")
    tau = row['tau']
    kept = row.get('kept', True)
    if tau is not None and (type(tau) not in (int, float) or not tau >= 0):     # a NaN is not
        raise UserError(f'a tau must be a number from 0 on or null, and that of {row["rule"]} is '
                        f'{json.dumps(tau)}')
    if not isinstance(kept, bool):
        raise UserError(f'kept must be true or false, and that of {row["rule"]} is '
                        f'{json.dumps(kept)}')
    return row | dict(tau=None if tau is None else float(tau))


def save_thresholds(folder, checkpoint, rows):
    """Write folder/exits.json. Of rows with the same key the last one counts."""
    of_key = {tuple(str(row[name]) for name in KEY): row for row in rows}
    write_json(dict(weights=hash_of_weights(checkpoint), exits=list(of_key.values())),
               os.path.join(folder, 'exits.json'))


def hash_of_weights(checkpoint):
    """sha256 of a checkpoint's weights: its thresholds belong to them alone."""
    digest = hashlib.sha256()
    for name, weight in sorted(checkpoint['model'].items()):
        digest.update(name.encode() + weight.float().numpy(force=True).tobytes())
    return digest.hexdigest()
