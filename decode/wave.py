"""
Decode several tokens at once, each at its own depth.

    python -m decode.wave                    a prompt continued by a wave, pass by pass
    python waves.py --wave=12 --wave_steps=3 --tau=0.03

An exit rule says when a token is certain, but the tokens after it can start before that. So a wave
of tokens goes through the whole model side by side, pass by pass: all layers and the head, with
`steps` loop steps in every group. Each token continues from its own last states, and what it
predicts is the input of the next token. Passes of a real wave (positions across; for each token
what it predicts, and the passes since its input last changed):

    column     1    2    3    4    5    6    7    8    9    10   11
    pass 12   [t5]  e4   _3   o2   o1   _1
    pass 13        [e5]  _4   o3   f1   d2   t1
    pass 14             [_5]  o4   f2   _1   e1   h1
    pass 15                  [o5]  f3   _2   t1   x1   a1
    pass 16                        f4   _3   t2   h1   p1   m1
    pass 17                       [f5]  _4   t3   h2   e1   e1   _1

In brackets: the prediction is committed and its column leaves the wave, because the rule has
triggered in every group and its input is certain. In each pass a token joins at the end, up to
`width`. In pass 13 column 5 turns from o to f, so in pass 14 column 6 has a new input: it keeps its
states, and counts from 1 again (its _1; _ is a space).

Geiping et al. 2025b (arXiv 2510.14961) describe this for one recurrent core. The cache policy is
`latest`: each pass overwrites the keys and values of the wave.

    w        tokens of the wave, at most `width`; the batch has 1 row
    age      passes of a token since its input last changed; passes: since it joined
    steps    loop steps of each group in a pass
"""
import math
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np
import torch
from torch.nn import functional as F

from cache import Span


def can_wave(model, rule=None):
    """
    Can this model be decoded by waves, with this rule? Inputs change while a wave loops, so its
    loop steps must read their input, and there must be no step_noise. A rule must work on a token's
    own states of the last two or three passes.
    """
    rule_fits = rule is None or rule.reads == 'readout' and not rule.by_row
    reads_e = model.groups and all(group.adapter.reads_e for group in model.groups)
    return bool(reads_e) and not model.config.step_noise and rule_fits


@dataclass
class Token:
    """A token of a wave, and what is known of it after a pass."""
    input: int
    passes: int = 0             # since it joined
    age: int = 0                # passes since its input last changed
    streak: int | np.ndarray = 0        # small signals in a row, of each group
    settled: bool = False
    says: int | None = None     # what it predicts


