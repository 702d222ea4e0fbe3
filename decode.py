"""
Decoding: a prompt in, tokens out, one by one, as drafts that are checked, or as a wave.

    python decode.py                    a prompt continued by a wave, pass by pass

    one_by_one      each token takes its loops, or those of the exit rule
    warm_start      the same, but its loops start from the last states of the token before it
                    (Geiping App. D.6)
    Drafts          guess some tokens with few loops, check them with all of them at once: the text
                    is that of one_by_one (self-speculation, Geiping 5)
    Wave            several tokens at once, each at its own depth (Geiping et al. 2025b, arXiv
                    2510.14961)

One seed is one text: the token at a place is drawn by (seed, place) alone, however it is decoded.

    B, T, V     rows; tokens of a pass; vocab_size
    place       of a token in the whole text; its position is that in the context window
    plan        a loops.Plan: the loop budget, the rule, the noise and the cache of all passes
    decoder     anything called as (model, plan, text, most) -> tokens (B, t), their loop steps
                (B, t, groups): the next t tokens of a Text, at most `most`, maybe none
"""
import math
import os
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from cache import Span, make_cache
from loops import derived_seed, of_groups

# draws --------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)      # drafts and waves draw the token at a place several times
def gumbel(seed, place, V):
    """Noise (V,): argmax(log p + gumbel) is a draw from p (the Gumbel-max trick)."""
    generator = torch.Generator().manual_seed(derived_seed(seed, 'token', place))
    return -torch.empty(V).exponential_(generator=generator).log()


def pick(logits, places, seeds, temperature=1.0, top_k=None):
    """
    Logits (B, T, V) -> tokens (B, T), those at `places` (T,) of rows with these seeds (B,).
    temperature 0: the likeliest. top_k: draw among so many likeliest ones, None = all.
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


class Text:
    """
    Rows of tokens idx (B, n) that are being continued, and how their next tokens are drawn.

    Of a prompt the last block_size tokens are kept. results: what the groups put out in the pass
    over the prompt, later in the last one of warm_start or one_by_one. wave: the Columns of a Wave.
    """

    def __init__(self, idx, block_size, seed=0, temperature=1.0, top_k=None):
        if temperature < 0:
            raise ValueError(f'temperature must be at least 0, not {temperature}')
        if top_k is not None and top_k < 1:
            raise ValueError(f'top_k must be at least 1, not {top_k}')
        self.idx = idx[:, -block_size:]
        self.n_cut = idx.shape[1] - self.idx.shape[1]       # places count these tokens too
        self.block_size = block_size
        self.seeds = [seed + b for b in range(len(idx))]
        self.temperature = temperature
        self.top_k = top_k
        self.results = None
        self.wave = None

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
        """The last token of each row (B, 1), which no pass has read yet."""
        return self.idx[:, -1:]

    @property
    def position(self):
        """Its position in the context window."""
        return self.idx.shape[1] - 1 - self.start

    def draw(self, logits, skip=0):
        """Logits (B, T, V) -> the next tokens (B, T), after `skip` tokens that are not here yet."""
        n = self.n_cut + self.idx.shape[1] + skip
        places = range(n, n + logits.shape[1])
        return pick(logits, places, self.seeds, self.temperature, self.top_k)


# passes -------------------------------------------------------------------------------------------

def run(model, idx, position, plan):
    """A pass over idx (B, T) from this position on -> logits (B, T, V), the groups' results."""
    x, results = model.hidden(idx, replace(plan, span=Span(position, idx.shape[1], idx.device)))
    return model.lm_head(x), results


@torch.no_grad()
def read(model, idx, plan, cache='exact'):
    """
    Given tokens idx (B, T) -> logits (B, T, V), loop steps kept and computed (B, T, groups).

    cache: 'exact', all tokens in one pass. Otherwise they are read one after another, with this
    cache (see cache.slots_of): each reads what earlier ones have kept. As many slots as loop steps
    give what the one pass gives. ValueError for a rule that wakes with another cache than 'exact'.
    """
    T = idx.shape[1]
    width = T
    if cache not in ('exact', 'auto'):
        check_final(plan.rule)
        width = 1
        plan = replace(plan, cache=make_cache(model, plan.counts, cache, T))
    parts = []
    for start in range(0, T, width):
        tokens = idx[:, start:start + width]
        logits, results = run(model, tokens, start, plan)
        parts.append((logits, of_groups(results, 'steps_used', tokens),
                      of_groups(results, 'evals', tokens)))
    return tuple(torch.cat(part, dim=1) for part in zip(*parts))


