"""What a data set (data.Text) and a task (tasks.Problems) have in common."""
import numpy as np


class Examples:
    """
    Batches to train on, and held-out windows. Both classes have

        batch(rng, rows, T)         a batch to train on -> x, y (B, T) int64
        n_held_out(T)               how many held-out windows of T tokens there are
        held_out(numbers, T)        those with these numbers -> x, y (N, T) int64
        check_fits(T, rows)         ValueError unless there are batches and windows of T tokens
        is_task                     do only some tokens have a label, and is the measure accuracy?
    """

    def spread(self, n, T):
        """The numbers (n,) of n held-out windows of T tokens, evenly spread. ValueError: too few"""
        there = self.n_held_out(T)
        if n > there:
            raise ValueError(f'the held-out text has {there} windows of {T} tokens, fewer than '
                             f'{n}: lower --n_windows')
        return np.linspace(0, there - 1, n).round().astype(int)
