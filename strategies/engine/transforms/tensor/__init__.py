"""Tensor parallelism: a model's matrices cut over the ranks of a group, with no edit to the model.

Source: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053); Korthikanti et al. 2022, Reducing Activation Recomputation
in Large Transformer Models, section 4.2 (arXiv 2205.05198), for norms that are sharded along the sequence.
"""
