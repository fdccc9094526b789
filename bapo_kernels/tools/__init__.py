"""Tools around the kernels: error budgets, validation, profiles and the command line.

Nothing of the package imports them but ``__main__``.
"""