def check_final(rule):
    """ValueError if an exit is not for good: then whole sequences have to be read in one pass."""
    if rule and rule.wake:
        raise ValueError('tokens can wake only in problems that are read in one pass, with the '
                         'cache exact: leave out --wake')


# decoders -----------------------------------------------------------------------------------------
#
# Drafts and Wave say which cache they need, and `check` is a ValueError if the model or the plan
# does not suit them. What a decoder remembers of a text hangs on the Text, so that one object
# serves many of them.

def one_by_one(model, plan, text, most):
    """One token, from noise."""
    logits, text.results = run(model, text.last, text.position, plan)
    return text.draw(logits), of_groups(text.results, 'steps_used', text.last)


def warm_start(model, plan, text, most):
    """One token, from what the groups put out for the token before it."""
    if not reads_input(model):
        raise ValueError('a warm start begins with the states of another token, so it needs a '
                         'model whose loop steps read their input')
    warm = [group.output(result['x'][:, -1:]) for group, result in zip(model.groups, text.results)]
    return one_by_one(model, replace(plan, warm=warm), text, most)


def reads_input(model):
    """Does each loop step read the input of its group?"""
    return all(group.adapter.reads_e for group in model.groups)


class Drafts:
    """
    Draft up to `tokens` tokens with `loops` loops, then run them side by side with all loops, and
    keep those that agree. Both use the same draws, so that the text is that of one_by_one.
    """
    cache = 'exact'

    def __init__(self, loops, tokens=4):
        self.loops = loops
        self.tokens = tokens

    def check(self, model, plan):
        if not 1 <= self.loops < min(plan.counts, default=1):
            raise ValueError(f'draft_loops must lie between 1 and n_loop - 1, not {self.loops}')

    def __call__(self, model, plan, text, most):
        # the window and `most` need room for the token that the check adds
        position = text.position
        room = min(self.tokens, text.block_size - 1 - position, most - 1)
        few_loops = replace(plan, counts=[self.loops] * len(plan.counts), rule=None)
        inputs = text.last                              # last, d1, d2 ...: (1, 1 + room)
        for i in range(room):
            logits, _ = run(model, inputs[:, -1:], position + i, few_loops)
            inputs = torch.cat((inputs, text.draw(logits, skip=i)), dim=1)

        # all loops on all of them, which overwrites the keys and values of the drafts
        logits, results = run(model, inputs, position, plan)
        checked = text.draw(logits)                     # t1, t2, t3 ...: (1, 1 + room)

        # keep t1, t2 ... up to and including the first that differs from its draft. Later drafts
        # leave keys behind the last token; they are overwritten before anything reads them
        agree = (checked[:, :-1] == inputs[:, 1:]).int().cumprod(dim=1)
        kept = 1 + int(agree.sum())                     # waits for the device
        return checked[:, :kept], of_groups(results, 'steps_used', inputs)[:, :kept]


