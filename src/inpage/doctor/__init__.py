"""`inpage doctor`: what is on, what is off and why, without starting an engine."""
