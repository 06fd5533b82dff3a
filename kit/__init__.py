"""Host side of the kit: from locked inputs to a proven release, one module per station of the road."""
