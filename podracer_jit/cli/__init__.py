"""The program `podracer_jit`: a module for each verb."""
