# Ouro's shape, but small (arXiv 2510.25741): all layers loop, four times in training,
# without injection. The rest is in its class (zoo/ouro.py): norms on the branches, a gated MLP, a
# head of its own and an exit gate. This is stage I of its training, and config/ouro_gate.py is
# stage II. Stage I works alone or on top of another config; stage II works alone, after it:
#   python train.py config/ouro.py
#   python train.py config/ouro_gate.py
model_class = 'zoo.ouro:Ouro'
out_dir = 'out-ouro-small'
groups = 'all'
injection = 'none'                      # x^(0) is the embedding
mean_recurrence = 4
loop_draw = 'fixed'
bptt_k = 64                             # gradients through all loops
pos = 'rotary'
keep_iters = []
