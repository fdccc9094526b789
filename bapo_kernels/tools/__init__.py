"""Tools around the kernels: error budgets, validation and the command line.

No other module of the package may import them but ``__main__``.
"""
