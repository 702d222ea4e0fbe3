"""
Compiled and recorded passes for writing text; sample.py and bench.py load it with --compile.

    python sample.py --compile          drafts; with --decoder also the others

A pass is compiled once for each width, loop count, number of rows and size of the cache, and once
more with warm states. Its place in the text does not matter. On CUDA passes are recorded as CUDA
graphs. A pass with an exit rule stays eager: the host decides after each step, so compiling saves
next to nothing. The pass that reads a prompt stays eager, too.
"""
from dataclasses import replace

import torch

from cache import Span


class Recorded:
    """
    Passes over one cache as CUDA graphs: the host needs more time to launch the kernels of a pass
    than a GPU to run them. A setting is recorded at its second call, and later calls run the same
    kernels for other tokens, in the same memory: the cache, and the tensors of that call, which
    nobody else may use. A text has a new cache in each window, so it is recorded anew there.
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
        setting = idx.shape, tuple(plan.counts), bool(plan.warm)
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
        # the next replay overwrites x, and also e, which no decoder reads; the counts never change
        return x.clone(), [result | dict(x=result['x'].clone()) for result in results]


def compile_passes(model, widths):
    """Replace model.hidden: passes of these widths run compiled."""
    eager = model.hidden
    if model.lm_head.weight.is_cuda:
        whole = Recorded(eager)
    else:
        torch._dynamo.config.recompile_limit = 64       # bench.py has more graphs than the usual 8
        # a token takes a fifth less time than if Python calls the kernels
        whole = torch.compile(eager, dynamic=False, fullgraph=True, options={'cpp_wrapper': True})

    def hidden(idx, plan):
        T = idx.shape[1]
        if plan.rule or plan.cache is None or plan.span.start == 0 or T not in widths:
            return eager(idx, plan)
        T_max = next(iter(plan.cache.values())).T_max       # of all layers
        span = Span(plan.span.start, T, idx.device, all_of=T_max)
        # without gaps, since the strides of text.last grow with the text, and a graph is compiled
        # for its strides; copies, since a recorded graph overwrites its inputs
        idx, *warm = (x.clone(memory_format=torch.contiguous_format)
                      for x in (idx, *(plan.warm or [])))
        return whole(idx, replace(plan, span=span, warm=warm))

    model.hidden = hidden
