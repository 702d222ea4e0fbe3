"""
torch.compile: blocks and loop steps in training, whole passes in decoding.

    python -m decode.compiled       ms per token, eager and compiled: fixed loops, a rule, a wave

A model is compiled by `compile_layers` for training, or by `compile_passes` for decoding, and used
as before. All that the compiler asks for stands here: a graph must not depend on where the new
tokens stand, or each position would be compiled again. So the cache holds the whole window and a
pass reads all of it (AnyPlace), and a short pass is padded to the width of a full one.

On CUDA a pass is not compiled but recorded (RecordedPass). There the host needs more time to launch
the kernels of a pass than the card to run them; a recorded pass is launched at once, and recording
takes a fraction of a second where compiling takes minutes.

    T        new tokens of a pass
    width    tokens of the widest pass: a wave, or drafts and the token before them
"""
import copy
import sys
import time
from dataclasses import replace

import torch
from torch.nn import functional as F

from cache import KeysValues, Span
from loops import of_groups
from model import compile_layers


class AnyPlace(Span):
    """T new tokens from position `start` on, in a cache of `end` tokens, all of which are read."""

    def __init__(self, start, T, end, block_size, device):
        self.start, self.end = start, end
        # padding may lie beyond the window, where the model has no positions
        self.index = torch.arange(start, start + T, device=device)
        self.pos = self.index.clamp(max=block_size - 1)
        self.mask = torch.arange(end, device=device) <= self.index[:, None]

    def put(self, kv, slot, new):
        # with numbers and slices, the compiler would copy the whole cache each time
        row = torch.arange(len(new), device=new.device)[:, None]
        kv[torch.full_like(row, slot), row, self.index] = new


class RecordedPass:
    """
    A pass without a rule as a CUDA graph, which a call runs again for other tokens of the same
    shape. The graph reads and writes always the same memory: `inputs` and `outputs`, and the cache.
    """

    def __init__(self, run, idx, plan):
        self.inputs = [tensor.clone() for tensor in inputs_of(idx, plan)]
        idx, plan = with_inputs(plan, self.inputs)
        self.outputs, self.replay = record(lambda: run(idx, plan))

    def __call__(self, idx, plan):
        for mine, new in zip(self.inputs, inputs_of(idx, plan)):
            mine.copy_(new)
        self.replay()
        x, results = self.outputs
        # copies, since the next call overwrites the outputs
        return x.clone(), [{name: None if value is None else value.clone()
                            for name, value in result.items()} for result in results]


