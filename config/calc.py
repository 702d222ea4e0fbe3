# Train on running arithmetic (tasks.py), which needs many loop steps. One CPU core is enough.
#   python train.py config/calc.py && python sample.py --out_dir=out-calc --exit accel --length=192
# It learns from problems of 48 tokens with nine loops on average, and solves those of 192 tokens
# and more with as many loops as they are deep (results/depth.md).
dataset = 'calc'
out_dir = 'out-calc'
pos = 'rotary'                  # learned positions relearn "the token before" at each place
rope_base = 100.0
window = 4                      # with full attention longer problems than these meet new distances
block_size = 48
n_layer, n_head, n_embd = 3, 2, 64
groups = [[1]]
mean_recurrence = 8
bptt_k = 8
batch_size = 32
max_iters = 1400                # after 700, one token in some hundreds is wrong, and errors add up
eval_interval = 350
eval_windows = 512
eval_loops = [1, 2, 4, 8, 16, 32]
keep_iters = [0, 100, 300, 700]
