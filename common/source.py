"""
Where the documents of a data set come from: what own_text.py, torchdocs.py and fineweb.py have in
common.
"""
from common.errors import UserError, check

SPLITS = 'train', 'val'


class Source:
    """
    The documents of a data set. Each kind of source is a class of its own, with

        description         where the text comes from, for meta.json
        identity            what changes with the text, as far as can be told: a sha256, or a name
        revision            with such a name, the commit on the hub; otherwise None
        val_fraction        the share that is held out; None if the source says by itself which
                            documents these are
        most_tokens         how many tokens are taken; None for all
        default_tokenizer   the tokenizer unless the user names one

        documents(progress) -> (split, text) pairs. progress: what an interrupted call saved, or {}.
                            A stream continues after it; the other sources begin anew
        state()             how far a stream was read, to be saved as progress; None if the source
                            cannot be continued
    """
    default_tokenizer = 'bytes'
    most_tokens = None
    revision = None

    def state(self):
        return None


def one_in(val_fraction):
    """
    n, if val_fraction is within 2% of 1/n (0.33 counts as 1/3): one document in n is held out.
    Otherwise ValueError.
    """
    n = round(1 / val_fraction)
    check(abs(n * val_fraction - 1) < 0.02, f'one of each n documents is held out, so val_fraction '
          f'must be 1/n, not {val_fraction}: say {1 / n:.5g} for n = {n}')
    return n


def refuse_fraction(val_fraction, reason):
    """ValueError if the knob val_fraction is given to a source where it would have no effect."""
    if val_fraction is not None:
        raise UserError(f'--val_fraction has no effect here: {reason}. Leave it out')
