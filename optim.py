"""
What moves the weights: AdamW, Muon, and weights averaged over training.

Not run by itself: train.py calls it. Muon: Jordan et al. 2024, by torch. Averages: Geiping 4.4.
"""
import torch

OPTIMIZERS = ('adamw', 'muon')


def make_optimizers(model, kind, lr, weight_decay, betas):
    """
    {name of their state in a checkpoint: optimizer}, all at the same learning rate.

    AdamW, with decay on matrices (embeddings too) and not on norms and biases. kind 'muon': Muon
    for the matrices of blocks and adapters, its steps as large as AdamW's, and AdamW for the rest.
    """
    decayed, free, inner = [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            free.append(p)
        elif kind == 'muon' and name.startswith('h.'):
            inner.append(p)
        else:
            decayed.append(p)
    groups = [dict(params=decayed, weight_decay=weight_decay), dict(params=free, weight_decay=0.0)]
    fused = next(model.parameters()).is_cuda
    optimizers = dict(optimizer=torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused))
    if inner:
        optimizers['muon'] = torch.optim.Muon(inner, lr=lr, weight_decay=weight_decay,
                                              adjust_lr_fn='match_rms_adamw')
    return optimizers


@torch.no_grad()
def move_average(averaged, model, decay, it):
    """Move the averaged weights (name: tensor); faster at first, when the raw ones are no good."""
    share = 1 - min(decay, (it + 1) / (it + 10))
    torch._foreach_lerp_([*averaged.values()], [*model.parameters()], share)
