"""
Problems that need many loop steps, with the number of steps of each answer.

    python tasks.py calc                    prints problems and checks 1,000 with the oracle
    python tasks.py calc:p=7,reset=0.05     the same with other knobs, the arguments of `calc`
    python train.py config/calc.py          trains on problems, which are made batch by batch

To add a task, write a class and enter an object of it in TASKS, here or in a file of your own:

    task(rng, rows, T, ...) -> x, y, depth      the problems; its knobs are arguments with defaults
    task.words(...) -> list of str              the text of each token
    task.oracle(words, ...) -> list of str      the right answers, computed in another way; None
                                                where there is no label
    task.picture(x, y, guesses, steps) -> str   a problem as sample.py prints it, all (T,); steps:
                                                the loop steps of each token, to colour it, or None

    ...     those of the task's knobs that the method needs, by name

Oracle and picture are optional. `python tasks.py NAME` compares the oracle's answers with the
labels (the depths are not compared), and `python train.py config/calc.py --dataset=NAME
--out_dir=out-NAME` trains on the task. If it is in your own mine.py, write mine.py before the flags
of each command.

    rng, rows, T    numpy's random generator, the number of problems, the tokens in each problem
    x               (rows, T) int64, the tokens
    y               (rows, T) int64, the label of each token: the right answer, as a token;
                    NOT_ASKED where there is no label, but each problem has at least one
    depth           (rows, T) int64, the steps of the solution that goes from token to token, as in
                    calc from the last `=v` on. It bounds the loop steps that the label needs from
                    above, since a transformer may take shortcuts. 0 for a token that needs only
                    itself, or has no label
"""
import functools
import hashlib
import inspect
import itertools
import string

import numpy as np
import torch

from common.configurator import parse
from common.errors import check, did_you_mean

# -------------------------------------------------------------------------------------------------
task = 'calc'           # a name in TASKS, with other knobs if you like: calc:p=7,reset=0.1
block_size = 24         # T, the tokens in a problem
rows = 1000             # problems to check with the oracle
seed = 0
# -------------------------------------------------------------------------------------------------

NOT_ASKED = -100            # torch's cross-entropy ignores this label
MOST_HELD_OUT = 2 ** 20     # the most tokens in all held-out problems of one length


def steps_since(mask):
    """The distance from each token back to the last one where the mask (rows, T) is true."""
    t = np.arange(mask.shape[1])
    return t - np.maximum.accumulate(np.where(mask, t, 0), axis=1)


# the tasks ---------------------------------------------------------------------------------------

class Calc:
    """
    Running arithmetic modulo p: `=v` sets the value to v, `+v` and `*v` (v > 0) change it.

    The label of each token is the value so far, written `=v`. The first token is a `=v`, and so is
    each later one with probability `reset`. The depth is the distance from the last `=v`: the
    steps of the token-by-token solution. They are an upper bound, since transformers may take
    shortcuts.
    """

    def __call__(self, rng, rows, T, p=5, reset=0.2):
        check(0 < reset <= 1, f'reset must lie in (0, 1], not {reset}')
        op = rng.integers(1, 3, size=(rows, T))         # 0 sets, 1 adds, 2 multiplies
        op[rng.random((rows, T)) < reset] = 0
        op[:, 0] = 0
        v = np.where(op == 0, rng.integers(p, size=(rows, T)), rng.integers(1, p, size=(rows, T)))
        # the words are =0 ... =(p-1), then +1 ... +(p-1), then *1 ... *(p-1)
        x = v + np.array([0, p - 1, 2 * (p - 1)])[op]

        # the value after each token
        y = v.copy()
        for t in range(1, T):
            value = y[:, t - 1]
            y[:, t] = np.choose(op[:, t], [v[:, t], value + v[:, t], value * v[:, t]]) % p
        return x, y, steps_since(op == 0)

    def words(self, p):
        check(p >= 2, f'p must be at least 2, not {p}')
        return [f'={v}' for v in range(p)] + [f'{op}{v}' for op in '+*' for v in range(1, p)]

    def oracle(self, words, p):
        """Compute with Python's unlimited integers, and take the remainder only in the answers."""
        check(words[0][0] == '=', 'it must begin with =v')
        answers = []
        for word in words:
            v = int(word[1:])
            if word[0] == '=':
                value = v
            elif word[0] == '+':
                value += v
            else:
                value *= v
            answers.append(f'={value % p}')
        return answers


