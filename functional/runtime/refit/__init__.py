"""A policy update of the whole fleet: the transaction and its states, the trainer's weights, the proof, the probe."""
