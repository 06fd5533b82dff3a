"""Completions from the fleet: the token-ID client, the admission gate, and the record of each request and rollout."""
