"""Host side of the kit: from locked inputs to a verified release, one module per stage."""
