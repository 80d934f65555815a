"""Many runs of one question: which, where each is trained, and what became of it."""
