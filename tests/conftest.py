"""Settings for all tests, made before JAX is imported."""

import os

# The tests compile hundreds of tiny programs and run each a few times: optimising them takes longer than it saves.
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} --xla_backend_optimization_level=0'.strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
