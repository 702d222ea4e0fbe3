# Train a cut of a pretrained model, see zoo/etd.py, on problems in its own tokens.
#   python train.py config/cut.py --init_from=out-cut/ckpt.pt --out_dir=out-cut-trained
# results/zoo.md has the commands before it and what came out. There short problems come first, and
# this run is the last of four. One run with --max_iters=400 does about as well.
dataset = 'calc:p=5,reset=0.1'
dtype = 'bfloat16'              # of matrix products: half the time on a CPU that has them
loss_at = 'all'                 # labels of few steps teach early loops while others are still wrong
mean_recurrence = 8
bptt_k = 8
block_size = 48                 # 24 words of two tokens
batch_size = 32
max_iters = 200
learning_rate = 5e-3
warmup_iters = 10
log_interval = 10
eval_interval = 40
eval_windows = 32
eval_loops = [32]
keep_iters = []
