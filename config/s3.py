# Train on running products in the group S3 (tasks.py).
#   python train.py config/calc.py config/s3.py
dataset = 'group'
out_dir = 'out-s3'
block_size = 24
n_layer = 4
groups = [[1, 2]]
max_iters = 400
