"""`functional doctor`: what is wrong with a running or ended run, told from its folder."""
