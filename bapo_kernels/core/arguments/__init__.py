"""From the arguments of a caller to the data of a call: options, checks, ranks, preparation.

Its files import the files of core that know no rows; ``prepare`` makes the call.
"""
