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
from shlex import quote

import numpy as np
import torch

from common import configurator
from common.encoding import kind_of, open_text_encoding
from common.errors import check, did_you_mean, explain
from common.examples import Examples
from common.tokenizer_json import TokenizerJson

# -------------------------------------------------------------------------------------------------
task = 'calc'           # a name in TASKS, with other knobs if you like: calc:p=7,reset=0.1
block_size = 24         # T, the tokens in a problem
rows = 1000             # problems to check with the oracle
seed = 0
# -------------------------------------------------------------------------------------------------

NOT_ASKED = -100            # torch's cross-entropy ignores this label
MOST_TOKENS = 2 ** 25       # the most tokens in a batch; x then takes 256 MiB
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
        value = configurator.parse(f'{key} of the task {name}', value, type(knobs[key]))
        check(type(value) is not int or value <= 1000,
              f'{key} of the task {name} must be at most 1000, not {value}')
        knobs[key] = value
    return name, knobs


def is_task(dataset):
    """Does the knob `dataset` name a task, with or without knobs of its own, and not a text?"""
    return dataset.partition(':')[0] in TASKS


def taken_by(method, knobs):
    """Those of the knobs that a method of a task takes."""
    return {knob: value for knob, value in knobs.items()
            if knob in inspect.signature(method).parameters}


def open_problems(dataset, reads=None, folder=None):
    """
    The problems of a task for a model whose tokenizer is `reads`, None = the words of the task.

    A model that reads text gets them in its own tokens; folder: where its tokenizer.json is.
    ValueError if the model has learned other words.
    """
    problems = Problems(dataset)
    if reads in (None, problems.tokenizer):
        return problems
    check(kind_of(reads) != 'task', f'the model knows the words of {reads}, and {dataset} '
          f'has those of {problems.tokenizer}: choose a task with the same words')
    return Problems(dataset, open_text_encoding(reads, folder))


def problems_of(checkpoint, dataset=None):
    """
    The problems that a checkpoint's model solves: those of its own task, or of `dataset`, the same
    task with other knobs: calc:reset=0.01 has deeper problems than calc. Any T can be asked for.
    """
    return open_problems(dataset or checkpoint['config']['dataset'], checkpoint['tokenizer'],
                         checkpoint['folder'])


class Words:
    """
    The words of a task as an encoding (see common.encoding): each word is a token.

    Its name lists the knobs on which the words depend, calc:p=5: the same words have the same name.
    """
    start = ()
    ends = ()
    eot_token = None            # a problem has no end

    def __init__(self, dataset):
        name, knobs = parse_task(dataset)
        shaping = taken_by(TASKS[name].words, knobs)
        self.name = f"{name}:{','.join(f'{knob}={value}' for knob, value in shaping.items())}"
        self.vocabulary = TASKS[name].words(**shaping)
        self.n_vocab = len(self.vocabulary)
        self.tokens = {word: token for token, word in enumerate(self.vocabulary)}
        check(self.vocabulary, f'the task {name} has no words')
        check(len(self.tokens) == self.n_vocab, f'the task {name} has a word twice')

    def encode(self, text, allowed_special=()):
        """Words separated by blanks -> tokens. ValueError for an unknown word."""
        words = text.split()
        unknown = [f"'{word}'" for word in words if word not in self.tokens]
        verb = 'is not a word' if len(unknown) == 1 else 'are no words'
        check(not unknown, f"{', '.join(unknown)} {verb} of {self.name}: choose from "
              f"{' '.join(self.vocabulary)}")
        return [self.tokens[word] for word in words]

    encode_ordinary = encode

    def decode(self, tokens):
        return ' '.join(self.vocabulary[token] for token in tokens)

    def decode_single_token_bytes(self, token):
        return self.vocabulary[token].encode()


