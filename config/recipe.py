# The paper's recipe at the default size: AdamW, r = 12, gradients through the last 8 loop steps.
#   python train.py config/recipe.py        13 minutes, one Xeon core
out_dir = 'out-recipe'
optimizer = 'adamw'
learning_rate = 2e-3            # tuned at this size; the paper's 12 layers take a smaller one
mean_recurrence = 12
bptt_k = 8
keep_iters = [0, 100, 300, 700]