class Wave:
    """
    A wave of tokens: a way to make the next tokens, see passes.py.

    plan: a loops.Plan, whose rule is applied to the change of a token's states from one pass to the
    next; the token keeps its last states, whatever rule.keep says. The front token is committed
    after max_passes with an unchanged input at the latest: the plan's loop budget over `steps`,
    rounded up. steps_used counts all steps since a token joined the wave.
    width: tokens of the wave. steps: loop steps of a pass, an int or one for each group.
    trace: a list, to which each pass appends dict(position=of the first token, inputs, tokens, age,
    leave=how many tokens are committed).

    ValueError for a width or steps below 1, and for a model or rule that can_wave excludes.
    """
    cache, name = 'latest', 'wave'

    def __init__(self, model, plan, width, steps, trace=None):
        if width < 1:
            raise ValueError(f'a wave needs a width of at least 1, not {width}')
        if not can_wave(model, plan.exit):
            raise ValueError('a wave needs a model with recurrent groups that read their input in '
                             "every step, without step_noise, and a rule that reads a token's last "
                             'states alone: choose another, or give wave=0')
        self.rule, self.read = plan.exit, plan.exit and model.reader(plan.exit)
        self.steps = model.loop_counts(steps, knob='wave_steps')
        self.width, self.trace = width, trace
        self.max_passes = max(math.ceil(n / k) for n, k in zip(plan.counts, self.steps))

    def begin(self, token, states):
        """Start with a window's first new token, from noise; of `states` only the shape is used."""
        self.tokens, self.idx = [Token(token.item())], token        # on the device, (1, w)
        self.steps_used = torch.tensor([self.steps], device=token.device)       # of a pass
        # of each group the states (1, w, C), and what the rule remembers of them (1, m, any)
        self.states, self.memos = [x[:, :0] for x in states], [None] * len(states)

    def next_tokens(self, model, plan, rows, most):
        """One pass -> the tokens that it commits, maybe none."""
        wave = self.tokens[:min(self.width, rows.block_size - rows.position, most)]
        w, known = len(wave), self.states[0].shape[1]
        # NaN: a token that has just joined starts from noise. The rule is applied below, between
        # passes
        plan = replace(plan, counts=self.steps, exit=None, width=self.width,
                       warm=[F.pad(x, (0, 0, 0, w - known), value=math.nan) for x in self.states],
                       span=Span(rows.position, w, self.idx.device))
        x, found = model.hidden(self.idx[:, :w], plan)
        says = rows.draw(model.lm_head(x))                                      # (1, w)
        signals = self.signals([one['x'] for one in found])

        # which tokens have settled?
        for token, said, value in zip(wave, rows.numbers(says), signals):
            token.says, token.passes, token.age = said, token.passes + 1, token.age + 1
            # the rule sees the change from pass to pass: none in the first pass with a new input
            if self.rule:
                token.streak, exits = self.rule.decide(value if token.age > 1 else None,
                                                       token.streak)
                token.settled = bool(np.all(exits))
        wave[0].settled |= wave[0].age >= self.max_passes       # out of budget
        seen = dict(position=rows.idx.shape[1] - 1, inputs=[token.input for token in wave],
                    tokens=[token.says for token in wave], age=[token.age for token in wave])

        # what a token predicts is the next one's input; the last prediction joins the wave
        for left, token in pairwise(wave):
            if token.input != left.says:
                token.input, token.age, token.settled = left.says, 0, False
        self.tokens = [*wave, Token(wave[-1].says)]
        # commit the leading tokens that have settled
        made, settled = [], takewhile(lambda token: token.settled, wave)
        for token, said in zip(settled, says.split(1, dim=1)):
            made.append((said, token.passes * self.steps_used, [token.says]))
        leave = len(made)
        self.tokens = self.tokens[leave:]
        self.idx = torch.cat((self.idx[:, :1], says), dim=1)[:, leave:]
        self.states = [x[:, leave:] for x in self.states]
        self.memos = [None if memo is None else memo[:, leave:] for memo in self.memos]
        if self.trace is not None:
            self.trace.append(seen | dict(leave=leave))
        return made

    def signals(self, states):
        """
        Store the states after a pass, (1, w, C) of each group -> the rule's signals (w, groups),
        infinite while they are undefined.
        """
        before, self.states = self.states, states
        value = np.full((states[0].shape[1], len(states)), np.inf)
        n = before[0].shape[1]
        if n and self.rule:
            found = [self.signal(g, x0, x1[:, :n])
                     for g, (x0, x1) in enumerate(zip(before, states))]
            value[:n] = torch.stack(found, dim=1).numpy(force=True)     # waits for the device, once
        return value

    def signal(self, g, x0, x1):
        """The rule's signal in group g (n,), from states (1, n, C) before and after a pass."""
        # tokens 0 ... m - 1 have a memo; m ... n - 1 none: second pass, or a rule without memos
        known = self.memos[g]
        n, m = x0.shape[1], 0 if known is None else known.shape[1]
        values, memos = [], []
        for start, end, memo in (0, m, known), (m, n, None):
            if start < end:
                part = slice(start, end)
                found, new = self.rule.signal(x0[:, part], x1[:, part], memo, self.read)
                values.append(x0.new_full((end - start,), np.inf) if found is None else found[0])
                memos.append(new)
        self.memos[g] = None if memos[0] is None else torch.cat(memos, dim=1)
        return torch.cat(values)


# the demonstration --------------------------------------------------------------------------------

start = 'The method returns '
max_new_tokens = 24
wave = 8                    # tokens at once
wave_steps = 1              # loop steps of a pass
exit: str | None = 'norm_rel'   # the rule that commits tokens; None = n_loop steps for each
tau: float | None = 0.01    # its threshold
hits: int | None = None     # small values in a row; None = the rule's own
n_loop = 30                 # loop steps until the wave's first token is committed at the latest
animate = False             # also a GIF: out/text/figures/wave.gif


def main():
    from common import plots
    from common.checkpoint import open_run
    from common.colours import paint, print_legend
    from decode import stream
    from exits import make_exit
    if wave < 1:
        raise ValueError(f'--wave must be at least 1, not {wave}')
    model, *_, results = open_run('pretrained/text')
    prompt = torch.tensor([[*start.encode()]])
    rule, trace = make_exit(exit, tau, hits) if exit else None, []
    tokens, steps = zip(*stream(model, prompt, max_new_tokens, 0, n_loop=n_loop, exit=rule,
                                wave=wave, wave_steps=wave_steps, trace=trace))
    if animate and not trace:
        raise ValueError('--animate shows the passes of a wave, and there are none: give '
                         '--max_new_tokens of at least 2')

    print('pass   what each token of the wave predicts; *: certain, so the token is committed')
    for n, one in enumerate(trace, start=1):
        line = '  ' * (one['position'] - trace[0]['position'])
        for i, (token, age) in enumerate(zip(one['tokens'], one['age'])):
            shown = chr(token) if chr(token).isprintable() else ' '
            line += paint(f"{shown}{'*' if i < one['leave'] else ' '}", age * wave_steps)
        print(f'{n:4d}   {line}')
    print_legend()

    full, _ = zip(*stream(model, prompt, max_new_tokens, 0, n_loop=n_loop, cache='latest'))
    same = sum(bool(a == b) for a, b in zip(tokens, full))
    print(f'{len(tokens)} tokens in {len(trace)} passes, '
          f'{torch.cat(steps).float().mean():.1f} loop steps a token; {same} tokens are those of '
          f'{n_loop} fixed loops')

    if animate:
        plots.wave(trace, start, [chr(i) if chr(i).isprintable() else ' ' for i in range(256)],
                   wave_steps, f'{results}/figures/wave.gif')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
