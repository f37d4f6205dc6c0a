"""What a kernel is: families, their knobs, what is legal, and what a kernel costs."""
