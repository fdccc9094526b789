"""Tools around the kernels: error budgets, validation and the command line.

Nothing of the package imports them but ``__main__``.
"""
