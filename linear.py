"""
nn.Linear, and a faster way through it for one token on a CPU.

Not run by itself: model.py builds its layers of it.
"""
import torch
import torch.nn as nn

LARGE = 2 ** 19         # entries from which a weight is read faster with all cores than with one


class Linear(nn.Linear):
    """nn.Linear, but a single row on a CPU goes through oneDNN, which reads it with all cores."""

    def forward(self, x):
        if x.numel() == self.in_features and self.weight.numel() > LARGE and self.plain(x):
            weight, bias = self.weight, self.bias
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, 'none', [], '')
        # weights that are kept in bfloat16: then the product is, as with autocast
        return super().forward(x.bfloat16() if self.weight.dtype == torch.bfloat16 else x)

    def plain(self, x):
        """Nothing but float32 numbers on a CPU: no gradient, no autocast, no compiler."""
        return (x.device.type == 'cpu' and x.dtype == self.weight.dtype == torch.float32
                and not torch.is_grad_enabled() and not torch.is_autocast_enabled('cpu')
                and not torch.compiler.is_compiling())
