# Train on Sudoku (zoo/sudoku.py): which digit stands in each cell? A quarter of an hour of a core.
#   python train.py config/sudoku.py
#   python sample.py --out_dir=out-sudoku --num_starts=8
#   python sample.py --out_dir=out-sudoku --start=FILE:board.txt    one from a newspaper
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
max_iters = 8000
min_lr = 0.0
eval_interval = 4000
eval_windows = 20
eval_loops = [32, 128]
keep_iters = []
