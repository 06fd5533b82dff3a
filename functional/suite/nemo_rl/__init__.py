"""NeMo RL's own trainer, unmodified, run and checked: `functional run --driver nemo-rl RECIPE`."""
