# The paper's recipe at the default size: AdamW, r = 12; gradients through the last 8 loop steps, as
# in Geiping. Differs from the paper: the adapter starts as x + e (theirs is concat_random).
#   python train.py config/recipe.py        a quarter of an hour on a quiet core
out_dir = 'out-recipe'
optimizer = 'adamw'
learning_rate = 2e-3            # nanoGPT's 6e-4 is for larger models
mean_recurrence = 12
bptt_k = 8
