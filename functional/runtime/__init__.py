"""What a trainer imports: configuration, the managed Dynamo fleet, rollouts, refit."""
