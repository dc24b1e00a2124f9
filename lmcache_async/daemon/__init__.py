"""A pool of records that the engines of a host share: the daemon, its protocol and its status page."""
