"""How fast a compiled training step can be on a machine that is not present: its HLO, a roofline, and advice."""
