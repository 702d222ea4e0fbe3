# Stage II of an Ouro (arXiv 2510.25741), after config/ouro.py: it trains the exit gate alone.
#   python train.py config/ouro_gate.py
model_class = 'zoo.ouro:OuroGate'
init_from = 'out-ouro-small/ckpt.pt'
out_dir = 'out-ouro-small-2'
loop_draw = 'fixed'
optimizer = 'adamw'                     # muon is for the matrices of blocks, which rest
max_iters = 300
keep_iters = []
