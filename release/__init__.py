"""What is released: the wheel and its bill of materials; tests with other versions."""
