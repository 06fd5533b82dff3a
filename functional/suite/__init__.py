"""The proof: a small GRPO trainer, its driver loop, the checks and their report."""
