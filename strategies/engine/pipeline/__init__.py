"""Pipeline parallelism: a model's blocks cut into stages, and the order in which each rank computes its own."""
