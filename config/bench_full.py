# The whole sweep of bench.py: every exit rule, threshold and cache policy. With --calibrate it
# finds a threshold for everything that sample.py can be asked for.
#   python bench.py config/bench_full.py
rules = ['norm', 'norm_rel', 'kl', 'accel', 'accel_rel', 'confidence', 'random']
taus = [3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
budgets = [1, 2, 3, 4, 6, 8, 12, 16]
drafts = [[1, 6, 4], [2, 8, 4]]
waves = [[8, 1], [8, 2]]
cache = ['exact', 'latest']
wake = [False, True]
