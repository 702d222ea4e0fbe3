# Train on p-hop induction (tasks.py): follow pointers back through a row of letters.
#   python train.py config/calc.py config/hop.py
dataset = 'hop'
out_dir = 'out-hop'
window = None                   # a hop may lead far back
block_size = 40
batch_size = 64
max_iters = 1500
