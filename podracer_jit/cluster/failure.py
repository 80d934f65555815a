"""The error of operations on a cluster, for code that does not import Ray."""


class Failed(RuntimeError):
  """Raised if a process of the cluster cannot do its work; the message is one line."""
