"""What a caller may demand of a product's numbers: fp32 sums everywhere, or bits that do not depend on the batch."""
