# Ouro's shape, but small (arXiv 2510.25741): all layers loop, four times in training,
# without injection. The rest is in its class (zoo/ouro.py): norms on the branches, a gated MLP, a
# head of its own and an exit gate. To train it in its two stages, alone or on top of a config:
#   python -m zoo.ouro --stage=1 config/ouro.py
#   python -m zoo.ouro --stage=2 --init_from=out-ouro/ckpt.pt --max_iters=300
model = 'zoo.ouro:Ouro'
out_dir = 'out-ouro'
groups = [list(range(n_layer))]
injection = 'none'                      # x^(0) is the embedding
mean_recurrence = 3                     # loop_draw 'fixed' loops r + 1 times
loop_draw = 'fixed'
bptt_k = 64                             # gradients through all loops
pos = 'rotary'
keep_iters = []
