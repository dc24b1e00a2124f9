"""One pool of records a host: the daemon that owns it, and what its clients need to talk to it."""
