"""Operations whose formula a kernel of the device replaces: attention, running sums, windows, GELU."""
