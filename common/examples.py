"""What a data set (data.Text) and a task (tasks.Problems) have in common."""
import numpy as np

from common.errors import UserError


class Examples:
    """
    Batches to train on, and held-out windows. Both classes implement this, with T a number of
    tokens:

        name                        of the data set, or of the task without its knobs
        description                 what is trained on, in words
        sha256                      of what is trained on: --resume refuses another one
        tokenizer                   the name of its encoding, see encoding.kind_of
        tokenizer_json              the TokenizerJson of that name, or None if it is another kind
        vocab_size                  how many tokens there are
        is_task                     True for a task: only some tokens have labels, and the measure
                                    is the accuracy. False for text: every token has one, and the
                                    measure is the loss

        batch(rng, rows, T, mine)   draws `rows` windows, the same in all processes, and returns
                                    those in the slice `mine` (by default all): x, y (B, T) int64
        n_held_out(T)               how many held-out windows of T tokens there are
        held_out(numbers, T)        those with these numbers -> x, y (N, T) int64
        check_fits(T, rows)         ValueError unless there are batches and windows of T tokens
        depths(T)                   only for a task: the depth of each label of its held-out
                                    windows, (n_held_out(T), T)
    """

    def spread(self, n, T):
        """
        Numbers (n,) of n held-out windows of T tokens, evenly spread. ValueError if there are
        fewer.
        """
        all_windows = self.n_held_out(T)
        if n > all_windows:
            raise UserError(f'there are only {all_windows} held-out windows of {T} tokens, not '
                            f'{n}: lower their number')
        return np.linspace(0, all_windows - 1, n).round().astype(int)