class Problems(Examples):
    """
    The problems of a task, a data set with the methods of data.Text.

    encoding: None = each word of the task is a token. With the encoding of a model that reads text
    each word is spelled, = and 3, in the same number of tokens, and T counts these. The label of a
    word stands at its last token and is the last token of the right answer; the other tokens have
    none. No token stands before the first word, even where the model's texts begin with one.

    A batch depends only on the generator that `batch` is given. The held-out problems have a seed
    of their own, so they are the same in every script.
    """
    is_task = True              # only some tokens have labels, and the measure is accuracy

    def __init__(self, dataset, encoding=None, n_problems=None):
        self.name, self.knobs = parse_task(dataset)
        self.task = TASKS[self.name]
        self.word_encoding = Words(dataset)
        self.vocabulary = self.word_encoding.vocabulary
        self.encoding = encoding or self.word_encoding
        self.tokenizer_json = encoding if isinstance(encoding, TokenizerJson) else None
        self.tokenizer = self.encoding.name
        self.vocab_size = self.encoding.n_vocab
        self.n_problems = n_problems or (512 if encoding else 2048)
        self.description = f'problems of {dataset}, made as they are needed'
        self.sha256 = hashlib.sha256(repr((self.name, self.knobs)).encode()).hexdigest()
        if encoding:
            self.sha256 = hashlib.sha256((self.sha256 + encoding.name).encode()).hexdigest()

        spelled = [[token] for token in range(len(self.vocabulary))]
        if encoding:
            spelled = [encoding.encode_ordinary(word) for word in self.vocabulary]
        self.per_word = len(spelled[0])
        check(all(len(tokens) == self.per_word for tokens in spelled), f'the words of {dataset} '
              f'are not of the same number of tokens of {self.tokenizer}: choose other knobs of '
              'the task')
        self.spelled = np.array(spelled)                            # (vocabulary, per_word)

    def make(self, rng, rows, T):
        """Problems: x, y, depth (rows, T). ValueError if the task makes what it must not."""
        check(1 <= rows * T <= MOST_TOKENS, f'cannot make {rows} problems of {T} tokens at once: '
              'choose other numbers (--batch_size and --block_size in training)')
        check(T % self.per_word == 0, f'each word of {self.name} has {self.per_word} tokens: '
              f'block_size must be a multiple of that, not {T}')
        shape = rows, T // self.per_word
        arrays = self.task(rng, *shape, **self.knobs)
        check(all(array.shape == shape and array.dtype == np.int64 for array in arrays),
              f'the task {self.name} must make three arrays of int64 (rows, T), not '
              f'{[(array.dtype.name, *array.shape) for array in arrays]}')
        word_ids, label_ids, steps = arrays
        has_label = label_ids != NOT_ASKED
        unasked = rows - has_label.any(axis=1).sum()
        check(unasked == 0, f'the task {self.name} made {unasked} of {rows} problems without a '
              'label: each problem needs one')
        for name, ids in ('x', word_ids), ('y', label_ids[has_label]):
            check(0 <= ids.min() <= ids.max() < len(self.vocabulary),
                  f'the task {self.name} has words 0 to {len(self.vocabulary) - 1}, and {name} has '
                  f'tokens from {ids.min()} to {ids.max()}')

        x, y = self.spell(word_ids, label_ids)
        depth = np.zeros_like(x)
        depth[:, self.per_word - 1::self.per_word] = steps
        return x, y, depth

    def spell(self, word_ids, label_ids):
        """
        Problems and labels in words (rows, T / per_word) -> in tokens, x and y (rows, T). With two
        tokens per word, and . where there is no label:

            words   =2   +1   *4        x   = 2  + 1  * 4
            labels  =2   =3   =2        y   . 2  . 3  . 2
        """
        x = self.spelled[word_ids].reshape(len(word_ids), -1)
        y = np.full_like(x, NOT_ASKED)
        has_label = label_ids != NOT_ASKED
        answers = np.unique(label_ids[has_label])
        last = self.spelled[:, -1]
        check(len(np.unique(last[answers])) == len(answers), f'two answers of the task {self.name} '
              f'end in the same token of {self.tokenizer}, and the label is that token: give each '
              'answer an end of its own')
        labels = y[:, self.per_word - 1::self.per_word]
        labels[has_label] = last[label_ids[has_label]]
        return x, y

    def answers(self, words):
        """The oracle's answers to a problem in words: words, None where it has none."""
        answers = self.task.oracle(words, **taken_by(self.task.oracle, self.knobs))
        check(len(answers) == len(words), f'the oracle of {self.name} gave {len(answers)} answers '
              f'to {len(words)} words')
        return answers

    def solve(self, text):
        """
        A problem as somebody types it, '=2 +3 *4', with the oracle's answers -> x, y (1, T).

        y has no labels if the task has no oracle. ValueError for an unknown word, or if the words
        are not a problem of the task.
        """
        word_ids = self.word_encoding.encode(text)
        words = text.split()
        with explain(f"'{text}' is not a problem of {self.name}",
                     f'{self.command_to_print()} prints some'):
            check(words, 'it has no words')
            answers = self.answers(words) if hasattr(self.task, 'oracle') else [None] * len(words)
            tokens = self.word_encoding.tokens | {None: NOT_ASKED}
            unknown = [answer for answer in answers if answer not in tokens]
            check(not unknown, f'the oracle answers {unknown[:1]}, which is no word of the task')
            label_ids = [tokens[answer] for answer in answers]
        return self.spell(np.array([word_ids]), np.array([label_ids]))

    def command_to_print(self):
        """The command that prints some of these problems."""
        module = type(self.task).__module__
        if module.startswith('zoo.'):
            return f'python -m {module}'
        return ' '.join(['python tasks.py', *map(quote, configurator.own_files), self.name])

    def wrong_rows(self, x, y):
        """The rows in which a label of y is not the oracle's answer to x (rows, T), as numbers."""
        wrong = []
        for row, (tokens, labels) in enumerate(zip(x, y)):
            answers = self.answers([self.vocabulary[token] for token in tokens])
            if any(label != NOT_ASKED and self.vocabulary[label] != answer
                   for label, answer in zip(labels, answers)):
                wrong.append(row)
        return wrong

    def check_fits(self, T, rows=1):
        """ValueError if T, a knob or the number of rows does not fit the task."""
        self.all_held_out(T)                            # make raises the errors
        self.make(np.random.default_rng(0), rows, T)

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


