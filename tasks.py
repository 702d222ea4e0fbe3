"""
Problems that need many loop steps, with the number of steps of each answer.

    python tasks.py calc                    prints problems and checks 1,000 with the oracle
    python tasks.py calc:p=7,reset=0.05     the same with other knobs, the fields of Calc
    python tasks.py config/maze.py          those of a config file, here of a task in zoo/
    python train.py config/calc.py          trains on problems, which are made batch by batch

To add a task, write a dataclass that inherits Task and enter it in TASKS, here or in a mine.py of
your own. `python tasks.py mine.py NAME` compares the labels with the oracle's answers, if it has
one, and `python train.py config/calc.py mine.py --dataset=NAME --out_dir=out-NAME` trains.

    rng, rows, T    numpy's random generator, the number of problems, the tokens in each problem
    x               (rows, T) int64, the tokens: i stands for words()[i]
    y               (rows, T) int64, the label of each token: the right answer, as a token. It must
                    follow from this token and earlier ones, unless a model like those of zoo/ reads
                    all. NOT_ASKED: no label, but each problem has at least one
    depth           (rows, T) int64, how many answers must be found one after another before this
                    one; 0 where there is no label. Tables and sample.py read it, training does not
"""
import functools
import hashlib
import shutil
from dataclasses import asdict, dataclass

import numpy as np
import torch

from common.configurator import Count, Natural, Share, build, configure
from common.encoding import Words
from common.errors import check, explain, run
from common.terminal import paint

# -------------------------------------------------------------------------------------------------
dataset = 'calc'        # a name in TASKS, with other knobs if you like: calc:p=7,reset=0.1
model_class: str | None = None  # MODULE:CLASS, a model whose file has the task, as in zoo/
block_size: Count = 24  # T, the tokens in a problem
rows: Count = 1000      # problems to check with the oracle
seed: Natural = 0
# -------------------------------------------------------------------------------------------------

NOT_ASKED = -100            # torch's cross-entropy ignores this label


def steps_since(mask):
    """The distance from each token back to the last one in the mask (rows, T), or to token 0."""
    t = np.arange(mask.shape[1])
    return t - np.maximum.accumulate(np.where(mask, t, 0), axis=1)


# the tasks ---------------------------------------------------------------------------------------

@dataclass
class Task:
    """
    What a task is. Its knobs are the fields of a dataclass, with defaults. It must have

        __call__(rng, rows, T) -> x, y, depth   the problems, (rows, T) each
        words() -> list of str                  the text of each token, in order, without blanks

    and it may override what stands below this text, and add these methods (arrays are NumPy's):

        oracle(words) -> list of str            the right answer to each word, None where it has no
                                                label, found in another way than the labels. What
                                                --start types may be no problem: then a ValueError
        picture(x, y, guesses, steps) -> str    a problem as text; all are (T,). It has a ! at wrong
                                                guesses, unless y or the guess is NOT_ASKED. steps:
                                                to colour the tokens, or None
        valid(x, guesses) -> (B,) bool          which guesses (B, T) solve x (B, T), found without
                                                the labels; for sample.py --num_starts
    """
    # the knobs that decide words(): a model takes no other values of them. They must make a task
    # without the other knobs
    of_words = ()
    shows_deepest = True        # does sample.py print the deepest answer, and when it was found?
    most_held_out = 2 ** 20     # tokens in all held-out problems of one length
    oracle = picture = valid = None

    def budget(self, T, wakes=True):
        """
        The loop steps for a problem of T tokens, unless --n_loop is given; None = the model's own.
        Here, if tokens wake: enough for news that travels one token per step, there and back, and
        100 in which the states come to rest.
        """
        return 2 * T + 100 if wakes else None

    def batch(self, rng, rows, T):
        """A training batch x, y (n, L): n is `rows` or a multiple of it, and L at most T."""
        return self(rng, rows, T)[:2]

    def read(self, text):
        """A problem that was typed -> its words, with blanks between. ValueError if it is none."""
        return text


@dataclass
class Calc(Task):
    """
    Running arithmetic modulo p: `=v` sets the value to v, `+v` and `*v` (v > 0) change it.

    The label of each token is the value so far, written `=v`. The first token is a `=v`, and so is
    each later one with probability `reset`. The depth is the distance from the last `=v`.
    """
    p: int = 5
    reset: Share = 0.2

    of_words = ('p',)

    def __post_init__(self):
        check(self.p > 1, f'p must be at least 2, not {self.p}')

    def __call__(self, rng, rows, T):
        p = self.p
        op = rng.integers(1, 3, size=(rows, T))         # 0 sets, 1 adds, 2 multiplies
        op[rng.random((rows, T)) < self.reset] = 0
        op[:, 0] = 0
        v = np.where(op == 0, rng.integers(p, size=(rows, T)), rng.integers(1, p, size=(rows, T)))
        # the words are =0 ... =(p-1), then +1 ... +(p-1), then *1 ... *(p-1)
        x = v + np.array([0, p - 1, 2 * (p - 1)])[op]

        y = v.copy()
        for t in range(1, T):
            value = y[:, t - 1]
            y[:, t] = np.choose(op[:, t], [v[:, t], value + v[:, t], value * v[:, t]]) % p
        return x, y, steps_since(op == 0)

    def words(self):
        sets = [f'={v}' for v in range(self.p)]
        return sets + [f'{op}{v}' for op in '+*' for v in range(1, self.p)]

    def oracle(self, words):
        """Compute with Python's unlimited integers, and take the remainder only in the answers."""
        check(words[0][0] == '=', 'a problem must begin with =v')
        answers = []
        for word in words:
            v = int(word[1:])
            if word[0] == '=':
                value = v
            elif word[0] == '+':
                value += v
            else:
                value *= v
            answers.append(f'={value % self.p}')
        return answers


