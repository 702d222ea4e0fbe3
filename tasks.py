"""
Problems that need depth, each with the loop steps that its labels need and an oracle.

    python tasks.py calc                    problems in words, their depths, a check by the oracle
    python tasks.py calc:p=7,reset=0.05     with other knobs: those of the function `calc`
    python train.py config/calc.py          training on one; batches are made as they are needed

A task is a function (rng, rows, T, its knobs) -> x, y, depth, (rows, T) int64 each:

    x        tokens
    y        what is asked at each token, NOT_ASKED where nothing is; a label is a token too
    depth    the loop steps that a label needs at least, if in each step information moves from a
             token to the next one that depends on it; 0 where nothing is asked

Its words are in WORDS: the text of each token. Its oracle, in ORACLES, comes to the same labels in
another way, from the words alone.

Sources: calc is ours. hop: Sanford et al. 2024 (p-hop induction), Saunshi et al. 2025. addition,
igsm: Saunshi et al. 2025. mano: Zhu et al. 2025 (Ouro), after Allen-Zhu's Physics of Language
Models. group: products in S5 need depth that grows with length (Liu et al. 2023).
"""
import difflib
import hashlib
import inspect
import itertools
from collections import Counter

import numpy as np
import torch

from common.configurator import configure, run

# -------------------------------------------------------------------------------------------------
task = 'calc'           # a name of TASKS, and knobs of its function: calc:p=7,reset=0.1
T: int | None = None    # tokens of a problem; None = what its config trains on
show = 3                # problems to print
rows = 1000             # problems to check against the oracle
seed = 0
# -------------------------------------------------------------------------------------------------

NOT_ASKED = -100        # as torch's cross-entropy has it
PAD = ' '


# the tasks ---------------------------------------------------------------------------------------

def calc(rng, rows, T, p=5, reset=0.2, dense=True):
    """
    Running arithmetic modulo p: `=v` sets the value, `+v` and `*v` (v from 1) change it.

    Asked at every token, or if not dense at the last: the value so far. reset: the share of `=v`,
    and the first is one. Depth: the distance from the last of them.
    """
    check(p >= 2, f'p must be at least 2, not {p}')
    check(0 < reset <= 1, f'reset must lie in (0, 1], not {reset}')
    kind = rng.integers(1, 3, size=(rows, T))               # 1 adds, 2 multiplies
    kind[rng.random((rows, T)) < reset] = 0
    kind[:, 0] = 0
    v = np.where(kind == 0, rng.integers(p, size=(rows, T)), rng.integers(1, p, size=(rows, T)))
    x = np.where(kind == 0, v, p + (kind - 1) * (p - 1) + v - 1)
    y, depth = np.zeros((2, rows, T), dtype=np.int64)
    value = steps = np.zeros(rows, dtype=np.int64)
    for t in range(T):
        value = np.choose(kind[:, t], [v[:, t], value + v[:, t], value * v[:, t]]) % p
        steps = np.where(kind[:, t] == 0, 0, steps + 1)
        y[:, t], depth[:, t] = value, steps
    return (x, y, depth) if dense else (x, *last_alone(y, depth))


def hop(rng, rows, T, letters=4, hops=4, dense=True):
    """
    p-hop induction. First p, of 0 ... hops, then letters of which no two neighbours are alike.

    A hop goes from a letter to the one behind its last occurrence: find(i) = the largest j <= i
    with v_(j-1) = v_i. Asked at every letter: the letter p hops away, or `-` if there is none.
    Depth: the hops made. dense = False: asked at the last letter alone, of rows in which its whole
    chain exists.
    """
    check(letters >= 2, f'letters must be at least 2, not {letters}')
    check(hops >= 0, f'hops must be at least 0, not {hops}')
    check(T >= 2, f'hop needs a T of at least 2, not {T}')
    n = T - 1
    p = rng.integers(hops + 1, size=(rows, 1))
    v = (rng.integers(letters, size=(rows, 1))
         + rng.integers(1, letters, size=(rows, n)).cumsum(axis=1)) % letters
    # find[:, i], -1 for none; place -1 is kept as it is by the column behind the last
    every, last = np.arange(rows), np.full((rows, letters), -2)
    find = np.full((rows, n + 1), -1)
    for i in range(n):
        find[:, i] = np.maximum(last[every, v[:, i]] + 1, -1)
        last[every, v[:, i]] = i
    place, depth = np.tile(np.arange(n), (rows, 1)), np.zeros((rows, n), dtype=np.int64)
    for made in range(hops):
        hopping = (made < p) & (place >= 0)
        place = np.where(hopping, np.take_along_axis(find, place, axis=1), place)
        depth += hopping
    y = np.where(place >= 0, np.take_along_axis(v, np.maximum(place, 0), axis=1), letters)
    x, y, depth = (np.concatenate(pair, axis=1) for pair in
                   ((letters + 1 + p, v), (np.full_like(p, NOT_ASKED), y), (0 * p, depth)))
    if dense:
        return x, y, depth
    # rows whose chain breaks are drawn again
    broken = y[:, -1] == letters
    if broken.any():
        x[broken], y[broken], depth[broken] = hop(rng, broken.sum(), T, letters, hops, dense=False)
    return x, *last_alone(y, depth)


