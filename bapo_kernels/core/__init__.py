"""Everything between the arguments of a public function and its kernels; users import none of it.

Operators, memory and ranks; the data of a call; its ``arguments``; tokens, rows and autograd; the
``head``. Each imports from those before it alone (``tests/repository/test_layers.py``).
"""