class Hop:
    """
    p-hop induction (Sanford et al. 2024, Saunshi et al. 2025): follow pointers back through a text.

    The first token is p, drawn from 0 ... hops. The others are letters v_i, and no two neighbours
    are alike. A hop leads from letter i to the one after the last earlier occurrence of v_i:
    find(i) = the largest j <= i with v_(j-1) = v_i. The label of each letter is the letter p hops
    away, or `-` if a hop leads nowhere; the depth is the number of hops tried.
    """

    def __call__(self, rng, rows, T, letters=4, hops=4):
        check(2 <= letters <= 26, f'letters must lie in [2, 26], not {letters}')
        check(hops >= 0, f'hops must be at least 0, not {hops}')
        check(T >= 2, f'hop needs a T of at least 2, not {T}')
        n = T - 1
        p = rng.integers(hops + 1, size=(rows, 1))
        v = (rng.integers(letters, size=(rows, 1))
             + rng.integers(1, letters, size=(rows, n)).cumsum(axis=1)) % letters       # (rows, n)

        # where a hop from each letter leads, -1 if nowhere
        find = np.zeros((rows, n), dtype=np.int64)
        row = np.arange(rows)
        after = np.full((rows, letters), -1)            # the place after the last of each letter
        for i in range(n):
            find[:, i] = after[row, v[:, i]]
            after[row, v[:, i]] = i + 1

        # p hops from every letter; a chain that has ended stays at place -1
        place = np.tile(np.arange(n), (rows, 1))
        depth = np.zeros((rows, T), dtype=np.int64)
        for hop in range(hops):
            hopping = (hop < p) & (place >= 0)
            place = np.where(hopping, np.take_along_axis(find, place, axis=1), place)
            depth[:, 1:] += hopping

        # the words are the letters, then -, then 0 ... hops
        x = np.concatenate((letters + 1 + p, v), axis=1)
        y = np.full_like(x, NOT_ASKED)
        y[:, 1:] = np.where(place >= 0, np.take_along_axis(v, place, axis=1), letters)
        return x, y, depth

    def words(self, letters, hops):
        return [*string.ascii_lowercase[:letters], '-', *map(str, range(hops + 1))]

    def oracle(self, words):
        """Search for each hop letter by letter, as the definition says."""
        p, v = words[0], words[1:]
        check(p.isdigit() and all(letter.isalpha() for letter in v),
              'it must be a number of hops and then letters')
        answers = [None]
        for i in range(len(v)):
            for _ in range(int(p)):
                i = max((j for j in range(1, i + 1) if v[j - 1] == v[i]), default=None)
                if i is None:
                    break
            answers.append('-' if i is None else v[i])
        return answers


GROUPS = dict(S3=list(itertools.permutations(range(3))), S5=list(itertools.permutations(range(5))))


