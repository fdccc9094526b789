"""What a call is made of; users import none of it, as the public functions are in the folder above.

Operators, memory and ranks; the data of a call; its ``arguments``; tokens, rows and autograd; the
``head``. Each imports from those before it alone (``tests/repository/test_layers.py``).
"""
