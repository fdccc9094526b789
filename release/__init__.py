"""What is released: the wheel, its bill of materials, and on what it has been installed."""
