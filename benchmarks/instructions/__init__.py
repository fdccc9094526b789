"""Instructions per element of the row passes, counted in their machine code; needs no GPU."""
