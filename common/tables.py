"""A table in the terminal."""


def print_rows(title, rows, formats):
    """Print columns of rows that have a value somewhere. formats: {column: its format}."""
    formats = {name: shape for name, shape in formats.items()
               if any(row.get(name) is not None for row in rows)}
    if not formats:
        print(f'\n{title} no values')
        return
    lines = [list(formats)]
    for row in rows:
        lines.append(['' if row.get(name) is None else format(row[name], shape)
                      for name, shape in formats.items()])
    widths = [max(map(len, column)) for column in zip(*lines)]
    print(f'\n{title}')
    for first, *others in lines:
        print(first.ljust(widths[0]), *map(str.rjust, others, widths[1:]), sep='  ')
