# Train on running products in the group S3 (tasks.py).
#   python train.py config/calc.py config/s3.py
dataset = 'group'
out_dir = 'out-s3'