def addition(rng, rows, T, numbers=4, digits=3):
    """
    The sum of 2 ... numbers numbers: `315+120+045=????`, each with zeros in front.

    Asked at the question marks: the digits of the sum, all at once. Padded in front. Depth: the
    additions, and the columns below that hand on a carry without a break.
    """
    check(numbers >= 2, f'numbers must be at least 2, not {numbers}')
    check(digits >= 1, f'digits must be at least 1, not {digits}')
    width = len(str(numbers * (10 ** digits - 1)))
    check(T >= numbers * (digits + 1) + width, f'addition of {numbers} numbers of {digits} digits '
          f'needs a T of at least {numbers * (digits + 1) + width}, not {T}')
    n = rng.integers(2, numbers + 1, size=rows)
    d = rng.integers(10, size=(rows, numbers, digits))
    d[np.arange(numbers) >= n[:, None]] = 0
    # the question: numbers from the back, so that its end is at the same place in every row
    x = np.full((rows, T), 13)
    for i in range(numbers):
        there, start = i < n, T - width - (i + 1) * (digits + 1)
        x[there, start:start + digits] = d[there, i]
        x[there, start + digits] = 10 if i else 11              # `=` behind the last one
    x[:, T - width:] = 12
    # the answer, from the lowest column
    y, depth = np.full((rows, T), NOT_ASKED), np.zeros((rows, T), dtype=np.int64)
    carry = run = np.zeros(rows, dtype=np.int64)
    for column in range(width):
        total = carry + (d[:, :, digits - 1 - column].sum(axis=1) if column < digits else 0)
        y[:, T - 1 - column], depth[:, T - 1 - column] = total % 10, n - 1 + run
        carry = total // 10
        run = np.where(carry > 0, run + 1, 0)
    return x, y, depth


def group(rng, rows, T, name='S3', reset=0.2):
    """
    The running product in the group S3, S5 or Z2 (where it is the parity).

    `=g` sets the value to g, `g` multiplies it by g from the right. Asked at every token: the value
    so far. reset: the share of `=g`, 0 for none; the first token is one. Depth: the distance from
    the last of them.
    """
    check(name in GROUPS, f"unknown group '{name}': choose one of {', '.join(GROUPS)}")
    check(0 <= reset <= 1, f'reset must lie in [0, 1], not {reset}')
    table = np.array([[GROUPS[name].index(tuple(a[i] for i in b)) for b in GROUPS[name]]
                      for a in GROUPS[name]])
    n = len(table)
    g, sets = rng.integers(n, size=(rows, T)), rng.random((rows, T)) < reset
    sets[:, 0] = True
    y, depth = np.zeros((2, rows, T), dtype=np.int64)
    value = steps = np.zeros(rows, dtype=np.int64)
    for t in range(T):
        value = np.where(sets[:, t], g[:, t], table[value, g[:, t]])
        steps = np.where(sets[:, t], 0, steps + 1)
        y[:, t], depth[:, t] = value, steps
    return g + n * sets, y, depth


def mano(rng, rows, T, p=23, operators=6):
    """
    A prefix expression of +, - and * modulo p, with 1 ... operators of them: `+ 3 * 5 2 =`.

    Asked at the `=`: its value. Padded in front. Depth: the height of its tree.
    """
    check(p >= 2, f'p must be at least 2, not {p}')
    check(operators >= 1, f'operators must be at least 1, not {operators}')
    check(T >= 2 * operators + 2, f'mano with {operators} operators needs a T of at least '
          f'{2 * operators + 2}, not {T}')
    x = np.full((rows, T), p + 4)
    y, depth = np.full((rows, T), NOT_ASKED), np.zeros((rows, T), dtype=np.int64)

    def expression(n):
        """Tokens, value and height of a random tree with n operators."""
        if n == 0:
            v = int(rng.integers(p))
            return [v], v, 0
        below = int(rng.integers(n))                # operators of the first operand
        a, v, height = expression(below)
        b, w, other = expression(n - 1 - below)
        op = int(rng.integers(3))
        return [p + op, *a, *b], (v + w, v - w, v * w)[op] % p, 1 + max(height, other)

    for row in range(rows):
        tokens, value, height = expression(int(rng.integers(1, operators + 1)))
        x[row, T - 1 - len(tokens):] = [*tokens, p + 3]
        y[row, -1], depth[row, -1] = value, height
    return x, y, depth


