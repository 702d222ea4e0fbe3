# Ouro's shape at this size (arXiv 2510.25741): the whole stack loops, four times in training; no
# injection, norms on the branches, a gated MLP, rotary positions, a head of its own, an exit gate.
# With its own two stages of training, on this or on top of another config:
#   python -m zoo.ouro --stage=1 config/ouro.py
#   python -m zoo.ouro --stage=2 --init_from=out-ouro/ckpt.pt --max_iters=300
out_dir = 'out-ouro'
groups = [list(range(n_layer))]
injection = 'none'                      # x^(0) is the embedding
mean_recurrence = 3                     # `fixed` adds one
loop_draw = 'fixed'
bptt_k = 64                             # all of them
pos = 'rotary'
sandwich = 'branch'
mlp = 'gated'
mlp_width = 8 * n_embd // 3             # as many weights as the plain MLP has
scale_embedding = False
last_norm = False                       # the loop's norm is the last
tied = False
gate = True
keep_iters = []
