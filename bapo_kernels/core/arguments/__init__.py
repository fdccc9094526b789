"""From what a caller gives to the data of a call: options, checks, ranks, preparation."""
