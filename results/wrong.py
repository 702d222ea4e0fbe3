"""
In which problems of 96 words the cut of SmolLM2 is wrong after 128 loops, and where it begins.

    python -m results.wrong             reads out-zoo/cut-1, see zoo.sh
"""
import torch

import data
from common.checkpoint import load_checkpoint

if __name__ == '__main__':
    model, checkpoint = load_checkpoint('out-zoo/cut-1/ckpt.pt', length=192)
    _, idx, targets, depth = data.held_out_windows(checkpoint, 16, 'calc:p=5,reset=0.02')
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        guesses = model(idx, n_loop=128)[0].argmax(-1)                          # (16, 192)
    wrong = (guesses != targets) & (targets >= 0)
    for problem in range(len(idx)):
        places = wrong[problem].nonzero().flatten().tolist()
        first = f', the first at word {places[0] // 2}' if places else ''
        print(f'problem {problem}, {depth[problem].max()} deep: {len(places)} wrong{first}')
