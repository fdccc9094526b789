"""From hidden states to log-probs or a loss: products with a head, and their gradients.

Its files import the other files of core; the public functions and autograd take it from there.
"""
