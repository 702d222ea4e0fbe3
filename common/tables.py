from common.terminal import print_rows  # noqa: F401
