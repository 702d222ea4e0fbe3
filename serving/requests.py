"""
Requests: what one asks a model to go on from, and files of them, a JSON object a line.

Not run by itself: batching.py answers requests, and sample.py --requests=FILE those of a file:

    {"prompt": "def f(", "max_new_tokens": 40, "temperature": 0.8, "seed": 1}
    {"tokens": [1, 2, 3], "name": "by their numbers"}

A line that is no such object is answered with what is wrong with it, and the others go on.
"""
import json
import time
from dataclasses import dataclass
from math import inf

from encoding import EOT

KNOWN = {'prompt', 'tokens', 'max_new_tokens', 'temperature', 'top_k', 'seed', 'name'}


@dataclass(eq=False)
class Request:
    """A prompt (list of tokens) to go on from. stop: the token that ends it. name: the caller's."""
    prompt: list
    max_new_tokens: int = 100
    temperature: float = 0.0        # 0 = greedy
    top_k: int | None = None
    seed: int = 0
    stop: int | None = None
    name: object = None

    def problem(self, config):
        """What is wrong with it, in a line, or ''."""
        def whole(n, least, most=inf):
            return type(n) is int and least <= n <= most
        if not isinstance(self.prompt, list) or not self.prompt:
            return 'the prompt is empty: give at least one token'
        if len(self.prompt) > config.block_size:
            return (f'the prompt has {len(self.prompt)} tokens, more than block_size = '
                    f'{config.block_size}: cut it')
        if not all(whole(token, 0, config.vocab_size - 1) for token in self.prompt):
            return f'a prompt holds tokens, whole numbers from 0 to {config.vocab_size - 1}'
        for name in ('max_new_tokens', 'top_k'):
            if not whole(getattr(self, name), 1) and (name, self.top_k) != ('top_k', None):
                return f'{name} must be at least 1, not {getattr(self, name)!r}'
        if not whole(self.seed, 0, 2 ** 63 - 1):
            return f'seed must be a whole number from 0 on, not {self.seed!r}'
        number = type(self.temperature) in (int, float)
        if not number or self.temperature != 0 and not 1e-6 <= self.temperature < 1e30:
            return f'temperature must be >= 1e-6, or 0 (greedy), not {self.temperature!r:.40}'
        return ''


def read_prompt(start):
    """The knob `start` -> the text."""
    if not start.startswith('FILE:'):
        return start
    path = start.removeprefix('FILE:')
    try:
        with open(path, encoding='utf-8') as f:
            return f.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompt file '{path}' as UTF-8 text ({error}): give "
                         '--start=FILE:PATH') from error


def read(path, encoding, usual):
    """
    The requests of a file, in order. encoding: of their text. usual: {knob: value} where a line
    has none. ValueError for a file that cannot be read; a bad line is a dict of name and error.
    """
    try:
        with open(path, encoding='utf-8-sig') as f:
            lines = {n: line for n, line in enumerate(f, 1) if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the requests in '{path}' ({error}): give a file of JSON "
                         'lines') from error
    for n, line in lines.items():
        try:
            yield of_line(line, encoding, dict(usual, name=n))
        except (ValueError, TypeError, RecursionError) as error:
            yield dict(name=n, error=f"line {n}: {' '.join(str(error).split())}")


def of_line(line, encoding, usual):
    """A line of the file as a Request; ValueError where it is none."""
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'it is no JSON ({error})') from None
    both = {'prompt', 'tokens'}
    if not isinstance(asked, dict) or not set(asked) <= KNOWN or both <= set(asked):
        raise ValueError(f'a JSON object may have {", ".join(sorted(KNOWN))}, and one of prompt '
                         'and tokens')
    prompt = asked.pop('tokens', None)
    if prompt is None:
        text = asked.pop('prompt', '')
        if not isinstance(text, str):
            raise ValueError(f'prompt must be text, not {text!r:.40}; tokens takes numbers')
        prompt = encoding.encode(text, allowed_special={EOT})
    return Request(**usual | asked | dict(prompt=prompt))


def answer(serve, requests, encoding, write=print):
    """
    Run requests through serve (batching.serve without its first argument) and write a JSON object
    for each, in the order in which they end: what it asked by name, and text, tokens, mean loop
    steps of each group, seconds; or error.
    """
    begin, open_ones = time.perf_counter(), {}

    def good():
        """Those whose line could be read; the others are answered here."""
        for request in requests:
            if isinstance(request, Request):
                yield request
            else:
                write(json.dumps(request), flush=True)

    for request, token, used in serve(good()):
        made = open_ones.setdefault(id(request), ([], []))
        if isinstance(token, ValueError):
            line = dict(error=str(token))
        else:
            made[0].append(token)
            made[1].append(used)
            if len(made[0]) < request.max_new_tokens and token != request.stop:
                continue
            text = b''.join(encoding.decode_single_token_bytes(token) for token in made[0]
                            if token < encoding.n_vocab)
            line = dict(text=text.decode('utf-8', 'replace'), tokens=made[0],
                        steps=[round(float(mean), 2) for mean in sum(made[1]) / len(made[1])])
        del open_ones[id(request)]
        seconds = round(time.perf_counter() - begin, 3)
        write(json.dumps(dict(name=request.name) | line | dict(seconds=seconds)), flush=True)
