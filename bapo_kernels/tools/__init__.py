"""Tools around the kernels: error budgets, validation, profiles and the command line."""
