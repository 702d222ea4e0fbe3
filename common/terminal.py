"""A table in the terminal, and text on the colour of its loop steps."""
import os
import re
import sys

# {loop steps: ANSI-256 colour from this count on}, from dark blue to red
COLOURS = {0: 17, 2: 19, 3: 25, 4: 31, 5: 36, 6: 71, 8: 107, 12: 143, 18: 179, 25: 208,
           50: 202, 100: 196}


def colours_are_shown():
    """Does the output go to a terminal, whose user has not set NO_COLOR?"""
    return sys.stdout.isatty() and not os.environ.get('NO_COLOR')


def paint(text, steps):
    """The text on the colour of its loop steps; line ends stay plain."""
    reached = [colour for bound, colour in COLOURS.items() if bound <= steps]
    before, after = f'\x1b[48;5;{reached[-1]}m\x1b[97m', '\x1b[0m'
    return re.sub('[^\n]+', lambda line: before + line[0] + after, text)


def print_legend():
    """Print which colour begins at which number of loop steps."""
    legend = ''.join(paint(f' {bound} ', bound) for bound in COLOURS)
    print(f'colours start at these mean loop steps (red: many, not wrong): {legend}')


def print_rows(title, rows, formats):
    """Print columns of rows that have a value somewhere. formats: {column: its format}."""
    formats = {name: spec for name, spec in formats.items()
               if any(row.get(name) is not None for row in rows)}
    lines = [list(formats)]
    for row in rows:
        lines.append(['' if row.get(name) is None else format(row[name], spec)
                      for name, spec in formats.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f'\n{title}')
    for first, *others in lines:
        print(first.ljust(widths[0]), *map(str.rjust, others, widths[1:]), sep='  ')
