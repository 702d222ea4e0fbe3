# The running product in S5 without resets, for one GPU. Not run yet. A depth that does not grow
# with the length cannot do it (Liu et al. 2023). On top of config/calc.py:
#   python train.py config/calc.py config/group_gpu.py
dataset = 'group:name=S5,reset=0'
out_dir = 'out-group-gpu'
block_size = 64
n_layer, n_head, n_embd = 4, 8, 256
groups = [[1, 2]]
mean_recurrence = 32
bptt_k = 64
batch_size = 512
max_iters = 20000
learning_rate = 2e-3
min_lr = 2e-4
