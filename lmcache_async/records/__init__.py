"""What is stored, looked into, proven, shrunk and moved from outside of an engine: what the command's parts do."""
