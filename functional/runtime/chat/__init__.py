"""Chat for agents: conversations to token IDs and back, over HTTP, by the rules of rollouts."""
