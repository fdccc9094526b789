"""From what a caller gives to the data of a call. Its files import those of core below rows."""
