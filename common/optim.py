"""The optimizers: AdamW for all weights, or Muon (Jordan et al. 2024) for matrices of blocks."""
import torch


def make_optimizers(model, kind, lr, weight_decay):
    """
    {name of their state in a checkpoint: optimizer}: AdamW, with decay on matrices (embeddings too)
    and not on norms; of kind 'muon', Muon for the matrices of blocks and adapters, its steps as
    large as AdamW's.
    """
    decayed = []
    undecayed = []
    by_muon = []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            undecayed.append(p)
        elif kind == 'muon' and name.startswith('h.'):
            by_muon.append(p)
        else:
            decayed.append(p)
    groups = [dict(params=decayed, weight_decay=weight_decay),
              dict(params=undecayed, weight_decay=0.0)]
    optimizers = dict(adamw=torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True))
    if by_muon:
        optimizers['muon'] = Muon(by_muon, lr=lr, weight_decay=weight_decay)
    return optimizers


class Muon(torch.optim.Muon):
    """
    torch's Muon with adjust_lr_fn='match_rms_adamw'. Its own step multiplies in bfloat16, which
    takes fifteen times as long on a CPU without such instructions.
    """

    @torch.no_grad()
    def step(self):
        group, = self.param_groups
        for p in group['params']:
            if p.grad is None:
                continue
            # the running mean of the gradient, and Nesterov's look ahead
            if p not in self.state:
                self.state[p]['momentum_buffer'] = torch.zeros_like(p)
            mean = self.state[p]['momentum_buffer'].lerp_(p.grad, 1 - group['momentum'])
            ahead = p.grad.lerp(mean, group['momentum'])
            p.mul_(1 - group['lr'] * group['weight_decay'])
            # 0.2: the usual root mean square of an entry of AdamW's step
            p.sub_(orthogonal(ahead), alpha=0.2 * group['lr'] * max(p.shape) ** 0.5)


def orthogonal(g, a=3.4445, b=-4.775, c=2.0315):
    """A matrix -> near U V^T of its SVD, by five Newton-Schulz steps; in bfloat16 on a GPU."""
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = (x / x.norm().clamp(min=1e-7)).to(torch.bfloat16 if g.is_cuda else torch.float32)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(g.dtype)
