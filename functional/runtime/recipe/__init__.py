"""A recipe, from its file to what it means: keys, rules, the engine's options, command lines, seeds, environments."""
