# Geiping's shape, but small (Geiping 3.2, 4): two layers, a core of four looped ones, two layers;
# r = 32, a random adapter. A pass costs 4 + 4 * 33 = 136 block evaluations on average, and 8 of 33
# loops have gradients. For one GPU:
#   python train.py config/groups.py config/huginn.py
out_dir = 'out-huginn-small'
n_layer = 8
groups = [[2, 3, 4, 5]]
mean_recurrence = 32
injection = 'concat_random'
eval_loops = [1, 4, 16, 32, 64]
