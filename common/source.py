"""
Where the documents of a data set come from: what own_text.py, torchdocs.py and fineweb.py have in
common.
"""
SPLITS = 'train', 'val'


class Source:
    """
    The documents of a data set. Each kind of source is a class of its own, with

        description         where the text comes from, for meta.json: a path, or some words
        default_tokenizer   the tokenizer unless the user names one
        sha256              of the text files; None if another fact identifies the text
        revision            the commit of a stream from the hub; otherwise None
        most_tokens         how many tokens are taken; None for all

        open(progress)      -> (split, text) pairs. progress: the state after which they go on, {}
                            for the first document. ValueError if they cannot be read
        state()             where the pairs are now, for progress; None if a source can only be read
                            from its first document on
    """
    sha256 = None
    revision = None
    most_tokens = None
    default_tokenizer = 'bytes'

    def state(self):
        return None
