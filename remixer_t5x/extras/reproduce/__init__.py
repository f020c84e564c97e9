"""`remixer-t5x reproduce`: trains the models of a paper's table and compares the results with the published ones."""
