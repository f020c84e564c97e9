"""Small trained additions to a model's parameters."""
