# Twelve equations, up to eight on the way to the asked one, for one GPU. Not run yet. On top of
# config/calc.py:
#   python train.py config/calc.py config/igsm_gpu.py
dataset = 'igsm:variables=12,steps=8'
out_dir = 'out-igsm-gpu'
block_size = 72
n_layer, n_head, n_embd = 4, 8, 512
groups = [[1, 2]]
batch_size = 512
max_iters = 40000
learning_rate = 1e-3
min_lr = 1e-4
