"""
A GIF of one token on its way through the groups of pretrained/text.

    python -m results.two_scales        -> assets/two_scales.gif
"""
import io

import torch
from matplotlib.figure import Figure
from PIL import Image

import data
import geometry
from common import plots
from common.checkpoint import open_run
from common.configurator import configure
from common.encoding import texts_of
from common.errors import run
from common.files import new_file
from exits import make_exit

# -------------------------------------------------------------------------------------------------
out_dir = 'pretrained/text'
gif = 'assets/two_scales.gif'
n_loop = 30
tau = 0.01                  # of norm_rel
# -------------------------------------------------------------------------------------------------


def two_scales(model, states, used, words, encoding, path):
    """
    A GIF of one token on its way through the groups until it exits, after used (G, T) loop steps:
    its path, the loop steps of the group it is in magnified, and the likeliest next tokens.

    The token is the one whose final prediction gains most from the first loop step to the last.
    """
    groups = model.config.groups

    def probabilities(g, k):
        """What the states of group g after step k predict, (T, V): the last group's by the coda."""
        read = model.through_coda if g == len(groups) - 1 else model.readout
        return read(states[g, k][None])[0].softmax(-1)
    p, best = probabilities(len(groups) - 1, -1).max(dim=-1, keepdim=True)
    t = int((p - probabilities(0, 1).gather(1, best)).argmax())
    points, lengths = geometry.path_of(states[:, :, t])
    # (k, 2) for each group; draw_zoom needs two points
    whole = [points[g][:max(2, steps)] for g, steps in enumerate(used[:, t])]

    rows = []
    for g, of_group in enumerate(whole):
        for k, (pc1, pc2) in enumerate(of_group, start=1):
            p, tokens = probabilities(g, k)[t].sort(descending=True)
            row = dict(group=g, token=t, k=k, pc1=pc1, pc2=pc2, length=lengths[g, k - 1])
            texts = texts_of(tokens[:5].tolist(), encoding)
            row |= {f'text_{i}': text for i, text in enumerate(texts, start=1)}
            rows.append(row | {f'p_{i}': share for i, share in enumerate(p[:5].tolist(), start=1)})

    def draw(figure, row):
        g = row['group']
        k = row['k']
        names = [row[f'text_{i}'] for i in range(1, 6)]
        shares = [row[f'p_{i}'] for i in range(1, 6)]
        top, bottom = figure.subfigures(2, 1, height_ratios=(3.6, 1.4))
        text = ''.join(words[:t + 1])[-40:]
        top.suptitle(f'The model reads "{text}" and expects {names[0]!r}', parse_math=False)
        ax, inset = top.subplots(1, 2)
        geometry.draw_path(ax, [*whole[:g], whole[g][:k]], whole, groups)
        geometry.draw_zoom(inset, ax, whole[g][:k], whole[g], g, f'; loop step {k}')
        ax.indicate_inset(inset_ax=inset, edgecolor=plots.colour_of(g), alpha=1)
        ax.set_title('between groups of layers: large jumps')
        ax.set_xlabel(f'length of the jump: {lengths[g, 0]:.1f}' if g else ' ')
        inset.set_title(f'inside {plots.title(groups[g])}: small loop steps')
        bars = bottom.subplots()
        bars.bar_label(bars.barh(range(5), shares, color=plots.colour_of(g)),
                       [f'{share:.0%}' for share in shares])
        bars.set_yticks(range(5), map(repr, names), parse_math=False)
        bars.set(xlim=(0, 1.1), xticks=[], title='the likeliest next tokens at this step')
        bars.invert_yaxis()

    # a jump is shown three times as long as a loop step
    frames = [row for row in rows for _ in range(3 if row['k'] == 1 else 1)]
    movie((8, 5), draw, frames, path)


def movie(size, draw, frames, path):
    """
    A GIF of 8 seconds that repeats: draw(figure, frame) for each frame, the last one held.

    size: in inches of 100 pixels.
    """
    figure = Figure(figsize=size, layout='constrained')
    images = []
    for frame in frames:
        figure.clear()
        draw(figure, frame)
        png = io.BytesIO()
        figure.savefig(png, format='png', dpi=100)
        images.append(Image.open(png).convert('RGB'))
    images += images[-1:] * 5
    with new_file(path, 'wb') as f:
        images[0].save(f, format='GIF', save_all=True, append_images=images[1:], loop=0,
                       duration=8000 / len(images))


@torch.no_grad()
def main():
    model, checkpoint, source, _ = open_run(out_dir)
    _, idx, *_ = data.held_out_windows(checkpoint, 24)
    idx = idx[:1]
    states = torch.stack([x[:, 0] for x in geometry.trace_of(model, idx, n_loop)])
    used = geometry.steps_of(make_exit('norm_rel', tau), model, idx, n_loop)
    encoding = data.open_encoding(checkpoint['tokenizer'], source)
    words = [repr(text)[1:-1] for text in texts_of(idx[0].tolist(), encoding)]  # \n for a line end
    two_scales(model, states, used, words, encoding, gif)


if __name__ == '__main__':
    configure(globals())
    run(main)
