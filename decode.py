"""
Decoding: a prompt in, tokens out, one by one, as drafts that are checked, or as a wave.

    python decode.py                    a prompt continued by a wave, pass by pass

`stream` loops over the tokens of a text, and a Decoder makes the next ones; `read` reads tokens
that are given, such as a problem. The noise that draws the token at a place depends on (seed,
place) alone: decoders with the same logits write the same text.

Geiping: App. D.6 (warm start), 5 (drafts: self-speculation). Geiping et al. 2025b, arXiv
2510.14961 (waves).

    B, T, V     rows; tokens of a pass; vocab_size
    G, C, w     groups; width of the model; columns of a wave
    place       of a token in the whole text; its position is that in the context window
    plan        a loops.Plan: loop budget, rule and noise of all passes; its cache is made here
"""
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from cache import Span, make_cache
from exits import check_finite, make_exit
from loops import derived_seed, of_groups

# text ---------------------------------------------------------------------------------------------

@torch.no_grad()
def stream(model, idx, n_new, plan, decoder, policy, **draws):
    """
    Continue prompts idx (B, T): yield tokens (B, t), and the loop steps kept in the pass that has
    predicted each (a wave: all since it joined), (B, t, groups); n_new tokens in all.

    policy: of the cache, see cache.slots_of. draws: seed (row b has seed + b), temperature, top_k,
    see pick. ValueError for bad input when the first token is asked for.
    """
    if n_new < 1 or idx.numel() == 0:
        raise ValueError('the prompt and the text must have at least one token each')
    check_final(plan.rule)
    decoder.check_fits(model, plan, policy, len(idx))
    text = Text(idx, model.config.block_size, **draws)
    window_start = None
    left = n_new
    while left > 0:
        if window_start != text.start:        # at first, and when the context window has moved
            # read the window; its last token gives the next one, whatever the decoder
            window_start = text.start
            plan = replace(plan, cache=make_cache(model, plan.counts, policy))
            context = text.idx[:, window_start:]
            logits, results = one_pass(model, context, 0, plan)
            decoder.begin(results)
            tokens = text.draw(logits[:, -1:])
            steps_used = of_groups(results, 'steps_used', context)[:, -1:]
        else:
            tokens, steps_used = decoder(model, plan, text, left)
        t = tokens.shape[-1]
        shape = len(text.idx), t, len(model.groups)
        if tokens.shape != shape[:2] or steps_used.shape != shape or t > left:
            raise ValueError(f'{type(decoder).__name__} must give tokens (B, t) and their loop '
                             f'steps (B, t, groups), and not more than the {left} tokens left')
        if t > 0:
            yield tokens, steps_used
        text.idx = torch.cat((text.idx, tokens), dim=1)
        left -= t


