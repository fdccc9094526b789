"""What a call is made of, in layers; each file imports from those before it alone.

checks, operators, memory, distributed, gemm; call (data); inputs, arguments, prepare (its makers);
rows, tokens (the kernels); head; logits, hidden, head_operators; autograd. The order is tested by
``tests/repository/test_layers.py``. Users import none of it: the public functions are in the folder
above.
"""
