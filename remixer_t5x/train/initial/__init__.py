"""What a run takes from a checkpoint of another run."""