class Group:
    """
    The running product of permutations, of three things (the group S3) or five (S5).

    `=g` sets the value to g, and `g` multiplies it by g from the right. The label of each token is
    the value so far, written `g`. The first token is a `=g`, and so is each later one with
    probability `reset`. The depth is the distance from the last `=g`: the steps of the
    token-by-token solution, an upper bound, since transformers may take shortcuts. In S5 the best
    of these still need a depth that grows with the length of the product (Liu et al. 2023).
    """

    def __call__(self, rng, rows, T, name='S3', reset=0.2):
        check(0 <= reset <= 1, f'reset must lie in [0, 1], not {reset}')
        number = {g: i for i, g in enumerate(GROUPS[name])}
        # table[a, b] = a * b, which does b first
        table = np.array([[number[tuple(a[i] for i in b)] for b in number] for a in number])
        g = rng.integers(len(number), size=(rows, T))
        sets = rng.random((rows, T)) < reset
        sets[:, 0] = True

        y = g.copy()
        for t in range(1, T):
            y[:, t] = np.where(sets[:, t], g[:, t], table[y[:, t - 1], g[:, t]])
        return g + len(number) * sets, y, steps_since(sets)

    def words(self, name):
        check(name in GROUPS, f"name must be one of {', '.join(GROUPS)}, not '{name}'")
        elements = [''.join(map(str, g)) for g in GROUPS[name]]
        return elements + ['=' + g for g in elements]

    def oracle(self, words, name):
        """Multiply permutation matrices."""
        check(words[0][0] == '=', 'it must begin with =g')
        eye = np.eye(len(GROUPS[name][0]), dtype=int)
        value, answers = None, []
        for word in words:
            matrix = eye[:, [int(digit) for digit in word.lstrip('=')]]
            value = matrix if word[0] == '=' else value @ matrix
            answers.append(''.join(map(str, value.argmax(axis=0))))
        return answers


TASKS = dict(calc=Calc(), hop=Hop(), group=Group())


# a task by its name ------------------------------------------------------------------------------

def is_task(dataset):
    """Does the knob `dataset` name a task, with or without knobs of its own, and not a text?"""
    return dataset.partition(':')[0] in TASKS


def parse_task(dataset):
    """`calc:p=7` -> ('calc', {knob: value} of all its knobs)."""
    name, _, changes = dataset.partition(':')
    check(name in TASKS, f"unknown task '{name}'{did_you_mean(name, TASKS)} "
          f"(the tasks are {', '.join(TASKS)}; name a file of your own behind the script)")
    parameters = list(inspect.signature(TASKS[name]).parameters.values())
    knobs = {knob.name: knob.default for knob in parameters[3:]}        # behind rng, rows and T
    for change in changes.split(',') if changes else []:
        key, _, value = change.partition('=')
        check(key in knobs, f"unknown knob '{key}' of the task {name}{did_you_mean(key, knobs)} "
              f"(its knobs are {', '.join(knobs)})")
        knobs[key] = parse(f'{key} of the task {name}', value, type(knobs[key]))
    return name, knobs


def taken_by(method, knobs):
    """Those of the knobs that a method of a task takes."""
    parameters = inspect.signature(method).parameters
    return {knob: value for knob, value in knobs.items() if knob in parameters}


class Words:
    """
    The words of a task as an encoding (see common/encoding.py): each word is a token.

    Its name lists the knobs on which the words depend, calc:p=5: the same words have the same name.
    """
    ends = ()                   # a problem has no end

    def __init__(self, dataset):
        name, knobs = parse_task(dataset)
        shaping = taken_by(TASKS[name].words, knobs)
        self.name = f"{name}:{','.join(f'{knob}={value}' for knob, value in shaping.items())}"
        self.vocabulary = TASKS[name].words(**shaping)
        self.n_vocab = len(self.vocabulary)
        self.tokens = {word: token for token, word in enumerate(self.vocabulary)}
        check(len(self.tokens) == self.n_vocab, f'the task {name} has a word twice')

    def encode(self, text):
        """Words separated by blanks -> tokens. ValueError for an unknown word."""
        words = text.split()
        for word in words:
            check(word in self.tokens, f"'{word}' is not a word of {self.name}: choose from "
                  f"{' '.join(self.vocabulary)}")
        return [self.tokens[word] for word in words]

    def decode(self, tokens):
        return ' '.join(self.vocabulary[token] for token in tokens)

    def decode_single_token_bytes(self, token):
        return self.vocabulary[token].encode()


