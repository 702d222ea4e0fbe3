from common import plots


def test_losses_of_a_log(monkeypatch):
    """A log.csv holds text, and nothing where an iteration was not evaluated."""
    drawn = []
    monkeypatch.setattr(plots, 'save', lambda figure, path: drawn.append(figure))
    rows = [dict(iter='0', loss='', val_loss_1='5.5', val_loss_4='5.25'),
            dict(iter='1', loss='5.0', val_loss_1='', val_loss_4=''),
            dict(iter='2', loss='4.5', val_loss_1='4.75', val_loss_4='4.0')]
    plots.losses(rows, [1, 4], 'loss.png')
    ax, = drawn[0].axes
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ['training, drawn loops', 'held-out, 1 loop', 'held-out, 4 loops']
    curves = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.get_lines()]
    assert curves == [([1, 2], [5.0, 4.5]), ([0, 2], [5.5, 4.75]), ([0, 2], [5.25, 4.0])]
