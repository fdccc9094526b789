"""From hidden states to log-probs or a loss. Its files import the other files of core."""