class Examples:
    """
    What a data set (data.Text) and a task (Problems) have in common. T is a number of tokens.

        name                        of the data set, or of the task without its knobs
        description                 what is trained on, in words
        sha256                      of what is trained on: --resume refuses another one
        tokenizer, vocab_size       the name of its encoding; how many tokens there are
        tokenizer_json              the TokenizerJson of that name; None if it is no such file
        is_task                     a task: only some tokens have labels, and the measure is the
                                    accuracy. Otherwise every token has one, and it is the loss

        check_fits(T, rows)         ValueError unless there are batches and windows of T tokens
        batch(rng, rows, T, mine)   draws `rows` windows, the same in all processes, and returns
                                    those in the slice `mine` (by default all): x, y (B, T) int64
        n_held_out(T)               how many held-out windows of T tokens there are
        held_out(numbers, T)        those with these numbers -> x, y (N, T) int64
        depths(T)                   only for a task: the depth of each label of its held-out
                                    windows, (n_held_out(T), T)
    """
    tokenizer_json = None

    def spread(self, n, T):
        """The numbers of n held-out windows, evenly spread (n,). ValueError if there are fewer."""
        n_all = self.n_held_out(T)
        check(n <= n_all, f'there are only {n_all} held-out windows of {T} tokens, not {n}')
        return np.linspace(0, n_all - 1, n).round().astype(int)


