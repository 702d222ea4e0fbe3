# The paper's model without loops, for comparison: 12 block evaluations per pass. For one GPU:
#   python train.py config/groups.py config/gpt2.py
out_dir = 'out-gpt2'
groups = []
