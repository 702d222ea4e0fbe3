# Train on mazes (zoo/maze.py): from each room, which door leads to the goal? Ten minutes of two CPU
# cores.
#   python train.py config/maze.py
#   python sample.py --out_dir=out-maze --exit norm_rel --tau=0.14 --damping=0.3 --length=256
# It learns from mazes of 5 to 9 rooms a side with 13 loops on average, and solves larger ones with
# as many loops as they are deep. With damping all rooms come to rest (results/maze.md).
model_class = 'zoo.maze:Maze'
dataset = 'maze:smallest=5'
out_dir = 'out-maze'
pos = 'none'
block_size = 81                 # a board of 9 x 9 rooms
n_layer, n_head, n_embd = 3, 4, 64
groups = [[1]]
mean_recurrence = 12
bptt_k = 8
batch_size = 25
max_iters = 2400
min_lr = 0.0
eval_interval = 600
eval_windows = 100
eval_loops = [4, 16, 64]
keep_iters = []