class Wave:
    """
    Up to `width` tokens go through the model side by side, pass by pass: all layers and the head,
    with `steps` loop steps in each group. Each token goes on from its own last states, and what it
    predicts is the input of the next one. The keys and values of the wave are overwritten in each
    pass. Passes of a real wave (positions across; what a token predicts, and the passes since its
    input last changed):

        column     1    2    3    4    5    6    7    8    9    10   11
        pass 12   [t5]  e4   _3   o2   o1   _1
        pass 13        [e5]  _4   o3   f1   d2   t1
        pass 14             [_5]  o4   f2   _1   e1   h1
        pass 15                  [o5]  f3   _2   t1   x1   a1
        pass 16                        f4   _3   t2   h1   p1   m1
        pass 17                       [f5]  _4   t3   h2   e1   e1   _1

    In brackets: the token leaves the wave, because its input is certain, and the plan's rule has
    triggered in every group. (The first token leaves after the plan's loop budget at the latest.)
    In each pass a token joins at the end. In pass 13 column 5 turns from o to f, so in pass 14
    column 6 has a new input: it keeps its states, and counts from 1 again (its _1; _ is a space).

    The rule is applied to the change of a token's states from one pass to the next; the token keeps
    its last states, whatever rule.keep says. Its loop steps are all those since it joined.

    trace: a list, to which each pass appends dict(position=of the first token, inputs, tokens, age,
    leave=how many tokens leave).
    """
    cache = 'latest'
    tau = 0.003             # the threshold of norm_rel at which texts are those of many loops

    def __init__(self, width, steps=1, trace=None):
        self.width = width
        self.steps = steps
        self.trace = trace

    def check(self, model, plan):
        if self.width < 1:
            raise ValueError(f'a wave needs a width of at least 1, not {self.width}')
        # inputs change while a wave loops; and a token knows nothing but its own last states
        looks_at_a_token = plan.rule is None or plan.rule.reads == 'readout'
        if not (model.groups and reads_input(model) and looks_at_a_token):
            raise ValueError('a wave needs a model with recurrent groups that read their input in '
                             'every step, and a rule that reads the states of a token alone')

    def __call__(self, model, plan, text, most):
        if text.wave is None or text.wave.window != text.start:
            text.wave = Columns(text, len(model.groups))
        wave = text.wave
        counts = model.loop_counts(self.steps)

        # a pass, in which a token joins at the end, up to `width`
        n = len(wave.age)
        w = min(n + 1, self.width, text.block_size - text.position, most)
        guesses = torch.tensor([wave.guesses[:w - 1]], dtype=torch.long, device=text.idx.device)
        inputs = torch.cat((text.last, guesses), dim=1)                         # (1, w)
        wave.resize(w)
        warm = None
        known = None
        if n > 0:
            warm = wave.states
            known = torch.arange(w, device=inputs.device) < n   # a token that joins begins in noise
        logits, results = run(model, inputs, text.position, replace(
            plan, counts=counts, rule=None, warm=warm, warm_tokens=known))
        says = text.draw(logits)                                                # (1, w)
        predictions = says[0].tolist()          # waits for the device

        # the leading tokens that are settled leave
        read = model.reader(plan.rule) if plan.rule else None
        wave.after_pass([result['x'] for result in results], plan.rule, read)
        settled = np.zeros(w, dtype=bool)
        if plan.rule:
            settled = (wave.streak >= plan.rule.hits).all(axis=1)
        most_passes = max(math.ceil(budget / steps) for budget, steps in zip(plan.counts, counts))
        settled[0] |= wave.age[0] >= most_passes
        is_new = [False] + [a != b for a, b in zip(predictions, inputs[0, 1:].tolist())]
        leave = 0
        while leave < w and settled[leave] and not is_new[leave]:
            leave += 1
        if self.trace is not None:
            self.trace.append(dict(position=text.n_cut + text.idx.shape[1] - 1,
                                   inputs=inputs[0].tolist(), tokens=predictions,
                                   age=wave.age.tolist(), leave=leave))
        steps_used = torch.tensor(wave.passes[:leave, None] * counts, device=says.device)
        wave.guesses = predictions
        wave.age[is_new] = 0
        wave.drop(leave)
        return says[:, :leave], steps_used[None]


