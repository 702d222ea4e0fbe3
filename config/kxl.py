# k x L (Saunshi et al., arXiv 2502.17416): k layers, which loop L times together, k = 2 and L = 3
# here. No input in the loop, so x^(0) is e; no norm of the core between the loops, and gradients
# through all of them. It has the weights of two layers and the depth of six.
#   python train.py config/kxl.py
#   python bench.py --out_dir=out-kxl --n_loop=3 '--budgets=[1,2,3]' '--rules=[]' '--decoder=[]'
#   python train.py '--groups=[]' --n_layer=2 --out_dir=out-two-layers   the same weights, no loop
#   python train.py '--groups=[]' --n_layer=6 --out_dir=out-six-layers   the same depth, six layers
out_dir = 'out-kxl'
n_layer = 2
groups = 'all'
injection = 'none'
norm_inside = False
mean_recurrence = 3
loop_draw = 'fixed'             # evaluation loops as often; with an exit rule this is the maximum
bptt_k = 64                     # more than there are loops: gradients through all of them
keep_iters = []
