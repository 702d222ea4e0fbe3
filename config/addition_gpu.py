# Sums of up to 32 numbers, for one GPU. Not run yet. Saunshi et al. 2025 report 99.6% on 32 numbers
# with one layer looped twelve times. On top of config/calc.py:
#   python train.py config/calc.py config/addition_gpu.py
dataset = 'addition:numbers=32'
out_dir = 'out-addition-gpu'
rope_base = 10000.0
block_size = 136
n_head, n_embd = 8, 256
mean_recurrence = 12
batch_size = 512
max_iters = 20000
learning_rate = 2e-3
min_lr = 2e-4