class Columns:
    """The n tokens of a wave, and what is known of each after a pass."""

    def __init__(self, text, n_groups):
        self.window = text.start
        self.guesses = []                               # what each predicts: the next one's input
        self.age = np.zeros(0, dtype=int)               # passes since its input last changed
        self.passes = np.zeros(0, dtype=int)            # passes since it joined
        self.streak = np.zeros((0, n_groups), dtype=int)        # small signals in a row
        self.states = [None] * n_groups                 # of each group, (1, n, C)
        self.memos = [None] * n_groups                  # of the rule in each group, (1, n, any)
        # the pass of a token in which the rule has a signal: changes of state need two passes,
        # changes of changes need three
        self.first_signal = 2

    def resize(self, w):
        """The first w tokens, with new ones at the end."""
        grow = max(0, w - len(self.age))
        self.age = np.pad(self.age[:w], (0, grow))
        self.passes = np.pad(self.passes[:w], (0, grow))
        self.streak = np.pad(self.streak[:w], ((0, grow), (0, 0)))
        self.states = [resized(x, w) for x in self.states]
        self.memos = [resized(memo, w) for memo in self.memos]

    def drop(self, leave):
        """The first tokens leave."""
        self.guesses = self.guesses[leave:]
        self.age = self.age[leave:]
        self.passes = self.passes[leave:]
        self.streak = self.streak[leave:]
        self.states = [x[:, leave:] for x in self.states]
        self.memos = [None if memo is None else memo[:, leave:] for memo in self.memos]

    def after_pass(self, states, rule, read):
        """Count a pass, and the rule's small signals in it. states: of each group, after it."""
        self.age += 1
        self.passes += 1
        if rule:
            for g, (before, after) in enumerate(zip(self.states, states)):
                if before is None:
                    before = torch.zeros_like(after)
                value, self.memos[g] = rule.signal(before, after, self.memos[g], read)
                if value is None:
                    self.first_signal = 3
                else:
                    value = value[0]                                            # (n,)
                self.streak[:, g] = rule.streak(value, self.streak[:, g])
            no_signal = (self.passes < self.first_signal) | (self.age == 1)
            self.streak[no_signal] = 0
        self.states = states


def resized(x, w):
    """x (1, n, any) -> (1, w, any), its first tokens, or with zeros behind them: a new tensor."""
    if x is None:
        return None
    n = min(w, x.shape[1])
    new = x.new_zeros(1, w, *x.shape[2:])
    new[:, :n] = x[:, :n]
    return new


def decoder_of(draft_loops=0, wave=0):
    """Drafts of so many loops, a Wave of so many tokens, or one_by_one."""
    if draft_loops and wave:
        raise ValueError('drafts and a wave are two decoders: give draft_loops or wave')
    if wave:
        return Wave(wave)
    return Drafts(draft_loops) if draft_loops else one_by_one


# compiled passes ----------------------------------------------------------------------------------

class Recorded:
    """
    Passes over one cache as CUDA graphs: a setting is recorded at its second call, and later calls
    run the same kernels for other tokens. There the host needs more time to launch the kernels of a
    pass than the card to run them, and recording takes a fraction of a second, not minutes.

    A graph always reads and writes the memory with which it was recorded: the cache, and the
    tensors of that call. So nobody else may use these.
    """

    def __init__(self, run):
        self.run = run
        self.cache = None
        self.graphs = {}            # {setting: None, or (graph, its inputs, its outputs)}

    def __call__(self, idx, plan):
        if plan.cache is not self.cache:        # another text, or its window has moved
            self.cache = plan.cache
            self.graphs = {}
        inputs = [idx, plan.span.pos, plan.span.mask, *(plan.warm or [])]
        if plan.warm_tokens is not None:
            inputs.append(plan.warm_tokens)
        setting = idx.shape, tuple(plan.counts), len(inputs)
        if setting not in self.graphs:
            self.graphs[setting] = None         # this call initialises the kernels
            return self.run(idx, plan)
        if self.graphs[setting] is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):       # nothing is computed yet
                outputs = self.run(idx, plan)
            self.graphs[setting] = graph, inputs, outputs
        graph, memory, (x, results) = self.graphs[setting]
        for mine, new in zip(memory, inputs):
            mine.copy_(new)
        graph.replay()
        return x.clone(), [result | dict(x=result['x'].clone()) for result in results]


