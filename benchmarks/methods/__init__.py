"""The methods that are measured: ours and the baselines, each behind a small adapter.

Baselines are installed packages, imported when they are called. An adapter computes the quantity of
the case: BAPO's loss with the gradients of its inputs, or log-probs. For packages that provide
log-probs only, the paper's search (a loop on the host) and the token loss are added in plain
PyTorch, at the cost of some kilobytes next to the logits.
"""
