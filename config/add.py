# Additive injection: x + e in place of the adapter (Geiping 3.2: as good for smaller models). Each
# group has 2 C^2 fewer parameters and a cheaper step. On top of any config:
#   python train.py config/add.py                       the small default
#   python train.py config/groups.py config/add.py      the paper's model
out_dir = 'out-add'
injection = 'add'
