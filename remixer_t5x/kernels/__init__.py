"""Operations with a plain-JAX implementation and optional device kernels: attention, token MLPs and GELU."""
