# Train on p-hop induction (tasks.py): follow pointers back through a row of letters.
#   python train.py config/calc.py config/hop.py
dataset = 'hop'
out_dir = 'out-hop'
block_size = 40
max_iters = 1500