TASKS = dict(calc=Calc)     # classes, not objects


# a task by its name ------------------------------------------------------------------------------

def is_task(dataset):
    """Does the knob `dataset` name a task, with or without knobs of its own, and not a text?"""
    return dataset.partition(':')[0] in TASKS


class Problems:
    """The problems of a task, with the methods and attributes of data.Text, see its docstring."""
    is_task = True
    tokenizer_json = None
    n_problems = 2048           # held out; of long ones there are fewer, see n_held_out

    def __init__(self, dataset):
        self.name = dataset.partition(':')[0]
        self.task = build(dataset, TASKS, 'task')
        of_words = ','.join(f'{field}={getattr(self.task, field)}' for field in self.task.of_words)
        words = self.task.words()
        check(build(f'{self.name}:{of_words}', TASKS, 'task').words() == words, 'of_words of the '
              f'task {self.name} must name all knobs on which its words depend')
        check(len({*words}) == len(words) and all(str(word).split() == [word] for word in words),
              f'the words of {self.name} must be different texts without blanks')
        self.encoding = Words(f'{self.name}:{of_words}', words)
        self.tokenizer = self.encoding.name
        self.vocab_size = self.encoding.n_vocab
        self.description = f'problems of {dataset}, made as they are needed'
        knobs = repr((self.name, asdict(self.task)))
        self.sha256 = hashlib.sha256(knobs.encode()).hexdigest()

    def make(self, rng, rows, T):
        """Problems: x, y, depth (rows, T)."""
        arrays = self.task(rng, rows, T)
        shape = self.check_arrays(arrays, 3)
        check(shape == (rows, T), f'the task {self.name} must make {rows} problems of {T} tokens, '
              f'and not {shape[0]} of {shape[1]}')
        _, y, depth = arrays
        check(depth.min() >= 0 and not depth[y == NOT_ASKED].any(), f'the task {self.name} must '
              'have depths of at least 0, and of 0 where there is no label')
        return tuple(map(np.ascontiguousarray, arrays))     # torch takes no reversed ones

    def check_arrays(self, arrays, n):
        """ValueError unless the task has made n arrays as it must -> their shape (rows, T)."""
        check(isinstance(arrays, tuple) and len(arrays) == n, f'the task {self.name} must return a '
              f'tuple of {n} arrays')
        x, y = arrays[:2]
        shape = np.shape(x)
        others = [f"{name} of {getattr(array, 'dtype', 'no dtype')}, {np.shape(array)}"
                  for name, array in zip(('x', 'y', 'depth'), arrays)
                  if np.shape(array) != shape or getattr(array, 'dtype', None) != np.int64]
        check(len(shape) == 2 and not others and x.size, f'the task {self.name} must make arrays '
              f"of NumPy's int64 and one shape (rows, T), and not {', '.join(others) or shape}")
        tokens = np.concatenate((x.flatten(), y[y != NOT_ASKED]))
        check(0 <= tokens.min() <= tokens.max() < self.vocab_size, f'the task {self.name} has '
              f'{self.vocab_size} words, and tokens from {tokens.min()} to {tokens.max()}')
        return shape

    def answers(self, x):
        """The oracle's answers to a problem x (T,), as tokens (T,); NOT_ASKED where it has none."""
        tokens = self.encoding.tokens | {None: NOT_ASKED}
        words = self.task.oracle([self.encoding.vocabulary[token] for token in x])
        check(len(words) == len(x) and tokens.keys() >= {*words}, f'the oracle of {self.name} must '
              f'answer {len(x)} words with a word or None each, and has {len(words)} answers, '
              f'of which these are no words: {[*{*words} - tokens.keys()]}')
        return np.array([tokens[word] for word in words])

    def solve(self, text):
        """
        A problem as somebody types it, '=2 +3 *4', with the oracle's answers -> x, y (1, T).
        ValueError if it is none of the task. Without an oracle y has no labels.
        """
        x = np.array(self.encoding.encode(self.task.read(text)))
        check(len(x), 'the problem has no words')
        y = self.answers(x) if self.task.oracle else np.full_like(x, NOT_ASKED)
        return x[None], y[None]

    def wrong_rows(self, x, y):
        """The numbers of the rows in which y is not what the oracle answers, None included."""
        return [row for row, (problem, labels) in enumerate(zip(x, y))
                if (labels != self.answers(problem)).any()]

    def check_fits(self, T):
        """Draw eight problems and a batch. ValueError if T or a knob does not fit the task."""
        rng = np.random.default_rng(0)
        for y in self.make(rng, 8, T)[1], self.batch(rng, 8, T)[1].numpy():
            check((y != NOT_ASKED).any(axis=1).all(), f'a problem of {self.name} has no label')

    def batch(self, rng, rows, T, mine=slice(None)):
        """Those in the slice `mine` of a batch of `rows` problems: x, y (B, L). See Task.batch."""
        arrays = self.task.batch(rng, rows, T)
        n, length = self.check_arrays(arrays, 2)
        check(n % rows == 0 and length <= T, f'a batch of {self.name} must have a multiple of '
              f'{rows} problems, of {T} tokens at most, and not {n} of {length}')
        x, y = (np.ascontiguousarray(array).reshape(rows, -1, length)[mine] for array in arrays)
        return torch.from_numpy(x).flatten(0, 1), torch.from_numpy(y).flatten(0, 1)

    def n_held_out(self, T):
        """How many held-out problems of T tokens there are."""
        return max(1, min(self.n_problems, self.task.most_held_out // T))

    @functools.cache
    def all_held_out(self, T):
        """The n held-out problems of T tokens, seeded by n: x, y, depth (n, T)."""
        n = self.n_held_out(T)
        return self.make(np.random.default_rng([n, *b'held-out']), n, T)

    def held_out(self, numbers, T):
        """The held-out problems of these numbers -> x, y (N, T)."""
        x, y, _ = self.all_held_out(T)
        return torch.from_numpy(x[numbers]), torch.from_numpy(y[numbers])


# the demonstration -------------------------------------------------------------------------------

def print_problem(problems, x, y, guesses=None, steps=None, in_colour=False, who='model'):
    """
    Print a problem: the task's picture, or lines of words, wrapped to the width of the terminal.

    x, y, guesses, steps: (T,), its tokens, labels, the guesses of `who`, and the loop steps of each
    token. in_colour: guesses on the colour of their loop steps. A wrong guess is written !word!.
    """
    if problems.task.picture:
        shown = y if guesses is None else guesses
        print(problems.task.picture(x, y, shown, steps if in_colour else None))
        return

    texts = problems.encoding.texts
    lines = {'problem': texts(x), 'label' if who == 'oracle' else 'right': texts(y)}
    if guesses is not None:
        ignored = NOT_ASKED if who == 'model' else None     # there a model may say anything
        lines[who] = [word if label in (guess, ignored) else f'!{word}!'
                      for word, guess, label in zip(texts(guesses), guesses, y)]
    if steps is not None:
        lines['loops'] = [f'{n:.1f}'.removesuffix('.0') for n in steps]

    width = 1 + max(len(word) for words in lines.values() for word in words)
    per_block = max(1, (shutil.get_terminal_size().columns - len('problem')) // width)
    for first in range(0, len(x), per_block):
        block = slice(first, first + per_block)
        for name, words in lines.items():
            cells = [word.rjust(width) for word in words[block]]
            if in_colour and name == who:
                cells = [paint(cell, n) for cell, n in zip(cells, steps[block])]
            print(name.ljust(len('problem')) + ''.join(cells))
        print()


def show(dataset, model_class=None, T=24, rows=1000, seed=0):
    """Print problems of a task and compare all `rows` of them with the oracle. See the knobs."""
    if model_class:
        from common.checkpoint import class_of
        class_of(model_class, named=True)       # its file enters the task in TASKS
    problems = Problems(dataset)
    problems.check_fits(T)
    x, y, depth = problems.make(np.random.default_rng(seed), rows, T)
    print(f'{dataset}: {problems.vocab_size} words, {T} tokens per problem\n')
    has_oracle = problems.task.oracle is not None
    with explain('the oracle fails on a problem', 'TRACEBACK=1 shows the line', ValueError):
        wrong = problems.wrong_rows(x, y) if has_oracle else []
    for row in wrong[:1] or range(min(3, rows)):
        guesses = problems.answers(x[row]) if has_oracle else None
        print_problem(problems, x[row], y[row], guesses, who='oracle')
    depth = depth[y != NOT_ASKED]
    print(f'labels are {depth.mean():.1f} steps deep on average, {depth.max()} at most')
    if not has_oracle:
        print(f'{rows} problems, not checked: the task has no oracle')
        return
    print(f'{rows} problems: the oracle disagrees with {len(wrong)}')
    if wrong:
        raise SystemExit(1)


if __name__ == '__main__':
    configure(globals(), positional='dataset')
    # a task's file imports this one as `tasks`: what it enters in TASKS is there, not here
    import tasks
    run(lambda: tasks.show(dataset, model_class, block_size, rows, seed))
