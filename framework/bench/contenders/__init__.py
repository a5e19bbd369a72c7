"""What the benchmark compares: one training loop around each way of spreading a model over ranks."""
