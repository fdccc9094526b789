"""A decoder of two layers that walks on a board: its runs take seconds, and need no download."""
