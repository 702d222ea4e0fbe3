# Waiting in place of sleeping: a token goes on looping until all earlier tokens are still, whether
# it reads them or not. To be given to a program like a config file:
#   python bench.py results/waiting.py --out_dir=pretrained/calc --wake=True
from model import CausalSelfAttention

CausalSelfAttention.readers = lambda self, moved: moved.cumsum(axis=1) > 0
