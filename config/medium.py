# The paper's layout at a medium scale, meant for two CPU cores and an evening: 12 layers, groups
# 4 / 5-6 / 7 and C = 192, on any folder of .txt files, with a BPE of its own. 113 minutes on one of
# two busy cores.
#   python data.py wiki --path=FOLDER --bpe=4096 && python train.py config/medium.py
dataset = 'wiki'
out_dir = 'out-medium'
block_size = 128
n_layer, n_head, n_embd = 12, 4, 192
groups = [[4], [5, 6], [7]]
mean_recurrence = 6             # differs from the paper: 12, and bptt_k 8, to save time
bptt_k = 4
batch_size = 16
max_iters = 1300
optimizer = 'adamw'
learning_rate = 1e-3
warmup_iters = 200
eval_interval = 500
eval_windows = 60
eval_loops = [1, 2, 4, 8, 16, 32]
keep_iters = [0, 100, 300, 700, 1000]
