"""The verbs of the command, one a file; a module's docstring is its help."""