class Text:
    """Rows of tokens idx (B, n) that are being continued, and how their next tokens are drawn."""

    def __init__(self, idx, block_size, seed=0, temperature=1.0, top_k=None):
        if not temperature >= 0:            # nor NaN
            raise ValueError(f'temperature must be at least 0, not {temperature}')
        if top_k is not None and top_k < 1:
            raise ValueError(f'top_k must be at least 1, not {top_k}')
        self.idx = idx[:, -block_size:]                     # of a prompt the last tokens are kept
        self.n_cut = idx.shape[1] - self.idx.shape[1]       # places count these tokens too
        self.block_size = block_size
        self.seeds = [seed + b for b in range(len(idx))]
        self.temperature = temperature
        self.top_k = top_k

    @property
    def start(self):
        """
        Where the context window begins: at 0 while all tokens fit. When the block is full it moves
        on by half a block, so that every later token has at least half a block of context.
        """
        hop = max(1, self.block_size // 2)
        return hop * max(0, math.ceil((self.idx.shape[1] - self.block_size) / hop))

    @property
    def last(self):
        """The last token of each row (B, 1), with which the next pass begins."""
        return self.idx[:, -1:]

    @property
    def position(self):
        """The position of the last token in the context window."""
        return self.idx.shape[1] - 1 - self.start

    def draw(self, logits, skip=0):
        """Logits (B, T, V) -> the next tokens (B, T), after `skip` tokens that are not here yet."""
        n = self.n_cut + self.idx.shape[1] + skip
        places = range(n, n + logits.shape[1])
        return pick(logits, places, self.seeds, self.temperature, self.top_k)


# passes -------------------------------------------------------------------------------------------

def one_pass(model, idx, position, plan):
    """A pass over idx (B, T) from this position on -> logits (B, T, V), the groups' results."""
    x, results = model.hidden(idx, replace(plan, span=Span(position, idx.shape[1], idx.device)))
    if plan.passes is not None:
        plan.passes.append(of_groups(results, 'evals', idx))
    return model.lm_head(x), results


@torch.no_grad()
def read(model, idx, plan, policy='exact'):
    """
    Given tokens idx (B, T) -> logits (B, T, V), loop steps kept and computed (B, T, groups).

    policy: with 'exact' the result is that of one pass, so it is one pass, and no cache is made.
    With any other (see cache.slots_of) they are read one after another. ValueError for a rule that
    wakes with another cache than 'exact'.
    """
    T = idx.shape[1]
    width = T
    if policy != 'exact':
        check_final(plan.rule)
        width = 1
        plan = replace(plan, cache=make_cache(model, plan.counts, policy, T))
    parts = []
    for start in range(0, T, width):
        tokens = idx[:, start:start + width]
        logits, results = one_pass(model, tokens, start, plan)
        parts.append((logits, of_groups(results, 'steps_used', tokens),
                      of_groups(results, 'evals', tokens)))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


def check_final(rule):
    """ValueError if an exit is not for good: then whole sequences have to be read in one pass."""
    if rule and rule.wake:
        raise ValueError('tokens can wake only in problems that are read in one pass, with the '
                         'cache exact: set wake to False')


# decoders -----------------------------------------------------------------------------------------

class Decoder:
    """
    How the next tokens of a text are made. To add one, write a subclass (OneByOne is the shortest)
    and `DECODERS[NAME] = ...` in mine.py, and run `python sample.py mine.py --decoder=NAME`. The
    fields of a dataclass are arguments, as in NAME:field=value. One object writes one text at a
    time; `begin` forgets what it knew before.
    """
    needs_cache = None      # the cache that it needs, 'exact' or 'latest'; None = any
    default_rule = None     # its exit rule, (name, tau), see exits.choose
    one_row = True          # can it continue one row only?

    def check_plan(self, model, plan):
        """ValueError if the model or the plan does not suit it."""

    def check_fits(self, model, plan, policy, n_rows):
        """ValueError if it cannot continue n_rows texts with this plan and cache."""
        name = type(self).__name__
        if self.needs_cache not in (None, policy):
            raise ValueError(f"{name} needs the cache '{self.needs_cache}', not {policy!r}")
        if self.one_row and n_rows > 1:
            raise ValueError(f'{name} continues one row, not {n_rows}')
        self.check_plan(model, plan)

    def widths(self, plan):
        """The widths of its passes without a rule that are worth compiling, a set."""
        return set() if plan.rule else {1}

    def begin(self, results):
        """
        The context window was read, at first or after it has moved. results: of each group in that
        pass, see RecurrentGroup.forward.
        """

    def __call__(self, model, plan, text, most):
        """
        The next t tokens of a Text, at most `most`, now and then none -> (B, t), their loop steps
        (B, t, groups). plan.cache has the keys of all tokens of the window but text.last, with
        which the pass begins. A pass must fit into the block: text.position + its tokens <=
        text.block_size. Keys left beyond the last token do no harm. A pass without a rule and with
        fewer loops than plan.counts leaves slots of the cache 'exact' empty: compute its tokens
        again with all loops, as Drafts does, or need 'latest'.
        """
        raise NotImplementedError

    def in_words(self, plan):
        """What sample.py prints before the loops, such as 'warm starts, '."""
        return ''


class OneByOne(Decoder):
    """One token, from x^(0)."""
    one_row = False

    def __call__(self, model, plan, text, most):
        logits, results = one_pass(model, text.last, text.position, plan)
        return text.draw(logits), of_groups(results, 'steps_used', text.last)


class WarmStart(Decoder):
    """One token, which begins in the groups' outputs for the token before it."""
    one_row = False

    def check_plan(self, model, plan):
        if not reads_input(model):
            raise ValueError('a warm start begins with the states of another token, so it needs a '
                             'model whose loop steps read their input')

    def in_words(self, plan):
        return 'warm starts, '

    def begin(self, results):
        self.results = results

    def __call__(self, model, plan, text, most):
        warm = [group.output(result['x'][:, -1:])
                for group, result in zip(model.groups, self.results)]
        logits, self.results = one_pass(model, text.last, text.position, replace(plan, warm=warm))
        return text.draw(logits), of_groups(self.results, 'steps_used', text.last)


def reads_input(model):
    """Does each loop step read the input of its group?"""
    return all(group.adapter.reads_e for group in model.groups)


@dataclass
class Drafts(Decoder):
    """
    Draft up to `tokens` tokens with `loops` loops, None = a quarter of the smallest budget, then
    run them side by side, from x^(0) again, with the plan's loops and rule, and keep those that
    agree. Both use the same draws, so that the text is that of one_by_one, but for the rule
    `random`.
    """
    loops: int | None = None
    tokens: int = 4
    needs_cache = 'exact'

    def draft_loops(self, plan):
        budget = min(plan.counts, default=1)
        return max(1, round(budget / 4)) if self.loops is None else self.loops

    def check_plan(self, model, plan):
        if not 1 <= self.draft_loops(plan) < min(plan.counts, default=1):
            raise ValueError('drafts need groups, n_loop from 2, and loops from 1 to n_loop - 1, '
                             f'not {self.draft_loops(plan)}')
        if self.tokens < 1:
            raise ValueError(f'drafts need at least 1 token, not {self.tokens}')

    def in_words(self, plan):
        return f'drafts of {self.tokens} tokens, loops {self.draft_loops(plan)}, checked by '

    def widths(self, plan):
        return {1} if plan.rule else {1, 1 + self.tokens}       # the check has the plan's rule

    def __call__(self, model, plan, text, most):
        # the check begins with the last token, and gives one token more than there are drafts
        position = text.position
        room = min(self.tokens, text.block_size - 1 - position, most - 1)
        few_loops = replace(plan, counts=[self.draft_loops(plan)] * len(plan.counts), rule=None)
        inputs = text.last                              # last, d1, d2 ...: (1, 1 + room)
        for i in range(room):
            logits, _ = one_pass(model, inputs[:, -1:], position + i, few_loops)
            inputs = torch.cat((inputs, text.draw(logits, skip=i)), dim=1)

        # all loops on all of them, which overwrites the keys and values of the drafts
        logits, results = one_pass(model, inputs, position, plan)
        checked = text.draw(logits)                     # t1, t2, t3 ...: (1, 1 + room)

        # keep t1, t2 ... up to and including the first that differs from its draft
        agree = (checked[:, :-1] == inputs[:, 1:]).int().cumprod(dim=1)
        kept = 1 + int(agree.sum())                     # waits for the device
        return checked[:, :kept], of_groups(results, 'steps_used', inputs)[:, :kept]


@dataclass
class Column:
    """A token of a wave that passes through G groups."""
    token: int                      # its input
    states: torch.Tensor            # (G, C); NaN before its first pass
    streak: np.ndarray              # small signals in a row, (G,)
    memo: torch.Tensor | None = None    # of the rule, (G, any)
    says: int | None = None         # what it predicted in its last pass
    age: int = 0                    # whole passes since its input last changed
    passes: int = 0                 # passes since it joined


@dataclass
class Wave(Decoder):
    """
    Up to `width` tokens go through the model side by side, pass by pass: all layers and the head,
    with `steps` loop steps in each group. Each token goes on from its own last states, and what it
    predicts is the input of the next one. The keys and values of the wave are overwritten in each
    pass. Passes 11 to 16 of `python decode.py`, with tau = 0.01 (positions across; what a token
    predicts, _ for a space, and the passes since its input last changed):

        column    1   2   3   4   5   6   7   8   9   10  11
        pass 11  [a5] t4  e3  _2  t1  o1
        pass 12      [t5] e4  _3  o2  o1  _1
        pass 13          [e5] _4  o3  f1  d2  t1
        pass 14              [_5] o4  f2  _1  e1  h1
        pass 15                  [o5] f3  _2  t1  x1  a1
        pass 16                       f4  _3  t2  h1  p1  m1

    A token in brackets leaves the wave, since two things hold: its input is certain (all before it
    have left or leave, and it reads what the last of them predicts), and by the plan's rule it is
    still in every group. (The first token also leaves, still or not, if one more pass with its
    input would exceed a loop budget of the plan.) In each pass a token joins at the end, while
    there is room. In pass 12 column 5 turns from t to o, so in pass 13 column 6 has a new input:
    it keeps its states, counts from 1 again, and turns from o to f, so in pass 14 column 7 counts
    anew, too. In pass 16 nobody leaves, since f is not still yet.

    The rule is applied to the change of a token's states from one pass to the next; the token keeps
    its last states, whatever rule.keep says. Its loop steps are all those since it joined; those of
    the first token after a context window was read are of that pass.

    trace: None, or a list, to which each pass appends dict(place=of the first token, inputs,
    tokens, age, leave=how many tokens leave).
    """
    width: int = 8
    steps: int = 1
    needs_cache = 'latest'
    # with it pretrained/text wrote what 30 loops write after bench.py's eight prompts
    default_rule = 'norm_rel', 0.003
    trace = None                    # without an annotation it is no argument

    def check_plan(self, model, plan):
        if self.width < 1 or not 1 <= self.steps <= min(plan.counts, default=1):
            raise ValueError('a wave needs a width of at least 1, and steps from 1 to n_loop, not '
                             f'{self.width} and {self.steps}')
        # a token's input changes while it loops, so each step must read it; and the rule sees the
        # states of single tokens, not whole rows
        if not (model.groups and reads_input(model) and plan.rule and plan.rule.reads == 'readout'):
            raise ValueError('a wave needs a model with recurrent groups that read their input in '
                             'every step, and a rule that reads the states of a token alone')

    def in_words(self, plan):
        return f'a wave of {self.width}; its front waits for a token '

    def widths(self, plan):
        return {self.width}         # of full waves; its passes have no rule, see run_pass

    def begin(self, results):
        self.columns = []

    def __call__(self, model, plan, text, most):
        # a token joins at the end, if it fits into the width, the block and the text
        if len(self.columns) < min(self.width, text.block_size - text.position, most):
            G = len(model.groups)
            token = self.columns[-1].says if self.columns else text.last.item()
            # NaN: it begins in noise, see Plan.warm
            unknown = torch.full((G, model.config.n_embd), math.nan, device=text.idx.device)
            self.columns.append(Column(token, unknown, np.zeros(G, dtype=int)))
        self.run_pass(model, plan, text)
        return self.leave(plan, text)

    def run_pass(self, model, plan, text):
        """All columns through the model: their next states, what they say, and their streaks."""
        inputs = torch.tensor([[column.token for column in self.columns]], device=text.idx.device)
        before = torch.stack([column.states for column in self.columns], dim=1)     # (G, w, C)
        # without a rule, which is applied below
        warm_plan = replace(plan, counts=[self.steps] * len(model.groups), rule=None,
                            warm=list(before[:, None]))         # warm: (1, w, C) for each group
        logits, results = one_pass(model, inputs, text.position, warm_plan)
        after = torch.stack([result['x'][0] for result in results])             # (G, w, C)
        check_finite(after)             # NaN would mean noise; waits for the device
        says = text.draw(logits)[0].tolist()
        for i, column in enumerate(self.columns):
            if column.passes > 0:       # before its first pass it had no states to compare
                value, column.memo = plan.rule.observe(before[:, i], after[:, i], column.memo,
                                                       model.readout)
                value = value.numpy(force=True)     # waits for the device, once a column and pass
                plan.rule.check_value(value, after[:, i], column.passes)    # signals so far
                # with a new input the state moves because the input did: no streak begins there
                column.streak = (column.streak + 1) * (value < plan.rule.tau) * (column.age > 0)
            column.states = after[:, i]
            column.says = says[i]
            column.age += 1
            column.passes += 1

    def n_leaving(self, plan):
        """How many leading columns leave."""
        # what the column before says now; the first column's input is text already
        said_before = [self.columns[0].token, *(column.says for column in self.columns)]
        for n, (column, said) in enumerate(zip(self.columns, said_before)):
            is_still = (column.streak >= plan.rule.hits).all()
            has_looped_enough = n == 0 and (column.age + 1) * self.steps > min(plan.counts)
            if column.token != said or not (is_still or has_looped_enough):
                return n
        return len(self.columns)

    def leave(self, plan, text):
        """Columns leave -> their tokens and loop steps; the others get their next inputs."""
        n = self.n_leaving(plan)
        says = [column.says for column in self.columns]
        if self.trace is not None:
            self.trace.append(dict(place=text.n_cut + text.idx.shape[1] - 1,
                                   inputs=[column.token for column in self.columns], tokens=says,
                                   age=[column.age for column in self.columns], leave=n))
        passes = text.idx.new_tensor([[column.passes for column in self.columns[:n]]])  # (1, n)
        steps_used = self.steps * passes[..., None].repeat(1, 1, len(plan.counts))

        # what a token predicts is the input of the next one
        for column, token in zip(self.columns[1:], says):
            if column.token != token:
                column.token = token
                column.age = 0
        self.columns = self.columns[n:]
        return text.idx.new_tensor([says[:n]]), steps_used


DECODERS = dict(one_by_one=OneByOne, warm_start=WarmStart, drafts=Drafts, wave=Wave)


def decoder_of(decoder=None):
    """A Decoder, or its name in DECODERS with arguments, as 'wave:width=8'; None stays None."""
    if isinstance(decoder, str):
        from common.configurator import build  # until one is named, the core needs no common/
        return build(decoder, DECODERS, 'decoder')
    return decoder


# draws --------------------------------------------------------------------------------------------

@lru_cache(maxsize=64)      # drafts and waves draw the token at a place several times
def gumbel(seed, place, V):
    """Noise (V,): argmax(log p + gumbel) is a draw from p (the Gumbel-max trick)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'token', place))
    return -torch.empty(V).exponential_(generator=generator).log()


def pick(logits, places, seeds, temperature=1.0, top_k=None):
    """
    Logits (B, T, V) -> tokens (B, T), those at `places` (T,) of rows with these seeds (B,).
    temperature 0: the likeliest. top_k: draw among the top_k likeliest, None = all.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    V = logits.shape[-1]
    if top_k is not None:
        least = logits.topk(min(top_k, V)).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    noise = [torch.stack([gumbel(seed, place, V) for place in places]) for seed in seeds]
    return (logits + torch.stack(noise).to(logits.device)).argmax(-1)


# the demonstration --------------------------------------------------------------------------------

def main():
    """A wave: what a token predicts, passes since its input changed; [ ]: it leaves; _: a space."""
    from model import GPT
    wave = Wave()
    wave.trace = []
    prompt = torch.tensor([[*b'The method returns ']])
    idx, _ = GPT.load('pretrained/text').generate(prompt, 18, temperature=0, n_loop=30,
                                                  decoder=wave, exit=make_exit('norm_rel', 0.01))
    print(f'{main.__doc__}\n{bytes(idx[0].tolist()).decode()}')
    for number, entry in enumerate(wave.trace, start=1):
        line = '    ' * (entry['place'] - prompt.shape[1])
        for i, (token, age) in enumerate(zip(entry['tokens'], entry['age'])):
            cell = f'{chr(token)}{age}'.replace(' ', '_')
            line += f'[{cell}]' if i < entry['leave'] else f' {cell} '
        print(f'pass {number:2d}  {line}')


if __name__ == '__main__':
    main()
