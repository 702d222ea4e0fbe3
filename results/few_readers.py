# News wakes the next 4 tokens only, however wide the window is. To be given to a program like a
# config file:
#   python bench.py results/few_readers.py --out_dir=RUN --wake=True
from model import CausalSelfAttention


def next_four(self, moved):
    reads = moved.copy()
    for distance in range(1, 5):
        reads[:, distance:] |= moved[:, :-distance]
    return reads


CausalSelfAttention.readers = next_four
