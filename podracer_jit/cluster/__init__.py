"""Operations in processes on a Ray cluster: calls, new processes for dead ones, and figures."""
