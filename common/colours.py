"""Text in the terminal on the colour of its loop steps."""
import re

# {loop steps: ANSI-256 colour from this count on}, from dark blue to orange
COLOURS = {0: 17, 2: 19, 3: 25, 4: 31, 5: 36, 6: 71, 8: 107, 12: 143, 18: 179, 25: 208}


def paint(text, steps):
    """The text on the colour of its loop steps; line ends stay plain."""
    colour = [colour for bound, colour in COLOURS.items() if bound <= steps][-1]
    parts = [part for part in re.split('(\n)', text) if part]
    return ''.join(part if part == '\n' else f'\x1b[48;5;{colour}m\x1b[97m{part}\x1b[0m'
                   for part in parts)


def print_legend():
    legend = ''.join(paint(f' {bound} ', bound) for bound in COLOURS)
    print(f'colours start at these mean loop steps: {legend}')