def igsm(rng, rows, T, p=7, variables=6, steps=4):
    """
    Equations modulo p in any order, `c=a*b;a=3;b=a+2;?c`: the value of one variable is asked.

    Of the variables one has a number, and the asked one is 1 ... steps equations away from it.
    Asked at the last token. Padded in front. Depth: the equations on the longest way to a number.
    """
    check(p >= 2, f'p must be at least 2, not {p}')
    check(1 <= steps < variables <= 26, 'steps must be at least 1, variables more than steps and '
          f'at most 26, not {steps} and {variables}')
    check(T >= 6 * variables, f'igsm with {variables} variables needs a T of at least '
          f'{6 * variables}, not {T}')
    plus, equals, end, ask, pad = p, p + 3, p + 4, p + 5, p + 6
    x = np.full((rows, T), pad)
    y, depth = np.full((rows, T), NOT_ASKED), np.zeros((rows, T), dtype=np.int64)
    for row in range(rows):
        # a level for each variable: the first ones are a chain, the last of which is asked
        d = int(rng.integers(1, steps + 1))
        level = [*range(d + 1), *rng.integers(1, d + 1, size=variables - d - 1).tolist()]
        name = (p + 7 + rng.permutation(variables)).tolist()
        values, equations = {}, []
        for i in sorted(range(variables), key=level.__getitem__):
            if level[i] == 0:
                values[i] = int(rng.integers(p))
                equations.append([name[i], equals, values[i], end])
                continue
            # one operand from the level below, the other a number or from any level below
            a = pick(rng, [j for j in values if level[j] == level[i] - 1])
            below = [j for j in values if level[j] < level[i] and j != a]
            b, op = int(rng.integers(1, p)), int(rng.integers(3))
            token, w = b, b
            if below and rng.random() < 0.5:
                b = pick(rng, below)
                token, w = name[b], values[b]
            values[i] = (values[a] + w, values[a] - w, values[a] * w)[op] % p
            equations.append([name[i], equals, name[a], plus + op, token, end])
        order = rng.permutation(len(equations))
        tokens = [token for e in order for token in equations[e]] + [ask, name[d]]
        x[row, T - len(tokens):] = tokens
        y[row, -1], depth[row, -1] = values[d], d
    return x, y, depth


def pick(rng, items):
    """One of a list, in a twentieth of the time of rng.choice."""
    return items[rng.integers(len(items))]


def last_alone(y, depth):
    """y, depth (rows, T), asked at the last token alone."""
    y[:, :-1], depth[:, :-1] = NOT_ASKED, 0
    return y, depth


def check(good, message):
    if not good:
        raise ValueError(message)


TASKS = dict(calc=calc, hop=hop, addition=addition, group=group, mano=mano, igsm=igsm)
LENGTHS = dict(calc=24, hop=40, addition=24, group=24, mano=16, igsm=40)     # T of the configs
GROUPS = dict(S3=list(itertools.permutations(range(3))), S5=list(itertools.permutations(range(5))),
              Z2=[(0, 1), (1, 0)])
LETTERS = 'abcdefghijklmnopqrstuvwxyz'

# the text of each token ---------------------------------------------------------------------------

WORDS = dict(
    calc=lambda p, reset, dense: [f'={v}' for v in range(p)] + [f'{op}{v}' for op in '+*'
                                                                for v in range(1, p)],
    hop=lambda letters, hops, dense: ([f'v{i}' for i in range(letters)] if letters > 26
                                      else list(LETTERS[:letters])) + ['-']
    + [str(p) for p in range(hops + 1)],
    addition=lambda numbers, digits: [*'0123456789+=?', PAD],
    group=lambda name, reset: [''.join(map(str, g)) for g in GROUPS[name]]
    + ['=' + ''.join(map(str, g)) for g in GROUPS[name]],
    mano=lambda p, operators: [*map(str, range(p)), '+', '-', '*', '=', PAD],
    igsm=lambda p, variables, steps: [*map(str, range(p)), '+', '-', '*', '=', ';', '?', PAD,
                                      *LETTERS[:variables]],
)
# the knobs that shape them
SHAPING = dict(calc=['p'], hop=['letters', 'hops'], addition=[], group=['name'], mano=['p'],
               igsm=['p', 'variables'])


