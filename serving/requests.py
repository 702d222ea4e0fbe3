"""
Requests: prompts to continue, each with its settings, and files of them, one JSON object a line.

Not run by itself: `python -m serving.batching --requests=FILE` answers such a file:

    {"prompt": "def f(", "max_new_tokens": 40, "temperature": 0.8, "seed": 1}
    {"tokens": [1, 2, 3], "name": "a prompt as token numbers"}

Every line gets an answer; one that cannot be read gets an error, and does not stop the others.
"""
import json
import time
from dataclasses import dataclass, fields

from common.configurator import convert, did_you_mean, types_of
from data import EOT
from decode import check


@dataclass(eq=False)
class Request:
    """A prompt to continue, as a list of tokens."""
    prompt: list
    max_new_tokens: int = 100
    temperature: int | float = 0.0      # 0 = greedy
    top_k: int | None = None            # sample among the k likeliest tokens; None = all
    seed: int = 0                       # of the tokens drawn
    stop: int | None = None             # the token that ends the answer
    name: str | int | None = None       # comes back with the answer

    def check(self, config):
        """ValueError if a model with this config cannot answer it."""
        for field in fields(self):
            convert(field.name, getattr(self, field.name), types_of(field.type))
        check([self.prompt], self.max_new_tokens, self.temperature, self.top_k)
        if len(self.prompt) > config.block_size:
            raise ValueError(f'the prompt has {len(self.prompt)} tokens, more than block_size = '
                             f'{config.block_size}: shorten it')
        if not all(type(token) is int and 0 <= token < config.vocab_size for token in self.prompt):
            raise ValueError('the tokens of a prompt must be whole numbers from 0 to '
                             f'{config.vocab_size - 1}')
        if not 0 <= self.seed < 2 ** 63:
            raise ValueError(f'seed must be a whole number from 0 to 2**63 - 1, not {self.seed}')


# the keys of a line: the fields of a Request except stop; tokens can replace prompt
KEYS = {field.name for field in fields(Request)} - {'stop'} | {'tokens'}


def read(path, encoding, usual):
    """
    The requests of a file, in order; for each bad line a dict with its name and error.

    encoding: of their text. usual: {field: value}, the defaults; the default name is the line's
    number. ValueError if the file cannot be read.
    """
    try:
        with open(path, encoding='utf-8-sig') as f:
            lines = f.readlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the requests in '{path}' ({error}): give a file of JSON "
                         'lines') from error
    for n, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield parse(line, encoding, usual | dict(name=n))
            except (ValueError, TypeError, RecursionError) as error:
                yield dict(name=n, error=f"line {n}: {' '.join(str(error).split())}")


def parse(line, encoding, usual):
    """A line of the file -> Request. ValueError if it is not one."""
    asked = json.loads(line)
    if not isinstance(asked, dict) or ('prompt' in asked) == ('tokens' in asked):
        raise ValueError('a request is a JSON object with either prompt (text) or tokens (numbers)')
    for key in asked:
        if key not in KEYS:
            raise ValueError(f"unknown key '{key}'{did_you_mean(key, KEYS)} (a request has "
                             f'{", ".join(sorted(KEYS))})')
    if 'tokens' in asked:
        prompt = asked.pop('tokens')
    else:
        text = convert('prompt', asked['prompt'], (str,))
        prompt = encoding.encode(text, allowed_special={EOT})
    return Request(**usual | asked | dict(prompt=prompt))


def answer(serve, requests, encoding, write=print):
    """
    Write one JSON object for each request, in the order in which they end: its name, and text,
    tokens, mean loop steps of each group, and seconds since the start; or its error.

    requests: what `read` yields. serve: an iterator of requests -> what batching.serve yields.
    """
    begin, made_by = time.perf_counter(), {}

    def readable():
        for request in requests:
            if isinstance(request, Request):
                made_by[request] = []
                yield request
            else:
                write(json.dumps(request), flush=True)

    for request, token, steps in serve(readable()):
        made = made_by[request]
        if isinstance(token, ValueError):
            line = dict(error=str(token))
        else:
            made.append((token, steps))
            if len(made) < request.max_new_tokens and token != request.stop:
                continue
            tokens, steps = zip(*made)
            text = b''.join(encoding.decode_single_token_bytes(token) for token in tokens
                            if token < encoding.n_vocab)    # padded vocabulary: no text
            line = dict(text=text.decode('utf-8', 'replace'), tokens=tokens,
                        steps=[round(sum(of_group) / len(made), 2) for of_group in zip(*steps)],
                        seconds=round(time.perf_counter() - begin, 3))
        del made_by[request]
        write(json.dumps(dict(name=request.name) | line), flush=True)
