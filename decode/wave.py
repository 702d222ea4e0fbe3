"""
Decode several tokens at once, each at its own depth.

    python -m decode.wave                    a prompt continued by a wave, pass by pass
    python -m decode.wave --wave=12 --wave_steps=3 --tau=0.03

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

    w        tokens of a pass, at most `width`; the batch has 1 row
    n, m     those of them that have been through a pass; that the rule has a memo of
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
from decode.passes import NewToken

UNDEFINED = math.inf        # the signal of a token that has none yet: no threshold calls it small


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

    def update(self, says, signals, rule):
        """After a pass: what the token predicts now, and the rule's signals, (groups,)."""
        self.says = says
        self.passes += 1
        self.age += 1
        if rule:
            # the rule sees the change from pass to pass: none in the first pass with a new input
            if self.age == 1:
                signals = np.full_like(signals, UNDEFINED)
            self.streak, still = rule.decide(signals, self.streak)
            self.settled = bool(still.all())

    def new_input(self, word):
        """Another input: the token keeps its states and counts passes from 0 again."""
        self.input = word
        self.age = 0
        self.settled = False


@dataclass
class Wave:
    """
    A wave of tokens: a decoder, see passes.py.

    width: tokens of the wave. steps: loop steps of a pass, an int or one for each group. trace: a
    list, to which each pass appends dict(position=of the first token, inputs, tokens, age, leave=
    how many tokens are committed).

    The plan's rule is applied to the change of a token's states from one pass to the next; the
    token keeps its last states, whatever rule.keep says. The front token is committed after
    max_passes with an unchanged input at the latest: the plan's loop budget over `steps`, rounded
    up. steps_used counts all steps since a token joined the wave.
    """
    width: int
    steps: int | list = 1
    trace: list | None = None
    policy, name = 'latest', 'wave'

    def start(self, model, plan):
        """ValueError for a width or steps below 1, and a model or rule that can_wave excludes."""
        if self.width < 1:
            raise ValueError(f'a wave needs a width of at least 1, not {self.width}')
        if not can_wave(model, plan.rule):
            raise ValueError('a wave needs a model with recurrent groups that read their input in '
                             "every step, without step_noise, and a rule that reads a token's last "
                             'states alone: choose another, or give wave=0')
        self.counts = model.loop_counts(self.steps)      # of a pass, by group
        self.max_passes = max(math.ceil(n / k) for n, k in zip(plan.counts, self.counts))
        self.rule = plan.rule
        self.read = model.reader(plan.rule) if plan.rule else None

    def begin(self, token, outputs):
        """Start with a context's first new token, from noise; outputs have the shape of states."""
        self.queue = [Token(token.item())]      # the tokens of the next pass, and maybe later ones
        self.inputs = token                     # their inputs on the device, (1, w)
        self.steps_used = torch.tensor([self.counts], device=token.device)      # of a pass
        # of each group the states (1, n, C) of the first n tokens, which have been through a pass,
        # and what the rule remembers of the first m of them, (1, m, any)
        self.states = [x[:, :0] for x in outputs]
        self.memos = [None] * len(outputs)

    def next_tokens(self, model, plan, rows, most):
        """One pass -> the tokens that it commits, maybe none."""
        now = self.queue[:min(self.width, rows.block_size - rows.position, most)]
        says, signals = self.run_pass(model, plan, rows, len(now))
        for token, number, of_token in zip(now, rows.numbers(says), signals):
            token.update(number, of_token, self.rule)
        front = now[0]
        if front.age >= self.max_passes:        # out of budget
            front.settled = True
        trace = dict(position=rows.idx.shape[1] - 1, inputs=[token.input for token in now],
                     tokens=[token.says for token in now], age=[token.age for token in now])

        # what a token predicts is the next one's input; the last prediction joins the queue
        for left, token in pairwise(now):
            if token.input != left.says:
                token.new_input(left.says)
        self.queue = [*now, Token(now[-1].says)]
        self.inputs = torch.cat((self.inputs[:, :1], says), dim=1)

        # commit the leading tokens that have settled
        settled = takewhile(lambda token: token.settled, now)
        committed = [NewToken(says[:, i:i + 1], token.passes * self.steps_used, [token.says])
                     for i, token in enumerate(settled)]
        self.drop(len(committed))
        if self.trace is not None:
            self.trace.append(trace | dict(leave=len(committed)))
        return committed

    def drop(self, n):
        """The first n tokens leave the wave."""
        self.queue = self.queue[n:]
        self.inputs = self.inputs[:, n:]
        self.states = [x[:, n:] for x in self.states]
        self.memos = [None if memo is None else memo[:, n:] for memo in self.memos]

    def run_pass(self, model, plan, rows, w):
        """
        A pass of the first w tokens, which goes on from their last states -> what they predict
        (1, w), and the rule's signals (w, groups).
        """
        device = self.inputs.device
        n = self.states[0].shape[1]
        # tokens that have just joined start from noise
        warm = [F.pad(x, (0, 0, 0, w - n)) for x in self.states]
        warm_tokens = torch.arange(w, device=device) < n
        # the rule is applied between passes, so there is none within the pass
        plan = replace(plan, counts=self.counts, rule=None, width=self.width, warm=warm,
                       warm_tokens=warm_tokens, span=Span(rows.position, w, device))
        x, results = model.hidden(self.inputs[:, :w], plan)
        says = rows.draw(model.lm_head(x))
        return says, self.pass_signals([result['x'] for result in results])

    def pass_signals(self, states):
        """
        Store the states after a pass, (1, w, C) of each group -> the rule's signals (w, groups).
        """
        before, self.states = self.states, states
        n, w = before[0].shape[1], states[0].shape[1]
        signals = np.full((w, len(states)), UNDEFINED)
        if n and self.rule:
            by_group = [self.group_signal(g, x0, x1[:, :n])
                        for g, (x0, x1) in enumerate(zip(before, states))]
            signals[:n] = torch.stack(by_group, dim=1).numpy(force=True)    # waits for the device
        return signals

    def group_signal(self, g, x0, x1):
        """The rule's signal in group g (n,), from states (1, n, C) before and after a pass."""
        # the first m tokens have a memo. The others have none: they are in their second pass, or
        # the rule keeps no memos
        memo = self.memos[g]
        m = 0 if memo is None else memo.shape[1]
        parts = []
        if m > 0:
            parts.append(self.signal_and_memo(x0[:, :m], x1[:, :m], memo))
        if m < x0.shape[1]:
            parts.append(self.signal_and_memo(x0[:, m:], x1[:, m:], None))
        values, memos = zip(*parts)
        self.memos[g] = None if memos[0] is None else torch.cat(memos, dim=1)
        return torch.cat(values)

    def signal_and_memo(self, x0, x1, memo):
        """rule.signal for one row: its value (n,), and its memo (1, n, any)."""
        value, memo = self.rule.signal(x0, x1, memo, self.read)
        if value is None:
            return x0.new_full((x0.shape[1],), UNDEFINED), memo
        return value[0], memo


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


