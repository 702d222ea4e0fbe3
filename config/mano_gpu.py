# Prefix expressions with up to 24 operators, for one GPU. Not run yet. The size at which Zhu et al.
# 2025 (Ouro) compare looped models with plain ones of twelve layers. On top of config/calc.py:
#   python train.py config/calc.py config/mano_gpu.py
dataset = 'mano:operators=24'
out_dir = 'out-mano-gpu'
block_size = 50
n_layer, n_head, n_embd = 4, 16, 1024
groups = [[1, 2]]
batch_size = 256
max_iters = 80000
learning_rate = 5e-4
min_lr = 5e-5
