from common.terminal import paint, print_legend  # noqa: F401