# the oracles: words of a problem -> a label at each token, None where nothing is asked -----------

def calc_oracle(words, p, reset, dense):
    """Python's own arithmetic on ever longer expressions, with one remainder at the end."""
    answers, expression = [], ''
    for word in words:
        expression = word[1:] if word[0] == '=' else f'({expression}){word}'
        answers.append(f'={eval(expression) % p}')
    return answers if dense else [None] * (len(words) - 1) + answers[-1:]


def hop_oracle(words, letters, hops, dense):
    """The definition, letter by letter."""
    p, v = int(words[0]), words[1:]
    answers = [None]
    for i in range(len(v)):
        for _ in range(p):
            i = max((j for j in range(1, i + 1) if v[j - 1] == v[i]), default=None)
            if i is None:
                break
        answers.append('-' if i is None else v[i])
    return answers if dense else [None] * (len(words) - 1) + answers[-1:]


def addition_oracle(words, numbers, digits):
    question, blanks = ''.join(words).strip().split('=')
    total = sum(map(int, question.split('+')))
    return [None] * (len(words) - len(blanks)) + list(str(total).zfill(len(blanks)))


def group_oracle(words, name, reset):
    """Permutation matrices."""
    eye, value, answers = np.eye(len(GROUPS[name][0]), dtype=int), None, []
    for word in words:
        matrix = eye[:, [int(digit) for digit in word.lstrip('=')]]
        value = matrix if word[0] == '=' else value @ matrix
        answers.append(''.join(map(str, value.argmax(axis=0))))
    return answers


def mano_oracle(words, p, operators):
    """From the back with a stack."""
    stack = []
    for word in reversed([word for word in words if word not in (PAD, '=')]):
        if word.isdigit():
            stack.append(int(word))
        else:
            a, b = stack.pop(), stack.pop()
            stack.append({'+': a + b, '-': a - b, '*': a * b}[word])
    return [None] * (len(words) - 1) + [str(stack[0] % p)]


def igsm_oracle(words, p, variables, steps):
    """Around the equations again and again, until the asked one is known."""
    equations, asked = ''.join(words).strip().split('?')
    known = {}
    while asked not in known:
        for equation in equations.rstrip(';').split(';'):
            name, right = equation.split('=')
            if all(letter in known for letter in right if letter.isalpha()):
                known[name] = eval(right, dict(known)) % p
    return [None] * (len(words) - 1) + [str(known[asked])]


ORACLES = dict(calc=calc_oracle, hop=hop_oracle, addition=addition_oracle, group=group_oracle,
               mano=mano_oracle, igsm=igsm_oracle)


# a task by its name -------------------------------------------------------------------------------

def parse(text):
    """`calc:p=7,reset=0.1` -> ('calc', every knob of it). ValueError for what is unknown."""
    name, _, given = text.partition(':')
    if name not in TASKS:
        raise ValueError(f"unknown task '{name}': {did_you_mean(name, TASKS)}")
    parameters = list(inspect.signature(TASKS[name]).parameters.values())[3:]
    knobs = {parameter.name: parameter.default for parameter in parameters}
    for part in given.split(',') if given else []:
        key, _, value = part.partition('=')
        if key not in knobs:
            raise ValueError(f"unknown knob '{key}' of the task {name}: "
                             f'{did_you_mean(key, knobs)}')
        knobs[key] = convert(f'{key} of the task {name}', value, type(knobs[key]))
    return name, knobs


def convert(key, text, kind):
    try:
        if kind is bool:
            return dict(True_=True, False_=False)[text + '_']
        return kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"{key} must be {kind.__name__}, not '{text}'") from None


def did_you_mean(name, known):
    near = difflib.get_close_matches(name, known, n=1, cutoff=0)
    return f"did you mean '{near[0]}'?" if near else 'it has none'


class Words:
    """The vocabulary of a task, with as much of tiktoken.Encoding as its readers call."""

    def __init__(self, text):
        name, knobs = parse(text)
        self.words = WORDS[name](**knobs)
        self.n_vocab, self.eot_token = len(self.words), None
        # a name for it: the task, with the knobs that shape its words
        shaping = [f'{key}={knobs[key]}' for key in SHAPING[name]]
        self.name = ':'.join([name, ','.join(shaping)]) if shaping else name

    def encode(self, text, allowed_special=()):
        """Words with blanks between them -> tokens; ValueError for an unknown one."""
        unknown = [word for word in text.split() if word not in self.words]
        if unknown:
            raise ValueError(f"'{unknown[0]}' is no word of {self.name}: {' '.join(self.words)}")
        return [self.words.index(word) for word in text.split()]

    def decode_single_token_bytes(self, token):
        return self.words[token].encode()


