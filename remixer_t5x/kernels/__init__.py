"""Operations with a formula and optional device kernels: attention, running sums, windows, GELU."""
