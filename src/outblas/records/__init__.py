"""What is kept of measurements: evaluations, stores, recordings and libraries."""
