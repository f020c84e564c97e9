"""What several studies share: training, tasks, variants of a model, results in a file, pictures."""