def compile_passes(model, widths=(1, 5), **how):
    """
    Compile the passes over new tokens, if they have one of these widths, from now on: a graph for
    each of them, at any place. On CUDA they are recorded. how: for torch.compile.

    A pass with an exit rule stays as it is, since the host decides after each loop step and
    compiling saves next to nothing; so does reading a prompt.
    """
    eager = model.hidden
    if model.lm_head.weight.is_cuda:
        whole = Recorded(eager)
    else:
        how = how or dict(options={'cpp_wrapper': True})
        whole = torch.compile(eager, dynamic=False, fullgraph=True, **how)

    def hidden(idx, plan):
        T = idx.shape[1]
        if plan.rule or plan.cache is None or plan.span.start == 0 or T not in widths:
            return eager(idx, plan)
        span = Span(plan.span.start, T, idx.device, all_of=model.config.block_size)
        # copies: the strides of a graph's inputs are those that it was compiled with
        warm = plan.warm and [own_copy(x) for x in plan.warm]
        x, results = whole(own_copy(idx), replace(plan, span=span, warm=warm, passes=None))
        if plan.passes is not None:
            plan.passes.append(of_groups(results, 'evals', idx))
        return x, results

    model.hidden = hidden


def own_copy(x):
    """A copy without gaps, in memory that nobody else uses."""
    return x.clone(memory_format=torch.contiguous_format)


def use_one_thread(model):
    """
    Decode a model narrower than 768 with one thread of a CPU from now on. A second thread brings
    nothing, and on busy cores the two wait for each other. OMP_NUM_THREADS, if it is set, decides.
    """
    if model.config.n_embd < 768 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)


# text ---------------------------------------------------------------------------------------------

@torch.no_grad()
def stream(model, idx, n_new, plan, decoder=one_by_one, cache='auto', **draws):
    """
    Continue prompts idx (B, T): yield tokens (B, t) and their loop steps (B, t, groups), n_new
    tokens in all.

    cache: see cache.slots_of; 'auto' is what the decoder needs, or 'exact'. draws: seed (row b has
    seed + b), temperature, top_k, see pick. ValueError for what does not fit together.
    """
    if n_new < 1 or idx.numel() == 0:
        raise ValueError('the prompt and the text must have at least one token each')
    check_final(plan.rule)
    needed = getattr(decoder, 'cache', None)
    if cache == 'auto':
        cache = needed or 'exact'
    if needed:
        name = type(decoder).__name__
        decoder.check(model, plan)
        if cache != needed:
            raise ValueError(f"{name} needs cache='{needed}', not {cache!r}")
        if len(idx) > 1:
            raise ValueError(f'{name} continues one row, not {len(idx)}')
    text = Text(idx, model.config.block_size, **draws)
    window = None
    while n_new > 0:
        if window != text.start:        # at first, and when the context window has moved: read it
            window = text.start
            plan = replace(plan, cache=make_cache(model, plan.counts, cache))
            context = text.idx[:, window:]
            logits, text.results = run(model, context, 0, plan)
            tokens = text.draw(logits[:, -1:])
            steps_used = of_groups(text.results, 'steps_used', context)[:, -1:]
        else:
            tokens, steps_used = decoder(model, plan, text, n_new)
        if tokens.shape[1] > 0:
            yield tokens, steps_used
        text.idx = torch.cat((text.idx, tokens), dim=1)
        n_new -= tokens.shape[1]


# the demonstration --------------------------------------------------------------------------------

def main():
    """A prompt continued by a wave, pass by pass. *: certain, so it leaves the wave; _: a space."""
    from exits import make_exit
    from loops import Plan
    from model import GPT
    model = GPT.load('pretrained/text')
    trace = []
    plan = Plan(model.loop_counts(30), make_exit('norm_rel', 0.01))
    prompt = torch.tensor([[*b'The method returns ']])
    for _ in stream(model, prompt, 24, plan, Wave(8, trace=trace), temperature=0):
        pass
    print(main.__doc__)
    for number, one_pass in enumerate(trace, start=1):
        line = '   ' * (one_pass['position'] - prompt.shape[1])
        for i, token in enumerate(one_pass['tokens']):
            line += chr(token).replace(' ', '_') + ('* ' if i < one_pass['leave'] else '  ')
        print(f'pass {number:2d}  {line}')


if __name__ == '__main__':
    main()
