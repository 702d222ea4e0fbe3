# p-hop induction (tasks.py): back through a row of letters, pointer by pointer. On top of calc.py:
#   python train.py config/calc.py config/hop.py
dataset = 'hop'
out_dir = 'out-hop'
block_size = 40
max_iters = 1500