def readable(number):
    """The byte of this number as a letter, or a blank if it has none."""
    return chr(number) if chr(number).isprintable() else ' '


def draw_wave(passes, start, text_of, steps, path):
    """
    A GIF of a wave, pass by pass: what each token predicts, coloured by its loop steps since its
    input last changed. Framed: committed. Underlined: it predicted something else before.

    passes: see Wave, trace. start: the prompt. text_of[token]. steps: loop steps of a pass.
    """
    from common import plots
    first = passes[0]['position']
    start += text_of[passes[0]['inputs'][0]]        # known before the first pass
    rows = []
    said = {}                                       # position: the last prediction
    for n, of_pass in enumerate(passes, start=1):
        for i, (token, age) in enumerate(zip(of_pass['tokens'], of_pass['age'])):
            at = of_pass['position'] - first + i
            rows.append({'pass': n, 'position': at, 'text': text_of[token],
                         'loop_steps': age * steps, 'committed': int(i < of_pass['leave']),
                         'revised': int(said.get(at, token) != token)})
            said[at] = token
    end = max(row['position'] for row in rows)
    most = max(row['loop_steps'] for row in rows)

    def draw(figure, n):
        """The first n passes."""
        ax = figure.subplots()
        shown = [row for row in rows if row['pass'] <= n]
        cells = ax.scatter(
            [row['position'] for row in shown], [row['pass'] for row in shown], s=180, marker='s',
            c=[row['loop_steps'] for row in shown], norm='log', vmin=1, vmax=most, lw=2,
            cmap='viridis_r', edgecolors=[plots.COLOURS[1] if row['committed'] else 'none'
                                          for row in shown])
        for row in shown:
            label = row['text'].replace(' ', '·') + ('\u0332' if row['revised'] else '')
            light = row['loop_steps'] <= most ** 0.5    # the lighter half of a logarithmic scale
            ax.annotate(label, (row['position'], row['pass']), parse_math=False, ha='center',
                        va='center', color='black' if light else 'white')
        figure.colorbar(cells, label='loop steps', shrink=0.5, ticks=[1, 2, 4, 8, 16, 32],
                        format='{x:.0f}').minorticks_off()
        ax.set(xlim=(-1, end + 1), ylim=(len(passes) + 1, 0), xlabel='position in the text',
               ylabel='pass through the model')
        text = ''.join(row['text'] for row in shown if row['committed'])
        ax.set_title(f'framed: committed. "{start}{text}"', parse_math=False)
        ax.spines[:].set_visible(False)

    plots.movie((8, 7), draw, range(1, len(passes) + 1), rows, path)


def main():
    from common.checkpoint import open_run
    from common.colours import paint, print_legend
    from exits import make_exit
    if wave < 1:
        raise ValueError(f'--wave must be at least 1, not {wave}')
    if animate and max_new_tokens < 2:
        raise ValueError('--animate shows the passes of a wave, and for one token there are none: '
                         'give --max_new_tokens of at least 2')
    model, *_, results = open_run('pretrained/text')
    prompt = torch.tensor([[*start.encode()]])
    rule = make_exit(exit, tau, hits) if exit else None
    trace = []
    text, steps_used = model.generate(prompt, max_new_tokens, temperature=0, n_loop=n_loop,
                                      exit=rule, wave=wave, wave_steps=wave_steps, trace=trace)

    print('pass   what each token of the wave predicts; *: certain, so the token is committed')
    for number, one_pass in enumerate(trace, start=1):
        line = '  ' * (one_pass['position'] - trace[0]['position'])
        for i, (token, age) in enumerate(zip(one_pass['tokens'], one_pass['age'])):
            mark = '*' if i < one_pass['leave'] else ' '
            line += paint(readable(token) + mark, age * wave_steps)
        print(f'{number:4d}   {line}')
    print_legend()

    fixed, _ = model.generate(prompt, max_new_tokens, temperature=0, n_loop=n_loop, cache='latest')
    same = (text == fixed)[0, prompt.shape[1]:].sum().item()
    print(f'{max_new_tokens} tokens in {len(trace)} passes, {steps_used.float().mean():.1f} loop '
          f'steps per token; {same} tokens are those of {n_loop} fixed loops')

    if animate:
        draw_wave(trace, start, [readable(i) for i in range(256)], wave_steps,
                  f'{results}/figures/wave.gif')


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
