"""
Two tasks of depth.md: pointers through a row of letters, and products of permutations.

    python train.py config/calc.py results/hop_and_group.py --dataset=group --out_dir=out-group
    python train.py config/calc.py results/hop_and_group.py --dataset=hop --window=None \\
        --block_size=40 --batch_size=64 --max_iters=1500 --out_dir=out-hop
"""
import itertools
import string
from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.configurator import Count, Natural, Share
from common.errors import check
from tasks import NOT_ASKED, TASKS, Task, steps_since


@dataclass
class Hop(Task):
    """
    p-hop induction (Sanford et al. 2024, Saunshi et al. 2025): follow pointers back through a text.

    The first token is p, drawn from 0 ... hops. The others are letters v_i, and no two neighbours
    are alike. A hop leads from letter i to the one after the last earlier occurrence of v_i:
    find(i) = the largest j <= i with v_(j-1) = v_i. The label of each letter is the letter p hops
    away, or `-` if a hop leads nowhere; the depth is the number of hops tried.
    """
    letters: Count = 4
    hops: Natural = 4

    of_words = 'letters', 'hops'

    def __post_init__(self):
        check(2 <= self.letters <= 26, f'letters must lie in [2, 26], not {self.letters}')

    def __call__(self, rng, rows, T):
        letters = self.letters
        n = T - 1
        p = rng.integers(self.hops + 1, size=(rows, 1))
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
        for hop in range(self.hops):
            hopping = (hop < p) & (place >= 0)
            place = np.where(hopping, np.take_along_axis(find, place, axis=1), place)
            depth[:, 1:] += hopping

        # the words are the letters, then -, then 0 ... hops
        x = np.concatenate((letters + 1 + p, v), axis=1)
        y = np.full_like(x, NOT_ASKED)
        y[:, 1:] = np.where(place >= 0, np.take_along_axis(v, place, axis=1), letters)
        return x, y, depth

    def words(self):
        return [*string.ascii_lowercase[:self.letters], '-', *map(str, range(self.hops + 1))]

    def oracle(self, words):
        """Search for each hop letter by letter, as the definition says."""
        p, v = words[0], words[1:]
        check(p.isdigit() and all(letter.isalpha() for letter in v), 'a problem must be a number '
              'of hops, then letters')
        answers = [None]
        for i in range(len(v)):
            for _ in range(int(p)):
                i = max((j for j in range(1, i + 1) if v[j - 1] == v[i]), default=None)
                if i is None:
                    break
            answers.append('-' if i is None else v[i])
        return answers


GROUPS = dict(S3=list(itertools.permutations(range(3))), S5=list(itertools.permutations(range(5))))


@dataclass
class Group(Task):
    """
    The running product of permutations, of three things (the group S3) or five (S5).

    `=g` sets the value to g, and `g` multiplies it by g from the right. The label of each token is
    the value so far, written `g`. The first token is a `=g`, and so is each later one with
    probability `reset`. The depth is the distance from the last `=g`. In S5 even the best shortcuts
    need a depth that grows with the length of the product, unless TC0 = NC1 (Liu et al. 2023).
    """
    name: Literal['S3', 'S5'] = 'S3'
    reset: Share = 0.2

    of_words = ('name',)

    def __call__(self, rng, rows, T):
        number = {g: i for i, g in enumerate(GROUPS[self.name])}
        # table[a, b] = a * b, which does b first
        table = np.array([[number[tuple(a[i] for i in b)] for b in number] for a in number])
        g = rng.integers(len(number), size=(rows, T))
        sets = rng.random((rows, T)) < self.reset
        sets[:, 0] = True

        y = g.copy()
        for t in range(1, T):
            y[:, t] = np.where(sets[:, t], g[:, t], table[y[:, t - 1], g[:, t]])
        return g + len(number) * sets, y, steps_since(sets)

    def words(self):
        elements = [''.join(map(str, g)) for g in GROUPS[self.name]]
        return elements + ['=' + g for g in elements]

    def oracle(self, words):
        """Multiply permutation matrices."""
        check(words[0][0] == '=', 'a problem must begin with =g')
        value = eye = np.eye(len(GROUPS[self.name][0]), dtype=int)
        answers = []
        for word in words:
            matrix = eye[:, [int(digit) for digit in word.lstrip('=')]]
            value = matrix if word[0] == '=' else value @ matrix
            answers.append(''.join(map(str, value.argmax(axis=0))))
        return answers


TASKS['hop'] = Hop
TASKS['group'] = Group
