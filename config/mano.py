# Prefix expressions modulo 23, asked at the end (tasks.py). On top of config/calc.py:
#   python train.py config/calc.py config/mano.py
dataset = 'mano'
out_dir = 'out-mano'
block_size = 16
n_layer = 4
groups = [[1, 2]]
max_iters = 2800
