# Train on sums of several numbers (tasks.py). The model gives all digits of the answer at once.
#   python train.py config/calc.py config/addition.py
dataset = 'addition'
out_dir = 'out-addition'
block_size = 24
n_layer = 4
groups = [[1, 2]]
max_iters = 1800
