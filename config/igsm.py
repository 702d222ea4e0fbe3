# Equations in any order, one variable asked at the end (tasks.py). On top of config/calc.py:
#   python train.py config/calc.py config/igsm.py
dataset = 'igsm'
out_dir = 'out-igsm'
block_size = 40
n_layer = 4
groups = [[1, 2]]
max_iters = 1400
