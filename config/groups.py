# The paper's model (sec. 2, App. B): 12 layers, groups 4 / 5-6 / 7, r = 12, FineWeb. For one GPU:
#   python data.py fineweb && python train.py config/groups.py
# A training pass costs 8 + 4 * 13 = 60 block evaluations on average where '--groups=[]' costs 12.
dataset = 'fineweb'
out_dir = 'out-groups'
block_size = 512
n_layer, n_head, n_embd = 12, 12, 768
groups = [[4], [5, 6], [7]]     # paper silent: counted from 0
injection = 'concat'            # differs from the paper: starts as x + e; theirs is concat_random
mean_recurrence = 12
bptt_k = 8
batch_size = 10                 # x 512 tokens = 307M tokens in 60k iterations
max_iters = 60000
# differs from the paper, which has nanoGPT's AdamW, at 6e-4: with that, and with so few tokens in
# an iteration, it learned only how frequent the tokens are (results/gpu.md)
optimizer = 'muon'
learning_rate = 1e-3            # with nanoGPT's warm-up and decay to a tenth
warmup_iters = 2000
eval_interval = 1000            # each saves 1.2 GB, with the optimizer's state
eval_loops = [1, 4, 12, 30]
log_interval = 10
keep_iters = [0, 100, 300, 1000, 3000, 10000, 20000, 30000, 40000, 50000]
