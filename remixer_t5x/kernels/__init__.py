"""Operations with a plain-JAX formula and optional device kernels: attention, running sums, window MLPs, GELU."""
