"""README's task of one's own, for depth.sh."""
import numpy as np

from tasks import TASKS


class Switch:           # 0 and 1 set the value, . keeps it, ! flips it
    words = lambda self: ['0', '1', '.', '!']
    def __call__(self, rng, rows, T, reset=0.2):    # a knob, see --dataset
        x = rng.integers(2, 4, (rows, T))
        sets = rng.random((rows, T)) < reset
        sets[:, 0] = True
        x[sets] -= 2
        last = np.maximum.accumulate(np.where(sets, np.arange(T), 0), axis=1)
        flips = (x == 3).cumsum(axis=1)
        answers = np.take_along_axis(x - flips, last, axis=1) + flips
        # (rows, T) each: tokens and answers, as places in `words`, and depths
        return x, answers % 2, np.arange(T) - last
TASKS['switch'] = Switch()
