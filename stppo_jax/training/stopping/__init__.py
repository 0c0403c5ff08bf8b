"""How a run stops early: by a signal, an alarm, a vote of hosts or an error."""