class Problems(Examples):
    """
    The problems of a task.

    A batch depends only on the generator that `batch` is given. The held-out problems have a seed
    of their own, so they are the same in every script.
    """
    is_task = True
    n_problems = 2048           # held out; of long ones there are fewer, see n_held_out

    def __init__(self, dataset):
        self.name, self.knobs = parse_task(dataset)
        self.task = TASKS[self.name]
        self.encoding = Words(dataset)
        self.tokenizer = self.encoding.name
        self.vocab_size = self.encoding.n_vocab
        self.description = f'problems of {dataset}, made as they are needed'
        self.sha256 = hashlib.sha256(repr((self.name, self.knobs)).encode()).hexdigest()

    def make(self, rng, rows, T):
        """Problems: x, y, depth (rows, T)."""
        arrays = self.task(rng, rows, T, **self.knobs)
        check(all(array.shape == (rows, T) and array.dtype == np.int64 for array in arrays),
              f'the task {self.name} must make three arrays of int64 (rows, T), not '
              f'{[(array.dtype.name, *array.shape) for array in arrays]}')
        return arrays

    def answers(self, words):
        """The oracle's answers to a problem in words: words, None where it has none."""
        return self.task.oracle(words, **taken_by(self.task.oracle, self.knobs))

    def solve(self, text):
        """
        A problem as somebody types it, '=2 +3 *4', with the oracle's answers -> x, y (1, T).

        y has no labels if the task has no oracle. ValueError for an unknown word, or if the words
        are not a problem of the task.
        """
        x = self.encoding.encode(text)
        check(x, 'the problem has no words')
        y = [NOT_ASKED] * len(x)
        if hasattr(self.task, 'oracle'):
            tokens = self.encoding.tokens | {None: NOT_ASKED}
            y = [tokens[answer] for answer in self.answers(text.split())]
        return np.array([x]), np.array([y])

    def wrong_rows(self, x, y):
        """The rows in which a label of y is not the oracle's answer to x (rows, T), as numbers."""
        vocabulary = self.encoding.vocabulary
        wrong = []
        for row, (tokens, labels) in enumerate(zip(x, y)):
            answers = self.answers([vocabulary[token] for token in tokens])
            if any(label != NOT_ASKED and vocabulary[label] != answer
                   for label, answer in zip(labels, answers, strict=True)):
                wrong.append(row)
        return wrong

    def check_fits(self, T, rows=1):
        """ValueError if T or a knob does not fit the task, or a token is not one of its words."""
        check(T >= 1, f'a problem has at least one token, not {T}')
        x, y, _ = self.make(np.random.default_rng(0), rows, T)
        tokens = np.concatenate((x.flatten(), y[y != NOT_ASKED]))
        check(0 <= tokens.min() <= tokens.max() < self.vocab_size, f'the task {self.name} has '
              f'{self.vocab_size} words, and tokens from {tokens.min()} to {tokens.max()}')

    def batch(self, rng, rows, T, mine=slice(None)):
        """Make `rows` problems and return the slice `mine` of them: x, y (B, T)."""
        x, y, _ = self.make(rng, rows, T)
        return torch.from_numpy(x[mine]), torch.from_numpy(y[mine])

    def n_held_out(self, T):
        """How many held-out problems of T tokens there are; of long ones there are fewer."""
        return max(1, min(self.n_problems, MOST_HELD_OUT // T))

    @functools.cache
    def all_held_out(self, T):
        """The held-out problems of T tokens: x, y, depth (n_held_out(T), T)."""
        n = self.n_held_out(T)
        return self.make(np.random.default_rng([n, *b'held-out']), n, T)

    def held_out(self, numbers, T):
        """The held-out problems of these numbers -> x, y (N, T)."""
        x, y, _ = self.all_held_out(T)
        return torch.from_numpy(x[numbers]), torch.from_numpy(y[numbers])

    def depths(self, T):
        """The depth of each label of the held-out problems, (n_held_out(T), T)."""
        _, _, depth = self.all_held_out(T)
        return depth


def problems_of(checkpoint, dataset=None):
    """
    The problems that a checkpoint's model solves: those of its own task, or of `dataset`, the same
    task with other knobs: calc:reset=0.01 has deeper problems than calc. Any T can be asked for.
    ValueError if the model has learned other words.
    """
    problems = Problems(dataset or checkpoint['config']['dataset'])
    reads = checkpoint['tokenizer']
    check(problems.tokenizer == reads, f'the model knows the words of {reads}, and {dataset} has '
          f'those of {problems.tokenizer}: choose a task with the same words')
    return problems


# the demonstration -------------------------------------------------------------------------------

def print_problem(problems, x, y):
    """A problem x, its labels y (T,) and the oracle's answers, in columns of words."""
    vocabulary = problems.encoding.vocabulary
    lines = dict(problem=[vocabulary[token] for token in x],
                 answers=['' if label == NOT_ASKED else vocabulary[label] for label in y])
    if hasattr(problems.task, 'oracle'):
        lines['oracle'] = [answer or '' for answer in problems.answers(lines['problem'])]
    width = max(map(len, vocabulary)) + 3
    for title, words in lines.items():
        print(f'  {title:7}' + ''.join(word.rjust(width) for word in words))
    print()


def main():
    problems = Problems(task)
    problems.check_fits(block_size)
    x, y, depth = problems.make(np.random.default_rng(seed), rows, block_size)
    print(f'{task}: {problems.vocab_size} words, {block_size} tokens per problem\n')
    for row in range(min(3, rows)):
        if hasattr(problems.task, 'picture'):
            print(problems.task.picture(x[row], y[row], y[row], None))
        else:
            print_problem(problems, x[row], y[row])
    depths, counts = np.unique(depth[y != NOT_ASKED], return_counts=True)
    shares = 100 * counts / counts.sum()
    print('labels by depth: ' + ', '.join(f'{d} {share:.1f}%' for d, share in zip(depths, shares)))
    if not hasattr(problems.task, 'oracle'):
        print(f'{rows} problems, not checked: the task has no oracle')
        return
    wrong = problems.wrong_rows(x, y)
    print(f'{rows} problems: the oracle disagrees with {len(wrong)}')
    if wrong:
        print_problem(problems, x[wrong[0]], y[wrong[0]])
        raise SystemExit(1)


if __name__ == '__main__':
    from common.configurator import configure
    from common.errors import run
    configure(globals(), positional='task')
    run(main)