def record(run):
    """Record the kernels that run() launches -> what it returns, and a function to run them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):           # nothing is computed yet
        outputs = run()
    return outputs, graph.replay


def inputs_of(idx, plan):
    """All tensors that differ from pass to pass, but for the cache."""
    span = plan.span
    known = [] if plan.warm_tokens is None else [plan.warm_tokens]
    return [idx, span.index, span.pos, span.mask, *known, *(plan.warm or [])]


def with_inputs(plan, inputs):
    """Tensors as inputs_of lists them -> idx, and the plan with them."""
    span = copy.copy(plan.span)
    idx, span.index, span.pos, span.mask, *rest = inputs
    known = None if plan.warm_tokens is None else rest.pop(0)
    return idx, replace(plan, span=span, warm_tokens=known, warm=rest or None)


class RecordedPasses:
    """The passes over one cache, each of which is recorded at its second run and replayed then."""

    def __init__(self, run):
        self.run = run
        self.memory = []            # of the keys and values, which the graphs read and write
        self.seen = set()           # settings that have run, which has initialised their kernels
        self.recorded = {}          # {setting: its RecordedPass}

    def __call__(self, idx, plan):
        memory = [kv.kv for kv in plan.cache.values() if isinstance(kv, KeysValues)]
        if list(map(id, memory)) != list(map(id, self.memory)):
            # another text, its window has moved, or the cache has got more slots
            self.memory = memory
            self.recorded.clear()
        setting = (tuple(plan.counts), tuple(idx.shape), plan.warm is None,
                   plan.warm_tokens is None)
        if setting not in self.seen:
            self.seen.add(setting)
            return self.run(idx, plan)
        if setting not in self.recorded:
            self.recorded[setting] = RecordedPass(self.run, idx, plan)
        return self.recorded[setting](idx, plan)


def compile_passes(model, width=5, **options):
    """
    Compile the passes of `model` over new tokens from now on: fixed loops and waves as one graph
    for each setting (on CUDA a recorded one), and with an exit rule each layer and loop step.
    Prompts stay eager.

    options: for torch.compile. If compiling fails, a line says so, and decoding goes on without it.
    """
    eager = model.hidden
    block_size = model.config.block_size
    end = block_size + width - 1                # tokens of the cache
    on_card = model.lm_head.weight.is_cuda
    options = dict(fullgraph=True) | (options or dict(options={'cpp_wrapper': not on_card}))

    def not_compiled(idx, plan):
        with torch.compiler.set_stance('force_eager'):
            return eager(idx, plan)

    whole = (RecordedPasses(not_compiled) if on_card
             else torch.compile(eager, dynamic=False, **options))
    compile_layers(model, **options)

    def hidden(idx, plan):
        if plan.cache is None or plan.span.start == 0:                          # a prompt
            return not_compiled(idx, plan)
        grow_cache(plan.cache, end)
        # with an exit rule the layers and steps are compiled, not the whole pass
        run = eager if plan.rule else whole
        T = idx.shape[1]
        # no pass is wider than the context
        pad = 0 if plan.rule else min(plan.width, block_size) - T
        try:
            # a copy: the strides of a graph's input are those that it was compiled with
            padded = F.pad(idx, (0, pad)).clone(memory_format=torch.contiguous_format)
            x, results = run(padded, padded_plan(plan, T, pad, end, block_size))
        except torch._dynamo.exc.TorchDynamoException as error:
            print('compiling failed, so decoding goes on without it:',
                  ' '.join(str(error).split())[:200], file=sys.stderr)
            torch.compiler.set_stance('force_eager')
            return hidden(idx, plan)
        results = [cut(result, T) for result in results]
        if plan.passes is not None:
            plan.passes.append(of_groups(results, 'evals', idx))
        return x[:, :T], results

    model.hidden = hidden
    if not on_card:
        print('compiling: up to a minute for each setting, or seconds if torch has it in its cache',
              file=sys.stderr)


def grow_cache(cache, end):
    """Make room for `end` tokens in the keys and values of every block, if there is less."""
    for kv in cache.values():
        if isinstance(kv, KeysValues) and kv.T_max < end:
            grow = end - kv.T_max
            kv.kv = F.pad(kv.kv, (0, 0) * 3 + (0, grow))        # (slots, B, T_max + grow, 2, H, D)
            kv.T_max = end


def padded_plan(plan, T, pad, end, block_size):
    """
    The plan of T new tokens and `pad` more, at any place in a cache of `end` tokens, and without a
    list to append to.
    """
    span = AnyPlace(plan.span.start, T + pad, end, block_size, plan.span.pos.device)
    plan = replace(plan, span=span, passes=None)
    if plan.warm is None or pad == 0:
        return plan
    return replace(plan, warm=[F.pad(x, (0, 0, 0, pad)) for x in plan.warm],
                   warm_tokens=F.pad(plan.warm_tokens, (0, pad)))


def cut(result, T):
    """The result of a group, see RecurrentGroup.forward, for the first T tokens."""
    return {name: None if value is None else value[:, :T] for name, value in result.items()}


# the demonstration --------------------------------------------------------------------------------

n_loop = 8                  # fixed loops, and the budget of the others
max_new_tokens = 40


def main():
    from common.checkpoint import open_run
    from decode import use_one_thread
    from exits import make_exit
    prompt = torch.tensor([[*b'The method returns ']])
    rule = make_exit('norm_rel', 0.1)
    decodings = {f'{n_loop} fixed loops': {}, 'norm_rel, tau = 0.1': dict(exit=rule),
                 'a wave of 8 x 1': dict(exit=rule, wave=8)}

    def decode(model, decoding):
        """The text, and ms per token."""
        begin = time.perf_counter()
        text, _ = model.generate(prompt, max_new_tokens, temperature=0, n_loop=n_loop,
                                 cache='latest', **decoding)
        return text, 1e3 * (time.perf_counter() - begin) / max_new_tokens

    eager, *_ = open_run('pretrained/text', quiet=True)
    compiled, *_ = open_run('pretrained/text', quiet=True)
    use_one_thread(eager)
    compile_passes(compiled, width=8)
    for label, decoding in decodings.items():
        for model in eager, compiled:
            decode(model, decoding)         # not timed: the first call compiles
        text, eager_ms = decode(eager, decoding)
        compiled_text, compiled_ms = decode(compiled, decoding)
        same = torch.equal(text, compiled_text)
        print(f'{label:20s} eager {eager_ms:5.1f} ms per token, compiled {compiled_ms:5.1f}'
              + ('' if same else ', another text'))


if __name__ == '__main__':
    from common.configurator import configure, run
    configure(globals())
    run(main)
