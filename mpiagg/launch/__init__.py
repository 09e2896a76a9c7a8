"""How ranks are started: who started this process, and how a command starts ranks of its own."""
