# Train on running arithmetic (tasks.py), which needs many loop steps. Two CPU cores are enough.
#   python train.py config/calc.py && python sample.py --out_dir=out-calc
dataset = 'calc'
out_dir = 'out-calc'
pos = 'rotary'                  # learned positions relearn "the token before" at each place
rope_base = 100.0
block_size = 24
n_layer, n_head, n_embd = 3, 2, 64
groups = [[1]]
mean_recurrence = 8
bptt_k = 8
batch_size = 64
max_iters = 700
eval_interval = 200
eval_windows = 512
eval_loops = [1, 2, 4, 8, 16, 32]
keep_iters = [0, 100, 300]
