"""RESP, the protocol of Redis and Valkey, from a client's side: records go straight between socket and arena."""
