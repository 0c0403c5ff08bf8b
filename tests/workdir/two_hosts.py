"""One of two hosts, in a process without the other one."""

from stppo_jax.parallel import hosts as hosts_lib


class TwoHosts(hosts_lib.Hosts):
  """A host whose partner says what it is told to say, or the same.

  Attributes:
    theirs: what is exchanged to the answer of the other host, or to a function
      that makes it from the value of this one.
    heard: what was exchanged: (what, value, timeout).
  """

  def __init__(self, index=0, **theirs):
    super().__init__(index, ['a', 'b'])
    self.theirs, self.heard = theirs, []

  def exchange(self, what, value, *, timeout=None):
    self.heard.append((what, value, timeout))
    theirs = self.theirs.get(what, value)
    theirs = theirs(value) if callable(theirs) else theirs
    return [theirs, value] if self.index else [value, theirs]