def print_problem(problems, x, y, oracle=None):
    """A problem x, its labels y (T,) and the oracle's answers, in columns of words."""
    answers = [None if label == NOT_ASKED else problems.vocabulary[label] for label in y]
    lines = dict(problem=[problems.vocabulary[token] for token in x], answers=answers)
    if oracle:
        lines['oracle'] = oracle
    width = max(map(len, problems.vocabulary)) + 3
    for title, words in lines.items():
        print(f'  {title:7}' + ''.join((word or '').rjust(width) for word in words))


def main():
    problems = Problems(task)
    check(seed >= 0, f'seed must be at least 0, not {seed}')
    x, y, depth = problems.make(np.random.default_rng(seed), rows, block_size)
    print(f'{task}: {problems.vocab_size} words, {block_size} tokens per problem\n')
    for tokens, labels in zip(x[:3], y[:3]):
        print_problem(problems, tokens, labels)
        print()
    depths, counts = np.unique(depth[y != NOT_ASKED], return_counts=True)
    shares = 100 * counts / counts.sum()
    print('labels by depth: ' + ', '.join(f'{d} {share:.1f}%' for d, share in zip(depths, shares)))

    # the oracle
    if not hasattr(problems.task, 'oracle'):
        print(f'{rows} problems, not checked: the task has no oracle')
        return
    wrong = problems.wrong_rows(x, y)
    print(f'{rows} problems: the oracle disagrees with {len(wrong)}')
    if wrong:
        first = wrong[0]
        print('\nthe first of them:')
        print_problem(problems, x[first], y[first],
                      problems.answers([problems.vocabulary[token] for token in x[first]]))
        raise SystemExit(1)


if __name__ == '__main__':
    configurator.configure(globals(), positional='task')
    configurator.run(main)
