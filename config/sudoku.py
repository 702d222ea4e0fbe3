# Train on Sudoku (zoo/sudoku.py).
model_class = 'zoo.sudoku:Sudoku'
dataset = 'sudoku'
out_dir = 'out-sudoku'
pos = 'none'
block_size = 729
n_layer, n_head, n_embd = 2, 4, 32
groups = [[0]]
mean_recurrence = 20
bptt_k = 8
batch_size = 2
max_iters = 10000
min_lr = 0.0
eval_interval = 5000
eval_windows = 50
eval_loops = [32, 128]
keep_iters = []
