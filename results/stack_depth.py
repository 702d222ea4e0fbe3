"""
A task of one's own, for depth.md: how many brackets are open? Counted modulo p.

    python tasks.py results/stack_depth.py stack        problems with their answers

`(` opens a bracket, `)` closes one, `x` does neither, and `|` begins a new expression, in which
nothing is open.
"""
from dataclasses import dataclass

import numpy as np

from common.configurator import Count, Share
from common.errors import check
from tasks import TASKS, Task, steps_since


@dataclass
class Stack(Task):
    """The number of open brackets after each word, modulo p; reset: the share of words |."""
    p: Count = 5
    reset: Share = 0.05
    of_words = ('p',)

    def words(self):
        return ['|', 'x', '(', ')'] + [str(v) for v in range(self.p)]

    def __call__(self, rng, rows, T):
        x = rng.integers(1, 4, (rows, T))
        x[rng.random((rows, T)) < self.reset] = 0
        x[:, 0] = 0
        y = np.zeros_like(x)
        opened = np.zeros(rows, dtype=np.int64)
        for t in range(T):
            x[(x[:, t] == 3) & (opened == 0), t] = 1        # nothing is open that ) could close
            step = np.array([0, 0, 1, -1])[x[:, t]]
            opened = np.where(x[:, t] == 0, 0, opened + step)
            y[:, t] = 4 + opened % self.p
        return x, y, steps_since(x == 0)

    def oracle(self, words):
        check(words[0] == '|' and {*words} <= {*'|x()'}, 'a problem begins with |, and has | x ( )')
        answers = []
        for t in range(len(words)):
            expression = ''.join(words[:t + 1]).rpartition('|')[2]
            opened = expression.count('(') - expression.count(')')
            check(opened >= 0, 'nothing is open that ) could close')
            answers.append(str(opened % self.p))
        return answers


TASKS['stack'] = Stack
