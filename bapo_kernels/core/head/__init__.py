"""From hidden states: products with a head, a chunk of rows at a time, and their gradients."""
