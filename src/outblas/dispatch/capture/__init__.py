"""Recording the products that a program runs."""
