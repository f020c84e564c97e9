"""Code shared by the studies: training, tasks, model variants, result files and figures."""
