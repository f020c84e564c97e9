"""`remixer-t5x reproduce`: trains the models of a paper's table and compares their results with the printed ones."""