class Problems:
    """
    A task as a data set: what data.Text is for text.

    Nothing is on disk. A batch is made of the generator that is handed in; the held-out problems
    have a seed of their own, the same in every script.
    """
    asked = True                # not every token has a label, and accuracy is what counts

    def __init__(self, text, held_out=2048):
        self.text, self.words = text, Words(text)
        self.tokenizer, self.vocab_size = self.words.name, self.words.n_vocab
        self.sha256 = hashlib.sha256(repr(parse(text)).encode()).hexdigest()
        self.said = f'problems of {text}, made as they are needed'
        self.rows = held_out
        self.problems = None    # x, y, depth (rows, T)

    def check(self, T):
        """ValueError if T or a knob does not fit the task."""
        make(self.text, np.random.default_rng(0), 1, T)

    def batch(self, rng, rows, T, mine=slice(None)):
        x, y, _ = make(self.text, rng, rows, T)
        return torch.from_numpy(x[mine]), torch.from_numpy(y[mine])

    def n_held_out(self, T):
        return self.rows

    def held_out(self, numbers, T):
        """Held-out problems by number -> x, y (N, T)."""
        x, y, _ = self.with_depth(T)
        return torch.from_numpy(x[numbers]), torch.from_numpy(y[numbers])

    def with_depth(self, T):
        """All held-out problems: x, y, depth (rows, T)."""
        if self.problems is None or self.problems[0].shape[1] != T:
            rng = np.random.default_rng([self.rows, *b'held-out'])
            self.problems = make(self.text, rng, self.rows, T)
        return self.problems


def make(text, rng, rows, T):
    """The task that `text` names -> x, y, depth (rows, T)."""
    name, knobs = parse(text)
    check(T >= 1, f'{name} needs a T of at least 1, not {T}')
    return TASKS[name](rng, rows, T, **knobs)


def check_rows(text, x, y):
    """How many rows have other labels than the oracle's."""
    name, knobs = parse(text)
    words, wrong = WORDS[name](**knobs), 0
    for tokens, labels in zip(x, y):
        answers = ORACLES[name]([words[token] for token in tokens], **knobs)
        wrong += answers != [None if label == NOT_ASKED else words[label] for label in labels]
    return wrong


def print_answers(text, x, y, guesses, steps, paint):
    """Problems x, right answers y and a model's guesses (rows, T), a wrong one as !word!."""
    words = Words(text).words
    width, asked = max(map(len, words)) + 3, y != NOT_ASKED
    for row in range(len(x)):
        right, mine = '', ''
        for place in range(x.shape[1]):
            answer = guess = ''
            if asked[row, place]:
                answer, guess = words[y[row, place]], words[guesses[row, place]]
                guess = guess if guess == answer else f'!{guess}!'
            right += answer.rjust(width)
            mine += paint(guess.rjust(width), steps[row, place])
        print('problem ' + ''.join(words[token].rjust(width) for token in x[row]))
        print(f'right   {right}\nmodel   {mine}\n')
    n = (guesses == y)[asked].sum()
    print(f'--- {n} of {asked.sum()} answers right, {100 * n / asked.sum():.1f}%')


def main():
    name, _ = parse(task)
    x, y, depth = make(task, np.random.default_rng(seed), rows, T or LENGTHS[name])
    words = Words(task).words
    print(f'{task}: {len(words)} words, {x.shape[1]} tokens a problem\n')
    for tokens, labels in zip(x[:show], y[:show]):
        answers = [words[label] if label != NOT_ASKED else '' for label in labels]
        width = max(map(len, words)) + 1
        print('  problem ' + ''.join(words[token].rjust(width) for token in tokens))
        print('  answers ' + ''.join(answer.rjust(width) for answer in answers) + '\n')
    depths = Counter(depth[y != NOT_ASKED].tolist())
    total = sum(depths.values())
    print('depth: ' + ', '.join(f'{d} {100 * depths[d] / total:.1f}%' for d in sorted(depths)))
    wrong = check_rows(task, x, y)
    print(f'{rows} problems, {wrong} of them with another answer than the oracle')
    if wrong:
        raise SystemExit(1)


if __name__ == '__main__':
    config = configure(globals(), positional='task')
    run(main)
