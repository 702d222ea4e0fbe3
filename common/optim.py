"""
Which weights are trained, and the optimizers: AdamW for all of them, or Muon (Jordan et al. 2024)
for the matrices of blocks and adapters.
"""
from collections import defaultdict

import torch

from common.errors import UserError


def freeze_all_but(model, layers):
    """
    Freeze all weights of a model but those of `layers`, such as '12-29', layers counted from 0. A
    group with one of these layers is trained whole. ValueError if no gradient would reach them.
    """
    config = model.config
    first, _, last = layers.partition('-')
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < config.n_layer):
        raise UserError(f'train_only must be FIRST-LAST, two layers from 0 to '
                        f"{config.n_layer - 1}, not '{layers}'")
    first = int(first)
    last = int(last)
    groups = model.groups
    if groups and not groups[-1].adapter.reads_e and last < config.groups[-1][0]:
        raise UserError(f'train_only = {layers}: no gradient passes a group that loops more than '
                        'bptt_k times and does not read its input; add layers behind it')
    model.requires_grad_(False)
    first_block = 0
    for layer in model.h:
        n_blocks = len(layer.core) if layer in groups else 1
        last_block = first_block + n_blocks - 1
        layer.requires_grad_(first_block <= last and first <= last_block)
        first_block = last_block + 1


def make_optimizers(model, kind, lr, weight_decay, betas, dtype=torch.float32):
    """
    {name of their state in a checkpoint: optimizer}, all at the same learning rate.

    AdamW, with decay on matrices (embeddings too) and not on norms and biases. kind 'muon': Muon
    for the matrices of blocks and adapters, its steps as large as AdamW's, and AdamW for the rest.
    dtype: of Muon's products.
    """
    decayed = []        # by AdamW with decay
    undecayed = []      # by AdamW without decay
    by_muon = []        # the matrices of blocks and adapters
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.dim() < 2:
            undecayed.append(p)
        elif kind == 'muon' and name.startswith('h.'):
            by_muon.append(p)
        else:
            decayed.append(p)
    groups = [dict(params=decayed, weight_decay=weight_decay),
              dict(params=undecayed, weight_decay=0.0)]
    optimizers = dict(optimizer=torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True))
    if by_muon:
        optimizers['muon'] = Muon(by_muon, lr, weight_decay, dtype)
    return optimizers


class Muon(torch.optim.Muon):
    """
    torch's Muon with adjust_lr_fn='match_rms_adamw', with a step of our own. torch's step takes one
    matrix at a time and always multiplies in bfloat16. Ours takes all matrices of one shape at
    once, and multiplies in `dtype`.
    """

    def __init__(self, params, lr, weight_decay, dtype=torch.float32):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        group, = self.param_groups
        lr = group['lr']
        momentum = group['momentum']
        alike = defaultdict(list)
        for p in group['params']:
            if p.grad is not None:
                alike[p.shape].append(p)
        for shape, weights in alike.items():
            # the running mean of the gradient, and Nesterov's look ahead
            grads = [p.grad for p in weights]
            for p in weights:
                if p not in self.state:
                    self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            means = [self.state[p]['momentum_buffer'] for p in weights]
            torch._foreach_lerp_(means, grads, 1 - momentum)
            ahead = torch.stack(torch._foreach_lerp(grads, means, momentum))
            step = orthogonal(ahead, *group['ns_coefficients'], group['ns_steps'], self.dtype)
            torch._foreach_mul_(weights, 1 - lr * group['weight_decay'])
            # 0.2: the usual root mean square of an entry of AdamW's step
            torch._foreach_add_(weights, step.unbind(), alpha=-0.2 * lr * max(shape) ** 0.5)


def orthogonal(g, a, b, c, steps, dtype):
    """
    g (N, rows, columns) -> near U V^T of the SVD of each matrix, by Newton-Schulz steps with the
    coefficients a, b and c, its products in this dtype.
    """
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(g.dtype)
