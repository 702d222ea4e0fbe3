# Additive injection, x + e in place of the adapter (Geiping 3.2: as good for smaller models): C x 2C parameters less a group, and
# the cheapest step. As an experiment on any run:
#   python train.py config/add.py                       the small default
#   python train.py config/groups.py config/add.py      the paper's model
out_dir = 'out-add'
injection = 'add'
